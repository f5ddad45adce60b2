"""Publishing tensors that lie on a real GPU."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest
import torch

import ftd_client
from ftd.shm.digest import PIECE_BYTES
from ftd_client import publishing
from tests.gpu.conftest import ftd, status_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible"),
]


@pytest.fixture
def receiving() -> Iterator[str]:
    """A namespace that waits for a publisher; its daemon leaves the GPU alone."""
    namespace = f"gpu-{uuid.uuid4().hex[:8]}"
    done = ftd("start", "-n", namespace, "--receive", "--detach", "--set", "pin=none")
    try:
        assert done.returncode == 0, done.stderr
        yield namespace
    finally:
        ftd("stop", "-n", namespace, "--force")


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.resolve_conj().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    big = torch.randint(0, 256, (3 * PIECE_BYTES + 77,), dtype=torch.uint8, device="cuda")
    wide = torch.randn(3000, 2500, device="cuda")
    return {
        "big": big,
        "tied": big,
        "turned": wide.t(),
        "every.other": wide[::2, 1::3],
        "expanded": torch.randn(1, 700, device="cuda").expand(900, 700),
        "half": torch.randn(1000, device="cuda").to(torch.bfloat16),
        "f8": torch.randn(64, device="cuda").to(torch.float8_e4m3fn),
        "conj": torch.randn(50, 60, dtype=torch.complex64, device="cuda").t().conj(),
        "scalar": torch.tensor(3.5, device="cuda"),
        "host": torch.arange(1000),
        "locked": torch.arange(1000).pin_memory(),
    }


def test_they_arrive_bit_for_bit(receiving: str) -> None:
    given = weights()
    published = ftd_client.publish(receiving, given)
    with ftd_client.attach(receiving) as follower:
        seen = follower.state_dict()
        assert seen.keys() == given.keys()
        wrong = [name for name in given if bits(seen[name]) != bits(given[name])]
        assert not wrong
        assert {name: seen[name].dtype for name in seen} == {name: given[name].dtype for name in given}
    assert status_of(receiving)["model"]["digest"] == published.digest


def test_what_is_queued_is_waited_for(receiving: str) -> None:
    """On a stream of the caller's own, which nothing else waits for."""
    target = torch.zeros(1 << 20, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(1_000_000_000)
        target.fill_(7.0)
        ftd_client.publish(receiving, {"a": target})
    with ftd_client.attach(receiving) as follower:
        assert follower.state_dict()["a"].eq(7.0).all()


def test_nothing_of_a_tensors_size_is_allocated_on_the_gpu(receiving: str) -> None:
    base = torch.randn(4096, 16384, device="cuda")  # 256 MiB
    given = {"turned": base.t(), "straight": base}
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    ftd_client.publish(receiving, given)
    # a slot's worth for each of 8 threads, where rows are gathered on the GPU before they are copied down
    assert torch.cuda.max_memory_allocated() - before <= 10 * PIECE_BYTES
    assert torch.cuda.memory_allocated() == before


def test_the_staging_segment_is_page_locked_meanwhile_and_no_longer(
    receiving: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots: list[torch.Tensor] = []
    locked: list[bool] = []
    real = publishing.fill

    def told(slot: torch.Tensor, *rest: object) -> list[memoryview]:
        slots.append(slot)
        locked.append(slot.is_pinned())
        return real(slot, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(publishing, "fill", told)
    ftd_client.publish(receiving, weights())
    assert locked and all(locked)
    assert not any(slot.is_pinned() for slot in slots)
