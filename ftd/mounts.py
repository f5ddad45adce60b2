"""The kernel's table of mounts as this process sees it: /proc/self/mountinfo (proc(5))."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Mount:
    """One mount.

    Attributes:
        device: `"major:minor"` of the filesystem.
        path: where it is mounted; spaces in it stay escaped as the kernel writes them.
        kind: the type's name.
        options: of the filesystem itself, not of this mount of it.
    """

    device: str
    path: str
    kind: str
    options: tuple[str, ...]


def mounts() -> list[Mount]:
    """Every mount in the kernel's order: of those on one path, the last is the one seen. Empty where the table cannot
    be read."""
    try:
        lines = Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        # optional fields stand before the separator: what follows them is counted from it
        place, _, filesystem = line.partition(" - ")
        fields, rest = place.split(), filesystem.split()
        found.append(Mount(fields[2], fields[4], rest[0], tuple(rest[-1].split(","))))
    return found
