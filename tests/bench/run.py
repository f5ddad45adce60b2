"""What the parts of a run are told, and what they share: the machine, the checkpoint, the limits, measured once."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path

import torch

from ftd.shm.segment import huge_policy
from tests.bench import checkpoint
from tests.bench.checkpoint import Checkpoint
from tests.bench.child import Found, measure
from tests.bench.rows import Limit, Row

GIB = 1 << 30


@dataclass(frozen=True)
class Pages:
    """Of the segments: as asked from the daemon, and of the copy that it is held against."""

    label: str
    huge: bool

    @property
    def setting(self) -> str:
        """`huge_pages` of the daemon."""
        return "auto" if self.huge else "never"

    @property
    def problem(self) -> str:
        """Why there are none here."""
        if self.huge and huge_policy() == "never":
            return "/dev/shm is mounted with huge=never: mount -o remount,huge=advise /dev/shm"
        return ""


PAGES = {"2m": Pages("2 MiB pages", True), "4k": Pages("4 KiB pages", False)}


@dataclass(frozen=True)
class Run:
    """One run.

    Attributes:
        device: that is loaded to.
        about_bytes: of the checkpoint.
        folder: for its files.
        asked_pages: the kinds of pages to measure with; `pages` are those that there are.
        ways: of loading that ftd is made to take, the first one being what users get.
        patterns: of the rows that are measured.
        tiny: the model that is streamed has kilobytes.
    """

    device: str
    about_bytes: int
    folder: Path
    asked_pages: tuple[Pages, ...]
    ways: tuple[str, ...]
    patterns: tuple[str, ...]
    tiny: bool

    def wants(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.patterns)

    def wanted(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if self.wants(name)]

    @property
    def cuda(self) -> bool:
        return torch.device(self.device).type == "cuda"

    @property
    def pages(self) -> list[Pages]:
        return [kind for kind in self.asked_pages if not kind.problem]

    def lacking(self, part: str) -> list[Row]:
        """A row for each kind of pages that this machine has not."""
        kinds = [kind for kind in self.asked_pages if kind.problem]
        return [Row(part, kind.label, problem=kind.problem, skipped=True) for kind in kinds]

    @cached_property
    def cores(self) -> int:
        return len(os.sched_getaffinity(0))

    @property
    def threads(self) -> int:
        """As many as the daemon reads with."""
        return min(16, self.cores)

    @property
    def most_s(self) -> float:
        """A measured process that takes longer hangs: what the slowest peer takes on a slow machine, and some."""
        return 60 + 15 * self.about_bytes / GIB

    @cached_property
    def checkpoint(self) -> Checkpoint:
        return checkpoint.write(self.folder, self.about_bytes)

    @cached_property
    def digest(self) -> str:
        """Of the checkpoint's tensors, read by nobody's loader."""
        file, tensors = str(self.checkpoint.file), "tests.bench.loaders:source_digest"
        found = measure(tensors, most_s=self.most_s, file=file, device=self.device)
        if "error" in found:
            raise RuntimeError(f"no digest: {found['error']}")
        return str(found["digest"])

    @cached_property
    def link(self) -> Found:
        return measure("tests.bench.limits:link", most_s=self.most_s, device=self.device)

    @cached_property
    def memcpy(self) -> Found:
        nbytes = min(GIB, self.about_bytes)
        return measure("tests.bench.limits:memcpy", most_s=self.most_s, threads=self.threads, nbytes=nbytes)

    @property
    def load_limit(self) -> Limit | None:
        """What no load can be faster than, GB/s."""
        host = self.memcpy  # told beside the link, too: what goes through host memory cannot be faster either
        name, found = ("H2D pinned", self.link) if self.cuda else ("host memcpy", host)
        return Limit(name, found["bytes_per_s"] / 1e9) if "bytes_per_s" in found else None

    def limits(self) -> list[Row]:
        """The limits that this run has measured so far."""
        measured = vars(self)
        rows = []
        if "link" in measured:
            rows.append(_limit(f"H2D from pinned memory to {self.device}, best of 5 × 1 GiB", self.link))
        if "memcpy" in measured:
            rows.append(_limit(f"host memcpy, {self.threads} threads, best of 5", self.memcpy))
        return rows

    def clean(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def _limit(what: str, found: Found) -> Row:
    if "bytes_per_s" not in found:
        return Row("limits", what, problem=found.get("error", ""), ours=False)
    return Row("limits", what, found["bytes_per_s"] / 1e9, "GB/s", ours=False)
