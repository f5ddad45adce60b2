import logging
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from ftd.clock import NS, monotonic_ns
from ftd.errors import AccessError, AlreadyRunningError
from ftd.shm import life as module
from ftd.shm import slots
from ftd.shm.coord import CoordRecord, CoordWriter
from ftd.shm.life import LifeLock, is_held
from ftd.shm.names import Names, listed
from ftd.shm.segment import PAGE_BYTES, Access, Segment, inode_of, open_or_create, path_of
from tests.conftest import NOBODY, kill

InChild = Callable[..., Any]
Standing = Callable[[Callable[[], Any]], int]


@pytest.fixture
def life(names: Names) -> Iterator[LifeLock]:
    """The namespace's lock, which takes everything of the namespace with it."""
    with LifeLock.acquire(names) as life:
        yield life
        life.sweep_all()


def _publish(names: Names, generation: int, pages: int = 1) -> list[str]:
    """A generation as a creator leaves it: weights, manifest, files."""
    made = [
        names.weights(generation, 0),
        names.weights(generation, 1),
        names.manifest(generation),
        names.files(generation),
    ]
    for name in made:
        with Segment.create(name, 0, Access()) as segment:
            segment.write(bytes(pages * PAGE_BYTES))
    return made


def _present(names: Names) -> list[str]:
    return [parsed.name for parsed in listed(names.namespace)]


# --- the lock ----------------------------------------------------------------------------------------------------


def test_there_is_at_most_one_creator(names: Names, life: LifeLock, in_child: InChild) -> None:
    for refused in (lambda: LifeLock.acquire(names), lambda: in_child(lambda: LifeLock.acquire(names))):
        with pytest.raises(AlreadyRunningError, match="is already being started by another process"):
            refused()
    assert is_held(names)
    assert life.is_named()


def test_the_lock_is_its_owners_alone(names: Names, life: LifeLock, in_child: InChild) -> None:
    """Whoever may open a file may also lock it."""
    facts = path_of(names.lock).stat()
    assert (stat.S_IMODE(facts.st_mode), facts.st_uid) == (0o600, os.geteuid())
    for denied in (lambda: LifeLock.acquire(names), lambda: is_held(names)):
        with pytest.raises(AccessError, match=r"lock may not be opened by .*: it belongs to .* mode 0600"):
            in_child(denied, uid=NOBODY)


def test_the_next_one_gets_it(names: Names) -> None:
    LifeLock.acquire(names).close()
    assert not is_held(names)
    with LifeLock.acquire(names) as life:
        life.remove_lock()


def test_a_killed_creator_gives_it_back(names: Names, standing: Standing) -> None:
    kept = []
    pid = standing(lambda: kept.append(LifeLock.acquire(names)))
    assert is_held(names)
    kill(pid)
    assert not is_held(names)
    with LifeLock.acquire(names) as life:
        life.sweep_all()


def test_a_forked_child_cannot_give_it_away(names: Names, life: LifeLock, in_child: InChild) -> None:
    in_child(life.close)
    assert is_held(names)


def test_a_namespace_without_a_lock_is_held_by_nobody(names: Names) -> None:
    assert not is_held(names)
    assert inode_of(names.lock) is None


@pytest.mark.parametrize("then", ["gone", "made anew"])
def test_a_lock_on_a_file_that_lost_its_name_is_tried_again(
    names: Names, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    """An ending creator removes the name before it lets go, and the next may have made it anew."""
    opened: list[int] = []

    def too_late(name: str, mode: int) -> int:
        fd = open_or_create(name, mode)
        opened.append(os.fstat(fd).st_ino)
        if len(opened) == 1:
            path_of(name).unlink()
            if then == "made anew":
                os.close(open_or_create(name, mode))
        return fd

    monkeypatch.setattr(module, "open_or_create", too_late)
    with LifeLock.acquire(names) as life:
        assert len(opened) == 2
        assert opened[1] == inode_of(names.lock) != opened[0]
        life.remove_lock()


def test_a_creator_whose_lock_lost_its_name_stays_alone(names: Names, life: LifeLock, first: CoordRecord) -> None:
    coord = CoordWriter(names, Access(), first)
    path_of(names.lock).unlink()
    assert not life.is_named()
    with pytest.raises(AlreadyRunningError, match=f"pid {first.owner.pid}"):
        LifeLock.acquire(names)
    assert inode_of(names.lock) is None
    assert coord.still_named()
    coord.close()
    with LifeLock.acquire(names) as other:  # now that it is gone, the namespace is free
        assert not life.is_named()
        other.sweep_all()


# --- who holds it ------------------------------------------------------------------------------------------------


def test_the_refusal_says_who_runs(names: Names, life: LifeLock, first: CoordRecord) -> None:
    coord = CoordWriter(names, Access(), first)
    with pytest.raises(AlreadyRunningError) as raised:
        LifeLock.acquire(names)
    assert raised.value.message == (
        f"namespace {names.namespace!r} is already running (pid {os.getpid()}, socket /run/ftd/a.sock, loading)"
    )
    assert f"ftd stop --namespace {names.namespace}" in raised.value.remedy
    assert raised.value.exit_status == 5
    coord.close()


def test_the_refusal_says_that_it_hangs(names: Names, life: LifeLock, first: CoordRecord) -> None:
    coord = CoordWriter(names, Access(), replace(first, heartbeat_ns=monotonic_ns() - 300 * NS))
    with pytest.raises(
        AlreadyRunningError, match=r"held by a daemon that is hung \(pid .*: its heartbeat is 30\d\.\d s old"
    ):
        LifeLock.acquire(names)
    coord.close()


# --- sweeping ----------------------------------------------------------------------------------------------------


def test_a_sweep_removes_every_generation_but_those_to_keep(names: Names, life: LifeLock) -> None:
    made = {generation: _publish(names, generation, pages=generation) for generation in (1, 2, 3)}
    slots.prepare(names, Access())
    removed, freed = life.sweep(keep={2, 99})
    assert sorted(removed) == sorted(made[1] + made[3])
    assert freed == 4 * (1 + 3) * PAGE_BYTES
    assert _present(names) == sorted([*made[2], names.lock, names.slots])
    assert life.sweep(keep={2}) == ([], 0)


def test_when_nobody_knows_what_is_used_everything_that_was_published_is_kept(names: Names, life: LifeLock) -> None:
    """A load that was killed left no manifest: nobody can hold it, whoever holds the leases."""
    kept = _publish(names, 1)
    partial = names.weights(2, 0)
    with Segment.create(partial, 0, Access()) as segment:
        segment.write(bytes(PAGE_BYTES))
    assert life.sweep(keep=None) == ([partial], PAGE_BYTES)
    assert _present(names) == sorted([*kept, names.lock])


def test_sweeping_all_leaves_nothing(names: Names, life: LifeLock, first: CoordRecord) -> None:
    made = _publish(names, 1)
    slots.prepare(names, Access())
    CoordWriter(names, Access(), first).close()
    removed, freed = life.sweep_all()
    assert sorted(removed) == sorted([*made, names.coord, names.slots])
    assert freed == 4 * PAGE_BYTES + 4096 + slots.SLOTS_BYTES
    assert _present(names) == []
    assert not is_held(names)
    assert life.sweep_all() == ([], 0)


def test_what_followers_map_lives_on(names: Names, life: LifeLock) -> None:
    _publish(names, 1)
    with Segment.open(names.weights(1, 0), writable=True) as segment:  # type: ignore[union-attr]
        view = segment.map_shared(writable=True)
    view[0] = 7
    life.sweep_all()
    assert view[0] == 7


@pytest.mark.leaves_segments
@pytest.mark.parametrize("tail", [".b", "_b", "-b", "b", ".g1", ".lock", ".coord", ".g1.0", "."])
def test_a_sweep_never_touches_a_namespace_of_a_longer_name(names: Names, life: LifeLock, tail: str) -> None:
    """SH-10."""
    other = Names(names.namespace + tail)
    with LifeLock.acquire(other):
        _publish(names, 1)
        made = _publish(other, 1)
        slots.prepare(other, Access())
        kept = {name: inode_of(name) for name in [*made, other.slots, other.lock]}
        life.sweep_all()
        assert {name: inode_of(name) for name in kept} == kept
        assert is_held(other)


def test_a_left_over_without_bytes_is_removed_too(names: Names, life: LifeLock) -> None:
    """SH-05: somebody died between making a segment and sizing it."""
    for name in (names.coord, names.slots, names.weights(1, 0), names.manifest(1)):
        Segment.create(name, 0, Access()).close()
    assert life.sweep_all() == ([names.weights(1, 0), names.manifest(1), names.coord, names.slots], 0)


# --- other users -------------------------------------------------------------------------------------------------

STRANGER = 4711


def _touch(name: str, uid: int, mode: int = 0o666) -> None:
    path_of(name).touch()
    path_of(name).chmod(mode)
    os.chown(path_of(name), uid, -1)


@pytest.fixture
def of_nobody(names: Names, in_child: InChild, first: CoordRecord) -> Names:
    """A namespace whose daemon, of another user, was killed."""

    def leave() -> None:
        LifeLock.acquire(names).close()
        slots.prepare(names, Access())
        CoordWriter(names, Access(), first).close()
        _publish(names, 1)

    in_child(leave, uid=NOBODY)
    return names


@pytest.mark.leaves_segments
def test_what_others_put_there_is_left_alone(of_nobody: Names, in_child: InChild) -> None:
    """SH-06: any user may make any name in /dev/shm, which must not end the daemon of another."""
    names = of_nobody
    planted = [names.weights(99, 0), names.weights(1, 7)]
    for name in planted:
        _touch(name, STRANGER)

    def sweep() -> Any:
        with LifeLock.acquire(names) as life:
            return life.sweep(keep=set()), life.sweep_all()

    (generations, _), (rest, _) = in_child(sweep, uid=NOBODY)
    assert len(generations) == 4 and sorted(rest) == [names.coord, names.slots]
    assert _present(names) == sorted(planted)


def test_root_sweeps_for_a_user(of_nobody: Names) -> None:
    names = of_nobody
    with LifeLock.acquire(names, any_owner=True) as life:
        assert path_of(names.lock).stat().st_uid == NOBODY
        removed, _ = life.sweep_all()
    assert len(removed) == 6
    assert _present(names) == []


@pytest.mark.leaves_segments
def test_a_name_that_cannot_be_removed_is_a_warning(of_nobody: Names, in_child: InChild) -> None:
    """Root was the creator once, and its segments are the namespace's; only root may remove them."""
    names = of_nobody
    _touch(names.weights(7, 0), 0)

    def sweep() -> list[str]:
        said: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("ftd").addHandler(handler)
        with LifeLock.acquire(names) as life:
            for _ in range(3):
                life.sweep(keep={1})
        return said

    (warning,) = in_child(sweep, uid=NOBODY)
    assert f"{names.weights(7, 0)} may not be removed by" in warning
    assert inode_of(names.weights(7, 0)) is not None


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: gives files to others")
def test_a_creator_never_stays_on_a_lock_of_another(names: Names, in_child: InChild) -> None:
    """Its owner could take the name away at any time, or lock it when the creator ends."""
    _touch(names.lock, STRANGER)
    before = inode_of(names.lock)
    with pytest.raises(AccessError, match="lock may not be removed by"):
        in_child(lambda: LifeLock.acquire(names), uid=NOBODY)
    assert inode_of(names.lock) == before
    open_files = os.listdir("/proc/self/fd")
    with LifeLock.acquire(names) as life:
        facts = path_of(names.lock).stat()
        assert (facts.st_uid, stat.S_IMODE(facts.st_mode)) == (os.geteuid(), 0o600)
        assert inode_of(names.lock) != before
        life.remove_lock()
    assert os.listdir("/proc/self/fd") == open_files
