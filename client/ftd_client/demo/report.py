"""What the demo prints: commands as typed, tables, and one line that says what each means."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from operator import mul
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ftd.units import format_bytes, format_seconds
from ftd_client.demo.measure import Memory

_LABEL_CHARS = 56


def command(words: Sequence[str]) -> None:
    """The command line that runs next; its output is its own."""
    _console().print(Text(f"$ {shlex.join(words)}", style="bold"), soft_wrap=True)


def note(text: str) -> None:
    _console().print(Text(text, style="dim"), soft_wrap=True)


def warning(text: str) -> None:
    Console(stderr=True, highlight=False, markup=False).print(Text(f"warning: {text}", style="yellow"), soft_wrap=True)


def similarity(answer: Mapping[str, Any]) -> None:
    """Cosine of each pair of embeddings."""
    vectors = answer["vectors"]
    table = Table(box=None, pad_edge=False)
    table.add_column("SIMILARITY", no_wrap=True, overflow="ellipsis", max_width=_LABEL_CHARS)
    for number in range(1, len(vectors) + 1):
        table.add_column(str(number), justify="right")
    for number, (label, one) in enumerate(zip(answer["labels"], vectors, strict=True), 1):
        table.add_row(Text(f"{number} {label}"), *(f"{_cosine(one, other):.2f}" for other in vectors))
    _console().print(table)


def times(ftd: Sequence[Mapping[str, Any]], pretrained: Sequence[Mapping[str, Any]]) -> None:
    """One row a worker of ftd, with the worker of `from_pretrained` that has the same number beside it."""
    table = Table(box=None, pad_edge=False)
    table.add_column("WORKER")
    for heading in ("ATTACH", "BUILD", "BIND", "= READY", "1ST RUN", "FROM_PRETRAINED", "1ST RUN"):
        table.add_column(heading, justify="right")
    own, other = ("attach_ms", "build_ms", "bind_ms", "ready_ms", "first_ms"), ("ready_ms", "first_ms")
    for number, (one, two) in enumerate(zip(ftd, pretrained, strict=True), 1):
        table.add_row(str(number), *(_ms(one[name]) for name in own), *(_ms(two[name]) for name in other))
    console = _console()
    console.print()
    console.print(table)
    note(
        "New processes, one after another, files in the page cache, imports not counted; BUILD makes the model on meta."
    )


def memory(ftd: Memory, loaded: Memory, copied: Memory, workers: int) -> None:
    """Three ways to hold the same weights in as many workers; the daemon is the first process of `ftd`."""
    table = Table(box=None, pad_edge=False)
    table.add_column(f"PSS OF {workers} WORKER{'S' if workers > 1 else ''}")
    for heading in ("WEIGHTS", "HEAP", "LIBRARIES", "TOTAL", "PRIVATE EACH"):
        table.add_column(heading, justify="right")
    for title, held, own in (
        ("ftd, with daemon", ftd, ftd.private_bytes[1:]),
        ("from_pretrained", loaded, loaded.private_bytes),
        ("  and then copied", copied, copied.private_bytes),
    ):
        weights = format_bytes(held.weights_bytes) if held.weights_bytes else "in heap"
        sums = (held.anonymous_bytes, held.other_bytes, held.total_bytes, mean(own))
        table.add_row(title, weights, *(format_bytes(size) for size in sums))
    console = _console()
    console.print()
    console.print(table)
    more = format_bytes(copied.anonymous_bytes - loaded.anonymous_bytes)
    note(
        "ftd: all weights, once. from_pretrained on a CPU: the pages of the file that were read, shared as well until a"
        f" worker casts or copies its model; then each holds its own (here {more} more heap)."
    )


def equality(model: str, workers: int, *, equal: bool) -> None:
    text = f"bit-equal: {'yes' if equal else 'no'}"
    rest = f" (outputs of {model} from ftd and from copy.deepcopy of from_pretrained, {workers} workers of each)"
    console = _console()
    console.print()
    console.print(Text(text, style="green" if equal else "red") + Text(rest), soft_wrap=True)


def closing(namespace: str, scratch: Path, seconds: float) -> None:
    _console().print(
        f"done in {format_seconds(seconds)}; nothing of {namespace} is left in /dev/shm, and {scratch} is removed",
        soft_wrap=True,
    )


def _cosine(one: Sequence[float], other: Sequence[float]) -> float:
    length = math.hypot(*one) * math.hypot(*other)
    return sum(map(mul, one, other)) / length if length else math.nan


def _ms(milliseconds: float) -> str:
    return format_seconds(milliseconds / 1e3)


def _console() -> Console:
    # made anew: standard output may be another one by now; highlighting would colour digits inside names
    return Console(highlight=False, markup=False)
