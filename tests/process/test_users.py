"""Daemon and follower of different users: modes decide, whatever the umask, and a refusal says what to change."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ftd_client
from ftd.daemon.app import StartOptions, run
from ftd.daemon.signals import StopSignals
from ftd.daemon.status import report
from ftd.daemon.stop import stop
from ftd.errors import AccessError, AlreadyRunningError, FtdError
from ftd.shm.coord import observe
from ftd.shm.life import LifeLock
from ftd.shm.names import SHM_DIR, Names
from ftd.shm.state import State
from tests.conftest import NOBODY
from tests.process.checkpoints import TINY_DIGESTS, digests
from tests.process.daemons import Daemon, segments, wait_for
from tests.process.workers import bytes_of

Start = Callable[..., Daemon]
InChild = Callable[..., Any]


def contents(namespace: str) -> dict[str, str]:
    with ftd_client.attach(namespace, timeout=0) as weights:
        return digests({name: bytes_of(tensor) for name, tensor in weights.state_dict().items()})


def modes(namespace: str) -> dict[str, int]:
    return {name: stat.S_IMODE((SHM_DIR / f"ftd.{namespace}.{name}").stat().st_mode) for name in segments(namespace)}


@pytest.fixture(params=[0o022, 0o077], ids=["umask 022", "umask 077"])
def umask(request: pytest.FixtureRequest) -> Any:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_the_default_keeps_strangers_out(
    umask: int, start: Start, in_child: InChild, namespace: str, runtime_dir: Path, model: Path
) -> None:
    """CN-04: owner, mode and the setting are in the message; nothing of it is a traceback of the system."""
    start("--model", model)
    assert modes(namespace) == {
        "lock": 0o600, "coord": 0o640, "slots": 0o660, "g1.0": 0o640, "g1.manifest": 0o640, "g1.files": 0o640,
    }  # fmt: skip
    assert contents(namespace) == TINY_DIGESTS
    for ask in (
        lambda: ftd_client.attach(namespace, timeout=0),
        lambda: report(namespace, os.environ),
        lambda: stop(namespace, os.environ, timeout_s=0.1, force=True),
    ):
        with pytest.raises(AccessError) as caught:
            in_child(ask, uid=NOBODY)
        assert "mode 0640" in caught.value.message and "root" in caught.value.message
        assert "`mode` and `group`" in caught.value.remedy
    with pytest.raises(AccessError, match="mode 0600"):
        in_child(lambda: LifeLock.acquire(Names(namespace)), uid=NOBODY)
    assert contents(namespace) == TINY_DIGESTS


def test_a_mode_for_all(
    umask: int, start: Start, in_child: InChild, namespace: str, runtime_dir: Path, model: Path
) -> None:
    """CN-04: `mode` opens weights, manifest, files and coord, and the leases with them; the lock stays closed."""
    daemon = start("--model", model, "--set", "mode=0644")
    assert modes(namespace) == {
        "lock": 0o600, "coord": 0o644, "slots": 0o666, "g1.0": 0o644, "g1.manifest": 0o644, "g1.files": 0o644,
    }  # fmt: skip
    assert in_child(lambda: contents(namespace), uid=NOBODY) == TINY_DIGESTS
    runtime_dir.chmod(0o755)
    shown = in_child(lambda: report(namespace, os.environ), uid=NOBODY)
    assert (shown["state"], shown["pid"]) == ("ready", daemon.pid)
    with pytest.raises(AccessError, match="refused to uid"):
        in_child(lambda: stop(namespace, os.environ, timeout_s=0.1, force=False), uid=NOBODY)
    with pytest.raises(AlreadyRunningError, match=f"pid {daemon.pid}"):
        in_child(lambda: LifeLock.acquire(Names(namespace)), uid=NOBODY)
    assert daemon.status()["state"] == "ready"


def test_a_group(start: Start, in_child: InChild, namespace: str, runtime_dir: Path, model: Path) -> None:
    """CN-04: `group` gives the segments to a group, whose members attach."""
    start("--model", model, "--set", f"group={NOBODY}")
    assert {(SHM_DIR / f"ftd.{namespace}.{name}").stat().st_gid for name in segments(namespace) if name != "lock"} == {
        NOBODY
    }
    assert in_child(lambda: contents(namespace), uid=NOBODY) == TINY_DIGESTS


def test_a_mount_that_is_not_for_everybody(in_child: InChild, namespace: str, model: Path) -> None:
    """CN-06: /dev/shm of mode 0755, as sandboxes mount it, and a daemon that is not root."""

    runtime_dir = f"/tmp/ftd-{namespace}"

    def begin() -> None:
        os.environ["FTD_RUNTIME_DIR"] = runtime_dir
        with StopSignals() as signals:
            run(StartOptions(namespace, model), os.environ, signals)

    try:
        with pytest.raises(FtdError) as caught:
            in_child(begin, uid=NOBODY, shm="mode=0755,size=8m")
    finally:
        shutil.rmtree(runtime_dir, ignore_errors=True)
    assert "/dev/shm may not be written" in caught.value.message and "mode 0755" in caught.value.message
    assert "chmod 1777" in caught.value.remedy


def test_a_daemon_that_may_not_lock_memory(in_child: InChild, namespace: str, open_model: Path) -> None:
    """CN-07: the tiny limit of a container costs the pin, with one warning that has limit and remedy; no more."""
    runtime_dir = f"/tmp/ftd-{namespace}"

    def scenario() -> dict[str, Any]:
        os.environ["FTD_RUNTIME_DIR"] = runtime_dir
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (1024, 1024))
        daemon = os.fork()
        if daemon == 0:
            with StopSignals() as signals:
                run(StartOptions(namespace, open_model), os.environ, signals)
            os._exit(0)
        try:
            wait_for("ready", lambda: observe(Names(namespace)).state is State.READY)
            return report(namespace, os.environ)
        finally:
            os.kill(daemon, signal.SIGTERM)
            assert os.waitpid(daemon, 0)[1] == 0
            assert segments(namespace) == []

    try:
        shown = in_child(scenario, uid=NOBODY, shm="mode=1777,size=8m")
    finally:
        shutil.rmtree(runtime_dir, ignore_errors=True)
    assert (shown["state"], shown["pin"], shown["segments"][0]["pinned_bytes"]) == ("ready", "none", 0)
    (warning,) = shown["warnings"]
    assert "1.00 KiB" in warning and "LimitMEMLOCK" in warning and "--ulimit memlock" in warning
