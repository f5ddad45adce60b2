"""all-MiniLM-L6-v2, as published by a real daemon, against transformers and safetensors on the same files."""

from __future__ import annotations

import json
import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

import ftd_client
from tests.integration.conftest import Publish
from tests.integration.saved_models import bound, reference, same_bits, same_outputs
from tests.process.daemons import ftd

_SENTENCES = [
    "A weight daemon keeps one copy.",
    "Cats sleep.",
    "The third sentence is a little longer than the others.",
]


def _encoded(directory: Path) -> dict[str, torch.Tensor]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    return dict(tokenizer(_SENTENCES, padding=True, return_tensors="pt"))


def _mapped_from(tensor: torch.Tensor) -> str:
    """Path of the mapping that holds the tensor's first byte."""
    address = tensor.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(None, 5)
        begin, end = (int(bound, 16) for bound in fields[0].split("-"))
        if begin <= address < end:
            return fields[5] if len(fields) > 5 else ""
    raise AssertionError(f"{address:x} is not mapped")


@pytest.mark.parametrize("building", [lambda: torch.device("meta"), ftd_client.meta_parameters])
def test_outputs_are_those_of_from_pretrained_to_the_bit(minilm: Path, publish: Publish, building: Any) -> None:
    context: AbstractContextManager[None] = building()
    with context:
        model = transformers.BertModel(transformers.AutoConfig.from_pretrained(minilm)).eval()
    with ftd_client.attach(publish(minilm)) as weights:
        weights.bind(model)
        assert same_outputs(model, reference(transformers.BertModel, minilm), **_encoded(minilm))


def test_every_tensor_is_the_files_to_the_bit_and_lies_in_the_segment(minilm: Path, publish: Publish) -> None:
    stored = load_file(minilm / "model.safetensors")
    namespace = publish(minilm)
    with ftd_client.attach(namespace) as weights:
        state = weights.state_dict()
        assert state.keys() == stored.keys()
        assert [name for name in stored if not same_bits(state[name], stored[name])] == []
        assert {_mapped_from(tensor) for tensor in state.values()} == {f"/dev/shm/ftd.{namespace}.g1.0"}


def test_loading_on_the_cpu_gives_memory_of_its_own(minilm: Path, publish: Publish) -> None:
    namespace = publish(minilm)
    with torch.device("meta"):
        model = transformers.BertModel(transformers.AutoConfig.from_pretrained(minilm)).eval()
    with ftd_client.attach(namespace) as weights:
        report = weights.load(model, "cpu")
    assert (report.device, report.tensors) == ("cpu", len(list(model.parameters())))
    assert report.bytes == sum(parameter.nbytes for parameter in model.parameters())
    assert not any("/dev/shm/" in _mapped_from(parameter) for parameter in model.parameters())
    ftd("stop", "-n", namespace)
    assert same_outputs(model, reference(transformers.BertModel, minilm), **_encoded(minilm))


def test_a_bound_model_runs_on_after_close_and_stop(minilm: Path, publish: Publish) -> None:
    namespace = publish(minilm)
    with torch.device("meta"):
        model = transformers.BertModel(transformers.AutoConfig.from_pretrained(minilm)).eval()
    with ftd_client.attach(namespace) as weights:
        weights.bind(model)
    assert ftd("stop", "-n", namespace).status == 0
    assert not list(Path("/dev/shm").glob(f"ftd.{namespace}.*"))
    assert same_outputs(model, reference(transformers.BertModel, minilm), **_encoded(minilm))


def test_streamed_from_the_daemon_it_says_the_same(minilm: Path, publish: Publish) -> None:
    namespace, whole = publish(minilm), reference(transformers.BertModel, minilm)
    with torch.device("meta"):
        model = transformers.BertModel(transformers.AutoConfig.from_pretrained(minilm)).eval()
    config = ftd_client.OffloadConfig(
        include_patterns=["encoder.layer.*"], shm_enabled=True, shm_namespace=namespace, pinned_memory=False,
        profiling_iters=2, num_blocks=2, min_blocks=2,
    )  # fmt: skip
    ftd_client.offload(model, config, "minilm")
    try:
        for _ in range(5):
            assert same_outputs(model, whole, **_encoded(minilm))
        (follower,) = json.loads(ftd("status", "-n", namespace, "--json").out)["followers"]
        managed = sum(p.nbytes for p in whole.encoder.parameters())
        assert follower["planned_bytes"] == managed
        assert 0 <= follower["streamed_bytes"] <= managed
    finally:
        ftd_client.release("minilm")
    assert same_outputs(model, whole, **_encoded(minilm))


def test_a_worker_needs_nothing_but_the_namespace(minilm: Path, publish: Publish, tmp_path: Path) -> None:
    with ftd_client.attach(publish(minilm)) as weights:
        weights.write_files(tmp_path)
    assert not list(tmp_path.rglob("*.safetensors"))
    assert transformers.AutoConfig.from_pretrained(tmp_path).to_dict() | {"_name_or_path": ""} == (
        transformers.AutoConfig.from_pretrained(minilm).to_dict() | {"_name_or_path": ""}
    )
    mine, theirs = _encoded(tmp_path), _encoded(minilm)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_a_copy_in_several_shards_is_the_same_model(minilm: Path, publish: Publish, tmp_path: Path) -> None:
    whole = reference(transformers.BertModel, minilm)
    whole.save_pretrained(tmp_path, max_shard_size="20MB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) >= 3 and (tmp_path / "model.safetensors.index.json").exists()
    stored = {name: tensor for path in shards for name, tensor in load_file(path).items()}
    with ftd_client.attach(publish(tmp_path)) as weights:
        state = weights.state_dict()
        assert state.keys() == stored.keys()
        assert [name for name in stored if not same_bits(state[name], stored[name])] == []
        model, report = bound(weights, transformers.BertModel, tmp_path)
        assert report.bound_bytes == sum(os.stat(path).st_size for path in shards) - _header_bytes(shards)
        assert same_outputs(model, whole, **_encoded(minilm))


def _header_bytes(shards: list[Path]) -> int:
    """Eight bytes of length and the header that they announce, of each file."""
    return sum(8 + int.from_bytes(path.read_bytes()[:8], "little") for path in shards)
