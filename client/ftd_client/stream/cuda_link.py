"""The link to a GPU: one copy stream beside the streams that compute, ordered by events alone."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence
from typing import Any

import torch

from ftd.cuda.runtime import CudaError, CudaRuntime
from ftd.errors import NotBuiltError
from ftd_client.forks import forget_after_fork
from ftd_client.stream.link import Copy, LinkError, Reach, Ticket
from ftd_client.stream.staging import Batch, Staging

# What torch's compiled code asks too, of the calling thread; torch.cuda's own functions look first whether CUDA is
# initialised in this process, or build an object, which takes longer than a wait. None in a torch without CUDA.
_current_device: Any = getattr(torch._C, "_cuda_getDevice", None)
_current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_is_capturing: Any = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)


class CudaTicket(Ticket):
    """An event that is recorded once after the copies of one submit, and goes back to its pool with the ticket.

    So no event is recorded anew while somebody may still ask for what it held. The pool is as large as the most
    tickets that ever lived at once.
    """

    __slots__ = ("_pool", "event")

    def __init__(self, event: int, pool: list[int]) -> None:
        self.event = event
        self._pool = pool

    def __del__(self) -> None:
        # may run at any allocation of any thread, inside of the link's lock too: it takes none. Waits already queued
        # for the event keep what it held then (cudaEventRecord in CUDA's manual).
        self._pool.append(self.event)


class StagedTicket(Ticket):
    """Of a submit some of whose copies go through slots."""

    __slots__ = ("batch",)

    def __init__(self, batch: Batch) -> None:
        self.batch = batch


class CudaLink:
    """Copies on a stream of its own, and what the GPU cannot read by itself through page-locked slots.

    Every call works on the stream that is current for the device in the calling thread. When that is another one than
    in the last call, the new one first waits for the old one: compute of one thread never overtakes that of another
    on places that both use. So a stream that computes has to live as long as the link; torch's own do.

    Attributes:
        stream: the copy stream's handle.
    """

    def __init__(self, device: torch.device, cuda: CudaRuntime, reach: Reach | None = None) -> None:
        assert device.index is not None
        self.device = device
        self._ordinal: int = device.index
        self._cuda = cuda
        self._pid = os.getpid()
        self._forked = False
        # held over each call: ctypes lets other threads run inside of it
        self._lock = threading.Lock()
        self._closed = False
        self._compute: int | None = None
        self._events: list[int] = []
        self._pool: list[int] = []
        with torch.cuda.device(device):
            # torch's own state first: its streams are asked for below
            torch.cuda.init()  # type: ignore[no-untyped-call]
            self.stream = cuda.stream_create()
            try:
                # what compute was given before a submit, and before a change of its stream; each is recorded and
                # waited for within one call
                self._before = self._event()
            except CudaError:
                cuda.stream_destroy(self.stream)
                raise
        self._staging = Staging(cuda, device.index, reach, self.stream) if reach is not None else None
        forget_after_fork(self)

    def after_fork(self) -> None:
        """In a forked child: nothing may be called there, and the lock may be held for good."""
        self._forked = True

    def submit(self, copies: Sequence[Copy]) -> Ticket:
        if self._forked:
            raise self._belongs_elsewhere()
        if _current_device() != self._ordinal:
            # CUDA would make a context on the device that happens to be current
            with torch.cuda.device(self._ordinal):
                return self.submit(copies)
        cuda, stream, before, pool = self._cuda, self.stream, self._before, self._pool
        with self._lock:
            compute = self._turn()
            ticket = CudaTicket(pool.pop() if pool else self._event(), pool)
            cuda.event_record(before, compute)
            cuda.stream_wait_event(stream, before)
            if self._staging is not None and self._staging.takes(copies):
                end = CudaTicket(pool.pop() if pool else self._event(), pool)
                return StagedTicket(self._staging.put(copies, ticket, end))
            for dst, src, nbytes in copies:
                cuda.memcpy_h2d_async(dst, src, nbytes, stream)
            cuda.event_record(ticket.event, stream)
        return ticket

    def wait(self, ticket: Ticket) -> None:
        if self._forked:
            raise self._belongs_elsewhere()
        if _current_device() != self._ordinal:
            with torch.cuda.device(self._ordinal):
                self.wait(ticket)
            return
        if type(ticket) is CudaTicket:
            event = ticket.event
        else:
            assert isinstance(ticket, StagedTicket)
            ticket.batch.wait()
            event = ticket.batch.end.event
        with self._lock:
            if not self._closed:  # closing has waited for all of them
                self._cuda.stream_wait_event(self._turn(), event)

    def drain(self) -> None:
        if self._forked:  # nothing copies in a child
            return
        with torch.cuda.device(self._ordinal), self._lock:
            if not self._closed:
                if self._staging is not None:
                    self._staging.settle()
                self._cuda.stream_synchronize(self.stream)
                if self._compute is not None:
                    # memory is freed next, and compute on another stream than it was allocated on may still read it
                    self._cuda.stream_synchronize(self._compute)

    def close(self) -> None:
        if self._forked:  # the child has none of it
            return
        with torch.cuda.device(self._ordinal), self._lock, contextlib.ExitStack() as stack:
            if self._closed:
                return
            self._closed = True
            # a device that failed refuses all of it, and has nothing left to free
            stack.enter_context(contextlib.suppress(CudaError))
            stack.callback(self._free)
            if self._staging is not None:
                self._staging.close()
            self._cuda.stream_synchronize(self.stream)

    def _free(self) -> None:
        for event in self._events:
            with contextlib.suppress(CudaError):
                self._cuda.event_destroy(event)
        with contextlib.suppress(CudaError):
            self._cuda.stream_destroy(self.stream)
        self._events.clear()

    def _turn(self) -> int:
        """The calling thread's compute stream, behind the one that computed last. The link's device is current."""
        if self._closed:
            raise LinkError("this link is closed: expected no copies any more")
        if _is_capturing():
            raise _captured()
        compute: int = _current_stream(self._ordinal)
        last = self._compute
        if compute != last:
            if last is not None:
                cuda = self._cuda
                if cuda.stream_is_capturing(last):
                    raise _captured()
                cuda.event_record(self._before, last)
                cuda.stream_wait_event(compute, self._before)
            self._compute = compute
        return compute

    def _event(self) -> int:
        event = self._cuda.event_create()
        self._events.append(event)
        return event

    def _belongs_elsewhere(self) -> LinkError:
        return LinkError(
            f"this link belongs to process {self._pid}, this is a child forked from it, where CUDA cannot be used",
            "start the child by spawn, and offload the model there",
        )


def _captured() -> NotBuiltError:
    return NotBuiltError(
        "a streamed forward is captured into a CUDA graph: expected to run it without one",
        "run the offloaded model outside of torch.cuda.graph, or keep all of it resident",
    )
