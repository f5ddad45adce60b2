"""Streaming by access: each parameter is fetched when something reaches for it, into memory of its own.

The way to run models whose forwards cannot be patched, and to measure with little memory. Slower than `Stream`, whose
places are fixed: every block is allocated anew, and lives as long as anything refers to it. Blocks are fetched ahead in
the order in which they were reached before, as many bytes as the plan's ring has.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from ftd_client.stream.link import Link, LinkError, Ticket
from ftd_client.stream.units import Param


class _Arrival(NamedTuple):
    tensors: dict[Param, torch.Tensor]
    versions: list[int]
    ticket: Ticket

    def written(self) -> bool:
        return [tensor._version for tensor in self.tensors.values()] != self.versions


class Loose:
    """Fetches blocks of parameters, in memory of their own, ahead of their use. Called with the model's lock held.

    Args:
        blocks: parameters that are fetched together, in the order of execution.
        window_bytes: fetched at most, beyond the block that is in use.
        submit: allocates tensors for parameters and starts the copies into them.
    """

    def __init__(
        self,
        blocks: Sequence[Sequence[Param]],
        window_bytes: int,
        link: Link,
        submit: Callable[[Sequence[Param]], tuple[list[torch.Tensor], Ticket]],
    ) -> None:
        self._blocks = tuple(tuple(block) for block in blocks)
        self._index = {param: i for i, block in enumerate(self._blocks) for param in block}
        self._window_bytes = window_bytes
        self._link = link
        self._submit = submit
        self._here: dict[int, _Arrival] = {}
        self._current = -1

    def fetch(self, param: Param) -> torch.Tensor | None:
        """The parameter's tensor, on the device for what is computed next; None of one that no block holds."""
        self.prepare(param)
        index = self._index.get(param)
        if index is None:
            return None
        tensor = self._here[index].tensors[param]
        if tensor.is_cuda:  # allocated on the stream that fetched it ahead, which may have been another one
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
        return tensor

    def prepare(self, param: Param) -> None:
        """Makes compute wait for the parameter's block, and starts the copies of those behind it."""
        index = self._index.get(param)
        if index is not None:
            if index in self._here and self._here[index].written():
                self._drop(index)  # no longer what the weight is: who wrote to it is told by others
            if index != self._current or index not in self._here:
                self._move_to(index)
            self._link.wait(self._here[index].ticket)

    def close(self) -> None:
        for block in list(self._here):
            self._drop(block)
        self._current = -1

    def _move_to(self, index: int) -> None:
        wanted = [index, *self._ahead(index)]
        for gone in self._here.keys() - set(wanted):
            self._drop(gone)
        for block in wanted:
            if block not in self._here:
                params = self._blocks[block]
                tensors, ticket = self._submit(params)
                self._here[block] = _Arrival(
                    dict(zip(params, tensors, strict=True)), [tensor._version for tensor in tensors], ticket
                )
        self._current = index

    def _drop(self, block: int) -> None:
        # held until compute waits for its copy: its memory may be reused at once
        arrival = self._here.pop(block)
        with contextlib.suppress(LinkError):  # a copy that failed has ended too
            self._link.wait(arrival.ticket)

    def _ahead(self, index: int) -> Iterator[int]:
        room = self._window_bytes
        for step in range(1, len(self._blocks)):
            block = (index + step) % len(self._blocks)
            room -= sum(param.nbytes for param in self._blocks[block])
            if room < 0:
                return
            yield block
