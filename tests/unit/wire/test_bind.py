"""Taking the path of a control socket: stale ones go, everything else is left alone."""

import os
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ftd.errors import AlreadyRunningError, FtdError, RuntimeDirError
from ftd.mutex import mutex
from ftd.wire.bind import bind_socket

from .conftest import NOBODY, as_nobody, needs_root

LOCK_NAME = "ns.sock.lock"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ns.sock"


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0o777)
    yield
    os.umask(before)


def stale(path: Path) -> int:
    """A socket file whose listener is gone; its inode."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.bind(str(path))
        sock.listen()
    return path.lstat().st_ino


@pytest.mark.parametrize("mode", [0o600, 0o660, 0o666])
def test_the_mode_is_exact_under_any_umask(path: Path, mode: int, umask: None) -> None:
    bound = bind_socket(path, mode)
    try:
        assert stat.S_IMODE(path.lstat().st_mode) == mode
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
            peer.connect(str(path))
    finally:
        bound.sock.close()


def test_nobody_connects_or_starts_before_the_mode_is_final(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    chmod = Path.chmod

    def spy(self: Path, mode: int) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer, pytest.raises(ConnectionRefusedError):
            peer.connect(str(self))
        with pytest.raises(RuntimeDirError, match="held by another process"), mutex(path.with_name(LOCK_NAME), 0):
            pass
        tried.append(mode)
        chmod(self, mode)

    monkeypatch.setattr(Path, "chmod", spy)
    bind_socket(path, 0o600).sock.close()
    assert tried == [0o600]


def test_the_group_is_given(path: Path) -> None:
    bound = bind_socket(path, 0o660, gid=os.getegid())
    bound.sock.close()
    assert path.lstat().st_gid == os.getegid()


def test_a_stale_socket_is_reclaimed(path: Path) -> None:
    stale(path)
    bound = bind_socket(path, 0o600)
    try:
        assert (path.lstat().st_dev, path.lstat().st_ino) == bound.identity
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
            peer.connect(str(path))
    finally:
        bound.sock.close()


def test_a_live_listener_means_already_running(path: Path) -> None:
    bound = bind_socket(path, 0o600)
    try:
        with pytest.raises(AlreadyRunningError, match=f"another daemon answers at {path}: pid {os.getpid()} "):
            bind_socket(path, 0o600)
        assert (path.lstat().st_dev, path.lstat().st_ino) == bound.identity
    finally:
        bound.sock.close()


def test_a_listener_with_a_full_backlog_is_alive(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stopped:
        stopped.bind(str(path))
        stopped.listen(0)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as waiting:
            waiting.connect(str(path))  # nobody accepts it
            with pytest.raises(AlreadyRunningError, match="its backlog is full"):
                bind_socket(path, 0o600)
    assert path.is_socket()


def test_a_socket_that_neither_answers_nor_refuses_is_left_alone(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.bind(str(path))
        with pytest.raises(RuntimeDirError, match="neither answers nor refuses"):
            bind_socket(path, 0o600)
    assert path.is_socket()


def _regular(path: Path) -> None:
    path.write_bytes(b"precious")


def _directory(path: Path) -> None:
    path.mkdir()


def _dangling(path: Path) -> None:
    path.symlink_to(path.with_name("nowhere"))


def _link_to_a_stale_socket(path: Path) -> None:
    stale(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def _fifo(path: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (_regular, "regular file"),
        (_directory, "directory"),
        (_dangling, "symbolic link"),
        (_link_to_a_stale_socket, "symbolic link"),
        (_fifo, "fifo"),
    ],
)
def test_what_is_no_socket_is_named_and_never_deleted(path: Path, make: object, kind: str) -> None:
    make(path)
    before = path.lstat()
    with pytest.raises(RuntimeDirError, match=f"{path} is a {kind}: expected nothing, or the socket") as caught:
        bind_socket(path, 0o600)
    assert caught.value.exit_status == 2
    assert path.lstat() == before


@needs_root
def test_another_users_stale_socket_is_left_alone(open_path: Path) -> None:
    inode = stale(open_path)
    os.chown(open_path.parent, NOBODY, NOBODY)
    with as_nobody(), pytest.raises(RuntimeDirError, match=f"a socket of uid 0: expected one of uid {NOBODY}"):
        bind_socket(open_path, 0o600)
    assert open_path.lstat().st_ino == inode


@needs_root
def test_root_reclaims_the_stale_socket_of_a_user(open_path: Path) -> None:
    stale(open_path)
    os.chown(open_path, NOBODY, NOBODY)
    bind_socket(open_path, 0o600).sock.close()
    assert open_path.lstat().st_uid == 0


def test_a_directory_that_takes_no_socket_is_a_runtime_dir_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RuntimeDirError):
        bind_socket(tmp_path / "file" / "s", 0o600)


def test_a_path_that_is_too_long_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 120)
    with pytest.raises(RuntimeDirError, match="cannot be made a socket"):
        bind_socket(path, 0o600)
    assert not path.exists()


@needs_root
def test_a_group_that_the_user_is_not_in_is_refused_and_undone(open_path: Path) -> None:
    os.chown(open_path.parent, NOBODY, NOBODY)
    with as_nobody(), pytest.raises(FtdError, match=f"uid {NOBODY} may not give .* to group 0") as caught:
        bind_socket(open_path, 0o660, gid=0)
    assert caught.value.code == "access"
    assert not open_path.exists()


def test_of_many_starters_one_wins(path: Path) -> None:
    stale(path)
    outcomes: list[object] = []
    gate = threading.Barrier(8)

    def starter() -> None:
        gate.wait()
        try:
            outcomes.append(bind_socket(path, 0o600))
        except AlreadyRunningError as error:
            outcomes.append(error)

    threads = [threading.Thread(target=starter) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    winners = [outcome for outcome in outcomes if not isinstance(outcome, Exception)]
    try:
        assert len(outcomes) == 8
        assert len(winners) == 1
        assert winners[0].identity == (path.lstat().st_dev, path.lstat().st_ino)
    finally:
        for winner in winners:
            winner.sock.close()


def test_unlink_removes_our_own_path(path: Path) -> None:
    bound = bind_socket(path, 0o600)
    bound.unlink()
    bound.sock.close()
    assert not path.exists()


def test_unlink_leaves_a_successors_path(path: Path) -> None:
    bound = bind_socket(path, 0o600)
    path.unlink()
    successor = bind_socket(path, 0o600)
    try:
        bound.unlink()
        assert (path.lstat().st_dev, path.lstat().st_ino) == successor.identity
        path.unlink()
        successor.unlink()  # gone already: nothing to do, nothing raised
    finally:
        bound.sock.close()
        successor.sock.close()
