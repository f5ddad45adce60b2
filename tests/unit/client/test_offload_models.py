"""Every model of the suite gives the resident model's bits from the first forward on, in every mode and phase."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import ftd_client
from ftd_client import OffloadConfig
from ftd_client.strategy import AllStreamed, Auto, EvenSpread
from tests.streamed_models import CASES, Call, made, tensors

NAME = "models"
#: Ways through the engine. Few blocks: what streams passes through as little memory as can be.
WAYS = {
    "allocation": {},
    "raw": {"transfer_mode": "raw_block_transfer", "skip_discovery": True},
    "strategy": {"transfer_mode": "strategy", "discovery_iters": 2, "load_strategy": EvenSpread()},
    "getter": {"profile_mode": "getter"},
    "function": {"profile_mode": "torch_function", "transfer_mode": "strategy"},
    "auto": {"load_strategy": Auto(), "num_blocks": 4, "min_blocks": 4},
}


@pytest.fixture(autouse=True)
def released() -> Iterator[None]:
    yield
    ftd_client.release(NAME)


def same(found: object, expected: object) -> bool:
    one, other = list(tensors(found)), list(tensors(expected))
    return len(one) == len(other) > 0 and all(
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b) for a, b in zip(one, other, strict=True)
    )


def run(call: Call, model: nn.Module) -> object:
    with torch.no_grad():
        return call.run(model)


#: Ways that every model goes; the others take turns. On a GPU every model goes every way.
FOR_ALL = ("allocation", "strategy")
PAIRS = [
    (name, way)
    for number, name in enumerate(CASES)
    for turn, way in enumerate(WAYS)
    if way in FOR_ALL or (number + turn) % 3 == 0
]


@pytest.mark.parametrize(("name", "way"), PAIRS)
def test_bits_are_those_of_the_resident_model(name: str, way: str) -> None:
    case = made(name)
    if case.shared and WAYS[way].get("transfer_mode") != "strategy":
        pytest.skip("block modes refuse it by name")
    resident = copy.deepcopy(case.model)
    before = {key: value.clone() for key, value in case.model.state_dict().items()}
    fields = {"num_blocks": 2, "min_blocks": 2, "load_strategy": AllStreamed(), "profiling_iters": 2} | WAYS[way]
    config = OffloadConfig(include_patterns=list(case.include), pinned_memory=False, **fields)
    model = ftd_client.offload(case.model, config, NAME)
    manager = ftd_client.get_offload_manager(NAME)
    for _ in range(manager.iters_before_inference + 3):
        for call in case.calls:
            assert same(run(call, model), run(call, resident)), (manager.phase, call)
    ftd_client.release(NAME)
    after = model.state_dict()
    assert all(torch.equal(after[key], value) for key, value in before.items())
    assert not [path for path, module in model.named_modules() if "forward" in vars(module)]
    for call in case.calls:
        assert same(run(call, model), run(call, resident)), "released"
