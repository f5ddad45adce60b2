"""Workers that stream a model from a live creator: right from the first forward, whoever dies, and nothing stays."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ftd.errors import NoCreatorError
from tests.process import faked, streaming
from tests.process.conftest import _OURS
from tests.process.daemons import QUICK, Daemon, holding, left_in, polls, segments, wait_for
from tests.process.workers import Worker

Start = Callable[..., Daemon]
Workers = Callable[[], Worker]

#: Width and layers. 1 MiB: a layer is 128 KiB and a bit.
SIZE = (128, 8)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return streaming.checkpoint(tmp_path_factory.mktemp("streamed"), *SIZE)


@pytest.fixture(scope="module")
def shared(weights: Path) -> Iterator[Daemon]:
    """One daemon for all tests that leave it as it is."""
    directory = Path(tempfile.mkdtemp(prefix="ftd-"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FTD_RUNTIME_DIR", str(directory))
        with Daemon(f"{_OURS}offload", "--model", weights, "--set", "heartbeat_s=0.05") as daemon:
            daemon.wait_ready()
            yield daemon
    shutil.rmtree(directory)


@pytest.fixture
def unused(shared: Daemon) -> Iterator[Daemon]:
    """The shared daemon, which nobody uses before and after, and which is well after."""
    before = segments(shared.namespace)
    assert shared.status()["followers"] == []
    yield shared
    seen = shared.status()
    assert (seen["state"], seen["failure"], seen["warnings"]) == ("ready", None, [])
    assert segments(shared.namespace) == before


def rows(daemon: Daemon) -> dict[int, dict[str, Any]]:
    return {row["pid"]: row for row in daemon.status()["followers"]}


@pytest.mark.parametrize(
    "fields",
    [{}, {"skip_discovery": True, "transfer_mode": "raw_block_transfer"}, {"transfer_mode": "strategy"}],
    ids=["blocks", "raw", "strategy"],
)
def test_a_model_on_meta_is_right_from_the_first_forward(
    unused: Daemon, worker: Workers, fields: dict[str, Any]
) -> None:
    one = worker()
    one.do(streaming.offload_with, unused.namespace, SIZE, fields)
    assert one.do(streaming.forward), "the first"
    assert one.do(streaming.forwards, 6)
    assert one.do(streaming.phase)[:2] == ("inference", 0)
    one.do(streaming.release)
    assert one.do(streaming.forward), "released, it computes on with the views"
    assert rows(unused) == {}


def test_released_and_offloaded_again(unused: Daemon, worker: Workers) -> None:
    one = worker()
    for name in ("first", "second", "first"):
        one.do(streaming.offload_named, unused.namespace, SIZE, name)
        assert one.do(streaming.forwards, 5, name)
        one.do(streaming.release, name)
    assert rows(unused) == {}


class TestTheSameModelAgain:
    """Released, it has views of the creator's weights, and may be offloaded once more."""

    def test_streams_them(self, unused: Daemon, worker: Workers) -> None:
        one = worker()
        one.do(streaming.offload_with, unused.namespace, SIZE, {})
        for _ in range(2):
            assert one.do(streaming.forwards, 5)
            one.do(streaming.release)
            one.do(streaming.offload_again, unused.namespace)
        assert one.do(streaming.forwards, 5)

    def test_streams_what_was_changed_in_between(self, unused: Daemon, worker: Workers) -> None:
        one = worker()
        one.do(streaming.offload_with, unused.namespace, SIZE, {})
        one.do(streaming.change_and_offload_again, unused.namespace)
        assert one.do(streaming.forwards, 5)


class TestNoCreator:
    def test_the_error_names_the_command(self, worker: Workers, namespace: str, runtime_dir: Path) -> None:
        one = worker()
        with pytest.raises(NoCreatorError, match=f"ftd start .*{namespace}"):
            one.do(streaming.offload_with, namespace, SIZE, {})
        assert segments(namespace) == [] and left_in(runtime_dir) == []

    def test_one_that_comes_later_is_waited_for(
        self, start: Start, worker: Workers, namespace: str, weights: Path
    ) -> None:
        one = worker()
        one.begin(streaming.offload_with, namespace, SIZE, {"shm_wait_timeout": 60.0})
        wait_for("the worker to wait", lambda: polls(one.pid))
        assert one.idle()
        start("--model", weights)
        one.result()
        assert one.do(streaming.forwards, 5)


def test_status_shows_what_is_where(unused: Daemon, worker: Workers) -> None:
    """Of every follower by itself, from `offload()` on, as its plan is at that time; nothing after `release()`."""
    one, other = worker(), worker()
    for each in (one, other):
        each.do(streaming.offload_with, unused.namespace, SIZE, {})
        assert each.do(streaming.forward)
    other.do(streaming.to_inference)
    for each in (one, other):
        shown, expected = rows(unused)[each.pid], each.do(streaming.placement)
        assert {key: shown[key] for key in expected} == expected
        assert expected["resident_bytes"] > 0 and expected["streamed_bytes"] > 0
        assert shown["state"] == "attached" and shown["pin"] == "none" and shown["pinned_bytes"] == 0
    one.do(streaming.release)
    assert set(rows(unused)) == {other.pid}
    other.do(streaming.release)
    assert rows(unused) == {}


class TestOnAFakeGpu:
    """The real daemon's weights, to a GPU that is a fake: CUDA refuses what it may refuse, and bits stay the same."""

    def test_forwards_begin_staged_and_go_on_directly(self, unused: Daemon, worker: Workers) -> None:
        one = worker()
        one.do(faked.offload, unused.namespace, SIZE)
        before, row = one.do(faked.facts), rows(unused)[one.pid]
        assert before["registered"] == faked.CHUNK_BYTES, "the first chunk, and nothing for what is resident"
        assert before["way"] == "pull", "a daemon without a GPU pushes nothing"
        assert before["contexts"] == [0]
        assert (row["pin"], row["pinned_bytes"]) == ("cuda", faked.CHUNK_BYTES)
        assert one.do(streaming.forwards, 2)
        then = one.do(faked.facts)
        assert then["staged"] > before["staged"] and then["direct"] == before["direct"]
        one.do(faked.go)
        after, row = one.do(faked.facts), rows(unused)[one.pid]
        assert row["streamed_bytes"] <= after["registered"] < row["planned_bytes"]
        assert (row["pin"], row["pinned_bytes"]) == ("cuda", after["registered"])
        assert one.do(streaming.to_inference) >= 1
        assert one.do(streaming.forwards, 2)
        last = one.do(faked.facts)
        assert last["staged"] == then["staged"] and last["direct"] > then["direct"]
        assert last["registered"] == after["registered"]
        one.do(streaming.release)
        assert one.do(faked.nothing_left)
        assert one.do(streaming.forward)

    @pytest.mark.parametrize(
        ("refuse", "limit", "pin", "pinned"),
        [
            ("unsupported", 0, "staged", 0),
            ("read_only", 0, "staged", 0),
            ("all", 0, "none", 0),
            ("nth", 1, "staged", 0),
            ("nth", 3, "staged", 2),
            ("above", faked.CHUNK_BYTES - 1, "staged", 0),
            ("total", 4 * faked.CHUNK_BYTES, "staged", 4),
        ],
    )
    def test_refusals_cost_speed_alone(
        self, unused: Daemon, worker: Workers, refuse: str, limit: int, pin: str, pinned: int
    ) -> None:
        one = worker()
        one.do(faked.offload, unused.namespace, SIZE, refuse, limit)
        assert one.do(streaming.forward), "the first"
        one.do(faked.go)
        assert one.do(streaming.to_inference) >= 1
        assert one.do(streaming.forwards, 3)
        row = rows(unused)[one.pid]
        assert (row["pin"], row["pinned_bytes"]) == (pin, pinned * faked.CHUNK_BYTES)
        assert one.do(faked.facts)["registered"] == row["pinned_bytes"]
        one.do(streaming.release)
        assert one.do(faked.nothing_left)

    def test_two_at_once(self, unused: Daemon, worker: Workers) -> None:
        crew = [worker(), worker()]
        for each in crew:
            each.do(faked.offload, unused.namespace, SIZE)
        for each in crew:
            each.begin(faked.go)
        for each in crew:
            each.result()
            assert each.do(streaming.forwards, 6)
        found = [each.do(faked.facts)["registered"] for each in crew]
        assert found[0] == found[1] > faked.CHUNK_BYTES
        for each in crew:
            each.do(streaming.release)
            assert each.do(faked.nothing_left)

    def test_one_that_dies_while_it_registers_holds_up_nobody(self, unused: Daemon, worker: Workers) -> None:
        victim, other = worker(), worker()
        victim.do(faked.offload, unused.namespace, SIZE)
        victim.do(faked.await_registration)
        victim.kill()
        other.do(faked.offload, unused.namespace, SIZE)
        other.do(faked.go)
        assert other.do(streaming.forwards, 6)
        assert set(rows(unused)) == {other.pid}
        other.do(streaming.release)

    def test_released_while_it_registers(self, unused: Daemon, worker: Workers) -> None:
        one = worker()
        one.do(faked.offload, unused.namespace, SIZE)
        one.do(faked.await_registration)
        one.do(faked.release_in_the_midst)
        assert one.do(faked.nothing_left)
        assert one.do(streaming.forward)


class TestDeath:
    def test_of_the_daemon_while_a_worker_streams(
        self, start: Start, worker: Workers, namespace: str, weights: Path, tmp_path: Path
    ) -> None:
        """Killed, then another one in its place, which adopts: forwards notice neither."""
        first, one = start("--model", weights, *QUICK), worker()
        one.do(streaming.offload_with, namespace, SIZE, {"profiling_iters": 20})
        stop, begun = tmp_path / "stop", tmp_path / "begun"
        one.begin(streaming.forwards_until, stop, begun)
        wait_for("forwards", begun.exists)
        first.kill()
        second = start("--model", weights, *QUICK)
        stop.touch()
        count, right = one.result()
        assert count == right and one.do(streaming.to_inference) >= 0
        assert one.do(streaming.forwards, 3)
        one.do(streaming.release)
        other = worker()
        other.do(streaming.offload_with, namespace, SIZE, {})
        assert other.do(streaming.forwards, 3)
        assert set(rows(second)) == {other.pid}

    def test_of_the_daemon_for_good(
        self, start: Start, worker: Workers, namespace: str, weights: Path, runtime_dir: Path
    ) -> None:
        """Nobody takes over: the worker goes through all phases, and may release."""
        daemon, one = start("--model", weights, *QUICK), worker()
        one.do(streaming.offload_with, namespace, SIZE, {})
        assert one.do(streaming.forward)
        daemon.kill()
        assert one.do(streaming.forwards, 8)
        assert one.do(streaming.phase)[0] == "inference"
        one.do(streaming.release)
        assert one.do(streaming.forward)
        one.end()
        start("--model", weights)  # whose orderly end removes what is left

    def test_of_a_worker_while_it_streams(self, unused: Daemon, worker: Workers, tmp_path: Path) -> None:
        before = segments(unused.namespace)
        victim, neighbour = worker(), worker()
        for each in (victim, neighbour):
            each.do(streaming.offload_with, unused.namespace, SIZE, {})
        begun = tmp_path / "begun"
        victim.begin(streaming.forwards_until, tmp_path / "never", begun)
        wait_for("forwards", begun.exists)
        victim.kill()
        assert set(rows(unused)) == {neighbour.pid}
        assert segments(unused.namespace) == before
        assert neighbour.do(streaming.forwards, 5)

    @pytest.mark.parametrize(
        "place",
        [
            "ftd_client.stream.staged.walk",  # attached and bound
            "ftd_client.stream.staged.open_link",  # the host is there
            "ftd_client.phase.replanning.choose_plan",  # the link's thread runs, parameters are parked
            "ftd_client.phase.replanning.describe",  # installed, and told to status
        ],
    )
    def test_of_a_worker_within_offload(self, unused: Daemon, worker: Workers, tmp_path: Path, place: str) -> None:
        before = segments(unused.namespace)
        victim, reached = worker(), tmp_path / "reached"
        victim.begin(streaming.stand_at, place, reached, unused.namespace, SIZE)
        wait_for(place, reached.exists)
        assert set(rows(unused)) == {victim.pid}
        victim.kill()
        assert rows(unused) == {}
        assert segments(unused.namespace) == before


def test_the_second_worker_plans_by_what_the_first_measured(
    start: Start, worker: Workers, namespace: str, weights: Path
) -> None:
    """By the profile that the daemon keeps, from its first forward on; its phases are those of the configuration."""
    start("--model", weights)
    asked = {"load_strategy": None, "discovery_iters": 2, "profiling_iters": 3}
    first, second = worker(), worker()
    first.do(streaming.listen)
    second.do(streaming.listen)
    first.do(streaming.offload_with, namespace, SIZE, asked)
    assert first.do(streaming.phase) == ("discovery", 5, "all_streamed"), "nothing is known"
    assert first.do(streaming.to_inference) == 5
    strategy = first.do(streaming.phase)[2]
    assert strategy != "all_streamed"
    second.do(streaming.offload_with, namespace, SIZE, asked)
    assert second.do(streaming.phase) == ("discovery", 5, strategy)
    seeded = "the first plan is from a profile that the daemon keeps"
    assert seeded in second.do(streaming.said) and seeded not in first.do(streaming.said)
    assert second.do(streaming.to_inference) == 5
    assert second.do(streaming.forwards, 2)


def test_what_a_worker_changed_before_it_streams_itself_and_no_other(unused: Daemon, worker: Workers) -> None:
    one, other = worker(), worker()
    one.do(streaming.bind_and_change, unused.namespace, SIZE)
    other.do(streaming.offload_with, unused.namespace, SIZE, {})
    for _ in range(2):
        assert one.do(streaming.forwards, 3)
        assert other.do(streaming.forwards, 3)


def test_two_models_of_one_namespace_in_one_process(unused: Daemon, worker: Workers) -> None:
    one = worker()
    for name in ("first", "second"):
        one.do(streaming.offload_named, unused.namespace, SIZE, name)
    for _ in range(5):
        for name in ("first", "second"):
            assert one.do(streaming.forward, name)
    assert len(unused.status()["followers"]) == 2
    one.do(streaming.release, "first")
    assert one.do(streaming.forwards, 3, "second")
    assert one.do(streaming.forward, "first")
    assert len(unused.status()["followers"]) == 1


class TestFork:
    """After `offload()`: the copy thread and the lease are the parent's."""

    def test_a_forward_in_the_child_is_a_clear_error(self, unused: Daemon, worker: Workers) -> None:
        one = worker()
        one.do(streaming.offload_with, unused.namespace, SIZE, {})
        for before in (0, 1, 6):  # nothing was run yet, in discovery, in inference
            assert one.do(streaming.forwards, before)
            kind, text = one.do(streaming.fork_and_forward)
            assert kind == "LinkError" and f"belongs to process {one.pid}" in text and "offload" in text
        assert one.do(streaming.forwards, 2)

    def test_nor_does_it_hang_when_another_thread_was_in_a_forward(self, unused: Daemon, worker: Workers) -> None:
        one = worker()
        one.do(streaming.offload_with, unused.namespace, SIZE, {})
        assert one.do(streaming.forwards, 5)
        kind, text = one.do(streaming.fork_within_a_forward, streaming.forward, 2.0)
        assert kind == "LinkError" and f"belongs to process {one.pid}" in text
        assert one.do(streaming.fork_within_a_forward, streaming.release, 2.0) == ("", "")

    def test_the_child_may_release(self, unused: Daemon, worker: Workers) -> None:
        one = worker()
        one.do(streaming.offload_with, unused.namespace, SIZE, {})
        assert one.do(streaming.fork_and_release) == ("", "")
        assert one.do(streaming.forwards, 2)
        assert set(rows(unused)) == {one.pid}

    def test_the_child_may_offload_another_model(self, unused: Daemon, worker: Workers) -> None:
        one = worker()
        one.do(streaming.offload_with, unused.namespace, SIZE, {})
        assert one.do(streaming.fork_and_offload, unused.namespace, SIZE) == ("", "")
        assert one.do(streaming.forwards, 6)
        assert set(rows(unused)) == {one.pid}


def test_four_workers_share_one_copy(start: Start, worker: Workers, namespace: str, tmp_path: Path) -> None:
    """16 MiB streamed by four at once: their shares of the weights and the daemon's are one copy."""
    size = (512, 8)
    path = streaming.checkpoint(tmp_path, *size)
    daemon, crew = start("--model", path), [worker() for _ in range(4)]
    total = daemon.status()["model"]["bytes"]
    for each in crew:
        each.begin(streaming.offload_with, namespace, size, {})
    for each in crew:
        each.result()
    for each in crew:
        each.begin(streaming.forwards, 5)
    assert all(each.result() for each in crew)
    shares = [each.do(streaming.pss_bytes, namespace) for each in crew]
    assert all(shares)
    assert sum(shares) <= 1.1 * total
    for each in crew:
        each.do(streaming.release)
        each.do(streaming.forget)
    assert all(holding(each.pid, namespace) == set() for each in crew), "mappings go with their last tensor"
