"""The rows of a run as tables, targets beside figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Rows = Mapping[str, Mapping[str, Any]]
Line = tuple[str, ...]


def times(rows: Rows, counts: tuple[int, ...]) -> Iterator[Line]:
    """Milliseconds of a forward, a contestant a line."""
    yield ("ms of a forward at tokens", *(f"{count}" for count in counts), "set-up", "GPU memory")
    roofline = rows.get("resident", {}).get("roofline_ms", {})
    for name, row in rows.items():
        if "ms" in row:
            yield (name, *(_number(row["ms"].get(str(count))) for count in counts), _seconds(row), _memory(row))
        elif name != "ftd_hooks":
            yield (name, *([row.get("skipped") or f"FAILED: {row.get('error')}"] + [""] * (len(counts) + 1)))
        if name == "resident" and roofline:
            yield ("roofline, all layers streamed", *(_number(roofline.get(str(count))) for count in counts), "", "")


def targets(rows: Rows, counts: tuple[int, ...], layers: int) -> Iterator[Line]:
    """Each target of the product that these rows can judge: what, measured, target, met."""
    resident = rows.get("resident", {})
    for name in ("ftd_all_streamed", "ftd_own_tensors"):
        yield from _all_streamed(name, rows.get(name, {}), resident, counts, layers)
    yield from _memory_mode(rows.get("ftd_memory", {}), resident, rows.get("flextensor_memory", {}), str(counts[0]))
    if "us_per_block" in (hooks := rows.get("ftd_hooks", {})):
        yield _judged(f"host, µs a block ({hooks['blocks']} blocks)", hooks["us_per_block"], 30)


def _all_streamed(
    name: str, row: Mapping[str, Any], resident: Mapping[str, Any], counts: tuple[int, ...], layers: int
) -> Iterator[Line]:
    if "ms" not in row or "roofline_ms" not in resident:
        return
    for count in map(str, counts):
        yield _judged(f"{name}: {count} tokens ÷ roofline", row["ms"][count] / resident["roofline_ms"][count], 1.01)
    yield from _facts(name, row, str(counts[0]))
    yield _judged(f"{name}: ring ÷ layer", row["ring_bytes"] / (resident["layer_bytes"] / layers), 2)
    if name == "ftd_all_streamed":  # the other one pins first, which is told apart
        yield _judged(f"{name}: set-up, s", row["setup_s"], 1)
    else:
        yield (f"{name}: offload() with pinning, s", f"{row['offload_s']:.3f}", "", "")
        yield _judged(f"{name}: set-up after offload(), s", row["setup_s"] - row["offload_s"], 1)


def _memory_mode(
    row: Mapping[str, Any], resident: Mapping[str, Any], peer: Mapping[str, Any], fewest: str
) -> Iterator[Line]:
    if "ms" not in row:
        return
    for count, ms in row["ms"].items():
        one = {field: values[count] for field, values in row.items()}
        name = f"ftd_memory, {count} tokens"
        yield from _facts(name, one | {"ms": {count: ms}, "equal": {count: one["equal"]}}, count)
        yield _judged(f"{name}: set-up, s", one["setup_s"], 1)
        if count in peer.get("ms", {}):
            yield _judged(f"{name} ÷ FlexTensor", ms / peer["ms"][count], 0.85 if count == fewest else None)
            yield _judged(f"{name}: GPU bytes ÷ FlexTensor", one["gpu_bytes"] / peer["gpu_bytes"][count], None)
    if "link_bytes_per_s" in resident:
        ideal_ms = row["streamed_bytes"][fewest] / resident["link_bytes_per_s"] * 1e3
        yield _judged(f"ftd_memory, {fewest} tokens ÷ (streamed bytes ÷ link)", row["ms"][fewest] / ideal_ms, 1.03)


def _facts(name: str, row: Mapping[str, Any], profiled: str) -> Iterator[Line]:
    """What holds of every row of ftd."""
    equal = all(row["equal"].values())
    yield (f"{name}: bit-equal to resident", "yes" if equal else "NO", "yes", "yes" if equal else "**no**")
    yield _judged(f"{name}: first forward ÷ steady", row["first_forward_ms"] / row["ms"][profiled], 1.2)
    off = abs(row["predicted_ms"] / row["ms"][profiled] - 1)
    yield _judged(f"{name}: prediction off by", off, 0.05)
    if row["allocated_bytes"]:
        off = abs(row["gpu_bytes"] / row["allocated_bytes"] - 1)
        yield _judged(f"{name}: get_gpu_memory_usage() off the allocator by", off, 0.01)


def _judged(what: str, found: float, most: float | None) -> Line:
    if most is None:
        return (what, f"{found:.3f}", "", "")
    return (what, f"{found:.3f}", f"≤ {most}", "yes" if found <= most else "**no**")


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def _seconds(row: Mapping[str, Any]) -> str:
    return _each(row.get("setup_s"), "{:.2f} s", 1)


def _memory(row: Mapping[str, Any]) -> str:
    return _each(row.get("gpu_bytes"), "{:.2f} GB", 1e9) or _each(row.get("peak_bytes"), "{:.2f} GB peak", 1e9)


def _each(value: Any, form: str, unit: float) -> str:
    """A figure, or one for each count of tokens."""
    values = list(value.values()) if isinstance(value, Mapping) else [] if value is None else [value]
    return ", ".join(form.format(one / unit) for one in values)


def markdown(lines: Iterator[Line]) -> str:
    rows = list(lines)
    if not rows:
        return ""
    rule = "|---" * len(rows[0]) + "|"
    return "\n".join([f"| {' | '.join(rows[0])} |", rule, *(f"| {' | '.join(row)} |" for row in rows[1:])])
