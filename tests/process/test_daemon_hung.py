"""SIGSTOP of the daemon: hung, never dead. Followers go on, and so does the daemon when it is let."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

import ftd_client
from ftd.errors import EXIT_ALREADY_RUNNING, EXIT_FAILED, EXIT_OK, CreatorHungError
from ftd.shm.state import State
from tests.process import workers
from tests.process.checkpoints import TINY_DIGESTS, held, tiny
from tests.process.daemons import QUICK, Daemon, ftd, left_in, refused, segments, wait_for
from tests.process.workers import Worker

Start = Callable[..., Daemon]
Workers = Callable[[], Worker]


def hang(daemon: Daemon) -> None:
    """Stops the daemon, and until its heartbeat is late."""
    daemon.freeze()
    wait_for("a late heartbeat", lambda: daemon.look().state is State.HUNG)


def test_status_finds_out_at_once(start: Start, namespace: str, model: Path) -> None:
    """OP-05: long before the heartbeat is late the socket says nothing; status takes less than 2 s to say so."""
    daemon = start("--model", model)  # heartbeat every second, late after thirty
    daemon.freeze()
    shown = ftd("status", "-n", namespace, "--json")
    assert shown.status == EXIT_FAILED and shown.wall_s < 2.0, shown
    assert shown.json["state"] == "hung" and shown.json["pid"] == daemon.pid
    assert "did not answer" in shown.json["failure"]["message"] and shown.json["failure"]["remedy"]
    everything = ftd("status", "--json")
    assert everything.status == EXIT_FAILED and everything.wall_s < 2.5
    daemon.thaw()
    wait_for("an answer", lambda: ftd("status", "-n", namespace).status == EXIT_OK)


def test_a_late_heartbeat(start: Start, namespace: str, model: Path) -> None:
    """LK-04: with the heartbeat late every door says hung, and the second start leaves the first in peace."""
    daemon = start("--model", model, *QUICK)
    hang(daemon)
    shown = ftd("status", "-n", namespace, "--json")
    assert shown.status == EXIT_FAILED and shown.wall_s < 2.0
    assert (shown.json["state"], shown.json["failure"]["code"]) == ("hung", "creator_hung")
    assert shown.json["heartbeat_age_s"] > 1.5
    for timeout in (0, None, 30):
        begun = time.monotonic()
        with pytest.raises(CreatorHungError, match=f"pid {daemon.pid}"):
            ftd_client.attach(namespace, timeout=timeout)
        assert time.monotonic() - begun < 2.0
    second = ftd("start", "-n", namespace, "--model", model)
    refused(second, EXIT_ALREADY_RUNNING, "hung", f"pid {daemon.pid}")
    assert "--replace" in second.err
    daemon.thaw()
    daemon.wait_ready()
    assert ftd("status", "-n", namespace).status == EXIT_OK
    with ftd_client.attach(namespace, timeout=0) as weights:
        assert weights.generation == 1


def test_followers_go_on(start: Start, worker: Workers, namespace: str, model: Path) -> None:
    """LK-04 (a): stopped for twice the timeout and continued: nothing is lost, nobody was told of a death."""
    daemon = start("--model", model, *QUICK)
    follower = worker()
    follower.do(workers.attach, namespace)
    hang(daemon)
    wait_for("twice the timeout", lambda: (daemon.look().heartbeat_age_s or 0.0) > 3.0)
    assert follower.do(workers.contents, namespace) == TINY_DIGESTS
    daemon.thaw()
    daemon.wait_ready()
    shown = daemon.status()
    assert [(row["pid"], row["state"]) for row in shown["followers"]] == [(follower.pid, "attached")]
    assert follower.do(workers.lost, namespace) == []
    assert daemon.terminate() == EXIT_OK
    assert follower.do(workers.wait_lost, namespace)[0] == "stopped"


def test_hung_while_it_loads(start: Start, worker: Workers, namespace: str, tmp_path: Path) -> None:
    """A waiting follower learns of it as soon as the heartbeat is late; the next one after SIGCONT gets the weights."""
    model = tiny(tmp_path / "model")
    follower = worker()
    with held(model / "config.json"):
        daemon = start("--model", model, *QUICK, wait=False)
        daemon.wait(State.LOADING)
        follower.begin(workers.attach_timed, namespace, None)
        daemon.freeze()
        name, text, _ = follower.result()
        assert name == "CreatorHungError" and f"pid {daemon.pid}" in text
        daemon.thaw()
        daemon.wait(State.LOADING)
    daemon.wait_ready()
    assert follower.do(workers.attach, namespace) == 1


def test_a_long_call_of_the_loader_is_no_hang(start: Start, namespace: str, tmp_path: Path) -> None:
    """LK-06: the heartbeat goes on while the loader is stuck in one system call for longer than the timeout."""
    model = tiny(tmp_path / "model")
    with held(model / "config.json"):
        daemon = start("--model", model, *QUICK, wait=False)
        seen = daemon.wait(State.LOADING)
        assert seen.record is not None
        begun_ns = seen.record.started_ns
        while time.clock_gettime_ns(time.CLOCK_MONOTONIC) - begun_ns < 2 * seen.record.hung_after_ns:
            assert daemon.look().state is State.LOADING
            time.sleep(0.01)
        shown = ftd("status", "-n", namespace, "--json").json
        assert (shown["state"], shown["failure"]) == ("loading", None)
    daemon.wait_ready()


def test_stop_asks_and_force_kills(start: Start, namespace: str, runtime_dir: Path, model: Path) -> None:
    daemon = start("--model", model)
    daemon.freeze()
    asked = ftd("stop", "-n", namespace, "--timeout", "1")
    refused(asked, EXIT_FAILED, "did not end within 1 s", "did not answer")
    assert "--force" in asked.err and asked.wall_s < 5
    assert "g1.0" in segments(namespace)
    forced = ftd("stop", "-n", namespace, "--timeout", "0.5", "--force")
    assert forced.status == EXIT_OK and f"killed pid {daemon.pid}" in forced.out, forced
    assert daemon.ended() == -9
    assert segments(namespace) == []
    assert left_in(runtime_dir) == []


def test_a_stop_that_nobody_heard_is_not_forgotten(start: Start, namespace: str, model: Path) -> None:
    """The stop of a stopped daemon times out, and takes effect as soon as the daemon goes on."""
    daemon = start("--model", model)
    daemon.freeze()
    assert ftd("stop", "-n", namespace, "--timeout", "0.5").status == EXIT_FAILED
    daemon.thaw()
    assert daemon.ended() == EXIT_OK
    assert segments(namespace) == []


@pytest.mark.long
def test_replace_of_a_hung_one(start: Start, worker: Workers, namespace: str, model: Path) -> None:
    """LK-04 (b): `--replace` kills it after the 30 s of a stop; its follower keeps working, and may attach anew."""
    daemon = start("--model", model, *QUICK)
    follower = worker()
    follower.do(workers.attach, namespace)
    hang(daemon)
    start("--model", model, "--replace", *QUICK)
    assert daemon.ended() == -9
    assert follower.do(workers.wait_lost, namespace)[0] == "died"
    assert follower.do(workers.contents, namespace) == TINY_DIGESTS
    follower.do(workers.attach, namespace)
    assert follower.do(workers.lost, namespace) == []
