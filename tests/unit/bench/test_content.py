"""What is measured with: the checkpoint, and how its content is compared."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from tests.bench import checkpoint, digest, loaders

MIB = 1 << 20


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> checkpoint.Checkpoint:
    return checkpoint.write(tmp_path_factory.mktemp("model"), 16 * MIB, layers=6)


def test_a_checkpoint_has_the_tensors_and_about_the_bytes_that_were_asked_for(
    written: checkpoint.Checkpoint,
) -> None:
    tensors = load_file(written.file)
    assert len(tensors) == written.tensors == 6 * 9 + 3
    assert sum(tensor.nbytes for tensor in tensors.values()) == written.nbytes
    assert written.nbytes == pytest.approx(16 * MIB, rel=0.15)


@pytest.mark.parametrize("gib", [0.25, 1, 4, 8, 16, 64])
def test_its_size_is_what_was_asked_for_within_a_percent_and_the_small_tensors(gib: float) -> None:
    asked = int(gib * (1 << 30))
    width, hidden = checkpoint._shape(asked, checkpoint.LAYERS)
    layers = checkpoint.LAYERS * 2 * (4 * width**2 + 3 * width * hidden + 2 * width)
    assert layers == pytest.approx(asked, rel=0.01)


def test_transformers_takes_its_directory_for_a_llama(written: checkpoint.Checkpoint) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.from_pretrained(written.folder)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in load_file(written.file).items()}
    assert {name: tuple(parameter.shape) for name, parameter in model.named_parameters()} == shapes
    assert json.loads((written.folder / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_a_digest_is_that_of_the_bytes_whoever_read_them(written: checkpoint.Checkpoint) -> None:
    assert digest.of(load_file(written.file)) == loaders.source_digest(str(written.file), "cpu")["digest"]


def test_a_digest_changes_with_a_bit_a_place_and_a_name() -> None:
    one, other = torch.arange(64, dtype=torch.int64), torch.arange(64, 128, dtype=torch.int64)
    whole = digest.of({"a": one, "b": other})
    flipped = one.clone()
    flipped[13] ^= 1 << 62
    swapped = one.clone()
    swapped[3], swapped[4] = one[4], one[3]
    for tensors in (
        {"a": flipped, "b": other}, {"a": swapped, "b": other}, {"a": other, "b": one}, {"a": one},
        {"a": one, "c": other},
    ):  # fmt: skip
        assert digest.of(tensors) != whole
    assert digest.of({"b": other, "a": one.view(torch.bfloat16).reshape(4, -1)}) == whole


def test_a_tensor_that_was_left_in_the_files_mapping_is_told_from_a_copy(written: checkpoint.Checkpoint) -> None:
    mapped = load_file(written.file)
    assert loaders._in_mapping_of(str(written.file), mapped)
    copied = {name: tensor.clone() for name, tensor in mapped.items()}
    assert not loaders._in_mapping_of(str(written.file), copied)


def test_a_cooled_file_is_out_of_the_page_cache_and_a_warm_one_in_it(written: checkpoint.Checkpoint) -> None:
    if checkpoint.cool(written.file) > 0:
        pytest.skip("this filesystem keeps its pages")
    checkpoint.warm(written.file)
    assert checkpoint.cached(written.file) == pytest.approx(1, abs=0.01)
