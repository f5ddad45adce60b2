"""Names are first come, first served: a worker believes its own user, root, and whoever owns a runtime directory."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ftd_client
from ftd.errors import AccessError
from ftd_client.trust import check_owner
from tests.conftest import NOBODY
from tests.process.daemons import Daemon

Start = Callable[..., Daemon]
STRANGER = 12345


def test_a_stranger_is_refused_and_the_owner_of_a_runtime_directory_is_not(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    environ = {"FTD_RUNTIME_DIR": str(tmp_path)}
    check_owner("x", os.geteuid(), environ)
    check_owner("x", 0, environ)
    with pytest.raises(AccessError, match=f"belongs to uid {STRANGER}"):
        check_owner("x", STRANGER, environ)
    if os.geteuid() == 0:
        os.chown(tmp_path, STRANGER, -1)
        check_owner("x", STRANGER, environ)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a block to another user")
def test_a_worker_attaches_to_no_strangers_weights(start: Start, namespace: str, model: Path) -> None:
    start("--model", model)
    ftd_client.attach(namespace).close()
    os.chown(f"/dev/shm/ftd.{namespace}.coord", STRANGER, -1)
    with pytest.raises(AccessError, match=f"belongs to uid {STRANGER}"):
        ftd_client.attach(namespace, timeout=1)


def test_everybody_believes_root(start: Start, namespace: str, model: Path, in_child: Callable[..., Any]) -> None:
    start("--model", model, "--set", "mode=0644")

    def generation() -> int:
        with ftd_client.attach(namespace, timeout=0) as weights:
            return weights.generation

    assert in_child(generation, uid=NOBODY) == 1
