"""Which word of a publisher is answered how, in every phase; and that whatever ends it, the next one may begin."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from ftd.daemon import receive
from ftd.daemon.build import LoadCancelledError
from ftd.daemon.progress import LoadProgress
from ftd.daemon.receive import ALLOWED, ENDS_WITH_PEER, OWNER_ONLY, WAITING, Phase, Receiver
from ftd.errors import FrameError, InternalError, MemoryShortError, PublishDamagedError, PublishRefusedError
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
    Staging,
    lane_args,
    token_args,
)

BOUND_S = 20.0
ME = Peer(7, 0, 0)
PUBLISHED = Published(1, "f", "d", 1, 4)


class Fake:
    """A reception whose steps do what the test says: nothing, wait, or fail."""

    def __init__(self, number: int, note: Callable[[str], None]) -> None:
        self.staging = Staging(bytes([number]) * 16, "/s", 7, 3, 2, 4096)
        self.note = note
        self.did: list[str] = []
        self.fails: dict[str, BaseException] = {}
        self.gates: dict[str, threading.Event] = {}
        self.entered: dict[str, threading.Event] = {}
        self.over = threading.Event()
        self.generation = object()

    def hold(self, step: str) -> None:
        self.gates[step], self.entered[step] = threading.Event(), threading.Event()

    def _step(self, step: str) -> None:
        if step in self.gates:
            self.entered[step].set()
            assert self.gates[step].wait(BOUND_S)
        self.did.append(step)
        if step in self.fails:
            raise self.fails[step]
        if self.over.is_set():
            raise LoadCancelledError

    def describe(self, _: object) -> None:
        self._step("describe")

    def fill(self, _: int, sock: socket.socket) -> None:
        with sock:
            self._step("fill")

    def finish(self) -> object:
        self._step("finish")
        return self.generation

    def describe_progress(self) -> str:
        return "1 B of 2 B"

    def cancel(self) -> None:
        self.over.set()

    def abort(self) -> None:
        self.did.append("abort")

    def keep(self) -> None:
        self.did.append("keep")


class Case:
    """A receiver on the running loop, and its publishers."""

    def __init__(self) -> None:
        self.made: list[Fake] = []
        self.fails_to_open: BaseException | None = None
        self.progress = LoadProgress()
        self.taken: list[socket.socket] = []
        self.receiver = Receiver("ns", self._open, self.progress, threads=4)  # type: ignore[arg-type]
        self.generation = asyncio.create_task(self.receiver.receive())

    def _open(self, _: str, __: Begin, note: Callable[[str], None]) -> Fake:
        if self.fails_to_open is not None:
            raise self.fails_to_open
        self.made.append(Fake(len(self.made), note))
        return self.made[-1]

    async def ask(self, op: str, args: dict[str, Any]) -> dict[str, Any]:
        if op == PUBLISH_LANE:
            ours, theirs = socket.socketpair()
            try:
                return await asyncio.wait_for(self.receiver.streams()[op](ME, args, lambda: theirs), BOUND_S)
            finally:
                ours.close()
                self.taken.append(theirs)
        return await asyncio.wait_for(self.receiver.handlers()[op](ME, args), BOUND_S)

    async def begin(self) -> dict[str, Any]:
        return token_args(Staging.from_result(await self.ask(PUBLISH_BEGIN, Begin(8, 8).to_args())).token)

    def wait(self, token: dict[str, Any]) -> asyncio.Task[dict[str, Any]]:
        return asyncio.create_task(self.receiver.handlers()[PUBLISH_WAIT](ME, token))  # type: ignore[arg-type]

    async def say(self, op: str, token: dict[str, Any], lane: int = 0) -> dict[str, Any]:
        return await self.ask(op, args_of(op, token["token"], lane))

    async def to_filling(self) -> tuple[dict[str, Any], asyncio.Task[dict[str, Any]]]:
        token = await self.begin()
        life = self.wait(token)
        await asyncio.sleep(0)
        await self.say(PUBLISH_DESCRIBE, token)
        return token, life

    async def publishes(self) -> None:
        """That a whole publication goes well now."""
        token, life = await self.to_filling()
        await self.say(PUBLISH_LANE, token)
        await self.say(PUBLISH_COMMIT, token)
        assert await asyncio.wait_for(self.generation, BOUND_S) is self.made[-1].generation
        assert not life.done()  # told only when it can be attached to
        self.receiver.announce(PUBLISHED)
        assert await life == PUBLISHED.to_result()
        assert self.made[-1].did == ["describe", "fill", "finish", "keep"]


def args_of(op: str, token: bytes, lane: int) -> dict[str, Any]:
    if op == PUBLISH_DESCRIBE:
        return Describe(token, 3, bytes(16)).to_args()
    if op == PUBLISH_LANE:
        return lane_args(token, lane)
    return token_args(token)


def with_case(scenario: Callable[[Case], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        case = Case()
        await asyncio.sleep(0)
        try:
            await scenario(case)
        finally:
            await case.receiver.close()
            case.generation.cancel()
            await asyncio.gather(case.generation, return_exceptions=True)

    asyncio.run(run())


def test_a_publication_from_the_first_word_to_the_last() -> None:
    async def scenario(case: Case) -> None:
        assert (case.progress.stage, case.receiver.is_waiting) == (WAITING, True)
        await case.publishes()
        assert not case.receiver.is_waiting
        with pytest.raises(PublishRefusedError, match=r"'ns' has the weights of pid 7"):
            await case.begin()

    with_case(scenario)


def test_all_of_it_is_for_the_owner_and_its_life_ends_with_the_publisher() -> None:
    async def scenario(case: Case) -> None:
        assert {*case.receiver.handlers(), *case.receiver.streams()} == OWNER_ONLY
        assert {PUBLISH_WAIT} == ENDS_WITH_PEER

    with_case(scenario)


def test_a_second_publisher_is_refused_by_the_name_of_the_first() -> None:
    async def scenario(case: Case) -> None:
        await case.begin()
        with pytest.raises(PublishRefusedError, match="is being published by pid 7"):
            await case.begin()
        assert len(case.made) == 1

    with_case(scenario)


def test_a_publisher_without_a_pid_here_is_called_so() -> None:
    async def scenario(case: Case) -> None:
        await case.receiver.handlers()[PUBLISH_BEGIN](Peer(0, 0, 0), Begin(8, 8).to_args())
        assert case.progress.stage == "receiving from a process that this pid namespace does not show"

    with_case(scenario)


@pytest.mark.parametrize("number", [1, 3])
def test_a_lane_that_is_taken_or_that_there_is_not_is_refused_and_ends_nothing(number: int) -> None:
    async def scenario(case: Case) -> None:
        token, _life = await case.to_filling()
        assert await case.say(PUBLISH_LANE, token, 1) == {}
        with pytest.raises(PublishRefusedError, match=f"lane {number} of 3: expected one that is not taken"):
            await case.say(PUBLISH_LANE, token, number)
        assert await case.say(PUBLISH_LANE, token, 2) == {}
        assert not case.made[0].over.is_set()

    with_case(scenario)


def test_of_two_that_begin_at_once_one_is_refused() -> None:
    async def scenario(case: Case) -> None:
        done = await asyncio.gather(case.begin(), case.begin(), return_exceptions=True)
        assert sorted(type(result) for result in done if isinstance(result, Exception)) == [PublishRefusedError]

    with_case(scenario)


@pytest.mark.parametrize("op", ALLOWED)
@pytest.mark.parametrize("phase", [Phase.BEGUN, Phase.FILLING, Phase.MADE])
def test_a_word_out_of_its_turn_is_refused_and_ends_nothing(phase: Phase, op: str) -> None:
    async def scenario(case: Case) -> None:
        token = await case.begin()
        if phase is not Phase.BEGUN:
            await case.say(PUBLISH_DESCRIBE, token)
        if phase is Phase.MADE:
            await case.say(PUBLISH_COMMIT, token)
        if ALLOWED[op] is phase:
            assert await case.say(op, token) == {}
        else:
            with pytest.raises(PublishRefusedError, match=f"{op} of a publication that is {phase}"):
                await case.say(op, token)
        assert not case.made[0].over.is_set()

    with_case(scenario)


@pytest.mark.parametrize(
    ("held", "op"), [("describe", PUBLISH_LANE), ("describe", PUBLISH_COMMIT), ("finish", PUBLISH_LANE)]
)
def test_a_word_while_another_is_carried_out_is_refused(held: str, op: str) -> None:
    async def scenario(case: Case) -> None:
        token = await case.begin()
        reception = case.made[0]
        if held == "finish":
            await case.say(PUBLISH_DESCRIBE, token)
        reception.hold(held)
        first = asyncio.create_task(case.say(PUBLISH_DESCRIBE if held == "describe" else PUBLISH_COMMIT, token))
        await asyncio.to_thread(reception.entered[held].wait, BOUND_S)
        with pytest.raises(PublishRefusedError):
            await case.say(op, token)
        reception.gates[held].set()
        assert await first == {}

    with_case(scenario)


def test_a_commit_while_a_slot_is_copied_is_refused() -> None:
    async def scenario(case: Case) -> None:
        token, _life = await case.to_filling()
        reception = case.made[0]
        reception.hold("fill")
        lane = asyncio.create_task(case.say(PUBLISH_LANE, token))
        await asyncio.to_thread(reception.entered["fill"].wait, BOUND_S)
        with pytest.raises(PublishRefusedError, match="a commit while slots are copied"):
            await case.say(PUBLISH_COMMIT, token)
        reception.gates["fill"].set()
        assert await lane == {}
        assert await case.say(PUBLISH_COMMIT, token) == {}

    with_case(scenario)


@pytest.mark.parametrize("op", [*ALLOWED, PUBLISH_WAIT])
def test_whoever_has_not_the_token_is_refused(op: str) -> None:
    async def scenario(case: Case) -> None:
        for _ in range(2):
            with pytest.raises(PublishRefusedError, match="this publication is over"):
                await case.say(op, {"token": b"?" * 16})
            if not case.made:
                await case.to_filling()
        assert not case.made[0].over.is_set()

    with_case(scenario)


@pytest.mark.parametrize("op", [PUBLISH_BEGIN, *ALLOWED, PUBLISH_WAIT])
def test_malformed_words_are_refused_and_end_nothing(op: str) -> None:
    async def scenario(case: Case) -> None:
        with pytest.raises(FrameError):
            await case.ask(op, {"token": 7, "bytes": None})
        await case.publishes()

    with_case(scenario)


@pytest.mark.parametrize(
    "error", [PublishDamagedError("damaged"), MemoryShortError("full"), FrameError("bad"), ValueError("a bug")]
)
@pytest.mark.parametrize(
    ("step", "op"), [("describe", PUBLISH_DESCRIBE), ("fill", PUBLISH_LANE), ("finish", PUBLISH_COMMIT)]
)
def test_a_step_that_fails_ends_it_with_nothing_left_before_anybody_hears_of_it(
    step: str, op: str, error: Exception
) -> None:
    async def scenario(case: Case) -> None:
        token = await case.begin()
        life = case.wait(token)
        if step != "describe":
            await case.say(PUBLISH_DESCRIBE, token)
        case.made[0].fails[step] = error
        expected = InternalError if isinstance(error, ValueError) else type(error)
        with pytest.raises(expected, match=str(error)):
            await case.say(op, token)
        assert case.made[0].did[-2:] == [step, "abort"]
        with pytest.raises(expected, match=str(error)):
            await life
        assert (case.progress.stage, case.receiver.is_waiting) == (WAITING, True)
        (warning,) = case.receiver.warnings
        assert "pid 7" in warning and "1 B of 2 B" in warning and str(error) in warning
        with pytest.raises(PublishRefusedError, match=f"this publication is over.*{error}"):
            await case.say(PUBLISH_LANE, token)
        await case.publishes()
        assert case.receiver.warnings == []

    with_case(scenario)


def test_one_that_cannot_begin_leaves_room_for_the_next() -> None:
    async def scenario(case: Case) -> None:
        case.fails_to_open = MemoryShortError("no room to stage")
        with pytest.raises(MemoryShortError, match="no room to stage"):
            await case.begin()
        case.fails_to_open = None
        await case.publishes()

    with_case(scenario)


@pytest.mark.parametrize("step", [PUBLISH_BEGIN, PUBLISH_LANE])
def test_where_no_thread_can_be_started_it_ends_and_the_next_one_may_begin(
    monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def scenario(case: Case) -> None:
        if step == PUBLISH_LANE:
            token, life = await case.to_filling()
            case.made[0].hold("fill")
            busy = asyncio.create_task(case.say(PUBLISH_LANE, token))
            await asyncio.to_thread(case.made[0].entered["fill"].wait, BOUND_S)
        with monkeypatch.context() as patch, pytest.raises(InternalError, match="can't start new thread"):
            patch.setattr(threading.Thread, "start", refuse)
            if step == PUBLISH_BEGIN:
                await case.begin()
            else:
                asyncio.get_running_loop().call_soon(case.made[0].gates["fill"].set)
                await case.say(PUBLISH_LANE, token, 1)
        if step == PUBLISH_LANE:
            for told in (busy, life):
                with pytest.raises(InternalError, match="can't start new thread"):
                    await told
        await case.publishes()
        assert len(case.made) == 1 + (step == PUBLISH_LANE), "what the pool kept made nothing"

    with_case(scenario)


def test_the_end_of_the_publisher_ends_it_once_nothing_runs_any_more() -> None:
    async def scenario(case: Case) -> None:
        token, life = await case.to_filling()
        reception = case.made[0]
        reception.hold("fill")
        lanes = [asyncio.create_task(case.say(PUBLISH_LANE, token, lane)) for lane in range(2)]
        await asyncio.to_thread(reception.entered["fill"].wait, BOUND_S)
        life.cancel()
        await asyncio.gather(life, return_exceptions=True)
        assert reception.over.is_set()
        assert "abort" not in reception.did
        following = asyncio.create_task(case.begin())  # waits for what the first one leaves
        reception.gates["fill"].set()
        for lane in lanes:
            with pytest.raises(PublishRefusedError, match="its publisher ended"):
                await lane
        assert reception.did.count("abort") == 1 and reception.did[-1] == "abort"
        assert await following

    with_case(scenario)


def test_the_end_of_the_publisher_while_it_is_pinned_publishes_nothing() -> None:
    async def scenario(case: Case) -> None:
        token, life = await case.to_filling()
        reception = case.made[0]
        reception.hold("finish")
        commit = asyncio.create_task(case.say(PUBLISH_COMMIT, token))
        await asyncio.to_thread(reception.entered["finish"].wait, BOUND_S)
        life.cancel()
        await asyncio.gather(life, return_exceptions=True)
        reception.gates["finish"].set()
        with pytest.raises(PublishRefusedError, match="its publisher ended"):
            await commit
        assert reception.did == ["describe", "finish", "abort"]
        assert not case.generation.done()
        await case.publishes()

    with_case(scenario)


def test_a_publisher_that_says_no_more_after_its_first_word_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receive, "_GRACE_S", 0.01)

    async def scenario(case: Case) -> None:
        await case.begin()
        assert await case.begin()  # which waits a little for the first one to end
        assert case.made[0].did == ["abort"]
        assert "said no more" in case.receiver.warnings[0]

    with_case(scenario)


def test_its_life_is_waited_for_once() -> None:
    async def scenario(case: Case) -> None:
        token, _life = await case.to_filling()
        with pytest.raises(PublishRefusedError, match="waited for already"):
            await case.ask(PUBLISH_WAIT, token)
        assert not case.made[0].over.is_set()

    with_case(scenario)


@pytest.mark.parametrize("phase", ["waiting", "begun", "filling", "copying", "finishing"])
def test_closing_leaves_nothing_in_every_phase(phase: str) -> None:
    async def scenario(case: Case) -> None:
        step = None
        if phase == "begun":
            await case.begin()
        elif phase != "waiting":
            token, life = await case.to_filling()
            if phase in ("copying", "finishing"):
                held = "fill" if phase == "copying" else "finish"
                case.made[0].hold(held)
                step = asyncio.create_task(case.say(PUBLISH_LANE if held == "fill" else PUBLISH_COMMIT, token))
                await asyncio.to_thread(case.made[0].entered[held].wait, BOUND_S)
                asyncio.get_running_loop().call_later(0.01, case.made[0].gates[held].set)
        await asyncio.wait_for(case.receiver.close(), BOUND_S)
        with pytest.raises(LoadCancelledError):
            await case.generation
        if case.made:
            assert case.made[0].did[-1] == "abort"
        for task in [step] if step else []:
            with pytest.raises(PublishRefusedError, match="stopping"):
                await task
        if phase in ("filling", "copying", "finishing"):
            with pytest.raises(PublishRefusedError, match="stopping"):
                await life
        with pytest.raises(PublishRefusedError, match="stopping"):
            await case.begin()
        with pytest.raises(LoadCancelledError):
            await case.receiver.receive()

    with_case(scenario)


def test_closing_before_it_is_announced_tells_the_publisher() -> None:
    async def scenario(case: Case) -> None:
        token, life = await case.to_filling()
        await case.say(PUBLISH_COMMIT, token)
        await case.receiver.close()
        with pytest.raises(PublishRefusedError, match="stopping"):
            await life
        assert "abort" not in case.made[0].did  # it is the service's by now

    with_case(scenario)


def test_notes_of_a_publication_that_failed_are_forgotten() -> None:
    async def scenario(case: Case) -> None:
        token, life = await case.to_filling()
        case.made[0].note("layers: no match")
        assert case.receiver.warnings == ["layers: no match"]
        case.made[0].fails["fill"] = PublishDamagedError("damaged")
        with pytest.raises(PublishDamagedError):
            await case.say(PUBLISH_LANE, token)
        with pytest.raises(PublishDamagedError):
            await life
        assert not any("layers" in text for text in case.receiver.warnings)

    with_case(scenario)
