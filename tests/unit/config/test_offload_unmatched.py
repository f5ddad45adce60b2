"""What somebody reads whose patterns manage nothing."""

import time

import pytest

from ftd.config.selection import ModuleName
from ftd.config.unmatched import MAX_PATTERNS, nearest_modules, nothing_managed

NAMES = ["model.embed.weight", *(f"model.layers.{index}.mlp.up.weight" for index in range(30)), "lm_head.weight"]
CLASSES = {"model.layers": "ModuleList", "lm_head": "Linear", "model.embed": "Embedding"}
PATHS = dict.fromkeys(
    ".".join(name.split(".")[:depth]) for name in NAMES for depth in range(len(name.split("."))) if depth
)
MODULES = [ModuleName("", ("LlamaForCausalLM", "m.LlamaForCausalLM"))] + [
    ModuleName(path, (name, f"m.{name}"))
    for path in PATHS
    for name in [CLASSES.get(path, "LlamaMLP" if path.endswith("mlp") else "LlamaDecoderLayer")]
]


@pytest.mark.parametrize(
    ("pattern", "first"),
    [
        ("layers.*", "model.layers.0"),
        ("model.layer.*", "model.layers.0"),
        ("Model.Layers.*", "model.layers.0"),
        ("name:lmhead", "lm_head"),
        ("model.layers.*.ml", "model.layers.0.mlp"),
        ("class:LLamaDecoder", "class:LlamaDecoderLayer"),
        ("class:*mlp", "class:LlamaMLP"),
    ],
)
def test_the_nearest_names(pattern, first):
    near = nearest_modules(pattern, MODULES)
    assert near[0] == first
    assert len(near) == len(set(near)) == 3


def test_names_that_differ_in_numbers_count_once():
    assert nearest_modules("model.layers.*", MODULES, 30).count("model.layers.0") == 1
    assert not any(name.startswith("model.layers.1") for name in nearest_modules("model.layers.*", MODULES, 30))
    assert nearest_modules("a", []) == ()
    assert nearest_modules("a", [ModuleName("", ("Linear",))]) == ()


def test_patterns_that_match_nothing():
    error = nothing_managed(["layer.*", "class:DecoderLayer"], [], MODULES, NAMES)
    assert str(error) == (
        "nothing to offload: include_patterns ['layer.*', 'class:DecoderLayer'] match no module that holds parameters, "
        "and no parameter; the nearest names are model.layers.0, model.layers.0.mlp, model.layers, "
        "class:LlamaDecoderLayer and class:ModuleList\n  → correct include_patterns"
    )


def test_patterns_that_exclude_everything():
    error = nothing_managed(["model.layers.*"], ["*.mlp"], MODULES, NAMES)
    assert str(error) == (
        "nothing to offload: exclude_patterns ['*.mlp'] take away all that include_patterns ['model.layers.*'] match"
        "\n  → narrow exclude_patterns"
    )


def test_no_patterns_and_no_parameters():
    assert "include_patterns is empty" in nothing_managed([], [], MODULES, NAMES).message
    assert "offload_block()" in nothing_managed([], [], MODULES, NAMES).remedy
    assert nothing_managed(["*"], [], MODULES, []).message == "nothing to offload: the model has no parameters"


def test_a_model_of_one_module_has_no_names_to_suggest():
    message = nothing_managed(["x.*"], [], [ModuleName("", ("Linear",))], ["weight"]).message
    assert message.endswith("match no module that holds parameters, and no parameter")


def test_long_lists_stay_readable():
    error = nothing_managed(["x" * 1000] * 50, [], MODULES, NAMES)
    assert f"and {50 - MAX_PATTERNS} more]" in error.message
    assert len(error.message) < 1200


def test_a_large_model_is_compared_in_bounded_time():
    modules = [ModuleName(f"block{index}x.part{index}y", ("A",)) for index in range(20_000)]
    begun = time.perf_counter()
    assert len(nearest_modules("blok.*", modules)) == 3
    assert time.perf_counter() - begun < 2
