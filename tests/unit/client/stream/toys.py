"""A plan at work over real bytes, with a link that copies as late as it may, or whenever a test says."""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn

from ftd.plan.block import Block
from ftd.plan.cost import CopyCost
from ftd.plan.plan import Plan
from ftd.plan.problem import Problem
from ftd.plan.strategy import AllStreamed, Strategy, make_plan
from ftd_client.stream.host import Host, own_host
from ftd_client.stream.installed import Installed, put_all
from ftd_client.stream.layout import TransferMode
from ftd_client.stream.link import Copy, LinkError, Ticket
from ftd_client.stream.loader import Loader
from ftd_client.stream.parked import Access, Parked
from ftd_client.stream.residents import Residents
from ftd_client.stream.units import Param, Unit, make_units
from ftd_client.walk import walk

CPU = torch.device("cpu")
LINK_COST = CopyCost(0.0, 1e9)


class Job(Ticket):
    """Copies that have been made, or not."""

    __slots__ = ("copies", "done")

    def __init__(self, copies: Sequence[Copy]) -> None:
        self.copies = tuple(copies)
        self.done = False


class LazyLink:
    """First in, first out, and nothing before somebody waits for it or calls `run`."""

    device = CPU

    def __init__(self) -> None:
        self.queue: deque[Job] = deque()
        self.jobs: list[Job] = []
        self.waits: list[Ticket] = []
        self.fail = False

    def submit(self, copies: Sequence[Copy]) -> Ticket:
        job = Job(copies)
        self.queue.append(job)
        self.jobs.append(job)
        return job

    def wait(self, ticket: Ticket) -> None:
        assert isinstance(ticket, Job)
        if self.fail:
            raise LinkError("copying failed: injected")
        self.waits.append(ticket)
        while not ticket.done:
            self.run(1)

    def run(self, count: int) -> None:
        for _ in range(min(count, len(self.queue))):
            job = self.queue.popleft()
            for copy in job.copies:
                ctypes.memmove(copy.dst, copy.src, copy.nbytes)
            job.done = True

    def drain(self) -> None:
        self.run(len(self.queue))

    def close(self) -> None:
        self.drain()


class Holder(nn.Module):
    """A module with one parameter of so many bytes, all of them its own number."""

    def __init__(self, number: int, nbytes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((nbytes,), number % 255 + 1, dtype=torch.uint8), requires_grad=False)


class Layer(nn.Module):
    def __init__(self, holders: Sequence[Holder]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(holders)


class Toy:
    """`sizes` are bytes of units by layer. What no plan knows of is in `unplanned`."""

    def __init__(
        self,
        sizes: Sequence[Sequence[int]],
        *,
        unplanned: int = 0,
        mode: TransferMode = "allocation_block_transfer",
        strategy: Strategy | None = None,
        num_blocks: int = 2,
        budget_bytes: int | None = None,
        granularity: str = "auto",
    ) -> None:
        numbers = iter(range(1, 10_000))
        self.model = nn.ModuleDict(
            {"layers": nn.ModuleList(Layer([Holder(next(numbers), n) for n in layer]) for layer in sizes)}
        )
        parts = walk(self.model)
        managed = {g.name: ".".join(g.name.split(".")[:2]) for g in parts.parameters}
        units, rest = make_units(self.model, parts, managed, ties=False)
        assert not rest
        self.bytes = {unit: unit.params[0].tensor.detach().clone() for unit in units}
        self.params: list[Param] = [unit.params[0] for unit in units]
        self.link = LazyLink()
        self.host: Host = own_host([[(p.name, p.tensor)] for p in self.params], pinned=False, mode="torch", device=CPU)
        self.loader = Loader(self.host, self.link, mode)
        self.lock = threading.RLock()
        self.parked = {
            p: Parked.of(p.name, p.tensor, CPU, Access(partial(self._fetch, p), partial(_tensor, p), _nothing))
            for p in self.params
        }
        put_all(self.parked, self.parked.__getitem__)
        self.units = units
        self.known = units[: len(units) - unplanned]
        unknown = units[len(units) - unplanned :]
        problem = Problem(
            tuple(Block(i, u.name, u.layer, u.nbytes, 1000) for i, u in enumerate(self.known)),
            LINK_COST,
            budget_bytes,
            num_blocks=num_blocks,
            min_blocks=min(2, num_blocks),
            granularity=granularity,  # type: ignore[arg-type]
        )
        self.plan: Plan = make_plan(problem, strategy or AllStreamed())
        self.residents = Residents(self.parked, self.loader, CPU)
        self.installed = Installed(
            self.plan, self.known, unknown, self.parked, self.residents, self.loader, self.link, self.lock
        )
        self.stream = self.installed.stream
        #: of a unit that streams: its step, and whether it is the last of it
        self.steps: dict[Unit, tuple[int, bool]] = {
            unit: (index, unit is block[-1]) for index, block in enumerate(self.installed.streamed) for unit in block
        }

    def _fetch(self, param: Param) -> torch.Tensor:
        return self.loader.load([param])[0]

    def found(self, unit: Unit) -> torch.Tensor:
        """What stands in the module's place now."""
        assert unit.scope is not None
        return unit.scope._parameters["weight"]  # type: ignore[return-value]

    def is_parked(self, unit: Unit) -> bool:
        return self.found(unit) is self.parked[unit.params[0]]

    def check(self) -> None:
        """Whatever is in a module's place has that parameter's bytes."""
        for unit in self.units:
            if not self.is_parked(unit):
                assert torch.equal(self.found(unit), self.bytes[unit]), f"{unit.name} has another's bytes"

    def call(self, unit: Unit, inside: Callable[[], None] = lambda: None) -> None:
        """A forward of the unit's scope."""
        index, last = self.steps[unit]
        self.stream.enter(index)
        try:
            self.check()
            assert not self.is_parked(unit)
            inside()
            self.check()
        finally:
            self.stream.leave(index, last)

    def forward(self, units: Sequence[Unit] | None = None) -> None:
        """A forward of the whole model."""
        self.stream.begin()
        for unit in self.streamed if units is None else units:
            self.call(unit)
        self.stream.end()

    @property
    def streamed(self) -> list[Unit]:
        """In the order of execution."""
        return [unit for unit in self.known if unit in self.steps]


def _nothing(_tensor: torch.Tensor) -> None:
    """A write that was refused is nobody else's business here."""


def _tensor(param: Param) -> torch.Tensor:
    return param.tensor
