"""A model's measurements as a profile, and a profile as a model's structure."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from ftd.config.offload import OffloadConfig
from ftd.plan.profile import Identity, Profile
from ftd.plan.strictjson import ProfileError
from ftd_client.phase.known import Known
from ftd_client.phase.planning import Measured
from ftd_client.phase.structure import Structure
from ftd_client.stream.units import Param, Unit

#: What changes how units are made or how long things take; what only changes the plan is free to differ.
_FIELDS = ("include_patterns", "exclude_patterns", "transfer_mode", "pinned_memory")


@dataclass(frozen=True, slots=True)
class Restored:
    """A structure and its times, and the parameters that turn out not to be managed."""

    structure: Structure
    measured: Measured
    dropped: list[Param]


class Static:
    """What a model's modules alone give: the units before any forward, by which profiles are written and read.

    Args:
        units: as `make_units` gives them; what becomes of them later does not matter here.
    """

    def __init__(self, model: nn.Module, units: Sequence[Unit]) -> None:
        self._model = model
        self._units = [replace(unit, params=list(unit.params)) for unit in units]
        self._layers = {param.name: unit.layer for unit in units for param in unit.params}

    def identity(self, config: OffloadConfig, device: torch.device) -> Identity:
        """What a profile of this model is measured on."""
        digest = hashlib.sha256()
        for unit in self._units:
            for param in unit.params:
                digest.update(f"{param.name} {param.tensor.dtype} {tuple(param.tensor.shape)}\n".encode())
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu:{platform.machine()}"
        measured_with = {key: getattr(config, key) for key in _FIELDS}
        return Identity(digest.hexdigest(), name, str(torch.__version__), measured_with)

    def profile(self, identity: Identity, known: Known) -> Profile:
        """What was measured; units that differ from the static ones are told in full."""
        structure, measured = known.structure, known.measured
        plain = {unit.name: [param.name for param in unit.params] for unit in self._units}
        made = {
            unit.name: tuple(param.name for param in unit.params)
            for unit in structure.units
            if plain.get(unit.name) != [param.name for param in unit.params]
        }
        order = tuple(unit.name for unit in structure.order)
        reached = set(order)
        return Profile(
            identity=identity,
            forwards=max(1, known.timings.forwards),
            order=order,
            compute_ns=measured.compute_ns,
            prefix_ns=measured.prefix_ns,
            unseen=tuple(unit.name for unit in structure.units if unit.name not in reached),
            regions=made,
            resident={unit.name: unit.resident for unit in structure.units if unit.resident},
            copy=known.cost,
            activation_bytes=measured.activation_bytes or 0,
        )

    def _check(self, name: str, members: Sequence[str], resident: str) -> None:
        """
        Raises:
            ProfileError: the unit would let something stream that must not, or tear apart what a module reads together.
        """
        for unit in self._units:
            held = {param.name for param in unit.params}
            if held.isdisjoint(members):
                continue
            together = unit.scope is not None and bool(unit.scope._modules)
            if (unit.resident and not resident) or (together and (unit.name != name or held != set(members))):
                raise ProfileError(
                    f"the profile's unit {name!r} puts parameters of {unit.name!r} where they can't be",
                    "profile the model again",
                )

    def restore(self, profile: Profile) -> Restored:
        """Units as the profile has them.

        Raises:
            ProfileError: it names units or parameters that this model does not have.
        """
        left = {param.name: param for unit in self._units for param in unit.params}
        modules = dict(self._model.named_modules())
        units: dict[str, Unit] = {}

        def take(name: str) -> Param:
            if name not in left:
                raise ProfileError(
                    f"the profile has parameter {name!r} in more than one unit, or this model has none of that name",
                    "profile the model again",
                )
            return left.pop(name)

        for name, members in profile.regions.items():
            self._check(name, members, profile.resident.get(name, ""))
            taken = [take(member) for member in members]
            if taken:
                layer = self._layers.get(taken[0].name, name) if name in modules else name
                units[name] = Unit(name, layer, modules.get(name), taken, profile.resident.get(name, ""))
        named = {*profile.order, *profile.unseen}
        for unit in self._units:
            if unit.name in named and unit.name not in units:
                taken = [take(param.name) for param in unit.params]
                reason = unit.resident or profile.resident.get(unit.name, "")
                units[unit.name] = Unit(unit.name, unit.layer, unit.scope, taken, reason)
        missing = sorted(named - units.keys())
        if missing:
            raise ProfileError(
                f"the profile has unit {missing[0]!r}, which this model has not", "profile the model again"
            )
        structure = Structure(list(units.values()), [units[name] for name in profile.order])
        measured = Measured(profile.prefix_ns, profile.compute_ns, profile.activation_bytes)
        return Restored(structure, measured, list(left.values()))
