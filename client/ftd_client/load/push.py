"""Weights by push: the daemon copies them from its registered pages into memory that this process exports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ftd.clock import Deadline
from ftd.cuda.runtime import CudaError, CudaRuntime
from ftd.errors import FrameError, FtdError, NoAnswerError, PushRefusedError
from ftd.wire.push import PUSH, PushPiece, PushTarget, bytes_pushed, requests
from ftd_client.creator import Creator
from ftd_client.load.arenas import Run

#: For the answer: a thirtieth of a slow link's speed, and what a first context takes. A daemon that is hung or stopped
#: takes the connection and says nothing.
_LEAST_BYTES_PER_S = 500_000_000
_START_S = 15.0
_PING_S = 2.0
#: For the kernel to take apart a daemon that was killed, before it counts as alive.
_DEATH_S = 5.0
_LOOK_S = 0.01


class Landing(NamedTuple):
    """Device memory of this process, and what goes there: `Run.dst` counts from `address`."""

    address: int
    runs: Sequence[Run]


class PushLostError(FtdError):
    """The daemon fell silent in the middle of a push, and lives: it may still write to that memory."""

    code = "push_lost"


def pushing_creator(namespace: str) -> Creator:
    """The creator, if it pushes. Asked before a push: one that is stopped or wedged shows, and has nothing of ours.

    Raises:
        FtdError: it does not.
    """
    creator = Creator.find(namespace)
    obstacle = creator.ask("status", {}, Deadline.after(_PING_S)).get("push_obstacle")
    if obstacle is not None:
        raise PushRefusedError(f"the daemon pushes nothing: {obstacle}", "start it with pin: cuda and push: auto")
    return creator


class Pushing:
    """A push that is ready to be asked for: the memory is exported.

    Args:
        inodes: of the generation's segments.
        ordinal: the GPU on which the landings lie; what this process queued for them is done.

    Raises:
        FtdError: it cannot be.
    """

    def __init__(
        self,
        creator: Creator,
        generation: int,
        inodes: Sequence[int],
        cuda: CudaRuntime,
        ordinal: int,
        landings: Sequence[Landing],
    ) -> None:
        targets = [_target(cuda, landing) for landing in landings if landing.runs]
        self._requests = list(requests(generation, inodes, cuda.device_uuid(ordinal), targets))
        self._creator = creator

    def run(self) -> None:
        """Returns when all bytes are there, and the daemon has closed the memory. In any thread.

        Raises:
            PushLostError: the landings may still be written to, with what they were to get: they must never be freed.
            FtdError: it cannot be; nothing is written to the landings any more.
        """
        for request in self._requests:
            deadline = Deadline.after(_START_S + request.nbytes / _LEAST_BYTES_PER_S)
            try:
                got = bytes_pushed(self._creator.ask(PUSH, request.to_args(), deadline))
            except (NoAnswerError, FrameError) as error:
                _await_death(self._creator, error)
                raise
            if got != request.nbytes:
                raise PushRefusedError(f"{got} bytes were pushed: expected {request.nbytes}", "see the daemon's log")


def _target(cuda: CudaRuntime, landing: Landing) -> PushTarget:
    start, _ = cuda.allocation_of(landing.address)
    shift = landing.address - start
    pieces = tuple(PushPiece(run.dst + shift, run.segment, run.offset, run.nbytes) for run in landing.runs)
    try:
        return PushTarget(cuda.ipc_export(landing.address), pieces)
    except CudaError as error:
        raise PushRefusedError(
            f"the GPU memory cannot be exported: {error.message}", "leave expandable_segments out of PYTORCH_ALLOC_CONF"
        ) from None


def _await_death(creator: Creator, error: FtdError) -> None:
    """Returns once the daemon is proven dead: its context, and every copy with it, is gone before its last thread is.

    Raises:
        PushLostError: it is not.
    """
    deadline = Deadline.after(_DEATH_S)
    while not creator.owner.has_ended():
        deadline.pause(_LOOK_S)
        if deadline.expired():
            raise PushLostError(f"{error.message}, and it lives", error.remedy) from error
