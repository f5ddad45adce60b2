"""Models of transformers and diffusers, small, made from their configurations without any download."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from tests.streamed_case import Call, Case, case

_SMALL = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64}


def _tokens(count: int = 6) -> torch.Tensor:
    return torch.randint(3, 64, (2, count))


@case
def llama() -> Case:
    """Decoder layers of linears and norms, a rotary table as a buffer outside of them."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(**_SMALL, num_key_value_heads=2, vocab_size=64, use_cache=False)
    model = AutoModelForCausalLM.from_config(config)
    return Case(model, (Call((_tokens(),)), Call((_tokens(1),))), ("model.layers.*",))


@case
def mixtral() -> Case:
    """Experts that the tokens choose: of a layer's bytes a forward reads some."""
    from transformers import AutoModelForCausalLM, MixtralConfig

    config = MixtralConfig(
        **_SMALL, num_key_value_heads=2, vocab_size=64, num_local_experts=4, num_experts_per_tok=2, use_cache=False
    )
    model = AutoModelForCausalLM.from_config(config)
    return Case(model, (Call((_tokens(),)), Call((_tokens(1),))), ("model.layers.*",))


@case
def t5() -> Case:
    """Two stacks; the first block of each owns the position bias that the others use; one embedding for all."""
    from transformers import AutoModelForSeq2SeqLM, T5Config

    config = T5Config(
        d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=64, use_cache=False, decoder_start_token_id=0
    )
    model = AutoModelForSeq2SeqLM.from_config(config)
    call = Call(kwargs={"input_ids": _tokens(), "decoder_input_ids": _tokens(4)})
    return Case(model, (call,), ("encoder.block.*", "decoder.block.*"))


def unet() -> Case:
    """Blocks whose outputs wait for a block of the other side; convolutions, group norms, cross attention."""
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(8, 16),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=8,
        attention_head_dim=4,
        norm_num_groups=4,
    )
    call = Call((torch.randn(1, 4, 8, 8), torch.tensor(7), torch.randn(1, 3, 8)))
    return Case(model, (call,), ("down_blocks.*", "mid_block", "up_blocks.*"))


if find_spec("diffusers") is not None:
    case(unet)
