"""Which files of a directory are the model, and what is said when they are not."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoint_files import Tensors, file_of, filled, index_of, sharded, valid_file, write

from ftd.errors import ConfigError, FtdError, SourceChangedError, SourceError
from ftd.source.resolve import resolve

INDEX = "model.safetensors.index.json"
A: Tensors = {"a.weight": filled("F32", (2, 3)), "a.bias": filled("F32", (2,))}
B: Tensors = {"b.weight": filled("BF16", (5,))}


def refusal(path: Path, kind: type[FtdError] = SourceError) -> FtdError:
    with pytest.raises(FtdError) as caught:
        resolve(path)
    assert type(caught.value) is kind
    assert caught.value.remedy
    return caught.value


def names(path: Path) -> list[str]:
    return [tensor.spec.name for tensor in resolve(path).tensors]


# --- which files --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["model.safetensors", "diffusion_pytorch_model.safetensors", "adapter_model.safetensors"]
)
def test_one_file_in_a_directory(tmp_path: Path, name: str) -> None:
    checkpoint = resolve(write(tmp_path, {name: valid_file(A)}))
    assert (checkpoint.path, checkpoint.kind, checkpoint.notes) == (tmp_path, "safetensors", ())
    assert [file.name for file in checkpoint.files] == [name]
    assert [tensor.spec.name for tensor in checkpoint.tensors] == ["a.weight", "a.bias"]


def test_the_standard_name_wins_and_the_rest_is_noted(tmp_path: Path) -> None:
    write(tmp_path, {"diffusion_pytorch_model.safetensors": valid_file(B), "model.safetensors": valid_file(A)})
    assert resolve(tmp_path).files[0].name == "model.safetensors"
    assert "diffusion_pytorch_model.safetensors" in resolve(tmp_path).notes[0]


def test_a_file_by_itself(tmp_path: Path) -> None:
    write(tmp_path, {"x.safetensors": valid_file(A), "y.safetensors": valid_file(B)})
    checkpoint = resolve(tmp_path / "y.safetensors")
    assert checkpoint.path == tmp_path / "y.safetensors"
    assert [file.name for file in checkpoint.files] == ["y.safetensors"]
    assert checkpoint.notes == ()


def test_one_shard_given_as_a_file_is_noted(tmp_path: Path) -> None:
    write(tmp_path, {"model-00001-of-00012.safetensors": valid_file(A)})
    assert "is one of 12 shards" in resolve(tmp_path / "model-00001-of-00012.safetensors").notes[0]


def test_several_files_without_an_index_are_listed(tmp_path: Path) -> None:
    write(tmp_path, {f"model-0000{i}-of-00002.safetensors": valid_file(A) for i in (1, 2)})
    error = refusal(tmp_path)
    assert "model-00001-of-00002.safetensors, model-00002-of-00002.safetensors" in error.message
    assert "path of the one to load" in error.remedy


def test_only_files_of_the_index_are_read(tmp_path: Path) -> None:
    """ST-13: a second split, a consolidated file and files in subdirectories are ignored, and said to be."""
    sharded(tmp_path, {"model-00001-of-00002.safetensors": A, "model-00002-of-00002.safetensors": B})
    second = {f"model-0000{i}-of-00008.safetensors": b"broken, and not looked at" for i in range(1, 9)}
    write(tmp_path, {**second, "model.safetensors": valid_file({**A, **B}), "onnx/model.safetensors": b""})
    checkpoint = resolve(tmp_path)
    assert [file.name for file in checkpoint.files] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    assert sum(tensor.spec.nbytes for tensor in checkpoint.tensors) == 24 + 8 + 10
    ignored, below = checkpoint.notes
    assert ignored.startswith("ignored 9 files") and all(name in ignored for name in [*second, "model.safetensors"])
    assert "onnx/model.safetensors" in below


def test_only_tensors_that_the_index_takes_are_taken(tmp_path: Path) -> None:
    shared = {"shared": filled("U8", (3,))}
    write(
        tmp_path,
        {
            "one.safetensors": valid_file({**A, **shared}),
            "two.safetensors": valid_file({**B, **shared, "stray": filled("U8", (1,))}),
            INDEX: index_of({"one.safetensors": [*A, "shared"], "two.safetensors": list(B)}),
        },
    )
    checkpoint = resolve(tmp_path)
    assert [(tensor.spec.name, tensor.file) for tensor in checkpoint.tensors] == [
        ("a.weight", 0),
        ("a.bias", 0),
        ("shared", 0),
        ("b.weight", 1),
    ]
    assert checkpoint.notes == (
        "two.safetensors: ignored 2 tensors that the index does not take from it: shared, stray",
    )


def test_the_index_of_diffusers(tmp_path: Path) -> None:
    sharded(tmp_path, {"diffusion_pytorch_model-00001-of-00001.safetensors": A})
    (tmp_path / INDEX).rename(tmp_path / "diffusion_pytorch_model.safetensors.index.json")
    assert names(tmp_path) == ["a.weight", "a.bias"]


def test_shards_in_a_subdirectory_and_spelled_twice(tmp_path: Path) -> None:
    index = {"weight_map": {"a.weight": "sub/one.safetensors", "a.bias": "./sub//one.safetensors"}}
    write(tmp_path, {"sub/one.safetensors": valid_file(A), INDEX: index})
    checkpoint = resolve(tmp_path)
    assert [file.name for file in checkpoint.files] == ["sub/one.safetensors"]
    assert len(checkpoint.tensors) == 2 and checkpoint.notes == ()


@pytest.mark.parametrize("metadata", [..., {}, None])
def test_metadata_in_shards(tmp_path: Path, metadata: Any) -> None:
    """ST-06."""
    write(tmp_path, {"s.safetensors": valid_file(A, metadata=metadata), INDEX: index_of({"s.safetensors": list(A)})})
    assert names(tmp_path) == list(A)


def test_a_shard_without_tensors_is_nothing_to_do(tmp_path: Path) -> None:
    """ST-07: beside the index; alone it is no model."""
    sharded(tmp_path, {"model-00001-of-00002.safetensors": A, "model-00002-of-00002.safetensors": {}})
    assert names(tmp_path) == list(A)
    alone = write(tmp_path / "alone", {"model.safetensors": valid_file({}, metadata={"format": "pt"})})
    assert "has no tensor in it" in refusal(alone).message
    nothing = write(tmp_path / "nothing", {INDEX: {"weight_map": {}}})
    assert "has no tensor in it" in refusal(nothing).message


def test_the_malformed_header_of_a_file_without_tensors(tmp_path: Path) -> None:
    """ST-07: file name and byte position."""
    write(tmp_path, {"model.safetensors": file_of('{},"__metadata__":{"key":"value"}}  ')})
    assert f"{tmp_path}/model.safetensors: is not JSON at byte 10" in refusal(tmp_path).message


# --- the hub's cache ----------------------------------------------------------------------------------------------


def test_files_that_are_links_as_in_the_hub_cache(tmp_path: Path) -> None:
    """ST-16: the name as written is checked, not where the link leads."""
    snapshot = tmp_path / "models--org--m" / "snapshots" / "abc"
    sharded(snapshot, {"one.safetensors": A, "two.safetensors": B})
    blobs = tmp_path / "models--org--m" / "blobs"
    blobs.mkdir()
    for path in list(snapshot.iterdir()):
        path.rename(blobs / f"blob-{path.name}")
        path.symlink_to(f"../../blobs/blob-{path.name}")
    checkpoint = resolve(snapshot)
    assert [file.path for file in checkpoint.files] == [snapshot / "one.safetensors", snapshot / "two.safetensors"]
    assert checkpoint.files[0].inode == (blobs / "blob-one.safetensors").stat().st_ino
    (blobs / "blob-two.safetensors").unlink()
    assert (
        "two.safetensors (is a link to ../../blobs/blob-two.safetensors, which is missing)" in refusal(snapshot).message
    )
    assert "snapshots/" in refusal(tmp_path / "models--org--m").remedy


def test_a_linked_directory_is_pinned_to_where_it_leads(tmp_path: Path) -> None:
    write(tmp_path / "v1", {"model.safetensors": valid_file(A)})
    (tmp_path / "current").symlink_to("v1")
    checkpoint = resolve(tmp_path / "current")
    assert checkpoint.path == tmp_path / "v1"
    assert checkpoint.fingerprint() == resolve(tmp_path / "v1").fingerprint()


def test_a_linked_file_keeps_its_place(tmp_path: Path) -> None:
    write(tmp_path, {"blobs/abc": valid_file(A), "snapshot/config.json": "{}"})
    link = tmp_path / "snapshot" / "model.safetensors"
    link.symlink_to("../blobs/abc")
    checkpoint = resolve(link)
    assert checkpoint.path == link
    assert [sidecar.name for sidecar in checkpoint.sidecars] == ["config.json"]


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
    assert "hf download org/model" in refusal(Path("org/model"), ConfigError).remedy
    write(tmp_path, {INDEX: index_of({})})
    assert str(tmp_path) in refusal(tmp_path / INDEX, ConfigError).remedy


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "is an empty directory"),
        ({"pytorch_model.bin": b"", "config.json": b""}, "found pytorch_model.bin: torch, not supported yet"),
        ({"m.gguf": b"", "pytorch_model.bin": b""}, "GGUF/torch, not supported yet"),
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


# --- the fingerprint ----------------------------------------------------------------------------------------------


def test_the_fingerprint_does_not_depend_on_the_order_of_the_index(tmp_path: Path) -> None:
    sharded(tmp_path, {"one.safetensors": A, "two.safetensors": B})
    before = resolve(tmp_path).fingerprint()
    assert len(before) == 32 and int(before, 16)
    index = json.loads((tmp_path / INDEX).read_text())
    index["weight_map"] = dict(reversed(index["weight_map"].items()))
    write(tmp_path, {INDEX: index})
    assert resolve(tmp_path).fingerprint() == before


@pytest.mark.parametrize("change", ["touch", "replace", "header", "index", "sidecar", "path", "rename"])
def test_the_fingerprint_depends_on_what_would_be_served(tmp_path: Path, change: str) -> None:
    model = sharded(tmp_path / "m", {"one.safetensors": A, "two.safetensors": {**B, "extra": filled("U8", (4,))}})
    write(model, {"config.json": "{}"})
    before = resolve(model).fingerprint()
    path = model / "two.safetensors"
    if change == "touch":
        os.utime(path, ns=(1, 1))
    elif change == "replace":
        status = path.stat()
        (model / "copy").write_bytes(path.read_bytes())
        os.utime(model / "copy", ns=(status.st_mtime_ns, status.st_mtime_ns))
        (model / "copy").rename(path)
    elif change == "header":
        # same file, size and time: only the header's bytes say it
        status = path.stat()
        path.write_bytes(path.read_bytes().replace(b'"U8"', b'"I8"'))
        os.utime(path, ns=(status.st_mtime_ns, status.st_mtime_ns))
    elif change == "index":
        write(model, {INDEX: index_of({"one.safetensors": list(A), "two.safetensors": list(B)})})
    elif change == "sidecar":
        write(model, {"config.json": '{"x": 1}'})
    elif change == "path":
        model = model.rename(tmp_path / "n")
    else:
        path.rename(model / "three.safetensors")
        text = (model / INDEX).read_text().replace("two.safetensors", "three.safetensors")
        write(model, {INDEX: text})
    assert resolve(model).fingerprint() != before


def test_no_descriptor_stays_open(tmp_path: Path) -> None:
    sharded(tmp_path, {"one.safetensors": A, "two.safetensors": B, "three.safetensors": {"c": filled("U8", (1,))}})
    os.truncate(tmp_path / "three.safetensors", 30)
    before = len(os.listdir("/proc/self/fd"))
    refusal(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before
