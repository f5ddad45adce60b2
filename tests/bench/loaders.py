"""What users would load a checkpoint by instead of ftd, through the interfaces that those projects document; each in
a process of its own, with the device started and the libraries imported before the clock."""

from __future__ import annotations

import json
import math
import struct
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path

import torch

from tests.bench import digest
from tests.bench.child import Found, Skip

Tensors = Mapping[str, torch.Tensor]
#: (directory, safetensors file, device) → what loads all tensors.
Loader = Callable[[str, str, str], Callable[[], Tensors]]


def load(name: str, folder: str, file: str, device: str) -> Found:
    """In the contestant's own process."""
    once = LOADERS[name](folder, file, device)
    start_device(device)
    begun = time.perf_counter()
    tensors = once()
    wait(device)
    seconds = time.perf_counter() - begun
    elsewhere = {str(tensor.device) for tensor in tensors.values()} - {str(torch.device(device))}
    if elsewhere:
        raise RuntimeError(f"tensors are on {elsewhere}, expected {device}")
    if _in_mapping_of(file, tensors):
        raise Skip("leaves tensors in the file's mapping, which is no load")
    return {"seconds": seconds, "digest": digest.of(tensors)}


def _in_mapping_of(file: str, tensors: Tensors) -> bool:
    """Whether any tensor lies in a mapping of the file, as loading to a CPU may leave it."""
    spans = [
        [int(part, 16) for part in line.split(" ", 1)[0].split("-")]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if line.endswith(file)
    ]
    return any(start <= tensor.data_ptr() < end for tensor in tensors.values() for start, end in spans)


def start_device(device: str) -> None:
    """A CUDA context takes seconds and is nobody's merit."""
    torch.empty(1, device=device)
    wait(device)


def wait(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def source_digest(file: str, device: str) -> Found:
    """Of the file's tensors, by plain reads of its bytes."""
    tensors = {}
    with Path(file).open("rb", buffering=0) as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
        header = json.loads(opened.read(length))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            data = bytearray(end - begin)
            opened.seek(8 + length + begin)
            if opened.readinto(data) != len(data):
                raise RuntimeError(f"{file} is short at {name}")
            assert len(data) == 2 * math.prod(entry["shape"])
            tensors[name] = torch.frombuffer(data, dtype=torch.bfloat16).to(device)
    return {"digest": digest.of(tensors)}


def _needs(*packages: str) -> None:
    for package in packages:
        if find_spec(package) is None:
            raise Skip(f"{package} is not installed")


def safetensors_load_file(folder: str, file: str, device: str) -> Callable[[], Tensors]:
    """`load_file(device=…)`."""
    from safetensors.torch import load_file

    return lambda: load_file(file, device=device)


def safetensors_safe_open(folder: str, file: str, device: str) -> Callable[[], Tensors]:
    """`safe_open`, tensor by tensor `.to(device)`."""
    from safetensors import safe_open

    def once() -> Tensors:
        with safe_open(file, "pt") as opened:
            return {name: _to(opened.get_tensor(name), device) for name in opened.keys()}  # noqa: SIM118

    return once


def torch_mmap(folder: str, file: str, device: str) -> Callable[[], Tensors]:
    """`torch.load(mmap=True)`, tensor by tensor `.to(device)`, of the same tensors as `torch.save` writes them."""
    from safetensors.torch import load_file

    written = Path(folder) / "model.pt"
    torch.save(load_file(file), written)

    def once() -> Tensors:
        tensors = torch.load(written, mmap=True, weights_only=True)
        return {name: _to(tensor, device) for name, tensor in tensors.items()}

    return once


def pin_and_copy(folder: str, file: str, device: str) -> Callable[[], Tensors]:
    """By hand: each tensor through `pin_memory()`."""
    if torch.device(device).type != "cuda":
        raise Skip("needs a CUDA device")
    from safetensors.torch import load_file

    def once() -> Tensors:
        return {name: tensor.pin_memory().to(device, non_blocking=True) for name, tensor in load_file(file).items()}

    return once


def fastsafetensors(folder: str, file: str, device: str) -> Callable[[], Tensors]:
    """`SafeTensorsFileLoader(nogds=True)`: files in the page cache do not gain from GPUDirect Storage."""
    _needs("fastsafetensors")
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    kept: list[object] = []

    def once() -> Tensors:
        loader = SafeTensorsFileLoader(SingleGroup(), device=device, nogds=True)
        loader.add_filenames({0: [file]})
        buffer = loader.copy_files_to_device()
        kept.extend((loader, buffer))  # tensors are views of it
        return {name: buffer.get_tensor(name) for name in loader.get_keys()}

    return once


def runai_model_streamer(folder: str, file: str, device: str) -> Callable[[], Tensors]:
    """`SafetensorsStreamer`, tensor by tensor `.to(device)`."""
    _needs("runai_model_streamer")
    from runai_model_streamer import SafetensorsStreamer

    def once() -> Tensors:
        with SafetensorsStreamer() as streamer:
            streamer.stream_file(file)
            return {name: tensor.to(device) for name, tensor in streamer.get_tensors()}

    return once


def accelerate(folder: str, file: str, device: str) -> Callable[[], Tensors]:
    """`load_checkpoint_and_dispatch` into an empty model, the whole of it to one device."""
    _needs("accelerate", "transformers")
    from accelerate import init_empty_weights, load_checkpoint_and_dispatch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)

    def once() -> Tensors:
        loaded = load_checkpoint_and_dispatch(model, folder, device_map={"": device}, dtype=torch.bfloat16)
        return dict(loaded.named_parameters())

    return once


def transformers(folder: str, file: str, device: str) -> Callable[[], Tensors]:
    """`from_pretrained(device_map=…)`, building the model included."""
    _needs("transformers", "accelerate")  # which device_map asks for
    from transformers import LlamaForCausalLM

    def once() -> Tensors:
        model = LlamaForCausalLM.from_pretrained(folder, device_map={"": device}, dtype=torch.bfloat16)
        return dict(model.named_parameters())

    return once


def _to(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """A copy on the CPU too: a view of the file's pages would be no load."""
    return tensor.to(device, copy=True)


LOADERS: dict[str, Loader] = {
    "safetensors_load_file": safetensors_load_file,
    "safetensors_safe_open": safetensors_safe_open,
    "torch_mmap": torch_mmap,
    "pin_and_copy": pin_and_copy,
    "fastsafetensors": fastsafetensors,
    "runai_model_streamer": runai_model_streamer,
    "accelerate": accelerate,
    "transformers": transformers,
}
