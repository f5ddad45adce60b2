"""The link: who copies bytes from the host into places on the device, and when compute may use them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from ftd.errors import FtdError
from ftd_client.load.pull import Copy

__all__ = ["Copy", "Link", "LinkError", "Reach", "Ticket"]


class LinkError(FtdError):
    """A link that cannot copy: closed, inherited by a forked child, without a device, or a copy that failed."""

    code = "link"


class Reach(Protocol):
    """Which of the host's memory a GPU reads by itself. It grows while copies are made, and never shrinks.

    Attributes:
        complete: all that is copied again and again; what is loaded on demand may lie outside.
    """

    complete: bool

    def holds(self, copy: Copy) -> bool:
        """Whether it reaches the copy's source, which lies on one side of every border of the host."""


class Ticket:
    """The completion of one submit. Only the link that gave it can wait for it."""

    __slots__ = ()


class Link(Protocol):
    """Copies in the order of their submission, beside compute. Any thread may call; it owns none of the memory.

    Submit and wait are meant for the thread that computes, with the stream current that it computes on.

    Raises, from `submit` and `wait`:
        LinkError: it is closed or was inherited by a forked child.
        NotBuiltError: the calling thread's stream is captured into a CUDA graph; nothing was touched.
        CudaError: CUDA refused.
    """

    @property
    def device(self) -> torch.device:
        """Where the copies go."""

    def submit(self, copies: Sequence[Copy]) -> Ticket:
        """Queues copies that run after everything that the calling thread's compute stream was given so far, so that
        they may overwrite what earlier compute reads. The memory on both sides stays as it is until they are done.
        Waits for none of them.
        """

    def wait(self, ticket: Ticket) -> None:
        """What the calling thread computes from now on runs after the ticket's copies. Blocks on the CPU only.

        Raises:
            LinkError: one of the copies failed; also for every later wait on this ticket.
        """

    def drain(self) -> None:
        """Blocks until all copies submitted so far are done, failed ones included, and the compute that was ordered
        with them: their memory may be freed then. In a forked child, where nothing copies, it returns at once."""

    def close(self) -> None:
        """Drains, then frees. A ticket stays good to wait for. May be called again, and in a forked child."""
