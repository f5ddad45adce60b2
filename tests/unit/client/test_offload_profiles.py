"""Stored profiles: a model that was measured once starts in inference, and one that was not is told why."""

from __future__ import annotations

import copy
import functools
import json
import logging
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ftd_client
from ftd.plan.profile import Profile, ProfileMismatchError, decode
from ftd.plan.store import ProfileMissingError, ProfileStorageError
from ftd.plan.strictjson import ProfileError
from ftd_client.stream.units import OffloadError
from tests.streamed_blocks import D, Stack

from .offloading import NAME, beside, config, equal, offloaded, released, run, stack, to_inference, untouched, x

pytestmark = pytest.mark.usefixtures(released.__name__)


class Backwards(Stack):
    """An order that only forwards tell."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in reversed(self.layers):
            x = layer(x)
        return self.head(x)


@functools.cache
def usual() -> tuple[str, bytes]:
    """Name and contents of the profile of the usual model."""
    with tempfile.TemporaryDirectory() as directory:
        path = saved(Path(directory), stack(kind=Backwards))
        return path.name, path.read_bytes()


def saved(directory: Path, model: nn.Module | None = None, **fields: Any) -> Path:
    """A profile of the model, which is released again."""
    if model is None and not fields:
        name, data = usual()
        directory.mkdir(exist_ok=True)
        path = directory / name
        path.write_bytes(data)
        return path
    model = model or stack(kind=Backwards)
    manager = offloaded(model, **fields)
    to_inference(manager, model)
    path = ftd_client.save_profile(directory, NAME)
    manager.release()
    return path


def profile(path: Path) -> Profile:
    return decode(path.read_bytes())


# --- there and back ----------------------------------------------------------------------------------------------


def test_offload_from_profile_begins_in_inference_with_the_order_that_was_measured(tmp_path: Path) -> None:
    path = saved(tmp_path)
    assert path.parent == tmp_path
    model = stack(kind=Backwards)
    resident = copy.deepcopy(model)
    assert ftd_client.offload_from_profile(model, tmp_path, config(profiling_iters=50), NAME) is model
    manager = ftd_client.get_offload_manager(NAME)
    assert (manager.phase, manager.iters_before_inference) == ("inference", 0)
    assert list(dict.fromkeys(name.split(".")[1] for name in manager.offload_units())) == list("3210")
    for _ in range(3):
        assert equal(model, resident)
    assert manager.phase == "inference"


def test_the_profile_holds_what_was_measured(tmp_path: Path) -> None:
    found = profile(saved(tmp_path, profiling_iters=4))
    assert found.forwards == 4
    assert len(found.order) == len(found.compute_ns) == 12
    assert all(span > 0 for span in found.compute_ns)
    assert found.order[0] == "layers.3.norm"
    assert found.identity.config["include_patterns"] == ["layers.*"]
    assert found.identity.torch == torch.__version__
    assert found.identity.device.startswith("cpu")


@pytest.mark.parametrize("forwards", [0, 1, 2, 5])
def test_load_profile_jumps_to_inference_from_any_phase(tmp_path: Path, forwards: int) -> None:
    saved(tmp_path)
    model = stack(kind=Backwards)
    manager, resident = beside(model)
    for _ in range(forwards):
        run(model)
    ftd_client.load_profile(tmp_path, name=NAME)
    assert manager.phase == "inference"
    assert equal(model, resident)


def test_load_profile_offloads_the_model_that_it_is_given(tmp_path: Path) -> None:
    saved(tmp_path)
    model = stack(kind=Backwards)
    resident = copy.deepcopy(model)
    ftd_client.init(config(), NAME)
    ftd_client.load_profile(tmp_path, model, NAME)
    assert ftd_client.get_offload_manager(NAME).phase == "inference"
    assert equal(model, resident)
    with pytest.raises(OffloadError, match="has another model than the one given"):
        ftd_client.load_profile(tmp_path, stack(), NAME)


class Marked(Stack):
    """Blocks by hand, and a weight that another layer reads."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with ftd_client.offload_block("front", NAME):
            x = self.layers[0](self.layers[1](x))
        x = x + x @ self.layers[2].up.weight.t() @ self.layers[2].down.weight.t()
        return self.head(self.layers[3](x))


class Unread(Stack):
    """One layer that nothing reaches, and one that is called twice."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for at in (0, 1, 3, 0):
            x = self.layers[at](x)
        return self.head(x)


@pytest.mark.parametrize(("kind", "by_hand"), [(Marked, False), (Marked, True), (Unread, False)])
def test_what_discovery_found_is_restored(tmp_path: Path, kind: type[Stack], by_hand: bool) -> None:
    fields: dict[str, Any] = {"include_patterns": []} if by_hand else {}
    measured = stack(kind=kind)
    manager = offloaded(measured, **fields)
    to_inference(manager, measured)
    found = sorted(manager.offload_units()), sorted(manager.resident_units()), manager.get_gpu_memory_usage()
    manager.save_profile(tmp_path)
    manager.release()
    model = stack(kind=kind)
    resident = copy.deepcopy(model)
    ftd_client.offload_from_profile(model, tmp_path, config(**fields), NAME)
    assert (sorted(manager.offload_units()), sorted(manager.resident_units()), manager.get_gpu_memory_usage()) == found
    for _ in range(3):
        assert equal(model, resident)
    manager.release()
    assert equal(model, resident)


def test_an_expert_that_no_profile_has_seen_is_taken_in(tmp_path: Path) -> None:
    class Chooses(Stack):
        def forward(self, x: torch.Tensor, order: tuple[int, ...] = (0, 1)) -> torch.Tensor:
            for at in order:
                x = self.layers[at](x)
            return self.head(x)

    saved(tmp_path, stack(kind=Chooses))
    model = stack(kind=Chooses)
    resident = copy.deepcopy(model)
    ftd_client.offload_from_profile(model, tmp_path, config(), NAME)
    for order in ((0, 1), (0, 2, 1), (3,), (0, 2, 1)):
        assert equal(model, resident, x(), order)


# --- where -------------------------------------------------------------------------------------------------------


def test_the_storage_directory_is_where_profiles_go_by_themselves_and_come_from(tmp_path: Path) -> None:
    directory = tmp_path / "made" / "on demand"
    model = stack()
    manager = offloaded(model, profile_storage_dir=str(directory))
    assert not directory.exists()
    to_inference(manager, model)
    (stored,) = directory.glob("*.profile.json")
    first = stored.read_bytes()
    assert ftd_client.save_profile(name=NAME) == stored
    assert profile(stored).order == decode(first).order
    manager.release()
    ftd_client.offload(model, config(profile_storage_dir=str(directory)), NAME)
    manager.load_profile()
    assert manager.phase == "inference"


def test_a_stored_profile_alone_changes_no_phase(tmp_path: Path) -> None:
    saved(tmp_path)
    manager = offloaded(stack(kind=Backwards), profile_storage_dir=str(tmp_path), profiling_iters=3)
    assert (manager.phase, manager.iters_before_inference) == ("discovery", 4)


def test_read_only_stores_nothing_and_says_so_when_asked(tmp_path: Path) -> None:
    saved(tmp_path / "there")
    model = stack(kind=Backwards)
    manager = offloaded(model, profile_storage_dir=str(tmp_path / "not"), profile_read_only=True)
    to_inference(manager, model)
    assert not (tmp_path / "not").exists()
    with pytest.raises(OffloadError, match="profile_read_only") as caught:
        manager.save_profile(tmp_path / "not")
    assert caught.value.remedy == "set profile_read_only=False"
    assert not (tmp_path / "not").exists()
    manager.load_profile(tmp_path / "there")


@pytest.mark.parametrize("call", ["save_profile", "load_profile"])
def test_without_a_directory_both_say_so(call: str) -> None:
    model = stack()
    manager = offloaded(model)
    to_inference(manager, model)
    with pytest.raises(OffloadError, match="no directory for profiles"):
        getattr(manager, call)()


@pytest.mark.parametrize("forwards", [0, 1])
def test_nothing_is_saved_before_it_is_measured(tmp_path: Path, forwards: int) -> None:
    model = stack()
    manager = offloaded(model, profiling_iters=3)
    for _ in range(forwards):
        run(model)
    with pytest.raises(OffloadError, match="nothing is measured of Stack yet") as caught:
        manager.save_profile(tmp_path)
    assert caught.value.remedy == f"run {4 - forwards} more forwards first"
    assert not list(tmp_path.iterdir())


def test_a_directory_that_cannot_be_written_is_a_warning_by_itself_and_an_error_when_asked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    model = stack()
    manager, resident = beside(model, profile_storage_dir=str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING, "ftd"):
        to_inference(manager, model)
    assert [r for r in caplog.records if r.getMessage().startswith("the profile is not stored: ")]
    assert equal(model, resident)
    with pytest.raises(ProfileStorageError):
        manager.save_profile()


# --- what does not fit -------------------------------------------------------------------------------------------


def test_there_is_none(tmp_path: Path) -> None:
    model = stack()
    before = list(model.named_parameters())
    with pytest.raises(ProfileMissingError, match="no profile in") as caught:
        ftd_client.offload_from_profile(model, tmp_path, config(), NAME)
    assert isinstance(caught.value, FileNotFoundError)
    assert untouched(model, before)
    assert ftd_client.get_offload_manager(NAME).phase == "idle"


DIFFERENT: dict[str, tuple[Any, dict[str, Any], list[str]]] = {
    "a layer more": (lambda: stack(count=5, kind=Backwards), {}, ["fingerprint"]),
    "another shape": (lambda: stack(*(nn.Linear(D, D) for _ in range(4)), kind=Backwards), {}, ["fingerprint"]),
    "another type": (lambda: stack(kind=Backwards).to(torch.float64), {}, ["fingerprint"]),
    "other patterns": (
        lambda: stack(kind=Backwards),
        {"include_patterns": ["layers.?"]},
        ["include_patterns"],
    ),
    "another transfer": (lambda: stack(kind=Backwards), {"transfer_mode": "raw_block_transfer"}, ["transfer_mode"]),
    "three at once": (
        lambda: stack(count=5, kind=Backwards),
        {"transfer_mode": "strategy", "exclude_patterns": ["layers.*.norm"]},
        ["fingerprint", "transfer_mode", "exclude_patterns"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_profile_of_something_else_is_refused_with_every_difference(tmp_path: Path, name: str) -> None:
    saved(tmp_path)
    build, fields, named = DIFFERENT[name]
    model = build()
    before = list(model.named_parameters())
    with pytest.raises(ProfileMismatchError) as caught:
        ftd_client.offload_from_profile(model, tmp_path, config(**fields), NAME)
    assert len(caught.value.differences) == len(named)
    for field in named:
        assert any(field in line for line in caught.value.differences), field
    assert untouched(model, before)


def test_a_profile_of_another_device_and_torch_is_refused_with_both(tmp_path: Path) -> None:
    path = saved(tmp_path)
    text = json.loads(path.read_text())
    text["device"], text["torch"] = "NVIDIA H200", "1.0"
    path.write_text(json.dumps(text))
    model = stack(kind=Backwards)
    manager, resident = beside(model)
    run(model)
    with pytest.raises(ProfileMismatchError) as caught:
        manager.load_profile(tmp_path)
    assert len(caught.value.differences) == 2
    assert "NVIDIA H200" in str(caught.value) and "1.0" in str(caught.value)
    assert manager.phase == "profiling", "the model goes on as before"
    assert equal(model, resident)


def test_what_only_changes_the_plan_may_differ(tmp_path: Path) -> None:
    saved(tmp_path)
    model = stack(kind=Backwards)
    resident = copy.deepcopy(model)
    fields: dict[str, Any] = {"num_blocks": 3, "load_strategy": None, "max_gpu_mem_fraction": 0.5, "profiling_iters": 9}
    ftd_client.offload_from_profile(model, tmp_path, config(**fields), NAME)
    assert ftd_client.get_offload_manager(NAME).phase == "inference"
    assert equal(model, resident)


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text["order"].append(["layers.9.up", 1]),
        lambda text: text["regions"].update({"made": ["layers.9.weight"]}),
        lambda text: text["regions"].update({"made": ["layers.0.up.weight"], "again": ["layers.0.up.weight"]}),
    ],
    ids=["a unit", "a parameter", "a parameter twice"],
)
def test_a_profile_that_names_what_the_model_has_not_changes_nothing(tmp_path: Path, damage: Any) -> None:
    path = saved(tmp_path)
    text = json.loads(path.read_text())
    damage(text)
    path.write_text(json.dumps(text))
    model = stack(kind=Backwards)
    manager, resident = beside(model)
    run(model)
    with pytest.raises(ProfileError):
        manager.load_profile(tmp_path)
    assert manager.phase == "profiling"
    for _ in range(4):
        assert equal(model, resident)
    assert manager.phase == "inference"


def test_loading_inside_of_a_forward_is_refused(tmp_path: Path) -> None:
    class Loads(Stack):
        load: Path | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.load is not None:
                ftd_client.load_profile(self.load, name=NAME)
            return super().forward(x)

    saved(tmp_path, stack(kind=Loads))
    model = stack(kind=Loads)
    manager, resident = beside(model)
    Loads.load = tmp_path
    try:
        with pytest.raises(OffloadError, match=r"load_profile\(\) was called from inside"):
            run(model)
    finally:
        Loads.load = None
    assert equal(model, resident)
    del manager
