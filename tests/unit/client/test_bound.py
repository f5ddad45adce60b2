"""Whether a model still shows the weights that it was bound to."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ftd_client.bind import bind
from ftd_client.bound import strangers
from ftd_client.choose import choose
from ftd_client.views import SharedWeights

from .load.served import shared_weights
from .models import Toy, meta


def _bound(
    key_map: Any = None, shard: Any = None, dtype: torch.dtype | None = None, rows: int = 7
) -> tuple[nn.Module, SharedWeights]:
    """A tied model, of which the checkpoint has the second name only."""
    weights = shared_weights("unused", {"head.weight": ("F32", (7, 4), 1, 512)})
    weights.view("head.weight").uniform_()
    selected = weights.select(choose(weights.specs, key_map, shard, None))
    model = meta(lambda: Toy(tied=True))
    model.embed.weight = model.head.weight = nn.Parameter(torch.empty(rows, 4, device="meta"))
    bind(model, selected, dtype=dtype)
    return model, selected


def test_a_tie_is_known_by_whichever_name_the_checkpoint_has() -> None:
    model, weights = _bound()
    assert strangers(model, weights) == []


def test_renamed_and_cut_it_is_known_too() -> None:
    model, weights = _bound({"head": "embed"})
    assert strangers(model, weights) == []
    model, weights = _bound(None, lambda name, shape: slice(2, 5), rows=3)
    assert strangers(model, weights) == []


def test_what_was_cast_or_exchanged_is_strange() -> None:
    model, weights = _bound(dtype=torch.float16)
    assert strangers(model, weights) == ["embed.weight"]
    model, weights = _bound()
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    assert strangers(model, weights) == ["embed.weight", "head.weight"], "the tie is gone too"
