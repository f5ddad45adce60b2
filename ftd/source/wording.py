"""Words for messages. Names out of files are untrusted: they may hold escapes, line breaks, or megabytes."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from itertools import islice

#: The remedy of every file that does not hold what its publisher wrote.
DOWNLOAD_AGAIN = "download the file again and compare its size and checksum with the publisher's"

_SHOWN_CHARACTERS = 200


def shown(text: str | os.PathLike[str]) -> str:
    """`text` with everything unprintable escaped, cut where it is long."""
    whole = os.fspath(text)
    part = whole[:_SHOWN_CHARACTERS]
    part = part if part.isprintable() else repr(part)[1:-1]
    return part if len(whole) <= _SHOWN_CHARACTERS else f"{part}… ({len(whole)} characters)"


def quoted(name: str) -> str:
    """As `shown`, between quotes: names of tensors may be empty or hold spaces."""
    return f"'{shown(name)}'"


def some(names: Collection[str], limit: int) -> str:
    """The first `limit` names and how many more there are."""
    listed = ", ".join(shown(name) for name in islice(names, limit))
    return listed if len(names) <= limit else f"{listed} and {len(names) - limit} more"


def plural(count: int, noun: str) -> str:
    """`1 file`, `2 files`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def encodable(names: Iterable[str]) -> bool:
    """Whether UTF-8, and so msgpack and JSON, can carry all the names: a lone surrogate cannot be encoded."""
    try:
        "".join(names).encode()
    except UnicodeEncodeError:
        return False
    return True
