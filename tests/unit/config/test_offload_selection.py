"""Which modules are layers and which parameters are managed: a model of names, and an oracle of the rules' words."""

import itertools
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ftd.config.globs import Glob
from ftd.config.selection import ModuleName, class_names, select
from tests.unit.config.pattern_oracle import in_class_name, one_or_more, one_segment


def modules_of(parameters, classes=None):
    """Every module that the parameters imply, the root first, each with its class."""
    found = {"": None}
    for name in parameters:
        segments = name.split(".")[:-1]
        found.update({".".join(segments[:depth]): None for depth in range(1, len(segments) + 1)})
    classes = classes or {}
    return [ModuleName(path, (name, f"pkg.mod.{name}")) for path in found for name in [classes.get(path, "Other")]]


LAYER = ["scale", "norm.weight", "attn.q.weight", "lin.weight", "lin.bias"]
NAMES = [
    "g",
    "emb.weight",
    *(f"layers.{index}.{name}" for index in range(2) for name in LAYER),
    "final_norm.weight",
]
CLASSES = {"": "Model", "emb": "Leaf", "layers": "ModuleList", "final_norm": "Norm"} | {
    f"layers.{index}{path}": name
    for index in range(2)
    for path, name in {"": "Layer", ".norm": "Norm", ".attn": "Seq", ".attn.q": "Leaf", ".lin": "Leaf"}.items()
}
MODULES = modules_of(NAMES, CLASSES)


def chosen(include, exclude=()):
    selection = select(include, exclude, MODULES, NAMES)
    return list(selection.layers), list(selection.managed)


def having(*ends, of=("layers.0.", "layers.1.")):
    return [name for name in NAMES if name.startswith(tuple(of)) and name.endswith(ends or ("",))]


LAYERS = ["layers.0", "layers.1"]


@pytest.mark.parametrize(
    ("include", "exclude", "layers", "managed"),
    [
        (["layers.*"], [], LAYERS, having()),
        (["name:layers.*"], [], LAYERS, having()),
        (["layers.?"], [], LAYERS, having()),
        (["layers.**"], [], LAYERS, having()),
        (["*"], [], ["emb", "layers", "final_norm"], NAMES[1:]),
        (["lay*.0"], [], ["layers.0"], having(of=["layers.0."])),
        (["layers.*.weight"], [], LAYERS, having(".weight")),
        (["layers.*.q.weight"], [], LAYERS, having("q.weight")),
        (["layers.*.scale"], [], LAYERS, having("scale")),
        (["layers.*.s*"], [], LAYERS, having("scale")),
        (["*.scale"], [], LAYERS, having("scale")),
        (["emb.weight"], [], ["emb"], ["emb.weight"]),
        (["layers.0.norm.weight"], [], ["layers.0.norm"], ["layers.0.norm.weight"]),
        (["layers.*.norm.weight"], [], ["layers.0.norm", "layers.1.norm"], having("norm.weight")),
        (["layers.*.attn.*.weight"], [], ["layers.0.attn.q", "layers.1.attn.q"], having("q.weight")),
        (["lay*.*.weight"], [], LAYERS, having(".weight")),
        (["layers.?.weight"], [], [], []),
        (["*.q.weight"], [], ["layers.0.attn.q", "layers.1.attn.q"], having("q.weight")),
        (["layers.*.attn"], [], ["layers.0.attn", "layers.1.attn"], having("q.weight")),
        (["layers.*.attn.*"], [], ["layers.0.attn.q", "layers.1.attn.q"], having("q.weight")),
        (["layers.*.bias", "*.q.weight"], [], None, having("q.weight", "bias")),
        (["class:Layer"], [], LAYERS, having()),
        (["class:*.Layer"], [], LAYERS, having()),
        (["class:pkg.*Layer"], [], LAYERS, having()),
        (["class:Norm"], [], ["layers.0.norm", "layers.1.norm", "final_norm"], [*having("norm.weight"), NAMES[-1]]),
        (["class:Model"], [], [""], NAMES),
        (["g"], [], [""], ["g"]),
        (["layers.*", "g"], [], ["", *LAYERS], ["g", *having()]),
        ([], [], [], []),
        (["layer.*"], [], [], []),
        (["layers.*.nope"], [], [], []),
        (["layers.[0]"], [], [], []),
        (["layers.*"], ["*.norm"], LAYERS, having("scale", "q.weight", "lin.weight", "bias")),
        (["layers.*"], ["layers.*.norm"], LAYERS, having("scale", "q.weight", "lin.weight", "bias")),
        (["layers.*"], ["class:Norm"], LAYERS, having("scale", "q.weight", "lin.weight", "bias")),
        (["layers.*"], ["*norm*"], LAYERS, having()),
        (["layers.*"], ["*.bias"], LAYERS, having("scale", "weight")),
        (["layers.*"], ["layers.*.weight"], LAYERS, having("scale", "bias")),
        (["layers.*"], ["class:Leaf"], LAYERS, having("scale", "norm.weight")),
        (["layers.*"], ["class:Seq"], LAYERS, having("scale", "norm.weight", "lin.weight", "bias")),
        (["layers.*"], ["layers.0.*"], LAYERS, having(of=["layers.1."])),
        (["layers.*"], ["layers.0"], ["layers.1"], having(of=["layers.1."])),
        (["layers.*"], ["layers.*"], [], []),
        (["layers.*"], ["layers"], [], []),
        (["layers.*"], ["*"], [], []),
        (["layers.*"], ["class:Layer"], [], []),
        (["class:Model"], ["class:Model"], [], []),
        (["*"], ["class:ModuleList"], ["emb", "final_norm"], ["emb.weight", "final_norm.weight"]),
        (["name:layers.*.weight"], ["name:layers.1.*"], LAYERS, having(".weight", of=["layers.0."])),
    ],
)
def test_a_model_of_layers(include, exclude, layers, managed):
    found_layers, found = chosen(include, exclude)
    assert found == managed
    assert layers is None or found_layers == layers


def test_a_parameter_belongs_to_the_deepest_layer():
    selection = select(["layers.*", "layers.*.attn", "class:Leaf"], [], MODULES, NAMES)
    assert selection.managed["layers.0.scale"] == "layers.0"
    assert selection.managed["layers.0.attn.q.weight"] == "layers.0.attn.q"
    assert selection.layers["layers.0.attn"] == ()
    assert selection.layers["layers.0.lin"] == ("layers.0.lin.weight", "layers.0.lin.bias")
    members = list(itertools.chain(*selection.layers.values()))
    assert sorted(members) == sorted(selection.managed)


def test_what_matches_a_filter_counts_in_every_selected_layer():
    # the first pattern selects modules, and as a filter it also names the bare parameter beside them
    assert chosen(["layers.0.*", "layers.*.bias"])[1] == [*having(of=["layers.0."]), "layers.1.lin.bias"]
    # without a selected module around it, a parameter stays
    assert "layers.0.scale" not in chosen(["layers.0.*"])[1]


def test_modules_without_parameters_do_not_hide_parameters():
    names = ["layers.0.experts.up", "layers.0.experts.down"]
    modules = [*modules_of(names), ModuleName("layers.0.experts.act", ("SiLU",))]
    selection = select(["layers.*.experts.*"], [], modules, names)
    assert list(selection.managed) == names
    assert list(selection.layers) == ["layers.0.experts"]
    assert not select(["class:SiLU"], [], modules, names).layers


def test_a_model_that_is_one_module():
    selection = select(["*"], [], [ModuleName("", ("Linear",))], ["weight", "bias"])
    assert selection.layers == {"": ("weight", "bias")}
    assert select(["*"], [], [ModuleName("", ("ReLU",))], []).layers == {}


def test_patterns_that_match_nothing_are_told():
    selection = select(["layers.*", "nope", "class:No*"], ["*.bias", "x.*", "class:Nope"], MODULES, NAMES)
    assert selection.unmatched_include == ("nope", "class:No*")[:1]
    assert selection.unmatched_exclude == ("x.*", "class:Nope")


def test_class_names_are_those_of_the_class_itself():
    class Base:
        pass

    class Inner(Base):
        pass

    short, full = class_names(Inner)
    assert short == "Inner"
    assert full == f"{__name__}.test_class_names_are_those_of_the_class_itself.<locals>.Inner"
    assert class_names(int) == ("int", "builtins.int")


def test_ten_thousand_modules_are_selected_quickly():
    names = [f"layers.{layer}.part{part}.weight" for layer in range(100) for part in range(100)]
    modules = modules_of(names)
    begun = time.perf_counter()
    selection = select(["layers.*.weight", "class:Nope", "*.part7"], ["*.part1?", "class:*Ex*"], modules, names)
    assert time.perf_counter() - begun < 3
    assert len(selection.managed) == 9_000
    assert len(selection.layers) == 100


# --- the oracle ---------------------------------------------------------------------------------------------------


def parts(pattern):
    return pattern.split(":", 1) if ":" in pattern else ("name", pattern)


def ancestors(path):
    segments = path.split(".") if path else []
    return [".".join(segments[:depth]) for depth in range(len(segments))]


def oracle(include, exclude, modules, names):
    """(layers, managed) by the words of the reference, each question asked of each module and parameter by itself."""
    classes = {module.path: module.class_names for module in modules}
    holding = [path for path in classes if any(path in ancestors(name) for name in names)]

    def of_class(glob, path):
        return any(in_class_name(glob, name) for name in classes[path])

    def by_name(glob, path):
        return path != "" and one_segment(glob, path)

    def modules_by(pattern):
        form, glob = parts(pattern)
        return [path for path in holding if (of_class(glob, path) if form == "class" else by_name(glob, path))]

    def parameters_by(pattern):
        form, glob = parts(pattern)
        return [name for name in names if form == "name" and one_or_more(glob, name)]

    def derived(glob, name):
        pattern = glob.split(".")
        beginnings = [".".join(pattern[:depth]) for depth in range(1, len(pattern)) if pattern[0] != "*"]
        named = [path for part in beginnings for path in ancestors(name)[1:] if one_segment(part, path)]
        return max(named, key=len, default=ancestors(name)[-1])

    def out(path, is_module):
        for pattern in exclude:
            form, glob = parts(pattern)
            around = [*ancestors(path), path] if is_module else ancestors(path)
            if form == "class":
                if any(of_class(glob, module) for module in around):
                    return True
            elif any(one_or_more(glob, one) for one in [*around, path] if one):
                return True
        return False

    selected = set()
    for pattern in include:
        selected.update(modules_by(pattern) or {derived(parts(pattern)[1], name) for name in parameters_by(pattern)})
    layers = [path for path in holding if path in selected and not out(path, True)]
    managed = {}
    for name in names:
        around = [path for path in ancestors(name) if path in layers]
        wanted = any(
            name in parameters_by(pattern) or set(ancestors(name)) & set(modules_by(pattern)) for pattern in include
        )
        if around and wanted and not out(name, False):
            managed[name] = around[-1]
    return layers, managed


words = st.sampled_from(["a", "b", "0", "1", "w"])
parameter_names = st.lists(st.lists(words, min_size=1, max_size=4).map(".".join), min_size=1, max_size=8, unique=True)


def leaves_only(names):
    """Names that are no module of another name."""
    return [name for name in names if not any(other.startswith(name + ".") for other in names)]


pieces = st.sampled_from(["*", "*", "a", "b", "0", "w", "a*", "?", "**"])
name_patterns = st.lists(pieces, min_size=1, max_size=4).map(".".join)
class_patterns = st.sampled_from(["A", "B", "*", "?", "*B", "pkg.*.A", "*.B", "pkg.A", "*o*"]).map("class:{}".format)
patterns = st.lists(st.one_of(name_patterns, name_patterns.map("name:{}".format), class_patterns), max_size=3)


@given(parameter_names.map(leaves_only), patterns, patterns, st.randoms(use_true_random=False))
@example(["a.0.w", "a.1.b.w"], ["a.*.w"], [], None)
@example(["a"], ["*"], ["**"], None)
@settings(max_examples=200, deadline=None)
def test_against_the_words_of_the_reference(names, include, exclude, random):
    paths = [module.path for module in modules_of(names)]
    classes = {path: random.choice("AB") for path in paths} if random else {}
    modules = modules_of(names, classes)
    layers, managed = oracle(include, exclude, modules, names)
    selection = select(include, exclude, modules, names)
    assert list(selection.layers) == layers
    assert dict(selection.managed) == managed


@given(parameter_names.map(leaves_only), patterns, patterns)
@settings(max_examples=100, deadline=None)
def test_excluding_never_adds_and_order_never_matters(names, include, exclude):
    modules = modules_of(names)
    plain = select(include, [], modules, names)
    less = select(include, exclude, modules, names)
    assert set(less.managed) <= set(plain.managed)
    assert set(less.layers) <= set(plain.layers)
    backwards = select(include[::-1], exclude[::-1], modules, names)
    assert (backwards.layers, backwards.managed) == (less.layers, less.managed)


def test_the_oracle_knows_all_forms():
    assert {Glob.parse(pattern).form for pattern in ("a", "name:a", "class:a")} == {"name", "class"}
