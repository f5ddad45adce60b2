"""What an observer tells of forwards: order, times, who reads what, and which region was around."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ftd_client.phase.observe import Observer, merge_order
from ftd_client.stream.units import Param

from .units import param, unit

A, B, C = unit("a"), unit("b"), unit("c")
ORDERS = st.lists(st.sampled_from("abcdef"), max_size=12)


class Counting:
    """A clock that says how often it was asked."""

    def __init__(self) -> None:
        self.now = 0

    def mark(self) -> object:
        self.now += 1
        return self.now

    def elapsed_ns(self, start: object, end: object) -> int:
        assert isinstance(start, int) and isinstance(end, int)
        return end - start


def nothing() -> None:
    pass


# --- orders ------------------------------------------------------------------------------------------------------


@given(ORDERS)
def test_the_first_forward_is_taken_as_it_is_but_for_repeats_in_a_row(seen: list[str]) -> None:
    merged = merge_order([], seen)
    assert all(one is not other for one, other in pairwise(merged))
    # only equal neighbours were taken out
    rest = iter(seen)
    assert all(any(item is found for found in rest) for item in merged)
    assert set(merged) == set(seen)


@given(ORDERS, st.lists(ORDERS, max_size=3))
def test_later_forwards_only_add_what_is_new(first: list[str], later: list[list[str]]) -> None:
    merged = merge_order([], first)
    for seen in later:
        before, merged = merged, merge_order(merged, seen)
        assert set(merged) == set(before) | set(seen)
        if before:
            assert [item for item in merged if item in before] == before, "what was known keeps its order"
            new = [item for item in merged if item not in before]
            assert len(new) == len(set(new)), "what is new stands once"


@given(ORDERS)
def test_a_forward_that_was_seen_changes_nothing(seen: list[str]) -> None:
    once = merge_order([], seen)
    assert merge_order(once, seen) == once


def test_new_ones_stand_behind_their_predecessor() -> None:
    assert merge_order(list("abd"), list("abcd")) == list("abcd")
    assert merge_order(list("bc"), list("abc")) == list("abc")
    assert merge_order(list("ab"), list("axyb")) == list("axyb")


# --- visits and times --------------------------------------------------------------------------------------------


def test_times_run_from_the_end_of_a_wait_to_the_next_unit() -> None:
    clock = Counting()
    observer = Observer(clock)
    observer.begin()  # 1
    clock.now = 10
    observer.reach(A, lambda: setattr(clock, "now", 100))  # 11, wait, 101
    clock.now = 150
    observer.reach(B, lambda: setattr(clock, "now", 300))  # 151, wait, 301
    clock.now = 400
    observer.finish()  # 401
    assert observer.times() == (10, [(A, 50), (B, 100)])


def test_times_without_a_clock_or_a_visit_are_none() -> None:
    for observer in (Observer(None), Observer(Counting())):
        observer.begin()
        observer.finish()
        assert observer.times() == (0, [])
    observer = Observer(None)
    observer.begin()
    observer.reach(A, nothing)
    observer.finish()
    assert observer.times() == (0, [])
    assert [visit.unit for visit in observer.visits] == [A]


def test_a_new_forward_begins_from_nothing() -> None:
    observer = Observer(Counting())
    for units in ([A, B], [C]):
        observer.begin()
        for each in units:
            observer.reach(each, nothing)
        observer.finish()
    assert [visit.unit for visit in observer.visits] == [C]
    assert [unit for unit, _ in observer.times()[1]] == [C]


# --- frames and regions ------------------------------------------------------------------------------------------


def test_the_innermost_region_counts() -> None:
    observer = Observer(None)
    observer.begin()
    observer.push("outer", None)
    observer.reach(A, nothing)
    observer.push("inner", None)
    observer.push("module", nn.Identity())
    observer.reach(B, nothing)
    observer.pop()
    observer.pop()
    observer.reach(A, nothing)
    observer.pop()
    observer.reach(C, nothing)
    assert [visit.region for visit in observer.visits] == ["outer", "inner", "outer", ""]
    assert list(observer.region_names) == ["outer", "inner"]


def _readers(observer: Observer, held: Param) -> list[tuple[str, bool, int]]:
    return [(frame.name, frame.units, frame.at) for frame in observer.readers[held]]


def test_a_reader_is_the_innermost_frame() -> None:
    observer, held, module = Observer(None), param("w"), nn.Identity()
    observer.begin()
    observer.reach(A, nothing)
    observer.push("outer", module)
    observer.push("inner", module)
    observer.read(held)
    observer.pop()
    observer.pop()
    assert _readers(observer, held) == [("inner", False, 1)]


def test_a_frame_that_units_run_in_is_told_apart_before_and_after_it_reads() -> None:
    for first in (True, False):
        observer, held = Observer(None), param("w")
        observer.begin()
        observer.push("outer", nn.Identity())
        if first:
            observer.read(held)
        observer.reach(A, nothing)
        if not first:
            observer.read(held)
        observer.pop()
        assert _readers(observer, held) == [("outer", True, 0)]


def test_equal_frames_of_several_forwards_count_once() -> None:
    observer, held, module = Observer(None), param("w"), nn.Identity()
    for name in ("one", "one", "two", "one"):
        observer.begin()
        observer.push(name, module)
        observer.read(held)
        observer.read(held)
        observer.pop()
    assert [name for name, _, _ in _readers(observer, held)] == ["one", "two"]


def test_a_read_outside_of_every_frame_is_the_models_own() -> None:
    observer, held = Observer(None), param("w")
    observer.begin()
    observer.reach(A, nothing)
    observer.read(held)
    assert _readers(observer, held) == [("", True, 1)]
