"""Who is at the other end of a control socket, as the kernel says, and what it may ask for."""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass
from typing import Protocol

from ftd.errors import AccessError

#: struct ucred of unix(7): pid_t, uid_t, gid_t
_UCRED = struct.Struct("=iII")


@dataclass(frozen=True, slots=True)
class Peer:
    """Credentials of the other end, taken by the kernel when it connected (or began to listen).

    `pid` is for people: 0 when the peer lives in a pid namespace that is not visible from here.
    """

    pid: int
    uid: int
    gid: int

    def is_trusted(self, owner_uid: int) -> bool:
        """Whether the peer is the daemon's own user or root."""
        return self.uid in (owner_uid, 0)


class _HasSocketOptions(Protocol):
    # asyncio hands out a TransportSocket, which is no socket.socket
    def getsockopt(self, level: int, optname: int, buflen: int, /) -> bytes: ...


def peer_of(sock: socket.socket | _HasSocketOptions) -> Peer:
    """The credentials of a connected Unix stream socket's other end."""
    return Peer(*_UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)))


def authorise(peer: Peer, op: str, *, owner_uid: int, owner_only: frozenset[str]) -> None:
    """Lets everybody who could connect ask for what is not in `owner_only`, and the owner and root for all.

    Raises:
        AccessError: another user asks for an operation of the owner.
    """
    if op in owner_only and not peer.is_trusted(owner_uid):
        raise AccessError(
            f"{op} is refused to uid {peer.uid}: expected uid {owner_uid}, which runs the daemon, or root",
            "run the command as that user or with sudo",
        )
