"""What models and their callers did to get wrong outputs in silence, or to hang: now it works, or is refused."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed, wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ftd_client
from ftd.errors import NotBuiltError
from ftd_client.offloaded import Offloaded
from ftd_client.phase import observe
from ftd_client.strategy import AllStreamed, Plan, Problem, assemble, workloads
from ftd_client.stream import hooks, memory, waits
from ftd_client.stream.cpu_link import CpuLink, move
from ftd_client.stream.link import Copy, LinkError
from ftd_client.stream.parked import Parked
from ftd_client.stream.units import OffloadError
from tests.streamed_blocks import D, Stack

from .offloading import NAME, beside, equal, offloaded, released, run, stack, to_inference, use_link, x

pytestmark = pytest.mark.usefixtures(released.__name__)
BOUND_S = 20
KEPT = "something holds its weights, or views of them"


class Resident:
    """Everything stays."""

    def plan(self, problem: Problem) -> Plan:
        return assemble(workloads(problem)[0], [], 0, "resident")


class Layers:
    """Everything streams, a layer at a time."""

    def plan(self, problem: Problem) -> Plan:
        work = workloads(problem)[0]
        return assemble(work, work.streamable, work.ring_floor(work.streamable), "layers")


RESIDENT: dict[str, Any] = {"load_strategy": Resident(), "max_gpu_mem_fraction": 0.5}


class Weight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D, D) / 4)

    def forward(self, x: torch.Tensor) -> Any:
        return x @ self.weight


def in_thread(act: Callable[[], Any]) -> Any:
    """What `act` returns in a thread of its own, within bounds; it is left behind when it hangs."""
    results: list[Any] = []

    def target() -> None:
        try:
            results.append(act())
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    thread.join(BOUND_S)
    assert results, "it hangs"
    if isinstance(results[0], BaseException):
        raise results[0]
    return results[0]


# --- views of weights that outlive their turn --------------------------------------------------------------------


def test_a_view_that_is_taken_out_of_a_region_keeps_its_bytes() -> None:
    class Regions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p = nn.ParameterList(torch.randn(D, D) / 4 for _ in range(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kept = []
            for i in range(6):
                with ftd_client.offload_block(f"r{i}", NAME):
                    kept.append(self.p[i][: D // 2])
                    x = x @ self.p[i]
            for view in kept:
                x = x + x @ view.t() @ view
            return x

    manager, resident = beside(model := Regions(), include_patterns=[])
    for _ in range(4):
        assert equal(model, resident)
    assert manager.phase == "inference"


class Out:
    def __init__(self, x: torch.Tensor, view: torch.Tensor) -> None:
        self.x, self.view = x, view


def test_a_view_in_an_object_that_a_layer_returns_keeps_its_bytes() -> None:
    class Objects(Weight):
        def forward(self, x: torch.Tensor) -> Out:
            return Out(super().forward(x), self.weight[:8])

    class Model(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kept = []
            for layer in self.layers:
                out = layer(x)
                x = out.x
                kept.append(out.view)
            for view in kept:
                x = x + x @ view.t() @ view
            return x

    # without discovery: the one that sees such a layer makes it resident
    manager, resident = beside(model := stack(*(Objects() for _ in range(6)), kind=Model), skip_discovery=True)
    for _ in range(4):
        assert equal(model, resident)
    assert manager.phase == "inference"


def test_a_block_whose_last_unit_is_not_called_leaves_nothing_in_place() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(D, D), nn.Linear(D, D)

        def forward(self, x: torch.Tensor, whole: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
            x = self.a(x)
            return (self.b(x), None) if whole else (x, self.a.weight)

    class Model(Stack):
        def forward(self, x: torch.Tensor, whole: bool = True) -> torch.Tensor:
            kept = []
            for layer in self.layers:
                x, weight = layer(x, whole)
                kept.append(weight)
            for weight in kept:
                x = x if weight is None else x @ weight
            return x

    model = stack(*(Half() for _ in range(6)), kind=Model)
    manager, resident = beside(model, load_strategy=Layers())
    to_inference(manager, model)
    assert equal(model, resident, x())
    assert equal(model, resident, x(), False)


class Caches(Weight):
    """Keeps a view of its weight from the first forward after `keep` is set."""

    keep = True

    def __init__(self) -> None:
        super().__init__()
        self.kept: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kept is None and self.keep:
            self.kept = self.weight.t()
        return x @ (self.weight.t() if self.kept is None else self.kept)


def test_a_kept_view_is_refused_without_discovery_too() -> None:
    offloaded(model := stack(*(Caches() for _ in range(6))), skip_discovery=True)
    with pytest.raises(OffloadError, match=rf"layers\.0 {KEPT}"):
        run(model)


SINCE_INFERENCE: dict[str, tuple[Callable[[Any, torch.Tensor], object], str]] = {
    "attribute": (lambda module, view: setattr(module, "kept", view), r"modules keep views .*: layers\.2\.kept"),
    "list": (lambda module, view: setattr(module, "kept", [view]), r"modules keep views .*: layers\.2\.kept"),
    "object": (lambda module, view: setattr(module, "kept", Out(view, view)), rf"layers\.\d( or layers\.\d)* {KEPT}"),
    "closure": (lambda module, view: setattr(module, "kept", lambda: view), rf"layers\.\d( or layers\.\d)* {KEPT}"),
    "somebody else": (lambda module, view: HELD.append(view), rf"layers\.\d( or layers\.\d)* {KEPT}"),
}
HELD: list[torch.Tensor] = []


class Begins(Weight):
    """Keeps a view of its weight when it is told how."""

    def __init__(self) -> None:
        super().__init__()
        object.__setattr__(self, "keep", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.keep is not None:
            self.keep(self, self.weight.t())  # type: ignore[operator]
        return x @ self.weight


@pytest.mark.parametrize("told", ["after the forward", "at release"])
@pytest.mark.parametrize("how", SINCE_INFERENCE)
def test_a_view_that_is_kept_for_the_first_time_in_inference_is_refused_by_name(how: str, told: str) -> None:
    keep, text = SINCE_INFERENCE[how]
    manager, resident = beside(model := stack(*(Begins() for _ in range(6))))
    to_inference(manager, model)
    assert equal(model, resident)
    layer = model.layers[2]
    object.__setattr__(layer, "keep", keep)
    try:
        if told == "after the forward":
            for _ in range(2):
                with pytest.raises(OffloadError, match=text):
                    run(model)
        else:
            run(layer)
            with pytest.raises(OffloadError, match=text):
                manager.release()
    finally:
        object.__setattr__(layer, "keep", None)
        HELD.clear()
        vars(layer).pop("kept", None)
    assert equal(model, resident)
    manager.release()
    assert equal(model, resident)


def test_the_search_for_who_keeps_a_view_passes_over_tensors_without_memory() -> None:
    wrapped: list[torch.Tensor] = [torch.ones(2).to_sparse()]
    torch.func.vmap(lambda t: wrapped.append(t) or t)(torch.ones(3, 2))  # type: ignore[func-returns-value]
    manager, resident = beside(model := stack(*(Begins() for _ in range(6))))
    to_inference(manager, model)
    object.__setattr__(model.layers[2], "keep", lambda _module, view: HELD.append(view))
    try:
        with pytest.raises(OffloadError, match=KEPT):
            run(model)
    finally:
        object.__setattr__(model.layers[2], "keep", None)
        HELD.clear()
    assert equal(model, resident)
    assert len(wrapped) == 2


@pytest.mark.parametrize("alignment", [64, 512])
def test_what_a_failed_forward_left_in_its_frames_is_kept_by_nobody(
    alignment: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # of 64 every allocation of the CPU is one, so that the ring starts where its memory does, as on a GPU
    monkeypatch.setattr(memory, "ALIGNMENT", alignment)

    class Fails(Weight):
        fail = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            view = self.weight.t()
            if self.fail:
                Fails.fail = False
                raise torch.OutOfMemoryError
            return x @ view.t()

    manager, resident = beside(model := stack(*(Fails() for _ in range(4))))
    to_inference(manager, model)
    Fails.fail = True
    try:
        run(model)
    except torch.OutOfMemoryError:
        # as one does with half of the batch
        assert equal(model, resident)
        manager.release()
    else:
        raise AssertionError("it did not fail")
    assert equal(model, resident)


def test_garbage_in_cycles_is_kept_by_nobody() -> None:
    class Cycles(Weight):
        cycle = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.cycle:
                garbage: list[Any] = [self.weight.t()]
                garbage.append(garbage)
            return x @ self.weight

    manager, resident = beside(model := stack(*(Cycles() for _ in range(4))))
    to_inference(manager, model)
    Cycles.cycle = True
    for _ in range(3):
        assert equal(model, resident)
    manager.release()


# --- grads within a block ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("since", ["the first forward", "inference"])
def test_grads_that_a_block_enables_for_itself_are_refused(since: str) -> None:
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    class Guides(Weight):
        guide = since != "inference"

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.set_grad_enabled(self.guide):
                x = x.detach().requires_grad_(self.guide)
                energy = torch.tanh(x @ self.weight)
            kept.append((x, energy))
            return energy.detach()

    class Model(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kept.clear()
            for layer in self.layers:
                x = layer(x)
            if Guides.guide:
                with torch.enable_grad():
                    x = x + sum(torch.autograd.grad(energy.sum(), each)[0] for each, energy in kept)
            return x

    manager = offloaded(model := stack(*(Guides() for _ in range(6)), kind=Model))
    if since == "inference":
        to_inference(manager, model)
        Guides.guide = True
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            run(model)
    else:
        with pytest.raises(OffloadError, match=KEPT):
            run(model)


# --- weights that change -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["streamed", "resident", "getter"])
@pytest.mark.parametrize("forwards", [1, 4])
def test_a_parameter_that_was_replaced_stays_and_the_old_one_never_comes_back_unnoticed(
    forwards: int, how: str
) -> None:
    fields: dict[str, Any] = {"streamed": {}, "resident": RESIDENT, "getter": {"profile_mode": "getter"}}[how]
    manager, resident = beside(model := stack(), **fields)
    for _ in range(forwards):
        run(model)
    new = torch.randn(2 * D, D)
    for each in (model, resident):
        each.layers[0].up.weight = nn.Parameter(new.clone())
        each.layers[1].extra = nn.Parameter(new.clone())
    refused = 0
    for _ in range(4):
        try:
            assert equal(model, resident)
        except OffloadError as error:
            assert "layers.0.up.weight" in error.message
            refused += 1
    try:
        manager.release()
    except OffloadError as error:
        assert "layers.0.up.weight" in error.message
        refused += 1
    assert refused
    assert torch.equal(model.layers[0].up.weight, new) and torch.equal(model.layers[1].extra, new)
    assert equal(model, resident)


def test_a_state_dict_that_was_assigned_stays_after_release() -> None:
    manager, resident = beside(model := stack())
    to_inference(manager, model)
    state = {name: torch.randn_like(tensor) for name, tensor in resident.state_dict().items()}
    model.load_state_dict(state, assign=True)
    resident.load_state_dict(state)
    manager.release()
    assert equal(model, resident)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "row": lambda weight: weight[0].zero_(),
    "setitem of a view": lambda weight: weight.view(-1).__setitem__(slice(100), 0),
    "transposed": lambda weight: weight.t().mul_(2),
    "view of a view": lambda weight: weight.view(-1)[:100].zero_(),
}


@pytest.mark.parametrize("told", ["at the next forward", "at release"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_write_through_a_view_is_told_once(change: str, told: str) -> None:
    manager, resident = beside(model := stack())
    to_inference(manager, model)
    with torch.no_grad():
        CHANGES[change](model.layers[0].up.weight)
    with pytest.raises(OffloadError, match=r"changed while offloaded, .*layers\.0\.up\.weight"):
        run(model) if told == "at the next forward" else manager.release()
    assert equal(model, resident)
    manager.release()
    assert equal(model, resident)


@pytest.mark.parametrize("mode", ["getter", "torch_function"])
def test_a_write_to_what_was_fetched_long_before_is_told(mode: str) -> None:
    kept: list[torch.Tensor] = []

    class Keeps(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.out_features == D and not kept:
                kept.append(self.weight.view(-1))
            return super().forward(x)

    model = stack(*(Keeps(D, D) for _ in range(6)))
    _, resident = beside(model, profile_mode=mode, profiling_iters=9, transfer_mode="strategy")
    kept.append(x())  # not in discovery, where getters are not at work yet
    for _ in range(2):
        assert equal(model, resident)
    kept.clear()
    for _ in range(2):
        assert equal(model, resident)
    kept.pop()[:5].zero_()
    with pytest.raises(OffloadError, match=r"changed while offloaded, .*layers\.0\.weight"):
        run(model)
    assert equal(model, resident)


def test_a_refused_write_that_is_caught_leaves_nothing_behind() -> None:
    refused: list[str] = []

    class Tries(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if isinstance(self.weight, Parked):
                try:
                    self.weight.mul_(2)
                except OffloadError as error:
                    refused.append(error.message)
            return super().forward(x)

    model = stack(*(Tries(D, D) for _ in range(4)))
    resident = copy.deepcopy(model)
    manager = offloaded(model, profile_mode="torch_function", transfer_mode="strategy")
    for _ in range(4):
        assert equal(model, resident)
    assert len(refused) == 16
    manager.release()
    assert equal(model, resident)


def test_a_write_within_a_region_is_told() -> None:
    class Regions(nn.Module):
        write = False

        def __init__(self) -> None:
            super().__init__()
            self.p = nn.ParameterList(torch.randn(D, D) / 4 for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for i in range(4):
                with ftd_client.offload_block(f"r{i}", NAME):
                    if self.write:
                        self.p[i].mul_(2)
                    x = x @ self.p[i]
            return x

    manager, resident = beside(model := Regions(), include_patterns=[])
    to_inference(manager, model)
    model.write = True
    with pytest.raises(OffloadError, match=r"changed while offloaded, .*p\.0"):
        run(model)
    model.write = False
    assert equal(model, resident)


@pytest.mark.parametrize(
    ("mode", "fields", "more"),
    [
        ("view", {}, 0),
        ("view", {}, 2),
        ("getter", {}, 2),
        ("torch_function", {}, 2),
        *((mode, RESIDENT, 2) for mode in ("view", "getter", "torch_function")),
    ],
)
def test_a_write_in_a_forward_is_told_and_computes_nothing_else(mode: str, fields: dict[str, Any], more: int) -> None:
    class Writes(nn.Linear):
        write = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.write:
                self.weight.mul_(2)
            return super().forward(x)

    model = stack(*(Writes(D, D) for _ in range(4)))
    manager, resident = beside(model, profile_mode=mode, profiling_iters=9, transfer_mode="strategy", **fields)
    assert equal(model, resident)
    refused = 0
    for write in (True, *[False] * more):
        model.layers[1].write = write
        try:
            output = run(model)
        except OffloadError as error:
            assert "layers.1.weight" in error.message
            refused += 1
        else:
            assert write or torch.equal(output, run(resident)), "the write is half in"
    model.layers[1].write = False
    try:
        manager.release()
    except OffloadError as error:
        assert "layers.1.weight" in error.message
        refused += 1
    assert refused
    assert equal(model, resident)


def test_weights_that_are_written_on_the_host_are_told_at_the_next_forward() -> None:
    model = stack()
    kept = list(model.parameters())
    manager = offloaded(model)
    to_inference(manager, model)
    with torch.no_grad():
        torch._foreach_mul_(kept, 0.5)  # an optimizer's, or an average's, who kept the parameters
    with pytest.raises(OffloadError, match=r"changed while offloaded, .*layers\.0\.norm\.weight"):
        run(model)


# --- copies and traces of it -------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["layers.0", "layers.0.up", "head"])
@pytest.mark.parametrize("take", [copy.deepcopy, pickle.dumps])
def test_no_module_of_an_offloaded_model_is_copied_with_its_hooks(take: Callable[[nn.Module], Any], part: str) -> None:
    manager = offloaded(model := stack())
    for _ in range(2):
        with pytest.raises(
            OffloadError, match=r"about to be copied or pickled with its hooks|a copy of the model would"
        ):
            take(model.get_submodule(part))
        to_inference(manager, model)
    manager.release()
    copied = copy.deepcopy(model.get_submodule(part))
    for parameter in copied.parameters():
        nn.init.zeros_(parameter)
    assert not run(copied).sub(x() if part == "layers.0" else 0).any()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tracing_is_refused_by_name_and_harmless() -> None:
    manager, resident = beside(model := stack())
    to_inference(manager, model)
    for traced in (model, model.layers[0].up):
        with torch.no_grad(), pytest.raises(NotBuiltError, match=r"torch\.jit\.trace"):
            torch.jit.trace(traced, x(), check_trace=False)
    assert equal(model, resident)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripting_is_refused_by_name_and_harmless() -> None:
    manager, resident = beside(model := stack())
    for _ in range(2):
        for scripted in (model, model.layers[0], model.layers[0].up):
            with pytest.raises(NotBuiltError, match=r"torch\.jit\.script"):
                torch.jit.script(scripted)
        assert equal(model, resident)
        to_inference(manager, model)
    manager.release()
    assert torch.equal(run(torch.jit.script(model.layers[0].up)), run(resident.layers[0].up))


@pytest.mark.parametrize("mode", ["view", "getter", "torch_function"])
def test_functions_of_the_model_that_torch_makes_are_right(mode: str) -> None:
    manager, resident = beside(model := stack(), profile_mode=mode, transfer_mode="strategy")
    batch = torch.randn(5, 3, D)
    with torch.no_grad():
        for _ in range(5):
            assert torch.equal(torch.func.vmap(model)(batch), torch.func.vmap(resident)(batch))
    assert manager.phase == "inference"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, which scripts rules for jvp
@pytest.mark.parametrize("mode", ["view", "getter", "torch_function"])
def test_derivatives_that_torch_makes_are_refused_in_every_phase(mode: str) -> None:
    manager, resident = beside(model := stack(), profile_mode=mode, transfer_mode="strategy")
    for _ in range(5):
        for transform, found in DERIVATIVES.items():
            with pytest.raises(OffloadError, match=f"torch.func transforms the offloaded model by {transform}"):
                found(model)
        assert equal(model, resident)
    assert manager.phase == "inference"


DERIVATIVES: dict[str, Callable[[nn.Module], object]] = {
    "grad": lambda model: torch.func.grad(lambda x: model(x).sum())(x()),
    "jvp": lambda model: torch.func.jvp(model, (x(),), (x(),)),
    "vmap, grad": lambda model: torch.func.vmap(torch.func.grad(lambda x: model(x).sum()))(x()[None]),
}


# --- other threads -----------------------------------------------------------------------------------------------


class Waits(nn.Linear):
    """Stops in its forward, once `at` is set, until `go` is."""

    def __init__(self) -> None:
        super().__init__(D, D)
        object.__setattr__(self, "gates", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gates: Any = self.gates
        if gates is not None:
            gates[0].set()
            assert gates[1].wait(BOUND_S)
        return super().forward(x)


def test_a_state_dict_that_another_thread_takes_in_a_forward_has_every_weight() -> None:
    manager, resident = beside(model := stack(*(Waits() for _ in range(6))))
    to_inference(manager, model)
    there, go = threading.Event(), threading.Event()
    object.__setattr__(model.layers[2], "gates", (there, go))
    thread = threading.Thread(target=run, args=(model,))
    thread.start()
    try:
        assert there.wait(BOUND_S)
        state = model.state_dict()
    finally:
        go.set()
        thread.join(BOUND_S)
    object.__setattr__(model.layers[2], "gates", None)
    for _ in range(2):
        run(model)
    for name, tensor in resident.state_dict().items():
        assert torch.equal(state[name], tensor), name


class Halts(Stack):
    """Stops between two layers, once `gates[0]` is set, until `gates[1]` is."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gates: Any = vars(self).get("gates")
        for layer in self.layers:
            x = layer(x)
            if gates is not None:
                gates[0].set()
                assert gates[1].wait(BOUND_S)
        out: torch.Tensor = self.head(x)
        return out


@pytest.mark.parametrize("call", ["suspend_profiling", "resume_profiling", "load_profile", "update_state"])
def test_what_must_not_happen_in_a_forward_waits_for_that_of_another_thread(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And keeps nothing that it needs to come to its end; nor does one get in that begins behind the question."""
    model = stack(kind=Halts)
    if call == "load_profile":
        offloaded(model, profile_storage_dir=str(tmp_path))
        to_inference(ftd_client.get_offload_manager(NAME), model)
        ftd_client.save_profile(name=NAME)
        ftd_client.release(NAME)
    manager, resident = beside(model, profile_storage_dir=str(tmp_path), skip_discovery=True, profiling_iters=1)
    if call == "resume_profiling":
        manager.suspend_profiling()
    if call == "update_state":
        monkeypatch.setattr(Offloaded, "refuse_inside", lambda self, what: None)
    phase, expected = manager.phase, run(resident)
    there, go = threading.Event(), threading.Event()
    vars(model)["gates"] = there, go
    found: list[torch.Tensor] = []
    forward = threading.Thread(target=lambda: found.append(run(model)), daemon=True)
    forward.start()
    assert there.wait(BOUND_S)
    other = threading.Thread(target=getattr(manager, call), daemon=True)
    other.start()
    other.join(0.1)
    assert (manager.phase, other.is_alive()) == (phase, True)
    go.set()
    for thread in (forward, other):
        thread.join(BOUND_S)
        assert not thread.is_alive(), "each waits for the other"
    assert torch.equal(found[0], expected)
    del vars(model)["gates"]
    assert equal(model, resident)


def test_layers_that_run_in_a_pool_within_the_forward_do_not_wait_for_it() -> None:
    with ThreadPoolExecutor(2) as pool:

        class Pool(Stack):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                results = [pool.submit(run, layer, x) for layer in self.layers]
                return torch.stack([each.result(BOUND_S) for each in results]).sum(0)

        manager, resident = beside(model := stack(kind=Pool))
        for _ in range(5):
            assert in_thread(lambda: equal(model, resident))
    assert manager.phase == "inference"


def joined(act: Callable[[], Any]) -> Any:
    results: list[Any] = []

    def target() -> None:
        try:
            results.append(act())
        except OffloadError as error:
            results.append(error)

    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    thread.join()
    if isinstance(results[0], OffloadError):
        raise results[0]
    return results[0]


def submitted(act: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(act).result()


def mapped(act: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(2) as pool:
        return next(pool.map(lambda _: act(), range(2)))


def shut_down(act: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(act)
    return future.result()


def awaited(act: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(2) as pool:
        wait(futures := [pool.submit(act), pool.submit(int)])
        return futures[0].result()


def completed(act: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return next(as_completed([pool.submit(act)])).result()


class Threads(Weight):
    """Its forward has a thread call another layer, or read its weight, and waits for that."""

    def __init__(self, start: Callable[[Callable[[], Any]], Any] | None, what: str) -> None:
        super().__init__()
        object.__setattr__(self, "start", start)
        object.__setattr__(self, "other", None)
        self.what = what

    def forward(self, x: torch.Tensor) -> Any:
        x = super().forward(x)
        start: Any = self.start
        if start is None:
            return x
        other: Any = self.other
        return start(lambda: run(other, x) if self.what == "calls" else torch.no_grad()(torch.matmul)(x, other.weight))


@pytest.mark.parametrize("what", ["calls", "reads"])
@pytest.mark.parametrize("since", ["discovery", "inference"])
@pytest.mark.parametrize("start", [joined, submitted, mapped, shut_down, awaited, completed])
def test_a_block_that_waits_for_a_thread_that_reaches_another_block_is_refused(
    start: Callable[[Callable[[], Any]], Any], since: str, what: str
) -> None:
    model = stack(*(Threads(start if i == 1 else None, what) for i in range(4)))
    resident = copy.deepcopy(model)
    for each in (model, resident):
        object.__setattr__(each.layers[1], "other", each.layers[3])
    expected = in_thread(lambda: run(resident))
    if since == "inference":
        object.__setattr__(model.layers[1], "start", None)
    manager = offloaded(model)
    if since == "inference":
        to_inference(manager, model)
        object.__setattr__(model.layers[1], "start", start)
    with pytest.raises(OffloadError, match=r"layers\.3(\.weight)? is reached by a thread that the forward of another"):
        in_thread(lambda: run(model))
    manager.release()
    offloaded(model, exclude_patterns=["layers.1"])  # what the error says
    for _ in range(5):
        assert torch.equal(in_thread(lambda: run(model)), expected)


def test_a_block_that_takes_long_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the thread that runs it has just waited for the one that waits, and still waits for others."""
    looks: list[int] = []
    look = waits._awaits_this

    def looked(thread: int) -> bool:
        looks.append(thread)
        if len(looks) == 3:
            go.set()
        return look(thread)

    monkeypatch.setattr(waits, "_LOOK_S", 0.001)
    monkeypatch.setattr(waits, "_awaits_this", looked)
    manager, resident = beside(model := stack(*(Waits() for _ in range(6))))
    to_inference(manager, model)
    there, go = threading.Event(), threading.Event()
    object.__setattr__(model.layers[2], "gates", (there, go))
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(run, model)
        assert there.wait(BOUND_S)
        found = in_thread(lambda: run(model.layers[4]))
        first.result(BOUND_S)
    assert len(looks) >= 3
    object.__setattr__(model.layers[2], "gates", None)
    assert torch.equal(found, run(resident.layers[4]))
    assert equal(model, resident)


def test_a_generator_that_stops_within_a_region_holds_nobody_up() -> None:
    class Yields(Stack):
        def forward(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
            for i, layer in enumerate(self.layers):
                with ftd_client.offload_block(f"g{i}", NAME):
                    x = layer(x)
                    yield x

    _, resident = beside(model := stack(kind=Yields))
    generator = run(model)
    with torch.no_grad():
        found = [next(generator)]
        expected = resident.layers[0](x())
        assert torch.equal(in_thread(lambda: run(model.layers[0])), expected)
        found += generator
        assert all(map(torch.equal, found, run(resident)))
    assert len(found) == 4


def test_threads_that_waited_while_the_model_was_released_get_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    manager, resident = beside(model := stack())
    to_inference(manager, model)
    arrived: list[int] = []
    all_there = threading.Event()

    def arrive() -> None:
        arrived.append(1)
        if len(arrived) == 3:
            all_there.set()

    # asked by hooks right before they wait
    monkeypatch.setattr(hooks, "_tracing", lambda: arrive() and False)
    weight = model.layers[3].up.weight
    assert isinstance(weight, Parked)
    fetch = weight.ftd_access.fetch
    weight.ftd_access.fetch = lambda: (arrive(), fetch())[1]
    inner = manager._offloaded
    assert inner is not None
    acts: list[Callable[[nn.Module], torch.Tensor]] = [
        run,
        lambda of: run(of.layers[0].up),
        lambda of: (weight if of is model else of.layers[3].up.weight) + 1,
    ]
    with ThreadPoolExecutor(3) as pool, torch.no_grad():
        with inner._turn, inner._lock:
            results = [pool.submit(torch.no_grad()(act), model) for act in acts]
            assert all_there.wait(BOUND_S)
            manager.release()
        for act, result in zip(acts, results, strict=True):
            assert torch.equal(result.result(BOUND_S), act(resident))


# --- copies that are interrupted, or fail ------------------------------------------------------------------------


def test_after_an_interrupted_submit_forwards_and_release_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    links = use_link(monkeypatch, CpuLink)
    manager, resident = beside(model := stack())
    to_inference(manager, model)
    (link,) = links
    assert isinstance(link, CpuLink)
    jobs = link._jobs

    class Interrupted:
        def put(self, job: object) -> None:
            monkeypatch.setattr(link, "_jobs", jobs)
            raise KeyboardInterrupt

    monkeypatch.setattr(link, "_jobs", Interrupted())
    with pytest.raises(KeyboardInterrupt):
        run(model)
    assert in_thread(lambda: equal(model, resident))
    in_thread(manager.release)


def test_a_failed_copy_is_told_once_and_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    failing = [0]

    def copies(wanted: Sequence[Copy]) -> None:
        failing[0] -= 1
        if not failing[0]:
            raise OSError("dma")
        move(wanted)

    links = use_link(monkeypatch, lambda: CpuLink(copies))
    manager, resident = beside(model := stack(count=2))
    to_inference(manager, model)
    for number in range(1, 8):
        links[0].drain()
        failing[0] = number
        with pytest.raises(LinkError, match="dma"):
            for _ in range(3):
                run(model)
        for _ in range(2):
            assert equal(model, resident), number


# --- only pieces are called --------------------------------------------------------------------------------------


def test_update_state_counts_forwards_of_pieces() -> None:
    manager, resident = beside(model := stack(), profiling_iters=2)
    phases = []
    for _ in range(4):
        for layer, other in zip(model.layers, resident.layers, strict=True):
            assert equal(layer, other)
        manager.update_state()
        phases.append(manager.phase)
    assert phases == ["profiling", "profiling", "inference", "inference"]


def test_calls_of_pieces_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observe, "_MOST_VISITS", 20)
    manager = offloaded(model := stack())
    inner = manager._offloaded
    assert inner is not None and inner.plans.running is not None and inner.plans.running.observer is not None
    observer = inner.plans.running.observer
    for i in range(40):
        run(model.layers[3 * i % 4])
    assert len(observer.visits) == 20
    to_inference(manager, model)
    for i in range(40):
        run(model.layers[3 * i % 4])
    assert len(inner.plans.running.installed.stream.missed) <= len(inner.plans.running.installed.stream.steps)


# --- after release -----------------------------------------------------------------------------------------------


def test_a_state_dict_outlives_release() -> None:
    manager, resident = beside(model := stack())
    to_inference(manager, model)
    state = model.state_dict()
    manager.release()
    for name, tensor in resident.state_dict().items():
        assert torch.equal(state[name], tensor), name
    tied = nn.Linear(D, 2 * D)
    tied.weight = state["layers.0.up.weight"]  # an nn.Parameter for all that it shows
    with torch.no_grad():
        assert torch.equal(tied(x()), F.linear(x(), resident.layers[0].up.weight, tied.bias))


# --- what is told ------------------------------------------------------------------------------------------------


def test_a_model_that_was_built_in_inference_mode_is_refused_with_the_way_out() -> None:
    with torch.inference_mode():
        model = stack()
    with pytest.raises(OffloadError, match=r"layers\.0\.norm\.weight was made under torch\.inference_mode") as caught:
        offloaded(model)
    assert "outside of it" in caught.value.remedy


def test_parameters_may_have_attributes_of_any_name() -> None:
    model = stack()
    expected = model.layers[1].up.weight.detach() + 1
    weight: Any = model.layers[1].up.weight
    weight.fetch, weight.name_, weight.host, weight.access = 1, 2, 3, 4
    offloaded(model)
    stand_in = model.layers[1].up.weight
    assert (stand_in.fetch, stand_in.host, stand_in.access) == (1, 3, 4)
    assert torch.equal(stand_in + 1, expected)


CONVERSIONS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "half": lambda module: module.half(),
    "double": lambda module: module.double(),
    "dtype": lambda module: module.to(torch.bfloat16),
    "meta": lambda module: module.to("meta"),
    "empty": lambda module: module.to_empty(device="cpu"),
}


@pytest.mark.parametrize("fields", [{}, RESIDENT], ids=["streamed", "resident"])
@pytest.mark.parametrize("how", CONVERSIONS)
def test_a_conversion_is_refused_before_anything_is_converted(how: str, fields: dict[str, Any]) -> None:
    model = stack()
    model.layers.insert(0, nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D)))
    # what is not managed comes first, in the model and in a module of it
    model._modules = {"head": model.head, **model._modules}
    manager, resident = beside(model.eval(), include_patterns=["layers.*"], exclude_patterns=["layers.0.0"], **fields)
    for _ in range(4):
        for converted in (model, model.layers, model.layers[0]):
            with pytest.raises(OffloadError, match=r"layers\.0\.1\.weight is offloaded: \w+ was about to be converted"):
                CONVERSIONS[how](converted)
        assert all(t.dtype in (torch.float32, torch.int64) for t in (*model.parameters(), *model.buffers()))
        assert equal(model, resident)
    manager.release()
    assert equal(CONVERSIONS["double"](model), resident.double(), x().double())


def test_the_order_of_dimensions_is_not_converted_either() -> None:
    class Convolves(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x.view(1, 1, -1, 8))

    model = stack(kind=Convolves)
    model.layers = nn.Sequential(nn.Conv2d(1, 3, 3), nn.Conv2d(3, 3, 3).to(memory_format=torch.channels_last))
    manager, resident = beside(model)
    for _ in range(4):
        assert model.layers[1].to(memory_format=torch.channels_last) is model.layers[1]
        with pytest.raises(OffloadError, match="about to be converted"):
            model.layers[1].to(memory_format=torch.contiguous_format)
        with pytest.raises(OffloadError, match="about to be converted"):
            model.to(memory_format=torch.channels_last)
        assert equal(model, resident)
    assert manager.phase == "inference"


def test_casting_to_the_type_that_it_has_changes_nothing() -> None:
    manager, resident = beside(model := stack())
    for _ in range(2):
        assert model.float() is model
        assert model.to("cpu", torch.float32) is model
        assert model.layers[0].cpu() is model.layers[0]
        assert equal(model, resident)
        to_inference(manager, model)


def test_a_model_that_shares_a_layer_of_an_offloaded_one_is_refused() -> None:
    manager = offloaded(model := stack())
    to_inference(manager, model)
    other = stack()
    other.layers[2] = model.layers[2]
    with pytest.raises(OffloadError, match="or a module of it, is offloaded already"):
        offloaded(other, "other")


def test_everything_streams_in_these_tests() -> None:
    """Where the usual plan left something resident, most of them would show nothing."""
    manager = offloaded(stack(), load_strategy=AllStreamed())
    assert manager.resident_units() == []
