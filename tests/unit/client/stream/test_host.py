"""Where parameters' bytes lie on the host, and what of them a GPU may read directly."""

from __future__ import annotations

import ctypes
import gc
import mmap
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from ftd.cuda import pin
from ftd.errors import FtdError, InternalError
from ftd.units import GIB, MIB
from ftd_client.stream import host as module
from ftd_client.stream.host import Host, PinnedMemoryError, own_host, plan_arenas
from ftd_client.stream.link import Copy
from tests.fake_cuda import FakeCuda
from tests.unit.client.stream.fakes import Threads

PAGE = mmap.PAGESIZE
CHUNK = 4 * PAGE
CPU, GPU = torch.device("cpu"), torch.device("cuda:0")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    Threads(fake, monkeypatch)
    monkeypatch.setattr(module, "load_runtime", fake.load)
    monkeypatch.setattr(pin, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(module, "_LEAST_REGISTERED", PAGE)
    return fake


@pytest.fixture
def arenas(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the page-locked memory that was asked for; this host's torch has none to give."""
    asked: list[int] = []
    real = torch.empty

    def empty(*size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        if not pin_memory:
            return real(*size, **options)
        asked.append(size[0])
        memory = real(size[0] + 512, **options)
        return memory[-memory.data_ptr() % 512 :][: size[0]]

    monkeypatch.setattr(torch, "empty", empty)
    return asked


def _bytes_at(host: Host, name: str, nbytes: int) -> bytes:
    return ctypes.string_at(host.addresses[name], nbytes) if nbytes else b""


def _groups() -> list[list[tuple[str, torch.Tensor]]]:
    tensor = torch.arange(60, dtype=torch.float32)
    return [
        [("a", tensor.clone()), ("empty", torch.empty(0, 3)), ("b", torch.arange(300, dtype=torch.int16))],
        [("permuted", tensor.clone().view(3, 4, 5).permute(2, 0, 1)), ("flag", torch.tensor([True, False, True]))],
    ]


def _raw(tensor: torch.Tensor) -> bytes:
    """As it lies in memory, whatever the order of its dimensions."""
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


# --- splitting ---------------------------------------------------------------------------------------------------


@given(
    borders=st.lists(st.integers(0, 12), max_size=8, unique=True).map(sorted),
    src=st.integers(0, 12),
    nbytes=st.integers(0, 8),
)
@example(borders=[3, 5, 8], src=3, nbytes=5)
def test_a_copy_is_split_at_borders_and_nowhere_else(borders: list[int], src: int, nbytes: int) -> None:
    host = Host()
    host._borders = borders
    parts = host.split(Copy(1000 + src, src, nbytes))
    assert parts[0].src == src
    assert sum(part.nbytes for part in parts) == nbytes
    assert all(one.src + one.nbytes == two.src for one, two in pairwise(parts))
    assert all(part.dst == part.src + 1000 for part in parts)
    assert [part.src for part in parts[1:]] == [border for border in borders if src < border < src + nbytes]


# --- a model's own -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("pinned", "device"), [(False, CPU), (False, GPU), (True, CPU)])
def test_what_is_not_pinned_stays_where_it_is(cuda: FakeCuda, pinned: bool, device: torch.device) -> None:
    groups = _groups()
    expected = {name: tensor.data_ptr() for group in groups for name, tensor in group}
    host = own_host(groups, pinned=pinned, mode="host_register", device=device)
    assert host.addresses == expected
    assert (host.kind, host.pinned_bytes, host.warnings, host.tensors) == ("none", 0, [], {})
    assert host.split(Copy(1, 2, 1 << 40)) == [Copy(1, 2, 1 << 40)]
    assert cuda.calls == []


def test_the_host_keeps_the_bytes_when_the_parameter_goes_elsewhere() -> None:
    weight = torch.nn.Parameter(torch.arange(1 << 16, dtype=torch.float32))
    expected = _raw(weight)
    host = own_host([[("w", weight)]], pinned=False, mode="torch", device=CPU)
    weight.data = torch.zeros(1)
    gc.collect()
    fill = [torch.full((1 << 16,), 9.0) for _ in range(4)]
    assert _bytes_at(host, "w", len(expected)) == expected
    del fill


@pytest.mark.parametrize("mode", ["torch", "host_register"])
def test_pinned_memory_without_cuda_is_refused(mode: Any) -> None:
    if torch.cuda.is_available():
        pytest.skip("has CUDA")
    with pytest.raises(PinnedMemoryError, match="set pinned_memory=False on CPU-only hosts") as raised:
        own_host(_groups(), pinned=True, mode=mode, device=CPU)
    assert isinstance(raised.value, RuntimeError)
    assert isinstance(raised.value, FtdError)


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(4, 4)[:, :2], torch.zeros(1).expand(3), torch.zeros(4)[::2], torch.zeros(3, device="meta")],
    ids=["gaps", "expanded", "strided", "meta"],
)
def test_only_dense_tensors_of_the_cpu_come_in(tensor: torch.Tensor) -> None:
    with pytest.raises(InternalError, match=r"layers\.0\.w"):
        own_host([[("layers.0.w", tensor)]], pinned=False, mode="torch", device=CPU)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(4, 1, 3).transpose(0, 1),
        torch.zeros(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        torch.tensor(3.0),
        torch.zeros(5, 1)[:, 0],
        torch.zeros(0, 7),
    ],
)
def test_dense_tensors_of_any_order_come_in(tensor: torch.Tensor) -> None:
    own_host([[("w", tensor)]], pinned=False, mode="torch", device=CPU).close()


def test_mode_torch_packs_groups_into_page_locked_memory(arenas: list[int]) -> None:
    groups = _groups()
    expected = {name: _raw(tensor) for group in groups for name, tensor in group}
    values = {name: tensor.clone() for group in groups for name, tensor in group}
    host = own_host(groups, pinned=True, mode="torch", device=GPU)
    assert arenas == [MIB]
    start = host.addresses["a"]
    assert {name: at - start for name, at in host.addresses.items() if at} == {
        "a": 0, "b": 512, "permuted": 1536, "flag": 2048,
    }  # fmt: skip
    assert host.addresses["empty"] == 0
    for name, raw in expected.items():
        assert _bytes_at(host, name, len(raw)) == raw
    for name, tensor in host.tensors.items():
        assert torch.equal(tensor, values[name])
        assert (tensor.stride(), tensor.dtype, tensor.data_ptr()) == (
            values[name].stride(), values[name].dtype, host.addresses[name],
        )  # fmt: skip
    assert set(host.tensors) == {"a", "b", "permuted", "flag"}
    assert (host.kind, host.pinned_bytes, host.warnings) == ("cuda", 2560, [])
    host.close()
    assert (host.kind, host.pinned_bytes, host.tensors) == ("none", 0, {})
    host.close()


def test_mode_torch_lets_the_original_go_group_by_group(arenas: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ARENA_BYTES", (4096, 2048))
    weights = {f"w{i}": torch.nn.Parameter(torch.full((500,), float(i))) for i in range(4)}
    groups = [[("w0", weights["w0"])], [("w1", weights["w1"])], [("w2", weights["w2"]), ("w3", weights["w3"])]]
    told: list[tuple[str, int]] = []

    def replace(name: str, tensor: torch.Tensor) -> None:
        told.append((name, len(arenas)))
        weights[name].data = tensor

    old = [weight.data_ptr() for weight in weights.values()]
    host = own_host(groups, pinned=True, mode="torch", device=GPU, replace=replace)
    assert arenas == [4096, 4096]
    assert told == [("w0", 1), ("w1", 1), ("w2", 2), ("w3", 2)]
    for i, (name, weight) in enumerate(weights.items()):
        assert weight.data_ptr() == host.addresses[name] != old[i]
        assert torch.equal(weight, torch.full((500,), float(i)))


def test_mode_torch_keeps_ties(arenas: list[int]) -> None:
    tied, other = torch.nn.Parameter(torch.arange(5.0)), torch.nn.Parameter(torch.ones(3))
    told: list[str] = []

    def replace(name: str, tensor: torch.Tensor) -> None:
        told.append(name)
        (tied if name in ("a", "head") else other).data = tensor

    host = own_host(
        [[("a", tied), ("b", other)], [("head", tied)]], pinned=True, mode="torch", device=GPU, replace=replace
    )
    assert host.addresses["a"] == host.addresses["head"]
    assert host.tensors["a"] is host.tensors["head"]
    assert told == ["a", "head", "b"]
    assert host.pinned_bytes == 1024


def test_mode_torch_makes_tensors_that_may_be_written_whoever_calls(arenas: list[int]) -> None:
    with torch.inference_mode():
        host = own_host([[("w", torch.ones(3))]], pinned=True, mode="torch", device=GPU)
    assert not host.tensors["w"].is_inference()
    host.tensors["w"].add_(1)


def test_memory_that_cuda_does_not_give_is_a_warning(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    real, count = torch.empty, 0

    def empty(*size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        nonlocal count
        count += pin_memory
        if pin_memory and count == 2:
            raise RuntimeError("CUDA error: out of memory\nmore")
        return real(*size, **options)

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(module, "_ARENA_BYTES", (2048,))
    groups = [[(f"w{i}", torch.full((500,), float(i)))] for i in range(4)]
    host = own_host(groups, pinned=True, mode="torch", device=GPU)
    assert count == 2, "not tried again"
    assert len(host.warnings) == 1
    assert "after 2.00 KiB: CUDA error: out of memory; the rest" in host.warnings[0]
    assert (host.kind, host.pinned_bytes, set(host.tensors)) == ("cuda", 2048, {"w0"})
    for i in range(4):
        assert _bytes_at(host, f"w{i}", 2000) == _raw(groups[i][0][1])
    assert host.addresses["w2"] == groups[2][0][1].data_ptr()


def test_mode_host_register_pins_pages_in_place_and_undoes_it(cuda: FakeCuda) -> None:
    memory = mmap.mmap(-1, 64 * PAGE)
    flat = torch.frombuffer(memory, dtype=torch.uint8)
    groups = [
        [("big", flat[100 : 9 * PAGE + 5])],
        [("touching", flat[9 * PAGE + 5 : 10 * PAGE]), ("far", flat[40 * PAGE + 8 : 40 * PAGE + 9])],
    ]
    base = flat.data_ptr()
    host = own_host(groups, pinned=True, mode="host_register", device=GPU)
    assert host.addresses == {"big": base + 100, "touching": base + 9 * PAGE + 5, "far": base + 40 * PAGE + 8}
    # never a page that others' bytes may lie on: CUDA would refuse to copy those
    start = base + PAGE
    assert cuda.registered == {
        start: (CHUNK, False), start + CHUNK: (CHUNK, False), start + 2 * CHUNK: (PAGE, False),
    }  # fmt: skip
    assert (host.kind, host.pinned_bytes, host.tensors) == ("cuda", 9 * PAGE, {})
    parts = host.split(Copy(0, base + 100, 9 * PAGE - 95))
    assert [part.src - base for part in parts] == [100, PAGE, PAGE + CHUNK, PAGE + 2 * CHUNK]
    host.close()
    host.close()
    assert cuda.registered == {}
    assert cuda.named("unregister") == cuda.named("register")[::-1]


def test_a_host_that_is_dropped_unregisters_before_its_memory_goes(cuda: FakeCuda) -> None:
    own_host([[("w", torch.zeros(1 << 16))]], pinned=True, mode="host_register", device=GPU)
    gc.collect()
    assert cuda.named("register")
    assert cuda.registered == {}


def test_mode_host_register_refused_is_rolled_back_and_told(cuda: FakeCuda) -> None:
    cuda.refuse_at = 3
    tensor = torch.zeros(4 * CHUNK, dtype=torch.uint8)
    host = own_host([[("w", tensor)]], pinned=True, mode="host_register", device=GPU)
    assert cuda.registered == {}
    assert cuda.named("unregister") == cuda.named("register")[:2][::-1]
    assert (host.kind, host.pinned_bytes, len(host.warnings)) == ("none", 0, 1)
    assert host.addresses == {"w": tensor.data_ptr()}
    assert host.split(Copy(0, tensor.data_ptr(), 4 * CHUNK)) == [Copy(0, tensor.data_ptr(), 4 * CHUNK)]


def test_mode_host_register_falls_back_to_torch(
    arenas: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "load_runtime", lambda: (None, "no libcudart was found"))
    host = own_host(_groups(), pinned=True, mode="host_register", device=GPU)
    assert arenas == [MIB]
    assert set(host.tensors) == {"a", "b", "permuted", "flag"}
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
        ("WARNING", "pinned_memory_mode=host_register is not possible: no libcudart was found; torch is used instead")
    ]
    assert host.warnings == [caplog.records[0].getMessage()]


def test_a_forked_child_leaves_registrations_alone(in_child: Callable[..., Any], cuda: FakeCuda) -> None:
    host = own_host([[("w", torch.zeros(1 << 16))]], pinned=True, mode="host_register", device=GPU)

    def child() -> int:
        host.close()
        return len(cuda.named("unregister"))

    assert in_child(child) == 0
    host.close()


# --- arenas ------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 20 * 1024), max_size=40).map(lambda sizes: [512 * size for size in sizes]))
def test_every_group_is_whole_in_one_arena(sizes: list[int]) -> None:
    arenas = list(plan_arenas(sizes))
    assert [index for arena in arenas for index in range(arena.first, arena.last)] == list(range(len(sizes)))
    for arena in arenas:
        assert arena.nbytes & (arena.nbytes - 1) == 0, "torch would round it up"
        assert sum(sizes[arena.first : arena.last]) <= arena.nbytes


@pytest.mark.parametrize(
    ("sizes", "most_waste"),
    [([436 * MIB] * 16, 0.11), ([436 * MIB] * 80, 0.06), ([64 * MIB] * 100, 0.0), ([100 * MIB] * 70, 0.06)],
)
def test_arenas_waste_little(sizes: list[int], most_waste: float) -> None:
    arenas = list(plan_arenas(sizes))
    assert sum(arena.nbytes for arena in arenas) <= sum(sizes) * (1 + most_waste)
    assert max(arena.nbytes for arena in arenas) <= 4 * GIB


def test_a_group_larger_than_an_arena_has_one_of_its_own() -> None:
    assert [tuple(arena) for arena in plan_arenas([MIB, 5 * GIB, MIB])] == [
        (MIB, 0, 1), (8 * GIB, 1, 2), (MIB, 2, 3),
    ]  # fmt: skip
