"""Locks that the kernel releases when their holder dies: open-file-description locks (fcntl(2), F_OFD_SETLK).

Four uses, all on segments in /dev/shm, so that the scope of a lock is the scope of the name:

- the *life lock* of a creator, on the segment `lock` (mode 0600: whoever may open a file may lock it);
- its exclusive lock on `coord`, which anybody may ask about by F_OFD_GETLK on a read-only descriptor;
- a follower's lease, one byte of `slots`;
- turns among followers, on bytes of `slots` behind the leases.

A descriptor that carries such a lock is opened for that alone: a mapping of it (Python's `mmap` duplicates the
descriptor) or a copy in a forked child would keep the lock alive after its owner let go. `LockFile` therefore owns
its descriptor, never lends it for mapping, and is closed in forked children.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import threading
import weakref

# struct flock of 64-bit Linux: short type, short whence, (pad) off_t start, off_t len, pid_t pid, (pad)
_FLOCK = struct.Struct("hhqqi4x")

_open_files: weakref.WeakSet[LockFile] = weakref.WeakSet()

#: Held while a descriptor is no `LockFile`'s that may carry a lock, at its opening and its closing: nobody forks
#: meanwhile. A child would have it unnoticed, and with it the lock, for as long as the child lives.
unforked = threading.RLock()
os.register_at_fork(before=unforked.acquire, after_in_parent=unforked.release, after_in_child=unforked.release)


class LockFile:
    """Owner of a descriptor that exists to be locked."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        _open_files.add(self)

    @property
    def closed(self) -> bool:
        """True after `close`, and in a child forked since."""
        return self._fd < 0

    def fileno(self) -> int:
        return self._fd

    def try_exclusive(self, start: int = 0, length: int = 0) -> bool:
        """Takes an exclusive lock on bytes `[start, start + length)` (length 0: to the end); False when another holds
        one there. Never blocks."""
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _flock(fcntl.F_WRLCK, start, length))
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise
        return True

    def release(self, start: int = 0, length: int = 0) -> None:
        fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _flock(fcntl.F_UNLCK, start, length))

    def close(self) -> None:
        """Ends every lock taken through this descriptor."""
        with unforked:
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)

    def __enter__(self) -> LockFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def exclusive_holder(fd: int, start: int = 0, length: int = 0) -> tuple[int, int] | None:
    """(start, length) of an exclusive lock that another description holds in the range, or None.

    Asks for a *shared* lock, which takes nothing, works on a read-only descriptor, and is refused only by an
    exclusive holder, which no read-only descriptor can be.
    """
    answer = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _flock(fcntl.F_RDLCK, start, length)))
    return None if answer[0] == fcntl.F_UNLCK else (answer[2], answer[3])


def exclusive_bytes(fd: int, start: int, end: int) -> list[int]:
    """Every byte of `[start, end)` that some other description holds exclusively, ascending.

    The kernel names one conflict a question; the ranges beside it are asked again, so the cost follows the number
    of holders and not the size of the range.
    """
    found: list[int] = []
    unasked = [(start, end)]
    while unasked:
        start, end = unasked.pop()
        held = exclusive_holder(fd, start, end - start) if start < end else None
        if held is None:
            continue
        first, last = max(start, held[0]), end if held[1] == 0 else min(end, held[0] + held[1])
        found += range(first, last)
        unasked += [(start, first), (last, end)]
    return sorted(found)


def _flock(kind: int, start: int, length: int) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, start, length, 0)


def _close_all() -> None:
    for file in list(_open_files):
        with contextlib.suppress(OSError):
            file.close()


os.register_at_fork(after_in_child=_close_all)
