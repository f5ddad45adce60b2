"""SH-06: any local user may make any name in /dev/shm. A daemon of another user serves, ends and starts again all the
same, and touches nothing that is not its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from ftd.daemon.app import StartOptions, run
from ftd.daemon.signals import StopSignals
from ftd.daemon.status import report
from ftd.daemon.stop import stop
from ftd.owner import start_ticks
from ftd.shm.coord import observe
from ftd.shm.names import MAX_GENERATION, SHM_DIR, Names
from ftd.shm.state import State
from tests.conftest import NOBODY
from tests.process.daemons import segments, wait_for

InChild = Callable[..., Any]

_STRANGER = 4711


@contextlib.contextmanager
def daemon_of_nobody(namespace: str, model: Path) -> Iterator[int]:
    """Its pid, once it is ready; it is killed at the end where it still runs."""
    pid = os.fork()
    if pid == 0:
        _be_a_daemon(namespace, model)
    try:
        wait_for("ready or dead", lambda: observe(Names(namespace)).state is State.READY or start_ticks(pid) is None)
        assert start_ticks(pid) is not None, "see its log"
        yield pid
    finally:
        with contextlib.suppress(ChildProcessError, ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _be_a_daemon(namespace: str, model: Path) -> NoReturn:
    status = 1
    try:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        with StopSignals() as signals:
            run(StartOptions(namespace, model, sets=("heartbeat_s=0.05", "pin=none")), os.environ, signals)
        status = 0
    finally:
        os._exit(status)


def plant(namespace: str, *tails: str) -> list[str]:
    for tail in tails:
        path = SHM_DIR / f"ftd.{namespace}.{tail}"
        path.touch(0o600)
        os.chown(path, _STRANGER, _STRANGER)
    return sorted(tails)


def wait_beats(namespace: str) -> None:
    """Until the daemon has looked after its names a few times."""
    for _ in range(5):
        before = observe(Names(namespace)).record
        wait_for("a heartbeat", lambda before=before: observe(Names(namespace)).record != before)


@pytest.mark.parametrize("end", ["stop", "kill, and stop by its user", "kill, and stop by root"])
def test_names_that_a_stranger_makes(in_child: InChild, namespace: str, open_model: Path, end: str) -> None:
    runtime_dir = f"/tmp/ftd-{namespace}"

    def force() -> str:
        return stop(namespace, os.environ, timeout_s=5, force=True)

    def scenario() -> None:
        os.environ["FTD_RUNTIME_DIR"] = runtime_dir
        with daemon_of_nobody(namespace, open_model) as pid:
            planted = plant(namespace, "g99.0", f"g{MAX_GENERATION}.0", "g1.7")
            wait_beats(namespace)
            shown = report(namespace, os.environ)
            assert (shown["state"], shown["generation"]) == ("ready", 1)
            assert all(f".{tail} of uid {_STRANGER}" in shown["warnings"][-1] for tail in planted)
            if end == "stop":
                os.kill(pid, signal.SIGTERM)
                assert os.waitpid(pid, 0)[1] == 0
        if end != "stop":
            assert "g1.0" in segments(namespace)
            in_child(force, uid=NOBODY) if "user" in end else force()
        assert sorted(segments(namespace)) == planted
        planted = plant(namespace, *planted, "g1.manifest")
        with daemon_of_nobody(namespace, open_model) as pid:
            assert report(namespace, os.environ)["generation"] == 2, "the first number that nobody uses"
            os.kill(pid, signal.SIGTERM)
            assert os.waitpid(pid, 0)[1] == 0
        assert sorted(segments(namespace)) == planted

    try:
        in_child(scenario, shm="mode=1777,size=8m")
    finally:
        shutil.rmtree(runtime_dir, ignore_errors=True)
