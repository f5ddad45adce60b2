"""Whatever speaks to the control socket gets an answer that it can understand, and the daemon lives."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest

from ftd._version import PROTOCOL
from ftd.errors import EXIT_OK
from tests.process.daemons import PATIENCE_S, Daemon, ftd

Start = Callable[..., Daemon]


def frame(payload: bytes) -> bytes:
    return struct.pack(">I", len(payload)) + payload


def ask(version: list[int] | None = None, **fields: Any) -> bytes:
    return frame(msgpack.packb({"v": version or list(PROTOCOL), "op": "status", "args": {}} | fields))


class Talk:
    """A connection that may send anything."""

    def __init__(self, path: Path) -> None:
        self._sock = socket.socket(socket.AF_UNIX)
        self._sock.settimeout(PATIENCE_S)
        self._sock.connect(str(path))

    def send(self, data: bytes) -> None:
        self._sock.sendall(data)

    def hear(self) -> Any:
        """The map of the next frame; None at the end of the stream."""
        head = self._read(4)
        return msgpack.unpackb(self._read(struct.unpack(">I", head)[0])) if head else None

    def _read(self, count: int) -> bytes:
        data = b""
        while len(data) < count and (piece := self._sock.recv(count - len(data))):
            data += piece
        return data

    def close(self) -> None:
        self._sock.close()


@pytest.fixture
def path(start: Start, namespace: str, runtime_dir: Path, model: Path) -> Path:
    start("--model", model)
    return runtime_dir / f"{namespace}.sock"


#: What is sent, the code of the answer, words of its message.
BAD = {
    "no msgpack": (frame(b"\xc1no msgpack at all"), "frame", "msgpack"),
    "no map": (frame(msgpack.packb([1, 2, 3])), "frame", "map"),
    "empty": (frame(b""), "frame", "0 payload bytes"),
    "too large": (struct.pack(">I", (1 << 20) + 1), "frame", str((1 << 20) + 1)),
    "4 GiB": (struct.pack(">I", (1 << 32) - 1), "frame", str((1 << 32) - 1)),
    "http": (b"GET / HTTP/1.1\r\n\r\n", "frame", "payload bytes"),
    "another major": (ask([PROTOCOL[0] + 1, 0]), "protocol_mismatch", f"protocol {PROTOCOL[0] + 1}.0"),
    "no version": (ask(v=None), "frame", "'v'"),
    "op of another type": (ask(op=7), "frame", "'op'"),
    "args of another type": (ask(args=[]), "frame", "'args'"),
    "unknown op": (ask(op="explode"), "control", "'explode'"),
}


def test_bad_words_are_answered(path: Path, namespace: str) -> None:
    """Each by an error frame; after all of them the daemon is as well as before."""
    for what, (data, code, words) in BAD.items():
        talk = Talk(path)
        talk.send(data)
        answer = talk.hear()
        assert answer["v"] == list(PROTOCOL) and set(answer["error"]) == {"code", "message", "remedy"}, what
        assert answer["error"]["code"] == code and words in answer["error"]["message"], (what, answer)
        talk.close()
    assert ftd("status", "-n", namespace).status == EXIT_OK


def test_another_minor_is_understood(path: Path) -> None:
    talk = Talk(path)
    talk.send(ask([PROTOCOL[0], PROTOCOL[1] + 7], more="fields of a newer release"))
    assert "result" in talk.hear()
    talk.send(ask())
    assert "result" in talk.hear(), "several requests on one connection"
    talk.close()


def test_half_a_frame_and_silence(path: Path, namespace: str) -> None:
    """Peers that say half a word, or nothing, or leave, hold up nobody: status and stop get through."""
    talks = [Talk(path) for _ in range(40)]
    for number, talk in enumerate(talks):
        talk.send(ask()[: number % 7])
    for talk in talks[::3]:
        talk.close()
    result = ftd("status", "-n", namespace)
    assert result.status == EXIT_OK
    assert ftd("stop", "-n", namespace).status == EXIT_OK
    for talk in talks:
        talk.close()


def test_a_peer_that_never_reads(path: Path, namespace: str) -> None:
    """It sends and never takes an answer: the daemon's loop goes on."""
    talk = Talk(path)
    talk._sock.setblocking(False)
    until = time.monotonic() + PATIENCE_S
    try:
        while time.monotonic() < until:
            talk._sock.send(ask() * 64)
    except BlockingIOError:
        pass
    assert ftd("status", "-n", namespace).status == EXIT_OK
    talk.close()


def test_more_peers_than_it_takes(path: Path, namespace: str) -> None:
    """The limit closes connections and no daemon; room comes back when they leave."""
    talks = []
    for _ in range(200):
        try:
            talks.append(Talk(path))
        except BlockingIOError:
            break
    for talk in talks:
        talk.close()
    assert ftd("status", "-n", namespace).status == EXIT_OK
    assert os.path.exists(path)
