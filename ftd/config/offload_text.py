"""Reads values of OffloadConfig out of text: an INI file, a JSON file, a YAML file, environment variables."""

from __future__ import annotations

import configparser
import json
import re
from collections.abc import Callable, Mapping
from typing import NoReturn, get_origin

from ftd.config.fields import listing
from ftd.config.offload import OffloadConfig
from ftd.config.problems import Given, Problems, nearest
from ftd.config.yamltext import Entry, YamlTextError, read_mapping

#: Sections of an INI file that hold the keys; one of them.
SECTIONS = ("flextensor", "ftd")

_NOTHING = frozenset({"", "none", "null"})

_LISTS = frozenset(key for key, info in OffloadConfig.model_fields.items() if get_origin(info.annotation) is list)
_TEXTS = frozenset(key for key, info in OffloadConfig.model_fields.items() if info.annotation in (str, str | None))


def from_environment(
    environ: Mapping[str, str], prefix: str, also_known: frozenset[str], problems: Problems
) -> dict[str, Given]:
    """The values of the variables `<prefix><FIELD>`. Each other name that begins with the prefix is a problem.

    Args:
        prefix: empty takes the fields' bare names, and then cannot know who else's variables the others are.
        also_known: names with the prefix that are no fields, such as that of the file's path.
    """
    known = {prefix + key.upper(): key for key in OffloadConfig.model_fields}
    given: dict[str, Given] = {}
    for name in sorted(environ):
        if name in known:
            key = known[name]
            text = environ[name]
            given[key] = Given(_listed(text) if key in _LISTS else _plain(key, text), None, f"${name}")
        elif prefix and name.startswith(prefix) and name not in also_known:
            near = nearest(name, [*known, *also_known])
            problems.add(f"unknown variable {name[:64]}: the nearest known one is {near}", f"${name[:64]}")
    return given


def from_file(path: str, text: str, read: Reader, problems: Problems) -> dict[str, Given]:
    """The values of a file's text. What is wrong with it is added to the problems."""
    origin = f"file {path}"
    try:
        entries = read(text)
    except (YamlTextError, _FileError) as error:
        problems.add(f"{path}: {error}", origin)
        return {}
    given: dict[str, Given] = {}
    for entry in entries:
        one = Given(_typed(entry), entry.written, origin, entry.line or None)
        if entry.key in SECTIONS:
            problems.add(f"{entry.key}: found a section, expected its keys at the top level ({one.where})", origin)
        elif entry.key not in OffloadConfig.model_fields:
            shown = repr(entry.key if len(entry.key) <= 64 else entry.key[:61] + "...")
            near = nearest(entry.key, OffloadConfig.model_fields)
            problems.add(f"unknown key {shown}: the nearest known one is {near!r} ({one.where})", origin)
        elif entry.key in given:
            problems.add(f"{entry.key}: found again, expected once ({one.where})", origin)
        else:
            given[entry.key] = one
    return given


def read_ini(text: str) -> list[Entry]:
    """The keys of the one section that is ours, lists split. Values are text, percent signs and all."""
    # no interpolation: a percent sign belongs to the path or pattern that holds it; keys come in lower case
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read_string(text)
    except configparser.MissingSectionHeaderError as error:
        raise _FileError(f"line {error.lineno}: found no section before it, expected [{SECTIONS[0]}]") from None
    except configparser.DuplicateOptionError as error:
        raise _FileError(f"line {error.lineno}: {error.option}: found again, expected once") from None
    except configparser.DuplicateSectionError as error:
        raise _FileError(f"line {error.lineno}: section [{error.section}] found again, expected once") from None
    except configparser.ParsingError as error:
        raise _FileError(f"line {error.errors[0][0]}: found no `key = value`") from None
    ours = [section for section in SECTIONS if section in parser]
    if len(ours) != 1:
        found = listing([f"[{section}]" for section in ours or parser.sections()] or ["no section"], "and")
        raise _FileError(f"found {found[:200]}, expected one section [{SECTIONS[0]}]")
    return [
        Entry(key, _listed(value) if key in _LISTS else value, None, 0) for key, value in parser[ours[0]].items()
    ]  # fmt: skip


def read_json(text: str) -> list[Entry]:
    """The keys of one flat JSON object."""
    try:
        root = json.loads(text, object_pairs_hook=_no_key_twice, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise _FileError(f"line {error.lineno}, column {error.colno}: {error.msg}") from None
    except RecursionError:
        raise _FileError("nested too deeply, expected a flat object") from None
    except ValueError:
        # int() refuses more than 4,300 digits
        raise _FileError("found a number that is too long") from None
    if not isinstance(root, dict):
        raise _FileError('found no object, expected {"key": value}')
    return [Entry(key, value, None, 0) for key, value in root.items()]


Reader = Callable[[str], list[Entry]]

#: By the file name's extension, in lower case.
READERS: Mapping[str, Reader] = {
    ".conf": read_ini,
    ".ini": read_ini,
    ".json": read_json,
    ".yaml": read_mapping,
    ".yml": read_mapping,
}


class _FileError(Exception):
    """The text is not of its format; the message says where."""


def _typed(entry: Entry) -> object:
    """Text that stands for nothing or a number means in every format what it means in the environment."""
    return _plain(entry.key, entry.value) if isinstance(entry.value, str) else entry.value


def _plain(key: str, text: str) -> str | None:
    if text.strip().lower() in _NOTHING:
        return None
    return text if key in _TEXTS else text.strip()


def _listed(text: str) -> list[str] | None:
    # an INI value may also go on over several lines
    items = [item.strip() for item in re.split(r"[,\n]", text)]
    return None if text.strip().lower() in _NOTHING - {""} else [item for item in items if item]


def _no_key_twice(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for position, key in enumerate(keys) if key in keys[:position])
        raise _FileError(f"{twice[:64]}: found again, expected once")
    return found


def _no_constant(name: str) -> NoReturn:
    raise _FileError(f"found {name}, expected a number")
