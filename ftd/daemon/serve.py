"""The daemon's loop: startup, tick, shutdown. One thread; loading runs beside it and only reports."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ftd.clock import NS, monotonic_ns
from ftd.config.model import DaemonConfig
from ftd.daemon import control, push, receive
from ftd.daemon.build import Generation, LoadCancelledError
from ftd.daemon.creator import materialize
from ftd.daemon.followers import OldGenerations
from ftd.daemon.gpus import Gpus
from ftd.daemon.notify import Notifier
from ftd.daemon.profiles import Profiles, directory_beside
from ftd.daemon.progress import LoadProgress
from ftd.daemon.push import Pusher
from ftd.daemon.receive import WAITING, Receiver
from ftd.daemon.reception import Reception
from ftd.daemon.signals import StopSignals
from ftd.shm.coord import CoordWriter
from ftd.shm.life import LifeLock
from ftd.shm.segment import Access, inode_of
from ftd.shm.state import State
from ftd.units import format_bytes, format_seconds
from ftd.wire.publish import Begin, Published
from ftd.wire.server import ControlServer, Handler

log = logging.getLogger("ftd")

#: A load that moves asks systemd for this much more time at every tick; one that hangs does not.
_EXTEND_S = 30.0
#: Time between two lines of progress in the log.
_LOG_EVERY_S = 5.0


class Service:
    """One run of the daemon, from an empty namespace to the stop request."""

    def __init__(
        self,
        life: LifeLock,
        coord: CoordWriter,
        config: DaemonConfig,
        access: Access,
        generation: int,
        socket: Path,
        notifier: Notifier,
    ) -> None:
        self._names = life.names
        self._coord, self._config, self._access = coord, config, access
        self._number, self._socket, self._notifier = generation, socket, notifier
        self._old = OldGenerations(life)
        self._profiles = Profiles(directory_beside(socket))
        self._gpus = Gpus()
        self._pusher = Pusher(self._gpus, allowed=config.push == "auto")
        self._progress = LoadProgress()
        self._receiver = self._make_receiver() if config.receive else None
        self._generation: Generation | None = None
        self._warnings: list[str] = []
        self._lost: set[str] = set()
        self._announced = False
        self._moved = -1
        self._logged_ns = monotonic_ns()

    async def run(self, signals: StopSignals) -> None:
        """Loads, publishes, serves until told to stop.

        Raises:
            FtdError: the generation could not be made; nothing of it is left.
        """
        loop = asyncio.get_running_loop()
        stop = asyncio.Event()
        signals.on_receive(lambda: loop.call_soon_threadsafe(stop.set))
        handlers: dict[str, Handler] = {
            **control.handlers(self._describe, stop.set),
            **self._profiles.handlers(),
            **self._pusher.handlers(),
            **(self._receiver.handlers() if self._receiver is not None else receive.refusals(self._names.namespace)),
        }
        async with (
            self._profiles,
            ControlServer(
                self._socket,
                handlers,
                mode=self._access.open_mode,
                gid=self._access.gid,
                owner_only=control.OWNER_ONLY | receive.OWNER_ONLY,
                ends_with_peer=push.ENDS_WITH_PEER | receive.ENDS_WITH_PEER,
                streams=self._receiver.streams() if self._receiver is not None else {},
            ),
        ):
            beat, chores = asyncio.create_task(self._beat()), asyncio.create_task(self._keep_house())
            try:
                await self._publish(stop, beat, chores)
                await _first(stop, beat, chores)
                log.info("stopping%s", f" ({signals.received})" if signals.received else "")
                self._notifier.stopping("stopping")
                self._coord.drain()
            finally:
                for task in (beat, chores):
                    task.cancel()
                await asyncio.gather(beat, chores, return_exceptions=True)  # theirs, if any, is on its way already
                if self._receiver is not None:
                    await self._receiver.close()
                self._gpus.close()
                # before its sources go; unpinning waits for no copy
                if not await self._pusher.close():
                    log.error("a GPU does not answer: the weights stay page-locked until this process has ended")
                elif self._generation is not None:
                    # unregistering pinned pages takes a second per 50 GB: not in the loop
                    await asyncio.to_thread(self._generation.close)
        self._coord.stopped()

    def _describe(self) -> dict[str, Any]:
        stage = self._progress.text() if self._coord.record.state is State.LOADING else None
        received = self._receiver.warnings if self._receiver is not None else []
        warnings = [*self._warnings, *self._gpus.warnings, *received, *self._profiles.warnings]
        return control.describe(self._generation, stage, self._pusher, warnings)

    async def _publish(self, stop: asyncio.Event, *others: asyncio.Task[None]) -> None:
        if self._receiver is not None:
            log.info(WAITING)
            load = asyncio.create_task(self._receiver.receive())
        else:
            load = asyncio.create_task(asyncio.to_thread(self._materialize))
        try:
            await _first(stop, load, *others)
        finally:
            self._progress.cancel()  # no effect on a load that is done
            if self._receiver is not None and not load.done():
                await self._receiver.close()
            with contextlib.suppress(LoadCancelledError):
                self._generation = await load
        if self._generation is None or stop.is_set():
            return
        made = self._generation
        pinned = made.pinned
        if pinned.kind == "cuda" and pinned.cuda is not None:
            self._gpus.watch(pinned.cuda, pinned.ordinal)
            self._pusher.serve(self._number, [fact.inode for fact in made.facts], made.regions)
        else:
            self._pusher.serve_none(pinned.why_not_cuda)
        self._coord.beat(self._progress.snapshot())
        self._coord.publish(self._number, made.manifest_bytes, made.manifest_digest)
        text = (
            f"ready: generation {self._number}, {len(made.manifest.tensors)} tensors,"
            f" {format_bytes(made.manifest.tensor_bytes)}, pin {made.pinned.kind}, {self._speed()}"
        )
        log.info(text)
        self._announced = self._notifier.ready(text)
        if self._receiver is not None:
            manifest = made.manifest
            self._receiver.announce(
                Published(
                    self._number,
                    manifest.fingerprint,
                    manifest.digest() or "",
                    len(manifest.tensors),
                    manifest.tensor_bytes,
                )
            )

    def _make_receiver(self) -> Receiver:
        def opener(publisher: str, told: Begin, note: Callable[[str], None]) -> Reception:
            return Reception(
                self._names,
                self._number,
                self._config,
                self._access,
                self._progress,
                make_room=self._old.reclaim,
                holders=self._old.describe_holders,
                note=note,
                publisher=publisher,
                told=told,
            )

        threads = self._config.read_threads
        return Receiver(self._names.namespace, opener, self._progress, threads=threads)

    def _materialize(self) -> Generation:
        self._old.reclaim()  # first: the new generation may need the room
        return materialize(
            self._names,
            self._number,
            self._config,
            self._access,
            self._progress,
            holders=self._old.describe_holders,
            note=self._note,
        )

    def _note(self, text: str) -> None:
        """From the loader's thread: appending is atomic, and logging is thread-safe."""
        self._warnings.append(text)
        log.warning(text)

    async def _beat(self) -> None:
        """The heartbeat: proof that this loop moves, for followers and for systemd's watchdog alike."""
        # below the watchdog's interval, and below the time that a moving load asks for
        interval_s = min(self._config.heartbeat_s, (self._notifier.watchdog_s or _EXTEND_S) / 2)
        while True:
            self._coord.beat(self._progress.snapshot())
            self._notifier.watchdog()
            if self._coord.record.state is State.LOADING:
                self._report_load()
                if self._receiver is not None:
                    # to its manager it has started: what publishes is ordered after it, and would else never start
                    self._announced = self._announced or self._notifier.ready(WAITING)
            else:
                self._announced = self._announced or self._notifier.ready("ready")
            await asyncio.sleep(interval_s)

    async def _keep_house(self) -> None:
        """What may take long: the kernel frees 4 GiB a second of small pages, and the heart beats meanwhile."""
        while True:
            if self._coord.record.state is State.READY:
                await asyncio.to_thread(self._old.reclaim, self._number)
                self._check_names()
            self._gpus.log_changes()
            await asyncio.sleep(self._config.heartbeat_s)

    def _report_load(self) -> None:
        if self._receiver is not None and self._receiver.is_waiting:
            self._notifier.status(WAITING)
            return
        text = self._progress.text()
        self._notifier.status(text)
        if self._progress.moved != self._moved:
            self._moved = self._progress.moved
            self._notifier.extend_timeout(_EXTEND_S)
        now = monotonic_ns()
        if now - self._logged_ns >= _LOG_EVERY_S * NS:
            self._logged_ns = now
            log.info("%s, %s", text, self._speed())

    def _speed(self) -> str:
        progress = self._progress.snapshot()
        if not progress.started_ns:
            return "not started"
        seconds = ((progress.ended_ns or monotonic_ns()) - progress.started_ns) / NS
        rate = progress.bytes_done / seconds if seconds else 0.0
        return f"{format_bytes(progress.bytes_done)} in {format_seconds(seconds)} ({format_bytes(rate)}/s)"

    def _check_names(self) -> None:
        """Somebody may remove names under a living daemon (logind's RemoveIPC does): new followers fail then."""
        if self._generation is None:
            return
        wanted = {fact.name: fact.inode for fact in self._generation.facts}
        lost = {name for name, inode in wanted.items() if inode_of(name) != inode}
        if not self._coord.still_named():
            lost.add(self._names.coord)
        for name in sorted(lost - self._lost):
            self._warnings.append(f"{name} was removed by somebody: new followers cannot attach; restart the daemon")
            log.error(self._warnings[-1])
        self._lost = lost


async def _first(stop: asyncio.Event, *tasks: asyncio.Task[Any]) -> None:
    """Returns when told to stop or when a task ends; a task's exception is raised."""
    waiter = asyncio.create_task(stop.wait())
    try:
        done, _ = await asyncio.wait([waiter, *tasks], return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        waiter.cancel()
