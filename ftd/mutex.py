"""Short mutual exclusion in a runtime directory: filelock, always with a bound.

Not for liveness: the creator's life lock is a lock on a segment in /dev/shm (`shm/lock.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import filelock

from ftd.errors import RuntimeDirError


@contextmanager
def mutex(path: Path, timeout_s: float = 5.0) -> Iterator[None]:
    """Holds the lock file `path` for the body; the empty file may stay.

    Raises:
        RuntimeDirError: the lock was not free in `timeout_s`, or the directory does not lock.
    """
    lock = filelock.FileLock(path, timeout=timeout_s, mode=0o600)
    try:
        lock.acquire()
    except filelock.Timeout:
        raise RuntimeDirError(
            f"{path} is held by another process: expected it free within {timeout_s:g} s",
            "look for a stopped `ftd start` that shares this runtime directory",
        ) from None
    except (OSError, NotImplementedError) as error:
        raise RuntimeDirError(
            f"{path} cannot be locked: {error}", "set FTD_RUNTIME_DIR to a directory on a local filesystem"
        ) from None
    try:
        yield
    finally:
        lock.release()
