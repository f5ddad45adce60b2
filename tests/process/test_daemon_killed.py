"""kill -9 of the daemon, while it loads and while it serves: who learns of it, what stays, what the next start does."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ftd.errors import EXIT_ALREADY_RUNNING, EXIT_FAILED, EXIT_MEMORY, EXIT_NOT_RUNNING, EXIT_OK, EXIT_USAGE
from ftd.shm.names import SHM_DIR
from tests.process import workers
from tests.process.checkpoints import TINY_DIGESTS, held, hollow, tiny
from tests.process.daemons import QUICK, Command, Daemon, frozen, ftd, holding, polls, refused, segments, wait_for
from tests.process.workers import Worker

Start = Callable[..., Daemon]
Workers = Callable[[], Worker]


def pages(namespace: str) -> int:
    """Bytes that the namespace's names hold in /dev/shm."""
    return sum(path.stat().st_blocks * 512 for path in SHM_DIR.glob(f"ftd.{namespace}.*"))


class TestWhileReady:
    """Followers keep their weights, and the next start takes the place."""

    def test_followers_learn_of_it_within_a_second(
        self, start: Start, worker: Workers, namespace: str, model: Path
    ) -> None:
        daemon = start("--model", model)
        followers = [worker() for _ in range(3)]
        for follower in followers:
            assert follower.do(workers.attach, namespace) == 1
        at = time.monotonic()
        daemon.kill()
        for follower in followers:
            reason, told_at = follower.do(workers.wait_lost, namespace)
            assert reason == "died"
            assert told_at - at < 1.0
            assert follower.do(workers.contents, namespace) == TINY_DIGESTS
            assert len(follower.do(workers.lost, namespace)) == 1
        assert ftd("stop", "-n", namespace, "--force").status == EXIT_OK

    def test_what_status_and_stop_say_of_the_rest(self, start: Start, namespace: str, model: Path) -> None:
        """State `stopped`, status 3, and a warning that names what was left; `stop` removes it only by force."""
        daemon = start("--model", model)
        daemon.kill()
        shown = ftd("status", "-n", namespace, "--json")
        assert (shown.status, shown.json["state"], shown.json["failure"]) == (EXIT_NOT_RUNNING, "stopped", None)
        assert (
            f"pid {daemon.pid}" in shown.json["warnings"][0] and f"/ftd.{namespace}.g1.0" in shown.json["warnings"][0]
        )
        refused(ftd("stop", "-n", namespace), EXIT_NOT_RUNNING, "not running", f"/ftd.{namespace}.g1.0")
        assert "g1.0" in segments(namespace)
        forced = ftd("stop", "-n", namespace, "--force")
        assert forced.status == EXIT_OK and "removed" in forced.out, forced
        assert segments(namespace) == []
        assert ftd("stop", "-n", namespace, "--force").status == EXIT_NOT_RUNNING

    def test_five_in_a_row_leave_one_model(self, start: Start, namespace: str, model: Path) -> None:
        """SH-08, US-03: each start reclaims what the last one left, its socket too; generations rise."""
        held_bytes = []
        for generation in range(1, 6):
            daemon = start("--model", model)
            assert daemon.status()["generation"] == generation
            assert set(segments(namespace)) == {
                "lock", "coord", "slots", f"g{generation}.0", f"g{generation}.manifest", f"g{generation}.files",
            }  # fmt: skip
            held_bytes.append(pages(namespace))
            daemon.kill()
        assert len(set(held_bytes)) == 1
        assert start("--model", model).status()["generation"] == 6

    def test_an_old_generation_stays_as_long_as_it_is_held(
        self, start: Start, worker: Workers, namespace: str, model: Path
    ) -> None:
        """SH-13: the old generation beside the new one, each follower on its own; freed when the last one leaves."""
        first = start("--model", model, *QUICK)
        old, leaver = worker(), worker()
        for follower in (old, leaver):
            follower.do(workers.attach, namespace)
        first.kill()
        second = start("--model", model, *QUICK)
        assert {"g1.0", "g1.manifest", "g2.0", "g2.manifest"} <= set(segments(namespace))
        new = worker()
        assert new.do(workers.attach, namespace) == 2
        rows = {row["pid"]: row["generation"] for row in second.status()["followers"]}
        assert rows == {old.pid: 1, leaver.pid: 1, new.pid: 2}
        assert old.do(workers.contents, namespace) == new.do(workers.contents, namespace) == TINY_DIGESTS
        leaver.do(workers.close, namespace)
        wait_for("one follower less", lambda: len(second.status()["followers"]) == 2)
        assert "g1.0" in segments(namespace)
        old.kill()
        wait_for("the old generation's end", lambda: not any(s.startswith("g1.") for s in segments(namespace)))
        assert "g2.0" in segments(namespace)
        assert new.do(workers.contents, namespace) == TINY_DIGESTS

    def test_a_start_that_fails_after_it(self, start: Start, worker: Workers, namespace: str, model: Path) -> None:
        """Whoever waits for the next daemon learns that it failed, although the dead one's names are still there."""
        daemon = start("--model", model)
        follower = worker()
        follower.do(workers.attach, namespace)
        daemon.kill()
        waiting = Command("status", "-n", namespace, "--wait-ready", "60")
        wait_for("its first look", lambda: polls(waiting.pid))
        refused(ftd("start", "-n", namespace, "--model", model, "--set", "mode=0777"), EXIT_USAGE, "mode")
        result = waiting.result()
        assert result.status == EXIT_FAILED and result.wall_s < 30
        assert "g1.0" in segments(namespace) and follower.do(workers.contents, namespace) == TINY_DIGESTS
        follower.kill()
        assert start("--model", model).status()["generation"] == 2

    def test_an_old_follower_survives_the_second_daemon_too(
        self, start: Start, worker: Workers, namespace: str, model: Path
    ) -> None:
        """The lease of a first daemon's follower counts for the second and the third."""
        start("--model", model).kill()
        second = start("--model", model)
        follower = worker()
        assert follower.do(workers.attach, namespace) == 2
        second.kill()
        third = start("--model", model)
        assert third.status()["generation"] == 3
        assert {"g2.0", "g3.0"} <= set(segments(namespace)) and "g1.0" not in segments(namespace)
        third.terminate()
        assert segments(namespace) == []
        assert follower.do(workers.contents, namespace) == TINY_DIGESTS
        assert holding(follower.pid, namespace) == {"g2.0"}


class TestWhileLoading:
    """Nobody waits for what will not come, and nothing half-made is ever believed."""

    def test_waiting_followers_learn_of_it_within_a_second(
        self, start: Start, worker: Workers, namespace: str, tmp_path: Path
    ) -> None:
        daemon = frozen(start, hollow(tmp_path, 96))
        waiting = [worker() for _ in range(3)]
        for follower, timeout in zip(waiting, (60, 0, None), strict=True):
            follower.begin(workers.attach_timed, namespace, timeout)
        for follower in waiting:
            wait_for("the follower's wait", lambda pid=follower.pid: polls(pid))
            assert follower.idle()
        at = time.monotonic()
        daemon.kill()
        for follower in waiting:
            name, text, _ = follower.result()
            assert time.monotonic() - at < 1.0
            assert name == "CreatorDiedError" and f"pid {daemon.pid}" in text and "died" in text, text
        assert ftd("stop", "-n", namespace, "--force").status == EXIT_OK

    @pytest.mark.parametrize("fraction", [0.0, 0.7])
    def test_the_next_start_reclaims(self, start: Start, namespace: str, tmp_path: Path, fraction: float) -> None:
        """SH-08: killed at some point of the load, again and again; /dev/shm holds one model at the end."""
        model = hollow(tmp_path, 96)
        for _ in range(2):
            frozen(start, model, fraction).kill()
            assert ftd("status", "-n", namespace).status == EXIT_NOT_RUNNING
        last = start("--model", model, *QUICK)
        assert 96 << 20 <= pages(namespace) < 100 << 20
        assert last.terminate() == EXIT_OK
        assert segments(namespace) == []

    def test_right_before_ready(self, start: Start, namespace: str, tmp_path: Path) -> None:
        """A whole set of weights without a publication is worth nothing: the next start makes its own."""
        model = tiny(tmp_path / "model")
        with held(model / "config.json"):
            daemon = start("--model", model, wait=False)
            daemon.wait_segments()
            daemon.kill()
        assert "g1.0" in segments(namespace) and "g1.manifest" not in segments(namespace)
        assert start("--model", model).status()["state"] == "ready"
        assert not any(name.startswith("g1.") for name in segments(namespace))


class TestWhereBothDoNotFit:
    """Until a crashed daemon's generation can be adopted: status 6, and who holds the memory."""

    def test_the_holder_is_named(self, in_child: Callable[..., Any], tmp_path: Path, namespace: str) -> None:
        model = hollow(tmp_path, 24)
        in_child(lambda: _both_do_not_fit(model, namespace), shm="size=40m")


def _both_do_not_fit(model: Path, namespace: str) -> None:
    with Daemon(namespace, "--model", model) as first, Worker() as follower:
        first.wait_ready()
        follower.do(workers.attach, namespace)
        first.kill()
        second = ftd("start", "-n", namespace, "--model", model)
        refused(second, EXIT_MEMORY, "need", "free", "held by followers of earlier generations", f" {follower.pid} (")
        assert "g1.0" in segments(namespace), "the follower still holds it"
        shown = ftd("status", "-n", namespace, "--json").json
        assert (shown["state"], shown["failure"]["code"]) == ("failed", "memory")
        assert [row["pid"] for row in shown["followers"]] == [follower.pid]
        follower.kill()
        with Daemon(namespace, "--model", model) as third:
            third.wait_ready()
    assert segments(namespace) == []


def test_another_start_meets_the_dying_one(start: Start, namespace: str, model: Path) -> None:
    """CU-12: until the kernel has let go of the killed daemon's lock a start says that it runs; then it succeeds."""
    daemon = start("--model", model)
    daemon.freeze()
    refused(ftd("start", "-n", namespace, "--model", model), EXIT_ALREADY_RUNNING, f"pid {daemon.pid}")
    daemon.kill()
    assert start("--model", model).status()["generation"] == 2
