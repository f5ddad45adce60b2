"""What a name in a torch checkpoint stands for: the closed list, as values of our own. Nothing is imported.

The list is that of torch's `weights_only` (`torch/_weights_only_unpickler.py`, 2.13) and a few plain values that it
refuses, NumPy's scalars among them. What is not on it is refused, unless the configuration allows it by name: then it,
and what is built of it, is `Opaque`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from ftd.errors import SourceError
from ftd.source.header import MAX_DIMENSIONS
from ftd.tensorspec import TORCH_NAMES

#: Name of torch's type → name of the element type; None where safetensors has no name for it.
ELEMENT_TYPES: dict[str, str | None] = {
    **{torch_name: name for name, torch_name in TORCH_NAMES.items()},
    "complex32": None, "complex128": None,
    "qint8": None, "quint8": None, "qint32": None, "quint4x2": None, "quint2x4": None,
    "bits1x8": None, "bits2x4": None, "bits4x2": None, "bits8": None, "bits16": None,
    **{f"{sign}int{bits}": None for sign in ("u", "") for bits in range(1, 8)},
}  # fmt: skip

#: Class of a storage → torch's name of its elements (`torch.storage._dtype_to_storage_type_map`); None: plain bytes.
STORAGES: dict[str, str | None] = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8",
    "ByteStorage": "uint8", "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64", "ComplexDoubleStorage": "complex128",
    "QInt8Storage": "qint8", "QUInt8Storage": "quint8", "QInt32Storage": "qint32", "QUInt4x2Storage": "quint4x2",
    "QUInt2x4Storage": "quint2x4",
    "UntypedStorage": None,
}  # fmt: skip

#: The remedy of what another `torch.save` would write differently.
SAVE_AGAIN = "load it with torch and write it again: torch.save(model.state_dict(), path)"

#: Bytes of one element of the types that a storage may have.
ITEM_BYTES: dict[str, int] = {
    "complex128": 16, "complex64": 8, "float64": 8, "int64": 8, "float32": 4, "int32": 4, "qint32": 4,
    "float16": 2, "bfloat16": 2, "int16": 2, "uint16": 2, "uint32": 4, "uint64": 8, "complex32": 4, "bits16": 2,
}  # fmt: skip


def item_bytes(dtype: str | None) -> int:
    """Of torch's type of this name; packed types count as the byte that holds several elements."""
    return ITEM_BYTES.get(dtype or "", 1)


@dataclass(frozen=True, slots=True)
class Named:
    """A name on the list, not yet used."""

    name: str


@dataclass(frozen=True, slots=True)
class Opaque:
    """A value that is not looked into, with the name of what made it."""

    name: str


@dataclass(slots=True)
class Mapping:
    """A dict as the stream wrote it: a key may come twice, and the last one counts."""

    pairs: list[Any] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Storage:
    """The bytes of one or several tensors.

    Attributes:
        key: names them in the file.
        dtype: torch's name of the type of its elements; None for plain bytes.
        numel: how many there are; of plain bytes, bytes.
    """

    key: str
    dtype: str | None
    numel: int

    @property
    def nbytes(self) -> int:
        return self.numel * item_bytes(self.dtype)


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor as the stream describes it; nothing of it was checked but the Python types.

    Attributes:
        dtype: torch's name of it.
        offset, shape, strides: in elements.
    """

    storage: Storage
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Unusable:
    """A tensor that cannot be served, and why: `is sparse`."""

    why: str


class Names:
    """Finds what names stand for, and remembers those that are not on the list.

    Attributes:
        unknown: full names, in the order in which they came.
    """

    def __init__(self, allowed: Collection[str] = ()) -> None:
        self._allowed = frozenset(allowed)
        self._found: dict[tuple[str, str], Named | Opaque] = {}
        self.unknown: dict[str, None] = {}

    def find(self, module: str, attribute: str) -> Named | Opaque:
        found = self._found.get((module, attribute))
        if found is None:
            found = self._found[module, attribute] = self._look_up(f"{_MODULES.get(module, module)}.{attribute}")
        return found

    def _look_up(self, name: str) -> Named | Opaque:
        if name in _KNOWN:
            return Named(name)
        if name not in self._allowed:
            self.unknown[name] = None
        return Opaque(name)


def call(function: Named | Opaque, arguments: tuple[Any, ...]) -> Any:
    """What `function(*arguments)` stands for.

    Raises:
        TypeError, ValueError, IndexError: arguments that it never has.
    """
    if isinstance(function, Opaque):
        return function
    maker = _CALLS.get(function.name)
    if maker is None:
        raise TypeError
    return maker(*arguments)


def storage_of(persistent_id: Any) -> Storage:
    """The storage that a persistent id of torch.save names.

    Raises:
        TypeError, ValueError, KeyError: it is none.
        SourceError: it is one of a kind that is not read.
    """
    kind, cls, key, _location, numel, *view = persistent_id
    if kind != "storage" or not isinstance(cls, Named) or type(key) is not str:
        raise TypeError
    if any(view):
        raise SourceError("has storages that are views of others, as torch before 0.4 wrote them", SAVE_AGAIN)
    dtype = STORAGES[cls.name.rpartition(".")[2]]
    return Storage(key, dtype, _size(numel))


def _size(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError
    return value


def _sizes(values: Any) -> tuple[int, ...]:
    if not isinstance(values, tuple | list):
        raise TypeError
    return tuple(map(_size, values))


def _tensor(
    storage: Any, offset: Any, shape: Any, strides: Any, requires_grad: Any = False, hooks: Any = None,
    metadata: Any = None,
) -> Tensor | Unusable:  # fmt: skip
    del requires_grad, hooks
    if not isinstance(storage, Storage):
        raise TypeError
    return _described(storage, storage.dtype, offset, shape, strides, metadata)


def _tensor_of_type(
    storage: Any, offset: Any, shape: Any, strides: Any, requires_grad: Any, hooks: Any, dtype: Any,
    metadata: Any = None,
) -> Tensor | Unusable:  # fmt: skip
    del requires_grad, hooks
    if not isinstance(storage, Storage) or not isinstance(dtype, Named):
        raise TypeError
    return _described(storage, dtype.name.removeprefix("torch."), offset, shape, strides, metadata)


def _described(
    storage: Storage, dtype: str | None, offset: Any, shape: Any, strides: Any, metadata: Any
) -> Tensor | Unusable:
    if dtype not in ELEMENT_TYPES or len(shape) != len(strides):
        raise TypeError
    # before anything is copied: a few bytes of the stream may name a long tuple again
    if len(shape) > MAX_DIMENSIONS:
        return Unusable(f"has {len(shape)} dimensions, at most {MAX_DIMENSIONS} are usable")
    # torch keeps `conj` and `neg` as marks on bytes that hold the other value
    if isinstance(metadata, Mapping) and metadata.pairs:
        return Unusable("is a lazily conjugated or negated view: its bytes are not its values")
    return Tensor(storage, dtype, _size(offset), _sizes(shape), _sizes(strides))


def _from_type(function: Any, cls: Any, arguments: Any, state: Any) -> Any:
    del state  # Python attributes of a tensor
    if isinstance(cls, Opaque):
        return cls
    return call(function, arguments)


def _parameter(data: Any, *_rest: Any) -> Any:
    return data


def _mapping(pairs: Any = None) -> Mapping:
    if pairs is None:
        return Mapping()
    if isinstance(pairs, Mapping):
        return pairs
    if not isinstance(pairs, list) or not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
        raise TypeError
    return Mapping(pairs)  # as Python 2 wrote an OrderedDict


def _same(items: Any = ()) -> Any:
    # never a copy: a few bytes of the stream may ask for one of something large, again and again
    if not isinstance(items, list | tuple):
        raise TypeError
    return items


def _opaque(name: str) -> Callable[..., Opaque]:
    return lambda *_: Opaque(name)


def _unusable(why: str) -> Callable[..., Unusable]:
    return lambda *_: Unusable(why)


# one name for one thing, whatever the versions of Python and NumPy that wrote it
_MODULES = {
    "__builtin__": "builtins",
    "copy_reg": "copyreg",
    "numpy._core.multiarray": "numpy.core.multiarray",
    "numpy._core.numeric": "numpy.core.numeric",
}

_CALLS: dict[str, Callable[..., Any]] = {
    "collections.OrderedDict": _mapping,
    "collections.Counter": _mapping,
    "collections.defaultdict": lambda *_: Mapping(),
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_of_type,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._tensor._rebuild_from_type_v2": _from_type,
    "torch.nn.parameter.Parameter": _parameter,
    "torch.nn.parameter.Buffer": _parameter,
    "torch._utils._rebuild_sparse_tensor": _unusable("is sparse"),
    "torch._utils._rebuild_sparse_csr_tensor": _unusable("is sparse"),
    "torch._utils._rebuild_nested_tensor": _unusable("is nested"),
    "torch._utils._rebuild_qtensor": _unusable("is quantised by torch"),
    "torch._utils._rebuild_meta_tensor_no_storage": _unusable("is on the meta device: it has no values"),
    "torch._utils._rebuild_wrapper_subclass": _unusable("is of a tensor subclass"),
    "torch._utils._rebuild_device_tensor_from_numpy": _unusable("is stored as a NumPy array"),
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": _unusable("was saved from a device that torch copies from"),
    "torch.Size": _same,
    "torch.device": _opaque("torch.device"),
    "torch.serialization._get_layout": _opaque("torch.layout"),
    "numpy.core.multiarray.scalar": _opaque("numpy scalar"),
    "numpy.dtype": _opaque("numpy.dtype"),
    "_codecs.encode": _opaque("bytes"),
    "builtins.set": _same,
    "builtins.frozenset": _same,
    "builtins.complex": _opaque("complex"),
    "builtins.bytearray": _opaque("bytearray"),
    "builtins.bytes": _opaque("bytes"),
    "builtins.slice": _opaque("slice"),
}

_KNOWN = frozenset(
    {
        *_CALLS,
        *(f"torch.{name}" for name in ELEMENT_TYPES),
        *(f"torch.{device}{name}" for name in STORAGES for device in ("", "cuda.", "storage.")),
        "torch.Tensor",
        *(f"torch.per_{kind}" for kind in (
            "tensor_affine", "tensor_symmetric", "channel_affine", "channel_symmetric", "channel_affine_float_qparams",
        )),
        "builtins.dict", "builtins.list", "builtins.int", "builtins.float",
    }
)  # fmt: skip
