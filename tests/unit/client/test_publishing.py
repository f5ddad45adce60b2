"""What `publish` refuses before it says a word, and the staging segment as it is opened and page-locked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import ftd_client
from ftd.errors import EXIT_USAGE, SegmentError, UsageError
from ftd.shm.names import Names
from ftd.shm.segment import Access, Segment
from ftd.wire.publish import MAX_FILES_BYTES, MAX_TEXT, Staging
from ftd_client import publishing
from ftd_client.handover import Cargo
from tests.fake_cuda import FakeCuda

SOME = {"a": torch.zeros(3)}


def test_its_names_are_the_packages() -> None:
    assert ftd_client.publish is publishing.publish
    assert {"publish", "Published"} <= set(ftd_client.__all__)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"transform": None}, "transform: None found, text of at most 1000 characters expected"),
        ({"transform": "x" * (MAX_TEXT + 1)}, "transform: 'x+ found, text of at most 1000"),
        ({"source": b"x"}, "source: b'x' found"),
        ({"layers": ["a[]"]}, r"layers: pattern 'a\[\]' has"),
        ({"files": {"/etc/passwd": b""}}, "files: '/etc/passwd' found, a relative path and bytes expected"),
        ({"files": {"../a": b""}}, r"files: '\.\./a' found"),
        ({"files": {"a": "text"}}, "files: 'a' found"),
        ({"files": {"a": bytes(MAX_FILES_BYTES), "b": b"x"}}, "files: 32.00 MiB found, at most 32.00 MiB expected"),
    ],
)
def test_arguments_that_make_no_sense_are_refused_without_a_daemon(
    namespace: str, arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        ftd_client.publish(namespace, SOME, **arguments)
    assert caught.value.exit_status == EXIT_USAGE


# --- the staging segment ------------------------------------------------------------------------------------------


@pytest.fixture
def staging(namespace: str) -> Iterator[Staging]:
    with Segment.create(Names(namespace).staging(1), 8192, Access(0o600)) as segment:
        yield Staging(b"t" * 16, segment.name, segment.inode, 1, 2, 4096)
        segment.unlink()


def test_it_is_mapped_writable_and_outlives_its_name(staging: Staging) -> None:
    memory = publishing._open(staging)
    reader = Segment.open(staging.name)
    assert reader is not None
    with reader:
        reader.unlink()
        memory[4096] = 7
        assert reader.map_shared()[4096] == 7
    assert memory.numel() == 8192


@pytest.mark.parametrize(
    "changed",
    [
        lambda told: Staging(told.token, told.name, told.inode + 1, told.lanes, told.slots, told.slot_bytes),
        lambda told: Staging(told.token, told.name, told.inode, told.lanes, 3, told.slot_bytes),
        lambda told: Staging(told.token, told.name + "x", told.inode, told.lanes, told.slots, told.slot_bytes),
    ],
    ids=["another inode", "another size", "none"],
)
def test_another_segment_than_the_daemons_is_refused(staging: Staging, changed: Callable[[Staging], Staging]) -> None:
    """It is the same name behind another mount, or nothing at all."""
    with pytest.raises(SegmentError) as caught:
        publishing._open(changed(staging))
    assert "containers must share /dev/shm" in caught.value.remedy


def cargo_on_a_gpu() -> Cargo:
    return Cargo((), (SimpleNamespace(is_cuda=False), SimpleNamespace(is_cuda=True)), {})  # type: ignore[arg-type]


def test_it_is_page_locked_while_tensors_come_from_a_gpu(staging: Staging, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda()
    monkeypatch.setattr(publishing, "load_runtime", lambda: (cuda, ""))
    memory = publishing._open(staging)
    with pytest.raises(ZeroDivisionError), publishing._pinned(memory, cargo_on_a_gpu()):
        assert cuda.registered == {memory.data_ptr(): (8192, False)}
        raise ZeroDivisionError
    assert cuda.registered == {}


def test_without_a_gpu_no_runtime_is_loaded(staging: Staging, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishing, "load_runtime", lambda: pytest.fail("it costs a second"))
    with publishing._pinned(publishing._open(staging), Cargo((), (torch.zeros(1),), {})):
        pass


def test_that_it_cannot_be_page_locked_costs_speed_and_nothing_else(
    staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = publishing._open(staging)
    ran = []
    for runtime in ((None, "no libcudart"), (FakeCuda(refuse_at=1), "")):
        monkeypatch.setattr(publishing, "load_runtime", lambda runtime=runtime: runtime)
        with publishing._pinned(memory, cargo_on_a_gpu()):
            ran.append(runtime)
    assert len(ran) == 2
