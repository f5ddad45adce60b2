"""Loading: formats, conversions, precedence, what is wrong."""

import errno
import itertools
import os
import pickle
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftd.config.load_offload import load_config, load_config_from_env, load_config_from_file
from ftd.config.offload import OffloadConfig
from ftd.errors import ConfigError, FtdError, OffloadConfigError
from tests.unit.config.offload_files import WRITERS, environment, ini, plain


class Strategy:
    pass


STRATEGY = Strategy()

#: Field → its value in the file, in the environment and as an argument: each differs from the one before, the first
#: from the default.
LEVELS = {
    "enabled": (False, True, False),
    "gpu_device": (1, 2, 3),
    "pinned_memory": (False, True, False),
    "pinned_memory_mode": ("host_register", "torch", "host_register"),
    "shm_enabled": (True, False, True),
    "shm_namespace": ("one", "two", "three"),
    "shm_wait_timeout": (1.5, 2.5, 3.5),
    "discovery_iters": (2, 3, 4),
    "skip_discovery": (True, False, True),
    "profiling_iters": (1, 2, 3),
    "external_compile": (True, False, True),
    "transfer_budget_scale": (0.5, 0.6, 0.7),
    "transfer_mode": ("raw_block_transfer", "strategy", "raw_block_transfer"),
    "num_blocks": (5, 6, 7),
    "min_blocks": (2, 3, 2),
    "max_gpu_mem_fraction": (0.5, 0.6, None),
    "profile_storage_dir": ("/one", "/two", None),
    "profile_read_only": (True, False, True),
    "load_strategy": (None, None, STRATEGY),
    "enable_instrumentation": (True, False, True),
    "instrumentation_output_dir": ("/one", "/two", "/three"),
    "offload_timing": ("eager", "cuda_graph", "off"),
    "piecewise_prefetch": ("error", "off", "warn"),
    "include_patterns": (["a.*", "b"], [], ["c"]),
    "exclude_patterns": (["a"], ["class:*B", "name:c"], []),
    "enable_diagnostics": (True, False, True),
    "profile_mode": ("getter", "view", "getter"),
}


def test_the_levels_cover_every_field_and_differ():
    assert list(LEVELS) == list(OffloadConfig.model_fields)
    for key, (in_file, in_environment, argument) in LEVELS.items():
        values = [getattr(OffloadConfig(), key), in_file, in_environment, argument]
        if key != "load_strategy":
            assert all(first != second for first, second in itertools.pairwise(values)), key


@pytest.mark.parametrize("key", LEVELS)
def test_precedence(tmp_path, key):
    in_file, in_environment, argument = LEVELS[key]
    for suffix, write in WRITERS.items():
        path = tmp_path / f"offload.{suffix}"
        # a namespace, so that shm_enabled has what it needs
        path.write_text(write({"shm_namespace": "base"} | {key: in_file}))
        with environment():
            assert getattr(load_config(path), key) == in_file
            assert getattr(load_config_from_file(path), key) == in_file
        with environment(**{f"FT_{key.upper()}": plain(in_environment)}):
            assert getattr(load_config(path), key) == in_environment
            assert getattr(load_config(path, use_env=False), key) == in_file
            assert getattr(load_config_from_file(path), key) == in_file
            assert getattr(load_config(path, **{key: argument}), key) == argument
            assert getattr(load_config_from_file(path, **{key: argument}), key) == argument
    with environment(**{"FT_SHM_NAMESPACE": "base"} | {f"FT_{key.upper()}": plain(in_environment)}):
        assert getattr(load_config_from_env(), key) == in_environment
        assert getattr(load_config(), key) == in_environment
        assert getattr(load_config_from_env(**{key: argument}), key) == argument


def test_levels_are_merged_field_by_field(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("num_blocks: 8\nmin_blocks: 2\ngpu_device: 1\n")
    with environment(FT_MIN_BLOCKS="3", FT_GPU_DEVICE="2"):
        config = load_config(path, gpu_device=3)
    assert config == OffloadConfig(num_blocks=8, min_blocks=3, gpu_device=3)
    assert config.model_fields_set == {"num_blocks", "min_blocks", "gpu_device"}


def test_enabled_is_false_only_where_the_environment_stands_alone(tmp_path):
    path = tmp_path / "c.json"
    path.write_text("{}")
    with environment():
        assert not load_config().enabled
        assert not load_config(num_blocks=5).enabled
        assert not load_config_from_env().enabled
        assert load_config(enabled=True).enabled
        assert load_config_from_env(enabled=True).enabled
        assert load_config(use_env=False).enabled
        assert load_config(path).enabled
        assert load_config_from_file(path).enabled
    with environment(FT_CONFIG_FILE=str(path)):
        assert load_config().enabled
        assert not load_config_from_env().enabled
    with environment(FT_ENABLED="1"):
        assert load_config().enabled
        assert load_config_from_env().enabled


def test_where_the_path_comes_from(tmp_path, monkeypatch):
    for name, count in (("a.ini", 5), ("b.ini", 6)):
        (tmp_path / name).write_text(ini({"num_blocks": count}))
    a, b = str(tmp_path / "a.ini"), str(tmp_path / "b.ini")
    monkeypatch.chdir(tmp_path)
    with environment(FT_CONFIG_FILE=a, MY_FILE=b, HOME=str(tmp_path)):
        assert load_config().num_blocks == 5
        assert load_config(use_env=False).num_blocks == 5
        assert load_config_from_file().num_blocks == 5
        assert load_config(b).num_blocks == 6
        assert load_config(config_file_env_var="MY_FILE", use_env=False).num_blocks == 6
        assert load_config_from_file(env_var="MY_FILE").num_blocks == 6
        assert load_config_from_file("~/b.ini").num_blocks == 6
        assert load_config_from_file("b.ini").num_blocks == 6
        assert load_config_from_file(Path("b.ini"), num_blocks=7).num_blocks == 7
    with environment(FT_CONFIG_FILE=""):
        assert load_config().num_blocks == 4
        with pytest.raises(FileNotFoundError, match=r"found neither an argument nor \$FT_CONFIG_FILE"):
            load_config_from_file()


@pytest.mark.parametrize("name", ["nope.yaml", "nope.toml", "nope", "file.ini/nope.yaml", "dangling.json"])
def test_a_missing_file_is_a_file_not_found_error(tmp_path, name):
    (tmp_path / "file.ini").write_text("[ftd]\n")
    (tmp_path / "dangling.json").symlink_to(tmp_path / "nowhere")
    path = tmp_path / name
    for call in (
        lambda: load_config(path),
        lambda: load_config_from_file(str(path)),
        load_config,
        lambda: load_config(use_env=False),
    ):
        with environment(FT_CONFIG_FILE=str(path)), pytest.raises(FileNotFoundError) as caught:
            call()
        error = caught.value
        assert isinstance(error, ConfigError)
        assert error.exit_status == 2
        assert str(path) in error.message
        assert error.remedy
        for one in (error, pickle.loads(pickle.dumps(error))):
            assert (str(one), one.errno, one.filename) == (str(error), errno.ENOENT, str(path))


@pytest.mark.parametrize("name", ["c.toml", "c", "c.yaml.bak", "c.safetensors", ".yaml"])
def test_an_unsupported_format_is_a_value_error(tmp_path, name):
    (tmp_path / name).write_text("num_blocks: 5\n")
    with environment(), pytest.raises(ValueError) as caught:
        load_config(tmp_path / name)
    assert "expected .conf, .ini, .json, .yaml or .yml" in caught.value.message


@pytest.mark.parametrize("name", ["C.YAML", "c.Yml", "c.x.yaml"])
def test_extensions_have_no_case(tmp_path, name):
    (tmp_path / name).write_text("num_blocks: 5\n")
    with environment():
        assert load_config(tmp_path / name).num_blocks == 5


def test_what_is_no_readable_file_is_a_value_error(tmp_path):
    (tmp_path / "dir.yaml").mkdir()
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe")
    (tmp_path / "large.ini").write_bytes(b"#" * (1 << 20) + b"\n")
    for name, found in [
        ("dir.yaml", "a directory"),
        ("pipe.yaml", "a device or pipe"),
        ("binary.json", "no UTF-8"),
        ("large.ini", "more than"),
        ("nul\0.ini", "null byte"),
    ]:
        with environment(), pytest.raises(ValueError, match=found) as caught:
            load_config(tmp_path / name)
        assert isinstance(caught.value, OffloadConfigError)
        assert caught.value.remedy == "correct config_path"


def test_a_file_that_may_not_be_read_is_a_value_error(monkeypatch):
    def refuse(path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    # root, who runs the tests in a container, may read everything
    monkeypatch.setattr("ftd.config.load_offload.read_text", refuse)
    with environment(), pytest.raises(OffloadConfigError, match=r"c\.ini: permission denied, expected a readable"):
        load_config("/c.ini")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *((word, True) for word in ("1", "true", "TRUE", "yes", "On", "y", "t", " true ")),
        *((word, False) for word in ("0", "false", "False", "no", "OFF", "n", "f")),
    ],
)
def test_booleans_in_the_environment(text, value):
    with environment(FT_ENABLED=text, FT_PINNED_MEMORY=text):
        config = load_config_from_env()
    assert (config.enabled, config.pinned_memory) == (value, value)


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("num_blocks", " 5 ", 5),
        ("gpu_device", "+1", 1),
        ("shm_wait_timeout", "2", 2.0),
        ("transfer_budget_scale", "9e-1", 0.9),
        ("max_gpu_mem_fraction", "0.9", 0.9),
        *(("max_gpu_mem_fraction", text, None) for text in ("none", "None", "NULL", "")),
        *(("shm_namespace", text, None) for text in ("none", "null", "")),
        ("shm_namespace", "1", "1"),
        ("shm_namespace", "true", "true"),
        ("profile_storage_dir", " /a b ", " /a b "),
        ("profile_storage_dir", "/x%2F50%", "/x%2F50%"),
        ("offload_timing", "off", "off"),
        ("load_strategy", "none", None),
        ("include_patterns", "a.*,b.*", ["a.*", "b.*"]),
        ("include_patterns", " a.*, b.* ,", ["a.*", "b.*"]),
        ("include_patterns", "a", ["a"]),
        ("include_patterns", "", []),
        ("include_patterns", "1,true,none", ["1", "true", "none"]),
        ("exclude_patterns", "class:*Expert*, name:a", ["class:*Expert*", "name:a"]),
    ],
)
def test_text_in_the_environment_and_in_an_ini_file(tmp_path, key, text, value):
    with environment(**{f"FT_{key.upper()}": text}):
        assert getattr(load_config_from_env(), key) == value
    (tmp_path / "c.ini").write_text(f"[flextensor]\n{key} = {text}\n")
    with environment():
        # configparser takes away the blanks around a value
        expected = value.strip() if isinstance(value, str) else value
        assert getattr(load_config_from_file(tmp_path / "c.ini"), key) == expected


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("enabled", "maybe"),
        ("enabled", ""),
        ("enabled", "none"),
        ("num_blocks", "true"),
        ("num_blocks", "yes"),
        ("num_blocks", "5.0"),
        ("num_blocks", "5x"),
        ("num_blocks", ""),
        ("num_blocks", "none"),
        ("max_gpu_mem_fraction", "true"),
        ("max_gpu_mem_fraction", "nan"),
        ("max_gpu_mem_fraction", "90%"),
        ("shm_wait_timeout", "inf"),
        ("shm_wait_timeout", "30s"),
        ("shm_namespace", "a/b"),
        ("profile_mode", "VIEW"),
        ("load_strategy", "auto"),
        ("instrumentation_output_dir", "none"),
        ("include_patterns", "none"),
        ("include_patterns", '["a"]'),
        ("exclude_patterns", "cls:A"),
    ],
)
def test_text_that_is_refused(tmp_path, key, text):
    with environment(**{f"FT_{key.upper()}": text}), pytest.raises(ValueError) as caught:
        load_config_from_env()
    assert caught.value.message.startswith(key)
    assert caught.value.remedy == f"correct $FT_{key.upper()}"
    (tmp_path / "c.conf").write_text(f"[ftd]\n{key} = {text}\n")
    with environment(), pytest.raises(ValueError) as caught:
        load_config_from_file(tmp_path / "c.conf")
    assert caught.value.message.startswith(key)


@pytest.mark.parametrize("name", ["FT_NAMESPCE", "FT_SHM__NAMESPACE", "FT_enabled", "FT_", "FT_CONFIG", "FT_SHM_SIZE"])
def test_an_unknown_variable_is_an_error_with_the_nearest_name(name):
    for call in (load_config, load_config_from_env):
        with environment(**{name: "x"}), pytest.raises(ValueError) as caught:
            call()
        assert caught.value.message.startswith(f"unknown variable {name}: the nearest known one is FT_")
        assert caught.value.remedy == f"correct ${name}"
    with environment(**{name: "x"}):
        assert load_config(use_env=False) == OffloadConfig()


def test_other_variables_are_nobodys_business():
    with environment(FTD_CONFIG="x", FTX="1", ft_num_blocks="5", MY_FT_X="1", FT_CONFIG_FILE=""):
        assert load_config_from_env() == OffloadConfig(enabled=False)


def test_another_prefix(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("num_blocks: 9\n")
    with environment(FT_NUM_BLOCKS="5", FT_NOPE="1", APP_NUM_BLOCKS="6", APP_CONFIG_FILE=str(path)):
        assert load_config_from_env("APP_").num_blocks == 6
        assert load_config(env_prefix="APP_", config_file_env_var="APP_CONFIG_FILE").num_blocks == 6
        # set, and yet not what is read: nobody should have to find that out
        with pytest.raises(ValueError, match="unknown variable APP_CONFIG_FILE"):
            load_config(env_prefix="APP_")
    with environment(FT_CONFIG_FILE="nowhere", MY_FILE=str(path)):
        assert load_config(config_file_env_var="MY_FILE").num_blocks == 9
    with environment(NUM_BLOCKS="6", NUMBLOCKS="7"):
        assert load_config_from_env("").num_blocks == 6


UNKNOWN = {
    "c.ini": "[flextensor]\nnumblocks = 5\n",
    "c.json": '{"numblocks": 5}',
    "c.yaml": "numblocks: 5\n",
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_key_is_an_error_with_the_nearest_name(tmp_path, name):
    (tmp_path / name).write_text(UNKNOWN[name])
    with (
        environment(),
        pytest.raises(ValueError, match="unknown key 'numblocks': the nearest known one is 'num_blocks'"),
    ):
        load_config_from_file(tmp_path / name)


def test_an_unknown_argument_is_an_error_with_the_nearest_name():
    for call in (load_config, load_config_from_env):
        with environment(), pytest.raises(ValueError, match=r"'include_pattern': .* 'include_patterns'"):
            call(include_pattern=["a"])


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("c.ini", "", "found no section, expected one section"),
        ("c.ini", "num_blocks=5\n", "line 1: found no section before it"),
        ("c.ini", "[flextensr]\nnum_blocks=5\n", r"found \[flextensr\], expected one section \[flextensor\]"),
        ("c.ini", "[FlexTensor]\n", r"found \[FlexTensor\]"),
        ("c.ini", "[ftd]\n[flextensor]\n", r"found \[flextensor\] and \[ftd\], expected one"),
        ("c.ini", "[ftd]\nnum_blocks=5\nNUM_BLOCKS=6\n", "line 3: num_blocks: found again"),
        ("c.ini", "[ftd]\n[ftd]\n", r"line 2: section \[ftd\] found again"),
        ("c.ini", "[ftd]\nnum_blocks\n", "line 2: found no `key = value`"),
        ("c.json", "", "line 1, column 1"),
        ("c.json", "[]", "found no object"),
        ("c.json", "null", "found no object"),
        ("c.json", '{"num_blocks": 5,}', "line 1, column"),
        ("c.json", '{"num_blocks": 5, "num_blocks": 6}', "num_blocks: found again"),
        ("c.json", '{"max_gpu_mem_fraction": NaN}', "found NaN, expected a number"),
        ("c.json", '{"num_blocks": 1' + "0" * 5000 + "}", "too long"),
        ("c.json", '{"a":' + "[" * 100_000, "nested too deeply|column"),
        ("c.json", '{"num_blocks": true}', "num_blocks: found true, expected a whole number"),
        ("c.json", '{"include_patterns": "a"}', "found 'a', expected a list"),
        ("c.json", '{"include_patterns": null}', "found nothing, expected a list"),
        ("c.json", '{"flextensor": {"num_blocks": 5}}', "flextensor: found a section, expected its keys at the top"),
        ("c.yaml", "[a]", "found a list, expected"),
        ("c.yaml", "a", "found a single value"),
        ("c.yaml", "a: b: c", "line 1, column"),
        ("c.yaml", "num_blocks: 5\nnum_blocks: 6\n", "num_blocks: found again, expected once .*line 2"),
        ("c.yaml", "exclude_patterns: [*.norm]", "YAML reads a leading"),
        ("c.yaml", "ftd:\n  num_blocks: 5\n", "ftd: found a section"),
    ],
)
def test_broken_files(tmp_path, name, text, found):
    path = tmp_path / name
    path.write_text(text)
    with environment(), pytest.raises(ValueError, match=found) as caught:
        load_config_from_file(path)
    assert isinstance(caught.value, OffloadConfigError)
    assert str(path) in caught.value.message
    assert "\n" not in caught.value.message
    assert caught.value.remedy == f"correct {path}"


def test_an_ini_file_may_hold_more_than_ours(tmp_path):
    path = tmp_path / "c.ini"
    path.write_text(
        "[DEFAULT]\nGPU_DEVICE: 1\n[logging]\nlevel = %(x)s\n[flextensor]\n; a comment\n"
        "profile_storage_dir = /p%2F50%/%(home)s\ninclude_patterns =\n  model.layers.*\n  head, tail\nmin_blocks = 2\n"
    )
    with environment():
        assert load_config_from_file(path) == OffloadConfig(
            gpu_device=1,
            min_blocks=2,
            profile_storage_dir="/p%2F50%/%(home)s",
            include_patterns=["model.layers.*", "head", "tail"],
        )


def test_an_empty_yaml_or_json_file_is_the_defaults(tmp_path):
    for name, text in (("c.yaml", ""), ("d.yml", "# nothing\n"), ("e.json", "\ufeff{}")):
        (tmp_path / name).write_text(text)
        with environment():
            assert load_config_from_file(tmp_path / name) == OffloadConfig()


def test_errors_of_all_levels_come_at_once(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("gpu: 1\nnum_blocks: no\n")
    with environment(FT_PROFILING_ITERS="-1", FT_X="1"), pytest.raises(OffloadConfigError) as caught:
        load_config(path, profile_mode="views", nope=1)
    problems = caught.value.message.split("; ")
    assert [problem.split(":")[0] for problem in problems] == [
        "unknown key 'gpu'",
        "unknown variable FT_X",
        "unknown argument 'nope'",
        "profiling_iters",
        "num_blocks",
        "profile_mode",
    ]
    assert caught.value.remedy == f"correct {path}, $FT_X, the arguments and $FT_PROFILING_ITERS"


# --- round trips ------------------------------------------------------------------------------------------------------

letters = st.characters(codec="utf-8", exclude_categories=("C", "Z"), include_characters=" %#;=:'\"\\")
directories = st.text(letters, min_size=1, max_size=12).filter(
    lambda text: text == text.strip() and text.lower() not in ("", "none", "null")
)
globs = st.lists(st.text("ab0*?_", min_size=1, max_size=4), min_size=1, max_size=3).map(".".join)
some_patterns = st.lists(st.one_of(globs, globs.map("class:{}".format), globs.map("name:{}".format)), max_size=3)


@st.composite
def configurations(draw):
    most = draw(st.integers(2, 9))
    mode = draw(st.sampled_from(["allocation_block_transfer", "raw_block_transfer", "strategy"]))
    blocks = mode != "strategy"
    values = {
        "enabled": draw(st.booleans()),
        "gpu_device": draw(st.integers(0, 99)),
        "pinned_memory_mode": draw(st.sampled_from(["torch", "host_register"])),
        "shm_enabled": draw(st.booleans()),
        "shm_namespace": draw(st.from_regex(r"[a-z0-9][a-z0-9._-]{0,9}", fullmatch=True)),
        "shm_wait_timeout": draw(st.floats(0, 1e9)),
        "profiling_iters": draw(st.integers(0, 10**6)),
        "external_compile": draw(st.booleans()) and blocks,
        "transfer_budget_scale": draw(st.floats(0, 100, exclude_min=True)),
        "transfer_mode": mode,
        "num_blocks": most,
        "min_blocks": draw(st.integers(2, most)),
        "max_gpu_mem_fraction": draw(st.none() | st.floats(0, 1, exclude_min=True)),
        "profile_storage_dir": draw(st.none() | directories),
        "instrumentation_output_dir": draw(directories),
        "offload_timing": draw(st.sampled_from(["off", "eager"])) if blocks else "off",
        "piecewise_prefetch": draw(st.sampled_from(["off", "warn", "error"])),
        "include_patterns": draw(some_patterns),
        "exclude_patterns": draw(some_patterns),
        "profile_mode": draw(st.sampled_from(["view", "getter"])) if blocks else "torch_function",
    }
    if not values["shm_enabled"] and values["shm_namespace"] in ("none", "null"):
        values["shm_namespace"] = None
    kept = draw(st.sets(st.sampled_from(sorted(values))))
    # fields that rule one another out or in stay together
    tied = {"shm_enabled", "shm_namespace", "num_blocks", "min_blocks"}
    tied |= {"transfer_mode", "external_compile", "offload_timing", "profile_mode"}
    values = {key: value for key, value in values.items() if key in kept | tied}
    return OffloadConfig(**values)


@given(configurations())
@settings(max_examples=30, deadline=None)
def test_every_format_gives_a_configuration_back(config):
    values = {key: getattr(config, key) for key in config.model_fields_set}
    with tempfile.TemporaryDirectory() as directory:
        for suffix, write in WRITERS.items():
            path = Path(directory, f"c.{suffix}")
            path.write_text(write(values), encoding="utf-8")
            with environment():
                loaded = load_config_from_file(path)
            assert loaded == config
            assert loaded.model_fields_set == config.model_fields_set
    variables = {f"FT_{key.upper()}": plain(value) for key, value in values.items()}
    with environment(**variables):
        assert load_config_from_env(enabled=config.enabled) == config


texts = st.text(st.characters(codec="utf-8"), max_size=60)
keys = st.sampled_from([*OffloadConfig.model_fields, "nope", "*", "enabled\n"])
lines = st.lists(st.tuples(keys, st.sampled_from([": ", " = ", "="]), texts).map("".join), max_size=4).map("\n".join)


@given(st.one_of(texts, lines, lines.map("[ftd]\n{}".format)), st.sampled_from(sorted(WRITERS)), keys, texts)
@settings(max_examples=100, deadline=None)
def test_nothing_that_a_user_writes_ends_in_another_error(text, suffix, key, value):
    variables = {f"FT_{key.upper()}": value} if "\0" not in value else {}
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, f"c.{suffix}")
        path.write_text(text, encoding="utf-8")
        with environment(**variables):
            try:
                assert isinstance(load_config(path), OffloadConfig)
            except ValueError as error:
                assert isinstance(error, FtdError)
                assert error.exit_status == 2
                assert error.remedy
                assert "\n" not in error.message
