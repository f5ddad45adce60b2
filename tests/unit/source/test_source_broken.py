"""What is said of a checkpoint that is incomplete or broken, and of a path that is none."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from checkpoint_files import INDEX, A, B, filled, index_of, refusal, sharded, valid_file, write

from ftd.errors import ConfigError, SourceChangedError
from ftd.source.resolve import resolve

# --- what is broken -----------------------------------------------------------------------------------------------


def test_all_missing_shards_are_listed(tmp_path: Path) -> None:
    """ST-12."""
    shards = {f"model-{i:05}-of-00004.safetensors": {f"t{i}": filled("U8", (1,))} for i in range(1, 5)}
    sharded(tmp_path, shards)
    for i in (1, 3):
        (tmp_path / f"model-{i:05}-of-00004.safetensors").unlink()
    message = refusal(tmp_path).message
    assert f"2 of 4 files that {INDEX} names missing" in message
    assert "model-00001-of-00004.safetensors, model-00003-of-00004.safetensors" in message


def test_a_hundred_missing_shards_make_one_readable_line(tmp_path: Path) -> None:
    write(tmp_path, {INDEX: index_of({f"{i}.safetensors": [f"t{i}"] for i in range(100)})})
    message = refusal(tmp_path).message
    assert "100 of 100 files" in message and "and 84 more" in message and len(message) < 600


@pytest.mark.parametrize("part", ["byte", "half"])
def test_a_truncated_last_shard_is_named_with_both_sizes(tmp_path: Path, part: str) -> None:
    """ST-09."""
    sharded(tmp_path, {"one.safetensors": A, "two.safetensors": {"b": filled("U8", (4000,))}})
    size = (tmp_path / "two.safetensors").stat().st_size
    cut = size - 1 if part == "byte" else size // 2
    os.truncate(tmp_path / "two.safetensors", cut)
    error = refusal(tmp_path)
    assert (
        f"two.safetensors file is {cut} bytes, its header needs {size}: {size - cut} bytes are missing" in error.message
    )
    assert "download the file again" in error.remedy


def test_missing_and_broken_files_are_told_together(tmp_path: Path) -> None:
    shards = {f"{i}.safetensors": {f"t{i}": filled("U8", (9,))} for i in range(9)}
    sharded(tmp_path, shards)
    (tmp_path / "0.safetensors").unlink()
    for i in range(1, 8):
        os.truncate(tmp_path / f"{i}.safetensors", (tmp_path / f"{i}.safetensors").stat().st_size - i)
    message = refusal(tmp_path).message
    assert "1 of 9 files" in message and "7 of 9 files broken" in message and "and 2 more" in message
    assert all(f"{i}.safetensors file is" in message for i in range(1, 6))


def test_a_tensor_that_its_shard_lacks_is_named(tmp_path: Path) -> None:
    write(tmp_path, {"s.safetensors": valid_file(A), INDEX: index_of({"s.safetensors": [*A, "c.weight", "d.weight"]})})
    error = refusal(tmp_path)
    assert "s.safetensors: lacks 2 tensors that the index takes from it: 'c.weight', 'd.weight'" in error.message


@pytest.mark.parametrize(
    ("shard", "why"),
    [
        ("../evil.safetensors", "leaves the model's directory"),
        ("sub/../../evil.safetensors", "leaves the model's directory"),
        ("/tmp/evil.safetensors", "is an absolute path"),
        ("evil\0.safetensors", "is no file name"),
        ("\ud800.safetensors", "is no file name"),
        ("", "is empty"),
        (".", "is empty"),
    ],
)
def test_shard_names_that_leave_the_directory(tmp_path: Path, shard: str, why: str) -> None:
    """ST-16: refused as written, though the file is there."""
    model = write(tmp_path / "model", {INDEX: {"weight_map": {"a": shard}}})
    write(tmp_path, {"evil.safetensors": valid_file({"a": filled("U8", (1,))})})
    message = refusal(model).message
    assert why in message and INDEX in message


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "is not JSON at byte 1"),
        ("[]", "is JSON but an array"),
        ("", "is not JSON at byte 0"),
        ("{}", "has no usable weight_map: expected an object, found none"),
        ('{"weight_map": []}', "found an array"),
        ('{"weight_map": {"a": 1}}', "assigns tensor 'a' to a number, expected a file name"),
        ('{"weight_map": {"a": "x", "a": "y"}}', "assigns tensor 'a' more than once"),
        ('{"weight_map": {"a": "x"}, "weight_map": {"a": "y"}}', "has the key 'weight_map' more than once"),
        ('{"m": 0, "m": 1, "weight_map": {"a": "x"}, "weight_map": {"a": "y"}}', "has the key 'm' more than once"),
        ('{"weight_map": {"\\ud800": "x"}}', "lone surrogate"),
        ('{"weight_map":' + "[" * 100_000, "nested too deeply"),
        ("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "is a Git LFS pointer"),
    ],
)
def test_a_broken_index(tmp_path: Path, content: str, words: str) -> None:
    message = refusal(write(tmp_path, {INDEX: content, "model.safetensors": valid_file(A)})).message
    assert words in message and f"{tmp_path}/{INDEX}" in message


def test_an_index_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    (tmp_path / INDEX).touch()
    os.truncate(tmp_path / INDEX, 100_000_001)
    assert "is 100000001 bytes, an index has at most 100000000" in refusal(tmp_path).message


def test_an_lfs_pointer_among_shards_is_named(tmp_path: Path) -> None:
    """ST-26."""
    sharded(tmp_path, {"one.safetensors": A, "two.safetensors": B})
    write(tmp_path, {"two.safetensors": "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"})
    error = refusal(tmp_path)
    assert "two.safetensors is no safetensors file: it is a Git LFS pointer" in error.message
    assert "git lfs pull" in error.remedy


def test_a_change_between_shards_is_told_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ST-25: not buried among the broken files, so that a caller may try again."""
    sharded(tmp_path, {"one.safetensors": A, "two.safetensors": B})

    def changed(path: Path, name: str) -> object:
        raise SourceChangedError(f"{path} changed", "wait")

    monkeypatch.setattr("ftd.source.resolve.read_file", changed)
    assert refusal(tmp_path, SourceChangedError).message == f"{tmp_path}/one.safetensors changed"


# --- what is no model ---------------------------------------------------------------------------------------------


def test_paths_that_lead_nowhere_are_usage_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert refusal(tmp_path / "nothing", ConfigError).exit_status == 2
    os.mkfifo("fifo")
    assert "is a fifo" in refusal(tmp_path / "fifo", ConfigError).message
    Path("loop").symlink_to("loop")
    refusal(tmp_path / "loop", ConfigError)
    Path("dangling").symlink_to("gone")
    assert "link to gone, which is missing" in refusal(tmp_path / "dangling", ConfigError).message
    refusal(Path("a\0b"), ConfigError)
    refusal(Path(os.fsdecode(b"caf\xe9")), ConfigError)
    refusal(Path("x" * 5000), ConfigError)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "is an empty directory"),
        ({"m.gguf": b"", "x.onnx": b""}, "has no weights of safetensors or torch; found m.gguf, x.onnx: GGUF/ONNX"),
        ({"training_args.bin": b"", "optimizer.pt": b""}, "has no weights; found optimizer.pt, training_args.bin"),
        ({"README.md": b""}, "found README.md"),
        ({"unet/model.safetensors": b"", "vae/x.safetensors": b""}, "subdirectories do: unet, vae"),
        ({"model.safetensors.incomplete": b""}, "unfinished downloads: model.safetensors.incomplete"),
    ],
)
def test_a_directory_without_weights_says_what_is_there(tmp_path: Path, files: dict[str, Any], words: str) -> None:
    message = refusal(write(tmp_path, files)).message
    assert words in message and str(tmp_path) in message


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """A directory that anybody may enter; pytest's own are closed to others."""
    directory = Path(tempfile.mkdtemp())
    directory.chmod(0o755)
    yield directory
    shutil.rmtree(directory)


@contextlib.contextmanager
def unprivileged() -> Iterator[None]:
    """An effective uid that is not root's, since root is refused nothing."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_file_that_may_not_be_read_says_who_owns_it(open_directory: Path) -> None:
    sharded(open_directory, {"one.safetensors": A, "two.safetensors": B})
    (open_directory / "two.safetensors").chmod(0)
    with unprivileged():
        error, uid = refusal(open_directory), os.geteuid()
    assert "two.safetensors permission denied: the file has mode 0000 and owner" in error.message
    assert f"this process is uid {uid}" in error.message


def test_a_sidecar_that_may_not_be_read_is_skipped(open_directory: Path) -> None:
    write(open_directory, {"model.safetensors": valid_file(A), "config.json": "{}", "sub/x.json": "{}"})
    (open_directory / "config.json").chmod(0)
    (open_directory / "sub").chmod(0)
    with unprivileged():
        checkpoint = resolve(open_directory)
    (open_directory / "sub").chmod(0o700)
    assert checkpoint.sidecars == ()
    assert checkpoint.notes == ("sub: not listed: permission denied", "config.json: sidecar skipped, permission denied")


def test_a_directory_that_may_not_be_entered_says_which(open_directory: Path) -> None:
    locked = open_directory / "locked"
    write(locked / "model", {"model.safetensors": valid_file(A)})
    locked.chmod(0)
    with unprivileged():
        inside, itself = refusal(locked / "model"), refusal(locked)
    locked.chmod(0o700)
    assert f"permission denied: {locked} has mode 0000 and owner" in inside.message and inside.exit_status == 1
    assert itself.message.startswith(f"{locked}: permission denied")


def test_a_lease_is_waited_for(tmp_path: Path) -> None:
    """A file server's lease on a file makes an open that doesn't wait fail: its holder is asked to give way."""
    path = write(tmp_path, {"model.safetensors": valid_file(A)}) / "model.safetensors"
    told, tell = socket.socketpair()
    tell.setblocking(False)
    told.settimeout(30)
    # a handler and no mask: the signal is the process's, and ends it where any thread lets it through, torch's too
    handler, wakeup = signal.signal(signal.SIGIO, lambda *_: None), signal.set_wakeup_fd(tell.fileno())
    with told, tell, ThreadPoolExecutor(1) as pool:
        lease = os.open(path, os.O_RDWR)
        try:
            fcntl.fcntl(lease, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            reader = pool.submit(resolve, path)
            assert told.recv(1) == bytes([signal.SIGIO]), "nobody wants the file"
        finally:
            os.close(lease)
            signal.set_wakeup_fd(wakeup)
            signal.signal(signal.SIGIO, handler)
        assert len(reader.result(30).tensors) == len(A)


def test_no_descriptor_stays_open(tmp_path: Path) -> None:
    sharded(tmp_path, {"one.safetensors": A, "two.safetensors": B, "three.safetensors": {"c": filled("U8", (1,))}})
    os.truncate(tmp_path / "three.safetensors", 30)
    before = len(os.listdir("/proc/self/fd"))
    refusal(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before
