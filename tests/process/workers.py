"""Workers that do what the test tells them: forked processes that attach, and that may be stopped and killed."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

import ftd_client
from tests.process.checkpoints import TINY_DIGESTS, digests
from tests.process.daemons import PATIENCE_S, holding, wait_for

_CONTEXT = multiprocessing.get_context("fork")


class Worker:
    """A process that calls functions of a test module, one after the other.

    Args:
        environ: of a process that starts afresh with it, for what is read only then (LD_PRELOAD); else it is forked.
    """

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        self._pipe, theirs = _CONTEXT.Pipe()
        context = _CONTEXT if environ is None else multiprocessing.get_context("spawn")
        self._process = context.Process(target=_obey, args=(theirs,), daemon=True)
        with pytest.MonkeyPatch.context() as patch:
            for name, value in (environ or {}).items():
                patch.setenv(name, value)
            self._process.start()
        theirs.close()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def begin(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Tells it to call `function`, which it finds by its name; `result` has what came of it."""
        self._pipe.send((function, arguments))

    def result(self, within_s: float = PATIENCE_S) -> Any:
        """What the function gave; what it raised is raised."""
        assert self._pipe.poll(within_s), f"worker {self.pid} did not answer within {within_s:g} s"
        value, error = self._pipe.recv()
        if error is not None:
            raise error
        return value

    def do(self, function: Callable[..., Any], *arguments: Any) -> Any:
        self.begin(function, *arguments)
        return self.result()

    def idle(self) -> bool:
        """Whether it has nothing to tell yet."""
        return not self._pipe.poll(0)

    def freeze(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """kill -9, and until it is gone."""
        self._process.kill()
        self._wait()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """For clean-up, whatever it does right now."""
        self._process.kill()
        self._wait()
        self._pipe.close()

    def _wait(self) -> None:
        # not join with a timeout, which waits for children of the worker too
        wait_for(f"worker {self.pid} to end", lambda: self._process.exitcode is not None)


def _obey(pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)  # threads of torch do not survive a fork
    while (told := pipe.recv()) is not None:
        function, arguments = told
        try:
            answer = (function(*arguments), None)
        except BaseException as error:
            answer = (None, error)
        pipe.send(answer)


# --- what workers are told ---------------------------------------------------------------------------------------

_followers: dict[str, ftd_client.Follower] = {}
_lost: dict[str, list[tuple[str, float]]] = {}
_tensors: dict[str, dict[str, torch.Tensor]] = {}


def attach(namespace: str, timeout: float | None = 30) -> int:
    """The generation."""
    told = _lost[namespace] = []
    follower = ftd_client.attach(
        namespace, timeout=timeout, on_lost=lambda reason: told.append((reason, time.monotonic()))
    )
    _followers[namespace] = follower
    _tensors.pop(namespace, None)
    return follower.generation


def attach_timed(namespace: str, timeout: float | None) -> tuple[str, str, float]:
    """Class and text of the error of an attach that fails, and the seconds it took."""
    begun = time.monotonic()
    try:
        attach(namespace, timeout)
    except ftd_client.FtdError as error:
        return type(error).__name__, str(error), time.monotonic() - begun
    raise AssertionError("attached")


def close(namespace: str) -> None:
    _followers.pop(namespace).close()


def lost(namespace: str) -> list[tuple[str, float]]:
    """Reasons given to `on_lost`, each with its time on the monotonic clock."""
    return list(_lost[namespace])


def wait_lost(namespace: str) -> tuple[str, float]:
    wait_for("on_lost", lambda: _lost[namespace])
    return _lost[namespace][0]


def wait_beats(namespace: str, times: int) -> None:
    """Until its second thread has looked at the creator so many times."""
    follower = _followers[namespace]
    for _ in range(times + 1):  # the first may belong to a look that was begun before
        before = follower._seat.record.heartbeat_ns
        wait_for("a heartbeat", lambda before=before: follower._seat.record.heartbeat_ns > before)


def contents(namespace: str) -> dict[str, str]:
    """Digest of every tensor's bytes as this worker reads them now."""
    if namespace not in _tensors:
        _tensors[namespace] = _followers[namespace].state_dict()
    return digests({name: bytes_of(tensor) for name, tensor in _tensors[namespace].items()})


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def forget(namespace: str) -> None:
    """Lets go of every tensor, so that the mappings go too."""
    _tensors.pop(namespace, None)


def come_and_go(namespace: str, times: int) -> None:
    for _ in range(times):
        with ftd_client.attach(namespace, timeout=0) as weights:
            assert weights.state_dict()


def usage(namespace: str) -> dict[str, int]:
    """What this process holds: descriptors, threads, and mappings of the namespace."""
    gc.collect()
    return {
        "fds": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "maps": len(holding(os.getpid(), namespace)),
    }


def leave_a_child(namespace: str) -> int:
    """Pid of a child forked now, which stands until it is killed."""
    pid = os.fork()
    if pid == 0:
        while True:
            signal.pause()
    return pid


def touch_nothing(namespace: str) -> list[str]:
    """Names of all tensors, which are made and kept."""
    _tensors[namespace] = _followers[namespace].state_dict()
    return list(_tensors[namespace])


def read_one(namespace: str, name: str) -> int:
    return int(_tensors[namespace][name].sum())


def write_one(namespace: str, name: str) -> None:
    _tensors[namespace] = _followers[namespace].state_dict()
    _tensors[namespace][name].fill_(1)


def overwrite(namespace: str) -> list[float]:
    """Writes ones into every tensor, and gives the values that are there then."""
    _tensors[namespace] = _followers[namespace].state_dict()
    for tensor in _tensors[namespace].values():
        tensor.fill_(1)
    return sorted({float(value) for tensor in _tensors[namespace].values() for value in tensor.flatten()})


def resident(namespace: str) -> dict[str, int]:
    """Sums of /proc/self/smaps over this process's mappings of the namespace's weights, in bytes."""
    totals = dict.fromkeys(("Size", "Rss", "Private_Dirty", "Anonymous"), 0)
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        key, _, rest = line.partition(":")
        if key in totals and inside:
            totals[key] += int(rest.split()[0]) * 1024
        elif "-" in key.split(" ")[0]:
            inside = f"/dev/shm/ftd.{namespace}.g" in line
    return totals


def attach_until(namespace: str, times: int) -> tuple[int, set[int]]:
    """Attaches, reads and leaves so many times at least, and until the daemon has changed; (times, generations)."""
    seen: set[int] = set()
    count = 0
    until = time.monotonic() + PATIENCE_S
    while count < times or (len(seen) < 2 and time.monotonic() < until):
        with ftd_client.attach(namespace, timeout=30) as weights:
            seen.add(weights.generation)
            assert digests({name: bytes_of(t) for name, t in weights.state_dict().items()}) == TINY_DIGESTS
        count += 1
    return count, seen
