"""The interpreter's interval during loads, and after the last of them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ftd_client.load import turns
from ftd_client.load.turns import while_loading, while_staging


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    interval_s = sys.getswitchinterval()
    yield
    sys.setswitchinterval(interval_s)


def test_the_last_one_out_puts_it_back() -> None:
    sys.setswitchinterval(0.01)
    while_loading.__enter__()
    while_loading.__enter__()
    assert sys.getswitchinterval() < 0.001
    while_loading.__exit__()
    assert sys.getswitchinterval() < 0.001
    while_loading.__exit__()
    assert sys.getswitchinterval() == pytest.approx(0.01)


def test_the_shortest_counts_whoever_leaves_first() -> None:
    before_s = sys.getswitchinterval()
    with while_staging:
        staging_s = sys.getswitchinterval()
        while_loading.__enter__()
        loading_s = sys.getswitchinterval()
        with while_staging:
            assert sys.getswitchinterval() == loading_s
        while_loading.__exit__()
        assert sys.getswitchinterval() == staging_s
    assert loading_s < staging_s < before_s == sys.getswitchinterval()


def test_an_error_passes() -> None:
    before_s = sys.getswitchinterval()
    with pytest.raises(KeyError), while_loading:
        raise KeyError
    assert sys.getswitchinterval() == before_s


def test_a_forked_child_has_the_interval_of_before(in_child: Callable[..., Any]) -> None:
    """Threads that are within are not in the child, to put it back; nor is it theirs to hold the lock."""
    before_s, inside, go = sys.getswitchinterval(), threading.Event(), threading.Event()

    def within() -> None:
        with while_loading:
            inside.set()
            go.wait(10)

    def in_turn() -> tuple[float, float, float]:
        found_s = sys.getswitchinterval()
        with while_loading:
            within_s = sys.getswitchinterval()
        return found_s, within_s, sys.getswitchinterval()

    thread = threading.Thread(target=within)
    thread.start()
    assert inside.wait(10)
    try:
        with turns._interval._lock:
            found_s, within_s, after_s = in_child(in_turn)
    finally:
        go.set()
        thread.join()
    assert (found_s, after_s) == (before_s, before_s)
    assert within_s < before_s


def test_a_child_that_is_forked_within_ends_it_itself(in_child: Callable[..., Any]) -> None:
    before_s = sys.getswitchinterval()

    def leave() -> tuple[float, float]:
        found_s = sys.getswitchinterval()
        while_loading.__exit__()
        return found_s, sys.getswitchinterval()

    with while_loading:
        found_s, after_s = in_child(leave)
    assert found_s < before_s
    assert after_s == before_s
