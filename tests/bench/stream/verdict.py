"""What the contestants of streaming found, as rows: times against the roofline, and what else is promised of ftd."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tests.bench.child import Found
from tests.bench.rows import Limit, Row, Target, at_most, row

#: Contestants that promise a time: what streams everything takes no longer than the roofline, and a bit.
_ALL_STREAMED = ("ftd_all_streamed", "ftd_own_tensors")
_HOOKS = "ftd_hooks"


def rows(name: str, found: Mapping[str, Found], layers: int) -> Iterator[Row]:
    """The rows of contestant `name`.

    Args:
        found: by the contestants so far, this one too, as JSON carried it: counts of tokens are text.
        layers: of the model.
    """
    one = found[name]
    ours = name.startswith("ftd")
    if "skipped" in one or "error" in one:
        yield row("stream", name, one, "ms", ours=ours)
        return
    if name == _HOOKS:
        what = f"{name}: the host's time for a block, {one['blocks']} blocks"
        yield Row("stream", what, one["us_per_block"], "µs", target=at_most(30))
        return
    roofline = found.get("resident", {}).get("roofline_ms", {}) if name != "resident" else {}
    note = _cost(one)
    for count, ms in one["ms"].items():
        limit = Limit("roofline", roofline[count]) if count in roofline else None
        target = at_most(1.01) if name in _ALL_STREAMED and limit else None
        yield Row("stream", f"{name}: {count} tokens", ms, "ms", limit=limit, target=target, note=note, ours=ours)
        note = ""
    if name in _ALL_STREAMED:
        yield from _all_streamed(name, one, found.get("resident", {}), layers)
    elif name == "ftd_memory":
        yield from _memory_mode(one, found.get("resident", {}), found.get("flextensor_memory", {}))


def _all_streamed(name: str, one: Found, resident: Found, layers: int) -> Iterator[Row]:
    yield from _facts(name, one, next(iter(one["ms"])))
    if "layer_bytes" in resident:
        yield _promised(f"{name}: ring ÷ layer", one["ring_bytes"] / (resident["layer_bytes"] / layers), at_most(2))
    if name == "ftd_all_streamed":  # the other one pins first, which is told apart
        yield _promised(f"{name}: set-up", one["setup_s"], at_most(1), "s")
    else:
        yield _promised(f"{name}: offload() with pinning", one["offload_s"], None, "s")
        yield _promised(f"{name}: set-up after offload()", one["setup_s"] - one["offload_s"], at_most(1), "s")


def _memory_mode(one: Found, resident: Found, peer: Found) -> Iterator[Row]:
    """Of ftd in memory mode, whose fields are by count of tokens."""
    fewest = next(iter(one["ms"]))
    for count, ms in one["ms"].items():
        of_count = {field: values[count] for field, values in one.items()}
        name = f"ftd_memory, {count} tokens"
        yield from _facts(name, of_count | {"ms": {count: ms}, "equal": {count: of_count["equal"]}}, count)
        yield _promised(f"{name}: set-up", of_count["setup_s"], at_most(1), "s")
        if count in peer.get("ms", {}):
            target = at_most(0.85) if count == fewest else None
            yield _promised(f"{name} ÷ FlexTensor", ms / peer["ms"][count], target)
            yield _promised(f"{name}: GPU bytes ÷ FlexTensor", of_count["gpu_bytes"] / peer["gpu_bytes"][count], None)
    if "link_bytes_per_s" in resident:
        ideal_ms = one["streamed_bytes"][fewest] / resident["link_bytes_per_s"] * 1e3
        what = f"ftd_memory, {fewest} tokens ÷ (streamed bytes ÷ link)"
        yield _promised(what, one["ms"][fewest] / ideal_ms, at_most(1.03))


def _facts(name: str, one: Mapping[str, Any], profiled: str) -> Iterator[Row]:
    """What holds of every contestant of ftd."""
    unequal = sum(not equal for equal in one["equal"].values())
    yield _promised(f"{name}: outputs that differ from the resident model's", unequal, at_most(0))
    yield _promised(f"{name}: first forward ÷ steady", one["first_forward_ms"] / one["ms"][profiled], at_most(1.2))
    off = abs(one["predicted_ms"] / one["ms"][profiled] - 1)
    yield _promised(f"{name}: prediction off by", off, at_most(0.05))
    if one["allocated_bytes"]:
        off = abs(one["gpu_bytes"] / one["allocated_bytes"] - 1)
        yield _promised(f"{name}: get_gpu_memory_usage() off the allocator by", off, at_most(0.01))


def _promised(what: str, found: float, target: Target | None, unit: str = "") -> Row:
    return Row("stream", what, found, unit, target=target)


def _cost(one: Mapping[str, Any]) -> str:
    """What was measured beside its times."""
    named = [
        ("link {} GB/s", "link_bytes_per_s", 1e9),
        ("layers {} GB", "layer_bytes", 1e9),
        ("set-up {} s", "setup_s", 1),
        ("GPU {} GB", "gpu_bytes", 1e9),
        ("GPU peak {} GB", "peak_bytes", 1e9),
    ]
    return "; ".join(form.format(_each(one[field], unit)) for form, field, unit in named if field in one)


def _each(value: Any, unit: float) -> str:
    """A figure, or one for each count of tokens."""
    values = value.values() if isinstance(value, Mapping) else [value]
    return ", ".join(f"{one / unit:.2f}" for one in values)
