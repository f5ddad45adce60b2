"""Types of configuration values: what each accepts, and in words what it expects.

A validator raises one of four things, which `problems.py` words: `UNEXPECTED`, the value is not what the field's
`Expected` states; `BOOLEAN_FOR_NUMBER`, the same for a boolean; `against`, it does not go with another field's value;
a `ValueError`, whose own message already says what was found and expected.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, get_args

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from ftd.config.patterns import validate_patterns
from ftd.units import GIB, KIB, MIB, parse_bytes

#: Longest time in seconds that a field takes: poll(2) counts a wait in milliseconds in a C int, 2**31 ms.
MAX_SECONDS = 1_000_000.0

#: Types of pydantic errors.
UNEXPECTED = "unexpected"
BOOLEAN_FOR_NUMBER = "boolean_for_number"
AGAINST = "against"

_OCTAL = re.compile(r"(?:0o)?[0-7]{1,8}")
_TYPE_NAME = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)+")
_NUMA = re.compile(r"none|interleave|bind:(?:0|[1-9][0-9]{0,3})")


@dataclass(frozen=True, slots=True)
class Expected:
    """Metadata of a field: what it accepts, for the middle of a sentence."""

    text: str


def expected_of(info: FieldInfo) -> str:
    """What the field accepts, in words: as its `Expected` states it, else the words of its Literal."""
    stated = next((item.text for item in info.metadata if isinstance(item, Expected)), None)
    return stated or listing(get_args(info.annotation))


def against(other: str, expected: str) -> PydanticCustomError:
    """The error of a value that the field `other` rules out; `expected` words what would go with it."""
    return PydanticCustomError(AGAINST, "expected {expected}", {"other": other, "expected": expected})


def _unexpected() -> PydanticCustomError:
    return PydanticCustomError(UNEXPECTED, "not what the field expects")


def no_boolean(value: object) -> object:
    """The value itself, unless it is a boolean, which pydantic would take for 0 or 1."""
    if isinstance(value, bool):
        raise PydanticCustomError(BOOLEAN_FOR_NUMBER, "a boolean where a number is meant")
    return value


def _octal_mode(value: object) -> object:
    """Text is octal digits; an int is the mode itself, which only Python code can say (`0o640`)."""
    value = no_boolean(value)
    if isinstance(value, str) and _OCTAL.fullmatch(value):
        value = int(value.removeprefix("0o"), 8)
    # whoever may write could change weights under all followers, and lock `coord`, the sign of a living creator
    if not isinstance(value, int) or value & ~0o644 or value & 0o600 != 0o600:
        raise _unexpected()
    return value


def _size(value: object) -> object:
    value = no_boolean(value)
    if isinstance(value, str) and len(value) <= 40:
        return parse_bytes(value)
    if not isinstance(value, int | None):
        raise _unexpected()
    return value


def _device(value: object) -> object:
    return None if value == "auto" else no_boolean(value)


def _group(value: object) -> object:
    # 2**32 - 1 is (gid_t)-1, by which chown(2) means "leave the group as it is"
    is_group = isinstance(value, str) and value != "" and "\0" not in value
    is_gid = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**32 - 1
    if not (is_group or is_gid or value is None):
        raise _unexpected()
    return value


def _numa(value: str) -> str:
    if not _NUMA.fullmatch(value):
        raise _unexpected()
    return value


def _flag(value: object) -> object:
    if not isinstance(value, bool):
        raise _unexpected()
    return value


def _path(value: Path | None) -> Path | None:
    # Path("") is the current directory, which nobody means by an empty value
    if value is not None and (value == Path() or "\0" in str(value)):
        raise _unexpected()
    return value


def _type_name(value: str) -> str:
    if not _TYPE_NAME.fullmatch(value):
        raise ValueError(f"found {value[:80]!r}, expected a full name such as argparse.Namespace")
    return value


def _pattern(value: str) -> str:
    validate_patterns([value])
    return value


ModelPath = Annotated[Path | None, AfterValidator(_path), Expected("the path of a checkpoint")]
Flag = Annotated[bool, BeforeValidator(_flag), Expected("true or false")]
Device = Annotated[
    Annotated[int, Field(ge=0, le=1023)] | None,
    BeforeValidator(_device),
    Expected("a CUDA ordinal from 0 to 1023, or auto"),
]
Numa = Annotated[str, AfterValidator(_numa), Expected("none, interleave or bind:<node>")]
Mode = Annotated[
    int,
    BeforeValidator(_octal_mode),
    Expected("octal digits such as 0640 by which the owner reads and writes, and others read at most"),
]
Group = Annotated[str | int | None, BeforeValidator(_group), Expected("a group's name or number")]
Size = Annotated[
    Annotated[int, Field(gt=0, lt=2**63)] | None,
    BeforeValidator(_size),
    Expected("a size above 0 such as 8GiB, or bytes"),
]
Threads = Annotated[
    int, BeforeValidator(no_boolean), Field(ge=1, le=256), Expected("a whole number from 1 to 256")
]  # fmt: skip
Seconds = Annotated[
    float,
    BeforeValidator(no_boolean),
    Field(gt=0, le=MAX_SECONDS, allow_inf_nan=False),
    Expected(f"a number of seconds above 0 and at most {MAX_SECONDS:.0f}"),
]
Address = Annotated[str | None, Field(min_length=1), Expected("host:port")]
Patterns = Annotated[
    tuple[Annotated[str, AfterValidator(_pattern)], ...] | None,
    Expected("a list of patterns such as [model.layers.*]"),
]
TypeNames = Annotated[
    tuple[Annotated[str, AfterValidator(_type_name)], ...] | None,
    Expected("a list of full names such as [argparse.Namespace]"),
]


def listing(words: Sequence[str], last: str = "or") -> str:
    """`auto, cuda or none`."""
    return f" {last} ".join(part for part in (", ".join(words[:-1]), words[-1]) if part)


def size_text(count: int) -> str:
    """Bytes as `parse_bytes` reads them back exactly: `8GiB`, or plain digits."""
    for unit, factor in (("TiB", 1 << 40), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if count and count % factor == 0:
            return f"{count // factor}{unit}"
    return str(count)
