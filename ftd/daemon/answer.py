"""What a daemon answers to `status`, checked: anybody may run something that answers, under a namespace of his own, and
whoever lists all of the host must not stumble over it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ftd.errors import ControlError
from ftd.shm.names import Names, parse

_MODEL = {"source": str, "tensors": int, "bytes": int, "dtypes": dict, "digest": (str, type(None))}
_SEGMENT = {
    "name": str,
    "bytes": int,
    "inode": int,
    "page_bytes": int,
    "huge_bytes": int,
    "pinned_bytes": int,
    "node_bytes": dict,
}
_PUSH = {"gpu": str, "pushed_bytes": int, "clients": int}
_VERSIONS = {"ftd": str, "protocol": str, "torch": (str, type(None))}


def checked(names: Names, answer: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The part of a status that only the daemon knows, as `control.describe` makes it, and nothing beside it.

    Raises:
        ControlError: it is something else.
    """
    checks: dict[str, Callable[[Any], bool]] = {
        "stage": lambda value: isinstance(value, str | None),
        "fingerprint": lambda value: isinstance(value, str | None),
        "model": lambda value: value is None or _is_model(value),
        "segments": lambda value: isinstance(value, list) and all(_is_segment(names, item) for item in value),
        "pin": lambda value: isinstance(value, str),
        "push": lambda value: isinstance(value, list) and all(_has(item, _PUSH) for item in value),
        "push_obstacle": lambda value: isinstance(value, str | None),
        "warnings": lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value),
        "versions": lambda value: _has(value, _VERSIONS),
    }
    wrong = [key for key, is_good in checks.items() if key not in answer or not is_good(answer[key])]
    if wrong:
        raise ControlError(
            f"the daemon at {path} gave no usable answer to status: {', '.join(wrong)} missing or of another type",
            "run the same release of ftd on both sides",
        )
    return {key: answer[key] for key in checks}


def _is_model(value: Any) -> bool:
    return _has(value, _MODEL) and all(_is_number(size) for size in value["dtypes"].values())


def _is_segment(names: Names, value: Any) -> bool:
    if not _has(value, _SEGMENT):
        return False
    if not all(_is_number(size) for size in value["node_bytes"].values()):
        return False
    parsed = parse(value["name"].removeprefix("/"))
    return parsed is not None and (parsed.name, parsed.namespace) == (value["name"], names.namespace)


def _has(value: Any, kinds: Mapping[str, Any]) -> bool:
    return isinstance(value, dict) and all(
        _is_number(value.get(key)) if kind is int else isinstance(value.get(key), kind) for key, kind in kinds.items()
    )


def _is_number(value: Any) -> bool:
    return type(value) is int and value >= 0
