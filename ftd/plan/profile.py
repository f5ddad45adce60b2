"""A profile: what was measured of one model on one kind of GPU, its file format, and whether it fits.

The format is JSON, for people too: `docs/format.md` has the fields. What a profile was measured on, its identity,
stands first and under the same names in every schema, so that any reader can say why a file does not fit.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from ftd.plan import strictjson
from ftd.plan.cost import CopyCost
from ftd.plan.strictjson import REMEDY, ProfileError, found_text
from ftd.units import MIB

#: Version of the fields below the identity; another one is refused.
SCHEMA = 1

#: A forward that enters 10,000 units with names of 50 characters takes 0.75 MB. Parsing the worst that fits takes a
#: fraction of a second and 50 MB, which a daemon can bear.
MAX_PROFILE_BYTES = 2 * MIB


class ProfileMismatchError(ProfileError):
    """A profile was measured on something else.

    Attributes:
        differences: one line each, all of them; empty where the error crossed a wire as text.
    """

    code = "profile_mismatch"
    differences: tuple[str, ...] = ()

    def __init__(self, message: str, remedy: str = "", differences: Iterable[str] = ()) -> None:
        super().__init__(message, remedy)
        self.differences = tuple(differences)
        self.args = (message, remedy, self.differences)

    def __str__(self) -> str:
        lines = [self.message, *(f"  · {difference}" for difference in self.differences)]
        return "\n".join([*lines, f"  → {self.remedy}"] if self.remedy else lines)


@dataclass(frozen=True, slots=True)
class Identity:
    """What a profile was measured on. Two that are equal are interchangeable; it is also what a reader expects.

    Args:
        fingerprint: of the model's structure: managed units, their tensors' names, shapes and types.
        device: its name, as `NVIDIA H200`, or `cpu:` and the processor's.
        torch: version that ran the forwards.
        config: the fields of OffloadConfig that change what is measured or planned; JSON values.

    Raises:
        ProfileError: a value is of another type, or no JSON.
    """

    fingerprint: str
    device: str
    torch: str
    config: Mapping[str, Any]
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        strictjson.count(self.schema, "schema", 1)
        for name in ("fingerprint", "device", "torch"):
            strictjson.text(getattr(self, name), name)
        config = {
            key: strictjson.plain(value, f"config.{key}")
            for key, value in sorted(strictjson.mapping(self.config, "config").items())
        }
        object.__setattr__(self, "config", config)

    def to_map(self) -> dict[str, Any]:
        """Its fields in the order of the format."""
        return {name: getattr(self, name) for name in IDENTITY_FIELDS}

    @staticmethod
    def from_map(fields: Mapping[str, Any]) -> Identity:
        """The identity among `fields`, whatever else is there.

        Raises:
            ProfileError: a field is missing or of another type.
        """
        missing = [name for name in IDENTITY_FIELDS if name not in fields]
        if missing:
            raise ProfileError(f"a profile without {', '.join(missing)}: expected all of its identity", REMEDY)
        return Identity(**{name: fields[name] for name in IDENTITY_FIELDS})


IDENTITY_FIELDS = ("schema", "fingerprint", "device", "torch", "config")


@dataclass(frozen=True, slots=True)
class Profile:
    """What was measured. A hint for planning: nothing in it can make a forward wrong, only slow.

    Args:
        identity: what it was measured on.
        forwards: measured ones that stand behind it; 1 or more.
        order: names of units as a forward entered them; one entered twice stands there twice.
        compute_ns: by position in `order`, until the next unit was entered.
        prefix_ns: compute before the first unit.
        unseen: units that no forward entered.
        regions: units that were made by marking a region by hand, each with its parameters.
        resident: units that must stay on the GPU, each with the reason.
        copy: measured cost of copies to the GPU.
        activation_bytes: peak of a forward beyond weights.

    Raises:
        ProfileError: a value is of another type, below zero or not finite, or names contradict one another.
    """

    identity: Identity
    forwards: int
    order: tuple[str, ...]
    compute_ns: tuple[int, ...]
    prefix_ns: int
    unseen: tuple[str, ...]
    regions: Mapping[str, tuple[str, ...]]
    resident: Mapping[str, str]
    copy: CopyCost
    activation_bytes: int

    def __post_init__(self) -> None:
        if self.identity.schema != SCHEMA:
            raise strictjson.wrong("schema", self.identity.schema, str(SCHEMA))
        strictjson.count(self.forwards, "forwards", 1)
        strictjson.count(self.prefix_ns, "prefix_ns")
        strictjson.count(self.activation_bytes, "activation_bytes")
        order = strictjson.names(self.order, "order")
        compute_ns = tuple(strictjson.count(value, "a compute_ns in order") for value in self.compute_ns)
        if len(order) != len(compute_ns):
            raise ProfileError(
                f"a profile of {len(order)} units with {len(compute_ns)} times: expected one each", REMEDY
            )
        unseen = strictjson.distinct(self.unseen, "unseen")
        both = sorted(set(unseen) & set(order))
        if both:
            raise ProfileError(f"unit {found_text(both[0])} is in order and in unseen: expected it in one", REMEDY)
        regions = {
            name: strictjson.distinct(parameters, f"regions.{name}")
            for name, parameters in sorted(strictjson.mapping(self.regions, "regions").items())
        }
        resident = {
            name: strictjson.text(reason, f"resident.{name}")
            for name, reason in sorted(strictjson.mapping(self.resident, "resident").items())
        }
        for name, value in (
            ("order", order), ("compute_ns", compute_ns), ("unseen", unseen), ("regions", regions),
            ("resident", resident),
        ):  # fmt: skip
            object.__setattr__(self, name, value)


_FIELDS = (
    *IDENTITY_FIELDS, "forwards", "copy", "activation_bytes", "prefix_ns", "order", "unseen", "regions", "resident",
)  # fmt: skip
_COPY_FIELDS = ("latency_ns", "bytes_per_s")


def encode(profile: Profile) -> bytes:
    """The profile's file: equal profiles give equal bytes.

    Raises:
        ProfileError: it would be larger than `MAX_PROFILE_BYTES`.
    """
    fields: dict[str, Any] = {
        **profile.identity.to_map(),
        "forwards": profile.forwards,
        "copy": {name: float(getattr(profile.copy, name)) for name in _COPY_FIELDS},
        "activation_bytes": profile.activation_bytes,
        "prefix_ns": profile.prefix_ns,
        "order": list(zip(profile.order, profile.compute_ns, strict=True)),
        "unseen": profile.unseen,
        "regions": profile.regions,
        "resident": profile.resident,
    }
    members = ",\n".join(f"  {_json(name)}: {_indented(value)}" for name, value in fields.items())
    data = f"{{\n{members}\n}}\n".encode()
    _check_size(len(data))
    return data


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, sort_keys=True)


def _indented(value: Any) -> str:
    """A value with a line for each of its members, since people compare such files line by line."""
    if isinstance(value, dict) and value:
        return "{\n" + ",\n".join(f"    {_json(key)}: {_json(item)}" for key, item in value.items()) + "\n  }"
    if isinstance(value, list | tuple) and value:
        return "[\n" + ",\n".join(f"    {_json(item)}" for item in value) + "\n  ]"
    return _json(value)


def decode(data: bytes) -> Profile:
    """The profile of a file's bytes, which may come from anybody.

    Raises:
        ProfileError: they are none, or one of another schema.
    """
    fields, identity = _read(data)
    if identity.schema != SCHEMA:
        raise strictjson.wrong("schema", identity.schema, str(SCHEMA))
    strictjson.exactly(fields, _FIELDS, "a profile")
    copy = strictjson.mapping(fields["copy"], "copy")
    strictjson.exactly(copy, _COPY_FIELDS, "copy")
    entries = [_entry(value) for value in strictjson.array(fields["order"], "order")]
    return Profile(
        identity=identity,
        forwards=fields["forwards"],
        order=tuple(name for name, _ in entries),
        compute_ns=tuple(compute_ns for _, compute_ns in entries),
        prefix_ns=fields["prefix_ns"],
        unseen=fields["unseen"],
        regions=fields["regions"],
        resident=fields["resident"],
        copy=_copy_cost(copy),
        activation_bytes=fields["activation_bytes"],
    )


def identify(data: bytes) -> Identity:
    """What a file's profile was measured on, also where its schema is another and the rest cannot be read.

    Raises:
        ProfileError: that cannot be read either.
    """
    return _read(data)[1]


def _read(data: bytes) -> tuple[dict[str, Any], Identity]:
    _check_size(len(data))
    fields = strictjson.parse(data)
    return fields, Identity.from_map(fields)


def _check_size(nbytes: int) -> None:
    if nbytes > MAX_PROFILE_BYTES:
        raise ProfileError(f"a profile of {nbytes} bytes: expected at most {MAX_PROFILE_BYTES}", "manage fewer units")


def _entry(value: Any) -> tuple[Any, Any]:
    pair = strictjson.array(value, "an entry of order")
    if len(pair) != 2:
        raise ProfileError(f"an entry of order has {len(pair)} values: expected a name and its compute_ns", REMEDY)
    return pair[0], pair[1]


def _copy_cost(fields: Mapping[str, Any]) -> CopyCost:
    latency_ns, bytes_per_s = (strictjson.number(fields[name], f"copy.{name}") for name in _COPY_FIELDS)
    if latency_ns < 0:
        raise strictjson.wrong("copy.latency_ns", latency_ns, "0 or more")
    if bytes_per_s <= 0:
        raise strictjson.wrong("copy.bytes_per_s", bytes_per_s, "above 0")
    return CopyCost(latency_ns, bytes_per_s)


def differences(found: Profile | Identity, expected: Identity) -> list[str]:
    """Why a profile does not fit, a line for each difference; empty where it fits."""
    measured = found.identity if isinstance(found, Profile) else found
    fixed = ((name, getattr(measured, name), getattr(expected, name)) for name in IDENTITY_FIELDS if name != "config")
    configured = (
        (f"config.{key}", measured.config.get(key, _NOTHING), expected.config.get(key, _NOTHING))
        for key in sorted({*measured.config, *expected.config})
    )
    return [
        f"{name}: measured with {_shown(ours)}, expected {_shown(theirs)}"
        for name, ours, theirs in chain(fixed, configured)
        if not _equal(ours, theirs)
    ]


_NOTHING = object()


def _shown(value: Any) -> str:
    return "nothing" if value is _NOTHING else _json(value)


def _equal(one: Any, other: Any) -> bool:
    # True == 1 in Python, and is something else in a configuration; 1 and 1.0 are the same
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)


def refuse(found: Profile | Identity, expected: Identity, what: str = "the profile") -> None:
    """Raises where a profile does not fit.

    Args:
        what: names it in the message.

    Raises:
        ProfileMismatchError: with every difference.
    """
    listed = differences(found, expected)
    if listed:
        number = "1 difference" if len(listed) == 1 else f"{len(listed)} differences"
        raise ProfileMismatchError(
            f"{what} was measured on something else: {number}",
            "profile the model again, or run it as that profile was measured",
            listed,
        )
