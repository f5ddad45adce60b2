"""Whether the weights fit, before a byte is read: /dev/shm, the cgroup, available memory, the budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from ftd.errors import MemoryShortError
from ftd.shm import numa
from ftd.shm.names import SHM_DIR
from ftd.shm.segment import free_bytes, space_text
from ftd.units import format_bytes

#: Values above this mean "no limit" (cgroup v1 writes 2**63 rounded down to a page).
_UNLIMITED = 1 << 60


@dataclass(frozen=True, slots=True)
class Limit:
    """A bound on new shared memory.

    Attributes:
        what: its name in messages.
        free: bytes that it still admits.
        remedy: how to raise it.
    """

    what: str
    free: int
    remedy: str


def limits(memory_budget: int | None, node: int | None = None) -> list[Limit]:
    """Every bound that holds here, measured now.

    Args:
        node: the NUMA node that all of it has to come from; the kernel kills who asks a full one.
    """
    found = [
        Limit(f"{SHM_DIR} ({space_text()})", free_bytes(), f"enlarge it: mount -o remount,size=<bytes> {SHM_DIR};"
              " in a container --shm-size, in a pod an emptyDir of medium Memory with a sizeLimit"),
        Limit("available memory", psutil.virtual_memory().available, "free memory on this host"),
    ]  # fmt: skip
    cgroup = cgroup_free_bytes()
    if cgroup is not None:
        found.append(Limit("the memory cgroup", cgroup, "raise MemoryMax= of the unit, or the container's limit"))
    on_node = None if node is None else numa.free_bytes(node)
    if on_node is not None:
        found.append(Limit(f"NUMA node {node}", on_node, "bind to another node, or set numa: interleave"))
    if memory_budget is not None:
        found.append(Limit("memory_budget", memory_budget, "raise `memory_budget` in the daemon's configuration"))
    return found


def check(needed: int, bounds: Sequence[Limit], holders: Callable[[], str]) -> None:
    """Raises:
    MemoryShortError: a bound does not admit `needed` bytes; the tightest is named, and what `holders` says of who
        holds memory, which takes a look at every process.
    """
    tightest = min(bounds, key=lambda bound: bound.free)
    if needed > tightest.free:
        raise MemoryShortError(
            f"the weights need {needed} bytes ({format_bytes(needed)}) of shared memory, {tightest.what} has"
            f" {tightest.free} free ({format_bytes(tightest.free)}){holders()}",
            tightest.remedy,
        )


def cgroup_free_bytes(root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> int | None:
    """Bytes that the tightest memory cgroup above this process still admits, reclaimable page cache counted as free;
    None without a limit. Reads both hierarchies, v2 and v1."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    free: list[int] = []
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            for base in (root, root / "unified"):
                free += _climb(base, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            free += _climb(
                root / "memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
            )
    return min(free, default=None)


def _climb(base: Path, path: str, limit_name: str, usage_name: str, cache_key: str) -> list[int]:
    found: list[int] = []
    folder = base / path.strip("/")
    # in a container the path may lie outside the mounted part of the hierarchy: its root is what is left
    for level in dict.fromkeys((folder, *folder.parents, base)):
        if level != base and base not in level.parents:
            continue
        limit, usage = _number(level / limit_name), _number(level / usage_name)
        if limit is not None and usage is not None and limit < _UNLIMITED:
            found.append(max(0, limit - usage + _stat(level / "memory.stat", cache_key)))
    return found


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _stat(path: Path, key: str) -> int:
    try:
        rows = dict(line.split() for line in path.read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return int(rows.get(key, 0))
