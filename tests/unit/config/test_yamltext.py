"""YAML as text with plain values: what stays text, what is refused, and where."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftd.config.yamltext import YamlTextError, as_text, read_mapping, read_value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5", 5),
        ("-5", -5),
        ("0", 0),
        ("1.5", 1.5),
        ("1_000", "1_000"),
        ("0640", "0640"),
        ("0x1F", "0x1F"),
        ("0b11", "0b11"),
        ("1:30", "1:30"),
        ("1:30.5", "1:30.5"),
        (".nan", ".nan"),
        ("-.inf", "-.inf"),
        ("2024-13-45", "2024-13-45"),
        ("9" * 5000, "9" * 5000),
        ("no", False),
        ("On", True),
        ("y", "y"),
        ("null", None),
        ("~", None),
        ("", None),
        ("none", "none"),
        ("'no'", "no"),
        ("!!int abc", "abc"),
        ("!!bool maybe", "maybe"),
        ("!!null text", "text"),
        ("!!str 5", "5"),
        ("=", "="),
        ("[a.*, 1, no]", ["a.*", 1, False]),
        ("{a: [1]}", {"a": [1]}),
    ],
)
def test_values(text, value):
    read = read_value(text).value
    assert read == value
    assert type(read) is type(value)


def test_entries_keep_what_was_written_order_repetition_and_line():
    entries = read_mapping("# comment\nmode: 0640\npin: 'no'\n\nmode: 640\nlayers: [a]\n8: x\nno: y\n<<: {a: b}\n")
    assert [(entry.key, entry.value, entry.written, entry.line) for entry in entries] == [
        ("mode", "0640", "0640", 2),
        ("pin", "no", "no", 3),
        ("mode", 640, "640", 5),
        ("layers", ["a"], None, 6),
        ("8", "x", "x", 7),
        ("no", "y", "y", 8),
        ("<<", {"a": "b"}, None, 9),
    ]


@pytest.mark.parametrize("text", ["", "\n", "# nothing\n", "---\n", "null", "\ufeff"])
def test_an_empty_text_has_no_keys(text):
    assert read_mapping(text) == []


ALIAS = 'YAML reads a leading * as an alias: quote it, as in "*.blocks.*"'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pin: cuda\nlayers: [*.blocks.*]", f"line 2, column 11: {ALIAS}"),
        ("a: &x 1\nb: *x", f"line 2, column 4: {ALIAS}"),
        ("a: *x", f"line 1, column 4: {ALIAS}"),
        ("- pin", "line 1, column 1: found a list, expected `key: value` lines"),
        ("pin:cuda", "line 1, column 1: found a single value, expected `key: value` lines"),
        ("a: b: c", "line 1, column 5: mapping values are not allowed here"),
        ("a: 1\n\tb: 2", "line 2, column 1: found character '\\t' that cannot start any token"),
        ("a: 1\nb: \x07", "line 2, column 4: '\\x07' is no text"),
        ("a: \udc80", "line 1, column 4: '\\udc80' is no text"),
        ("a: 1\n---\nb: 2", "line 2, column 1: but found another document"),
        ("? [a]\n: 1", "line 1, column 3: found a list or mapping as a key, expected a name"),
        ("a: {[b]: 1}", "line 1, column 5: found a list or mapping as a key, expected a name"),
        ("a: !x 1", "line 1, column 4: found the tag '!x', expected a plain value"),
        (
            "a: !!python/object/apply:os.system [x]\nb: !!python/name:os.system x",
            "line 2, column 4: found the tag 'tag:yaml.org,2002:python/name:os.system', expected a plain value",
        ),
        ("%YAML 9.9\n---\na: 1", "line 1, column 1: found incompatible YAML document (version 1.* is required)"),
        ("a: " + "[" * 1_000, "line 1, column 1: nested too deeply, expected `key: value` lines"),
    ],
)
def test_refused(text, message):
    with pytest.raises(YamlTextError) as caught:
        read_mapping(text)
    assert str(caught.value) == message


@given(st.text(max_size=40))
def test_any_text_is_read_or_refused(text):
    for read in (read_mapping, read_value):
        try:
            read(text)
        except YamlTextError as error:
            assert str(error).startswith("line ")


# a lone surrogate is no character: YAML cannot hold one, even escaped
writable = st.text(st.characters(blacklist_categories=("Cs",)), max_size=12)


@given(
    st.one_of(writable, st.sampled_from(["no", "~", "", "640", "0640", "*a", "a: b", "a #b", "é", "😀", "[", "a,b"]))
)
def test_strings_are_written_so_that_they_are_read_back(text):
    assert read_value(as_text(text)).value == text


@given(st.one_of(st.integers(-(10**20), 10**20), st.floats(allow_nan=False, allow_infinity=False)))
def test_numbers_are_written_so_that_they_are_read_back(number):
    assert float(read_value(as_text(number)).value) == float(number)


@given(st.lists(writable, max_size=4))
def test_lists_are_written_so_that_they_are_read_back(items):
    assert read_value(as_text(tuple(items))).value == items


def test_a_path_of_undecodable_bytes_is_written_printable():
    assert as_text(Path("/models/\udcff")) == '"/models/\\udcff"'
