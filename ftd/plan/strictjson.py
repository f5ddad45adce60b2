"""JSON of a profile, from a file or a peer that nobody vouches for: typed, bounded, every failure a `ProfileError`.

Each check gives back the value it was given, and names in its error the place, what was found and what was expected.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ftd.errors import FtdError

#: Names of modules and tensors, reasons, devices: a path of a hundred levels is shorter.
MAX_TEXT = 1000
#: Integers travel through JSON and msgpack.
MAX_COUNT = (1 << 63) - 1
#: A configuration holds numbers, texts, and lists of texts.
_MAX_DEPTH = 4


class ProfileError(FtdError):
    """Bytes are no profile, or a profile says what cannot be."""

    code = "profile"


REMEDY = "profile the model again, and store that profile in place of this one"


def wrong(where: str, found: Any, expected: str) -> ProfileError:
    return ProfileError(f"{where} is {found_text(found)}: expected {expected}", REMEDY)


def found_text(value: Any) -> str:
    """A value for a message: it may be anything, and of any size."""
    if value is None or type(value) in (bool, int, float, str):
        text = "null" if value is None else ascii(value)
        return text if len(text) <= 80 else f"{text[:80]}…"
    kinds: dict[type, str] = {dict: "an object", list: "an array", tuple: "an array"}
    return kinds.get(type(value), f"a {type(value).__name__}")


def parse(data: bytes) -> dict[str, Any]:
    """The object that `data` is; no key of any object in it stands twice."""
    try:
        value = json.loads(data.decode(), object_pairs_hook=_object, parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise ProfileError(f"a profile is not UTF-8 at byte {error.start}: expected JSON", REMEDY) from None
    except json.JSONDecodeError as error:
        raise ProfileError(f"a profile is not JSON at line {error.lineno}: {error.msg.lower()}", REMEDY) from None
    except RecursionError:
        raise ProfileError("a profile is JSON nested too deeply", REMEDY) from None
    except ValueError:  # sys.get_int_max_str_digits()
        raise ProfileError("a profile holds an integer of thousands of digits", REMEDY) from None
    return mapping(value, "a profile")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    built = dict(pairs)
    if len(built) != len(pairs):
        again = _repeated([key for key, _ in pairs])
        raise ProfileError(f"a profile has the key {found_text(again)} twice: expected it once", REMEDY)
    return built


def _repeated(keys: Sequence[str]) -> str:
    return next(key for key, times in Counter(keys).items() if times > 1)


def _no_constant(name: str) -> float:
    raise ProfileError(f"a profile holds {name}: expected finite numbers", REMEDY)


def exactly(fields: Mapping[str, Any], keys: Sequence[str], where: str) -> None:
    for what, those in (
        ("lacks", [key for key in keys if key not in fields]),
        ("has the unknown", [found_text(key) for key in fields if key not in keys]),
    ):
        if those:
            raise ProfileError(f"{where} {what} {', '.join(those[:5])}: expected exactly {', '.join(keys)}", REMEDY)


def mapping(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise wrong(where, value, "an object")
    return {text(key, f"a key of {where}", empty=True): item for key, item in value.items()}


def array(value: Any, where: str) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        raise wrong(where, value, "an array")
    return value


def text(value: Any, where: str, *, empty: bool = False) -> str:
    if type(value) is not str or not (value or empty):
        raise wrong(where, value, "a text")
    if len(value) > MAX_TEXT or not value.isprintable():  # a lone surrogate is not printable either
        raise wrong(where, value, f"printable text of at most {MAX_TEXT} characters")
    return value


def names(value: Any, where: str) -> tuple[str, ...]:
    """Names, which may stand in it more than once. The root module's own name is empty."""
    return tuple(text(item, f"a name in {where}", empty=True) for item in array(value, where))


def distinct(value: Any, where: str) -> tuple[str, ...]:
    found = names(value, where)
    if len(set(found)) != len(found):
        raise ProfileError(f"{where} has {found_text(_repeated(found))} twice: expected it once", REMEDY)
    return found


def count(value: Any, where: str, least: int = 0) -> int:
    if type(value) is not int or not least <= value <= MAX_COUNT:
        raise wrong(where, value, f"an integer of {least} or more")
    return value


def number(value: Any, where: str) -> float:
    if type(value) not in (int, float) or not (abs(value) <= MAX_COUNT if type(value) is int else math.isfinite(value)):
        raise wrong(where, value, "a finite number")
    return float(value)


def plain(value: Any, where: str, depth: int = 0) -> Any:
    """A configuration's value, in the form that JSON gives back: lists for tuples, dicts for mappings."""
    if value is None or type(value) is bool:
        return value
    if type(value) is str:
        return text(value, where, empty=True)
    if type(value) in (int, float):
        number(value, where)
        return value
    if depth < _MAX_DEPTH and isinstance(value, list | tuple):
        return [plain(item, where, depth + 1) for item in value]
    if depth < _MAX_DEPTH and isinstance(value, Mapping):
        return {key: plain(item, f"{where}.{key}", depth + 1) for key, item in mapping(value, where).items()}
    raise wrong(where, value, f"a JSON value, nested at most {_MAX_DEPTH} deep")
