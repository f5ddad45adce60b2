"""The life lock of a namespace: at most one creator, whatever runtime directory or container it was started from.

Its holder alone judges staleness, unlinks and reclaims.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable, Set
from pathlib import Path

from ftd.errors import AccessError, AlreadyRunningError, SegmentError
from ftd.shm.coord import observe
from ftd.shm.lock import LockFile, exclusive_holder
from ftd.shm.names import Names, present
from ftd.shm.segment import Segment, inode_of, open_or_create, unlink
from ftd.shm.state import State

log = logging.getLogger("ftd")


class LifeLock:
    """Held from `acquire` to `close`, or to the death of the process."""

    def __init__(self, names: Names, lock: LockFile) -> None:
        self.names = names
        self._lock = lock
        self._refused: set[str] = set()

    @staticmethod
    def acquire(names: Names, *, any_owner: bool = False) -> LifeLock:
        """The lock of the namespace, whose segment is made where it does not exist.

        Args:
            any_owner: takes the segment of another user as it is, which only root can: to sweep, not to stay.

        Raises:
            AlreadyRunningError: another process holds it, or lives although the lock's name was taken from it.
            AccessError: the segment belongs to another user.
        """
        while True:
            lock = LockFile(_open(names))
            try:
                if not lock.try_exclusive():
                    raise already_running(names)
                life = LifeLock(names, lock)
                # an ending creator removes the name before it lets go: then this is a lock on nothing
                if life.is_named():
                    life._refuse_beside_another()
                    if any_owner or os.fstat(lock.fileno()).st_uid == os.geteuid():
                        return life
                    life.remove_lock()  # its owner could take the name away from a living creator: make one of our own
            except BaseException:
                lock.close()
                raise
            lock.close()

    def _refuse_beside_another(self) -> None:
        """The name of a living creator's lock may have been removed: its block is locked then, and it stays alone."""
        if observe(self.names).locked:
            self._remove(self.names.lock)
            raise already_running(self.names)

    def is_named(self) -> bool:
        """Whether the name of the lock still leads to this one; where it does not, nothing may be judged or removed."""
        return inode_of(self.names.lock) == os.fstat(self._lock.fileno()).st_ino

    def sweep(self, keep: Set[int] | None) -> tuple[list[str], int]:
        """Removes the names of every generation but those to keep (None: every one that was published).

        What others put there is left alone, and a name that cannot be removed is a warning.

        Returns:
            the names removed, and the bytes of pages they held.
        """
        there = present(self.names)
        kept = there.published if keep is None else keep
        return self._remove_all(
            name.name for name in there.ours if name.generation is not None and name.generation not in kept
        )

    def sweep_all(self) -> tuple[list[str], int]:
        """Removes every name of the namespace, the lock's last. Mappings of followers live on."""
        # generations first: who may remove them follows from the others
        names = sorted(present(self.names).ours, key=lambda name: name.generation is None)
        done = self._remove_all(name.name for name in names if name.name != self.names.lock)
        self.remove_lock()
        return done

    def _remove_all(self, names: Iterable[str]) -> tuple[list[str], int]:
        freed = {name: held for name in names if (held := self._remove(name)) is not None}
        return list(freed), sum(freed.values())

    def _remove(self, name: str) -> int | None:
        """Bytes that it held; None where it cannot be removed, which is said once and must not end a daemon."""
        try:
            return unlink(name)
        except (AccessError, SegmentError) as error:
            if name not in self._refused:
                self._refused.add(name)
                log.warning("%s", error.message)
            return None

    def remove_lock(self) -> None:
        """Removes the name of the lock, which is the last that may go; the lock itself stands until `close`.

        Raises:
            AccessError: it belongs to another user.
        """
        unlink(self.names.lock)

    def close(self) -> None:
        self._lock.close()

    def __enter__(self) -> LifeLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _open(names: Names) -> int:
    try:
        # 0600: whoever may open a file may also lock it
        return open_or_create(names.lock, 0o600)
    except AccessError as error:
        if inode_of(names.lock) is None:
            raise
        with contextlib.suppress(AccessError):
            if observe(names).locked:
                raise already_running(names) from None
        raise AccessError(
            error.message, "choose another namespace, or let that user stop the daemon and remove what it left"
        ) from None


def is_held(names: Names) -> bool:
    """Whether some process holds the life lock: a creator, also one that has no coordination block yet or any more.

    Asks without taking it, so it never makes a concurrent start fail.

    Raises:
        AccessError: it belongs to another user.
    """
    segment = Segment.open(names.lock)
    if segment is None:
        return False
    with segment:
        return exclusive_holder(segment.fileno()) is not None


def already_running(names: Names) -> AlreadyRunningError:
    """Who holds the namespace, as far as it tells."""
    seen = observe(names)
    if seen.record is None:
        return AlreadyRunningError(
            f"namespace {names.namespace!r} is already being started by another process",
            f"ftd status --namespace {names.namespace}",
        )
    owner = seen.record.owner
    where = f"pid {owner.pid}, socket {Path(seen.record.socket)}"
    if seen.state is State.HUNG:
        return AlreadyRunningError(
            f"namespace {names.namespace!r} is held by a daemon that is hung ({where}): its heartbeat is"
            f" {seen.heartbeat_age_s:.1f} s old",
            f"ftd start --namespace {names.namespace} --replace, which kills it first",
        )
    return AlreadyRunningError(
        f"namespace {names.namespace!r} is already running ({where}, {seen.state})",
        f"ftd status --namespace {names.namespace}, or ftd stop --namespace {names.namespace} first",
    )
