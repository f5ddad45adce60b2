"""What the fuzzers read: by name, the inputs that they start from, and the function that takes one input."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from ftd.errors import SourceError
from ftd.source.header import parse_header
from ftd.source.index import parse_index
from ftd.source.strided import span
from ftd.source.torchfile import read_torch_file

Target = tuple[Callable[[], Iterator[bytes]], Callable[[bytes], None]]

#: A file without a name, written anew for each input.
_FILE = os.memfd_create("fuzz", os.MFD_CLOEXEC)
_PATH = Path(f"/proc/self/fd/{_FILE}")


def torch_seeds() -> Iterator[bytes]:
    """What torch writes, small, in both layouts."""
    import torch

    from tests.unit.source.torch_files import saved

    numbers = torch.arange(6.0)
    for state in (
        {"a": numbers, "b": numbers.view(2, 3).t(), "c": torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))},
        {"model": {"w": torch.ones(3, dtype=torch.uint16)}, "step": 3, "optimizer": {"state": {}, "param_groups": []}},
        {"s": torch.eye(2).to_sparse(), "t": [torch.ones(1), "x", 2.5, None, b"y"]},
    ):
        yield saved(state)
        yield saved(state, as_zip=False)
        yield saved(state, as_zip=False, protocol=4)


def torch_file(data: bytes) -> None:
    """As a file, and as the pickle of an archive that is whole otherwise."""
    from tests.unit.source.torch_files import zip_of

    for content in (data, zip_of({"x/data.pkl": data, "x/data/0": bytes(64)})):
        os.ftruncate(_FILE, 0)
        os.pwrite(_FILE, content, 0)
        with contextlib.suppress(SourceError):
            for spec, offset, strides in read_torch_file(_PATH, "model.pt", ("argparse.Namespace",)).tensors:
                if spec.nbytes:
                    itemsize = spec.nbytes // math.prod(spec.shape) or 1
                    reach = span(spec.shape, strides) * itemsize if strides else spec.nbytes
                    assert offset >= 0 and offset + reach <= len(content), (spec, offset, strides)


def header_seeds() -> Iterator[bytes]:
    entry = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
    for header in ({}, {"a": entry}, {"__metadata__": {"format": "pt"}, "a": entry}):
        yield json.dumps(header).encode()


def header(data: bytes) -> None:
    """Of a file that is as long as its tensors say, up to a megabyte, and of one of that length."""
    for size in (len(data) + 8, len(data) + 8 + 24, 1 << 20):
        with contextlib.suppress(SourceError):
            for spec, offset in parse_header(data, size):
                assert len(data) + 8 <= offset and offset + spec.nbytes <= size, (spec, offset)


def index_seeds() -> Iterator[bytes]:
    for weight_map in ({}, {"a": "x.safetensors"}, {"a": "x.safetensors", "b": "./sub//y.bin"}):
        yield json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}).encode()


def index(data: bytes) -> None:
    with contextlib.suppress(SourceError):
        for name in parse_index(data):
            path = Path("/model") / name
            assert path.is_relative_to("/model") and ".." not in path.parts and path != Path("/model"), name


TARGETS: dict[str, Target] = {
    "torch": (torch_seeds, torch_file),
    "header": (header_seeds, header),
    "index": (index_seeds, index),
}
