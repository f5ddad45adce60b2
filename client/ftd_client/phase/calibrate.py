"""What a copy to the device costs, measured once per device and process."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ftd.clock import monotonic_ns
from ftd.plan.cost import CopyCost, Sample
from ftd.units import MIB
from ftd_client.stream.link import Copy, Link
from ftd_client.stream.memory import Memory

#: Copies of each size, and how many are queued at once: as in a forward, one begins while another runs.
_SIZES = ((MIB // 4, 16), (MIB, 16), (4 * MIB, 8), (16 * MIB, 4), (64 * MIB, 2))
_ROUNDS = 3

#: Cost of copies that no link can be asked about: a model smaller than the smallest size.
_SMALL = CopyCost(10_000, 5e9)


class CopyCosts:
    """Costs by device and kind of host memory."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], CopyCost] = {}

    def of(self, link: Link, kind: str, sources: Sequence[tuple[int, int]]) -> CopyCost:
        """The cost of copies over `link`.

        Args:
            kind: how the host's memory is pinned.
            sources: (address, bytes) of host memory to copy from, such as the model's.
        """
        key = (str(link.device), kind)
        if key not in self._known:
            self._known[key] = _measure(link, sources)
        return self._known[key]


def _measure(link: Link, sources: Sequence[tuple[int, int]]) -> CopyCost:
    address, most = max(sources, key=lambda source: source[1], default=(0, 0))
    samples: list[Sample] = []
    sizes = [(nbytes, count) for nbytes, count in _SIZES if nbytes <= most]
    if not sizes:
        return _SMALL
    scratch = Memory(max(nbytes for nbytes, _ in sizes), link.device)
    if link.device.type == "cuda":
        torch.cuda.current_stream(link.device).synchronize()
    for nbytes, count in sizes:
        # different parts of the source: what one copy left in a cache must not speed the next one up
        places = [address + (i * nbytes) % max(most - nbytes + 1, 1) // 512 * 512 for i in range(count)]
        copies = [Copy(scratch.address, place, nbytes) for place in places]
        for _ in range(_ROUNDS):
            link.drain()
            began_ns = monotonic_ns()
            link.submit(copies)
            link.drain()
            samples.append(Sample(nbytes, (monotonic_ns() - began_ns) / count))
    return CopyCost.fit(samples)
