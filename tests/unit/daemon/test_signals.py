import os
import signal

import pytest

from ftd.daemon.signals import StopSignals

BOTH = [signal.SIGTERM, signal.SIGINT]


@pytest.mark.parametrize("number", BOTH)
def test_a_signal_is_recorded_and_ends_nothing(number: signal.Signals) -> None:
    with StopSignals() as signals:
        assert signals.received is None
        os.kill(os.getpid(), number)
        assert signals.received == number.name


def test_the_first_one_is_the_reason() -> None:
    with StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.received == "SIGINT"


def test_every_signal_wakes_the_loop() -> None:
    woken: list[str | None] = []
    with StopSignals() as signals:
        signals.on_receive(lambda: woken.append(signals.received))
        assert woken == []
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
    assert woken == ["SIGTERM", "SIGTERM"]


def test_one_that_came_before_the_loop_is_not_lost() -> None:
    woken: list[str | None] = []
    with StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        signals.on_receive(lambda: woken.append(signals.received))
        assert woken == ["SIGTERM"]


@pytest.mark.parametrize("number", BOTH)
def test_handlers_are_restored_also_after_an_error(number: signal.Signals) -> None:
    seen: list[int] = []
    before = signal.signal(number, lambda n, _: seen.append(n))
    try:
        with pytest.raises(KeyError), StopSignals() as signals:
            os.kill(os.getpid(), number)
            raise KeyError
        assert seen == []
        os.kill(os.getpid(), number)
        assert (seen, signals.received) == ([number], number.name)
    finally:
        signal.signal(number, before)
