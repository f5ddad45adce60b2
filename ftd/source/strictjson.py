"""JSON from untrusted files: one object, duplicate keys seen, every failure a `SourceError`."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from ftd.errors import SourceError
from ftd.source.wording import DOWNLOAD_AGAIN


class Repeated(dict[str, Any]):
    """An object that had the key `key` more than once; the last value won.

    A class of its own, because the decoder cannot know whether the object matters: whoever uses it decides.
    """

    key: str


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    built = dict(pairs)
    if len(built) == len(pairs):
        return built
    repeated = Repeated(built)
    repeated.key = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
    return repeated


def load_object(raw: bytes, start: int) -> dict[str, Any]:
    """The JSON object that `raw` is; `start` is its byte offset in the file, for messages, which carry no path.

    Raises:
        SourceError: not UTF-8, not JSON, too deep, or no object.
    """
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise SourceError(f"is not UTF-8 at byte {start + error.start}", DOWNLOAD_AGAIN) from None
    try:
        value = json.loads(text, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        position = start + len(text[: error.pos].encode())  # the decoder counts characters
        raise SourceError(f"is not JSON at byte {position}: {error.msg.lower()}", DOWNLOAD_AGAIN) from None
    except RecursionError:
        raise SourceError("is JSON nested too deeply", DOWNLOAD_AGAIN) from None
    except ValueError:  # sys.get_int_max_str_digits()
        raise SourceError("is JSON with an integer of thousands of digits", DOWNLOAD_AGAIN) from None
    if not isinstance(value, dict):
        raise SourceError(f"is JSON but {json_type(value)}, expected an object", DOWNLOAD_AGAIN)
    return value


def json_type(value: Any) -> str:
    """What JSON calls a decoded value, for messages: its contents may be anything, and of any size."""
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
