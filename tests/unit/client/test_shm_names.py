"""Derived namespaces: the same wherever they are derived, another for anything else, and always valid."""

from __future__ import annotations

import itertools
import os
import re
from pathlib import Path, PurePosixPath

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ftd.config.offload import OffloadConfig
from ftd.errors import FtdError, NamespaceError
from ftd.shm.names import check_namespace
from ftd_client.shm import NamespaceArgumentError, apply_rank_suffix, compute_shm_namespace, ranks_in

CONFIG = OffloadConfig()
HUB = "meta-llama/Llama-3-70B"

texts = st.text(st.characters(), min_size=1, max_size=80)  # surrogates among them
namespaces = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", fullmatch=True)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
ranks = st.integers(0, 300) | st.integers(0, 10**9 - 1)


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "llama-70b"
    path.mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    return path


def test_one_checkpoint_has_one_namespace_however_it_is_named(checkpoint: Path) -> None:
    (checkpoint.parent / "current").symlink_to("llama-70b")
    spellings = [
        checkpoint, str(checkpoint), f"{checkpoint}/", "llama-70b", "./llama-70b//", "current", "~/llama-70b",
        os.fsencode(checkpoint), f"{checkpoint}/../llama-70b/.",
    ]  # fmt: skip
    found = {compute_shm_namespace(spelling, CONFIG) for spelling in spellings}
    assert len(found) == 1
    assert re.fullmatch("llama-70b-[0-9a-f]{12}", found.pop())


def test_namespaces_are_those_of_every_process_and_release() -> None:
    """Golden: workers and whoever starts the creator derive in processes, and maybe releases, of their own."""
    assert compute_shm_namespace(HUB, CONFIG) == "Llama-3-70B-67079f7ea8c4"
    keys = {"revision": "main", "quantization": None, "ranks": 8}
    assert compute_shm_namespace(HUB, CONFIG, keys, "draft") == "Llama-3-70B-046015cf3b6c"
    assert apply_rank_suffix("m" * 64, 0, 1, 2) == "mmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmm-tp0-pp1-ep2-e4b9ade42345"


def test_text_stays_text(checkpoint: Path) -> None:
    before = compute_shm_namespace("org/model", CONFIG)
    assert before == compute_shm_namespace("org/model/", CONFIG)
    assert before == compute_shm_namespace(PurePosixPath("org/model"), CONFIG)
    Path("org/model").mkdir(parents=True)
    assert compute_shm_namespace("org/model", CONFIG) != before, "a directory that exists is that directory"


def test_no_field_of_the_configuration_counts() -> None:
    derived = compute_shm_namespace(HUB, CONFIG)
    other = OffloadConfig(
        shm_enabled=True, shm_namespace=derived, num_blocks=2, min_blocks=2, include_patterns=["layers.*"],
        pinned_memory=False, transfer_mode="strategy", max_gpu_mem_fraction=0.5,
    )  # fmt: skip
    assert compute_shm_namespace(HUB, other) == derived


def test_everything_else_counts() -> None:
    keys = [
        None, [1], [1.0], [True], ["1"], [None], ["1", "2"], ["2", "1"], ["12"], {"a": 1}, {"a": "1"}, {"a": 1, "b": 2},
        ["a", 1], ["a", 1, "b"], {"A": 1}, [""], ["", ""],
    ]  # fmt: skip
    asked = itertools.product([HUB, "meta-llama/Llama-3-8B", "Llama-3-70B"], keys, ["default", "draft"])
    found = [compute_shm_namespace(path, CONFIG, key, manager) for path, key, manager in asked]
    assert len(set(found)) == len(found)


@given(st.dictionaries(st.text(max_size=5), scalars, max_size=5), st.randoms(use_true_random=False))
def test_the_order_of_a_mapping_does_not_count(keys: dict[str, str], random) -> None:
    pairs = list(keys.items())
    random.shuffle(pairs)
    assert compute_shm_namespace(HUB, CONFIG, keys) == compute_shm_namespace(HUB, CONFIG, dict(pairs))


def test_nothing_extra_is_nothing_extra() -> None:
    assert len({compute_shm_namespace(HUB, CONFIG, keys) for keys in (None, [], (), {})}) == 1


@given(path=texts, manager=texts, keys=st.none() | st.lists(scalars, max_size=4))
@example("x" * 300, "default", None)
@example("//", "default", None)
@example("…", "default", [])
@example("-", "default", [])
@example("a\0b", "default", ["\ud800"])
@example("/models/" + "é" * 70 + "/", "default", None)
@example("." * 70, "default", None)
@example("x" * 31 + "--tail", "default", None)
def test_the_result_is_valid_whatever_is_given(path: str, manager: str, keys: list[str] | None) -> None:
    found = compute_shm_namespace(path, CONFIG, keys, manager)
    assert check_namespace(found) == found
    assert found == compute_shm_namespace(path, CONFIG, keys, manager)
    assert len(apply_rank_suffix(found, 127, 127, 127)) <= 64
    assert apply_rank_suffix(found, 127, 127, 127).startswith(found), "the suffix of three digits each fits whole"


@pytest.mark.parametrize(
    ("path", "readable"),
    [
        (HUB, "Llama-3-70B"),
        ("Qwen 2.5 (0.5B) é", "Qwen-2.5-0.5B-e"),
        ("..hidden", "hidden"),
        ("日本", "model"),
        ("m" * 40, "m" * 32),
        ("m" * 31 + "-x", "m" * 31),
    ],
)
def test_the_prefix_is_readable(path: str, readable: str) -> None:
    assert compute_shm_namespace(path, CONFIG).rpartition("-")[0] == readable


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("", CONFIG), "model_path is empty"),
        ((None, CONFIG), "NoneType"),
        ((HUB, {"extra": 1}), "config is a dict"),
        ((HUB, CONFIG, "main"), "extra_keys is a str"),
        ((HUB, CONFIG, ""), "extra_keys is a str"),
        ((HUB, CONFIG, b"main"), "extra_keys is a bytes"),
        ((HUB, CONFIG, {"a", "b"}), "extra_keys is a set"),
        ((HUB, CONFIG, 3), "extra_keys is a int"),
        ((HUB, CONFIG, {1: "a"}), "key 1"),
        ((HUB, CONFIG, {"a": [1]}), "extra_keys[a] is a list"),
        ((HUB, CONFIG, ["x", object()]), "extra_keys[1] is a object"),
        ((HUB, CONFIG, None, ""), "manager_name is ''"),
        ((HUB, CONFIG, None, None), "manager_name is None"),
    ],
)
def test_what_has_no_stable_text_is_refused(arguments: tuple, named: str) -> None:
    with pytest.raises(NamespaceArgumentError, match=re.escape(named)) as caught:
        compute_shm_namespace(*arguments)
    assert isinstance(caught.value, FtdError)
    assert isinstance(caught.value, ValueError)
    assert caught.value.remedy


def test_suffixes_read_as_ranks() -> None:
    assert apply_rank_suffix("llama", 0, 1) == "llama-tp0-pp1"
    assert apply_rank_suffix("llama", 0, 1, 2) == "llama-tp0-pp1-ep2"
    assert apply_rank_suffix("l" * 52, 0, 1, 2) == "l" * 52 + "-tp0-pp1-ep2"
    assert re.fullmatch("l{39}-tp0-pp1-ep2-[0-9a-f]{12}", apply_rank_suffix("l" * 53, 0, 1, 2))


arguments = st.tuples(namespaces, ranks, ranks, st.none() | ranks)


@given(arguments, arguments)
@example(("a" * 64, 0, 0, None), ("a" * 63 + "b", 0, 0, None))
@example(("a-tp0-pp0", 0, 0, None), ("a", 0, 0, None))
@example(("a" * 64, 1, 11, None), ("a" * 64, 11, 1, None))
def test_other_arguments_give_another_valid_name(one: tuple, other: tuple) -> None:
    names = [apply_rank_suffix(*asked) for asked in (one, other)]
    assert [check_namespace(name) for name in names] == names
    assert (names[0] == names[1]) == (one == other)


@given(arguments)
@example(("a" * 64, 1, 11, None))
@example(("a-tp3-pp4", 0, 10**9 - 1, 2))
def test_the_ranks_of_a_name_are_those_that_it_was_made_of(asked: tuple) -> None:
    base, tp, pp, ep = asked
    expected = {"tp": tp, "pp": pp} | ({} if ep is None else {"ep": ep})
    assert ranks_in(apply_rank_suffix(base, tp, pp, ep)) == expected


@pytest.mark.parametrize(
    "name",
    ["llama", "llama-tp0", "llama-pp0-tp1", "llama-tp0-pp1x", "llama-tp-pp1", "tp0-pp1", "llama-tp0-pp1-" + "a" * 12,
     "llama-tp0-pp1234567890", "llama-tp٣-pp1"],
)  # fmt: skip
def test_other_names_have_no_ranks(name: str) -> None:
    assert ranks_in(name) == {}


@given(namespaces, arguments)
def test_a_shortened_name_is_nobodys_whole_name(base: str, asked: tuple) -> None:
    long = apply_rank_suffix(asked[0].ljust(64, "x"), *asked[1:])
    assert re.search(r"-(pp|ep)\d+$", apply_rank_suffix(base[:50], 0, 1))
    assert not re.search(r"-(pp|ep)\d+$", long)


@pytest.mark.parametrize("rank", [-1, True, 1.0, "1", 10**9])
@pytest.mark.parametrize("place", ["tp_rank", "pp_rank", "ep_rank"])
def test_a_rank_is_a_whole_number(place: str, rank: object) -> None:
    with pytest.raises(NamespaceArgumentError, match=place):
        apply_rank_suffix("llama", **({"tp_rank": 0, "pp_rank": 0} | {place: rank}))


@pytest.mark.parametrize("base", ["", "-a", "a" * 65, "a/b", None])
def test_a_base_is_a_namespace(base: str) -> None:
    with pytest.raises(NamespaceError):
        apply_rank_suffix(base, 0, 0)
