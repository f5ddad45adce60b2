"""Models built under `meta_parameters`."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from torch import nn

from ftd_client.meta import meta_parameters
from ftd_client.walk import walk

from .weights import bits


def test_parameters_go_to_meta_and_buffers_stay_real() -> None:
    with meta_parameters():
        model = nn.Sequential(nn.Linear(3, 4, dtype=torch.float16), nn.BatchNorm1d(4))
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model[0].weight.dtype == torch.float16
    assert model[0].weight.shape == (4, 3)
    assert bits(model[1].running_var) == bits(torch.ones(4))


def test_what_a_parameter_is_survives() -> None:
    parameter = nn.Parameter(torch.zeros(2, dtype=torch.int8), requires_grad=False)
    parameter.group = "experts"
    with meta_parameters():
        model = nn.ParameterList([parameter])
    assert type(model[0]) is nn.Parameter
    assert (model[0].dtype, model[0].requires_grad, model[0].group) == (torch.int8, False, "experts")


@pytest.mark.parametrize("how", ["after", "before"])
def test_ties_keep_identity(how: str) -> None:
    """MD-04: whether tied between registered modules, or by one real Parameter that is registered twice."""
    with meta_parameters():
        one, other = nn.Linear(3, 3), nn.Linear(3, 3)
        if how == "after":
            other.weight = one.weight
        else:
            shared = nn.Parameter(torch.ones(3, 3))
            one.weight = shared
            other.weight = shared
    assert one.weight is other.weight
    assert one.weight.is_meta
    assert one.bias is not other.bias


def test_the_memory_of_a_parameter_goes_when_it_is_registered() -> None:
    with meta_parameters():
        model = nn.Module()
        real = nn.Parameter(torch.ones(4))
        alive = weakref.ref(real)
        model.w = real
        del real
        gc.collect()
        assert alive() is None
        # a new Parameter at the freed one's address is another Parameter
        model.others = nn.ParameterList(nn.Parameter(torch.ones(4)) for _ in range(50))
    assert len(walk(model).parameters) == 51


def test_subclasses_and_lazy_parameters_stay_as_they_are() -> None:
    with meta_parameters():
        lazy = nn.LazyLinear(3)
    assert type(lazy.weight) is nn.UninitializedParameter


def test_nested_use_and_the_end_of_it() -> None:
    with meta_parameters():
        with meta_parameters():
            inner = nn.Linear(2, 2)
        outer = nn.Linear(2, 2)
    after = nn.Linear(2, 2)
    assert (inner.weight.is_meta, outer.weight.is_meta, after.weight.is_meta) == (True, True, False)


def test_an_exception_inside_undoes_it() -> None:
    with pytest.raises(ZeroDivisionError), meta_parameters():
        _ = 1 / 0
    assert not nn.Linear(2, 2).weight.is_meta


def test_other_threads_are_unaffected() -> None:
    built: list[nn.Module] = []
    with meta_parameters():
        thread = threading.Thread(target=lambda: built.append(nn.Linear(2, 2)))
        thread.start()
        thread.join()
        here = nn.Linear(2, 2)
    assert here.weight.is_meta
    assert not built[0].weight.is_meta


def test_recurrent_modules_see_the_parameters_that_they_hold() -> None:
    with meta_parameters():
        model = nn.LSTM(2, 3)
    named = [getattr(model, name) for name in model._flat_weights_names]
    assert [id(weight) for weight in model._flat_weights] == [id(weight) for weight in named]
