"""Plans that can't be put to work, for want of memory most of all: a plan goes on, and every forward is right."""

from __future__ import annotations

import copy
import weakref
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ftd_client
from ftd_client.phase import replanning
from ftd_client.strategy import EvenSpread, Plan, Problem, assemble, workloads
from ftd_client.stream import installed, residents
from ftd_client.stream.loader import Loader
from ftd_client.stream.memory import Memory
from ftd_client.stream.rest import Rest
from ftd_client.stream.units import OffloadError
from tests.streamed_blocks import D, Stack, blocks

from .offloading import NAME, beside, equal, offloaded, released, run, stack, to_inference

pytestmark = pytest.mark.usefixtures(released.__name__)
INSTEAD = "a plan could not be put to work"


class Short:
    """Device memory that is not to be had, for so many plans from now on.

    Attributes:
        error: raised then.
        refused: how often it was.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.plans = self.refused = 0
        self.error: type[BaseException] = torch.OutOfMemoryError
        for module in (installed, residents):
            monkeypatch.setattr(module, "Memory", self._make)

    def _make(self, nbytes: int, device: torch.device) -> Memory:
        if nbytes and self.plans:
            self.plans -= 1
            self.refused += 1
            raise self.error(f"{nbytes} bytes")
        return Memory(nbytes, device)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Short:
    return Short(monkeypatch)


class Backwards(Stack):
    """Reaches its layers in another order than they are registered in; the first one on demand."""

    all = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in list(self.layers)[::-1][: None if self.all else -1]:
            x = layer(x)
        return self.head(x)


class ReadsAnothers(nn.Module):
    """Its linear's weights are read outside of that one's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.linear.weight, self.linear.bias)


def told(caplog: pytest.LogCaptureFixture) -> int:
    return sum(INSTEAD in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize(("forwards", "mode"), [(0, "view"), (2, "view"), (3, "view"), (2, "getter"), (3, "getter")])
def test_the_plan_before_goes_on_where_the_next_one_cannot_be_put_to_work(
    forwards: int, mode: str, short: Short, caplog: pytest.LogCaptureFixture
) -> None:
    fields = {"profile_mode": mode, "transfer_mode": "strategy"}
    manager, resident = beside(model := stack(kind=Backwards), **fields)
    phases = ["discovery", "profiling", "profiling", "inference", "inference", "inference"]
    for number in range(6):
        assert manager.phase == phases[number]
        before = manager.plan
        if number == forwards:
            model.all = resident.all = True  # reaches what is in no plan, in inference
            short.plans = 1
        assert equal(model, resident)
        assert manager.plan is not None and before is not None
        if number == forwards:
            assert short.refused == 1 and told(caplog) == 1
            assert manager.plan == before
        usage = manager.get_gpu_memory_usage()
        assert usage.total_bytes == manager.plan.gpu_bytes + usage.unmapped_tensors_bytes
    manager.release()
    assert equal(model, resident)


def test_discovery_finds_another_order_and_loads_nothing() -> None:
    """As long as nothing is measured, what is resident is as good as what another choice would have there."""
    model = stack(kind=Backwards, count=12)
    model.all = True
    resident, limit = copy.deepcopy(model), sum(p.nbytes for p in model.parameters()) * 2 // 3
    manager = offloaded(model, load_strategy=None, max_gpu_mem_fraction=limit / psutil.virtual_memory().total)
    plan, units = manager.plan, set(manager.resident_units())
    assert equal(model, resident)
    assert manager.phase == "profiling" and manager.plan != plan
    assert units and manager.offload_units() and set(manager.resident_units()) == units


def test_what_discovery_makes_other_blocks_of_streams_on_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that read their linears' weights are blocks in place of those that streamed."""
    layers: list[nn.Module] = [ReadsAnothers() if i in (2, 6) else block for i, block in enumerate(blocks(12))]
    model = stack(*layers, kind=Backwards)
    model.all = True
    resident, limit = copy.deepcopy(model), sum(p.nbytes for p in model.parameters()) * 2 // 3
    manager = offloaded(model, load_strategy=None, max_gpu_mem_fraction=limit / psutil.virtual_memory().total)
    assert {"layers.2.linear", "layers.6.linear"} <= set(manager.offload_units())
    loaded: list[object] = []
    fill = Loader.fill

    def counted(loader: Loader, arenas: Any) -> Any:
        loaded.append(arenas)
        return fill(loader, arenas)

    monkeypatch.setattr(Loader, "fill", counted)
    assert equal(model, resident)
    assert manager.phase == "profiling" and not loaded
    assert {"layers.2", "layers.6"} <= set(manager.offload_units())


def test_what_a_plan_could_not_take_in_is_not_tried_with_every_forward(short: Short) -> None:
    manager, resident = beside(model := stack(kind=Backwards))
    to_inference(manager, model)
    model.all = resident.all = True
    short.plans = 1
    before = manager.plan
    for _ in range(3):
        assert equal(model, resident)
    assert short.refused == 1 and manager.plan == before
    manager.set_config(manager._config.model_copy(update={"num_blocks": 3}))  # type: ignore[union-attr]
    for _ in range(2):
        assert equal(model, resident)
    assert manager.plan != before


class Reads(nn.Module):
    """Computes with the weight of a module that it does not call, which discovery finds."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(D, D)
        self.outer = nn.Linear(D, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(x) @ self.inner.weight


class Roomy:
    """Everything streams, through more memory than it needs where that is to be had."""

    def plan(self, problem: Problem) -> Plan:
        work = workloads(problem)[0]
        floor = work.ring_floor(work.streamable)
        wide = assemble(work, work.streamable, 4 * floor, "roomy")
        fits = problem.budget_bytes is None or wide.gpu_bytes <= problem.budget_bytes
        return wide if fits else assemble(work, work.streamable, floor, "roomy")


def test_a_smaller_plan_is_put_to_work_where_the_one_before_was_of_other_units(
    short: Short, caplog: pytest.LogCaptureFixture
) -> None:
    model = stack(*(Reads() for _ in range(12)))
    manager, resident = beside(model, load_strategy=Roomy(), num_blocks=8, max_gpu_mem_fraction=0.5)
    short.plans = 1
    assert equal(model, resident)
    assert short.refused == 1 and told(caplog) == 1
    smallest = manager.plan
    assert smallest is not None and "layers.0.inner.weight" in manager.resident_units()
    for _ in range(4):
        assert equal(model, resident)
    assert manager.phase == "inference"
    assert manager.plan is not None and manager.plan.ring_bytes > smallest.ring_bytes


class ByHand(nn.Module):
    """The first layers are in regions, the others aren't."""

    def __init__(self, inside: int = 2, outside: int = 1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(blocks(inside + outside))
        self.inside = inside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            with ftd_client.offload_block(f"r{i}", NAME) if i < self.inside else nullcontext():
                x = layer(x)
        return x


@pytest.mark.parametrize("where", ["the plan", "what is not managed"])
def test_what_discovery_drops_is_where_it_belongs_whatever_failed(
    where: str, short: Short, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    manager, resident = beside(model := ByHand(), include_patterns=[])
    if where == "the plan":
        short.plans = 1
    else:
        take = Rest.take

        def fails(*args: Any) -> None:
            monkeypatch.setattr(Rest, "take", take)
            raise torch.OutOfMemoryError

        monkeypatch.setattr(Rest, "take", fails)
    for _ in range(5):
        assert equal(model, resident)
    assert told(caplog) == 1 and manager.phase == "inference"
    manager.release()
    assert equal(model, resident)


def test_what_discovery_drops_takes_no_more_memory_than_either_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: weakref.WeakSet[Memory] = weakref.WeakSet()
    found: list[int] = []
    take = Rest.take

    def memory(nbytes: int, device: torch.device) -> Memory:
        alive.add(made := Memory(nbytes, device))
        return made

    def takes(rest: Rest, *groups: Any) -> None:
        take(rest, *groups)
        found.append(rest.nbytes + sum(memory.nbytes for memory in alive))

    for module in (installed, residents):
        monkeypatch.setattr(module, "Memory", memory)
    monkeypatch.setattr(residents, "ARENA_BYTES", 4096)
    monkeypatch.setattr(Rest, "take", takes)
    model = ByHand(6, 6)
    share = sum(p.nbytes for p in model.parameters()) * 7 // 10
    monkeypatch.setattr(replanning, "budget_bytes", lambda *_, others, **__: share - others)
    manager, resident = beside(model, include_patterns=[], load_strategy=EvenSpread())
    found.clear()
    before = manager.get_gpu_memory_usage().total_bytes
    assert manager.resident_units()
    assert equal(model, resident)
    (most,) = found
    assert most <= max(before, manager.get_gpu_memory_usage().total_bytes)


def test_without_any_plan_everything_is_loaded_on_demand(short: Short) -> None:
    manager, resident = beside(model := stack())
    rest_bytes = manager.get_gpu_memory_usage().unmapped_tensors_bytes
    run(model)
    short.plans = 10
    run(model)
    with pytest.raises(torch.OutOfMemoryError):
        run(model)
    usage = manager.get_gpu_memory_usage()
    assert (usage.blocks_bytes, usage.unmapped_tensors_bytes, usage.total_bytes) == (0, rest_bytes, rest_bytes)
    assert equal(model, resident)
    manager.release()
    assert equal(model, resident)


def test_an_interrupt_goes_on_to_whom_it_is_for_and_a_plan_is_at_work(short: Short) -> None:
    manager, resident = beside(model := stack())
    for _ in range(2):
        run(model)
    before = manager.plan
    short.error, short.plans = KeyboardInterrupt, 1
    with pytest.raises(KeyboardInterrupt):
        run(model)
    assert manager.plan == before and manager.phase == "inference"
    assert equal(model, resident)


def test_an_interrupt_frees_no_memory_that_is_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    manager, resident = beside(model := stack())
    for _ in range(2):
        run(model)
    assert manager._offloaded is not None
    plans = manager._offloaded.plans
    assert plans.running is not None
    ring, link = weakref.ref(plans.running.installed.ring), plans.staged.link
    real, alive = link.drain, list[bool]()

    def drain() -> None:
        memory = ring()
        alive.append(memory is not None and memory.nbytes > 0)
        if len(alive) == 1:
            raise KeyboardInterrupt
        real()

    monkeypatch.setattr(link, "drain", drain)
    with pytest.raises(KeyboardInterrupt):
        run(model)
    assert alive[:2] == [True, True]
    assert equal(model, resident)


def test_a_profile_whose_plan_cannot_be_put_to_work_changes_nothing(short: Short, tmp_path: Path) -> None:
    manager = offloaded(model := stack(kind=Backwards))
    to_inference(manager, model)
    manager.save_profile(tmp_path)
    manager.release()
    resident = copy.deepcopy(model)
    manager = offloaded(model)
    before = manager.plan
    short.plans = 1
    with pytest.raises(torch.OutOfMemoryError):
        manager.load_profile(tmp_path)
    assert manager.phase == "discovery" and manager.plan == before
    assert equal(model, resident)
    manager.load_profile(tmp_path)
    assert manager.phase == "inference"
    assert equal(model, resident)


def test_a_weight_that_changed_before_the_next_plan_is_told_with_that_plan_at_work() -> None:
    class Writes(nn.Linear):
        write = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            output = super().forward(x)
            if self.write:
                self.weight.mul_(2)
            return output

    model = stack(*(Writes(D, D) for _ in range(4)))
    manager, resident = beside(model, load_strategy=None, max_gpu_mem_fraction=0.5)
    for _ in range(2):
        assert equal(model, resident)
    assert manager.resident_units()
    model.layers[1].write = True
    with pytest.raises(OffloadError, match=r"layers\.1\.weight"):
        run(model)
    model.layers[1].write = False
    assert manager.phase == "inference" and manager.plan is not None
    for _ in range(2):
        assert equal(model, resident)


def test_a_plan_within_less_memory_loads_nothing_anew_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the one after the first forward, which knows what activations take."""
    model = stack(count=12)
    managed_bytes = sum(p.nbytes for p in model.layers.parameters())
    left = iter([0.8] + [0.4] * 100)
    monkeypatch.setattr(replanning, "budget_bytes", lambda *_, **__: int(managed_bytes * next(left)))
    loaded: list[int] = []
    fill = Loader.fill

    def filled(loader: Loader, arenas: Any) -> Any:
        loaded.append(sum(layout.nbytes for _, places in arenas for layout, _ in places))
        return fill(loader, arenas)

    monkeypatch.setattr(Loader, "fill", filled)
    monkeypatch.setattr(residents, "ARENA_BYTES", 4096)  # the ring has room for what stays of one, as it usually has
    manager, resident = beside(model, load_strategy=EvenSpread())
    nbytes = {path: sum(p.nbytes for p in module.parameters()) for path, module in model.named_modules()}
    for _ in range(4):
        before, loaded[:] = set(manager.resident_units()), []
        assert equal(model, resident)
        now = set(manager.resident_units())
        assert sum(loaded) == sum(nbytes[name] for name in now - before)
        usage, plan = manager.get_gpu_memory_usage(), manager.plan
        assert plan is not None and now & before
        assert usage.total_bytes == plan.gpu_bytes + usage.unmapped_tensors_bytes
        assert manager._offloaded is not None
        assert manager._offloaded.plans.residents.nbytes == plan.resident_bytes
    assert manager.phase == "inference"
    manager.release()
    assert equal(model, resident)
