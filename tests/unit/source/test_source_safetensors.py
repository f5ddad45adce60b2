"""Reading one file: hostile lengths, files that are something else, changes while reading."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import tarfile
import time
import tracemalloc
import zipfile
from pathlib import Path

import pytest
from checkpoint_files import entry, file_of, filled, valid_file

from ftd.errors import SourceChangedError, SourceError
from ftd.source import safetensors
from ftd.source.header import MAX_HEADER_BYTES
from ftd.source.safetensors import read_file


def written(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    return path


def refusal(path: Path) -> SourceError:
    with pytest.raises(SourceError) as caught:
        read_file(path, path.name)
    assert caught.value.remedy
    return caught.value


def test_a_file_is_described_as_fstat_and_header_say(tmp_path: Path) -> None:
    path = written(tmp_path, valid_file({"a": filled("F32", (2, 2))}))
    file, tensors = read_file(path, "shards/x.safetensors")
    status = path.stat()
    assert (file.path, file.name) == (path, "shards/x.safetensors")
    assert (file.bytes, file.mtime_ns, file.inode, file.device) == (
        status.st_size,
        status.st_mtime_ns,
        status.st_ino,
        status.st_dev,
    )
    assert len(file.header_digest) == 32
    assert [spec.name for spec, _ in tensors] == ["a"]


@pytest.mark.parametrize("length", [0, 1, 93, 101 << 20, 1 << 63, (1 << 64) - 1])
def test_a_hostile_length_is_refused_with_flat_memory(tmp_path: Path, length: int) -> None:
    """ST-18: files of 10 to 100 bytes whose header claims to be longer, or nothing."""
    path = written(tmp_path, length.to_bytes(8, "little") + b"{" + b" " * 91)
    refusal(path)  # imports and caches are not what is measured
    tracemalloc.start()
    try:
        error = refusal(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert f"a header of {length} bytes, expected 2 to 92" in error.message
    assert peak < 64 << 10


def test_a_header_that_is_no_json_is_not_allocated(tmp_path: Path) -> None:
    """ST-18: a sparse file large enough for the longest header."""
    path = written(tmp_path, MAX_HEADER_BYTES.to_bytes(8, "little"))
    os.truncate(path, MAX_HEADER_BYTES + 100)
    tracemalloc.start()
    try:
        error = refusal(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert "no JSON object at byte 8" in error.message
    assert peak < 64 << 10


@pytest.mark.parametrize("size", [1, 7, 8, 9])
def test_files_too_short_for_a_header(tmp_path: Path, size: int) -> None:
    """ST-18."""
    assert f"is {size} bytes: too short" in refusal(written(tmp_path, b"\2" + b"\0" * (size - 1))).message


def test_an_empty_file(tmp_path: Path) -> None:
    assert "is empty (0 bytes)" in refusal(written(tmp_path, b"")).message


def _torch_zip() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", b"x" * 100)
    return buffer.getvalue()


def _tar() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("weights"))
    return buffer.getvalue()


_LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"4d7a" * 16 + b"\nsize 4976698672\n"


@pytest.mark.parametrize(
    ("content", "what", "remedy"),
    [
        (_LFS, "a Git LFS pointer", "git lfs pull"),
        (b"/annex/objects/SHA256E-s10--abc\n", "a git-annex pointer", "git annex get"),
        (b"\n<!DOCTYPE html><html><body>404</body></html>", "an HTML page", "download"),
        (b"<html>\n<head><title>503</title></head></html>", "an HTML page", "download"),
        (b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>', "an XML document", "download"),
        (b'{"error":"Repository not found"}', "JSON text", "access token"),
        (gzip.compress(b"x" * 1000, mtime=0), "gzip data", "unpack"),
        (_torch_zip(), "a zip archive", "safetensors version"),
        (pickle.dumps({"w": [1.0] * 20}, protocol=2), "a pickle, as torch.save writes it", "name it *.pt"),
        (pickle.dumps({"w": [1.0] * 20}, protocol=4), "a pickle", "name it *.pt"),
        (_tar(), "a tar archive", "unpack"),
        (b"GGUF\3\0\0\0" + b"\1" * 20, "a GGUF file", "convert"),
        (bytes(4096), "zeros where the header should be", "download"),
    ],
)  # fmt: skip
def test_a_file_that_is_something_else_is_named(tmp_path: Path, content: bytes, what: str, remedy: str) -> None:
    """ST-26."""
    error = refusal(written(tmp_path, content))
    assert f"it is {what}" in error.message
    assert remedy in error.remedy


def test_gzip_data_whose_length_is_plausible_is_named_too(tmp_path: Path) -> None:
    """ST-26: the first eight bytes of gzip, read as a length, are 559,903; the file is longer than that."""
    content = gzip.compress(os.urandom(600_000), compresslevel=1, mtime=0)
    assert int.from_bytes(content[:8], "little") < len(content)
    assert "gzip data" in refusal(written(tmp_path, content)).message


def test_a_valid_file_is_not_taken_for_what_its_length_looks_like(tmp_path: Path) -> None:
    padding = int.from_bytes(b"\x1f\x8b\x08\0\0\0\0\0", "little")
    content = file_of(b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'.ljust(padding), b"x")
    assert content.startswith(b"\x1f\x8b\x08")
    assert read_file(written(tmp_path, content), "x")[1][0][0].name == "a"


def test_what_lies_in_the_way_is_named(tmp_path: Path) -> None:
    assert "is a directory, expected a regular file" in refusal(tmp_path).message
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    assert "is a fifo, expected a regular file" in refusal(fifo).message
    link = tmp_path / "link"
    link.symlink_to("blobs/abc")
    assert "is a link to blobs/abc, which is missing" in refusal(link).message
    assert refusal(tmp_path / "nothing").message == "is missing"


def test_a_failing_disk_is_an_error_of_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, valid_file({"a": filled("U8", (4,))}))

    def fails(*args: object) -> bytes:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "pread", fails)
    assert "cannot be read: input/output error" in refusal(path).message


def test_a_file_that_shrinks_under_the_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = valid_file({f"layer.{i}": filled("U8", (1,)) for i in range(100)})
    path = written(tmp_path, content)
    read = os.pread

    def shrinking(fd: int, count: int, offset: int) -> bytes:
        data = read(fd, count, offset)
        if offset == 0:
            os.truncate(path, 2000)
        return data

    monkeypatch.setattr(os, "pread", shrinking)
    assert "ended at byte 2000 while it was read" in refusal(path).message


def test_a_change_while_the_header_is_read_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ST-25."""
    path = written(tmp_path, valid_file({"a": filled("U8", (4,))}))
    parse = safetensors.parse_header

    def rewriting(raw: bytes, file_bytes: int) -> object:
        os.utime(path, ns=(1, 1))
        return parse(raw, file_bytes)

    monkeypatch.setattr(safetensors, "parse_header", rewriting)
    with pytest.raises(SourceChangedError, match=r"mtime_ns [0-9]+ is now 1"):
        read_file(path, path.name)


def test_check_unchanged_sees_size_time_and_identity(tmp_path: Path) -> None:
    """ST-25: in-place rewrite, touch, and replacement by rename."""
    path = written(tmp_path, valid_file({"a": filled("U8", (4,))}))
    file, _ = read_file(path, path.name)

    def changes() -> str:
        fd = os.open(path, os.O_RDONLY)
        try:
            file.check_unchanged(fd)
        except SourceChangedError as error:
            return error.message
        finally:
            os.close(fd)
        return ""

    assert changes() == ""
    copy = tmp_path / "copy"
    copy.write_bytes(path.read_bytes())
    os.utime(copy, ns=(file.mtime_ns, file.mtime_ns))
    original = tmp_path / "original"
    path.rename(original)
    copy.rename(path)
    assert "inode" in changes() and "mtime" not in changes()
    original.rename(path)
    assert "ctime_ns" in changes() and "inode" not in changes()  # moved away and back: as after a rewrite
    os.truncate(path, file.bytes - 1)
    os.utime(path, ns=(file.mtime_ns, file.mtime_ns))
    assert f"bytes {file.bytes} is now {file.bytes - 1}" in changes() and "mtime" not in changes()


def test_a_rewrite_in_place_that_puts_the_mtime_back_is_seen(tmp_path: Path) -> None:
    """ST-25: what is read would be of two versions, with the size and the time of one."""
    path = written(tmp_path, valid_file({"a": filled("U8", (4,))}))
    file, _ = read_file(path, path.name)
    data = path.read_bytes()
    eventually = time.monotonic() + 10  # a file system's clock ticks every few milliseconds
    while path.stat().st_ctime_ns == file.ctime_ns and time.monotonic() < eventually:
        with path.open("r+b") as rewritten:
            rewritten.write(data[:-1] + b"!")
        os.utime(path, ns=(file.mtime_ns, file.mtime_ns))
    with path.open("rb") as opened, pytest.raises(SourceChangedError, match="changed while it was read: ctime_ns"):
        file.check_unchanged(opened.fileno())


def test_ten_thousand_tensors_take_little_time(tmp_path: Path) -> None:
    names = [f"model.layers.{i // 9}.mlp.experts.{i % 9}.down_proj.weight" for i in range(10_000)]
    header = {name: entry("BF16", [2, 4], 16 * i, 16 * i + 16) for i, name in enumerate(names)}
    path = written(tmp_path, file_of(header, bytes(160_000)))
    start = time.process_time()  # of this process alone: the machine may be busy
    _, tensors = read_file(path, path.name)
    assert time.process_time() - start < 0.5
    assert [spec.name for spec, _ in tensors] == names
