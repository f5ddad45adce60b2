"""Models by their names on the hub: found in the cache as huggingface_hub lays it out, never asked of the network."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from checkpoint_files import A, filled, valid_file, write
from huggingface_hub import constants, snapshot_download

from ftd.errors import ConfigError, SourceError
from ftd.hubname import split_hub_name
from ftd.source.hub import cache_directory, snapshot
from ftd.source.resolve import resolve

OLD, NEW = "0" * 39 + "1", "0" * 39 + "2"


def cached(cache: Path, *, repository: str = "org/name", revisions: dict[str, str] | None = None) -> Path:
    """A cache with two snapshots, whose files are links to blobs; gives the folder of the model."""
    folder = cache / f"models--{repository.replace('/', '--')}"
    for commit in (OLD, NEW):
        blob = write(folder / "blobs", {commit: valid_file({"a": filled("F32", (2, 3))})}) / commit
        place = folder / "snapshots" / commit
        place.mkdir(parents=True)
        (place / "model.safetensors").symlink_to(os.path.relpath(blob, place))
    for revision, commit in (revisions or {"main": NEW, "v1.0": OLD, "refs/pr/3": OLD}).items():
        write(folder / "refs", {revision: commit})
    return folder


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"HF_HUB_CACHE": str(tmp_path / "hub"), "HOME": str(tmp_path / "home")}


@pytest.mark.parametrize(
    ("name", "commit"),
    [
        ("org/name", NEW), ("org/name@main", NEW), ("org/name@v1.0", OLD), ("org/name@refs/pr/3", OLD),
        (f"org/name@{OLD}", OLD), (f"org/name@{NEW}", NEW),
    ],
)  # fmt: skip
def test_every_way_to_say_a_revision(tmp_path: Path, environ: dict[str, str], name: str, commit: str) -> None:
    folder = cached(tmp_path / "hub")
    checkpoint = resolve(Path(name), (), environ)
    assert checkpoint.path == folder / "snapshots" / commit
    assert [file.path for file in checkpoint.files] == [folder / "snapshots" / commit / "model.safetensors"]


def test_the_library_finds_the_same(tmp_path: Path, environ: dict[str, str]) -> None:
    cached(tmp_path / "hub")
    for revision in ("main", "v1.0", "refs/pr/3", OLD):
        theirs = snapshot_download("org/name", revision=revision, cache_dir=tmp_path / "hub", local_files_only=True)
        assert snapshot(f"org/name@{revision}", environ) == Path(theirs)


def test_what_is_not_there_names_the_command(tmp_path: Path, environ: dict[str, str]) -> None:
    cached(tmp_path / "hub")
    with pytest.raises(ConfigError) as caught:
        resolve(Path("org/other"), (), environ)
    assert caught.value.message == (
        f"model org/other is neither a path nor, at revision main, in the hub's cache {tmp_path}/hub"
    )
    assert "run `hf download org/other` first" in caught.value.remedy and caught.value.exit_status == 2
    with pytest.raises(ConfigError) as caught:
        resolve(Path("org/name@v2"), (), environ)
    assert "at revision v2" in caught.value.message and "found there: main, refs/pr/3, v1.0" in caught.value.message
    assert "`hf download org/name --revision v2`" in caught.value.remedy


def test_a_path_goes_first(tmp_path: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    cached(tmp_path / "hub")
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "org/name", {"model.safetensors": valid_file(A)})
    assert resolve(Path("org/name"), (), environ).path == tmp_path / "org/name"
    with pytest.raises(ConfigError, match="is missing"):
        resolve(tmp_path / "no/such", (), environ)


def test_a_half_finished_download(tmp_path: Path, environ: dict[str, str]) -> None:
    """ST-09 of the cache: the link is there, the blob is not; or nothing but a configuration."""
    folder = cached(tmp_path / "hub")
    (folder / "blobs" / NEW).rename(folder / "blobs" / f"{NEW}.incomplete")
    with pytest.raises(SourceError, match="which is missing"):
        resolve(Path("org/name"), (), environ)
    (folder / "snapshots" / NEW / "model.safetensors").unlink()
    write(folder / "snapshots" / NEW, {"config.json": {}})
    with pytest.raises(SourceError, match=r"has no weights; found config\.json"):
        resolve(Path("org/name"), (), environ)


@pytest.mark.parametrize("content", [b"", b"main", b"\xff" * 40, NEW.encode() * 2, b"../../x"])
def test_a_ref_that_holds_no_commit(tmp_path: Path, environ: dict[str, str], content: bytes) -> None:
    folder = cached(tmp_path / "hub")
    (folder / "refs/main").write_bytes(content)
    with pytest.raises(ConfigError, match="neither a path nor"):
        resolve(Path("org/name"), (), environ)
    (folder / "refs/main").write_bytes(NEW.encode() + b"\n")
    assert snapshot("org/name", environ) == folder / "snapshots" / NEW


def test_a_ref_that_is_no_file(tmp_path: Path, environ: dict[str, str]) -> None:
    """A fifo nobody writes to is no wait without an end; a branch may be the beginning of another one's name."""
    folder = cached(tmp_path / "hub")
    os.mkfifo(folder / "refs/fifo")
    with pytest.raises(ConfigError, match="is a fifo, expected a regular file"):
        snapshot("org/name@fifo", environ)
    with pytest.raises(ConfigError, match="neither a path nor"):
        snapshot("org/name@refs/pr", environ)


def test_where_the_cache_is(tmp_path: Path) -> None:
    home = {"HOME": "/h"}
    assert cache_directory(home) == Path("/h/.cache/huggingface/hub")
    assert cache_directory({**home, "XDG_CACHE_HOME": "/x"}) == Path("/x/huggingface/hub")
    assert cache_directory({**home, "XDG_CACHE_HOME": "/x", "HF_HOME": "/y"}) == Path("/y/hub")
    assert cache_directory({"HF_HOME": "/y", "HUGGINGFACE_HUB_CACHE": "/z"}) == Path("/z")
    assert cache_directory({"HUGGINGFACE_HUB_CACHE": "/z", "HF_HUB_CACHE": "/c"}) == Path("/c")
    assert cache_directory({"HF_HUB_CACHE": ""} | home) == Path("/h/.cache/huggingface/hub")
    assert cache_directory(os.environ) == Path(constants.HF_HUB_CACHE), "as the library says"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("org/name", ("org/name", "main")),
        ("Org-1/na.me_2", ("Org-1/na.me_2", "main")),
        ("org/name@v1", ("org/name", "v1")),
        ("org/name@refs/pr/1", ("org/name", "refs/pr/1")),
        ("org/name@a--b.git", ("org/name", "a--b.git")),
        ("name", None), ("/org/name", None), ("./org/name", None), ("../name", None), ("org/name/", None),
        ("org/name/file", None), ("org/name@", None), ("org/name@../x", None), ("org//name", None), ("~/name", None),
        ("org/na--me", None), ("org/name.git", None), ("org/имя", None), ("org/na me", None), ("org/name@/x", None),
        ("-org/name", None), ("", None),
    ],
)  # fmt: skip
def test_what_is_a_name(text: str, expected: tuple[str, str] | None) -> None:
    assert split_hub_name(text) == expected
