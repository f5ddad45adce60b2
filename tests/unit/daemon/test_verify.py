"""Random checkpoints through loader, manifest and both comparisons: nothing differs, and what does is found by name."""

from __future__ import annotations

import errno
import hashlib
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ftd.config.model import DaemonConfig
from ftd.daemon import verify_source
from ftd.daemon.creator import materialize
from ftd.daemon.progress import LoadProgress
from ftd.daemon.reread import compare
from ftd.daemon.verify import _live, _segment
from ftd.daemon.verify_source import check_has_files, compare_source
from ftd.daemon.verify_table import bar, print_report
from ftd.errors import SourceError, UsageError
from ftd.shm.manifest import Manifest
from ftd.shm.names import Names, listed
from ftd.shm.segment import Access, path_of, unlink
from ftd.source.resolve import resolve
from ftd.tensorspec import DTYPE_BITS, TensorSpec
from tests.unit.shm.test_digest import reference
from tests.unit.source.checkpoint_files import A, Tensors, sharded

NAMES = st.one_of(
    st.from_regex(r"layers\.[0-9]{1,2}\.(mlp|attn)\.weight", fullmatch=True),
    st.text(st.characters(exclude_categories=("Cs",)), max_size=8),
    st.sampled_from(["", "重み", "веса.0", "وزن", "😀.weight", 'quote"d', "line\nbreak", "nul\0"]),
).filter(lambda name: name != "__metadata__")
DTYPES = sorted(name for name, bits in DTYPE_BITS.items() if bits % 8 == 0)
SHAPES = st.lists(st.sampled_from([0, 1, 2, 3, 5]), max_size=3).map(tuple)


@st.composite
def shards(draw: st.DrawFn) -> list[Tensors]:
    names = draw(st.lists(NAMES, min_size=1, max_size=8, unique=True))
    made: list[Tensors] = [{}, {}, {}]
    for name in names:
        dtype, shape = draw(st.sampled_from(DTYPES)), draw(SHAPES)
        size = TensorSpec(name, dtype, shape).nbytes
        made[draw(st.integers(0, 2))][name] = (dtype, shape, draw(st.binary(min_size=size, max_size=size)))
    return [tensors for tensors in made if tensors]


@contextmanager
def loaded(names: Names, contents: list[Tensors]) -> Iterator[tuple[Manifest, Path]]:
    """The manifest of a generation of these shards, and their directory."""
    with tempfile.TemporaryDirectory() as directory:
        path = sharded(Path(directory).resolve(), {f"x-{i}.safetensors": each for i, each in enumerate(contents)})
        with published(names, path) as manifest:
            yield manifest, path


@contextmanager
def published(names: Names, model: Path) -> Iterator[Manifest]:
    """The manifest of its generation, which lives in the block."""
    config = DaemonConfig(model=model, pin="none", verify="full")
    made = materialize(names, 1, config, Access(), LoadProgress(), holders=lambda: "", note=lambda _: None)
    try:
        yield made.manifest
    finally:
        made.close()
        for name in listed(names.namespace):
            unlink(name.name)


def differing(manifest: Manifest) -> list[str]:
    with ExitStack() as stack:
        segments = [_segment(fact.name, fact.bytes, fact.inode, stack) for fact in manifest.segments]
        found = compare(list(_live(manifest, segments)), threads=2, step=lambda _: None)
    return [difference.name for difference in found]


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


@pytest.mark.leaves_segments
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(contents=shards(), data=st.data())
def test_what_differs_is_found_by_name_and_nothing_else_is(
    names: Names, contents: list[Tensors], data: st.DataObject
) -> None:
    """ST-01, ST-03, ST-08, ST-21, ST-25: every type and shape, names in every script, any offset."""
    stored = {name: content for tensors in contents for name, (_, _, content) in tensors.items()}
    with loaded(names, contents) as (manifest, path):
        digests = {p.spec.name: digest for p, digest in zip(manifest.tensors, manifest.digests, strict=True)}
        assert digests == {name: reference(content) for name, content in stored.items()}
        assert differing(manifest) == []
        assert compare_source(manifest, 2, bar)["ok"]
        full = [name for name, content in stored.items() if content]
        if not full:
            return
        name = data.draw(st.sampled_from(full))
        at = data.draw(st.integers(0, len(stored[name]) - 1))
        extent = next(placed.extent for placed in manifest.tensors if placed.spec.name == name)
        flip(path_of(names.weights(1, extent.segment)), extent.offset + at)
        assert differing(manifest) == [name]
        assert compare_source(manifest, 2, bar)["ok"]
        checkpoint = resolve(path)
        tensor = next(tensor for tensor in checkpoint.tensors if tensor.spec.name == name)
        flip(checkpoint.files[tensor.file].path, tensor.offset + at)
        told = compare_source(manifest, 2, bar)
        assert [(found["name"], found["place"]) for found in told["differing"]] == [
            (name, checkpoint.files[tensor.file].name)
        ]
        assert not told["ok"] and told["problems"] == []


@pytest.mark.leaves_segments
def test_tensors_that_lie_otherwise_in_their_file_are_compared_too(names: Names, tmp_path: Path) -> None:
    """TL-06: digests are of what followers see, and the hash of the file is of the file."""
    kernel = torch.arange(2 * 3 * 4 * 5, dtype=torch.float32).reshape(2, 3, 4, 5).to(memory_format=torch.channels_last)
    linear = torch.arange(12, dtype=torch.bfloat16).reshape(3, 4).t()
    tensors = {"conv": kernel, "linear": linear, "bias": torch.ones(1).expand(7), "tied": torch.arange(9)}
    path = tmp_path / "model.pt"
    torch.save({**tensors, "again": tensors["tied"]}, path)
    path.with_name("model.pt.sha256").write_text(hashlib.sha256(path.read_bytes()).hexdigest())
    with published(names, path) as manifest:
        digests = {p.spec.name: digest for p, digest in zip(manifest.tensors, manifest.digests, strict=True)}
        seen = {**tensors, "again": tensors["tied"]}
        assert digests == {
            name: reference(bytes(tensor.contiguous().view(torch.uint8).flatten().tolist()))
            for name, tensor in seen.items()
        }
        assert differing(manifest) == [] and compare_source(manifest, 2, bar)["ok"]
        for name, alike in {
            "conv": ["conv"],
            "linear": ["linear"],
            "bias": ["bias"],
            "tied": ["again", "tied"],
        }.items():
            tensor = next(tensor for tensor in resolve(path).tensors if tensor.spec.name == name)
            flip(path, tensor.offset)
            told = compare_source(manifest, 2, bar)
            assert sorted(found["name"] for found in told["differing"]) == alike
            flip(path, tensor.offset)
        extent = next(placed.extent for placed in manifest.tensors if placed.spec.name == "tied")
        flip(path_of(names.weights(1, extent.segment)), extent.offset)
        assert sorted(differing(manifest)) == ["again", "tied"]


@pytest.mark.leaves_segments
@pytest.mark.parametrize(
    ("error", "problem"),
    [
        (SourceError("ended at byte 9 while it was read"), "ended at byte 9 while it was read"),
        (OSError(errno.EIO, "Input/output error"), "cannot be read: input/output error"),
    ],
)
def test_a_tensor_that_lies_otherwise_and_cannot_be_read_is_named(
    names: Names, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, problem: str
) -> None:
    path = tmp_path / "model.pt"
    torch.save({"plain": torch.arange(9), "turned": torch.arange(12).reshape(3, 4).t()}, path)

    def failing(*_: object) -> bytes:
        raise error

    with published(names, path) as manifest:
        monkeypatch.setattr(verify_source, "read_exactly", failing)
        told = compare_source(manifest, 2, bar)
    assert [(found["name"], found["place"], found["problem"]) for found in told["differing"]] == [
        ("turned", "model.pt", problem)
    ]
    assert told["problems"] == []


@pytest.mark.leaves_segments
def test_weights_of_a_process_have_no_files(names: Names) -> None:
    with loaded(names, [A]) as (manifest, _):
        check_has_files(manifest)
        received = replace(manifest, source={"kind": "published", "path": "engine", "files": []})
    with pytest.raises(UsageError, match=rf"generation 1 of {names.namespace} came from a process \(engine\)"):
        check_has_files(received)


def test_names_out_of_files_move_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    row = {"name": "a\x1b[2J\nb", "place": "x\x1b[1m.safetensors", "offset": 8, "problem": "ends at byte 9"}
    part = {"differing": [row], "problems": ["/dev/shm/ftd.a.g1.1 is gone"]}
    told = {"namespace": "a", "generation": 1, "digest": "d", "tensors": 5, "bytes": 7, "seconds": 1.0, **part}
    print_report({**told, "source": {"path": "/m\x07", **part}})
    out = capsys.readouterr().out
    assert "\x1b" not in out and "\x07" not in out
    assert out.count("'a\\x1b[2J\\nb' in x\\x1b[1m.safetensors at byte 8: ends at byte 9\n") == 2
    assert out.count("1 of 5 tensors differ") == 2 and out.count("g1.1 is gone") == 2


def test_what_could_not_be_compared_is_not_counted_as_equal(capsys: pytest.CaptureFixture[str]) -> None:
    """A file that is gone, and no tensor that differs, is no `0 of 5 tensors differ`."""
    told = {"namespace": "a", "generation": 1, "digest": "d", "tensors": 5, "bytes": 7, "seconds": 1.0}
    clean, gone = {"differing": [], "problems": []}, {"differing": [], "problems": ["model path /m is missing"]}
    print_report({**told, **clean, "source": {"path": "/m", **gone}})
    out = capsys.readouterr().out
    assert "shared memory (1.0 s): as published\n" in out and "/m: not what was published\n" in out
