"""Types of OffloadConfig's fields: what each accepts, and in words what it expects.

Numbers refuse booleans, and text stands for one where it is plainly that: environment and INI files know only text.
"""

from __future__ import annotations

import os
import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from ftd.config.fields import UNEXPECTED, Expected, no_boolean
from ftd.config.globs import normalized

#: The rule of the namespaces that a daemon can have. `ftd.shm.names` owns it; leaves import no leaf, and a test
#: compares the two, so that a name that cannot exist is refused when the configuration is made, not at attach.
NAMESPACE_RULE = "1 to 64 of A-Z a-z 0-9 . _ - starting with a letter or digit"
_NAMESPACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

_WHOLE = re.compile(r"[+-]?[0-9]{1,18}")

_DIRECTORY = "the path of a directory"
_STRATEGY = "a strategy object, which only Python code can give"

PinnedMemoryMode = Literal["torch", "host_register"]
TransferMode = Literal["allocation_block_transfer", "raw_block_transfer", "strategy"]
OffloadTiming = Literal["off", "eager", "cuda_graph"]
PiecewisePrefetch = Literal["off", "warn", "error"]
ProfileMode = Literal["view", "getter", "torch_function"]


def _refused(expected: str) -> PydanticCustomError:
    return PydanticCustomError(UNEXPECTED, "expected {expected}", {"expected": expected})


def _whole_number(value: object) -> object:
    # pydantic takes "5.0" and "1_0" for whole numbers too
    if isinstance(value, str) and not _WHOLE.fullmatch(value.strip()):
        raise _refused("a whole number")
    return no_boolean(value)


def _namespace(value: str | None) -> str | None:
    # "" says "none", as an empty variable does; shm_enabled refuses it
    if value and not _NAMESPACE.fullmatch(value):
        raise _refused(f"a namespace: {NAMESPACE_RULE}")
    return value


def _path_text(value: object) -> object:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _directory(value: str | None) -> str | None:
    # "" would be the working directory, which nobody means by it
    if value is not None and (not value or "\0" in value):
        raise _refused(_DIRECTORY)
    return value


def _strategy(value: object) -> object:
    """Anything that is not plain data or a class; whether it is a strategy is for `offload()` to find out."""
    data = (str, bytes, bool, int, float, list, tuple, dict, set, frozenset, type)
    if isinstance(value, data):
        raise _refused(_STRATEGY)
    return value


Flag = Annotated[bool, Expected("true or false")]
Ordinal = Annotated[
    int, BeforeValidator(_whole_number), Field(ge=0), Expected("a CUDA ordinal of 0 or more")
]  # fmt: skip
Iterations = Annotated[
    int, BeforeValidator(_whole_number), Field(ge=0), Expected("a whole number of 0 or more")
]  # fmt: skip
Blocks = Annotated[
    int, BeforeValidator(_whole_number), Field(ge=2), Expected("a whole number of 2 or more")
]  # fmt: skip
Namespace = Annotated[str | None, AfterValidator(_namespace), Expected(f"a namespace: {NAMESPACE_RULE}")]
Wait = Annotated[
    float,
    BeforeValidator(no_boolean),
    Field(ge=0, allow_inf_nan=False),
    Expected("a number of seconds of 0 or more, where 0 sets no limit"),
]
Scale = Annotated[
    float, BeforeValidator(no_boolean), Field(gt=0, allow_inf_nan=False), Expected("a number above 0")
]  # fmt: skip
Fraction = Annotated[
    Annotated[float, Field(gt=0, le=1)] | None,
    BeforeValidator(no_boolean),
    Expected("a number above 0 and at most 1, such as 0.9"),
]
Directory = Annotated[str, BeforeValidator(_path_text), AfterValidator(_directory), Expected(_DIRECTORY)]
MaybeDirectory = Annotated[
    str | None, BeforeValidator(_path_text), AfterValidator(_directory), Expected(_DIRECTORY)
]  # fmt: skip
StrategyObject = Annotated[
    Any,
    BeforeValidator(_strategy),
    WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "null"}]}),
    Expected(_STRATEGY),
]
TargetPatterns = Annotated[
    list[Annotated[str, AfterValidator(normalized)]], Expected("a list of patterns such as [layers.*]")
]  # fmt: skip
