"""Loading to a real GPU: by push, by pull, and through the death of either end."""

from __future__ import annotations

import os
import random
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ftd_client
from tests.gpu.conftest import Start, ftd, start_daemon, status_of
from tests.gpu.load_case import SHAPE, checkpoint, differing, load_once, loaders, on_meta

safetensors_torch = pytest.importorskip("safetensors.torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible"),
]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

MODEL_BYTES = 24 * 2 * SHAPE[0] * SHAPE[1]
BOUND_S = 30


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stack") / "model.safetensors"
    safetensors_torch.save_file(checkpoint(), path)
    return path


@pytest.fixture(scope="module")
def pushing(model: Path) -> Iterator[str]:
    """A namespace whose daemon pushes, for the tests that leave it alive."""
    namespace = f"gpu-{uuid.uuid4().hex[:8]}"
    try:
        status = start_daemon(namespace, model, "pin=cuda")
        assert (status["pin"], status["push"]) == ("cuda", [])
        yield namespace
    finally:
        ftd("stop", "-n", namespace, "--force")


@pytest.fixture(autouse=True)
def memory_comes_back() -> Iterator[None]:
    yield
    torch.cuda.empty_cache()


def eventually(what: str, condition: Callable[[], bool]) -> None:
    until = time.monotonic() + BOUND_S
    while not condition():
        assert time.monotonic() < until, what
        time.sleep(0.01)


def free_bytes(device: int = 0) -> int:
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def name_of(device: int) -> str:
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def right(did: dict[str, Any], way: str) -> bool:
    assert (did["way"], did["wrong"]) == (way, []), did
    return True


# --- with a daemon that lives ----------------------------------------------------------------------------------------


def test_push_is_bit_equal_again_and_again_and_status_shows_it(pushing: str) -> None:
    before = {row["gpu"]: row["pushed_bytes"] for row in status_of(pushing)["push"]}.get(name_of(0), 0)
    current = torch.cuda.current_device()
    with ftd_client.attach(pushing) as weights:
        for _ in range(3):
            did = load_once(weights, "cuda:0")
            assert right(did, "push")
            assert did["why"] == ""
    assert torch.cuda.current_device() == current
    (row,) = [row for row in status_of(pushing)["push"] if row["gpu"] == name_of(0)]
    assert row["clients"] == 0
    assert row["pushed_bytes"] - before >= 3 * MODEL_BYTES


def test_what_was_changed_in_place_before_arrives_changed(pushing: str) -> None:
    model = on_meta()
    with ftd_client.attach(pushing) as weights, ftd_client.attach(pushing) as others:
        weights.bind(model)
        with torch.no_grad():
            model.layers[3].weight[5, 7] = 42.0
            model.small[2].bias.data.fill_(7.0)
            model.layers[9].weight.view(torch.int16).numpy()[-1, -1] ^= 1
        report = weights.load(model, "cuda:0")
        assert (report.way, report.why) == ("push", "")
        assert differing(model, weights.state_dict()) == []
        changed = set(differing(model, others.state_dict()))
    assert {"layers.3.weight", "layers.9.weight", "small.2.bias"} <= changed
    assert model.layers[3].weight[5, 7].item() == 42.0
    assert len(changed) < 50, "only what shares their pages"
    assert model.head.weight is model.layers[0].weight


def test_parameters_are_aligned_and_share_nothing_but_their_allocation(pushing: str, tmp_path: Path) -> None:
    model = on_meta()
    with ftd_client.attach(pushing) as weights:
        weights.load(model, "cuda:0")
        views = weights.state_dict()
    assert all(parameter.data_ptr() % 512 == 0 for parameter in model.parameters())
    assert all(parameter.untyped_storage().nbytes() == parameter.nbytes for parameter in model.parameters())
    few = {name: tensor for name, tensor in model.state_dict().items() if name.startswith(("small", "scale"))}
    assert len({tensor.dtype for tensor in few.values()}) == 2
    torch.save(few, tmp_path / "few")
    assert (tmp_path / "few").stat().st_size < 1 << 20
    safetensors_torch.save_model(model.small, str(tmp_path / "small"))
    for name, tensor in torch.load(tmp_path / "few", weights_only=True).items():
        assert torch.equal(tensor.cpu().view(torch.int16), views[name].view(torch.int16)), name
    versions = {name: parameter._version for name, parameter in model.named_parameters()}
    with torch.no_grad():
        model.layers[1].weight.zero_()
    assert [name for name, p in model.named_parameters() if p._version != versions[name]] == ["layers.1.weight"]


def test_memory_of_a_model_that_is_gone_comes_back(pushing: str) -> None:
    """The daemon has let go of it too."""
    with ftd_client.attach(pushing) as weights:
        load_once(weights, "cuda:0")
        before = free_bytes()
        for _ in range(3):
            load_once(weights, "cuda:0")
    eventually("the memory to come back", lambda: free_bytes() >= before - (64 << 20))


def test_four_followers_at_once_are_all_right(pushing: str) -> None:
    with loaders(pushing, *["cuda:0"] * 4, times=3) as made:
        for each in made:
            each.go()
        for each in made:
            assert all(right(did, "push") for did in each.rest())


def test_memory_that_cannot_be_exported_is_pulled_into(pushing: str) -> None:
    options = dict.fromkeys(("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"), "expandable_segments:True")
    with loaders(pushing, "cuda:0", **options) as (follower,):
        follower.go()
        (did,) = follower.rest()
    assert right(did, "pull")
    assert "cannot be exported" in did["why"]


def test_a_follower_killed_in_the_middle_hurts_nobody(pushing: str) -> None:
    """Nor does the daemon keep its memory."""
    with ftd_client.attach(pushing) as weights:
        load_once(weights, "cuda:0")
        before = free_bytes()
        for turn in range(3):
            with loaders(pushing, "cuda:0", "cuda:0", times=100) as (victim, other):
                victim.go()
                other.go()
                assert right(victim.next(), "push")
                time.sleep(random.Random(turn).uniform(0, 0.2))
                victim.process.kill()
                victim.process.wait()
                assert all(right(other.next(), "push") for _ in range(2))
        assert right(load_once(weights, "cuda:0"), "push")
        eventually("the memory to come back", lambda: free_bytes() >= before - (64 << 20))
    assert status_of(pushing)["state"] == "ready"
    eventually("their pushes to end", lambda: all(row["clients"] == 0 for row in status_of(pushing)["push"]))


@two_gpus
def test_two_gpus_load_at_once_by_a_device_map(pushing: str) -> None:
    model = on_meta()
    devices = {"": "cuda:0", **{f"layers.{number}": number % 2 for number in range(1, 24)}, "small": "cuda:1"}
    current = torch.cuda.current_device()
    with ftd_client.attach(pushing) as weights:
        report = weights.load(model, devices)
        assert (report.way, report.why) == ("push", "")
        assert differing(model, weights.state_dict()) == []
    assert torch.cuda.current_device() == current
    assert {model.layers[number].weight.device.index for number in (2, 4)} == {0}
    assert model.layers[3].weight.device.index == model.small[0].weight.device.index == 1
    assert {name_of(0), name_of(1)} <= {row["gpu"] for row in status_of(pushing)["push"]}


# --- with a daemon of one's own --------------------------------------------------------------------------------------


def test_a_daemon_that_may_not_push_is_pulled_from(model: Path, name: str, start: Start) -> None:
    assert start(model, "pin=cuda", "push=never")["push"] == []
    with ftd_client.attach(name) as weights:
        for _ in range(2):
            did = load_once(weights, "cuda:0")
            assert right(did, "pull")
            assert "push: never" in did["why"]
    assert status_of(name)["push"] == []


@two_gpus
def test_no_context_is_made_on_a_gpu_that_nobody_loads_to(model: Path, name: str, start: Start) -> None:
    torch.empty(1, device="cuda:1")
    start(model, "pin=cuda", "device=0")
    before = free_bytes(1)
    with ftd_client.attach(name) as weights:
        assert right(load_once(weights, "cuda:0"), "push")
        assert free_bytes(1) >= before - (64 << 20)
        assert right(load_once(weights, "cuda:1"), "push")
    assert {row["gpu"] for row in status_of(name)["push"]} == {name_of(0), name_of(1)}


def test_a_stopped_daemon_is_pulled_from_within_seconds(model: Path, name: str, start: Start) -> None:
    pid = start(model, "pin=cuda")["pid"]
    with ftd_client.attach(name) as weights:
        os.kill(pid, signal.SIGSTOP)
        try:
            did = load_once(weights, "cuda:0")
        finally:
            os.kill(pid, signal.SIGCONT)
        assert right(did, "pull")
        assert "did not answer status" in did["why"]
        assert did["seconds"] < 10
        assert right(load_once(weights, "cuda:0"), "push")


@pytest.mark.parametrize("turn", range(2))
def test_a_daemon_killed_in_the_middle_costs_time_and_no_bit(model: Path, name: str, start: Start, turn: int) -> None:
    """And leaves no error in torch, which the follower tries at its end."""
    pid = start(model, "pin=cuda")["pid"]
    with loaders(name, "cuda:0", "cuda:0", times=1000) as made:
        for each in made:
            each.go()
        for each in made:
            assert right(each.next(), "push")
        time.sleep(random.Random(turn).uniform(0, 0.1))
        os.kill(pid, signal.SIGKILL)
        for each in made:
            done = each.rest()
            assert [did["wrong"] for did in done if did["wrong"]] == []
            assert done[-1]["lost"] == "died"
            assert done[-1]["way"] == "pull"
            assert "and it lives" not in str([did["why"] for did in done])
