"""Finds a strategy: by name, by the path of a user's own, or the object itself."""

from __future__ import annotations

import importlib
from difflib import get_close_matches

from ftd.plan.errors import PlanError
from ftd.plan.strategy import AllStreamed, Auto, EvenSpread, Strategy

STRATEGIES: dict[str, type[Auto] | type[EvenSpread] | type[AllStreamed]] = {
    cls.name: cls for cls in (Auto, EvenSpread, AllStreamed)
}
_REMEDY = "give an object with a method plan(problem) that returns a Plan"


def load_strategy(given: str | Strategy | None) -> Strategy:
    """The strategy that is meant.

    Args:
        given: None for auto, a name of `STRATEGIES`, `package.module.Name` or `package.module:Name` of a class
            without arguments or of an object, or an object that plans. Importing runs the module's code.

    Raises:
        PlanError: no such name, module or attribute, or what is there does not plan.
    """
    if given is None:
        return Auto()
    if isinstance(given, str):
        return STRATEGIES[given]() if given in STRATEGIES else _imported(given)
    if isinstance(given, type) or not isinstance(given, Strategy):
        found = f"class {given.__name__}" if isinstance(given, type) else type(given).__name__
        raise PlanError(f"the strategy is a {found} without a method plan of its own", _REMEDY)
    return given


def _imported(path: str) -> Strategy:
    module, separator, name = path.partition(":") if ":" in path else path.rpartition(".")
    if not (module and separator and name):
        near = get_close_matches(path, STRATEGIES, 1)
        raise PlanError(
            f"no strategy is called {path!r}, expected one of {', '.join(STRATEGIES)} or package.module.Name"
            + (f"; nearest: {near[0]}" if near else ""),
            _REMEDY,
        )
    try:
        found = getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise PlanError(f"strategy {path!r}: module {module!r} cannot be imported: {error}", _REMEDY) from error
    except AttributeError:
        raise PlanError(f"strategy {path!r}: module {module!r} has no {name!r}", _REMEDY) from None
    return load_strategy(found() if isinstance(found, type) else found)
