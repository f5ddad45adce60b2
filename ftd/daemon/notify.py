"""sd_notify(3) in both directions: the daemon tells its service manager, and `ftd start --detach` listens.

A datagram of `KEY=VALUE` lines goes to the address in `NOTIFY_SOCKET`. Nobody may suffer from telling: sending never
blocks and never raises, because the manager's socket may be full, or gone.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import socket
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from ftd.errors import FtdError, os_reason

log = logging.getLogger(__name__)

#: systemd reads a datagram into PIPE_BUF bytes and drops longer ones whole (NOTIFY_BUFFER_MAX of its manager).
MAX_DATAGRAM_BYTES = 4096
_MAX_STATUS_BYTES = 512

#: Our own field: an error as one line of JSON. systemd ignores names that begin with X_.
ERROR_FIELD = "X_FTD_ERROR"

#: sun_path of unix(7), its terminating zero left out.
_MAX_ADDRESS_BYTES = 107

_VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")


@dataclass(frozen=True, slots=True)
class Notifier:
    """Tells the service manager. Every method says whether the datagram was taken: False is worth another try.

    Attributes:
        address: of the manager's socket, `\\0` first for an abstract one; None makes every method do nothing.
        watchdog_s: within which the manager wants to hear `watchdog()`; None where it does not listen.
    """

    address: str | None = None
    watchdog_s: float | None = None

    @staticmethod
    def from_environ(environ: Mapping[str, str]) -> Notifier:
        """What the manager put into the environment; unusable values are logged and mean nobody listens."""
        return Notifier(_address(environ.get("NOTIFY_SOCKET", "")), _watchdog_s(environ))

    def ready(self, status: str) -> bool:
        return self._send({"READY": "1", "STATUS": status})

    def status(self, text: str) -> bool:
        """One line for `systemctl status`."""
        return self._send({"STATUS": text})

    def extend_timeout(self, seconds: float) -> bool:
        """Asks for `seconds` from now for what is under way: start, or stop."""
        return self._send({"EXTEND_TIMEOUT_USEC": str(int(seconds * 1e6))})

    def watchdog(self) -> bool:
        return self._send({"WATCHDOG": "1"})

    def stopping(self, status: str) -> bool:
        return self._send({"STOPPING": "1", "STATUS": status})

    def failed(self, error: FtdError) -> bool:
        """Why the process is about to end: for people as a status, for `reported_error` as a field of our own."""
        return self._send({"STATUS": f"failed: {error.message}", ERROR_FIELD: _error_line(error)})

    def _send(self, fields: Mapping[str, str]) -> bool:
        if self.address is None:
            return True
        lines = [f"{name}={_cut(value, _limit(name))}" for name, value in fields.items()]
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sock:
                sock.sendto("\n".join(lines).encode(), self.address)
        except OSError as error:
            log.debug("the service manager did not take %s: %s", ", ".join(fields), os_reason(error))
            return False
        return True


def without_manager(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a child process that must not speak to this process's service manager."""
    return {name: value for name, value in environ.items() if name not in _VARIABLES}


def reported_error(fields: Mapping[str, str]) -> FtdError | None:
    """The error that `failed` put into a datagram; None where there is none."""
    try:
        found = json.loads(fields[ERROR_FIELD])
    except (KeyError, ValueError):
        return None
    return FtdError.from_dict(found) if isinstance(found, dict) else None


class NotifyListener:
    """The other end: a socket whose `address` goes into a child's `NOTIFY_SOCKET`.

    Args:
        address: a path or `@name`; by default a path in a new directory of mode 0700, where nobody else can send.
            Abstract names are open to every user of the host.
    """

    def __init__(self, address: str | None = None) -> None:
        self._directory: Path | None = None
        if address is None:
            self._directory = _short_temporary_directory()
            address = str(self._directory / "notify")
        self.address = address
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            self._sock.bind(_sockaddr(self.address))
        except OSError:
            self.close()
            raise

    def receive(self, timeout_s: float) -> dict[str, str] | None:
        """The fields of the next datagram; None when none came within `timeout_s` (0: none is waiting)."""
        self._sock.settimeout(timeout_s)
        try:
            data = self._sock.recv(MAX_DATAGRAM_BYTES)
        except (TimeoutError, BlockingIOError):
            return None
        lines = data.decode("utf-8", "replace").split("\n")
        return dict(line.split("=", 1) for line in lines if "=" in line)

    def close(self) -> None:
        self._sock.close()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    def __enter__(self) -> NotifyListener:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _address(text: str) -> str | None:
    if not text:
        return None
    if not text.startswith(("/", "@")) or len(os.fsencode(text)) > _MAX_ADDRESS_BYTES:
        # sd_notify(3) also knows vsock addresses, by which a virtual machine tells its host: not from a service
        log.warning("NOTIFY_SOCKET=%s is no Unix socket: nobody will be notified", text)
        return None
    return _sockaddr(text)


def _sockaddr(text: str) -> str:
    return "\0" + text[1:] if text.startswith("@") else text


def _watchdog_s(environ: Mapping[str, str]) -> float | None:
    """As sd_watchdog_enabled(3): meant for this process, or for nobody in particular."""
    interval, pid = environ.get("WATCHDOG_USEC"), environ.get("WATCHDOG_PID")
    if not interval:
        return None
    try:
        interval_us, meant = int(interval), int(pid) if pid else os.getpid()
    except ValueError:
        interval_us, meant = 0, os.getpid()
    if interval_us <= 0:
        log.warning("WATCHDOG_USEC=%s, WATCHDOG_PID=%s make no sense: no watchdog", interval, pid)
        return None
    return interval_us / 1e6 if meant == os.getpid() else None


def _limit(name: str) -> int:
    return MAX_DATAGRAM_BYTES if name == ERROR_FIELD else _MAX_STATUS_BYTES


def _error_line(error: FtdError) -> str:
    """The error as JSON that leaves room for a status; long texts are shortened, never the structure."""
    room = MAX_DATAGRAM_BYTES - _MAX_STATUS_BYTES - 64
    limit = room
    while True:
        fields = {name: _cut(text, limit) for name, text in error.to_dict().items()}
        line = json.dumps({**fields, "exit_status": error.exit_status})
        if len(line) <= room:
            return line
        limit //= 2


def _cut(text: str, limit_bytes: int) -> str:
    """`text` on one line of at most so many UTF-8 bytes; a line break would begin another field."""
    data = " ".join(text.split()).encode("utf-8", "backslashreplace")
    if len(data) <= limit_bytes:
        return data.decode()
    return data[: limit_bytes - len("…".encode())].decode("utf-8", "ignore") + "…"


def _short_temporary_directory() -> Path:
    """A new private directory whose name leaves room for a socket address, wherever TMPDIR points."""
    parent = tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix="ftd-notify-", dir=parent if len(os.fsencode(parent)) < 70 else "/tmp"))
