"""What the daemon answers over its control socket."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import asdict
from importlib import metadata
from typing import Any

from ftd._version import PROTOCOL, __version__
from ftd.daemon.build import Generation
from ftd.daemon.push import Pusher

#: Operations for the daemon's own user and root.
OWNER_ONLY = frozenset({"stop"})


def describe(generation: Generation | None, stage: str | None, pusher: Pusher, warnings: list[str]) -> dict[str, Any]:
    """The part of a status that only the daemon knows; the rest is read from shared memory by whoever asks."""
    return {
        "stage": stage,
        "fingerprint": generation.manifest.fingerprint if generation else None,
        "model": generation.model if generation else None,
        "segments": [asdict(fact) for fact in generation.facts] if generation else [],
        "pin": generation.pinned.kind if generation else "none",
        "push": pusher.describe(),
        "push_obstacle": pusher.obstacle,
        "warnings": list(warnings),
        "versions": versions(),
    }


@functools.cache
def versions() -> dict[str, Any]:
    """Releases of this process. torch is looked up on disk, not imported."""
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = None
    return {"ftd": __version__, "protocol": ".".join(map(str, PROTOCOL)), "torch": torch}


def handlers(
    status: Callable[[], dict[str, Any]], stop: Callable[[], None]
) -> dict[str, Callable[[Any, dict[str, Any]], dict[str, Any]]]:
    """Operations by name, for `ControlServer`."""

    def on_status(_peer: Any, _args: dict[str, Any]) -> dict[str, Any]:
        return status()

    def on_stop(_peer: Any, _args: dict[str, Any]) -> dict[str, Any]:
        stop()
        return {}

    return {"status": on_status, "stop": on_stop}
