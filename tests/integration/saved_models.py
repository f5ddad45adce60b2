"""Tiny models of real architectures, saved as transformers saves them, and the checks that tests share."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from torch import nn

from ftd_client import BindReport, Follower

_LLAMA = {
    "vocab_size": 160,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

#: Marks a test of names that only transformers 5 changes as it loads.
merges = pytest.mark.skipif(
    int(transformers.__version__.split(".")[0]) < 5, reason="transformers 4 loads weights under the names in the file"
)


def llama(directory: Path, *, tied: bool = False, dtype: torch.dtype = torch.float32) -> Path:
    config = transformers.LlamaConfig(**_LLAMA, tie_word_embeddings=tied)
    return _saved(transformers.LlamaForCausalLM, config, directory, dtype)


def gpt2(directory: Path) -> Path:
    """Tied by default, and of Conv1D modules, whose weights lie transposed."""
    config = transformers.GPT2Config(
        vocab_size=160, n_positions=64, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2
    )
    return _saved(transformers.GPT2LMHeadModel, config, directory, torch.float32)


def mixtral(directory: Path) -> Path:
    """Saved in names that transformers 5 merges as it loads: no module of the class has them."""
    config = transformers.MixtralConfig(**_LLAMA, num_local_experts=2)
    return _saved(transformers.MixtralForCausalLM, config, directory, torch.float32)


def _saved(cls: Any, config: Any, directory: Path, dtype: torch.dtype) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = cls(config).to(dtype)
    model.save_pretrained(directory)
    return directory


def stored_names(directory: Path) -> set[str]:
    """Tensor names of all weight files."""
    names: set[str] = set()
    for path in directory.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            names.update(file.keys())
    return names


def reference(cls: Any, directory: Path) -> nn.Module:
    """What transformers loads, in memory that torch allocated: kernels round by alignment."""
    # transformers 4 makes everything float32 without it
    model: nn.Module = copy.deepcopy(cls.from_pretrained(directory, torch_dtype="auto"))
    return model.eval()


def bound(follower: Follower, cls: Any, directory: Path) -> tuple[nn.Module, BindReport]:
    """The same class on meta with the follower's weights."""
    with torch.device("meta"):
        model = cls(transformers.AutoConfig.from_pretrained(directory))
    report = follower.bind(model)
    return model.eval(), report


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    raw = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*raw)


def same_outputs(one: nn.Module, other: nn.Module, **inputs: torch.Tensor) -> bool:
    """Whether every output tensor of both has the same bits."""
    with torch.inference_mode():
        first, second = one(**inputs), other(**inputs)
    tensors = {name: value for name, value in first.items() if isinstance(value, torch.Tensor)}
    return bool(tensors) and all(same_bits(value, second[name]) for name, value in tensors.items())


def token_ids(count: int = 24, vocabulary: int = 160) -> torch.Tensor:
    return torch.randint(vocabulary, (2, count), generator=torch.Generator().manual_seed(3))
