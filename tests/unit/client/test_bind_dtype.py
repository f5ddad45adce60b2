"""`dtype=`: what is cast, what never is, what it costs, and that nothing is cast unasked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ftd.errors import UsageError
from ftd_client.bind import Cast, bind

from .models import meta, net, problems_of, values
from .weights import DictWeights, bits

_TYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


class Mixed(nn.Module):
    """Linears in one type and a correction bias in another, as routers of mixture models have it."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(4, 4, bias=False)
        self.correction = nn.Parameter(torch.zeros(4))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return self.router(given).float() + self.correction


@pytest.mark.parametrize("built", [torch.float32, torch.bfloat16])
def test_each_tensor_keeps_its_type_of_the_checkpoint_whatever_the_model_was_built_in(built: torch.dtype) -> None:
    """MD-08: by default nothing is cast, and the forward runs."""
    tensors = {"router.weight": torch.randn(4, 4).bfloat16(), "correction": torch.randn(4) * 1e-6}
    model = meta(lambda: Mixed().to(built))
    report = bind(model, DictWeights(tensors))
    assert {name: bits(value) for name, value in values(model).items()} == {n: bits(t) for n, t in tensors.items()}
    assert report.cast == () and report.cast_bytes == 0
    changed = "router.weight" if built is torch.float32 else "correction"
    assert [change.name for change in report.dtype_changes] == [changed]
    given = torch.randn(2, 4).bfloat16()
    expected = (given @ tensors["router.weight"].t()).float() + tensors["correction"]
    assert torch.equal(model(given), expected)


@pytest.mark.parametrize("stored", _TYPES)
@pytest.mark.parametrize("wanted", _TYPES)
def test_what_is_cast_is_what_torch_casts_and_is_listed(stored: torch.dtype, wanted: torch.dtype) -> None:
    tensors = {name: value.to(stored) if value.is_floating_point() else value for name, value in values(net()).items()}
    weights = DictWeights(tensors)
    model = meta(net)
    report = bind(model, weights, dtype=wanted)
    for name, value in values(model).items():
        expected = tensors[name].to(wanted) if tensors[name].is_floating_point() else tensors[name]
        assert bits(value) == bits(expected)
        shares = value.data_ptr() == tensors[name].data_ptr()
        assert shares is (stored == wanted and name in dict(model.named_parameters()))
    floating = [name for name, value in tensors.items() if value.is_floating_point()]
    assert sorted(cast.name for cast in report.cast) == ([] if stored == wanted else sorted(floating))
    private = sum(parameter.nbytes for parameter in model.parameters())
    shown = sum(tensors[name].nbytes for name in report.bound)
    assert (report.bound_bytes, report.cast_bytes) == ((shown, 0) if stored == wanted else (0, private))
    if stored != wanted:
        cast = Cast("0.weight", stored, wanted, 12 * wanted.itemsize)
        assert cast in report.cast
        assert f"cast, {private} B of this process: 8 ({cast}" in str(report)


def test_what_is_quantised_integer_or_complex_is_never_cast() -> None:
    tensors = {
        "0": torch.arange(3, dtype=torch.int8), "1": torch.ones(3).to(torch.float8_e4m3fn),
        "2": torch.ones(3, dtype=torch.complex64), "3": torch.ones(3, dtype=torch.bool), "4": torch.ones(3),
    }  # fmt: skip
    model = meta(lambda: nn.ParameterList([nn.Parameter(torch.empty(3)) for _ in range(5)]))
    report = bind(model, DictWeights(tensors), dtype=torch.bfloat16)
    assert [parameter.dtype for parameter in model] == [
        torch.int8, torch.float8_e4m3fn, torch.complex64, torch.bool, torch.bfloat16
    ]  # fmt: skip
    assert [cast.name for cast in report.cast] == ["4"]
    assert all(model[i].data_ptr() == tensors[str(i)].data_ptr() for i in range(4))
    assert (report.bound_bytes, report.cast_bytes) == (3 + 3 + 24 + 3, 6)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.complex64, torch.bool, "bfloat16", 16])
def test_other_types_are_no_casts(dtype: Any) -> None:
    model = meta(net)
    with pytest.raises(UsageError, match="expected one of float16, bfloat16, float32, float64"):
        bind(model, DictWeights(values(net())), dtype=dtype)
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize(
    ("value", "stored", "wanted"),
    [
        (7e4, torch.float32, torch.float16), (7e4, torch.bfloat16, torch.float16), (1e39, torch.float64, torch.float32),
        (3.4e38, torch.float32, torch.bfloat16), (-7e4, torch.float32, torch.float16),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["parameter", "buffer"])
def test_a_cast_that_would_make_a_value_infinite_is_refused(
    value: float, stored: torch.dtype, wanted: torch.dtype, kind: str
) -> None:
    def build() -> nn.Module:
        model = nn.Module()
        if kind == "parameter":
            model.x = nn.Parameter(torch.empty(3))
        else:
            model.register_buffer("x", torch.empty(3))
        return model

    weights = DictWeights({"x": torch.tensor([1.0, value, torch.inf], dtype=stored)})
    (line,) = problems_of(meta(build), weights, dtype=wanted)
    assert line.startswith(f"x: values beyond {str(wanted).removeprefix('torch.')} found")
    fits = DictWeights({"x": torch.tensor([1.0, torch.nan, torch.inf], dtype=stored)})
    model = meta(build)
    bind(model, fits, dtype=wanted)
    assert bits(model.x) == bits(fits.tensors["x"].to(wanted))


def test_parameters_that_show_the_same_bytes_are_cast_once() -> None:
    stored = torch.randn(4)
    model = meta(lambda: nn.ParameterList([nn.Parameter(torch.empty(4)) for _ in range(2)]))
    report = bind(model, DictWeights({"0": stored, "1": stored}), dtype=torch.float16)
    assert model[0] is not model[1]
    assert model[0].data_ptr() == model[1].data_ptr()
    assert report.shared == (("0", "1"),)
    assert report.cast_bytes == 8
    assert [cast.name for cast in report.cast] == ["0", "1"]


def test_empty_tensors_are_cast_apart() -> None:
    model = meta(lambda: nn.ParameterList([nn.Parameter(torch.empty(0)), nn.Parameter(torch.empty(2, 0))]))
    bind(model, DictWeights({"0": torch.empty(0), "1": torch.empty(2, 0)}), dtype=torch.float16)
    assert [(p.dtype, tuple(p.shape)) for p in model] == [(torch.float16, (0,)), (torch.float16, (2, 0))]


def test_cast_buffers_are_private_even_where_parameters_have_their_bytes() -> None:
    def build() -> nn.Module:
        model = nn.Module()
        model.p = nn.Parameter(torch.empty(2))
        model.register_buffer("b", torch.empty(2))
        model.register_buffer("c", torch.empty(2))
        return model

    stored = torch.ones(2)
    model = meta(build)
    bind(model, DictWeights({"p": stored, "b": stored, "c": stored}), dtype=torch.bfloat16)
    model.b.fill_(5)
    assert model.p.tolist() == model.c.tolist() == [1.0, 1.0]


def test_non_persistent_buffers_keep_their_type() -> None:
    """A rotary table in bfloat16 would give other positions."""
    model = meta(lambda: nn.Linear(2, 2, bias=False))
    table = torch.arange(4.0)
    model.register_buffer("table", table, persistent=False)
    bind(model, DictWeights({"weight": torch.ones(2, 2)}), dtype=torch.bfloat16)
    assert model.table is table
