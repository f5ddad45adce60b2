"""The segment `slots`: one slot a follower, written by followers and never trusted by anybody else.

    0      8 bytes magic "ftdslots" · u16 major · u16 minor · u32 segment bytes, little-endian
    4096   slot i at 4096 + i * 512: a double record (`record.py`), two copies of 256 bytes; payload: a msgpack array

The lease of slot *i* is an exclusive lock on byte *i* of the segment. Of the bytes behind the leases the first is held
by the follower whose turn comes next, the second by the one whose turn it is (`Turns`). A slot's record only says who
holds the lease and how far it is: a record without the lock is a dead follower's, a lock without a readable record is
somebody unknown, who counts as alive and as using every generation.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from operator import attrgetter

from ftd.clock import Deadline, monotonic_ns
from ftd.errors import AccessError, FtdError, NoLeaseError, SegmentError
from ftd.owner import Owner
from ftd.packing import pack, unpack
from ftd.shm.header import HEADER_BYTES, check_header, encode_header
from ftd.shm.lock import LockFile, exclusive_bytes, unforked
from ftd.shm.names import Names
from ftd.shm.record import DoubleRecord
from ftd.shm.segment import Access, Segment, unlink

MAGIC = b"ftdslots"
SLOT_COUNT = 2048
_SLOTS_AT = 4096
_SLOT_BYTES = 512
SLOTS_BYTES = _SLOTS_AT + SLOT_COUNT * _SLOT_BYTES
#: Bytes that are locked for turns. Two, since whoever has just had a turn would else be the first to take the next one:
#: a lock wakes nobody who polls for it.
_NEXT, _TURN = SLOT_COUNT, SLOT_COUNT + 1
_POLL_S = 0.001
#: Of a slot's array: the owner's fields, then those of `SlotRecord` in their order.
_SLOT_TYPES: tuple[type, ...] = (bytes, int, int, int, int, str, str, int, int, int, int, int, int, int, str)


@dataclass(frozen=True, slots=True)
class SlotRecord:
    """What a follower says about itself. Times are nanoseconds of the monotonic clock, sizes bytes.

    Attributes:
        state: `attached`, or `busy` while it loads.
        device: where its weights go, as torch writes it; `"cpu"` until it loads.
        pin: `cuda`, `staged` or `none`.
    """

    owner: Owner
    state: str
    device: str
    generation: int
    attached_ns: int
    heartbeat_ns: int
    planned_bytes: int = 0
    resident_bytes: int = 0
    streamed_bytes: int = 0
    pinned_bytes: int = 0
    pin: str = "none"


_rest_of = attrgetter(*(f.name for f in fields(SlotRecord)[1:]))


def encode_slot(record: SlotRecord) -> bytes:
    owner = record.owner
    return pack([owner.boot_id, owner.pid_namespace, owner.pid, owner.start_ticks, owner.uid, *_rest_of(record)])


def decode_slot(payload: bytes) -> SlotRecord | None:
    """The record, or None where the bytes are none: nobody answers for a follower's slot but the follower."""
    try:
        values = unpack(payload)
    except ValueError:
        return None
    if type(values) is not list or len(values) < len(_SLOT_TYPES):
        return None
    values = values[: len(_SLOT_TYPES)]  # a newer minor version writes more
    if not all(map(_is_good, values, _SLOT_TYPES)):
        return None
    return SlotRecord(Owner(*values[:5]), *values[5:])


def _is_good(value: object, kind: type) -> bool:
    """Of exactly this type (a boolean is no number), no negative number, no text that moves a terminal's cursor."""
    if type(value) is not kind:
        return False
    if isinstance(value, int):
        return value >= 0
    return not isinstance(value, str) or (value.isascii() and value.isprintable())


def prepare(names: Names, access: Access) -> None:
    """Makes the namespace's slots, or keeps those that followers of earlier generations hold.

    Only for the holder of the life lock. Damaged slots are replaced: leases on them are lost from sight, and their
    holders keep their mappings.
    """
    held = Segment.open(names.slots, writable=True)
    if held is not None:
        with held:
            if _is_whole(held):
                held.give(Access(access.open_mode, access.gid))
                return
        unlink(names.slots)
    with Segment.create(names.slots, 0, Access(access.open_mode, access.gid)) as segment:
        try:
            # written, not truncated to size: a published segment has no hole
            segment.write(bytes(SLOTS_BYTES - _SLOTS_AT), _SLOTS_AT)
            segment.write(encode_header(MAGIC, SLOTS_BYTES).ljust(_SLOTS_AT, b"\0"))
        except BaseException:
            segment.unlink()
            raise


def _is_whole(segment: Segment) -> bool:
    try:
        check_header(os.pread(segment.fileno(), HEADER_BYTES, 0), MAGIC, SLOTS_BYTES, segment.name)
    except FtdError:
        return False
    return segment.size == SLOTS_BYTES


class Lease:
    """The right to use a generation: a byte of `slots`, held until `release` or the death of the process.

    Not inherited: in a forked child the lease is gone (`held` is False) and the parent's stands.
    """

    def __init__(self, lock: LockFile, index: int, record_file: Segment) -> None:
        self.index = index
        self._lock = lock
        self._file = record_file
        self._double = DoubleRecord(record_file.fileno(), _SLOTS_AT + index * _SLOT_BYTES, _SLOT_BYTES // 2)
        self._pid = os.getpid()
        # a killed holder's words must not pass for this one's, nor what it wrote decide what can be written
        self._double.clear()

    @staticmethod
    def acquire(names: Names) -> Lease:
        """A free slot of the namespace, any one of them.

        Raises:
            NoLeaseError: all are taken.
            SegmentError: the namespace has no slots, or they are damaged.
            AccessError: they may not be written.
        """
        with unforked:
            locked = Segment.open(names.slots, writable=True)
            if locked is None:
                raise SegmentError(
                    f"{names.slots} is missing: expected the leases of the namespace", "restart the daemon"
                )
            inode = locked.inode
            lock = LockFile(locked.detach())
        try:
            check_header(os.pread(lock.fileno(), HEADER_BYTES, 0), MAGIC, SLOTS_BYTES, names.slots)
            index = next((i for i in _any_order() if lock.try_exclusive(i, 1)), None)
            if index is None:
                raise NoLeaseError(
                    f"{names.namespace}: all {SLOT_COUNT} leases are taken", "end some followers of this namespace"
                )
            records = Segment.open(names.slots, writable=True)
            if records is None or records.inode != inode:
                if records is not None:
                    records.close()
                raise SegmentError(f"{names.slots} was replaced during attach", "attach again")
            return Lease(lock, index, records)
        except BaseException:
            lock.close()
            raise

    @property
    def held(self) -> bool:
        return not self._lock.closed and self._pid == os.getpid()

    def write(self, record: SlotRecord) -> None:
        """Says who holds the slot and how far it is."""
        if self.held:
            self._double.write(encode_slot(record))

    def release(self) -> None:
        """Gives the slot back."""
        if self.held:
            self._double.write(b"")  # so that the next holder is never taken for this one
        self._lock.close()
        self._file.close()


def _any_order() -> Iterator[int]:
    """All slots, each time in another order.

    Whoever begins at the first meets every lease that stands, and at each of them the kernel walks the locks of the
    file, one process at a time: 256 leases took 76 ms, and 1 in this way. An odd step comes to each of 2^11
    slots once; it is by chance as well since others may hold a row of them.
    """
    start, step = struct.unpack("HH", os.urandom(4))  # not by `random`: its state is the user's
    return ((start + i * (step | 1)) % SLOT_COUNT for i in range(SLOT_COUNT))


class Turns:
    """Turns among the followers of a namespace at what goes no faster side by side. For speed alone: whoever waits for
    too long goes on without. The kernel ends the turn of a process that dies; a forked child has none.

    Of one thread at a time. A context manager.
    """

    def __init__(self, lock: LockFile) -> None:
        self._lock = lock

    @staticmethod
    def of(names: Names) -> Turns | None:
        """None where the namespace has no slots that may be written."""
        try:
            with unforked:
                segment = Segment.open(names.slots, writable=True)
                return None if segment is None else Turns(LockFile(segment.detach()))
        except (AccessError, SegmentError):
            return None

    @contextmanager
    def turn(self, deadline: Deadline, cancelled: Callable[[], bool] = lambda: False) -> Iterator[bool]:
        """Waits for a turn, which ends with the context. Whether it is one: not after the deadline, nor once
        `cancelled`, which is asked every millisecond."""
        is_next = self._take(_NEXT, deadline, cancelled)
        try:
            is_ours = is_next and self._take(_TURN, deadline, cancelled)
        finally:
            if is_next:
                self._give(_NEXT)
        try:
            yield is_ours
        finally:
            if is_ours:
                self._give(_TURN)

    def close(self) -> None:
        self._lock.close()

    def _take(self, byte: int, deadline: Deadline, cancelled: Callable[[], bool]) -> bool:
        while not self._lock.closed:
            if self._lock.try_exclusive(byte, 1):
                return True
            if deadline.expired() or cancelled():
                break
            deadline.pause(_POLL_S)
        return False

    def _give(self, byte: int) -> None:
        if not self._lock.closed:
            self._lock.release(byte, 1)

    def __enter__(self) -> Turns:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class Holder:
    """A lease that is held now; `record` is None where its holder is unknown."""

    index: int
    record: SlotRecord | None

    def age_s(self) -> float | None:
        """Seconds since its heartbeat."""
        return None if self.record is None else max(0.0, (monotonic_ns() - self.record.heartbeat_ns) / 1e9)


def holders(names: Names) -> list[Holder]:
    """Every lease of the namespace that is held now; empty where it has no slots, or none that may be read: when their
    name was taken away, somebody else's file may have it, and tells nothing."""
    try:
        segment = Segment.open(names.slots)
    except (AccessError, SegmentError):
        return []
    if segment is None:
        return []
    with segment:
        return list(_holders(segment.fileno()))


def _holders(fd: int) -> Iterator[Holder]:
    for index in exclusive_bytes(fd, 0, SLOT_COUNT):
        payload = DoubleRecord(fd, _SLOTS_AT + index * _SLOT_BYTES, _SLOT_BYTES // 2).read()
        yield Holder(index, decode_slot(payload) if payload else None)


def generations_in_use(held: list[Holder]) -> set[int] | None:
    """Generations that followers hold; None when some holder is unknown, who may hold any."""
    if any(holder.record is None for holder in held):
        return None
    return {holder.record.generation for holder in held if holder.record}
