"""How tensor names are grouped into layers, and how names are ordered. Pure.

A tensor's module path is its name without the last component. Without patterns, its layer is the module path up to
and including the first segment that is all digits (`model.layers.10.mlp.up.weight` → `model.layers.10`), and where
there is none, the module path itself (`model.embed_tokens.weight` → `model.embed_tokens`, `scale` → `""`). The last
component never counts: `blocks.0` is parameter 0 of a list named `blocks`, not a layer of its own.

With patterns, a tensor belongs to the deepest prefix of its module path that some pattern matches wholly; a tensor
that no pattern matches falls back to the rule above. In a pattern, `*` stands for any characters of one segment. All
other glob and regex characters, `**` too, are refused, so that they can be given a meaning later.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

_RESERVED = frozenset("?[]{}()!^$|\\")
_DIGITS = re.compile("([0-9]+)")


def natural_key(name: str) -> tuple[tuple[str | int, ...], str]:
    """Sort key that compares runs of ASCII digits as numbers: `layers.2` before `layers.10`.

    Total: only equal names have equal keys (`a.01` goes before `a.1`). Other scripts' digits count as letters.
    """
    # split with one group alternates text and digits, so that equal positions always compare equal types
    text, *rest = _DIGITS.split(name)
    key: list[str | int] = [text]
    for run, text in zip(rest[::2], rest[1::2], strict=True):
        digits = run.lstrip("0")
        # length, then digits, orders like the number, of any length: int() refuses more than 4,300 digits
        key += (len(digits), digits, text)
    return tuple(key), name


def validate_patterns(patterns: Sequence[str]) -> None:
    """Accepts patterns made of names and `*`, joined by dots.

    Raises:
        ValueError: the first pattern that is not; the message says what was found in it and what was expected.
    """
    for pattern in patterns:
        shown = repr(pattern if len(pattern) <= 80 else pattern[:77] + "...")
        if "" in pattern.split("."):
            raise ValueError(f"pattern {shown} has an empty segment, expected names and * joined by single dots")
        if "**" in pattern:
            raise ValueError(f"pattern {shown} has **, expected * for one segment each, such as model.layers.*")
        reserved = next((char for char in pattern if char in _RESERVED), None)
        if reserved is not None:
            raise ValueError(f"pattern {shown} has {reserved!r}, expected names and * only, such as model.layers.*")


@dataclass(frozen=True)
class LayerRule:
    """Names the layer of each tensor, by patterns and by the default rule.

    Attributes:
        patterns: dotted patterns, in any order.

    Raises:
        ValueError: as `validate_patterns`.
    """

    patterns: tuple[str, ...] = ()
    _depths: tuple[_Depth, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        validate_patterns(self.patterns)
        by_depth: dict[int, list[str]] = {}
        for pattern in self.patterns:
            by_depth.setdefault(pattern.count(".") + 1, []).append(pattern)
        depths = tuple(_Depth.of(depth, by_depth[depth]) for depth in sorted(by_depth, reverse=True))
        object.__setattr__(self, "_depths", depths)

    def layer_of(self, name: str) -> str:
        """The module path of the layer that the tensor `name` belongs to; `""` is the root module."""
        module = name.split(".")[:-1]
        for depth in self._depths:
            if depth.segments <= len(module):
                prefix = ".".join(module[: depth.segments])
                if depth.matches(prefix):
                    return prefix
        for position, segment in enumerate(module):
            # isdigit alone holds for superscripts and other scripts' digits too
            if segment.isascii() and segment.isdigit():
                return ".".join(module[: position + 1])
        return ".".join(module)

    def unmatched(self, names: Iterable[str]) -> list[str]:
        """The patterns that match no module path prefix of any tensor, in their order."""
        modules = {tuple(name.split(".")[:-1]) for name in names}
        missing = []
        for pattern in self.patterns:
            depth = _Depth.of(pattern.count(".") + 1, [pattern])
            prefixes = {module[: depth.segments] for module in modules if len(module) >= depth.segments}
            if not any(depth.matches(".".join(prefix)) for prefix in prefixes):
                missing.append(pattern)
        return missing


@dataclass(frozen=True, slots=True)
class _Depth:
    """All patterns of one number of segments."""

    segments: int
    literal: frozenset[str]
    globs: re.Pattern[str] | None

    @staticmethod
    def of(segments: int, patterns: Sequence[str]) -> _Depth:
        globs = [_to_regex(pattern) for pattern in patterns if "*" in pattern]
        literal = frozenset(pattern for pattern in patterns if "*" not in pattern)
        return _Depth(segments, literal, re.compile("|".join(globs)) if globs else None)

    def matches(self, path: str) -> bool:
        return path in self.literal or (self.globs is not None and self.globs.fullmatch(path) is not None)


def _to_regex(pattern: str) -> str:
    return r"\.".join(glob_regex(segment) for segment in pattern.split("."))


def glob_regex(glob: str, any_char: str = "[^.]") -> str:
    """A glob as a regular expression: `*` is any run of characters, `?` one of them.

    Args:
        any_char: what one such character may be; everything but the dot for a glob of one segment.
    """
    first, *rest = (re.escape(part).replace(r"\?", any_char) for part in glob.split("*"))
    if not rest:
        return first
    *inner, last = rest
    # an atomic group takes the first place where a part fits and never backtracks into it: names come from files
    return first + "".join(rf"(?>{any_char}*?{part})" for part in inner) + f"{any_char}*{last}"
