from ftd.plan.block import ALIGNMENT, Block, aligned, by_layer
from ftd.shm.layout import TENSOR_ALIGNMENT
from tests.unit.plan.shapes import LAYER_BYTES, LAYERS, llama


def test_slots_are_aligned_as_segments_are() -> None:
    assert ALIGNMENT == TENSOR_ALIGNMENT
    assert [aligned(n) for n in (0, 1, 511, 512, 513)] == [0, 512, 512, 512, 1024]


def test_layers_join_their_blocks() -> None:
    blocks = llama(64)
    joined = by_layer(blocks)
    assert [block.name for block, _ in joined] == [f"layers.{i}" for i in range(LAYERS)]
    assert {block.nbytes for block, _ in joined} == {LAYER_BYTES}
    assert [parts for _, parts in joined] == [tuple(range(7 * i, 7 * i + 7)) for i in range(LAYERS)]
    assert sum(block.compute_ns for block, _ in joined) == sum(block.compute_ns for block in blocks)


def test_parts_keep_their_alignment_inside_a_layer() -> None:
    blocks = (Block(0, "a", "x", 513), Block(1, "b", "x", 1))
    assert [block.nbytes for block, _ in by_layer(blocks)] == [1024 + 512]


def test_a_layer_entered_again_and_a_block_apart_stay_apart() -> None:
    layers = ["x", "x", "y", "x", "x", "x"]
    blocks = tuple(Block(i, f"b{i}", layer, 512) for i, layer in enumerate(layers))
    assert [parts for _, parts in by_layer(blocks, apart=(4,))] == [(0, 1), (2,), (3,), (4,), (5,)]
    assert [block.name for block, _ in by_layer(blocks, apart=(4,))] == ["x", "y", "x", "b4", "x"]
