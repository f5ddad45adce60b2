"""A follower and fork: the child gets no lease by birth, keeps none alive, and may attach itself."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ftd_client
from ftd.errors import FollowerClosedError
from tests.process import workers
from tests.process.checkpoints import TINY_DIGESTS, digests
from tests.process.daemons import Daemon, is_gone, segments, wait_for
from tests.process.workers import Worker, bytes_of

Start = Callable[..., Daemon]
Workers = Callable[[], Worker]


def follower_pids(daemon: Daemon) -> list[int]:
    return sorted(row["pid"] for row in daemon.status()["followers"])


class TestInTheChild:
    """CU-15: what a forked child may do with the parent's follower."""

    def test_the_follower_is_closed_and_the_parents_stands(
        self, start: Start, in_child: Callable[..., Any], namespace: str, model: Path
    ) -> None:
        daemon = start("--model", model)
        with ftd_client.attach(namespace, timeout=0) as weights:
            tensors = weights.state_dict()

            def child() -> dict[str, str]:
                for use in (weights.state_dict, weights.files, lambda: weights.load(None, "cpu")):
                    with pytest.raises(FollowerClosedError, match=f"process {os.getppid()}"):
                        use()
                weights.close()
                return digests({name: bytes_of(tensor) for name, tensor in tensors.items()})

            assert in_child(child) == TINY_DIGESTS, "tensors made before the fork stay readable in the child"
            assert follower_pids(daemon) == [os.getpid()]
            assert set(weights.state_dict()) == set(TINY_DIGESTS)

    def test_it_attaches_itself(self, start: Start, in_child: Callable[..., Any], namespace: str, model: Path) -> None:
        daemon = start("--model", model)
        with ftd_client.attach(namespace, timeout=0):

            def child() -> tuple[dict[str, str], list[int]]:
                with ftd_client.attach(namespace, timeout=0) as own:
                    found = digests({name: bytes_of(tensor) for name, tensor in own.state_dict().items()})
                    return found, follower_pids(daemon)

            found, pids = in_child(child)
            assert found == TINY_DIGESTS
            assert len(pids) == 2 and os.getpid() in pids
            assert follower_pids(daemon) == [os.getpid()]

    def test_a_write_stays_in_the_child(
        self, start: Start, in_child: Callable[..., Any], namespace: str, model: Path
    ) -> None:
        """MD-12: a view inherited by the child is private to it as well."""
        start("--model", model)
        with ftd_client.attach(namespace, timeout=0) as weights:
            tensors = weights.state_dict()

            def child() -> bool:
                tensors["embed.weight"].fill_(1)
                return bool((tensors["embed.weight"] == 1).all())

            assert in_child(child)
            assert digests({name: bytes_of(tensor) for name, tensor in tensors.items()}) == TINY_DIGESTS


def test_a_child_keeps_no_lease_alive(start: Start, standing: Callable[..., int], namespace: str, model: Path) -> None:
    """The parent closes while the child lives: the lease is gone, and the old generation with it."""
    first = start("--model", model)
    weights = ftd_client.attach(namespace, timeout=0)
    child = standing(lambda: None)
    assert follower_pids(first) == [os.getpid()]
    weights.close()
    assert follower_pids(first) == []
    os.kill(child, 0)  # still there, with a copy of every descriptor that is not a lease


def test_a_child_outlives_its_parent(start: Start, worker: Workers, namespace: str, model: Path) -> None:
    """The parent is killed: its lease goes although a child of it lives on, which reads on all the same."""
    daemon = start("--model", model, "--set", "heartbeat_s=0.05")
    parent = worker()
    parent.do(workers.attach, namespace)
    parent.do(workers.contents, namespace)
    child = parent.do(workers.leave_a_child, namespace)
    try:
        assert follower_pids(daemon) == [parent.pid]
        parent.kill()
        assert follower_pids(daemon) == []
        daemon.kill()
        start("--model", model, "--set", "heartbeat_s=0.05")
        assert not any(name.startswith("g1.") for name in segments(namespace)), "a child holds no generation"
    finally:
        os.kill(child, 9)
    wait_for("the child's end", lambda: is_gone(child))


def test_a_server_that_forks_its_workers(start: Start, worker: Workers, namespace: str, model: Path) -> None:
    """CU-15: imported and attached before the fork, attached again in every child."""
    daemon = start("--model", model)
    with ftd_client.attach(namespace, timeout=0):
        children = [worker() for _ in range(4)]
        for child in children:
            assert child.do(workers.attach, namespace) == 1
            assert child.do(workers.contents, namespace) == TINY_DIGESTS
        assert follower_pids(daemon) == sorted([os.getpid(), *(child.pid for child in children)])
    assert follower_pids(daemon) == sorted(child.pid for child in children)
