"""What is said on the control socket: a request, and a reply that is a result or an error. Pure.

    request  {"v": [major, minor], "op": text, "args": map}
    reply    {"v": [major, minor], "result": map}   or   {"v": …, "error": {"code", "message", "remedy"}}

The version comes first in every map and is checked before anything else is believed: another major may have other
fields. Keys that this minor does not know are ignored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ftd._version import PROTOCOL
from ftd.errors import ControlError, FrameError, FtdError, ProtocolMismatchError


@dataclass(frozen=True, slots=True)
class Request:
    """`op` names a handler of the daemon, `args` are its arguments: msgpack values under text keys."""

    op: str
    args: dict[str, Any] = field(default_factory=dict)

    def to_map(self) -> dict[str, Any]:
        return {"v": list(PROTOCOL), "op": self.op, "args": self.args}

    @staticmethod
    def from_map(fields: Mapping[str, Any]) -> Request:
        """The request that a decoded frame holds.

        Raises:
            ProtocolMismatchError: the peer speaks another major version.
            FrameError: a field is missing or of another type.
        """
        check_version(fields)
        return Request(_typed(fields, "op", str), _typed(fields, "args", dict))


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to one request: `result`, unless `error` is set."""

    result: dict[str, Any] = field(default_factory=dict)
    error: FtdError | None = None

    def to_map(self) -> dict[str, Any]:
        if self.error is None:
            return {"v": list(PROTOCOL), "result": self.result}
        texts = {key: _encodable(text) for key, text in self.error.to_dict().items()}
        return {"v": list(PROTOCOL), "error": texts}

    @staticmethod
    def from_map(fields: Mapping[str, Any]) -> Reply:
        """The reply that a decoded frame holds; an error of the peer is restored, not raised.

        Raises:
            ProtocolMismatchError: the peer speaks another major version.
            FrameError: a field is missing or of another type, or there are both a result and an error.
        """
        check_version(fields)
        if ("result" in fields) == ("error" in fields):
            found = "both" if "result" in fields else "neither"
            raise FrameError(f"a reply with {found} of result and error: expected one", _REMEDY)
        if "result" in fields:
            return Reply(result=_typed(fields, "result", dict))
        texts = _typed(fields, "error", dict)
        for key in ("code", "message", "remedy"):
            _typed(texts, key, str)
        return Reply(error=FtdError.from_dict(texts))


_T = TypeVar("_T")
_REMEDY = "the other end of the socket is no ftd of this protocol"


def check_version(fields: Mapping[str, Any]) -> None:
    """Accepts any minor of our major.

    Raises:
        ProtocolMismatchError: another major; the message names both versions.
        FrameError: there is no version.
    """
    version = _typed(fields, "v", list)
    if len(version) != 2 or any(type(part) is not int or part < 0 for part in version):
        raise FrameError(f"a message of version {repr(version)[:80]}: expected [major, minor]", _REMEDY)
    if version[0] != PROTOCOL[0]:
        raise ProtocolMismatchError(
            f"the peer speaks protocol {version[0]}.{version[1]}: expected {PROTOCOL[0]}.x, ours is "
            f"{PROTOCOL[0]}.{PROTOCOL[1]}",
            "run the same release of ftd in the daemon and in its clients",
        )


def unknown_op(op: str, known: Iterable[str]) -> ControlError:
    """The error that answers an operation which this daemon lacks."""
    return ControlError(
        f"unknown operation {op[:80]!r}: expected one of {', '.join(sorted(known))}",
        "the client may be of a newer release than the daemon: restart the daemon with that release",
    )


def _typed(fields: Mapping[str, Any], key: str, kind: type[_T]) -> _T:
    value = fields.get(key)
    if not isinstance(value, kind):
        found = "nothing" if key not in fields else type(value).__name__
        raise FrameError(f"a message whose {key!r} is {found}: expected {kind.__name__}", _REMEDY)
    return value


def _encodable(text: str) -> str:
    # a file name that is no UTF-8 reaches messages as lone surrogates, which msgpack cannot carry
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
