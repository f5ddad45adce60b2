"""A figure, the limit it is held against, its target, and tables of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from tests.bench.child import Found


@dataclass(frozen=True)
class Target:
    """What is promised of a row's ratio, or of its figure where there is no limit to hold it against."""

    bound: float
    least: bool

    def met(self, found: float) -> bool:
        return found >= self.bound if self.least else found <= self.bound

    def __str__(self) -> str:
        return f"{'≥' if self.least else '≤'} {self.bound:g}"


def at_least(bound: float) -> Target:
    return Target(bound, least=True)


def at_most(bound: float) -> Target:
    return Target(bound, least=False)


@dataclass(frozen=True)
class Limit:
    """What the machine did in the same run, in the unit of the figure."""

    name: str
    value: float


@dataclass(frozen=True)
class Row:
    """One figure.

    Attributes:
        part: of the run.
        what: was measured.
        value: None where there is none, for the reason in `problem`.
        ours: ftd's, not a peer's or the machine's.
        problem: why there is no figure, or why it does not count.
        skipped: it could not be measured here, which is nobody's failure.
    """

    part: str
    what: str
    value: float | None = None
    unit: str = ""
    limit: Limit | None = None
    target: Target | None = None
    note: str = ""
    ours: bool = True
    problem: str = ""
    skipped: bool = False

    @property
    def ratio(self) -> float | None:
        return None if self.value is None or self.limit is None else self.value / self.limit.value

    @property
    def verdict(self) -> str:
        """`met`, `missed`, `failed`, `skipped`, or nothing where nothing is promised."""
        if self.problem:
            return "skipped" if self.skipped else "failed"
        judged = self.value if self.limit is None else self.ratio
        if self.target is None or judged is None:
            return ""
        return "met" if self.target.met(judged) else "missed"

    def plain(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, plain: dict[str, Any]) -> Self:
        made = {"limit": Limit, "target": Target}
        return cls(**{key: made[key](**value) if key in made and value else value for key, value in plain.items()})


def row(part: str, what: str, found: Found, field: str, *, per: float = 1, **rest: Any) -> Row:
    """The row of a measured process: its figure `field` ÷ `per`, or why there is none."""
    for kind in ("skipped", "error"):
        if kind in found:
            return Row(part, what, problem=found[kind], skipped=kind == "skipped", ours=rest.get("ours", True))
    return Row(part, what, found[field] / per, **rest)


def table(rows: Iterable[Row]) -> str:
    """Markdown."""
    lines = [("what", "measured", "of the limit", "target", "verdict", ""), ("---",) * 6]
    part = ""
    for one in rows:
        if one.part != part:
            part = one.part
            lines.append((f"**{part}**", "", "", "", "", ""))
        lines.append((one.what, _figure(one), _of_limit(one), _target(one), _verdict(one), _remark(one)))
    return "\n".join(_cells(line) for line in lines)


def line(row: Row) -> str:
    """A row as it is told while the run goes on."""
    said = (row.part, row.what, _figure(row), _of_limit(row), _target(row), row.verdict, _remark(row))
    return "  ".join(text for text in said if text)


def _cells(line: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in line)} |"


def figure(value: float, unit: str) -> str:
    """Four digits that count."""
    digits = 0 if abs(value) >= 1000 else 1 if abs(value) >= 100 else 2 if abs(value) >= 10 else 3
    return f"{value:.{digits}f} {unit}".strip()


def _remark(row: Row) -> str:
    return "; ".join(text for text in (row.problem, row.note) if text)


def _figure(row: Row) -> str:
    return "–" if row.value is None else figure(row.value, row.unit)


def _of_limit(row: Row) -> str:
    if row.ratio is None or row.limit is None:
        return ""
    return f"{row.ratio:.3f} of {figure(row.limit.value, row.unit)} {row.limit.name}"


def _target(row: Row) -> str:
    return "" if row.target is None else f"{row.target} {row.unit if row.limit is None else ''}".strip()


def _verdict(row: Row) -> str:
    return f"**{row.verdict}**" if row.verdict in ("missed", "failed") else row.verdict
