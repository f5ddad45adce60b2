"""Tensors as they are handed over: described, cut, copied piece by piece."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ftd.errors import PublishRefusedError
from ftd.shm.digest import PIECE_BYTES
from ftd.tensorspec import TensorSpec
from ftd.torchspec import spec_of, torch_form
from ftd.wire.publish import MAX_PARTS, PART_ALIGNMENT, places
from ftd_client import handover
from ftd_client.handover import Cargo, Piece, batches, collect, copy_range, fill, portions


def cargo_of(*sizes: int, ties: dict[str, str] | None = None) -> Cargo:
    specs = tuple(TensorSpec(f"t{i}", "U8", (size,)) for i, size in enumerate(sizes))
    return Cargo(specs, tuple(torch.zeros(spec.shape, dtype=torch.uint8) for spec in specs), ties or {})


# --- what travels -------------------------------------------------------------------------------------------------


def test_every_type_of_the_format_that_torch_has_is_described_so_that_it_comes_back() -> None:
    names = ["BOOL", "U8", "I64", "U16", "F8_E4M3", "F8_E5M2", "F16", "BF16", "F32", "F64", "C64", "F4"]
    for name in (n for n in names if n != "F4" or hasattr(torch, "float4_e2m1fn_x2")):
        spec = TensorSpec("x", name, (3, 4))
        dtype, shape = torch_form(spec)
        assert spec_of("x", torch.empty(shape, dtype=dtype)) == spec


def test_a_type_that_no_checkpoint_has_is_refused_by_name() -> None:
    with pytest.raises(PublishRefusedError, match=r"'x': complex128 found, a type of safetensors expected"):
        collect({"x": torch.zeros(2, dtype=torch.complex128)})


class Marked(torch.Tensor):
    def __tensor_flatten__(self) -> tuple[list[str], object]:
        return ["inner"], None


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.empty(2, device="meta"), "a tensor on meta"),
        (torch.zeros(2, 2).to_sparse(), "layout torch.sparse_coo"),
        (torch.zeros(2).as_subclass(Marked), "Marked found, plain Tensor expected"),
        (nn.Parameter(torch.zeros(2).as_subclass(Marked)), "Marked"),
        (torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, torch.qint8), "quint8|qint8"),
        ([1.0], r"builtins\.list found, a tensor expected"),
        (None, "NoneType found"),
    ],
)
def test_what_is_no_plain_tensor_is_refused_by_name(value: Any, words: str) -> None:
    with pytest.raises(PublishRefusedError, match=words) as caught:
        collect({"good": torch.zeros(1), "bad": value})
    assert caught.value.message.startswith("1 tensor cannot be published: 'bad': ")
    assert ("__tensor_flatten__" in caught.value.remedy) == ("Marked" in words)


def test_all_that_is_wrong_is_told_at_once() -> None:
    with pytest.raises(PublishRefusedError, match=r"10 tensors cannot.*'b0'.*'b7'.*; and 2 more"):
        collect({f"b{i}": 7 for i in range(10)})  # type: ignore[misc]


def test_names_that_are_no_text_are_refused() -> None:
    for name in ("a\udc80", 7):
        with pytest.raises(PublishRefusedError, match="a name that is no text"):
            collect({name: torch.zeros(1)})  # type: ignore[dict-item]


def test_a_model_is_its_state_dict_and_a_tie_is_one_tensor() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False), nn.BatchNorm1d(3))
    model[1].weight = model[0].weight
    cargo = collect(model)
    assert [spec.name for spec in cargo.specs] == list(model.state_dict())
    assert cargo.ties == {"1.weight": "0.weight"}
    assert {spec.name: spec.shape for spec in cargo.specs}["2.num_batches_tracked"] == ()


def test_a_tensor_whose_memory_was_given_back_is_refused_before_it_is_read() -> None:
    gone, cut = torch.ones(5), torch.arange(10)[3:7]
    gone.untyped_storage().resize_(0)
    cut.untyped_storage().resize_(48)
    whole = torch.arange(12.0).view(3, 4).t().expand(2, 4, 3)
    collect({"whole": whole, "last": torch.arange(10)[3:], "none": torch.empty(0)})
    with pytest.raises(PublishRefusedError, match=r"'gone': a storage of 0 bytes.* 20 exp.*'cut': .* 48 bytes.* 56 "):
        collect({"whole": whole, "gone": gone, "cut": cut})


class Made(Mapping[str, torch.Tensor]):
    """Makes each tensor when it is asked."""

    def __getitem__(self, name: str) -> torch.Tensor:
        return torch.full((50, 50), int(name), dtype=torch.complex64).conj()

    def __iter__(self) -> Iterator[str]:
        return iter(map(str, range(8)))

    def __len__(self) -> int:
        return 8


def test_tensors_that_are_made_one_after_the_other_are_no_ties() -> None:
    """What is copied for its bits may be gone when the next one is made, in its place."""
    cargo = collect(Made())
    assert cargo.ties == {}
    assert [bits.view(torch.complex64)[0, 0].real.item() for bits in cargo.tensors] == list(range(8))


def test_only_the_same_view_of_the_same_memory_is_a_tie() -> None:
    base = torch.arange(16, dtype=torch.int32).view(4, 4)
    given = {
        "base": base, "again": base.detach(), "turned": base.t(), "flat": base.view(-1), "part": base[:2],
        "typed": base.view(torch.float32), "equal": base.clone(), "none": base[:0], "nothing": base[:0],
    }  # fmt: skip
    assert collect(given).ties == {"again": "base"}
    numbers = torch.zeros(2, dtype=torch.complex64)
    assert collect({"a": numbers, "conj": numbers.conj()}).ties == {}


# --- pieces -------------------------------------------------------------------------------------------------------


def whole(pieces: Iterable[Piece]) -> dict[int, int]:
    """Bytes of each tensor, which come in order and without gaps."""
    seen: dict[int, int] = {}
    for piece in pieces:
        assert piece.offset == seen.get(piece.tensor, 0)
        seen[piece.tensor] = piece.offset + piece.nbytes
    return seen


@given(
    st.lists(st.integers(0, 3000), max_size=30), st.integers(1, 50).map(PART_ALIGNMENT.__mul__),
    st.sets(st.integers(0, 29)),
)  # fmt: skip
def test_every_byte_is_in_one_portion_and_every_portion_fits(sizes: list[int], slot: int, tied: set[int]) -> None:
    ties = {f"t{i}": "t0" for i in tied if 0 < i < len(sizes)}
    given = [piece for batch in batches(cargo_of(*sizes, ties=ties)) for piece in batch]
    found = list(portions(given, slot))
    for portion in found:
        assert 0 < len(portion) <= MAX_PARTS
        assert places([piece.nbytes for piece in portion[:-1]])[-1] + portion[-1].nbytes <= slot
        assert all(piece.offset % PART_ALIGNMENT == 0 for piece in portion)
    parts = [piece for portion in found for piece in portion]
    assert whole(parts) == whole(given) == {i: size for i, size in enumerate(sizes) if size and f"t{i}" not in ties}
    assert [(part.tensor, part.offset + part.nbytes) for part in parts if part.ends] == [
        (piece.tensor, piece.offset + piece.nbytes) for piece in given
    ]


def test_large_tensors_are_cut_where_their_digests_are_and_what_follows_goes_along() -> None:
    cargo = cargo_of(2 * PIECE_BYTES + 5, 7, PIECE_BYTES - 11)
    assert list(batches(cargo)) == [
        [Piece(0, 0, PIECE_BYTES)], [Piece(0, PIECE_BYTES, PIECE_BYTES)],
        [Piece(0, 2 * PIECE_BYTES, 5), Piece(1, 0, 7)], [Piece(2, 0, PIECE_BYTES - 11)],
    ]  # fmt: skip


def test_no_portion_has_more_parts_than_a_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "MAX_PARTS", 3)
    (batch,) = batches(cargo_of(*[1] * 8))
    assert [len(portion) for portion in portions(batch, 1 << 20)] == [3, 3, 2]


@st.composite
def strange_tensors(draw: st.DrawFn) -> torch.Tensor:
    """Of any strides: transposed, sliced, expanded."""
    shape = draw(st.lists(st.integers(1, 5), min_size=0, max_size=4))
    dtype = draw(st.sampled_from([torch.uint8, torch.int16, torch.int32, torch.int64]))
    tensor = torch.arange(math.prod(shape), dtype=dtype).view(shape)
    if shape:
        tensor = tensor.permute(draw(st.permutations(range(len(shape)))))
        dim = draw(st.integers(0, len(shape) - 1))
        tensor = tensor[
            (slice(None),) * dim + (slice(draw(st.integers(0, tensor.shape[dim] - 1)), None, draw(st.integers(1, 3))),)
        ]
        if draw(st.booleans()):
            tensor = tensor.unsqueeze(0).expand(draw(st.integers(1, 3)), *tensor.shape)
    return tensor


@given(strange_tensors(), st.data())
def test_any_range_of_any_tensor_is_copied_in_the_order_of_its_elements(
    tensor: torch.Tensor, data: st.DataObject
) -> None:
    whole = tensor.contiguous().numpy().tobytes()
    size = tensor.element_size()
    first = data.draw(st.integers(0, tensor.numel() - 1))
    last = data.draw(st.integers(first, tensor.numel()))
    target = torch.full((8 + (last - first) * size + 8,), 0xEE, dtype=torch.uint8)
    copy_range(target[8:-8], tensor, first * size)
    assert target[8:-8].numpy().tobytes() == whole[first * size : last * size]
    assert target[:8].eq(0xEE).all() and target[-8:].eq(0xEE).all()  # nothing beyond


def test_a_slot_has_each_piece_at_its_place() -> None:
    tensors = (torch.arange(5, dtype=torch.uint8), torch.arange(6, dtype=torch.int32).view(2, 3).t())
    slot = torch.zeros(256, dtype=torch.uint8)
    one, other = fill(slot, [Piece(0, 1, 3), Piece(1, 8, 16)], tensors)
    assert one.tobytes() == bytes([1, 2, 3])
    assert other.tobytes() == tensors[1].contiguous().numpy().tobytes()[8:]
    assert slot[:3].numpy().tobytes() == one.tobytes()
    assert slot[64:80].numpy().tobytes() == other.tobytes()
