"""Which blocks stream: so many bytes, spread over the forward as compute is."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate

from ftd.plan.workload import Workload

#: Share of bytes in the measure of distance: enough to order blocks whose compute is unknown or nearly nothing,
#: too little to bend the measured balance.
_BYTES_SHARE = 0.02


def spread(workload: Workload, eligible: Sequence[int], target_bytes: int, lean: float = 0.0) -> list[int]:
    """Blocks of about `target_bytes` in all, as even over compute time as whole blocks allow. O(n).

    Error diffusion, apart for blocks of each order of size: every block's compute earns room for bytes, and an
    eligible block streams when at least half of it has been earned.

    Args:
        eligible: indices that may be chosen, ascending.
        lean: 0 takes the same share of small and large blocks; below 0 more of the small, above 0 more of the large.
            Small ones between large ones let a ring of hardly more than one large block stay busy.
    """
    sizes = workload.sizes
    offered: dict[int, int] = {}
    for i in eligible:
        offered[sizes[i].bit_length()] = offered.get(sizes[i].bit_length(), 0) + sizes[i]
    if target_bytes >= sum(offered.values()):
        return list(eligible)
    wanted = _shares(offered, target_bytes, lean)
    passed = _passed(workload)
    first = passed[eligible[0]] if eligible else 0.0
    last_seen = dict.fromkeys(offered, first)
    earned = dict.fromkeys(offered, 0.0)
    whole = (passed[-1] - first) or 1.0
    chosen: list[int] = []
    for i in eligible:
        size = sizes[i]
        group = size.bit_length()
        earned[group] += wanted[group] * (passed[i + 1] - last_seen[group]) / whole
        last_seen[group] = passed[i + 1]
        if 2 * earned[group] >= size:
            chosen.append(i)
            earned[group] -= size
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


def _shares(offered: dict[int, int], target_bytes: int, lean: float) -> dict[int, float]:
    """By order of size, the bytes to stream: shares as 2 ** (lean · order), none above what is offered."""
    wanted = dict.fromkeys(offered, 0.0)
    open_groups, left = set(offered), float(target_bytes)
    middle = max(offered)
    while open_groups and left > 0:
        weight = {group: offered[group] * 2.0 ** (lean * (group - middle)) for group in open_groups}
        unit = left / sum(weight.values())
        full = {group for group in open_groups if weight[group] * unit >= offered[group]}
        for group in full or open_groups:
            wanted[group] = float(offered[group]) if full else weight[group] * unit
            left -= wanted[group]
        open_groups -= full or open_groups
    return wanted


def _passed(workload: Workload) -> list[float]:
    """By block, the share of the forward that has passed before it; one entry more for the end."""
    compute, nbytes = sum(workload.compute_ns), max(sum(workload.sizes), 1)
    by_bytes = _BYTES_SHARE if compute else 1.0
    by_compute = (1 - by_bytes) / compute if compute else 0.0
    shares = (
        by_compute * time_ns + by_bytes * size / nbytes
        for time_ns, size in zip(workload.compute_ns, workload.sizes, strict=True)
    )
    return list(accumulate(shares, initial=0.0))
