"""Device memory that a plan may take: the fraction asked for, less what others and a forward's activations need."""

from __future__ import annotations

import psutil
import torch

from ftd.units import MIB

#: Kept free for activations while nothing is measured yet: this share of the limit, and no less than so much.
_UNMEASURED_SHARE = 1 / 16
_UNMEASURED_BYTES = 64 * MIB


def budget_bytes(
    fraction: float | None,
    device: torch.device,
    *,
    ours: int,
    others: int,
    allocated_before: int | None = None,
    activation_bytes: int | None,
) -> int | None:
    """Bytes for managed weights; None without a fraction (latency mode).

    Args:
        fraction: of the device's memory, for the peak of all that this process allocates there.
        ours: bytes that the plan at work holds.
        others: on the CPU, where no allocator tells: bytes of what is not managed.
        allocated_before: on CUDA, what this process had allocated when the last forward began: now, at its end, its
            output is there too, which activations count already. None where there was none.
        activation_bytes: at the peak of a forward; None while it is not measured.
    """
    if fraction is None:
        return None
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        free, _ = torch.cuda.mem_get_info(device)
        allocated = torch.cuda.memory_allocated(device)
        # what torch keeps for itself is free for us, and what others leave free is all there is
        reachable = free + torch.cuda.memory_reserved(device)
        others = (allocated if allocated_before is None else allocated_before) - ours
    else:
        memory = psutil.virtual_memory()
        total, reachable = memory.total, memory.available + ours + others
    limit = min(int(fraction * total), reachable)
    if activation_bytes is None:
        activation_bytes = 0 if device.type == "cpu" else max(int(limit * _UNMEASURED_SHARE), _UNMEASURED_BYTES)
    return max(0, limit - others - activation_bytes)


class Activations:
    """The peak of what forwards allocate beyond what is there when they begin.

    On CUDA it resets torch's peak statistics of that device at the beginning of each forward that it measures.

    Attributes:
        before_bytes: what was allocated when the last one began.
        peak_bytes: the most that one allocated beyond that.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.before_bytes: int | None = None
        self.peak_bytes: int | None = None

    def begin(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            self.before_bytes = torch.cuda.memory_allocated(self._device)

    def finish(self) -> None:
        if self.before_bytes is not None:
            peak = torch.cuda.max_memory_allocated(self._device) - self.before_bytes
            self.peak_bytes = max(self.peak_bytes or 0, peak)
