"""The daemon of a benchmark: started from the command line as a user would, and gone afterwards whatever happened."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.bench.child import ROOT

NAMESPACE = f"bench-{os.getpid()}"
_STOP_S = 20


class CommandError(Exception):
    """`ftd` failed: what it said."""


@dataclass(frozen=True)
class Served:
    """A ready daemon.

    Attributes:
        status: as `ftd status --json` told when it was ready.
        start_s: from the command to its end: `ftd start --detach` returns once the namespace is ready.
    """

    namespace: str
    status: dict[str, Any]
    start_s: float

    @property
    def pid(self) -> int:
        return int(self.status["pid"])

    @property
    def huge(self) -> str:
        """The share of 2 MiB pages that the weights really got."""
        segments = self.status["segments"]
        got = sum(segment["huge_bytes"] for segment in segments)
        return f"{100 * got / sum(segment['bytes'] for segment in segments):.0f} % huge"

    def now(self) -> dict[str, Any]:
        return _status(self.namespace)


@contextmanager
def served(model: Path | None, most_s: float, **settings: str | int) -> Iterator[Served]:
    """A daemon for the body.

    Args:
        model: None where a process publishes; the daemon waits for it in the body.
        settings: of its configuration, as `--set` takes them.

    Raises:
        CommandError: it did not start.
    """
    sets = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    begun = time.perf_counter()
    try:
        whence = ["--receive"] if model is None else ["--model", str(model)]
        _ftd(most_s, "start", "-n", NAMESPACE, *whence, "--detach", *sets)
        start_s = time.perf_counter() - begun
        yield Served(NAMESPACE, _status(NAMESPACE), start_s)
    except BaseException:
        with suppress(CommandError):  # what ended the body matters more
            _stop()
        raise
    _stop()


def _stop() -> None:
    """Also of a daemon that is still starting, and of none."""
    _ftd(_STOP_S + 10, "stop", "-n", NAMESPACE, "--timeout", str(_STOP_S), "--force", fine=(0, 3))


def _status(namespace: str) -> dict[str, Any]:
    status: dict[str, Any] = json.loads(_ftd(10, "status", "-n", namespace, "--json", fine=(0, 4)))
    return status


def _ftd(most_s: float, *arguments: str, fine: tuple[int, ...] = (0,)) -> str:
    command = [sys.executable, "-m", "ftd", *arguments]
    try:
        # in a session of its own: a Ctrl-C is for this process, which then stops the daemon
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=most_s, cwd=ROOT, start_new_session=True, check=False
        )
    except subprocess.TimeoutExpired:
        raise CommandError(f"ftd {arguments[0]} took more than {most_s:.0f} s") from None
    if done.returncode not in fine:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise CommandError(said[0] if said else f"ftd {arguments[0]}: exit status {done.returncode}")
    return done.stdout
