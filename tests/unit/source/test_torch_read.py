"""Torch checkpoints, read as torch reads them: every kind of tensor, both layouts, nested and tied."""

from __future__ import annotations

import argparse
import collections
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_files import filled, refusal, valid_file, write
from torch_files import LAYOUTS, archive, bits, mapping, older, same, saved, served, storage, tensor, written

from ftd.errors import SourceError
from ftd.source.resolve import resolve
from ftd.source.statedict import MODEL_NAMES

as_zip = pytest.mark.parametrize("as_zip", LAYOUTS, ids=["zip", "older"])

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32,
    torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
    *(getattr(torch, name) for name in ("float8_e8m0fnu", "float4_e2m1fn_x2") if hasattr(torch, name)),
]  # fmt: skip


def of(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Random bits."""
    count = int(np.prod(shape)) * dtype.itemsize
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (count,), dtype=torch.uint8)
    return raw.view(dtype).view(shape)


@as_zip
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_type(tmp_path: Path, dtype: torch.dtype, as_zip: bool) -> None:
    """ST-21 of torch checkpoints."""
    state = {"a": of(dtype, 3, 4), "b": of(dtype, 5), "c": torch.nn.Parameter(of(dtype, 2, 2), requires_grad=False)}
    assert same(served(written(tmp_path, state, as_zip=as_zip)), state)


@as_zip
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_protocol_of_the_pickle(tmp_path: Path, as_zip: bool, protocol: int) -> None:
    state = collections.OrderedDict(a=of(torch.float32, 3, 4), b=of(torch.int64, 2))
    whole = {
        "model": state,
        "set": {1, 2},
        "bytes": b"x",
        "array": bytearray(b"y"),
        "complex": 1j,
        "frozen": frozenset("a"),
    }
    path = written(tmp_path, saved(whole, as_zip=as_zip, protocol=protocol))
    assert same(served(path), state)


@as_zip
def test_modules_buffers_and_states_with_metadata(tmp_path: Path, as_zip: bool) -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Linear(4, 2))
    state = model.state_dict()
    assert state._metadata and state["1.num_batches_tracked"].dim() == 0
    state["attribute"] = torch.nn.Parameter(torch.ones(3))
    state["attribute"].tag = "kept by torch"
    assert same(served(written(tmp_path, state, as_zip=as_zip)), state)


@as_zip
def test_scalars_and_tensors_without_elements(tmp_path: Path, as_zip: bool) -> None:
    """ST-01 and ST-03 of torch checkpoints: nothing is tied for having no bytes."""
    state = {"scalar": torch.tensor(2.5), "none": torch.zeros(0), "rows": torch.zeros(3, 0, dtype=torch.int8)}
    path = written(tmp_path, state, as_zip=as_zip)
    assert same(served(path), state) and resolve(path).ties == {}


# --- strides, ties, views -----------------------------------------------------------------------------------------


@as_zip
def test_tensors_that_do_not_lie_row_by_row(tmp_path: Path, as_zip: bool) -> None:
    """TL-06: channels last, transposed, expanded, cut out; what followers see is row-major."""
    state = {
        "channels_last": torch.randn(6, 5, 3, 3).to(memory_format=torch.channels_last),
        "channels_last_3d": torch.randn(2, 3, 2, 3, 4).to(memory_format=torch.channels_last_3d),
        "transposed": torch.randn(7, 11).t(),
        "expanded": torch.randn(4, 1).expand(4, 9),
        "scalar_expanded": torch.tensor(3.0).expand(2, 3),
        "columns": torch.randn(8, 8)[1::2, 2:7:3],
        "permuted": torch.randn(2, 3, 4, 5).permute(2, 0, 3, 1),
        "half": torch.randn(5, 4, dtype=torch.float16).t(),
        "bytes": of(torch.uint8, 5, 4).t(),
        "double": torch.randn(5, 4, dtype=torch.float64).t(),
        "complex": of(torch.complex64, 5, 4).t(),
    }
    assert not any(value.is_contiguous() for value in state.values())
    found = served(written(tmp_path, state, as_zip=as_zip))
    assert same(found, state) and all(value.is_contiguous() for value in found.values())


def test_strides_of_single_rows_are_row_by_row(tmp_path: Path) -> None:
    """torch gives a dimension of one any stride: such a tensor is read where it lies."""
    state = {"a": torch.randn(4, 1, 5).transpose(0, 1), "b": torch.randn(1, 6).as_strided((1, 6), (999, 1))}
    path = written(tmp_path, state)
    assert all(stored.strides is None for stored in resolve(path).tensors) and same(served(path), state)


@as_zip
def test_ties_are_stored_once_and_views_take_their_own_bytes(tmp_path: Path, as_zip: bool) -> None:
    big = torch.randn(1000, 8)
    state = {
        "embed": big,
        "head": big,
        "part": big[10:20],
        "turned": big.t(),
        "turned_too": big.t(),
        "same": big.clone(),
    }
    path = written(tmp_path, state, as_zip=as_zip)
    checkpoint = resolve(path)
    assert checkpoint.ties == {"head": "embed", "turned_too": "turned"}
    found = served(path)
    assert same(found, state)
    assert found["head"].data_ptr() == found["embed"].data_ptr() != found["part"].data_ptr()


@as_zip
def test_a_small_view_of_something_large_takes_its_own_bytes(tmp_path: Path, as_zip: bool) -> None:
    state = {"a": torch.randn(1 << 20)[5:10]}
    checkpoint = resolve(written(tmp_path, state, as_zip=as_zip))
    assert sum(stored.spec.nbytes for stored in checkpoint.tensors) == 20


# --- which part is the model --------------------------------------------------------------------------------------


def notes(path: Path, allowed: tuple[str, ...] = ()) -> str:
    return "\n".join(resolve(path, allowed).notes)


@as_zip
def test_what_is_no_tensor_is_told(tmp_path: Path, as_zip: bool) -> None:
    """TL-04: numbers, text, None, a nested dict, an extra state."""
    inner = {"weight": torch.randn(2, 3), "list": [torch.ones(1), torch.zeros(2)], "empty": {}, "numbers": [1, 2, 3]}
    state = {"epoch": 3, "name": "x", "extra": None, "layer": inner, "blob": b"xyz", 7: torch.ones(1), "lr": 0.5}
    path = written(tmp_path, state, as_zip=as_zip)
    expected = {"layer.weight": inner["weight"], "layer.list.0": inner["list"][0], "layer.list.1": inner["list"][1]}
    assert same(served(path), {**expected, "7": state[7]})
    told = notes(path)
    assert "left out what is no tensor: epoch=3, name='x', extra=None" in told
    assert "layer.numbers (a list)" in told and "lr=0.5" in told and "blob" in told


@as_zip
@pytest.mark.parametrize("name", ["model", "state_dict", "model_state_dict", "model_state"])
def test_the_model_of_a_training_state(tmp_path: Path, as_zip: bool, name: str) -> None:
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    state = {"step": 12, "loss": torch.tensor(0.5), name: model.state_dict(), "optimizer": optimizer.state_dict()}
    path = written(tmp_path, state, as_zip=as_zip)
    assert same(served(path), model.state_dict())
    assert f"'{name}' is taken for the model; left out: step=12, loss (a tensor), optimizer (6 tensors)" in notes(path)


def test_a_model_of_any_name_beside_an_optimizer(tmp_path: Path) -> None:
    weights = {"w": torch.randn(3)}
    optimizer = {"state": {0: {"exp_avg": torch.zeros(3)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    assert same(served(written(tmp_path, {"generator": weights, "optim": optimizer, "step": 3})), weights)
    # as Lightning keeps them
    lightning = {"state_dict": weights, "optimizer_states": [optimizer], "epoch": 1}
    assert same(served(written(tmp_path, lightning)), weights)
    message = refusal(written(tmp_path, {"optim": optimizer})).message
    assert "state of an optimizer, optim, and no model" in message


def test_nested_dicts_without_a_known_name_are_joined(tmp_path: Path) -> None:
    state = {"encoder": {"0": {"w": torch.randn(3)}}, "decoder": {"w": torch.randn(2)}, "scale": torch.ones(1)}
    expected = {"encoder.0.w": state["encoder"]["0"]["w"], "decoder.w": state["decoder"]["w"], "scale": state["scale"]}
    assert same(served(written(tmp_path, state)), expected)


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"model": {"w": torch.ones(2)}, "ema": {"w": torch.ones(2)}}, "model (1 tensor), ema (1 tensor)"),
        ({"params": {"w": torch.ones(2)}, "params_ema": {"w": torch.ones(2)}}, "params (1 tensor), params_ema"),
        ({"model": {"w": torch.ones(2)}, "weight": torch.ones(2)}, "model (1 tensor), weight (a tensor)"),
        (
            {
                "g": {"w": torch.ones(2)},
                "d": {"w": torch.ones(2)},
                "o": {"state": {0: torch.ones(1)}, "param_groups": []},
            },
            "g (1 tensor), d (1 tensor)",
        ),
    ],
)
def test_several_parts_that_may_be_the_model_are_refused(tmp_path: Path, state: Any, words: str) -> None:
    error = refusal(written(tmp_path, state))
    assert f"holds several parts that may be the model: {words}" in error.message
    assert "torch.load(path, weights_only=True)['" in error.remedy


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.ones(3), "holds a tensor, expected a dict of tensors"),
        ([torch.ones(3)], "holds a list, expected a dict of tensors"),
        (3, "holds a number"),
        (None, "holds nothing"),
        ({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}, "two tensors that would both be called 'a.b'"),
        ({"1": torch.ones(1), 1: torch.ones(1)}, "a number and a text as keys that both read '1'"),
        ({("a", 1): torch.ones(1)}, "has a key that is neither text nor a number"),
        ({True: torch.ones(1)}, "has a key that is neither text nor a number"),
        ({"a": 3}, "has no tensor in it"),
        ({"\ud800": torch.ones(1)}, "lone surrogate"),
        ({"s": torch.ones(3).untyped_storage(), "t": torch.ones(3)}, None),
    ],
)
def test_what_is_no_state_dict(tmp_path: Path, value: Any, words: str | None) -> None:
    path = written(tmp_path, value)
    if words is None:
        assert "s (a bare storage)" in notes(path)
    else:
        assert words in refusal(path).message


def test_a_key_that_comes_twice_counts_as_the_last(tmp_path: Path) -> None:
    first, second = np.arange(2, dtype="<f4"), np.arange(2, 4, dtype="<f4")
    items = mapping({"a": tensor(storage("0", 2), (2,), (1,))})[:-1]
    items += mapping({"a": tensor(storage("1", 2), (2,), (1,))})[2:]
    two = archive(items, {"0": first.tobytes(), "1": second.tobytes()})
    assert same(served(written(tmp_path, two)), {"a": torch.from_numpy(second)})


# --- types --------------------------------------------------------------------------------------------------------


class Elsewhere(argparse.Namespace):
    """A type that no state dict needs."""


@as_zip
def test_training_arguments_are_refused_unless_allowed(tmp_path: Path, as_zip: bool) -> None:
    """TL-01: never unpickled; named with the option that leaves them out."""
    weights = {"w": torch.randn(3)}
    state = {"args": argparse.Namespace(lr=0.1, seed=Elsewhere(a=1)), "model": weights}
    path = written(tmp_path, state, as_zip=as_zip)
    error = refusal(path)
    assert f"types that no state dict needs: argparse.Namespace, {__name__}.Elsewhere" in error.message
    assert f"--set 'allow_types=[argparse.Namespace, {__name__}.Elsewhere]'" in error.remedy
    only = resolve_refusal(path, ("argparse.Namespace",))
    assert "argparse.Namespace" not in only.message and f"{__name__}.Elsewhere" in only.message
    allowed = ("argparse.Namespace", f"{__name__}.Elsewhere")
    assert same(served(path, allowed), weights)
    assert "left out: args (argparse.Namespace)" in notes(path, allowed)


def resolve_refusal(path: Path, allowed: tuple[str, ...]) -> SourceError:
    with pytest.raises(SourceError) as caught:
        resolve(path, allowed)
    return caught.value


class Runs:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@as_zip
def test_nothing_is_run_though_it_is_allowed(tmp_path: Path, as_zip: bool) -> None:
    mark = tmp_path / "mark"
    path = written(tmp_path, {"x": Runs(mark), "w": torch.ones(2)}, as_zip=as_zip)
    message = refusal(path).message
    assert "pathlib" in message
    names = tuple(message.split("needs: ")[1].split(", "))
    assert same(served(path, names), {"w": torch.ones(2)}) and not mark.exists()
    pickle.loads(pickle.dumps(Runs(mark)))
    assert mark.exists(), "the test would not notice"


@as_zip
@pytest.mark.parametrize("module", ["numpy.core.multiarray", "numpy._core.multiarray"], ids=["numpy1", "numpy2"])
def test_numpy_scalars_under_either_name_of_their_module(tmp_path: Path, as_zip: bool, module: str) -> None:
    """TL-07: read past, and told as what they are; arrays are refused by name, alike for both."""
    raw = saved({"step": np.float64(3), "w": torch.ones(2)}, as_zip=False)
    assert raw.count(b"multiarray") == 1
    own = b"numpy._core.multiarray" if b"numpy._core" in raw else b"numpy.core.multiarray"
    assert raw.count(own) == 1
    path = written(tmp_path, raw.replace(own, module.encode()))
    assert same(served(path), {"w": torch.ones(2)})
    assert "step (numpy scalar)" in notes(path)
    array = saved({"a": np.arange(3), "w": torch.ones(2)}, as_zip=False).replace(own, module.encode())
    message = refusal(written(tmp_path, array)).message
    assert "numpy.core.multiarray._reconstruct, numpy.ndarray" in message and "_core" not in message
    allowed = ("numpy.core.multiarray._reconstruct", "numpy.ndarray")
    assert same(served(written(tmp_path, array), allowed), {"w": torch.ones(2)})


def test_types_of_torch_that_are_values(tmp_path: Path) -> None:
    state = {"w": torch.ones(2), "d": torch.float32, "s": torch.Size([1, 2]), "dev": torch.device("cpu")}
    path = written(tmp_path, state)
    assert same(served(path), {"w": torch.ones(2)})
    assert "dev (torch.device)" in notes(path)


@as_zip
@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.eye(3).to_sparse(), "is sparse"),
        (torch.eye(3).to_sparse_csr(), "is sparse"),
        (torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "is quantised by torch"),
        (torch.ones(3, dtype=torch.complex64).conj(), "its bytes are not its values"),
        (torch.ones(3, dtype=torch.complex128), "is complex128"),
        (torch.empty(3, device="meta"), "is on the meta device"),
        (torch.arange(8.0).unfold(0, 4, 2), "a view whose elements overlap"),
    ],
)
def test_tensors_that_cannot_be_served_are_refused_by_name(
    tmp_path: Path, value: Any, as_zip: bool, words: str
) -> None:
    """TL-06: sparse, and every other kind whose bytes alone are not the tensor."""
    message = refusal(written(tmp_path, {"good": torch.ones(2), "layer.bad": value}, as_zip=as_zip)).message
    assert f"tensor 'layer.bad' {words}" in message or ("tensor 'layer.bad'" in message and words in message)


def test_a_tensor_subclass_is_refused_by_its_type(tmp_path: Path) -> None:
    class Own(torch.Tensor):
        pass

    Own.__qualname__, Own.__module__ = "Own", __name__
    globals()["Own"] = Own
    message = refusal(written(tmp_path, {"w": torch.ones(2).as_subclass(Own)})).message
    assert f"{__name__}.Own" in message


def test_a_whole_model_is_refused_by_its_types(tmp_path: Path) -> None:
    message = refusal(written(tmp_path, torch.nn.Linear(2, 2))).message
    assert "torch.nn.modules.linear.Linear" in message


# --- files --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["m.pt", "m.pth", "m.bin", "m.ckpt", "consolidated.00", "blob"])
def test_a_file_by_any_name(tmp_path: Path, name: str) -> None:
    state = {"a": torch.randn(3)}
    checkpoint = resolve(written(tmp_path, state, name))
    assert checkpoint.kind == "torch" and same(served(tmp_path / name), state)


def test_shards_by_their_index(tmp_path: Path) -> None:
    one, two = {"a": torch.randn(3), "stray": torch.ones(1)}, {"b": torch.randn(2, 2)}
    write(tmp_path, {
        "pytorch_model-00001-of-00002.bin": saved(one),
        "pytorch_model-00002-of-00002.bin": saved(two, as_zip=False),
        "pytorch_model.bin.index.json": {"weight_map": {
            "a": "pytorch_model-00001-of-00002.bin", "b": "pytorch_model-00002-of-00002.bin",
        }},
        "config.json": {},
    })  # fmt: skip
    for path in (tmp_path, tmp_path / "pytorch_model.bin.index.json"):
        assert same(served(path), {"a": one["a"], "b": two["b"]})
        assert "ignored 1 tensor that the index does not take from it: stray" in notes(path)
    assert [sidecar.name for sidecar in resolve(tmp_path).sidecars] == ["config.json"]
    assert "is one of 2 shards; only this one is read" in notes(tmp_path / "pytorch_model-00001-of-00002.bin")


def test_ties_across_an_index_need_both_names(tmp_path: Path) -> None:
    shared = torch.randn(3)
    write(tmp_path, {
        "s.bin": saved({"a": shared, "b": shared}),
        "pytorch_model.bin.index.json": {"weight_map": {"b": "s.bin"}},
    })  # fmt: skip
    assert resolve(tmp_path).ties == {} and same(served(tmp_path), {"b": shared})


def test_the_fingerprint_tells_contents_apart(tmp_path: Path) -> None:
    path = written(tmp_path, {"a": torch.ones(2)})
    before = resolve(path).fingerprint()
    assert resolve(path).fingerprint() == before
    status = path.stat()
    written(tmp_path, {"b": torch.ones(2)})
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert resolve(path).fingerprint() != before


def test_python_2_text(tmp_path: Path) -> None:
    """As torch under Python 2 wrote keys: as byte strings."""
    short = b"U\x06weight"
    value = b"}" + short + tensor(storage("0", 2), (2,), (1,)) + b"s"
    content = {"0": np.arange(2, dtype="<f4").tobytes()}
    for raw in (archive(value, content), older(value, content)):
        assert same(served(written(tmp_path, raw)), {"weight": torch.arange(2.0)})


def test_both_formats_in_one_directory(tmp_path: Path) -> None:
    """Safetensors goes first, and the log says so."""
    write(tmp_path, {
        "model.safetensors": valid_file({"a": filled("F32", (2,))}),
        "pytorch_model.bin": saved({"a": torch.ones(2)}),
        "training_args.bin": b"x", "optimizer.pt": b"y",
    })  # fmt: skip
    checkpoint = resolve(tmp_path)
    assert checkpoint.kind == "safetensors" and [file.name for file in checkpoint.files] == ["model.safetensors"]
    assert checkpoint.notes == ("ignored 1 torch checkpoint, safetensors is preferred: pytorch_model.bin",)
    assert bits(served(tmp_path / "pytorch_model.bin")["a"]) == bits(torch.ones(2))


def test_the_page_names_what_the_code_knows() -> None:
    page = (Path(__file__).parents[3] / "docs/sources.md").read_text()
    listed = page.partition("under a usual name (")[2].partition(")")[0]
    assert tuple(listed.replace("`", "").split(", ")) == MODEL_NAMES
