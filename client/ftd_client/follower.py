"""Attaching: a lease on a published generation, and its weights mapped into this process."""

from __future__ import annotations

import math
import mmap
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace as replace_fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ftd.clock import NS, monotonic_ns
from ftd.errors import FollowerClosedError, SegmentError, UsageError
from ftd.packing import no_collection
from ftd.shm.coord import CoordReader, CoordRecord
from ftd.shm.manifest import (
    MAX_FILES_BYTES,
    MAX_MANIFEST_BYTES,
    Manifest,
    decode_files,
    decode_manifest,
    digest_of,
    read_segment,
)
from ftd.shm.names import Names
from ftd.shm.segment import Segment
from ftd.shm.state import State
from ftd_client.bind import BindReport, bind
from ftd_client.bound import remember
from ftd_client.load.cargo import Cargo
from ftd_client.load.move import MoveReport, move
from ftd_client.load.placement import Devices, Placement
from ftd_client.load.turns import short_turns
from ftd_client.seat import Seat
from ftd_client.views import SharedWeights
from ftd_client.waiting import Waiter
from ftd_client.watch import Watch


def attach(namespace: str, *, timeout: float | None = 30, on_lost: Callable[[str], None] | None = None) -> Follower:
    """Takes a lease on a namespace's weights and maps them. Copies nothing and touches no page of them.

    Args:
        timeout: seconds. Without a creator: how long to wait for one; 0 or None raises at once (a start that failed
            before this call counts as no creator, and is named). With a living one: bounds the whole wait; 0 or None
            waits as long as it lives and its heartbeat comes.
        on_lost: called once with `"stopped"`, `"died"` or `"replaced"`, from a thread of the follower, when the
            creator is gone. The weights stay usable: their pages live until this process lets go.

    Raises:
        NamespaceError: the name is not valid.
        UsageError: the timeout is no number of seconds.
        NoCreatorError: there is none.
        CreatorFailedError: it failed; its own message is in this one.
        CreatorDiedError: it was killed or stopped while it loaded.
        CreatorHungError: it lives, but its heartbeat is late.
        AttachTimeoutError: it was not ready in time.
        ProtocolMismatchError: it speaks another major version.
        AccessError: this user may not read the segments, or they belong to a user that it has no reason to believe
            (`ftd_client.trust`).
        SegmentError: what it published is damaged.
        NoLeaseError: every slot is taken.
    """
    names = Names(namespace)
    if timeout is not None and (isinstance(timeout, str) or not math.isfinite(timeout) or timeout < 0):
        raise UsageError(f"attach: found timeout={timeout!r}, expected seconds, 0 or None", "attach(..., timeout=30)")
    waiter = Waiter(names, timeout)
    while True:
        reader = waiter.ready()
        record = reader.look().record
        try:
            if record is not None:
                return Follower(names, reader, record, on_lost)
        except (SegmentError, _MovedOnError):
            if _is_current(reader, record):
                reader.close()
                raise
        except BaseException:
            reader.close()
            raise
        reader.close()


class _MovedOnError(Exception):
    """The creator left between the look and the lease."""


def _is_current(reader: CoordReader, record: CoordRecord | None) -> bool:
    seen = reader.look()
    return (
        seen.locked
        and seen.record is not None
        and record is not None
        and (seen.record.state, seen.record.generation) == (State.READY, record.generation)
        and reader.is_named()
    )


class Follower:
    """A lease on one generation, and its weights. Made by `attach`; a context manager.

    Not inherited by a forked child: there the tensors already made stay readable, and everything else raises
    `FollowerClosedError`; attach again in the child.

    Attributes:
        namespace: its name.
        manifest: what the generation holds (tensors, layers, types, shapes, source).
    """

    def __init__(
        self, names: Names, reader: CoordReader, record: CoordRecord, on_lost: Callable[[str], None] | None
    ) -> None:
        self.namespace = names.namespace
        self._names = names
        self._pid = os.getpid()
        self._seat = Seat(names, record.generation)
        try:
            # from here on the generation is kept; was it still the published one when that began?
            if not _is_current(reader, record):
                raise _MovedOnError
            self.manifest = _manifest(names, record)
            mappings, pages = _map(self.manifest)
            self._weights: SharedWeights | None = SharedWeights(self.manifest, mappings, pages)
            self._bound: weakref.WeakSet[nn.Module] = weakref.WeakSet()
            self._watch = Watch(names, reader, record, self._seat, on_lost)
        except BaseException:
            self._seat.leave()
            raise
        _end_with(self._watch, [*mappings, *pages] or [self])

    @property
    def generation(self) -> int:
        """Of the weights that this follower holds, for as long as it lives."""
        return self.manifest.generation

    @property
    def fingerprint(self) -> str:
        """Hash of source identity, layout rules and transforms."""
        return self.manifest.fingerprint

    @property
    def lost(self) -> str | None:
        """Why the creator is gone (`"stopped"`, `"died"`, `"replaced"`); None while it lives."""
        return self._watch.lost

    @property
    def weights(self) -> SharedWeights:
        """The weights by name, with where they lie."""
        return self._open()

    def tell_placement(self, **changes: object) -> None:
        """Says in status where this follower's weights are: fields of a slot's record from `device` on."""
        self._seat.tell(**changes)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Every tensor by name, zero-copy.

        They are private copy-on-write views: changing one in place copies the touched pages into this process and
        reaches no other.
        """
        weights = self._open()
        return {name: weights.view(name) for name in weights.specs}

    def bind(self, model: nn.Module, *, strict: bool = True, replace: bool = False) -> BindReport:
        """Gives a model built on the `meta` device its weights; see `ftd_client.bind.bind`.

        All models that one follower binds show the same pages: what one changes in place, the others see. Attach once
        more for a model that is to change its weights alone.
        """
        weights = self._open()
        report = bind(model, weights, strict=strict, replace=replace)
        self._bound.add(model)
        remember(model, weights)
        return report

    def load(self, model: nn.Module, device: Devices, *, strict: bool = True, replace: bool = False) -> MoveReport:
        """Makes the model's parameters and buffers resident on `device`, each once, ties kept.

        On a GPU the weights come by push where the daemon can, else by pull; the report says which, and why not the
        other. A device map (module names to devices, the longest name counts) loads all GPUs at once.

        A model that this follower has not bound is bound first, by the same rules: one that holds values of its own
        is refused unless `replace` is given. Afterwards the model depends on no mapping of this follower: on the CPU
        too it has memory of its own.

        Raises:
            BindError: model and weights do not fit.
            UsageError: there is no such device.
        """
        weights, placement, began_ns = self._open(), Placement(device), monotonic_ns()
        self._seat.tell(state="busy", device=placement.brief)
        try:
            with no_collection(), short_turns, Cargo(weights, placement) as cargo:
                cargo.depart(model, replace=replace)
                if replace or model not in self._bound:
                    self.bind(model, strict=strict, replace=replace)
                moved = move(model, device, cargo)
            report = replace_fields(moved, seconds=(monotonic_ns() - began_ns) / NS)
            self._seat.tell(
                resident_bytes=self._seat.record.resident_bytes + report.bytes,
                pin="staged" if report.way == "pull" else self._seat.record.pin,
            )
        finally:
            self._seat.tell(state="attached")
        return report

    def files(self) -> dict[str, bytes]:
        """The checkpoint's sidecar files (config.json, tokenizer files) by relative name, read from shared memory.

        Raises:
            SegmentError: they are damaged, or gone since their generation was retired.
        """
        self._open()
        if not self.manifest.files_inode:
            return {}
        # by inode: after an orderly stop generations count from 1 again, and the name may be another daemon's
        data = read_segment(self._names.files(self.generation), MAX_FILES_BYTES, inode=self.manifest.files_inode)
        if data is None:
            raise SegmentError(
                f"{self._names.files(self.generation)} is gone: generation {self.generation} was retired",
                "attach again",
            )
        return decode_files(data)

    def write_files(self, directory: Path | str) -> list[Path]:
        """Writes the sidecar files below `directory`, for libraries that read a model's directory."""
        written = []
        for name, data in self.files().items():
            path = Path(directory) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            written.append(path)
        return written

    @property
    def closed(self) -> bool:
        return self._weights is None

    def close(self) -> None:
        """Gives the lease back and ends new access. Tensors already made stay valid; the mapping goes with the last."""
        if self._weights is None:
            return
        self._weights = None
        if self._pid == os.getpid():
            self._watch.stop()

    def __enter__(self) -> Follower:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else self.lost or "attached"
        return f"<Follower of {self.namespace!r}, generation {self.generation}, {state}>"

    def _open(self) -> SharedWeights:
        if self._pid != os.getpid():
            raise FollowerClosedError(
                f"this follower of {self.namespace!r} belongs to process {self._pid}, this is a child forked from it",
                "call ftd_client.attach in the child",
            )
        if self._weights is None:
            raise FollowerClosedError(f"this follower of {self.namespace!r} is closed", "attach again")
        return self._weights


def _end_with(watch: Watch, owners: list[Any]) -> None:
    """Ends the heartbeat and gives the lease back when the last of `owners` is gone: a follower that was dropped
    without `close` keeps its lease as long as some tensor of it lives, and not longer."""
    left = set(range(len(owners)))

    def gone(index: int) -> None:
        left.discard(index)
        if not left:
            watch.end()

    for index, owner in enumerate(owners):
        weakref.finalize(owner, gone, index).atexit = False


def _manifest(names: Names, record: CoordRecord) -> Manifest:
    """The published manifest, believed only when magic, version, length and checksum are right."""
    name = names.manifest(record.generation)
    data = read_segment(name, MAX_MANIFEST_BYTES)
    if data is None:
        raise SegmentError(
            f"{name} is missing: expected the manifest of generation {record.generation}", "attach again"
        )
    if len(data) != record.manifest_bytes or digest_of(data) != record.manifest_digest:
        raise SegmentError(f"{name} is not the manifest that was published: its checksum differs", "restart the daemon")
    manifest = _decoded(record.manifest_digest, data)
    if (manifest.namespace, manifest.generation) != (names.namespace, record.generation):
        raise SegmentError(
            f"{name} says {manifest.namespace!r} generation {manifest.generation}: expected {names.namespace!r}"
            f" generation {record.generation}",
            "restart the daemon",
        )
    return manifest


#: What a process knows already: each of its attachments to a generation would decode the same bytes (5 ms for 1,000
#: tensors, one after the other where many threads attach at once).
_known: weakref.WeakValueDictionary[bytes, Manifest] = weakref.WeakValueDictionary()
_decoding = threading.Lock()
os.register_at_fork(after_in_child=_decoding._at_fork_reinit)  # type: ignore[attr-defined]


def _decoded(digest: bytes, data: bytes) -> Manifest:
    with _decoding:
        manifest = _known.get(digest)
        if manifest is None:
            manifest = _known[digest] = decode_manifest(data)
        return manifest


def _map(manifest: Manifest) -> tuple[list[mmap.mmap], list[mmap.mmap]]:
    """Each segment twice: private for views, shared for DMA. Now, since the names may be gone later."""
    mappings, pages = [], []
    for fact in manifest.segments:
        segment = Segment.open(fact.name)
        if segment is None:
            raise SegmentError(f"{fact.name} is missing: expected {fact.bytes} bytes of weights", "restart the daemon")
        with segment:
            if (segment.size, segment.inode) != (fact.bytes, fact.inode):
                raise SegmentError(
                    f"{fact.name} has {segment.size} bytes and inode {segment.inode}: expected {fact.bytes} and"
                    f" {fact.inode}",
                    "restart the daemon",
                )
            mappings.append(segment.map_private())
            pages.append(segment.map_shared())
    return mappings, pages
