"""Costs of copies: measured over the link they are used on, once per device and kind of memory."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from ftd.units import MIB
from ftd_client.phase import calibrate as module
from ftd_client.phase.calibrate import CopyCosts
from ftd_client.stream.link import Copy, Ticket

BANDWIDTH, LATENCY_NS = 8e9, 20_000


class Timed:
    """A link whose copies take the time that they should, on a clock of its own."""

    def __init__(self, device: str = "cpu", bytes_per_s: float = BANDWIDTH) -> None:
        self.device = torch.device(device)
        self.now_ns, self.pending_ns = 0.0, 0.0
        self.bytes_per_s = bytes_per_s
        self.copies: list[Copy] = []

    def submit(self, copies: Sequence[Copy]) -> Ticket:
        self.copies += copies
        self.pending_ns += sum(LATENCY_NS + copy.nbytes / self.bytes_per_s * 1e9 for copy in copies)
        return Ticket()

    def wait(self, ticket: Ticket) -> None:
        raise AssertionError("compute has nothing to wait for")

    def drain(self) -> None:
        self.now_ns += self.pending_ns
        self.pending_ns = 0.0

    def close(self) -> None:
        raise AssertionError("not ours")


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Timed:
    link = Timed()
    monkeypatch.setattr(module, "monotonic_ns", lambda: round(link.now_ns))
    return link


def test_the_cost_is_that_of_the_link(timed: Timed) -> None:
    cost = CopyCosts().of(timed, "cuda", [(4096, MIB), (1 << 30, 64 * MIB), (8192, 7)])
    assert cost.bytes_per_s == pytest.approx(BANDWIDTH, rel=0.02)
    assert cost.latency_ns == pytest.approx(LATENCY_NS, rel=0.05)


def test_only_the_largest_source_is_read_and_only_within_it(timed: Timed) -> None:
    address, nbytes = 1 << 30, 5 * MIB + 77
    CopyCosts().of(timed, "cuda", [(4096, MIB), (address, nbytes)])
    assert timed.copies
    assert all(address <= copy.src and copy.src + copy.nbytes <= address + nbytes for copy in timed.copies)
    assert max(copy.nbytes for copy in timed.copies) == 4 * MIB
    # neighbours in the queue don't find in a cache what the one before has read
    sources = [copy.src for copy in timed.copies if copy.nbytes == MIB][:4]
    assert len(set(sources)) == 4


def test_it_is_measured_once_per_device_and_kind(timed: Timed, monkeypatch: pytest.MonkeyPatch) -> None:
    costs, sources = CopyCosts(), [(4096, MIB)]
    first = costs.of(timed, "cuda", sources)
    count = len(timed.copies)
    assert costs.of(timed, "cuda", [(1 << 40, 64 * MIB)]) is first
    assert len(timed.copies) == count
    costs.of(timed, "none", sources)
    assert len(timed.copies) == 2 * count
    CopyCosts().of(timed, "cuda", sources)
    assert len(timed.copies) == 3 * count


@pytest.mark.parametrize("sources", [[], [(4096, 0)], [(4096, 1000)]])
def test_a_model_too_small_to_measure_gets_a_usable_cost(timed: Timed, sources: list[tuple[int, int]]) -> None:
    cost = CopyCosts().of(timed, "cuda", sources)
    assert not timed.copies
    assert cost.bytes_per_s > 0
