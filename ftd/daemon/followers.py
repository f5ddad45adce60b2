"""Generations beside the current one: kept while a lease names them, removed when the last is gone."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

from ftd.owner import process_name
from ftd.shm.life import LifeLock
from ftd.shm.names import MAX_GENERATION, SHM_DIR, Names, listed, parse, present
from ftd.shm.slots import generations_in_use, holders
from ftd.units import format_bytes

log = logging.getLogger("ftd")


class OldGenerations:
    """What earlier creators of the namespace left. Only for the holder of the life lock."""

    def __init__(self, life: LifeLock) -> None:
        self._life = life
        self._names = life.names
        self._waiting: set[int] = set()

    def reclaim(self, current: int = 0) -> None:
        """Removes every generation that no follower holds, except `current` (0: there is none yet)."""
        if not self._life.is_named():
            return
        there = present(self._names)
        if not there.generations - {current}:
            self._waiting = set()
            return
        used = generations_in_use(holders(self._names))
        removed, freed = self._life.sweep((there.published if used is None else used) | {current})
        if removed:
            log.info("removed %d segments of earlier generations, %s", len(removed), format_bytes(freed))
        waiting = present(self._names).generations - {current}
        if waiting and waiting != self._waiting:
            log.info("generation %s is kept: followers still hold it", ", ".join(map(str, sorted(waiting))))
        self._waiting = waiting

    def describe_holders(self) -> str:
        """`"; held by followers of earlier generations: python 123 (2.00 GiB), pid 456"`, or nothing.

        What a process maps shows to its own user and to root; of the others there is the word of their leases.
        """
        mapped = mapped_by_pid(self._names)
        rows = [f"{process_name(pid)} {pid} ({format_bytes(size)})" for pid, size in sorted(mapped.items())]
        claimed = {holder.record.owner.pid for holder in holders(self._names) if holder.record is not None}
        rows += [f"pid {pid}" for pid in sorted(claimed - mapped.keys())]
        return f"; held by followers of earlier generations: {', '.join(rows)}" if rows else ""


def next_generation(names: Names, last: int) -> int:
    """One above the last that was published and above every one that still has names.

    Numbers that files of others take are passed over, but don't count: nobody else says how far the count is. Neither
    does a number that none can follow.
    """
    number = 1 + max(n for n in (0, last, *present(names).generations) if n < MAX_GENERATION)
    taken = {name.generation for name in listed(names.namespace)}
    while number in taken:
        number += 1
    return number


def mapped_by_pid(names: Names) -> dict[int, int]:
    """Bytes of the namespace's weights that other processes map, by pid, as far as this user may look; also of
    segments whose names are gone."""
    found: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            lines = (entry / "maps").read_text(errors="replace").splitlines()
        except OSError:
            continue
        size = _mapped_bytes(lines, names.namespace)
        if size:
            found[int(entry.name)] = size
    return found


def _mapped_bytes(lines: Sequence[str], namespace: str) -> int:
    """Bytes of the namespace's generations that rows of /proc/<pid>/maps (proc(5)) cover.

    Each byte of a segment counts once: shared and private mappings of it are the same pages, and the kernel splits a
    mapping where a part of it is advised or locked.
    """
    ranges: list[tuple[str, int, int]] = []
    for line in lines:
        fields = line.split(None, 5)
        path = Path(fields[5].removesuffix(" (deleted)")) if len(fields) > 5 else SHM_DIR
        parsed = parse(path.name) if path.parent == SHM_DIR else None
        if parsed is not None and parsed.namespace == namespace and parsed.generation is not None:
            low, high = (int(part, 16) for part in fields[0].split("-"))
            offset = int(fields[2], 16)
            ranges.append((fields[4], offset, offset + high - low))
    total, at = 0, ("", 0)
    for inode, start, end in sorted(ranges):
        low = max(start, at[1]) if inode == at[0] else start
        if end > low:
            total, at = total + end - low, (inode, end)
    return total
