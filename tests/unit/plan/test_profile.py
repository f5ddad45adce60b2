import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftd.errors import FtdError
from ftd.plan.profile import (
    MAX_PROFILE_BYTES,
    Identity,
    Profile,
    ProfileMismatchError,
    decode,
    differences,
    encode,
    identify,
    refuse,
)
from ftd.plan.strictjson import MAX_TEXT, ProfileError
from tests.unit.plan.profiles import IDENTITY, PROFILE, identities, on, profiles

GOLDEN = """\
{
  "schema": 1,
  "fingerprint": "6f1d2c3b4a5968778695a4b3c2d1e0f0",
  "device": "NVIDIA H200",
  "torch": "2.11.0+cu130",
  "config": {
    "include_patterns": ["layers.*"],
    "max_gpu_mem_fraction": 0.5,
    "transfer_mode": "raw_block_transfer"
  },
  "forwards": 10,
  "copy": {
    "latency_ns": 9000.0,
    "bytes_per_s": 55400000000.0
  },
  "activation_bytes": 123456789,
  "prefix_ns": 77,
  "order": [
    ["embed", 1000],
    ["layers.0", 250000],
    ["shared", 4000],
    ["layers.1", 260000],
    ["shared", 4100]
  ],
  "unseen": [
    "layers.2.experts.7",
    "layers.2.experts.8"
  ],
  "regions": {
    "tail": ["norm.weight", "lm_head.weight"]
  },
  "resident": {
    "embed": "shares bytes with lm_head"
  }
}
"""


def test_golden_bytes() -> None:
    assert encode(PROFILE).decode() == GOLDEN
    assert decode(GOLDEN.encode()) == PROFILE


@given(profiles)
def test_what_is_encoded_is_decoded(profile: Profile) -> None:
    data = encode(profile)
    found = decode(data)
    assert found == profile
    assert encode(found) == data
    assert identify(data) == profile.identity


def test_lists_and_tuples_of_a_configuration_are_one() -> None:
    tuples = replace(IDENTITY, config={**IDENTITY.config, "include_patterns": ("layers.*",)})
    assert tuples == IDENTITY
    assert encode(replace(PROFILE, identity=tuples)) == GOLDEN.encode()


def test_ten_thousand_units_fit() -> None:
    names = tuple(f"model.language_model.layers.{i // 128}.mlp.experts.{i % 128}.down_proj" for i in range(10_000))
    profile = replace(PROFILE, order=names, compute_ns=tuple(range(10**7, 10**7 + 10_000)))
    data = encode(profile)
    assert len(data) < MAX_PROFILE_BYTES / 2
    assert decode(data) == profile


def test_one_that_is_too_large_is_refused_at_both_ends() -> None:
    names = tuple(f"{i:0{MAX_TEXT}}" for i in range(MAX_PROFILE_BYTES // MAX_TEXT + 1))
    with pytest.raises(ProfileError, match=f"bytes: expected at most {MAX_PROFILE_BYTES}"):
        encode(replace(PROFILE, order=names, compute_ns=(1,) * len(names)))
    with pytest.raises(ProfileError, match=f"a profile of {MAX_PROFILE_BYTES + 1} bytes: expected at most"):
        decode(GOLDEN.encode().ljust(MAX_PROFILE_BYTES + 1))
    assert decode(GOLDEN.encode().ljust(MAX_PROFILE_BYTES)) == PROFILE


# --- what is refused ---------------------------------------------------------------------------------------------


def changed(path: str, value: Any) -> bytes:
    """The golden profile with one value changed."""
    fields = json.loads(GOLDEN)
    *way, last = path.split("/")
    inner = fields
    for step in way:
        inner = inner[int(step) if isinstance(inner, list) else step]
    inner[int(last) if isinstance(inner, list) else last] = value
    return json.dumps(fields).encode()


def without(key: str) -> bytes:
    return json.dumps({k: v for k, v in json.loads(GOLDEN).items() if k != key}).encode()


def nested(depth: int) -> Any:
    return [nested(depth - 1)] if depth else 1


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is not JSON at line 1"),
        (b"\xff{}", "is not UTF-8 at byte 0"),
        (b"[]", "a profile is an array: expected an object"),
        (b"7", "a profile is 7: expected an object"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"schema": 1' + b"0" * 5000 + b"}", "an integer of thousands of digits"),
        (b"{}", "without schema, fingerprint, device, torch, config: expected all of its identity"),
        (without("torch"), "a profile without torch: expected all of its identity"),
        (without("order"), "a profile lacks order: expected exactly schema, fingerprint, "),
        (changed("surprise", 1), "a profile has the unknown 'surprise': expected exactly schema"),
        (GOLDEN.replace('"forwards": 10', '"forwards": 10, "forwards": 10').encode(), "the key 'forwards' twice"),
        (GOLDEN.replace('"tail":', '"tail": [], "tail":').encode(), "the key 'tail' twice: expected it once"),
        (GOLDEN.replace("9000.0", "NaN").encode(), "holds NaN: expected finite numbers"),
        (GOLDEN.replace("9000.0", "-Infinity").encode(), "holds -Infinity: expected finite numbers"),
        (GOLDEN.replace("9000.0", "1e999").encode(), "copy.latency_ns is inf: expected a finite number"),
        (GOLDEN.replace("0.5", "1e999").encode(), "config.max_gpu_mem_fraction is inf: expected a finite number"),
        (changed("schema", 2), "schema is 2: expected 1"),
        (changed("schema", True), "schema is True: expected an integer of 1 or more"),
        (changed("schema", 0), "schema is 0: expected an integer of 1 or more"),
        (changed("fingerprint", ""), "fingerprint is '': expected a text"),
        (changed("device", 3), "device is 3: expected a text"),
        (changed("torch", None), "torch is null: expected a text"),
        (changed("device", "a\nb"), r"device is 'a\\nb': expected printable text of at most 1000"),
        (changed("device", "\ud800"), r"device is '\\ud800': expected printable text"),
        (changed("device", "x" * 1001), "expected printable text of at most 1000"),
        (changed("config", []), "config is an array: expected an object"),
        (changed("config/depth", nested(5)), "config.depth is an array: expected a JSON value, nested at most 4 deep"),
        (changed("forwards", 0), "forwards is 0: expected an integer of 1 or more"),
        (changed("forwards", 1.0), "forwards is 1.0: expected an integer of 1 or more"),
        (changed("prefix_ns", -1), "prefix_ns is -1: expected an integer of 0 or more"),
        (changed("activation_bytes", 1 << 63), "activation_bytes is 9223372036854775808: expected an integer"),
        (changed("copy", None), "copy is null: expected an object"),
        (changed("copy/rate", 1), "copy has the unknown 'rate': expected exactly latency_ns, bytes_per_s"),
        (changed("copy/latency_ns", -1.0), "copy.latency_ns is -1.0: expected 0 or more"),
        (changed("copy/latency_ns", True), "copy.latency_ns is True: expected a finite number"),
        (changed("copy/bytes_per_s", 0), "copy.bytes_per_s is 0.0: expected above 0"),
        (changed("copy/bytes_per_s", 10**400), "copy.bytes_per_s is 1000"),
        (changed("order", {}), "order is an object: expected an array"),
        (changed("order/1", "layers.0"), "an entry of order is 'layers.0': expected an array"),
        (changed("order/1", ["layers.0", 1, 2]), "an entry of order has 3 values: expected a name and its compute_ns"),
        (changed("order/1/0", 7), "a name in order is 7: expected a text"),
        (changed("order/1/1", -7), "a compute_ns in order is -7: expected an integer of 0 or more"),
        (changed("order/1/1", "7"), "a compute_ns in order is '7': expected an integer of 0 or more"),
        (changed("unseen/0", "layers.2.experts.8"), "unseen has 'layers.2.experts.8' twice: expected it once"),
        (changed("unseen/0", "shared"), "unit 'shared' is in order and in unseen: expected it in one"),
        (changed("regions/tail", "norm"), "regions.tail is 'norm': expected an array"),
        (changed("regions/tail", ["a", "a"]), "regions.tail has 'a' twice: expected it once"),
        (changed("resident/embed", ""), "resident.embed is '': expected a text"),
        (changed("resident/embed", None), "resident.embed is null: expected a text"),
    ],
)
def test_what_is_no_profile_is_refused_by_what_is_wrong(data: bytes, message: str) -> None:
    with pytest.raises(ProfileError, match=message) as caught:
        decode(data)
    assert caught.value.remedy
    assert len(caught.value.message) < 400


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.data())
def test_a_changed_profile_is_refused_or_as_good_as_any(data: st.DataObject) -> None:
    """Any value of a valid one replaced by any other, or its bytes cut and overwritten."""
    if data.draw(st.booleans()):
        fields = json.loads(GOLDEN)
        inner, key = data.draw(st.sampled_from(list(places(fields))))
        inner[key] = data.draw(json_values)
        raw = json.dumps(fields).encode()
    else:
        raw = GOLDEN.encode()
        start = data.draw(st.integers(0, len(raw)))
        raw = raw[:start] + data.draw(st.binary(max_size=4)) + raw[start + data.draw(st.integers(0, 4)) :]
    judged(raw)


@given(st.binary(max_size=200) | json_values.map(lambda value: json.dumps(value).encode()))
def test_anything_is_refused_or_a_profile(raw: bytes) -> None:
    judged(raw)


def judged(raw: bytes) -> None:
    try:
        profile = decode(raw)
    except ProfileError:
        return
    assert decode(encode(profile)) == profile


def places(value: Any) -> Any:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield value, key
        yield from places(inner)


@pytest.mark.parametrize(
    "make",
    [
        lambda: replace(PROFILE, compute_ns=(1, 2)),
        lambda: replace(PROFILE, forwards=0),
        lambda: replace(PROFILE, order=(1, 2, 3, 4, 5)),
        lambda: replace(PROFILE, identity=replace(IDENTITY, schema=2)),
        lambda: replace(IDENTITY, config={"x": float("nan")}),
        lambda: replace(IDENTITY, config={"x": object()}),
        lambda: replace(IDENTITY, config={1: 2}),
    ],
)
def test_what_could_not_be_read_again_cannot_be_made(make: Callable[[], object]) -> None:
    with pytest.raises(ProfileError):
        make()


# --- whether one fits --------------------------------------------------------------------------------------------


@given(identities)
def test_equal_identities_do_not_differ(identity: Identity) -> None:
    assert differences(identity, identity) == []
    refuse(identity, Identity.from_map(identity.to_map()))


def test_every_difference_has_a_line() -> None:
    expected = Identity(
        fingerprint="ff",
        device="NVIDIA L4",
        torch="2.6.0",
        config={"include_patterns": ["layers.*", "head"], "max_gpu_mem_fraction": None, "num_blocks": 4},
        schema=2,
    )
    with pytest.raises(ProfileMismatchError) as caught:
        refuse(PROFILE, expected, "p.profile.json")
    assert list(caught.value.differences) == [
        "schema: measured with 1, expected 2",
        'fingerprint: measured with "6f1d2c3b4a5968778695a4b3c2d1e0f0", expected "ff"',
        'device: measured with "NVIDIA H200", expected "NVIDIA L4"',
        'torch: measured with "2.11.0+cu130", expected "2.6.0"',
        'config.include_patterns: measured with ["layers.*"], expected ["layers.*", "head"]',
        "config.max_gpu_mem_fraction: measured with 0.5, expected null",
        "config.num_blocks: measured with nothing, expected 4",
        'config.transfer_mode: measured with "raw_block_transfer", expected nothing',
    ]
    assert caught.value.message == "p.profile.json was measured on something else: 8 differences"
    assert all(line in str(caught.value) for line in caught.value.differences)


@pytest.mark.parametrize(
    ("one", "other", "same"), [(1, 1.0, True), (1, True, False), (0, False, False), (None, 0, False)]
)
def test_numbers_are_compared_as_numbers_and_booleans_as_booleans(one: Any, other: Any, same: bool) -> None:
    found, expected = replace(IDENTITY, config={"x": one}), replace(IDENTITY, config={"x": other})
    assert (differences(found, expected) == []) is same


def test_the_error_crosses_processes() -> None:
    with pytest.raises(ProfileMismatchError) as caught:
        refuse(on(torch="2.6.0"), IDENTITY)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.differences) == (str(caught.value), caught.value.differences)
    assert isinstance(FtdError.from_dict(caught.value.to_dict()), ProfileMismatchError)
