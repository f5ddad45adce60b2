"""Fields of OffloadConfig whose effect this release does not build: accepted and validated, then refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ftd._version import __version__
from ftd.config.fields import listing
from ftd.config.offload import OffloadConfig
from ftd.errors import NotBuiltError

#: Field → its only value that is built.
LATER: Mapping[str, object] = MappingProxyType(
    {"external_compile": False, "offload_timing": "off", "piecewise_prefetch": "warn"}
)


def refuse_unbuilt(config: OffloadConfig) -> None:
    """Passes a configuration that `offload()` can honour in full.

    Raises:
        NotBuiltError: it asks for something that this release does not build; the message names each field.
    """
    values = {key: getattr(config, key) for key in LATER}
    unbuilt = [key for key, value in values.items() if value != LATER[key]]
    if unbuilt:
        texts = [
            f"{key}: {values[key]!r} is not built yet in ftd {__version__}; expected {LATER[key]!r}" for key in unbuilt
        ]
        raise NotBuiltError("; ".join(texts), f"leave out {listing(unbuilt, 'and')}")
