"""What torch says of threads and streams, for the fake GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ftd_client.stream import cuda_link
from tests.fake_cuda import FakeCuda


class Threads:
    """What torch says of the calling thread, for a fake GPU: its device, and its stream there."""

    def __init__(self, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
        self._cuda = cuda
        self.stream = cuda.new_stream()
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: cuda.current)
        monkeypatch.setattr(cuda_link, "_current_device", lambda: cuda.current)
        monkeypatch.setattr(cuda_link, "_is_capturing", lambda: self.stream in cuda.capturing)
        monkeypatch.setattr(cuda_link, "_current_stream", lambda ordinal: self.stream)
        monkeypatch.setattr(torch.cuda, "device", self._device)
        monkeypatch.setattr(torch.cuda, "init", lambda: None)

    @contextlib.contextmanager
    def _device(self, device: Any) -> Iterator[None]:
        before, index = self._cuda.current, device if isinstance(device, int) else device.index
        self._cuda.current = before if index is None else index
        yield
        self._cuda.current = before
