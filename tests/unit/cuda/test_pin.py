import ctypes
import mmap
import os
import resource
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftd.cuda import pin as module
from ftd.cuda.pin import CHUNK_BYTES, Pinned, Region, pages_within, pin, register
from ftd.cuda.runtime import ABSENT, NO_GPU, CudaError, CudaRuntime
from ftd.units import GIB
from tests.conftest import NOBODY

CHUNK = 4 * mmap.PAGESIZE
PAGE = mmap.PAGESIZE


class FakeCuda:
    """The CUDA runtime at the one seam: keeps what is registered, and refuses when told to.

    `full` devices take no context; `refuse_at` is the register call that fails, counted from 1.
    """

    def __init__(self, *, devices: int = 1, full: tuple[int, ...] = (), refuse_at: int = 0) -> None:
        self.devices, self.full, self.refuse_at = devices, full, refuse_at
        self.device: int | None = None
        self.calls: list[tuple[str, int]] = []
        self.registered: dict[int, int] = {}

    def device_count(self) -> int:
        return self.devices

    def use_device(self, ordinal: int) -> None:
        self.calls.append(("use", ordinal))
        if ordinal in self.full:
            raise CudaError(f"device {ordinal} is full")
        self.device = ordinal

    def host_register(self, address: int, nbytes: int, *, read_only: bool = False) -> None:
        assert self.device is not None
        self.calls.append(("register", address))
        if len([call for call, _ in self.calls if call == "register"]) == self.refuse_at:
            raise CudaError("cudaHostRegister: out of memory (error 2)")
        self.registered[address] = nbytes

    def host_unregister(self, address: int) -> None:
        self.calls.append(("unregister", address))
        del self.registered[address]

    def load(self) -> tuple[CudaRuntime | None, str]:
        return self, ""

    def named(self, call: str) -> list[int]:
        return [argument for name, argument in self.calls if name == call]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", CHUNK)


@pytest.fixture
def memory() -> Iterator[Region]:
    """Two and a half chunks of memory that may really be locked."""
    view = mmap.mmap(-1, 2 * CHUNK + CHUNK // 2)
    anchor = ctypes.c_char.from_buffer(view)
    yield Region(ctypes.addressof(anchor), len(view))
    del anchor
    view.close()


def _pin(regions: list[Region], how: str, cuda: FakeCuda | str, **changes: Any) -> Pinned:
    """`pin` with what most tests want; `cuda` as text is the reason why there is none."""
    arguments: dict[str, Any] = {
        "how": how,
        "device": None,
        "cancelled": lambda: False,
        "progress": lambda _: None,
        "runtime": cuda.load if isinstance(cuda, FakeCuda) else lambda: (None, cuda),
    }
    return pin(regions, **(arguments | changes))


def _locked_bytes() -> int:
    rows = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(row.split()[1]) for row in rows if row.startswith("VmLck:"))


def test_a_chunk_is_small_enough_for_every_driver() -> None:
    assert CHUNK_BYTES == GIB


# --- CUDA --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["auto", "cuda"])
def test_regions_are_registered_chunk_by_chunk(how: str) -> None:
    cuda, told = FakeCuda(), list[int]()
    one, other = Region(100 * PAGE, 2 * CHUNK + PAGE), Region(900 * PAGE, CHUNK)
    pinned = _pin([one, other], how, cuda, progress=told.append)
    assert cuda.registered == {
        100 * PAGE: CHUNK, 104 * PAGE: CHUNK, 108 * PAGE: PAGE, 900 * PAGE: CHUNK,
    }  # fmt: skip
    assert told == [CHUNK, CHUNK, PAGE, CHUNK]
    assert (pinned.kind, pinned.warnings) == ("cuda", [])
    assert (pinned.bytes_in(one), pinned.bytes_in(other)) == (one.nbytes, other.nbytes)
    assert pinned.bytes_in(Region(500 * PAGE, PAGE)) == 0
    pinned.close()
    assert cuda.registered == {}
    assert cuda.named("unregister") == [900 * PAGE, 108 * PAGE, 104 * PAGE, 100 * PAGE]
    assert (pinned.kind, pinned.bytes_in(one)) == ("none", 0)
    pinned.close()
    assert len(cuda.named("unregister")) == 4


@pytest.mark.parametrize("refuse_at", [1, 2, 3])
@pytest.mark.parametrize("how", ["auto", "cuda"])
def test_a_refusal_is_undone_in_reverse_and_mlock_takes_over(memory: Region, how: str, refuse_at: int) -> None:
    cuda = FakeCuda(refuse_at=refuse_at)
    before = _locked_bytes()
    pinned = _pin([memory], how, cuda)
    assert cuda.registered == {}
    assert cuda.named("unregister") == cuda.named("register")[: refuse_at - 1][::-1]
    assert pinned.kind == "mlock"
    assert pinned.bytes_in(memory) == memory.nbytes == _locked_bytes() - before
    assert len(pinned.warnings) == 1
    done = ["0 B", "16.00 KiB", "32.00 KiB"][refuse_at - 1]
    assert f"CUDA refused to pin the weights after {done}: cudaHostRegister: out of memory" in pinned.warnings[0]
    pinned.close()
    assert _locked_bytes() == before
    assert len(cuda.named("unregister")) == refuse_at - 1


def test_cancelled_between_chunks_it_keeps_what_it_has() -> None:
    cuda = FakeCuda()
    region = Region(100 * PAGE, 5 * CHUNK)
    pinned = _pin([region], "auto", cuda, cancelled=lambda: len(cuda.registered) == 2)
    assert (pinned.kind, pinned.bytes_in(region), pinned.warnings) == ("cuda", 2 * CHUNK, [])
    pinned.close()
    assert cuda.registered == {}


def test_the_device_that_was_asked_for_is_the_only_one_tried(memory: Region) -> None:
    cuda = FakeCuda(devices=4, full=(2,))
    pinned = _pin([memory], "auto", cuda, device=2)
    assert cuda.named("use") == [2]
    assert pinned.kind == "mlock"
    assert "device 2 is full" in pinned.warnings[0]
    pinned.close()


def test_without_a_choice_the_first_device_that_takes_a_context_pins() -> None:
    cuda = FakeCuda(devices=4, full=(0, 1))
    pinned = _pin([Region(PAGE, PAGE)], "auto", cuda)
    assert (pinned.kind, pinned.cuda, pinned.ordinal) == ("cuda", cuda, 2)
    assert (cuda.named("use"), cuda.device) == ([0, 1, 2], 2)


def test_when_no_device_takes_a_context_the_last_refusal_is_told(memory: Region) -> None:
    pinned = _pin([memory], "auto", FakeCuda(devices=2, full=(0, 1)))
    assert pinned.kind == "mlock"
    assert "device 1 is full" in pinned.warnings[0]
    pinned.close()


def test_a_gpu_that_vanished_is_a_refusal(memory: Region) -> None:
    pinned = _pin([memory], "auto", FakeCuda(devices=0))
    assert pinned.kind == "mlock"
    assert "no GPU is visible" in pinned.warnings[0]
    pinned.close()


def test_a_runtime_that_is_already_gone_takes_its_registrations_with_it() -> None:
    cuda = FakeCuda()
    pinned = _pin([Region(PAGE, 3 * CHUNK)], "cuda", cuda)

    def gone(address: int) -> None:
        raise CudaError("driver shutting down")

    cuda.host_unregister = gone  # type: ignore[method-assign]
    pinned.close()
    assert (pinned.kind, pinned.chunks) == ("none", [])


def test_register_is_all_or_nothing_and_sets_no_device() -> None:
    cuda = FakeCuda(refuse_at=3)
    cuda.device = 1
    pinned = register(cuda, [Region(100 * PAGE, 5 * CHUNK)])
    assert (pinned.kind, pinned.chunks, cuda.registered) == ("none", [], {})
    assert pinned.warnings == [
        "CUDA refused to pin the weights after 32.00 KiB: cudaHostRegister: out of memory (error 2)"
    ]
    assert cuda.named("use") == []


@pytest.mark.parametrize("read_only", [False, True])
def test_register_says_whether_the_memory_is_read_only(read_only: bool) -> None:
    cuda, told = FakeCuda(), list[bool]()
    cuda.device = 0
    cuda.host_register = lambda *_, read_only: told.append(read_only)  # type: ignore[method-assign]
    register(cuda, [Region(PAGE, 2 * CHUNK)], read_only=read_only)
    assert told == [read_only] * 2


@given(st.lists(st.tuples(st.integers(0, 12 * PAGE), st.integers(1, 3 * PAGE)), max_size=8))
def test_pages_that_lie_within_ranges(ranges: list[tuple[int, int]]) -> None:
    regions = pages_within(ranges)
    pages = [page for r in regions for page in range(r.address // PAGE, (r.address + r.nbytes) // PAGE)]
    held = {at for address, nbytes in ranges for at in range(address, address + nbytes)}
    touched = {at // PAGE for at in held}
    assert pages == sorted(page for page in touched if all(at in held for at in range(page * PAGE, (page + 1) * PAGE)))
    assert all(r.address % PAGE == 0 == r.nbytes % PAGE for r in regions)
    assert all(a.address + a.nbytes <= b.address for a, b in pairwise(regions))
    assert all(r.nbytes >= 3 * PAGE for r in pages_within(ranges, 3 * PAGE))


# --- without CUDA ------------------------------------------------------------------------------------------------


def test_cuda_that_was_asked_for_and_is_not_there_is_told(memory: Region) -> None:
    pinned = _pin([memory], "cuda", "no libcudart was found")
    assert pinned.kind == "mlock"
    assert pinned.warnings == ["pin: cuda is not possible: no libcudart was found; mlock is tried instead"]
    pinned.close()


@pytest.mark.parametrize("reason", sorted(ABSENT))
def test_on_a_host_without_gpus_auto_is_silent(memory: Region, reason: str) -> None:
    pinned = _pin([memory], "auto", reason)
    assert (pinned.kind, pinned.warnings, pinned.why_not_cuda) == ("mlock", [], reason)
    pinned.close()


@pytest.mark.parametrize(
    "reason", ["cudaGetDeviceCount: unknown error (error 999)", f"{NO_GPU}; missing: /dev/nvidia0"]
)
def test_a_gpu_that_should_be_there_and_is_not_is_told_by_auto_too(memory: Region, reason: str) -> None:
    """CU-19."""
    pinned = _pin([memory], "auto", reason)
    assert (pinned.kind, pinned.why_not_cuda) == ("mlock", reason)
    assert pinned.warnings == [f"pin: cuda is not possible: {reason}; mlock is tried instead"]
    pinned.close()


@pytest.mark.parametrize("how", ["mlock", "none"])
def test_what_was_not_asked_for_is_not_tried(memory: Region, how: str) -> None:
    def never() -> tuple[CudaRuntime | None, str]:
        raise AssertionError("no CUDA was asked for")

    pinned = _pin([memory], how, "", runtime=never)
    assert (pinned.kind, pinned.why_not_cuda) == (how, f"its configuration says pin: {how}")
    pinned.close()


def test_none_does_nothing(memory: Region) -> None:
    before = _locked_bytes()
    pinned = _pin([memory], "none", FakeCuda())
    assert (pinned.kind, pinned.chunks, pinned.warnings) == ("none", [], [])
    assert _locked_bytes() == before


def test_mlock_locks_for_real_and_unlocks(memory: Region) -> None:
    before, told = _locked_bytes(), list[int]()
    pinned = _pin([memory], "mlock", "", progress=told.append)
    assert told == [CHUNK, CHUNK, CHUNK // 2]
    assert _locked_bytes() - before == memory.nbytes == pinned.bytes_in(memory)
    pinned.close()
    assert _locked_bytes() == before


def test_mlock_cancelled_between_chunks_keeps_what_it_has(memory: Region) -> None:
    told: list[int] = []
    pinned = _pin([memory], "mlock", "", progress=told.append, cancelled=lambda: len(told) == 1)
    assert (pinned.kind, pinned.bytes_in(memory), pinned.warnings) == ("mlock", CHUNK, [])
    pinned.close()


def test_no_bytes_are_pinned_by_nothing() -> None:
    assert _pin([], "mlock", "").bytes_in(Region(0, 0)) == 0
    assert _pin([], "cuda", FakeCuda()).chunks == []


def test_the_limit_that_refuses_mlock_is_told(memory: Region, in_child: Callable[..., Any]) -> None:
    def refused() -> tuple[str, int, list[str], int]:
        # a new user has no CAP_IPC_LOCK, and keeps the limit of the process
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (CHUNK + PAGE, CHUNK + PAGE))
        pinned = _pin([memory], "auto", "no GPU is visible")
        return pinned.kind, len(pinned.chunks), pinned.warnings, _locked_bytes()

    kind, chunks, warnings, locked = in_child(refused, uid=NOBODY if os.geteuid() == 0 else None)
    assert (kind, chunks, locked) == ("none", 0, 0)
    assert len(warnings) == 1
    assert warnings[0].startswith(
        "mlock of the weights failed after 16.00 KiB: cannot allocate memory (limit 20.00 KiB); they may be swapped"
    )
    assert "LimitMEMLOCK=infinity" in warnings[0]


def test_memory_that_cannot_be_locked_at_all_is_told() -> None:
    """An address that nothing is mapped at: refused whatever the limit."""
    view = mmap.mmap(-1, CHUNK)
    anchor = ctypes.c_char.from_buffer(view)
    region = Region(ctypes.addressof(anchor), CHUNK)
    del anchor
    view.close()
    pinned = _pin([region], "mlock", "")
    assert pinned.kind == "none"
    assert "mlock of the weights failed after 0 B" in pinned.warnings[0]
