"""Copies of parameters into device memory: what a plan's memory and demand are filled by."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn

from ftd_client.stream.courier import Courier
from ftd_client.stream.host import Host
from ftd_client.stream.layout import Layout, Piece, TransferMode, lay_out
from ftd_client.stream.lent import Lent
from ftd_client.stream.link import Copy, Link, Ticket
from ftd_client.stream.memory import Memory
from ftd_client.stream.units import Param


class Loader:
    """Copies of parameters into device memory: what a plan's memory and demand are filled by.

    Args:
        courier: brings what it can of what stays on the device.

    Attributes:
        lent: what was handed out in memory of its own.
    """

    def __init__(self, host: Host, link: Link, mode: TransferMode, courier: Courier | None = None) -> None:
        self._host = host
        self._link = link
        self._mode = mode
        self._courier = courier
        self.lent = Lent()

    def layout(self, params: Sequence[Param]) -> Layout:
        """The place that parameters take together."""
        return lay_out([Piece(self._host.addresses[p.name], p.nbytes) for p in params], self._mode)

    def copies(self, layout: Layout, address: int) -> tuple[Copy, ...]:
        """Those that fill such a place at an address of the device."""
        return self._split(_filling(layout, address))

    def want(self, params: Iterable[Param]) -> None:
        """Says which parameters are copied again and again, in order."""
        self._host.want([(self._host.addresses[param.name], param.nbytes) for param in params])

    def fill(self, arenas: Sequence[tuple[Memory, Sequence[tuple[Layout, int]]]]) -> tuple[list[Memory], str]:
        """Fills places of fresh memories, at these offsets; they are there for what is computed next.

        Returns:
            The memories, which are others where those may still be written to; and which way most bytes came: `push`,
            `pull` or `copy`.
        """
        loads = [
            (memory, [copy for layout, offset in places for copy in _filling(layout, memory.address + offset)])
            for memory, places in arenas
        ]
        memories = [memory for memory, _ in loads]
        copies: Sequence[Copy] = [copy for _, each in loads for copy in each]
        way = ""
        if self._courier is not None:
            memories, copies, way = self._courier.bring(loads)
        if copies:
            self._wait(self._link.submit(self._split(copies)))
        return memories, way or "copy"

    def _split(self, copies: Iterable[Copy]) -> tuple[Copy, ...]:
        return tuple(piece for copy in copies for piece in self._host.split(copy))

    def submit(self, params: Sequence[Param]) -> tuple[list[torch.Tensor], Ticket]:
        """Parameters to be handed out, in fresh memory of their own, and the ticket of the copies into them."""
        tensors, ticket = self._submit(params)
        self.lent.add(params, tensors)
        return tensors, ticket

    def lend(self, params: Sequence[Param]) -> list[torch.Tensor]:
        """Parameters to be handed out, there for what is computed next."""
        tensors = self.load(params)
        self.lent.add(params, tensors)
        return tensors

    def _submit(self, params: Sequence[Param]) -> tuple[list[torch.Tensor], Ticket]:
        with torch.inference_mode(False), torch.no_grad():
            fresh = [
                torch.empty_strided(p.tensor.shape, p.tensor.stride(), dtype=p.tensor.dtype, device=self._link.device)
                for p in params
            ]
            copies = [
                piece
                for param, tensor in zip(params, fresh, strict=True)
                for piece in self._host.split(Copy(tensor.data_ptr(), self._host.addresses[param.name], param.nbytes))
            ]
            parameters: list[torch.Tensor] = [as_parameter(tensor, p) for tensor, p in zip(fresh, params, strict=True)]
            return parameters, self._link.submit(copies)

    def load(self, params: Sequence[Param]) -> list[torch.Tensor]:
        """Parameters in fresh memory, there for what is computed next. Whoever asks looks at their versions."""
        tensors, ticket = self._submit(params)
        self._wait(ticket)
        return tensors

    def _wait(self, ticket: Ticket) -> None:
        try:
            self._link.wait(ticket)
        except BaseException:
            # interrupted, or an earlier copy failed: the memory must not go while it is written
            self._link.drain()
            raise


def _filling(layout: Layout, address: int) -> Iterator[Copy]:
    return (Copy(address + run.offset, run.address, run.nbytes) for run in layout.runs)


def as_parameter(tensor: torch.Tensor, param: Param) -> nn.Parameter:
    """A tensor of the device as what stood in the module, with the attributes that it had."""
    parameter = nn.Parameter(tensor, requires_grad=False)
    parameter.__dict__.update(param.tensor.__dict__)
    return parameter
