"""An interrupt that is held back comes afterwards, once, to whoever handled it before."""

from __future__ import annotations

import signal
import threading

import pytest

from ftd_client.interrupts import uninterrupted


@pytest.fixture(autouse=True)
def _as_in_a_terminal() -> object:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_it_comes_at_the_end() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            done.append("inner")
        done.append("outer")
    assert done == ["inner", "outer"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_of_the_body_is_in_its_context() -> None:
    with pytest.raises(KeyboardInterrupt) as caught, uninterrupted():
        signal.raise_signal(signal.SIGINT)
        raise ValueError("of the body")
    assert isinstance(caught.value.__context__, ValueError)


def test_without_one_nothing_comes() -> None:
    with pytest.raises(KeyError), uninterrupted():
        raise KeyError
    with uninterrupted():
        pass


def test_what_is_ignored_stays_so_and_other_threads_change_nothing() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with uninterrupted():
        signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    signal.signal(signal.SIGINT, signal.default_int_handler)
    seen = []

    def within() -> None:
        with uninterrupted():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=within)
    thread.start()
    thread.join(10)
    assert seen == [signal.default_int_handler]
