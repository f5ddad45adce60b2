"""Attachments of one process, one after the other."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

from ftd_client.queueing import one_at_a_time

PATIENCE_S = 60


def test_a_second_thread_waits_for_the_first() -> None:
    order: list[str] = []

    def second() -> None:
        with one_at_a_time():
            order.append("second")

    with one_at_a_time():
        thread = threading.Thread(target=second)
        thread.start()
        thread.join(0.05)
        order.append("first")
    thread.join(PATIENCE_S)
    assert order == ["first", "second"]


def test_within_nothing_is_collected() -> None:
    with one_at_a_time():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_thread_that_has_its_turn_may_take_it_again() -> None:
    """In a handler of a signal, or in a finalizer."""
    with one_at_a_time(), one_at_a_time():
        pass


def test_a_child_does_not_wait_for_a_thread_of_its_parent(in_child: Callable[..., Any]) -> None:
    within, leave = threading.Event(), threading.Event()

    def stay() -> None:
        with one_at_a_time():
            within.set()
            assert leave.wait(PATIENCE_S)

    def attach() -> bool:
        with one_at_a_time():
            return True

    thread = threading.Thread(target=stay)
    thread.start()
    try:
        assert within.wait(PATIENCE_S)
        assert in_child(attach)
    finally:
        leave.set()
        thread.join()
