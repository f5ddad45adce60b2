"""The benchmark's command line: what is run, and what is refused."""

from __future__ import annotations

import sys

import pytest

from tests.bench import __main__ as bench


def _asked(monkeypatch: pytest.MonkeyPatch, *words: str) -> object:
    monkeypatch.setattr(sys, "argv", ["bench", *words])
    return bench._arguments()


def test_a_run_measures_everything_but_what_takes_minutes_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = _asked(monkeypatch, "--device", "cpu")
    named = bench._named(asked)
    assert named == "--size-gib 8 --only publish,attach,load --pages both --ways push,pull --device cpu"


def test_the_options_that_a_table_names_make_the_same_run(monkeypatch: pytest.MonkeyPatch) -> None:
    words = "--size-gib 2.5 --only load,stream --pages 4k --ways pull --rows ftd*,safetensors* --device cuda:0 --tiny"
    named = bench._named(_asked(monkeypatch, *words.split()))
    assert bench._named(_asked(monkeypatch, *[word.strip("'") for word in named.split()])) == named


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--only attach,lood", "found lood, expected some of publish,attach,load,stream"),
        ("--ways push,copy", "found copy, expected some of push,pull"),
        ("--rows safetensor --only load", "expected a pattern of one of ftd, load_together"),
        ("--rows ftd_hooks --only load", "expected a pattern of one of"),
        ("--size-gib 0", "expected at least"),
        ("--size-gib nan", "expected at least"),
        ("--pages 1g", "invalid choice"),
    ],
)
def test_what_there_is_not_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str, said: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        _asked(monkeypatch, *words.split())
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
