"""Torch checkpoints and models of the hub's cache, through a real daemon: what followers see is what torch reads."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ftd_client
from tests.process.checkpoints import tiny
from tests.process.daemons import Daemon, ftd
from tests.unit.source.checkpoint_files import write
from tests.unit.source.torch_files import LAYOUTS, bits, same, saved

Start = Callable[..., Daemon]
as_zip = pytest.mark.parametrize("as_zip", LAYOUTS, ids=["zip", "older"])


def state() -> dict[str, torch.Tensor]:
    """Of every kind that is stored in a way of its own."""
    embedding = torch.randn(64, 8)
    return {
        "embed.weight": embedding,
        "head.weight": embedding,
        "layers.0.rows": embedding[3:9],
        "layers.0.conv": torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last),
        "layers.1.turned": torch.randn(700, 900).t(),
        "layers.1.bias": torch.randn(1).expand(16),
        "layers.1.scale": torch.tensor(2.5, dtype=torch.bfloat16),
        "layers.1.none": torch.zeros(0, 3),
        "layers.1.fp8": torch.randn(6).to(torch.float8_e4m3fn),
    }


@as_zip
def test_what_followers_see_is_what_torch_reads(
    start: Start, namespace: str, runtime_dir: Path, tmp_path: Path, as_zip: bool
) -> None:
    """TL-03, TL-04, TL-06: and `ftd verify` finds the same in memory and in the files."""
    path = tmp_path / "checkpoint.pt"
    expected = state()
    path.write_bytes(saved({"step": 3, "note": "x", "model": expected}, as_zip=as_zip))
    if as_zip:  # torch 2.13 writes 8-bit floats in the older layout and cannot read them there
        assert same(torch.load(path, weights_only=True)["model"], expected)
    start("--model", path)
    with ftd_client.attach(namespace) as weights:
        found = weights.state_dict()
        assert same(found, expected)
        assert found["head.weight"].data_ptr() == found["embed.weight"].data_ptr()
    told = ftd("status", "-n", namespace, "--json").json
    once = {tensor.data_ptr() if tensor.numel() else name: tensor.nbytes for name, tensor in found.items()}
    assert told["model"]["bytes"] == sum(once.values()) and told["model"]["tensors"] == len(expected)
    assert any("'model' is taken for the model; left out: step=3, note='x'" in text for text in told["warnings"])
    assert ftd("verify", "-n", namespace, "--source").status == 0


@as_zip
def test_a_model_with_tied_weights_is_bound(
    start: Start, namespace: str, runtime_dir: Path, tmp_path: Path, as_zip: bool
) -> None:
    """Both names are in a torch checkpoint: one parameter where the model ties them, two views of one where not."""

    class Model(nn.Module):
        def __init__(self, *, tied: bool) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(16, 4), nn.Linear(4, 16, bias=False)
            if tied:
                self.head.weight = self.embed.weight

    whole = Model(tied=True)
    write(tmp_path, {"pytorch_model.bin": saved(whole.state_dict(), as_zip=as_zip)})
    start("--model", tmp_path)
    with ftd_client.attach(namespace) as weights:
        for tied in (True, False):
            with torch.device("meta"):
                model = Model(tied=tied)
            report = weights.bind(model)
            assert (model.head.weight is model.embed.weight) is tied
            assert bits(model.head.weight) == bits(model.embed.weight) == bits(whole.embed.weight)
            assert bool(report.tied) is tied and bool(report.shared) is not tied


def test_types_are_left_out_where_the_configuration_allows(
    start: Start, namespace: str, runtime_dir: Path, tmp_path: Path
) -> None:
    """TL-01: the option that the refusal names; a verification later knows it too."""
    weights = {"w": torch.randn(3)}
    write(tmp_path, {"m.pt": saved({"args": argparse.Namespace(lr=0.1), "model": weights})})
    start("--model", tmp_path, "--set", "allow_types=[argparse.Namespace]")
    with ftd_client.attach(namespace) as follower:
        assert same(follower.state_dict(), weights)
    assert ftd("verify", "-n", namespace, "--source").status == 0


def test_shards_of_torch(start: Start, namespace: str, runtime_dir: Path, tmp_path: Path) -> None:
    tensors = state()
    names: dict[str, Any] = {name: f"pytorch_model-{i % 3}.bin" for i, name in enumerate(tensors)}
    for shard in set(names.values()):
        write(tmp_path, {shard: saved({name: tensors[name].clone() for name in names if names[name] == shard})})
    write(tmp_path, {"pytorch_model.bin.index.json": {"weight_map": names}})
    start("--model", tmp_path)
    with ftd_client.attach(namespace) as weights:
        assert same(weights.state_dict(), tensors)


def test_a_model_of_the_cache_by_its_name(
    start: Start, namespace: str, runtime_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, commit = tmp_path / "hub/models--org--name", "c" * 40
    model = tiny(folder / "snapshots" / commit)
    write(folder, {"refs/main": commit})
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert not os.path.lexists("org/name")
    start("--model", "org/name")
    told = ftd("status", "-n", namespace, "--json").json
    assert told["model"]["source"] == str(model)
    assert ftd("verify", "-n", namespace, "--source").status == 0
