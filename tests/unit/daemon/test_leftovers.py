import os
from collections.abc import Callable
from typing import Any

import pytest

from ftd.clock import monotonic_ns
from ftd.daemon.leftovers import of_others, of_the_dead
from ftd.owner import Owner, user_name
from ftd.shm import slots
from ftd.shm.life import LifeLock
from ftd.shm.names import Names
from ftd.shm.segment import PAGE_BYTES, Access, Segment, path_of
from ftd.shm.slots import Lease, SlotRecord, holders
from tests.conftest import NOBODY

pytestmark = pytest.mark.leaves_segments

InChild = Callable[..., Any]


@pytest.fixture
def dead(names: Names) -> Names:
    """A namespace whose daemon was killed while it replaced generation 1, which it had published."""
    LifeLock.acquire(names).close()
    slots.prepare(names, Access())
    for name in (names.weights(1, 0), names.manifest(1), names.weights(2, 0)):
        with Segment.create(name, 0, Access()) as segment:
            segment.write(bytes(PAGE_BYTES))
    return names


def _attach(names: Names, generation: int) -> Lease:
    lease = Lease.acquire(names)
    now = monotonic_ns()
    lease.write(SlotRecord(Owner.current(), "attached", "cpu", generation, now, now))
    return lease


def test_nothing_left_is_nothing_said(names: Names) -> None:
    assert of_the_dead(names, None, []) == of_others(names) == []


def test_what_nobody_holds_is_reclaimed(dead: Names) -> None:
    (text,) = of_the_dead(dead, None, holders(dead))
    assert text.startswith(f"left: {dead.weights(1, 0)}, {dead.manifest(1)}, {dead.weights(2, 0)}, ")
    assert text.endswith(
        f"; the next start reclaims them, ftd stop --namespace {dead.namespace} --force removes them all"
    )


def test_what_followers_hold_is_kept_until_they_leave(dead: Names) -> None:
    leases = [_attach(dead, 1), _attach(dead, 1), _attach(dead, 77)]
    (text,) = of_the_dead(dead, None, holders(dead))
    assert f"generation 1 is kept until its followers (pid {os.getpid()}) are gone, the next start" in text
    for lease in leases:
        lease.release()


def test_what_somebody_unknown_holds_may_be_all_that_was_published(dead: Names) -> None:
    lease = Lease.acquire(dead)
    (text,) = of_the_dead(dead, None, holders(dead))
    assert "generation 1 is kept until its followers (unknown) are gone" in text
    lease.release()


def test_files_of_others_are_named_with_their_owners(dead: Names, in_child: InChild) -> None:
    def plant() -> None:
        for generation in range(101, 108):
            path_of(dead.weights(generation, 0)).touch()

    in_child(plant, uid=NOBODY)
    (text,) = of_others(dead)
    assert text.startswith("not of this namespace, though named like it: ")
    assert text.endswith(" and 2 more; left alone, remove them by hand")
    assert text.count(f" of {user_name(NOBODY)}") == 5
    assert "g101" not in of_the_dead(dead, None, [])[0]
