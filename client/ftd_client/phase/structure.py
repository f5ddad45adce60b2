"""What discovery found out about a model, as units in the order of execution."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from ftd_client.phase.observe import Frame, Observer, merge_order
from ftd_client.stream.units import OffloadError, Param, Unit


@dataclass
class Structure:
    """Units of a model.

    Attributes:
        units: all of them.
        order: those that forwards reached, in order; one that is reached again later stands twice.
    """

    units: list[Unit]
    order: list[Unit] = field(default_factory=list)

    @staticmethod
    def static(units: Sequence[Unit]) -> Structure:
        """Before any forward: the order of the model's modules."""
        return Structure(list(units), [unit for unit in units if not unit.is_region])

    @property
    def unplanned(self) -> list[Unit]:
        """Units that no forward has reached."""
        known = set(self.order)
        return [unit for unit in self.units if unit not in known and not (unit.resident or unit.is_region)]

    def insert(self, unit: Unit, before: Unit | None) -> None:
        """Takes a unit into the order, in front of another one or at the end."""
        self.order.insert(self.order.index(before) if before is not None else len(self.order), unit)


class Discovery:
    """Gathers what the forwards of discovery tell, and makes a structure of it."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = list(units)
        self._order: list[Unit] = []
        self._regions: dict[Unit, str] = {}
        self._readers: dict[Param, list[Frame]] = {}
        self._after: dict[Param, Unit | None] = {}
        self._outliving: set[Unit] = set()
        self.region_names: dict[str, None] = {}

    def add(self, observer: Observer) -> None:
        """A forward has been observed."""
        self._order = merge_order(self._order, [visit.unit for visit in observer.visits])
        for visit in observer.visits:
            if visit.region:
                self._regions.setdefault(visit.unit, visit.region)
        for param, frames in observer.readers.items():
            known = self._readers.setdefault(param, [])
            known += [frame for frame in frames if frame not in known]
            at = frames[0].at
            self._after.setdefault(param, observer.visits[at - 1].unit if 0 < at <= len(observer.visits) else None)
        self._outliving |= observer.outliving
        self.region_names |= observer.region_names

    def structure(self, *, regions_only: bool) -> tuple[Structure, list[Param]]:
        """The structure, and the parameters that turn out not to be managed.

        Args:
            regions_only: patterns selected nothing, so that only what regions marked by hand reach is managed.
        """
        for unit in self._outliving:
            unit.resident = unit.resident or "its output is a view of its weight"
        for unit, region in self._regions.items():
            unit.layer = region
        adopted = self._adopt()
        units = [unit for unit in self._units if unit.params]
        order = [unit for unit in self._order if unit.params]
        for unit, after in adopted:
            units.append(unit)
            if not unit.is_region:
                order.insert(order.index(after) + 1 if after in order else 0, unit)
        dropped: list[Param] = []
        if regions_only:
            managed = set(self._regions) | {unit for unit, _ in adopted if unit.layer in self.region_names}
            dropped = [param for unit in units if unit not in managed for param in unit.params]
            units = [unit for unit in units if unit in managed]
            order = [unit for unit in order if unit in managed]
        order += [unit for unit in units if unit.resident and unit not in order]
        return Structure(units, order), dropped

    def _adopt(self) -> list[tuple[Unit, Unit | None]]:
        """Moves parameters that one other module reads to that module's unit; what several read becomes resident."""
        owner = {param: unit for unit in self._units for param in unit.params}
        reached = set(self._order)
        made: dict[tuple[str, nn.Module | None], Unit] = {}
        adopted: list[tuple[Unit, Unit | None]] = []
        by_scope = {unit.scope: unit for unit in self._units if unit.scope is not None}
        for param, frames in self._readers.items():
            unit = owner[param]
            reader = frames[0]
            if unit.scope is not None and unit.scope._modules:
                # its forward computes with all of them together, in another way when it meets a stand-in
                unit.resident = unit.resident or f"read by {_reader_text(frames)} too"
                continue
            unit.params.remove(param)
            alone = len({(f.name, f.module) for f in frames}) == 1 and unit not in reached
            is_region = reader.module is None and reader.name
            if not alone or (any(frame.units for frame in frames) and not is_region) or unit.resident:
                reason = unit.resident or f"read by {_reader_text(frames)} outside of its module's forward"
                stuck = Unit(param.name, unit.layer, None, [param], resident=reason)
                adopted.append((stuck, self._after.get(param)))
            elif reader.module is not None and reader.module in by_scope:
                by_scope[reader.module].params.append(param)
            else:
                key = (reader.name, reader.module)
                if key not in made:
                    layer = reader.name if reader.module is None else unit.layer
                    made[key] = Unit(reader.name, layer, reader.module)
                    adopted.append((made[key], self._after.get(param)))
                made[key].params.append(param)
        return adopted


def _reader_text(frames: Iterable[Frame]) -> str:
    return " and ".join(sorted({frame.name or "the model itself" for frame in frames})[:3])


def refuse_kept_views(model: nn.Module, passing: Callable[[torch.Tensor], bool]) -> None:
    """
    Args:
        passing: whether a tensor lies in memory that is overwritten.

    Raises:
        OffloadError: a module keeps a tensor that lies there: a view of a weight, made in a forward, which would show
            other weights later.
    """
    found = []
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            items = (
                value if isinstance(value, list | tuple) else value.values() if isinstance(value, dict) else (value,)
            )
            for item in items:
                # no subclasses: they have no memory of their own kind, or none at all
                if type(item) in (torch.Tensor, nn.Parameter) and passing(item):
                    found.append(f"{path}.{name}".lstrip("."))
    if found:
        raise OffloadError(
            f"modules keep views of weights that stream, and would find others' bytes there later: "
            f"{', '.join(dict.fromkeys(found[:5]))}",
            "name those modules in exclude_patterns",
        )
