"""sd_notify as a service manager sees it, from a socket of the test's own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import ftd_client
from ftd.daemon.notify import NotifyListener
from ftd.shm.state import State
from tests.process.checkpoints import held, hollow, tiny
from tests.process.daemons import PATIENCE_S, QUICK, Daemon, frozen

Start = Callable[..., Daemon]


class Manager:
    """The other end of NOTIFY_SOCKET: every datagram with the time at which it was taken."""

    def __init__(self, listener: NotifyListener) -> None:
        self._listener = listener
        self.heard: list[dict[str, str]] = []
        self.environ = {"NOTIFY_SOCKET": listener.address}

    def until(self, key: str, value: str | None = None) -> dict[str, str]:
        """Listens until a datagram has this field."""
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            fields = self._listener.receive(0.1)
            if fields is not None:
                self.heard.append(fields)
                if key in fields and value in (None, fields[key]):
                    return fields
        raise AssertionError(f"{key}={value} not within {PATIENCE_S:g} s: {self.heard[-5:]}")

    def silent(self, key: str, seconds: float) -> bool:
        """Whether no datagram of this field comes in that time."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            fields = self._listener.receive(left)
            if fields is not None and key in fields:
                return False
        return True

    def drain(self) -> None:
        while self._listener.receive(0) is not None:
            pass


@pytest.fixture
def manager() -> Iterator[Manager]:
    with NotifyListener() as listener:
        yield Manager(listener)


def test_ready_means_that_an_attach_works(
    start: Start, manager: Manager, namespace: str, runtime_dir: Path, tmp_path: Path
) -> None:
    """OP-03: not before everything is published; STATUS says how far it is meanwhile."""
    model = tiny(tmp_path / "model")
    with held(model / "config.json"):
        daemon = start("--model", model, *QUICK, wait=False, environ=manager.environ)
        manager.until("STATUS", "loading 0 %")
        assert not any("READY" in fields for fields in manager.heard)
        assert daemon.look().state is State.LOADING
    ready = manager.until("READY", "1")
    with ftd_client.attach(namespace, timeout=0) as weights:
        assert weights.generation == 1
    assert ready["STATUS"].startswith("ready: generation 1, 4 tensors")
    daemon.process.terminate()
    assert manager.until("STOPPING", "1")["STATUS"] == "stopping"
    assert daemon.ended() == 0


def test_time_is_asked_for_while_it_progresses(
    start: Start, manager: Manager, namespace: str, runtime_dir: Path, tmp_path: Path
) -> None:
    """OP-03: progress extends the start's timeout, and a load that hangs does not, although the heartbeat goes on."""
    model = tiny(tmp_path / "model")
    with held(model / "config.json"):
        daemon = start("--model", model, *QUICK, wait=False, environ=manager.environ)
        assert int(manager.until("EXTEND_TIMEOUT_USEC")["EXTEND_TIMEOUT_USEC"]) >= 10_000_000
        for _ in range(2):  # the first may go with a step, the second does not
            manager.until("STATUS", "loading 0 %")
        assert manager.silent("EXTEND_TIMEOUT_USEC", 0.5)
        manager.until("STATUS", "loading 0 %")
        seen = daemon.look()
        assert seen.record is not None and seen.state is State.LOADING
    manager.until("READY")


def test_percent(start: Start, manager: Manager, namespace: str, runtime_dir: Path, tmp_path: Path) -> None:
    """Stopped in the midst, the last status says how much of it is done."""

    def begin(*words: str | Path, wait: bool) -> Daemon:
        manager.drain()
        manager.heard.clear()
        return start(*words, wait=wait, environ=manager.environ)

    daemon = frozen(begin, hollow(tmp_path, 96), 0.4)
    daemon.thaw()
    manager.until("READY")
    texts = [fields["STATUS"] for fields in manager.heard if fields.get("STATUS", "").startswith("loading")]
    percents = [int(text.split()[1]) for text in texts]
    assert percents == sorted(percents) and all(0 <= percent <= 100 for percent in percents)
    assert any(0 < percent < 100 for percent in percents), texts


def test_the_watchdog_is_fed_by_the_loop(
    start: Start, manager: Manager, namespace: str, runtime_dir: Path, model: Path
) -> None:
    """Twice in its interval, whatever the heartbeat's is; a daemon that stands does not feed it."""
    environ = manager.environ | {"WATCHDOG_USEC": "400000"}
    daemon = start("--model", model, environ=environ)  # heartbeat every second
    manager.until("READY")
    begun = time.monotonic()
    for _ in range(8):
        manager.until("WATCHDOG", "1")
    assert time.monotonic() - begun < 6.0
    daemon.freeze()
    manager.drain()
    assert manager.silent("WATCHDOG", 1.0)
    daemon.thaw()
    manager.until("WATCHDOG", "1")


def test_the_watchdog_is_fed_while_it_loads(
    start: Start, manager: Manager, namespace: str, runtime_dir: Path, tmp_path: Path
) -> None:
    """LK-06: a loader that stands in a system call is not a loop that stands."""
    model = tiny(tmp_path / "model")
    with held(model / "config.json"):
        start("--model", model, wait=False, environ=manager.environ | {"WATCHDOG_USEC": "400000"})
        manager.until("STATUS", "loading 0 %")
        for _ in range(4):
            manager.until("WATCHDOG", "1")
        assert not any("READY" in fields for fields in manager.heard)
    manager.until("READY")


def test_a_failure_is_told(start: Start, manager: Manager, namespace: str, runtime_dir: Path, tmp_path: Path) -> None:
    """STATUS carries the reason; READY never comes."""
    daemon = start("--model", tmp_path / "nothing", wait=False, environ=manager.environ)
    status = manager.until("X_FTD_ERROR")
    assert status["STATUS"].startswith("failed: ") and str(tmp_path / "nothing") in status["STATUS"]
    assert daemon.ended() == 2
    assert not any("READY" in fields for fields in manager.heard)


@pytest.mark.parametrize("address", ["/nowhere/at/all", "rubbish"])
def test_nobody_listens(address: str, start: Start, namespace: str, runtime_dir: Path, model: Path) -> None:
    """A manager that is gone is no reason to fail."""
    daemon = start("--model", model, *QUICK, environ={"NOTIFY_SOCKET": address})
    assert daemon.status()["state"] == "ready"
    assert daemon.terminate() == 0


def test_a_manager_that_does_not_read(
    start: Start, manager: Manager, namespace: str, runtime_dir: Path, model: Path
) -> None:
    """Its queue fills up; the daemon blocks on nothing, and READY comes through once there is room."""
    daemon = start("--model", model, *QUICK, environ=manager.environ)
    beat = 0
    for _ in range(20):
        seen = daemon.look()
        assert seen.record is not None and seen.state is State.READY
        while (record := daemon.look().record) is None or record.heartbeat_ns <= beat:
            time.sleep(0.001)
        beat = record.heartbeat_ns
    manager.until("READY", "1")
