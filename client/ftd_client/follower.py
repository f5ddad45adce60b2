"""Attaching: a lease on a published generation, and its weights mapped into this process."""

from __future__ import annotations

import math
import mmap
import os
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace as replace_fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ftd.clock import NS, monotonic_ns
from ftd.errors import FollowerClosedError, SegmentError, UsageError
from ftd.packing import no_collection
from ftd.shm.coord import CoordReader, CoordRecord
from ftd.shm.manifest import MAX_FILES_BYTES, Manifest, decode_files, read_published, read_segment
from ftd.shm.names import Names
from ftd.shm.segment import Segment
from ftd.shm.state import State
from ftd_client.bind import BindReport, bind, fit
from ftd_client.bound import remember
from ftd_client.choose import KeyMap, Shard, choose
from ftd_client.load.cargo import Cargo
from ftd_client.load.move import MoveReport, move
from ftd_client.load.placement import Devices, Placement
from ftd_client.load.turns import while_loading
from ftd_client.plan import uncast
from ftd_client.queueing import one_at_a_time
from ftd_client.ranks import Rank, expect_fingerprint, expect_rank, rank_of
from ftd_client.seat import Seat
from ftd_client.views import SharedWeights
from ftd_client.waiting import Waiter
from ftd_client.watch import Watch


def attach(
    namespace: str,
    *,
    timeout: float | None = 30,
    on_lost: Callable[[str], None] | None = None,
    rank: int | None = None,
    world: int | None = None,
    fingerprint: str | None = None,
) -> Follower:
    """Takes a lease on a namespace's weights and maps them. Copies nothing and touches no page of them.

    Args:
        timeout: seconds. Without a creator: how long to wait for one; 0 or None raises at once (a start that failed
            before this call counts as no creator, and is named). With a living one: bounds the whole wait; 0 or None
            waits as long as it lives and its heartbeat comes.
        on_lost: called once with `"stopped"`, `"died"` or `"replaced"`, from a thread of the follower, when the
            creator is gone. The weights stay usable: their pages live until this process lets go.
        rank, world: this worker's place in tensor parallelism, for `bind(model, shard=...)`. A namespace that says by
            its name (`ftd_client.shm.apply_rank_suffix`) that it is another rank's is refused.
        fingerprint: refuse weights of any other one.

    Raises:
        NamespaceError: the name is not valid.
        UsageError: the timeout is no number of seconds, or rank and world are no place among workers.
        OtherWeightsError: the weights are another rank's, or have another fingerprint.
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
    place = rank_of(rank, world)
    expect_rank(namespace, place)
    waiter = Waiter(names, timeout)
    while True:
        reader, record = waiter.ready()
        try:
            return Follower(names, reader, record, on_lost, rank=place, fingerprint=fingerprint)
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


def _is_current(reader: CoordReader, record: CoordRecord) -> bool:
    seen = reader.look()
    return (
        seen.locked
        and seen.record is not None
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
        self,
        names: Names,
        reader: CoordReader,
        record: CoordRecord,
        on_lost: Callable[[str], None] | None,
        *,
        rank: Rank | None = None,
        fingerprint: str | None = None,
    ) -> None:
        self.namespace, self._rank = names.namespace, rank
        self._names = names
        self._pid = os.getpid()
        # dtype, key map and shard of each model that was bound
        self._bound: weakref.WeakKeyDictionary[nn.Module, tuple[object, ...]] = weakref.WeakKeyDictionary()
        with ExitStack() as undo:
            with one_at_a_time():
                self._seat = Seat(names, record.generation)
                undo.callback(self._seat.leave)
                # from here on the generation is kept; was it still the published one when that began?
                if not _is_current(reader, record):
                    raise _MovedOnError
                self.manifest = _manifest(names, record)
                expect_fingerprint(names.namespace, self.manifest.fingerprint, fingerprint)
                mappings, pages = _map(self.manifest)
                self._weights: SharedWeights | None = SharedWeights(self.manifest, mappings, pages)
                self._watch = Watch(names, reader, record, self._seat, on_lost)
                _end_with(self._watch, [*mappings, *pages] or [self])
            undo.callback(self._watch.end)  # it may have begun, where an interrupt comes meanwhile
            self._watch.start()
            undo.pop_all()

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
        with no_collection():
            return {name: weights.view(name) for name in weights.specs}

    def bind(
        self,
        model: nn.Module,
        *,
        strict: bool = True,
        replace: bool = False,
        dtype: torch.dtype | None = None,
        key_map: KeyMap | None = None,
        shard: Shard | None = None,
    ) -> BindReport:
        """Gives a model built on the `meta` device its weights; see `ftd_client.bind.bind`.

            weights.bind(model, key_map={"model": "transformer"})       # model.layers.0.… is transformer.layers.0.…
            weights.bind(model, shard={"layers.*.q_proj": 0, "layers.*.gate_proj": 0})          # attach(rank=, world=)

        All models that one follower binds show the same pages: what one changes in place, the others see. Attach once
        more for a model that is to change its weights alone.

        Args:
            strict, replace, dtype: see `ftd_client.bind.bind`.
            key_map: prefixes of the checkpoint's names, in whole components, and what the model has in their place;
                the longest that fits a name counts, and is applied once. `""` fits every name; None leaves out what
                has the prefix. Or a function that gives a name of the model, or None, for one of the checkpoint.
            shard: what this rank takes of each tensor. Patterns of names or modules of the model (`*` for any
                characters of one component; the deepest that fits counts), and 0 or `"colwise"` for the rank's equal
                share of the rows, None for all of the tensor. Or a function that gives a slice of the first dimension,
                or None, for a name and the whole shape.

        Raises:
            UsageError: an argument is of no use; a shard by patterns needs a follower with a rank.
            BindError: model and weights do not fit, two tensors got one name, or a tensor can't be cut as told.
        """
        weights = self._chosen(key_map, shard)
        report = bind(model, weights, strict=strict, replace=replace, dtype=dtype)
        self._keep(model, weights, (dtype, key_map, shard))
        return report

    def _chosen(self, key_map: KeyMap | None, shard: Shard | None) -> SharedWeights:
        weights = self._open()
        return weights.select(choose(weights.specs, key_map, shard, self._rank))

    def _keep(self, model: nn.Module, weights: SharedWeights, told: tuple[object, ...]) -> None:
        self._bound[model] = told
        remember(model, weights)

    def load(
        self,
        model: nn.Module,
        device: Devices,
        *,
        strict: bool = True,
        replace: bool = False,
        dtype: torch.dtype | None = None,
        key_map: KeyMap | None = None,
        shard: Shard | None = None,
    ) -> MoveReport:
        """Makes the model's parameters and buffers resident on `device`, each once, ties kept.

        On a GPU the weights come by push where the daemon can, else by pull; the report says which, and why not the
        other. A device map (module names to devices, the longest name counts) loads all GPUs at once.

        A model that this follower has not bound gets the weights by the same rules and arguments as from `bind`: one
        that holds values of its own is refused unless `replace` is given. Afterwards the model depends on no mapping of
        this follower: on the CPU too it has memory of its own. What is cast (`dtype`) is cast on the CPU and copied.
        Whatever fails leaves the model as it was.

        Raises:
            BindError: model and weights do not fit.
            UsageError: there is no such device, or an argument is of no use.
        """
        weights, placement, began_ns = self._chosen(key_map, shard), Placement(device), monotonic_ns()
        told = (dtype, key_map, shard)
        ended: dict[str, object] = {"state": "attached"}
        self._seat.tell(state="busy", device=placement.brief)
        try:
            with while_loading, Cargo(uncast(weights, dtype), placement) as cargo:
                # what many new objects would set off comes while the bytes travel, and not before the first or behind
                # the last
                with no_collection():
                    cargo.depart(model, replace=replace)
                if replace or self._would_bind(model, told):
                    # not kept in a variable: it is freed in there
                    moved = move(
                        model, placement, cargo, fit(model, weights, strict=strict, replace=replace, dtype=dtype)
                    )
                    self._keep(model, weights, told)
                else:
                    moved = move(model, placement, cargo)
            before = self._seat.record
            ended["resident_bytes"] = before.resident_bytes + moved.bytes
            ended["pin"] = "staged" if moved.way == "pull" else before.pin
        finally:
            self._seat.tell(**ended)
        return replace_fields(moved, seconds=(monotonic_ns() - began_ns) / NS)

    def _would_bind(self, model: nn.Module, told: tuple[object, ...]) -> bool:
        """Whether the model was not bound, or in another way than one that is asked for."""
        before = self._bound.get(model)
        return before is None or (before != told and any(argument is not None for argument in told))

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


#: What this process has read, by namespace, generation and digest, as long as some follower of it lives: each of its
#: attachments would decode the same bytes (5 ms for 1,000 tensors).
_known: weakref.WeakValueDictionary[tuple[str, int, bytes], Manifest] = weakref.WeakValueDictionary()


def _manifest(names: Names, record: CoordRecord) -> Manifest:
    key = (names.namespace, record.generation, record.manifest_digest)
    manifest = _known.get(key)
    if manifest is None:
        manifest = _known[key] = read_published(names, record.generation, record.manifest_digest)
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
