"""What to tell somebody whose patterns manage nothing: the reason, and the nearest names that the model has."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from ftd.config.fields import listing
from ftd.config.globs import CLASS, Glob
from ftd.config.selection import ModuleName, select
from ftd.errors import OffloadConfigError

#: More patterns than this are counted, not listed: the error is one line.
MAX_PATTERNS = 8

#: Likewise of the names suggested for all of them.
MAX_NAMES = 5

#: Names are compared one by one, 30 µs each: enough of them for any model whose layers repeat.
MAX_COMPARED = 2_000


def nearest_modules(pattern: str, modules: Sequence[ModuleName], limit: int = 3) -> tuple[str, ...]:
    """The modules whose names resemble a pattern most, best first; of a class pattern, class names, as patterns.

    Of modules that differ only in the numbers in their paths, the first stands for all.
    """
    glob = Glob.parse(pattern)
    if glob.form == CLASS:
        names = {name: f"{CLASS}:{name}" for module in modules for name in module.class_names[:1]}
    else:
        names = {}
        for module in modules:
            if module.path:
                names.setdefault(_shape(module.path), module.path)
    compared = dict(list(names.items())[:MAX_COMPARED])
    # folded, since the case of a name is what people mistake most
    folded = {name.casefold(): shown for name, shown in compared.items()}
    close = difflib.get_close_matches(glob.body.casefold(), folded, n=limit, cutoff=0.0)
    return tuple(folded[name] for name in close)


def nothing_managed(
    include: Sequence[str], exclude: Sequence[str], modules: Sequence[ModuleName], parameters: Sequence[str]
) -> OffloadConfigError:
    """The error of a model in which patterns manage no parameter, and no block was marked by hand.

    Args: as of `select`.
    """
    if not parameters:
        return OffloadConfigError("nothing to offload: the model has no parameters", "offload a model that has some")
    if not include:
        return OffloadConfigError(
            "nothing to offload: include_patterns is empty, expected patterns such as ['layers.*']",
            "give include_patterns, or mark blocks with offload_block()",
        )
    if len(select(include, (), modules, parameters).unmatched_include) < len(include):
        return OffloadConfigError(
            f"nothing to offload: exclude_patterns {_shown(exclude)} take away all that include_patterns "
            f"{_shown(include)} match",
            "narrow exclude_patterns",
        )
    near = dict.fromkeys(name for pattern in include[:MAX_PATTERNS] for name in nearest_modules(pattern, modules))
    names = f"; the nearest names are {listing([*near][:MAX_NAMES], 'and')}" if near else ""
    return OffloadConfigError(
        f"nothing to offload: include_patterns {_shown(include)} match no module that holds parameters, and no "
        f"parameter{names}",
        "correct include_patterns",
    )


def _shape(path: str) -> str:
    return ".".join("*" if segment.isascii() and segment.isdigit() else segment for segment in path.split("."))


def _shown(patterns: Sequence[str]) -> str:
    more = len(patterns) - MAX_PATTERNS
    texts = [repr(pattern if len(pattern) <= 80 else pattern[:77] + "...") for pattern in patterns[:MAX_PATTERNS]]
    return f"[{', '.join([*texts, f'and {more} more'] if more > 0 else texts)}]"
