"""Problems to plan: the shapes that FACTS measured, and small random ones."""

from hypothesis import strategies as st

from ftd.plan.block import Block
from ftd.plan.cost import CopyCost
from ftd.plan.problem import Problem

#: The link of FACTS: 55.4 GB/s for long copies; 48 GB/s at 1 MiB and 53 at 4 MiB are a latency of 3 to 4 µs.
LINK = CopyCost(3500.0, 55.4e9)
UNIT = 8 * 2**20
#: Linears of one layer of the 7 GB llama, in units of 8 MiB.
LINEARS = {"q": 4, "k": 1, "v": 1, "o": 4, "gate": 14, "up": 14, "down": 14}
LAYERS = 16
LAYER_BYTES = UNIT * sum(LINEARS.values())
#: Milliseconds of a resident forward by tokens, as FACTS measured.
RESIDENT_MS = {64: 5.0, 4096: 50.0, 16384: 250.5, 32768: 621.5}


def llama(tokens: int) -> tuple[Block, ...]:
    """The 7 GB model, one block a linear, compute shared out by bytes."""
    forward_ns = RESIDENT_MS[tokens] * 1e6
    share = forward_ns / LAYERS / sum(LINEARS.values())
    names = [(layer, name, size) for layer in range(LAYERS) for name, size in LINEARS.items()]
    return tuple(
        Block(i, f"layers.{layer}.{name}", f"layers.{layer}", size * UNIT, round(share * size))
        for i, (layer, name, size) in enumerate(names)
    )


def blocks_of(sizes: list[int], compute_ns: list[int] | None = None, per_layer: int = 1) -> tuple[Block, ...]:
    times = compute_ns or [0] * len(sizes)
    return tuple(Block(i, f"b{i}", f"layer{i // per_layer}", size, times[i]) for i, size in enumerate(sizes))


_SIZES = st.one_of(st.sampled_from([0, 1, 511, 512, 513, 4096]), st.integers(0, 20_000))


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Any small problem: sizes from nothing up, layers of one or more blocks, tied blocks, every kind of limit."""
    sizes = draw(st.lists(_SIZES, max_size=14))
    compute = draw(st.lists(st.integers(0, 4000), min_size=len(sizes), max_size=len(sizes)))
    blocks = blocks_of(sizes, compute, draw(st.integers(1, 4)))
    indices = draw(st.permutations(range(len(sizes))))
    tied_count = draw(st.integers(0, min(3, len(sizes))))
    tied = tuple(indices[:tied_count])
    least = draw(st.integers(1, 4))
    return Problem(
        blocks,
        CopyCost(draw(st.sampled_from([0.0, 50.0, 2000.0])), draw(st.sampled_from([1e9, 4e9, 5e10]))),
        num_blocks=draw(st.integers(least, 5)),
        min_blocks=least,
        transfer_budget_scale=draw(st.sampled_from([0.5, 0.95, 1.0, 1.5])),
        granularity=draw(st.sampled_from(["block", "layer", "auto"])),
        tied=(tied,) if tied and draw(st.booleans()) else tuple((i,) for i in tied),
    )
