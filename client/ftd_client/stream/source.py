"""Where an offloaded model's weights come from: the shared memory of a creator, or its own CPU tensors."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Protocol

import torch
from torch import nn

from ftd.config.offload import OffloadConfig
from ftd.cuda.runtime import load_runtime
from ftd.shm.names import Names
from ftd.shm.slots import Turns
from ftd_client.bound import strangers, weights_of
from ftd_client.follower import Follower, attach
from ftd_client.stream.courier import Courier
from ftd_client.stream.host import Host, own_host
from ftd_client.stream.shared import SharedHost, shared_host
from ftd_client.stream.units import OffloadError, Param
from ftd_client.views import SharedWeights
from ftd_client.walk import modules_by_name, on_meta


class Source(Protocol):
    """Opened before the model is taken apart, closed after it was put together again.

    Attributes:
        shared: the weights are views of shared memory, which cost nothing to hold on to.
        namespace: of the creator; empty where there is none.
    """

    shared: bool
    namespace: str

    def host(self, blocks: Sequence[Sequence[Param]], device: torch.device) -> Host:
        """Where the bytes of parameters lie, by `Param.name`; those of a block belong together."""

    def courier(self) -> Courier | None:
        """Who brings what stays on the device; None where that comes as the rest does. After `host`."""

    def tell(self, device: torch.device, planned: int, resident: int, streamed: int, host: Host) -> None:
        """Says to whoever watches how much of the model is where."""

    def close(self) -> None:
        """Lets go. The model's tensors stay valid."""


class SharedSource:
    """The weights of a running creator: bound to a model on meta, or those that a model shows already."""

    shared = True

    def __init__(self, model: nn.Module, config: OffloadConfig) -> None:
        assert config.shm_namespace is not None
        self._pin = config.pinned_memory
        self.namespace = config.shm_namespace
        self.follower: Follower = attach(config.shm_namespace, timeout=config.shm_wait_timeout)
        try:
            self._weights = self._bind(model)
            self._courier: Courier | None = None
        except BaseException:
            self.follower.close()
            raise

    def _bind(self, model: nn.Module) -> SharedWeights:
        """A model that was bound to the same generation before, by whomever, stays so, with what it changed."""
        weights, before = self.follower.weights, weights_of(model)
        if before is None or all(parameter.is_meta for parameter in model.parameters()):
            self.follower.bind(model)
            return weights
        if before.identity != weights.identity:
            raise OffloadError(
                f"{type(model).__qualname__} shows {before.title}; {weights.title} expected",
                "offload a model that was newly built on meta",
            )
        others = strangers(model, before)
        if others:
            raise OffloadError(
                f"{type(model).__qualname__} was bound to {self.namespace!r}, and {len(others)} of its parameters were "
                f"exchanged since: {', '.join(others[:5])}",
                "set shm_enabled=False to offload its own weights, or build it on meta again",
            )
        return before

    def host(self, blocks: Sequence[Sequence[Param]], device: torch.device) -> Host:
        weights = self._weights
        stored = {
            param.name: next(name for name in param.group.names if name in weights.specs)
            for block in blocks
            for param in block
        }
        turns = partial(Turns.of, Names(weights.namespace))
        names = list(dict.fromkeys(stored.values()))
        host = shared_host(weights, names, pin=self._pin, device=device, turns=turns)
        host.addresses = {name: host.addresses[there] for name, there in stored.items()}
        there = weakref.ref(host)  # it is told of by a thread of its own, which is not to keep it

        def told() -> None:
            alive = there()
            if alive is not None:
                self.follower.tell_placement(pinned_bytes=alive.pinned_bytes, pin=alive.kind)

        host.watch(told)
        self._courier = _courier(weights, host, device)
        return host

    def courier(self) -> Courier | None:
        return self._courier

    def tell(self, device: torch.device, planned: int, resident: int, streamed: int, host: Host) -> None:
        self.follower.tell_placement(
            device=str(device),
            planned_bytes=planned,
            resident_bytes=resident,
            streamed_bytes=streamed,
            pinned_bytes=host.pinned_bytes,
            pin=host.kind,
        )

    def close(self) -> None:
        self.follower.close()


def _courier(weights: SharedWeights, host: SharedHost, device: torch.device) -> Courier | None:
    cuda, _ = load_runtime() if device.type == "cuda" else (None, "")
    if cuda is None:
        return None
    ordinal = torch.cuda.current_device() if device.index is None else device.index
    return Courier(weights, host, cuda, ordinal, pulls=host.kind != "none")


class OwnSource:
    """The model's own tensors."""

    shared = False
    namespace = ""

    def __init__(self, model: nn.Module, config: OffloadConfig) -> None:
        missing = on_meta(modules_by_name(model))
        if missing:
            raise OffloadError(
                f"{type(model).__qualname__} has no weights: {len(missing)} tensors are on meta, first {missing[0]}; "
                "expected a model that holds its own",
                "set shm_enabled and shm_namespace to take them from a creator, or load the model first",
            )
        self._config = config

    def host(self, blocks: Sequence[Sequence[Param]], device: torch.device) -> Host:
        for block in blocks:
            for param in block:
                if param.tensor.device.type != "cpu":
                    param.tensor.data = param.tensor.data.cpu()
        tensors = {param.name: param.tensor for block in blocks for param in block}

        def replace(name: str, tensor: torch.Tensor) -> None:
            # the parameter stays the same object; its memory becomes the pinned one
            tensors[name].data = tensor

        with torch.inference_mode(False), torch.no_grad():
            return own_host(
                [[(param.name, param.tensor) for param in block] for block in blocks],
                pinned=self._config.pinned_memory,
                mode=self._config.pinned_memory_mode,
                device=device,
                replace=replace,
            )

    def courier(self) -> Courier | None:
        """Its tensors are nobody else's."""
        return None

    def tell(self, device: torch.device, planned: int, resident: int, streamed: int, host: Host) -> None:
        """Nobody watches."""

    def close(self) -> None:
        """The tensors are the model's."""
