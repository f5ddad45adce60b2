"""Memory of processes as the kernel counts it: /proc/<pid>/smaps_rollup and /proc/<pid>/smaps (proc(5)).

PSS gives each page to the processes that map it in equal parts, so that a sum over processes counts no page twice.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ftd.errors import os_reason
from ftd_client.demo.problems import DemoError

#: First line of a mapping: addresses, permissions, offset, device, inode, and the path up to the line's end.
_MAPPING = re.compile(r"[0-9a-f]+-[0-9a-f]+ \S+ [0-9a-f]+ \S+ \d+ *(.*)")
_FIELD = re.compile(r"(\w+): +(\d+) kB")


@dataclass(frozen=True, slots=True)
class Memory:
    """What several processes hold together, in bytes.

    Attributes:
        weights_bytes: PSS of the mappings of the weights' files or segments.
        anonymous_bytes: PSS of memory that no file backs, outside of those mappings.
        other_bytes: PSS of everything else: libraries and the interpreter.
        private_bytes: pages that one process alone maps; one number a process, in the order asked.
    """

    weights_bytes: int
    anonymous_bytes: int
    other_bytes: int
    private_bytes: tuple[int, ...]

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.anonymous_bytes + self.other_bytes


def memory_of(pids: Iterable[int], is_weights: Callable[[str], bool]) -> Memory:
    """Sums over processes of this user; `is_weights` tells a mapping of weights by its path.

    Raises:
        DemoError: the kernel does not say, or a process is gone.
    """
    weights = anonymous = other = 0
    private = []
    for pid in pids:
        rollup = read_fields(_read(pid, "smaps_rollup").splitlines())
        mapped, copied = weights_of(_read(pid, "smaps"), is_weights)
        weights += mapped
        anonymous += rollup["Pss_Anon"] - copied
        other += rollup["Pss"] - mapped - (rollup["Pss_Anon"] - copied)
        private.append(rollup["Private_Clean"] + rollup["Private_Dirty"])
    return Memory(weights, anonymous, other, tuple(private))


def weights_of(smaps: str, is_weights: Callable[[str], bool]) -> tuple[int, int]:
    """PSS of the weights' mappings, and how much of that is anonymous (pages copied on write)."""
    pss = anonymous = 0
    for path, lines in _mappings(smaps.splitlines()):
        if is_weights(path.removesuffix(" (deleted)")):
            fields = read_fields(lines)
            pss += fields["Pss"]
            anonymous += fields["Anonymous"]
    return pss, anonymous


def read_fields(lines: Iterable[str]) -> dict[str, int]:
    """`Name:  123 kB` lines as bytes by name."""
    return {match[1]: int(match[2]) * 1024 for line in lines if (match := _FIELD.match(line))}


def _mappings(lines: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    path, body = "", list[str]()
    for line in lines:
        match = _MAPPING.fullmatch(line)
        if match is None:
            body.append(line)
            continue
        yield path, body
        path, body = match[1], []
    yield path, body


def _read(pid: int, name: str) -> str:
    path = Path(f"/proc/{pid}/{name}")
    try:
        return path.read_text(errors="replace")
    except OSError as error:
        raise DemoError(
            f"{path} can't be read: {os_reason(error)}", "run the demo on a Linux host with /proc, 4.14 or later"
        ) from None
