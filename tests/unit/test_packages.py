"""The distribution holds every package of the tree: an editable install finds those that a wheel would lack."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_package_is_listed() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    there = [
        ".".join(path.parent.relative_to(base).parts)
        for base, name in ((ROOT, "ftd"), (ROOT / "client", "ftd_client"))
        for path in (base / name).rglob("__init__.py")
    ]
    assert sorted(listed) == sorted(there)
