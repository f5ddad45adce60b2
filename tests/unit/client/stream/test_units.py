"""Units: what streams together, what stays and why, and what is refused by name."""

from __future__ import annotations

import warnings
from fnmatch import fnmatchcase

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ftd_client.stream.units import OffloadError, Unit, is_dense, make_units
from ftd_client.walk import Group, walk
from tests.streamed_models import CASES, made

D = 8


class Bare(nn.Module):
    """Parameters of its own beside modules that have some."""

    def __init__(self, rows: int = 1) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.zeros(rows, 1024))
        self.inner = nn.Linear(D, D)
        self.more = nn.ModuleList([nn.Linear(D, D)])


def units_of(model: nn.Module, pattern: str = "*", *, ties: bool = False) -> tuple[list[Unit], list[Group]]:
    """Units of the parameters that match, their layer being the first two segments of the name."""
    parts = walk(model)
    managed = {
        name: ".".join(name.split(".")[:2])
        for group in parts.parameters
        for name in group.names
        if fnmatchcase(name, pattern)
    }
    return make_units(model, parts, managed, ties=ties)


def shown(units: list[Unit]) -> dict[str, list[str]]:
    return {unit.name: [param.name for param in unit.params] for unit in units}


def test_a_leaf_is_a_unit() -> None:
    model = nn.ModuleList([nn.Linear(D, D), nn.Sequential(nn.LayerNorm(D), nn.Linear(D, D, bias=False))])
    units, rest = units_of(model)
    assert shown(units) == {
        "0": ["0.weight", "0.bias"],
        "1.0": ["1.0.weight", "1.0.bias"],
        "1.1": ["1.1.weight"],
    }
    assert [unit.scope for unit in units] == [model[0], model[1][0], model[1][1]]
    assert [unit.nbytes for unit in units] == [4 * (D * D + D), 8 * D, 4 * D * D]
    assert not any(unit.resident for unit in units)
    assert rest == []


def test_small_parameters_beside_modules_stay_and_large_ones_make_one_unit_of_all() -> None:
    units, _ = units_of(Bare())
    assert set(shown(units)) == {"own", "inner", "more.0"}
    (own,) = [unit for unit in units if unit.name == "own"]
    assert "Bare reads it" in own.resident and own.scope is None
    model = nn.ModuleList([Bare(65)])
    units, _ = units_of(model)
    (whole,) = units
    assert (whole.name, whole.scope, len(whole.params)) == ("0", model[0], 5)
    assert not whole.resident


def test_torch_modules_that_read_their_childrens_weights_take_them_along() -> None:
    model = nn.ModuleList([nn.MultiheadAttention(D, 2), nn.TransformerEncoderLayer(D, 2, D)])
    units, _ = units_of(model)
    assert [(unit.name, len(unit.params)) for unit in units] == [("0", 4), ("1", 12)]
    containers = nn.ModuleList([nn.Sequential(nn.Linear(D, D), nn.Linear(D, D))])
    assert len(units_of(containers)[0]) == 2


def test_parameters_of_one_module_in_several_layers_are_told_by_the_first() -> None:
    model = nn.ModuleList([nn.ModuleList([nn.Linear(D, D), nn.Linear(D, D)]), nn.Linear(D, D)])
    units, _ = units_of(model)
    assert list(dict.fromkeys(unit.layer for unit in units)) == ["0.0", "0.1", "1.weight"]


def test_what_is_not_managed_is_the_rest() -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(D, D)]), "head": nn.Linear(D, 2)})
    units, rest = units_of(model, "layers.*")
    assert shown(units) == {"layers.0": ["layers.0.weight", "layers.0.bias"]}
    assert [group.name for group in rest] == ["head.weight", "head.bias"]
    assert units_of(model, "layers.0.bias")[1][0].name == "layers.0.weight"


def test_what_has_no_bytes_or_repeats_them_is_not_streamed() -> None:
    model = nn.ModuleList([nn.Linear(D, D)])
    model[0].nothing = nn.Parameter(torch.empty(0, D))
    model[0].expanded = nn.Parameter(torch.randn(1).expand(D))
    units, rest = units_of(model)
    assert shown(units) == {"0": ["0.weight", "0.bias"]}
    assert {group.name for group in rest} == {"0.nothing", "0.expanded"}


def test_a_tie_within_a_layer_stays_with_the_reason() -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.Sequential(nn.Linear(D, D), nn.Linear(D, D))])})
    model["layers"][0][1].weight = model["layers"][0][0].weight
    units, _ = units_of(model)
    (tied,) = [unit for unit in units if unit.resident]
    assert tied.resident == "tied: one tensor in several modules"
    assert [param.name for param in tied.params] == ["layers.0.0.weight"]


def test_a_tie_across_layers_is_refused_by_name_or_stays() -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(D, D), nn.Linear(D, D)])})
    model["layers"][1].weight = model["layers"][0].weight
    with pytest.raises(OffloadError, match=r"layers\.0\.weight.* in layers\.0 and layers\.1") as caught:
        units_of(model)
    assert "transfer_mode='strategy'" in caught.value.remedy
    units, _ = units_of(model, ties=True)
    assert [unit.name for unit in units if unit.resident] == ["layers.0.weight"]


def test_a_tie_with_what_is_not_managed_is_not_managed() -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(D, D)]), "head": nn.Linear(D, D)})
    model["head"].weight = model["layers"][0].weight
    units, rest = units_of(model, "layers.*")
    assert shown(units) == {"layers.0": ["layers.0.bias"]}
    assert "layers.0.weight" in [group.name for group in rest]


class Sub(nn.Parameter):
    pass


def test_more_than_a_plain_parameter_is_refused_and_every_one_is_named() -> None:
    model = nn.ModuleList([nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)])
    for i in (0, 2):
        model[i].weight = Sub(torch.zeros(D, D))
    with pytest.raises(OffloadError) as caught:
        units_of(model)
    text = str(caught.value)
    assert "2 parameters" in text and "0.weight" in text and "2.weight" in text and "Sub found" in text
    assert "1.weight" not in text
    assert "before it is quantised" in caught.value.remedy
    units_of(model, "1.*")


@pytest.mark.parametrize("box", [lambda p: [p], lambda p: (p,), lambda p: {"p": p}])
def test_a_parameter_that_also_lies_in_a_container_of_python_is_refused(box: object) -> None:
    model = nn.ModuleList([nn.Linear(D, D)])
    model[0].kept = box(model[0].weight)  # type: ignore[operator]
    with pytest.raises(OffloadError, match=r"0\.kept"):
        units_of(model)


def test_a_second_name_of_a_parameter_keeps_it_where_it_is() -> None:
    model = nn.ModuleList([nn.Linear(D, D), nn.Linear(D, D)])
    model[0].__dict__["kept"] = model[0].weight
    units, _ = units_of(model)
    (stuck,) = [unit for unit in units if unit.resident]
    assert [param.name for param in stuck.params] == ["0.weight"]
    assert "'kept'" in stuck.resident


def test_a_module_with_books_of_its_own_keeps_its_parameters() -> None:
    class Books(nn.Linear):
        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, value)

    units, _ = units_of(nn.ModuleList([Books(D, D), nn.Linear(D, D)]))
    assert {unit.name: "Books" in unit.resident for unit in units} == {"0.weight": True, "0.bias": True, "1": False}


def test_scripted_modules_stay() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch is about to let go of TorchScript
        scripted = torch.jit.trace(nn.Linear(D, D), torch.zeros(1, D))
    units, _ = units_of(nn.ModuleList([scripted]))
    assert [param.name for unit in units if unit.resident for param in unit.params] == ["0.weight", "0.bias"]


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("unet", "t5", "mixtral", "llama")])
def test_every_parameter_of_every_model_is_in_one_place(name: str) -> None:
    case = made(name)
    units, rest = units_of(case.model, ties=True)
    found = [param.name for unit in units for param in unit.params] + [group.name for group in rest]
    assert sorted(found) == sorted(group.name for group in walk(case.model).parameters)
    names = [unit.name for unit in units]
    assert len(set(names)) == len(names)
    assert all(unit.scope is not None for unit in units if not unit.resident)


@given(st.permutations(range(4)), st.lists(st.integers(0, 4), min_size=4, max_size=4), st.booleans())
def test_dense_is_one_run_of_memory_in_any_order_of_dimensions(order: list[int], sizes: list[int], holes: bool) -> None:
    base = torch.empty(sizes).permute(*order)
    assert is_dense(base) or base.numel() == 0
    if holes and base.numel() > 1:
        wide = torch.empty([*sizes, 2]).permute(*order, 4)[..., 0]
        assert not is_dense(wide)


def test_dense_is_neither_repeated_nor_sliced() -> None:
    assert is_dense(torch.tensor(1.0))
    assert is_dense(torch.empty(3).as_strided((3, 1), (1, 7)))
    assert not is_dense(torch.empty(1).expand(3))
    assert not is_dense(torch.empty(6)[::2])
    assert not is_dense(torch.empty(3, 4)[:, :2])
    assert is_dense(torch.empty(3, 4)[:2])
