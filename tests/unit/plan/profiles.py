"""Profiles for tests: a plain one, and hypothesis strategies of any."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from ftd.plan.cost import CopyCost
from ftd.plan.profile import Identity, Profile
from ftd.plan.strictjson import MAX_COUNT

IDENTITY = Identity(
    fingerprint="6f1d2c3b4a5968778695a4b3c2d1e0f0",
    device="NVIDIA H200",
    torch="2.11.0+cu130",
    config={"include_patterns": ["layers.*"], "max_gpu_mem_fraction": 0.5, "transfer_mode": "raw_block_transfer"},
)
PROFILE = Profile(
    identity=IDENTITY,
    forwards=10,
    order=("embed", "layers.0", "shared", "layers.1", "shared"),
    compute_ns=(1000, 250_000, 4000, 260_000, 4100),
    prefix_ns=77,
    unseen=("layers.2.experts.7", "layers.2.experts.8"),
    regions={"tail": ("norm.weight", "lm_head.weight")},
    resident={"embed": "shares bytes with lm_head"},
    copy=CopyCost(9000.0, 55.4e9),
    activation_bytes=123_456_789,
)


def on(**changes: Any) -> Profile:
    """The plain one, measured on something else."""
    return replace(PROFILE, identity=replace(IDENTITY, **changes))


_characters = st.characters(exclude_categories=("C", "Z"), include_characters=" ")  # str.isprintable
printable = st.text(_characters, max_size=12)
named = st.text(_characters, min_size=1, max_size=12)
counts = st.integers(0, MAX_COUNT)
numbers = st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-MAX_COUNT, MAX_COUNT) | numbers | printable,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(printable, inner, max_size=3),
    max_leaves=3,
).filter(lambda value: _depth(value) <= 4)
identities = st.builds(Identity, named, named, named, st.dictionaries(printable, values, max_size=4))


def _depth(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(_depth, inner), default=0) if isinstance(value, dict | list) else 0


@st.composite
def _profiles(draw: st.DrawFn) -> Profile:
    entries = draw(st.lists(st.tuples(printable, counts), max_size=6))
    order = tuple(name for name, _ in entries)
    return Profile(
        identity=draw(identities),
        forwards=draw(st.integers(1, MAX_COUNT)),
        order=order,
        compute_ns=tuple(compute_ns for _, compute_ns in entries),
        prefix_ns=draw(counts),
        unseen=tuple(draw(st.sets(printable, max_size=4)) - set(order)),
        regions=draw(st.dictionaries(printable, st.lists(printable, unique=True, max_size=3).map(tuple), max_size=3)),
        resident=draw(st.dictionaries(printable, named, max_size=3)),
        copy=CopyCost(draw(st.floats(0, allow_infinity=False)), draw(st.floats(1e-9, allow_infinity=False))),
        activation_bytes=draw(counts),
    )


profiles = _profiles()
