"""Which files of a directory are the model where some are torch's. `docs/decisions/index-or-file.md`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoint_files import INDEX, A, refusal, sharded, valid_file, write
from torch_files import saved

from ftd.source.resolve import resolve

TORCH = saved({"a": torch.ones(2)})
SAFE = valid_file(A)
TORCH_INDEX = "pytorch_model.bin.index.json"
SHARD = {"weight_map": {"a": "s.bin"}}


@pytest.mark.parametrize(
    ("files", "read"),
    [
        ({"pytorch_model.bin": TORCH}, ["pytorch_model.bin"]),
        ({"diffusion_pytorch_model.bin": TORCH}, ["diffusion_pytorch_model.bin"]),
        ({"s.bin": TORCH, TORCH_INDEX: SHARD}, ["s.bin"]),
        ({"best.pt": TORCH}, ["best.pt"]),
        ({"adapter_model.bin": TORCH, "training_args.bin": b"", "optimizer.pt": b"", "scheduler.pt": b"",
          "rng_state.pth": b"", "rng_state_0.pth": b"", "scaler.pt": b""}, ["adapter_model.bin"]),
        ({"model.safetensors": SAFE, "pytorch_model.bin": TORCH}, ["model.safetensors"]),
        ({"model.safetensors": SAFE, "s.bin": TORCH, TORCH_INDEX: SHARD}, ["model.safetensors"]),
        ({"diffusion_pytorch_model.safetensors": SAFE, "diffusion_pytorch_model.bin": TORCH},
         ["diffusion_pytorch_model.safetensors"]),
        ({"any.safetensors": SAFE, "any.bin": TORCH}, ["any.safetensors"]),
        ({"pytorch_model.bin": TORCH, "other.bin": TORCH}, ["pytorch_model.bin"]),
    ],
)  # fmt: skip
def test_what_is_read(tmp_path: Path, files: dict[str, bytes], read: list[str]) -> None:
    checkpoint = resolve(write(tmp_path, files))
    assert [file.name for file in checkpoint.files] == read
    told = "\n".join(checkpoint.notes)
    beside = [name for name in files if name.endswith(".bin") and name not in read and name != "training_args.bin"]
    assert all(name in told for name in beside)
    assert "training_args" not in told


def test_an_index_of_safetensors_goes_before_torch(tmp_path: Path) -> None:
    sharded(tmp_path, {"one.safetensors": A})
    write(tmp_path, {"pytorch_model.bin": TORCH})
    checkpoint = resolve(tmp_path)
    assert [file.name for file in checkpoint.files] == ["one.safetensors"]
    assert "safetensors is preferred: pytorch_model.bin" in checkpoint.notes[0]


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"pytorch_model.bin": TORCH, "s.bin": TORCH, TORCH_INDEX: SHARD}, "different files, of which transformers"),
        ({"pytorch_model.bin": TORCH, "diffusion_pytorch_model.bin": TORCH}, "diffusers would read diffusion_pytorch"),
        ({"model.safetensors": SAFE, "diffusion_pytorch_model.bin": TORCH}, "transformers would read model."),
        ({"pytorch_model.bin": TORCH, "adapter.safetensors": SAFE}, "adapter.safetensors under no name that they look"),
        ({"a.pt": TORCH, "b.pt": TORCH}, f"has 2 torch files and no {TORCH_INDEX}: a.pt, b.pt"),
        ({"unet/pytorch_model.bin": TORCH}, "has no weights itself; its subdirectories do: unet"),
    ],
)  # fmt: skip
def test_what_is_not_guessed(tmp_path: Path, files: dict[str, bytes], words: str) -> None:
    error = refusal(write(tmp_path, files))
    assert words in error.message and error.remedy


def test_the_paths_of_the_remedy_are_taken(tmp_path: Path) -> None:
    write(tmp_path, {"pytorch_model.bin": TORCH, "adapter.safetensors": SAFE})
    for name in ("pytorch_model.bin", "adapter.safetensors"):
        assert f"--model {tmp_path}/{name}" in refusal(tmp_path).remedy
        assert [file.name for file in resolve(tmp_path / name).files] == [name]


def test_a_link_of_both_names_to_one_file_is_no_conflict(tmp_path: Path) -> None:
    write(tmp_path, {"pytorch_model.bin": TORCH})
    (tmp_path / "diffusion_pytorch_model.bin").symlink_to("pytorch_model.bin")
    assert [file.name for file in resolve(tmp_path).files] == ["pytorch_model.bin"]


def test_an_index_may_name_shards_of_both_formats(tmp_path: Path) -> None:
    weight_map = {"a": "s.bin", "a.weight": "s.safetensors"}
    write(tmp_path, {"s.bin": TORCH, "s.safetensors": SAFE, INDEX: {"weight_map": weight_map}})
    checkpoint = resolve(tmp_path)
    assert checkpoint.kind == "safetensors and torch" and len(checkpoint.tensors) == 2
