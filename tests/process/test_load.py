"""`load` and `files` never show anything but the generation that the follower holds."""

from __future__ import annotations

import copy
import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import ftd_client
from ftd.errors import BindError, SegmentError, UsageError
from ftd.shm.names import Names
from ftd.shm.slots import holders
from tests.process.daemons import Daemon, ftd, wait_for

Start = Callable[..., Daemon]


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)
        self.register_buffer("seen", torch.zeros(2))


def checkpoint(folder: Path, value: float) -> Path:
    folder.mkdir()
    tensors = {name: torch.full_like(tensor, value) for name, tensor in Small().state_dict().items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(f'{{"value": {value}}}')
    return folder


def on_meta() -> Small:
    with torch.device("meta"):
        return Small()


@pytest.fixture
def ones(start: Start, tmp_path: Path) -> Daemon:
    return start("--model", checkpoint(tmp_path / "ones", 1.0))


def equal(model: nn.Module, weights: ftd_client.Follower) -> bool:
    views = weights.state_dict()
    return all(torch.equal(tensor, views[name]) for name, tensor in model.state_dict().items())


def test_a_model_with_values_of_its_own_is_not_taken_for_loaded(ones: Daemon, namespace: str) -> None:
    model = Small()
    before = copy.deepcopy(model.state_dict())
    with ftd_client.attach(namespace) as weights:
        with pytest.raises(BindError, match="do not fit"):
            weights.load(model, "cpu")
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
        weights.load(model, "cpu", replace=True)
        assert equal(model, weights)


def test_a_bound_model_is_moved_as_it_is(ones: Daemon, namespace: str) -> None:
    """What was changed in place after bind goes along."""
    model = on_meta()
    with ftd_client.attach(namespace) as weights:
        weights.bind(model)
        with torch.no_grad():
            model.fc.bias.fill_(7)
        weights.load(model, "cpu")
        assert model.fc.bias.tolist() == [7.0] * 3
        assert weights.state_dict()["fc.weight"].data_ptr() != model.fc.weight.data_ptr()
    with ftd_client.attach(namespace) as other:
        assert other.state_dict()["fc.bias"].tolist() == [1.0] * 3


def test_a_model_that_another_follower_bound_is_real_to_this_one(ones: Daemon, namespace: str) -> None:
    """Accepted with the weights' own values, refused with values that it has changed."""
    model = on_meta()
    with ftd_client.attach(namespace) as first, ftd_client.attach(namespace) as second:
        assert first.manifest is second.manifest  # decoding it is most of what attaching costs
        first.bind(model)
        second.bind(model)
        with torch.no_grad():
            model.fc.bias.fill_(7)
        with pytest.raises(BindError, match=r"fc\.bias: a real parameter on cpu of other values"):
            first.load(model, "cpu", shard=lambda name, shape: None)
        assert model.fc.bias.tolist() == [7.0] * 3


@pytest.mark.parametrize("device", ["gpu", "meta", "cuda:99", 3.5])
def test_a_device_that_is_none_leaves_the_model_alone(ones: Daemon, namespace: str, device: object) -> None:
    model = on_meta()
    with ftd_client.attach(namespace) as weights:
        with pytest.raises(UsageError, match="found"):
            weights.load(model, device)  # type: ignore[arg-type]
        assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("timeout", [float("nan"), float("inf"), -1, "5"])
def test_a_timeout_that_is_none_is_refused(namespace: str, timeout: object) -> None:
    with pytest.raises(UsageError, match="timeout"):
        ftd_client.attach(namespace, timeout=timeout)  # type: ignore[arg-type]


def test_files_are_never_those_of_the_next_daemon(ones: Daemon, start: Start, namespace: str, tmp_path: Path) -> None:
    """SH-13: after an orderly stop generations count from 1 again, under the same names."""
    with ftd_client.attach(namespace) as weights:
        assert weights.files()["config.json"] == b'{"value": 1.0}'
        ftd("stop", "-n", namespace)
        start("--model", checkpoint(tmp_path / "twos", 2.0))
        with ftd_client.attach(namespace) as later:
            assert (weights.generation, later.generation) == (1, 1)
            assert later.files()["config.json"] == b'{"value": 2.0}'
        with pytest.raises(SegmentError, match="retired"):
            weights.files()
        assert weights.state_dict()["fc.bias"].tolist() == [1.0] * 3


def test_a_dropped_follower_keeps_its_lease_as_long_as_a_tensor_and_no_longer(ones: Daemon, namespace: str) -> None:
    threads = threading.active_count()
    bias = ftd_client.attach(namespace).state_dict()["fc.bias"]
    gc.collect()
    assert [holder.record.owner.pid for holder in holders(Names(namespace)) if holder.record] == [os.getpid()]
    assert bias.tolist() == [1.0] * 3
    del bias
    gc.collect()
    wait_for("the lease to be given back", lambda: not holders(Names(namespace)))
    wait_for("the heartbeat to end", lambda: threading.active_count() == threads)


def test_close_beside_heartbeats_never_writes_to_another_file(ones: Daemon, namespace: str, tmp_path: Path) -> None:
    """A closed descriptor's number is the next file's: whoever closes and whoever writes take turns."""
    for turn in range(20):
        weights = ftd_client.attach(namespace)
        seat = weights._seat
        stop = threading.Event()

        def beat(seat: object = seat, stop: threading.Event = stop) -> None:
            while not stop.is_set():
                seat.tell()  # type: ignore[attr-defined]

        beating = threading.Thread(target=beat)
        beating.start()
        weights.close()
        victims = [open(tmp_path / f"{turn}-{index}", "wb+") for index in range(4)]  # noqa: SIM115
        stop.set()
        beating.join()
        assert all(os.fstat(victim.fileno()).st_size == 0 for victim in victims)
        for victim in victims:
            victim.close()


def test_a_list_that_holds_a_parameter_is_named(ones: Daemon, namespace: str) -> None:
    model = Small()
    model.kept = [model.fc.weight]
    with ftd_client.attach(namespace) as weights, pytest.raises(BindError) as caught:
        weights.bind(model, replace=True)
    assert any(problem.startswith("kept: a plain list") for problem in caught.value.problems)
