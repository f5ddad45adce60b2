"""Runtime directories, and the paths of the control sockets in them.

The candidates are the contract's, in its order: `$FTD_RUNTIME_DIR`, `/run/ftd`, `$XDG_RUNTIME_DIR/ftd`,
`/tmp/ftd-<uid>`. Namespaces that come in here have been checked by `shm/names.py`.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ftd.errors import RuntimeDirError, os_reason
from ftd.mounts import mounts

SYSTEM_DIR = Path("/run/ftd")
TMP_DIR = Path("/tmp")

#: sun_path of unix(7) holds 108 bytes, the last of which is the terminating zero.
MAX_SOCKET_PATH_BYTES = 107

#: On these a directory may be that of several hosts: another host's live socket refuses connections here, and would
#: be taken for a stale one and removed. Type names of /proc/self/mountinfo.
NETWORK_FILESYSTEMS = frozenset({
    "nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "gpfs", "beegfs", "afs", "ocfs2", "gfs2",
    "fuse.sshfs", "fuse.glusterfs", "fuse.ceph-fuse",
})  # fmt: skip

_REMEDY = "set FTD_RUNTIME_DIR to a local directory that only its owner may write (chmod go-w); ftd makes a missing one"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A place for the runtime directory.

    Attributes:
        mode: of the directory when this user makes it, whatever the umask.
        private: anybody may make something of this name, so it must be a real directory of this user, of mode 0700.
    """

    path: Path
    mode: int = 0o755
    private: bool = False


def daemon_dir(environ: Mapping[str, str]) -> Path:
    """The directory that a daemon of this user takes; made where it is missing.

    Raises:
        RuntimeDirError: `FTD_RUNTIME_DIR` is unusable, or no candidate is usable (every reason is named).
    """
    given = _given(environ)
    if given is not None:
        # Whoever sets it expects the socket there. Falling back would put the daemon where the clients of that
        # setting don't look first, and would hide the typo.
        _prepare(given)
        return given.path
    refused = []
    for candidate in _candidates(environ):
        try:
            _prepare(candidate)
        except RuntimeDirError as error:
            refused.append(error.message)
        else:
            return candidate.path
    raise RuntimeDirError(f"no runtime directory is usable: {'; '.join(refused)}", _REMEDY)


def client_dirs(environ: Mapping[str, str]) -> list[Path]:
    """Every candidate that exists and that this user may read and search, in the contract's order."""
    found = []
    for candidate in _candidates(environ):
        if candidate.private:
            usable = _private_problem(candidate.path, (os.geteuid(), 0)) is None
        else:
            # not Path.is_dir, which raises where a parent is closed to us: su keeps another's XDG_RUNTIME_DIR
            usable = os.path.isdir(candidate.path)  # noqa: PTH112
        if usable and os.access(candidate.path, os.R_OK | os.X_OK, effective_ids=True):
            found.append(candidate.path)
    return list(dict.fromkeys(found))


def survey(environ: Mapping[str, str]) -> list[tuple[Path, str | None]]:
    """Every candidate in the contract's order, and why a daemon of this user would not take it. Makes nothing."""
    return [(candidate.path, _obstacle(candidate)) for candidate in _candidates(environ)]


def _obstacle(candidate: Candidate) -> str | None:
    path = candidate.path
    if not path.is_absolute():
        return "relative"
    try:
        if os.path.lexists(path):
            return _judged(candidate)
    except OSError as error:
        return os_reason(error)
    if os.access(path.parent, os.W_OK | os.X_OK, effective_ids=True):
        return None
    return f"missing, and {path.parent} is missing or not writable for uid {os.geteuid()}"


def socket_path(directory: Path, namespace: str) -> Path:
    """Path of a namespace's control socket.

    Raises:
        RuntimeDirError: it is longer than the kernel takes.
    """
    path = directory / f"{namespace}.sock"
    length = len(os.fsencode(path))
    if length > MAX_SOCKET_PATH_BYTES:
        raise RuntimeDirError(
            f"the socket path {path} has {length} bytes: expected at most {MAX_SOCKET_PATH_BYTES}",
            "set FTD_RUNTIME_DIR to a shorter directory, or shorten the namespace",
        )
    return path


def find_socket(said: Path, environ: Mapping[str, str]) -> Path:
    """A daemon's socket: where it says, or of that name in a runtime directory that this process sees elsewhere."""
    found = [said, *(folder / said.name for folder in client_dirs(environ))]
    # not Path.exists, which raises where a directory on the way is closed to us
    return next((path for path in found if os.path.exists(path)), said)  # noqa: PTH110


def _given(environ: Mapping[str, str]) -> Candidate | None:
    text = environ.get("FTD_RUNTIME_DIR")
    return Candidate(Path(text)) if text else None


def _candidates(environ: Mapping[str, str]) -> Iterator[Candidate]:
    given = _given(environ)
    if given is not None:
        yield given
    yield Candidate(SYSTEM_DIR)
    session = environ.get("XDG_RUNTIME_DIR", "")
    if session.startswith("/"):  # the XDG base directory specification: ignore a relative one
        yield Candidate(Path(session) / "ftd")
    yield Candidate(TMP_DIR / f"ftd-{os.geteuid()}", mode=0o700, private=True)


def _prepare(candidate: Candidate) -> None:
    """Makes the directory where it is missing, and judges it.

    Raises:
        RuntimeDirError: it cannot be made, or is no place for a socket.
    """
    path = candidate.path
    if not path.is_absolute():
        # a daemon and its clients rarely share a working directory
        raise RuntimeDirError(f"the runtime directory {path} is relative: expected an absolute path", _REMEDY)
    try:
        _make(path, candidate.mode)
        problem = _judged(candidate)
    except OSError as error:
        raise RuntimeDirError(f"{path} cannot be made or read: {os_reason(error)}", _REMEDY) from None
    if problem is not None:
        raise RuntimeDirError(f"{path} is {problem}: expected a local directory that only its owner may write", _REMEDY)


def _make(path: Path, mode: int) -> None:
    try:
        path.mkdir(mode)
    except FileExistsError:
        return
    # mkdir(2) takes the umask away from the mode: an ordinary 077 would hide the socket from clients
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fchmod(descriptor, mode)
    finally:
        os.close(descriptor)


def _judged(candidate: Candidate) -> str | None:
    return _private_problem(candidate.path, (os.geteuid(),)) if candidate.private else _problem(candidate.path)


def _problem(path: Path) -> str | None:
    """Why a daemon may not take the directory; None when it may."""
    found = path.stat()
    if not stat.S_ISDIR(found.st_mode):
        return "no directory"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"writable by others than its owner (mode {stat.S_IMODE(found.st_mode):04o})"
    if not os.access(path, os.W_OK | os.X_OK, effective_ids=True):
        return f"not writable for uid {os.geteuid()}"
    filesystem = filesystem_of(path)
    return f"on {filesystem}, which hosts may share" if filesystem in NETWORK_FILESYSTEMS else None


def _private_problem(path: Path, owner_uids: tuple[int, ...]) -> str | None:
    """Why a directory of a name that anybody may make is not to be trusted; None when it is."""
    try:
        found = path.lstat()
    except OSError as error:
        return os_reason(error)
    if not stat.S_ISDIR(found.st_mode):
        return "no real directory"
    if found.st_uid not in owner_uids:
        return f"a directory of uid {found.st_uid}"
    if stat.S_IMODE(found.st_mode) != 0o700:
        return f"of mode {stat.S_IMODE(found.st_mode):04o} and not 0700"
    return None


def filesystem_of(path: Path) -> str:
    """Type of the filesystem that holds `path`; empty where the kernel's table does not tell."""
    device = path.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    return next((mount.kind for mount in mounts() if mount.device == wanted), "")
