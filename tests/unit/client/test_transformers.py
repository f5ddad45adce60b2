"""Models of transformers, built on meta both ways and compared with the same class built on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertModel,
    CLIPVisionConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)
from transformers.utils import logging

from ftd_client.bind import bind
from ftd_client.meta import meta_parameters
from ftd_client.walk import walk

from .weights import DictWeights, bits

_SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}


def _bert() -> nn.Module:
    return BertModel(BertConfig(**_SMALL, vocab_size=100))


def _llama() -> nn.Module:
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope["original_max_position_embeddings"] = 32
    config = LlamaConfig(**_SMALL, vocab_size=100, tie_word_embeddings=True, rope_parameters=rope)
    return LlamaForCausalLM(config)


def _t5() -> nn.Module:
    return T5ForConditionalGeneration(T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=2, vocab_size=100))


def _gpt2() -> nn.Module:
    ends = {"bos_token_id": 1, "eos_token_id": 2}
    return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=100, n_positions=32, **ends))


def _whisper() -> nn.Module:
    parts = {f"{part}_{what}": 2 for part in ("encoder", "decoder") for what in ("layers", "attention_heads")}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3}
    config = WhisperConfig(d_model=32, encoder_ffn_dim=64, decoder_ffn_dim=64, vocab_size=100, **parts, **ends)
    return WhisperForConditionalGeneration(config)


def _llava() -> nn.Module:
    vision = CLIPVisionConfig(**_SMALL, image_size=28, patch_size=14)
    return LlavaForConditionalGeneration(LlavaConfig(text_config=LlamaConfig(**_SMALL), vision_config=vision))


#: Builder, and how many non-persistent buffers the model has.
_MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "bert": (_bert, 2),
    "llama": (_llama, 2),
    "t5": (_t5, 0),
    "gpt2": (_gpt2, 0),
    "whisper": (_whisper, 0),
    "llava": (_llava, 3),
}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    yield
    logging.set_verbosity(before)


@pytest.mark.parametrize("way", ["meta device", "meta_parameters"])
@pytest.mark.parametrize("kind", _MODELS)
def test_a_bound_model_is_the_model_built_on_the_cpu(kind: str, way: str) -> None:
    """MD-01, MD-04: every parameter, buffer and tie, to the bit and in the order of `state_dict()`."""
    build, transient = _MODELS[kind]
    torch.manual_seed(1)
    reference = build()
    weights = DictWeights(dict(reference.state_dict(keep_vars=True)))
    with torch.device("meta") if way == "meta device" else meta_parameters():
        model = build()
    assert all(parameter.is_meta for parameter in model.parameters())
    report = bind(model, weights)
    assert len(report.recomputed if way == "meta device" else report.left) == transient
    assert len(report.recomputed) + len(report.left) == transient
    assert _content(model) == _content(reference)
    assert report.dtype_changes == ()
    assert [bits(value) for value in model.state_dict().values()] == [
        bits(value) for value in reference.state_dict().values()
    ]


def test_an_old_checkpoint_of_bert_holds_position_ids() -> None:
    reference = _bert()
    tensors = {**reference.state_dict(), "embeddings.position_ids": torch.zeros(1, 512, dtype=torch.int64)}
    with torch.device("meta"):
        model = _bert()
    report = bind(model, DictWeights(tensors))
    assert report.ignored == ("embeddings.position_ids",)
    assert bits(model.embeddings.position_ids) == bits(reference.embeddings.position_ids)


def test_a_bound_llama_computes_the_reference() -> None:
    reference = _llama().eval()
    with torch.device("meta"):
        model = _llama().eval()
    bind(model, DictWeights({name: tensor.clone() for name, tensor in reference.state_dict().items()}))
    ids = torch.arange(10).reshape(1, 10)
    with torch.no_grad():
        assert bits(model(ids).logits) == bits(reference(ids).logits)


def _content(model: nn.Module) -> list[object]:
    return [(group.names, group.tensor.requires_grad, bits(group.tensor)) for group in walk(model).groups()]
