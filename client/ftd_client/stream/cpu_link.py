"""The link to places in host memory: real copies on a thread, so that the engine runs and is tested without a GPU."""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from queue import SimpleQueue

import torch

from ftd_client.stream.link import Copy, LinkError, Ticket


class Job(Ticket):
    """Copies to be made, and whether they were."""

    __slots__ = ("copies", "done", "error")

    def __init__(self, copies: Sequence[Copy]) -> None:
        self.copies = copies
        self.done = threading.Event()
        self.error: BaseException | None = None


Jobs = SimpleQueue[Job | None]


def move(copies: Sequence[Copy]) -> None:
    """Makes the copies. ctypes lets go of the interpreter lock meanwhile."""
    for copy in copies:
        ctypes.memmove(copy.dst, copy.src, copy.nbytes)


def in_order(jobs: Jobs) -> Iterable[Job]:
    """First in, first out, until the link is closed."""
    return iter(jobs.get, None)


class CpuLink:
    """One thread that copies. Compute on the CPU is done when the call returns, so a job need not wait for any.

    Args:
        copy: makes the copies of a job; tests delay them or fail here.
        order: the jobs of the queue, until it gives None; tests change the order here, and have to keep that of
            jobs whose places overlap.
    """

    device = torch.device("cpu")

    def __init__(
        self,
        copy: Callable[[Sequence[Copy]], None] = move,
        order: Callable[[Jobs], Iterable[Job]] = in_order,
    ) -> None:
        self._pid = os.getpid()
        self._jobs: Jobs = SimpleQueue()
        self._lock = threading.Lock()
        self._pending: deque[Job] = deque()  # those that are done leave when the next one comes
        # the thread does not hold the link: one that is dropped without `close` ends its thread too
        self._thread = threading.Thread(target=_work, args=(self._jobs, copy, order), name="ftd-copy", daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, self._jobs.put, None)
        self._end.atexit = False

    def submit(self, copies: Sequence[Copy]) -> Ticket:
        self._check_process()
        job = Job(tuple(copies))
        with self._lock:
            if not self._end.alive:
                raise LinkError("this link is closed: expected no copies any more")
            while self._pending and self._pending[0].done.is_set():
                self._pending.popleft()
            try:
                self._pending.append(job)
                self._jobs.put(job)
            except BaseException:  # an interrupt in between: nobody would ever call it done
                job.done.set()
                raise
        return job

    def wait(self, ticket: Ticket) -> None:
        assert isinstance(ticket, Job)
        if not ticket.done.is_set():
            self._check_process()
            ticket.done.wait()
        if ticket.error is not None:
            raise LinkError(
                f"copying {sum(copy.nbytes for copy in ticket.copies)} bytes failed:"
                f" {type(ticket.error).__name__}: {ticket.error}"
            ) from ticket.error

    def drain(self) -> None:
        if self._pid != os.getpid():  # nothing copies in a child
            return
        with self._lock:
            pending = tuple(self._pending)
        for job in pending:
            job.done.wait()

    def close(self) -> None:
        if self._pid != os.getpid():
            return
        with self._lock:
            self._end()
        self._thread.join()
        self._pending.clear()

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise LinkError(
                f"this link belongs to process {self._pid}, this is a child forked from it, which has no copy thread",
                "offload the model in the child",
            )


def _work(jobs: Jobs, copy: Callable[[Sequence[Copy]], None], order: Callable[[Jobs], Iterable[Job]]) -> None:
    for job in order(jobs):
        try:
            copy(job.copies)
        except BaseException as error:
            job.error = error  # raised where the bytes are wanted
        finally:
            job.done.set()
        del job  # held until the next one comes, else
