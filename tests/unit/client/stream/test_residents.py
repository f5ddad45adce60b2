"""What stays on the device outlives plans: it is loaded once, is right, and never takes the memory of two plans."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ftd.plan.block import aligned
from ftd_client.stream import residents as module
from ftd_client.stream.layout import Layout
from ftd_client.stream.link import LinkError
from ftd_client.stream.memory import Memory, bytes_of
from ftd_client.stream.units import OffloadError, Param

from . import toys
from .toys import Toy

SIZES = [[100, 700], [513, 1500], [4096], [1, 512, 1024]]
#: Two or three parameters.
ARENA = 2048


class Counted:
    """Memory that is there, and the most that ever was."""

    def __init__(self) -> None:
        self.alive: weakref.WeakSet[Memory] = weakref.WeakSet()
        self.most = 0
        self.short = False

    @property
    def nbytes(self) -> int:
        return sum(memory.nbytes for memory in self.alive)

    def __call__(self, nbytes: int, device: torch.device) -> Memory:
        if self.short:
            raise torch.OutOfMemoryError
        made = Memory(nbytes, device)
        self.alive.add(made)
        self.most = max(self.most, self.nbytes)
        return made


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counted]:
    with pytest.MonkeyPatch.context() as patch:
        yield _counted(patch)


def _counted(patch: pytest.MonkeyPatch) -> Counted:
    counted = Counted()
    patch.setattr(module, "Memory", counted)
    patch.setattr(module, "ARENA_BYTES", ARENA)
    return counted


def _copied(toy: Toy, before: int) -> int:
    return sum(copy.nbytes for job in toy.link.jobs[before:] for copy in job.copies)


def _settle(toy: Toy, params: list[Param]) -> int:
    """Gives the bytes that were loaded for it."""
    before = len(toy.link.jobs)
    toy.residents.settle(params)
    toy.link.drain()
    _assert_resident(toy, params)
    return _copied(toy, before)


def _assert_resident(toy: Toy, params: list[Param]) -> None:
    for unit in toy.units:
        (param,) = unit.params
        found = toy.residents.tensor_of(param)
        assert toy.is_parked(unit) == (param not in params) == (found is None)
        assert found is None or (toy.found(unit) is found and torch.equal(found, toy.bytes[unit]))
    toy.residents.check()


@settings(max_examples=50)
@given(st.lists(st.tuples(st.sets(st.integers(0, 7)), st.sampled_from([0, 1024, 3000, 8192])), min_size=2, max_size=6))
def test_one_plan_after_another_loads_what_is_new_and_takes_no_more_memory_than_either(
    plans: list[tuple[set[int], int]],
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        counted, toy = _counted(patch), Toy(SIZES)
        toy.link.drain()
        before: set[int] = set()
        for numbers, spare_bytes in plans:
            params = [toy.params[i] for i in sorted(numbers)]
            had, counted.most, toy.residents.spare_bytes = counted.nbytes, 0, spare_bytes
            loaded, new = _settle(toy, params), sum(toy.params[i].nbytes for i in numbers - before)
            assert loaded == new if spare_bytes > 2 * ARENA + 4096 - 1 else loaded >= new
            assert toy.residents.nbytes == counted.nbytes == sum(aligned(param.nbytes) for param in params)
            assert counted.most <= max(had + spare_bytes, counted.nbytes)
            before = numbers
        toy.residents.close()
        assert toy.residents.nbytes == counted.nbytes == 0
        assert all(toy.is_parked(unit) for unit in toy.units)


def test_what_cannot_be_moved_is_loaded_anew_and_makes_room_for_all_others(counted: Counted) -> None:
    toy = Toy([[1024, 1024]] * 6)
    _settle(toy, toy.params)
    assert _settle(toy, toy.params[::2]) == 1024
    assert counted.most == 12 * 1024


def test_a_plan_that_wants_the_same_leaves_every_tensor_where_it_is(counted: Counted) -> None:
    toy = Toy(SIZES)
    _settle(toy, toy.params[:5])
    before = [toy.residents.tensor_of(param) for param in toy.params[:5]]
    assert _settle(toy, toy.params[4::-1]) == 0
    assert all(toy.residents.tensor_of(param) is old for param, old in zip(toy.params, before, strict=False))


def test_what_was_changed_is_told_and_comes_anew_with_the_next_plan(counted: Counted) -> None:
    toy = Toy(SIZES)
    _settle(toy, toy.params)
    changed = toy.residents.tensor_of(toy.params[3])
    assert changed is not None
    changed.zero_()
    toy.residents.spare_bytes = 2 * ARENA
    for ask in (toy.residents.check, toy.residents.review):
        with pytest.raises(OffloadError, match=f"changed in place .*: {toy.params[3].name}"):
            ask()
    assert toy.residents.tensor_of(toy.params[3]) is None and toy.is_parked(toy.units[3])
    toy.residents.review()
    assert _settle(toy, toy.params) == toy.params[3].nbytes


def test_what_replaced_one_is_told_once_and_stays(counted: Counted) -> None:
    toy = Toy(SIZES)
    _settle(toy, toy.params)
    scope = toy.units[2].scope
    assert scope is not None
    theirs = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    scope.weight = theirs
    with pytest.raises(OffloadError, match=f"replaced while offloaded: {toy.params[2].name}"):
        toy.residents.review()
    assert toy.found(toy.units[2]) is theirs
    toy.residents.review()
    toy.residents.close()
    assert toy.found(toy.units[2]) is theirs
    assert counted.nbytes == 0


def test_one_that_was_changed_and_then_replaced_is_told_and_stays(counted: Counted) -> None:
    toy = Toy(SIZES)
    _settle(toy, toy.params)
    scope, changed = toy.units[2].scope, toy.residents.tensor_of(toy.params[2])
    assert scope is not None and changed is not None
    changed.zero_()
    scope.weight = theirs = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    with pytest.raises(OffloadError, match=f"replaced while offloaded: {toy.params[2].name}"):
        toy.residents.review()
    assert toy.found(toy.units[2]) is theirs
    toy.residents.review()


def test_what_is_moved_has_the_same_bytes_whatever_they_stand_for(
    counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bool of torch's own is 0 or 1; this one is what a checkpoint said."""

    class Odd(toys.Holder):
        def __init__(self, number: int, nbytes: int) -> None:
            super().__init__(number, nbytes)
            self.weight = torch.nn.Parameter(self.weight.data.view(torch.bool), requires_grad=False)

    monkeypatch.setattr(toys, "Holder", Odd)
    toy = Toy(SIZES)
    toy.residents.settle(toy.params)
    toy.link.drain()
    toy.residents.spare_bytes = 2 * ARENA
    toy.residents.settle(toy.params[1:2])
    found = toy.residents.tensor_of(toy.params[1])
    assert found is not None and counted.nbytes == 1024
    assert bytes_of(found).eq(3).all()


def test_how_long_it_takes_to_lay_out_many_grows_with_their_number_alone(
    counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = 0

    class Asked(Layout):
        def __getattribute__(self, name: str) -> Any:
            nonlocal asked
            asked += name == "nbytes"
            return super().__getattribute__(name)

    toy = Toy([[1] * 100])
    lay_out = toy.loader.layout
    monkeypatch.setattr(toy.loader, "layout", lambda params: Asked(*lay_out(params)))
    monkeypatch.setattr(module, "ARENA_BYTES", 1 << 20)
    _settle(toy, toy.params)
    assert asked <= 4 * len(toy.params)


def test_every_stream_is_waited_for_before_what_it_may_read_is_freed_and_after_what_it_may_read_is_there(
    counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forward that reads what is resident alone asks no link for its turn."""
    toy = Toy(SIZES)
    _settle(toy, toy.params)
    before = counted.nbytes
    monkeypatch.setattr(module, "Memory", lambda nbytes, _device: counted(nbytes, torch.device("cpu")))
    toy.residents._device = torch.device("cuda", 0)
    freed: list[int] = []
    put: list[bool] = []
    stream = SimpleNamespace(synchronize=lambda: put.append(not toy.is_parked(toy.units[0])))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: freed.append(before - counted.nbytes))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: stream)
    toy.residents.spare_bytes = 2 * ARENA
    _settle(toy, toy.params[1:])
    assert freed == [0] and put == [False], "moved"
    _settle(toy, toy.params)
    assert freed == [0] and put == [False, False], "loaded"


@pytest.mark.parametrize("fails", ["memory", "copies"])
def test_one_that_could_not_be_settled_leaves_what_is_there_right(counted: Counted, fails: str) -> None:
    toy = Toy(SIZES)
    _settle(toy, toy.params[:4])
    toy.residents.spare_bytes = 2 * ARENA
    if fails == "memory":
        counted.short = True
    else:
        toy.link.fail = True
    with pytest.raises((torch.OutOfMemoryError, LinkError)):
        toy.residents.settle(toy.params[1:])
    assert not toy.link.queue, "nothing is written to memory that is somebody else's by now"
    counted.short = toy.link.fail = False
    _assert_resident(toy, toy.params[1:4])
    toy.residents.spare_bytes = 2 * ARENA
    assert _settle(toy, toy.params[2:]) == sum(param.nbytes for param in toy.params[4:])
    gc.collect()
    assert toy.residents.nbytes == counted.nbytes == sum(aligned(param.nbytes) for param in toy.params[2:])
