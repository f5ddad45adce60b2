"""What one include or exclude pattern of OffloadConfig matches. Pure.

A pattern is a glob over the dotted names of modules and parameters (`layers.*`, or in full `name:layers.*`), or
over the names of module classes (`class:*Expert*`). `?` is one character, `*` any run of characters, and both stay
within one segment of a dotted name. A `*` that is a whole segment by itself means something else in each place:

- `one_segment`, for which modules a pattern includes: exactly one segment.
- `one_or_more`, for which parameters it includes and what it excludes: one segment or more.
- `in_class_name`, for classes: any run of characters, dots too, since a class name counts as one piece.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from ftd.config.patterns import glob_regex

NAME, CLASS = "name", "class"

_ANY = "(?s:.)"
_SEGMENT = "[^.]+"


@dataclass(frozen=True)
class Glob:
    """A pattern, taken apart.

    Attributes:
        form: `NAME` or `CLASS`.
        body: the glob without the form.
    """

    form: str
    body: str

    @staticmethod
    def parse(pattern: str) -> Glob:
        """The parts of a pattern; blanks around it, and after the form, do not count.

        Raises:
            ValueError: it is none; the message says what was found and what was expected.
        """
        text = pattern.strip()
        shown = repr(text if len(text) <= 80 else text[:77] + "...")
        form, colon, body = text.partition(":")
        if not colon:
            form, body = NAME, text
        elif form not in (NAME, CLASS):
            raise ValueError(f"pattern {shown} has the form {form[:20] + ':'!r}, expected name:<glob> or class:<glob>")
        body = body.strip()
        if not body:
            raise ValueError(f"pattern {shown} is empty, expected a glob such as layers.* or class:*Expert*")
        if form == NAME and "" in body.split("."):
            raise ValueError(f"pattern {shown} has an empty segment, expected names and * joined by single dots")
        if '"' in body or "'" in body:
            raise ValueError(f"pattern {shown} has a quotation mark, expected a bare glob such as layers.*")
        return Glob(form, body)

    def one_segment(self, path: str) -> bool:
        """Whether the whole path matches where a `*` segment is exactly one segment."""
        return self._one_segment.fullmatch(path) is not None

    def one_or_more(self, path: str) -> bool:
        """Whether the whole path matches where a `*` segment is one segment or more."""
        return self._one_or_more.fullmatch(path) is not None

    def in_class_name(self, name: str) -> bool:
        """Whether a class name, short or with its module, matches as a whole."""
        return self._in_class_name.fullmatch(name) is not None

    @cached_property
    def _one_segment(self) -> re.Pattern[str]:
        return re.compile(_dotted(self.body.split(".")))

    @cached_property
    def _one_or_more(self) -> re.Pattern[str]:
        return re.compile(_spanning(self.body.split(".")))

    @cached_property
    def _in_class_name(self) -> re.Pattern[str]:
        return re.compile(glob_regex(self.body, _ANY))


def normalized(pattern: str) -> str:
    """The pattern without the blanks that do not count.

    Raises:
        ValueError: as `Glob.parse`.
    """
    glob = Glob.parse(pattern)
    return f"{glob.form}:{glob.body}" if ":" in pattern else glob.body


def _dotted(segments: list[str]) -> str:
    return r"\.".join(_SEGMENT if segment == "*" else glob_regex(segment) for segment in segments)


def _spanning(segments: list[str]) -> str:
    """A regular expression in which each run of n `*` segments takes n segments or more.

    What lies between two runs is taken at its first place by an atomic group: a later place would leave less to the
    rest, and without backtracking the time stays linear in the number of places.
    """
    regex = ""
    stars = 0
    chunk: list[str] = []  # what follows the last run of stars
    for segment in segments:
        if segment != "*":
            chunk.append(segment)
            continue
        if chunk:
            regex += _inner(stars, chunk)
            stars, chunk = 0, []
        stars += 1
    return regex + _last(stars, chunk)


def _inner(stars: int, chunk: list[str]) -> str:
    """A run of stars, what follows it, and the dot before the next run."""
    text = _dotted(chunk) + r"\."
    return rf"(?>(?:{_SEGMENT}\.){{{stars},}}?{text})" if stars else text


def _last(stars: int, chunk: list[str]) -> str:
    if not chunk:
        return rf"(?:{_SEGMENT}\.){{{stars - 1},}}{_SEGMENT}"
    return (rf"(?:{_SEGMENT}\.){{{stars},}}" if stars else "") + _dotted(chunk)
