"""Weights by push: the daemon copies them from its registered pages into memory that this process exports."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from ftd.clock import Deadline
from ftd.cuda.runtime import CudaError, CudaRuntime
from ftd.errors import FrameError, FtdError, NoAnswerError, PushRefusedError, os_reason
from ftd.wire.client import Asked
from ftd.wire.push import PUSH, PushPiece, PushRequest, PushTarget, bytes_pushed, requests
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


class Inquiry:
    """Whether the creator of a namespace pushes. Asked before a push: one that is stopped or wedged shows, and has
    nothing of ours. Once a load: such a one takes seconds to show."""

    def __init__(self, namespace: str) -> None:
        self._deadline = Deadline.after(_PING_S)
        self._line: Asked | None = None
        self._is_answered = False
        try:
            creator = Creator.find(namespace)
            self._line = creator.asked("status", {}, self._deadline)
            self._found: Creator | str = creator
        except (FtdError, OSError) as error:
            self._found = reason_of(error)

    def creator(self) -> Creator | str:
        """Whom to ask for pushes; or why nobody."""
        if self._line is not None and not self._is_answered:
            self._is_answered = True
            try:
                obstacle = self._line.reply(self._deadline).get("push_obstacle")
            except (FtdError, OSError) as error:
                self._found = reason_of(error)
            else:
                self._found = f"the daemon pushes nothing: {obstacle}" if obstacle is not None else self._found
        return self._found

    def line(self) -> Asked | None:
        """The connection, for the first push; once, after `creator`."""
        line, self._line = self._line, None
        return line

    def close(self) -> None:
        """Asks no further."""
        if self._line is not None:
            self._line.close()


class Pushing:
    """A push that is ready to be asked for: the memory is exported, which nobody was told yet.

    Args:
        inodes: of the generation's segments.
        ordinal: the GPU on which the landings lie; what this process queued for them is done.

    Raises:
        FtdError: it cannot be.
    """

    def __init__(
        self,
        generation: int,
        inodes: Sequence[int],
        cuda: CudaRuntime,
        ordinal: int,
        landings: Sequence[Landing],
    ) -> None:
        targets = [_target(cuda, landing) for landing in landings if landing.runs]
        self._creator: Creator | None = None
        self._requests = deque(requests(generation, inodes, cuda.device_uuid(ordinal), targets))
        self._call: _Call | None = None

    def start(self, creator: Creator, line: Asked | None = None) -> None:
        """Asks for the first of it, so that it is on its way while the caller goes on; `run` tells what came of it.

        Args:
            line: a connection to the creator that is free; closed in the end.
        """
        self._creator = creator
        if self._requests:
            self._call = _Call(creator, self._requests.popleft(), line)
        elif line is not None:
            line.close()

    def run(self) -> None:
        """Returns when all bytes of what was started are there, and the daemon has closed the memory. In any thread.

        Raises:
            PushLostError: the landings may still be written to, with what they were to get: they must never be freed.
            FtdError: it cannot be; nothing is written to the landings any more.
        """
        creator = self._creator
        while creator is not None and self._call is not None:
            call, self._call = self._call, None
            try:
                call.wait()
            except (NoAnswerError, FrameError) as error:
                _await_death(creator, error)
                raise
            self.start(creator)


class _Call:
    """A request, asked for."""

    def __init__(self, creator: Creator, request: PushRequest, line: Asked | None) -> None:
        self._nbytes = request.nbytes
        self._deadline = Deadline.after(_START_S + request.nbytes / _LEAST_BYTES_PER_S)
        self._asked: Asked | FtdError | OSError
        if line is not None and line.answered(0):  # by what nobody asked: the daemon has hung up on an idle connection
            line.close()
            line = None
        try:
            if line is None:
                self._asked = creator.asked(PUSH, request.to_args(), self._deadline)
            else:
                self._asked = line
                line.again(PUSH, request.to_args(), self._deadline)
        except (FtdError, OSError) as error:
            self._asked = error  # for `wait`: the daemon may have got it all the same
            if line is not None:
                line.close()

    def wait(self) -> None:
        """Raises as `Pushing.run`, but `PushLostError`."""
        if not isinstance(self._asked, Asked):
            raise self._asked
        with self._asked as asked:
            got = bytes_pushed(asked.reply(self._deadline))
        if got != self._nbytes:
            raise PushRefusedError(f"{got} bytes were pushed: expected {self._nbytes}", "see the daemon's log")


def reason_of(error: FtdError | OSError) -> str:
    """Why there is no push; for the middle of a sentence."""
    return error.message if isinstance(error, FtdError) else os_reason(error)


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
