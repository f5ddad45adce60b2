"""What a real daemon without a GPU says to somebody who wants its weights pushed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import ftd_client
from ftd.clock import Deadline
from ftd.errors import PushRefusedError
from ftd.wire.client import call
from ftd.wire.push import PUSH, PushPiece, PushRequest, PushTarget
from tests.process.daemons import PATIENCE_S, Daemon, ftd

Start = Callable[..., Daemon]


def ask(daemon: Daemon, namespace: str) -> None:
    with ftd_client.attach(namespace) as weights:
        inodes = tuple(segment.inode for segment in weights.manifest.segments)
        target = PushTarget(b"h" * 64, (PushPiece(0, 0, 0, 1),))
        request = PushRequest(weights.generation, inodes, b"g" * 16, (target,))
        record = daemon.look().record
        assert record is not None
        call(Path(record.socket), PUSH, request.to_args(), Deadline.after(PATIENCE_S))


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (["pin=mlock"], "its pages are not registered with CUDA"),
        (["pin=none"], "its pages are not registered with CUDA"),
        (["push=never"], "its configuration says push: never"),
        (["pin=cuda", "push=never"], "its configuration says push: never"),
    ],
)
def test_it_refuses_by_name_and_says_so_in_status(
    start: Start, model: Path, namespace: str, sets: list[str], words: str
) -> None:
    daemon = start("--model", model, *(part for text in sets for part in ("--set", text)))
    with pytest.raises(PushRefusedError, match=f"pushes nothing: {words}"):
        ask(daemon, namespace)
    status = daemon.status()
    assert (status["state"], status["push"]) == ("ready", [])
    assert words in status["push_obstacle"]
    assert "pushed" not in ftd("status", "-n", namespace).out
    assert "Traceback" not in daemon.log()


@pytest.mark.parametrize("value", ["always", "", "true"])
def test_another_value_of_push_is_a_usage_error(model: Path, namespace: str, runtime_dir: Path, value: str) -> None:
    result = ftd("start", "-n", namespace, "--model", model, "--set", f"push={value}")
    assert result.status == 2
    assert "push" in result.err
