"""The one file that speaks to PyYAML: text in, plain values with the text that they were written as out.

Types are narrower than YAML 1.1's, whose surprises have broken configurations of others: a whole number is decimal
without a leading zero, and everything else that YAML would turn into a number (`0640`, `1:30`, `0x10`), a date or
binary stays the text that it is. Booleans stay YAML's (`no` is false), so that a reader can explain them. Aliases and
tags are refused: a configuration is flat and needs none, and an alias is most often an unquoted `*`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import yaml

_DECIMAL = re.compile(r"[-+]?(?:0|[1-9][0-9]{0,39})")
_BOOLEANS = {"yes": True, "true": True, "on": True, "no": False, "false": False, "off": False}
_STANDARD = "tag:yaml.org,2002:"
_TEXT_TAGS = frozenset(
    _STANDARD + tag for tag in ("str", "null", "bool", "int", "float", "timestamp", "merge", "value")
)


class YamlTextError(ValueError):
    """The text is no YAML, or uses what a configuration may not; the message starts with line and column."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One key of a mapping, or (with an empty key) one value.

    Attributes:
        value: None, bool, int, float, str, or a list or dict of these.
        written: the scalar's own text, before YAML gave it a type; None for a list or mapping.
        line: counts from 1.
    """

    key: str
    value: object
    written: str | None
    line: int


def read_mapping(text: str) -> list[Entry]:
    """The keys of a YAML mapping in their order, repeated ones included; none for an empty text.

    Raises:
        YamlTextError: the text is not one YAML mapping.
    """
    root = _compose(text)
    if root is None or (isinstance(root, yaml.ScalarNode) and root.tag == _STANDARD + "null"):
        return []
    if not isinstance(root, yaml.MappingNode):
        kind = "a list" if isinstance(root, yaml.SequenceNode) else "a single value"
        raise YamlTextError(f"{_at(root.start_mark)}: found {kind}, expected `key: value` lines")
    return [
        Entry(_key(key), _value(node), _written(node), key.start_mark.line + 1)
        for key, node in root.value
    ]  # fmt: skip


def read_value(text: str) -> Entry:
    """One YAML value, such as that of a command line's KEY=VALUE; an empty text is null.

    Raises:
        YamlTextError: the text is not one YAML value.
    """
    root = _compose(text)
    return Entry("", None, "", 1) if root is None else Entry("", _value(root), _written(root), 1)


def as_text(value: object) -> str:
    """A number, a string, a path or a sequence of strings on one line, such that `read_value` gives it back."""
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_quoted_unless_plain(str(item), in_list=True) for item in value) + "]"
    return repr(value) if isinstance(value, int | float) else _quoted_unless_plain(str(value), in_list=False)


def _quoted_unless_plain(text: str, *, in_list: bool) -> str:
    try:
        plain = read_value(f"[{text}]").value == [text] if in_list else read_value(text).value == text
    except YamlTextError:
        plain = False
    return text if plain else f'"{"".join(_escaped(char) for char in text)}"'


def _escaped(char: str) -> str:
    if char in '"\\':
        return "\\" + char
    if char.isprintable():
        return char
    return f"\\u{ord(char):04x}" if ord(char) < 0x10000 else f"\\U{ord(char):08x}"


class _Loader(yaml.SafeLoader):
    """SafeLoader without aliases: nothing is shared, so a small text cannot unfold into a huge value."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise YamlTextError(f"{_at(self.peek_event().start_mark)}: {_ALIAS}")  # type: ignore[no-untyped-call]
        return super().compose_node(parent, index)


_ALIAS = 'YAML reads a leading * as an alias: quote it, as in "*.blocks.*"'


def _compose(text: str) -> Any:
    """The single node of the text; None when it is empty."""
    try:
        # the reader refuses control characters in its constructor already
        loader = _Loader(text)
        try:
            return loader.get_single_node()
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        what = _ALIAS if error.context == "while scanning an alias" else error.problem
        raise YamlTextError(f"{_at(error.problem_mark or error.context_mark)}: {what}") from None
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        line, column = before.count("\n") + 1, error.position - before.rfind("\n")
        raise YamlTextError(f"line {line}, column {column}: {text[error.position]!a} is no text") from None
    except RecursionError:
        raise YamlTextError("line 1, column 1: nested too deeply, expected `key: value` lines") from None


def _at(mark: Any) -> str:
    return f"line {mark.line + 1}, column {mark.column + 1}" if mark else "line 1, column 1"


def _key(node: Any) -> str:
    if not isinstance(node, yaml.ScalarNode):
        raise YamlTextError(f"{_at(node.start_mark)}: found a list or mapping as a key, expected a name")
    return str(node.value)


def _written(node: Any) -> str | None:
    return str(node.value) if isinstance(node, yaml.ScalarNode) else None


def _value(node: Any) -> object:
    if isinstance(node, yaml.MappingNode):
        return {_key(key): _value(value) for key, value in node.value}
    if isinstance(node, yaml.SequenceNode):
        return [_value(item) for item in node.value]
    if node.tag not in _TEXT_TAGS:
        raise YamlTextError(f"{_at(node.start_mark)}: found the tag {node.tag!r}, expected a plain value")
    return _scalar(node.tag.removeprefix(_STANDARD), str(node.value))


def _scalar(kind: str, text: str) -> object:
    """The value of a scalar that YAML resolved to `kind`; the text itself wherever it is not plainly that."""
    if kind == "null" and text.lower() in ("", "~", "null"):
        return None
    if kind == "bool":
        return _BOOLEANS.get(text.lower(), text)
    if kind == "int" and _DECIMAL.fullmatch(text):
        return int(text)
    if kind == "float":
        try:
            return float(text)
        except ValueError:
            return text
    return text
