"""Which blocks stream: so many bytes, spread over the forward as compute is."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from ftd.plan.workload import Workload

#: Share of bytes in the measure of distance: enough to order blocks whose compute is unknown or nearly nothing,
#: too little to bend the measured balance.
_BYTES_SHARE = 0.02


def spread(workload: Workload, eligible: Sequence[int], target_bytes: int) -> list[int]:
    """Blocks of about `target_bytes` in all, as even over compute time as whole blocks allow. O(n).

    Error diffusion: every block's compute earns room for bytes, and an eligible block streams when at least half of
    it has been earned.

    Args:
        eligible: indices that may be chosen, ascending.
    """
    earned_by = _earnings(workload)
    offered = sum(workload.sizes[i] for i in eligible)
    if target_bytes >= offered:
        return list(eligible)
    chosen: list[int] = []
    earned, last = 0.0, -1
    for i in eligible:
        earned += target_bytes * (earned_by[i + 1] - earned_by[last + 1])
        last = i
        size = workload.sizes[i]
        if 2 * earned >= size:
            chosen.append(i)
            earned -= size
    return chosen


def fit(workload: Workload, eligible: Sequence[int], chosen: Sequence[int], needed_bytes: int) -> list[int]:
    """`chosen`, changed until it has at least `needed_bytes` and no block more than that takes.

    Missing bytes come from the smallest eligible block that covers them, or the largest ones; then the largest
    blocks that fit into what is too much become resident. So memory is used to the last block that fits.
    """
    sizes = workload.sizes
    streamed = set(chosen)
    total = sum(sizes[i] for i in streamed)
    outside = sorted((sizes[i], i) for i in eligible if i not in streamed)
    while total < needed_bytes and outside:
        at = min(bisect_left(outside, (needed_bytes - total, -1)), len(outside) - 1)
        size, block = outside.pop(at)
        streamed.add(block)
        total += size
    inside = sorted((sizes[i], i) for i in streamed)
    while total > needed_bytes and (at := bisect_right(inside, (total - needed_bytes, len(sizes))) - 1) >= 0:
        size, block = inside.pop(at)
        streamed.discard(block)
        total -= size
    return sorted(streamed)


def _earnings(workload: Workload) -> list[float]:
    """By block, the share of the forward that has passed before it; one entry more for the end."""
    compute = sum(workload.compute_ns)
    nbytes = sum(workload.sizes)
    by_bytes = _BYTES_SHARE if compute else 1.0
    passed = [0.0]
    for time_ns, size in zip(workload.compute_ns, workload.sizes, strict=True):
        share = (1 - by_bytes) * time_ns / compute if compute else 0.0
        passed.append(passed[-1] + share + by_bytes * size / max(nbytes, 1))
    return passed
