"""Phases of an offloaded model: how many forwards each takes, what moves them, and what is refused when."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

import ftd_client
from ftd.errors import NotBuiltError, OffloadConfigError
from ftd_client import OffloadConfig
from ftd_client.manager import ConfigInUseError
from ftd_client.stream.host import PinnedMemoryError
from ftd_client.stream.units import OffloadError
from tests.streamed_blocks import Block, D, Stack

from .offloading import NAME, beside, config, equal, offloaded, released, run, stack, to_inference, untouched, x

pytestmark = pytest.mark.usefixtures(released.__name__)


# --- counting ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["view", "getter", "torch_function"])
@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize(("discovery", "profiling"), [(1, 1), (3, 2), (0, 0)])
def test_forwards_lead_to_inference_and_are_right_all_along(
    discovery: int, profiling: int, skip: bool, mode: str
) -> None:
    model = stack(count=2)
    manager, resident = beside(
        model,
        discovery_iters=discovery,
        profiling_iters=profiling,
        skip_discovery=skip,
        profile_mode=mode,
        transfer_mode="strategy",
    )
    wanted = ([] if skip else ["discovery"] * max(1, discovery)) + ["profiling"] * max(1, profiling)
    assert manager.skip_discovery_honored == skip
    seen = []
    while manager.phase != "inference":
        assert manager.iters_before_inference == len(wanted) - len(seen)
        seen.append(str(manager.phase))
        assert equal(model, resident)
    assert seen == wanted
    for _ in range(2):
        assert equal(model, resident)
        assert (manager.phase, manager.iters_before_inference) == ("inference", 0)


def test_without_a_model_there_is_no_phase() -> None:
    manager = ftd_client.get_offload_manager(NAME)
    assert (manager.phase, manager.iters_before_inference) == ("idle", 0)
    assert manager.offload_units() == manager.resident_units() == []
    assert manager.get_gpu_memory_usage().total_bytes == 0
    assert manager.plan is None
    manager.release()


@pytest.mark.parametrize(
    "call",
    [
        "update_state", "join_after_forward", "pause_profiling", "suspend_profiling", "resume_profiling",
        "clear_profiling_durations", "save_profile", "load_profile",
    ],
)  # fmt: skip
def test_what_needs_a_model_says_so(call: str) -> None:
    with pytest.raises(OffloadError, match=rf"{call}\(\): manager 'test' has no model") as caught:
        getattr(ftd_client.get_offload_manager(NAME), call)()
    assert caught.value.remedy == "call offload() first"


def test_update_state_inside_of_a_forward_is_refused() -> None:
    class Impatient(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            ftd_client.update_state(NAME)
            return super().forward(x)

    model = stack(kind=Impatient)
    manager = offloaded(model)
    with pytest.raises(OffloadError, match=r"update_state\(\) was called from inside"):
        run(model)
    assert manager.phase == "discovery"


def test_a_forward_that_raises_does_not_count_and_breaks_nothing() -> None:
    class Fails(Block):
        fail = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            if self.fail:
                raise ZeroDivisionError
            return y

    model = stack(Block(), Fails(), Block(), Block())
    manager, resident = beside(model)
    Fails.fail = True
    for phase in ("discovery", "profiling", "profiling", "inference"):
        assert manager.phase == phase
        Fails.fail = True
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                run(model)
        assert manager.phase == phase
        Fails.fail = False
        assert equal(model, resident)


def test_a_model_that_calls_itself_counts_once() -> None:
    class Recursive(Stack):
        def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
            y = super().forward(x)
            return y + self(y, depth - 1) if depth else y

    model = stack(kind=Recursive)
    manager, resident = beside(model)
    for left in (3, 2, 1, 0, 0):
        assert manager.iters_before_inference == left
        assert equal(model, resident)


# --- discovery ---------------------------------------------------------------------------------------------------


def test_a_skip_that_selects_nothing_is_not_honoured_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    class Marked(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                with ftd_client.offload_block("all", NAME):
                    x = layer(x)
            return self.head(x)

    model = stack(kind=Marked)
    with caplog.at_level(logging.WARNING, "ftd"):
        manager, resident = beside(model, include_patterns=["nothing.*"], skip_discovery=True)
    assert any("skip_discovery is not honoured" in record.getMessage() for record in caplog.records)
    assert manager.skip_discovery_honored is False
    assert manager.phase == "discovery"
    for _ in range(5):
        assert equal(model, resident)
    assert manager.phase == "inference"
    assert {name.split(".")[0] for name in manager.offload_units()} == {"layers"}


def test_a_skip_that_is_honoured_refuses_blocks_by_hand() -> None:
    model = stack()
    manager = offloaded(model, skip_discovery=True)
    assert manager.skip_discovery_honored is True
    with pytest.raises(OffloadError, match=r"offload_block\('mine'\)") as caught, manager.offload_block("mine"):
        pass
    assert "skip_discovery=False" in caught.value.remedy
    run(model)


def test_a_skip_profiles_by_the_modules_order() -> None:
    model = stack()
    manager, resident = beside(model, skip_discovery=True)
    assert manager.phase == "profiling"
    names = manager.offload_units()
    assert names[:3] == ["layers.0.norm", "layers.0.up", "layers.0.down"]
    for _ in range(3):
        assert equal(model, resident)
    assert manager.offload_units() == names


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D, D))


class ByHand(nn.Module):
    """Blocks marked by hand: around modules, around the use of a module's parameter, and something outside of both."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.scale = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D), Scale()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        block = ftd_client.offload_block
        with block("first", NAME):
            x = self.a(x)
        with block("second", NAME):
            x = self.b(x)
        with block("third", NAME):
            x = x @ self.scale.weight
        return self.c(x)


@pytest.mark.parametrize("mode", ["allocation_block_transfer", "raw_block_transfer", "strategy"])
def test_blocks_by_hand_are_managed_and_nothing_else(mode: str) -> None:
    torch.manual_seed(0)
    model = ByHand().requires_grad_(False)
    manager, resident = beside(model, include_patterns=[], transfer_mode=mode)
    for _ in range(5):
        assert equal(model, resident)
    # what the third one reads is put in place when it is entered, and has no place in the order
    assert manager.offload_units() == ["a", "b"]
    assert manager.resident_units() == []
    # 2 linears and the scale are managed; the linear beside them is not
    assert manager.get_gpu_memory_usage().unmapped_tensors_bytes == 4 * (D * D + D)
    ftd_client.release(NAME)
    assert equal(model, resident)


def test_offload_block_does_nothing_without_a_model() -> None:
    with ftd_client.offload_block("anything", NAME):
        pass


def test_a_block_around_the_model_is_no_harm() -> None:
    model = stack()
    manager, resident = beside(model)
    for _ in range(5):
        with manager.offload_block("all of it"):
            assert torch.equal(run(model), run(resident))
    manager.release()


@pytest.mark.parametrize(
    ("include", "exclude", "text"),
    [
        (["layer.*"], [], r"\['layer.\*'\].*nearest names are layers"),
        (["class:Blok"], [], "class:Block"),
        (["layers.*"], ["*"], "exclude_patterns"),
        ([], [], "include_patterns is empty"),
    ],
)
def test_when_discovery_ends_with_nothing_managed_that_is_an_error(
    include: list[str], exclude: list[str], text: str
) -> None:
    model = stack()
    before = list(model.named_parameters())
    expected = run(model)
    offloaded(model, include_patterns=include, exclude_patterns=exclude)
    with pytest.raises(OffloadConfigError, match=text):
        run(model)
    ftd_client.release(NAME)
    assert untouched(model, before)
    assert torch.equal(run(model), expected)


# --- profiling ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("iters", "warned"), [(0, True), (1, True), (2, True), (3, False)])
def test_few_forwards_of_profiling_are_a_warning(iters: int, warned: bool, caplog: pytest.LogCaptureFixture) -> None:
    model = stack()
    manager = offloaded(model, profiling_iters=iters)
    with caplog.at_level(logging.INFO, "ftd"):
        to_inference(manager, model)
    (report,) = [record for record in caplog.records if record.getMessage().startswith("profiled")]
    assert report.getMessage().startswith(f"profiled {max(1, iters)} forward")
    assert ("3 or more expected" in report.getMessage()) == warned
    if warned:
        assert report.levelname == "WARNING"


def test_paused_forwards_are_neither_measured_nor_counted() -> None:
    model = stack()
    manager, resident = beside(model, skip_discovery=True, profiling_iters=2)
    ftd_client.pause_profiling(NAME)
    for _ in range(4):
        assert equal(model, resident)
        assert (manager.phase, manager.iters_before_inference) == ("profiling", 2)
    ftd_client.resume_profiling(NAME)
    to_inference(manager, model)


@pytest.mark.parametrize("mode", ["view", "getter", "torch_function"])
def test_suspended_forwards_run_without_instruments(mode: str) -> None:
    model = stack(count=2)
    manager, resident = beside(
        model, skip_discovery=True, profiling_iters=1, profile_mode=mode, transfer_mode="strategy"
    )
    ftd_client.suspend_profiling(NAME)
    for _ in range(3):
        assert equal(model, resident)
        assert manager.iters_before_inference == 1
    ftd_client.resume_profiling(NAME)
    assert equal(model, resident)
    assert manager.phase == "inference"
    assert equal(model, resident)


def test_a_suspension_in_discovery_holds_for_profiling() -> None:
    model = stack()
    manager = offloaded(model, profiling_iters=1)
    manager.suspend_profiling()
    for _ in range(3):
        run(model)
    assert manager.phase == "profiling"
    manager.resume_profiling()
    run(model)
    assert manager.phase == "inference"


def test_what_was_measured_can_be_dropped() -> None:
    model = stack()
    manager = offloaded(model, skip_discovery=True, profiling_iters=3)
    run(model)
    run(model)
    assert manager.iters_before_inference == 1
    ftd_client.clear_profiling_durations(NAME)
    assert manager.iters_before_inference == 3
    to_inference(manager, model)


def test_pausing_works_in_every_phase() -> None:
    model = stack()
    manager, resident = beside(model)
    while manager.phase != "inference":
        for call in (manager.pause_profiling, manager.suspend_profiling, manager.resume_profiling):
            call()
        assert equal(model, resident)
    for call in (manager.pause_profiling, manager.suspend_profiling, manager.clear_profiling_durations):
        call()
        assert equal(model, resident)
    assert manager.phase == "inference"


# --- configuration -----------------------------------------------------------------------------------------------


def test_iterations_change_at_once() -> None:
    model = stack()
    manager = offloaded(model, discovery_iters=5, profiling_iters=10)
    run(model)
    ftd_client.set_config(config(discovery_iters=2, profiling_iters=3), NAME)
    assert manager.iters_before_inference == 4
    to_inference(manager, model)


FIXED: dict[str, Any] = {
    "enabled": False,
    "gpu_device": 1,
    "pinned_memory": True,
    "pinned_memory_mode": "host_register",
    "shm_namespace": "other",
    "skip_discovery": True,
    "external_compile": True,
    "transfer_mode": "raw_block_transfer",
    "include_patterns": ["layers.0"],
    "exclude_patterns": ["layers.0"],
    "profile_mode": "getter",
}


@pytest.mark.parametrize("field", FIXED)
def test_what_the_engine_was_built_from_stays_until_release(field: str) -> None:
    model = stack()
    manager = offloaded(model)
    with pytest.raises(RuntimeError, match=rf"{field}: .* is in use, .* found") as caught:
        ftd_client.set_config(config(**{field: FIXED[field]}), NAME)
    assert isinstance(caught.value, ConfigInUseError)
    assert "release()" in caught.value.remedy
    to_inference(manager, model)
    manager.release()
    manager.set_config(config(**{field: FIXED[field]}))


def test_every_difference_is_named_at_once() -> None:
    offloaded(stack())
    with pytest.raises(ConfigInUseError) as caught:
        ftd_client.set_config(config(skip_discovery=True, profile_mode="getter"), NAME)
    assert "skip_discovery" in caught.value.message and "profile_mode" in caught.value.message


@pytest.mark.parametrize(("field", "value"), [("offload_timing", "eager"), ("piecewise_prefetch", "error")])
def test_what_is_read_once_warns(field: str, value: str, caplog: pytest.LogCaptureFixture) -> None:
    offloaded(stack())
    with caplog.at_level(logging.WARNING, "ftd"):
        ftd_client.set_config(config(**{field: value}), NAME)
    assert [record.getMessage() for record in caplog.records if field in record.getMessage()]


def test_a_configuration_that_was_set_is_used_by_offload() -> None:
    ftd_client.init(config(profiling_iters=7, skip_discovery=True), NAME)
    model = ftd_client.offload(stack(), name=NAME)
    assert ftd_client.get_offload_manager(NAME).iters_before_inference == 7
    run(model)


# --- what offload() refuses --------------------------------------------------------------------------------------


def test_disabled_leaves_the_model_untouched_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    model = stack()
    before = list(model.named_parameters())
    with caplog.at_level(logging.INFO, "ftd"):
        assert ftd_client.offload(model, config(enabled=False), NAME) is model
    assert [r.getMessage() for r in caplog.records] == [
        "offload() of manager 'test' left Stack untouched: enabled is false"
    ]
    assert untouched(model, before)
    assert ftd_client.get_offload_manager(NAME).phase == "idle"


@pytest.mark.parametrize(
    ("field", "value"), [("external_compile", True), ("offload_timing", "eager"), ("piecewise_prefetch", "off")]
)
def test_what_is_not_built_is_refused_by_name_before_anything_happens(field: str, value: Any) -> None:
    model = stack()
    before = list(model.named_parameters())
    with pytest.raises(NotBuiltError, match=field):
        ftd_client.offload(model, config(**{field: value}), NAME)
    assert untouched(model, before)
    assert ftd_client.get_offload_manager(NAME).phase == "idle"


def test_compile_fn_is_refused_by_name() -> None:
    with pytest.raises(NotBuiltError, match="compile_fn"):
        ftd_client.offload(stack(), config(), NAME, compile_fn=lambda module: module)


@pytest.mark.parametrize(
    "call",
    ["collect_offload_timing", "reset_offload_timing", "update_offload_timing", "request_strategy_replan",
     "strategy_replan_status"],
)  # fmt: skip
def test_functions_that_are_not_built_say_so(call: str) -> None:
    with pytest.raises(NotBuiltError, match=rf"{call}\(\) is not built yet"):
        getattr(ftd_client, call)(NAME)


def test_replays_are_not_counted_yet() -> None:
    offloaded(stack())
    with pytest.raises(NotBuiltError, match="replay_generation"):
        ftd_client.update_state(NAME, replay_generation=3)


@pytest.mark.skipif(torch.cuda.is_available(), reason="pinned memory works here")
def test_pinned_memory_without_cuda_is_a_runtime_error() -> None:
    model = stack()
    before = list(model.named_parameters())
    with pytest.raises(RuntimeError, match="pinned_memory is true") as caught:
        ftd_client.offload(model, OffloadConfig(include_patterns=["layers.*"]), NAME)
    assert isinstance(caught.value, PinnedMemoryError)
    assert untouched(model, before)


def test_a_manager_has_one_model_and_a_model_one_manager() -> None:
    model = stack()
    offloaded(model)
    with pytest.raises(OffloadError, match="manager 'test' has a model already"):
        offloaded(stack())
    for part in (model, nn.Sequential(model)):
        with pytest.raises(OffloadError, match="is offloaded already"):
            offloaded(part, "other")
    assert ftd_client.get_offload_manager("other").phase == "idle"


# --- release -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("forwards", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("mode", ["view", "getter", "torch_function"])
def test_release_in_any_phase_leaves_the_model_as_it_was(forwards: int, mode: str) -> None:
    model = stack(count=2)
    before = list(model.named_parameters())
    wanted = [parameter.requires_grad for _, parameter in before]
    attributes = [dict(vars(module)) for module in model.modules()]
    bits = {name: value.clone() for name, value in model.state_dict().items()}
    offloaded(model, profile_mode=mode, transfer_mode="strategy")
    for _ in range(forwards):
        run(model)
    ftd_client.release(NAME)
    assert untouched(model, before)
    assert [parameter.requires_grad for _, parameter in before] == wanted
    assert [dict(vars(module)) for module in model.modules()] == attributes
    assert all(torch.equal(value, bits[name]) for name, value in model.state_dict().items())
    assert ftd_client.get_offload_manager(NAME).phase == "idle"


def test_a_second_offload_takes_another_configuration() -> None:
    model = stack()
    manager, resident = beside(model, profiling_iters=5, skip_discovery=True)
    run(model)
    manager.release()
    manager.release()
    ftd_client.offload(model, config(include_patterns=["layers.1", "layers.2"], profiling_iters=1), NAME)
    assert (manager.phase, manager.iters_before_inference) == ("discovery", 2)
    assert manager.skip_discovery_honored is False
    for _ in range(4):
        assert equal(model, resident)
    assert {name.rsplit(".", 1)[0] for name in manager.offload_units()} == {"layers.1", "layers.2"}


def test_many_rounds_leave_nothing_behind() -> None:
    model = stack()
    before = list(model.named_parameters())
    manager, resident = beside(model)
    for _ in range(5):
        assert equal(model, resident)
        manager.release()
        assert untouched(model, before)
        ftd_client.offload(model, config(), NAME)


def test_release_that_need_not_keep_the_model_frees_what_was_managed() -> None:
    model = stack()
    to_inference(offloaded(model), model)
    ftd_client.release(NAME, preserve_model=False)
    assert all(parameter.is_meta for parameter in model.layers.parameters())
    assert not any(parameter.is_meta for parameter in model.head.parameters())
    assert not any("forward" in vars(module) for module in model.modules())


def test_release_inside_of_a_forward_is_refused() -> None:
    class Leaves(Stack):
        leave = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.leave:
                ftd_client.release(NAME)
            return super().forward(x)

    model = stack(kind=Leaves)
    manager, resident = beside(model)
    with pytest.raises(OffloadError, match=r"release\(\) was called from inside of a forward"):
        run(model)
    Leaves.leave = False
    assert equal(model, resident)
    assert manager.phase == "profiling"


# --- facts -------------------------------------------------------------------------------------------------------


def test_memory_is_that_of_the_plan_and_of_what_is_not_managed() -> None:
    model = stack()
    manager = offloaded(model, num_blocks=2)
    to_inference(manager, model)
    usage, plan = manager.get_gpu_memory_usage(), manager.plan
    assert plan is not None
    head = 4 * (D * D + D)
    assert usage.unmapped_tensors_bytes == head
    assert usage.blocks_bytes == plan.ring_bytes > 0
    assert usage.total_bytes == plan.ring_bytes + plan.resident_bytes + head
    ftd_client.release(NAME)
    assert manager.get_gpu_memory_usage().total_bytes == 0


def test_every_unit_streams_or_stays() -> None:
    model = stack()
    manager = offloaded(model)
    to_inference(manager, model)
    streamed, resident = manager.offload_units(), manager.resident_units()
    assert not set(streamed) & set(resident)
    expected = [name for name, module in model.layers.named_modules(prefix="layers") if module._parameters]
    assert sorted(streamed + resident) == sorted(expected)


def test_join_after_forward_may_be_called_at_any_time() -> None:
    model = stack()
    manager, resident = beside(model)
    for _ in range(5):
        manager.join_after_forward()
        assert equal(model, resident)


# --- what does not hold yet --------------------------------------------------------------------------------------


def test_pieces_that_are_called_without_the_model_are_told_by_update_state() -> None:
    model = stack()
    manager, resident = beside(model)
    for expected in ("profiling", "profiling", "inference", "inference"):
        h = other = x()
        with torch.no_grad():
            for layer, plain in zip(model.layers, resident.layers, strict=True):
                h, other = layer(h), plain(other)
        assert torch.equal(h, other)
        assert ftd_client.update_state(NAME) == expected
    assert len(manager.offload_units()) == 12


@pytest.mark.parametrize("width", [D, 300])
def test_a_region_manages_a_bare_parameter_that_it_reads(width: int) -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.scale = nn.Linear(width, width), nn.Parameter(torch.randn(width, width))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with ftd_client.offload_block("one", NAME):
                x = self.first(x)
            with ftd_client.offload_block("other", NAME):
                return x @ self.scale

    model = Bare()
    manager, resident = beside(model, include_patterns=[])
    for _ in range(5):
        assert equal(model, resident, torch.ones(2, width))
    assert manager.get_gpu_memory_usage().unmapped_tensors_bytes == 0


def test_disabled_honours_no_skip() -> None:
    manager = offloaded(stack(), skip_discovery=True)
    manager.release()
    manager.offload(stack(), config(enabled=False, skip_discovery=True))
    assert manager.skip_discovery_honored is False
