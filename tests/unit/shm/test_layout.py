import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftd.shm.layout import LAYER_ALIGNMENT, TENSOR_ALIGNMENT, Extent, Layout, lay_out, structure_fingerprint
from ftd.tensorspec import TensorSpec
from ftd.units import GIB, MIB

PAGES = st.sampled_from([4096, 2 * MIB])
#: From nothing to layers that are worth a huge page of their own; the shapes cost no memory.
LENGTHS = st.one_of(
    st.sampled_from([0, 1, 511, 512, 513, 4096, 2 * MIB, 64 * MIB, 128 * MIB - 1, 128 * MIB, 3 * GIB + 7]),
    st.integers(0, 3000),
    st.integers(0, 200 * MIB),
)
#: (layer, bytes) of each tensor; the layers come in any order and interleaved.
MODELS = st.lists(st.tuples(st.integers(0, 5), LENGTHS), max_size=30)
SEGMENT_BYTES = st.sampled_from([4096, 64 * 1024, 128 * MIB, GIB, 64 * GIB])


def _specs(model: list[tuple[int, int]]) -> list[TensorSpec]:
    return [TensorSpec(f"{layer}.{i}", "U8", (nbytes,)) for i, (layer, nbytes) in enumerate(model)]


def _layer_of(name: str) -> str:
    return name.partition(".")[0]


def _laid_out(model: list[tuple[int, int]], page_bytes: int, segment_bytes: int) -> Layout:
    return lay_out(_specs(model), _layer_of, page_bytes=page_bytes, segment_bytes=segment_bytes)


LAYOUTS = st.builds(_laid_out, MODELS, PAGES, SEGMENT_BYTES)


@given(LAYOUTS)
def test_tensors_and_gaps_cover_every_byte_exactly_once(layout: Layout) -> None:
    pieces = [placed.extent for placed in layout.tensors] + layout.gaps()
    pieces = sorted((p for p in pieces if p.nbytes), key=lambda p: (p.segment, p.offset))
    ends = [0] * len(layout.segments)
    for piece in pieces:
        assert piece.offset == ends[piece.segment]
        ends[piece.segment] += piece.nbytes
    assert tuple(ends) == layout.segments


@given(LAYOUTS)
def test_every_tensor_starts_where_kernels_like_it(layout: Layout) -> None:
    assert all(placed.extent.offset % TENSOR_ALIGNMENT == 0 for placed in layout.tensors)


@given(MODELS, PAGES, SEGMENT_BYTES)
def test_layers_come_in_the_order_of_their_first_tensor_and_tensors_in_the_order_given(
    model: list[tuple[int, int]], page_bytes: int, segment_bytes: int
) -> None:
    layout = _laid_out(model, page_bytes, segment_bytes)
    specs = _specs(model)
    layers = list(dict.fromkeys(_layer_of(spec.name) for spec in specs))
    assert layout.layers == tuple(layers)
    assert [p.spec for p in layout.tensors] == sorted(specs, key=lambda spec: layers.index(_layer_of(spec.name)))
    assert all(layout.layers[p.layer] == _layer_of(p.spec.name) for p in layout.tensors)
    filled = [p.extent for p in layout.tensors if p.extent.nbytes]
    assert all((a.segment, a.offset + a.nbytes) <= (b.segment, b.offset) for a, b in pairwise(filled))


@given(LAYOUTS)
def test_a_layer_is_one_copy(layout: Layout) -> None:
    """One segment, and nothing between its tensors but what aligns them."""
    for layer in range(len(layout.layers)):
        extents = [p.extent for p in layout.tensors if p.layer == layer and p.extent.nbytes]
        assert len({extent.segment for extent in extents}) <= 1
        assert all(0 <= b.offset - (a.offset + a.nbytes) < TENSOR_ALIGNMENT for a, b in pairwise(extents))


@given(LAYOUTS)
def test_a_large_layer_starts_at_a_huge_page(layout: Layout) -> None:
    for layer in range(len(layout.layers)):
        extents = [p.extent for p in layout.tensors if p.layer == layer and p.extent.nbytes]
        if extents and extents[-1].offset + extents[-1].nbytes - extents[0].offset >= 64 * LAYER_ALIGNMENT:
            assert extents[0].offset % LAYER_ALIGNMENT == 0


@given(MODELS, PAGES, SEGMENT_BYTES)
def test_padding_is_bounded(model: list[tuple[int, int]], page_bytes: int, segment_bytes: int) -> None:
    layout = _laid_out(model, page_bytes, segment_bytes)
    padding = sum(gap.nbytes for gap in layout.gaps())
    assert layout.tensor_bytes == sum(nbytes for _, nbytes in model)
    assert padding == sum(layout.segments) - layout.tensor_bytes
    bound = layout.tensor_bytes // 64 + TENSOR_ALIGNMENT * len(model) + page_bytes * len(layout.segments)
    assert padding <= bound


@given(MODELS, PAGES, SEGMENT_BYTES)
def test_segments_are_whole_pages_and_hold_either_what_they_may_or_one_layer(
    model: list[tuple[int, int]], page_bytes: int, segment_bytes: int
) -> None:
    layout = _laid_out(model, page_bytes, segment_bytes)
    for index, size in enumerate(layout.segments):
        inside = [p for p in layout.tensors if p.extent.segment == index and p.extent.nbytes]
        end = max(p.extent.offset + p.extent.nbytes for p in inside)
        assert size % page_bytes == 0
        assert end <= size < end + page_bytes
        assert end <= segment_bytes or len({p.layer for p in inside}) == 1


@given(MODELS, PAGES)
def test_a_segment_is_cut_only_where_it_must_be(model: list[tuple[int, int]], page_bytes: int) -> None:
    assert len(_laid_out(model, page_bytes, 1 << 60).segments) == (1 if any(nbytes for _, nbytes in model) else 0)


def test_layers_share_a_segment_up_to_its_last_byte() -> None:
    assert _laid_out([(0, 2048), (1, 2048)], 4096, 4096).segments == (4096,)
    assert _laid_out([(0, 2048), (1, 2049)], 4096, 4096).segments == (4096, 4096)


def test_tensors_without_bytes_take_no_room() -> None:
    layout = _laid_out([(0, 0), (0, 10), (0, 0), (1, 0), (2, 5), (3, 0)], 4096, GIB)
    assert [p.extent for p in layout.tensors] == [
        Extent(0, 0, 0), Extent(0, 0, 10), Extent(0, 0, 0), Extent(0, 0, 0), Extent(0, 512, 5), Extent(0, 0, 0),
    ]  # fmt: skip
    assert layout.segments == (4096,)


def test_a_model_without_bytes_has_no_segment() -> None:
    layout = _laid_out([(0, 0), (1, 0)], 4096, GIB)
    assert (layout.segments, layout.gaps(), len(layout.tensors)) == ((), [], 2)
    assert _laid_out([], 4096, GIB) == Layout((), (), ())


def test_a_tensor_longer_than_a_segment_has_one_of_its_own() -> None:
    layout = _laid_out([(0, 100), (1, 10_000), (2, 100)], 4096, 4096)
    assert layout.segments == (4096, 12288, 4096)
    assert [p.extent for p in layout.tensors] == [Extent(0, 0, 100), Extent(1, 0, 10_000), Extent(2, 0, 100)]


def test_small_layers_share_pages_and_large_ones_do_not() -> None:
    small = _laid_out([(0, 100), (1, 100), (2, 100)], 2 * MIB, GIB)
    assert [p.extent.offset for p in small.tensors] == [0, 512, 1024]
    large = _laid_out([(0, 100), (1, 128 * MIB), (2, 128 * MIB - 1)], 2 * MIB, GIB)
    assert [p.extent.offset for p in large.tensors] == [0, 2 * MIB, 130 * MIB]


def test_ten_thousand_tensors_are_quick() -> None:
    specs = [TensorSpec(f"layers.{i // 10}.{i % 10}", "BF16", (4096, 512)) for i in range(10_000)]

    def seconds() -> float:
        start = time.process_time()
        layout = lay_out(specs, lambda name: name.rsplit(".", 1)[0], page_bytes=2 * MIB)
        layout.gaps()
        return time.process_time() - start

    assert min(seconds() for _ in range(3)) < 0.3


def test_the_structure_is_that_of_names_types_shapes_and_layers_wherever_they_lie() -> None:
    specs = [TensorSpec("0.a", "F32", (2, 3)), TensorSpec("0.b", "F16", ()), TensorSpec("1.c", "F16", (0,))]
    one = structure_fingerprint(lay_out(specs, _layer_of, page_bytes=4096))
    assert one == structure_fingerprint(lay_out(specs[::-1], _layer_of, page_bytes=2 * MIB, segment_bytes=4096))
    assert len(one) == 32


@pytest.mark.parametrize(
    "changed",
    [
        [TensorSpec("0.x", "F32", (2, 3))],
        [TensorSpec("0.a", "I32", (2, 3))],
        [TensorSpec("0.a", "F32", (3, 2))],
        [TensorSpec("0.a", "F32", (2, 3)), TensorSpec("0.b", "F32", ())],
        [],
    ],
)
def test_another_structure_has_another_fingerprint(changed: list[TensorSpec]) -> None:
    before = structure_fingerprint(lay_out([TensorSpec("0.a", "F32", (2, 3))], _layer_of, page_bytes=4096))
    assert structure_fingerprint(lay_out(changed, _layer_of, page_bytes=4096)) != before


def test_another_grouping_has_another_structure() -> None:
    specs = [TensorSpec("0.a", "F32", (2, 3))]
    one, other = (lay_out(specs, rule, page_bytes=4096) for rule in (_layer_of, lambda _: "whole"))
    assert structure_fingerprint(one) != structure_fingerprint(other)
