"""A stream that looks for weights that code changed unnoticed: diagnostics, slow, in place of the usual one.

Version counters tell of most writes. What goes past them (`.data`, numpy, custom kernels) would be lost with the turn,
or stay for as long as the block's place is not reused. Here the bytes of a place are digested when its block is bound
and again when its turn ends; and a parameter has to arrive with the same bytes each time.
"""

from __future__ import annotations

import contextlib
import ctypes
import zlib
from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from ftd_client.stream.memory import bytes_of
from ftd_client.stream.runtime import Binding, Stream
from ftd_client.stream.units import OffloadError, Param


class CheckedStream(Stream):
    """Raises where a block's bytes are not those that arrived.

    It sees what is bound for a turn, in the ring or loaded on demand; not resident weights, which keep what is written
    to them until the next plan, nor what is fetched access by access.

    Raises, from `enter`, `leave`, `begin` and `end`, when the stream has done what it does anyway:
        OffloadError: parameters were written to; they are named.
    """

    def __init__(self, *args: Any) -> None:
        self._arrived: dict[Param, int] = {}
        super().__init__(*args)

    def enter(self, index: int) -> None:
        bound, strays = self._bound, len(self._strays)
        super().enter(index)
        if len(self._strays) > strays:
            bindings = self._strays[-1][1]
        elif self._bound != bound:
            bindings = self._bindings
        else:
            return
        found = _digests(bindings)
        other = [param for param, digest in found.items() if self._arrived.setdefault(param, digest) != digest]
        if other:
            with contextlib.suppress(OffloadError):  # of the end of this turn, which finds the same
                super().leave(index, True)
            _refuse(other, "found with other bytes than it first came to the device with")

    def leave(self, index: int, last: bool) -> None:
        stray = self._strays[-1][1] if self._strays and self._strays[-1][0] == index else ()
        changed = self._changed(stray)
        super().leave(index, last)
        if changed:
            _refuse(changed, _IN_ITS_TURN)

    def _end_turn(self) -> None:
        changed = self._changed(self._bindings)
        super()._end_turn()
        if changed:
            _refuse(changed, _IN_ITS_TURN)

    def _changed(self, bindings: Sequence[Binding]) -> list[Param]:
        return [param for param, digest in _digests(bindings).items() if self._arrived.get(param, digest) != digest]


_IN_ITS_TURN = "changed while it was on the device, where the change does not last"


def _refuse(params: Sequence[Param], what: str) -> NoReturn:
    raise OffloadError(
        f"{', '.join(param.name for param in params[:5])}: {what}; it was written to past its version counter, as "
        ".data, numpy and custom kernels do",
        "call release() before weights are changed, or name it in exclude_patterns",
    )


def _digests(bindings: Sequence[Binding]) -> dict[Param, int]:
    """Of each parameter's bytes on the device, behind everything that was computed so far."""
    return {param: _digest(view) for param, view in {b.param: b.view for b in bindings}.items()}


def _digest(view: torch.Tensor) -> int:
    host = bytes_of(view).cpu()
    return zlib.crc32((ctypes.c_char * host.nbytes).from_address(host.data_ptr()))
