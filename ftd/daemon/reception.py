"""What a publisher hands over, until it is a generation: staging segment, description, pieces, the end. Blocking.

`Receiver` runs this in threads and keeps the order of steps; here is what a step does.
"""

from __future__ import annotations

import hashlib
import os
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ftd.config.model import DaemonConfig
from ftd.config.patterns import validate_patterns
from ftd.daemon.build import Build, Generation, LoadCancelledError, make_plan
from ftd.daemon.fill import fetch
from ftd.daemon.progress import LoadProgress
from ftd.daemon.prove import prove_memory
from ftd.errors import FrameError, InternalError, MemoryShortError, PublishDamagedError
from ftd.packing import no_collection, pack
from ftd.shm.digest import PIECE_BYTES, PieceDigester, PieceDigests, cut, whole_digest
from ftd.shm.layout import Extent
from ftd.shm.names import SHM_DIR, Names
from ftd.shm.segment import PAGE_BYTES, Access, Segment, free_bytes, huge_obstacle, space_text
from ftd.units import MIB, format_bytes
from ftd.wire.lane import LaneIn
from ftd.wire.publish import PART_ALIGNMENT, Begin, Describe, Description, Part, Put, Staging, places

#: As STRIDE_BYTES of `ftd/shm/digest.py`: few enough to be digested, and copied by the other end, out of a cache.
SLOT_BYTES = 4 * MIB
#: Of a lane: one is filled while the other is copied.
SLOTS = 2
#: What is staged at most.
MAX_STAGED_BYTES = 128 * MIB
#: `kind` of the manifest's source.
PUBLISHED = "published"
#: Parts that one preadv takes with what lies between them; <limits.h> has IOV_MAX of 1024.
_TOGETHER = 512
_REMEDY = "publish with the release of ftd that the daemon runs"


class Reception:
    """One publication, from an empty staging segment on. `fill` may run in several threads at once, nothing else.

    Makes the staging segment, whose pages are all there: a publisher that touches them needs no room for them.

    Args:
        told: what the publisher has in mind; bounds the staging segment and nothing else.
        make_room: removes what nobody holds.
        holders: names who holds memory, for the message when it is short.
        note: told what a person should know.
        publisher: who it is, for people.

    Raises:
        MemoryShortError: /dev/shm is full.
    """

    def __init__(
        self,
        names: Names,
        number: int,
        config: DaemonConfig,
        access: Access,
        progress: LoadProgress,
        *,
        make_room: Callable[[], None],
        holders: Callable[[], str],
        note: Callable[[str], None],
        publisher: str,
        told: Begin,
    ) -> None:
        self._names, self._number, self._config, self._access = names, number, config, access
        self._progress, self._holders, self._note, self._publisher = progress, holders, note, publisher
        self._over = threading.Event()
        self._mutex = threading.Lock()
        self._undo = ExitStack()
        self._pieces = PieceDigests()
        self._extents: list[Extent | None] = []
        self._missing: set[tuple[int, int]] = set()
        self._build: Build | None = None
        self._what: Description | None = None
        make_room()  # first: staging segment and weights may need it
        lanes, slots, slot_bytes = _shape(told, config.read_threads, free_bytes())
        try:
            self._segment = self._stage(lanes, slots * slot_bytes)
        except BaseException:
            self._undo.close()
            raise
        self.staging = Staging(os.urandom(16), self._segment.name, self._segment.inode, lanes, slots, slot_bytes)

    def _stage(self, lanes: int, lane_bytes: int) -> Segment:
        nbytes = lanes * lane_bytes
        segment = Segment.create(self._names.staging(self._number), nbytes, Access(0o600))
        self._undo.callback(segment.close)
        self._undo.callback(segment.unlink)
        huge = self._config.huge_pages != "never" and huge_obstacle() is None
        with (
            segment.map_shared(writable=True, huge=huge) as mapping,
            memoryview(mapping) as view,
            Path("/dev/zero").open("rb", buffering=0) as zeros,
            ThreadPoolExecutor(lanes) as pool,
        ):

            def touch(lane: int) -> None:
                with view[lane * lane_bytes : (lane + 1) * lane_bytes] as part:
                    fetch(zeros.fileno(), [part], 0)  # by the kernel: a full tmpfs is an error and no SIGBUS

            try:
                list(pool.map(touch, range(lanes)))
            except MemoryShortError:
                raise MemoryShortError(
                    f"{SHM_DIR} has no room for the {format_bytes(nbytes)} by which weights travel ({space_text()})",
                    "free or enlarge it, then publish again",
                ) from None
        return segment

    @no_collection()
    def describe(self, told: Describe) -> None:
        """Proves that there is room, and makes the segments. The publisher has the staging segment open by now.

        Raises:
            FrameError: the description is none.
            MemoryShortError: it does not fit.
        """
        self._segment.unlink()
        data = os.pread(self._segment.fileno(), min(told.nbytes, self.staging.nbytes), 0)
        told.check(data)
        what = self._what = Description.decode(data)
        _check_layers(what)
        plan = make_plan(
            what.tensors,
            what.ties,
            self._config,
            layers=self._config.layers or () if what.layers is None else what.layers,
            file_bytes=sum(map(len, what.files.values())),
            holders=self._holders,
            note=self._note,
        )
        self._build = Build(self._names, self._number, plan, self._config, self._access, self._undo)
        self._build.write_files(what.files)
        places_by_name = {placed.spec.name: placed.extent for placed in plan.layout.tensors}
        for index, spec in enumerate(what.tensors):
            extent = None if spec.name in what.ties else places_by_name[spec.name]
            self._extents.append(extent)
            if extent is not None:
                self._missing |= {(index, at) for at, _ in cut(0, extent.nbytes)}
        self._progress.start(plan.layout.tensor_bytes)

    def fill(self, number: int, sock: socket.socket) -> None:
        """Copies what comes on a lane to where it belongs, digested, until its publisher has no more.

        Args:
            sock: of the lane; is closed.

        Raises:
            FrameError: what comes is no piece, or was there before.
            LoadCancelledError: it was given up meanwhile.
            MemoryShortError: /dev/shm ran full.
            PublishDamagedError: what arrived is not what was sent.
            PublishRefusedError: the publisher ended.
        """
        slots, slot_bytes = self.staging.slots, self.staging.slot_bytes
        piece: _Piece | None = None
        with LaneIn(sock, self._go_on) as lane:
            for turn, put in enumerate(lane.puts(slots)):
                piece = self._put(put, (number * slots + turn % slots) * slot_bytes, piece)
        if piece is not None:
            raise FrameError(f"a lane that ends inside a piece of {self._name(piece.tensor)!r}", _REMEDY)

    def _put(self, put: Put, slot: int, piece: _Piece | None) -> _Piece | None:
        """Copies what lies in the slot at that byte; takes and gives the piece that is not whole yet."""
        starts = places([part.nbytes for part in put.parts])
        if starts[-2] + put.parts[-1].nbytes > self.staging.slot_bytes:
            raise FrameError(f"a put of {starts[-1]} bytes: expected at most {self.staging.slot_bytes}", _REMEDY)
        for first in range(0, len(put.parts), _TOGETHER):
            self._go_on()
            parts = put.parts[first : first + _TOGETHER]
            piece = self._copy(parts, slot + starts[first], piece)
            self._progress.add(sum(part.nbytes for part in parts))
        return piece

    def _copy(self, parts: Sequence[Part], at: int, piece: _Piece | None) -> _Piece | None:
        """Copies parts from byte `at` of the staging segment on by one request, and digests what arrived: the publisher
        may write to its slot at any time."""
        assert self._build is not None  # it is described
        targets = list[tuple[_Piece, Part, memoryview]]()
        gap = memoryview(bytearray(PART_ALIGNMENT))
        buffers = list[memoryview]()
        try:
            for part in parts:
                piece = self._next(part, piece)
                begin = piece.extent.offset + piece.done
                target = self._build.views[piece.extent.segment][begin : begin + part.nbytes]
                targets.append((piece, part, target))
                buffers += target, gap[: -part.nbytes % PART_ALIGNMENT]
                piece.done += part.nbytes
                if part.digest:
                    piece = None
            if fetch(self._segment.fileno(), buffers[:-1], at) is not None:
                raise PublishDamagedError("the staging segment was cut short while it was read", "publish again")
            for of, part, target in targets:
                of.digester.update(target)
                if part.digest:
                    self._end(of, part)
        finally:
            for _, _, target in targets:
                target.release()  # the frames of an error would hold the mapping
        return piece

    def _next(self, part: Part, piece: _Piece | None) -> _Piece:
        """The piece that the part goes on with, or begins.

        Raises:
            FrameError: it does neither.
        """
        piece = piece or self._claim(part)
        end = part.offset + part.nbytes
        is_next = (part.tensor, part.offset) == (piece.tensor, piece.at) and end <= piece.end
        if not is_next or bool(part.digest) != (end == piece.end):
            raise FrameError(
                f"a part of {part.nbytes} bytes at {part.offset} of tensor {part.tensor}: expected the next of its"
                " piece",
                _REMEDY,
            )
        return piece

    def _claim(self, part: Part) -> _Piece:
        extent = self._extents[part.tensor] if part.tensor < len(self._extents) else None
        with self._mutex:
            if extent is None or (part.tensor, part.offset) not in self._missing:
                raise FrameError(
                    f"a part of {part.nbytes} bytes at {part.offset} of tensor {part.tensor}: expected the begin of a"
                    " piece that is not here yet",
                    _REMEDY,
                )
            self._missing.discard((part.tensor, part.offset))
        nbytes = min(PIECE_BYTES, extent.nbytes - part.offset)
        return _Piece(part.tensor, part.offset, Extent(extent.segment, extent.offset + part.offset, nbytes))

    def _end(self, piece: _Piece, part: Part) -> None:
        found = piece.digester.digest()
        if found != part.digest:
            raise PublishDamagedError(
                f"bytes {piece.begin} to {piece.end} of {self._name(piece.tensor)!r} arrived with XXH3-128"
                f" {found.hex()}: expected {part.digest.hex()}, as its publisher said",
                "let nothing write to tensors while they are published, then publish again",
            )
        self._pieces.add(piece.extent, found)

    def _name(self, tensor: int) -> str:
        return self._what.tensors[tensor].name if self._what else ""

    def finish(self) -> Generation:
        """The generation, once all of it is there.

        Raises:
            FrameError: it is not.
            LoadCancelledError: it was given up meanwhile.
            MemoryShortError: /dev/shm ran full.
        """
        build, what = self._build, self._what
        if build is None or what is None:
            raise InternalError("a commit before a description")
        if self._missing:
            missing = sorted({what.tensors[index].name for index, _ in self._missing})
            raise FrameError(f"{len(missing)} tensors are not whole, {missing[0]!r} is one", _REMEDY)
        build.pad()
        with no_collection():
            digests = build.digests(self._pieces)
        self._progress.end()
        if self._config.verify == "full":
            self._progress.enter("verifying")
            prove_memory(build.layout, build.segments, digests, self._config.read_threads, self._step)
        weights = whole_digest(build.layout.tensors, digests)
        files = [[name, hashlib.blake2b(data, digest_size=16).digest()] for name, data in sorted(what.files.items())]
        identity = pack([PUBLISHED, weights, what.transform, files])
        source: dict[str, Any] = {
            "kind": PUBLISHED,
            "path": what.source or self._publisher,
            "files": [],
            "transform": what.transform,
        }
        return build.finish(
            self._progress,
            cancelled=self._over.is_set,
            note=self._note,
            identity=hashlib.blake2b(identity, digest_size=16).hexdigest(),
            source=source,
            digests=digests,
        )

    def _step(self) -> None:
        self._progress.tick()
        self._go_on()

    def _go_on(self) -> None:
        if self._over.is_set():
            raise LoadCancelledError

    def describe_progress(self) -> str:
        """`"3.00 GiB of 10.0 GiB"`, for people."""
        progress = self._progress.snapshot()
        return f"{format_bytes(progress.bytes_done)} of {format_bytes(progress.bytes_total)}"

    def cancel(self) -> None:
        """Lets whatever runs end soon."""
        self._over.set()

    def abort(self) -> None:
        """Removes all of it. Nothing may run any more."""
        self._undo.close()

    def keep(self) -> None:
        """Leaves the generation to the caller, and the staging segment to nobody.

        Its pages go now: the publisher, whose lanes have ended, touches them no more, and children that it forked
        meanwhile map them for as long as they live.
        """
        if self._build is not None:
            self._build.keep()
        os.ftruncate(self._segment.fileno(), 0)
        self._segment.close()


class _Piece:
    """A piece on its way.

    Attributes:
        begin: its first byte in the tensor.
        extent: where it belongs.
        done: bytes of it that are there, in order.
    """

    def __init__(self, tensor: int, begin: int, extent: Extent) -> None:
        self.tensor, self.begin, self.extent = tensor, begin, extent
        self.done, self.digester = 0, PieceDigester()

    @property
    def at(self) -> int:
        return self.begin + self.done

    @property
    def end(self) -> int:
        return self.begin + self.extent.nbytes


def _shape(told: Begin, threads: int, free: int) -> tuple[int, int, int]:
    """How many lanes, slots of each, and bytes of a slot: no more lanes than there is to hand over, nor than the
    weights leave of what is free; but one at least, and slots enough for the description."""
    most = max(1, told.nbytes, told.description_bytes)
    slot_bytes = min(SLOT_BYTES, _up(most, PAGE_BYTES))
    lane_bytes = SLOTS * slot_bytes
    useful = min(threads, _up(told.nbytes, PIECE_BYTES) // PIECE_BYTES, (free - told.nbytes) // lane_bytes)
    lanes = max(1, min(MAX_STAGED_BYTES // lane_bytes, useful))
    slots = _up(told.description_bytes, lanes * slot_bytes) // (lanes * slot_bytes)
    return lanes, max(SLOTS, min(MAX_STAGED_BYTES // (lanes * slot_bytes), slots)), slot_bytes


def _up(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit


def _check_layers(what: Description) -> None:
    try:
        validate_patterns(what.layers or ())
    except ValueError as error:
        raise FrameError(f"layers: {error}", "give patterns such as model.layers.*") from None
