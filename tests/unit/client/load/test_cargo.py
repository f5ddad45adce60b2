"""A model onto GPUs with its weights by shipment, over a fake GPU whose memory is the CPU's."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file, save_model
from torch import nn

from ftd.cuda import pump
from ftd.cuda.runtime import CudaError
from ftd.errors import BindError, UsageError
from ftd.wire.client import Asked
from ftd_client.bind import bind, fit
from ftd_client.creator import Creator
from ftd_client.load import cargo as module
from ftd_client.load import push as push_module
from ftd_client.load import shipment as shipment_module
from ftd_client.load.cargo import Cargo
from ftd_client.load.move import MoveReport, move
from ftd_client.load.placement import Devices, Placement
from ftd_client.load.push import Inquiry
from ftd_client.views import SharedWeights
from tests.fake_cuda import FakeCuda
from tests.unit.client.load.served import (
    BOUND_S,
    FakeDaemon,
    FakeShipment,
    bounded,
    daemon_of,
    eventually,
    fake_device,
    shared_weights,
)
from tests.unit.client.weights import bits

TENSORS = {
    "first.weight": ("F32", (40, 60), 0, 0),
    "first.bias": ("F32", (40,), 0, 9728),
    "second.weight": ("BF16", (7, 40), 0, 20480),
    "second.bias": ("BF16", (7,), 0, 21504),
    "far.weight": ("F32", (3, 3), 1, 8192),
    "far.bias": ("F32", (3,), 1, 8704),
}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.far = nn.Linear(60, 40), nn.Linear(40, 7), nn.Linear(3, 3)


def on_meta() -> Model:
    with torch.device("meta"):
        return Model()


@pytest.fixture
def weights(namespace: str) -> SharedWeights:
    return shared_weights(namespace, TENSORS)


@pytest.fixture(autouse=True)
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    fake = FakeCuda()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", fake_device(fake))
    monkeypatch.setattr(module, "load_runtime", fake.load)
    monkeypatch.setattr(module, "Shipment", FakeShipment)
    monkeypatch.setattr(pump, "SLICE_BYTES", 1024)
    monkeypatch.setattr(push_module, "_PING_S", 1.0)
    monkeypatch.setattr(push_module, "_DEATH_S", 0.1)
    monkeypatch.setattr(push_module, "_START_S", 0.3)
    monkeypatch.setattr(shipment_module, "_given_up", [])
    yield fake
    eventually("threads are left", lambda: not [t for t in threading.enumerate() if t.name.startswith("ftd-")])
    assert fake.is_idle
    assert not shipment_module._under_way
    assert (fake.registered, fake.current) == ({}, 0)


@pytest.fixture
def daemon(namespace: str, weights: SharedWeights, cuda: FakeCuda, runtime_dir: Path) -> Iterator[FakeDaemon]:
    with daemon_of(namespace, weights, cuda, runtime_dir) as made:
        yield made
    assert not cuda.opened


def load(model: nn.Module, weights: SharedWeights, devices: Devices, *, bound: bool = False) -> MoveReport:
    """As `Follower.load` does."""

    def run() -> MoveReport:
        with Cargo(weights, Placement(devices)) as cargo:
            cargo.depart(model)
            return move(model, Placement(devices), cargo, None if bound else fit(model, weights))

    return bounded(run)


def gpu_of(cuda: FakeCuda, tensor: torch.Tensor) -> int | None:
    """In whose memory it lies."""
    for each in cuda.allocations:
        if each.address <= tensor.data_ptr() < each.address + each.nbytes:
            return each.ordinal
    return None


def check(model: nn.Module, weights: SharedWeights, cuda: FakeCuda, expected: dict[str, int] | int = 0) -> None:
    for name, parameter in model.named_parameters():
        assert bits(parameter) == bits(weights.view(name)), name
        assert gpu_of(cuda, parameter) == (expected if isinstance(expected, int) else expected[name]), name
        assert parameter.data_ptr() % 512 == 0


# --- the ways --------------------------------------------------------------------------------------------------------


def test_by_push(daemon: FakeDaemon, weights: SharedWeights, cuda: FakeCuda) -> None:
    model = on_meta()
    report = load(model, weights, "cuda:0")
    check(model, weights, cuda)
    total = sum(parameter.nbytes for parameter in model.parameters())
    assert (report.way, report.ways["push"], report.bytes, report.why) == ("push", total, total, "")
    assert (report.tensors, report.device) == (6, "cuda:0")
    assert daemon.pushes == 1


def test_the_first_push_takes_the_connection_of_the_question(
    daemon: FakeDaemon, weights: SharedWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    real = Creator.asked

    def counted(self: Creator, op: str, *args: Any) -> Any:
        asked.append(op)
        return real(self, op, *args)

    monkeypatch.setattr(Creator, "asked", counted)
    monkeypatch.setattr(module, "_FIRST_BYTES", (1,))
    assert load(on_meta(), weights, "cuda:0").way == "push"
    assert (asked, daemon.pushes) == (["status", "push"], 2)


def test_a_connection_that_idled_too_long_is_dialled_anew(
    daemon: FakeDaemon, weights: SharedWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon hangs up on it, which says nothing of a push."""
    daemon.serving.server._frame_timeout_s = 0.05
    real = Inquiry.line

    def late(self: Inquiry) -> Asked | None:
        line = real(self)
        assert line is None or line.answered(BOUND_S)
        return line

    monkeypatch.setattr(Inquiry, "line", late)
    report = load(on_meta(), weights, "cuda:0")
    assert (report.way, report.why, daemon.pushes) == ("push", "", 1)


def test_by_pull(weights: SharedWeights, cuda: FakeCuda) -> None:
    model = on_meta()
    report = load(model, weights, "cuda:0")
    check(model, weights, cuda)
    assert report.way == "pull"
    assert "no daemon serves" in report.why
    assert "no daemon serves" in str(report)


@pytest.mark.parametrize("parts", [(1,), (1, 1), (9000, 1)])
def test_what_is_pulled_in_parts_is_one_pull(
    weights: SharedWeights, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, parts: tuple[int, ...]
) -> None:
    """Whose slots are made with the first of them."""
    monkeypatch.setattr(module, "_FIRST_BYTES", parts)
    model = on_meta()
    report = load(model, weights, "cuda:0")
    check(model, weights, cuda)
    assert (report.way, report.ways["pull"]) == ("pull", report.bytes)
    assert len(cuda.named("register")) == 1


def test_by_copies_where_no_memory_can_be_locked(weights: SharedWeights, cuda: FakeCuda) -> None:
    cuda.refuse = {"register"}
    model = on_meta()
    assert load(model, weights, "cuda:0").way == "copy"
    check(model, weights, cuda)


def test_all_gpus_of_a_device_map_at_once(daemon: FakeDaemon, weights: SharedWeights, cuda: FakeCuda) -> None:
    model = on_meta()
    devices = {"": "cuda:1", "first": 0, "second.bias": "cpu"}
    report = load(model, weights, devices)
    first = dict.fromkeys(("first.weight", "first.bias"), 0)
    for name, parameter in model.named_parameters():
        assert bits(parameter) == bits(weights.view(name))
        assert gpu_of(cuda, parameter) == (None if name == "second.bias" else first.get(name, 1)), name
    assert model.second.bias.data_ptr() != weights.view("second.bias").data_ptr()
    assert dict(report.ways) == {"copy": 14, "push": report.bytes - 14}
    assert daemon.pushes == 2
    assert {row["gpu"][4:6] for row in daemon.pusher.describe()} == {"01", "02"}


def test_one_gpu_may_be_pushed_to_and_another_pulled(
    daemon: FakeDaemon, weights: SharedWeights, cuda: FakeCuda
) -> None:
    """The daemon may see fewer GPUs than its followers."""
    seen = FakeCuda(devices=1)
    daemon.pusher._runtime = seen.load
    seen.allocations, seen.opened = cuda.allocations, cuda.opened
    model = on_meta()
    report = load(model, weights, {"": 0, "far": 1})
    check(model, weights, cuda, {name: int(name.startswith("far")) for name in TENSORS})
    assert set(report.ways) >= {"push", "pull"}
    assert "is not visible to this daemon" in report.why


def test_a_daemon_that_says_nothing_is_waited_for_once(
    daemon: FakeDaemon, weights: SharedWeights, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not for each GPU, nor each part of what goes there."""
    monkeypatch.setattr(module, "_FIRST_BYTES", (1000,))
    daemon.hangs = True
    model = on_meta()
    report = load(model, weights, {"": 0, "second": 1, "far": "cpu"})
    assert report.way == "pull"
    assert "did not answer status" in report.why
    assert (daemon.pings, daemon.pushes) == (1, 0)
    daemon.hangs = False
    assert load(on_meta(), weights, {"": 0, "second": 1, "far": "cpu"}).way == "push"
    assert daemon.pings == 2


def test_memory_that_was_lost_is_left_to_the_daemon(daemon: FakeDaemon, weights: SharedWeights, cuda: FakeCuda) -> None:
    async def garbled(*_: object) -> dict[str, Any]:
        return {"bytes": None}

    daemon.answer = garbled
    model = on_meta()
    report = load(model, weights, "cuda:0")
    assert report.way == "pull"
    kept = shipment_module._given_up
    assert kept
    for memory in kept:
        memory.fill_(0xAA)
    check(model, weights, cuda)
    lost = {memory.untyped_storage().data_ptr() for memory in kept}
    assert not lost & {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}


# --- what is on board ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_daemon", [True, False])
def test_what_was_changed_in_place_arrives_as_changed(
    request: pytest.FixtureRequest, weights: SharedWeights, cuda: FakeCuda, with_daemon: bool
) -> None:
    if with_daemon:
        request.getfixturevalue("daemon")
    model = on_meta()
    bind(model, weights)
    with torch.no_grad():
        model.first.weight[3, 4] = 42.0
        model.second.bias.data.fill_(7.0)  # which no version counter tells
    report = load(model, weights, "cuda:0", bound=True)
    assert report.way == ("push" if with_daemon else "pull")
    check(model, weights, cuda)
    assert model.first.weight[3, 4].item() == 42.0
    assert model.second.bias.tolist() == [7.0] * 7


def test_ties_stay_ties_whichever_name_the_checkpoint_has(daemon: FakeDaemon, namespace: str, cuda: FakeCuda) -> None:
    weights = shared_weights(namespace, {"second.weight": ("F32", (5, 5), 0, 512)})
    daemon.serve(weights)
    with torch.device("meta"):
        model = nn.ModuleDict({"first": nn.Linear(5, 5, bias=False), "second": nn.Linear(5, 5, bias=False)})
    model["second"].weight = model["first"].weight
    report = load(model, weights, "cuda:0")
    assert (report.way, report.tensors, report.bytes) == ("push", 1, 100)
    assert model["first"].weight is model["second"].weight
    assert bits(model["first"].weight) == bits(weights.view("second.weight"))
    assert gpu_of(cuda, model["first"].weight) == 0


def test_parameters_of_one_extent_that_are_no_tie_have_memory_each(
    daemon: FakeDaemon, weights: SharedWeights, cuda: FakeCuda
) -> None:
    model = nn.ParameterList([nn.Parameter(weights.view("first.bias")) for _ in range(2)])
    report = load(model, weights, "cuda:0", bound=True)
    assert (report.way, report.tensors) == ("push", 2)
    assert model[0].data_ptr() != model[1].data_ptr()
    for parameter in model:
        assert bits(parameter) == bits(weights.view("first.bias"))
        assert gpu_of(cuda, parameter) == 0


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.float8_e4m3fn, torch.float64, torch.complex64])
def test_parts_and_other_types_of_weights_travel_too(
    daemon: FakeDaemon, weights: SharedWeights, cuda: FakeCuda, dtype: torch.dtype
) -> None:
    """A slice of the first dimension is contiguous, wherever it begins."""
    whole = weights.view("first.weight")
    with torch.no_grad():
        parts = [whole[3:7].view(dtype), whole[1], whole[5:6], weights.view("far.weight").reshape(9)[:8].view(dtype)]
    model = nn.ParameterList([nn.Parameter(part, requires_grad=part.is_floating_point()) for part in parts])
    expected = [bits(part) for part in parts]
    report = load(model, weights, "cuda:0", bound=True)
    assert (report.way, report.tensors, report.ways["copy"]) == ("push", 4, 0)
    assert [bits(parameter) for parameter in model] == expected
    for parameter, part in zip(model, parts, strict=True):
        assert parameter.requires_grad is part.is_floating_point()
        assert gpu_of(cuda, parameter) == 0
        assert parameter.data_ptr() % parameter.itemsize == 0


def test_only_plain_contiguous_views_can_be_located(weights: SharedWeights) -> None:
    whole = weights.view("first.weight")
    assert weights.locate(whole) == weights.where("first.weight")
    assert weights.locate(whole.detach()[1:]) is not None
    pairs = whole.view(torch.complex64)
    others = [
        whole.T, whole[:, 1:], whole[::2], whole.expand(2, 40, 60), pairs.conj(), pairs.conj().imag, pairs.real,
        whole.clone(), whole[:0], torch.empty(3, device="meta"), whole.to_sparse(),
    ]  # fmt: skip
    assert [weights.locate(other) for other in others] == [None] * len(others)


def test_what_cannot_travel_is_copied_as_it_is(daemon: FakeDaemon, weights: SharedWeights, cuda: FakeCuda) -> None:
    """Beside what does."""
    whole = weights.view("first.weight")
    model = nn.ParameterDict({
        "plain": nn.Parameter(whole),
        "turned": nn.Parameter(whole.T),
        "conj": nn.Parameter(whole.view(torch.complex64).conj()),
    })  # fmt: skip
    expected = {name: parameter.detach().clone() for name, parameter in model.items()}
    load(model, weights, {"": "cpu", "plain": 0}, bound=True)
    for name, parameter in model.items():
        assert bits(parameter.resolve_conj()) == bits(expected[name].resolve_conj()), name
    assert gpu_of(cuda, model["plain"]) == 0


def test_parameters_have_version_counters_and_attributes_of_their_own(
    daemon: FakeDaemon, weights: SharedWeights
) -> None:
    model = on_meta()
    model.first.weight.note = "kept"
    model.first.bias.requires_grad_(False)
    load(model, weights, "cuda:0")
    assert (model.first.weight.note, model.first.bias.requires_grad) == ("kept", False)
    before = {name: parameter._version for name, parameter in model.named_parameters()}
    with torch.no_grad():
        model.first.weight.add_(1)
    assert [n for n, p in model.named_parameters() if p._version != before[n]] == ["first.weight"]


def test_a_loaded_model_is_saved_and_copied_like_any_other(
    daemon: FakeDaemon, weights: SharedWeights, tmp_path: Path
) -> None:
    """Its parameters lie in one allocation, but none is a part of another's storage."""
    model = on_meta()
    load(model, weights, "cuda:0")
    expected = {name: bits(weights.view(name)) for name in TENSORS}
    storages = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    assert len(storages) == len(TENSORS)
    assert all(parameter.untyped_storage().nbytes() == parameter.nbytes for parameter in model.parameters())
    save_file(model.state_dict(), tmp_path / "file")
    save_model(model, str(tmp_path / "model"))
    torch.save(model.state_dict(), tmp_path / "torch")
    copied = copy.deepcopy(model)
    assert not storages & {parameter.untyped_storage().data_ptr() for parameter in copied.parameters()}
    for state in (
        load_file(tmp_path / "file"),
        load_file(tmp_path / "model"),
        torch.load(tmp_path / "torch", weights_only=True),
        copied.state_dict(),
    ):
        assert {name: bits(tensor) for name, tensor in state.items()} == expected
    one = io.BytesIO()
    torch.save(model.second.bias, one)
    assert len(one.getvalue()) < 4096


def test_a_model_loaded_in_inference_mode_may_be_written_to_later(daemon: FakeDaemon, weights: SharedWeights) -> None:
    model = on_meta()
    with torch.inference_mode():
        load(model, weights, "cuda:0")
    with torch.no_grad():
        model.first.weight.add_(1)


def test_a_module_below_itself_is_entered_once(daemon: FakeDaemon, weights: SharedWeights, cuda: FakeCuda) -> None:
    model = on_meta()
    model.first.again = model
    assert load(model, weights, "cuda:0").way == "push"
    check(model, weights, cuda)


# --- what goes wrong -------------------------------------------------------------------------------------------------


def _state(model: nn.Module) -> list[int]:
    return [id(parameter) for parameter in model.parameters()]


def test_a_device_map_with_a_hole_sends_nothing_off(daemon: FakeDaemon, weights: SharedWeights) -> None:
    model = on_meta()
    before = _state(model)
    with pytest.raises(UsageError, match=r"no device for far\.weight"):
        load(model, weights, {"first": 0, "second": 1})
    assert _state(model) == before
    assert daemon.pushes == 0


@pytest.mark.parametrize("with_daemon", [True, False])
def test_no_memory_for_the_second_part_leaves_the_model_as_it_was(
    request: pytest.FixtureRequest, weights: SharedWeights, monkeypatch: pytest.MonkeyPatch, with_daemon: bool
) -> None:
    """And nothing waits for the rest of the first, nor is it freed before it is done."""
    if with_daemon:
        request.getfixturevalue("daemon")
    made: list[int] = []

    class Short(FakeShipment):
        def _allocate(self) -> None:
            made.append(1)
            if len(made) > 1:
                raise torch.OutOfMemoryError
            super()._allocate()

    monkeypatch.setattr(module, "Shipment", Short)
    monkeypatch.setattr(module, "_FIRST_BYTES", (1,))
    model = on_meta()
    before = _state(model)
    with pytest.raises(torch.OutOfMemoryError):
        load(model, weights, "cuda:0")
    assert _state(model) == before


@pytest.mark.parametrize("with_daemon", [True, False])
def test_what_a_load_without_room_had_is_free_at_once(
    request: pytest.FixtureRequest, weights: SharedWeights, monkeypatch: pytest.MonkeyPatch, with_daemon: bool
) -> None:
    """Not when the collector comes by: the next try wants it."""
    if with_daemon:
        request.getfixturevalue("daemon")
    made: list[weakref.ref[Any]] = []

    class Short(FakeShipment):
        def _allocate(self) -> None:
            if made:
                raise torch.OutOfMemoryError
            super()._allocate()
            made.extend([weakref.ref(self), *map(weakref.ref, self._memory)])

    monkeypatch.setattr(module, "Shipment", Short)
    monkeypatch.setattr(module, "_FIRST_BYTES", (1,))
    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(torch.OutOfMemoryError), Cargo(weights, Placement("cuda:0")) as cargo:
            cargo.depart(on_meta())
        del cargo
        assert made
        eventually("memory stays", lambda: all(each() is None for each in made))
    finally:
        gc.enable()


@pytest.mark.parametrize("nth", range(1, 7))
@pytest.mark.parametrize("with_daemon", [True, False])
def test_threads_that_cannot_be_started_leave_nothing_under_way(
    request: pytest.FixtureRequest, weights: SharedWeights, monkeypatch: pytest.MonkeyPatch, with_daemon: bool, nth: int
) -> None:
    """A push of which nobody saw the end would keep its memory."""
    if with_daemon:
        request.getfixturevalue("daemon")
    started: list[str] = []
    real = threading.Thread.start

    def start(self: threading.Thread) -> None:
        if self.name.startswith(("ftd-load", "ftd-pull")):
            started.append(self.name)
            if len(started) >= nth:
                raise RuntimeError("can't start new thread")
        real(self)

    monkeypatch.setattr(threading.Thread, "start", start)
    monkeypatch.setattr(module, "_FIRST_BYTES", (1, 1))
    model = on_meta()
    before = _state(model)
    try:
        load(model, weights, "cuda:0")
    except RuntimeError as error:
        assert "can't start" in str(error)
        assert _state(model) == before
    assert nth > 1 or started == ["ftd-load_0"]


def test_a_model_that_does_not_fit_stays_as_it_was(daemon: FakeDaemon, weights: SharedWeights) -> None:
    model = on_meta()
    model.extra = nn.Linear(2, 2, device="meta")
    before = _state(model)
    with pytest.raises(BindError):
        load(model, weights, "cuda:0")
    assert _state(model) == before


@pytest.mark.parametrize("bound", [True, False])
def test_a_device_that_refuses_leaves_the_model_as_it_was(weights: SharedWeights, cuda: FakeCuda, bound: bool) -> None:
    def fail(name: str, count: int) -> None:
        if name == "memcpy" and count == 2:
            raise CudaError("memcpy: no")

    cuda.before = fail
    model = on_meta()
    if bound:
        bind(model, weights)
    before = _state(model)
    with pytest.raises(CudaError, match="memcpy: no"):
        load(model, weights, "cuda:0", bound=bound)
    assert _state(model) == before
    assert not bound or all(bits(p) == bits(weights.view(name)) for name, p in model.named_parameters())
    cuda.before = lambda name, count: None
    assert load(model, weights, "cuda:0", bound=bound).way == "pull"
    check(model, weights, cuda)


@pytest.mark.usefixtures("daemon")
def test_no_room_on_the_second_gpu_leaves_the_model_as_it_was(
    weights: SharedWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(FakeShipment):
        def _allocate(self) -> None:
            if self._ordinal == 1:
                raise torch.OutOfMemoryError("CUDA out of memory")
            super()._allocate()

    monkeypatch.setattr(module, "Shipment", Full)
    model = on_meta()
    with pytest.raises(torch.OutOfMemoryError):
        load(model, weights, {"": 0, "far": 1})
    assert all(parameter.is_meta for parameter in model.parameters())


def test_without_a_gpu_nothing_travels(weights: SharedWeights, cuda: FakeCuda) -> None:
    model = on_meta()
    report = load(model, weights, "cpu")
    assert (report.way, cuda.calls, cuda.allocations) == ("copy", [], [])
    assert all(bits(parameter) == bits(weights.view(name)) for name, parameter in model.named_parameters())


def test_the_rest_follows_what_lies_first(
    daemon: FakeDaemon, weights: SharedWeights, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_FIRST_BYTES", (1, 1))
    model = on_meta()
    report = load(model, weights, "cuda:0")
    check(model, weights, cuda)
    assert report.ways["push"] == report.bytes
    assert daemon.pushes == 3
