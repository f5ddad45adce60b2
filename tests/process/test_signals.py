"""OP-08: SIGTERM and Ctrl-C at any moment of a daemon's life: status 0, and nothing stays."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ftd.errors import EXIT_OK
from ftd.shm.coord import observe
from ftd.shm.names import Names
from tests.process import workers
from tests.process.checkpoints import TINY_DIGESTS, held, hollow, tiny
from tests.process.daemons import PATIENCE_S, Command, Daemon, frozen, is_gone, left_in, listens, segments, wait_for
from tests.process.workers import Worker

Start = Callable[..., Daemon]
Workers = Callable[[], Worker]

TWO = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda n: n.name)
EACH = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP], ids=lambda n: n.name)


@EACH
@pytest.mark.parametrize("steps", [5, pytest.param(200, marks=pytest.mark.long)])
def test_at_any_moment_of_a_start(
    number: signal.Signals, steps: int, start: Start, namespace: str, runtime_dir: Path, model: Path
) -> None:
    """From the birth of the process to well behind READY, in equal steps of the time that a start takes here."""
    begun = time.monotonic()
    daemon = start("--model", model)
    span_s = 1.2 * (time.monotonic() - begun)
    assert daemon.terminate() == EXIT_OK
    heard = 0
    for step in range(steps):
        daemon = start("--model", model, wait=False)
        until = time.monotonic() + span_s * step / steps
        while time.monotonic() < until:
            time.sleep(0.001)
        listening = listens(daemon.pid)
        daemon.process.send_signal(number)
        status = daemon.process.wait(PATIENCE_S)
        heard += listening
        # who does not listen yet has made nothing: it dies by the signal, as Python lets it
        assert status == EXIT_OK or (not listening and status in (-number, 1, 130)), (step, daemon.log())
        assert not listening or "Traceback" not in daemon.log(), daemon.log()
        assert segments(namespace) == [] and left_in(runtime_dir) == [], step
    assert heard > steps // 3, "most of a start listens"


@pytest.mark.parametrize(
    ("number", "fraction"),
    [(signal.SIGTERM, 0.0), (signal.SIGTERM, 0.8), (signal.SIGINT, 0.5), (signal.SIGHUP, 0.5)],
    ids=lambda value: getattr(value, "name", value),
)
def test_while_it_loads(
    number: signal.Signals, fraction: float, start: Start, namespace: str, runtime_dir: Path, tmp_path: Path
) -> None:
    daemon = frozen(start, hollow(tmp_path, 96), fraction)
    daemon.process.send_signal(number)
    assert "g1.0" in segments(namespace)
    begun = time.monotonic()
    daemon.thaw()
    assert daemon.ended() == EXIT_OK
    assert time.monotonic() - begun < 5
    assert segments(namespace) == [] and left_in(runtime_dir) == []
    assert "ready" not in daemon.log()


@TWO
def test_right_before_ready(
    number: signal.Signals, start: Start, namespace: str, runtime_dir: Path, tmp_path: Path
) -> None:
    """Everything is loaded, and nothing published: called off all the same."""
    model = tiny(tmp_path / "model")
    with held(model / "config.json"):
        daemon = start("--model", model, wait=False)
        daemon.wait_segments()
        daemon.process.send_signal(number)
    assert daemon.ended() == EXIT_OK
    assert segments(namespace) == [] and left_in(runtime_dir) == []


def test_with_followers(start: Start, worker: Workers, namespace: str, runtime_dir: Path, model: Path) -> None:
    daemon = start("--model", model)
    followers = [worker() for _ in range(3)]
    for follower in followers:
        follower.do(workers.attach, namespace)
    daemon.process.terminate()
    assert daemon.ended() == EXIT_OK
    assert segments(namespace) == [] and left_in(runtime_dir) == []
    for follower in followers:
        assert follower.do(workers.wait_lost, namespace)[0] == "stopped"
        assert follower.do(workers.contents, namespace) == TINY_DIGESTS


@TWO
def test_again_and_again(number: signal.Signals, start: Start, namespace: str, runtime_dir: Path, model: Path) -> None:
    """An impatient user: the clean-up of the first signal is not hurt by the next ones."""
    daemon = start("--model", model)
    while daemon.process.poll() is None:
        daemon.process.send_signal(number)
        time.sleep(0.0005)
    assert daemon.ended() == EXIT_OK
    assert segments(namespace) == [] and left_in(runtime_dir) == []
    assert "stopping" in daemon.log()


def test_stop_while_it_loads(start: Start, namespace: str, runtime_dir: Path, tmp_path: Path) -> None:
    """`ftd stop` does what the signals do."""
    daemon = frozen(start, hollow(tmp_path, 96))
    stop = Command("stop", "-n", namespace)
    daemon.thaw()
    assert stop.result().status == EXIT_OK
    assert daemon.ended() == EXIT_OK
    assert segments(namespace) == [] and left_in(runtime_dir) == []


@TWO
def test_of_the_parent_that_waits(number: signal.Signals, namespace: str, runtime_dir: Path, tmp_path: Path) -> None:
    """Ctrl-C of `start --detach` while it waits ends the daemon too: nobody would know of it."""
    model = tiny(tmp_path / "model")
    with held(model / "config.json"):
        command = Command("start", "-n", namespace, "--model", model, "--detach")
        wait_for("segments", lambda: "g1.0" in segments(namespace))
        record = observe(Names(namespace)).record
        assert record is not None
        os.kill(command.pid, number)
    result = command.result()
    assert result.status == EXIT_OK and "ready" not in result.out, result
    wait_for("the daemon's end", lambda: is_gone(record.owner.pid))
    assert segments(namespace) == [] and left_in(runtime_dir) == []
