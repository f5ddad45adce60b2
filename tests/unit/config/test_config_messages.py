"""What people read after typical mistakes, word for word."""

import pytest

from ftd.config.problems import MAX_LISTED, nearest
from ftd.errors import ConfigError

SIZE = "expected a number and one of B, KiB, MiB, GiB, TiB, KB, MB, GB, TB"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("modle: /m", "unknown key 'modle': the nearest known one is 'model' ({file}, line 1)"),
        ("read-threads: 4", "unknown key 'read-threads': the nearest known one is 'read_threads' ({file}, line 1)"),
        ("PIN: cuda", "unknown key 'PIN': the nearest known one is 'pin' ({file}, line 1)"),
        ("pin: gpu", "pin: found 'gpu', expected auto, cuda, mlock or none ({file}, line 1)"),
        ("pin:", "pin: found nothing, expected auto, cuda, mlock or none ({file}, line 1)"),
        (
            "pin: cuda\nhuge_pages: no",
            "huge_pages: found false (YAML reads no as false: quote it), expected auto, require or never "
            "({file}, line 2)",
        ),
        ("push: off", "push: found false (YAML reads off as false: quote it), expected auto or never ({file}, line 1)"),
        (
            "group: on",
            "group: found true (YAML reads on as true: quote it), expected a group's name or number ({file}, line 1)",
        ),
        (
            "read_threads: yes",
            "read_threads: found true (YAML reads yes as true), expected a whole number from 1 to 256 ({file}, line 1)",
        ),
        (
            "mode: 0755",
            "mode: found '0755', expected octal digits such as 0640 by which the owner reads and writes, and others "
            "read at most ({file}, line 1)",
        ),
        (
            "mode: no",
            "mode: found 'no', expected octal digits such as 0640 by which the owner reads and writes, and others "
            "read at most ({file}, line 1)",
        ),
        ("memory_budget: 8 gigs", f"memory_budget: '8 gigs' is no size: {SIZE} ({{file}}, line 1)"),
        ("device: cuda:0", "device: found 'cuda:0', expected a CUDA ordinal from 0 to 1023, or auto ({file}, line 1)"),
        (
            "heartbeat_s: .inf",
            "heartbeat_s: found '.inf', expected a number of seconds above 0 and at most 1000000 ({file}, line 1)",
        ),
        (
            "heartbeat_s: 20",
            "lease_timeout_s: found 30 (default), expected more than twice heartbeat_s, which is 20 ({file}, line 1)",
        ),
        (
            "lease_timeout_s: 1.50",
            "lease_timeout_s: found 1.50 ({file}, line 1), expected more than twice heartbeat_s, which is 1 (default)",
        ),
        (
            "layers: model.layers.*",
            "layers: found 'model.layers.*', expected a list of patterns such as [model.layers.*] ({file}, line 1)",
        ),
        (
            "layers: ['encoder.layer.?']",
            "layers[0]: pattern 'encoder.layer.?' has '?', expected names and * only, such as model.layers.* "
            "({file}, line 1)",
        ),
        (
            "allow_types: argparse.Namespace",
            "allow_types: found 'argparse.Namespace', expected a list of full names such as [argparse.Namespace] "
            "({file}, line 1)",
        ),
        (
            "allow_types: [Namespace]",
            "allow_types[0]: found 'Namespace', expected a full name such as argparse.Namespace ({file}, line 1)",
        ),
        ("layers: [a, no]", "layers[1]: found false, expected text: quote it ({file}, line 1)"),
        ("pin: cuda\npin: none", "pin: found again, expected once, as on line 1 ({file}, line 2)"),
    ],
)
def test_mistakes_in_a_file(load, tmp_path, text, message):
    with pytest.raises(ConfigError) as caught:
        load(text)
    path = f"{tmp_path}/etc/ns.yaml"
    assert str(caught.value) == message.format(file=f"file {path}") + f"\n  → correct {path}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("numa=of", "numa: found 'of', expected none, interleave or bind:<node> (--set)"),
        (
            "layers=[*.b]",
            'layers: line 1, column 3: YAML reads a leading * as an alias: quote it, as in "*.blocks.*" (--set)',
        ),
        ("layers=[a", "layers: line 1, column 3: expected ',' or ']', but got '<stream end>' (--set)"),
        ("model=", None),
        ("model=''", "model: found '', expected the path of a checkpoint (--set)"),
        (
            "model=~no-such-user/m",
            "model: '~no-such-user/m': found no home directory for ~no-such-user, expected an absolute path (--set)",
        ),
        ("group=a: b", "group: found {'a': 'b'}, expected a group's name or number (--set)"),
        ("namspace=x", "unknown key 'namspace': the nearest known one is 'numa' (--set)"),
    ],
)
def test_mistakes_in_set(load, text, message):
    if message is None:
        assert str(load(sets=[text]).config.model) == "/m"  # --model stands above it
        return
    with pytest.raises(ConfigError) as caught:
        load(sets=[text], model=None if text.startswith("model=") else "/m")
    assert str(caught.value) == f"{message}\n  → correct --set"


def test_all_mistakes_at_once(load, tmp_path):
    with pytest.raises(ConfigError) as caught:
        load("pni: cuda\nmode: 416\nheartbeat_s: no\n", sets=["verify=of", "devise=1"], model=None)
    path = f"{tmp_path}/etc/ns.yaml"
    assert caught.value.message.split("; ") == [
        f"unknown key 'pni': the nearest known one is 'pin' (file {path}, line 1)",
        "unknown key 'devise': the nearest known one is 'device' (--set)",
        f"no model: expected --model, or `model:` in {path}",
        "mode: found '416', expected octal digits such as 0640 by which the owner reads and writes, and others read at "
        f"most (file {path}, line 2)",
        "verify: found 'of', expected none, fingerprint or full (--set)",
        f"heartbeat_s: found false (YAML reads no as false), expected a number of seconds above 0 and at most 1000000 "
        f"(file {path}, line 3)",
    ]
    assert caught.value.remedy == f"give the checkpoint's path with --model and correct {path} and --set"


def test_a_hopeless_file_gives_a_readable_error(load):
    text = "".join(f"key{number}: 1\n" for number in range(500)) + "x" * 900 + ": 1\n"
    with pytest.raises(ConfigError) as caught:
        load(text)
    problems = caught.value.message.split("; ")
    assert len(problems) == MAX_LISTED + 1
    assert problems[-1] == f"and {501 - MAX_LISTED} more"
    with pytest.raises(ConfigError) as caught:
        load("x" * 900 + ": 1\ngroup: [" + "[a], " * 1000 + "]\n")
    assert len(caught.value.message) < 600


def test_nearest_always_names_one_and_ties_are_decided():
    assert nearest("", ["b", "a"]) == nearest("", ["a", "b"])
    assert nearest("zzz", ["pin"]) == "pin"
