"""A run's outcome: rows and the machine's facts, as a file, as text, and as a part of the documentation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from tests.bench import plot, rows
from tests.bench.rows import Row

BEGIN, END = "<!-- begin: python -m tests.bench -->", "<!-- end: python -m tests.bench -->"


@dataclass(frozen=True)
class Results:
    """Attributes: the command's own arguments; the machine by name of the fact; how long it took; what was found."""

    arguments: str
    facts: list[tuple[str, str]]
    seconds: float
    rows: list[Row]

    def write(self, folder: Path) -> None:
        """results.json, from which the rest can be made again, table.md and, where a rate has a limit, plot.svg."""
        folder.mkdir(parents=True, exist_ok=True)
        plain = vars(self) | {"rows": [row.plain() for row in self.rows]}
        (folder / "results.json").write_text(json.dumps(plain, indent=1, ensure_ascii=False) + "\n")
        (folder / "table.md").write_text(self.text() + "\n")
        if drawn := plot.svg(self.rows):
            (folder / "plot.svg").write_text(drawn)

    @classmethod
    def read(cls, path: Path) -> Self:
        plain = json.loads(path.read_text())
        facts = [(name, value) for name, value in plain["facts"]]
        return cls(plain["arguments"], facts, plain["seconds"], [Row.of(row) for row in plain["rows"]])

    def text(self) -> str:
        """Markdown: the machine and the table."""
        facts = "\n".join(f"{name + ':':12}{value}" for name, value in self.facts)
        command = f"python -m tests.bench {self.arguments}".strip()
        return f"`{command}`, {self.seconds:.0f} s\n\n```\n{facts}\n```\n\n{rows.table(self.rows)}"

    @property
    def failed(self) -> bool:
        return any(row.verdict == "failed" for row in self.rows)


def write_docs(page: Path, runs: Sequence[Results]) -> None:
    """Puts the runs between the page's markers, each with its plot beside the page; other text there stays.

    Raises:
        ValueError: the page has not both markers, once each and in order.
    """
    sections = []
    for number, run in enumerate(runs, 1):
        section = run.text()
        if drawn := plot.svg(run.rows):
            name = f"{page.stem}-{number}.svg"
            (page.parent / name).write_text(drawn)
            section += f"\n\n![rates against the limits of the same run]({name})"
        sections.append(section)
    page.write_text(between(page.read_text(), "\n\n".join(sections)))


def between(text: str, new: str) -> str:
    """`text` with `new` in place of what stands between the markers."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in after or END in before + after:
        raise ValueError(f"found no single pair of markers, expected {BEGIN} … {END}")
    return f"{before}{BEGIN}\n\n{new}\n\n{END}{after}"
