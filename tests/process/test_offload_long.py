"""Streaming for long: what a worker and its daemon hold stays as it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ftd.units import MIB
from tests.process import streaming
from tests.process.daemons import Daemon, holding, segments
from tests.process.workers import Worker

pytestmark = pytest.mark.long

Start = Callable[..., Daemon]
Workers = Callable[[], Worker]

SIZE = (128, 8)
#: Of 2,000 forwards or 100 cycles; one of them that leaves a KiB (a forward) or 16 KiB (a cycle) behind is found.
NOISE_BYTES = MIB


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return streaming.checkpoint(tmp_path_factory.mktemp("streamed"), *SIZE)


def grown(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    return {key: after[key] - before[key] for key in before if after[key] != before[key]}


def check(before: dict[str, int], after: dict[str, int]) -> None:
    more = grown(before, after)
    assert more.pop("own_bytes", 0) <= NOISE_BYTES and not more, (before, after)


@pytest.mark.parametrize("fields", [{}, {"enable_diagnostics": True}, {"transfer_mode": "strategy"}])
def test_two_thousand_forwards(
    start: Start, worker: Workers, namespace: str, weights: Path, fields: dict[str, object]
) -> None:
    daemon, one = start("--model", weights), worker()
    one.do(streaming.offload_with, namespace, SIZE, fields)
    assert one.do(streaming.forwards, 200)
    before = one.do(streaming.holds)
    for _ in range(10):
        assert one.do(streaming.forwards, 200)
    check(before, one.do(streaming.holds))
    assert [row["state"] for row in daemon.status()["followers"]] == ["attached"]


def test_a_hundred_cycles_of_attach_and_release(start: Start, worker: Workers, namespace: str, weights: Path) -> None:
    daemon, one = start("--model", weights), worker()
    before_all = segments(namespace)
    one.do(streaming.cycle, namespace, SIZE, 10)
    before = one.do(streaming.holds)
    for _ in range(10):
        one.do(streaming.cycle, namespace, SIZE, 10)
    check(before, one.do(streaming.holds))
    assert holding(one.pid, namespace) == set()
    assert daemon.status()["followers"] == [] and segments(namespace) == before_all


def test_a_hundred_cycles_of_a_model_with_its_own_weights(worker: Workers) -> None:
    one = worker()
    one.do(streaming.keep_own, SIZE)
    one.do(streaming.cycle_own, 10)
    before = one.do(streaming.holds)
    for _ in range(10):
        one.do(streaming.cycle_own, 10)
    check(before, one.do(streaming.holds))
