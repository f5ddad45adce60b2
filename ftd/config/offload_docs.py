"""The page of the documentation on OffloadConfig, made from the model: `python -m ftd.config.offload_docs`.

The repository's copy is `docs/offload-config.md`; a test compares the two.
"""

from __future__ import annotations

from typing import get_args

from pydantic.fields import FieldInfo

from ftd.config.fields import expected_of
from ftd.config.later import LATER
from ftd.config.offload import OffloadConfig

_HEAD = """\
# OffloadConfig

<!-- made by `python -m ftd.config.offload_docs > docs/offload-config.md`: change the docstrings, not this file -->

How a model is offloaded, for `ftd_client.offload`. Values come from four places; each overrides those before it, \
field by field:

1. the defaults below
2. a file: the path given to `load_config` or `load_config_from_file`, else the one in `$FT_CONFIG_FILE`
3. environment variables: `FT_` and the field's name in upper case
4. arguments

```python
config = ftd_client.load_config("offload.yaml", num_blocks=2)    # file, environment, argument
config = ftd_client.load_config_from_file("offload.ini")         # no environment
config = ftd_client.load_config_from_env()                       # no file
config = ftd_client.OffloadConfig(include_patterns=["layers.*"]) # neither
```

**`enabled` is false when the environment is read and no file is.** Set `FT_ENABLED=1`, or pass `enabled=True`.

A configuration is validated when it is made, loaded, or copied by `model_copy(update=...)`. Assigning to a field, or \
changing one of its lists in place, is not checked.
"""

_FILES = """\
## Files

The name's extension decides: `.ini` and `.conf`, `.json`, `.yaml` and `.yml`. At most 1 MiB, UTF-8. A file that does \
not exist raises a `FileNotFoundError`, everything else that is wrong one `ValueError` that lists it all; both are \
`FtdError`s.

- INI keeps its keys in the section `[flextensor]` or `[ftd]`; other sections are left alone, `[DEFAULT]` counts. A \
percent sign is a percent sign. Lists are separated by commas or lines.
- JSON and YAML are flat: the keys stand at the top level, lists are lists.
- An unknown key is an error that names the nearest known one. So is a key that stands twice.
- YAML reads `yes`, `no`, `on` and `off` without quotes as true and false. Where text is meant, as for \
`offload_timing: "off"`, quote them; the error says so.
- A pattern that begins with `*` looks like an alias to YAML: quote it, `exclude_patterns: ["*.norm"]`.
- A boolean is refused where a number is meant.

## Environment

| text | read as |
|---|---|
| `1`, `true`, `yes`, `on`, `y`, `t`, and `0`, `false`, `no`, `off`, `n`, `f`, in any case | a boolean |
| `5` | a whole number; `5.0` is refused |
| `0.9` | a number |
| `layers.*, head` | a list, separated by commas; empty for an empty list |
| `none`, `null`, in any case, or nothing | None, where the field can be None |

Text in a file means the same. Every other variable whose name begins with `FT_` is an error that names the nearest \
known one. `load_config(env_prefix=...)` takes another prefix, and then that prefix belongs to OffloadConfig alone.
"""

_PATTERNS = """\
## Patterns

A pattern is one of three:

| pattern | goes by |
|---|---|
| `layers.*` | the dotted name of modules and parameters |
| `name:layers.*` | the same |
| `class:*Expert*` | the name of a module's class, either short (`SharedExpertMLP`) or with its module \
(`models.moe.SharedExpertMLP`); base classes do not count |

`?` is one character and `*` any run of characters, within one segment of a dotted name. A `*` that is a whole segment \
means something else in each place:

| where | `*` is | example |
|---|---|---|
| modules to include | one segment | `layers.*` is `layers.0`, and not `layers.0.attn` |
| parameters to include | one segment or more | `*.weight` is `linear.weight` and `layers.0.attn.weight` |
| anything to exclude | one segment or more | `layers.0.*` is all that lies below `layers.0` |
| class names | any run of characters, dots too | `class:torch.nn.*.Linear` is `torch.nn.modules.linear.Linear` |

**Include.** A pattern that matches modules makes each of them a layer and offloads all its parameters. A pattern that \
matches no module is taken for parameters: it offloads those it matches, and makes layers of the modules that its \
beginning names (`layers.*.weight` of `layers.*`). One that begins with `*` names parameters wherever they are, so \
their own modules become the layers. Where layers lie in one another, a parameter belongs to the innermost. \
Everything else stays on the GPU.

**Exclude** comes after. What it matches is not offloaded: a parameter, or a module with all that lies below it, \
whether it was matched by name or by class.

| include | exclude | offloaded |
|---|---|---|
| `layers.*` | | every layer, whole |
| `layers.*.weight` | | the weights of every layer, at any depth; biases stay |
| `layers.*` | `*.norm` | every layer without its norms |
| `layers.*` | `class:SharedExpertMLP`, `class:MoELayer` | every layer without what lies in these modules |
| `class:*DecoderLayer` | `layers.0` | every decoder layer but the first |

When nothing is managed in the end, `offload()` raises an error that names the patterns and the nearest module names.
"""


def page() -> str:
    """The whole page, ending in a newline."""
    fields = OffloadConfig.model_fields
    rows = [_row(key, info) for key, info in fields.items()]
    table = "\n".join(["| field | default | environment | values | effect |", "|---|---|---|---|---|", *rows])
    notes = [f"### `{key}`\n\n{text}\n" for key, info in fields.items() if (text := _notes(info))]
    return (
        "\n".join([_HEAD, "## Fields\n", table, "", _FILES, _PATTERNS, "## Notes on fields\n", *notes]).rstrip() + "\n"
    )


def _row(key: str, info: FieldInfo) -> str:
    default = info.get_default(call_default_factory=True)
    effect = _paragraphs(info)[0]
    if key in LATER:
        effect += f" Not built yet: `offload()` refuses all but `{_text(LATER[key])}`."
    cells = [f"`{key}`", f"`{_text(default)}`", f"`FT_{key.upper()}`", _values(info), effect]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _values(info: FieldInfo) -> str:
    words = get_args(info.annotation)
    if words and all(isinstance(word, str) for word in words):
        return ", ".join(f"`{word}`" for word in words)
    return expected_of(info)


def _notes(info: FieldInfo) -> str:
    return "\n\n".join(_paragraphs(info)[1:-1])


def _paragraphs(info: FieldInfo) -> list[str]:
    """Of the field's docstring, each on one line. The first is the effect, the last names the variable."""
    return [" ".join(part.split()) for part in (info.description or "").split("\n\n")]


def _text(value: object) -> str:
    return str(value) if not isinstance(value, str) else f'"{value}"'


if __name__ == "__main__":
    print(page(), end="")
