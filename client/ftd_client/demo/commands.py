"""Commands of ftd, run as a user runs them.

They and the workers run in sessions of their own, so that Ctrl-C reaches the demo alone and what follows has one
order: workers first, then the daemon. Every wait ends at a signal, and none is unbounded.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from ftd_client.demo.interrupts import Interrupts
from ftd_client.demo.problems import CommandFailedError, DemoError, InterruptedDemoError

POLL_S = 0.05
#: `ftd start` stops its daemon before it ends, and that gives back pinned memory.
_COMMAND_END_S = 60.0


def ftd_command(arguments: Sequence[str], environ: Mapping[str, str], interrupts: Interrupts | None) -> None:
    """Runs `ftd <arguments>` as a user would, its output on ours. Without `interrupts` it runs silently to its end.

    Raises:
        CommandFailedError: it ended with an error.
        InterruptedDemoError: a signal came; the command was told to end, and has.
    """
    quiet = interrupts is None
    sys.stdout.flush()
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "ftd", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL if quiet else None,
        stderr=subprocess.DEVNULL if quiet else None,
        env=dict(environ),
        start_new_session=True,
    ) as command:
        while not ended(command, POLL_S):
            try:
                if interrupts is not None:
                    interrupts.check()
            except InterruptedDemoError:
                command.terminate()
                if not ended(command, _COMMAND_END_S):
                    command.kill()
                raise
    if command.returncode:
        raise CommandFailedError(f"ftd {arguments[0]}", command.returncode)


def ftd_facts(namespace: str, environ: Mapping[str, str]) -> dict[str, Any]:
    """`ftd status --json` of a namespace, which answers within seconds whatever happens.

    Raises:
        DemoError: the daemon is not ready any more.
    """
    done = subprocess.run(
        [sys.executable, "-P", "-m", "ftd", "status", "-n", namespace, "--json"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env=dict(environ),
        start_new_session=True,
        check=False,
    )
    facts: dict[str, Any] = json.loads(done.stdout or b"{}")
    if done.returncode:
        found = facts.get("state", f"status {done.returncode}")
        raise DemoError(
            f"the daemon was ready and is {found} now: expected it to stay", "look for what ended it: journalctl -k"
        )
    return facts


def ended(process: subprocess.Popen[Any], within_s: float) -> bool:
    """Whether the process ends in that time; it is reaped then."""
    try:
        process.wait(timeout=within_s)
    except subprocess.TimeoutExpired:
        return False
    return True
