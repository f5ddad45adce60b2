"""Profiles in a directory: one readable file each, named after what it was measured on.

Used by whoever runs a model, in a directory of his own, and by the daemon for its namespace. A file is replaced whole
or not at all; readers take no lock.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ftd.errors import FtdError, MissingFileError, RuntimeDirError, os_reason
from ftd.mutex import mutex
from ftd.plan.profile import (
    MAX_PROFILE_BYTES,
    SCHEMA,
    Identity,
    Profile,
    ProfileMismatchError,
    decode,
    differences,
    encode,
    identify,
)
from ftd.plan.strictjson import ProfileError

log = logging.getLogger(__name__)

SUFFIX = ".profile.json"
_TEMPORARY = ".tmp"
#: Empty; stays, like those of the runtime directory.
LOCK_NAME = ".profiles.lock"


class ProfileMissingError(ProfileError, MissingFileError):
    """There is no profile: no directory, or none in it."""

    code = "profile_missing"


class ProfileStorageError(FtdError):
    """A directory of profiles cannot be read or written."""

    code = "profile_storage"


@dataclass(frozen=True, slots=True)
class Entry:
    """A file of a directory: its profile, or why there is none.

    Attributes:
        identity: what it was measured on; also known of another schema, whose profile is not.
    """

    path: Path
    identity: Identity | None = None
    profile: Profile | None = None
    problem: ProfileError | None = None


def file_name(identity: Identity) -> str:
    """`NVIDIA-H200.<fingerprint>.<digest>.profile.json`: the same for equal identities, another for others.

    Device and fingerprint are cut and freed of what file names may not hold; the digest is of the whole identity.
    """
    whole = json.dumps(identity.to_map(), sort_keys=True).encode()
    digest = hashlib.blake2b(whole, digest_size=6).hexdigest()
    return f"{_slug(identity.device, 40)}.{_slug(identity.fingerprint, 16)}.{digest}{SUFFIX}"


def _slug(text: str, length: int) -> str:
    return re.sub(r"[^A-Za-z0-9_]+", "-", text)[:length].strip("-") or "unnamed"


def listing(directory: Path) -> list[Entry]:
    """Every file of the directory that is named like a profile, by name; none where there is no directory.

    Raises:
        ProfileStorageError: the directory cannot be read.
    """
    return [_look(path) for path in _paths(directory)]


def load(directory: Path, expected: Identity) -> Profile:
    """The profile in `directory` that was measured on what is expected, whatever its file is called.

    Raises:
        ProfileMissingError: there is no directory, or no profile in it.
        ProfileMismatchError: there are only others; with every difference of the nearest, and the names of all.
        ProfileError: there are only files that are no profiles.
        ProfileStorageError: the directory cannot be read.
    """
    entries = listing(directory)
    if not entries:
        raise ProfileMissingError(
            f"no profile in {directory}: expected a file *{SUFFIX}",
            "store one with save_profile after profiling",
            str(directory),
        )
    fitting = {e.path: e.profile for e in entries if e.profile is not None and not differences(e.profile, expected)}
    if fitting:
        own = directory / file_name(expected)
        return fitting.get(own) or next(iter(fitting.values()))
    raise _none_fits(directory, entries, expected)


def _none_fits(directory: Path, entries: list[Entry], expected: Identity) -> ProfileError:
    damaged = [f"{entry.path.name} is no profile: {entry.problem.message}" for entry in entries if entry.problem]
    others = [(entry.path, entry.identity) for entry in entries if entry.identity is not None]
    if not others:
        return ProfileError(
            f"no profile in {directory}: {'; '.join(damaged)}", "remove what is damaged, and store a profile again"
        )
    measured = {path: differences(identity, expected) for path, identity in others}
    nearest = min(measured, key=lambda path: (len(measured[path]), path.name))
    rest = [
        f"{path.name} is further off: {len(lines)} differences" for path, lines in measured.items() if path != nearest
    ]
    return ProfileMismatchError(
        f"no profile in {directory} fits; the nearest is {nearest.name}",
        "profile the model again, or run it as that profile was measured",
        [*measured[nearest], *rest, *damaged],
    )


def read(directory: Path, identity: Identity) -> Profile | None:
    """The profile of the file that `save` gives this identity; None where there is none. Looks at no other file.

    Raises:
        ProfileError: the file is damaged, or holds another profile.
        ProfileStorageError: the directory cannot be read.
    """
    path = directory / file_name(identity)
    try:
        profile = _read(path)
    except ProfileMissingError:
        return None
    if differences(profile, identity):
        raise ProfileError(f"{path} holds another profile than its name says", "remove it")
    return profile


def save(directory: Path, profile: Profile, *, at_most: int | None = None, mode: int = 0o777) -> Path:
    """Stores a profile in place of an earlier one of the same identity, on the disk when this returns; its path.

    Args:
        at_most: profiles that the directory keeps; those stored longest ago go.
        mode: of the directory, where it has to be made; the umask takes from it.

    Raises:
        ProfileError: the profile is larger than the format allows.
        ProfileStorageError: the directory cannot be made or written, or is full; what was there stays as it was.
    """
    data = encode(profile)
    path = directory / file_name(profile.identity)
    try:
        directory.mkdir(mode, parents=True, exist_ok=True)
        with mutex(directory / LOCK_NAME):
            _clear_away(directory)
            others = _by_age(item for item in _paths(directory) if item != path)
            _write(path, data, others[-1][0] if others else 0)
            if at_most is not None:
                _evict([item for _, item in others], at_most - 1)
            _sync(directory)
    except OSError as error:
        raise _unwritable(directory, error) from None
    except RuntimeDirError as error:
        raise ProfileStorageError(
            f"no profile can be stored in {directory}: {error.message}", "choose a directory that this user may write"
        ) from None
    return path


def _by_age(paths: Iterable[Path]) -> list[tuple[int, Path]]:
    """Times of change and paths, the oldest first."""
    found = []
    for path in paths:
        with contextlib.suppress(FileNotFoundError):  # its owner may remove it at any time
            found.append((path.lstat().st_mtime_ns, path))
    return sorted(found)


def _evict(oldest_first: list[Path], kept: int) -> None:
    for path in oldest_first[: max(0, len(oldest_first) - kept)]:
        try:
            path.unlink(missing_ok=True)
            log.info("%s: evicted by a newer profile", path)
        except OSError as error:  # the newer one stands already
            log.warning("%s cannot be evicted: %s", path, os_reason(error))


def _write(path: Path, data: bytes, newest_ns: int) -> None:
    """Whole, on the disk, and later than `newest_ns`: the times order the files when one has to go."""
    temporary = path.with_name(f".{path.name}{_TEMPORARY}")
    with contextlib.ExitStack() as undo:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(temporary, flags, 0o666), "wb") as file:
            undo.callback(temporary.unlink, missing_ok=True)
            file.write(data)
            file.flush()
            written = os.fstat(file.fileno())
            if written.st_mtime_ns <= newest_ns:  # a coarse clock, or one that was set back
                os.utime(file.fileno(), ns=(written.st_atime_ns, newest_ns + 1))
            os.fsync(file.fileno())
        temporary.replace(path)
        undo.pop_all()


def _clear_away(directory: Path) -> None:
    """What writers left that were killed; nobody else writes while the mutex is held."""
    for path in directory.glob(f".*{SUFFIX}{_TEMPORARY}"):
        path.unlink(missing_ok=True)


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _paths(directory: Path) -> list[Path]:
    try:
        with os.scandir(directory) as entries:
            names = [e.name for e in entries if e.name.endswith(SUFFIX) and not e.name.startswith(".")]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise _unreadable(directory, error) from None
    return [directory / name for name in sorted(names)]


def _look(path: Path) -> Entry:
    try:
        data = _bytes(path)
        identity = identify(data)
        return Entry(path, identity, decode(data) if identity.schema == SCHEMA else None)
    except ProfileError as error:
        return Entry(path, problem=error)
    except OSError as error:
        return Entry(path, problem=ProfileError(f"it cannot be read: {os_reason(error)}", "let this user read it"))


def _read(path: Path) -> Profile:
    try:
        return decode(_bytes(path))
    except FileNotFoundError:
        raise ProfileMissingError(f"{path} is gone", "store it again", str(path)) from None
    except OSError as error:
        raise _unreadable(path, error) from None
    except ProfileError as error:
        raise ProfileError(f"{path} is no profile: {error.message}", error.remedy) from None


def _bytes(path: Path) -> bytes:
    # O_NONBLOCK: a fifo at the path would hold the reader for ever
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ProfileError("it is no regular file", "remove it")
    with os.fdopen(descriptor, "rb") as file:
        return file.read(MAX_PROFILE_BYTES + 1)


def _unreadable(path: Path, error: OSError) -> ProfileStorageError:
    return ProfileStorageError(f"{path} cannot be read: {os_reason(error)}", "let this user read it")


def _unwritable(directory: Path, error: OSError) -> ProfileStorageError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return ProfileStorageError(
        f"no profile can be stored in {directory}: {os_reason(error)}",
        "make room there, or choose another directory" if full else "choose a directory that this user may write",
    )
