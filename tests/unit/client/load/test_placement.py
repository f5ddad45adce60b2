"""Which device each part of a model goes to."""

from __future__ import annotations

import pytest
import torch

from ftd.errors import UsageError
from ftd.owner import Owner
from ftd.shm.slots import SlotRecord, decode_slot, encode_slot
from ftd_client.load.placement import Placement


@pytest.fixture(autouse=True)
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)


CUDA = [torch.device("cuda", index) for index in range(2)]
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("device", "expected"),
    [("cpu", CPU), ("cuda:0", CUDA[0]), (1, CUDA[1]), (torch.device("cuda", 1), CUDA[1]), ("cuda", CUDA[1])],
)
def test_one_device_is_for_everything(device: str | int | torch.device, expected: torch.device) -> None:
    placement = Placement(device)
    assert placement.of("a.b.c") == placement.of("") == expected
    assert placement.of("a").index == expected.index, "a GPU is one in particular"
    assert (str(placement), placement.has_gpus) == (str(expected), expected.type == "cuda")


def test_the_longest_name_counts_and_only_whole_names_do() -> None:
    placement = Placement(
        {"": "cpu", "layers": 0, "layers.1": "cuda:1", "layers.1.norm.weight": "cpu", "layers.1.mlp": 0}
    )
    assert placement.of("lm_head.weight") == placement.of("layer.weight") == CPU
    assert placement.of("layers.10.weight") == CUDA[0]
    assert placement.of("layers.1.weight") == CUDA[1]
    assert placement.of("layers.1.norm.weight") == CPU
    assert placement.of("layers.1.norm.bias") == CUDA[1]
    assert placement.of("layers.1.mlp.up.weight") == CUDA[0]
    assert (str(placement), placement.has_gpus) == ("cpu, cuda:0, cuda:1", True)


def test_what_the_map_leaves_out_is_named() -> None:
    placement = Placement({"layers": "cpu", "norm": 0})
    with pytest.raises(UsageError, match=r"no device for lm_head\.weight: layers, norm found") as caught:
        placement.of("lm_head.weight")
    assert "''" in caught.value.remedy
    with pytest.raises(UsageError, match="no device for x"):
        Placement({}).of("x")


@pytest.mark.parametrize("device", ["cuda:2", "disk", "meta", 2, -1, True, 1.5, None, "cuda:-1"])
def test_a_device_that_is_none_is_refused(device: object) -> None:
    for given in (device, {"": "cpu", "layers": device}):
        with pytest.raises(UsageError, match="expected") as caught:
            Placement(given)  # type: ignore[arg-type]
        assert caught.value.remedy


def test_a_slot_has_room_for_what_it_says_of_any_number_of_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 72)
    placement = Placement({str(number): number for number in range(72)})
    most = (1 << 63) - 1
    owner = Owner(b"b" * 16, most, most, most, most)
    record = SlotRecord(owner, "attached", placement.brief, most, most, most, most, most, most, most, "staged")
    assert decode_slot(encode_slot(record)) == record, "plain text"
    assert len(encode_slot(record)) <= 232
    assert placement.brief.startswith("cuda:0, cuda:1")
    assert placement.brief.endswith("...")
    eight = Placement({str(number): number for number in range(8)})
    assert eight.brief == str(eight)
