"""On which NUMA nodes the pages of segments lie: mbind(2) by its number, without libnuma.

A policy set on a shared mapping of a tmpfs file is the file's own (mbind(2)): it holds for every page that is made
from then on, whichever thread or system call makes it.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
from dataclasses import dataclass
from pathlib import Path

from ftd.errors import ConfigError, os_reason
from ftd.shm.names import SHM_DIR

NODES_DIR = Path("/sys/devices/system/node")

# <asm/unistd.h> of each architecture
_SYS_MBIND = {"x86_64": 237, "aarch64": 235, "riscv64": 235, "ppc64le": 259, "s390x": 268}
# <linux/mempolicy.h>
_MPOL_BIND = 2
_MPOL_INTERLEAVE = 3
_BITS_PER_LONG = 8 * ctypes.sizeof(ctypes.c_ulong)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where pages are to come from: `nodes` in turn, or only them.

    Attributes:
        setting: the configuration's word for it.
        bound: the one node that has to hold everything; None where others may help out.
    """

    setting: str
    nodes: tuple[int, ...]
    bound: int | None = None


def placement(setting: str, nodes: tuple[int, ...]) -> Placement | None:
    """What a configuration's `numa` means on a host with these nodes; None leaves it to the kernel.

    Raises:
        ConfigError: the kernel knows no nodes, or not the one that is named.
    """
    if setting == "none":
        return None
    if not nodes:
        raise ConfigError(
            f"numa: {setting} needs a kernel with NUMA: {NODES_DIR} names no node with memory", "set numa: none"
        )
    if setting == "interleave":
        return Placement(setting, nodes)
    node = int(setting.removeprefix("bind:"))
    if node not in nodes:
        found = ", ".join(map(str, nodes))
        raise ConfigError(
            f"numa: {setting} names no node with memory that this process may use: found {found}",
            f"set numa: none, interleave or bind:{nodes[0]}",
        )
    return Placement(setting, (node,), node)


def memory_nodes() -> tuple[int, ...]:
    """Nodes with memory that this process may use; none where the kernel has no NUMA."""
    try:
        present = parse_nodes((NODES_DIR / "has_memory").read_text())
    except OSError:
        return ()
    status = Path("/proc/self/status").read_text()
    allowed = next((row.split()[1] for row in status.splitlines() if row.startswith("Mems_allowed_list:")), None)
    return present if allowed is None else tuple(node for node in present if node in parse_nodes(allowed))


def parse_nodes(text: str) -> tuple[int, ...]:
    """The kernel's list format: `0-1,3`."""
    found: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return tuple(found)


def place(view: mmap.mmap, wanted: Placement) -> None:
    """Sets the policy of the file behind a writable shared mapping, of which no page has been made yet.

    Raises:
        ConfigError: the kernel refuses it.
    """
    number = _SYS_MBIND.get(platform.machine())
    if number is None:
        raise _refused(wanted, f"its number is not known for {platform.machine()}", "set numa: none")
    words = (ctypes.c_ulong * (max(wanted.nodes) // _BITS_PER_LONG + 1))()
    for node in wanted.nodes:
        words[node // _BITS_PER_LONG] |= 1 << node % _BITS_PER_LONG
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    mode = _MPOL_INTERLEAVE if wanted.bound is None else _MPOL_BIND
    done = libc.syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(view))),
        ctypes.c_ulong(len(view)),
        ctypes.c_ulong(mode),
        words,
        ctypes.c_ulong(len(words) * _BITS_PER_LONG + 1),  # the kernel takes one off
        ctypes.c_ulong(0),
    )
    if done != 0:
        error = OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        # docker's default seccomp profile allows mbind with that capability only
        remedy = (
            "in a container --cap-add SYS_NICE; or set numa: none" if error.errno == errno.EPERM else "set numa: none"
        )
        raise _refused(wanted, os_reason(error), remedy)


def _refused(wanted: Placement, reason: str, remedy: str) -> ConfigError:
    return ConfigError(f"numa: {wanted.setting}: mbind was refused: {reason}", remedy)


def node_bytes() -> dict[str, dict[str, int]]:
    """Bytes that this process maps of each node, by segment name, as /proc/self/numa_maps has them.

    For all segments at once: the kernel walks every page of the process for it.
    """
    try:
        rows = Path("/proc/self/numa_maps").read_text().splitlines()
    except OSError:
        return {}
    return parse_numa_maps(rows)


def parse_numa_maps(rows: list[str]) -> dict[str, dict[str, int]]:
    """See `node_bytes`. A row: `7f… interleave:0-1 file=/dev/shm/x dirty=4 N0=2 N1=2 kernelpagesize_kB=4`."""
    found: dict[str, dict[str, int]] = {}
    for row in rows:
        words = dict(word.partition("=")[::2] for word in row.split()[2:])
        path = Path(words.get("file", ""))
        if path.parent == SHM_DIR:
            page = int(words.get("kernelpagesize_kB", "4")) * 1024
            nodes = found.setdefault(f"/{path.name}", {})
            for word, value in words.items():
                if word[0] == "N" and word[1:].isdigit():
                    nodes[word[1:]] = nodes.get(word[1:], 0) + int(value) * page
    return found


def free_bytes(node: int) -> int | None:
    """Bytes that a node still gives, its page cache counted as free; None where that cannot be told."""
    try:
        rows = (NODES_DIR / f"node{node}" / "meminfo").read_text().splitlines()
    except OSError:
        return None
    return parse_node_free(rows)


def parse_node_free(rows: list[str]) -> int:
    """See `free_bytes`. A row: `Node 0 MemFree: 23013748 kB`. The cache's lists hold no shared memory."""
    kib = {words[2]: int(words[3]) for words in map(str.split, rows) if len(words) > 3}
    return 1024 * sum(kib.get(f"{key}:", 0) for key in ("MemFree", "Active(file)", "Inactive(file)"))
