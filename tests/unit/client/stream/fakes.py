"""A GPU at the CUDA seam: streams and events as CUDA defines them, run in any order that they allow."""

from __future__ import annotations

import contextlib
import ctypes
import random
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from ftd.cuda.runtime import READ_ONLY_REGISTRATION, CudaError, CudaRuntime
from ftd_client.stream import cuda_link


class FakeCuda:
    """Nothing runs before it has to: `run` picks, by chance, among the streams whose next operation may run.

    Attributes:
        refuse: names of calls that fail.
        refuse_at: the registration that fails, counted from 1.
        registered: address → (bytes, read-only).
    """

    def __init__(self, *, seed: int = 0, read_only: bool = True, refuse_at: int = 0) -> None:
        self._chance = random.Random(seed)
        self._streams: dict[int, deque[Callable[[], None] | tuple[int, int]]] = {}
        self._recorded: dict[int, int] = {}
        self._done: dict[int, int] = {}
        self._handles = iter(range(1000, 10**9))
        self.streams: set[int] = set()
        self.events: set[int] = set()
        self.capturing: set[int] = set()
        self.current = 0
        self.refuse: set[str] = set()
        self.read_only, self.refuse_at = read_only, refuse_at
        self.calls: list[tuple[Any, ...]] = []
        self.registered: dict[int, tuple[int, bool]] = {}

    def load(self) -> tuple[CudaRuntime | None, str]:
        return self, ""

    def device_count(self) -> int:
        return 2

    def use_device(self, ordinal: int) -> None:
        self.current = ordinal

    def device_attribute(self, attribute: int, ordinal: int) -> int:
        assert attribute == READ_ONLY_REGISTRATION
        return int(self.read_only)

    def host_register(self, address: int, nbytes: int, *, read_only: bool = False) -> None:
        self._log("register", address)
        for start, (size, _) in self.registered.items():
            assert address + nbytes <= start or start + size <= address, "registered twice"
        if len(self.named("register")) == self.refuse_at:
            raise CudaError("cudaHostRegister: out of memory (error 2)")
        self.registered[address] = nbytes, read_only

    def host_unregister(self, address: int) -> None:
        self._log("unregister", address)
        del self.registered[address]

    def memcpy_h2d_async(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        self._log("memcpy", dst, src, nbytes, stream)
        self._streams[stream].append(lambda: ctypes.memmove(dst, src, nbytes) and None)

    def stream_create(self) -> int:
        handle = self.new_stream()
        self.streams.add(handle)
        self._log("stream_create", self.current)
        return handle

    def new_stream(self) -> int:
        """A stream of somebody else's."""
        handle = next(self._handles)
        self._streams[handle] = deque()
        return handle

    def stream_destroy(self, stream: int) -> None:
        self.streams.remove(stream)

    def stream_wait_event(self, stream: int, event: int) -> None:
        self._log("wait", stream, event)
        if event in self._recorded:
            self._streams[stream].append((event, self._recorded[event]))

    def stream_synchronize(self, stream: int) -> None:
        self._log("synchronize", stream)
        while self._streams[stream]:
            self.step()

    def stream_is_capturing(self, stream: int) -> bool:
        return stream in self.capturing

    def event_create(self, *, timing: bool = False) -> int:
        self._log("event_create", self.current)
        handle = next(self._handles)
        self.events.add(handle)
        return handle

    def event_destroy(self, event: int) -> None:
        self.events.remove(event)

    def event_record(self, event: int, stream: int) -> None:
        self._log("record", event, stream)
        assert stream not in self.capturing
        self._recorded[event] = version = self._recorded.get(event, 0) + 1
        self._streams[stream].append(lambda: self._done.update({event: max(version, self._done.get(event, 0))}))

    def event_query(self, event: int) -> bool:
        return self._done.get(event, 0) == self._recorded.get(event, 0)

    def event_synchronize(self, event: int) -> None:
        while not self.event_query(event):
            self.step()

    def event_elapsed_ms(self, start: int, end: int) -> float:
        return 1.0

    def compute(self, stream: int, work: Callable[[], None]) -> None:
        """Queues compute."""
        self._streams[stream].append(work)

    def step(self) -> bool:
        """Runs one operation; False when there is none."""
        ready = [queue for queue in self._streams.values() if queue and self._may_run(queue[0])]
        if not ready:
            assert not any(self._streams.values()), "streams that wait for one another"
            return False
        operation = self._chance.choice(ready).popleft()
        if callable(operation):
            operation()
        return True

    def run(self) -> None:
        while self.step():
            pass

    def named(self, call: str) -> list[tuple[Any, ...]]:
        return [arguments for name, *arguments in self.calls if name == call]  # type: ignore[misc]

    def _may_run(self, operation: Callable[[], None] | tuple[int, int]) -> bool:
        return callable(operation) or self._done.get(operation[0], 0) >= operation[1]

    def _log(self, name: str, *arguments: Any) -> None:
        if name in self.refuse:
            raise CudaError(f"{name}: refused (error 2)")
        self.calls.append((name, *arguments))


class Threads:
    """What torch says of the calling thread, for a fake GPU: its device, and its stream there."""

    def __init__(self, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
        self._cuda = cuda
        self.stream = cuda.new_stream()
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: cuda.current)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.stream in cuda.capturing)
        monkeypatch.setattr(cuda_link, "_current_stream", lambda ordinal: self.stream)
        monkeypatch.setattr(torch.cuda, "device", self._device)
        monkeypatch.setattr(torch.cuda, "init", lambda: None)

    @contextlib.contextmanager
    def _device(self, device: Any) -> Iterator[None]:
        before, index = self._cuda.current, device if isinstance(device, int) else device.index
        self._cuda.current = before if index is None else index
        yield
        self._cuda.current = before
