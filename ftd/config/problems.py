"""What is wrong with a configuration: every problem in one error, each with key, found, expected and origin."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field

from pydantic import ValidationError

from ftd.config.fields import AGAINST, BOOLEAN_FOR_NUMBER, listing
from ftd.errors import ConfigError

#: More than this many are counted, not listed: the error is one line.
MAX_LISTED = 20

_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxlist, _SHORT.maxdict, _SHORT.maxstring = 2, 4, 4, 80


@dataclass(frozen=True, slots=True)
class Given:
    """A value as somebody gave it.

    Attributes:
        written: the scalar's own text where it came as YAML, else None.
        origin: `default`, `file <path>`, `--set` or `--model`, as it is printed beside the value.
        line: of the file, from 1; None elsewhere.
    """

    value: object
    written: str | None
    origin: str
    line: int | None = None

    @property
    def where(self) -> str:
        return self.origin if self.line is None else f"{self.origin}, line {self.line}"


@dataclass(slots=True)
class Problems:
    """Collects problems, and what to do about them.

    Attributes:
        remedies: for problems that are not a value to correct.
        places: where values are to be corrected; a dict for its order.
    """

    texts: list[str] = field(default_factory=list)
    remedies: list[str] = field(default_factory=list)
    places: dict[str, None] = field(default_factory=dict)

    def add(self, text: str, origin: str) -> None:
        """Takes one line, and the origin (as in `Given`) that is to be corrected."""
        self.texts.append(text)
        self.places[origin.removeprefix("file ")] = None

    def add_with_remedy(self, text: str, remedy: str) -> None:
        """Takes one line, and what to do about it."""
        self.texts.append(text)
        self.remedies.append(remedy)

    def error(self) -> ConfigError:
        """All of them as one error; there must be one."""
        hidden = len(self.texts) - MAX_LISTED
        more = [f"and {hidden} more"] if hidden > 0 else []
        correct = [f"correct {listing(list(self.places), 'and')}"] if self.places else []
        return ConfigError("; ".join(self.texts[:MAX_LISTED] + more), listing([*self.remedies, *correct], "and"))


def nearest(name: str, known: Collection[str]) -> str:
    """The known name that resembles `name` most; case and `-` for `_` do not count."""
    by_folded = {one.casefold(): one for one in sorted(known)}
    folded = name[:64].replace("-", "_").casefold()
    # swapped letters first: difflib alone finds `mode` nearer to `modle` than `model`
    swapped = [one for one in by_folded if sorted(one) == sorted(folded)]
    return by_folded[swapped[0] if swapped else difflib.get_close_matches(folded, by_folded, n=1, cutoff=0.0)[0]]


def found_text(given: Given) -> str:
    """The value as its giver would recognise it."""
    value = given.value
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "nothing"
    if isinstance(value, int | float):
        return given.written or f"{value:g}"
    return _SHORT.repr(value)


def describe(
    error: ValidationError, given: Mapping[str, Given], expected: Callable[[str], str]
) -> Iterator[tuple[str, str]]:
    """(problem, origin to correct) of each value that pydantic refused.

    Args:
        given: by key; a field that is missing here has its default.
        expected: what a field accepts, in words.
    """
    for detail in error.errors(include_url=False):
        key, *inner = (str(part) for part in detail["loc"])
        one = given.get(key, Given(detail["input"], None, "default"))
        if detail["type"] == AGAINST:
            other = given.get(detail["ctx"]["other"], Given(None, None, "default"))
            text = f"{key}: found {found_text(one)} ({one.where}), {detail['msg']} ({other.where})"
            yield text, other.origin if one.origin == "default" else one.origin
            continue
        place = f"{key}[{inner[0]}]" if inner else key
        if detail["type"] == "value_error":
            what = str(detail["ctx"]["error"])
        elif inner:
            what = f"found {found_text(Given(detail['input'], None, one.origin))}, expected text: quote it"
        else:
            what = f"found {found_text(one)}{_why_boolean(one, detail['type'])}, expected {expected(key)}"
        yield f"{place}: {what} ({one.where})", one.origin


def _why_boolean(given: Given, kind: str) -> str:
    """How a word became a boolean; quoting helps only where a word is meant."""
    if not isinstance(given.value, bool) or given.written is None:
        return ""
    return f" (YAML reads {given.written} as {found_text(given)}{'' if kind == BOOLEAN_FOR_NUMBER else ': quote it'})"
