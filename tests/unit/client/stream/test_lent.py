"""Weights that were handed out: every write is told once, by name, and none of their memory is held."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from ftd_client.stream.lent import _FEW, Lent
from ftd_client.stream.units import OffloadError
from tests.unit.client.phase.units import param


def handed_out(lent: Lent, name: str = "layers.0.weight") -> nn.Parameter:
    with torch.inference_mode(False):  # as the loader makes them
        made = nn.Parameter(torch.ones(8, 8), requires_grad=False)
    lent.add([param(name)], [made])
    return made


WRITES: dict[str, Callable[[Any], object]] = {
    "itself": lambda w: w.mul_(2),
    "row": lambda w: w[0].zero_(),
    "transposed": lambda w: w.t().mul_(2),
    "view of a view": lambda w: w.view(-1)[:5].zero_(),
    "one of several": lambda w: w.chunk(2)[1].zero_(),
    "detached": lambda w: w.detach()[1].view(2, 4).add_(1),
    "out": lambda w: torch.add(w, 1, out=w.view(64)[:64].view(8, 8)),
    "foreach": lambda w: torch._foreach_mul_([w[1]], 2),
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("alive", [True, False])
@pytest.mark.parametrize("how", WRITES)
def test_a_write_is_told_once_whoever_still_has_it(how: str, alive: bool, mode: Any) -> None:
    lent = Lent()
    with mode():
        made = handed_out(lent)
        lent.check()
        WRITES[how](made)
        if not alive:
            del made
        with pytest.raises(OffloadError, match=r"does not last: layers\.0\.weight\n"):
            lent.check()
        lent.check()


def test_a_view_may_be_written_to_long_after_the_weight_is_gone() -> None:
    lent = Lent()
    view = handed_out(lent).view(-1)[:5]
    for _ in range(2):
        lent.check()
    view.zero_()
    with pytest.raises(OffloadError, match=r"layers\.0\.weight"):
        lent.check()
    view.zero_()
    with pytest.raises(OffloadError, match=r"layers\.0\.weight"):
        lent.check()


def test_reading_is_no_write_and_holds_nothing() -> None:
    lent = Lent()
    made = handed_out(lent)
    storage = StorageWeakRef(made.untyped_storage())
    lent.check()
    (made.t() + made).sum()
    del made
    assert storage.expired()
    lent.check()
    assert not lent._witnesses


def test_a_refused_write_is_not_told_again_and_a_later_one_is() -> None:
    lent = Lent()
    made = handed_out(lent)
    made.zero_()
    lent.refused(made)
    lent.check()
    made.zero_()
    with pytest.raises(OffloadError):
        lent.check()


def test_what_nobody_asks_after_does_not_pile_up_and_writes_to_it_are_kept() -> None:
    lent = Lent()
    for i in range(10 * _FEW):
        handed_out(lent, f"layers.{i}").zero_()
        assert len(lent._witnesses) <= _FEW + 1
    with pytest.raises(OffloadError, match=r"layers\.0, layers\.1, layers\.2, layers\.3, layers\.4\n"):
        lent.check()
