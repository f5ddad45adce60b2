"""Counting of forwards: phases end when their forwards are done, and each that is entered has at least one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftd_client.phase.course import Course, Phase

ITERS = st.integers(0, 5)


def _walk(course: Course) -> list[Phase]:
    """The phase of each forward until inference."""
    seen: list[Phase] = []
    while course.phase is not Phase.INFERENCE:
        assert len(seen) < 20, "inference is never reached"
        seen.append(course.phase)
        if course.forward_done():
            course.advance()
    return seen


@given(ITERS, ITERS, st.booleans())
def test_each_phase_has_its_forwards_and_at_least_one(discovery: int, profiling: int, skip: bool) -> None:
    course = Course(discovery, profiling, skip_discovery=skip)
    wanted = [] if skip else [Phase.DISCOVERY] * max(1, discovery)
    assert _walk(course) == wanted + [Phase.PROFILING] * max(1, profiling)


@given(ITERS, ITERS, st.booleans())
def test_left_says_how_many_forwards_there_are(discovery: int, profiling: int, skip: bool) -> None:
    course = Course(discovery, profiling, skip_discovery=skip)
    said = []
    while course.phase is not Phase.INFERENCE:
        said.append(course.left)
        if course.forward_done():
            course.advance()
    assert said == list(range(len(said), 0, -1))
    assert course.left == 0


def test_inference_does_not_end() -> None:
    course = Course(1, 1, skip_discovery=False)
    course.jump_to_inference()
    assert [course.forward_done() for _ in range(3)] == [False] * 3
    assert (course.phase, course.left) == (Phase.INFERENCE, 0)


def test_dropped_measurements_are_made_again() -> None:
    course = Course(1, 3, skip_discovery=True)
    course.forward_done()
    course.forward_done()
    assert course.left == 1
    course.recount()
    assert course.left == 3


@pytest.mark.parametrize(("profiling_iters", "left"), [(5, 3), (1, 1), (0, 1)])
def test_iterations_that_change_meanwhile_count_with_what_is_done(profiling_iters: int, left: int) -> None:
    course = Course(1, 3, skip_discovery=True)
    course.forward_done()
    course.forward_done()
    course.profiling_iters = profiling_iters
    assert course.left == left
    assert course.forward_done() == (left == 1)


def test_phases_are_the_words_of_the_contract() -> None:
    assert [str(phase) for phase in Phase] == ["idle", "discovery", "profiling", "inference"]
    assert Phase("inference") == "inference"
