"""Placement by NUMA node, as far as a host of one node shows it: /proc/self/numa_maps names the policy."""

import errno
import mmap
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ftd.errors import EXIT_USAGE, ConfigError
from ftd.shm import numa
from ftd.shm.names import Names
from ftd.shm.numa import Placement, memory_nodes, node_bytes, parse_nodes, parse_numa_maps, place, placement
from ftd.shm.segment import HUGE_PAGE_BYTES, PAGE_BYTES, Access, Segment, path_of
from ftd.units import GIB

InChild = Callable[..., Any]
NODES = memory_nodes()

needs_nodes = pytest.mark.skipif(not NODES, reason="this kernel has no NUMA")

# --- what the configuration means --------------------------------------------------------------------------------


def test_none_leaves_it_to_the_kernel_on_every_host() -> None:
    assert placement("none", ()) is None
    assert placement("none", (0, 1)) is None


def test_interleave_takes_every_node_and_binds_to_none() -> None:
    assert placement("interleave", (0, 2)) == Placement("interleave", (0, 2), None)
    assert placement("interleave", (0,)) == Placement("interleave", (0,), None)


def test_bind_takes_that_node_alone() -> None:
    assert placement("bind:2", (0, 2)) == Placement("bind:2", (2,), 2)


def test_a_node_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"numa: bind:1 names no node with memory .*: found 0, 2\n") as caught:
        placement("bind:1", (0, 2))
    assert caught.value.exit_status == EXIT_USAGE
    assert "bind:0" in caught.value.remedy


@pytest.mark.parametrize("setting", ["interleave", "bind:0"])
def test_a_kernel_without_numa_is_said_so(setting: str) -> None:
    with pytest.raises(ConfigError, match=f"numa: {setting} needs a kernel with NUMA"):
        placement(setting, ())


@pytest.mark.parametrize(
    ("text", "nodes"), [("0\n", (0,)), ("0-1\n", (0, 1)), ("0-1,3,5-6", (0, 1, 3, 5, 6)), ("\n", ()), ("", ())]
)
def test_the_kernels_lists_are_read(text: str, nodes: tuple[int, ...]) -> None:
    assert parse_nodes(text) == nodes


def test_a_kernel_without_nodes_has_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(numa, "NODES_DIR", tmp_path)
    assert memory_nodes() == ()
    assert numa.free_bytes(0) is None


def test_nodes_that_a_cpuset_forbids_are_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "has_memory").write_text("0-3\n")
    monkeypatch.setattr(numa, "NODES_DIR", tmp_path)
    status = Path("/proc/self/status").read_text()
    allowed = parse_nodes(next(row.split()[1] for row in status.splitlines() if row.startswith("Mems_allowed_list")))
    assert memory_nodes() == tuple(node for node in range(4) if node in allowed)


# --- the kernel's policy -----------------------------------------------------------------------------------------


def policy_of(path: Path) -> str:
    rows = Path("/proc/self/numa_maps").read_text().splitlines()
    return next(row.split()[1] for row in rows if f"file={path}" in row)


@needs_nodes
@pytest.mark.leaves_segments
@pytest.mark.parametrize("setting", ["interleave", f"bind:{NODES[0] if NODES else 0}"])
def test_the_kernel_has_the_policy_and_tells_where_the_pages_are(names: Names, setting: str) -> None:
    """CU-17."""
    wanted = placement(setting, NODES)
    assert wanted is not None
    name = names.weights(1, 0)
    with Segment.create(name, 4 * PAGE_BYTES, Access()) as segment:
        view = segment.map_shared(writable=True)
        assert policy_of(path_of(name)) == "default"
        place(view, wanted)
        assert policy_of(path_of(name)).split(":")[0] == setting.split(":", maxsplit=1)[0]
        view[:] = bytes(len(view))
        assert sum(node_bytes()[name].values()) == 4 * PAGE_BYTES
        if wanted.bound is not None:
            assert node_bytes()[name] == {str(wanted.bound): 4 * PAGE_BYTES}


@needs_nodes
@pytest.mark.leaves_segments
def test_the_policy_is_the_files_and_not_the_mappings(names: Names) -> None:
    """What fills pages is a system call of any thread, and padding is written without a mapping."""
    name = names.weights(1, 0)
    with Segment.create(name, PAGE_BYTES, Access()) as segment:
        view = segment.map_shared(writable=True)
        place(view, Placement("interleave", NODES))
        del view
        again = segment.map_shared()
        assert policy_of(path_of(name)).startswith("interleave:")
        again.close()


@needs_nodes
def test_huge_pages_are_counted_in_bytes(names: Names, in_child: InChild) -> None:
    name = names.weights(1, 0)

    def got() -> dict[str, int]:
        with Segment.create(name, 2 * HUGE_PAGE_BYTES, Access()) as segment:
            view = segment.map_shared(writable=True, huge=True)
            place(view, Placement("interleave", NODES))
            view[:] = bytes(len(view))
            return node_bytes()[name]

    assert sum(in_child(got, shm="size=16m,huge=advise").values()) == 2 * HUGE_PAGE_BYTES


@needs_nodes
@pytest.mark.leaves_segments
def test_a_node_that_the_kernel_does_not_have_is_refused(names: Names) -> None:
    with Segment.create(names.weights(1, 0), PAGE_BYTES, Access()) as segment:
        view = segment.map_shared(writable=True)
        with pytest.raises(ConfigError, match="numa: bind:1000: mbind was refused: invalid argument") as caught:
            place(view, Placement("bind:1000", (1000,), 1000))
        assert caught.value.remedy == "set numa: none"


class _Refused:
    """libc of a container whose seccomp profile forbids mbind."""

    def __init__(self, *_: object, **__: object) -> None:
        self.syscall = _minus_one


def _minus_one(*_: object) -> int:
    return -1


def test_a_container_that_forbids_it_is_told_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numa.ctypes, "CDLL", _Refused)
    monkeypatch.setattr(numa.ctypes, "get_errno", lambda: errno.EPERM)
    with mmap.mmap(-1, PAGE_BYTES) as view, pytest.raises(ConfigError, match="not permitted") as caught:
        place(view, Placement("interleave", (0,)))
    assert "--cap-add SYS_NICE" in caught.value.remedy


def test_an_architecture_whose_number_is_not_known_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "m68k")
    with mmap.mmap(-1, PAGE_BYTES) as view, pytest.raises(ConfigError, match="not known for m68k"):
        place(view, Placement("interleave", (0,)))


# --- the kernel's tables -----------------------------------------------------------------------------------------


def test_bytes_are_summed_by_segment_and_node() -> None:
    rows = [
        "7f0000000000 interleave:0-1 file=/dev/shm/ftd.a.g1.0 dirty=6 active=0 N0=4 N1=2 kernelpagesize_kB=4",
        "7f0000100000 interleave:0-1 file=/dev/shm/ftd.a.g1.0 dirty=1 N1=1 kernelpagesize_kB=4",
        "7f0000200000 bind:0 file=/dev/shm/ftd.a.g1.1 dirty=2 N0=2 kernelpagesize_kB=2048",
        "7f0000300000 bind:0 file=/dev/shm/ftd.a.g1.2",
        "7f0000400000 default file=/usr/lib/libc.so.6 mapped=3 N0=3 kernelpagesize_kB=4",
        "7f0000500000 default anon=1 dirty=1 N0=1 kernelpagesize_kB=4",
        "7f0000600000 default",
    ]
    assert parse_numa_maps(rows) == {
        "/ftd.a.g1.0": {"0": 4 * 4096, "1": 3 * 4096},
        "/ftd.a.g1.1": {"0": 4 << 20},
        "/ftd.a.g1.2": {},
    }


def test_page_cache_of_a_node_counts_as_free_and_shared_memory_does_not() -> None:
    rows = [
        "Node 1 MemTotal:       8349900 kB",
        "Node 1 MemFree:        1048576 kB",
        "Node 1 Active(anon):   1048576 kB",
        "Node 1 Active(file):   1048576 kB",
        "Node 1 Inactive(file): 2097152 kB",
        "Node 1 Shmem:          1048576 kB",
        "Node 1 HugePages_Total: 0",
        "",
    ]
    assert numa.parse_node_free(rows) == 4 * GIB


@needs_nodes
def test_a_nodes_free_memory_is_told() -> None:
    free = numa.free_bytes(NODES[0])
    assert free is not None
    assert 0 < free <= os.sysconf("SC_PHYS_PAGES") * PAGE_BYTES
