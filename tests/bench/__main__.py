"""ftd beside its peers and the machine's limits: `python -m tests.bench [--size-gib 8] [--only publish,load]`.

Parts: publish, attach, load, stream. Each thing measured runs in a process of its own, bounded, and becomes a row; what
cannot be measured here is a row with the reason. Without CUDA the same code runs on the CPU. `stream` is a run of its
own, about 3 minutes on an H200 and 7 with FlexTensor: it runs when it is named.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from pathlib import Path

import torch

from tests.bench import attach, load, machine, publish, rows
from tests.bench.child import ROOT
from tests.bench.results import Results, write_docs
from tests.bench.rows import Row
from tests.bench.run import GIB, PAGES, Run
from tests.bench.stream import part as stream

Part = Callable[[Run], Iterator[Row]]
PARTS: dict[str, Part] = {"publish": publish.rows, "attach": attach.rows, "load": load.rows, "stream": stream.rows}
NAMES = {"publish": publish.NAMES, "attach": attach.NAMES, "load": load.NAMES, "stream": stream.NAMES}
PAGE = ROOT / "docs" / "benchmarks.md"


def main() -> None:
    asked = _arguments()
    runs = [Results.read(Path(path)) for path in asked.read] if asked.read else [_measured(asked)]
    if asked.write_docs:
        write_docs(PAGE, runs)
    for run in runs:
        print(f"\n{run.text()}")
    if any(run.failed for run in runs):
        sys.exit(1)


def _measured(asked: argparse.Namespace) -> Results:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end)
    run = Run(
        device=asked.device,
        about_bytes=int(asked.size_gib * GIB),
        folder=Path(tempfile.mkdtemp(prefix="ftd-bench-", dir=asked.folder)),
        asked_pages=tuple(PAGES.values()) if asked.pages == "both" else (PAGES[asked.pages],),
        ways=asked.ways,
        patterns=asked.rows,
        tiny=asked.tiny,
    )
    found: list[Row] = []
    begun = time.monotonic()
    arguments = _named(asked)
    facts = machine.facts()

    def results() -> Results:
        return Results(arguments, facts, time.monotonic() - begun, [*run.limits(), *found])

    try:
        for name in asked.only:
            for row in _rows(name, run):
                found.append(row)
                print(rows.line(row), file=sys.stderr, flush=True)
                if asked.out:  # whenever this is ended, what was found stays
                    results().write(asked.out)
    finally:
        run.clean()
    done = results()
    if asked.out:
        done.write(asked.out)
    return done


def _rows(name: str, run: Run) -> Iterator[Row]:
    """A part's rows, of which a failure of the harness itself is one too: other parts go on."""
    try:
        with closing(PARTS[name](run)) as part:  # type: ignore[type-var]
            yield from part
    except Exception as error:
        traceback.print_exc()
        yield Row(name, "the rest of this part", problem=f"{type(error).__name__}: {error}")


def _end(number: int, _: object) -> None:
    """Everything that was started is undone, once: a second signal would only interrupt that."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    sys.exit(128 + number)


def _arguments() -> argparse.Namespace:
    options = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    add = options.add_argument
    add("--size-gib", type=float, default=8, help="of the checkpoint [8]")
    add("--only", type=_among(PARTS), default=["publish", "attach", "load"], help="parts [publish,attach,load]")
    add("--rows", type=_words, default=("*",), help=f"patterns of rows, of {_names()}")
    add("--pages", choices=[*PAGES, "both"], default="both", help="of the segments [both]")
    add("--ways", type=_among(("push", "pull")), default=("push", "pull"), help="of loading [push,pull]")
    add("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    add("--folder", help="where the checkpoint is written: a disk, for publishing from one [the temporary folder]")
    add("--tiny", action="store_true", help="stream a model of kilobytes: figures mean nothing")
    add("--out", type=Path, help="directory for results.json, table.md and plot.svg")
    add("--from", dest="read", nargs="+", metavar="RESULTS", help="results.json of earlier runs, instead of a run")
    add("--write-docs", action="store_true", help=f"put the tables and plots into {PAGE.relative_to(ROOT)}")
    asked = options.parse_args()
    if not asked.size_gib >= 1 / 64:
        options.error("--size-gib: expected at least 1/64")
    known = [name for part in asked.only for name in NAMES[part]]
    run = Run("cpu", 0, Path(os.devnull), (), (), asked.rows, tiny=True)
    if not run.wanted(known):
        options.error(f"--rows {','.join(asked.rows)}: expected a pattern of one of {', '.join(known)}")
    return asked


def _named(asked: argparse.Namespace) -> str:
    """The options that decide what a run's figures mean."""
    words = ["--size-gib", f"{asked.size_gib:g}", "--only", ",".join(asked.only), "--pages", asked.pages]
    if "load" in asked.only:
        words += ["--ways", ",".join(asked.ways)]
    if asked.rows != ("*",):
        words += ["--rows", ",".join(asked.rows)]
    return shlex.join([*words, "--device", asked.device, *(["--tiny"] if asked.tiny else [])])


def _names() -> str:
    return "; ".join(f"{part}: {', '.join(names)}" for part, names in NAMES.items())


def _words(text: str) -> tuple[str, ...]:
    return tuple(word for word in text.split(",") if word)


def _among(known: Iterable[str]) -> Callable[[str], tuple[str, ...]]:
    choices = tuple(known)

    def parse(text: str) -> tuple[str, ...]:
        words = _words(text)
        for word in words:
            if word not in choices:
                raise argparse.ArgumentTypeError(f"found {word}, expected some of {','.join(choices)}")
        return words

    return parse


if __name__ == "__main__":
    main()
