"""Receiving: a daemon without a model waits for a process that publishes, and keeps the order of what that one says.

Belongs to the daemon's loop; what takes time runs in threads (`reception.py`). One publisher at a time: its life is
the connection on which `publish_wait` stays open. However a publication ends before it is handed over, everything of
it is removed before anybody hears of it, and then the next publisher may begin.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from enum import StrEnum
from typing import Any, TypeVar

from ftd.daemon.build import Generation, LoadCancelledError
from ftd.daemon.progress import LoadProgress
from ftd.daemon.reception import Reception
from ftd.errors import FtdError, InternalError, PublishRefusedError
from ftd.owner import process_name
from ftd.wire.peer import Peer
from ftd.wire.publish import (
    PUBLISH_BEGIN,
    PUBLISH_COMMIT,
    PUBLISH_DESCRIBE,
    PUBLISH_LANE,
    PUBLISH_WAIT,
    Begin,
    Describe,
    Published,
    lane_of,
    token_of,
)
from ftd.wire.server import StreamHandler, Take

log = logging.getLogger("ftd")

#: Operations for the daemon's own user and root: whoever may publish decides what followers run.
OWNER_ONLY = frozenset({PUBLISH_BEGIN, PUBLISH_WAIT, PUBLISH_DESCRIBE, PUBLISH_LANE, PUBLISH_COMMIT})
#: Handlers that end with the publisher.
ENDS_WITH_PEER = frozenset({PUBLISH_WAIT})
#: `stage` of a daemon that has nothing to do yet.
WAITING = "waiting for a publisher"
#: From the answer to `publish_begin` to `publish_wait`: a publisher that died in between is not heard of otherwise.
_GRACE_S = 5.0

#: Within which the end of a connection is noticed (`wire/server.py` looks 50 times a second) and a small one cleared.
_NOTICE_S = 0.2

T = TypeVar("T")
#: Makes a reception: `(publisher, what it has in mind, note)`.
Open = Callable[[str, Begin, Callable[[str], None]], Reception]


class Phase(StrEnum):
    """How far a publication is."""

    BEGUN = "begun"
    DESCRIBING = "being described"
    FILLING = "being filled"
    COMMITTING = "being committed"
    MADE = "made"
    OVER = "over"


#: What may be asked for when.
ALLOWED: dict[str, Phase] = {
    PUBLISH_DESCRIBE: Phase.BEGUN,
    PUBLISH_LANE: Phase.FILLING,
    PUBLISH_COMMIT: Phase.FILLING,
}


class _Publication:
    """What the loop knows of the one that is under way.

    Attributes:
        running: steps in threads.
        idle: set while there are none.
        cleared: set once nothing of it is left.
        lanes: that were given out.
        outcome: what `publish_wait` answers.
    """

    def __init__(self, publisher: str, outcome: asyncio.Future[dict[str, Any]]) -> None:
        self.publisher = publisher
        self.phase = Phase.BEGUN
        self.reception: Reception | None = None
        self.awaited = False
        self.running = 0
        self.lanes = set[int]()
        self.idle, self.cleared = asyncio.Event(), asyncio.Event()
        self.idle.set()
        self.outcome = outcome
        outcome.add_done_callback(lambda done: done.cancelled() or done.exception())  # heard, if nobody waits for it


def _name(peer: Peer) -> str:
    """Who it is, for people."""
    if not peer.pid:
        return "a process that this pid namespace does not show"
    return f"pid {peer.pid} ({process_name(peer.pid)})"


def refusals(namespace: str) -> dict[str, Callable[[Peer, dict[str, Any]], dict[str, Any]]]:
    """Operations of a daemon that reads a checkpoint, for `ControlServer`: no publisher, by name."""

    def refuse(_peer: Peer, _args: dict[str, Any]) -> dict[str, Any]:
        raise PublishRefusedError(
            f"the daemon of {namespace!r} reads a checkpoint: expected one that waits for a publisher",
            f"ftd stop --namespace {namespace}, then ftd start --namespace {namespace} --receive",
        )

    return {PUBLISH_BEGIN: refuse}


class Receiver:
    """Takes publications until one is made.

    Args:
        opener: makes the reception; runs in a thread.
        threads: that copy, each what comes on a lane.
    """

    def __init__(self, namespace: str, opener: Open, progress: LoadProgress, *, threads: int) -> None:
        self._namespace, self._open, self._progress = namespace, opener, progress
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="ftd-receive")
        self._current: _Publication | None = None
        self._made: asyncio.Future[Generation] | None = None
        self._closed = False
        self._notes: list[str] = []
        self._last = ""
        self._chores: set[asyncio.Future[Any]] = set()
        progress.reset(WAITING)

    async def receive(self) -> Generation:
        """The generation that some publisher committed, however many failed before. `announce` has to follow.

        Raises:
            LoadCancelledError: it was closed.
        """
        if self._closed:
            raise LoadCancelledError
        self._made = asyncio.get_running_loop().create_future()
        return await self._made

    def announce(self, published: Published) -> None:
        """Tells the publisher that its weights can be attached to."""
        if self._current is not None and not self._current.outcome.done():
            self._current.outcome.set_result(published.to_result())

    async def close(self) -> None:
        """Refuses what comes and gives up what is under way; returns when nothing of it is left, but what was made."""
        self._closed = True
        current = self._current
        if current is not None and current.phase is not Phase.MADE:
            self._give_up(current, PublishRefusedError("the daemon is stopping", "start it again"))
            await current.cleared.wait()
        elif current is not None and not current.outcome.done():
            current.outcome.set_exception(PublishRefusedError("the daemon is stopping", "start it again"))
        if self._made is not None and not self._made.done():
            self._made.set_exception(LoadCancelledError())
        self._pool.shutdown(wait=False)

    @property
    def is_waiting(self) -> bool:
        return self._current is None and not self._closed

    @property
    def warnings(self) -> list[str]:
        """What a person should know: of the publication that is under way or was made, and why the last one failed."""
        return [*self._notes, *([self._last] if self._last else [])]

    def handlers(self) -> dict[str, Callable[[Peer, dict[str, Any]], Awaitable[dict[str, Any]]]]:
        """Operations by name, for `ControlServer`."""
        return {
            PUBLISH_BEGIN: self._on_begin,
            PUBLISH_WAIT: self._on_wait,
            PUBLISH_DESCRIBE: self._on_describe,
            PUBLISH_COMMIT: self._on_commit,
        }

    def streams(self) -> dict[str, StreamHandler]:
        """Operations whose peers say more than their request, for `ControlServer`."""
        return {PUBLISH_LANE: self._on_lane}

    async def _on_begin(self, peer: Peer, args: dict[str, Any]) -> dict[str, Any]:
        told = Begin.from_args(args)
        await self._let_end()
        self._refuse_if_busy()
        loop = asyncio.get_running_loop()
        publisher = _name(peer)
        current = self._current = _Publication(publisher, loop.create_future())
        self._notes.clear()
        self._progress.reset(f"receiving from {publisher}")
        # as a step: close() waits for it, and what it made is removed if that came first
        reception = await self._step(current, lambda: self._opened(current, told))
        log.info("%s begins to publish", publisher)
        loop.call_later(_GRACE_S, self._expire, current)
        return reception.staging.to_result()

    def _opened(self, current: _Publication, told: Begin) -> Reception:
        if current.phase is Phase.OVER:  # a pool that could not start a thread kept it for the next one
            raise LoadCancelledError
        current.reception = self._open(current.publisher, told, self._note)
        return current.reception

    def _expire(self, current: _Publication) -> None:
        if not current.awaited:
            self._give_up(current, PublishRefusedError("its publisher said no more", "publish again"))

    async def _on_wait(self, _peer: Peer, args: dict[str, Any]) -> dict[str, Any]:
        current = self._of(args)
        if current.awaited:
            raise PublishRefusedError("this publication is waited for already", "wait once")
        current.awaited = True
        try:
            return await asyncio.shield(current.outcome)
        except asyncio.CancelledError:
            if not current.outcome.done():
                self._give_up(current, PublishRefusedError("its publisher ended", "publish again"))
            raise

    async def _on_describe(self, _peer: Peer, args: dict[str, Any]) -> dict[str, Any]:
        told = Describe.from_args(args)
        current, reception = self._allowed(PUBLISH_DESCRIBE, args)
        current.phase = Phase.DESCRIBING
        await self._step(current, lambda: reception.describe(told))
        current.phase = Phase.FILLING
        return {}

    async def _on_lane(self, _peer: Peer, args: dict[str, Any], take: Take) -> dict[str, Any]:
        number = lane_of(args)
        current, reception = self._allowed(PUBLISH_LANE, args)
        if number >= reception.staging.lanes or number in current.lanes:
            raise PublishRefusedError(
                f"lane {number} of {reception.staging.lanes}: expected one that is not taken", "take each once"
            )
        current.lanes.add(number)
        sock = take()
        await self._step(current, lambda: reception.fill(number, sock))
        return {}

    async def _on_commit(self, _peer: Peer, args: dict[str, Any]) -> dict[str, Any]:
        current, reception = self._allowed(PUBLISH_COMMIT, args)
        if current.running:
            raise PublishRefusedError("a commit while slots are copied: expected it behind them", "wait for each lane")
        current.phase = Phase.COMMITTING
        generation = await self._step(current, reception.finish)
        reception.keep()
        current.phase = Phase.MADE
        self._last = ""
        if self._made is not None:
            self._made.set_result(generation)
        return {}

    async def _let_end(self) -> None:
        """Lets a publication that ends in this moment be gone: that its publisher was killed is noticed soon."""
        current = self._current
        if current is not None and current.phase is not Phase.MADE:
            with suppress(TimeoutError):
                await asyncio.wait_for(current.cleared.wait(), _NOTICE_S)
        while self._current is not None and self._current.phase is Phase.OVER:
            await self._current.cleared.wait()  # its memory may take the kernel seconds

    def _refuse_if_busy(self) -> None:
        current = self._current
        if self._closed:
            raise PublishRefusedError(f"the daemon of {self._namespace!r} is stopping", "start it again")
        if current is None:
            return
        if current.phase is Phase.MADE:
            raise PublishRefusedError(
                f"{self._namespace!r} has the weights of {current.publisher}: expected a daemon that waits for a"
                " publisher",
                f"ftd stop --namespace {self._namespace}, start it again with --receive, and publish then",
            )
        raise PublishRefusedError(
            f"{self._namespace!r} is being published by {current.publisher}: expected a daemon that waits for a"
            " publisher",
            "wait until it is done, or end that process",
        )

    def _of(self, args: dict[str, Any]) -> _Publication:
        token, current = token_of(args), self._current
        staging = current.reception.staging if current and current.reception else None
        if current is None or staging is None or staging.token != token or current.phase is Phase.OVER:
            raise PublishRefusedError(
                f"this publication is over{': ' + self._last if self._last else ''}", "publish again"
            )
        return current

    def _allowed(self, op: str, args: dict[str, Any]) -> tuple[_Publication, Reception]:
        current = self._of(args)
        if current.phase is not ALLOWED[op] or current.reception is None:
            raise PublishRefusedError(f"{op} of a publication that is {current.phase}", f"expected {ALLOWED[op]}")
        return current, current.reception

    async def _step(self, current: _Publication, work: Callable[[], T]) -> T:
        """The result of `work` in a thread. If it fails, or the publication was given up meanwhile, nothing is left of
        it when the error is raised."""
        error: FtdError | None = None
        try:
            # a handler that is cancelled leaves its thread, and the count with it
            result = await asyncio.shield(self._started(current, work))
        except LoadCancelledError:
            pass
        except FtdError as found:
            error = found
        except Exception as found:
            log.exception("receiving failed")
            error = InternalError(
                f"receiving failed inside the daemon: {type(found).__name__}: {found}",
                "report it with the daemon's log",
            )
        else:
            if current.phase is not Phase.OVER:
                return result
        if error is not None:
            self._give_up(current, error)
        await current.cleared.wait()
        raise error or current.outcome.exception() or PublishRefusedError("this publication is over", "publish again")

    def _started(self, current: _Publication, work: Callable[[], T]) -> asyncio.Future[T]:
        # counted only then: where no thread can be started this raises, and what was not begun would be waited for
        step = asyncio.wrap_future(self._pool.submit(work))
        current.running += 1
        current.idle.clear()
        step.add_done_callback(lambda _: self._stepped(current))
        return step

    def _stepped(self, current: _Publication) -> None:
        current.running -= 1
        if not current.running:
            current.idle.set()

    def _give_up(self, current: _Publication, error: FtdError) -> None:
        """Ends a publication that is not made yet, once."""
        if current.phase in (Phase.OVER, Phase.MADE):
            return
        current.phase = Phase.OVER
        if current.reception is not None:
            current.reception.cancel()
        chore = asyncio.ensure_future(self._clear(current, error))
        self._chores.add(chore)
        chore.add_done_callback(self._chores.discard)

    async def _clear(self, current: _Publication, error: FtdError) -> None:
        await current.idle.wait()
        progress = ""
        if current.reception is not None:
            progress = f" after {current.reception.describe_progress()}"
            try:
                await asyncio.wrap_future(self._pool.submit(current.reception.abort))
            except Exception:
                log.exception("what %s handed over cannot be removed", current.publisher)
        self._current = None
        self._notes.clear()
        self._last = f"the publication of {current.publisher} was given up{progress}: {error.message}"
        log.warning("%s", self._last)
        self._progress.reset(WAITING)
        current.outcome.set_exception(error)
        current.cleared.set()

    def _note(self, text: str) -> None:
        """From a thread: appending is atomic, and logging is thread-safe."""
        self._notes.append(text)
        log.warning(text)
