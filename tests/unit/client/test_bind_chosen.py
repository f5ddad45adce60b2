"""Key maps and shards at bind: what of the model got which part of the checkpoint, and what refusals say of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ftd.errors import BindError
from ftd_client.bind import BindReport, bind
from ftd_client.choose import choose
from ftd_client.ranks import Rank

from .models import Toy, meta, problems_of, values
from .weights import DictWeights, bits


def chosen(weights: DictWeights, key_map: Any = None, shard: Any = None, rank: Rank | None = None) -> DictWeights:
    return weights.select(choose(weights.specs, key_map, shard, rank))


class Mlp(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)
        self.norm = nn.BatchNorm1d(inner)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return self.down(self.norm(self.up(given)))


def test_renamed_tensors_are_views_of_the_checkpoints() -> None:
    stored = {f"model.{name}": value for name, value in values(Mlp(3, 4)).items()} | {"ema.up.weight": torch.ones(4, 3)}
    weights = DictWeights(stored)
    model = meta(lambda: Mlp(3, 4))
    report = bind(model, chosen(weights, {"model": "", "ema": None}))
    for name, parameter in model.named_parameters():
        assert parameter.data_ptr() == stored[f"model.{name}"].data_ptr()
    assert report.dropped == ("ema.up.weight",)
    assert "left out by the key map: 1 (ema.up.weight)" in str(report)
    assert report.unexpected == report.unmatched == ()


def test_a_refusal_says_what_a_name_is_in_the_checkpoint() -> None:
    stored = values(Mlp(3, 4)) | {"stray": torch.ones(6, 2)}
    weights = DictWeights({f"old.{name}": value for name, value in stored.items()})
    shard = {"up": 0, "norm.num_batches_tracked": None, "stray": 0}
    lines = problems_of(meta(lambda: Mlp(3, 4)), chosen(weights, {"old": ""}, shard, Rank(1, 2)))
    assert lines == [
        "up.weight: (2, 3) of F32 found in the checkpoint (old.up.weight[2:4]), (4, 3) of float32 expected",
        "up.bias: (2,) of F32 found in the checkpoint (old.up.bias[2:4]), (4,) of float32 expected",
        "stray: (3, 2) of F32 found (old.stray[3:6]), no place in the model",
    ]


def test_rules_that_fit_nothing_are_refused_or_listed() -> None:
    weights = DictWeights(values(Mlp(3, 4)))
    selected = chosen(weights, {"up": "up", "modle": "model"}, {"*.q_proj": 0, "up": None}, Rank(0, 2))
    assert problems_of(meta(lambda: Mlp(3, 4)), selected) == [
        "'modle': no name found that it fits", "'*.q_proj': no name found that it fits"
    ]  # fmt: skip
    report = bind(meta(lambda: Mlp(3, 4)), selected, strict=False)
    assert report.unmatched == ("modle", "*.q_proj")
    assert "rules that fit no name: 2 (modle, *.q_proj)" in str(report)


def test_a_shard_may_name_both_ends_of_a_tie_of_which_the_checkpoint_has_one() -> None:
    whole = torch.randn(8, 4)
    weights = DictWeights({"head.weight": whole})

    class Local(Toy):
        def __init__(self) -> None:
            super().__init__(tied=True)
            self.embed.weight = self.head.weight = nn.Parameter(torch.empty(4, 4))

    model = meta(Local)
    report = bind(model, chosen(weights, None, {"embed": 0, "head": 0}, Rank(1, 2)))
    assert model.embed.weight is model.head.weight
    assert model.head.weight.data_ptr() == whole[4:].data_ptr()
    assert report.unmatched == ()
    assert report.bound_bytes == 64


def test_a_tie_of_two_different_slices_is_refused() -> None:
    whole = torch.randn(8, 4)
    weights = DictWeights({"embed.weight": whole, "head.weight": whole})

    def shard(name: str, shape: tuple[int, ...]) -> slice:
        return slice(0, 7) if name == "embed.weight" else slice(1, 8)

    (line,) = problems_of(meta(lambda: Toy(tied=True)), chosen(weights, None, shard))
    assert line.startswith("head.weight: F32 of other bytes found, those of embed.weight (F32) expected")


def _bind_rank(model: nn.Module, weights: DictWeights, rank: int, world: int) -> BindReport:
    shard = {"up": 0, "norm": 0, "norm.num_batches_tracked": None}
    return bind(model, chosen(weights, None, shard, Rank(rank, world)), replace=True)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_ranks_compute_their_rows_of_the_whole(world: int) -> None:
    """Buffers are cut too, and are private; the slices of all ranks are the model."""
    torch.manual_seed(1)
    reference = Mlp(3, 8)
    reference.norm.running_mean.normal_()
    weights = DictWeights(values(reference))
    reference.eval()
    given = torch.randn(5, 3, dtype=torch.float32)
    found: dict[str, list[torch.Tensor]] = {}
    for rank in range(world):
        model = meta(lambda: Mlp(3, 8 // world))
        model.down = nn.Linear(8, 3, device="meta")
        report = _bind_rank(model, weights, rank, world)
        assert report.bound_bytes == sum(p.nbytes for p in model.parameters())
        rows = slice(rank * 8 // world, (rank + 1) * 8 // world)
        assert model.up.weight.data_ptr() == weights.tensors["up.weight"][rows].data_ptr()
        assert model.norm.running_mean.data_ptr() != weights.tensors["norm.running_mean"][rows].data_ptr()
        for name, value in values(model).items():
            found.setdefault(name, []).append(value)
        local = model.eval().norm(model.up(given))
        torch.testing.assert_close(local, reference.norm(reference.up(given))[:, rows])
    for name, parts in found.items():
        whole = torch.cat(parts) if name.startswith(("up", "norm")) and parts[0].ndim else parts[0]
        assert bits(whole) == bits(values(reference)[name])


def test_another_ranks_slice_is_another_value() -> None:
    """A model bound to one rank's rows is refused by the next rank's; the error names them."""
    weights = DictWeights({"weight": torch.randn(4, 2)})
    model = meta(lambda: nn.Linear(2, 2, bias=False))
    bind(model, chosen(weights, None, {"weight": 0}, Rank(0, 2)))
    bind(model, chosen(weights, None, {"weight": 0}, Rank(0, 2)))
    with pytest.raises(BindError, match="of other values found"):
        bind(model, chosen(weights, None, {"weight": 0}, Rank(1, 2)))


def test_a_slice_is_cast_like_a_tensor() -> None:
    whole = torch.randn(4, 2)
    weights = DictWeights({"weight": whole})
    model = meta(lambda: nn.Linear(2, 2, bias=False))
    report = bind(model, chosen(weights, None, {"weight": 0}, Rank(1, 2)), dtype=torch.bfloat16)
    assert bits(model.weight) == bits(whole[2:].bfloat16())
    assert (report.bound_bytes, report.cast_bytes) == (0, 8)
