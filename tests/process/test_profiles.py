"""The daemon keeps what workers measured: for the next worker, over its own restart, and against nonsense."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import ftd_client.profile_exchange as client
from ftd.clock import Deadline
from ftd.errors import FrameError
from ftd.plan.profile import encode
from ftd.plan.store import file_name, listing
from ftd.plan.strictjson import ProfileError
from ftd.wire import profiles as wire
from ftd.wire.client import call
from ftd_client.profile_exchange import TIMEOUT_S, fetch, offer
from tests.conftest import NOBODY
from tests.process.daemons import PATIENCE_S, QUICK, Daemon, left_in, wait_for
from tests.process.workers import Worker
from tests.unit.plan.profiles import IDENTITY, PROFILE, on

Start = Callable[..., Daemon]

#: Beyond the bound of a call, for a machine that does something else.
SLACK_S = 1.0


@pytest.fixture
def kept(namespace: str, runtime_dir: Path) -> Path:
    return runtime_dir / f"{namespace}.profiles"


def fetched(namespace: str, torch: str = IDENTITY.torch) -> bool:
    return fetch(namespace, replace(IDENTITY, torch=torch)) == on(torch=torch)


def test_one_worker_offers_and_the_next_fetches(
    start: Start, worker: Callable[[], Worker], namespace: str, model: Path, kept: Path
) -> None:
    daemon = start("--model", model)
    first, second = worker(), worker()
    assert not second.do(fetched, namespace)
    assert first.do(offer, namespace, PROFILE)
    first.kill()
    assert second.do(fetched, namespace)
    assert not second.do(fetched, namespace, "2.6.0")
    assert daemon.status()["warnings"] == []
    assert [entry.profile for entry in listing(kept)] == [PROFILE]


@pytest.mark.parametrize("end", [Daemon.terminate, Daemon.kill])
def test_profiles_outlive_the_daemon(
    start: Start, namespace: str, runtime_dir: Path, model: Path, kept: Path, end: Callable[[Daemon], object]
) -> None:
    daemon = start("--model", model)
    assert offer(namespace, PROFILE)
    end(daemon)
    assert fetch(namespace, IDENTITY) is None  # nobody answers
    assert kept.name in left_in(runtime_dir)
    start("--model", model)
    assert fetch(namespace, IDENTITY) == PROFILE


def test_garbage_is_refused_and_the_daemon_lives(
    start: Start, namespace: str, runtime_dir: Path, model: Path, kept: Path
) -> None:
    daemon = start("--model", model)
    socket = runtime_dir / f"{namespace}.sock"
    for error, args in (
        (FrameError, {}),
        (FrameError, {"profile": os.urandom(1 << 19)}),
        (FrameError, wire.put_args(bytes(256 << 20))),
        (ProfileError, wire.put_args(os.urandom(1 << 10))),
        (ProfileError, wire.put_args(b"[" * (1 << 21))),
        (ProfileError, wire.put_args(b'{"a":[' + b"[]," * 600_000 + b"[]]}")),
        (ProfileError, wire.put_args(encode(PROFILE).replace(b"9000.0", b"1e999"))),
    ):
        with pytest.raises(error):
            call(socket, wire.PUT, args, Deadline.after(PATIENCE_S))
    assert not kept.exists()
    assert offer(namespace, PROFILE)
    assert daemon.status()["state"] == "ready"


def test_a_damaged_file_is_told_by_status_and_fails_nothing(
    start: Start, namespace: str, model: Path, kept: Path
) -> None:
    kept.mkdir(0o700)
    damaged = kept / file_name(IDENTITY)
    damaged.write_bytes(encode(PROFILE)[:50])
    (kept / file_name(on(torch="2.6.0").identity)).write_bytes(encode(on(torch="2.6.0")))
    daemon = start("--model", model)
    (text,) = wait_for("the warning", lambda: daemon.status()["warnings"])
    assert text.startswith(f"{damaged} is no profile: ")
    assert daemon.status()["state"] == "ready"
    assert fetch(namespace, IDENTITY) is None
    assert fetched(namespace, "2.6.0")
    assert offer(namespace, PROFILE)
    assert daemon.status()["warnings"] == []
    assert fetch(namespace, IDENTITY) == PROFILE


def test_a_daemon_that_stands_still_costs_two_seconds_at_most(start: Start, namespace: str, model: Path) -> None:
    daemon = start("--model", model, *QUICK)
    assert offer(namespace, PROFILE)
    daemon.freeze()
    begun = time.monotonic()
    assert fetch(namespace, IDENTITY, timeout_s=60) is None
    assert time.monotonic() - begun < TIMEOUT_S + SLACK_S
    wait_for("hung", lambda: daemon.status()["state"] == "hung")
    begun = time.monotonic()
    assert not offer(namespace, PROFILE)  # by its heartbeat, without asking
    assert time.monotonic() - begun < SLACK_S
    daemon.thaw()
    wait_for("ready", lambda: daemon.status()["state"] == "ready")
    assert fetch(namespace, IDENTITY) == PROFILE


def test_a_daemon_of_an_older_release_is_ordinary(
    start: Start, namespace: str, model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start("--model", model)
    monkeypatch.setattr(wire, "GET", "get_profile_of_tomorrow")
    caplog.set_level(logging.DEBUG, client.log.name)
    assert fetch(namespace, IDENTITY) is None
    (record,) = caplog.records
    assert record.levelname == "DEBUG" and "unknown operation 'get_profile_of_tomorrow'" in record.getMessage()


def test_a_follower_of_another_user_offers_and_fetches_too(
    start: Start, namespace: str, runtime_dir: Path, model: Path, kept: Path, in_child: Callable[..., bool]
) -> None:
    runtime_dir.chmod(0o755)
    start("--model", model, "--set", "mode=0644")

    def as_nobody() -> bool:
        return offer(namespace, PROFILE) and fetched(namespace) and not os.access(kept, os.R_OK)

    assert in_child(as_nobody, uid=NOBODY)
