import logging
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from ftd.clock import monotonic_ns
from ftd.daemon.followers import OldGenerations, mapped_by_pid, next_generation
from ftd.errors import SegmentError
from ftd.owner import Owner, process_name
from ftd.shm import slots
from ftd.shm.life import LifeLock
from ftd.shm.names import MAX_GENERATION, Names, listed
from ftd.shm.segment import PAGE_BYTES, Access, Segment, inode_of, path_of
from ftd.shm.slots import Lease, SlotRecord
from tests.conftest import NOBODY, kill

pytestmark = pytest.mark.leaves_segments

InChild = Callable[..., Any]
Standing = Callable[[Callable[[], Any]], int]


@pytest.fixture
def life(names: Names) -> Iterator[LifeLock]:
    with LifeLock.acquire(names) as life:
        slots.prepare(names, Access())
        yield life


@pytest.fixture
def old(life: LifeLock) -> OldGenerations:
    return OldGenerations(life)


def _publish(names: Names, *generations: int, pages: int = 1) -> None:
    for generation in generations:
        for name in (names.weights(generation, 0), names.manifest(generation)):
            with Segment.create(name, 0, Access()) as segment:
                segment.write(bytes(pages * PAGE_BYTES))


def _present(names: Names) -> set[int]:
    return {parsed.generation for parsed in listed(names.namespace) if parsed.generation}


def _attach(names: Names, generation: int) -> Lease:
    lease = Lease.acquire(names)
    now = monotonic_ns()
    lease.write(SlotRecord(Owner.current(), "attached", "cpu", generation, now, now))
    return lease


@contextmanager
def attached(names: Names, generation: int) -> Iterator[Lease]:
    lease = _attach(names, generation)
    try:
        yield lease
    finally:
        lease.release()


# --- reclaiming --------------------------------------------------------------------------------------------------


def test_what_nobody_holds_is_removed(names: Names, old: OldGenerations) -> None:
    _publish(names, 1, 2, 3)
    old.reclaim(current=3)
    assert _present(names) == {3}
    assert inode_of(names.slots) is not None and inode_of(names.lock) is not None


def test_before_the_first_publication_everything_is_old(names: Names, old: OldGenerations) -> None:
    _publish(names, 1, 2)
    old.reclaim()
    assert _present(names) == set()


def test_a_generation_stays_until_its_last_follower_leaves(names: Names, old: OldGenerations) -> None:
    _publish(names, 1, 2, 3)
    with attached(names, 1):
        with attached(names, 1), attached(names, 3):
            old.reclaim(current=3)
            assert _present(names) == {1, 3}
        old.reclaim(current=3)
        assert _present(names) == {1, 3}
    old.reclaim(current=3)
    assert _present(names) == {3}


def test_a_killed_follower_keeps_nothing(names: Names, old: OldGenerations, standing: Standing) -> None:
    _publish(names, 1, 2)
    kept = []
    pid = standing(lambda: kept.append(_attach(names, 1)))
    old.reclaim(current=2)
    assert _present(names) == {1, 2}
    kill(pid)
    old.reclaim(current=2)
    assert _present(names) == {2}


def test_while_some_holder_is_unknown_nothing_is_removed_that_it_may_hold(names: Names, old: OldGenerations) -> None:
    """A generation without a manifest was never published; the current one stays whatever somebody removed of it."""
    _publish(names, 1, 2, 3)
    Segment.create(names.weights(4, 0), 0, Access()).close()
    silent = Lease.acquire(names)
    path_of(names.manifest(3)).unlink()
    old.reclaim(current=3)
    assert _present(names) == {1, 2, 3}
    silent.release()
    old.reclaim(current=3)
    assert _present(names) == {3}


def test_a_follower_that_claims_a_generation_of_its_own_keeps_no_other(names: Names, old: OldGenerations) -> None:
    _publish(names, 1, 2)
    with attached(names, 2**63):
        old.reclaim(current=2)
        assert _present(names) == {2}


def test_what_somebody_else_made_of_the_names_is_no_reason_to_end(
    names: Names, old: OldGenerations, in_child: InChild
) -> None:
    """SH-06: any user may make any name in /dev/shm that is not there, such as that of slots that were removed."""
    _publish(names, 2)

    def plant() -> None:
        for name in (names.weights(99, 0), names.weights(MAX_GENERATION, 0)):
            path_of(name).touch()

    in_child(plant, uid=NOBODY)
    path_of(names.weights(5, 0)).mkdir()
    path_of(names.slots).unlink()
    path_of(names.slots).symlink_to("nowhere")
    try:
        old.reclaim(current=2)
    finally:
        path_of(names.weights(5, 0)).rmdir()
    assert _present(names) == {2, 99, MAX_GENERATION}


def test_who_lost_the_name_of_its_lock_removes_nothing(names: Names, old: OldGenerations) -> None:
    """Another creator may live under that name by now."""
    _publish(names, 1, 2)
    path_of(names.lock).unlink()
    old.reclaim(current=2)
    assert _present(names) == {1, 2}


def test_generations_of_a_namespace_of_a_longer_name_are_not_ours(names: Names, old: OldGenerations) -> None:
    other = Names(names.namespace + ".g1")
    _publish(names, 1)
    _publish(other, 1)
    old.reclaim()
    assert (_present(names), _present(other)) == (set(), {1})


def test_what_is_kept_is_said_once(names: Names, old: OldGenerations, caplog: pytest.LogCaptureFixture) -> None:
    _publish(names, 1, 2, 3, pages=2)
    with caplog.at_level(logging.INFO, "ftd"), attached(names, 2):
        for _ in range(3):
            old.reclaim(current=3)
        assert [record.message for record in caplog.records] == [
            "removed 2 segments of earlier generations, 16.00 KiB",
            "generation 2 is kept: followers still hold it",
        ]
        caplog.clear()
    with caplog.at_level(logging.INFO, "ftd"):
        old.reclaim(current=3)
        assert [record.message for record in caplog.records] == ["removed 2 segments of earlier generations, 16.00 KiB"]


# --- numbers -----------------------------------------------------------------------------------------------------


def test_a_new_generation_is_above_all_that_were_seen(names: Names) -> None:
    assert next_generation(names, last=0) == 1
    assert next_generation(names, last=7) == 8
    _publish(names, 9)
    assert next_generation(names, last=7) == 10
    assert next_generation(names, last=20) == 21


def test_a_number_of_others_is_passed_over_and_does_not_count(names: Names, life: LifeLock, in_child: InChild) -> None:
    _publish(names, 1)

    def plant() -> None:
        for generation in (2, 3, 99, MAX_GENERATION):
            path_of(names.weights(generation, 0)).touch()

    in_child(plant, uid=NOBODY)
    assert next_generation(names, last=0) == 4
    assert next_generation(names, last=98) == 100


def test_a_number_that_none_can_follow_does_not_count(names: Names, life: LifeLock) -> None:
    """Its successor could not be parsed, and its segments would stay for ever."""
    _publish(names, 3, MAX_GENERATION)
    assert next_generation(names, last=0) == 4
    assert next_generation(names, last=2**64 - 1) == 4
    assert next_generation(names, last=MAX_GENERATION - 1) == MAX_GENERATION + 1
    with pytest.raises(SegmentError):
        names.weights(MAX_GENERATION + 1, 0)


# --- who holds memory --------------------------------------------------------------------------------------------


def _map(name: str, how: str) -> mmap.mmap:
    with Segment.open(name) as segment:  # type: ignore[union-attr]
        return segment.map_shared() if how == "shared" else segment.map_private()


def test_every_segment_that_a_process_maps_counts_once(names: Names, standing: Standing) -> None:
    """Shared and private mappings of one segment are the same pages; two segments are not."""
    for index, pages in ((0, 2), (1, 3)):
        with Segment.create(names.weights(1, index), 0, Access()) as segment:
            segment.write(bytes(pages * PAGE_BYTES))
    kept: list[mmap.mmap] = []

    def both() -> None:
        kept.extend(_map(names.weights(1, index), how) for index in (0, 1) for how in ("shared", "private"))

    def one() -> None:
        kept.append(_map(names.weights(1, 1), "shared"))

    first, second, idle = standing(both), standing(one), standing(lambda: None)
    assert mapped_by_pid(names) == {first: 5 * PAGE_BYTES, second: 3 * PAGE_BYTES}
    assert idle not in mapped_by_pid(names)
    kill(second)
    assert mapped_by_pid(names) == {first: 5 * PAGE_BYTES}


def test_a_mapping_in_pieces_counts_once(names: Names, standing: Standing) -> None:
    """The kernel splits a mapping where a part of it is advised or locked."""
    _publish(names, 1, pages=8)
    kept: list[mmap.mmap] = []

    def split() -> None:
        kept.append(_map(names.weights(1, 0), "private"))
        kept[0].madvise(mmap.MADV_DONTFORK, 2 * PAGE_BYTES, 2 * PAGE_BYTES)

    pid = standing(split)
    assert mapped_by_pid(names) == {pid: 8 * PAGE_BYTES}


def test_memory_whose_name_is_gone_is_still_found(names: Names, standing: Standing) -> None:
    _publish(names, 1)
    kept: list[mmap.mmap] = []
    pid = standing(lambda: kept.append(_map(names.weights(1, 0), "shared")))
    path_of(names.weights(1, 0)).unlink()
    assert mapped_by_pid(names) == {pid: PAGE_BYTES}


@pytest.mark.parametrize("tail", [".gpu", ".g1", "x", "_b"])
def test_memory_of_a_namespace_of_a_longer_name_is_not_ours(names: Names, standing: Standing, tail: str) -> None:
    other = Names(names.namespace + tail)
    _publish(other, 1)
    kept: list[mmap.mmap] = []
    pid = standing(lambda: kept.append(_map(other.weights(1, 0), "shared")))
    assert mapped_by_pid(names) == {}
    assert mapped_by_pid(other) == {pid: PAGE_BYTES}


def test_the_creators_own_mapping_is_not_listed(names: Names) -> None:
    _publish(names, 1)
    view = _map(names.weights(1, 0), "shared")
    assert os.getpid() not in mapped_by_pid(names)
    view.close()


def test_holders_are_described_for_the_message(names: Names, old: OldGenerations, standing: Standing) -> None:
    assert old.describe_holders() == ""
    _publish(names, 1, pages=2)
    kept: list[mmap.mmap] = []
    pid = standing(lambda: kept.append(_map(names.weights(1, 0), "shared")))
    expected = f"; held by followers of earlier generations: {process_name(pid)} {pid} (8.00 KiB)"
    assert old.describe_holders() == expected


def test_holders_whose_mappings_do_not_show_are_named_by_their_leases(
    names: Names, old: OldGenerations, standing: Standing
) -> None:
    """The daemon's user may not read /proc/<pid>/maps of workers of other users."""
    _publish(names, 1)
    kept: list[Any] = []

    def both() -> None:
        kept.extend([_map(names.weights(1, 0), "shared"), _attach(names, 1)])

    shown, hidden = standing(both), standing(lambda: kept.append(_attach(names, 1)))
    silent = Lease.acquire(names)
    assert old.describe_holders() == (
        f"; held by followers of earlier generations: {process_name(shown)} {shown} (4.00 KiB), pid {hidden}"
    )
    silent.release()
