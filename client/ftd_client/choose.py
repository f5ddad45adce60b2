"""Which tensors of a checkpoint a model takes, under which of its names, and which rows of each: key maps and shards.

A key map turns names of the checkpoint into names of the model; a shard cuts what then has a name. Pure: specs in,
specs out. What is cut stays a view, since rows of the first dimension lie one behind the other.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ftd.config.patterns import glob_regex, validate_patterns
from ftd.errors import BindError, UsageError
from ftd.tensorspec import TensorSpec
from ftd_client.ranks import Rank

#: Prefixes of the checkpoint → prefixes of the model, in whole components; the longest that fits counts, once. Or a
#: function of the whole name. None leaves a tensor out.
KeyMap = Mapping[str, str | None] | Callable[[str], str | None]
#: Names or modules of the model, with `*` for any characters of one component → the dimension that ranks share
#: equally (0), or None for the whole tensor; the deepest that fits counts. Or a function of name and shape.
Shard = Mapping[str, int | str | None] | Callable[[str, tuple[int, ...]], slice | None]

#: What transformers' `tp_plan` calls the dimensions of a Linear's weight, which torch keeps as [out, in].
_STYLES = {"colwise": 0, "rowwise": 1}
_NO_VIEW = (
    "only slices of the first dimension are views: publish each rank's own weights into a namespace of its own "
    "(ftd_client.shm.apply_rank_suffix)"
)


class Piece(NamedTuple):
    """A tensor of the checkpoint, or some of its rows, under the name that the model has for it.

    Attributes:
        rows: [start, stop) of the first dimension; None for the whole tensor.
    """

    name: str
    stored: TensorSpec
    rows: tuple[int, int] | None = None

    @property
    def spec(self) -> TensorSpec:
        if self.rows is None:
            return TensorSpec(self.name, self.stored.dtype, self.stored.shape)
        return TensorSpec(self.name, self.stored.dtype, (self.rows[1] - self.rows[0], *self.stored.shape[1:]))

    @property
    def skipped_bytes(self) -> int:
        """Of the tensor, before the first row.

        Raises:
            ValueError: that row starts inside a byte.
        """
        return self._replace(rows=(0, self.rows[0])).spec.nbytes if self.rows else 0

    def __str__(self) -> str:
        """What it is in the checkpoint; empty where that is what it is in the model."""
        if self.rows is None:
            return "" if self.stored.name == self.name else self.stored.name
        return f"{self.stored.name}[{self.rows[0]}:{self.rows[1]}]"


@dataclass(frozen=True, slots=True)
class Choice:
    """What a key map and a shard make of a checkpoint.

    Attributes:
        pieces: by name of the model.
        dropped: names of the checkpoint that the key map leaves out.
        unmatched_keys: prefixes of the key map that no name of the checkpoint has.
        unmatched_shards: patterns of the shard that fit no name of `pieces`.
    """

    pieces: Mapping[str, Piece]
    dropped: tuple[str, ...] = ()
    unmatched_keys: tuple[str, ...] = ()
    unmatched_shards: tuple[str, ...] = ()

    def unmatched(self, model_names: Iterable[str]) -> list[str]:
        """Rules that nothing has to do with; a shard may also speak of names that only the model has: those of ties."""
        idle = [_Pattern.of(pattern) for pattern in self.unmatched_shards]
        names = list(model_names) if idle else []
        return [*self.unmatched_keys, *(each.text for each in idle if not any(map(each.depth, names)))]


def choose(
    specs: Mapping[str, TensorSpec], key_map: KeyMap | None, shard: Shard | None, rank: Rank | None
) -> Choice | None:
    """The tensors of `specs` as a model takes them; None where neither a key map nor a shard says anything.

    Raises:
        UsageError: an argument has another type than it may have, or a shard by patterns has no rank.
        BindError: two tensors would get one name, or a tensor can't be cut as told; every one is named.
    """
    if key_map is None and shard is None:
        return None
    names, dropped, idle_keys = _renamed(specs, key_map)
    cut, idle_shards = _cut(names, shard, rank)
    return Choice(cut, tuple(dropped), tuple(idle_keys), tuple(idle_shards))


def _renamed(
    specs: Mapping[str, TensorSpec], key_map: KeyMap | None
) -> tuple[dict[str, TensorSpec], list[str], list[str]]:
    """Tensors by their new names, names that were left out, and prefixes that no name has."""
    if key_map is None:
        return dict(specs), [], []
    if isinstance(key_map, Mapping):
        prefixes = _Prefixes(key_map)
        new_name: Callable[[str], str | None] = prefixes.new_name
    elif callable(key_map):
        prefixes, new_name = None, key_map
    else:
        raise UsageError(f"key_map is a {type(key_map).__name__}, expected a mapping of prefixes or a function", _KEYS)
    takers: dict[str, list[str]] = {}
    dropped = []
    for old in specs:
        new = new_name(old)
        if new is None:
            dropped.append(old)
        elif isinstance(new, str) and new:
            takers.setdefault(new, []).append(old)
        else:
            raise UsageError(f"key_map turns {old!r} into {new!r}, expected a name, or None to leave it out", _KEYS)
    problems = [
        f"{new}: {' and '.join(olds)} found in the checkpoint, one tensor for this name expected"
        for new, olds in takers.items()
        if len(olds) > 1
    ]
    if problems:
        raise BindError(
            f"key_map gives one name to several tensors: {len(problems)} such names found",
            "let key_map turn all but one of them into None",
            tuple(problems),
        )
    return {new: specs[olds[0]] for new, olds in takers.items()}, dropped, prefixes.idle if prefixes else []


_KEYS = "pass key_map={'model': 'transformer'}, or a function of a name"


class _Prefixes:
    """A mapping of prefixes, and which of them have not met a name yet."""

    def __init__(self, rules: Mapping[str, str | None]) -> None:
        for old, new in rules.items():
            if not isinstance(old, str) or not (new is None or isinstance(new, str)):
                raise UsageError(f"key_map has {old!r}: {new!r}, expected prefixes, or None to leave out", _KEYS)
        self._rules = {old.removesuffix("."): (old, new) for old, new in rules.items()}
        if len(self._rules) < len(rules):
            raise UsageError("key_map has a prefix with and without a dot behind it, expected it once", _KEYS)
        self._idle = dict.fromkeys(self._rules)

    @property
    def idle(self) -> list[str]:
        return [self._rules[prefix][0] for prefix in self._idle]

    def new_name(self, name: str) -> str | None:
        parts = name.split(".")
        for length in range(len(parts), -1, -1):
            prefix = ".".join(parts[:length])
            if prefix in self._rules:
                self._idle.pop(prefix, None)
                new = self._rules[prefix][1]
                rest = ".".join(parts[length:])
                return None if new is None else ".".join(filter(None, (new.removesuffix("."), rest)))
        return name


@dataclass(frozen=True, slots=True)
class _Pattern:
    text: str
    components: re.Pattern[str]
    count: int

    @staticmethod
    def of(text: str) -> _Pattern:
        globs = text.split(".")
        return _Pattern(text, re.compile(r"\.".join(map(glob_regex, globs))), len(globs))

    def depth(self, name: str) -> int:
        """Components of the name, or of the module around it, that it fits; 0 for none."""
        return self.count if self.components.fullmatch(".".join(name.split(".")[: self.count])) else 0


def _cut(specs: Mapping[str, TensorSpec], shard: Shard | None, rank: Rank | None) -> tuple[dict[str, Piece], list[str]]:
    """Pieces by name, and patterns that fit none."""
    if shard is None:
        return {name: Piece(name, stored) for name, stored in specs.items()}, []
    if isinstance(shard, Mapping):
        if rank is None:
            raise UsageError("shard by patterns: found no rank, expected one", "attach(..., rank=0, world=2)")
        rows_of: _Equal | _Told = _Equal(shard, rank)
    elif callable(shard):
        rows_of = _Told(shard)
    else:
        raise UsageError(f"shard is a {type(shard).__name__}, expected a mapping or a function", _SHARDS)
    pieces, problems, remedies = {}, [], []
    for name, stored in specs.items():
        try:
            piece = Piece(name, stored, rows_of(name, stored.shape))
            _ = piece.skipped_bytes, piece.spec.nbytes
        except _NoCutError as error:
            problems.append(f"{name}: {error.args[0]}")
            remedies.append(error.args[1])
        except ValueError:
            problems.append(f"{name}: rows of {stored.dtype} that end inside a byte found, whole bytes expected")
            remedies.append("bind this tensor whole (None)")
        else:
            pieces[name] = piece
    if problems:
        raise BindError(
            f"shard can't be had as views: {len(problems)} such tensors found",
            "; ".join(dict.fromkeys(remedies)),
            tuple(problems),
        )
    return pieces, rows_of.idle if isinstance(rows_of, _Equal) else []


_SHARDS = "pass shard={'layers.*.q_proj': 0}, or a function of name and shape that gives a slice or None"


class _NoCutError(Exception):
    """Why a tensor can't be cut as told, and what to do about it."""


class _Equal:
    """Equal shares of ranks, by patterns; and which of these have not met a name yet."""

    def __init__(self, rules: Mapping[str, int | str | None], rank: Rank) -> None:
        self._rank = rank
        self._patterns: list[tuple[_Pattern, int | None]] = []
        for text, told in rules.items():
            try:
                validate_patterns([text])
            except ValueError as error:
                raise UsageError(f"shard: {error}", _SHARDS) from None
            dimension = _STYLES.get(told) if isinstance(told, str) else told
            if isinstance(told, bool) or not (told is None or isinstance(dimension, int)):
                raise UsageError(f"shard has {text!r}: {told!r}, expected 0, 'colwise' or None", _SHARDS)
            self._patterns.append((_Pattern.of(text), dimension))
        self._idle = dict.fromkeys(rules)

    @property
    def idle(self) -> list[str]:
        return list(self._idle)

    def __call__(self, name: str, shape: tuple[int, ...]) -> tuple[int, int] | None:
        best, dimension = 0, None
        for pattern, told in self._patterns:
            depth = pattern.depth(name)
            if depth:
                self._idle.pop(pattern.text, None)
            if depth > best:
                best, dimension = depth, told
        if dimension is None:
            return None
        if dimension != 0:
            raise _NoCutError(f"a slice of dimension {dimension} found, of dimension 0 expected", _NO_VIEW)
        if not shape:
            raise _NoCutError("a scalar found, rows to cut expected", "give scalars None in the shard")
        share, over = divmod(shape[0], self._rank.world)
        if over:
            text = f"{shape[0]} rows found, a multiple of {self._rank.world} ranks expected"
            raise _NoCutError(text, "pass a function as shard, which may cut unequal slices")
        return self._rank.rank * share, (self._rank.rank + 1) * share


class _Told:
    """Slices that a function tells."""

    def __init__(self, function: Callable[[str, tuple[int, ...]], slice | None]) -> None:
        self._function = function

    def __call__(self, name: str, shape: tuple[int, ...]) -> tuple[int, int] | None:
        told = self._function(name, shape)
        if told is None:
            return None
        if not isinstance(told, slice):
            raise UsageError(f"shard gives {told!r} for {name!r}, expected a slice or None", _SHARDS)
        if not shape:
            raise _NoCutError("a scalar found, rows to cut expected", "give scalars None in the shard")
        start, stop = told.start if told.start is not None else 0, told.stop if told.stop is not None else shape[0]
        if told.step not in (None, 1) or not (isinstance(start, int) and isinstance(stop, int)):
            raise _NoCutError(f"{told} found, whole rows one behind the other expected", _NO_VIEW)
        # Python's slices bend to what is there; a rank that gets fewer rows than it asked for computes nonsense
        if not 0 <= start <= stop <= shape[0]:
            raise _NoCutError(f"rows {start}:{stop} found, some of 0:{shape[0]} expected", "correct the shard")
        return start, stop
