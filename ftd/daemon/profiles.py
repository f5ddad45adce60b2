"""Profiles that the daemon keeps for its namespace: what one worker measured, the next one starts from.

They lie in the runtime directory and outlive the daemon. Whoever may connect may store one, so nobody is to believe
more of a profile than that it is well-formed: it is a hint, and can cost speed only.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from ftd.errors import FtdError
from ftd.plan import profile, store
from ftd.plan.profile import MAX_PROFILE_BYTES, Identity
from ftd.plan.store import ProfileStorageError
from ftd.wire import profiles as wire

log = logging.getLogger("ftd")

#: A namespace is one model on one host: that many kinds of GPU, versions of torch and configurations of it.
MAX_PROFILES = 32

T = TypeVar("T")


def directory_beside(socket: Path) -> Path:
    """`<ns>.profiles` in the runtime directory, beside the socket `<ns>.sock`."""
    return socket.with_name(socket.name.removesuffix(".sock") + ".profiles")


class Profiles:
    """The kept profiles of one namespace, and the operations on them. A context manager of the daemon's loop.

    Files are read and written, and what followers send is parsed, in one thread of its own: neither a slow disk nor
    many peers at once hold up the loop.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="profiles")
        self._damaged: dict[str, str] = {}  # by file name; replaced whole, since the loop reads it

    @property
    def warnings(self) -> list[str]:
        """Files that are no profiles, for the status."""
        return list(self._damaged.values())

    def handlers(self) -> dict[str, Callable[[Any, dict[str, Any]], Coroutine[Any, Any, dict[str, Any]]]]:
        """Operations by name, for `ControlServer`."""
        return {wire.PUT: self._on_put, wire.GET: self._on_get}

    async def __aenter__(self) -> Profiles:
        self._thread.submit(self._look_around)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # without waiting for a disk that hangs: what is being stored is stored whole or not at all, and what waits its
        # turn is gone with the connection that asked
        self._thread.shutdown(wait=False)

    async def _on_put(self, _peer: Any, args: dict[str, Any]) -> dict[str, Any]:
        return await self._beside(lambda: self._put(args))

    async def _on_get(self, _peer: Any, args: dict[str, Any]) -> dict[str, Any]:
        return await self._beside(lambda: self._get(args))

    async def _beside(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _put(self, args: dict[str, Any]) -> dict[str, Any]:
        offered = profile.decode(wire.profile_put(args, MAX_PROFILE_BYTES))
        try:
            # for the daemon's user alone: followers ask the daemon
            path = store.save(self._directory, offered, at_most=MAX_PROFILES, mode=0o700)
        except ProfileStorageError as error:
            log.warning(error.message)
            raise
        log.info("a profile was stored: %s", path.name)
        self._forget_repaired(path.name)
        return {}

    def _get(self, args: dict[str, Any]) -> dict[str, Any]:
        identity = Identity.from_map(wire.identity_asked(args))
        try:
            kept = store.read(self._directory, identity)
        except FtdError as error:
            self._warn(store.file_name(identity), error.message)
            kept = None
        return wire.get_result(None if kept is None else profile.encode(kept))

    def _look_around(self) -> None:
        """Finds what is damaged. It is left alone until it is replaced or evicted."""
        try:
            for entry in store.listing(self._directory):
                if entry.problem is not None:
                    self._warn(entry.path.name, f"{entry.path} is no profile: {entry.problem.message}")
        except FtdError as error:
            self._warn("", error.message)

    def _warn(self, name: str, text: str) -> None:
        if self._damaged.get(name) != text:
            log.warning(text)
        self._damaged = {**self._damaged, name: text}

    def _forget_repaired(self, stored: str) -> None:
        """After a store: the directory works, one file is new, another may have been evicted."""
        self._damaged = {
            name: text
            for name, text in self._damaged.items()
            if name not in ("", stored) and (self._directory / name).exists()
        }
