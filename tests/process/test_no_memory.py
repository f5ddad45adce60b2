"""Too little memory, whichever: status 6, which memory, bytes needed and free; never a SIGBUS, nothing left."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ftd.daemon.status import report
from ftd.errors import EXIT_MEMORY
from ftd.shm.names import SHM_DIR
from ftd.shm.segment import free_bytes
from ftd.units import MIB
from tests.process import workers
from tests.process.checkpoints import held, hollow, tiny
from tests.process.daemons import QUICK, Daemon, frozen, ftd, left_in, refused, segments, wait_for
from tests.process.workers import Worker

InChild = Callable[..., Any]


@contextlib.contextmanager
def crowded(leave_bytes: int) -> Iterator[None]:
    """Somebody else's file takes all of /dev/shm but so much. Only in a tmpfs of the test's own."""
    path = SHM_DIR / "crowd"
    fd = os.open(path, os.O_CREAT | os.O_WRONLY)
    try:
        os.posix_fallocate(fd, 0, free_bytes() - leave_bytes)
        yield
    finally:
        os.close(fd)
        path.unlink()


class TestDevShm:
    """CN-01, CN-11: the mount's size is checked before a byte is read, and again by every page."""

    @pytest.mark.parametrize("detach", [(), ("--detach",)])
    def test_is_too_small(
        self, in_child: InChild, namespace: str, runtime_dir: Path, tmp_path: Path, detach: tuple[str, ...]
    ) -> None:
        model = hollow(tmp_path, 64)

        def scenario() -> None:
            free = free_bytes()
            result = ftd("start", "-n", namespace, "--model", model, *detach)
            line = refused(result, EXIT_MEMORY, "need", "/dev/shm", "16.00 MiB")
            needed = next(int(word) for word in line.split() if word.isdigit())
            assert 64 * MIB < needed < 66 * MIB
            assert "--shm-size" in result.err and "remount" in result.err
            assert free_bytes() == free and segments(namespace) == []
            kept = report(namespace, os.environ)
            assert (kept["state"], kept["failure"]["code"]) == ("failed", "memory")

        in_child(scenario, shm="size=16m")

    def test_fills_up_while_the_weights_are_read(
        self, in_child: InChild, namespace: str, runtime_dir: Path, tmp_path: Path
    ) -> None:
        """Another writer takes the space that was free at the check."""
        model = hollow(tmp_path, 96)

        def scenario() -> None:
            with frozen(lambda *words, wait: Daemon(namespace, *words), model) as daemon:
                with crowded(leave_bytes=3 * MIB):
                    daemon.thaw()
                    assert daemon.ended() == EXIT_MEMORY
                refused_log(daemon, "/dev/shm ran full while the weights were read")
            assert segments(namespace) == [] and left_in(runtime_dir) == [f"{namespace}.failed.json"]

        in_child(scenario, shm="size=112m")

    def test_fills_up_before_the_sidecar_files(
        self, in_child: InChild, namespace: str, runtime_dir: Path, tmp_path: Path
    ) -> None:
        model = tiny(tmp_path / "model")
        (model / "tokenizer.json").write_bytes(b" " * MIB)

        def scenario() -> None:
            with contextlib.ExitStack() as stack:
                with held(model / "config.json"):
                    daemon = stack.enter_context(Daemon(namespace, "--model", model))
                    daemon.wait_segments()
                    stack.enter_context(crowded(leave_bytes=0))
                assert daemon.ended() == EXIT_MEMORY
                refused_log(daemon, f"/ftd.{namespace}.g1.files")
            assert segments(namespace) == []

        in_child(scenario, shm="size=8m")

    @pytest.mark.parametrize("leave", [0, 64 << 10])
    def test_is_full_from_the_start(
        self, in_child: InChild, namespace: str, runtime_dir: Path, model: Path, leave: int
    ) -> None:
        """Not even the small segments that coordinate find room."""

        def scenario() -> None:
            with crowded(leave_bytes=leave):
                refused(ftd("start", "-n", namespace, "--model", model), EXIT_MEMORY, "/dev/shm", "free")
                assert segments(namespace) == []
                assert report(namespace, os.environ)["failure"]["code"] == "memory"

        in_child(scenario, shm="size=4m")

    def test_has_no_inode_left(self, in_child: InChild, namespace: str, runtime_dir: Path, model: Path) -> None:
        def scenario() -> None:
            for number in range(2):  # the root directory is the third
                (SHM_DIR / str(number)).touch()
            refused(ftd("start", "-n", namespace, "--model", model), EXIT_MEMORY, "/dev/shm", "another segment")
            assert segments(namespace) == []

        in_child(scenario, shm="size=8m,nr_inodes=3")

    def test_a_full_mount_does_not_disturb_who_serves(
        self, in_child: InChild, namespace: str, runtime_dir: Path, model: Path
    ) -> None:
        """Heartbeats, status and new followers need no new page."""

        def scenario() -> None:
            with Daemon(namespace, "--model", model, *QUICK) as daemon:
                daemon.wait_ready()
                with crowded(leave_bytes=0), Worker() as follower:
                    seen = daemon.look()
                    assert seen.record is not None
                    beat = seen.record.heartbeat_ns
                    assert follower.do(workers.attach, namespace) == 1
                    wait_for("a heartbeat", lambda: (r := daemon.look().record) and r.heartbeat_ns > beat)
                    assert [row["pid"] for row in daemon.status()["followers"]] == [follower.pid]

        in_child(scenario, shm="size=4m")


def test_the_budget(namespace: str, runtime_dir: Path, model: Path) -> None:
    result = ftd("start", "-n", namespace, "--model", model, "--set", "memory_budget=64KiB")
    refused(result, EXIT_MEMORY, "memory_budget", "65536")
    assert segments(namespace) == []


def test_the_cgroup(in_child: InChild, memory_cgroup: Callable[[int], Path], namespace: str, runtime_dir: Path,
                    tmp_path: Path) -> None:  # fmt: skip
    """CN-08: shared memory is charged to the cgroup; its limit is read before the kernel enforces it by a kill."""
    model = hollow(tmp_path, 160)
    group = memory_cgroup(128 * MIB)

    def scenario() -> None:
        (group / "cgroup.procs").write_text(str(os.getpid()))
        refused(ftd("start", "-n", namespace, "--model", model), EXIT_MEMORY, "the memory cgroup")
        assert segments(namespace) == []

    in_child(scenario)


@pytest.fixture
def memory_cgroup() -> Iterator[Callable[[int], Path]]:
    """`memory_cgroup(limit_bytes)`: a new memory cgroup; skips where none can be made."""
    made: list[Path] = []

    def make(limit_bytes: int) -> Path:
        for root, limit in (
            (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
            (Path("/sys/fs/cgroup"), "memory.max"),
        ):
            group = root / f"ftd-test-{os.getpid()}"
            with contextlib.suppress(OSError):
                group.mkdir()
                made.append(group)
                (group / limit).write_text(str(limit_bytes))
                return group
        pytest.skip("no memory cgroup can be made here")

    yield make
    for group in made:
        wait_for("an empty cgroup", lambda path=group: not (path / "cgroup.procs").read_text())
        group.rmdir()


def refused_log(daemon: Daemon, *words: str) -> None:
    lines = [line for line in daemon.log().splitlines() if line.startswith(("ftd: ", "  → "))]
    assert len(lines) == 2 and all(word in lines[0] for word in words), daemon.log()
