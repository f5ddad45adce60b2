"""Opening files of a checkpoint, with errors that say who is refused what."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from ftd.errors import SourceError, os_reason
from ftd.owner import group_name, user_name
from ftd.source.wording import DOWNLOAD_AGAIN, shown


class MissingFileError(SourceError):
    """A file that should be there is not, or is a link to nothing. Listed apart from broken files."""


@contextlib.contextmanager
def opened(path: Path) -> Iterator[int]:
    """A read-only descriptor of the regular file `path`; messages carry no path.

    Raises:
        MissingFileError: nothing is there.
        SourceError: it cannot be read, is no regular file, or reading inside the `with` failed.
    """
    try:
        fd = open_readable(path)
        try:
            mode = os.fstat(fd).st_mode
            if not stat.S_ISREG(mode):
                raise SourceError(f"is {kind_of(mode)}, expected a regular file", DOWNLOAD_AGAIN)
            yield fd
        finally:
            os.close(fd)
    except OSError as error:
        raise explained(path, error) from None


def read_exactly(fd: int, count: int, offset: int) -> bytes:
    """`count` bytes from `offset` on; `count` is allocated at once, so the caller has checked it.

    Raises:
        SourceError: the file ends before.
    """
    data = b""
    while len(data) < count:  # one round, unless a signal or an odd file system cuts it short
        more = os.pread(fd, count - len(data), offset + len(data))
        if not more:
            raise SourceError(f"ended at byte {offset + len(data)} while it was read", DOWNLOAD_AGAIN)
        data += more
    return data


def explained(path: Path, error: OSError) -> SourceError:
    """The error of an operation on `path` as a sentence without the path itself."""
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        target = _link_target(path)
        problem = "is missing" if target is None else f"is a link to {shown(target)}, which is missing"
        return MissingFileError(problem, "download the missing files, or the whole model again")
    if isinstance(error, PermissionError):
        return SourceError(
            f"permission denied: {_refuser(path)}; this process is uid {os.geteuid()}",
            "give that user read access to the file and search access to its directories",
        )
    return SourceError(f"cannot be read: {os_reason(error)}", "check the file system that holds the checkpoint")


def kind_of(mode: int) -> str:
    """What an inode of this mode is, with its article."""
    kinds = {
        stat.S_IFDIR: "a directory",
        stat.S_IFIFO: "a fifo",
        stat.S_IFSOCK: "a socket",
        stat.S_IFBLK: "a block device",
        stat.S_IFCHR: "a character device",
    }
    return kinds.get(stat.S_IFMT(mode), "a special file")


def open_readable(path: Path) -> int:
    """A descriptor of whatever is at `path`; waits for no writer of a fifo.

    Raises:
        OSError: it cannot be opened.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY
    try:
        return os.open(path, flags | os.O_NONBLOCK)  # opening a fifo waits for its writer otherwise
    except BlockingIOError:
        # another process (Samba, say) holds a lease, which only regular files have: the kernel asks it to give way,
        # and takes the lease after /proc/sys/fs/lease-break-time (fcntl(2), F_SETLEASE)
        return os.open(path, flags)


def _link_target(path: Path) -> str | None:
    try:
        return os.fspath(path.readlink())
    except OSError:
        return None


def _refuser(path: Path) -> str:
    """The owner and mode of `path`, or of the deepest directory above it that can be looked at."""
    for place in (path, *path.parents):
        try:
            status = place.stat()
        except OSError:
            continue
        what = "the file" if place == path else shown(place)
        mode = stat.S_IMODE(status.st_mode)
        return f"{what} has mode {mode:04o} and owner {user_name(status.st_uid)}:{group_name(status.st_gid)}"
    return "its owner cannot be told"
