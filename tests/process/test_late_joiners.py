"""Followers that come too early, in the middle of a load, and to one that fails."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

import ftd_client
from ftd.errors import AttachTimeoutError, CreatorFailedError, NoCreatorError
from ftd.shm.names import SHM_DIR
from ftd.shm.state import State
from tests.process import workers
from tests.process.checkpoints import TINY_DIGESTS, held, hollow, tiny
from tests.process.daemons import Daemon, frozen, ftd, polls, segments, wait_for
from tests.process.workers import Worker

Start = Callable[..., Daemon]
Workers = Callable[[], Worker]


class TestBeforeTheDaemon:
    """A positive timeout waits for a creator to appear; none raises at once."""

    def test_ten_followers_that_were_there_first(
        self, start: Start, worker: Workers, namespace: str, runtime_dir: Path, model: Path
    ) -> None:
        early = [worker() for _ in range(10)]
        for follower in early:
            follower.begin(workers.attach, namespace, 60)
        for follower in early:
            wait_for("its wait", lambda pid=follower.pid: polls(pid))
        daemon = start("--model", model)
        assert [follower.result() for follower in early] == [1] * 10
        assert {row["pid"] for row in daemon.status()["followers"]} == {follower.pid for follower in early}
        for follower in early:
            assert follower.do(workers.contents, namespace) == TINY_DIGESTS

    @pytest.mark.parametrize("timeout", [0, None])
    def test_nobody_is_not_waited_for(self, namespace: str, runtime_dir: Path, timeout: float | None) -> None:
        with pytest.raises(NoCreatorError, match=namespace) as caught:
            ftd_client.attach(namespace, timeout=timeout)
        assert f"ftd start --namespace {namespace}" in caught.value.remedy

    def test_nobody_came(self, worker: Workers, namespace: str, runtime_dir: Path) -> None:
        name, text, seconds = worker().do(workers.attach_timed, namespace, 0.4)
        assert name == "NoCreatorError" and "within 0.4 s" in text
        assert 0.4 <= seconds < 2.0

    def test_a_name_without_bytes_is_no_creator(
        self, start: Start, namespace: str, runtime_dir: Path, model: Path
    ) -> None:
        """SH-05, LK-09: zero-byte left-overs of every name: a bounded wait, and a start that reclaims them."""
        for tail in ("lock", "coord", "slots", "g1.0", "g1.manifest", "g1.files"):
            (SHM_DIR / f"ftd.{namespace}.{tail}").touch()
        with pytest.raises(NoCreatorError):
            ftd_client.attach(namespace, timeout=0.2)
        assert ftd("status", "-n", namespace).status == 3
        start("--model", model)
        assert set(segments(namespace)) == {"lock", "coord", "slots", "g2.0", "g2.manifest", "g2.files"}
        with ftd_client.attach(namespace, timeout=0) as weights:
            assert weights.generation == 2

    def test_damaged_left_overs(self, start: Start, namespace: str, runtime_dir: Path, model: Path) -> None:
        """LK-01, LK-09, SH-16: foreign bytes, a live pid among them, decide nothing."""
        start("--model", model).kill()
        for tail, data in {
            "lock": str(os.getpid()).encode(),
            "coord": b"\xff" * 5000,
            "slots": b"ftdslots" + bytes(100),
            "g1.0": b"short",
            "g1.manifest": os.urandom(64),
        }.items():
            (SHM_DIR / f"ftd.{namespace}.{tail}").write_bytes(data)
        assert ftd("status", "-n", namespace).status == 3
        with pytest.raises(NoCreatorError):
            ftd_client.attach(namespace, timeout=0)
        daemon = start("--model", model)
        assert daemon.status()["generation"] == 2
        with ftd_client.attach(namespace, timeout=0) as weights:
            assert set(weights.state_dict()) == set(TINY_DIGESTS)


class TestDuringTheLoad:
    """A living creator is waited for, as long as the timeout says."""

    def test_attach_in_the_middle(self, start: Start, worker: Workers, namespace: str, tmp_path: Path) -> None:
        followers = [worker() for _ in range(3)]
        daemon = frozen(start, hollow(tmp_path, 96))
        for follower, timeout in zip(followers, (60, 0, None), strict=True):
            follower.begin(workers.attach, namespace, timeout)
        for follower in followers:
            wait_for("its wait", lambda pid=follower.pid: polls(pid))
            assert follower.idle()
        daemon.thaw()
        assert [follower.result() for follower in followers] == [1, 1, 1]

    def test_ready_and_gone_between_two_looks(
        self, start: Start, worker: Workers, namespace: str, tmp_path: Path
    ) -> None:
        """It did not die while it loaded: who may wait gets the next daemon's weights, the other hears of nobody."""
        model = tiny(tmp_path / "model")
        patient, hasty = worker(), worker()
        with held(model / "config.json"):
            daemon = start("--model", model, wait=False)
            daemon.wait(State.LOADING)
            patient.begin(workers.attach, namespace, 60)
            hasty.begin(workers.attach_timed, namespace, 0)
            for follower in (patient, hasty):
                wait_for("its wait", lambda pid=follower.pid: polls(pid))
                follower.freeze()
        daemon.wait_ready()
        daemon.kill()
        for follower in (patient, hasty):
            follower.thaw()
        assert hasty.result()[0] == "NoCreatorError"
        assert start("--model", model).status()["generation"] == 2
        assert patient.result() == 2

    def test_not_in_time(self, start: Start, worker: Workers, namespace: str, tmp_path: Path) -> None:
        model = tiny(tmp_path / "model")
        follower = worker()
        with held(model / "config.json"):
            daemon = start("--model", model, wait=False)
            daemon.wait(State.LOADING)
            name, text, seconds = follower.do(workers.attach_timed, namespace, 0.3)
        assert name == AttachTimeoutError.__name__ and "still loading after 0.3 s" in text
        assert 0.3 <= seconds < 3.0
        daemon.wait_ready()

    def test_stopped_before_it_was_ready(self, start: Start, worker: Workers, namespace: str, tmp_path: Path) -> None:
        """An orderly stop ends the wait as well: nobody waits for a load that was called off."""
        follower = worker()
        # large: it must not be ready before it has seen the signal, or the follower rightly waits for the next one
        daemon = frozen(start, hollow(tmp_path, 768))
        follower.begin(workers.attach_timed, namespace, 60)
        wait_for("its wait", lambda: polls(follower.pid))
        daemon.process.terminate()
        daemon.thaw()
        assert daemon.ended() == 0
        name, text, seconds = follower.result()
        assert name == "CreatorDiedError" and "was stopped while it loaded" in text
        assert seconds < 30


class TestFailure:
    """The creator's own message reaches everybody who waited, and those who come later."""

    def test_followers_that_wait(self, start: Start, worker: Workers, namespace: str, tmp_path: Path) -> None:
        model = tiny(tmp_path / "model")
        followers = [worker() for _ in range(3)]
        with held(model / "config.json") as config:
            daemon = start("--model", model, wait=False)
            daemon.wait_segments()
            for follower, timeout in zip(followers, (60, 0, None), strict=True):
                follower.begin(workers.attach_timed, namespace, timeout)
            for follower in followers:
                wait_for("its wait", lambda pid=follower.pid: polls(pid))
            os.ftruncate(config, 1)
        assert daemon.ended() == 1
        for follower in followers:
            name, text, _ = follower.result()
            assert name == "CreatorFailedError"
            assert "config.json has 1 bytes" in text and "[source_changed]" in text and "→ start again" in text
        assert segments(namespace) == []

    def test_followers_that_wait_before_it_starts(
        self, start: Start, worker: Workers, namespace: str, tmp_path: Path
    ) -> None:
        """A start that fails within an instant, perhaps between two looks of the waiting one."""
        follower = worker()
        follower.begin(workers.attach_timed, namespace, 60)
        wait_for("its wait", lambda: polls(follower.pid))
        (tmp_path / "model.safetensors").write_bytes(b"no weights")
        assert start("--model", tmp_path, wait=False).ended() == 1
        name, text, seconds = follower.result()
        assert name == "CreatorFailedError" and "model.safetensors" in text
        assert seconds < 30

    def test_followers_that_come_later(
        self, worker: Workers, namespace: str, runtime_dir: Path, tmp_path: Path
    ) -> None:
        (tmp_path / "model.safetensors").write_bytes(b"no weights")
        failed = ftd("start", "-n", namespace, "--model", tmp_path)
        assert failed.status == 1
        for timeout in (0, None):
            with pytest.raises(CreatorFailedError, match=r"model\.safetensors"):
                ftd_client.attach(namespace, timeout=timeout)
        name, text, seconds = worker().do(workers.attach_timed, namespace, 0.5)
        assert name == "CreatorFailedError" and "model.safetensors" in text
        assert 0.5 <= seconds < 3.0, "somebody may start it again within the time"

    def test_a_second_try_is_waited_for(
        self, start: Start, worker: Workers, namespace: str, runtime_dir: Path, tmp_path: Path, model: Path
    ) -> None:
        (tmp_path / "model.safetensors").write_bytes(b"no weights")
        assert ftd("start", "-n", namespace, "--model", tmp_path).status == 1
        follower = worker()
        follower.begin(workers.attach, namespace, 60)
        wait_for("its wait", lambda: polls(follower.pid))
        start("--model", model)
        assert follower.result() == 1
