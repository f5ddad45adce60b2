"""Points in time of compute: of the CPU as it runs, of a GPU by events in its stream."""

from __future__ import annotations

import torch

from ftd.clock import monotonic_ns
from ftd_client.phase.observe import Clock


class CpuClock:
    """Compute on the CPU is done when it returns."""

    def mark(self) -> object:
        return monotonic_ns()

    def elapsed_ns(self, start: object, end: object) -> int:
        assert isinstance(start, int)
        assert isinstance(end, int)
        return max(0, end - start)


class CudaClock:
    """Events in the stream that computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> object:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def elapsed_ns(self, start: object, end: object) -> int:
        assert isinstance(start, torch.cuda.Event)
        assert isinstance(end, torch.cuda.Event)
        end.synchronize()
        milliseconds: float = start.elapsed_time(end)
        return max(0, round(milliseconds * 1e6))


def clock_of(device: torch.device) -> Clock:
    return CpuClock() if device.type == "cpu" else CudaClock(device)
