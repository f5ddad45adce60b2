"""Torch checkpoints for tests: written by torch, or member by member; and read as a daemon fills segments from them."""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from ftd.daemon.fill import Filler, plan_reads
from ftd.shm.layout import lay_out
from ftd.shm.segment import PAGE_BYTES
from ftd.source.resolve import resolve
from ftd.torchspec import torch_form

#: torch's two layouts, by the argument of torch.save.
LAYOUTS = (True, False)


def saved(value: Any, *, as_zip: bool = True, protocol: int = 2) -> bytes:
    """What torch.save writes."""
    file = io.BytesIO()
    torch.save(value, file, pickle_protocol=protocol, _use_new_zipfile_serialization=as_zip)
    return file.getvalue()


def written(directory: Path, value: Any, name: str = "model.pt", *, as_zip: bool = True) -> Path:
    path = directory / name
    path.write_bytes(value if isinstance(value, bytes) else saved(value, as_zip=as_zip))
    return path


def served(path: Path, allowed: Collection[str] = ()) -> dict[str, torch.Tensor]:
    """Every tensor as followers would see it. Ties are one tensor's memory."""
    checkpoint = resolve(path, allowed)
    specs = [tensor.spec for tensor in checkpoint.tensors]
    layout = lay_out(specs, lambda _: "", page_bytes=PAGE_BYTES, same_as=checkpoint.ties)
    views = [memoryview(bytearray(size)) for size in layout.segments]
    extents = {placed.spec.name: placed.extent for placed in layout.tensors}
    stored = [tensor for tensor in checkpoint.tensors if tensor.spec.name not in checkpoint.ties]
    filler = Filler(checkpoint.files, views, threads=2, cancelled=lambda: False, done=lambda _: None)
    filler.run(plan_reads(stored, extents))
    tensors = {}
    for placed in layout.tensors:
        dtype, shape = torch_form(placed.spec)
        at, nbytes = placed.extent.offset, placed.extent.nbytes
        if nbytes:
            count = nbytes // dtype.itemsize
            flat = torch.frombuffer(views[placed.extent.segment], dtype=dtype, count=count, offset=at)
        else:
            flat = torch.empty(0, dtype=dtype)
        tensors[placed.spec.name] = flat.view(shape)
    return tensors


def bits(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    """All that makes two tensors the same to the last bit, NaNs included."""
    plain = tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
    raw = plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    return tensor.dtype, tuple(tensor.shape), raw


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return {name: bits(t) for name, t in found.items()} == {name: bits(t) for name, t in expected.items()}


# --- by hand ------------------------------------------------------------------------------------------------------


def zip_of(members: dict[str, bytes], *, comment: bytes = b"", zip64: bool = False, **changes: int) -> bytes:
    """A zip archive of stored members; `changes` are fields of its end: count, nbytes, begin."""
    data, entries = b"", b""
    for text, content in members.items():
        name = text.partition("\0")[0].encode()  # what follows a NUL tells members of one name apart
        extra = struct.pack("<HHQQQ", 1, 24, len(content), len(content), len(data)) if zip64 else b""
        size, local = (0xFFFFFFFF, 0xFFFFFFFF) if zip64 else (len(content), len(data))
        entries += struct.pack("<4sHHHHHHIII", b"PK\x01\x02", 0, 0, 0, 0, 0, 0, 0, size, size)
        entries += struct.pack("<HHHHHII", len(name), len(extra), 0, 0, 0, 0, local) + name + extra
        data += struct.pack("<4sHHHHHIIIHH", b"PK\x03\x04", 0, 0, 0, 0, 0, 0, 0, 0, len(name), 0) + name + content
    count, nbytes = changes.get("count", len(members)), changes.get("nbytes", len(entries))
    begin = changes.get("begin", len(data))
    end = b""
    if zip64:
        end += struct.pack("<4sQHHIIQQQQ", b"PK\x06\x06", 44, 0, 0, 0, 0, count, count, nbytes, begin)
        end += struct.pack("<4sIQI", b"PK\x06\x07", 0, len(data) + len(entries), 1)
        count, nbytes, begin = 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF
    end += struct.pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, count, count, nbytes, begin, len(comment)) + comment
    return data + entries + end


def named(module: str, name: str) -> bytes:
    """The opcode that names something."""
    return f"c{module}\n{name}\n".encode()


def text(value: str) -> bytes:
    raw = value.encode()
    return b"X" + len(raw).to_bytes(4, "little") + raw


def whole(value: int) -> bytes:
    return b"J" + value.to_bytes(4, "little", signed=True)


def tuple_of(*parts: bytes) -> bytes:
    return b"(" + b"".join(parts) + b"t"


def storage(key: str, numel: int, kind: str = "FloatStorage", *more: bytes) -> bytes:
    return tuple_of(text("storage"), named("torch", kind), text(key), text("cpu"), whole(numel), *more) + b"Q"


def tensor(
    where: bytes, shape: tuple[int, ...], strides: tuple[int, ...], offset: int = 0, metadata: bytes = b""
) -> bytes:
    sizes, steps = (tuple_of(*map(whole, values)) for values in (shape, strides))
    rest = tuple_of(where, whole(offset), sizes, steps, b"\x89", b"N", *([metadata] if metadata else []))
    return named("torch._utils", "_rebuild_tensor_v2") + rest + b"R"


def mapping(items: dict[str, bytes]) -> bytes:
    return b"}(" + b"".join(text(name) + value for name, value in items.items()) + b"u"


def stream(value: bytes) -> bytes:
    return b"\x80\x02" + value + b"."


def archive(value: bytes, storages: dict[str, bytes], **more: bytes) -> bytes:
    """A checkpoint of today's layout with this pickle."""
    members = {"x/data.pkl": stream(value), "x/version": b"3\n", "x/byteorder": b"little"}
    members |= {f"x/data/{key}": content for key, content in storages.items()}
    members |= {f"x/{name}": content for name, content in more.items()}
    return zip_of(members)


def older(value: bytes, storages: dict[str, bytes], *, itemsize: int = 4, little: bool = True) -> bytes:
    """A checkpoint of the layout before torch 1.6 with this pickle."""
    machine = {"protocol_version": 1001, "little_endian": little, "type_sizes": {"short": 2, "int": 4, "long": 4}}
    head = b"".join(pickle.dumps(part, protocol=2) for part in (0x1950A86A20F9469CFC6C, 1001, machine))
    tail = pickle.dumps(list(storages), protocol=2)
    for content in storages.values():
        tail += (len(content) // itemsize).to_bytes(8, "little") + content
    return head + stream(value) + tail
