"""The path of a control socket: taken under a mutex, given back only while it is still ours."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import stat
from dataclasses import dataclass
from pathlib import Path

from ftd.errors import AccessError, AlreadyRunningError, FtdError, RuntimeDirError, os_reason
from ftd.mutex import mutex
from ftd.owner import process_name
from ftd.wire.peer import peer_of

log = logging.getLogger(__name__)

#: Connections that wait for accept while the daemon's loop is busy; above the server's own limit of connections.
BACKLOG = 128

#: Another daemon's kernel accepts into its backlog at once, stopped or not: this only bounds the unforeseen.
_PROBE_S = 1.0


@dataclass(frozen=True, slots=True)
class BoundSocket:
    """A listening socket and the identity of the path that it made.

    Attributes:
        identity: (device, inode) of the path when it was bound.
    """

    sock: socket.socket
    path: Path
    identity: tuple[int, int]

    def unlink(self) -> None:
        """Removes the path if it is still ours; never raises.

        To be called while the socket still listens: a starter that finds it answering leaves the path alone, so no
        mutex is needed, and the name that is removed cannot be that of a successor.
        """
        try:
            found = self.path.lstat()
            if (found.st_dev, found.st_ino) == self.identity:
                self.path.unlink()
            else:
                log.warning("%s was replaced while this daemon ran: left alone", self.path)
        except FileNotFoundError:
            log.warning("%s was removed while this daemon ran", self.path)
        except OSError as error:
            log.warning("%s cannot be removed: %s", self.path, os_reason(error))


def bind_socket(path: Path, mode: int, gid: int | None = None) -> BoundSocket:
    """Takes `path`, reclaiming it from a daemon that is gone, and listens.

    Args:
        mode: final mode of the path, whatever the umask; connect(2) wants the write bit.
        gid: group of the path; None leaves the process's own.

    Raises:
        AlreadyRunningError: somebody listens at the path.
        RuntimeDirError: something that no earlier daemon of this user left is there (it is never deleted), or the
            directory takes no socket.
        AccessError: this user may not give the path to `gid`.
    """
    # the mutex makes probe, unlink, bind and listen one step for every starter in this directory
    with mutex(path.with_name(path.name + ".lock")):
        _clear(path)
        return _listen(path, mode, gid)


def remove_stale(path: Path) -> None:
    """Removes the socket of a daemon that is gone; whatever else is at `path` stays, and is no error."""
    if not os.path.lexists(path):
        return
    with contextlib.suppress(FtdError, OSError), mutex(path.with_name(path.name + ".lock")):
        _clear(path)


def _clear(path: Path) -> None:
    """Makes sure that nothing is at `path`: stale sockets go, everything else is an error."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    except OSError as error:
        raise RuntimeDirError(f"{path} cannot be examined: {os_reason(error)}", _REMEDY_DIR) from None
    if not stat.S_ISSOCK(found.st_mode):
        raise RuntimeDirError(
            f"{path} is a {_kind(found.st_mode)}: expected nothing, or the socket of an earlier daemon",
            "move it away, since ftd deletes nothing that it did not make",
        )
    if os.geteuid() not in (found.st_uid, 0):
        raise RuntimeDirError(
            f"{path} is a socket of uid {found.st_uid}: expected one of uid {os.geteuid()}",
            "let its owner remove it, or set FTD_RUNTIME_DIR to another directory",
        )
    listener = _listener_at(path)
    if listener is not None:
        # its /dev/shm may be another mount than ours: the namespace lock cannot see it, the path can
        raise AlreadyRunningError(
            f"another daemon answers at {path}: {listener}",
            "stop it, or give this daemon another runtime directory with FTD_RUNTIME_DIR",
        )
    log.info("%s was left by a daemon that is gone: reclaimed", path)
    # a daemon that stops may remove it in this very moment
    path.unlink(missing_ok=True)


def _listener_at(path: Path) -> str | None:
    """Who listens at the socket `path`, for a message; None when nobody does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_S)
        try:
            probe.connect(os.fspath(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return None
        except BlockingIOError:
            # EAGAIN of connect(2): a listener whose backlog is full, such as a stopped daemon
            return "its backlog is full"
        except OSError as error:
            # unsure means alive: only a refusal proves that nobody listens
            raise RuntimeDirError(
                f"{path} neither answers nor refuses: {os_reason(error)}",
                "remove the socket once you are sure that no daemon uses it",
            ) from None
        pid = peer_of(probe).pid
        return f"pid {pid} ({process_name(pid)})"


def _listen(path: Path, mode: int, gid: int | None) -> BoundSocket:
    with contextlib.ExitStack() as undo:
        sock = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        try:
            sock.bind(os.fspath(path))
            undo.callback(path.unlink, missing_ok=True)
            if gid is not None:
                _give_to_group(path, gid)
            # nobody can connect before listen(), so nobody ever meets the mode that the umask gave
            path.chmod(mode)
            found = path.lstat()
            sock.listen(BACKLOG)
        except OSError as error:
            raise RuntimeDirError(f"{path} cannot be made a socket: {os_reason(error)}", _REMEDY_DIR) from None
        undo.pop_all()
        return BoundSocket(sock, path, (found.st_dev, found.st_ino))


def _give_to_group(path: Path, gid: int) -> None:
    try:
        os.chown(path, -1, gid)
    except PermissionError:
        raise AccessError(
            f"uid {os.geteuid()} may not give {path} to group {gid}: expected a group that it belongs to",
            "add the daemon's user to that group, or leave `group` out of the configuration",
        ) from None


_REMEDY_DIR = "set FTD_RUNTIME_DIR to a local directory that this user may write"

_KINDS = {
    stat.S_IFREG: "regular file",
    stat.S_IFDIR: "directory",
    stat.S_IFLNK: "symbolic link",
    stat.S_IFIFO: "fifo",
}


def _kind(mode: int) -> str:
    return _KINDS.get(stat.S_IFMT(mode), "device")
