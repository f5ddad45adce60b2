import math
import time

import pytest

from ftd import clock
from ftd.clock import NS, Deadline, monotonic_ns, wall_s


@pytest.fixture
def hands(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The clock of the module: it stands until its first element is changed, and sleeping moves it."""
    now = [1_000 * NS]

    def sleep(seconds: float) -> None:
        now[0] += int(seconds * NS)

    monkeypatch.setattr(clock, "monotonic_ns", lambda: now[0])
    monkeypatch.setattr(time, "sleep", sleep)
    return now


def test_the_clock_is_the_one_that_all_processes_share() -> None:
    before = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    assert before <= monotonic_ns() <= time.clock_gettime_ns(time.CLOCK_MONOTONIC)


def test_wall_time_is_that_of_people() -> None:
    assert time.time() - 1 < wall_s() < time.time() + 1


def test_a_deadline_runs_down_and_stays_at_zero(hands: list[int]) -> None:
    deadline = Deadline.after(2.5)
    assert deadline.remaining_s() == 2.5
    hands[0] += 2 * NS
    assert deadline.remaining_s() == 0.5
    assert not deadline.expired()
    hands[0] += NS // 2
    assert deadline.expired()
    hands[0] += 60 * NS
    assert deadline.remaining_s() == 0.0


@pytest.mark.parametrize("never", [None, math.inf])
def test_a_deadline_that_never_comes(hands: list[int], never: float | None) -> None:
    deadline = Deadline.after(never)
    hands[0] += 10**9 * NS
    assert deadline.remaining_s() is None
    assert not deadline.expired()


@pytest.mark.parametrize("seconds", [0, -5])
def test_no_time_at_all_is_expired_at_once(hands: list[int], seconds: float) -> None:
    assert Deadline.after(seconds).expired()
    assert Deadline.after(seconds).remaining_s() == 0.0


def test_a_pause_ends_with_the_deadline(hands: list[int]) -> None:
    deadline = Deadline.after(1.0)
    start = hands[0]
    deadline.pause(0.75)
    assert hands[0] == start + 3 * NS // 4
    deadline.pause(0.75)
    assert hands[0] == start + NS
    deadline.pause(0.75)
    assert hands[0] == start + NS


def test_a_pause_without_a_deadline_is_as_long_as_asked_for(hands: list[int]) -> None:
    start = hands[0]
    Deadline.after(None).pause(3)
    assert hands[0] == start + 3 * NS
