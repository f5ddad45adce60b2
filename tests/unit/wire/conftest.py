"""A control server on a loop of its own, and another user's credentials."""

import asyncio
import contextlib
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ftd.wire.server import ControlServer

BOUND_S = 10.0
NOBODY = 65534


class Serving:
    """A `ControlServer` that runs in a thread, so that tests and peers may block."""

    def __init__(self, server: ControlServer) -> None:
        self.server, self.path = server, server.path
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()
        try:
            self.run(server.start())
        except BaseException:
            self._end()
            raise

    def run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(BOUND_S)

    def close(self) -> None:
        self.run(self.server.close())
        self._end()

    def _end(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(BOUND_S)
        self.loop.close()


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Serving]]:
    """`serve(handlers, **options)` starts a server at `tmp_path/s`; all are closed at the end."""
    with contextlib.ExitStack() as stack:

        def start(handlers: dict[str, Any], *, path: Path | None = None, mode: int = 0o600, **options: Any) -> Serving:
            serving = Serving(ControlServer(path or tmp_path / "s", handlers, mode=mode, **options))
            stack.callback(serving.close)
            return serving

        yield start


@contextlib.contextmanager
def as_nobody() -> Iterator[None]:
    """The body runs with another user's credentials, which connect(2) hands to the listener."""
    os.setegid(NOBODY)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can take on another user's credentials")


@pytest.fixture
def open_path() -> Iterator[Path]:
    """A place for a socket that other users can reach; pytest's own directories are closed to them."""
    with tempfile.TemporaryDirectory(prefix="ftd-test-", dir="/tmp") as directory:
        Path(directory).chmod(0o755)
        yield Path(directory) / "s"
