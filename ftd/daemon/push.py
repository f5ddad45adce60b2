"""Pushing: the weights copied from this process's registered pages into GPU memory that a follower exported.

Nothing of it is registered or faulted in at that time, so it runs at the speed of the link on any size of pages.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any

from ftd.cuda.pin import Region
from ftd.cuda.pump import Pump, Push, PushAbandonedError, PushCancelledError
from ftd.cuda.runtime import CudaError, CudaRuntime, gpu_name, load_runtime
from ftd.daemon.gpus import Gpus
from ftd.errors import FrameError, FtdError, PushRefusedError
from ftd.units import format_bytes, format_seconds
from ftd.wire.peer import Peer
from ftd.wire.push import PUSH, PushRequest, push_result

log = logging.getLogger("ftd")

#: Handlers that end with the follower that asked.
ENDS_WITH_PEER = frozenset({PUSH})
#: For a driver to return from the copies that are queued, which take 2 ms.
_CLOSE_S = 5.0


class Pusher:
    """The pushes of a generation, and the operation that asks for one. Belongs to the daemon's loop.

    Args:
        allowed: the configuration's `push: auto`.
        gpus: told of those that it makes a context on, and asked for those that are lost.
    """

    def __init__(
        self, gpus: Gpus, *, allowed: bool, runtime: Callable[[], tuple[CudaRuntime | None, str]] = load_runtime
    ) -> None:
        self._gpus, self._runtime = gpus, runtime
        self._cuda: CudaRuntime | None = None
        self._allowed = allowed
        self._obstacle = "its pages are not registered with CUDA" if allowed else "its configuration says push: never"
        self._generation: tuple[int, tuple[int, ...]] = 0, ()
        self._sources: Sequence[Region] = ()
        self._pumps: dict[bytes, Pump] = {}

    def serve(self, generation: int, inodes: Sequence[int], sources: Sequence[Region]) -> None:
        """From now on this generation is pushed, if pushing is allowed.

        Args:
            inodes: of its segments: a number alone may be another daemon's generation.
            sources: its segments, each registered as a whole with CUDA; they have to stay so until `close` returns.
        """
        self._generation, self._sources = (generation, tuple(inodes)), sources if self._allowed else ()

    def serve_none(self, why_not_cuda: str) -> None:
        """Its pages are pinned otherwise, or not at all."""
        if self._allowed:
            self._obstacle = f"its pages are not registered with CUDA: {why_not_cuda}"

    async def close(self) -> bool:
        """Cancels what is under way and refuses what comes; whether no copy runs any more. Where a driver does not
        return, the sources have to stay as they are until this process ends."""
        self._obstacle, self._sources = "it is stopping", ()
        closing = [asyncio.to_thread(pump.close, _CLOSE_S) for pump in self._pumps.values()]
        return all(await asyncio.gather(*closing))

    @property
    def obstacle(self) -> str | None:
        """Why it pushes nothing; None where it does."""
        if not self._sources:
            return self._obstacle
        lost = self._gpus.all_lost
        return lost and f"its GPUs are lost: {lost}"

    def describe(self) -> list[dict[str, Any]]:
        """`push` of a status: every GPU on which this process made a context to push, or pins and pushed."""
        return [
            {"gpu": gpu_name(gpu), "pushed_bytes": pump.pushed_bytes, "clients": pump.clients}
            for gpu, pump in self._pumps.items()
        ]

    def handlers(self) -> dict[str, Callable[[Peer, dict[str, Any]], Coroutine[Any, Any, dict[str, Any]]]]:
        """Operations by name, for `ControlServer`."""
        return {PUSH: self._on_push}

    async def _on_push(self, peer: Peer, args: dict[str, Any]) -> dict[str, Any]:
        """
        Raises:
            PushRefusedError: this daemon does not push that.
            FtdError: CUDA refused it; nothing is copied any more.
        """
        request = self._admit(args)
        push = Push((peer.uid, peer.pid), request.targets)
        pump = self._pump(request.gpu)
        pump.submit(push)
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        done = asyncio.wrap_future(push.done)
        try:
            nbytes = await asyncio.shield(done)
            self._gpus.watch(pump.cuda, pump.ordinal)
        except asyncio.CancelledError:
            push.cancel()
            with suppress(Exception):
                await done  # the follower's memory must be let go of before it may be freed
            log.info("a push of %s to pid %d was given up", format_bytes(request.nbytes), peer.pid)
            raise
        except PushAbandonedError:
            raise asyncio.CancelledError from None  # no answer: each would say that nothing is copied any more
        except PushCancelledError:
            raise PushRefusedError("the daemon stopped pushing", "see its log, or let the follower pull") from None
        except FtdError as error:
            log.warning("a push to pid %d on %s failed: %s", peer.pid, gpu_name(request.gpu), error.message)
            raise
        log.info(
            "pushed %s to pid %d on %s in %s",
            format_bytes(nbytes), peer.pid, gpu_name(request.gpu), format_seconds(loop.time() - began_s),
        )  # fmt: skip
        return push_result(nbytes)

    def _admit(self, args: dict[str, Any]) -> PushRequest:
        if not self._sources:
            raise PushRefusedError(
                f"this daemon pushes nothing: {self._obstacle}",
                "start it with pin: cuda and push: auto, or let the follower pull",
            )
        try:
            request = PushRequest.from_args(args)
            if (request.generation, request.inodes) == self._generation:
                request.check_pieces([source.nbytes for source in self._sources])
                return request
        except FrameError as error:
            # as an error of its own: a FrameError means to the follower that it cannot tell what was answered
            raise PushRefusedError(error.message, error.remedy) from None
        raise PushRefusedError(
            f"generation {request.generation} of these segments is not served: generation {self._generation[0]} is",
            "attach again",
        )

    def _pump(self, gpu: bytes) -> Pump:
        lost = self._gpus.lost().get(gpu)
        if lost is not None:
            raise PushRefusedError(
                f"{gpu_name(gpu)} is lost to this daemon: {lost}", "let the follower pull, and restart the daemon"
            )
        if gpu not in self._pumps:
            if self._cuda is None:
                self._cuda, reason = self._runtime()
                if self._cuda is None:
                    raise PushRefusedError(f"this daemon pushes nothing: {reason}", "let the follower pull")
            self._pumps[gpu] = Pump(self._cuda, _ordinal_of(self._cuda, gpu), self._sources)
        return self._pumps[gpu]


def _ordinal_of(cuda: CudaRuntime, gpu: bytes) -> int:
    visible: list[bytes] = []
    with suppress(CudaError):
        visible += [cuda.device_uuid(ordinal) for ordinal in range(cuda.device_count())]
    if gpu not in visible:
        raise PushRefusedError(
            f"{gpu_name(gpu)} is not visible to this daemon: expected one of {', '.join(map(gpu_name, visible))}",
            "give the daemon's unit or container that GPU, or let the follower pull",
        )
    return visible.index(gpu)
