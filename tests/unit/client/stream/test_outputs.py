"""Outputs of streamed blocks keep their bytes when the ring gets others."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from ftd_client.stream.outputs import outliving

Pair = namedtuple("Pair", "one other")


class Output(OrderedDict[str, Any]):
    """As the outputs of transformers are: a mapping of a class of its own."""


class Attributes:
    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


@dataclass(frozen=True, slots=True)
class Slotted:
    one: Any
    other: Any


@pytest.mark.parametrize(
    "wrap",
    [
        lambda a, b: (a, b),
        lambda a, b: [b, {"a": a}],
        Pair,
        lambda a, b: Output(x=a, y=(b, None, 3)),
        lambda a, b: {"deep": {"deeper": [(a,)]}, "b": b},
        lambda a, b: {a, b},
        lambda a, b: frozenset([a, b]),
        lambda a, b: Attributes(a=a, more=Attributes(b=[b])),
        lambda a, b: Slotted(a, {"b": b}),
    ],
)
def test_views_of_ours_are_copied_wherever_they_are_and_nothing_else(wrap: Any) -> None:
    memory, other = torch.arange(8.0), torch.arange(3.0)
    view = memory[2:4]
    output = outliving(wrap(view, other), lambda t: t.untyped_storage().data_ptr() == memory.data_ptr())
    assert type(output) is type(wrap(view, other))
    memory.zero_()
    flat = [t for t in _flat(output) if isinstance(t, torch.Tensor)]
    assert sorted(len(t) for t in flat) == [2, 3]
    for found in flat:
        assert torch.equal(found, torch.arange(8.0)[2:4] if len(found) == 2 else other)
        assert (found is other) == (len(found) == 3)


def test_an_output_without_such_views_is_the_same_object() -> None:
    unchanged = [torch.ones(1)], (torch.ones(1), 4), {"x": None}, "text", None, torch.ones(2)
    for output in (*unchanged, {torch.ones(1)}, Attributes(a=torch.ones(1)), Slotted(torch.ones(1), 1)):
        assert outliving(output, lambda _: False) is output


def _flat(value: Any) -> Any:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, Attributes):
        value = list(vars(value).values())
    if isinstance(value, Slotted):
        value = [value.one, value.other]
    if isinstance(value, list | tuple | set | frozenset):
        return [leaf for item in value for leaf in _flat(item)]
    return [value]
