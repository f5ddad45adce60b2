"""Real daemons and the real command line: processes, exit statuses, and what they leave behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ftd.daemon.status import report
from ftd.shm.coord import Observation, observe
from ftd.shm.names import SHM_DIR, Names, listed
from ftd.shm.state import State

#: Bound of every wait: long enough for a machine that does something else, never slept through.
PATIENCE_S = 40.0
_POLL_S = 0.002

#: A heartbeat that is late soon. Not sooner: a busy machine must not look hung.
QUICK = ("--set", "heartbeat_s=0.05", "--set", "lease_timeout_s=1.5")

T = TypeVar("T")


def wait_for(what: str, condition: Callable[[], T], within_s: float = PATIENCE_S) -> T:
    """The first true value of `condition`."""
    until = time.monotonic() + within_s
    while not (value := condition()):
        assert time.monotonic() < until, f"{what}: not within {within_s:g} s"
        time.sleep(_POLL_S)
    return value


@dataclass(frozen=True)
class Result:
    """How a command ended."""

    status: int
    out: str
    err: str
    wall_s: float

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def ftd(*arguments: str | Path, environ: dict[str, str] | None = None, within_s: float = PATIENCE_S) -> Result:
    """Runs the command line. No command ever shows a traceback."""
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "ftd", *map(str, arguments)],
        env={**os.environ, **(environ or {})},
        capture_output=True,
        text=True,
        timeout=within_s,
        stdin=subprocess.DEVNULL,
    )
    assert "Traceback" not in done.stdout + done.stderr, done.stderr
    return Result(done.returncode, done.stdout, done.stderr, time.monotonic() - begun)


class Command:
    """The command line beside the test."""

    def __init__(self, *arguments: str | Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ftd", *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid
        self._begun = time.monotonic()

    def result(self) -> Result:
        out, err = self._process.communicate(timeout=PATIENCE_S)
        return Result(self._process.returncode, out, err, time.monotonic() - self._begun)


def refused(result: Result, status: int, *words: str) -> str:
    """Checks an error as the contract words it: one line that has all `words`, one line of remedy; gives the first."""
    assert result.status == status, result
    lines = [line for line in result.err.splitlines() if line.startswith(("ftd: ", "  → "))]
    assert len(lines) == 2, result.err
    assert lines[0].startswith("ftd: ") and lines[1].startswith("  → ") and len(lines[1]) > 6, result.err
    missing = [word for word in words if word not in lines[0]]
    assert not missing, f"{missing} not in {lines[0]!r}"
    return lines[0]


class Daemon:
    """`ftd start` of a namespace, in the foreground of a process of its own."""

    def __init__(self, namespace: str, *arguments: str | Path, environ: dict[str, str] | None = None) -> None:
        self.namespace = namespace
        self.names = Names(namespace)
        self._before = set(segments(namespace))
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed by `end`)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ftd", "start", "-n", namespace, *map(str, arguments)],
            env={**os.environ, **(environ or {})},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
        )
        self.pid = self.process.pid

    def look(self) -> Observation:
        return observe(self.names)

    def wait(self, *states: State, within_s: float = PATIENCE_S) -> Observation:
        """Until the namespace is in one of the states, this daemon's word."""

        def there() -> Observation | None:
            seen = self.look()
            mine = seen.record is not None and seen.record.owner.pid == self.pid
            if not (mine and seen.state in states):
                assert self.process.poll() is None, f"ended with {self.process.returncode}: {self.log()}"
                return None
            return seen

        return wait_for(f"{self.namespace} {'/'.join(states)}", there, within_s)

    def wait_ready(self) -> Observation:
        return self.wait(State.READY)

    def wait_segments(self) -> Path:
        """Until it has read the headers and loads; the file of its weights."""
        self.wait(State.LOADING)

        def new() -> list[str]:
            return [name for name in segments(self.namespace) if name.endswith(".0") and name not in self._before]

        return SHM_DIR / f"ftd.{self.namespace}.{wait_for('weights', new)[0]}"

    def freeze(self) -> None:
        """SIGSTOP, and until every thread stands."""
        os.kill(self.pid, signal.SIGSTOP)
        wait_for(f"{self.pid} to stop", lambda: all(state == "T" for state in _thread_states(self.pid)))

    def freeze_at(self, fraction: float) -> bool:
        """Stops it once more than that of the weights is in shared memory; False when it was faster than that."""
        weights = self.wait_segments()
        size = weights.stat().st_size
        wait_for("bytes", lambda: weights.stat().st_blocks * 512 > fraction * size)
        self.freeze()
        return weights.stat().st_blocks * 512 < size and self.look().state is State.LOADING

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """kill -9, and until the kernel has let go of its locks."""
        self.process.kill()
        self.process.wait(PATIENCE_S)

    def terminate(self) -> int:
        """SIGTERM; the exit status."""
        self.process.terminate()
        return self.ended()

    def ended(self, within_s: float = PATIENCE_S) -> int:
        """Its exit status, once it has ended."""
        status = self.process.wait(within_s)
        assert "Traceback" not in self.log(), self.log()
        return status

    def log(self) -> str:
        """What it wrote so far."""
        self._log.flush()
        return os.pread(self._log.fileno(), 1 << 20, 0).decode()

    def status(self) -> dict[str, Any]:
        """What `ftd status --json` prints, without a process for it."""
        return report(self.namespace, os.environ)

    def __enter__(self) -> Daemon:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """For clean-up: an ordinary stop of whatever still runs, which must go well."""
        try:
            if self.process.poll() is None:
                self.thaw()  # one that ends already may be told so again
                assert self.terminate() == 0, self.log()
        finally:
            self.process.kill()
            self.process.wait()
            self._log.close()


def frozen(start: Callable[..., Daemon], model: Path, fraction: float = 0.0) -> Daemon:
    """A daemon that stands in the midst of its load, stopped.

    Args:
        start: makes one of these arguments, without waiting for it.
        model: large enough to be caught, see `hollow`.
        fraction: of the weights that is loaded at least.
    """
    for _ in range(10):
        daemon = start("--model", model, *QUICK, "--set", "read_threads=1", "--set", "pin=none", wait=False)
        if daemon.freeze_at(fraction):
            return daemon
        daemon.thaw()
        assert daemon.terminate() == 0
    raise AssertionError(f"{model} loads too fast to be caught")


def segments(namespace: str) -> list[str]:
    """Names of the namespace in /dev/shm without their common prefix."""
    return [name.name.removeprefix(f"/ftd.{namespace}.") for name in listed(namespace)]


def left_in(runtime_dir: Path) -> list[str]:
    """What stays in a runtime directory that should be empty; lock files may stay."""
    return sorted(path.name for path in runtime_dir.iterdir() if not path.name.endswith(".lock"))


def holding(pid: int, namespace: str) -> set[str]:
    """Segments of the namespace that a process maps, by name, also removed ones."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    paths = [line.split(None, 5)[5] for line in lines if f"/dev/shm/ftd.{namespace}." in line]
    return {path.removeprefix(f"/dev/shm/ftd.{namespace}.").removesuffix(" (deleted)") for path in paths}


def polls(pid: int) -> bool:
    """Whether a process sleeps between two looks: it has begun to wait."""
    return "nanosleep" in Path(f"/proc/{pid}/wchan").read_text()


def listens(pid: int) -> bool:
    """Whether the process has its own handler of SIGTERM (Python itself has none, while it has one of SIGINT)."""
    text = Path(f"/proc/{pid}/status").read_text()
    caught = next(line.split()[1] for line in text.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)


def is_gone(pid: int) -> bool:
    """Whether a process has ended; a zombie has."""
    try:
        return "Z" in _thread_states(pid)[:1]
    except FileNotFoundError:
        return True
    except ProcessLookupError:
        return False  # a thread ended while it was read: look again


def _thread_states(pid: int) -> Sequence[str]:
    stats = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    if not stats:
        raise FileNotFoundError(pid)
    return [stat.rpartition(")")[2].split()[0] for stat in stats]
