"""Rows OF of the field reports, as far as they need no GPU; each test names its row."""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ftd_client
from ftd.errors import NotBuiltError, OffloadConfigError
from ftd.plan.errors import BudgetError
from ftd_client.bind import bind
from ftd_client.meta import meta_parameters
from ftd_client.phase import budget as budget_module
from ftd_client.stream.cpu_link import CpuLink, move
from ftd_client.stream.link import Copy, Ticket
from ftd_client.stream.units import OffloadError
from tests.streamed_blocks import Block, D, Stack

from .offloading import (
    NAME,
    beside,
    config,
    equal,
    offloaded,
    released,
    run,
    stack,
    to_inference,
    untouched,
    use_link,
    x,
)
from .weights import DictWeights

pytestmark = pytest.mark.usefixtures(released.__name__)
MODES = ["view", "getter", "torch_function"]


class Tiny(nn.Linear):
    def __init__(self) -> None:
        super().__init__(D, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(x) / 4


def test_of_01_many_small_layers_through_two_places() -> None:
    """OF-01: 200 forwards of 24 small layers through two places, each bit of each."""
    model = stack(*(Tiny() for _ in range(24)))
    manager, resident = beside(model, num_blocks=2, min_blocks=2)
    inputs = [torch.randn(2, D, generator=torch.Generator().manual_seed(i)) for i in range(5)]
    expected = [run(resident, each) for each in inputs]
    for forward in range(200):
        assert torch.equal(run(model, inputs[forward % 5]), expected[forward % 5]), forward
    plan = manager.plan
    assert plan is not None
    assert len(plan.streamed) == 24
    assert plan.ring_bytes == 2 * max(block.slot_bytes for block in plan.blocks)


@pytest.mark.parametrize("mode", MODES)
def test_of_03_paths_that_profiling_has_not_seen(mode: str) -> None:
    """OF-03: profiled on path A; then B, A, B; one module is called twice, one never."""

    class Paths(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for at in (0, 1, 1, 3) if x.shape[0] == 3 else (4, 0, 3, 0):
                x = self.layers[at](x)
            return self.head(x)

    model = stack(kind=Paths, count=6)
    manager, resident = beside(model, profile_mode=mode, transfer_mode="strategy")
    to_inference(manager, model)
    for rows in (4, 3, 4, 3, 4):
        assert equal(model, resident, x(rows))
    assert not any(name.startswith(("layers.2", "layers.5")) for name in (b.name for b in manager.plan.blocks))  # type: ignore[union-attr]


@pytest.mark.parametrize("nbytes", [1, 511, 513, 70_000, 4 << 20])
def test_of_04_places_are_refilled_only_after_their_copy_and_their_use(
    nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OF-04: two places, late copies, checksums of what compute saw; release waits for what is on its way."""

    class Sums(nn.Module):
        def __init__(self, value: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.full((nbytes,), value, dtype=torch.uint8), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([x, self.weight.sum(dtype=torch.int64)[None]])

    pause, running = threading.Event(), threading.Semaphore(0)

    def late(copies: Sequence[Copy]) -> None:
        pause.wait(0.001)
        move(copies)
        running.release()

    links = use_link(monkeypatch, lambda: CpuLink(late))
    model = nn.ModuleDict({"layers": nn.ModuleList(Sums(i + 1) for i in range(6))})

    class Runs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model["layers"]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    whole = Runs()
    offloaded(whole)
    for _ in range(6):
        assert whole(torch.zeros(0, dtype=torch.int64)).tolist() == [nbytes * (i + 1) for i in range(6)]
    ftd_client.release(NAME)
    assert isinstance(links[0], CpuLink)
    assert not links[0]._pending, "nothing is on its way any more"
    assert [int(layer.weight[-1]) for layer in whole.layers] == list(range(1, 7))


class Captured(CpuLink):
    """A link that refuses as the CUDA link does while its caller's stream is captured into a graph."""

    capturing = False

    def submit(self, copies: Sequence[Copy]) -> Ticket:
        self._refuse()
        return super().submit(copies)

    def wait(self, ticket: Ticket) -> None:
        self._refuse()
        super().wait(ticket)

    def _refuse(self) -> None:
        if Captured.capturing:
            raise NotBuiltError("CUDA graphs are not built yet")


@pytest.mark.parametrize("forwards", [0, 1, 5])
def test_of_06_a_capture_is_refused_and_the_model_works_afterwards(
    forwards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OF-06: refusal by name; the next forward outside of the capture is right."""
    use_link(monkeypatch, Captured)
    model = stack()
    manager, resident = beside(model)
    for _ in range(forwards):
        run(model)
    phase = manager.phase
    monkeypatch.setattr(Captured, "capturing", True)
    for _ in range(2):
        with pytest.raises(NotBuiltError, match="CUDA graphs"):
            run(model)
    monkeypatch.setattr(Captured, "capturing", False)
    assert manager.phase == phase
    for _ in range(5):
        assert equal(model, resident)


@pytest.mark.parametrize("fullgraph", [False, True])
def test_of_08_compiling_is_refused_plainly_and_the_model_works_afterwards(fullgraph: bool) -> None:
    """OF-08: hooks are never traced; the refusal names what is not built."""
    model = stack(count=2)
    manager, resident = beside(model)
    compiled = torch.compile(model, backend="eager", fullgraph=fullgraph)
    for _ in range(2):
        with pytest.raises(Exception, match=r"compil.*offloaded.model.*is.not.built.yet"):
            compiled(x())
    torch.compiler.reset()
    for _ in range(4):
        assert equal(model, resident)
    assert manager.phase == "inference"


class Quantised(torch.Tensor):
    """Bytes and a scale, which only it knows how to read."""

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale: float) -> Quantised:
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32)  # type: ignore[return-value]

    def __init__(self, data: torch.Tensor, scale: float) -> None:
        self.inner, self.scale = data, scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Quantised(args[0].inner, args[0].scale)
        plain = [arg.inner.float() * arg.scale if isinstance(arg, Quantised) else arg for arg in args]
        return func(*plain, **(kwargs or {}))


@pytest.mark.parametrize("where", ["layers.1.up", "head"])
def test_of_09_tensor_subclasses_are_refused_by_name_and_left_alone(where: str) -> None:
    """OF-09: in what streams and in what does not."""
    model = stack()
    weight = Quantised(torch.ones_like(model.get_submodule(where).weight, dtype=torch.int8), 0.5)
    model.get_submodule(where).weight = nn.Parameter(weight, requires_grad=False)
    before = list(model.named_parameters())
    with pytest.raises(OffloadError, match=rf"{where}\.weight.*Quantised found, plain Parameter expected"):
        offloaded(model)
    assert untouched(model, before)


def test_of_09_a_subclass_that_is_excluded_with_its_module_is_still_refused_by_name() -> None:
    """OF-09: what is not managed moves to the device too, which a copy of bytes would not do right."""
    model = stack()
    weight = Quantised(torch.ones_like(model.layers[1].up.weight, dtype=torch.int8), 0.5)
    model.layers[1].up.weight = nn.Parameter(weight, requires_grad=False)
    with pytest.raises(OffloadError, match=r"layers\.1\.up\.weight can't be moved"):
        offloaded(model, exclude_patterns=["layers.1.up"])


class Packed(nn.Parameter):
    """As 4-bit weights are: packed bytes of another shape, and a state that says how to read them."""


def test_of_10_a_parameter_class_with_a_state_is_refused_by_name() -> None:
    """OF-10: the packed shape is never taken for the declared one."""
    model = stack()
    packed = Packed(torch.zeros(64, 1, dtype=torch.uint8), requires_grad=False)
    packed.quant_state = object()
    model.layers[1].up.weight = packed
    with pytest.raises(OffloadError, match=r"layers\.1\.up\.weight: .*Packed found"):
        offloaded(model)
    assert model.layers[1].up.weight is packed and hasattr(packed, "quant_state")


@pytest.mark.parametrize("mode", MODES)
def test_of_10_a_state_that_hangs_on_a_plain_parameter_travels_with_it(mode: str) -> None:
    """OF-10: wherever the weight is, its state is the same object."""

    class Dequantises(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(x, self.weight * self.weight.quant_state["scale"], self.bias)

    state = {"scale": torch.tensor(0.5)}
    model = stack(*(Dequantises(D, D) for _ in range(4)))
    resident = copy.deepcopy(model)
    for layer in (*model.layers, *resident.layers):
        layer.weight.quant_state = state
    offloaded(model, profile_mode=mode, transfer_mode="strategy")
    for _ in range(5):
        assert equal(model, resident)
        assert all(layer.weight.quant_state is state for layer in model.layers)
    ftd_client.release(NAME)
    assert all(layer.weight.quant_state is state for layer in model.layers)


def test_of_11_parameters_of_one_shape_that_were_on_meta_are_told_apart() -> None:
    """OF-11: all of them reported address 0 when the model was built."""
    source = stack(*(Tiny() for _ in range(12)))
    with meta_parameters():
        model = Stack(*(Tiny() for _ in range(12))).eval()
    assert {parameter.data_ptr() for parameter in model.parameters()} == {0}
    bind(model, DictWeights(source.state_dict()))
    manager = offloaded(model)
    for _ in range(5):
        assert equal(model, source)
        found = {float(layer.weight.sum()) for layer in model.layers}
        assert len(found) == 12
    assert len(manager.offload_units()) == 12


def device_memory(monkeypatch: pytest.MonkeyPatch, total: int = 1 << 30) -> None:
    """The CPU has so much memory, all of it free."""
    memory = SimpleNamespace(total=total, available=total)
    monkeypatch.setattr(budget_module.psutil, "virtual_memory", lambda: memory)


def test_of_13_tied_weights_count_once_in_the_budget_and_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """OF-13: with room for one of the tied matrices and no second one, the model runs."""
    device_memory(monkeypatch)
    one = nn.Linear(256, 256, bias=False)
    model = nn.ModuleDict({"layers": nn.ModuleList([one, nn.Linear(256, 256, bias=False)])})
    model["layers"][1].weight = one.weight

    class Runs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model["layers"]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers[1](self.layers[0](x))

    whole = Runs().requires_grad_(False)
    resident = copy.deepcopy(whole)
    matrix = 4 * 256 * 256
    fields: dict[str, Any] = {"transfer_mode": "strategy", "load_strategy": None}
    with pytest.raises(BudgetError):
        offloaded(whole, max_gpu_mem_fraction=(matrix - 512) / (1 << 30), **fields)
    manager = offloaded(whole, max_gpu_mem_fraction=matrix / (1 << 30), **fields)
    for _ in range(5):
        assert equal(whole, resident, torch.randn(2, 256, generator=torch.Generator().manual_seed(0)))
        assert manager.get_gpu_memory_usage().total_bytes == matrix


class Adapter(nn.Module):
    """A low-rank adapter around a linear, as libraries put them in."""

    def __init__(self, base: nn.Module, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base = base
        self.down, self.up = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)  # type: ignore[arg-type]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("forwards", [0, 1, 5])
def test_of_14_adapters_come_and_go_while_the_model_is_offloaded(forwards: int, mode: str) -> None:
    """OF-14: add one, run, remove it, run, add another; as the plain model does."""
    model = stack(count=3)
    _, resident = beside(model, profile_mode=mode, transfer_mode="strategy")
    for _ in range(forwards):
        assert equal(model, resident)
    for both in (model, resident):
        both.layers[1].up = Adapter(both.layers[1].up, 7)
    for _ in range(2):
        assert equal(model, resident)
    for both in (model, resident):
        both.layers[1].up = both.layers[1].up.base
    for _ in range(2):
        assert equal(model, resident)
    for both in (model, resident):
        both.layers[2].down = Adapter(both.layers[2].down, 8)
    for _ in range(3):
        assert equal(model, resident)
    ftd_client.release(NAME)
    assert equal(model, resident)
    assert not any("forward" in vars(module) for module in model.modules())
    assert isinstance(model.layers[2].down, Adapter)


def test_of_14_a_parameter_that_is_added_to_a_layer_stays_there() -> None:
    """OF-14: a new parameter of a module that streams is not the engine's."""

    class Grows(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            return y + x @ self.added if "added" in self._parameters else y

    model = stack(*(Grows(D, D) for _ in range(4)))
    manager, resident = beside(model)
    to_inference(manager, model)
    added = torch.randn(D, D)
    for both in (model, resident):
        both.layers[1].added = nn.Parameter(added.clone(), requires_grad=False)
    for _ in range(3):
        assert equal(model, resident)
    ftd_client.release(NAME)
    assert torch.equal(model.layers[1].added, added)
    assert equal(model, resident)


@pytest.mark.parametrize("merge", ["in place", "through data", "assigned", "replaced"])
def test_of_14_merging_an_adapter_into_a_weight_that_streams_is_refused_by_name(merge: str) -> None:
    """OF-14: refused where it happens, or, where nothing can tell, at the next forward."""
    model = stack()
    manager = offloaded(model)
    to_inference(manager, model)
    linear = model.layers[1].up
    with torch.no_grad(), pytest.raises(OffloadError, match=r"layers\.1\.up\.weight") as caught:
        if merge == "in place":
            linear.weight.add_(1)
        elif merge == "through data":
            linear.weight.data += 1
        elif merge == "assigned":
            linear.weight.data = torch.zeros(2 * D, D)
        else:
            linear.weight = nn.Parameter(torch.zeros(2 * D, D), requires_grad=False)
            model(x())
    assert "release()" in caught.value.remedy


class Speaks(nn.Module):
    """Has a method that is not `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)
        self.bare = nn.Parameter(torch.randn(D))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x) * self.bare

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) - self.bare


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("forwards", [0, 1, 5])
def test_of_16_pieces_and_weights_are_reached_directly(forwards: int, mode: str) -> None:
    """OF-16: a submodule called directly, another method, functional use of a weight, of what streams and what not."""
    model = stack(Speaks(), Speaks(), Speaks())
    _, resident = beside(model, profile_mode=mode, transfer_mode="strategy")
    for _ in range(forwards):
        run(model)
    uses = [
        lambda m: m.head(x()),
        lambda m: m.layers[1](x()),
        lambda m: m.layers[2].linear(x()),
        lambda m: m.layers[1].encode(x()),
        lambda m: F.linear(x(), m.layers[0].linear.weight, m.layers[2].linear.bias),
        lambda m: torch.stack([layer.bare for layer in m.layers]),
        lambda m: m.layers[1].linear.weight.norm(),
        lambda m: m.layers[0].linear.weight.detach().numpy().sum(),
    ]
    with torch.no_grad():
        for use in uses:
            assert torch.equal(torch.as_tensor(use(model)), torch.as_tensor(use(resident)))
    assert equal(model, resident)


@pytest.mark.parametrize("forwards", [0, 2, 5])
def test_of_17_what_needs_a_grad_is_told_at_the_forward(forwards: int) -> None:
    """OF-17: an input that requires grad is refused by name; without one there is nothing to go backward from."""
    model = stack()
    _, resident = beside(model)
    for _ in range(forwards):
        run(model)
    with pytest.raises(OffloadError, match="its input requires grad"):
        model(x().requires_grad_())
    output = model(x())
    assert torch.equal(output, run(resident))
    with pytest.raises(RuntimeError, match="does not require grad"):
        output.sum().backward()


def test_of_18_two_models_in_one_process_and_two_threads() -> None:
    """OF-18, without a second GPU: each manager has its own link, lock and places."""
    models = [stack(count=3), stack(*(Tiny() for _ in range(8)))]
    residents = copy.deepcopy(models)
    names = [NAME, "second"]
    wrong: list[tuple[str, int]] = []

    def forwards(at: int) -> None:
        for forward in range(15):
            if not equal(models[at], residents[at]):
                wrong.append((names[at], forward))

    for model, name in zip(models, names, strict=True):
        ftd_client.offload(model, config(), name)
    try:
        threads = [threading.Thread(target=forwards, args=(at,)) for at in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert not any(thread.is_alive() for thread in threads)
        assert not wrong
        assert all(ftd_client.get_offload_manager(name).phase == "inference" for name in names)
    finally:
        ftd_client.release("second")


def test_of_18_a_model_that_lies_partly_elsewhere_is_refused() -> None:
    """OF-18, without a second GPU: tensors that are on another device than the host's are named."""
    model = stack()
    model.layers[1].to("meta")
    with pytest.raises(OffloadError, match=r"on meta, first layers\.1\.norm\.weight"):
        offloaded(model)


@pytest.mark.parametrize("skip", [False, True])
def test_of_19_patterns_that_match_nothing_are_an_error_with_the_nearest_names(
    skip: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """OF-19: at the latest when discovery ends; a warning comes at once."""
    model = stack()
    offloaded(model, include_patterns=["layer.*", "blocks.*"], skip_discovery=skip)
    assert any("match nothing in this model: layer.*, blocks.*" in record.getMessage() for record in caplog.records)
    with pytest.raises(OffloadConfigError, match=r"'layer\.\*', 'blocks\.\*'.*nearest names are layers"):
        run(model)


def test_of_19_a_pattern_that_matches_nothing_beside_one_that_does_is_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """OF-19: named, while the other one works."""
    offloaded(stack(), include_patterns=["layers.*", "blocks.*"], exclude_patterns=["*.lora"])
    texts = [record.getMessage() for record in caplog.records]
    assert "include_patterns that match nothing in this model: blocks.*" in texts
    assert "exclude_patterns that match nothing in this model: *.lora" in texts


def test_of_19_patterns_that_match_only_what_cannot_be_managed_are_an_error_too() -> None:
    """OF-19: the one layer's weight is the head's as well, which is not managed."""
    linear = nn.Linear(D, D, bias=False)
    model = stack(linear)
    model.head = nn.Linear(D, D, bias=False)
    model.head.weight = linear.weight
    with pytest.raises(OffloadConfigError):
        offloaded(model, skip_discovery=True)
        run(model)


@pytest.mark.parametrize("mode", MODES)
def test_of_21_a_budget_is_refused_with_the_smallest_that_works_and_that_one_works(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OF-21: 1 byte, the smallest minus 1, and exactly it, what is not managed included."""
    device_memory(monkeypatch)
    model = stack(*(Block() for _ in range(4)))
    before = list(model.named_parameters())
    resident = copy.deepcopy(model)
    fields: dict[str, Any] = {"load_strategy": None, "profile_mode": mode, "transfer_mode": "strategy"}
    rest = 4 * (D * D + D)
    with pytest.raises(BudgetError) as caught:
        offloaded(model, max_gpu_mem_fraction=1 / (1 << 30), **fields)
    smallest = caught.value.smallest_bytes
    largest = 4 * 2 * D * D
    assert smallest >= largest
    assert str(smallest) in caught.value.message
    assert untouched(model, before)
    for too_small in (smallest - 1, largest - 1):
        with pytest.raises(BudgetError):
            offloaded(model, max_gpu_mem_fraction=(rest + too_small) / (1 << 30), **fields)
    manager = offloaded(model, max_gpu_mem_fraction=(rest + smallest) / (1 << 30), **fields)
    for _ in range(5):
        for rows in (1, 3, 500):
            assert equal(model, resident, x(rows))
        assert manager.get_gpu_memory_usage().total_bytes <= rest + smallest
    assert manager.phase == "inference"
