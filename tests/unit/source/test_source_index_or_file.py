"""A directory whose standard names lead to different weights is refused; the path of one of them is taken.

`docs/decisions/index-or-file.md`.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from checkpoint_files import INDEX, A, B, filled, index_of, refusal, sharded, valid_file, write

from ftd.source import resolve as resolve_module
from ftd.source.index import is_index
from ftd.source.resolve import resolve

FILE = "model.safetensors"
DIFFUSERS_FILE = "diffusion_pytorch_model.safetensors"
DIFFUSERS_INDEX = "diffusion_pytorch_model.safetensors.index.json"
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


def split(directory: Path) -> Path:
    return sharded(directory, dict(zip(SHARDS, (A, B), strict=True)))


def names(path: Path) -> list[str]:
    return [file.name for file in resolve(path).files]


def test_both_are_refused_with_who_reads_what(tmp_path: Path) -> None:
    """ST-13: transformers would read the file, vLLM the index; a guess would be wrong for one of them."""
    write(split(tmp_path), {FILE: valid_file({**A, **B})})
    error = refusal(tmp_path)
    assert error.message == (
        f"{tmp_path} holds {FILE} and {INDEX} (names {SHARDS[0]}, {SHARDS[1]}):"
        f" different files, of which transformers would read {FILE}"
    )
    assert error.remedy == (
        f"give the path of the one that is meant: --model {tmp_path}/{FILE} or --model {tmp_path}/{INDEX}"
    )


def test_each_path_of_the_remedy_is_taken(tmp_path: Path) -> None:
    """The stray file has other bytes under the same names, so that taking the wrong one shows."""
    other = {name: filled(dtype, shape) for name, (dtype, shape, _) in {**A, **B}.items()}
    write(split(tmp_path), {FILE: valid_file(other), "config.json": "{}", "1_Pooling/config.json": "{}"})
    whole, index = resolve(tmp_path / FILE), resolve(tmp_path / INDEX)
    assert [file.name for file in whole.files] == [FILE]
    assert [file.name for file in index.files] == SHARDS
    assert [sidecar.name for sidecar in index.sidecars] == ["1_Pooling/config.json", "config.json"]
    assert [sidecar.name for sidecar in whole.sidecars] == ["config.json"]
    assert index.path == tmp_path / INDEX
    assert index.notes == (f"ignored 1 file, {INDEX} does not name them: {FILE}",)
    assert index.fingerprint() != whole.fingerprint()


@pytest.mark.parametrize("file", [FILE, DIFFUSERS_FILE])
def test_an_index_of_that_very_file_is_no_conflict(tmp_path: Path, file: str) -> None:
    write(tmp_path, {file: valid_file(A), f"{file}.index.json": index_of({file: list(A)})})
    assert names(tmp_path) == [file]
    assert resolve(tmp_path).notes == ()
    write(tmp_path, {f"{file}.index.json": index_of({file: list(A), "more.safetensors": list(B)})})
    assert "different files" in refusal(tmp_path).message


def test_diffusers_reads_the_index(tmp_path: Path) -> None:
    split(tmp_path)
    (tmp_path / INDEX).rename(tmp_path / DIFFUSERS_INDEX)
    assert names(tmp_path) == SHARDS
    write(tmp_path, {DIFFUSERS_FILE: valid_file(A)})
    error = refusal(tmp_path)
    assert f"of which diffusers would read {DIFFUSERS_INDEX}" in error.message and "transformers" not in error.message
    assert f"--model {tmp_path}/{DIFFUSERS_INDEX} or --model {tmp_path}/{DIFFUSERS_FILE}" in error.remedy
    assert names(tmp_path / DIFFUSERS_INDEX) == SHARDS
    assert names(tmp_path / DIFFUSERS_FILE) == [DIFFUSERS_FILE]


def test_names_of_both_libraries_side_by_side(tmp_path: Path) -> None:
    """Each library would read its own; where both names are one file, there is nothing to ask."""
    write(tmp_path, {FILE: valid_file(A), DIFFUSERS_FILE: valid_file(B)})
    reads = f"transformers would read {FILE} and diffusers would read {DIFFUSERS_FILE}"
    assert reads in refusal(tmp_path).message
    (tmp_path / DIFFUSERS_FILE).unlink()
    (tmp_path / DIFFUSERS_FILE).symlink_to(FILE)
    assert names(tmp_path) == [FILE]


def test_an_index_that_names_nothing_is_no_match_for_a_file(tmp_path: Path) -> None:
    write(tmp_path, {FILE: valid_file(A), INDEX: index_of({})})
    assert f"{INDEX} (names no file)" in refusal(tmp_path).message


def test_a_hundred_shards_make_one_readable_line(tmp_path: Path) -> None:
    write(tmp_path, {FILE: valid_file(A), INDEX: index_of({f"{i}.safetensors": [f"t{i}"] for i in range(100)})})
    message = refusal(tmp_path).message
    assert "and 96 more" in message and len(message) < 500


# --- an index as the path -----------------------------------------------------------------------------------------


def test_the_index_of_a_variant_by_its_path(tmp_path: Path) -> None:
    """Exactly that index: the one of the standard name, broken here, is not looked at."""
    variant = "model.safetensors.index.fp16.json"
    split(tmp_path)
    (tmp_path / INDEX).rename(tmp_path / variant)
    write(tmp_path, {INDEX: "broken", FILE: b"broken"})
    assert names(tmp_path / variant) == SHARDS


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (INDEX, True),
        (DIFFUSERS_INDEX, True),
        ("adapter_model.safetensors.index.json", True),
        ("model.safetensors.index.fp16.json", True),
        ("model.safetensors", False),
        ("config.json", False),
        ("pytorch_model.bin.index.json", True),
        ("model.safetensors.index.json.bak", False),
    ],
)
def test_what_is_an_index(name: str, expected: bool) -> None:
    assert is_index(name) is expected


def test_problems_of_an_index_as_the_path(tmp_path: Path) -> None:
    split(tmp_path)
    (tmp_path / SHARDS[1]).unlink()
    error = refusal(tmp_path / INDEX)
    assert f"1 of 2 files that {INDEX} names missing: {SHARDS[1]}" in error.message
    write(tmp_path, {INDEX: "{"})
    assert f"{tmp_path}/{INDEX}: is not JSON at byte 1" in refusal(tmp_path / INDEX).message


def test_an_index_that_is_a_link_as_in_the_hub_cache(tmp_path: Path) -> None:
    """Its shards lie beside the link, not beside the blob."""
    snapshot = split(tmp_path / "snapshot")
    (tmp_path / "blobs").mkdir()
    (snapshot / INDEX).rename(tmp_path / "blobs" / "abc")
    (snapshot / INDEX).symlink_to("../blobs/abc")
    assert [file.path for file in resolve(snapshot / INDEX).files] == [snapshot / name for name in SHARDS]


def test_an_index_in_a_directory_that_cannot_be_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    split(tmp_path)

    def refused(*args: object, **kwargs: object) -> object:
        raise PermissionError(13, os.strerror(13))

    monkeypatch.setattr(resolve_module, "list_directory", refused)
    assert names(tmp_path / INDEX) == SHARDS
    assert "no sidecars" in resolve(tmp_path / INDEX).notes[0]
