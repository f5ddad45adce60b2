"""Which pages a generation gets: huge or small, and on which NUMA node."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ftd.config.model import DaemonConfig
from ftd.daemon import build, creator
from ftd.daemon.build import Generation, WeightsFact
from ftd.daemon.progress import LoadProgress
from ftd.errors import EXIT_MEMORY, ConfigError, MemoryShortError
from ftd.shm import numa
from ftd.shm.names import SHM_DIR, Names
from ftd.shm.segment import HUGE_PAGE_BYTES, PAGE_BYTES, Access
from ftd.units import MIB
from tests.process.checkpoints import hollow

InChild = Callable[..., Any]

needs_huge_pages = pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled").exists(), reason="no transparent huge pages"
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return hollow(tmp_path, 5)


def load(names: Names, model: Path, **config: Any) -> Generation:
    return creator.materialize(
        names,
        1,
        DaemonConfig(model=model, pin="none", **config),
        Access(),
        LoadProgress(),
        holders=lambda: "",
        note=lambda text: None,
    )


def facts(names: Names, model: Path, **config: Any) -> list[WeightsFact]:
    generation = load(names, model, **config)
    generation.close()
    return list(generation.facts)


def left(names: Names) -> list[Path]:
    return list(SHM_DIR.glob(f"ftd.{names.namespace}*"))


# --- huge_pages --------------------------------------------------------------------------------------------------


@needs_huge_pages
@pytest.mark.parametrize("huge_pages", ["auto", "require"])
@pytest.mark.parametrize("option", ["advise", "within_size", "always"])
def test_a_mount_that_gives_them_fills_the_whole_segment_with_them(
    names: Names, model: Path, in_child: InChild, huge_pages: str, option: str
) -> None:
    (fact,) = in_child(lambda: facts(names, model, huge_pages=huge_pages), shm=f"size=32m,huge={option}")
    assert (fact.bytes, fact.huge_bytes, fact.page_bytes) == (6 * MIB, 6 * MIB, HUGE_PAGE_BYTES)


@needs_huge_pages
def test_never_does_not_ask_for_them(names: Names, model: Path, in_child: InChild) -> None:
    (fact,) = in_child(lambda: facts(names, model, huge_pages="never"), shm="size=32m,huge=advise")
    assert (fact.huge_bytes, fact.page_bytes) == (0, PAGE_BYTES)
    assert fact.bytes < 6 * MIB  # and does not round up to them


def test_auto_does_without_where_the_mount_gives_none(names: Names, model: Path, in_child: InChild) -> None:
    (fact,) = in_child(lambda: facts(names, model, huge_pages="auto"), shm="size=32m")
    assert (fact.huge_bytes, fact.page_bytes) == (0, PAGE_BYTES)


@needs_huge_pages
def test_require_is_refused_with_the_command_before_a_segment_is_made(
    names: Names, model: Path, in_child: InChild
) -> None:
    def refused() -> tuple[MemoryShortError, list[Path]]:
        with pytest.raises(MemoryShortError) as caught:
            load(names, model, huge_pages="require")
        return caught.value, left(names)

    error, remaining = in_child(refused, shm="size=32m")
    assert "huge_pages is `require`, but /dev/shm is mounted with huge=never" in error.message
    assert error.remedy == "mount -o remount,huge=advise /dev/shm"
    assert error.exit_status == EXIT_MEMORY
    assert remaining == []


@needs_huge_pages
def test_require_is_refused_where_memory_is_too_fragmented(
    names: Names, model: Path, in_child: InChild, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "huge_bytes", lambda: {names.weights(1, 0): 4 * MIB})

    def refused() -> tuple[MemoryShortError, list[Path]]:
        with pytest.raises(MemoryShortError) as caught:
            load(names, model, huge_pages="require")
        return caught.value, left(names)

    error, remaining = in_child(refused, shm="size=32m,huge=advise")
    assert "only 4.00 MiB of 6.00 MiB came in 2 MiB pages" in error.message
    assert "compact_memory" in error.remedy
    assert remaining == []
    (fact,) = in_child(lambda: facts(names, model, huge_pages="auto"), shm="size=32m,huge=advise")
    assert fact.huge_bytes == 4 * MIB


# --- numa --------------------------------------------------------------------------------------------------------

NODES = numa.memory_nodes()
needs_nodes = pytest.mark.skipif(not NODES, reason="this kernel has no NUMA")


@needs_nodes
@pytest.mark.leaves_segments
@pytest.mark.parametrize("setting", ["interleave", f"bind:{NODES[0] if NODES else 0}"])
def test_all_bytes_are_told_by_node(names: Names, model: Path, caplog: pytest.LogCaptureFixture, setting: str) -> None:
    with caplog.at_level(logging.INFO, logger="ftd"):
        (fact,) = facts(names, model, numa=setting)
    assert sum(fact.node_bytes.values()) == fact.bytes
    assert set(fact.node_bytes) <= set(map(str, NODES))
    assert f"numa: {setting}: " in caplog.text and f"on node {NODES[0]}" in caplog.text


@needs_nodes
@pytest.mark.leaves_segments
def test_pages_lie_where_they_were_bound_to_before_the_first_byte(
    names: Names, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CU-17: they cannot move once they are touched, or pinned."""
    fill, seen = creator._fill, []

    def filled(*arguments: Any) -> tuple[bytes, ...]:
        rows = Path("/proc/self/numa_maps").read_text().splitlines()
        seen.append(next(row.split()[1:] for row in rows if f"file={SHM_DIR}{names.weights(1, 0)}" in row))
        return fill(*arguments)

    monkeypatch.setattr(creator, "_fill", filled)
    facts(names, model, numa=f"bind:{NODES[0]}")
    (words,) = seen
    assert words[0] == f"bind:{NODES[0]}"
    assert not any(word.startswith("N") for word in words[1:])  # no page yet


@pytest.mark.leaves_segments
def test_none_asks_no_table(names: Names, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numa, "node_bytes", lambda: pytest.fail("it walks every page"))
    assert [fact.node_bytes for fact in facts(names, model)] == [{}]


def test_a_node_that_is_not_there_ends_the_start_with_nothing_left(names: Names, model: Path) -> None:
    with pytest.raises(ConfigError, match="numa: bind:999 "):
        load(names, model, numa="bind:999")
    assert left(names) == []


def test_a_node_that_cannot_hold_them_is_refused_before_the_kernel_kills(
    names: Names, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numa, "memory_nodes", lambda: (0, 7))
    monkeypatch.setattr(numa, "free_bytes", lambda node: {7: 1 * MIB}[node])
    with pytest.raises(MemoryShortError, match=r"NUMA node 7 has 1048576 free") as caught:
        load(names, model, numa="bind:7")
    assert "interleave" in caught.value.remedy
    assert left(names) == []
