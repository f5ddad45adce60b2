"""Whoever states the hash of a file is found, and nobody else is taken for one."""

import hashlib
import os
import subprocess
from pathlib import Path

import pytest
from huggingface_hub import _local_folder

from ftd.errors import SourceError
from ftd.source.base import SourceFile
from ftd.source.publisher import stated_hashes
from ftd.source.resolve import resolve
from tests.unit.source.checkpoint_files import A, valid_file, write

HASH = "0123456789abcdef" * 4
OTHER = "f" * 64


def file_of(path: Path) -> SourceFile:
    return resolve(path).files[0]


@pytest.fixture
def file(tmp_path: Path) -> SourceFile:
    write(tmp_path, {"model.safetensors": valid_file(A)})
    return file_of(tmp_path)


def test_nobody_states_one(file: SourceFile) -> None:
    assert stated_hashes(file) == {}


# --- a file beside it --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        HASH,
        f"{HASH}\n",
        f"{HASH.upper()}\n",
        f"{HASH}  model.safetensors\n",
        f"{HASH} *model.safetensors\n",
        f"{HASH}  ./some/where/model.safetensors\n",
        f"SHA256 (model.safetensors) = {HASH}\n",
        f"# by hand\n{OTHER}  config.json\n{HASH}  model.safetensors\n",
    ],
)
def test_a_list_beside_it(file: SourceFile, text: str) -> None:
    beside = file.path.with_name("model.safetensors.sha256")
    beside.write_text(text)
    assert stated_hashes(file) == {str(beside): HASH}


@pytest.mark.parametrize(
    "text", ["", "none\n", f"{OTHER}  config.json\n", HASH[1:], f"{HASH}0\n", f"md5 {HASH}", "\0" * 64, "é" * 10]
)
def test_a_list_that_does_not_name_it_is_an_error(file: SourceFile, text: str) -> None:
    """Somebody wanted it compared."""
    beside = file.path.with_name("model.safetensors.sha256")
    beside.write_text(text)
    with pytest.raises(SourceError, match=f"{beside} has no SHA-256 of model.safetensors"):
        stated_hashes(file)


def test_a_list_that_is_none_is_an_error(file: SourceFile) -> None:
    file.path.with_name("model.safetensors.sha256").mkdir()
    with pytest.raises(SourceError, match="sha256 is a directory, expected a regular file"):
        stated_hashes(file)


# --- the hub's cache ---------------------------------------------------------------------------------------------


def _in_cache(root: Path, blob: str) -> SourceFile:
    repository = root / "models--org--name"
    write(repository, {f"blobs/{blob}": valid_file(A)})
    snapshot = repository / "snapshots/abc"
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to(f"../../blobs/{blob}")
    return file_of(snapshot)


def test_a_blob_of_the_cache_is_called_by_its_hash(tmp_path: Path) -> None:
    file = _in_cache(tmp_path, HASH)
    assert stated_hashes(file) == {f"the name of {tmp_path}/models--org--name/blobs/{HASH}": HASH}


def test_so_it_is_behind_another_link(tmp_path: Path) -> None:
    cached = _in_cache(tmp_path, HASH)
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "model.safetensors").symlink_to(cached.path)
    assert list(stated_hashes(file_of(mine)).values()) == [HASH]


@pytest.mark.parametrize("blob", [HASH[:40], HASH + "0", HASH[:-1] + "g", HASH.upper(), "etag"])
def test_other_names_of_blobs_are_no_hash(tmp_path: Path, blob: str) -> None:
    """Small files are called by their git hash, which covers more than the bytes."""
    assert stated_hashes(_in_cache(tmp_path, blob)) == {}


def test_a_file_that_is_called_like_a_hash_is_no_blob(tmp_path: Path) -> None:
    write(tmp_path, {f"{HASH}.safetensors": valid_file(A), HASH: valid_file(A)})
    (tmp_path / "model.safetensors").symlink_to(HASH)
    assert stated_hashes(file_of(tmp_path)) == {}


# --- the hub's downloads into a directory ------------------------------------------------------------------------


def _downloaded(root: Path, name: str, *, etag: str = HASH, saved_s: float = 0.0, text: str | None = None) -> Path:
    metadata = root / ".cache/huggingface/download" / f"{name}.metadata"
    metadata.parent.mkdir(parents=True, exist_ok=True)
    modified_s = (root / name).stat().st_mtime
    metadata.write_text(f"{'c' * 40}\n{etag}\n{modified_s + saved_s}\n" if text is None else text)
    return metadata


def test_a_download_states_its_hash(file: SourceFile) -> None:
    metadata = _downloaded(file.path.parent, "model.safetensors", saved_s=3)
    assert stated_hashes(file) == {str(metadata): HASH}


def test_a_download_of_a_model_below_states_it_at_the_top(tmp_path: Path) -> None:
    write(tmp_path, {"vae/model.safetensors": valid_file(A)})
    metadata = _downloaded(tmp_path, "vae/model.safetensors")
    assert stated_hashes(file_of(tmp_path / "vae")) == {str(metadata): HASH}


def test_the_hub_itself_writes_it_so(file: SourceFile) -> None:
    """Not by its documentation, but by what it does."""
    _local_folder.write_download_metadata(file.path.parent, "model.safetensors", "c" * 40, HASH)
    assert list(stated_hashes(file).values()) == [HASH]


@pytest.mark.parametrize(
    "change",
    [
        {"saved_s": -2},  # written to since
        {"etag": HASH[:40]},
        {"text": ""},
        {"text": HASH},
        {"text": f"c\n{HASH}\n"},
        {"text": f"c\n{HASH}\nnever\n"},
        {"text": f"c\n{HASH}\nnan\n"},
    ],
    ids=str,
)
def test_what_the_hub_would_disregard_is_disregarded(file: SourceFile, change: dict[str, object]) -> None:
    _downloaded(file.path.parent, "model.safetensors", **change)  # type: ignore[arg-type]
    assert stated_hashes(file) == {}


def test_all_who_state_one_are_told(tmp_path: Path) -> None:
    file = _in_cache(tmp_path, HASH)
    beside = file.path.with_name("model.safetensors.sha256")
    beside.write_text(OTHER)
    assert stated_hashes(file) == {
        str(beside): OTHER,
        f"the name of {os.path.realpath(file.path)}": HASH,
    }


def test_sha256sum_is_understood(file: SourceFile) -> None:
    beside = file.path.with_name("model.safetensors.sha256")
    with beside.open("w") as out:
        subprocess.run(["sha256sum", "model.safetensors"], cwd=file.path.parent, stdout=out, check=True)
    assert stated_hashes(file) == {str(beside): hashlib.sha256(file.path.read_bytes()).hexdigest()}
