"""Values of OffloadConfig in each file format and as variables, and an environment of a test's own."""

import contextlib
import json
import os
from unittest import mock

import yaml


def plain(value):
    """How INI files and variables say a value."""
    if value is None:
        return "none"
    if isinstance(value, list):
        return ", ".join(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def ini(values, section="flextensor"):
    return "".join([f"[{section}]\n", *(f"{key} = {plain(value)}\n" for key, value in values.items())])


WRITERS = {
    "ini": ini,
    "conf": lambda values: ini(values, "ftd"),
    "json": json.dumps,
    "yaml": yaml.safe_dump,
    "yml": lambda values: yaml.safe_dump(values, allow_unicode=True, default_flow_style=False),
}


@contextlib.contextmanager
def environment(**variables):
    """The process's environment without any variable of OffloadConfig but these."""
    others = {key: value for key, value in os.environ.items() if not key.startswith("FT_")}
    with mock.patch.dict(os.environ, others | variables, clear=True):
        yield
