"""Loads the daemon's configuration: defaults < file < `--set` < `--model`, and keeps where each value came from."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import ValidationError

from ftd.config.fields import listing, size_text
from ftd.config.locate import Search, expand, read_first, search_paths
from ftd.config.model import AS_WRITTEN, NOT_BUILT, DaemonConfig, expected_text
from ftd.config.problems import Given, Problems, describe, nearest
from ftd.config.yamltext import Entry, YamlTextError, as_text, read_mapping, read_value
from ftd.errors import ConfigError, NotBuiltError, UsageError
from ftd.hubname import split_hub_name

#: The daemon's own environment variables. `FT_` belongs to OffloadConfig, and its names do not start with `FTD_`.
KNOWN_VARIABLES = frozenset({"FTD_CONFIG", "FTD_RUNTIME_DIR"})

#: What `ftd start --detach` tells its child: not a setting, so never suggested.
_PRIVATE_VARIABLES = frozenset({"FTD_DETACHED_LOG"})


@dataclass(frozen=True, slots=True)
class Loaded:
    """A configuration and its history.

    Attributes:
        origins: every field → `default`, `file <path>`, `--set` or `--model`.
        warnings: lines for the log; none of them stops a start.
        file: the configuration file that was read, if any.
    """

    config: DaemonConfig
    origins: dict[str, str]
    warnings: tuple[str, ...] = ()
    file: Path | None = None


def load_daemon_config(
    namespace: str,
    *,
    config_file: Path | None = None,
    sets: Sequence[str] = (),
    model: Path | None = None,
    environ: Mapping[str, str],
) -> Loaded:
    """The configuration of a namespace whose name has been checked (it becomes part of a path here).

    Args:
        config_file: from `--config`.
        sets: from `--set`, each `KEY=VALUE`; the last one of a key counts.
        model: from `--model`.
        environ: the process's environment.

    Raises:
        UsageError: a `--set` without a key or `=`.
        ConfigError: everything else that is wrong, all at once.
        NotBuiltError: a value is valid, but this release does not build it.
    """
    pairs = [_split_set(text) for text in sets]
    problems = Problems()
    search = search_paths(namespace, config_file, environ)
    file, entries, warnings = _read_file(search, problems)
    given = _from_file(file, entries or [], problems) | _from_sets(pairs, problems)
    if model is not None:
        given["model"] = Given(str(model), None, "--model")
    _place_model(given, file, environ, problems)
    receives = given.get("receive")
    if receives is not None and receives.value is True:
        if "model" in given:
            problems.add_with_remedy(
                f"receive: true ({receives.where}) and model ({given['model'].where}): expected one of them",
                "leave out the other",
            )
    elif "model" not in given and entries is not None:
        searched = [str(file)] if file else [str(path) for path in search.paths]
        problems.add_with_remedy(
            f"no model: expected --model, or `model:` in {listing(searched)}", "give the checkpoint's path with --model"
        )
    config = _validate(given, problems)
    origins = {key: given[key].origin if key in given else "default" for key in DaemonConfig.model_fields}
    warnings += _unknown_variables(environ)
    return Loaded(config, origins, tuple(warnings), file)


def render_origins(loaded: Loaded) -> list[tuple[str, str, str]]:
    """(key, value, origin) of every field in its order; the value is YAML that would be read as the same value."""
    values = ((key, getattr(loaded.config, key)) for key in DaemonConfig.model_fields)
    return [(key, _value_text(key, value), loaded.origins[key]) for key, value in values]


def _value_text(key: str, value: object) -> str:
    if value is None:
        return "auto" if key == "device" else "null"
    if isinstance(value, bool):
        return str(value).lower()
    if key == "mode" and isinstance(value, int):
        return f"{value:04o}"
    if key == "memory_budget" and isinstance(value, int):
        return size_text(value)
    return as_text(value)


def _split_set(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not (equals and key.strip()):
        raise UsageError(f"--set {text!r}: expected KEY=VALUE", "write it like --set pin=none")
    return key.strip(), value


def _read_file(search: Search, problems: Problems) -> tuple[Path | None, list[Entry] | None, list[str]]:
    """Path and keys of the file, and warnings. No path where there is no file, no keys where it cannot be read."""
    try:
        file, warnings = read_first(search)
    except ConfigError as error:
        problems.add_with_remedy(error.message, error.remedy)
        return None, None, []
    if file is None:
        return None, [], warnings
    try:
        return file.path, read_mapping(file.text), warnings
    except YamlTextError as error:
        problems.add(f"{file.path}: {error}", f"file {file.path}")
        return file.path, None, warnings


def _from_file(path: Path | None, entries: Sequence[Entry], problems: Problems) -> dict[str, Given]:
    origin = f"file {path}"
    given: dict[str, Given] = {}
    for entry in entries:
        one = _given(entry.key, entry, origin, entry.line)
        first = given.get(entry.key)
        if entry.key not in DaemonConfig.model_fields:
            _add_unknown(entry.key, one, problems)
        elif first is not None:
            problems.add(f"{entry.key}: found again, expected once, as on line {first.line} ({one.where})", origin)
        else:
            given[entry.key] = one
    return given


def _from_sets(pairs: Sequence[tuple[str, str]], problems: Problems) -> dict[str, Given]:
    given: dict[str, Given] = {}
    for key, text in pairs:
        try:
            one = _given(key, read_value(text), "--set")
        except YamlTextError as error:
            problems.add(f"{key}: {error} (--set)", "--set")
            continue
        if key in DaemonConfig.model_fields:
            given[key] = one
        else:
            _add_unknown(key, one, problems)
    return given


def _given(key: str, entry: Entry, origin: str, line: int | None = None) -> Given:
    as_written = key in AS_WRITTEN and entry.written is not None
    return Given(entry.written if as_written else entry.value, entry.written, origin, line)


def _add_unknown(key: str, given: Given, problems: Problems) -> None:
    shown = repr(key if len(key) <= 64 else key[:61] + "...")
    known = nearest(key, DaemonConfig.model_fields)
    problems.add(f"unknown key {shown}: the nearest known one is {known!r} ({given.where})", given.origin)


def _place_model(given: dict[str, Given], file: Path | None, environ: Mapping[str, str], problems: Problems) -> None:
    """Makes the model's path absolute: in a file it starts at the file's directory. Drops one that is null.

    The name of a model on the hub stays as it is, unless something lies at the path that reads the same.
    """
    one = given.get("model")
    if one is None or one.value is None:
        given.pop("model", None)
    elif isinstance(one.value, str) and one.value:
        base = file.parent if file and one.origin.startswith("file ") else None
        try:
            place = expand(one.value, base, environ)
            if split_hub_name(one.value) is None or os.path.lexists(place):
                given["model"] = replace(one, value=str(place))
        except ConfigError as error:
            problems.add(f"model: {error.message} ({one.where})", one.origin)


def _validate(given: Mapping[str, Given], problems: Problems) -> DaemonConfig:
    try:
        config = DaemonConfig.model_validate({key: one.value for key, one in given.items()})
    except ValidationError as error:
        for text, origin in describe(error, given, expected_text):
            problems.add(text, origin)
        raise problems.error() from None
    except NotBuiltError as error:
        if problems.texts:
            raise problems.error() from None
        unbuilt = [key for key, built in NOT_BUILT.items() if key in given and given[key].value != built]
        places = listing([f"{key} ({given[key].where})" for key in unbuilt], "and")
        raise NotBuiltError(error.message, f"leave out {places}") from None
    if problems.texts:
        raise problems.error()
    return config


def _unknown_variables(environ: Mapping[str, str]) -> Iterator[str]:
    for name in sorted(environ):
        if name.startswith("FTD_") and name not in KNOWN_VARIABLES | _PRIVATE_VARIABLES:
            known = nearest(name, KNOWN_VARIABLES)
            yield f"environment variable {name} is not known and has no effect: the nearest known one is {known}"
