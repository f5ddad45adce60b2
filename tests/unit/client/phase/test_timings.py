"""Medians of compute times by unit, and what is said of their worth."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftd_client.phase.timings import Timings
from ftd_client.stream.units import Unit

from .units import unit

A, B, C = unit("a"), unit("b"), unit("c")
NS = st.integers(0, 10**9)


def _timings(*forwards: tuple[int, Sequence[tuple[Unit, int]]]) -> Timings:
    timings = Timings()
    for prefix_ns, spans in forwards:
        timings.add(prefix_ns, spans)
    return timings


@given(st.lists(st.tuples(NS, NS, NS), min_size=1, max_size=9))
def test_each_position_has_the_median_of_its_forwards(times: list[tuple[int, int, int]]) -> None:
    timings = _timings(*((prefix, [(A, a), (B, b)]) for prefix, a, b in times))
    prefixes, firsts, seconds = zip(*times, strict=True)
    assert timings.forwards == len(times)
    assert timings.prefix_ns() == round(median(prefixes))
    assert timings.compute_ns([A, B]) == [round(median(firsts)), round(median(seconds))]
    assert timings.compute_ns([B, A]) == timings.compute_ns([A, B])[::-1]


def test_one_late_forward_does_not_move_the_median() -> None:
    timings = _timings((1, [(A, 10)]), (1, [(A, 12)]), (999, [(A, 100_000)]))
    assert (timings.prefix_ns(), timings.compute_ns([A])) == (1, [12])


def test_visits_of_one_unit_are_told_apart() -> None:
    timings = _timings((0, [(A, 10), (B, 5), (A, 30)]), (0, [(A, 20), (B, 5), (A, 40)]))
    assert timings.compute_ns([A, B, A]) == [15, 5, 35]


def test_visits_that_the_order_has_no_position_for_are_added_to_the_last_one() -> None:
    timings = _timings((0, [(A, 10), (B, 5), (A, 30), (A, 100)]))
    assert timings.compute_ns([A, B]) == [140, 5]
    assert timings.compute_ns([A, B, A]) == [10, 5, 130]


def test_a_unit_that_some_forwards_skip_counts_with_their_share() -> None:
    timings = _timings((0, [(A, 10)]), (0, [(A, 10), (B, 80)]), (0, [(A, 10)]), (0, [(A, 10)]))
    assert timings.compute_ns([A, B]) == [10, 20]


def test_a_unit_that_no_forward_reached_takes_no_time() -> None:
    assert _timings((3, [(A, 10)])).compute_ns([A, C]) == [10, 0]


def test_nothing_measured_is_nothing() -> None:
    timings = Timings()
    assert (timings.forwards, timings.prefix_ns()) == (0, 0)


def test_clear_drops_all_of_it() -> None:
    timings = _timings((7, [(A, 10)]))
    timings.clear()
    timings.add(1, [(B, 2)])
    assert (timings.forwards, timings.prefix_ns(), timings.compute_ns([A, B])) == (1, 1, [0, 2])


@pytest.mark.parametrize("count", range(6))
def test_few_forwards_are_told_with_the_number_expected(count: int) -> None:
    quality = _timings(*((0, [(A, 10)]) for _ in range(count))).quality()
    assert quality.forwards == count
    assert bool(quality.problems) == (count < 3)
    if count < 3:
        (problem,) = quality.problems
        assert problem == f"{count} forward{'s' * (count != 1)} measured, 3 or more expected"


def test_forwards_that_differ_are_told_with_their_spread() -> None:
    steady = _timings(*((0, [(A, 100 + i)]) for i in range(8))).quality()
    assert steady.problems == ()
    assert 0 < steady.spread < 0.1
    wild = _timings(*((0, [(A, 100 + 60 * (i % 2))]) for i in range(8))).quality()
    (problem,) = wild.problems
    assert wild.spread > 0.1
    assert f"{wild.spread:.0%}" in problem and "at most 10%" in problem


def test_one_late_forward_of_many_is_no_problem() -> None:
    quality = _timings(*((0, [(A, 100 if i else 10_000)]) for i in range(10))).quality()
    assert quality.problems == ()
