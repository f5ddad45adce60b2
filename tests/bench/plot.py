"""The rates of a run as bars against the limit that the same run measured: an SVG."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

from tests.bench.rows import Row, figure

_BAR, _STEP, _HEAD = 14, 22, 26
_LABELS, _BARS, _FIGURES = 380, 420, 150
_OURS, _PEERS, _MARK = "#2563eb", "#9ca3af", "#b91c1c"
#: A ratio above the limit is noise of either, or a limit that was none; the bar ends here.
_MOST = 1.1


def svg(rows: Sequence[Row]) -> str:
    """A bar for each rate that has a limit, 1.0 being the limit, with a mark where its target is; "" without any.

    On a ground of its own, so that a page of any colour can show it.
    """
    shown = [row for row in rows if row.ratio is not None and row.unit == "GB/s" and not row.problem]
    if not shown:
        return ""
    parts = list(dict.fromkeys(row.part for row in shown))
    height = 40 + len(parts) * _HEAD + len(shown) * _STEP
    width = _LABELS + _BARS + _FIGURES
    one = _x(1)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        ' font-family="sans-serif" font-size="12" fill="#111827">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<line x1="{one}" y1="22" x2="{one}" y2="{height - 8}" stroke="#111827" stroke-dasharray="3 3"/>',
        f'<text x="{one}" y="16" text-anchor="middle">limit of the same run</text>',
        f'<text x="8" y="16" fill="{_MARK}">red: target</text>',
    ]
    y = 30
    for part in parts:
        lines.append(f'<text x="8" y="{y + 16}" font-weight="bold">{escape(part)}</text>')
        y += _HEAD
        for row in shown:
            if row.part == part:
                lines += _bar(row, y)
                y += _STEP
    return "\n".join([*lines, "</svg>", ""])


def _bar(row: Row, y: int) -> list[str]:
    assert row.ratio is not None and row.value is not None
    colour = _OURS if row.ours else _PEERS
    end = _x(min(row.ratio, _MOST))
    text = y + _BAR - 3
    lines = [
        f'<text x="{_LABELS - 8}" y="{text}" text-anchor="end">{escape(row.what)}</text>',
        f'<rect x="{_LABELS}" y="{y}" width="{end - _LABELS}" height="{_BAR}" fill="{colour}"/>',
        f'<text x="{_LABELS + _BARS + 8}" y="{text}">{row.ratio:.2f} · {escape(figure(row.value, row.unit))}</text>',
    ]
    if row.target is not None:
        at = _x(row.target.bound)
        lines.append(f'<line x1="{at}" y1="{y - 2}" x2="{at}" y2="{y + _BAR + 2}" stroke="{_MARK}" stroke-width="2"/>')
    return lines


def _x(ratio: float) -> int:
    return round(_LABELS + ratio / _MOST * _BARS)
