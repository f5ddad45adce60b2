"""Stand-ins: they look like their parameter, hold nothing, compute like it, and refuse to be written to."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ftd_client.stream.parked import Access, Parked
from ftd_client.stream.units import OffloadError

CPU, META = torch.device("cpu"), torch.device("meta")


class Made:
    """A stand-in, the tensor it stands for, how often that was fetched, and the fetched ones that were written to."""

    def __init__(self, like: torch.Tensor | None = None, device: torch.device = CPU) -> None:
        torch.manual_seed(0)
        like = torch.randn(4, 6) if like is None else like
        self.host = like if isinstance(like, nn.Parameter) else nn.Parameter(like, requires_grad=False)
        self.fetches = 0
        self.refused: list[torch.Tensor] = []
        self.access = Access(self._fetch, lambda: self.host, self.refused.append)
        self.parked = Parked.of("layers.0.weight", self.host, device, self.access)

    def _fetch(self) -> torch.Tensor:
        self.fetches += 1
        return nn.Parameter(self.host.detach().clone(), requires_grad=False)


@pytest.fixture
def made() -> Made:
    return Made()


@pytest.mark.parametrize(
    "like",
    [
        torch.randn(4, 6),
        torch.randn(4, 6).t(),
        torch.randn(2, 3, 5, 5).to(memory_format=torch.channels_last),
        torch.tensor(1.5, dtype=torch.float64),
        torch.randint(-9, 9, (7,), dtype=torch.int8),
        torch.randn(3, 3).to(torch.bfloat16),
    ],
)
def test_it_looks_like_its_parameter_and_fetches_nothing_for_that(like: torch.Tensor) -> None:
    made = Made(like)
    parked, host = made.parked, made.host
    for ask in (
        lambda t: t.shape, lambda t: t.size(), lambda t: t.stride(), lambda t: t.dtype, lambda t: t.device,
        lambda t: t.layout, lambda t: t.ndim, lambda t: t.dim(), lambda t: t.numel(), lambda t: t.nbytes,
        lambda t: t.element_size(), lambda t: t.itemsize, lambda t: t.is_contiguous(), lambda t: t.requires_grad,
        lambda t: t.is_floating_point(), torch.is_floating_point, lambda t: t.is_leaf, lambda t: t.grad,
        lambda t: t.is_meta, lambda t: t.is_cuda, lambda t: t.is_sparse, torch.numel,
    ):  # fmt: skip
        assert ask(parked) == ask(host)
    assert isinstance(parked, nn.Parameter)
    assert isinstance(parked, torch.Tensor)
    assert "layers.0.weight" in repr(parked)
    assert made.fetches == 0


def test_it_says_it_is_on_the_device_where_its_bytes_will_be() -> None:
    made = Made(device=META)
    assert made.parked.device == META
    assert made.host.device == CPU


def test_attributes_of_the_parameter_are_its_own_too() -> None:
    host = nn.Parameter(torch.randn(2), requires_grad=False)
    host.note = "kept"
    host.fetch = "of somebody's own"
    made = Made(host)
    assert (made.parked.note, made.parked.fetch) == ("kept", "of somebody's own")
    assert torch.equal(made.parked + 0, host)


X = torch.randn(3, 6)
IDS = torch.tensor([[0, 3], [1, 1]])
COMPUTES: dict[str, Callable[[Any], Any]] = {
    "linear": lambda w: F.linear(X, w),
    "matmul": lambda w: X @ w.t(),
    "rmatmul": lambda w: w @ X.t(),
    "embedding": lambda w: F.embedding(IDS, w),
    "indexing": lambda w: w[1:, ::2],
    "iteration": lambda w: [row.sum() for row in w],
    "out-of-place": lambda w: w * 2 + 1,
    "reflected": lambda w: 1 - w,
    "in a list": lambda w: torch.cat([w, w * 2]),
    "keyword": lambda w: F.linear(X, weight=w),
    "einsum": lambda w: torch.einsum("ij,kj->ik", X, w),
    "reduction": lambda w: w.sum(0),
    "item": lambda w: w[0, 0].item(),
    "comparison": lambda w: w > 0,
    "clone": lambda w: w.clone(),
    "type": lambda w: w.to(torch.float64),
    "half": lambda w: w.half(),
    "contiguous": lambda w: w.t().contiguous(),
    "view": lambda w: w.view(-1).cumsum(0),
    "numpy": lambda w: torch.from_numpy(w.numpy().copy()),
    "tolist": lambda w: torch.tensor(w.tolist()),
    "detach": lambda w: F.linear(X, w.detach()),
    "data": lambda w: F.linear(X, w.data),
}


@pytest.mark.parametrize("name", COMPUTES)
def test_it_computes_what_its_parameter_computes(made: Made, name: str) -> None:
    with torch.no_grad():
        found, expected = COMPUTES[name](made.parked), COMPUTES[name](made.host)
    found, expected = (value if isinstance(value, list) else [value] for value in (found, expected))
    for one, other in zip(found, expected, strict=True):
        assert not isinstance(one, Parked)
        assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))
    assert made.fetches > 0


def test_an_operation_on_several_fetches_each_once(made: Made) -> None:
    other = Made()
    with torch.no_grad():
        assert torch.equal(made.parked + other.parked, made.host * 2)
    assert (made.fetches, other.fetches) == (1, 1)


WRITES: dict[str, Callable[[Any], Any]] = {
    "add_": lambda w: w.add_(1),
    "+=": lambda w: w.__iadd__(1),
    "copy_": lambda w: w.copy_(torch.zeros(4, 6)),
    "zero_": lambda w: w.zero_(),
    "init": nn.init.zeros_,
    "setitem": lambda w: w.__setitem__(0, 0.0),
    "data": lambda w: w.data.mul_(2),
    "detach": lambda w: w.detach().mul_(2),
    "set data": lambda w: setattr(w, "data", torch.zeros(4, 6)),
    "set grad": lambda w: setattr(w, "grad", torch.zeros(4, 6)),
    "requires_grad_": lambda w: w.requires_grad_(True),
    "set requires_grad": lambda w: setattr(w, "requires_grad", True),
    "out": lambda w: torch.mul(torch.ones(4, 6), 2, out=w),
    "foreach": lambda w: torch._foreach_mul_([w], 2),
    "address": lambda w: w.data_ptr(),
}


@pytest.mark.parametrize("name", WRITES)
def test_writes_are_refused_by_name(made: Made, name: str) -> None:
    before = made.host.clone()
    with torch.no_grad(), pytest.raises(OffloadError, match=r"layers\.0\.weight is offloaded") as caught:
        WRITES[name](made.parked)
    assert "release()" in caught.value.remedy
    assert torch.equal(made.host, before)


def test_whoever_fetched_it_is_told_of_a_refused_write_and_of_no_reading(made: Made) -> None:
    with torch.no_grad():
        made.parked.view(-1)[:2].sum()
        assert not made.refused
        with pytest.raises(OffloadError):
            made.parked.mul_(2)
    (written,) = made.refused
    assert torch.equal(written, made.host * 2)


def test_once_released_every_stand_in_is_the_weight_on_the_host(made: Made) -> None:
    detached = made.parked.detach()
    made.access.release()
    with torch.no_grad():
        assert (made.parked * 1).data_ptr() != made.host.data_ptr()
        for parked in (made.parked, detached):
            assert parked.view(-1).data_ptr() == made.host.data_ptr()
    assert made.fetches == 0


def test_what_others_write_while_it_is_read_is_no_write(made: Made) -> None:
    target = torch.zeros(4, 6)
    with torch.no_grad():
        target.copy_(made.parked)
        target.add_(made.parked)
        torch.mul(made.parked, 1, out=target)
    assert torch.equal(target, made.host)


def test_what_is_no_change_is_allowed(made: Made) -> None:
    parked = made.parked
    assert parked.requires_grad_(False) is parked
    assert parked.to("cpu") is parked
    assert parked.to(torch.float32) is parked
    assert parked.to(CPU, torch.float32) is parked
    assert parked.cpu() is parked
    assert made.fetches == 0


def test_moving_to_the_host_takes_the_bytes_of_the_host() -> None:
    made = Made(device=META)
    for moved in (made.parked.cpu(), made.parked.to("cpu"), made.parked.to(torch.zeros(1))):
        assert torch.equal(moved, made.host)
        assert not isinstance(moved, Parked)
    assert made.fetches == 0


def test_a_copy_is_one_and_a_detached_one_stands_in_as_well(made: Made) -> None:
    copied = made.parked.to("cpu", copy=True)
    assert not isinstance(copied, Parked)
    assert torch.equal(copied, made.host)
    detached = made.parked.detach()
    assert isinstance(detached, Parked)
    assert detached.ftd_name == "layers.0.weight"


def test_copying_it_in_python_is_refused_and_saving_takes_the_hosts_bytes(made: Made) -> None:
    with pytest.raises(OffloadError, match=r"layers\.0\.weight"):
        copy.deepcopy(made.parked)
    file = io.BytesIO()
    torch.save({"w": made.parked}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)["w"]
    assert type(loaded) in (torch.Tensor, nn.Parameter)
    assert torch.equal(loaded, made.host)
    assert made.fetches == 0


def test_a_modules_listings_know_it(made: Made) -> None:
    module = nn.Linear(6, 4, bias=False)
    module._parameters["weight"] = made.parked  # type: ignore[assignment]
    assert list(module.parameters()) == [made.parked] or next(module.parameters()) is made.parked
    assert module.state_dict()["weight"].shape == (4, 6)
    assert sum(parameter.numel() for parameter in module.parameters()) == 24
    assert made.fetches == 0
    with torch.no_grad():
        assert torch.equal(module(X), F.linear(X, made.host))


def test_a_stand_in_has_no_memory() -> None:
    host = nn.Parameter(torch.empty(1, dtype=torch.uint8).expand(1 << 45), requires_grad=False)
    assert Made(host).parked.numel() == 1 << 45
