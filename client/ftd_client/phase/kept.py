"""Whether somebody holds weights that stream beyond their forward: asked where no forward is watched any more."""

from __future__ import annotations

import gc
from types import FrameType

import torch
from torch import nn

from ftd_client.phase.structure import refuse_kept_views
from ftd_client.stream.hooks import refuse_kept
from ftd_client.stream.installed import Installed

_PLAIN = (torch.Tensor, nn.Parameter)


class Kept:
    """Counts who holds the ring of a plan; only where there are more of them than before, it looks who that is.

    Made before the first forward of the plan. Called while none runs.

    Attributes:
        told: the last call raised.
    """

    def __init__(self, model: nn.Module, installed: Installed) -> None:
        self._model = model
        self._installed = installed
        self._usual = self._holders()
        self.told = False

    def check(self) -> None:
        """
        Raises:
            OffloadError: a module, or somebody else, holds a view of the ring since the last call.
        """
        holders = self._holders()
        if holders > self._usual:
            self.told = True
            refuse_kept_views(self._model, self._installed.ring.holds)
            gc.collect()
            self._refuse_others()
            # frames have it, of an error that is being handled, or a graph, whose backward refuses
            holders = self._holders()
        self._usual, self.told = holders, False

    def _holders(self) -> int:
        count: int = torch._C._storage_Use_Count(self._installed.ring.storage)
        return count

    def _refuse_others(self) -> None:
        ring, views = self._installed.ring, self._installed.views()
        ours = {id(view) for _, view in views}
        found = [t for t in gc.get_objects() if type(t) in _PLAIN and id(t) not in ours and ring.holds(t)]
        for tensor in found:
            if any(holder is not found and not isinstance(holder, FrameType) for holder in gc.get_referrers(tensor)):
                address = tensor.data_ptr()
                # blocks share places
                names = [name for name, view in views if 0 <= address - view.data_ptr() < view.nbytes]
                refuse_kept(" or ".join(dict.fromkeys(names[:3])))
