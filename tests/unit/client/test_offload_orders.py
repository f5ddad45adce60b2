"""Models that do not call their layers one after the other: right from the first forward, and fast once known."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import ftd_client
from tests.streamed_blocks import Block, D, Stack, blocks

from .offloading import NAME, beside, config, equal, offloaded, released, run, stack, to_inference, x

pytestmark = pytest.mark.usefixtures(released.__name__)


class Ordered(Stack):
    """Calls its layers in the order that it is given."""

    def forward(self, x: torch.Tensor, order: tuple[int, ...] = (0, 1, 2, 3)) -> torch.Tensor:
        for at in order:
            x = self.layers[at](x)
        return self.head(x)


ALL = (0, 1, 2, 3)
ORDERS = [
    [(0, 1, 2, 3), (3, 2, 1, 0)],
    [(0, 0, 1, 1, 2, 2, 3, 3)],
    [(0, 1, 2, 3, 0, 1, 2, 3), (1,), ()],
    [(0, 1), (0, 2), (0, 1), (0, 3), (0, 2)],
    [(3,), (0, 1, 2, 3), (2, 0), (1, 1, 1)],
]


@pytest.mark.parametrize(
    ("orders", "mode"),
    [*((orders, "view") for orders in ORDERS), *((ORDERS[-1], mode) for mode in ("getter", "torch_function"))],
    ids=str,
)
def test_any_path_is_right_in_every_phase(orders: list[tuple[int, ...]], mode: str) -> None:
    model = stack(kind=Ordered)
    manager, resident = beside(model, profile_mode=mode, transfer_mode="strategy", profiling_iters=3)
    for _ in range(6 // len(orders) + 1):
        for order in orders:
            assert equal(model, resident, x(), order), (manager.phase, order)
    assert manager.phase == "inference"


@pytest.mark.parametrize("learned", ORDERS, ids=str)
def test_a_path_that_nobody_has_seen_is_right(learned: list[tuple[int, ...]]) -> None:
    model = stack(kind=Ordered)
    manager, resident = beside(model)
    while manager.phase != "inference":
        for order in learned:
            run(model, x(), order)
    for order in (*[o for orders in ORDERS for o in orders], *learned):
        for _ in range(2):
            assert equal(model, resident, x(), order), order


def test_layers_are_planned_in_the_order_in_which_they_run() -> None:
    model = stack(kind=Ordered)
    manager = offloaded(model, discovery_iters=1)
    backwards = (3, 2, 1, 0)
    while manager.phase != "inference":
        run(model, x(), backwards)
    layers = list(dict.fromkeys(".".join(name.split(".")[:2]) for name in manager.offload_units()))
    assert layers == [f"layers.{at}" for at in backwards]


def test_a_layer_that_is_never_called_is_not_planned_until_it_is() -> None:
    model = stack(kind=Ordered)
    manager, resident = beside(model)
    while manager.phase != "inference":
        run(model, x(), (0, 1, 3))
    plan = manager.plan
    assert plan is not None
    assert not any(block.name.startswith("layers.2") for block in plan.blocks)
    assert equal(model, resident, x(), (0, 1, 2, 3))
    assert manager.plan is not plan
    assert manager.plan is not None
    names = [block.name for block in manager.plan.blocks]
    assert [name.split(".")[1] for name in names if name.startswith("layers") and name.endswith("up")] == list("0123")
    assert equal(model, resident, x(), (0, 1, 2, 3))


def test_a_layer_that_is_called_again_later_stays_where_memory_allows() -> None:
    model = stack(kind=Ordered)
    manager = offloaded(model)
    while manager.phase != "inference":
        run(model, x(), (0, 1, 2, 0, 3))
    assert {name.split(".")[1] for name in manager.resident_units()} == {"0"}
    assert {name.split(".")[1] for name in manager.offload_units()} == {"1", "2", "3"}


class Experts(nn.Module):
    """Runs two of its experts, which the input chooses."""

    def __init__(self, count: int = 6) -> None:
        super().__init__()
        self.experts = nn.ModuleList(blocks(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = [int(at) for at in x[0, :2].abs().mul(1000).long() % len(self.experts)]
        for at in chosen:
            x = x + self.experts[at](x)
        return x


def test_a_mixture_takes_experts_into_the_plan_as_they_come() -> None:
    model = stack(Experts(), Experts())
    manager, resident = beside(model, discovery_iters=1, profiling_iters=1)
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, D, generator=generator) for _ in range(60)]
    planned = []
    for each in inputs:
        assert equal(model, resident, each)
        assert manager.plan is not None
        planned.append(len(manager.plan.blocks))
    assert planned == sorted(planned), "what is known stays known"
    assert planned[-1] > planned[3]
    every = 2 * 6 * 3  # two layers of six experts of three units
    assert len(manager.offload_units()) + len(manager.resident_units()) == every
    assert planned[-1] == 1 + every, "all of them are in the plan at last"


@pytest.mark.parametrize("mode", ["view", "getter", "torch_function"])
def test_submodules_may_be_called_directly_between_forwards(mode: str) -> None:
    model = stack(kind=Ordered)
    manager, resident = beside(model, profile_mode=mode, transfer_mode="strategy")
    for round_ in range(6):
        for path in ("layers.2", "layers.0.up", "layers.3.norm", "head"):
            one, other = model.get_submodule(path), resident.get_submodule(path)
            assert torch.equal(run(one), run(other)), (round_, path)
        assert equal(model, resident)
    assert manager.phase == "inference"


def test_a_layer_that_runs_the_model_or_another_layer_is_right() -> None:
    class Calls(Block):
        """Holds its weights' results across a call of something else."""

        def __init__(self) -> None:
            super().__init__()
            self.__dict__["other"] = None

        def forward(self, x: torch.Tensor, calls: bool = False) -> torch.Tensor:
            weight = self.up.weight
            y = self.other(x) if calls else x
            return super().forward(y) + (y @ weight.t())[..., :D]

    model = stack(*(Calls() for _ in range(5)))
    resident = copy.deepcopy(model)
    offloaded(model)
    for both in (model, resident):
        for at, layer in enumerate(both.layers):
            layer.__dict__["other"] = both if at % 2 else both.layers[at - 1]
    try:
        for _ in range(5):
            for at in (3, 1, 4, 0, 2):
                with torch.no_grad():
                    assert torch.equal(model.layers[at](x(), True), resident.layers[at](x(), True)), at
            assert equal(model, resident)
    finally:
        for layer in (*model.layers, *resident.layers):
            layer.__dict__["other"] = None


def test_two_managers_at_once_do_not_meet() -> None:
    first, second = stack(count=3), stack(count=5)
    pairs = [(first, copy.deepcopy(first)), (second, copy.deepcopy(second))]
    ftd_client.offload(first, config(), NAME)
    ftd_client.offload(second, config(transfer_mode="raw_block_transfer"), "second")
    try:
        for _ in range(6):
            for model, resident in pairs:
                assert equal(model, resident)
        ftd_client.release(NAME)
        for model, resident in pairs:
            assert equal(model, resident)
    finally:
        ftd_client.release("second")


def test_one_model_inside_of_another_streams_beside_it() -> None:
    """The outer model is not managed where the inner one is."""
    inner, outer = stack(count=3), stack(count=3)
    resident_inner, resident_outer = copy.deepcopy(inner), copy.deepcopy(outer)
    ftd_client.offload(outer, config(), NAME)
    ftd_client.offload(inner, config(), "inner")
    try:
        for _ in range(6):
            with torch.no_grad():
                assert torch.equal(outer(inner(x())), resident_outer(resident_inner(x())))
    finally:
        ftd_client.release("inner")


def test_to_inference_leaves_the_plan_alone_where_nothing_is_new() -> None:
    model = stack(kind=Ordered)
    manager = offloaded(model)
    to_inference(manager, model)
    plan = manager.plan
    for order in (ALL, (0, 1, 2), (2, 1), ALL):
        run(model, x(), order)
        assert manager.plan is plan
