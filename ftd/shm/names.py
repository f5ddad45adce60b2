"""Every name that a namespace owns in /dev/shm, derived and parsed in one place.

The names are the contract's: `ftd.<namespace>.` and one of `lock`, `coord`, `slots`, `g<generation>.<i>`,
`g<generation>.manifest`, `g<generation>.files`, `g<generation>.staging`. A namespace may hold dots and even look like
a tail; parsing from the right is unambiguous, since no tail is the end of another.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ftd.errors import NamespaceError, SegmentError

#: Where glibc keeps POSIX shared memory (shm_overview(7)); a segment `/x` is the file `/dev/shm/x`.
SHM_DIR = Path("/dev/shm")

#: The last generation whose names can be parsed: 18 digits.
MAX_GENERATION = 10**18 - 1

NAMESPACE_RULE = "1 to 64 of A-Z a-z 0-9 . _ - starting with a letter or digit"
_NAMESPACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SEGMENT = re.compile(
    r"ftd\.(?P<namespace>[A-Za-z0-9][A-Za-z0-9._-]{0,63})"
    r"\.(?:(?P<fixed>lock|coord|slots)"
    r"|g(?P<generation>[1-9][0-9]{0,17})\.(?P<part>0|[1-9][0-9]{0,8}|manifest|files|staging))"
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
        return self._of(generation, str(index))

    def manifest(self, generation: int) -> str:
        return self._of(generation, "manifest")

    def files(self, generation: int) -> str:
        """Sidecar files of the checkpoint."""
        return self._of(generation, "files")

    def staging(self, generation: int) -> str:
        """By which a process hands over weights; mode 0600, and nameless soon."""
        return self._of(generation, "staging")

    def _of(self, generation: int, part: str) -> str:
        file_name = f"ftd.{self.namespace}.g{generation}.{part}"
        if parse(file_name) is None:  # nobody would ever find such a segment, and so nobody would remove it
            raise SegmentError(
                f"generation {generation} of {self.namespace!r} has no segment {part!r}: expected 1 to {MAX_GENERATION}"
            )
        return "/" + file_name


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


@dataclass(frozen=True, slots=True)
class Present:
    """What is in /dev/shm under the names of one namespace, where anybody may make a file.

    Attributes:
        ours: segments of whoever keeps the namespace, sorted by name.
        foreign: every other name, with the user id of its owner: never counted, and never removed.
    """

    ours: tuple[ParsedName, ...]
    foreign: Mapping[str, int]

    @property
    def generations(self) -> set[int]:
        return {name.generation for name in self.ours if name.generation is not None}

    @property
    def published(self) -> set[int]:
        """Generations that a follower may hold: the manifest is made last."""
        return {name.generation for name in self.ours if name.generation is not None and name.part == "manifest"}


def present(names: Names) -> Present:
    """Tells the segments of a namespace from files that others put beside them.

    The namespace is kept by the owners of `lock`, `coord` and `slots`, and by root. Its creator owns all three; root
    sweeps for it.
    """
    facts: dict[ParsedName, os.stat_result] = {}
    for name in listed(names.namespace):
        try:
            facts[name] = (SHM_DIR / name.name.removeprefix("/")).lstat()
        except FileNotFoundError:
            continue  # removed in this moment
    keepers = {0} | {found.st_uid for name, found in facts.items() if name.generation is None}
    ours: list[ParsedName] = []
    foreign: dict[str, int] = {}
    for name, found in facts.items():
        if stat.S_ISREG(found.st_mode) and found.st_uid in keepers:
            ours.append(name)
        else:
            foreign[name.name] = found.st_uid
    return Present(tuple(ours), foreign)
