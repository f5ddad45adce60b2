"""Which parameters of a model are managed, by the configuration's patterns."""

from __future__ import annotations

import logging

from torch import nn

from ftd.config.offload import OffloadConfig
from ftd.config.selection import ModuleName, class_names, select
from ftd.config.unmatched import nothing_managed
from ftd.errors import OffloadConfigError
from ftd_client.walk import Parts, walk

_log = logging.getLogger("ftd")


def managed_parameters(model: nn.Module, parts: Parts, config: OffloadConfig) -> dict[str, str]:
    """Name of each managed parameter → its layer, a tied one under each of its names; empty where patterns select
    nothing. Patterns that match nothing are warned about."""
    selection = select(config.include_patterns, config.exclude_patterns, _module_names(model), _names(parts))
    for kind, patterns in (("include", selection.unmatched_include), ("exclude", selection.unmatched_exclude)):
        if patterns:
            _log.warning("%s_patterns that match nothing in this model: %s", kind, ", ".join(patterns))
    return dict(selection.managed)


def nothing_is_managed(model: nn.Module, config: OffloadConfig) -> OffloadConfigError:
    """The error of a model of which nothing is managed: the patterns, and the nearest names that it has."""
    names = _names(walk(model))
    return nothing_managed(config.include_patterns, config.exclude_patterns, _module_names(model), names)


def _module_names(model: nn.Module) -> list[ModuleName]:
    named = model.named_modules(remove_duplicate=False)
    return [ModuleName(path, class_names(type(module))) for path, module in named]


def _names(parts: Parts) -> list[str]:
    return [name for group in parts.parameters for name in group.names]
