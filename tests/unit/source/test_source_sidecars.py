"""Which files travel with the weights."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoint_files import filled, valid_file, write

from ftd.errors import SourceChangedError
from ftd.source import resolve as resolve_module
from ftd.source.base import Checkpoint, Sidecar
from ftd.source.resolve import resolve
from ftd.source.sidecar_names import CONFIGURATION, TOKENIZER, is_sidecar
from ftd.source.sidecars import MAX_SIDECAR_BYTES, MAX_SIDECARS, read_sidecar

WEIGHTS = valid_file({"a": filled("U8", (1,))})


def names(checkpoint: Checkpoint) -> list[str]:
    return [sidecar.name for sidecar in checkpoint.sidecars]


@pytest.mark.parametrize(
    "name",
    [
        "config.json", "tokenizer.json", "merges.txt", "vocab.txt", "spiece.model", "chat_template.jinja", "source.spm",
        "tokenizer.model.v3", "tokenizer.model.v11m", "tokenizer.4.0.json", "qwen.tiktoken", "tekken.json",
        "adapter_config.json", "quantize_config.json", "model_index.json", "sentence_xlm-roberta_config.json",
        "1_Pooling/config.json", "12_Dense/config.json", "additional_chat_templates/tool_use.jinja",
        "scheduler/scheduler_config.json", "tokenizer/vocab.json", "tokenizer_2/spiece.model",
        "qformer_tokenizer/tokenizer.json", "text_encoder_2/config.json", "vae/config.json",
        "feature_extractor/preprocessor_config.json",
    ],
)  # fmt: skip
def test_what_a_loader_needs(name: str) -> None:
    assert is_sidecar(name)


@pytest.mark.parametrize(
    "name",
    [
        # what lies in a home directory
        "credentials.json", "passwords.txt", "package.json", "notes.txt", "client_secret.json", "vocabulary.txt",
        "my_vocab.txt", "tokens.json", "id_rsa", "settings.json", "hmm.model", "secret.jinja", "config.json.bak",
        "Config.json", "config.json~", ".config.json", "xconfig.json", "tokenizer.secret.json", "tokenizer",
        # what lies beside weights, and no loader reads
        "data_config.json", "trainer_state.json", "training_args.json", "train_log.txt", "requirements.txt",
        "README.md", "LICENSE", "modelcard.json", "all_results.json", "eval_results.txt", "tokenizer.model.old",
        # weights, their indexes, code
        "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin.index.json", "pytorch_model.bin",
        "diffusion_pytorch_model.safetensors.index.fp16.json", "tokenizer.bin", "vocab.npy", "tokenizer.model.v3.py",
        "modeling_x.py", "tokenization_x.py", "tokenizer.py", "vocab.safetensors",
        # one level below
        "secrets/config.json", "1_Pooling/secret.json", "additional_chat_templates/config.json", "app/package.json",
        "scheduler/config.json", "tokenizer/config.json", "tokenizer_2/notes.txt", "vae/secret.json", "a/b/config.json",
        "additional_chat_templates/.jinja", "config.json\n",
    ],
)  # fmt: skip
def test_what_never_travels(name: str) -> None:
    assert not is_sidecar(name)


def _vocabulary_names() -> set[str]:
    """The literals of every `VOCAB_FILES_NAMES` in the installed transformers, without importing it."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        pytest.skip("needs transformers")
    found: set[str] = set()
    for path in Path(spec.origin).parent.rglob("tokenization_*.py"):
        for block in re.findall(r"^VOCAB_FILES_NAMES = \{(.*?)\}", path.read_text(), re.DOTALL | re.MULTILINE):
            found.update(re.findall(r':\s*"([^"]+)"', block))
    return found


def test_the_tokenizers_of_transformers_find_their_files() -> None:
    wanted = _vocabulary_names()
    assert len(wanted) > 20
    assert sorted(name for name in wanted if not is_sidecar(name)) == []


def test_the_page_lists_what_the_table_has() -> None:
    page = (Path(__file__).parents[3] / "docs/sidecar-files.md").read_text()
    listed = {word for word in re.findall(r"`([^`]+)`", page) if re.fullmatch(r"[\w.-]+\.[a-z]+", word)}
    assert listed == {*CONFIGURATION, *TOKENIZER}


def test_a_home_directory_keeps_its_secrets(tmp_path: Path) -> None:
    """Whoever may attach reads every sidecar: neither a file's nor a directory's path publishes what isn't listed."""
    secrets = dict.fromkeys(("credentials.json", "passwords.txt", "vocab_of_keys", "a.model", "s/x.json"), "secret")
    write(tmp_path, {"model.safetensors": WEIGHTS, "config.json": "{}", **secrets})
    assert names(resolve(tmp_path / "model.safetensors")) == ["config.json"]
    assert names(resolve(tmp_path)) == ["config.json"]


def test_the_directory_and_one_level_below(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "model.safetensors": WEIGHTS,
            "config.json": "{}",
            "1_Pooling/config.json": '{"a":1}',
            "a/b/config.json": "{}",
            ".cache/config.json": "{}",
            "modeling.py": "",
        },
    )
    checkpoint = resolve(tmp_path)
    assert names(checkpoint) == ["1_Pooling/config.json", "config.json"]
    pooling = checkpoint.sidecars[0]
    assert (pooling.path, pooling.bytes) == (tmp_path / "1_Pooling/config.json", 7)
    assert pooling.mtime_ns == pooling.path.stat().st_mtime_ns
    assert checkpoint.notes == ()


def test_a_single_file_has_its_directory_s_top_level(tmp_path: Path) -> None:
    write(tmp_path, {"x.safetensors": WEIGHTS, "config.json": "{}", "1_Pooling/config.json": "{}"})
    assert names(resolve(tmp_path / "x.safetensors")) == ["config.json"]


def test_links_count_if_they_lead_to_regular_files(tmp_path: Path) -> None:
    model = write(tmp_path / "snapshots" / "abc", {"model.safetensors": WEIGHTS})
    write(tmp_path, {"blobs/1": "{}"})
    (model / "config.json").symlink_to("../../blobs/1")
    (model / "vocab.json").symlink_to("../../blobs/2")
    (model / "modules.json").symlink_to("../../blobs")
    write(tmp_path, {"elsewhere/config.json": "{}"})
    (model / "1_Pooling").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    os.mkfifo(model / "merges.txt")
    checkpoint = resolve(model)
    assert names(checkpoint) == ["config.json"]
    assert checkpoint.sidecars[0].bytes == 2
    assert checkpoint.notes == (
        "merges.txt: sidecar skipped, no regular file",
        "vocab.json: sidecar skipped, no such file or directory",
    )


def test_small_files_first_and_what_does_not_fit_is_noted(tmp_path: Path) -> None:
    write(tmp_path, {"model.safetensors": WEIGHTS, "config.json": "{}"})
    # sparse: sizes are what counts
    for name, size in (("merges.txt", MAX_SIDECAR_BYTES - 2), ("vocab.txt", MAX_SIDECAR_BYTES - 1)):
        (tmp_path / name).touch()
        os.truncate(tmp_path / name, size)
    checkpoint = resolve(tmp_path)
    assert names(checkpoint) == ["config.json", "merges.txt"]
    assert sum(sidecar.bytes for sidecar in checkpoint.sidecars) == MAX_SIDECAR_BYTES
    assert checkpoint.notes == ("sidecars skipped, beyond 32.00 MiB and 1024 files in all: vocab.txt (32.00 MiB)",)


def test_a_dump_of_small_files_is_cut(tmp_path: Path) -> None:
    write(tmp_path, {"model.safetensors": WEIGHTS, **{f"{i}_M/config.json": "" for i in range(MAX_SIDECARS + 20)}})
    checkpoint = resolve(tmp_path)
    assert len(checkpoint.sidecars) == MAX_SIDECARS
    assert "983_M/config.json (0 B)" in checkpoint.notes[0] and "and 4 more" in checkpoint.notes[0]


def test_names_that_are_not_utf8_are_noted(tmp_path: Path) -> None:
    write(tmp_path, {"model.safetensors": WEIGHTS})
    with open(os.fsencode(tmp_path) + b"/caf\xe9.json", "wb"):
        pass
    checkpoint = resolve(tmp_path)
    assert names(checkpoint) == []
    assert checkpoint.notes == ("caf\\udce9.json: ignored, its name is not UTF-8",)


def test_a_directory_that_cannot_be_listed_costs_a_single_file_its_sidecars(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, {"x.safetensors": WEIGHTS, "config.json": "{}"})

    def refused(*args: object, **kwargs: object) -> object:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(resolve_module, "list_directory", refused)
    checkpoint = resolve(tmp_path / "x.safetensors")
    assert len(checkpoint.tensors) == 1 and names(checkpoint) == []
    assert "no sidecars" in checkpoint.notes[0] and "permission denied" in checkpoint.notes[0]


# --- reading them -------------------------------------------------------------------------------------------------


def listed(directory: Path) -> Sidecar:
    write(directory, {"model.safetensors": WEIGHTS, "config.json": '{"a": 1}'})
    (sidecar,) = resolve(directory).sidecars
    return sidecar


def test_a_sidecar_is_read(tmp_path: Path) -> None:
    assert read_sidecar(listed(tmp_path)) == b'{"a": 1}'


def _grow(path: Path) -> None:
    os.truncate(path, 1 << 40)  # sparse: reading it all would not end


def _same_size(path: Path) -> None:
    path.write_text('{"b": 2}')
    os.utime(path, ns=(1, 1))


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_grow, "has 1099511627776 bytes: expected 8 as at the start"),
        (lambda path: path.write_text(""), "has 0 bytes: expected 8"),
        (_same_size, "was written to since the start"),
        (Path.unlink, "is missing"),
        (_fifo, "is a fifo"),
    ],
)
def test_a_sidecar_that_is_another_by_now(tmp_path: Path, change: Callable[[Path], object], words: str) -> None:
    sidecar = listed(tmp_path)
    change(sidecar.path)
    with pytest.raises(SourceChangedError) as caught:
        read_sidecar(sidecar)
    assert f"{sidecar.path} {words}" in caught.value.message
    assert caught.value.remedy.startswith("start again")


def test_a_sidecar_that_changes_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sidecar = listed(tmp_path)
    read = os.pread

    def rewriting(fd: int, count: int, offset: int) -> bytes:
        data = read(fd, count, offset)
        os.utime(sidecar.path, ns=(1, 1))
        return data

    monkeypatch.setattr(os, "pread", rewriting)
    with pytest.raises(SourceChangedError, match="was written to"):
        read_sidecar(sidecar)
