"""Clocks: of the CPU as it runs, of a GPU by events in the stream that computes there."""

from __future__ import annotations

import itertools

import pytest
import torch

from ftd_client.phase import clock as module
from ftd_client.phase.clock import CpuClock, CudaClock, clock_of


def test_the_cpus_time_is_monotonic_and_never_below_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    times = itertools.chain([100, 350], itertools.repeat(1))
    monkeypatch.setattr(module, "monotonic_ns", lambda: next(times))
    clock = CpuClock()
    first, second = clock.mark(), clock.mark()
    assert clock.elapsed_ns(first, second) == 250
    assert clock.elapsed_ns(second, first) == 0


def test_the_cpus_clock_sees_real_time_pass() -> None:
    clock = CpuClock()
    start = clock.mark()
    sum(range(200_000))
    assert 0 < clock.elapsed_ns(start, clock.mark()) < 10**10


class Event:
    """An event of a stream whose work takes a millisecond and a half each."""

    waited = 0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.at = 0

    def record(self, stream: int) -> None:
        Event.recorded += 1
        self.at, self.stream = Event.recorded, stream

    recorded = 0

    def synchronize(self) -> None:
        Event.waited = self.at

    def elapsed_time(self, end: Event) -> float:
        assert Event.waited >= end.at, "read before the device was there"
        return (end.at - self.at) * 1.5


def test_a_gpus_times_come_from_events_in_the_current_stream_of_that_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    clock = clock_of(torch.device("cuda", 1))
    assert isinstance(clock, CudaClock)
    start, end = clock.mark(), clock.mark()
    assert isinstance(start, Event)
    assert start.stream == "stream of cuda:1"
    assert Event.waited == 0, "marks wait for nothing"
    assert clock.elapsed_ns(start, end) == 1_500_000


def test_the_clock_is_the_devices() -> None:
    assert isinstance(clock_of(torch.device("cpu")), CpuClock)
