"""Generations beside the current one: kept while a lease names them, removed when the last is gone."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from ftd.owner import process_name
from ftd.shm.life import LifeLock
from ftd.shm.names import Names, listed
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
        present = {name.generation for name in listed(self._names.namespace) if name.generation}
        if not present - {current}:
            self._waiting = set()
            return
        used = generations_in_use(holders(self._names))
        removed, freed = self._life.sweep(None if used is None else used | {current})
        if removed:
            log.info("removed %d segments of earlier generations, %s", len(removed), format_bytes(freed))
        waiting = {name.generation for name in listed(self._names.namespace) if name.generation} - {current}
        if waiting and waiting != self._waiting:
            log.info("generation %s is kept: followers still hold it", ", ".join(map(str, sorted(waiting))))
        self._waiting = waiting

    def describe_holders(self) -> str:
        """`"; held by followers of earlier generations: python 123 (2.00 GiB)"`, or nothing."""
        held = mapped_by_pid(self._names)
        if not held:
            return ""
        rows = [f"{process_name(pid)} {pid} ({format_bytes(size)})" for pid, size in sorted(held.items())]
        return f"; held by followers of earlier generations: {', '.join(rows)}"


def next_generation(names: Names, last: int) -> int:
    """One above the last that was published and above every one that still has names."""
    return 1 + max([last, *(name.generation or 0 for name in listed(names.namespace))])


def mapped_by_pid(names: Names) -> dict[int, int]:
    """Bytes of the namespace's weights that other processes map, by pid, as far as this user may look; also of
    segments whose names are gone."""
    found: dict[int, int] = {}
    prefix = f"/dev/shm/ftd.{names.namespace}.g"
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            lines = (entry / "maps").read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            fields = line.split(None, 5)
            if len(fields) > 5 and fields[5].startswith(prefix):
                low, high = (int(part, 16) for part in fields[0].split("-"))
                # shared and private mappings of one segment are the same pages
                found[int(entry.name)] = max(found.get(int(entry.name), 0), high - low)
    return found
