"""The header of a safetensors file, as values: bytes in, tensors out, every rule of the format checked.

The file is an 8-byte little-endian length, that many bytes of JSON, then the tensors' bytes. The JSON maps names to
`{"dtype", "shape", "data_offsets": [begin, end]}`, relative to the end of the JSON, beside an optional
`__metadata__`, which is not looked into. The tensors must tile the data: no overlap, no hole, nothing behind the
last one (https://huggingface.co/docs/safetensors/index#format). The empty name is a name: the format allows it.

Messages carry no path; the caller adds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ftd.errors import SourceError
from ftd.source.strictjson import Repeated, json_type, load_object
from ftd.source.wording import DOWNLOAD_AGAIN, encodable, quoted, shown
from ftd.tensorspec import DTYPE_BITS, TensorSpec

#: Bytes of the length in front of the header.
LENGTH_BYTES = 8
#: Longest header, as in the format's reference implementation.
MAX_HEADER_BYTES = 100_000_000
#: The shortest header: `{}`.
MIN_HEADER_BYTES = 2

_ASK_WRITER = "the file breaks the safetensors format: download it again, or write it with the safetensors library"

#: What torch's reductions (`dim_bitset_size`) and numpy (`NPY_MAXDIMS`) can work with. The format has no limit, but
#: a shape of millions of ones would fill the manifest.
MAX_DIMENSIONS = 64

# torch keeps sizes, strides and byte counts in int64
_LIMIT = 1 << 63


class _Entry(NamedTuple):
    """One tensor of a header; `begin` and `end` are relative to the data."""

    begin: int
    end: int
    name: str
    dtype: str
    shape: tuple[int, ...]


def parse_header(raw: bytes, file_bytes: int) -> list[tuple[TensorSpec, int]]:
    """The tensors of a file of `file_bytes` whose header (without its length) is `raw`, by rising offset.

    Offsets are absolute in the file.

    Raises:
        SourceError: the first rule of the format that is broken, by tensor name; message without path.
    """
    header = load_object(raw, LENGTH_BYTES)
    if isinstance(header, Repeated):
        raise SourceError(
            f"has tensor {quoted(header.key)} more than once in its header: a duplicate name", _ASK_WRITER
        )
    metadata = header.pop("__metadata__", None)
    if metadata is not None and not isinstance(metadata, dict):
        raise SourceError(f"has {json_type(metadata)} as __metadata__, expected an object", _ASK_WRITER)
    entries = sorted(_entry(name, value) for name, value in header.items())
    if not encodable(header):
        name = next(name for name in header if not encodable([name]))
        raise SourceError(f"tensor name {quoted(name)} has a lone surrogate: it is no Unicode text", _ASK_WRITER)
    _check_tiling(entries)
    data_start = LENGTH_BYTES + len(raw)
    _check_length(entries, data_start, file_bytes)
    # after the bounds: a name that means nothing here must not hide a file that is cut short
    for entry in entries:
        if entry.dtype not in DTYPE_BITS:
            raise SourceError(
                f"tensor {quoted(entry.name)} has the unknown element type {quoted(entry.dtype)}",
                f"known are {', '.join(DTYPE_BITS)}: convert the checkpoint, or use a newer ftd",
            )
    return [(TensorSpec(entry.name, entry.dtype, entry.shape), data_start + entry.begin) for entry in entries]


def _broken(name: str, problem: str) -> SourceError:
    return SourceError(f"tensor {quoted(name)} {problem}", _ASK_WRITER)


def _entry(name: str, value: Any) -> _Entry:
    if not isinstance(value, dict):
        raise _broken(name, f"is {json_type(value)}, expected an object")
    if isinstance(value, Repeated):
        raise _broken(name, f"has the key {quoted(value.key)} more than once")
    dtype = value.get("dtype")
    if not isinstance(dtype, str):
        raise _broken(name, f"has {json_type(dtype)} as dtype, expected a string")
    shape = _integers(name, "shape", value.get("shape"))
    offsets = _integers(name, "data_offsets", value.get("data_offsets"))
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _broken(name, f"has data_offsets {_dims(offsets)}, expected [begin, end] with begin <= end")
    begin, end = offsets
    elements = _elements(name, shape)
    bits = DTYPE_BITS.get(dtype)
    if bits is not None:
        if elements * bits % 8:
            raise _broken(name, f"has {elements} {dtype} elements of {bits} bits, which do not fill whole bytes")
        needed = elements * bits // 8
        if needed != end - begin:
            found = f"data_offsets [{begin}, {end}] hold {end - begin}"
            raise _broken(name, f"of type {dtype} and shape {_dims(shape)} needs {needed} bytes, its {found}")
    return _Entry(begin, end, name, dtype, tuple(shape))


def _integers(name: str, key: str, value: Any) -> list[int]:
    expected = "expected a list of integers from 0 to 2^63-1"
    if not isinstance(value, list):
        raise _broken(name, f"has {json_type(value)} as {key}, {expected}")
    for item in value:
        if type(item) is not int:  # not isinstance: True is an int to Python, and no size
            raise _broken(name, f"has {json_type(item)}{_number(item)} in its {key}, {expected}")
        if not 0 <= item < _LIMIT:
            raise _broken(name, f"has {shown(str(item))} in its {key}, {expected}")
    return value


def _number(item: Any) -> str:
    return f" ({item})" if isinstance(item, float | bool) else ""


def _dims(sizes: list[int]) -> str:
    first = ", ".join(map(str, sizes[:8]))
    return f"[{first}]" if len(sizes) <= 8 else f"[{first}, … {len(sizes)} in all]"


def _elements(name: str, shape: list[int]) -> int:
    if len(shape) > MAX_DIMENSIONS:
        raise _broken(name, f"has {len(shape)} dimensions, at most {MAX_DIMENSIONS} are usable")
    count = element_count(shape)
    if count is None:
        raise _broken(name, f"has shape {_dims(shape)}, more than 2^63-1 elements")
    return count


def element_count(shape: Sequence[int]) -> int | None:
    """Elements of a shape; None where torch could not make such a tensor, though another size is zero."""
    product = 1
    for size in shape:
        product *= size or 1  # the strides of the other dimensions must fit as well
        if product >= _LIMIT:
            return None
    return 0 if 0 in shape else product


def _check_tiling(entries: list[_Entry]) -> None:
    position, last = 0, ""
    for entry in entries:
        if entry.begin != position:
            before = f"tensor {quoted(last)} ends" if position else "the data begins"
            what = "overlaps it" if entry.begin < position else "leaves a hole"
            raise _broken(entry.name, f"begins at {entry.begin} and {what}: {before} at {position}")
        position, last = entry.end, entry.name


def _check_length(entries: list[_Entry], data_start: int, file_bytes: int) -> None:
    needed = data_start + (entries[-1].end if entries else 0)
    if file_bytes < needed:
        name = next(entry.name for entry in entries if data_start + entry.end > file_bytes)
        raise SourceError(
            f"file is {file_bytes} bytes, its header needs {needed}: {needed - file_bytes} bytes are missing,"
            f" from tensor {quoted(name)} on",
            DOWNLOAD_AGAIN,
        )
    if file_bytes > needed:
        raise SourceError(
            f"file is {file_bytes} bytes, its header needs {needed}: {file_bytes - needed} bytes too many"
            " behind the last tensor",
            DOWNLOAD_AGAIN,
        )
