"""Weights handed out in memory of their own, to whoever reached for one where its stand-in is.

A write there is lost with that memory, so it has to be told. Nothing of the memory is held for that: of each tensor
stays a *witness*, an empty tensor that shares its version counter, until the storage is gone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ftd_client.stream.units import OffloadError, Param

#: So many witnesses are not worth a look at whose storage is gone: 1 µs each.
_FEW = 64


class _Witness(NamedTuple):
    name: str
    counter: torch.Tensor
    version: int
    storage: StorageWeakRef

    @staticmethod
    def of(name: str, tensor: torch.Tensor) -> _Witness:
        with torch.inference_mode(False), torch.no_grad():
            counter = tensor.detach()
            counter.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return _Witness(name, counter, counter._version, _weak(tensor))


class Lent:
    """Knows of writes to what was handed out, and to any view of it, however late they come and whoever makes them.

    Called with the model's lock held, but for `refused`.
    """

    def __init__(self) -> None:
        self._witnesses: list[_Witness] = []
        self._most = _FEW
        self._refused: deque[StorageWeakRef] = deque()
        self._written: dict[str, None] = {}

    def add(self, params: Sequence[Param], tensors: Sequence[torch.Tensor]) -> None:
        """Parameters are handed out as these tensors, each of which has a storage of its own."""
        if len(self._witnesses) > self._most:
            self._look()
            self._most = max(_FEW, 2 * len(self._witnesses))
        self._witnesses += [_Witness.of(p.name, tensor) for p, tensor in zip(params, tensors, strict=True)]

    def refused(self, tensor: torch.Tensor) -> None:
        """A write to it was told where it was made. Any thread may call."""
        self._refused.append(_weak(tensor))

    def check(self) -> None:
        """
        Raises:
            OffloadError: some were written to since the last time, and that is lost; each write is told once.
        """
        self._look()
        if self._written:
            names, self._written = list(self._written), {}
            raise OffloadError(
                f"changed while offloaded, which does not last: {', '.join(names[:5])}",
                "call release() before weights are changed, and offload again",
            )

    def _look(self) -> None:
        told = [self._refused.popleft() for _ in range(len(self._refused))]
        told_of = {storage.cdata for storage in told}
        left = []
        for witness in self._witnesses:
            # asked first: what is written before it goes is seen
            gone = witness.storage.expired()  # type: ignore[no-untyped-call]
            version = witness.counter._version
            if version != witness.version and witness.storage.cdata not in told_of:
                self._written[witness.name] = None
            if not gone:
                left.append(witness._replace(version=version))
        self._witnesses = left


def _weak(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
