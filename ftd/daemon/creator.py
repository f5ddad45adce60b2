"""Materializing a generation: checkpoint → layout → segments → pins → manifest. Everything but the last write.

Runs in a thread beside the daemon's loop. What it made is one resource, `Generation`; a failure half-way removes it.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import mmap
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from ftd.clock import wall_s
from ftd.config.model import DaemonConfig
from ftd.config.patterns import LayerRule, natural_key
from ftd.cuda.pin import Pinned, Region, pin
from ftd.daemon import headroom
from ftd.daemon.fill import Filler, pad, plan_reads
from ftd.daemon.progress import LoadProgress
from ftd.daemon.prove import prove_files, prove_memory
from ftd.errors import InternalError, MemoryShortError
from ftd.shm import numa
from ftd.shm.digest import PieceDigests
from ftd.shm.layout import LAYOUT_RULES, Extent, Layout, lay_out, structure_fingerprint
from ftd.shm.manifest import Manifest, SegmentFact, digest_of, encode_files, encode_manifest, write_segment
from ftd.shm.names import Names
from ftd.shm.segment import HUGE_PAGE_BYTES, PAGE_BYTES, Access, Segment, huge_bytes, huge_obstacle
from ftd.source.base import Checkpoint
from ftd.source.resolve import resolve
from ftd.source.sidecars import read_sidecar
from ftd.units import MIB, format_bytes

#: Room that the small segments (manifest, sidecar envelope, coordination) need beside weights and sidecar files.
_MANIFEST_BYTES_A_TENSOR = 512

log = logging.getLogger("ftd")


class LoadCancelledError(Exception):
    """The load was asked to end. Never leaves the daemon."""


@dataclass(frozen=True, slots=True)
class WeightsFact:
    """A weights segment as status shows it.

    Attributes:
        node_bytes: by NUMA node, as text; asked where a placement was.
    """

    name: str
    bytes: int
    inode: int
    page_bytes: int
    huge_bytes: int
    pinned_bytes: int
    node_bytes: dict[str, int]


class Generation:
    """A complete generation: its segments stay mapped and pinned until `close`; its names stay until they are
    removed by the holder of the life lock.

    Attributes:
        manifest, manifest_bytes, manifest_digest: as published.
        pinned: how its pages are held.
        facts: its weights segments.
    """

    def __init__(
        self,
        manifest: Manifest,
        sealed: bytes,
        facts: tuple[WeightsFact, ...],
        pinned: Pinned,
        mappings: list[mmap.mmap],
    ) -> None:
        self.manifest = manifest
        self.manifest_bytes = len(sealed)
        self.manifest_digest = digest_of(sealed)
        self.facts = facts
        self.pinned = pinned
        self._mappings = mappings  # pinned pages must stay mapped

    @functools.cached_property
    def model(self) -> dict[str, Any]:
        """`model` of a status: sums over every tensor, made once."""
        return {
            "source": self.manifest.source["path"],
            "tensors": len(self.manifest.tensors),
            "bytes": self.manifest.tensor_bytes,
            "dtypes": self.manifest.bytes_by_dtype(),
            "digest": self.manifest.digest(),
        }

    @property
    def regions(self) -> list[Region]:
        """Its weights segments as this process maps them."""
        return [_region(mapping) for mapping in self._mappings]

    def close(self) -> None:
        """Unpins in reverse and unmaps."""
        self.pinned.close()
        self._mappings.clear()


def materialize(
    names: Names,
    generation: int,
    config: DaemonConfig,
    access: Access,
    progress: LoadProgress,
    *,
    holders: Callable[[], str],
    note: Callable[[str], None],
) -> Generation:
    """Builds the generation from the configured checkpoint.

    Args:
        holders: names who holds memory of earlier generations, for the message when memory is short.
        note: told what a person should know: files that were ignored, pages that were not locked.

    Raises:
        LoadCancelledError: it was asked to end.
        FtdError: anything a user can cause.
    """
    if config.model is None:
        raise InternalError("a configuration without a model reached the loader")
    checkpoint = resolve(config.model, config.allow_types or ())
    for text in checkpoint.notes:
        note(text)
    huge = _wants_huge(config)
    placement = numa.placement(config.numa, numa.memory_nodes())
    layout = _layout(checkpoint, config, huge, note)
    node = placement.bound if placement is not None else None
    _check_room(layout, checkpoint, headroom.limits(config.memory_budget, node), holders)
    with ExitStack() as undo:
        progress.enter("loading")
        segments, mappings, views = _make_segments(names, generation, layout, access, huge, placement, undo)
        # before the weights: a file that changed since it was listed ends the load now, not after minutes of reading
        files_inode = _write_files(names, generation, checkpoint, access, undo)
        digests = _fill(checkpoint, layout, segments, views, config, progress)
        progress.end()
        if config.verify == "full":
            progress.enter("verifying")
            prove_memory(layout, segments, digests, config.read_threads, lambda: _step(progress))
            prove_files(checkpoint, layout, views, config.read_threads, lambda: _step(progress), note)
        progress.enter("pinning")
        pinned = _pin(mappings, config, progress, undo)
        for text in pinned.warnings:
            note(text)
        _stop_if(progress)
        progress.enter("publishing")
        facts = _facts(segments, mappings, pinned, placed=placement is not None)
        _check_huge(config, facts)
        if placement is not None:
            log.info("numa: %s: %s", placement.setting, _by_node(facts))
        manifest = _manifest(names, generation, checkpoint, layout, facts, files_inode, digests, config.allow_types)
        sealed = encode_manifest(manifest)
        _write_once(names.manifest(generation), sealed, access, undo)
        for segment in segments:
            segment.close()
        undo.pop_all()  # from here on the names belong to the holder of the life lock
        return Generation(manifest, sealed, facts, pinned, mappings)


def _wants_huge(config: DaemonConfig) -> bool:
    if config.huge_pages == "never":
        return False
    obstacle = huge_obstacle()
    if obstacle is not None and config.huge_pages == "require":
        raise MemoryShortError(
            f"huge_pages is `require`, but {obstacle.found}: expected {obstacle.expected}", obstacle.remedy
        )
    return obstacle is None


def _layout(checkpoint: Checkpoint, config: DaemonConfig, huge: bool, note: Callable[[str], None]) -> Layout:
    rule = LayerRule(tuple(config.layers or ()))
    specs = [stored.spec for stored in checkpoint.tensors]
    for pattern in rule.unmatched([spec.name for spec in specs]):
        note(f"layers: pattern {pattern!r} matches no tensor")
    layer = {spec.name: rule.layer_of(spec.name) for spec in specs}
    specs.sort(key=lambda spec: (natural_key(layer[spec.name]), natural_key(spec.name)))
    pages = HUGE_PAGE_BYTES if huge else PAGE_BYTES
    return lay_out(specs, layer.__getitem__, page_bytes=pages, same_as=checkpoint.ties)


def _check_room(
    layout: Layout, checkpoint: Checkpoint, bounds: Sequence[headroom.Limit], holders: Callable[[], str]
) -> None:
    needed = sum(layout.segments) + sum(sidecar.bytes for sidecar in checkpoint.sidecars)
    needed += 1 * MIB + len(layout.tensors) * _MANIFEST_BYTES_A_TENSOR
    headroom.check(needed, bounds, holders)


def _make_segments(
    names: Names,
    generation: int,
    layout: Layout,
    access: Access,
    huge: bool,
    placement: numa.Placement | None,
    undo: ExitStack,
) -> tuple[list[Segment], list[mmap.mmap], list[memoryview]]:
    segments, mappings, views = [], [], []
    for index, size in enumerate(layout.segments):
        segment = Segment.create(names.weights(generation, index), size, access)
        undo.callback(segment.close)
        undo.callback(segment.unlink)
        segments.append(segment)
        mappings.append(segment.map_shared(writable=True, huge=huge))
        if placement is not None:
            numa.place(mappings[-1], placement)
        views.append(memoryview(mappings[-1]))
    return segments, mappings, views


def _fill(
    checkpoint: Checkpoint,
    layout: Layout,
    segments: list[Segment],
    views: list[memoryview],
    config: DaemonConfig,
    progress: LoadProgress,
) -> tuple[bytes, ...]:
    """Fills the segments; gives the digest of each tensor, or none at all."""
    progress.start(layout.tensor_bytes)
    extents = {placed.spec.name: placed.extent for placed in layout.tensors}
    digests = None if config.verify == "none" else PieceDigests()
    filler = Filler(
        checkpoint.files,
        views,
        threads=config.read_threads,
        cancelled=progress.cancelled,
        done=progress.add,
        digests=digests,
    )
    stored = [tensor for tensor in checkpoint.tensors if tensor.spec.name not in checkpoint.ties]
    filler.run(plan_reads(stored, extents))
    _stop_if(progress)
    gaps: dict[int, list[Extent]] = {}
    for gap in layout.gaps():
        gaps.setdefault(gap.segment, []).append(gap)
    for index, segment in enumerate(segments):
        pad(segment.fileno(), gaps.get(index, []))
        if segment.has_hole():
            raise InternalError(f"{segment.name} has a hole after it was filled")
    if digests is None:
        return ()
    nothing = memoryview(b"")
    return tuple(
        digests.of(extent, views[extent.segment] if extent.nbytes else nothing)
        for extent in (placed.extent for placed in layout.tensors)
    )


def _pin(mappings: list[mmap.mmap], config: DaemonConfig, progress: LoadProgress, undo: ExitStack) -> Pinned:
    pinned = pin(
        [_region(mapping) for mapping in mappings],
        how=config.pin,
        device=config.device,
        cancelled=progress.cancelled,
        progress=progress.tick,
    )
    undo.callback(pinned.close)
    return pinned


def _region(mapping: mmap.mmap) -> Region:
    return Region(ctypes.addressof(ctypes.c_char.from_buffer(mapping)), len(mapping))


def _facts(
    segments: list[Segment], mappings: list[mmap.mmap], pinned: Pinned, *, placed: bool
) -> tuple[WeightsFact, ...]:
    # not asked where no page can be huge: smaps walks every one, 200 ms for 8 GiB of small ones
    mapped = huge_bytes() if huge_obstacle() is None else {}
    nodes = numa.node_bytes() if placed else {}
    facts = []
    for segment, mapping in zip(segments, mappings, strict=True):
        huge = mapped.get(segment.name, 0)
        page = HUGE_PAGE_BYTES if huge * 2 > segment.size else PAGE_BYTES
        pins = pinned.bytes_in(_region(mapping))
        on_nodes = nodes.get(segment.name, {})
        facts.append(WeightsFact(segment.name, segment.size, segment.inode, page, huge, pins, on_nodes))
    return tuple(facts)


def _by_node(facts: tuple[WeightsFact, ...]) -> str:
    totals: dict[str, int] = {}
    for fact in facts:
        for node, nbytes in fact.node_bytes.items():
            totals[node] = totals.get(node, 0) + nbytes
    return ", ".join(f"{format_bytes(nbytes)} on node {node}" for node, nbytes in totals.items())


def _check_huge(config: DaemonConfig, facts: tuple[WeightsFact, ...]) -> None:
    total, got = sum(fact.bytes for fact in facts), sum(fact.huge_bytes for fact in facts)
    if config.huge_pages == "require" and got < total:
        raise MemoryShortError(
            f"huge_pages is `require`, but only {format_bytes(got)} of {format_bytes(total)} came in 2 MiB pages:"
            " memory is fragmented",
            "echo 1 > /proc/sys/vm/compact_memory and start again, or set huge_pages: auto",
        )


def _write_files(names: Names, generation: int, checkpoint: Checkpoint, access: Access, undo: ExitStack) -> int:
    if not checkpoint.sidecars:
        return 0
    files = {sidecar.name: read_sidecar(sidecar) for sidecar in checkpoint.sidecars}
    return _write_once(names.files(generation), encode_files(files), access, undo)


def _write_once(name: str, data: bytes, access: Access, undo: ExitStack) -> int:
    inode = write_segment(name, data, access)
    undo.callback(_unlink_same, name, inode)
    return inode


def _unlink_same(name: str, inode: int) -> None:
    segment = Segment.open(name)
    if segment is not None:
        with segment:
            if segment.inode == inode:
                segment.unlink()


def _manifest(
    names: Names,
    generation: int,
    checkpoint: Checkpoint,
    layout: Layout,
    facts: tuple[WeightsFact, ...],
    files_inode: int,
    digests: tuple[bytes, ...],
    allow_types: tuple[str, ...] | None,
) -> Manifest:
    rules = f"{LAYOUT_RULES}:{layout.layers}"
    fingerprint = hashlib.blake2b(f"{checkpoint.fingerprint()}:{rules}".encode(), digest_size=16).hexdigest()
    return Manifest(
        namespace=names.namespace,
        generation=generation,
        fingerprint=fingerprint,
        structure=structure_fingerprint(layout),
        source={
            "kind": checkpoint.kind,
            "path": str(checkpoint.path),
            "files": [{"name": file.name, "bytes": file.bytes} for file in checkpoint.files],
            **({"allow_types": list(allow_types)} if allow_types else {}),
        },
        created_s=wall_s(),
        segments=tuple(SegmentFact(fact.name, fact.bytes, fact.inode) for fact in facts),
        files_inode=files_inode,
        layers=layout.layers,
        tensors=layout.tensors,
        digests=digests,
    )


def _stop_if(progress: LoadProgress) -> None:
    if progress.cancelled():
        raise LoadCancelledError


def _step(progress: LoadProgress) -> None:
    progress.tick()
    _stop_if(progress)
