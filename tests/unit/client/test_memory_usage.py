"""Bytes, and the same in units of 2**20."""

import pickle

import pytest

from ftd_client.memory_usage import GPUMemoryUsage


def test_megabytes_are_binary() -> None:
    usage = GPUMemoryUsage(blocks_bytes=3 << 20, unmapped_tensors_bytes=1 << 19, total_bytes=5_000_000)
    assert (usage.blocks_mb, usage.unmapped_tensors_mb) == (3.0, 0.5)
    assert usage.total_mb == pytest.approx(4.76837, abs=1e-5)


def test_figures_are_given_in_this_order_and_stay() -> None:
    usage = GPUMemoryUsage(1, 2, 4)
    assert (usage.blocks_bytes, usage.unmapped_tensors_bytes, usage.total_bytes) == (1, 2, 4)
    with pytest.raises(AttributeError):
        usage.total_bytes = 3  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(usage)) == usage
