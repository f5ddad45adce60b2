"""A generation on its way, wherever its bytes come from: plan → segments → (filled by somebody) → pins → manifest.

Everything but the last write. What was made is one resource, `Generation`; a failure half-way removes it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import mmap
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from ftd.clock import wall_s
from ftd.config.model import DaemonConfig
from ftd.config.patterns import LayerRule, natural_key
from ftd.cuda.pin import Pinned, Region, pin
from ftd.daemon import headroom
from ftd.daemon.fill import pad
from ftd.daemon.progress import LoadProgress
from ftd.errors import InternalError, MemoryShortError
from ftd.shm import numa
from ftd.shm.digest import PieceDigests
from ftd.shm.layout import LAYOUT_RULES, Extent, Layout, lay_out, structure_fingerprint
from ftd.shm.manifest import Manifest, SegmentFact, digest_of, encode_files, encode_manifest, write_segment
from ftd.shm.names import Names
from ftd.shm.segment import HUGE_PAGE_BYTES, PAGE_BYTES, Access, Segment, huge_bytes, huge_obstacle
from ftd.tensorspec import TensorSpec
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


@dataclass(frozen=True, slots=True)
class Plan:
    """What will be made, and that there is room for it."""

    layout: Layout
    huge: bool
    placement: numa.Placement | None


def make_plan(
    specs: Sequence[TensorSpec],
    ties: Mapping[str, str],
    config: DaemonConfig,
    *,
    layers: Sequence[str],
    file_bytes: int,
    holders: Callable[[], str],
    note: Callable[[str], None],
) -> Plan:
    """Where everything will lie.

    Args:
        ties: names of tensors that have the bytes of another one, and that one's name.
        layers: patterns that group tensors into layers.
        file_bytes: of the sidecar files.
        holders: names who holds memory of earlier generations, for the message when memory is short.
        note: told what a person should know.

    Raises:
        MemoryShortError: it does not fit, or there are no huge pages where the configuration requires them.
        ConfigError: the configuration names a NUMA node that is not there.
    """
    huge = _wants_huge(config)
    placement = numa.placement(config.numa, numa.memory_nodes())
    layout = _layout(specs, ties, layers, huge, note)
    node = placement.bound if placement is not None else None
    needed = sum(layout.segments) + file_bytes + 1 * MIB + len(layout.tensors) * _MANIFEST_BYTES_A_TENSOR
    headroom.check(needed, headroom.limits(config.memory_budget, node), holders)
    return Plan(layout, huge, placement)


class Build:
    """The segments of a generation that is being made, and the steps to its end. Not thread-safe.

    Args:
        undo: gets what removes everything again, until `keep`.

    Attributes:
        segments, views: of the weights, by index; nothing in them is populated yet.
    """

    def __init__(
        self, names: Names, number: int, plan: Plan, config: DaemonConfig, access: Access, undo: ExitStack
    ) -> None:
        self._names, self._number, self._config, self._access = names, number, config, access
        self._placement = plan.placement
        self._undo = undo
        self._files_inode = 0
        self.layout = plan.layout
        self.segments: list[Segment] = []
        self._mappings: list[mmap.mmap] = []
        self.views: list[memoryview] = []
        for index, size in enumerate(plan.layout.segments):
            self._add(names.weights(number, index), size, huge=plan.huge)

    def _add(self, name: str, size: int, *, huge: bool) -> None:
        segment = Segment.create(name, size, self._access)
        self._undo.callback(segment.close)
        self._undo.callback(segment.unlink)
        self.segments.append(segment)
        mapping = segment.map_shared(writable=True, huge=huge)
        view = memoryview(mapping)
        self._undo.callback(_unmap, mapping, view)
        self._mappings.append(mapping)
        self.views.append(view)
        if self._placement is not None:
            numa.place(mapping, self._placement)

    def write_files(self, files: Mapping[str, bytes]) -> None:
        """Makes the segment of the sidecar files, if there are any."""
        if files:
            self._files_inode = self._write_once(self._names.files(self._number), encode_files(dict(files)))

    def pad(self) -> None:
        """Fills what is no tensor's, once the tensors are there.

        Raises:
            MemoryShortError: /dev/shm ran full.
            InternalError: some tensor is not there.
        """
        gaps: dict[int, list[Extent]] = {}
        for gap in self.layout.gaps():
            gaps.setdefault(gap.segment, []).append(gap)
        for index, segment in enumerate(self.segments):
            pad(segment.fileno(), gaps.get(index, []))
            if segment.has_hole():
                raise InternalError(f"{segment.name} has a hole after it was filled")

    def digests(self, pieces: PieceDigests) -> tuple[bytes, ...]:
        """Of each tensor, in the order of the layout."""
        nothing = memoryview(b"")
        return tuple(
            pieces.of(extent, self.views[extent.segment] if extent.nbytes else nothing)
            for extent in (placed.extent for placed in self.layout.tensors)
        )

    def finish(
        self,
        progress: LoadProgress,
        *,
        cancelled: Callable[[], bool],
        note: Callable[[str], None],
        identity: str,
        source: dict[str, Any],
        digests: tuple[bytes, ...],
    ) -> Generation:
        """Pins the weights and writes the manifest.

        Args:
            identity: of the weights' source; what its layout adds makes the fingerprint.
            source: as the manifest holds it.
            digests: of the tensors in the order of the layout, or none.

        Raises:
            LoadCancelledError: it was asked to end.
            MemoryShortError: not all pages are huge where the configuration requires them, or /dev/shm ran full.
        """
        progress.enter("pinning", total=sum(self.layout.segments))
        pinned = self._pin(progress, cancelled)
        for text in pinned.warnings:
            note(text)
        if cancelled():
            raise LoadCancelledError
        progress.enter("publishing")
        facts = self._facts(pinned)
        _check_huge(self._config, facts)
        if self._placement is not None:
            log.info("numa: %s: %s", self._placement.setting, _by_node(facts))
        manifest = self._manifest(facts, identity, source, digests)
        sealed = encode_manifest(manifest)
        self._write_once(self._names.manifest(self._number), sealed)
        return Generation(manifest, sealed, facts, pinned, self._mappings)

    def keep(self) -> None:
        """From here on the names belong to the holder of the life lock."""
        self._undo.pop_all()
        for segment in self.segments:
            segment.close()

    def _pin(self, progress: LoadProgress, cancelled: Callable[[], bool]) -> Pinned:
        pinned = pin(
            [_region(mapping) for mapping in self._mappings],
            how=self._config.pin,
            device=self._config.device,
            cancelled=cancelled,
            progress=progress.tick,
        )
        self._undo.callback(pinned.close)
        return pinned

    def _facts(self, pinned: Pinned) -> tuple[WeightsFact, ...]:
        # not asked where no page can be huge: smaps walks every one, 200 ms for 8 GiB of small ones
        mapped = huge_bytes() if huge_obstacle() is None else {}
        nodes = numa.node_bytes() if self._placement is not None else {}
        facts = []
        for segment, mapping in zip(self.segments, self._mappings, strict=True):
            huge = mapped.get(segment.name, 0)
            page = HUGE_PAGE_BYTES if huge * 2 > segment.size else PAGE_BYTES
            pins = pinned.bytes_in(_region(mapping))
            on_nodes = nodes.get(segment.name, {})
            facts.append(WeightsFact(segment.name, segment.size, segment.inode, page, huge, pins, on_nodes))
        return tuple(facts)

    def _manifest(
        self, facts: tuple[WeightsFact, ...], identity: str, source: dict[str, Any], digests: tuple[bytes, ...]
    ) -> Manifest:
        rules = f"{LAYOUT_RULES}:{self.layout.layers}"
        return Manifest(
            namespace=self._names.namespace,
            generation=self._number,
            fingerprint=hashlib.blake2b(f"{identity}:{rules}".encode(), digest_size=16).hexdigest(),
            structure=structure_fingerprint(self.layout),
            source=source,
            created_s=wall_s(),
            segments=tuple(SegmentFact(fact.name, fact.bytes, fact.inode) for fact in facts),
            files_inode=self._files_inode,
            layers=self.layout.layers,
            tensors=self.layout.tensors,
            digests=digests,
        )

    def _write_once(self, name: str, data: bytes) -> int:
        inode = write_segment(name, data, self._access)
        self._undo.callback(_unlink_same, name, inode)
        return inode


def _wants_huge(config: DaemonConfig) -> bool:
    if config.huge_pages == "never":
        return False
    obstacle = huge_obstacle()
    if obstacle is not None and config.huge_pages == "require":
        raise MemoryShortError(
            f"huge_pages is `require`, but {obstacle.found}: expected {obstacle.expected}", obstacle.remedy
        )
    return obstacle is None


def _layout(
    specs: Sequence[TensorSpec],
    ties: Mapping[str, str],
    patterns: Sequence[str],
    huge: bool,
    note: Callable[[str], None],
) -> Layout:
    rule = LayerRule(tuple(patterns))
    for pattern in rule.unmatched([spec.name for spec in specs]):
        note(f"layers: pattern {pattern!r} matches no tensor")
    layer = {spec.name: rule.layer_of(spec.name) for spec in specs}
    ordered = sorted(specs, key=lambda spec: (natural_key(layer[spec.name]), natural_key(spec.name)))
    pages = HUGE_PAGE_BYTES if huge else PAGE_BYTES
    return lay_out(ordered, layer.__getitem__, page_bytes=pages, same_as=ties)


def _region(mapping: mmap.mmap) -> Region:
    return Region(ctypes.addressof(ctypes.c_char.from_buffer(mapping)), len(mapping))


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


def _unmap(mapping: mmap.mmap, view: memoryview) -> None:
    """Gives pages and descriptor back now: the frames of an error would hold them until they are collected."""
    with contextlib.suppress(BufferError):  # somebody has a part of the view, and it goes with that
        view.release()
        mapping.close()


def _unlink_same(name: str, inode: int) -> None:
    segment = Segment.open(name)
    if segment is not None:
        with segment:
            if segment.inode == inode:
                segment.unlink()
