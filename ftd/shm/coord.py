"""The coordination block `coord`: what the creator says about itself, in 4 KiB that anybody may read.

    0    8 bytes magic "ftdcoord" · u16 major · u16 minor · u32 segment bytes, little-endian
    64   the double record (`record.py`), two copies of 2016 bytes; its payload is a msgpack map (`docs/format.md`)

The creator replaces the segment at every start: a stray shared lock on the old one cannot stand in its way, and a
follower of a dead creator sees that its inode is gone. A new one is locked while it is still empty, so whoever reads
a record finds it locked as long as its writer lives.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

from ftd._version import __version__
from ftd.clock import NS, monotonic_ns
from ftd.errors import FtdError, InternalError, SegmentError
from ftd.owner import Owner
from ftd.packing import pack, unpack_map
from ftd.shm.header import check_header, encode_header
from ftd.shm.lock import LockFile, exclusive_holder
from ftd.shm.names import Names
from ftd.shm.record import HEAD_BYTES, DoubleRecord, newest
from ftd.shm.segment import Access, Segment, inode_of, unlink
from ftd.shm.state import NEXT, State, judge

MAGIC = b"ftdcoord"
COORD_BYTES = 4096
_RECORD_AT = 64
_COPY_BYTES = (COORD_BYTES - _RECORD_AT) // 2
_MESSAGE_BYTES = 1000
_REMEDY_BYTES = 300
#: From making the block to its first record a creator needs microseconds: `lease_timeout_s` by default, which is
#: written there and so not known yet.
_WORDLESS_S = 30.0
_PLAIN: dict[object, type] = {"int": int, "str": str, "bytes": bytes}


@dataclass(frozen=True, slots=True)
class Progress:
    """Bytes of the weights that are in shared memory, of how many; times on the monotonic clock (0: not yet)."""

    bytes_done: int = 0
    bytes_total: int = 0
    started_ns: int = 0
    ended_ns: int = 0


@dataclass(frozen=True, slots=True)
class CoordRecord:
    """What a creator says. Times are nanoseconds of the monotonic clock.

    Attributes:
        state: what it wrote last; never `hung`.
        generation: the published one; 0 before the first.
        manifest_bytes, manifest_digest: of the published generation (BLAKE2b-128 of the whole manifest segment).
        failure: `FtdError.to_dict()` and `exit_status`, once `state` is `failed`.
    """

    owner: Owner
    state: State
    generation: int
    heartbeat_ns: int
    heartbeat_interval_ns: int
    hung_after_ns: int
    started_ns: int
    socket: str
    manifest_bytes: int = 0
    manifest_digest: bytes = b""
    progress: Progress = field(default_factory=Progress)
    failure: dict[str, Any] | None = None
    version: str = __version__


def encode_record(record: CoordRecord) -> bytes:
    """The record as msgpack. Texts that are too long are cut: a record always fits."""
    values = {f.name: getattr(record, f.name) for f in fields(record)}
    values["state"] = record.state.value
    values["socket"] = os.fsencode(record.socket)  # a path may hold bytes that are no UTF-8
    values["owner"] = _plain(record.owner)
    values["progress"] = _plain(record.progress)
    if record.failure is not None:
        values["failure"] = record.failure | {
            "message": _cut(record.failure["message"], _MESSAGE_BYTES),
            "remedy": _cut(record.failure["remedy"], _REMEDY_BYTES),
        }
    payload = pack(values)
    if len(payload) > _COPY_BYTES - HEAD_BYTES:
        raise InternalError(f"coordination record of {len(payload)} bytes: expected at most {_COPY_BYTES - HEAD_BYTES}")
    return payload


@functools.lru_cache(maxsize=8)
def decode_record(payload: bytes) -> CoordRecord:
    """The record that `encode_record` wrote; fields that a newer minor version added are left out. Remembered: whoever
    attaches looks several times between two heartbeats, and so do others of its process.

    Raises:
        SegmentError: the payload is no record.
    """
    try:
        values = unpack_map(payload)
        values["state"] = State(values["state"])
        values["socket"] = os.fsdecode(values["socket"])
        values["owner"] = Owner(**_known(Owner, values["owner"]))
        values["progress"] = Progress(**_known(Progress, values["progress"]))
        _check_failure(values.get("failure"))
        return CoordRecord(**_known(CoordRecord, values))
    except (ValueError, TypeError, KeyError) as error:
        raise SegmentError(f"coordination record cannot be read: {error}") from None


def _known(cls: type[CoordRecord | Owner | Progress], values: dict[str, Any]) -> dict[str, Any]:
    """The fields of the class among the values; a number is a plain one and not below zero.

    Whoever may write in /dev/shm may write a block: those who read it must not stumble over it.
    """
    known = {f.name: values[f.name] for f in fields(cls) if f.name in values}
    for f in fields(cls):
        value, kind = known.get(f.name), _PLAIN.get(f.type)
        if f.name in known and kind and (type(value) is not kind or (isinstance(value, int) and value < 0)):
            raise ValueError(f"{f.name} is {value!r:.40}")
    return known


def _check_failure(failure: Any) -> None:
    if failure is not None and not all(type(failure[key]) is str for key in ("code", "message", "remedy")):
        raise ValueError(f"failure is {failure!r:.40}")


def _plain(value: Owner | Progress) -> dict[str, Any]:
    return {f.name: getattr(value, f.name) for f in fields(value)}


def _cut(text: str, limit: int) -> str:
    data = text.encode("utf-8", "replace")  # Python shows odd bytes of file names as surrogates, which have no UTF-8
    return data.decode() if len(data) <= limit else data[: limit - 3].decode("utf-8", "ignore") + "…"


class CoordWriter:
    """The creator's own block: created, locked for life, rewritten by heartbeats and state changes.

    Thread-safe: the loader's thread reports progress while the loop beats.
    """

    def __init__(self, names: Names, access: Access, first: CoordRecord) -> None:
        unlink(names.coord)
        with contextlib.ExitStack() as undo:
            self._segment = Segment.create(names.coord, 0, access)
            undo.callback(self._segment.close)
            undo.callback(self._segment.unlink)
            self._lock = _lock_for_life(names.coord)
            undo.callback(self._lock.close)
            self._mutex = threading.Lock()
            self._record = first
            self._segment.write(bytes(COORD_BYTES - _RECORD_AT), _RECORD_AT)
            self._double = DoubleRecord(self._segment.fileno(), _RECORD_AT, _COPY_BYTES)
            self._double.write(encode_record(first))
            # the header last: a reader believes a block only when it stands
            self._segment.write(encode_header(MAGIC, COORD_BYTES).ljust(_RECORD_AT, b"\0"))
            undo.pop_all()

    @property
    def record(self) -> CoordRecord:
        return self._record

    def beat(self, progress: Progress | None = None) -> None:
        """Stamps the heartbeat, with how far loading is."""
        self._update(lambda r: replace(r, progress=progress or r.progress))

    def publish(self, generation: int, manifest_bytes: int, manifest_digest: bytes) -> None:
        """Makes a generation visible. The last write of a publication."""
        self._move(State.READY, generation=generation, manifest_bytes=manifest_bytes, manifest_digest=manifest_digest)

    def drain(self) -> None:
        """Refuses new leases from now on."""
        self._move(State.DRAINING)

    def fail(self, error: FtdError) -> None:
        """Tells everybody who waits why there will be no weights."""
        self._move(State.FAILED, failure=error.to_dict() | {"exit_status": error.exit_status})

    def stopped(self) -> None:
        self._move(State.STOPPED)

    def still_named(self) -> bool:
        return self._segment.is_named()

    def unlink(self) -> None:
        self._segment.unlink()

    def close(self) -> None:
        """Lets go of the lock: from now on everybody sees that this creator is gone."""
        self._lock.close()
        self._segment.close()

    def _move(self, state: State, **changes: Any) -> None:
        def moved(record: CoordRecord) -> CoordRecord:
            if state not in NEXT[record.state]:
                raise InternalError(f"a namespace that is {record.state} cannot become {state}")
            return replace(record, state=state, **changes)

        self._update(moved)

    def _update(self, change: Callable[[CoordRecord], CoordRecord]) -> None:
        with self._mutex:
            record = replace(change(self._record), heartbeat_ns=monotonic_ns())
            self._double.write(encode_record(record))
            self._record = record


def _lock_for_life(name: str) -> LockFile:
    segment = Segment.open(name, writable=True)
    if segment is not None:
        lock = LockFile(segment.detach())
        if lock.try_exclusive():
            return lock
        lock.close()
    raise SegmentError(f"{name} was taken by somebody else the moment it was made", "start again")


@dataclass(frozen=True, slots=True)
class Observation:
    """A look at a namespace's creator at one instant.

    Attributes:
        state: by `judge`; None where the namespace has no coordination block.
        locked: whether a creator holds it.
        record: what it says; None where that cannot be read.
        inode: of the block looked at.
        problem: why the record cannot be read.
        owner_uid: whose the block is, as the kernel says: the record is no more than that user's word.
    """

    state: State | None
    locked: bool
    record: CoordRecord | None
    inode: int | None
    heartbeat_age_s: float | None
    problem: FtdError | None = None
    owner_uid: int | None = None


class CoordReader:
    """A block opened for reading. Never mapped: its descriptor asks about locks."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._opened_ns = monotonic_ns()
        facts = os.fstat(segment.fileno())
        self.inode, self._owner_uid = facts.st_ino, facts.st_uid

    @staticmethod
    def open(names: Names) -> CoordReader | None:
        """The namespace's block, or None.

        Raises:
            AccessError: it exists and may not be read.
        """
        segment = Segment.open(names.coord)
        return CoordReader(segment) if segment else None

    def look(self) -> Observation:
        """What can be seen now, also after the name went to another block."""
        # the record before the lock: a creator locks before it writes, so a record that is not locked is a dead one's
        record, problem = self._try_read()
        locked = exclusive_holder(self._segment.fileno()) is not None
        if not locked:
            record, problem = self._try_read()  # its last words may have come between the two
        age_s = max(0.0, (monotonic_ns() - (record.heartbeat_ns if record else self._opened_ns)) / NS)
        wordless_s = _WORDLESS_S if problem is None else float("inf")  # a word that cannot be read is one
        state = judge(
            locked=locked,
            written=record.state if record else None,
            heartbeat_age_s=age_s,
            hung_after_s=record.hung_after_ns / NS if record else wordless_s,
        )
        shown_s = age_s if record else None
        return Observation(state, locked, record, self.inode, shown_s, problem, self._owner_uid)

    def is_named(self) -> bool:
        return inode_of(self._segment.name) == self.inode

    def close(self) -> None:
        self._segment.close()

    def _try_read(self) -> tuple[CoordRecord | None, FtdError | None]:
        try:
            return self._read(), None
        except FtdError as error:
            return None, error

    def _read(self) -> CoordRecord | None:
        block = os.pread(self._segment.fileno(), COORD_BYTES, 0)
        if len(block) < _RECORD_AT or block[:8] == bytes(8):
            return None  # made, not yet written
        check_header(block, MAGIC, COORD_BYTES, self._segment.name)
        found = newest(block[_RECORD_AT:], _COPY_BYTES)
        return None if found is None else decode_record(found[1])


def observe(names: Names) -> Observation:
    """One look at whatever block has the name now."""
    reader = CoordReader.open(names)
    if reader is None:
        return Observation(None, False, None, None, None)
    try:
        return reader.look()
    finally:
        reader.close()
