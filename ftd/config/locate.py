"""Where a daemon's configuration file is looked for, and how it is read: bounded, and never a device or pipe."""

from __future__ import annotations

import os
import pwd
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ftd.errors import ConfigError, os_reason
from ftd.units import MIB

SYSTEM_DIR = Path("/etc/ftd")

#: A configuration holds a few dozen lines; a larger file is a checkpoint or a log by mistake.
MAX_FILE_BYTES = MIB

_IN_FULL = "write the path in full"


@dataclass(frozen=True, slots=True)
class Search:
    """Candidates in their order.

    Attributes:
        named_by: `--config` or `$FTD_CONFIG`, whose one candidate must exist; empty for the standard places.
    """

    paths: tuple[Path, ...]
    named_by: str = ""


@dataclass(frozen=True, slots=True)
class ConfigFile:
    path: Path
    text: str


def search_paths(namespace: str, config_file: Path | None, environ: Mapping[str, str]) -> Search:
    """The candidates for a valid namespace; an empty `$FTD_CONFIG` counts as unset."""
    if config_file is not None:
        return Search((expand(str(config_file), None, environ),), "--config")
    if environ.get("FTD_CONFIG"):
        return Search((expand(environ["FTD_CONFIG"], None, environ),), "$FTD_CONFIG")
    directories = [SYSTEM_DIR]
    user_dir = Path(environ.get("XDG_CONFIG_HOME") or "")
    if not user_dir.is_absolute():
        # the XDG Base Directory Specification has relative paths ignored
        home = _home(environ)
        user_dir = home / ".config" if home else Path()
    if user_dir.is_absolute():
        directories.append(user_dir / "ftd")
    return Search(tuple(directory / f"{namespace}.yaml" for directory in directories))


def read_first(search: Search) -> tuple[ConfigFile | None, list[str]]:
    """The first candidate that exists, and warnings; None when none exists and none has to.

    Raises:
        ConfigError: a file that has to exist does not, or an existing one cannot be read or is no text.
    """
    warnings: list[str] = []
    for path in search.paths:
        try:
            return ConfigFile(path, read_text(path)), warnings
        except (FileNotFoundError, NotADirectoryError) as error:
            if search.named_by:
                raise _unusable(path, search, os_reason(error), f"correct {search.named_by}") from None
        except PermissionError as error:
            # sudo -u leaves HOME at a directory that the new user may not enter: nothing to configure there
            if not search.named_by and not _exists(path):
                warnings.append(f"{path} was not looked for: {os_reason(error)}")
                continue
            user = f"uid {os.geteuid()}"
            raise _unusable(path, search, f"{os_reason(error)} for {user}", f"let {user} read {path}") from None
        except (OSError, ValueError) as error:
            what = os_reason(error) if isinstance(error, OSError) else str(error)
            raise _unusable(path, search, what, f"correct {search.named_by or path}") from None
    return None, warnings


def expand(text: str, base: Path | None, environ: Mapping[str, str]) -> Path:
    """An absolute path: `~` is a home directory, a relative path starts at `base` or the working directory.

    Raises:
        ConfigError: the home directory or the working directory is not known.
    """
    path = Path(text)
    # of the text, not of the path, which has lost the ./ that makes a tilde an ordinary character
    if text.startswith("~"):
        first = path.parts[0]
        home = _home(environ) if first == "~" else _home_of(first[1:])
        if home is None:
            raise ConfigError(f"{text!r}: found no home directory for {first}, expected an absolute path", _IN_FULL)
        path = home.joinpath(*path.parts[1:])
    try:
        return (base / path if base else path).absolute()
    except OSError as error:
        raise ConfigError(
            f"{text!r} is relative to the working directory: {os_reason(error)}, expected an absolute path", _IN_FULL
        ) from None


def read_text(path: Path) -> str:
    """The text of a regular file of at most `MAX_FILE_BYTES`.

    Raises:
        OSError: it cannot be opened or read.
        ValueError: it is no such file, or no UTF-8; the message says what was found.
    """
    # O_NONBLOCK: opening a pipe without a writer would wait for ever, before the check below can refuse it
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise ValueError("found a directory" if stat.S_ISDIR(mode) else "found a device or pipe")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            content = file.read(MAX_FILE_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(content) > MAX_FILE_BYTES:
        raise ValueError(f"found more than {MAX_FILE_BYTES} bytes")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"found no UTF-8 text at byte {error.start}") from None


def _exists(path: Path) -> bool:
    try:
        path.stat()
    except OSError:
        return False
    return True


def _unusable(path: Path, search: Search, what: str, remedy: str) -> ConfigError:
    named = f" ({search.named_by})" if search.named_by else ""
    return ConfigError(f"configuration file {path}{named}: {what}, expected a readable YAML file", remedy)


def _home(environ: Mapping[str, str]) -> Path | None:
    if environ.get("HOME"):
        return Path(environ["HOME"])
    try:
        return Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:
        return None


def _home_of(user: str) -> Path | None:
    try:
        return Path(pwd.getpwnam(user).pw_dir)
    except KeyError:
        return None
