"""Worker processes: started together, asked in turn, ended together."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ftd.clock import Deadline
from ftd.errors import FtdError
from ftd_client.demo.commands import POLL_S, ended
from ftd_client.demo.interrupts import Interrupts
from ftd_client.demo.problems import DemoError

#: A large model on a cold disk takes a worker minutes; beyond this it is stuck.
_ANSWER_S = 900.0
#: An idle worker ends at once; one in the middle of a forward is not waited for.
_END_S = 10.0


class WorkerProcess:
    """A worker: lines on its standard input are its cue for the next step, its answers are lines of JSON.

    The end of its input ends it, so that none outlives this process, however that ends.
    """

    def __init__(self, title: str, order: Mapping[str, Any], environ: Mapping[str, str], log: Path) -> None:
        self._title = title
        self._log = log
        self._buffer = b""
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "ftd_client.demo.worker", json.dumps(order)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=dict(environ),
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def cue(self) -> None:
        """Lets the worker take its next step. A worker that is gone shows when its answer is missed."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(b"\n")
            self._process.stdin.flush()

    def answer(self, interrupts: Interrupts) -> dict[str, Any]:
        """The next answer.

        Raises:
            FtdError: the worker failed; its own error, with its title.
            DemoError: it ended, or said nothing for too long.
            InterruptedDemoError: a signal came.
        """
        assert self._process.stdout is not None
        deadline = Deadline.after(_ANSWER_S)
        while b"\n" not in self._buffer:
            interrupts.check()
            if deadline.expired():
                raise DemoError(
                    f"{self._title} said nothing for {_ANSWER_S:.0f} s", "see what the machine is busy with"
                )
            if select.select([self._process.stdout], [], [], POLL_S)[0]:
                data = os.read(self._process.stdout.fileno(), 1 << 16)
                if not data:
                    raise self._ended_early()
                self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            error = FtdError.from_dict(answer["error"])
            error.message = f"{self._title}: {error.message}"
            raise error
        return answer

    def dismiss(self, *, at_once: bool) -> None:
        """Lets the worker end, or kills it; `reap` waits for that."""
        assert self._process.stdin is not None
        if at_once:
            self._process.kill()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def reap(self) -> int:
        """Waits until the worker has ended, and kills one that does not; its exit status, negative for a signal."""
        assert self._process.stdout is not None
        if not ended(self._process, _END_S):
            self._process.kill()
        self._process.stdout.close()
        return self._process.wait()

    def _ended_early(self) -> DemoError:
        status = self.reap()
        how = f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
        said = self._log.read_text(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(said) if line.strip()), "")
        return DemoError(
            f"{self._title} ended {how} before it answered{f': {last[:300]}' if last else ''}",
            "run it with fewer workers (--workers 1) if memory is short",
        )


class Crew:
    """Workers that live at the same time and end together: in order, or at once when the body fails."""

    def __init__(self, workers: Sequence[WorkerProcess]) -> None:
        self._workers = workers

    @staticmethod
    @contextlib.contextmanager
    def of(count: int, order: Mapping[str, Any], environ: Mapping[str, str], scratch: Path) -> Iterator[Crew]:
        """`count` workers with one order; logs and files of worker i go below `scratch`."""
        kind = order["kind"]
        with contextlib.ExitStack() as stack:
            workers: list[WorkerProcess] = []
            # entered before the first one starts: the last may fail to
            stack.push(lambda failed, *_: _end_all(workers, failed))
            for number in range(1, count + 1):
                folder = scratch / f"{kind}-{number}"
                folder.mkdir()
                own = {**order, "scratch": str(folder)}
                workers.append(WorkerProcess(f"worker {number} ({kind})", own, environ, folder / "log"))
            yield Crew(workers)

    @property
    def pids(self) -> list[int]:
        return [worker.pid for worker in self._workers]

    def gather(self, interrupts: Interrupts) -> None:
        """Waits until each has said that it is there."""
        for worker in self._workers:
            worker.answer(interrupts)

    def in_turn(self, interrupts: Interrupts) -> list[dict[str, Any]]:
        """The next step of each, when the one before has answered: times are those of a machine with nothing else."""
        answers = []
        for worker in self._workers:
            worker.cue()
            answers.append(worker.answer(interrupts))
        return answers


def _end_all(workers: Sequence[WorkerProcess], failed: type[BaseException] | None) -> None:
    for worker in workers:
        worker.dismiss(at_once=failed is not None)
    for worker in workers:
        worker.reap()
