"""Fixtures of all tests: a namespace of one's own, a runtime directory, children that are forked and killed."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import shutil
import signal
import stat
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

SHM = Path("/dev/shm")
NOBODY = 65534

# derandomized: a run that fails here fails everywhere; no deadline: shared machines stall
settings.register_profile("ftd", deadline=None, derandomize=True, database=None, max_examples=40)
settings.load_profile("ftd")

_CLONE_NEWNS = 0x20000  # <linux/sched.h>
_MS_REC_PRIVATE = 0x4000 | 0x40000  # <linux/mount.h>


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "leaves_segments: the test need not remove what it made in /dev/shm")


@pytest.fixture
def namespace(request: pytest.FixtureRequest) -> Iterator[str]:
    """A namespace that nobody else has. Names that start with it are removed; one that is left fails the test."""
    name = f"t{os.getpid()}-{uuid.uuid4().hex[:8]}"
    yield name
    left = sorted(SHM.glob(f"ftd.{name}*"))
    for path in left:
        path.unlink()
    if left and request.node.get_closest_marker("leaves_segments") is None:
        pytest.fail(f"left in /dev/shm: {', '.join(path.name for path in left)}")


@pytest.fixture
def runtime_dir(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """$FTD_RUNTIME_DIR, with a path short enough for a socket (tmp_path is not)."""
    path = Path(tempfile.mkdtemp(prefix="ftd-"))
    monkeypatch.setenv("FTD_RUNTIME_DIR", str(path))
    yield path
    shutil.rmtree(path)


@pytest.fixture(params=[0o000, 0o022, 0o077])
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    """Runs the test under each: names and modes of what others open must not depend on it."""
    before = os.umask(request.param)
    yield
    os.umask(before)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.fixture
def in_child() -> Callable[..., Any]:
    """`in_child(function, uid=None, shm=None)`: its result in a forked child, or its exception.

    `uid` runs it as that user; `shm` are mount options of a tmpfs of the child's own at /dev/shm. Skips where that is
    not permitted, and fails when the child was killed.
    """
    return _in_child


@pytest.fixture
def standing() -> Iterator[Callable[[Callable[[], Any]], int]]:
    """`standing(function)`: pid of a forked child that has run it and keeps what it took until it is killed."""
    pids: list[int] = []

    def start(function: Callable[[], Any]) -> int:
        pid, read_fd = _fork(function, then_wait=True)
        pids.append(pid)
        _result(_read_all(read_fd), pid)
        return pid

    yield start
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            kill(pid)


def kill(pid: int) -> None:
    """Kills a child by SIGKILL and waits until the kernel has let go of what it held."""
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def _in_child(function: Callable[[], Any], *, uid: int | None = None, shm: str | None = None) -> Any:
    if os.geteuid() != 0 and (uid is not None or shm is not None):
        pytest.skip("needs root: another user, or a mount")

    def prepared() -> Any:
        if shm is not None:
            _mount_shm(shm)
        if uid is not None:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
        return function()

    pid, read_fd = _fork(prepared, then_wait=False)
    data = _read_all(read_fd)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        pytest.fail(f"the child died by {signal.Signals(os.WTERMSIG(status)).name}")
    return _result(data, pid)


def _fork(function: Callable[[], Any], *, then_wait: bool) -> tuple[int, int]:
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write_fd)
        return pid, read_fd
    status = 1
    try:
        try:
            kept = function()
            data = pickle.dumps((None if then_wait else kept, None))
        except BaseException as error:  # pytest's own are such
            data = pickle.dumps((None, error))
        with open(write_fd, "wb") as pipe:
            pipe.write(data)
        status = 0
        while then_wait:
            signal.pause()
    finally:
        os._exit(status)


def _read_all(fd: int) -> bytes:
    with open(fd, "rb") as pipe:
        return pipe.read()


def _result(data: bytes, pid: int) -> Any:
    assert data, f"child {pid} said nothing"
    value, error = pickle.loads(data)
    if isinstance(error, PermissionError) and error.filename == "mount":
        pytest.skip(f"a private /dev/shm is not permitted here: {error}")
    if error is not None:
        raise error
    return value


def _mount_shm(options: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    done = (
        libc.unshare(_CLONE_NEWNS) == 0
        and libc.mount(None, b"/", None, _MS_REC_PRIVATE, None) == 0
        and libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, options.encode()) == 0
    )
    if not done:
        number = ctypes.get_errno()
        raise PermissionError(number, os.strerror(number), "mount")
