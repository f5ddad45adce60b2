"""Which part of a torch checkpoint is the model, and what its tensors are called. `docs/sources.md` states the rule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ftd.errors import SourceError
from ftd.source.header import element_count
from ftd.source.strided import Strides, is_row_major, overlaps, span
from ftd.source.torchnames import ELEMENT_TYPES, SAVE_AGAIN, Mapping, Opaque, Storage, Tensor, Unusable, item_bytes
from ftd.source.wording import encodable, plural, quoted, shown, some
from ftd.tensorspec import TensorSpec
from ftd.units import MIB, format_bytes

#: Names under which training states keep their model (Lightning, timm, fairseq, DeepSpeed, Real-ESRGAN and others).
MODEL_NAMES = (
    "model", "state_dict", "model_state_dict", "model_state", "module", "net", "network", "weights", "params",
    "ema", "model_ema", "ema_model", "state_dict_ema", "ema_state_dict", "params_ema",
)  # fmt: skip
#: A state dict is two or three levels deep; one that holds itself has no end.
_MAX_DEPTH = 64
#: Characters of all names beside those in the pickle: the keys above a tensor are part of its name.
_NAME_GROWTH, _FREE_NAME_CHARACTERS = 16, 1_000_000
#: And never more than these: 500,000 names of 100. Each may take 4 bytes, and is held several times.
_MAX_NAME_CHARACTERS = 50_000_000
#: Expanded tensors and overlapping views take more bytes here than in the file. This much is still no mistake.
_MAX_GROWTH = 4
_FREE_GROWTH_BYTES = 64 * MIB
_LISTED = 16


@dataclass(frozen=True, slots=True)
class Chosen:
    """The tensors of the model by name, and what was left out."""

    tensors: list[tuple[str, Tensor]]
    notes: tuple[str, ...]


@dataclass(slots=True)
class _Part:
    """A value at the top of the checkpoint: the tensors below it, and what else there is, as text."""

    value: Any
    tensors: list[tuple[str, Tensor | Unusable]]
    others: list[str]

    @property
    def is_direct(self) -> bool:
        return isinstance(self.value, Tensor | Unusable)

    def text(self, name: str) -> str:
        """For notes."""
        if self.is_direct or not self.tensors:
            return _described(name, self.value)
        return f"{shown(name)} ({plural(len(self.tensors), 'tensor')})"


def choose(value: Any, pickle_bytes: int) -> Chosen:
    """The model in what a torch checkpoint holds.

    Args:
        pickle_bytes: length of the pickle that says so.

    Raises:
        SourceError: no dict, no tensors, several parts that may be meant, or a tensor that cannot be served.
    """
    if not isinstance(value, Mapping):
        raise SourceError(f"holds {_kind(value)}, expected a dict of tensors", SAVE_AGAIN)
    walk = _Walk(pickle_bytes)
    parts = {name: walk.part(name, part) for name, part in walk.entries(value)}
    name = _model_name(parts)
    if name is None:
        tensors = [pair for part in parts.values() for pair in part.tensors]
        others = [text for part in parts.values() for text in part.others]
        notes = []
    else:
        prefix = len(name) + 1
        tensors = [(full[prefix:], tensor) for full, tensor in parts[name].tensors]
        others = parts[name].others
        rest = [part.text(other) for other, part in parts.items() if other != name]
        notes = [f"{quoted(name)} is taken for the model; left out: {_listed(rest)}"] if rest else []
    if others:
        notes.append(f"left out what is no tensor: {_listed(others)}")
    return Chosen(_usable(tensors), tuple(notes))


def placed(chosen: Chosen, places: dict[str, int], file_bytes: int) -> list[tuple[TensorSpec, int, Strides]]:
    """The model's tensors with their offsets in the file, by rising offset.

    Args:
        places: where the storages begin, of all tensors with elements.

    Raises:
        SourceError: tensors that cannot be served, with the reasons; or that together would take many times the file.
    """
    found: list[tuple[TensorSpec, int, Strides]] = []
    problems: list[str] = []
    for name, tensor in chosen.tensors:
        try:
            spec, strides = _spec(name, tensor)
        except SourceError as error:
            problems.append(error.message)
            continue
        offset = places[tensor.storage.key] + tensor.offset * item_bytes(tensor.dtype) if spec.nbytes else 0
        found.append((spec, offset, strides))
    if problems:
        raise _unservable(problems)
    total = sum({(offset, strides, spec.dtype, spec.shape): spec.nbytes for spec, offset, strides in found}.values())
    if total > _MAX_GROWTH * file_bytes + _FREE_GROWTH_BYTES:
        raise SourceError(
            f"describes tensors of {format_bytes(total)} in a file of {format_bytes(file_bytes)}: expanded, or views of"
            " one another",
            "save them contiguous: torch.save({name: t.contiguous() for name, t in state.items()}, path)",
        )
    found.sort(key=lambda each: each[1])
    return found


class _Walk:
    """Looks at values within limits that hold for the whole checkpoint.

    Each takes a byte of the pickle at least. More of them are parts that a few bytes name again and again.
    """

    def __init__(self, pickle_bytes: int) -> None:
        self._values = pickle_bytes
        self._characters = min(_NAME_GROWTH * pickle_bytes + _FREE_NAME_CHARACTERS, _MAX_NAME_CHARACTERS)

    def entries(self, value: Any) -> list[tuple[str, Any]]:
        """What a container holds, by name; of a key that comes twice, the last."""
        if isinstance(value, list | tuple):
            self._count(len(value))
            return [(str(index), item) for index, item in enumerate(value)]
        self._count(len(value.pairs))
        named: dict[tuple[bool, str], Any] = {}
        for index, (key, item) in enumerate(value.pairs):
            if isinstance(key, str):
                named[True, key] = item
            elif isinstance(key, int) and not isinstance(key, bool) and key.bit_length() < 64:
                named[False, str(key)] = item
            else:
                unnamed = Unusable("has a key that is neither text nor a number")
                named[False, f"<{_kind(key)} {index}>"] = unnamed if isinstance(item, _HOLDERS) else item
        _check_distinct([name for _, name in named], "has a number and a text as keys that both read")
        return [(name, item) for (_, name), item in named.items()]

    def part(self, name: str, value: Any) -> _Part:
        found = _Part(value, [], [])
        for full, leaf in self._leaves(name, value, 0):
            if isinstance(leaf, Tensor | Unusable):
                found.tensors.append((full, leaf))
            else:
                found.others.append(_described(full, leaf))
        return found

    def _leaves(self, name: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
        if not isinstance(value, Mapping | list | tuple):
            yield name, value
            return
        if depth == _MAX_DEPTH:
            raise SourceError(f"is nested more than {_MAX_DEPTH} levels deep", SAVE_AGAIN)
        if isinstance(value, list | tuple) and not any(isinstance(item, _HOLDERS) for item in value):
            self._count(len(value))
            yield name, value  # a row of numbers or texts is one value
            return
        for key, item in self.entries(value):
            full = f"{name}.{key}"
            self._characters -= len(full)
            if self._characters < 0:
                raise SourceError("has keys that make far longer names than themselves", SAVE_AGAIN)
            yield from self._leaves(full, item, depth + 1)

    def _count(self, values: int) -> None:
        self._values -= values
        if self._values < 0:
            raise SourceError("holds the same containers many times over", SAVE_AGAIN)


_HOLDERS = (Tensor, Unusable, Mapping, list, tuple)


def _model_name(parts: dict[str, _Part]) -> str | None:
    """The part that is the model; None where the whole is."""
    groups = [name for name, part in parts.items() if part.tensors and not part.is_direct]
    known = [name for name in groups if name in MODEL_NAMES]
    optimizers = [name for name in groups if _is_optimizer(parts[name].value)]
    candidates = known or ([name for name in groups if name not in optimizers] if optimizers else [])
    if not candidates:
        if optimizers:
            raise SourceError(f"holds the state of an optimizer, {_listed(optimizers)}, and no model", SAVE_AGAIN)
        return None
    beside = [name for name, part in parts.items() if part.is_direct and not _is_scalar(part.value)]
    if len(candidates) > 1 or beside:
        meant = [parts[name].text(name) for name in (*candidates, *beside)]
        raise SourceError(
            f"holds several parts that may be the model: {_listed(meant)}",
            "write the one that is meant to a file of its own:"
            f" torch.save(torch.load(path, weights_only=True)[{candidates[0]!r:.60}], new_path)",
        )
    return candidates[0]


def _is_optimizer(value: Any) -> bool:
    """Whether it looks like what `torch.optim.Optimizer.state_dict` gives."""
    if isinstance(value, list | tuple):  # Lightning keeps a list of them
        return any(_is_optimizer(item) for item in value[:4] if isinstance(item, Mapping))
    keys = {key for key, _ in value.pairs[:16] if isinstance(key, str)}
    return {"state", "param_groups"} <= keys


def _is_scalar(value: Any) -> bool:
    return isinstance(value, Tensor) and all(size == 1 for size in value.shape)


def _usable(tensors: list[tuple[str, Tensor | Unusable]]) -> list[tuple[str, Tensor]]:
    names = [name for name, _ in tensors]
    _check_distinct(names, "has two tensors that would both be called")
    if not encodable(names):
        name = next(name for name in names if not encodable([name]))
        raise SourceError(f"tensor name {quoted(name)} has a lone surrogate: it is no Unicode text", SAVE_AGAIN)
    unusable = [f"tensor {quoted(name)} {tensor.why}" for name, tensor in tensors if isinstance(tensor, Unusable)]
    if unusable:
        raise _unservable(unusable)
    return [(name, tensor) for name, tensor in tensors if isinstance(tensor, Tensor)]


def _check_distinct(names: list[str], problem: str) -> None:
    if len(set(names)) < len(names):
        (name, _), *_ = Counter(names).most_common(1)
        raise SourceError(f"{problem} {quoted(name)}", SAVE_AGAIN)


def _spec(name: str, tensor: Tensor) -> tuple[TensorSpec, Strides]:
    """What followers are told, and the strides where the elements don't lie row by row."""
    dtype = ELEMENT_TYPES[tensor.dtype]
    if dtype is None:
        raise SourceError(f"tensor {quoted(name)} is {tensor.dtype}, which safetensors has no name for")
    if element_count(tensor.shape) is None:
        raise SourceError(f"tensor {quoted(name)} has more than 2^63-1 elements")
    shape, strides = tensor.shape, tensor.strides
    end = (tensor.offset + span(shape, strides)) * item_bytes(tensor.dtype)
    if 0 not in shape and end > tensor.storage.nbytes:
        raise SourceError(
            f"tensor {quoted(name)} ends at byte {end} of a storage of {plural(tensor.storage.nbytes, 'byte')}"
        )
    whole = is_row_major(shape, strides)
    if not whole and overlaps(shape, strides):
        raise SourceError(f"tensor {quoted(name)} is a view whose elements overlap (a sliding window)")
    if dtype == "F4":  # torch counts the bytes, safetensors the two elements in each
        if not whole or not shape:
            raise SourceError(f"tensor {quoted(name)} is {tensor.dtype} and not contiguous")
        shape = (*shape[:-1], shape[-1] * 2)
    return TensorSpec(name, dtype, shape), None if whole else strides


def _unservable(problems: list[str]) -> SourceError:
    more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
    return SourceError("; ".join(problems[:5]) + more, "convert or leave out these tensors, then save again")


def _listed(texts: list[str]) -> str:
    return some(texts, _LISTED)


def _described(name: str, value: Any) -> str:
    """`step=3`: small values as they are, others by what they are."""
    if value is None or isinstance(value, bool | float):
        return f"{shown(name)}={value}"
    if isinstance(value, int) and value.bit_length() < 64:
        return f"{shown(name)}={value}"
    if isinstance(value, str) and len(value) <= 32:
        return f"{shown(name)}={quoted(value)}"
    return f"{shown(name)} ({_kind(value)})"


def _kind(value: Any) -> str:
    if isinstance(value, Opaque):
        return value.name
    kinds = {
        Mapping: "a dict", list: "a list", tuple: "a list", str: "text", bytes: "bytes", int: "a number",
        float: "a number", bool: "a truth value", Tensor: "a tensor", Unusable: "a tensor", Storage: "a bare storage",
    }  # fmt: skip
    return kinds.get(type(value), "nothing" if value is None else "a name")
