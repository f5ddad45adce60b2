"""Runtime directories, and two of the things that live there: control sockets and the reasons of failed starts.

The candidates are the contract's, in its order: `$FTD_RUNTIME_DIR`, `/run/ftd`, `$XDG_RUNTIME_DIR/ftd`,
`/tmp/ftd-<uid>`. Namespaces that come in here have been checked by `shm/names.py`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ftd import clock, owner
from ftd.errors import FtdError, RuntimeDirError, os_reason

log = logging.getLogger(__name__)

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
        problem = _private_problem(path, (os.geteuid(),)) if candidate.private else _problem(path)
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
    try:
        lines = Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()
    except OSError:
        return ""
    for line in lines:
        # proc(5): the third field is the device, and the type follows the separator
        fields, _, rest = line.partition(" - ")
        if fields.split()[2:3] == [wanted]:
            return rest.split()[0]
    return ""


# --- why the last start failed -----------------------------------------------------------------------------------

#: A record is a few hundred bytes; anything much larger is not one.
MAX_FAILURE_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Failure:
    """Why the last start in a namespace failed: what the failing daemon knew, for whoever asks after its end.

    Attributes:
        pid, boot_id: of the daemon that failed, for people; `boot_id` in hexadecimal.
        failed_at_ns: CLOCK_MONOTONIC of that boot.
        wall_s: seconds since the epoch.
    """

    namespace: str
    code: str
    message: str
    remedy: str
    exit_status: int
    pid: int
    boot_id: str
    failed_at_ns: int
    wall_s: float

    @staticmethod
    def of(namespace: str, error: FtdError) -> Failure:
        """The failure of this process, now."""
        now = (clock.monotonic_ns(), clock.wall_s())
        texts = (error.code, error.message, error.remedy)
        return Failure(namespace, *texts, error.exit_status, os.getpid(), owner.boot_id().hex(), *now)

    def to_dict(self) -> dict[str, str]:
        """As the contract prints it: `{"code", "message", "remedy"}`."""
        return {"code": self.code, "message": self.message, "remedy": self.remedy}

    def is_after(self, begun_ns: int) -> bool:
        """Whether it happened on this boot, at or after `begun_ns` of the monotonic clock."""
        return self._is_of_this_boot() and self.failed_at_ns >= begun_ns

    def _is_of_this_boot(self) -> bool:
        return self.boot_id == owner.boot_id().hex()

    def _order(self) -> tuple[bool, float]:
        # the wall clock may have been set between two failures: it only orders those of earlier boots
        here = self._is_of_this_boot()
        return here, self.failed_at_ns if here else self.wall_s


_KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("namespace", "code", "message", "remedy", "boot_id"), (str,)),
    **dict.fromkeys(("exit_status", "pid", "failed_at_ns"), (int,)),
    "wall_s": (float, int),
}
_SUFFIX = ".failed.json"


def write_failure(directory: Path, failure: Failure) -> bool:
    """Leaves the record for the next asker, whole or not at all; whether it stands.

    Never raises: the failure itself is on its way to the user, and a full disk must not replace it.
    """
    path = directory / (failure.namespace + _SUFFIX)
    temporary = directory / f".{path.name}.{os.getpid()}"
    try:
        with contextlib.ExitStack() as undo:
            # a name of our own, made anew: what an earlier process of this pid left may be a link
            temporary.unlink(missing_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with os.fdopen(os.open(temporary, flags, 0o600), "wb") as file:
                undo.callback(temporary.unlink, missing_ok=True)
                file.write(json.dumps(asdict(failure)).encode())
                # whoever may look into the directory may know, whatever the umask
                os.fchmod(file.fileno(), 0o644)
            temporary.replace(path)
            undo.pop_all()
    except OSError as error:
        log.warning("%s cannot be written: %s", path, os_reason(error))
        return False
    return True


def read_failure(directories: Iterable[Path], namespace: str) -> Failure | None:
    """The latest record of a namespace in all directories; None when there is none that can be understood."""
    found = [failure for directory in directories if (failure := _read(directory / (namespace + _SUFFIX)))]
    return max(found, key=Failure._order, default=None)


def remove_failure(directories: Iterable[Path], namespace: str) -> None:
    """Removes the records of a namespace where this user may; what stays is logged."""
    for directory in directories:
        path = directory / (namespace + _SUFFIX)
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            log.warning("%s cannot be removed: %s", path, os_reason(error))


def failed_namespaces(directories: Iterable[Path]) -> list[str]:
    """Namespaces that have a record which can be understood, sorted."""
    found: set[str] = set()
    for directory in directories:
        # scandir rather than glob: a directory that vanished or was closed to us says so in one place
        with contextlib.suppress(OSError), os.scandir(directory) as entries:
            names = [entry.name for entry in entries if entry.name.endswith(_SUFFIX)]
            found.update(failure.namespace for name in names if (failure := _read(directory / name)))
    return sorted(found)


def _read(path: Path) -> Failure | None:
    """The record at `path`. Whatever is no record is unknown, not an error: it must not block a recovery."""
    try:
        # O_NONBLOCK: a fifo at the path would hold the reader for ever
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            return _parse(file.read(MAX_FAILURE_BYTES + 1), path.name.removesuffix(_SUFFIX))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        reason = os_reason(error) if isinstance(error, OSError) else str(error)
        log.warning("%s is no failure record and is ignored: %s", path, reason)
        return None


def _parse(data: bytes, namespace: str) -> Failure:
    """The record of these bytes.

    Raises:
        ValueError, RecursionError: they are none, or one of another namespace.
    """
    if len(data) > MAX_FAILURE_BYTES:
        raise ValueError(f"more than {MAX_FAILURE_BYTES} bytes")
    value: Any = json.loads(data)
    fields = value if isinstance(value, dict) else {}
    wrong = [name for name, kinds in _KINDS.items() if type(fields.get(name)) not in kinds]
    if wrong:
        raise ValueError(f"{', '.join(wrong)} missing or of another type")
    if fields["namespace"] != namespace or not math.isfinite(fields["wall_s"]):
        raise ValueError(f"expected the namespace {namespace} and a finite time")
    return Failure(**{name: fields[name] for name in _KINDS})
