"""Real daemons for the tests on a real GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

Start = Callable[..., dict[str, Any]]


def ftd(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ftd", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **(env or {})},
    )


def status_of(namespace: str) -> dict[str, Any]:
    return json.loads(ftd("status", "-n", namespace, "--json").stdout)


def start_daemon(namespace: str, model: Path, *sets: str, env: dict[str, str] | None = None) -> dict[str, Any]:
    """Its status, once it is ready."""
    flags = [part for text in sets for part in ("--set", text)]
    done = ftd("start", "-n", namespace, "--model", str(model), "--detach", *flags, env=env)
    assert done.returncode == 0, done.stderr
    return status_of(namespace)


@pytest.fixture
def name() -> Iterator[str]:
    namespace = f"gpu-{uuid.uuid4().hex[:8]}"
    yield namespace
    ftd("stop", "-n", namespace, "--force")
    assert not [entry for entry in os.listdir("/dev/shm") if namespace in entry]


@pytest.fixture
def start(name: str) -> Start:
    def run(model: Path, *sets: str, env: dict[str, str] | None = None) -> dict[str, Any]:
        return start_daemon(name, model, *sets, env=env)

    return run
