"""Open-file-description locks, with real files and real processes: liveness rests on what the kernel promises."""

import contextlib
import fcntl
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ftd.shm.lock import LockFile, exclusive_bytes, exclusive_holder
from tests.conftest import kill

InChild = Callable[..., Any]
Standing = Callable[[Callable[[], Any]], int]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "locked"
    path.write_bytes(bytes(64))
    return path


@pytest.fixture
def opened(path: Path) -> Iterator[Callable[[], LockFile]]:
    with contextlib.ExitStack() as stack:
        yield lambda: stack.enter_context(LockFile(os.open(path, os.O_RDWR | os.O_CLOEXEC)))


@pytest.fixture
def asker(path: Path) -> Iterator[int]:
    """A read-only descriptor: all that a follower has of `coord`."""
    fd = os.open(path, os.O_RDONLY)
    yield fd
    os.close(fd)


def test_one_description_excludes_another_of_the_same_process(opened: Callable[[], LockFile], asker: int) -> None:
    one, other = opened(), opened()
    assert one.try_exclusive()
    assert not other.try_exclusive()
    assert exclusive_holder(asker) == (0, 0)
    one.close()
    assert other.try_exclusive()


def test_the_holder_may_ask_again(opened: Callable[[], LockFile]) -> None:
    one = opened()
    assert one.try_exclusive()
    assert one.try_exclusive()
    assert exclusive_holder(one.fileno()) is None  # one's own lock is no conflict


def test_another_thread_is_excluded(opened: Callable[[], LockFile]) -> None:
    one, other = opened(), opened()
    taken: list[bool] = []
    assert one.try_exclusive()
    thread = threading.Thread(target=lambda: taken.append(other.try_exclusive()))
    thread.start()
    thread.join()
    assert taken == [False]


def test_another_process_is_excluded_and_sees_it(path: Path, opened: Callable[[], LockFile], in_child: InChild) -> None:
    def look() -> tuple[bool, tuple[int, int] | None]:
        with LockFile(os.open(path, os.O_RDWR)) as mine:
            return mine.try_exclusive(3, 1), exclusive_holder(mine.fileno())

    one = opened()
    assert one.try_exclusive(3, 1)
    assert in_child(look) == (False, (3, 1))
    one.release(3, 1)
    assert in_child(look) == (True, None)


def test_asking_takes_nothing(opened: Callable[[], LockFile], asker: int) -> None:
    assert exclusive_holder(asker) is None
    assert opened().try_exclusive()


def test_a_read_only_descriptor_cannot_pose_as_a_holder(path: Path, opened: Callable[[], LockFile], asker: int) -> None:
    """A stray shared lock stands in an exclusive lock's way, and is never taken for a creator."""
    stray = os.open(path, os.O_RDONLY)
    try:
        fcntl.fcntl(stray, fcntl.F_OFD_SETLK, _shared())
        assert exclusive_holder(asker) is None
        assert not opened().try_exclusive()
        with LockFile(os.dup(stray)) as copy, pytest.raises(OSError, match="Bad file descriptor"):
            copy.try_exclusive()
    finally:
        os.close(stray)


def _shared() -> bytes:
    from ftd.shm.lock import _flock

    return _flock(fcntl.F_RDLCK, 0, 0)


def test_bytes_are_locked_one_by_one(opened: Callable[[], LockFile], asker: int) -> None:
    one, other = opened(), opened()
    assert one.try_exclusive(0, 1)
    assert other.try_exclusive(1, 1)
    assert not other.try_exclusive(0, 1)
    assert exclusive_bytes(asker, 0, 64) == [0, 1]
    one.close()
    assert exclusive_bytes(asker, 0, 64) == [1]


def test_bytes_beyond_the_end_of_the_file_can_be_locked(opened: Callable[[], LockFile], asker: int) -> None:
    assert opened().try_exclusive(10_000, 1)
    assert exclusive_bytes(asker, 9_990, 10_010) == [10_000]


def test_a_lock_to_the_end_of_the_file_covers_the_range(opened: Callable[[], LockFile], asker: int) -> None:
    assert opened().try_exclusive(5, 0)
    assert exclusive_bytes(asker, 0, 9) == [5, 6, 7, 8]


def test_of_a_lock_that_reaches_out_of_the_range_only_what_is_inside_is_found(
    opened: Callable[[], LockFile], asker: int
) -> None:
    assert opened().try_exclusive(2, 6)
    assert exclusive_bytes(asker, 4, 6) == [4, 5]
    assert exclusive_bytes(asker, 0, 4) == [2, 3]
    assert exclusive_bytes(asker, 6, 64) == [6, 7]


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.sets(st.integers(0, 60), max_size=20), min_size=1, max_size=4),
    st.integers(0, 60),
    st.integers(0, 64),
)
def test_exactly_the_bytes_that_are_held_are_found(
    path: Path, asker: int, wanted: list[set[int]], start: int, end: int
) -> None:
    held: set[int] = set()
    with contextlib.ExitStack() as stack:
        for bytes_of_one in wanted:
            lock = stack.enter_context(LockFile(os.open(path, os.O_RDWR)))
            for at in bytes_of_one:
                assert lock.try_exclusive(at, 1) == (at not in held)
            held |= bytes_of_one
        assert exclusive_bytes(asker, start, end) == sorted(at for at in held if start <= at < end)
        assert exclusive_bytes(asker, 0, 61) == sorted(held)
    assert exclusive_bytes(asker, 0, 61) == []


def test_a_forked_child_has_lost_it_and_the_parent_has_not(
    opened: Callable[[], LockFile], asker: int, in_child: InChild
) -> None:
    one = opened()
    assert one.try_exclusive(7, 1)
    fd = one.fileno()

    def look() -> tuple[bool, bool]:
        one.close()  # whatever a child calls, it cannot give away what is its parent's
        with contextlib.suppress(OSError, ValueError):
            one.release(7, 1)
        return one.closed, os.path.exists(f"/proc/self/fd/{fd}")

    assert in_child(look) == (True, False)
    assert not one.closed
    assert exclusive_bytes(asker, 0, 64) == [7]


def test_a_child_that_lives_on_does_not_keep_it(opened: Callable[[], LockFile], asker: int, standing: Standing) -> None:
    one = opened()
    assert one.try_exclusive()
    standing(lambda: None)
    assert exclusive_holder(asker) is not None
    one.close()
    assert exclusive_holder(asker) is None


def test_a_program_that_was_started_does_not_keep_it(opened: Callable[[], LockFile], asker: int) -> None:
    one = opened()
    assert one.try_exclusive()
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, close_fds=False) as program:
        one.close()
        assert exclusive_holder(asker) is None
        program.communicate(b"")


def test_a_killed_holder_has_let_go(path: Path, asker: int, standing: Standing) -> None:
    kept = []

    def hold() -> None:
        kept.append(LockFile(os.open(path, os.O_RDWR)))
        assert kept[0].try_exclusive(2, 3)

    pid = standing(hold)
    assert exclusive_bytes(asker, 0, 64) == [2, 3, 4]
    kill(pid)
    assert exclusive_bytes(asker, 0, 64) == []


def test_a_holder_that_was_forgotten_has_let_go(path: Path, asker: int) -> None:
    lock = LockFile(os.open(path, os.O_RDWR))
    assert lock.try_exclusive()
    del lock
    assert exclusive_holder(asker) is None


def test_closing_twice_closes_nobody_elses_descriptor(path: Path) -> None:
    lock = LockFile(os.open(path, os.O_RDWR))
    number = lock.fileno()
    lock.close()
    assert lock.closed
    reused = os.open(path, os.O_RDONLY)
    try:
        assert reused == number
        lock.close()
        os.fstat(reused)
    finally:
        os.close(reused)


def test_a_descriptor_that_does_not_lock_is_an_error_and_no_refusal() -> None:
    read_fd, write_fd = os.pipe()
    os.close(write_fd)
    with LockFile(read_fd) as lock, pytest.raises(OSError, match="Bad file descriptor"):
        lock.try_exclusive()
