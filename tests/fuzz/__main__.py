"""Runs one fuzzer. An input may end in `SourceError` or be read; all else is a crash, and so is too much memory."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["ftd.source"]):
    from tests.fuzz import targets

#: One input, of 8 KiB at most, may allocate no more than this at once.
_LIMITS = ("-malloc_limit_mb=64", "-rss_limit_mb=2048", "-timeout=10", "-max_len=8192")


def main(target: str, corpus: Path, *options: str) -> None:
    seeds, one = targets.TARGETS[target]
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(seeds()):
        (corpus / f"seed-{number}").write_bytes(seed)
    atheris.Setup([sys.argv[0], *_LIMITS, *options, os.fspath(corpus)], one)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
