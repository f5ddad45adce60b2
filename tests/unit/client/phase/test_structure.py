"""What discovery makes of what forwards told: order, adoption by readers, regions, and what stays resident."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ftd_client.phase.observe import Observer
from ftd_client.phase.structure import Discovery, Structure, refuse_kept_views
from ftd_client.stream.units import OffloadError, Param, Unit

from .units import unit


def nothing() -> None:
    pass


class Forward:
    """Tells an observer of one forward."""

    def __init__(self) -> None:
        self.observer = Observer(None)
        self.observer.begin()

    def reach(self, *units: Unit) -> Forward:
        for each in units:
            self.observer.reach(each, nothing)
        return self

    def inside(self, name: str, module: nn.Module | None, *what: Unit | Param) -> Forward:
        """Units that are reached, and parameters that are read, in that frame."""
        self.observer.push(name, module)
        for each in what:
            if isinstance(each, Unit):
                self.reach(each)
            else:
                self.observer.read(each)
        self.observer.pop()
        return self


def found(units: list[Unit], *forwards: Forward, regions_only: bool = False) -> tuple[Structure, list[Param]]:
    discovery = Discovery(units)
    for forward in forwards:
        discovery.add(forward.observer)
    return discovery.structure(regions_only=regions_only)


def names(units: list[Unit]) -> list[str]:
    return [each.name for each in units]


def test_the_static_order_is_that_of_the_modules() -> None:
    a, b = unit("a"), unit("b")
    structure = Structure.static([a, b])
    assert structure.order == structure.units == [a, b]
    assert structure.unplanned == []


def test_the_order_is_that_of_the_forwards_and_the_rest_is_unplanned() -> None:
    a, b, c, stuck = unit("a"), unit("b"), unit("c"), unit("d", resident="for a reason")
    structure, dropped = found([a, b, c, stuck], Forward().reach(c, a), Forward().reach(c, a))
    assert names(structure.order) == ["c", "a", "d"]
    assert names(structure.unplanned) == ["b"]
    assert dropped == []


def test_forwards_that_differ_are_merged() -> None:
    a, b, c = unit("a"), unit("b"), unit("c")
    structure, _ = found([a, b, c], Forward().reach(a, c), Forward().reach(a, b, c))
    assert names(structure.order) == ["a", "b", "c"]


def test_a_unit_that_is_reached_again_later_stands_twice() -> None:
    a, b = unit("a"), unit("b")
    structure, _ = found([a, b], Forward().reach(a, b, a))
    assert names(structure.order) == ["a", "b", "a"]


def test_insert_puts_a_unit_in_front_of_another_or_last() -> None:
    a, b, c = unit("a"), unit("b"), unit("c")
    structure = Structure([a, b, c], [a])
    structure.insert(c, None)
    structure.insert(b, c)
    assert names(structure.order) == ["a", "b", "c"]
    assert structure.unplanned == []


def test_what_one_module_reads_of_another_becomes_its_own() -> None:
    a, lent, reader = unit("a"), unit("lent"), nn.Identity()
    (held,) = lent.params
    structure, _ = found([a, lent], Forward().reach(a).inside("reader", reader, held))
    assert names(structure.order) == ["a", "reader"]
    made = structure.order[1]
    assert (made.scope, made.params, made.layer, made.resident) == (reader, [held], "lent", "")
    assert lent not in structure.units


def test_a_reader_that_has_a_unit_takes_it_into_that_one() -> None:
    a, lent = unit("a"), unit("lent")
    (held,) = lent.params
    forward = Forward()
    forward.observer.push("a", a.scope)
    forward.observer.read(held)
    forward.observer.pop()
    structure, _ = found([a, lent], forward.reach(a))
    assert names(structure.units) == ["a"]
    assert a.params[-1] is held


def test_adopted_units_stand_where_they_were_read() -> None:
    a, b, lent = unit("a"), unit("b"), unit("lent")
    structure, _ = found([a, b, lent], Forward().reach(a).inside("r", nn.Identity(), *lent.params).reach(b))
    assert names(structure.order) == ["a", "r", "b"]
    first = unit("lent")
    structure, _ = found([a, first], Forward().inside("r", nn.Identity(), *first.params).reach(a))
    assert names(structure.order) == ["r", "a"]


@pytest.mark.parametrize("why", ["two readers", "its own scope too", "a reader that others run in", "nobody's frame"])
def test_what_cannot_be_one_modules_own_is_resident_with_the_reason(why: str) -> None:
    a, lent = unit("a"), unit("lent")
    (held,) = lent.params
    forward = Forward()
    if why == "two readers":
        forward.inside("one", nn.Identity(), held).inside("other", nn.Identity(), held)
    elif why == "its own scope too":
        forward.reach(lent).inside("one", nn.Identity(), held)
    elif why == "a reader that others run in":
        forward.inside("one", nn.Identity(), held, a)
    else:
        forward.reach(a)
        forward.observer.read(held)
    structure, dropped = found([a, lent], forward)
    (stuck,) = [each for each in structure.units if each.params == [held]]
    assert "outside of its module's forward" in stuck.resident
    assert ("one" in stuck.resident) == (why != "nobody's frame")
    assert stuck in structure.order and stuck not in structure.unplanned
    assert dropped == []


def test_readers_of_several_forwards_count_together() -> None:
    a, lent = unit("a"), unit("lent")
    (held,) = lent.params
    one, other = (Forward().reach(a).inside(name, nn.Identity(), held) for name in ("one", "other"))
    structure, _ = found([a, lent], one, other)
    (stuck,) = [each for each in structure.units if each.params == [held]]
    assert "read by one and other" in stuck.resident


def test_a_unit_whose_output_outlives_its_turn_is_resident() -> None:
    a = unit("a")
    forward = Forward().reach(a)
    forward.observer.outliving.add(a)
    structure, _ = found([a], forward)
    assert structure.units[0].resident == "its output is a view of its weight"


def test_regions_are_layers() -> None:
    a, b, c = unit("a"), unit("b"), unit("c")
    structure, _ = found([a, b, c], Forward().inside("half", None, a, b).reach(c))
    assert [each.layer for each in structure.order] == ["half", "half", "c"]


def test_what_a_region_reads_itself_is_a_unit_of_that_name() -> None:
    a, lent = unit("a"), unit("lent")
    (held,) = lent.params
    structure, _ = found([a, lent], Forward().reach(a).inside("half", None, held))
    made = structure.units[1]
    assert (made.name, made.layer, made.scope, made.params) == ("half", "half", None, [held])
    assert made.is_region
    assert names(structure.order) == ["a"], "it is put in place when it is entered, and streams no more"
    assert structure.unplanned == []


def test_what_a_region_reads_beside_modules_that_run_in_it_is_its_own_too() -> None:
    a, lent = unit("a"), unit("lent")
    (held,) = lent.params
    structure, _ = found([a, lent], Forward().inside("half", None, a, held))
    made = structure.units[1]
    assert (made.name, made.is_region, made.params) == ("half", True, [held])
    assert names(structure.order) == ["a"]


def test_without_patterns_only_regions_are_managed() -> None:
    a, b, lent, never = unit("a"), unit("b"), unit("lent"), unit("never")
    (held,) = lent.params
    structure, dropped = found(
        [a, b, lent, never], Forward().inside("half", None, a).reach(b).inside("other", None, held), regions_only=True
    )
    assert names(structure.units) == ["a", "other"]
    assert names(structure.order) == ["a"]
    assert [each.name for each in dropped] == ["b.weight", "never.weight"]


# --- views that are kept -----------------------------------------------------------------------------------------


def within(memory: torch.Tensor) -> Callable[[torch.Tensor], bool]:
    low = memory.data_ptr()
    return lambda tensor: low <= tensor.data_ptr() < low + memory.nbytes


@pytest.mark.parametrize("keep", [lambda view: view, lambda view: [view], lambda view: {"x": view}])
def test_a_module_that_keeps_a_view_is_refused_by_name(keep: Any) -> None:
    memory = torch.zeros(64)
    ring = within(memory)
    model = nn.Sequential(nn.Identity(), nn.Identity())
    model[1].kept = keep(torch.zeros(64)[3:9])
    refuse_kept_views(model, ring)
    model[1].kept = keep(memory[3:9])
    with pytest.raises(OffloadError, match=r"1\.kept") as caught:
        refuse_kept_views(model, ring)
    assert "exclude_patterns" in caught.value.remedy


def test_the_memory_before_and_behind_is_not_meant() -> None:
    memory = torch.zeros(64)
    middle = memory[16:32]
    ring = within(middle)
    model = nn.Identity()
    for allowed in (memory[:16], memory[32:], torch.zeros(0)):
        model.kept = allowed
        refuse_kept_views(model, ring)
    model.kept = memory[31:40]
    with pytest.raises(OffloadError):
        refuse_kept_views(model, ring)
