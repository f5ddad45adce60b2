"""A stream over real bytes: whatever is called in whatever order, no module finds another's weights."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ftd.plan.strategy import AllStreamed, Auto, EvenSpread
from ftd_client.stream.link import LinkError
from ftd_client.stream.units import OffloadError, Unit

from .toys import Toy

SIZES = st.lists(
    st.lists(st.sampled_from([1, 512, 513, 1500, 4096]), min_size=1, max_size=3), min_size=1, max_size=6
)  # fmt: skip


@st.composite
def toys(draw: st.DrawFn) -> Toy:
    sizes = draw(SIZES)
    return Toy(
        sizes,
        unplanned=draw(st.integers(0, len(sizes[-1]))),
        strategy=draw(st.sampled_from([AllStreamed(), EvenSpread(), Auto()])),
        num_blocks=draw(st.integers(1, 3)),
        granularity=draw(st.sampled_from(["auto", "layer", "block"])),
    )


class Walker:
    """Frames of calls, as a program could have them: opened and closed like parentheses, anything in anything."""

    def __init__(self, toy: Toy) -> None:
        self.toy = toy
        self.frames: list[tuple[Unit | None, torch.Tensor | None]] = []

    def open_scope(self, unit: Unit) -> None:
        self.toy.stream.enter(self.toy.steps[unit][0])
        held = self.toy.found(unit)
        assert held is not self.toy.parked[unit.params[0]]
        self.frames.append((unit, held))

    def open_root(self) -> None:
        self.toy.stream.begin()
        self.frames.append((None, None))

    def close(self) -> None:
        if self.frames:
            unit, _ = self.frames.pop()
            if unit is None:
                self.toy.stream.end()
            else:
                self.toy.stream.leave(*self.toy.steps[unit])

    def check(self) -> None:
        """What a running forward has in its hands, and what it would find now, has the right bytes."""
        self.toy.check()
        for unit, held in self.frames:
            if unit is not None:
                assert held is not None
                assert torch.equal(held, self.toy.bytes[unit]), f"{unit.name} lost its bytes while it ran"
        if all(unit is None for unit, _ in self.frames):
            assert all(self.toy.is_parked(unit) for unit in self.toy.steps), "in place while no scope of it runs"


@settings(max_examples=100)
@given(toys(), st.data())
def test_no_order_of_calls_shows_anybody_anothers_bytes(toy: Toy, data: st.DataObject) -> None:
    walker = Walker(toy)
    units = list(toy.steps)
    if not units:
        return
    numbers = data.draw(st.lists(st.integers(0, 1000), max_size=60))
    for number in numbers:
        what, which = number % 8, number // 8
        if what <= 3 and len(walker.frames) < 5:
            walker.open_scope(units[which % len(units)])
        elif what == 4:
            walker.open_root()
        elif what == 5:
            toy.link.run(which % 4)
        else:
            walker.close()
        walker.check()
    while walker.frames:
        walker.close()
        walker.check()
    toy.forward()
    toy.installed.close()
    toy.residents.close()
    assert all(toy.is_parked(unit) for unit in toy.units)
    assert not toy.link.queue


def assert_in_place(toy: Toy, unit: Unit) -> None:
    assert not toy.is_parked(unit)


@settings(max_examples=40)
@given(toys(), st.lists(st.integers(0, 5), max_size=30))
def test_in_order_no_copy_is_made_twice_and_nothing_is_missed(toy: Toy, runs: list[int]) -> None:
    for at in range(3):
        at_first = len(toy.link.jobs)
        toy.stream.begin()
        for unit in toy.streamed:
            toy.link.run(runs.pop() if runs else 0)
            toy.call(unit)
        toy.stream.end()
        assert not toy.stream.missed, at
        # fewer where a place is nobody else's, and its bytes stay
        assert len(toy.link.jobs) - at_first <= len(toy.plan.streamed)
    assert all(toy.is_parked(unit) for unit in toy.streamed)


def test_copies_run_ahead_of_their_use() -> None:
    toy = Toy([[4096]] * 6, num_blocks=3)
    assert len(toy.link.jobs) == 3, "the first forward finds the ring full"
    for forward in range(2):
        assert len(toy.link.jobs) == 3 + 6 * forward
        toy.stream.begin()
        for unit in toy.streamed:
            toy.call(unit)
            ahead = [s for s in toy.stream.steps if s.ticket is not None]
            assert len(ahead) >= 2, "nothing is on its way while the next one computes"
        toy.stream.end()


def test_what_a_forward_skips_is_passed_over_and_copied_for_the_next() -> None:
    toy = Toy([[512]] * 8)
    first, last = toy.streamed[0], toy.streamed[-1]
    for _ in range(3):
        toy.forward([first, last])
    assert 0 not in toy.stream.missed
    toy.stream.missed.clear()
    toy.forward()
    assert not toy.stream.missed


def test_going_back_is_a_miss_that_leaves_the_order_as_it_is() -> None:
    toy = Toy([[512]] * 8)
    order = toy.streamed
    back = [*order[:5], order[0], *order[5:]]
    toy.forward(back)
    assert toy.stream.missed == {0: 5}
    jobs = len(toy.link.jobs)
    toy.forward(back)
    assert len(toy.link.jobs) - jobs == len(order) + 1
    assert toy.stream.missed == {0: 5}, "told once, however often it is missed"


def test_units_of_a_step_share_its_turn() -> None:
    toy = Toy([[512, 1024]] * 4, granularity="layer")
    one, other = toy.streamed[:2]
    assert toy.steps[one] == (0, False)
    assert toy.steps[other] == (0, True)
    ahead = len(toy.link.jobs)
    for _ in range(2):
        toy.call(one, lambda: assert_in_place(toy, other))
        assert toy.is_parked(one) and toy.is_parked(other), "nobody is to find them while no scope of theirs runs"
    assert len(toy.link.jobs) == ahead, "its turn goes on"
    toy.call(other, lambda: assert_in_place(toy, one))
    assert toy.is_parked(one) and toy.is_parked(other)
    assert len(toy.link.jobs) == ahead + 1


def test_a_step_that_is_never_finished_ends_when_another_begins() -> None:
    toy = Toy([[512, 1024]] * 4, granularity="layer")
    ahead = len(toy.link.jobs)
    toy.call(toy.streamed[0])
    assert len(toy.link.jobs) == ahead
    toy.call(toy.streamed[2])
    assert len(toy.link.jobs) == ahead + 1
    toy.stream.begin()
    assert len(toy.link.jobs) > ahead + 1, "the turn of what was called last has ended as well"
    assert all(toy.is_parked(unit) for unit in toy.streamed)
    toy.stream.end()


def test_calls_without_the_model_go_round() -> None:
    toy = Toy([[512]] * 6)
    for _ in range(3):
        for unit in toy.streamed:
            toy.call(unit)
    assert not toy.stream.missed


def test_a_scope_inside_of_another_is_loaded_beside_it() -> None:
    toy = Toy([[512]] * 6)
    outer, inner = toy.streamed[0], toy.streamed[3]

    def inside() -> None:
        toy.call(inner)
        assert toy.is_parked(inner)
        assert not toy.is_parked(outer)

    toy.call(outer, inside)
    assert list(toy.stream.missed) == [3]


def test_a_unit_that_no_plan_knows_is_loaded_each_time() -> None:
    toy = Toy([[512]] * 4, unplanned=1)
    new = toy.units[-1]
    for _ in range(3):
        toy.forward()
        jobs = len(toy.link.jobs)
        toy.call(new)
        assert len(toy.link.jobs) == jobs + 1
    assert toy.stream.missed == {toy.steps[new][0]: 0}


def test_join_waits_for_every_copy_on_its_way() -> None:
    toy = Toy([[512]] * 6)
    toy.forward()
    toy.link.waits.clear()
    toy.stream.join()
    assert not toy.link.queue
    assert set(toy.link.waits) == {step.ticket for step in toy.stream.steps if step.ticket is not None}


def test_a_place_that_was_filled_by_somebody_else_is_an_error() -> None:
    toy = Toy([[512]] * 4)
    unit = toy.streamed[1]
    assert unit.scope is not None
    unit.scope.weight = nn.Parameter(torch.zeros(512, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(OffloadError, match=r"layers\.1\.parts\.0\.weight was replaced after it was offloaded"):
        toy.call(unit)


def test_a_place_that_is_filled_during_the_forward_is_an_error() -> None:
    toy = Toy([[512]] * 4)
    unit = toy.streamed[0]

    def replaced() -> None:
        assert unit.scope is not None
        unit.scope._parameters["weight"] = nn.Parameter(toy.bytes[unit].clone(), requires_grad=False)

    with pytest.raises(OffloadError, match=r"layers\.0\.parts\.0\.weight was replaced"):
        toy.call(unit, replaced)


@pytest.mark.parametrize("granularity", ["block", "layer"])
@pytest.mark.parametrize("which", [0, 1])
def test_a_write_that_shows_in_the_version_is_an_error_at_the_end_of_the_scope(which: int, granularity: str) -> None:
    toy = Toy([[512, 1024]] * 4, granularity=granularity)
    unit = toy.streamed[which]

    def write() -> None:
        toy.found(unit).fill_(toy.bytes[unit][0])

    toy.stream.begin()
    for before in toy.streamed[:which]:
        toy.call(before)
    with pytest.raises(OffloadError, match=rf"layers\.0\.parts\.{which}\.weight was changed in place"):
        toy.call(unit, write)
    assert all(toy.is_parked(each) for each in toy.units)
    toy.stream.end()
    toy.forward()


def test_a_write_through_a_view_that_was_kept_is_an_error_at_the_next_turn() -> None:
    toy = Toy([[512]] * 4)
    unit = toy.streamed[0]
    kept: list[torch.Tensor] = []
    toy.call(unit, lambda: kept.append(toy.found(unit)[:8]))
    kept[0].zero_()
    with pytest.raises(OffloadError, match=r"layers\.0\.parts\.0\.weight was changed in place"):
        for _ in range(2):
            toy.forward()
    assert all(toy.is_parked(each) for each in toy.units)


def test_every_parking_raises_the_version_so_that_backward_knows() -> None:
    toy = Toy([[512, 1024]] * 2, granularity="layer")
    one, seen = toy.streamed[0], []
    for _ in range(3):
        toy.call(one, lambda: seen.append(toy.found(one)._version))
    assert seen == sorted(set(seen))


def test_a_failed_copy_is_told_each_time_and_nothing_stays_in_place() -> None:
    toy = Toy([[512]] * 4)
    toy.link.fail = True
    for _ in range(2):
        with pytest.raises(LinkError):
            toy.call(toy.streamed[0])
        assert all(toy.is_parked(unit) for unit in toy.units)
    toy.link.fail = False
    toy.forward()
