"""The daemon's end of the control socket, on its asyncio loop.

Every peer is bounded: in time per frame and per reply, in bytes (`frame.MAX_FRAME_BYTES`), and all of them in number.
Whatever a peer sends ends its own connection at worst.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import select
import socket
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

from ftd.errors import ControlError, FtdError, InternalError
from ftd.wire import frame
from ftd.wire.bind import BACKLOG, BoundSocket, bind_socket
from ftd.wire.messages import Reply, Request, unknown_op
from ftd.wire.peer import Peer, authorise, peer_of

log = logging.getLogger(__name__)

#: Answers one operation: takes the peer and the arguments, gives the result or a coroutine of it.
Handler = Callable[[Peer, dict[str, Any]], Awaitable[dict[str, Any]] | dict[str, Any]]

#: Gives the connection's socket, a duplicate that does not block; the loop reads nothing of it from then on.
Take = Callable[[], socket.socket]
#: Answers an operation whose peer says more before it is answered: whoever takes the socket reads on, and closes it.
StreamHandler = Callable[[Peer, dict[str, Any], Take], Awaitable[dict[str, Any]]]

FRAME_TIMEOUT_S = 5.0
MAX_CONNECTIONS = 64

#: Of the connections, these are for root and the daemon's own user: strangers cannot lock out `ftd stop`.
RESERVED_CONNECTIONS = 8

#: How long `close` lets running handlers finish and answer, so that the reply to `stop` still goes out.
CLOSE_GRACE_S = 1.0

#: Between two looks whether the peer of a long operation is still there.
_LOOK_S = 0.02


class ControlServer:
    """Listens at a path and answers requests, one or several in sequence on a connection.

    Belongs to the loop that starts it. A handler runs to its end even when its peer has gone, unless it is named in
    `ends_with_peer`; else it is cancelled only by `close`. A synchronous handler blocks the loop, so it must not wait.

    Args:
        mode, gid: of the socket's path, see `bind_socket`.
        owner_only: operations that only this process's user and root may ask for.
        ends_with_peer: operations whose handlers are cancelled when the peer is gone.
        streams: operations whose peers say more than their request. Each is the last of its connection.
        frame_timeout_s: for a request to arrive whole, idle time before it included, and for a reply to be taken.
    """

    def __init__(
        self,
        path: Path,
        handlers: Mapping[str, Handler],
        *,
        mode: int,
        gid: int | None = None,
        owner_only: frozenset[str] = frozenset(),
        ends_with_peer: frozenset[str] = frozenset(),
        streams: Mapping[str, StreamHandler] = MappingProxyType({}),
        frame_timeout_s: float = FRAME_TIMEOUT_S,
        max_connections: int = MAX_CONNECTIONS,
        close_grace_s: float = CLOSE_GRACE_S,
    ) -> None:
        self.path = path
        self._handlers, self._streams = dict(handlers), dict(streams)
        self._mode, self._gid = mode, gid
        self._owner_uid, self._owner_only = os.geteuid(), owner_only
        self._ends_with_peer = ends_with_peer
        self._frame_timeout_s, self._close_grace_s = frame_timeout_s, close_grace_s
        self._max_connections = max_connections
        self._bound: BoundSocket | None = None
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._answering: set[asyncio.Task[None]] = set()
        self._closing = False

    async def start(self) -> None:
        """Binds and listens; see `bind_socket` for what it raises. Waits up to 5 s for the directory's mutex."""
        bound = bind_socket(self.path, self._mode, self._gid)
        try:
            self._server = await asyncio.start_unix_server(self._connected, sock=bound.sock, backlog=BACKLOG)
        except BaseException:
            bound.unlink()
            bound.sock.close()
            raise
        self._bound = bound

    async def close(self) -> None:
        """Removes the path, gives running handlers `close_grace_s`, and ends every connection. Idempotent."""
        if self._bound is None or self._server is None:
            return
        bound, self._bound = self._bound, None
        self._closing = True
        bound.unlink()  # before the listener goes: see there
        self._server.close()
        for task in self._connections - self._answering:
            task.cancel()
        if self._answering:
            await asyncio.wait(self._answering, timeout=self._close_grace_s)
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        await self._server.wait_closed()

    async def __aenter__(self) -> ControlServer:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Life of one connection; runs in a task of its own."""
        task = asyncio.current_task()
        assert task is not None
        # drain() then waits until the kernel has it all, so that closing afterwards loses nothing and lasts nothing
        writer.transport.set_write_buffer_limits(high=0)
        try:
            peer = peer_of(writer.get_extra_info("socket"))
            if self._is_full(peer):
                log.debug("%s: connection of pid %d refused, too many", self.path, peer.pid)
                # said, since silence means to a follower that its request may have been taken
                refusal = ControlError(f"{len(self._connections)} connections to the daemon are open", "try again")
                await self._write(writer, frame.encode(Reply(error=refusal).to_map()))
                return
            self._connections.add(task)
            while not self._closing and await self._exchange(peer, reader, writer):
                pass
        except OSError:
            pass  # the peer is gone, or takes no reply: nobody is left to tell
        except asyncio.CancelledError:
            pass  # by `close` alone; asyncio's streams of Python 3.11 log a task that ends cancelled as an error
        except Exception:
            log.exception("%s: a connection failed", self.path)
        finally:
            self._connections.discard(task)
            self._answering.discard(task)
            writer.transport.abort()

    def _is_full(self, peer: Peer) -> bool:
        reserved = 0 if peer.is_trusted(self._owner_uid) else min(RESERVED_CONNECTIONS, self._max_connections - 1)
        return self._closing or len(self._connections) >= self._max_connections - reserved

    async def _exchange(self, peer: Peer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request and its reply; whether another may follow."""
        task = asyncio.current_task()
        assert task is not None
        try:
            fields = await self._read(reader)
            if fields is None:
                return False
            request = Request.from_map(fields)
        except FtdError as error:
            # where the next frame would begin is unknown after a bad one
            log.debug("%s: bad frame of pid %d: %s", self.path, peer.pid, error.message)
            await self._write(writer, frame.encode(Reply(error=error).to_map()))
            return False
        self._answering.add(task)
        try:
            answer = self._answer(peer, request, writer.transport)
            if request.op in self._ends_with_peer:
                answer = _while_connected(writer.transport, answer)
            await self._write(writer, await answer)
        finally:
            self._answering.discard(task)
        return request.op not in self._streams

    async def _read(self, reader: asyncio.StreamReader) -> dict[str, Any] | None:
        """The next frame's map; None when the peer closed between frames."""
        try:
            async with asyncio.timeout(self._frame_timeout_s):
                header = await _read_up_to(reader, frame.HEADER_BYTES)
                if not header:
                    return None
                length = frame.payload_bytes(header)
                return frame.decode(await _read_up_to(reader, length), length)
        except TimeoutError:
            raise ControlError(
                f"no whole request came within {self._frame_timeout_s:g} s", "send each request at once"
            ) from None

    async def _answer(self, peer: Peer, request: Request, transport: asyncio.WriteTransport) -> bytes:
        """The frame that answers a request, whatever its handler does."""
        try:
            return frame.encode(Reply(await self._handle(peer, request, transport)).to_map())
        except FtdError as error:
            reply = Reply(error=error)
        except Exception as error:
            log.exception("%s: operation %s of pid %d failed", self.path, request.op, peer.pid)
            reply = Reply(
                error=InternalError(
                    f"{request.op} failed inside the daemon: {type(error).__name__}: {error}"[:1000],
                    "report it with the traceback in the daemon's log",
                )
            )
        return frame.encode(reply.to_map())

    async def _handle(self, peer: Peer, request: Request, transport: asyncio.WriteTransport) -> dict[str, Any]:
        handler, stream = self._handlers.get(request.op), self._streams.get(request.op)
        if handler is None and stream is None:
            raise unknown_op(request.op, self._handlers | self._streams)
        authorise(peer, request.op, owner_uid=self._owner_uid, owner_only=self._owner_only)
        if stream is not None:
            return await stream(peer, request.args, partial(_take, transport))
        assert handler is not None
        result = handler(peer, request.args)
        return await result if inspect.isawaitable(result) else result

    async def _write(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(data)
        async with asyncio.timeout(self._frame_timeout_s):
            await writer.drain()


def _take(transport: asyncio.WriteTransport) -> socket.socket:
    assert isinstance(transport, asyncio.Transport)
    transport.pause_reading()
    sock: socket.socket = transport.get_extra_info("socket").dup()
    return sock


async def _while_connected(transport: asyncio.WriteTransport, work: Coroutine[Any, Any, bytes]) -> bytes:
    """Cancels `work` when the peer is gone.

    Raises:
        ConnectionError: it is, and the work has ended.
    """
    task = asyncio.create_task(work)
    try:
        while not (await asyncio.wait([task], timeout=_LOOK_S))[0]:
            if _is_hung_up(transport):
                raise ConnectionResetError
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait([task])


def _is_hung_up(transport: asyncio.WriteTransport) -> bool:
    """Whether the peer has closed its end, whatever of its words is unread; not when it only said its last."""
    if transport.is_closing():
        return True
    poll = select.poll()
    poll.register(transport.get_extra_info("socket").fileno(), 0)  # a hang-up is always told
    return bool(poll.poll(0))


async def _read_up_to(reader: asyncio.StreamReader, count: int) -> bytes:
    """`count` bytes, or fewer where the stream ends: the codec judges what is short."""
    try:
        return await reader.readexactly(count)
    except asyncio.IncompleteReadError as error:
        return error.partial
