"""`verify: full`, seen from the loader itself."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ftd.config.model import DaemonConfig
from ftd.daemon import creator, prove
from ftd.daemon.build import Generation, LoadCancelledError
from ftd.daemon.creator import materialize
from ftd.daemon.fill import Filler, Read
from ftd.daemon.progress import LoadProgress
from ftd.errors import SegmentError, SourceChangedError, SourceDamagedError, SourceError
from ftd.shm.layout import Extent
from ftd.shm.names import SHM_DIR, Names
from ftd.shm.segment import Access
from ftd.source.base import SourceFile, StoredTensor
from ftd.tensorspec import TensorSpec
from tests.unit.source.checkpoint_files import A, B, sharded, valid_file, write

SHARDS = {"model-00001-of-00002.safetensors": A, "model-00002-of-00002.safetensors": B}


def load(names: Names, model: Path, progress: LoadProgress | None = None) -> tuple[Generation, list[str]]:
    notes: list[str] = []
    config = DaemonConfig(model=model, pin="none", verify="full")
    progress = progress or LoadProgress()
    made = materialize(names, 1, config, Access(), progress, holders=lambda: "", note=notes.append)
    return made, notes


def nothing_is_left(names: Names) -> bool:
    return list(SHM_DIR.glob(f"ftd.{names.namespace}*")) == []


def state(path: Path, data: bytes | None = None) -> None:
    digest = hashlib.sha256(path.read_bytes() if data is None else data).hexdigest()
    path.with_name(f"{path.name}.sha256").write_text(f"{digest}  {path.name}\n")


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.leaves_segments
def test_files_as_stated_are_published_without_a_word(names: Names, tmp_path: Path) -> None:
    sharded(tmp_path, SHARDS)
    for name in SHARDS:
        state(tmp_path / name)
    made, notes = load(names, tmp_path)
    made.close()
    assert notes == []
    assert len(made.manifest.digests) == 3


@pytest.mark.leaves_segments
def test_files_of_which_nobody_states_a_hash_are_named(names: Names, tmp_path: Path) -> None:
    sharded(tmp_path, SHARDS)
    state(tmp_path / "model-00001-of-00002.safetensors")
    made, notes = load(names, tmp_path)
    made.close()
    assert notes == ["verify: full found no stated hash of 1 file: model-00002-of-00002.safetensors"]


@pytest.mark.parametrize("at", [-1, 9], ids=["weight", "header"])
def test_a_file_that_is_not_what_is_stated_is_refused(names: Names, tmp_path: Path, at: int) -> None:
    """A header that reads well with one character changed as well: the name of a tensor."""
    write(tmp_path, {"model.safetensors": valid_file(A)})
    path = tmp_path / "model.safetensors"
    state(path)
    flip(path, at if at < 0 else path.read_bytes().index(b"a.bias"))
    with pytest.raises(SourceDamagedError, match=rf"{path} has SHA-256 [0-9a-f]{{64}}, {path}.sha256 says") as caught:
        load(names, tmp_path)
    assert caught.value.remedy.startswith("download")
    assert nothing_is_left(names)


def test_every_file_that_differs_is_told(names: Names, tmp_path: Path) -> None:
    sharded(tmp_path, SHARDS)
    for name in SHARDS:
        state(tmp_path / name, b"")
    with pytest.raises(SourceDamagedError) as caught:
        load(names, tmp_path)
    assert all(name in caught.value.message for name in SHARDS)


def test_whoever_states_two_hashes_is_wrong_once(names: Names, tmp_path: Path) -> None:
    blob = valid_file(A)
    digest = hashlib.sha256(blob).hexdigest()
    write(tmp_path, {f"blobs/{digest}": blob})
    (tmp_path / "model").mkdir()
    link = tmp_path / "model/model.safetensors"
    link.symlink_to(f"../blobs/{digest}")
    link.with_name("model.safetensors.sha256").write_text("0" * 64)
    with pytest.raises(SourceDamagedError, match="sha256 says 000") as caught:
        load(names, tmp_path / "model")
    assert "blobs" not in caught.value.message


def test_the_hash_is_that_of_the_memory_and_not_of_the_file(
    names: Names, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A byte that went wrong on its way, before it was digested."""
    write(tmp_path, {"model.safetensors": valid_file(A)})
    state(tmp_path / "model.safetensors")
    fetch = Filler._fetch

    def wrong(self: Filler, fd: int, file: SourceFile, buffers: list[memoryview], at: int) -> None:
        fetch(self, fd, file, buffers, at)
        buffers[0][0] ^= 1

    monkeypatch.setattr(Filler, "_fetch", wrong)
    with pytest.raises(SourceDamagedError, match=r"model\.safetensors has SHA-256"):
        load(names, tmp_path)
    assert nothing_is_left(names)


def test_memory_that_changed_since_it_was_read_is_refused(
    names: Names, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, {"model.safetensors": valid_file(A)})
    run = Filler.run

    def disturbed(self: Filler, reads: list[Read]) -> None:
        run(self, reads)
        piece = reads[0].pieces[-1]
        self._views[piece.segment][piece.offset] ^= 1

    monkeypatch.setattr(Filler, "run", disturbed)
    with pytest.raises(SegmentError, match=r"1 tensor changed in shared memory after they were read: 'a\.\w+'"):
        load(names, tmp_path)
    assert nothing_is_left(names)


def test_a_file_that_changes_before_it_is_compared_is_refused(
    names: Names, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, {"model.safetensors": valid_file(A)})
    path = tmp_path / "model.safetensors"
    state(path)
    real = creator.prove_files

    def later(*arguments: object) -> None:
        os.utime(path, ns=(0, 1))
        real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(creator, "prove_files", later)
    with pytest.raises(SourceChangedError, match="changed while it was read: mtime_ns"):
        load(names, tmp_path)


def test_a_file_that_is_gone_by_then_is_named(names: Names, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {"model.safetensors": valid_file(A)})
    path = tmp_path / "model.safetensors"
    state(path)
    real = creator.prove_files

    def later(*arguments: object) -> None:
        path.unlink()
        real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(creator, "prove_files", later)
    with pytest.raises(SourceError, match=f"{path} is missing"):
        load(names, tmp_path)


@pytest.mark.parametrize("what", ["prove_memory", "prove_files"])
def test_it_ends_when_it_is_told_to(names: Names, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    write(tmp_path, {"model.safetensors": valid_file(A)})
    state(tmp_path / "model.safetensors")
    progress = LoadProgress()
    real: Callable[..., None] = getattr(creator, what)

    def cancelled(*arguments: object) -> None:
        progress.cancel()
        real(*arguments)
        pytest.fail("it went on")

    monkeypatch.setattr(creator, what, cancelled)
    with pytest.raises(LoadCancelledError):
        load(names, tmp_path, progress)
    assert nothing_is_left(names)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(st.tuples(st.integers(0, 90), st.integers(0, 30)), max_size=8), stride_bytes=st.integers(1, 40))
def test_the_file_is_put_together_from_its_first_byte_to_its_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: list[tuple[int, int]], stride_bytes: int
) -> None:
    """Whatever lies between, before and behind tensors, and where tensors share bytes."""
    data = os.urandom(120)
    (tmp_path / "f").write_bytes(data)
    status = (tmp_path / "f").stat()
    file = SourceFile(tmp_path / "f", "f", 120, status.st_mtime_ns, status.st_ino, status.st_dev, "")
    tensors = [StoredTensor(TensorSpec(str(n), "U8", (length,)), 0, at) for n, (at, length) in enumerate(rows)]
    extents = {str(n): Extent(0, 1000 * n, length) for n, (_, length) in enumerate(rows)}
    memory = bytearray(1000 * len(rows) + 30)
    for number, (at, length) in enumerate(rows):
        memory[1000 * number : 1000 * number + length] = data[at : at + length]
    monkeypatch.setattr(prove, "STRIDE_BYTES", stride_bytes)
    found = prove._sha256(file, tensors, extents, [memoryview(memory)], lambda: None)
    assert found == hashlib.sha256(data).hexdigest()
