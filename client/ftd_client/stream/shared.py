"""Shared weights as a host: in the segments' pages, of which a GPU reads what is registered; slots carry the rest."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from ftd.cuda.runtime import READ_ONLY_REGISTRATION, CudaError, CudaRuntime, load_runtime
from ftd.shm.slots import Turns
from ftd_client.load import slots
from ftd_client.stream import pinner as pinning
from ftd_client.stream.host import Host, Kind, Source
from ftd_client.stream.pinner import Chunk, Pinner
from ftd_client.views import Mapped, SharedWeights


class Place(NamedTuple):
    """Of a byte in a generation's segments."""

    segment: int
    offset: int


def shared_host(
    weights: SharedWeights,
    names: Sequence[str],
    *,
    pin: bool,
    device: torch.device,
    turns: Callable[[], Turns | None] = lambda: None,
) -> SharedHost:
    """A host of a follower's weights: each in the segment's own pages where a GPU is to read them, else in the view.

    A tensor that this process changed in place is read where it was changed, in its private view. Nothing but the first
    chunk is registered until somebody wants it. Models of one follower share registrations, in chunks of one grid, and
    the last host that is closed undoes them. Other followers of this process have mappings and registrations of their
    own.

    Args:
        pin: page-locks what is wanted, when `device` is a GPU.
        turns: among followers, for as long as anything is registered.

    Raises:
        KeyError: the generation has no such tensor.
    """
    host = SharedHost(weights, names, device)
    if pin and device.type == "cuda":
        host._pin(device, turns)
    return host


class SharedHost(Host):
    """Made by `shared_host`."""

    def __init__(self, weights: SharedWeights, names: Sequence[str], device: torch.device) -> None:
        super().__init__()
        self._pinner: Pinner | None = None
        self._segments: list[Mapped] = []
        self._starts: list[tuple[int, int]] = []  # of the segments' pages, with their numbers
        extents = {name: weights.where(name) for name in names}
        used = sorted({extent.segment for extent in extents.values() if extent.nbytes})
        for segment in used:
            self._keep(weights.private[segment])
        changed = dict.fromkeys(extents, True)
        if device.type == "cuda":
            self._segments = list(weights.shared)
            self._starts = sorted((mapped.address, number) for number, mapped in enumerate(weights.shared))
            some = {name: extent for name, extent in extents.items() if extent.nbytes}
            changed = dict(zip(some, weights.changed(list(some.values())), strict=True))
        for name, extent in extents.items():
            if not extent.nbytes:
                self.addresses[name] = 0
                continue
            pages = weights.private if changed[name] else weights.shared
            self.addresses[name] = pages[extent.segment].address + extent.offset
        self._first = next(filter(None, map(self.locate, self.addresses.values())), None)

    @property
    def kind(self) -> Kind:
        """`cuda` where what plans stream is registered, or will be; `staged` where a part goes through slots for good;
        `none` where nothing is page-locked."""
        pinner = self._pinner
        if pinner is None:
            return "none"
        return "cuda" if pinner.pinned_bytes and not pinner.refusal else "staged"

    @property
    def pinned_bytes(self) -> int:
        return self._pinner.pinned_bytes if self._pinner is not None else 0

    def locate(self, address: int) -> Place | None:
        """Where in the segments a byte lies; None of one that lies elsewhere, as this process changed it."""
        index = bisect_right(self._starts, (address, len(self._starts))) - 1
        if index < 0:
            return None
        start, segment = self._starts[index]
        return Place(segment, address - start) if address < start + self._segments[segment].nbytes else None

    def want(self, sources: Sequence[Source]) -> None:
        if self._pinner is not None:
            found = [(self.locate(address), nbytes) for address, nbytes in sources if nbytes]
            chunks = [chunk for place, nbytes in found if place for chunk in self._chunks(place, nbytes)]
            self._pinner.want(chunks, elsewhere=any(place is None for place, _ in found))

    def watch(self, told: Callable[[], None]) -> None:
        """Calls `told` as `kind` and `pinned_bytes` change, in a thread; not more often than anybody looks."""
        if self._pinner is not None:
            self._pinner.watch = told

    def samples(self, sources: Sequence[Source]) -> Sequence[Source]:
        pinned = self._pinner.regions if self._pinner is not None else []
        return [(region.address, region.nbytes) for region in pinned] or sources

    def close(self) -> None:
        super().close()
        pinner, self._pinner = self._pinner, None
        if pinner is not None:
            pinner.join()
        self._segments, self._starts = [], []

    def _pin(self, device: torch.device, turns: Callable[[], Turns | None]) -> None:
        """Registers the first chunk, which shows whether this process may; if not, sees whether it has slots."""
        ordinal = torch.cuda.current_device() if device.index is None else device.index
        cuda, reason = load_runtime()
        if cuda is None:
            self._warn(f"the shared weights cannot be pinned: {reason}; they are copied more slowly")
            return
        reason = _obstacle(cuda, ordinal)
        pinner = Pinner(cuda, ordinal, None if reason else turns(), refusal=reason)
        self._undo.callback(pinner.close)  # before it has anything to undo
        if self._first is not None:
            pinner.first(next(self._chunks(self._first, 1)))
        if not pinner.pinned_bytes:
            with torch.cuda.device(ordinal), slots.page_locked(cuda) as own:
                how = "staged" if own else "copied more slowly"
            if pinner.refusal:
                self._warn(f"the shared weights cannot be pinned: {pinner.refusal}; they are {how}")
            if not own:
                pinner.join()
                return
        self._pinner = self.reach = pinner
        size = pinning.CHUNK_BYTES
        self._borders = sorted(mapped.address + at for mapped in self._segments for at in range(0, mapped.nbytes, size))

    def _chunks(self, place: Place, nbytes: int) -> Iterator[Chunk]:
        size = pinning.CHUNK_BYTES
        for number in range(place.offset // size, (place.offset + nbytes - 1) // size + 1):
            yield Chunk(self._segments[place.segment], number)


def _obstacle(cuda: CudaRuntime, ordinal: int) -> str:
    """Why nothing can be registered. Asked, so that no call is made that is known to fail."""
    try:
        supported = cuda.device_attribute(READ_ONLY_REGISTRATION, ordinal)
    except CudaError as error:
        return error.message
    return "" if supported else f"cuda:{ordinal} registers no read-only memory"
