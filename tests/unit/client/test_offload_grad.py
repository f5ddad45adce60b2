"""Inference only: where no grad is wanted everything works, and where one is, the forward says so by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import ftd_client
from ftd_client.stream.units import OffloadError
from tests.streamed_blocks import Block, D, Stack

from .offloading import NAME, beside, offloaded, released, run, stack, to_inference, x

pytestmark = pytest.mark.usefixtures(released.__name__)
MODES = ["view", "getter", "torch_function"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("grad", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_without_grads_every_mode_of_torch_gives_the_same(grad: Any, mode: str) -> None:
    model = stack(count=2)
    resident = copy.deepcopy(model).requires_grad_(False)
    manager = offloaded(model, profile_mode=mode, transfer_mode="strategy")
    for _ in range(6):
        with grad():
            output = model(x())
            assert torch.equal(output, resident(x()))
            assert not output.requires_grad
    assert manager.phase == "inference"


def test_modes_may_change_from_forward_to_forward() -> None:
    model = stack()
    manager, resident = beside(model)
    for grad in (torch.inference_mode, torch.enable_grad, torch.no_grad, torch.inference_mode, torch.enable_grad):
        with grad():
            output = model(x())
        assert torch.equal(output, run(resident))
    ftd_client.release(NAME)
    # nothing that was made in inference mode is left in the model
    model(x().requires_grad_()).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    del manager


def test_a_model_offloaded_in_inference_mode_is_no_inference_tensor_afterwards() -> None:
    model = stack()
    with torch.inference_mode():
        manager = offloaded(model)
        for _ in range(5):
            model(x())
        manager.release()
    model(x()).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


class Listed(nn.Module):
    """Takes and gives lists of dictionaries."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = Inner()

    def forward(self, value: list[dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
        return self.linear(value)


class Inner(nn.Linear):
    def __init__(self) -> None:
        super().__init__(D, D)

    def forward(self, value: Any) -> Any:
        return [{"x": super().forward(value[0]["x"])}]


class Lists(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value = [{"x": x}]
        for layer in self.layers:
            value = layer(value)
        return self.head(value[0]["x"])


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("forwards", [0, 1, 2, 3, 5])
def test_an_input_that_requires_grad_is_refused_at_the_forward_in_every_phase(forwards: int, nested: bool) -> None:
    model = stack(*(Listed() for _ in range(4)), kind=Lists) if nested else stack()
    _, resident = beside(model)
    for _ in range(forwards):
        run(model)
    with pytest.raises(OffloadError, match=r"layers\.0\.\w+ is streamed, and its input requires grad") as caught:
        model(x().requires_grad_())
    assert "torch.no_grad()" in caught.value.remedy
    assert torch.equal(run(model), run(resident))


def test_an_input_that_requires_grad_is_no_matter_where_none_is_recorded() -> None:
    model = stack()
    manager, resident = beside(model)
    for _ in range(5):
        with torch.no_grad():
            assert torch.equal(model(x().requires_grad_()), resident(x()))
    assert manager.phase == "inference"


class Hidden:
    """Holds a tensor where nobody looks."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


@pytest.mark.parametrize(
    ("forwards", "seen"),
    [
        (0, r"layers\.0 is streamed, and its output requires grad(.|\n)*torch\.no_grad\(\)"),
        (2, r"layers\.0 is streamed, and its output requires grad(.|\n)*torch\.no_grad\(\)"),
        (5, "modified by an inplace operation"),
    ],
)
def test_a_grad_that_is_hidden_is_found_by_who_watches_or_refused_by_backward_and_never_wrong(
    forwards: int, seen: str
) -> None:
    class Opens(nn.Linear):
        def __init__(self) -> None:
            super().__init__(D, D)

        def forward(self, box: Hidden) -> Hidden:
            return Hidden(super().forward(box.value))

    class Boxes(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            box = Hidden(x)
            for layer in self.layers:
                box = layer(box)
            return self.head(box.value)

    model = stack(*(Opens() for _ in range(6)), kind=Boxes)
    _, resident = beside(model)
    for _ in range(forwards):
        run(model)
    wanted = x().requires_grad_()
    with pytest.raises((OffloadError, RuntimeError), match=seen):
        model(wanted).sum().backward()
    assert wanted.grad is None
    assert torch.equal(run(model), run(resident))


def test_grads_of_what_comes_after_the_model_are_right() -> None:
    model = stack()
    manager, resident = beside(model)
    head = nn.Linear(D, 2)
    for _ in range(5):
        head.zero_grad()
        head(model(x())).sum().backward()
        found = head.weight.grad
        head.zero_grad()
        head(resident(x()).detach()).sum().backward()
        assert found is not None and head.weight.grad is not None
        assert torch.equal(found, head.weight.grad)
    assert manager.phase == "inference"


def test_what_wanted_grads_wants_them_again_after_release() -> None:
    model = stack()
    model.layers[1].requires_grad_(False)
    wanted = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    manager = offloaded(model)
    to_inference(manager, model)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    manager.release()
    assert {name for name, parameter in model.named_parameters() if parameter.requires_grad} == wanted
    model(x()).sum().backward()


def test_a_weight_that_is_written_with_grads_enabled_is_found() -> None:
    class Scales(nn.Linear):
        write = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.write:
                with torch.no_grad():
                    self.weight.mul_(2)
            return super().forward(x)

    model = stack(Block(), Scales(D, D), Block(), Block())
    manager, _ = beside(model)
    to_inference(manager, model)
    Scales.write = True
    try:
        with pytest.raises(OffloadError, match=r"layers\.1\.weight was changed in place"):
            for _ in range(3):
                model(x())
    finally:
        Scales.write = False
