"""What sets off for a model that takes other names, slices or types: what it will show, and nothing in vain."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ftd_client.bind import fit
from ftd_client.choose import choose
from ftd_client.load.cargo import Cargo
from ftd_client.load.move import MoveReport, move
from ftd_client.load.placement import Placement
from ftd_client.plan import uncast
from ftd_client.ranks import Rank
from ftd_client.views import SharedWeights
from tests.fake_cuda import FakeCuda
from tests.unit.client.load.served import FakeDaemon, bounded
from tests.unit.client.load.test_cargo import Model, cuda, daemon, gpu_of, on_meta, weights
from tests.unit.client.weights import bits

__all__ = ["cuda", "daemon", "weights"]  # fixtures


def load(model: nn.Module, weights: SharedWeights) -> MoveReport:
    """As `Follower.load` does."""

    def run() -> MoveReport:
        with Cargo(weights, Placement("cuda:0")) as cargo:
            cargo.depart(model)
            return move(model, Placement("cuda:0"), cargo, fit(model, weights))

    return bounded(run)


def chosen(weights: SharedWeights, key_map: Any, shard: Any, rank: Rank | None = None) -> SharedWeights:
    return weights.select(choose(weights.specs, key_map, shard, rank))


def shipped(report: MoveReport) -> int:
    """By whichever way: where threads get no turn for too long, a push counts as lost and the weights are pulled."""
    return sum(nbytes for way, nbytes in report.ways.items() if way != "copy")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_gets_its_slices_at_aligned_addresses(
    daemon: FakeDaemon, weights: SharedWeights, cuda: FakeCuda, rank: int
) -> None:
    """Rows of 240 bytes and a bias of 4-byte elements: no slice starts at a multiple of 512 in the segment."""
    with torch.device("meta"):
        model = Model()
        model.first = nn.Linear(60, 20)
    selected = chosen(weights, None, {"first": 0}, Rank(rank, 2))
    report = load(model, selected)
    rows = slice(20 * rank, 20 * rank + 20)
    for name, parameter in model.named_parameters():
        whole = weights.view(name)
        assert bits(parameter) == bits(whole[rows] if name.startswith("first") else whole), name
        assert gpu_of(cuda, parameter) == 0
        assert parameter.data_ptr() % 512 == 0
    assert shipped(report) == sum(p.nbytes for p in model.parameters())


class Renamed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Model()


def test_what_has_another_name_is_found_by_it(daemon: FakeDaemon, weights: SharedWeights, cuda: FakeCuda) -> None:
    with torch.device("meta"):
        model = Renamed()
    report = load(model, chosen(weights, {"": "body"}, None))
    for name, parameter in model.body.named_parameters():
        assert bits(parameter) == bits(weights.view(name))
        assert gpu_of(cuda, parameter) == 0
    assert shipped(report) == sum(p.nbytes for p in model.parameters())


def test_names_that_swap_are_not_mistaken(daemon: FakeDaemon, weights: SharedWeights, cuda: FakeCuda) -> None:
    """Each name is one of the checkpoint too: by it the other tensor would be shipped."""
    with torch.device("meta"):
        model = Model()
        model.first, model.far = model.far, model.first
    load(model, chosen(weights, {"first": "far", "far": "first"}, None))
    for name in ("weight", "bias"):
        assert bits(getattr(model.first, name)) == bits(weights.view(f"far.{name}"))
        assert bits(getattr(model.far, name)) == bits(weights.view(f"first.{name}"))


def test_what_is_cast_is_not_shipped_before(daemon: FakeDaemon, weights: SharedWeights, cuda: FakeCuda) -> None:
    for name in weights.specs:
        if weights.view(name).dtype == torch.float32:  # random bytes may be beyond bfloat16
            weights.view(name).uniform_()
    model = on_meta()

    def run() -> None:
        with Cargo(uncast(weights, torch.bfloat16), Placement("cuda:0")) as cargo:
            cargo.depart(model)
            given = fit(model, weights, dtype=torch.bfloat16)
            gpu = torch.device("cuda:0")
            taken = {match.group.name: cargo.take(match.group, gpu, match) for match in given.plan.parameters}
            assert sum(cargo.arrive().values()) == sum(weights.specs[f"second.{n}"].nbytes for n in ("weight", "bias"))
            for name, parameter in taken.items():
                shown = name.startswith("second")
                assert (parameter is not None) is shown
                assert parameter is None or bits(parameter) == bits(weights.view(name))

    bounded(run)
