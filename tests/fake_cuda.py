"""GPUs at the CUDA seam: streams, events and memory as CUDA defines them, run in any order that CUDA allows."""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import threading
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, NamedTuple

from ftd.cuda.runtime import IPC_HANDLE_BYTES, READ_ONLY_REGISTRATION, CudaError, CudaRuntime


class Allocation(NamedTuple):
    """Device memory, that is to say host memory.

    Attributes:
        peer: where others see it once they opened it.
    """

    address: int
    nbytes: int
    ordinal: int
    peer: int
    keep: object

    def read(self, at: int = 0, nbytes: int | None = None) -> bytes:
        return ctypes.string_at(self.address + at, self.nbytes - at if nbytes is None else nbytes)


class FakeCuda:
    """Nothing runs before it has to: `run` picks, by chance, among the streams whose next operation may run.

    One process and all others at once: what it exports it may open. Thread-safe; each thread has a device.

    Attributes:
        refuse: names of calls that fail.
        refuse_at: the registration that fails, counted from 1.
        before: asked before a call with its name and which of that name it is, counted from 1; may raise or wait.
        registered: address → (bytes, read-only).
        opened: address → how often it is open.
        contexts: ordinals that have one.
    """

    def __init__(self, *, seed: int = 0, read_only: bool = True, refuse_at: int = 0, devices: int = 2) -> None:
        self._chance = random.Random(seed)
        self._lock = threading.RLock()
        self._thread = threading.local()
        self._streams: dict[int, deque[Callable[[], None] | tuple[int, int]]] = {}
        self._recorded: dict[int, int] = {}
        self._done: dict[int, int] = {}
        self._handles = iter(range(1000, 10**9))
        self.uuids = [bytes([ordinal + 1]) * 16 for ordinal in range(devices)]
        self.streams: set[int] = set()
        self.events: set[int] = set()
        self.capturing: set[int] = set()
        self.refuse: set[str] = set()
        self.before: Callable[[str, int], None] = lambda name, count: None
        self.read_only, self.refuse_at = read_only, refuse_at
        self.calls: list[tuple[Any, ...]] = []
        self.counts: Counter[str] = Counter()
        self.registered: dict[int, tuple[int, bool]] = {}
        self.allocations: list[Allocation] = []
        self.opened: Counter[int] = Counter()
        self.contexts: set[int] = set()
        self._closed: dict[int, int] = {}  # memory that was opened once

    # --- the runtime ------------------------------------------------------------------------------------------------

    def load(self) -> tuple[CudaRuntime | None, str]:
        return self, ""

    def device_count(self) -> int:
        return len(self.uuids)

    def device_uuid(self, ordinal: int) -> bytes:
        self._enter("device_uuid")
        return self.uuids[ordinal]

    def use_device(self, ordinal: int) -> None:
        self._enter("use_device")
        self.current = ordinal
        self.contexts.add(ordinal)

    def ask_device(self) -> None:
        self._enter("ask_device")

    def device_attribute(self, attribute: int, ordinal: int) -> int:
        assert attribute == READ_ONLY_REGISTRATION
        return int(self.read_only)

    def host_register(self, address: int, nbytes: int, *, read_only: bool = False) -> None:
        self._log("register", address)
        with self._lock:
            for start, (size, _) in self.registered.items():
                assert address + nbytes <= start or start + size <= address, "registered twice"
            if len(self.named("register")) == self.refuse_at:
                raise CudaError("cudaHostRegister: out of memory (error 2)")
            self.registered[address] = nbytes, read_only

    def host_unregister(self, address: int) -> None:
        self._log("unregister", address)
        with self._lock:
            del self.registered[address]

    def allocation_of(self, address: int) -> tuple[int, int]:
        self._enter("allocation_of")
        with self._lock:
            for each in self.allocations:
                for start in (each.address, each.peer if self.opened[each.peer] else each.address):
                    if start <= address < start + each.nbytes:
                        return start, each.nbytes
        raise CudaError("cuMemGetAddressRange_v2: error 1")

    def ipc_export(self, address: int) -> bytes:
        self._enter("ipc_export")
        with self._lock:
            for each in self.allocations:
                if each.address <= address < each.address + each.nbytes:
                    return self.handle(each)
        raise CudaError("cudaIpcGetMemHandle: invalid argument (error 1)")

    def ipc_open(self, handle: bytes) -> int:
        self._log("ipc_open", handle)
        with self._lock:
            for each in self.allocations:
                if handle == self.handle(each):
                    if each.ordinal != self.current:
                        break
                    self._closed.pop(each.peer, None)
                    self.opened[each.peer] += 1
                    return each.peer
        raise CudaError("cudaIpcOpenMemHandle: invalid device context (error 201)")

    def ipc_close(self, address: int) -> None:
        self._log("ipc_close", address)
        with self._lock:
            if not self.opened[address]:
                raise CudaError("cudaIpcCloseMemHandle: invalid argument (error 1)")
            self.opened[address] -= 1
            if not self.opened[address]:
                del self.opened[address]
                for each in self.allocations:
                    if each.peer == address != each.address:
                        self._closed[address] = each.nbytes

    def copy_pinned(self, dst: int, src: int, nbytes: int, stream: int, event: int) -> None:
        assert any(at <= src and src + nbytes <= at + size for at, (size, _) in self.registered.items()), "not pinned"
        self.memcpy_h2d_async(dst, src, nbytes, stream)
        self.event_record(event, stream)

    def memcpy_h2d_async(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        self._log("memcpy", dst, src, nbytes, stream)
        with self._lock:
            for start, (size, _) in self.registered.items():
                inside = start <= src and src + nbytes <= start + size
                if not inside and start < src + nbytes and src < start + size:
                    raise CudaError("cudaMemcpyAsync: invalid argument (error 1)")  # it straddles two registrations
            self._streams[stream].append(lambda: self._copy(dst, src, nbytes))

    def stream_create(self) -> int:
        handle = self.new_stream()
        self._log("stream_create", self.current)
        self.streams.add(handle)
        return handle

    def stream_destroy(self, stream: int) -> None:
        self._enter("stream_destroy")
        self.streams.remove(stream)

    def stream_wait_event(self, stream: int, event: int) -> None:
        self._log("wait", stream, event)
        with self._lock:
            if event in self._recorded:
                self._streams[stream].append((event, self._recorded[event]))

    def stream_synchronize(self, stream: int) -> None:
        self._log("synchronize", stream)
        with self._lock:
            while self._streams[stream]:
                self.step()

    def stream_is_capturing(self, stream: int) -> bool:
        return stream in self.capturing

    def event_create(self) -> int:
        self._log("event_create", self.current)
        with self._lock:
            handle = next(self._handles)
            self.events.add(handle)
            return handle

    def event_destroy(self, event: int) -> None:
        self._enter("event_destroy")
        self.events.remove(event)

    def event_record(self, event: int, stream: int) -> None:
        self._log("record", event, stream)
        assert stream not in self.capturing
        with self._lock:
            self._recorded[event] = version = self._recorded.get(event, 0) + 1
            self._streams[stream].append(lambda: self._done.update({event: max(version, self._done.get(event, 0))}))

    def event_query(self, event: int) -> bool:
        return self._done.get(event, 0) == self._recorded.get(event, 0)

    def event_synchronize(self, event: int) -> None:
        self._enter("event_synchronize")
        with self._lock:
            while not self.event_query(event):
                self.step()

    # --- the tests' side --------------------------------------------------------------------------------------------

    @property
    def current(self) -> int:
        """The calling thread's device."""
        return int(getattr(self._thread, "device", 0))

    @current.setter
    def current(self, ordinal: int) -> None:
        self._thread.device = ordinal

    def allocate(self, nbytes: int, ordinal: int = 0) -> Allocation:
        """Zeroed device memory of another process, which this one sees elsewhere once it has opened it."""
        fd = os.memfd_create("device memory")
        try:
            os.ftruncate(fd, nbytes)
            views = [mmap.mmap(fd, nbytes) for _ in range(2)]
        finally:
            os.close(fd)
        address, peer = (ctypes.addressof(ctypes.c_char.from_buffer(view)) for view in views)
        return self.adopt(address, nbytes, ordinal, peer=peer, keep=views)

    def adopt(
        self, address: int, nbytes: int, ordinal: int = 0, *, peer: int | None = None, keep: object = None
    ) -> Allocation:
        """Takes memory for an allocation of a device."""
        made = Allocation(address, nbytes, ordinal, address if peer is None else peer, keep)
        with self._lock:
            self.allocations.append(made)
        return made

    def handle(self, allocation: Allocation) -> bytes:
        """What its owner exports."""
        return (b"handle %d" % allocation.address).ljust(IPC_HANDLE_BYTES, b"\0")

    def new_stream(self) -> int:
        """A stream of somebody else's."""
        with self._lock:
            handle = next(self._handles)
            self._streams[handle] = deque()
            return handle

    def compute(self, stream: int, work: Callable[[], None]) -> None:
        """Queues compute."""
        self._streams[stream].append(work)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is queued anywhere."""
        with self._lock:
            return not any(self._streams.values())

    def step(self) -> bool:
        """Runs one operation; False when there is none."""
        with self._lock:
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

    def lose(self) -> None:
        """What is queued never runs: its device is lost."""
        with self._lock:
            for queue in self._streams.values():
                queue.clear()

    def named(self, call: str) -> list[tuple[Any, ...]]:
        with self._lock:
            return [arguments for name, *arguments in self.calls if name == call]  # type: ignore[misc]

    def _copy(self, dst: int, src: int, nbytes: int) -> None:
        for start, size in self._closed.items():
            assert dst + nbytes <= start or start + size <= dst, "a copy into memory that was closed"
        ctypes.memmove(dst, src, nbytes)

    def _may_run(self, operation: Callable[[], None] | tuple[int, int]) -> bool:
        return callable(operation) or self._done.get(operation[0], 0) >= operation[1]

    def _enter(self, name: str) -> None:
        with self._lock:
            self.counts[name] += 1
            count = self.counts[name]
        self.before(name, count)  # outside of the lock: it may wait
        if name in self.refuse:
            raise CudaError(f"{name}: refused (error 2)")

    def _log(self, name: str, *arguments: Any) -> None:
        self._enter(name)
        with self._lock:
            self.calls.append((name, *arguments))
