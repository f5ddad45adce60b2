"""Non-persistent buffers on meta: recomputed with a proof, or refused by name (MD-01)."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy
import pytest
import torch
from torch import nn

from ftd.errors import BindError
from ftd_client.bind import bind
from ftd_client.buffers import recompute
from ftd_client.walk import walk

from .weights import DictWeights, bits


class Table(nn.Module):
    """A table of values in every kind of type, written in place by its own init."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(2))
        self.register_buffer("freq", torch.empty(4), persistent=False)
        self.register_buffer("brief", torch.empty(2, 2, dtype=torch.bfloat16), persistent=False)
        self.register_buffer("ids", torch.empty(1, 3, dtype=torch.int64), persistent=False)
        self.register_buffer("mask", torch.empty(3, dtype=torch.bool), persistent=False)
        self.register_buffer("cis", torch.empty(2, dtype=torch.complex64), persistent=False)
        self.register_buffer("none", torch.empty(0, 3), persistent=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.scale.fill_(1.0)
        self.freq.copy_(1.0 / 10000 ** (torch.arange(4) / 4))
        self.freq[3] = torch.nan
        self.brief.fill_(-0.0)
        self.ids.copy_(torch.arange(3))
        self.mask.copy_(torch.tensor([True, False, True]))
        self.cis.copy_(torch.polar(torch.ones(2), torch.arange(2.0)))


def _meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


def _values(model: nn.Module) -> dict[str, torch.Tensor]:
    result = recompute(model, walk(model).transient)
    assert result.refused == {}
    return {group.name: tensor for group, tensor in result.values.items()}


def _reasons(model: nn.Module) -> dict[str, str]:
    result = recompute(model, walk(model).transient)
    assert result.values == {}
    return {group.name: reason for group, reason in result.refused.items()}


def test_an_init_that_writes_every_byte_is_believed() -> None:
    model = _meta(Table)
    reference = Table()
    values = _values(model)
    assert {name: bits(tensor) for name, tensor in values.items()} == {
        name: bits(tensor) for name, tensor in reference.named_buffers()
    }
    assert all(buffer.is_meta for buffer in model.buffers())


def test_bind_puts_the_values_in_place() -> None:
    model = nn.Sequential(_meta(Table), nn.Identity())
    report = bind(model, DictWeights({"0.scale": torch.full((2,), 7.0)}))
    assert report.recomputed == ("0.freq", "0.brief", "0.ids", "0.mask", "0.cis", "0.none")
    assert bits(model[0].freq) == bits(Table().freq)
    # the init wrote 1.0 into the parameter as well, while that was on meta
    assert model[0].scale.tolist() == [7.0, 7.0]
    assert list(model.state_dict()) == ["0.scale"]


class Base(nn.Module):
    """A module with one buffer, whose constructor computes it; subclasses say what their init does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(4.0), persistent=False)


class NoInit(Base):
    pass


class Partly(Base):
    def reset_parameters(self) -> None:
        self.table[1:].copy_(torch.arange(1.0, 4.0))


class Ignoring(Base):
    def reset_parameters(self) -> None:
        self.unrelated = 1


class Scaling(Base):
    def reset_parameters(self) -> None:
        self.table.mul_(2)


class Clamping(Base):
    def reset_parameters(self) -> None:
        self.table.clamp_(0, 1)


class Inverting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(4, dtype=torch.bool), persistent=False)

    def reset_parameters(self) -> None:
        self.table.logical_not_()


class Random(Base):
    def reset_parameters(self) -> None:
        self.table.normal_()


class PythonRandom(Base):
    def reset_parameters(self) -> None:
        self.table.fill_(random.random())


class NumpyRandom(Base):
    def reset_parameters(self) -> None:
        self.table.copy_(torch.from_numpy(numpy.random.rand(4)))


class Dropping(Base):
    def reset_buffers(self) -> None:
        self.table = None


class Reshaping(Base):
    def reset_buffers(self) -> None:
        self.table = torch.arange(5.0)


class Retyping(Base):
    def reset_buffers(self) -> None:
        self.table = torch.arange(4)


class Metaphysical(Base):
    def reset_buffers(self) -> None:
        self.table = torch.arange(4.0, device="meta")


class Raising(Base):
    def reset_parameters(self) -> None:
        raise OSError("no file")


class FromWeights(Base):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4))

    def reset_parameters(self) -> None:
        self.table.copy_(self.weight * 2)


_UNPROVEN = "leaves it unwritten, partly written or random"


@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (NoInit, "NoInit has no reset_parameters or reset_buffers, and nothing around it an _init_weights"),
        (Partly, f"Partly.reset_parameters {_UNPROVEN}"),
        (Ignoring, f"Ignoring.reset_parameters {_UNPROVEN}"),
        (Scaling, f"Scaling.reset_parameters {_UNPROVEN}"),
        (Clamping, f"Clamping.reset_parameters {_UNPROVEN}"),
        (Inverting, f"Inverting.reset_parameters {_UNPROVEN}"),
        (Random, f"Random.reset_parameters {_UNPROVEN}"),
        (PythonRandom, f"PythonRandom.reset_parameters {_UNPROVEN}"),
        (NumpyRandom, f"NumpyRandom.reset_parameters {_UNPROVEN}"),
        (Dropping, f"Dropping.reset_buffers {_UNPROVEN}"),
        (Reshaping, f"Reshaping.reset_buffers {_UNPROVEN}"),
        (Retyping, f"Retyping.reset_buffers {_UNPROVEN}"),
        (Metaphysical, f"Metaphysical.reset_buffers {_UNPROVEN}"),
        (Raising, "Raising.reset_parameters raised OSError: no file"),
        (FromWeights, "FromWeights.reset_parameters raised"),
    ],
)
def test_what_is_not_proven_is_refused_and_the_model_left_as_it_was(cls: type[nn.Module], reason: str) -> None:
    model = nn.Sequential(_meta(cls))
    before = {key: value for key, value in model[0].__dict__.items() if not key.startswith("_")}
    table = model[0].table
    reasons = _reasons(model)
    assert list(reasons) == ["0.table"]
    assert reasons["0.table"].startswith(reason)
    assert model[0].table is table
    assert {key: value for key, value in model[0].__dict__.items() if not key.startswith("_")} == before
    weights = DictWeights({"0.weight": torch.ones(4)} if cls is FromWeights else {})
    with pytest.raises(BindError, match="meta_parameters") as caught:
        bind(model, weights)
    (line,) = caught.value.problems
    assert line.startswith(f"0.table: a non-persistent buffer on meta, which nothing recomputes: {reason}")


class Assigning(Base):
    def reset_parameters(self) -> None:
        self.table = torch.arange(4.0)


class Registering(Base):
    def reset_parameters(self) -> None:
        self.register_buffer("table", torch.arange(8.0)[::2] / 2, persistent=False)
        self.register_buffer("another", torch.ones(1), persistent=False)


class Buffering(Base):
    def reset_parameters(self) -> None:
        self.table = nn.Buffer(torch.arange(4.0), persistent=True)


@pytest.mark.parametrize("cls", [Assigning, Registering, Buffering])
def test_an_init_may_replace_the_buffer(cls: type[Base]) -> None:
    model = _meta(cls)
    table = model.table
    values = _values(model)
    assert values["table"].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert values["table"].is_contiguous()
    assert list(model._buffers) == ["table"]
    assert model._non_persistent_buffers_set == {"table"}
    assert model.table is table
    assert model.state_dict() == {}


def test_a_value_of_any_strides_is_compared_and_taken() -> None:
    class Transposing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.arange(6.0).view(2, 3).t(), persistent=False)

        def reset_parameters(self) -> None:
            self.table = torch.arange(6.0).view(2, 3).t()

    value = _values(_meta(Transposing))["table"]
    assert value.is_contiguous()
    assert bits(value) == bits(Transposing().table)


def test_a_value_of_the_models_own_cache_is_copied() -> None:
    cache = torch.arange(4.0)

    class Caching(Base):
        def reset_parameters(self) -> None:
            self.table = cache

    assert _values(_meta(Caching))["table"].data_ptr() != cache.data_ptr()


class Filling(Base):
    """Writes everything that it owns, real or not."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.register_buffer("real", torch.zeros(2), persistent=False)

    def reset_parameters(self) -> None:
        self.weight.fill_(5.0)
        self.real.fill_(5.0)
        self.table.fill_(5.0)


def test_real_buffers_beside_it_are_not_written() -> None:
    model = _meta(Filling)
    model.real = torch.zeros(2)
    bind(model, DictWeights({"weight": torch.ones(2)}))
    assert model.real.tolist() == [0.0, 0.0]
    assert model.table.tolist() == [5.0] * 4
    assert model.weight.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("where", ["own", "below"])
def test_an_init_that_could_overwrite_real_parameters_does_not_run(where: str) -> None:
    model = _meta(Filling)
    real = nn.Parameter(torch.zeros(2))
    if where == "own":
        model.weight = real
    else:
        model.child = nn.ParameterList([real])
    groups = [group for group in walk(model).transient if group.name == "table"]
    result = recompute(model, groups)
    assert result.refused == {groups[0]: "Filling holds real parameters, which its init could overwrite"}
    assert real.tolist() == [0.0, 0.0]


def test_a_tied_buffer_is_one_again_and_two_values_for_it_are_refused() -> None:
    class Other(Base):
        def reset_parameters(self) -> None:
            self.table.fill_(1.0)

    for second, expected in ((Assigning, None), (Other, "the modules that share it compute different values")):
        model = nn.ModuleList([_meta(Assigning), _meta(second), _meta(NoInit)])
        model[1].table = model[0].table
        model[2].table = model[0].table
        if expected:
            assert _reasons(model) == {"0.table": expected}
        else:
            bind(model, DictWeights({}))
            assert model[0].table is model[1].table is model[2].table
            assert model[0].table.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_random_generators_are_left_where_they_were() -> None:
    torch.manual_seed(3)
    random.seed(3)
    numpy.random.seed(3)
    expected = (torch.rand(1).item(), random.random(), numpy.random.rand())
    torch.manual_seed(3)
    random.seed(3)
    numpy.random.seed(3)
    for cls in (Random, PythonRandom, NumpyRandom, Raising):
        recompute(model := _meta(cls), walk(model).transient)
    assert (torch.rand(1).item(), random.random(), numpy.random.rand()) == expected


def test_the_cpu_is_where_values_are_computed_whatever_the_default_device() -> None:
    model = _meta(Assigning)
    with torch.device("meta"), torch.inference_mode():
        values = recompute(model, walk(model).transient).values
    (value,) = values.values()
    assert value.device.type == "cpu"
    value.add_(1)  # which a tensor made in inference mode would refuse


def test_a_subclass_in_a_buffers_place_is_refused() -> None:
    class Wrapped(torch.Tensor):
        pass

    model = _meta(Assigning)
    model._buffers["table"] = model.table.as_subclass(Wrapped)
    assert "Wrapped found, plain Tensor expected" in _reasons(model)["table"]
