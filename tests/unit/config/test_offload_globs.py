"""One pattern: its three forms, and what `*` means in each place."""

import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ftd.config.globs import Glob, normalized
from tests.unit.config.pattern_oracle import in_class_name, one_or_more, one_segment

segments = st.text(st.sampled_from("ab0"), min_size=1, max_size=2)
paths = st.lists(segments, min_size=1, max_size=6).map(".".join)
pieces = st.one_of(st.just("*"), segments, st.text(st.sampled_from("ab0*?"), min_size=1, max_size=3))
patterns = st.lists(pieces, min_size=1, max_size=5).map(".".join)


@given(patterns, st.lists(paths, max_size=8))
@example("*.a.*.a.*", ["a.a.a.a.a", "b.a.b.a", "b.a.a.b", "b.a.b.a.b"])
@example("*.*.a.*", ["b.a.b", "b.b.a.b", "a.a.a.a", "b.b.b.a.b"])
@example("*.*.a", ["a.a", "b.b.a", "b.b.b.a"])
@example("a.**", ["a.b", "a.b.c", "a"])
@settings(max_examples=200, deadline=None)
def test_names(pattern, some):
    glob = Glob.parse(pattern)
    for path in some:
        assert glob.one_segment(path) == one_segment(pattern, path)
        assert glob.one_or_more(path) == one_or_more(pattern, path)


@given(st.text(st.sampled_from("ab.*?"), min_size=1, max_size=6), st.text(st.sampled_from("ab."), max_size=7))
@settings(max_examples=200)
def test_class_names(pattern, name):
    assert Glob.parse(f"class:{pattern}").in_class_name(name) == in_class_name(pattern, name)


@given(patterns, paths)
@settings(max_examples=50)
def test_what_one_segment_matches_one_or_more_does_too(pattern, path):
    glob = Glob.parse(pattern)
    assert not glob.one_segment(path) or glob.one_or_more(path)


@pytest.mark.parametrize(
    ("pattern", "method", "text", "expected"),
    [
        ("layers.*", "one_segment", "layers.0", True),
        ("layers.*", "one_segment", "layers.0.attn", False),
        ("layers.*", "one_segment", "layers", False),
        ("layers.*", "one_segment", "model.layers.0", False),
        ("layers.1*", "one_segment", "layers.10", True),
        ("layers.1*", "one_segment", "layers.1", True),
        ("layers.1?", "one_segment", "layers.1", False),
        ("layers.?", "one_segment", "layers.7", True),
        ("l*", "one_or_more", "layers.0", False),  # a star that is no whole segment stays within one
        ("*norm*", "one_or_more", "layers.0.norm", False),
        ("*.*norm*", "one_or_more", "layers.0.input_norm", True),
        ("*.weight", "one_or_more", "weight", False),
        ("a?b", "one_segment", "a.b", False),
        ("a+b.(c)", "one_segment", "a+b.(c)", True),
        ("a[0]", "one_segment", "a[0]", True),
        ("a[0]", "one_segment", "a0", False),
        ("A", "one_segment", "a", False),
        ("*", "one_segment", "x\ny", True),
        ("*.w", "one_or_more", "x\ny.z.w", True),
        ("*", "one_segment", "", False),
        ("*", "one_or_more", "", False),
        ("class:*Expert*", "in_class_name", "SharedExpertMLP", True),
        ("class:SharedExpertMLP", "in_class_name", "models.moe.SharedExpertMLP", False),
        ("class:*.SharedExpertMLP", "in_class_name", "models.moe.SharedExpertMLP", True),
        ("class:*.SharedExpertMLP", "in_class_name", "SharedExpertMLP", False),
        ("class:torch.nn.*.Linear", "in_class_name", "torch.nn.modules.linear.Linear", True),
        ("class:a?b", "in_class_name", "a.b", True),
        ("class:m.<locals>.A", "in_class_name", "m.<locals>.A", True),
    ],
)
def test_matches(pattern, method, text, expected):
    assert getattr(Glob.parse(pattern), method)(text) is expected


@pytest.mark.parametrize(
    ("pattern", "form", "body", "kept"),
    [
        ("layers.*", "name", "layers.*", "layers.*"),
        ("name:layers.*", "name", "layers.*", "name:layers.*"),
        (" name: layers.* ", "name", "layers.*", "name:layers.*"),
        ("class:*Expert*", "class", "*Expert*", "class:*Expert*"),
        ("class:a..b", "class", "a..b", "class:a..b"),
        ("name:class:x", "name", "class:x", "name:class:x"),
        ("class:name:x", "class", "name:x", "class:name:x"),
        ("class", "name", "class", "class"),
    ],
)
def test_forms(pattern, form, body, kept):
    assert Glob.parse(pattern) == Glob(form, body)
    assert normalized(pattern) == kept
    assert normalized(kept) == kept


@pytest.mark.parametrize(
    ("pattern", "complaint"),
    [
        ("", "'' is empty"),
        (" \n", "'' is empty"),
        ("class:", "'class:' is empty"),
        ("name:  ", "'name:' is empty"),
        ("cls:Foo", "has the form 'cls:', expected name:<glob> or class:<glob>"),
        ("Class:Foo", "has the form 'Class:'"),
        (":a", "has the form ':'"),
        ("a..b", "empty segment"),
        (".a", "empty segment"),
        ("layers.", "empty segment"),
        ('["a"]', "quotation mark"),
        ("class:'A'", "quotation mark"),
    ],
)
def test_no_patterns(pattern, complaint):
    with pytest.raises(ValueError) as caught:
        normalized(pattern)
    assert complaint in str(caught.value)
    assert "expected" in str(caught.value)


def test_the_message_of_a_huge_pattern_is_short():
    with pytest.raises(ValueError) as caught:
        normalized("x" * 100_000 + ":a")
    assert len(str(caught.value)) < 250


def test_no_pattern_takes_long():
    path = ".".join(["a" * 20] * 60)
    pattern = ".".join(["*", "a*a*a*?"] * 12 + ["b"])
    begun = time.perf_counter()
    glob = Glob.parse(pattern)
    assert not glob.one_or_more(path)
    assert not Glob.parse("class:" + "*a" * 40 + "b").in_class_name(path)
    assert glob.one_or_more(path + ".b")
    assert time.perf_counter() - begun < 1
