"""Checkpoints that are none: one line of what is wrong, one of what to do, nothing left, and the reason kept."""

from __future__ import annotations

import gzip
import os
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch

import ftd_client
from ftd.daemon.status import report
from ftd.errors import EXIT_FAILED, EXIT_USAGE, CreatorFailedError
from tests.process.checkpoints import held, hollow, tiny
from tests.process.daemons import Daemon, frozen, ftd, left_in, refused, segments
from tests.unit.source.checkpoint_files import INDEX, A, B, entry, file_of, index_of, sharded, valid_file, write
from tests.unit.source.torch_files import saved

Start = Callable[..., Daemon]

LFS_POINTER = """version https://git-lfs.github.com/spec/v1
oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393
size 12345
"""


def one_file(header: object, data: bytes = b"") -> Callable[[Path], Path]:
    return lambda folder: write(folder, {"model.safetensors": file_of(header, data)})


def missing(folder: Path) -> Path:
    return folder / "nothing"


def empty(folder: Path) -> Path:
    return folder


def without_weights(folder: Path) -> Path:
    return write(folder, {"config.json": {}, "tokenizer.json": {}, "README.md": "hello"})


def truncated_shard(folder: Path) -> Path:
    sharded(folder, {"a.safetensors": A, "b.safetensors": B})
    os.truncate(folder / "b.safetensors", (folder / "b.safetensors").stat().st_size - 1)
    return folder


def missing_shard(folder: Path) -> Path:
    sharded(folder, {"a.safetensors": A, "b.safetensors": B})
    (folder / "b.safetensors").unlink()
    return folder


def outside_shard(folder: Path) -> Path:
    write(folder, {"evil.safetensors": valid_file(B)})
    model = folder / "model"
    return write(model, {
        "a.safetensors": valid_file(A),
        INDEX: index_of({"a.safetensors": list(A), "../evil.safetensors": list(B)}),
    })  # fmt: skip


def absolute_shard(folder: Path) -> Path:
    evil = write(folder, {"evil.safetensors": valid_file(B)}) / "evil.safetensors"
    index = index_of({"a.safetensors": list(A), str(evil): list(B)})
    return write(folder / "model", {"a.safetensors": valid_file(A), INDEX: index})


def long_header(folder: Path) -> Path:
    return write(folder, {"model.safetensors": (1 << 40).to_bytes(8, "little") + b"{}"})


def lfs_pointer(folder: Path) -> Path:
    return write(folder, {"model.safetensors": LFS_POINTER})


def torch_file(value: object, *, cut: int = 0, as_zip: bool = True) -> Callable[[Path], Path]:
    """A checkpoint that torch wrote, without its last `cut` bytes."""

    def make(folder: Path) -> Path:
        raw = saved(value, as_zip=as_zip)
        return write(folder, {"pytorch_model.bin": raw[: len(raw) - cut]})

    return make


def other_file(name: str, content: bytes) -> Callable[[Path], Path]:
    return lambda folder: write(folder, {name: content})


def hub_name(_: Path) -> Path:
    return Path("some-org/no-such-model")


def same_name_twice(folder: Path) -> Path:
    text = '{"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}, "a": {"dtype": "U8", "shape": [1], '
    return write(folder, {"model.safetensors": file_of(text + '"data_offsets": [1, 2]}}', b"xy")})


WEIGHTS = {"w": torch.ones(2, 3)}

#: Maker of the model, exit status, words of the error.
CASES: dict[str, tuple[Callable[[Path], Path], int, tuple[str, ...]]] = {
    "ST-09 path missing": (missing, EXIT_USAGE, ("nothing", "missing")),
    "empty directory": (empty, EXIT_FAILED, ("is an empty directory",)),
    "directory without weights": (without_weights, EXIT_FAILED, ("has no weights; found",)),
    "a model that is not in the hub's cache": (hub_name, EXIT_USAGE, ("some-org/no-such-model", "hub's cache")),
    "ST-09 truncated shard": (truncated_shard, EXIT_FAILED, ("b.safetensors", "bytes")),
    "ST-12 index names a missing file": (missing_shard, EXIT_FAILED, ("b.safetensors", "missing")),
    "ST-16 index names an outside file": (outside_shard, EXIT_FAILED, ("../evil.safetensors",)),
    "ST-16 index names an absolute path": (absolute_shard, EXIT_FAILED, ("evil.safetensors",)),
    "ST-18 header longer than the file": (long_header, EXIT_FAILED, ("model.safetensors", str(1 << 40))),
    "ST-19 overlapping offsets": (
        one_file({"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], 2, 6)}, bytes(6)), EXIT_FAILED, ("'b'", "overlap"),
    ),
    "ST-19 offsets beyond the file": (one_file({"a": entry("U8", [4], 0, 4)}, bytes(2)), EXIT_FAILED, ("bytes",)),
    "ST-19 shape that does not fit": (one_file({"a": entry("F32", [4], 0, 4)}, bytes(4)), EXIT_FAILED, ("'a'",)),
    "ST-20 unknown dtype": (one_file({"a": entry("F7", [4], 0, 4)}, bytes(4)), EXIT_FAILED, ("'a'", "F7")),
    "ST-04 duplicate name": (same_name_twice, EXIT_FAILED, ("'a'", "duplicate name")),
    "ST-26 LFS pointer": (lfs_pointer, EXIT_FAILED, ("model.safetensors", "LFS")),
    "ST-26 HTML page": (other_file("model.safetensors", b"<html></html>" * 9), EXIT_FAILED, ("an HTML page",)),
    "ST-26 gzip data": (other_file("model.safetensors", gzip.compress(b"x")), EXIT_FAILED, ("gzip data",)),
    "ST-26 LFS pointer in place of a torch checkpoint": (
        other_file("pytorch_model.bin", LFS_POINTER.encode()), EXIT_FAILED, ("pytorch_model.bin", "LFS"),
    ),
    "TL-01 training arguments": (
        torch_file({"args": Namespace(lr=1), "model": WEIGHTS}), EXIT_FAILED, ("argparse.Namespace",),
    ),
    "TL-03 zip that is cut short": (torch_file(WEIGHTS, cut=9), EXIT_FAILED, ("pytorch_model.bin", "cut short")),
    "TL-03 older layout that is cut short": (
        torch_file(WEIGHTS, cut=1, as_zip=False), EXIT_FAILED, ("pytorch_model.bin", "1 bytes are missing"),
    ),
    "TL-03 empty file": (other_file("pytorch_model.bin", b""), EXIT_FAILED, ("pytorch_model.bin", "is empty")),
    "TL-04 no tensors": (torch_file({"epoch": 3, "extra": None}), EXIT_FAILED, ("has no tensor in it",)),
    "TL-06 sparse tensor": (torch_file({"w": torch.eye(3).to_sparse()}), EXIT_FAILED, ("'w'", "is sparse")),
    "TL-07 NumPy array": (torch_file({"a": numpy.arange(3), **WEIGHTS}), EXIT_FAILED, ("numpy.ndarray",)),
    "several parts that may be the model": (
        torch_file({"model": WEIGHTS, "ema": WEIGHTS}), EXIT_FAILED, ("model (1 tensor), ema (1 tensor)",),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_is_refused(case: str, namespace: str, runtime_dir: Path, tmp_path: Path) -> None:
    """Row by row, see `CASES`."""
    make, status, words = CASES[case]
    model = make(tmp_path)
    result = ftd("start", "-n", namespace, "--model", model)
    line = refused(result, status, *words)
    assert segments(namespace) == []
    assert left_in(runtime_dir) == [f"{namespace}.failed.json"]
    kept = report(namespace, os.environ)
    assert kept["state"] == "failed" and f"ftd: {kept['failure']['message']}" == line
    assert result.err.rstrip().endswith(f"  → {kept['failure']['remedy']}")
    with pytest.raises(CreatorFailedError) as caught:
        ftd_client.attach(namespace, timeout=0)
    assert kept["failure"]["message"] in caught.value.message and caught.value.remedy == kept["failure"]["remedy"]


class TestChangesDuringTheLoad:
    """ST-25 (a): a checkpoint that moves under the load makes it fail, and nothing half-old is published."""

    def test_a_shard_is_cut_short(self, start: Start, namespace: str, runtime_dir: Path, tmp_path: Path) -> None:
        model = hollow(tmp_path, 96)
        daemon = frozen(start, model)
        os.truncate(model, 64 << 20)
        daemon.thaw()
        assert daemon.ended() == EXIT_FAILED
        assert "while it was read" in daemon.log()
        assert segments(namespace) == []

    def test_a_shard_is_written_to(self, start: Start, namespace: str, runtime_dir: Path, tmp_path: Path) -> None:
        model = hollow(tmp_path, 96)
        daemon = frozen(start, model)
        with model.open("r+b") as file:
            file.seek(1 << 20)
            file.write(b"x")
        daemon.thaw()
        assert daemon.ended() == EXIT_FAILED
        assert "changed while it was read" in daemon.log()
        assert segments(namespace) == []

    def test_a_sidecar_is_replaced(self, start: Start, namespace: str, runtime_dir: Path, tmp_path: Path) -> None:
        model = tiny(tmp_path / "model")
        with held(model / "tokenizer.json") as tokenizer:
            daemon = start("--model", model, wait=False)
            daemon.wait_segments()
            os.ftruncate(tokenizer, 3)
        assert daemon.ended() == EXIT_FAILED
        assert "tokenizer.json" in daemon.log()
        assert segments(namespace) == [] and left_in(runtime_dir) == [f"{namespace}.failed.json"]


def test_sizes_are_checked_before_the_first_segment(
    start: Start, namespace: str, runtime_dir: Path, tmp_path: Path
) -> None:
    """ST-09: a byte short of the last of several large shards: refused at once, nothing read, nothing made."""
    shards = {f"model-{i}.safetensors": [f"{i}.weight"] for i in range(3)}
    for name, (tensor,) in shards.items():
        path = hollow(tmp_path, 0, name=name)
        header = file_of({tensor: entry("U8", [1 << 30], 0, 1 << 30)})
        path.write_bytes(header)
        os.truncate(path, len(header) + (1 << 30) - (name == "model-2.safetensors"))
    write(tmp_path, {INDEX: index_of(shards)})
    begun = time.monotonic()
    refused(ftd("start", "-n", namespace, "--model", tmp_path), EXIT_FAILED, "model-2.safetensors", "bytes")
    assert time.monotonic() - begun < 10
    assert segments(namespace) == []
