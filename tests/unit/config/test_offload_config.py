"""OffloadConfig by itself: defaults, bounds, rules between fields, copies."""

import itertools
import math
import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from ftd.config import offload_fields
from ftd.config.fields import expected_of
from ftd.config.offload import OffloadConfig
from ftd.errors import NamespaceError
from ftd.shm import names

DEFAULTS = {
    "enabled": True,
    "gpu_device": 0,
    "pinned_memory": True,
    "pinned_memory_mode": "torch",
    "shm_enabled": False,
    "shm_namespace": None,
    "shm_wait_timeout": 0.0,
    "discovery_iters": 1,
    "skip_discovery": False,
    "profiling_iters": 10,
    "external_compile": False,
    "transfer_budget_scale": 1.0,
    "transfer_mode": "allocation_block_transfer",
    "num_blocks": 4,
    "min_blocks": 4,
    "max_gpu_mem_fraction": None,
    "profile_storage_dir": None,
    "profile_read_only": False,
    "load_strategy": None,
    "enable_instrumentation": False,
    "instrumentation_output_dir": ".ftd/instrumentation",
    "offload_timing": "off",
    "piecewise_prefetch": "warn",
    "include_patterns": ["*"],
    "exclude_patterns": [],
    "enable_diagnostics": False,
    "profile_mode": "view",
}
FLAGS = [key for key, value in DEFAULTS.items() if isinstance(value, bool)]
NUMBERS = [key for key, value in DEFAULTS.items() if isinstance(value, int | float) and key not in FLAGS]
MODES = ["allocation_block_transfer", "raw_block_transfer", "strategy"]
TIMINGS = ["off", "eager", "cuda_graph"]
PROFILE_MODES = ["view", "getter", "torch_function"]


def test_the_contracts_fields_in_its_order_with_its_defaults():
    assert OffloadConfig().model_dump() == DEFAULTS
    assert list(OffloadConfig.model_fields) == list(DEFAULTS)


def test_lists_of_two_configurations_are_two_lists():
    first = OffloadConfig()
    first.include_patterns.append("a")
    assert OffloadConfig().include_patterns == ["*"]


class Plain:
    pass


STRATEGY = Plain()


@pytest.mark.parametrize(
    ("key", "value", "kept"),
    [
        ("gpu_device", 0, 0),
        ("gpu_device", "7", 7),
        ("discovery_iters", 0, 0),
        ("profiling_iters", 0, 0),
        ("profiling_iters", 2.0, 2),
        ("shm_wait_timeout", 0, 0.0),
        ("shm_wait_timeout", 1e9, 1e9),
        ("transfer_budget_scale", 1e-9, 1e-9),
        ("transfer_budget_scale", 3, 3.0),
        ("max_gpu_mem_fraction", 1, 1.0),
        ("max_gpu_mem_fraction", 1e-9, 1e-9),
        ("max_gpu_mem_fraction", "0.9", 0.9),
        ("min_blocks", 2, 2),
        ("num_blocks", 1000, 1000),
        ("enabled", "no", False),
        ("enabled", 0, False),
        ("shm_namespace", "", ""),
        ("shm_namespace", "a" * 64, "a" * 64),
        ("profile_storage_dir", Path("/p/q"), "/p/q"),
        ("instrumentation_output_dir", "50%/x", "50%/x"),
        ("load_strategy", STRATEGY, STRATEGY),
        ("include_patterns", [], []),
        ("include_patterns", ("a.*", " b "), ["a.*", "b"]),
        ("exclude_patterns", ["class: *Expert* ", "name: a"], ["class:*Expert*", "name:a"]),
    ],
)
def test_accepted(key, value, kept):
    assert getattr(OffloadConfig(**{key: value}), key) == kept


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("enabled", "maybe"),
        ("enabled", 2),
        ("enabled", None),
        ("gpu_device", -1),
        ("gpu_device", 1.5),
        ("gpu_device", "1.0"),
        ("gpu_device", "1_0"),
        ("gpu_device", "cuda:0"),
        ("gpu_device", None),
        ("pinned_memory_mode", "mlock"),
        ("pinned_memory_mode", "Torch"),
        ("shm_namespace", "a" * 65),
        ("shm_namespace", "../x"),
        ("shm_namespace", "a b"),
        ("shm_namespace", 5),
        ("shm_wait_timeout", -1),
        ("shm_wait_timeout", math.inf),
        ("shm_wait_timeout", math.nan),
        ("shm_wait_timeout", None),
        ("discovery_iters", -1),
        ("profiling_iters", -1),
        ("transfer_budget_scale", 0),
        ("transfer_budget_scale", -0.5),
        ("transfer_budget_scale", math.inf),
        ("transfer_budget_scale", math.nan),
        ("transfer_mode", "allocation"),
        ("num_blocks", 1),
        ("min_blocks", 1),
        ("max_gpu_mem_fraction", 0),
        ("max_gpu_mem_fraction", 1.0000001),
        ("max_gpu_mem_fraction", 90),
        ("max_gpu_mem_fraction", math.nan),
        ("max_gpu_mem_fraction", "90%"),
        ("profile_storage_dir", ""),
        ("profile_storage_dir", "a\0b"),
        ("instrumentation_output_dir", None),
        ("instrumentation_output_dir", ""),
        ("load_strategy", "auto"),
        ("load_strategy", 1),
        ("load_strategy", {"name": "auto"}),
        ("load_strategy", Plain),
        ("offload_timing", "on"),
        ("offload_timing", False),
        ("piecewise_prefetch", "raise"),
        ("profile_mode", "views"),
        ("include_patterns", "layers.*"),
        ("include_patterns", None),
        ("include_patterns", [3]),
        ("include_patterns", [None]),
        ("include_patterns", [""]),
        ("include_patterns", ["  "]),
        ("include_patterns", ["class:"]),
        ("include_patterns", ["name: "]),
        ("exclude_patterns", ["cls:Foo"]),
        ("exclude_patterns", ["Class:Foo"]),
        ("exclude_patterns", ["a..b"]),
        ("exclude_patterns", ["a."]),
        ("exclude_patterns", ['"a"']),
    ],
)
def test_rejected(key, value):
    with pytest.raises(ValueError) as caught:
        OffloadConfig(**{key: value})
    assert {error["loc"][0] for error in caught.value.errors()} == {key}


@pytest.mark.parametrize("key", [*NUMBERS, "max_gpu_mem_fraction"])
@pytest.mark.parametrize("value", [True, False])
def test_a_boolean_is_no_number(key, value):
    with pytest.raises(ValidationError, match="a boolean where a number is meant"):
        OffloadConfig(**{key: value})


def test_an_unknown_field_names_the_nearest():
    with pytest.raises(ValidationError, match="unknown field 'numblocks': the nearest known one is 'num_blocks'"):
        OffloadConfig(numblocks=3)
    with pytest.raises(ValidationError, match=r"'include_pattern'.*'include_patterns'; .*'gpu'.*'gpu_device'"):
        OffloadConfig(include_pattern=["a"], gpu=1)


@given(st.text(st.sampled_from("aZ09._-/ é"), max_size=4) | st.integers(62, 66).map(lambda count: "n" * count))
def test_a_namespace_is_accepted_exactly_where_a_daemon_can_have_it(text):
    assert names.NAMESPACE_RULE == offload_fields.NAMESPACE_RULE
    try:
        names.check_namespace(text)
    except NamespaceError:
        if text:
            with pytest.raises(ValidationError):
                OffloadConfig(shm_namespace=text)
    else:
        assert OffloadConfig(shm_enabled=True, shm_namespace=text).shm_namespace == text


def wrong_fields(**values):
    try:
        OffloadConfig(**values)
    except ValidationError as error:
        return {detail["loc"][0] for detail in error.errors()}
    return set()


@pytest.mark.parametrize(("enabled", "name"), [*itertools.product([True, False], [None, "", "ns"])])
def test_shared_memory_needs_a_namespace(enabled, name):
    expected = {"shm_namespace"} if enabled and not name else set()
    assert wrong_fields(shm_enabled=enabled, shm_namespace=name) == expected
    if name is None:
        assert wrong_fields(shm_enabled=enabled) == expected


@pytest.mark.parametrize(
    ("mode", "compiled", "timing", "profile"), [*itertools.product(MODES, [True, False], TIMINGS, PROFILE_MODES)]
)
def test_what_goes_with_a_transfer_mode(mode, compiled, timing, profile):
    blocks = mode != "strategy"
    expected = set()
    if compiled and not blocks:
        # the mode is then no value to compare others with
        expected = {"transfer_mode"}
    else:
        if timing != "off" and not blocks:
            expected.add("offload_timing")
        if profile == "torch_function" and blocks:
            expected.add("profile_mode")
    found = wrong_fields(transfer_mode=mode, external_compile=compiled, offload_timing=timing, profile_mode=profile)
    assert found == expected


@pytest.mark.parametrize(("most", "fewest"), [*itertools.product([None, 2, 3, 4, 5], repeat=2)])
def test_the_search_range_of_blocks_is_not_empty(most, fewest):
    values = {key: value for key, value in (("num_blocks", most), ("min_blocks", fewest)) if value}
    assert wrong_fields(**values) == ({"min_blocks"} if (fewest or 4) > (most or 4) else set())


def test_pinning_modes_go_with_everything():
    for pinned, mode in itertools.product([True, False], ["torch", "host_register"]):
        assert wrong_fields(pinned_memory=pinned, pinned_memory_mode=mode) == set()


def test_a_copy_is_validated_and_keeps_what_was_set_explicitly():
    config = OffloadConfig(num_blocks=5, gpu_device=0)
    copied = config.model_copy(update={"min_blocks": 2})
    assert copied == OffloadConfig(num_blocks=5, min_blocks=2)
    assert copied.model_fields_set == {"num_blocks", "gpu_device", "min_blocks"}
    assert config.model_copy().model_fields_set == {"num_blocks", "gpu_device"}
    assert config.min_blocks == 4
    for update in ({"min_blocks": 6}, {"num_blocks": 3}, {"gpu_device": True}, {"nope": 1}, {"shm_enabled": True}):
        with pytest.raises(ValidationError):
            config.model_copy(update=update)


def test_assignment_is_not_validated_but_its_copy_is():
    config = OffloadConfig()
    config.include_patterns.append("layers.*")
    assert config.model_copy().include_patterns == ["*", "layers.*"]
    config.gpu_device = -1
    with pytest.raises(ValidationError):
        config.model_copy()
    assert config.model_copy(update={"gpu_device": 1}).gpu_device == 1


@pytest.mark.parametrize("deep", [True, False])
def test_a_copy_shares_no_list_and_a_shallow_one_the_strategy(deep):
    config = OffloadConfig(include_patterns=["a"], load_strategy=STRATEGY)
    copied = config.model_copy(deep=deep)
    copied.include_patterns.append("b")
    assert config.include_patterns == ["a"]
    assert (copied.load_strategy is STRATEGY) is not deep


def test_it_crosses_processes_and_has_a_schema():
    config = OffloadConfig(exclude_patterns=["a"], max_gpu_mem_fraction=0.5)
    assert pickle.loads(pickle.dumps(config)) == config
    assert OffloadConfig.model_validate_json(config.model_dump_json()) == config
    assert set(OffloadConfig.model_json_schema()["properties"]) == set(DEFAULTS)


@pytest.mark.parametrize("key", DEFAULTS)
def test_every_field_says_what_it_is_what_it_expects_and_its_variable(key):
    info = OffloadConfig.model_fields[key]
    assert expected_of(info)
    first, *_, last = info.description.split("\n\n")
    assert len(first) > 30
    assert last == f"Environment: `FT_{key.upper()}`." or (key == "enabled" and f"`FT_{key.upper()}`" in last)
