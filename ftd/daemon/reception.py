"""What a publisher hands over, until it is a generation: staging segment, description, pieces, the end. Blocking.

`Receiver` runs this in threads and keeps the order of steps; here is what a step does.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from ftd.config.model import DaemonConfig
from ftd.config.patterns import validate_patterns
from ftd.daemon.build import Build, Generation, LoadCancelledError, make_plan
from ftd.daemon.fill import fetch
from ftd.daemon.progress import LoadProgress
from ftd.daemon.prove import prove_memory
from ftd.errors import FrameError, InternalError, PublishDamagedError
from ftd.packing import pack
from ftd.shm.digest import PIECE_BYTES, PieceDigester, PieceDigests, cut, strides, whole_digest
from ftd.shm.layout import Extent
from ftd.shm.names import Names
from ftd.shm.segment import PAGE_BYTES, Access, Segment, free_bytes
from ftd.units import MIB, format_bytes
from ftd.wire.publish import Begin, Describe, Description, Part, Put, Staging, places

#: What is staged at most. One slot is filled while another is copied: two for each thread that copies.
MAX_SLOTS = 16
#: `kind` of the manifest's source.
PUBLISHED = "published"
_REMEDY = "publish with the release of ftd that the daemon runs"
_ZEROS = bytes(1 * MIB)


class Reception:
    """One publication, from an empty staging segment on. `put` may run in several threads at once, nothing else.

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
        slots, slot_bytes = _slots(told, config.read_threads, free_bytes())
        try:
            self._segment = self._stage(slots * slot_bytes)
        except BaseException:
            self._undo.close()
            raise
        self.staging = Staging(os.urandom(16), self._segment.name, self._segment.inode, slots, slot_bytes)

    def _stage(self, nbytes: int) -> Segment:
        segment = Segment.create(self._names.staging(self._number), 0, Access(0o600))
        self._undo.callback(segment.close)
        self._undo.callback(segment.unlink)
        for at in range(0, nbytes, len(_ZEROS)):
            segment.write(_ZEROS[: nbytes - at], at)
        return segment

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

    def put(self, told: Put) -> None:
        """Copies what lies in a slot to where it belongs, digested.

        Raises:
            FrameError: there is no such slot, or a part is no piece, or was there before.
            PublishDamagedError: what arrived is not what was sent.
            MemoryShortError: /dev/shm ran full.
        """
        if self._build is None:
            raise InternalError("a put before a description")
        sizes = [part.nbytes for part in told.parts]
        *starts, end = places(sizes)
        if told.slot >= self.staging.slots or starts[-1] + sizes[-1] > self.staging.slot_bytes:
            raise FrameError(f"a put of {end} bytes into slot {told.slot}: there is no such slot", _REMEDY)
        for part in told.parts:
            self._claim(part)
        base = told.slot * self.staging.slot_bytes
        for part, start in zip(told.parts, starts, strict=True):
            if self._over.is_set():
                raise LoadCancelledError
            self._copy(self._build, part, base + start)
            self._progress.add(part.nbytes)

    def _claim(self, part: Part) -> None:
        extent = self._extents[part.tensor] if part.tensor < len(self._extents) else None
        piece = min(PIECE_BYTES, extent.nbytes - part.offset) if extent is not None else 0
        with self._mutex:
            if (part.tensor, part.offset) not in self._missing or part.nbytes != piece:
                raise FrameError(
                    f"a part of {part.nbytes} bytes at {part.offset} of tensor {part.tensor}: expected a piece that is"
                    " not here yet",
                    _REMEDY,
                )
            self._missing.discard((part.tensor, part.offset))

    def _copy(self, build: Build, part: Part, at: int) -> None:
        extent = self._extents[part.tensor]
        assert extent is not None  # it was claimed
        piece = Extent(extent.segment, extent.offset + part.offset, part.nbytes)
        digester = PieceDigester()
        for (stride,) in strides([piece]):
            with build.views[piece.segment][stride.offset : stride.offset + stride.nbytes] as buffer:
                if fetch(self._segment.fileno(), [buffer], at) is not None:
                    raise PublishDamagedError("the staging segment was cut short while it was read", "publish again")
                digester.update(buffer)
            at += stride.nbytes
        found = digester.digest()
        if found != part.digest:
            raise PublishDamagedError(
                f"bytes {part.offset} to {part.offset + part.nbytes} of {self._name(part)!r} arrived with XXH3-128"
                f" {found.hex()}: expected {part.digest.hex()}, as its publisher said",
                "let nothing write to tensors while they are published, then publish again",
            )
        self._pieces.add(piece, found)

    def _name(self, part: Part) -> str:
        return self._what.tensors[part.tensor].name if self._what else ""

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

        Its pages go now: the publisher, whose puts are answered, touches them no more, and children that it forked
        meanwhile map them for as long as they live.
        """
        if self._build is not None:
            self._build.keep()
        os.ftruncate(self._segment.fileno(), 0)
        self._segment.close()


def _slots(told: Begin, threads: int, free: int) -> tuple[int, int]:
    """How many, and their bytes: no more than there is to hand over, nor than the weights leave of what is free; but
    one at least, and room for the description."""
    most = max(1, told.nbytes, told.description_bytes)
    slot_bytes = min(PIECE_BYTES, -(-most // PAGE_BYTES) * PAGE_BYTES)
    useful = min(2 * threads, -(-told.nbytes // slot_bytes), (free - told.nbytes) // slot_bytes)
    return min(MAX_SLOTS, max(useful, -(-told.description_bytes // slot_bytes), 1)), slot_bytes


def _check_layers(what: Description) -> None:
    try:
        validate_patterns(what.layers or ())
    except ValueError as error:
        raise FrameError(f"layers: {error}", "give patterns such as model.layers.*") from None
