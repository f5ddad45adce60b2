"""`docs/offload-config.md` is what the model says, and its examples hold."""

import re
from pathlib import Path

import pytest

from ftd.config import offload_docs
from ftd.config.globs import Glob
from ftd.config.later import LATER
from ftd.config.offload import OffloadConfig

PAGE = (Path(__file__).parents[3] / "docs/offload-config.md").read_text()


def rows(heading):
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line.startswith("| `")]


FIELDS = {row[0].strip("`"): row for row in rows("Fields")}


def test_the_page_is_up_to_date():
    assert offload_docs.page() == PAGE, "run python -m ftd.config.offload_docs > docs/offload-config.md"


def test_every_field_has_a_row_with_default_variable_and_effect():
    assert list(FIELDS) == list(OffloadConfig.model_fields)
    config = OffloadConfig()
    for key, (_, default, variable, values, effect) in FIELDS.items():
        assert default.strip("`").strip('"') == str(getattr(config, key))
        assert variable == f"`FT_{key.upper()}`"
        assert values
        assert len(effect) > 30
        assert ("Not built yet" in effect) == (key in LATER)


def test_what_has_one_effect_only_names_all_values():
    assert FIELDS["transfer_mode"][3] == "`allocation_block_transfer`, `raw_block_transfer`, `strategy`"
    assert FIELDS["enabled"][3] == "true or false"


@pytest.mark.parametrize(
    ("method", "pattern", "yes", "no"),
    [
        ("one_segment", "layers.*", ["layers.0"], ["layers.0.attn"]),
        ("one_or_more", "*.weight", ["linear.weight", "layers.0.attn.weight"], []),
        ("one_or_more", "layers.0.*", ["layers.0.norm", "layers.0.attn.q.weight"], ["layers.0", "layers.1.norm"]),
        ("in_class_name", "torch.nn.*.Linear", ["torch.nn.modules.linear.Linear"], ["Linear"]),
    ],
)
def test_the_examples_of_patterns_hold(method, pattern, yes, no):
    assert re.search(rf"`(class:)?{re.escape(pattern)}`", PAGE)
    form = "class" if method == "in_class_name" else "name"
    matches = getattr(Glob.parse(f"{form}:{pattern}"), method)
    assert [matches(path) for path in yes + no] == [True] * len(yes) + [False] * len(no)
