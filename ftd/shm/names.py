"""Every name that a namespace owns in /dev/shm, derived and parsed in one place.

The names are the contract's: `ftd.<namespace>.` and one of `lock`, `coord`, `slots`, `g<generation>.<i>`,
`g<generation>.manifest`, `g<generation>.files`. A namespace may hold dots and even look like a tail; parsing from
the right is unambiguous, since no tail is the end of another.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from ftd.errors import NamespaceError

#: Where glibc keeps POSIX shared memory (shm_overview(7)); a segment `/x` is the file `/dev/shm/x`.
SHM_DIR = Path("/dev/shm")

NAMESPACE_RULE = "1 to 64 of A-Z a-z 0-9 . _ - starting with a letter or digit"
_NAMESPACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SEGMENT = re.compile(
    r"ftd\.(?P<namespace>[A-Za-z0-9][A-Za-z0-9._-]{0,63})"
    r"\.(?:(?P<fixed>lock|coord|slots)|g(?P<generation>[1-9][0-9]{0,17})\.(?P<part>0|[1-9][0-9]{0,8}|manifest|files))"
)


def check_namespace(namespace: str) -> str:
    """The namespace itself.

    Raises:
        NamespaceError: it breaks the rule; the message states it.
    """
    if not isinstance(namespace, str) or _NAMESPACE.fullmatch(namespace) is None:
        raise NamespaceError(f"namespace {namespace!r} is not valid: expected {NAMESPACE_RULE}", "choose another name")
    return namespace


@dataclass(frozen=True, slots=True)
class Names:
    """Segment names (with the leading slash that shm_open wants) of one namespace."""

    namespace: str

    def __post_init__(self) -> None:
        check_namespace(self.namespace)

    @property
    def lock(self) -> str:
        """Held for life by the creator; mode 0600."""
        return f"/ftd.{self.namespace}.lock"

    @property
    def coord(self) -> str:
        """Coordination block, written by the creator."""
        return f"/ftd.{self.namespace}.coord"

    @property
    def slots(self) -> str:
        """Leases and heartbeats of followers."""
        return f"/ftd.{self.namespace}.slots"

    def weights(self, generation: int, index: int) -> str:
        return f"/ftd.{self.namespace}.g{generation}.{index}"

    def manifest(self, generation: int) -> str:
        return f"/ftd.{self.namespace}.g{generation}.manifest"

    def files(self, generation: int) -> str:
        """Sidecar files of the checkpoint."""
        return f"/ftd.{self.namespace}.g{generation}.files"


@dataclass(frozen=True, slots=True)
class ParsedName:
    """What a file name in /dev/shm says. `generation` is None for `lock`, `coord` and `slots`."""

    name: str
    namespace: str
    generation: int | None
    part: str


def parse(file_name: str) -> ParsedName | None:
    """The parts of a file name in /dev/shm; None for files of others."""
    match = _SEGMENT.fullmatch(file_name)
    if match is None:
        return None
    if match["fixed"]:
        return ParsedName("/" + file_name, match["namespace"], None, match["fixed"])
    return ParsedName("/" + file_name, match["namespace"], int(match["generation"]), match["part"])


def listed(namespace: str | None = None) -> list[ParsedName]:
    """All segments of ftd in /dev/shm, or those of one namespace, sorted by name."""
    found = (parse(path.name) for path in SHM_DIR.iterdir())
    return sorted(
        (name for name in found if name and namespace in (None, name.namespace)), key=lambda parsed: parsed.name
    )
