"""A function in a process of its own: bounded, killed with all that it started, its failure told as data.

A measured process shares no caches, allocator or CUDA context with another, and none can hang the run.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Self

#: What a function returned, or `{"skipped": why}`, or `{"error": why}`.
Found = dict[str, Any]

ROOT = Path(__file__).parents[2]
_MARK, _MET = "ROW ", "MET"
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_EXIT_S = 15  # for what a process undoes when it ends: 8 GiB unregister in 0.2 s


class Skip(Exception):
    """This cannot be measured here; the text says why."""


class Child:
    """Calls `function` ("module:name") with keyword arguments that JSON can carry. A context manager.

    Args:
        most_s: from now on; a function that takes longer is killed, and its result says so.
    """

    def __init__(self, function: str, *, most_s: float, **arguments: Any) -> None:
        self._most_s, self._until = most_s, time.monotonic() + most_s
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from tests.bench.child import main; main()", function, json.dumps(arguments)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said, text=True, cwd=ROOT,
            start_new_session=True,  # a group to kill, and no Ctrl-C but through us
        )  # fmt: skip
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # one that hangs in a driver cannot even be killed
            self._process.wait(_EXIT_S)
        self._said.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def met(self) -> bool:
        """Waits until the child stands at its next `meet`; False when it never will."""
        return self._next(_MET) is not None

    def go(self) -> None:
        """Lets it go on from there."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it failed, which its result says
            self._process.stdin.write("\n")
            self._process.stdin.flush()

    def result(self) -> Found:
        line = self._next(_MARK)
        if line is not None:
            try:
                self._process.wait(_EXIT_S)
            except subprocess.TimeoutExpired:
                return {"error": f"finished, but did not end within {_EXIT_S} s"}
            found: Found = json.loads(line.removeprefix(_MARK))
            return found
        if time.monotonic() >= self._until:
            return {"error": f"took more than {self._most_s:.0f} s"}
        try:
            status = f"exit status {self._process.wait(_EXIT_S)}"
        except subprocess.TimeoutExpired:
            status = "closed its output, but did not end"
        self._said.seek(0)
        text = self._said.read()
        sys.stderr.write(text)
        # the last line that begins at the margin: an error's remedy follows it, indented
        said = [line for line in text.splitlines() if line[:1].strip()]
        return {"error": said[-1][:200] if said else status}

    def _next(self, mark: str) -> str | None:
        while True:
            try:
                line = self._lines.get(timeout=max(self._until - time.monotonic(), 0))
            except queue.Empty:
                return None
            if line is None:
                self._lines.put(None)  # for whoever asks next
                return None
            if line.startswith(mark):
                return line

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line.rstrip("\n"))
        self._lines.put(None)


def measure(function: str, *, most_s: float, **arguments: Any) -> Found:
    """One call in a process of its own, to its end."""
    with Child(function, most_s=most_s, **arguments) as child:
        return child.result()


def failed_to_meet(children: Sequence[Child]) -> Found | None:
    """None once all stand at their next `meet`; else the failure of one that never will."""
    for child in children:
        if not child.met():
            return {"error": "ended too soon"} | child.result()
    return None


def meet() -> None:
    """In the child: waits for the other side's `go`."""
    print(f"\n{_MET}", flush=True)
    sys.stdin.readline()


def main() -> None:
    """The child's side."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    module, name = sys.argv[1].split(":")
    try:
        found = getattr(import_module(module), name)(**json.loads(sys.argv[2]))
    except Skip as reason:
        found = {"skipped": str(reason)}
    print(f"\n{_MARK}{json.dumps(found)}", flush=True)
