"""Parts of the demo whose mistakes its output would not show: memory counted wrong, a proof that proves nothing."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import nn

import ftd_client
from ftd.errors import FtdError
from ftd.units import MIB
from ftd_client.demo import models
from ftd_client.demo.crew import Crew
from ftd_client.demo.interrupts import Interrupts
from ftd_client.demo.measure import Memory, memory_of, weights_of
from ftd_client.demo.problems import CommandFailedError, DemoError, step
from ftd_client.demo.run import _check_equal
from tests.integration.conftest import Publish
from tests.integration.saved_models import llama, merges, mixtral

_SMAPS = """\
7f0000000000-7f0000400000 rw-p 00000000 00:1a 42                         /dev/shm/ftd.a b.g1.0 (deleted)
Size:               4096 kB
Rss:                4096 kB
Pss:                1365 kB
Anonymous:            16 kB
VmFlags: rd wr mr mw me
7f0000400000-7f0000800000 r--p 00000000 00:1a 43                         /dev/shm/ftd.a b.g1.1
Pss:                 100 kB
Anonymous:             0 kB
7f0000800000-7f0000900000 rw-p 00000000 00:00 0\x20
Pss:                7000 kB
Anonymous:          7000 kB
7fff00000000-7fff00001000 r-xp 00000000 00:00 0                          [vdso]
Pss:                   0 kB
Anonymous:             0 kB
"""


def test_mappings_of_weights_are_told_by_their_path() -> None:
    is_weights = "/dev/shm/ftd.a b.g1.0".__eq__
    assert weights_of(_SMAPS, is_weights) == (1365 * 1024, 16 * 1024)
    assert weights_of(_SMAPS, lambda path: path.startswith("/dev/shm/")) == (1465 * 1024, 16 * 1024)
    assert weights_of("", is_weights) == (0, 0)


def test_memory_of_a_process_falls_into_three_parts(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(32 * MIB))

    def measure() -> Memory:
        return memory_of([os.getpid()], str(path.resolve()).__eq__)

    assert measure().weights_bytes == 0
    block = b"\1" * MIB  # of 16, freed ones stay in the heap once the process freed larger ones
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE) as m:
        assert sum(m[:: mmap.PAGESIZE]) == 0
        read = measure()
        assert read.weights_bytes == 32 * MIB
        for at in range(0, 16 * MIB, MIB):
            m[at : at + MIB] = block
        written = measure()
        # copied pages are still weights, and are not counted as heap a second time
        assert written.weights_bytes == 32 * MIB
        assert abs(written.anonymous_bytes - read.anonymous_bytes) < 8 * MIB
        assert written.private_bytes[0] > 16 * MIB
        assert written.total_bytes == sum((written.weights_bytes, written.anonymous_bytes, written.other_bytes))


def test_memory_of_nobody_is_an_error() -> None:
    with pytest.raises(DemoError, match="/proc/999999999/smaps_rollup can't be read"):
        memory_of([999_999_999], bool)


def test_the_proof_fails_on_one_output_that_differs(capsys: pytest.CaptureFixture[str]) -> None:
    one, other = {"model": "M", "digest": "a"}, {"model": "M", "digest": "b"}
    _check_equal([one, one], [one, one])
    assert "bit-equal: yes" in capsys.readouterr().out
    for ftd, reference in (([one, other], [one, one]), ([one, one], [one, other]), ([one, one], [other, other])):
        with pytest.raises(DemoError, match="outputs differ: 2 different ones"):
            _check_equal(ftd, reference)
        assert "bit-equal: no" in capsys.readouterr().out


def test_a_digest_tells_the_last_bit(tmp_path: Path) -> None:
    directory = llama(tmp_path / "model")
    config = models.read_config(directory)
    model, _ = models.pretrained_model(models.model_class(config), directory)
    inputs = models.make_inputs(config, directory, ["a", "b"])
    before = models.embed(model, inputs)
    assert models.embed(model, inputs).digest == before.digest
    with torch.no_grad():
        weight = model.lm_head.weight.view(torch.int32)
        weight[0, 0] ^= 1 << 18
    assert models.embed(model, inputs).digest != before.digest


def test_tokens_come_from_the_tokenizer_where_there_is_one(minilm: Path, tmp_path: Path) -> None:
    config = models.read_config(minilm)
    long = "word " * 600
    short, cut = models.make_inputs(config, minilm, ["hello world", long])
    assert short.label == "hello world" and short.tensors["input_ids"].tolist() == [[101, 7592, 2088, 102]]
    assert cut.tensors["input_ids"].shape == (1, 128)
    directory = llama(tmp_path / "model")
    made = models.make_inputs(models.read_config(directory), directory, ["a", "b"])
    ids = [one.tensors["input_ids"] for one in made]
    assert all(int(row.max()) < 160 for row in ids) and not torch.equal(*ids)
    again = models.make_inputs(models.read_config(directory), directory, ["a", "b"])
    assert all(torch.equal(one, other.tensors["input_ids"]) for one, other in zip(ids, again, strict=True))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"model_type": "bert", "architectures": ["NoSuchModel"]}', None),
        ('{"model_type": "no-such-kind"}', "config.json can't be used"),
        ("{", "config.json can't be used"),
        ('{"model_type": "x", "auto_map": {"AutoConfig": "code.Config"}}', "config.json can't be used"),
    ],
)
def test_the_class_of_a_directory(text: str, words: str | None, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    (tmp_path / "code.py").write_text("raise SystemExit('code of a model was run')")
    if words is None:
        assert models.model_class(models.read_config(tmp_path)) is transformers.BertModel
    else:
        with pytest.raises(DemoError, match=words):
            models.read_config(tmp_path)


class _Unrecomputable(nn.Module):
    """A buffer that only the constructor can make, which is what all models of transformers 4 have."""

    def __init__(self, config: object) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))
        self.register_buffer("scale", torch.arange(4.0), persistent=False)


def test_buffers_that_nothing_recomputes_are_built_for_real(publish: Publish, tmp_path: Path) -> None:
    save_file({"weight": torch.ones(4)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with ftd_client.attach(publish(tmp_path)) as weights:
        model, _, _ = models.bound_model(weights, _Unrecomputable, tmp_path)
        assert model.weight.tolist() == [1.0] * 4 and model.scale.tolist() == [0.0, 1.0, 2.0, 3.0]


@merges
def test_names_that_transformers_merges_are_refused_with_the_way_out(publish: Publish, tmp_path: Path) -> None:
    directory = mixtral(tmp_path / "model")
    cls = models.model_class(models.read_config(directory))
    with ftd_client.attach(publish(directory)) as weights, pytest.raises(DemoError) as caught:
        models.bound_model(weights, cls, directory)
    assert caught.value.message.startswith(
        "MixtralForCausalLM and the checkpoint differ in 6 tensors, the first: model."
    )
    assert "save_original_format=False" in caught.value.remedy


def test_the_error_of_a_worker_comes_with_its_number(tmp_path: Path) -> None:
    source = tmp_path / "model"
    source.mkdir()
    (source / "config.json").write_text('{"model_type": "no-such-kind"}')
    order = {"kind": "from_pretrained", "source": str(source), "sentences": ["a"]}
    with Interrupts() as interrupts, Crew.of(1, order, os.environ, tmp_path) as crew:
        crew.gather(interrupts)
        with pytest.raises(DemoError) as caught:
            crew.in_turn(interrupts)
    assert caught.value.message.startswith("worker 1 (from_pretrained): the model's config.json can't be used: ")
    assert caught.value.remedy and not any(psutil.pid_exists(pid) for pid in crew.pids)


def test_foreign_errors_become_one_line() -> None:
    def fail(error: Exception) -> Callable[[], None]:
        def run() -> None:
            with step("it can't be done", "do something else"):
                raise error

        return run

    with pytest.raises(DemoError) as caught:
        fail(KeyError("a\n b"))()
    assert str(caught.value) == "it can't be done: KeyError: 'a\\n b'\n  → do something else"
    own = FtdError("known")
    with pytest.raises(FtdError) as kept:
        fail(own)()
    assert kept.value is own
    assert CommandFailedError("ftd start", 6).status == 6
