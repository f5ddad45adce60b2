"""Weights in shared memory and the daemon's end of a push, in this process, over a fake GPU."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ftd.clock import NS, Deadline, monotonic_ns
from ftd.cuda.pin import Region
from ftd.daemon.gpus import Gpus
from ftd.daemon.push import ENDS_WITH_PEER, Pusher
from ftd.owner import Owner
from ftd.shm.coord import CoordRecord, CoordWriter
from ftd.shm.layout import Extent, Placed
from ftd.shm.manifest import Manifest, SegmentFact
from ftd.shm.names import Names
from ftd.shm.segment import Access, Segment
from ftd.shm.state import State
from ftd.tensorspec import TensorSpec
from ftd.wire.peer import Peer
from ftd.wire.server import ControlServer
from ftd_client.load.arenas import ALIGNMENT
from ftd_client.load.pull import Pull
from ftd_client.load.push import Inquiry
from ftd_client.load.shipment import Shipment
from ftd_client.views import SharedWeights
from tests.fake_cuda import FakeCuda
from tests.unit.wire.conftest import BOUND_S, Serving

GENERATION = 4
SEGMENT_BYTES = (64 * 4096, 16 * 4096)


def shared_weights(
    namespace: str, tensors: Mapping[str, tuple[str, tuple[int, ...], int, int]], *, seed: int = 0
) -> SharedWeights:
    """Segments of random bytes, already without names.

    Args:
        tensors: name → type, shape, segment and offset.
    """
    facts, mappings, pages = [], [], []
    for number, nbytes in enumerate(SEGMENT_BYTES):
        with Segment.create(f"/ftdl.{uuid.uuid4().hex}", nbytes, Access()) as segment:
            segment.unlink()
            segment.write(random.Random(seed + number).randbytes(nbytes))
            mappings.append(segment.map_private())
            pages.append(segment.map_shared())
            facts.append(SegmentFact(segment.name, nbytes, segment.inode))
    placed = []
    for name, (dtype, shape, number, offset) in tensors.items():
        spec = TensorSpec(name, dtype, shape)
        placed.append(Placed(spec, 0, Extent(number, offset, spec.nbytes)))
    manifest = Manifest(namespace, GENERATION, "f", "s", {}, 0.0, tuple(facts), 0, ("",), tuple(placed))
    return SharedWeights(manifest, mappings, pages)


class FakeDaemon:
    """A namespace's creator, as far as followers see it while they load.

    Attributes:
        pushes, pings: how often it was asked for one, and for its status.
        answer: asked instead of the pusher, where there is one.
        hangs: to a status it says nothing.
    """

    def __init__(self, namespace: str, weights: SharedWeights, cuda: FakeCuda, folder: Path, owner: Owner) -> None:
        self._gpus = Gpus()
        self.pusher = Pusher(self._gpus, allowed=True, runtime=cuda.load)
        self.serve(weights)
        self.pushes = self.pings = 0
        self.answer: Callable[[Peer, dict[str, Any]], Any] | None = None
        self.hangs = False
        handlers = {"status": self._status, "push": self._push}
        server = ControlServer(
            folder / "ns.sock", handlers, mode=0o600, ends_with_peer=ENDS_WITH_PEER, close_grace_s=0.1
        )
        self.serving = Serving(server)
        now = monotonic_ns()
        record = CoordRecord(owner, State.LOADING, 0, now, NS, 1000 * NS, now, str(server.path))
        self._coord = CoordWriter(Names(namespace), Access(), record)
        self._coord.publish(GENERATION, 0, b"")

    def serve(self, weights: SharedWeights) -> None:
        sources = [Region(mapped.address, mapped.nbytes) for mapped in weights.shared]
        self.pusher.serve(GENERATION, weights.inodes, sources)

    def end(self) -> None:
        self._coord.unlink()
        self._coord.close()
        self.serving.run(self.pusher.close())
        self._gpus.close()
        self.serving.close()

    async def _status(self, peer: Peer, args: dict[str, Any]) -> dict[str, Any]:
        self.pings += 1
        if self.hangs:
            await asyncio.sleep(BOUND_S)
        return {}

    async def _push(self, peer: Peer, args: dict[str, Any]) -> dict[str, Any]:
        self.pushes += 1
        if self.answer is not None:
            return dict(await self.answer(peer, args))
        return await self.pusher.handlers()["push"](peer, args)


@contextlib.contextmanager
def daemon_of(
    namespace: str, weights: SharedWeights, cuda: FakeCuda, folder: Path, owner: Owner | None = None
) -> Iterator[FakeDaemon]:
    made = FakeDaemon(namespace, weights, cuda, folder, owner or Owner.current())
    try:
        yield made
    finally:
        made.end()


class FakeShipment(Shipment):
    """On the CPU, whose memory the fake takes for that of a GPU: inside of larger allocations, as torch's are."""

    def __init__(
        self,
        weights: SharedWeights,
        extents: Any,
        device: torch.device,
        cuda: FakeCuda,
        ordinal: int,
        inquiry: Inquiry,
        pull: Callable[[], Pull],
    ) -> None:
        self.cuda_memory, self._at = cuda, ordinal
        super().__init__(weights, extents, torch.device("cpu"), cuda, ordinal, inquiry, pull)

    def _allocate(self) -> None:
        super()._allocate()
        with torch.inference_mode(False):
            self._memory = [self._inside(memory.nbytes) for memory in self._memory]

    def _inside(self, nbytes: int) -> torch.Tensor:
        whole = bytearray(b"\xee" * (nbytes + 5 * ALIGNMENT))
        address = torch.frombuffer(whole, dtype=torch.uint8).data_ptr()
        self.cuda_memory.adopt(address, len(whole), self._at)
        start = 3 * ALIGNMENT - address % ALIGNMENT
        return torch.frombuffer(whole, dtype=torch.uint8, offset=start, count=nbytes)


def fake_device(cuda: FakeCuda) -> Any:
    """`torch.cuda.device` of the fake's."""

    class Device:
        def __init__(self, device: Any) -> None:
            self.ordinal = device if isinstance(device, int) else device.index or 0

        def __enter__(self) -> None:
            self.before, cuda.current = cuda.current, self.ordinal

        def __exit__(self, *_: object) -> None:
            cuda.current = self.before

    return Device


def bounded(work: Callable[[], Any]) -> Any:
    """Its result, or its error, within a bound."""
    got: list[Any] = []

    def run() -> None:
        try:
            got.append((work(), None))
        except BaseException as error:
            got.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(BOUND_S)
    assert got, "it hangs"
    value, error = got[0]
    if error is not None:
        raise error
    return value


def eventually(what: str, condition: Callable[[], bool]) -> None:
    deadline = Deadline.after(BOUND_S)
    while not condition():
        assert not deadline.expired(), what
        deadline.pause(0.005)
