"""Loads OffloadConfig: defaults < file < environment < arguments. Reports all that is wrong, and where it stands."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ftd.config.fields import expected_of, listing
from ftd.config.locate import expand, read_text
from ftd.config.offload import OffloadConfig
from ftd.config.offload_text import READERS, from_environment, from_file
from ftd.config.problems import Given, Problems, describe, nearest
from ftd.errors import ConfigError, ConfigMissingError, OffloadConfigError, os_reason

_FILE_VARIABLE = "FT_CONFIG_FILE"

_ARGUMENTS = "the arguments"


def load_config(
    config_path: str | Path | None = None,
    env_prefix: str = "FT_",
    use_env: bool = True,
    config_file_env_var: str = _FILE_VARIABLE,
    **kwargs: Any,
) -> OffloadConfig:
    """The configuration out of a file, the environment and arguments; each overrides those before it.

    With `use_env` and no file, `enabled` is false unless `<prefix>ENABLED` or an argument says otherwise.

    Args:
        config_path: a file ending in .conf, .ini, .json, .yaml or .yml. None takes the path in `config_file_env_var`,
            whatever `use_env` says; where that is unset or empty too, there is no file.
        env_prefix: what the names of variables begin with, before the field's name in upper case. Every other name
            that begins with it is an error. Empty takes the bare names.
        use_env: whether variables count.
        config_file_env_var: name of the variable that may hold the file's path.
        kwargs: fields of `OffloadConfig`.

    Raises:
        FileNotFoundError: the file does not exist (`ConfigMissingError`).
        ValueError: anything else that is wrong (`OffloadConfigError`).
    """
    problems = Problems()
    path, named_by = _path(config_path, config_file_env_var)
    given = _from_path(path, named_by, problems) if path is not None else {}
    if use_env:
        if path is None:
            given["enabled"] = Given(False, None, "default")
        given |= from_environment(os.environ, env_prefix, frozenset({config_file_env_var, _FILE_VARIABLE}), problems)
    return _validated(given | _from_arguments(kwargs, problems), problems)


def load_config_from_file(
    config_path: str | Path | None = None, env_var: str = _FILE_VARIABLE, **kwargs: Any
) -> OffloadConfig:
    """The configuration out of a file, and arguments that override it; variables do not count.

    Args:
        config_path: as of `load_config`.
        env_var: name of the variable that holds the path when `config_path` is None.
        kwargs: fields of `OffloadConfig`.

    Raises:
        FileNotFoundError: the file does not exist, or none is named (`ConfigMissingError`).
        ValueError: anything else that is wrong (`OffloadConfigError`).
    """
    if config_path is None and not os.environ.get(env_var):
        raise ConfigMissingError(
            f"no configuration file: found neither an argument nor ${env_var}, expected a path in one of them",
            f"pass config_path, or set {env_var}",
        )
    return load_config(config_path, use_env=False, config_file_env_var=env_var, **kwargs)


def load_config_from_env(prefix: str = "FT_", **kwargs: Any) -> OffloadConfig:
    """The configuration out of the environment, and arguments that override it; no file is read.

    `enabled` is false unless `<prefix>ENABLED` or an argument says otherwise.

    Args:
        prefix: as `env_prefix` of `load_config`. `<prefix>CONFIG_FILE` may be set, and has no effect here.
        kwargs: fields of `OffloadConfig`.

    Raises:
        ValueError: something is wrong (`OffloadConfigError`).
    """
    problems = Problems()
    given = {"enabled": Given(False, None, "default")}
    given |= from_environment(os.environ, prefix, frozenset({f"{prefix}CONFIG_FILE", _FILE_VARIABLE}), problems)
    return _validated(given | _from_arguments(kwargs, problems), problems)


def _path(config_path: str | Path | None, variable: str) -> tuple[Path | None, str]:
    """The file's absolute path, if there is to be a file, and the variable that names it, if one does."""
    named_by = "" if config_path is not None else f" (${variable})"
    text = str(config_path) if config_path is not None else os.environ.get(variable, "")
    if config_path is None and not text:
        return None, ""
    try:
        return expand(text, None, os.environ), named_by
    except ConfigError as error:
        raise OffloadConfigError(f"configuration file {error.message}{named_by}", error.remedy) from None


def _from_path(path: Path, named_by: str, problems: Problems) -> dict[str, Given]:
    text = _text(path, named_by)
    read = READERS.get(path.suffix.lower())
    if read is None:
        expected = listing([*READERS])
        raise OffloadConfigError(
            f"configuration file {path}{named_by}: found a name ending in {path.suffix!r}, expected {expected}",
            "name it after its format",
        )
    return from_file(str(path), text, read, problems)


def _text(path: Path, named_by: str) -> str:
    remedy = f"correct {named_by.strip(' ()') or 'config_path'}"
    try:
        return read_text(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        message = f"configuration file {path}{named_by}: {os_reason(error)}, expected a file"
        raise ConfigMissingError(message, remedy, str(path)) from None
    except (OSError, ValueError) as error:
        what = os_reason(error) if isinstance(error, OSError) else str(error)
        message = f"configuration file {path}{named_by}: {what}, expected a readable text file"
        raise OffloadConfigError(message, remedy) from None


def _from_arguments(kwargs: Mapping[str, Any], problems: Problems) -> dict[str, Given]:
    given: dict[str, Given] = {}
    for key, value in kwargs.items():
        if key in OffloadConfig.model_fields:
            given[key] = Given(value, None, _ARGUMENTS)
        else:
            near = nearest(key, OffloadConfig.model_fields)
            problems.add(f"unknown argument {key[:64]!r}: the nearest known field is {near!r}", _ARGUMENTS)
    return given


def _validated(given: Mapping[str, Given], problems: Problems) -> OffloadConfig:
    config: OffloadConfig | None = None
    try:
        config = OffloadConfig.model_validate({key: one.value for key, one in given.items()})
    except ValidationError as error:
        for text, origin in describe(error, given, _expected):
            problems.add(text, origin)
    if config is None or problems.texts:
        found = problems.error()
        raise OffloadConfigError(found.message, found.remedy)
    return config


def _expected(key: str) -> str:
    return expected_of(OffloadConfig.model_fields[key])
