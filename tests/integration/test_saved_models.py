"""Tiny models of real architectures, saved by transformers: ties, types, buffers that no checkpoint holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import ftd_client
from tests.integration.conftest import Publish
from tests.integration.saved_models import (
    bound,
    gpt2,
    llama,
    merges,
    mixtral,
    reference,
    same_outputs,
    stored_names,
    token_ids,
)


@pytest.mark.parametrize(
    ("save", "cls", "embedding"),
    [
        (gpt2, transformers.GPT2LMHeadModel, "transformer.wte.weight"),
        (lambda directory: llama(directory, tied=True), transformers.LlamaForCausalLM, "model.embed_tokens.weight"),
    ],
    ids=["gpt2", "llama"],
)
def test_a_tie_of_which_the_checkpoint_holds_one_name_is_one_parameter(
    save: Callable[[Path], Path], cls: Any, embedding: str, publish: Publish, tmp_path: Path
) -> None:
    directory = save(tmp_path / "model")
    assert embedding in stored_names(directory) and "lm_head.weight" not in stored_names(directory)
    with ftd_client.attach(publish(directory)) as weights:
        model, report = bound(weights, cls, directory)
        assert report.tied == ((embedding, "lm_head.weight"),)
        assert model.lm_head.weight is model.get_input_embeddings().weight
        loaded = reference(cls, directory)
        assert len(report.bound) == len(list(model.parameters())) == len(list(loaded.parameters()))
        assert same_outputs(model, loaded, input_ids=token_ids())


def test_an_untied_head_stays_apart(publish: Publish, tmp_path: Path) -> None:
    directory = llama(tmp_path / "model")
    assert "lm_head.weight" in stored_names(directory)
    with ftd_client.attach(publish(directory)) as weights:
        model, report = bound(weights, transformers.LlamaForCausalLM, directory)
        assert report.tied == () and model.lm_head.weight is not model.get_input_embeddings().weight
        assert same_outputs(model, reference(transformers.LlamaForCausalLM, directory), input_ids=token_ids())


def test_a_model_takes_the_type_of_the_checkpoint_and_says_so(publish: Publish, tmp_path: Path) -> None:
    directory = llama(tmp_path / "model", dtype=torch.bfloat16)
    with ftd_client.attach(publish(directory)) as weights:
        model, report = bound(weights, transformers.LlamaForCausalLM, directory)
        assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
        assert {change.name for change in report.dtype_changes} == set(report.bound) == stored_names(directory)
        assert {(change.built, change.bound) for change in report.dtype_changes} == {(torch.float32, torch.bfloat16)}
        # rotary frequencies are in no checkpoint, and in float32 whatever the weights are
        assert [name for name, _ in model.named_buffers() if name not in report.recomputed] == []
        assert {buffer.dtype for buffer in model.buffers()} == {torch.float32}
        assert same_outputs(model, reference(transformers.LlamaForCausalLM, directory), input_ids=token_ids())


@merges
def test_weights_that_transformers_merges_on_load_are_refused_by_name(publish: Publish, tmp_path: Path) -> None:
    directory = mixtral(tmp_path / "model")
    with ftd_client.attach(publish(directory)) as weights:
        with pytest.raises(ftd_client.BindError) as caught:
            bound(weights, transformers.MixtralForCausalLM, directory)
        lines = "\n".join(caught.value.problems)
        assert "model.layers.0.mlp.experts.gate_up_proj: nothing found in the checkpoint" in lines
        assert "block_sparse_moe.experts.0.w1.weight" in lines


@merges
def test_a_copy_saved_in_the_names_of_the_class_is_bound(publish: Publish, tmp_path: Path) -> None:
    whole = transformers.MixtralForCausalLM.from_pretrained(mixtral(tmp_path / "model"))
    directory = tmp_path / "own"
    whole.save_pretrained(directory, save_original_format=False)
    with ftd_client.attach(publish(directory)) as weights:
        model, _ = bound(weights, transformers.MixtralForCausalLM, directory)
        assert same_outputs(model, reference(transformers.MixtralForCausalLM, directory), input_ids=token_ids())
