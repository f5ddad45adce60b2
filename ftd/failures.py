"""Why the last start in a namespace failed: a small file in a runtime directory, for whoever asks later.

Written by the failing daemon while it holds the life lock; removed by the next start or stop. Namespaces that come in
here have been checked by `shm/names.py`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ftd import clock, owner
from ftd.errors import FtdError, os_reason

log = logging.getLogger(__name__)

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
