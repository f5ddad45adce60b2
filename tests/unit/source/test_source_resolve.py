"""Which files and tensors of a directory are the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checkpoint_files import INDEX, A, B, file_of, filled, index_of, refusal, sharded, valid_file, write

from ftd.source.resolve import resolve


def names(path: Path) -> list[str]:
    return [tensor.spec.name for tensor in resolve(path).tensors]


@pytest.mark.parametrize(
    "name", ["model.safetensors", "diffusion_pytorch_model.safetensors", "adapter_model.safetensors"]
)
def test_one_file_in_a_directory(tmp_path: Path, name: str) -> None:
    checkpoint = resolve(write(tmp_path, {name: valid_file(A)}))
    assert (checkpoint.path, checkpoint.kind, checkpoint.notes) == (tmp_path, "safetensors", ())
    assert [file.name for file in checkpoint.files] == [name]
    assert [tensor.spec.name for tensor in checkpoint.tensors] == ["a.weight", "a.bias"]


def test_the_standard_name_wins_and_the_rest_is_noted(tmp_path: Path) -> None:
    write(tmp_path, {"adapter_model.safetensors": valid_file(B), "model.safetensors": valid_file(A)})
    assert resolve(tmp_path).files[0].name == "model.safetensors"
    assert resolve(tmp_path).notes == ("ignored 1 file, only model.safetensors is read: adapter_model.safetensors",)


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
    """ST-13: a second split, a consolidated file and files in subdirectories are ignored, and said to be.

    What a stray `model.safetensors` does is in `test_source_index_or_file.py`.
    """
    sharded(tmp_path, {"model-00001-of-00002.safetensors": A, "model-00002-of-00002.safetensors": B})
    second = {f"model-0000{i}-of-00008.safetensors": b"broken, and not looked at" for i in range(1, 9)}
    write(tmp_path, {**second, "consolidated.safetensors": valid_file({**A, **B}), "onnx/model.safetensors": b""})
    checkpoint = resolve(tmp_path)
    assert [file.name for file in checkpoint.files] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    assert sum(tensor.spec.nbytes for tensor in checkpoint.tensors) == 24 + 8 + 10
    ignored, below = checkpoint.notes
    assert ignored.startswith("ignored 9 files") and all(
        name in ignored for name in [*second, "consolidated.safetensors"]
    )
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
