"""What of shared weights stays on a GPU: the daemon pushes it, else it is pulled. Nothing is registered for it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import NamedTuple

import torch

from ftd.cuda.runtime import CudaRuntime
from ftd.errors import FtdError, PushRefusedError
from ftd.plan.block import ALIGNMENT
from ftd.units import format_bytes
from ftd_client.creator import Creator
from ftd_client.load.arenas import Run
from ftd_client.load.pull import pull
from ftd_client.load.push import Inquiry, Landing, Pushing, PushLostError, reason_of
from ftd_client.load.shipment import from_pages, prepare_push
from ftd_client.stream.link import Copy
from ftd_client.stream.memory import Memory
from ftd_client.stream.shared import SharedHost
from ftd_client.views import SharedWeights

log = logging.getLogger("ftd_client")


#: Fresh memory, and the copies into it.
Load = tuple[Memory, Sequence[Copy]]


class Delivery(NamedTuple):
    """What became of copies.

    Attributes:
        memories: where they are: others than were given, where those can't be trusted any more.
        left: what was not brought.
        way: of the rest; empty where that is nothing.
    """

    memories: list[Memory]
    left: Sequence[Copy]
    way: str


class Courier:
    """Brings weights to a GPU.

    Args:
        pulls: whether slots may be page-locked for it.

    Attributes:
        why: nothing is pushed; empty while it is. One push that failed was the last.
    """

    def __init__(
        self, weights: SharedWeights, host: SharedHost, cuda: CudaRuntime, ordinal: int, *, pulls: bool
    ) -> None:
        self._weights, self._host, self._cuda, self._ordinal, self._pulls = weights, host, cuda, ordinal, pulls
        self.why = ""

    def bring(self, loads: Sequence[Load]) -> Delivery:
        """Makes copies into fresh memory, all but those of weights that this process changed.

        Raises:
            CudaError: the device refused them; none is under way.
            torch.OutOfMemoryError: a push was lost, and there is no room for what it was to bring.
        """
        memories = [memory for memory, _ in loads]
        sorted_out = [self._sort(memory, copies) for memory, copies in loads]
        left = [copy for _, others in sorted_out for copy in others]
        landings = [Landing(memory.address, runs) for memory, (runs, _) in zip(memories, sorted_out, strict=True)]
        if not any(landing.runs for landing in landings):
            return Delivery(memories, left, "")
        device = memories[0].device
        # memory that was freed comes back before what reads it has run; the daemon knows no streams of this process
        _synchronize(device)
        if not self.why:
            try:
                self._push(memories, landings)
            except (FtdError, OSError) as error:
                self.why = reason_of(error)
                log.info("what stays on %s is not pushed: %s", device, self.why)
                if isinstance(error, PushLostError):
                    memories, left = _elsewhere(memories, left)
                    _synchronize(device)
            else:
                return Delivery(memories, left, "push")
        copies = [
            copy
            for memory, landing in zip(memories, landings, strict=True)
            for copy in from_pages(self._weights, memory.address, landing.runs)
        ]
        if not self._pulls:
            return Delivery(memories, [*left, *copies], "")
        pull(self._cuda, self._ordinal, copies)
        return Delivery(memories, left, "pull")

    def _push(self, memories: Sequence[Memory], landings: Sequence[Landing]) -> None:
        with closing(Inquiry(self._weights.namespace)) as inquiry:
            creator = inquiry.creator()
        if isinstance(creator, str):
            raise PushRefusedError(creator)
        pushing = prepare_push(self._weights, self._cuda, self._ordinal, landings)
        written = [memory for memory, landing in zip(memories, landings, strict=True) if landing.runs]
        with ThreadPoolExecutor(1, thread_name_prefix="ftd-push") as pool:  # whose end no interrupt forestalls
            pool.submit(_run, pushing, creator, written).result()

    def _sort(self, memory: Memory, copies: Sequence[Copy]) -> tuple[list[Run], list[Copy]]:
        """Those that come from segments, in as few pieces as they make, and the others."""
        runs: list[Run] = []
        left: list[Copy] = []
        for copy in sorted(copies):
            place = self._host.locate(copy.src)
            if place is None:
                left.append(copy)
                continue
            run = Run(copy.dst - memory.address, place.segment, place.offset, copy.nbytes)
            if runs and _joins(runs[-1], run):
                runs[-1] = runs[-1]._replace(nbytes=run.dst + run.nbytes - runs[-1].dst)
            else:
                runs.append(run)
        return runs, left


def _synchronize(device: torch.device) -> None:
    """What was computed on the current stream is done: torch may have filled fresh memory, too."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _elsewhere(memories: Sequence[Memory], left: Sequence[Copy]) -> tuple[list[Memory], list[Copy]]:
    """Other memories in place of these, and the copies into them."""
    others = [Memory(memory.nbytes, memory.device) for memory in memories]
    moved = [
        copy._replace(dst=copy.dst - memory.address + other.address)
        for memory, other in zip(memories, others, strict=True)
        for copy in left
        if memory.address <= copy.dst < memory.address + memory.nbytes
    ]
    return others, moved


def _run(pushing: Pushing, creator: Creator, memories: Sequence[Memory]) -> None:
    """Gives up memory that the daemon may still write to; here, since an interrupt of the caller's hides the error."""
    try:
        pushing.start(creator)
        pushing.run()
    except PushLostError as error:
        for memory in memories:
            memory.give_up()
        log.warning(
            "%s of %s stay taken until this process ends: %s",
            format_bytes(sum(memory.nbytes for memory in memories)),
            memories[0].device,
            error.message,
        )
        raise


def _joins(one: Run, other: Run) -> bool:
    """Whether two are one piece, with what little lies between them on both sides."""
    gap = other.dst - one.dst - one.nbytes
    return one.segment == other.segment and 0 <= gap < ALIGNMENT and other.offset == one.offset + one.nbytes + gap
