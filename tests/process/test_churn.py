"""Everybody looks all the time while daemons come and go: no look ever meets a state that was not there."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ftd.daemon.status import report
from ftd.shm.state import State
from tests.process import workers
from tests.process.daemons import Daemon, ftd
from tests.process.workers import Worker

Start = Callable[..., Daemon]
Workers = Callable[[], Worker]


@pytest.mark.parametrize("rounds", [3, pytest.param(40, marks=pytest.mark.long)])
def test_status_never_cries_wolf(start: Start, namespace: str, runtime_dir: Path, model: Path, rounds: int) -> None:
    """An orderly life is stopped, loading, ready, draining, stopped: never hung, never failed."""
    for _ in range(rounds):
        seen = []
        daemon = start("--model", model, wait=False)
        while not seen or seen[-1]["state"] != State.READY:
            seen.append(report(namespace, os.environ))
        daemon.process.terminate()
        while daemon.process.poll() is None:
            seen.append(report(namespace, os.environ))
        seen.append(report(namespace, os.environ))
        wrong = [s for s in seen if s["state"] not in ("stopped", "loading", "ready", "draining") or s["failure"]]
        assert not wrong, wrong[0]
        states = [s["state"] for s in seen]
        assert states[-1] == "stopped"
        assert "draining" not in states or "ready" not in states[states.index("draining") :], states


@pytest.mark.parametrize("rounds", [3, pytest.param(40, marks=pytest.mark.long)])
def test_attach_never_misses(
    start: Start, worker: Workers, namespace: str, runtime_dir: Path, model: Path, rounds: int
) -> None:
    """Followers that attach without end, while the daemon is stopped, killed and replaced under them."""
    followers = [worker() for _ in range(3)]
    daemon = start("--model", model)
    for follower in followers:
        follower.begin(workers.attach_until, namespace, 3 * rounds)
    for turn in range(rounds):
        if turn % 2:
            daemon.kill()
        else:
            assert ftd("stop", "-n", namespace).status == 0
            daemon.ended()
        daemon = start("--model", model)
        seen = daemon.status()
        assert seen["state"] == "ready"
    for follower in followers:
        attached, generations = follower.result()
        assert attached >= 3 * rounds and generations
