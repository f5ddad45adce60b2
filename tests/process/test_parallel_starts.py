"""LK-11: twenty starts of one namespace in the same instant give one daemon, and nineteen exits with 5."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import traceback
from collections import Counter
from pathlib import Path
from typing import IO

import pytest

import ftd.daemon.app  # so that the children import nothing between the barrier and the lock
import ftd_client
from ftd.cli import main
from ftd.errors import EXIT_ALREADY_RUNNING, EXIT_OK
from ftd.shm.coord import observe
from ftd.shm.names import Names
from ftd.shm.state import State
from tests.process.checkpoints import TINY_DIGESTS, digests
from tests.process.daemons import Command, ftd, left_in, segments, wait_for
from tests.process.workers import bytes_of

STARTS = 20


class Racer:
    """A forked process that runs the command line as soon as the barrier opens."""

    def __init__(self, barrier: tuple[int, int], arguments: list[str], log: IO[str]) -> None:
        self.status: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            self._run(barrier, arguments, log)

    @staticmethod
    def _run(barrier: tuple[int, int], arguments: list[str], log: IO[str]) -> None:
        status = 99
        try:
            os.close(barrier[1])
            sys.argv, sys.stdout, sys.stderr = ["ftd", *arguments], log, log
            os.read(barrier[0], 1)  # nothing comes: it returns when the last writer is gone
            main()
        except SystemExit as end:
            status = int(end.code or 0)
        except BaseException:
            traceback.print_exc(file=log)
        finally:
            log.flush()
            os._exit(status)

    def ended(self) -> bool:
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = os.waitstatus_to_exitcode(status) if pid else None
        return self.status is not None


def race(namespace: str, runtime_dir: Path, model: Path) -> None:
    """One round; nothing stays."""
    barrier = os.pipe()
    with tempfile.TemporaryFile("w+") as log:
        arguments = ["start", "-n", namespace, "--model", str(model), "--log-level", "error"]
        racers = [Racer(barrier, arguments, log) for _ in range(STARTS)]
        os.close(barrier[1])
        os.close(barrier[0])
        try:
            wait_for("nineteen ends", lambda: sum(racer.ended() for racer in racers) >= STARTS - 1)
            ends = Counter(racer.status for racer in racers)
            assert ends == {EXIT_ALREADY_RUNNING: STARTS - 1, None: 1}, os.pread(log.fileno(), 1 << 16, 0).decode()
            winner = next(racer for racer in racers if racer.status is None)
            wait_for("ready", lambda: observe(Names(namespace)).state is State.READY)
            record = observe(Names(namespace)).record
            assert record is not None and record.owner.pid == winner.pid
            assert set(segments(namespace)) == {"lock", "coord", "slots", "g1.0", "g1.manifest", "g1.files"}
            assert left_in(runtime_dir) == [f"{namespace}.sock"]
            with ftd_client.attach(namespace, timeout=0) as weights:
                assert digests({n: bytes_of(t) for n, t in weights.state_dict().items()}) == TINY_DIGESTS
            os.kill(winner.pid, signal.SIGTERM)
            wait_for("its end", winner.ended)
            assert winner.status == EXIT_OK
        finally:
            for racer in racers:
                if not racer.ended():
                    os.kill(racer.pid, signal.SIGKILL)
                    os.waitpid(racer.pid, 0)
        log.seek(0)
        text = log.read()
    assert "Traceback" not in text, text
    assert text.count("is already ") == STARTS - 1, text
    assert segments(namespace) == [] and left_in(runtime_dir) == []


@pytest.mark.parametrize("rounds", [3, pytest.param(50, marks=pytest.mark.long)])
def test_one_wins(namespace: str, runtime_dir: Path, model: Path, rounds: int) -> None:
    """From a barrier right before the lock, where they meet for sure."""
    for _ in range(rounds):
        race(namespace, runtime_dir, model)


def test_one_wins_from_the_shell(namespace: str, runtime_dir: Path, model: Path) -> None:
    """Command lines at once; the losers neither touch the winner's data nor its socket."""
    starts = 6
    commands = [Command("start", "-n", namespace, "--model", model, "--detach") for _ in range(starts)]
    results = [command.result() for command in commands]
    try:
        assert Counter(result.status for result in results) == {EXIT_ALREADY_RUNNING: starts - 1, EXIT_OK: 1}
        assert not any("Traceback" in result.err for result in results)
        with ftd_client.attach(namespace, timeout=0) as weights:
            assert digests({n: bytes_of(t) for n, t in weights.state_dict().items()}) == TINY_DIGESTS
        assert ftd("status", "-n", namespace).status == EXIT_OK
    finally:
        assert ftd("stop", "-n", namespace).status == EXIT_OK
    assert segments(namespace) == []
