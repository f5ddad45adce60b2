"""Which modules of a model are layers, and which of its parameters are managed. Pure: it knows names, not modules.

1. An include pattern that matches modules selects them, and all their parameters are wanted. Modules that hold no
   parameter do not count: they could only hide what the pattern means.
2. One that matches no module is taken for parameters: those that it matches are wanted, and for each of them one
   module is selected, the ancestor that the longest beginning of the pattern names: `layers.*.mlp.weight` selects
   what `layers.*.mlp` matches, and for a weight further down what `layers.*` matches. A pattern that begins with `*`
   names parameters wherever they are (`*.weight`), and selects the modules that own them.
3. What an exclude pattern matches is out, whatever includes it: a parameter, or a module with everything below it.
4. A parameter is managed when it lies in a selected module, is wanted (a name pattern of any kind that matches it
   will do), and is not excluded. It belongs to the deepest selected module that it lies in.

The root module has the empty path. No name pattern matches it; a class pattern can, and so can rule 2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ftd.config.globs import CLASS, NAME, Glob


@dataclass(frozen=True, slots=True)
class ModuleName:
    """A module as patterns see it.

    Attributes:
        path: dotted, as `named_modules()` gives it; empty for the root.
        class_names: the names of its class, as `class_names` gives them.
    """

    path: str
    class_names: tuple[str, ...] = ()


def class_names(cls: type) -> tuple[str, str]:
    """The short name of a class, and the one with its module. Base classes have no part in matching."""
    return cls.__name__, f"{cls.__module__}.{cls.__qualname__}"


@dataclass(frozen=True, slots=True)
class Selection:
    """What patterns select in a model.

    Attributes:
        layers: path of each selected module → the managed parameters that belong to it, both in the model's order.
            A module whose parameters all belong to deeper ones, or are excluded, has none.
        managed: each managed parameter → the layer it belongs to, in the model's order.
        unmatched_include: include patterns that match nothing in this model, for a warning.
        unmatched_exclude: likewise.
    """

    layers: Mapping[str, tuple[str, ...]]
    managed: Mapping[str, str]
    unmatched_include: tuple[str, ...] = ()
    unmatched_exclude: tuple[str, ...] = ()


def select(
    include: Sequence[str], exclude: Sequence[str], modules: Iterable[ModuleName], parameters: Iterable[str]
) -> Selection:
    """Applies patterns to a model.

    Args:
        include: as in `OffloadConfig`.
        exclude: as in `OffloadConfig`.
        modules: all of them, the root too, in the model's order.
        parameters: dotted names in the model's order; a tied one under each name that is to be judged.

    Raises:
        ValueError: a pattern is none, which a validated configuration rules out.
    """
    names = tuple(parameters)
    holders = {owner for name in names for owner in _owners(name)}
    held = [module for module in modules if module.path in holders]
    included = _Included.of(include, held, names)
    excluded = _Excluded.of(exclude, held, names)
    chosen = [module.path for module in held if module.path in included.layers and not excluded.has(module.path)]
    layers: dict[str, list[str]] = {path: [] for path in chosen}
    managed: dict[str, str] = {}
    for name in names:
        layer = next((path for path in _owners(name) if path in layers), None)
        if layer is not None and included.wants(name) and not excluded.has(name):
            managed[name] = layer
            layers[layer].append(name)
    return Selection(
        {path: tuple(members) for path, members in layers.items()},
        managed,
        tuple(included.unmatched),
        tuple(excluded.unmatched),
    )


@dataclass(frozen=True, slots=True)
class _Included:
    """Modules to select, before any exclusion; those of them with all their parameters; parameters by name."""

    layers: set[str]
    whole: set[str]
    named: set[str]
    unmatched: list[str]

    @staticmethod
    def of(patterns: Sequence[str], modules: Sequence[ModuleName], parameters: Sequence[str]) -> _Included:
        found = _Included(set(), set(), set(), [])
        for pattern in patterns:
            glob = Glob.parse(pattern)
            hits = _modules_hit(glob, glob.one_segment, modules)
            named = _parameters_hit(glob, parameters)
            if not (hits or named):
                found.unmatched.append(pattern)
            found.whole.update(hits)
            found.named.update(named)
            found.layers.update(hits or (_layer_of(glob, name) for name in named))
        return found

    def wants(self, parameter: str) -> bool:
        return parameter in self.named or any(path in self.whole for path in _owners(parameter))


@dataclass(frozen=True, slots=True)
class _Excluded:
    """Modules and parameters that exclude patterns match themselves."""

    paths: set[str]
    unmatched: list[str]

    @staticmethod
    def of(patterns: Sequence[str], modules: Sequence[ModuleName], parameters: Sequence[str]) -> _Excluded:
        found = _Excluded(set(), [])
        for pattern in patterns:
            glob = Glob.parse(pattern)
            hits = _modules_hit(glob, glob.one_or_more, modules) | _parameters_hit(glob, parameters)
            if not hits:
                found.unmatched.append(pattern)
            found.paths.update(hits)
        return found

    def has(self, path: str) -> bool:
        """Whether a module or parameter is excluded, by itself or with a module that it lies in."""
        return path in self.paths or any(owner in self.paths for owner in _owners(path))


def _modules_hit(glob: Glob, matches_path: Callable[[str], bool], modules: Sequence[ModuleName]) -> set[str]:
    if glob.form == CLASS:
        return {module.path for module in modules if any(map(glob.in_class_name, module.class_names))}
    # the empty path of the root is no segment, which a glob of one such as ** would match all the same
    return {module.path for module in modules if module.path and matches_path(module.path)}


def _parameters_hit(glob: Glob, parameters: Sequence[str]) -> set[str]:
    return set() if glob.form == CLASS else {name for name in parameters if glob.one_or_more(name)}


def _layer_of(glob: Glob, parameter: str) -> str:
    """The module that rule 2 selects for a parameter that the pattern matches."""
    pattern = glob.body.split(".")
    segments = parameter.split(".")
    if pattern[0] != "*":
        for depth in range(len(pattern) - 1, 0, -1):
            path = ".".join(segments[:depth])
            if Glob(NAME, ".".join(pattern[:depth])).one_segment(path):
                return path
    return ".".join(segments[:-1])


def _owners(path: str) -> Iterator[str]:
    """The modules that a module or parameter lies in, from the nearest to the root."""
    while path:
        path = path.rpartition(".")[0]
        yield path
