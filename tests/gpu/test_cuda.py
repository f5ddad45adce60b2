"""`pin: cuda`, attach, and load to a GPU, on a real one."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import ftd_client
from ftd.cuda.runtime import load_runtime
from tests.gpu.conftest import Start, ftd

transformers = pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible"),
]


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small llama with tied embeddings, in bfloat16, of several shards."""
    folder = tmp_path_factory.mktemp("llama")
    config = transformers.LlamaConfig(
        vocab_size=4096, hidden_size=512, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=8,
        num_key_value_heads=4, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder, max_shard_size="8MB")
    assert (folder / "model.safetensors.index.json").exists()
    return folder


@pytest.fixture(scope="session")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """2.5 GiB in few tensors, one of them larger than a registration chunk."""
    path = tmp_path_factory.mktemp("big") / "model.safetensors"
    torch.manual_seed(1)
    safetensors_torch.save_file(
        {
            "layers.0.weight": torch.randint(-128, 127, (1536 << 20,), dtype=torch.int8),
            "layers.1.weight": torch.randint(-128, 127, (1024 << 20,), dtype=torch.int8),
            "scale": torch.tensor(0.5),
        },
        path,
    )
    return path


def test_a_gpu_that_is_there_answers_when_it_is_asked() -> None:
    """CU-19: what tells the daemon that it is not."""
    cuda, reason = load_runtime()
    assert cuda is not None, reason
    cuda.use_device(0)
    cuda.ask_device()


def compute_pids() -> set[int]:
    shown = subprocess.run(
        ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"], capture_output=True, text=True
    )
    return {int(line) for line in shown.stdout.split() if line.isdigit()}


def test_every_byte_is_pinned_and_reaches_the_gpu(big: Path, name: str, start: Start) -> None:
    """CU-05, CU-08: registration by chunks over whole segments; a tensor crosses a chunk border."""
    status = start(big, "pin=cuda")
    assert status["pin"] == "cuda", status["warnings"]
    assert [s["pinned_bytes"] for s in status["segments"]] == [s["bytes"] for s in status["segments"]]
    with ftd_client.attach(name) as weights:
        for tensor_name, tensor in weights.state_dict().items():
            assert torch.equal(tensor.cuda().cpu(), tensor), tensor_name


def test_llama_is_bit_equal_to_the_resident_model(llama: Path, name: str, start: Start) -> None:
    """MD-03, MD-04: buffers follow the weights; the tie is one copy on the device."""
    start(llama, "pin=cuda")
    reference = copy.deepcopy(transformers.LlamaForCausalLM.from_pretrained(llama, dtype="auto")).eval().cuda()
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_pretrained(llama)).eval()
    with ftd_client.attach(name) as weights:
        before = torch.cuda.memory_allocated()
        report = weights.load(model, "cuda:0")
        taken = torch.cuda.memory_allocated() - before
        status = json.loads(ftd("status", "-n", name, "--json").stdout)
        assert [(f["pid"], f["device"]) for f in status["followers"]] == [(os.getpid(), "cuda:0")]
        assert status["followers"][0]["resident_bytes"] == report.bytes
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert {t.device.type for t in [*model.parameters(), *model.buffers()]} == {"cuda"}
    unique = sum(p.nbytes for p in model.parameters())
    assert unique <= taken <= unique * 1.05 + (1 << 20)
    tokens = torch.randint(0, 4096, (2, 64), generator=torch.Generator().manual_seed(2)).cuda()
    with torch.inference_mode():
        assert torch.equal(model(tokens).logits, reference(tokens).logits)


def test_attach_and_bind_leave_cuda_alone(llama: Path, name: str, start: Start) -> None:
    """CU-13, CU-15: import, attach and bind start no context; a child forked after the import may use CUDA."""
    start(llama, "pin=cuda")
    script = f"""
import os, sys, ftd_client, torch
pid = os.fork()
if pid == 0:
    weights = ftd_client.attach({name!r})
    tensors = weights.state_dict()
    assert not torch.cuda.is_initialized()
    key = "model.embed_tokens.weight"
    assert torch.equal(tensors[key].cuda().cpu(), tensors[key])
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
assert not torch.cuda.is_initialized()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_follower_ends_silently_with_its_model_at_module_scope(llama: Path, name: str, start: Start) -> None:
    """CU-11."""
    start(llama, "pin=cuda")
    script = f"""
import sys, ftd_client, torch
weights = ftd_client.attach({name!r})
tensors = {{key: value.cuda() for key, value in weights.state_dict().items()}}
torch.cuda.synchronize()
sys.exit(7)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (7, "")


def test_mlock_makes_no_context(llama: Path, start: Start) -> None:
    status = start(llama, "pin=mlock")
    assert status["pin"] == "mlock"
    maps = Path(f"/proc/{status['pid']}/maps").read_text()
    assert "libcuda" not in maps
    assert status["pid"] not in compute_pids()


@pytest.mark.parametrize("visible", ["", "-1"])
def test_hidden_gpus_mean_no_gpu_mode(llama: Path, start: Start, visible: str) -> None:
    """CU-18: the variable is never parsed; the runtime says what is visible."""
    status = start(llama, "pin=cuda", env={"CUDA_VISIBLE_DEVICES": visible})
    assert status["pin"] == "mlock"
    assert any("cuda" in text.lower() for text in status["warnings"])


def test_a_uuid_names_the_gpu(llama: Path, start: Start) -> None:
    """CU-18."""
    gpu = subprocess.run(
        ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"], capture_output=True, text=True
    ).stdout.split()[0]
    assert start(llama, "pin=cuda", env={"CUDA_VISIBLE_DEVICES": gpu})["pin"] == "cuda"


def test_a_device_that_is_not_there_degrades(llama: Path, start: Start) -> None:
    """CU-02: every refusal costs speed and shows in status."""
    status = start(llama, "pin=cuda", "device=99")
    assert status["pin"] == "mlock"
    assert any("CUDA refused" in text for text in status["warnings"])


def test_kill_while_pinned_and_start_again(big: Path, name: str, start: Start) -> None:
    """CU-12, SH-08."""
    first = start(big, "pin=cuda")
    os.kill(first["pid"], signal.SIGKILL)
    deadline = time.monotonic() + 60
    while ftd("status", "-n", name).returncode != 3:
        assert time.monotonic() < deadline
    second = start(big, "pin=cuda")
    assert (second["pin"], second["generation"]) == ("cuda", first["generation"] + 1)
    left = {entry for entry in os.listdir("/dev/shm") if entry.startswith(f"ftd.{name}.g")}
    assert all(entry.startswith(f"ftd.{name}.g{second['generation']}.") for entry in left)
    assert ftd("stop", "-n", name).returncode == 0


def test_torch_works_after_a_refused_load(llama: Path, name: str, start: Start) -> None:
    """CU-01: no pending error is left for the next unrelated call."""
    start(llama, "pin=cuda")
    with torch.device("meta"):
        wrong = transformers.LlamaForCausalLM(transformers.LlamaConfig(hidden_size=64, num_hidden_layers=1))
    with ftd_client.attach(name) as weights, pytest.raises(ftd_client.BindError):
        weights.load(wrong, "cuda:0")
    assert torch.ones(3, device="cuda").sum().item() == 3
