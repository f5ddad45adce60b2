"""Key maps and shards, which say what a model takes of a checkpoint: names, rows, and what makes no sense."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftd.errors import BindError, UsageError
from ftd.tensorspec import TensorSpec
from ftd_client.choose import Choice, Piece, choose
from ftd_client.ranks import Rank


def chosen(
    names: dict[str, tuple[int, ...]] | list[str],
    key_map: Any = None,
    shard: Any = None,
    rank: Rank | None = None,
    dtype: str = "F32",
) -> Choice:
    shapes = names if isinstance(names, dict) else dict.fromkeys(names, (4, 2))
    specs = {name: TensorSpec(name, dtype, shape) for name, shape in shapes.items()}
    choice = choose(specs, key_map, shard, rank)
    assert choice is not None
    return choice


def names(choice: Choice) -> dict[str, str]:
    """Of the model → of the checkpoint."""
    return {name: piece.stored.name for name, piece in choice.pieces.items()}


def rows(choice: Choice) -> dict[str, tuple[int, int] | None]:
    return {name: piece.rows for name, piece in choice.pieces.items()}


def test_neither_is_no_choice() -> None:
    assert choose({}, None, None, Rank(0, 2)) is None


# --- key maps --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key_map", "expected"),
    [
        ({}, ["model.a", "model.layers.1.w", "model.layers.10.w", "model_ema.a"]),
        ({"model": "m"}, ["m.a", "m.layers.1.w", "m.layers.10.w", "model_ema.a"]),
        ({"model.": "m."}, ["m.a", "m.layers.1.w", "m.layers.10.w", "model_ema.a"]),
        ({"model": ""}, ["a", "layers.1.w", "layers.10.w", "model_ema.a"]),
        ({"": "x"}, ["x.model.a", "x.model.layers.1.w", "x.model.layers.10.w", "x.model_ema.a"]),
        ({"model.layers.1": "first"}, ["model.a", "first.w", "model.layers.10.w", "model_ema.a"]),
        # the longest that fits, and once: what `model` becomes is not looked up again
        ({"model": "model_ema.b", "model_ema": "c", "model.layers": "l"}, ["model_ema.b.a", "l.1.w", "l.10.w", "c.a"]),
        ({"model.a": "model.layers"}, ["model.layers", "model.layers.1.w", "model.layers.10.w", "model_ema.a"]),
        (str.upper, ["MODEL.A", "MODEL.LAYERS.1.W", "MODEL.LAYERS.10.W", "MODEL_EMA.A"]),
    ],
)
def test_prefixes_are_whole_components(key_map: Any, expected: list[str]) -> None:
    olds = ["model.a", "model.layers.1.w", "model.layers.10.w", "model_ema.a"]
    assert names(chosen(olds, key_map)) == dict(zip(expected, olds, strict=True))


@pytest.mark.parametrize("key_map", [{"ema": None}, lambda name: None if name.startswith("ema") else name])
def test_none_leaves_out(key_map: Any) -> None:
    choice = chosen(["a", "ema.a", "ema.b"], key_map)
    assert names(choice) == {"a": "a"}
    assert choice.dropped == ("ema.a", "ema.b")


def test_a_rule_that_fits_nothing_is_told_as_it_was_written() -> None:
    choice = chosen(["a.w", "b.w"], {"a": "c", "b.": "b", "x.": "y", "a.w.z": None})
    assert choice.unmatched_keys == ("x.", "a.w.z")
    assert choice.unmatched(["x"]) == ["x.", "a.w.z"]


def test_two_tensors_for_one_name_are_refused_with_all_of_their_names() -> None:
    with pytest.raises(BindError, match="2 such names") as caught:
        chosen(["a.w", "b.w", "w", "a.v", "v", "u"], {"a": "", "b": ""})
    assert caught.value.problems == (
        "w: a.w and b.w and w found in the checkpoint, one tensor for this name expected",
        "v: a.v and v found in the checkpoint, one tensor for this name expected",
    )


@pytest.mark.parametrize(
    "key_map",
    ["model", 3, {"a": 1}, {1: "a"}, {"a": "b", "a.": "c"}, {"a.w": ""}, lambda name: 1, lambda name: ""],
)
def test_a_key_map_that_is_none_is_refused(key_map: Any) -> None:
    with pytest.raises(UsageError, match="key_map") as caught:
        chosen(["a.w"], key_map)
    assert caught.value.remedy


# --- shards ----------------------------------------------------------------------------------------------------------

_SHAPES: dict[str, tuple[int, ...]] = {
    "layers.0.q.weight": (8, 3), "layers.0.q.bias": (8,), "layers.0.norm.weight": (8,),
    "layers.0.q.scale": (), "layers.10.q.weight": (0, 3), "head.weight": (6, 2, 2),
}  # fmt: skip


@pytest.mark.parametrize("way", [0, "colwise"])
def test_ranks_share_rows_equally(way: object) -> None:
    shard = {"layers.*.q": way, "layers.*.q.scale": None, "head.weight": way}
    for rank in (0, 1):
        assert rows(chosen(_SHAPES, shard=shard, rank=Rank(rank, 2))) == {
            "layers.0.q.weight": (4 * rank, 4 * rank + 4), "layers.0.q.bias": (4 * rank, 4 * rank + 4),
            "layers.0.norm.weight": None, "layers.0.q.scale": None, "layers.10.q.weight": (0, 0),
            "head.weight": (3 * rank, 3 * rank + 3),
        }  # fmt: skip


def test_the_deepest_pattern_counts_and_a_star_is_one_component() -> None:
    for shard in ({"layers": 0, "layers.*.q.scale": None}, {"layers.*.q.scale": None, "layers": 0}):
        found = rows(chosen(_SHAPES, shard=shard, rank=Rank(1, 2)))
        assert found["layers.0.q.scale"] is found["head.weight"] is None
        assert found["layers.0.norm.weight"] == (4, 8)
    choice = chosen(_SHAPES, shard={"layers.*.weight": 0, "*.weight": 0, "hea": 0, "head.w*t": 0}, rank=Rank(0, 2))
    assert choice.unmatched_shards == ("layers.*.weight", "hea")
    assert rows(choice)["layers.0.q.weight"] is None
    # what only the model has is the other name of a tie
    assert choice.unmatched(["layers.0.weight"]) == ["hea"]
    assert choice.unmatched(["hea.x", "y"]) == ["layers.*.weight"]


def test_a_function_gives_slices() -> None:
    asked: dict[str, tuple[int, ...]] = {}
    told = {"layers.0.q.weight": slice(1, 3), "layers.0.q.bias": slice(None, 0), "head.weight": slice(5, None, 1)}

    def shard(name: str, shape: tuple[int, ...]) -> slice | None:
        asked[name] = shape
        return told.get(name)

    found = rows(chosen(_SHAPES, shard=shard))
    assert asked == _SHAPES
    assert found == dict.fromkeys(_SHAPES) | {
        "layers.0.q.weight": (1, 3), "layers.0.q.bias": (0, 0), "head.weight": (5, 6)
    }  # fmt: skip


@pytest.mark.parametrize(
    ("shard", "text"),
    [
        ({"head": 1}, "a slice of dimension 1 found, of dimension 0 expected"),
        ({"head": "rowwise"}, "a slice of dimension 1 found, of dimension 0 expected"),
        ({"head": -1}, "a slice of dimension -1 found, of dimension 0 expected"),
        ({"head": 0}, "6 rows found, a multiple of 4 ranks expected"),
        (lambda name, shape: slice(0, 7), "rows 0:7 found, some of 0:6 expected"),
        (lambda name, shape: slice(-2, None), "rows -2:6 found, some of 0:6 expected"),
        (lambda name, shape: slice(3, 2), "rows 3:2 found, some of 0:6 expected"),
        (lambda name, shape: slice(0, 6, 2), "slice(0, 6, 2) found, whole rows one behind the other expected"),
        (lambda name, shape: slice(0.0, 6), "slice(0.0, 6, None) found, whole rows one behind the other expected"),
    ],
)
def test_what_is_no_view_is_refused_by_name(shard: Any, text: str) -> None:
    with pytest.raises(BindError) as caught:
        chosen({"head.weight": (6, 2)}, shard=shard, rank=Rank(0, 4))
    assert caught.value.problems == (f"head.weight: {text}",)
    assert caught.value.remedy


@pytest.mark.parametrize("shard", [{"*": 0}, lambda name, shape: slice(0, 0)])
def test_a_scalar_has_no_rows(shard: Any) -> None:
    with pytest.raises(BindError) as caught:
        chosen({"a": (), "b": ()}, shard=shard, rank=Rank(0, 1))
    assert [line.split(":")[0] for line in caught.value.problems] == ["a", "b"]


def test_rows_end_at_whole_bytes() -> None:
    with pytest.raises(BindError, match="end inside a byte"):
        chosen({"a": (6,)}, shard=lambda name, shape: slice(1, 3), dtype="F4")
    with pytest.raises(BindError, match="end inside a byte"):
        chosen({"a": (6,)}, shard=lambda name, shape: slice(0, 3), dtype="F4")
    piece = chosen({"a": (6,)}, shard=lambda name, shape: slice(2, 6), dtype="F4").pieces["a"]
    assert (piece.skipped_bytes, piece.spec.nbytes) == (1, 2)


@pytest.mark.parametrize(
    ("shard", "rank"),
    [
        ({"a": 0}, None), ("a", Rank(0, 2)), (0, Rank(0, 2)), ({"a": True}, Rank(0, 2)), ({"a": "rows"}, Rank(0, 2)),
        ({"a": slice(0, 1)}, Rank(0, 2)), ({"a.**": 0}, Rank(0, 2)), ({"": 0}, Rank(0, 2)), ({"a?": 0}, Rank(0, 2)),
        (lambda name, shape: 1, None), (lambda name, shape: (0, 1), None),
    ],
)  # fmt: skip
def test_a_shard_that_is_none_is_refused(shard: Any, rank: Rank | None) -> None:
    with pytest.raises(UsageError, match="shard") as caught:
        chosen(["a"], shard=shard, rank=rank)
    assert caught.value.remedy


def test_a_shard_speaks_of_names_of_the_model() -> None:
    choice = chosen({"old.w": (4,)}, {"old": "new"}, {"new": 0}, Rank(1, 2))
    assert choice.pieces == {"new.w": Piece("new.w", TensorSpec("old.w", "F32", (4,)), (2, 4))}
    assert choice.unmatched_shards == ()
    assert str(choice.pieces["new.w"]) == "old.w[2:4]"


# --- of any names ----------------------------------------------------------------------------------------------------

_PARTS = st.sampled_from(["a", "b", "c", "1", "10", "ß", "模", ""])
_NAMES = st.lists(_PARTS, min_size=1, max_size=4).map(".".join).filter(bool)


@settings(max_examples=300)
@given(st.lists(_NAMES, max_size=8, unique=True), st.dictionaries(_NAMES, st.none() | _NAMES, max_size=4))
def test_a_mapping_does_what_its_rules_say_one_by_one(olds: list[str], rules: dict[str, str | None]) -> None:
    if len({prefix.removesuffix(".") for prefix in rules}) < len(rules):
        return

    def rename(name: str) -> str | None:
        fits = [p for p in rules if f"{name}.".startswith(f"{p.removesuffix('.')}." if p != "." else "")]
        if not fits:
            return name
        prefix = max(fits, key=lambda each: len(each.removesuffix(".")))
        new, rest = rules[prefix], name[len(prefix.removesuffix(".")) :].removeprefix(".")
        return None if new is None else ".".join(part for part in (new.removesuffix("."), rest) if part)

    expected = {old: rename(old) for old in olds}
    kept = [new for new in expected.values() if new is not None]
    run: Callable[[], Choice] = lambda: chosen(olds, rules)  # noqa: E731
    if "" in kept:
        with pytest.raises(UsageError):
            run()
    elif len(set(kept)) < len(kept):
        with pytest.raises(BindError):
            run()
    else:
        assert names(run()) == {new: old for old, new in expected.items() if new is not None}


@given(rows=st.integers(0, 40), world=st.integers(1, 9))
def test_ranks_together_have_every_row_once(rows: int, world: int) -> None:
    taken = []
    for rank in range(world):
        try:
            choice = chosen({"w": (rows, 2)}, shard={"w": 0}, rank=Rank(rank, world))
        except BindError:
            assert rows % world
            return
        found = choice.pieces["w"].rows
        assert found is not None
        taken += range(*found)
    assert taken == list(range(rows))
