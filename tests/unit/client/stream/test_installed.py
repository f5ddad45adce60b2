"""What fills a plan's memory and demand: nothing is given back while a copy may still write to it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import pytest
import torch

from ftd.plan.strategy import EvenSpread
from ftd_client.stream.courier import Delivery, Load
from ftd_client.stream.host import Source
from ftd_client.stream.installed import Installed
from ftd_client.stream.link import LinkError
from ftd_client.stream.loader import Loader
from ftd_client.stream.memory import Memory
from ftd_client.stream.residents import Residents

from .toys import CPU, Toy


@pytest.mark.parametrize("ask", [Loader.load, Loader.lend])
def test_a_load_that_fails_lets_go_of_no_memory_that_is_still_written(ask: Callable[..., object]) -> None:
    toy = Toy([[100, 100]] * 2)
    toy.link.drain()
    toy.link.fail = True
    before = len(toy.link.jobs)
    with pytest.raises(LinkError, match="injected"):
        ask(toy.loader, toy.params[:2])
    (job,) = toy.link.jobs[before:]
    assert len(job.copies) == 2
    assert job.done, "its memory is somebody else's by now"


def test_one_interrupted_lets_go_of_none_either(monkeypatch: pytest.MonkeyPatch) -> None:
    toy = Toy([[100]] * 2)

    def interrupted(_ticket: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(toy.link, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        toy.loader.load(toy.params[:1])
    assert all(job.done for job in toy.link.jobs)


class Elsewhere:
    """A courier that brings every other copy, into memory of its own."""

    why = ""

    def __init__(self) -> None:
        self.memory: Memory | None = None

    def bring(self, loads: Sequence[Load]) -> Delivery:
        ((memory, copies),) = loads
        self.memory = other = Memory(memory.nbytes, memory.device)
        moved = [copy._replace(dst=copy.dst - memory.address + other.address) for copy in copies]
        for copy in moved[::2]:
            ctypes.memmove(copy.dst, copy.src, copy.nbytes)
        return Delivery([other], moved[1::2], "push")


def _planned_again(toy: Toy, courier: Elsewhere | None) -> Installed:
    """The toy's plan with its residents brought by somebody."""
    toy.installed.close()
    toy.residents.close()
    loader = Loader(toy.host, toy.link, "allocation_block_transfer", courier)  # type: ignore[arg-type]
    residents = Residents(toy.parked, loader, CPU)
    return Installed(toy.plan, toy.known, [], toy.parked, residents, loader, toy.link, toy.lock)


def test_what_is_resident_lies_where_it_was_brought() -> None:
    toy, courier = Toy([[600] * 3] * 4, strategy=EvenSpread(), budget_bytes=8192), Elsewhere()
    assert len(toy.installed.resident) > 2
    installed = _planned_again(toy, courier)
    toy.link.drain()
    assert installed.residents.way == "push"
    assert courier.memory is not None
    for unit in installed.resident:
        tensor = installed.residents.tensor_of(unit.params[0])
        assert tensor is not None
        assert courier.memory.holds(tensor)
        assert torch.equal(tensor, toy.bytes[unit])
    installed.close()
    assert courier.memory.nbytes == installed.residents.nbytes, "the next plan may want it"
    installed.residents.close()
    assert courier.memory.nbytes == 0, "given back"


def test_without_anybody_it_comes_by_the_link() -> None:
    toy = Toy([[600] * 3] * 4, strategy=EvenSpread(), budget_bytes=8192)
    assert toy.installed.residents.way == "copy"


def test_the_host_is_told_what_streams_in_order_before_any_of_it_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    toy = Toy([[600] * 3] * 4, strategy=EvenSpread(), budget_bytes=8192)
    told: list[tuple[list[Source], int]] = []
    before = len(toy.link.jobs)
    monkeypatch.setattr(toy.host, "want", lambda sources: told.append((list(sources), len(toy.link.jobs))))
    installed = _planned_again(toy, None)
    streamed = [unit.params[0] for block in installed.streamed for unit in block]
    assert told == [([(toy.host.addresses[param.name], param.nbytes) for param in streamed], before)]
    assert 0 < len(streamed) < len(toy.params)
    installed.close()
