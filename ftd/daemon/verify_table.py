"""What `ftd verify` found, for people: a bar while it looks, a line a tensor that differs, then what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.text import Text

from ftd.source.wording import quoted, shown
from ftd.units import format_bytes, format_seconds


@contextmanager
def bar(what: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, nothing elsewhere."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total_bytes)
        yield lambda nbytes: progress.advance(task, nbytes)


def print_report(told: Mapping[str, Any]) -> None:
    """Prints the object of `verify.report`."""
    console = Console(highlight=False, markup=False)
    amount = f"{told['tensors']} tensors, {format_bytes(told['bytes'])}, digest {told['digest']}"
    _say(console, f"{told['namespace']}: generation {told['generation']}, {amount}")
    again = (
        f"ftd start --namespace {told['namespace']} --replace loads anew; look for memory errors in the kernel's log"
    )
    _say_part(console, told, told["tensors"], f"shared memory ({format_seconds(told['seconds'])})", again)
    source = told["source"]
    if source is not None:
        remedy = "compare the files with their publisher's; a start publishes them as they are now"
        _say_part(console, source, told["tensors"], shown(source["path"]), remedy)


def _say_part(console: Console, part: Mapping[str, Any], tensors: int, title: str, remedy: str) -> None:
    differing, problems = part["differing"], part["problems"]
    for problem in problems:
        _say(console, problem, "red")
    for found in differing:
        place = f" in {shown(found['place'])} at byte {found['offset']}" if found["place"] else ""
        _say(console, f"{quoted(found['name'])}{place}: {found['problem']}", "red")
    if not problems and not differing:
        _say(console, f"{title}: as published", "green")
        return
    # of a file that is gone no tensor was compared
    differ = f"{len(differing)} of {tensors} tensors differ from" if differing else "not"
    _say(console, f"{title}: {differ} what was published", "red")
    _say(console, f"  → {remedy}")


def _say(console: Console, text: str, style: str = "") -> None:
    console.print(Text(text, style=style), soft_wrap=True)
