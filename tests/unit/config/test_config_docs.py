"""`docs/configuration.md` agrees with the model, and its example is one that loads."""

import re
from pathlib import Path
from typing import get_args

import pytest

from ftd.config.load import Loaded, render_origins
from ftd.config.model import NOT_BUILT, DaemonConfig
from ftd.config.patterns import LayerRule
from ftd.config.yamltext import read_value

PAGE = (Path(__file__).parents[3] / "docs/configuration.md").read_text()


def table(heading: str, cells: int) -> list[list[str]]:
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    assert all(len(row) == cells for row in rows)
    return rows[2:]


KEYS = {row[0].strip("`"): row for row in table("Keys", 4)}


def test_the_page_lists_every_key_in_its_order_and_no_other():
    assert list(KEYS) == list(DaemonConfig.model_fields)


def test_the_page_states_the_defaults():
    config = DaemonConfig()
    rendered = render_origins(Loaded(config, dict.fromkeys(DaemonConfig.model_fields, "default")))
    expected = {key: f"`{text}`" for key, text, _ in rendered} | {"read_threads": "min(16, cores)"}
    assert {key: row[1] for key, row in KEYS.items()} == expected


@pytest.mark.parametrize("key", DaemonConfig.model_fields)
def test_the_page_marks_what_is_not_built(key):
    values = re.findall(r"`([^`]+)`( \(not built yet\))?", KEYS[key][2])
    marked = {value: bool(mark) for value, mark in values}
    words = get_args(DaemonConfig.model_fields[key].annotation)
    if all(isinstance(word, str) for word in words):
        assert not words or set(marked) == set(words)
    if key in NOT_BUILT:
        assert {value for value, mark in marked.items() if not mark} <= {NOT_BUILT[key]}
        assert any(marked.values())
    else:
        assert not any(marked.values())


def test_the_example_file_loads(load):
    example = PAGE.split("```yaml\n")[1].split("```")[0]
    loaded = load(example, model=None)
    assert loaded.config == DaemonConfig(
        model=Path("/srv/models/llama-70b"),
        huge_pages="require",
        mode=0o640,
        group="inference",
        memory_budget="150GiB",
        layers=["model.layers.*"],
    )
    assert loaded.warnings == ()


def test_the_examples_of_layers_hold():
    for patterns, name, layer in table("`layers`", 3):
        given = patterns.strip("`")
        rule = LayerRule() if given == "–" else LayerRule(tuple(read_value(given).value))
        assert rule.layer_of(name.strip("`")) == layer.strip("`")
