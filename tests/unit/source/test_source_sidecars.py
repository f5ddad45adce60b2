"""Which files travel with the weights."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from checkpoint_files import filled, valid_file, write

from ftd.source import resolve as resolve_module
from ftd.source.base import Checkpoint
from ftd.source.resolve import resolve
from ftd.source.sidecars import MAX_SIDECAR_BYTES, MAX_SIDECARS, is_sidecar

WEIGHTS = valid_file({"a": filled("U8", (1,))})


def names(checkpoint: Checkpoint) -> list[str]:
    return [sidecar.name for sidecar in checkpoint.sidecars]


@pytest.mark.parametrize(
    "name",
    [
        "config.json", "tokenizer.json", "merges.txt", "vocab.txt", "spiece.model", "tokenizer.model.v3", "vocab.bpe",
        "qwen.tiktoken", "chat_template.jinja", "1_Pooling/config.json", "source.spm", "bpe.codes", "tokenizer",
    ],
)  # fmt: skip
def test_what_a_loader_needs(name: str) -> None:
    assert is_sidecar(name)


@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin.index.json",
        "diffusion_pytorch_model.safetensors.index.fp16.json", "pytorch_model.bin", "tokenizer.bin", "vocab.npy",
        "modeling_x.py", "tokenization_x.py", "tokenizer.py", "vocab.safetensors", ".hidden.json", "README.md", "a.png",
    ],
)  # fmt: skip
def test_what_never_travels(name: str) -> None:
    assert not is_sidecar(name)


def test_the_directory_and_one_level_below(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "model.safetensors": WEIGHTS,
            "config.json": "{}",
            "1_Pooling/config.json": '{"a":1}',
            "a/b/config.json": "{}",
            ".cache/x.json": "{}",
            "modeling.py": "",
        },
    )
    checkpoint = resolve(tmp_path)
    assert names(checkpoint) == ["1_Pooling/config.json", "config.json"]
    pooling = checkpoint.sidecars[0]
    assert (pooling.path, pooling.bytes) == (tmp_path / "1_Pooling/config.json", 7)
    assert pooling.mtime_ns == pooling.path.stat().st_mtime_ns
    assert checkpoint.notes == ()


def test_a_single_file_has_its_directory_s_top_level(tmp_path: Path) -> None:
    write(tmp_path, {"x.safetensors": WEIGHTS, "config.json": "{}", "1_Pooling/config.json": "{}"})
    assert names(resolve(tmp_path / "x.safetensors")) == ["config.json"]


def test_links_count_if_they_lead_to_regular_files(tmp_path: Path) -> None:
    model = write(tmp_path / "snapshots" / "abc", {"model.safetensors": WEIGHTS})
    write(tmp_path, {"blobs/1": "{}"})
    (model / "config.json").symlink_to("../../blobs/1")
    (model / "gone.json").symlink_to("../../blobs/2")
    (model / "folder.json").symlink_to("../../blobs")
    (model / "linked").symlink_to(tmp_path, target_is_directory=True)
    os.mkfifo(model / "pipe.txt")
    checkpoint = resolve(model)
    assert names(checkpoint) == ["config.json"]
    assert checkpoint.sidecars[0].bytes == 2
    assert checkpoint.notes == (
        "gone.json: sidecar skipped, no such file or directory",
        "pipe.txt: sidecar skipped, no regular file",
    )


def test_small_files_first_and_what_does_not_fit_is_noted(tmp_path: Path) -> None:
    write(tmp_path, {"model.safetensors": WEIGHTS, "config.json": "{}"})
    # sparse: sizes are what counts
    for name, size in (("a.json", MAX_SIDECAR_BYTES - 2), ("b.json", MAX_SIDECAR_BYTES - 1)):
        (tmp_path / name).touch()
        os.truncate(tmp_path / name, size)
    checkpoint = resolve(tmp_path)
    assert names(checkpoint) == ["a.json", "config.json"]
    assert sum(sidecar.bytes for sidecar in checkpoint.sidecars) == MAX_SIDECAR_BYTES
    assert checkpoint.notes == ("sidecars skipped, beyond 32.00 MiB and 1024 files in all: b.json (32.00 MiB)",)


def test_a_dump_of_small_files_is_cut(tmp_path: Path) -> None:
    write(tmp_path, {"model.safetensors": WEIGHTS, **{f"{i:04}.txt": "" for i in range(MAX_SIDECARS + 20)}})
    checkpoint = resolve(tmp_path)
    assert len(checkpoint.sidecars) == MAX_SIDECARS
    assert "1024.txt (0 B)" in checkpoint.notes[0] and "and 4 more" in checkpoint.notes[0]


def test_names_that_are_not_utf8_are_noted(tmp_path: Path) -> None:
    write(tmp_path, {"model.safetensors": WEIGHTS})
    with open(os.fsencode(tmp_path) + b"/caf\xe9.json", "wb"):
        pass
    checkpoint = resolve(tmp_path)
    assert names(checkpoint) == []
    assert checkpoint.notes == ("caf\\udce9.json: ignored, its name is not UTF-8",)


def test_a_directory_that_cannot_be_listed_costs_a_single_file_its_sidecars(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, {"x.safetensors": WEIGHTS, "config.json": "{}"})

    def refused(*args: object, **kwargs: object) -> object:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(resolve_module, "list_directory", refused)
    checkpoint = resolve(tmp_path / "x.safetensors")
    assert len(checkpoint.tensors) == 1 and names(checkpoint) == []
    assert "no sidecars" in checkpoint.notes[0] and "permission denied" in checkpoint.notes[0]
