"""Followers that stop, die, come and go: the daemon does not care, and nothing adds up."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

import ftd_client
from ftd.errors import EXIT_OK, NoCreatorError, NoLeaseError, SegmentError
from ftd.shm.lock import LockFile
from ftd.shm.names import SHM_DIR
from ftd.shm.slots import SLOT_COUNT
from ftd_client.views import SharedWeights
from tests.process import workers
from tests.process.checkpoints import TINY_DIGESTS
from tests.process.daemons import PATIENCE_S, QUICK, Daemon, ftd, holding, segments, wait_for
from tests.process.workers import Worker

Start = Callable[..., Daemon]
Workers = Callable[[], Worker]


def states(daemon: Daemon) -> dict[int, str]:
    return {row["pid"]: row["state"] for row in daemon.status()["followers"]}


def test_a_killed_follower_vanishes(start: Start, worker: Workers, namespace: str, model: Path) -> None:
    """SH-01, LK-10: its lease goes with it, its slot is given again; segments and neighbours stay."""
    daemon = start("--model", model)
    victim, neighbour = worker(), worker()
    for follower in (victim, neighbour):
        follower.do(workers.attach, namespace)
    assert states(daemon) == {victim.pid: "attached", neighbour.pid: "attached"}
    before = segments(namespace)
    victim.kill()
    assert states(daemon) == {neighbour.pid: "attached"}
    assert segments(namespace) == before
    successor = worker()
    successor.do(workers.attach, namespace)
    assert states(daemon) == {neighbour.pid: "attached", successor.pid: "attached"}
    for follower in (neighbour, successor):
        assert follower.do(workers.contents, namespace) == TINY_DIGESTS


def test_a_stopped_follower_is_hung_and_comes_back(start: Start, worker: Workers, namespace: str, model: Path) -> None:
    """LK-04, for a follower: hung in status, its lease stands, and it goes on as if nothing had been."""
    daemon = start("--model", model, *QUICK)
    follower = worker()
    follower.do(workers.attach, namespace)
    follower.freeze()
    wait_for("a hung follower", lambda: states(daemon) == {follower.pid: "hung"})
    assert ftd("status", "-n", namespace).status == EXIT_OK, "a follower's hang is no fault of the namespace"
    follower.thaw()
    wait_for("its return", lambda: states(daemon) == {follower.pid: "attached"})
    assert follower.do(workers.lost, namespace) == []
    assert follower.do(workers.contents, namespace) == TINY_DIGESTS


def test_a_follower_that_sleeps_through_the_daemons_end(
    start: Start, worker: Workers, namespace: str, model: Path
) -> None:
    """It wakes up to another daemon and a new generation: it is told, and its own weights are what they were."""
    first = start("--model", model)
    sleeper = worker()
    sleeper.do(workers.attach, namespace)
    sleeper.freeze()
    first.kill()
    start("--model", model)
    assert {"g1.0", "g2.0"} <= set(segments(namespace)), "the sleeper holds generation 1"
    sleeper.thaw()
    assert sleeper.do(workers.wait_lost, namespace)[0] == "died"
    assert sleeper.do(workers.contents, namespace) == TINY_DIGESTS


class TestComeAndGo:
    """CU-11, SH-01: nothing accumulates, in the process or on the host."""

    def test_two_hundred_attaches_of_one_process(
        self, start: Start, worker: Workers, namespace: str, model: Path
    ) -> None:
        daemon = start("--model", model)
        follower = worker()
        follower.do(workers.come_and_go, namespace, 5)  # what is allocated once
        before = follower.do(workers.usage, namespace)
        assert before["maps"] == 0
        follower.do(workers.come_and_go, namespace, 200)
        after = follower.do(workers.usage, namespace)
        assert after["threads"] == before["threads"] and after["fds"] == before["fds"] and after["maps"] == 0
        assert daemon.status()["followers"] == []
        assert set(segments(namespace)) == {"lock", "coord", "slots", "g1.0", "g1.manifest", "g1.files"}

    def test_failed_attaches_leave_nothing(self, worker: Workers, namespace: str, runtime_dir: Path) -> None:
        follower = worker()
        follower.do(workers.attach_timed, namespace, 0)
        before = follower.do(workers.usage, namespace)
        for _ in range(50):
            assert follower.do(workers.attach_timed, namespace, 0)[0] == "NoCreatorError"
        assert follower.do(workers.usage, namespace) == before

    @pytest.mark.parametrize("count", [20, pytest.param(200, marks=pytest.mark.long)])
    def test_processes_that_end_without_a_word(
        self, start: Start, worker: Workers, namespace: str, model: Path, count: int
    ) -> None:
        """Each attaches and is killed, or exits, with its tensors alive; the host is as before."""
        daemon = start("--model", model)
        before = {path.name: path.stat().st_ino for path in SHM_DIR.glob(f"ftd.{namespace}.*")}
        for number in range(count):
            with Worker() as follower:
                follower.do(workers.attach, namespace)
                assert follower.do(workers.contents, namespace) == TINY_DIGESTS
                if number % 2:
                    follower.kill()
        assert {path.name: path.stat().st_ino for path in SHM_DIR.glob(f"ftd.{namespace}.*")} == before
        assert daemon.status()["followers"] == []

    def test_tensors_keep_the_mapping_and_nothing_else(
        self, start: Start, worker: Workers, namespace: str, model: Path
    ) -> None:
        """SH-04: closed with tensors alive, the lease is gone and the mapping stays, as long as the last tensor."""
        daemon = start("--model", model)
        follower = worker()
        follower.do(workers.attach, namespace)
        assert follower.do(workers.contents, namespace) == TINY_DIGESTS
        follower.do(workers.close, namespace)
        assert daemon.status()["followers"] == []
        assert holding(follower.pid, namespace) == {"g1.0"}
        assert follower.do(workers.contents, namespace) == TINY_DIGESTS
        follower.do(workers.forget, namespace)
        assert holding(follower.pid, namespace) == set()


#: A worker as users write them: the model lives at module scope until the interpreter is gone.
SCRIPT = """
import sys, torch, ftd_client
weights = ftd_client.attach(sys.argv[1])
model = torch.nn.ParameterList(weights.state_dict().values())
print("attached", flush=True)
sys.stdin.readline()
{end}
"""


def test_ends_of_the_interpreter(start: Start, namespace: str, model: Path) -> None:
    """CU-11, SH-01: every way out has its own status, silent; no lease stays, no segment goes."""
    daemon = start("--model", model)
    ends = {
        "sys.exit(7)": (7, ""),
        "raise RuntimeError('its own')": (1, "RuntimeError: its own"),
        "import os, signal; os.kill(os.getpid(), signal.SIGTERM)": (-15, ""),
    }
    before = segments(namespace)
    processes = {
        end: subprocess.Popen(
            [sys.executable, "-c", SCRIPT.format(end=end), namespace],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for end in ends
    }
    try:
        for process in processes.values():
            assert process.stdout is not None and process.stdout.readline() == "attached\n"
        assert set(states(daemon)) == {process.pid for process in processes.values()}
        for end, process in processes.items():
            _, err = process.communicate("\n", timeout=PATIENCE_S)
            status, words = ends[end]
            assert (process.returncode, err.strip().splitlines()[-1:]) == (status, [words] if words else []), end
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
    assert daemon.status()["followers"] == []
    assert segments(namespace) == before
    assert ftd("status", "-n", namespace).status == EXIT_OK


def test_threads_that_attach_at_once(start: Start, namespace: str, model: Path) -> None:
    """Each has a lease and weights of its own."""
    daemon = start("--model", model)
    line = threading.Barrier(16)

    def attach() -> ftd_client.Follower:
        line.wait(PATIENCE_S)
        return ftd_client.attach(namespace)

    with ExitStack() as stack, ThreadPoolExecutor(16) as pool:
        followers = [stack.enter_context(done.result()) for done in [pool.submit(attach) for _ in range(16)]]
        assert [row["pid"] for row in daemon.status()["followers"]] == [os.getpid()] * 16
        tensors = [follower.weights.view("embed.weight") for follower in followers]
        tensors[0].fill_(1)
        assert not any(bool((tensor == 1).all()) for tensor in tensors[1:])
    assert daemon.status()["followers"] == []


def test_a_process_reads_a_manifest_once(start: Start, namespace: str, model: Path) -> None:
    """What it has checked it need not check again, as long as some follower of it has it."""
    start("--model", model)
    with ftd_client.attach(namespace) as first:
        os.truncate(SHM_DIR / f"ftd.{namespace}.g1.manifest", 100)
        with ftd_client.attach(namespace) as second:
            assert second.manifest is first.manifest
    del first, second
    with pytest.raises(SegmentError, match="checksum differs"):
        ftd_client.attach(namespace)


def test_a_thousand_views_set_off_no_full_collection(
    start: Start, namespace: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start("--model", model)
    real, collecting = SharedWeights.view, list[bool]()

    def view(weights: SharedWeights, name: str) -> torch.Tensor:
        collecting.append(gc.isenabled())
        return real(weights, name)

    monkeypatch.setattr(SharedWeights, "view", view)
    with ftd_client.attach(namespace) as weights:
        assert weights.state_dict()
    assert set(collecting) == {False} and gc.isenabled()


def test_who_waits_for_a_creator_holds_nobody_up(start: Start, namespace: str, model: Path) -> None:
    start("--model", model)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ftd_client.attach, f"{namespace}-nobody", timeout=3)
        with ftd_client.attach(namespace):
            assert not waiting.done()
        with pytest.raises(NoCreatorError):
            waiting.result()


def test_a_follower_without_a_thread_is_none(
    start: Start, namespace: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = start("--model", model)
    before = os.listdir("/proc/self/fd")

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="new thread"):
        ftd_client.attach(namespace)
    monkeypatch.undo()
    assert daemon.status()["followers"] == []
    assert len(os.listdir("/proc/self/fd")) <= len(before)


def test_an_attach_that_is_interrupted_leaves_no_thread(
    start: Start, namespace: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not while somebody keeps the interrupt, and with it all that its frames hold, either."""
    daemon = start("--model", model)
    begin = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        begin(thread)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt) as kept:
        ftd_client.attach(namespace)
    monkeypatch.undo()
    assert daemon.status()["followers"] == []
    wait_for("its end", lambda: not any(each.name == f"ftd-{namespace}" for each in threading.enumerate()))
    assert kept


def test_no_slot_is_left(start: Start, namespace: str, model: Path) -> None:
    """With every lease taken an attach says so, and succeeds as soon as one is given back."""
    start("--model", model)
    with LockFile(os.open(SHM_DIR / f"ftd.{namespace}.slots", os.O_RDWR | os.O_CLOEXEC)) as crowd:
        assert crowd.try_exclusive(0, SLOT_COUNT)
        with pytest.raises(NoLeaseError, match=f"all {SLOT_COUNT} leases are taken"):
            ftd_client.attach(namespace, timeout=5)
        crowd.release(7, 1)
        with ftd_client.attach(namespace, timeout=5):
            with pytest.raises(NoLeaseError):
                ftd_client.attach(namespace, timeout=5)
            shown = ftd("status", "-n", namespace, "--json")
    assert shown.status == EXIT_OK
    assert len(shown.json["followers"]) == SLOT_COUNT
    assert [row["pid"] for row in shown.json["followers"] if row["pid"]] == [os.getpid()]
