"""What the engine's components were made with, as JSON files that people and bug reports can read.

A file each and time: `<UTC time>-<pid>-<number>-<component>.json`, whole or not there. Nothing here fails whom it
observes: what cannot be written is one warning, and then no more is tried.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import itertools
import json
import logging
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel
from torch import nn

from ftd._version import __version__
from ftd.clock import wall_s
from ftd.config.offload import OffloadConfig
from ftd_client.stream.host import Host
from ftd_client.stream.units import Param
from ftd_client.wording import bare

_log = logging.getLogger("ftd")

#: Files of a directory, the oldest of which make room: some hundred calls of `offload()`, a few MB of small models.
MAX_FILES = 1000
#: Values in a file, and characters of a text: a plan of 10,000 blocks has 200,000, and takes 8 MB.
MAX_VALUES = 400_000
MAX_CHARACTERS = 2_000
_MAX_DEPTH = 12

_NAME = re.compile(r"\d{8}T\d{6}\.\d{6}Z-\d+-\d+-[a-z_]+\.json")
_numbers = itertools.count(1)

#: Writes each keyword's value to a file of its name.
Recorder = Callable[..., None]


def recorder(config: OffloadConfig) -> Recorder:
    """The recorder that the configuration asks for; without `enable_instrumentation`, one that does nothing."""
    return Files(Path(config.instrumentation_output_dir)) if config.enable_instrumentation else _nothing


def _nothing(**components: object) -> None:
    """Instrumentation is off."""


class Files:
    """Writes components to a directory, which is made when it is needed."""

    def __init__(self, directory: Path) -> None:
        # of now, wherever the process goes later
        self._directory = Path(os.path.abspath(directory))  # noqa: PTH100  (resolve() would follow links)
        self._failed = False

    def __call__(self, **components: object) -> None:
        for component, arguments in components.items():
            if self._failed:
                return
            try:
                self._write(component, arguments)
            except Exception as error:  # a user's strategy may fail to say what it is, in any way
                self._failed = True
                _log.warning(
                    "instrumentation stops: %s is not written to %s: %s: %s",
                    component,
                    self._directory,
                    type(error).__name__,
                    error,
                )

    def _write(self, component: str, arguments: object) -> None:
        now = datetime.datetime.fromtimestamp(wall_s(), datetime.UTC)
        text = json.dumps(
            {
                "component": component,
                "time": now.isoformat(),
                "pid": os.getpid(),
                "ftd": __version__,
                "torch": str(torch.__version__),
                "arguments": Plain().of(arguments),
            },
            indent=1,
            ensure_ascii=False,
        )
        self._directory.mkdir(parents=True, exist_ok=True)
        self._make_room()
        path = self._directory / f"{now:%Y%m%dT%H%M%S.%fZ}-{os.getpid()}-{next(_numbers)}-{component}.json"
        partial = path.with_suffix(".tmp")
        try:
            with partial.open("x", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text)
            partial.rename(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise

    def _make_room(self) -> None:
        """Removes the oldest files of such names, those of other processes among them."""
        ours = sorted(name for name in os.listdir(self._directory) if _NAME.fullmatch(name))  # noqa: PTH208
        for name in ours[: max(0, len(ours) - MAX_FILES + 1)]:
            (self._directory / name).unlink(missing_ok=True)


class Plain:
    """Turns one component's arguments into what JSON has; bounded, since a model may have any number of anything."""

    def __init__(self, most: int = MAX_VALUES) -> None:
        self._left = most

    def of(self, value: object, depth: int = 0) -> Any:
        self._left -= 1
        if value is None or isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
            return value
        if isinstance(value, str):
            return str(value) if len(value) <= MAX_CHARACTERS else f"{value[:MAX_CHARACTERS]}…"
        described = _described(value)
        if isinstance(described, str) or depth >= _MAX_DEPTH:
            return self.of(str(described)[: MAX_CHARACTERS + 1])
        if isinstance(described, Mapping):
            return self._map(described, depth + 1)
        return self._list(described, depth + 1)

    def _map(self, items: Mapping[Any, object], depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for number, (key, value) in enumerate(items.items()):
            if self._left <= 0:
                found["…"] = f"{len(items) - number} more"
                break
            found[self.of(str(key))] = self.of(value, depth)
        return found

    def _list(self, items: Sequence[object], depth: int) -> list[Any]:
        found = []
        for number, value in enumerate(items):
            if self._left <= 0:
                found.append(f"… {len(items) - number} more")
                break
            found.append(self.of(value, depth))
        return found


@functools.singledispatch
def _described(value: Any) -> Mapping[Any, object] | Sequence[object] | str:
    """A value's parts, one level deep, or a text."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, nn.Module) or repr(value) == object.__repr__(value):
        return f"{type(value).__module__}.{type(value).__qualname__}"
    return repr(value)


@_described.register
def _(value: torch.Tensor) -> str:
    return f"{bare(value.dtype)} {tuple(value.shape)}, strides {value.stride()}"


@_described.register
def _(value: torch.device) -> Mapping[str, object]:
    known: dict[str, object] = {"device": str(value)}
    if value.type == "cuda":
        facts = torch.cuda.get_device_properties(value)
        known |= {"name": facts.name, "total_bytes": facts.total_memory, "cuda": torch.version.cuda}
    return known


@_described.register
def _(value: BaseModel) -> Mapping[str, object]:
    return {name: getattr(value, name) for name in type(value).model_fields}


@_described.register
def _(value: Param) -> Mapping[str, object]:
    return {"names": value.group.names, "nbytes": value.nbytes, "tensor": value.tensor}


@_described.register
def _(value: Host) -> Mapping[str, object]:
    places = {name: hex(address) for name, address in value.addresses.items()}
    return {
        "kind": value.kind,
        "pinned_bytes": value.pinned_bytes,
        "warnings": value.warnings,
        "addresses": places,
    }


@_described.register(Mapping)
def _(value: Mapping[Any, object]) -> Mapping[Any, object]:
    return value


@_described.register(list)
@_described.register(tuple)
def _(value: Any) -> Mapping[str, object] | Sequence[object]:
    fields: Mapping[str, object] | None = value._asdict() if hasattr(value, "_asdict") else None
    return value if fields is None else fields


@_described.register(Set)
def _(value: Set[object]) -> Sequence[object]:
    return sorted(value, key=repr)
