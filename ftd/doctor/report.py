"""What `ftd doctor` says: the object of `--json`, and a table for people."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ftd.doctor.checks import Check, Verdict, judge, troubles
from ftd.doctor.facts import Host

_COLOURS = {Verdict.OK: "green", Verdict.WARNING: "yellow", Verdict.FAILED: "red"}


def report(host: Host) -> dict[str, Any]:
    """The object: `ok`, false where a check failed; `checks`, always all of them; `versions`."""
    checks = judge(host)
    return {
        "ok": all(check.verdict is not Verdict.FAILED for check in checks),
        "checks": [asdict(check) for check in checks],
        "versions": dict(host.versions),
    }


def show(shown: Mapping[str, Any]) -> None:
    """Prints that object for people."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # highlighting would colour digits inside names
    console = Console(highlight=False, markup=False)
    checks = [Check(**check) for check in shown["checks"]]
    table = Table(box=None, pad_edge=False)
    for heading in ("CHECK", "", "FOUND"):
        table.add_column(heading, overflow="fold")
    for check in checks:
        table.add_row(check.name, Text(check.verdict, style=_COLOURS[check.verdict]), check.found)
    console.print(table)
    console.print(Text(", ".join(f"{name} {text}" for name, text in shown["versions"].items() if text)), soft_wrap=True)
    for check in troubles(checks):
        line = f"{check.verdict}: {check.name}: {check.found}: expected {check.expected}"
        console.print(Text(line, style=_COLOURS[check.verdict]), soft_wrap=True)
        console.print(Text(f"  → {check.remedy}"), soft_wrap=True)
