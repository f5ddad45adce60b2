"""The daemon's configuration: one frozen model, and the values of the contract that this release does not build."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from ftd._version import __version__
from ftd.config.fields import (
    Address,
    Device,
    Flag,
    Group,
    Mode,
    ModelPath,
    Numa,
    Patterns,
    Seconds,
    Size,
    Threads,
    TypeNames,
    against,
    expected_of,
    listing,
)
from ftd.errors import NotBuiltError

#: Field → its only value that is built; every other one that the contract knows is refused by `NotBuiltError`.
NOT_BUILT: Mapping[str, object] = MappingProxyType({"on_stop": "unlink", "metrics_address": None})

#: Fields whose YAML scalar counts as it is written: `mode: 640` and `mode: 0640` are the same octal digits, where
#: YAML 1.1 makes the first six hundred and forty and YAML 1.2 both.
AS_WRITTEN = frozenset({"mode"})


def usable_cores() -> int:
    """Cores that this process may run on; a container's cpuset counts, its quota does not."""
    return len(os.sched_getaffinity(0))


class DaemonConfig(BaseModel):
    """What `ftd start` needs to know besides the namespace. Holds only values that this release builds.

    Raises:
        ValidationError: pydantic's; `load.py` turns it into a `ConfigError` with origins.
        NotBuiltError: valid by the contract, but not built yet.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    model: ModelPath = None
    """Checkpoint to publish: a directory or file, or a model of the hub's cache as org/name[@revision]."""

    receive: Flag = False
    """Whether a process publishes the weights, in place of a checkpoint."""

    pin: Literal["auto", "cuda", "mlock", "none"] = "auto"
    """How the creator page-locks the segments; auto takes CUDA where there is a GPU."""

    push: Literal["auto", "never"] = "auto"
    """Whether the creator may copy into a follower's GPU memory."""

    device: Device = None
    """CUDA ordinal whose context pins; None chooses one."""

    huge_pages: Literal["auto", "require", "never"] = "auto"
    """Whether segments ask for 2 MiB pages, and whether a start without them fails."""

    numa: Numa = "none"
    """Placement of the segments' pages: none, interleave, or bind:<node>."""

    mode: Mode = 0o640
    """Permission bits of weights, manifest, files and coord; the umask changes nothing.

    Text is octal digits, with or without a leading 0 or 0o, and in a file or --set so is a bare number. An int in
    Python is the mode itself: write 0o640.
    """

    group: Group = None
    """Group of the segments, by name or number; None leaves the daemon's own."""

    memory_budget: Size = None
    """Most bytes that the namespace may take; refused before loading when it does not fit. None sets no limit."""

    read_threads: Threads = Field(default_factory=lambda: min(16, usable_cores()))
    """Threads that read the checkpoint into the segments."""

    verify: Literal["none", "fingerprint", "full"] = "fingerprint"
    """What is known of weights when they are published: nothing; their digests; or that memory still has these, and
    that the files are what their publishers state."""

    heartbeat_s: Seconds = 1.0
    """Seconds between two stamps of progress."""

    lease_timeout_s: Seconds = Field(default=30.0, validate_default=True)
    """Seconds without a stamp after which a participant counts as hung; above twice heartbeat_s."""

    on_stop: Literal["unlink", "keep"] = "unlink"
    """What happens to the segments when the daemon stops."""

    metrics_address: Address = None
    """Address that serves metrics; None serves none."""

    allow_types: TypeNames = None
    """Types by full name, such as argparse.Namespace, whose values are left out where torch checkpoints hold them.

    Nothing of such a type is ever made. Without it, a checkpoint that holds one is refused.
    """

    layers: Patterns = None
    """Patterns that group tensors into layers (see `patterns.py`); None and [] leave it to the default rule."""

    @field_validator("lease_timeout_s")
    @classmethod
    def _above_two_heartbeats(cls, value: float, info: ValidationInfo) -> float:
        # absent when heartbeat_s is itself invalid, which is reported anyway
        heartbeat_s = info.data.get("heartbeat_s")
        if heartbeat_s is not None and value <= 2 * heartbeat_s:
            raise against("heartbeat_s", f"more than twice heartbeat_s, which is {heartbeat_s:g}")
        return value

    @model_validator(mode="after")
    def _only_what_is_built(self) -> Self:
        unbuilt = [key for key, built in NOT_BUILT.items() if getattr(self, key) != built]
        if unbuilt:
            raise NotBuiltError(
                "; ".join(
                    f"{key}: {getattr(self, key)!r} is not built yet in ftd {__version__}; expected {_built_text(key)}"
                    for key in unbuilt
                ),
                f"leave out {listing(unbuilt, 'and')}",
            )
        return self


def expected_text(key: str) -> str:
    """What the field `key` accepts, in words."""
    return expected_of(DaemonConfig.model_fields[key])


def _built_text(key: str) -> str:
    built = NOT_BUILT[key]
    return "no value" if built is None else repr(built)
