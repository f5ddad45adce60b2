"""Order of the four places, origins, the model's path, warnings, rendering."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ftd.config import load as module
from ftd.config.load import load_daemon_config, render_origins
from ftd.config.model import DaemonConfig
from ftd.errors import ConfigError, NotBuiltError, UsageError


def test_every_place_in_its_turn(load, tmp_path):
    origin = f"file {tmp_path}/etc/ns.yaml"
    loaded = load("model: /file\npin: cuda\n", sets=["pin=mlock", "pin=none", "model=/set"], model=Path("/flag"))
    assert (loaded.config.pin, loaded.origins["pin"]) == ("none", "--set")
    assert (loaded.config.model, loaded.origins["model"]) == (Path("/flag"), "--model")
    loaded = load("model: /file\npin: cuda\n", sets=["model=/set"], model=None)
    assert (loaded.config.pin, loaded.origins["pin"]) == ("cuda", origin)
    assert (loaded.config.model, loaded.origins["model"]) == (Path("/set"), "--set")
    loaded = load("model: /file\n", model=None)
    assert (loaded.config.pin, loaded.origins["pin"]) == ("auto", "default")
    assert (loaded.config.model, loaded.origins["model"]) == (Path("/file"), origin)
    assert list(loaded.origins) == list(DaemonConfig.model_fields)


def test_a_set_value_replaces_even_an_invalid_one_of_the_file(load):
    assert load("pin: gpu", sets=["pin=none"]).config.pin == "none"


@pytest.mark.parametrize("written", ["0640", "640", "'0640'", '"640"', "0o640"])
def test_mode_is_octal_however_it_is_written(load, written):
    assert load(f"mode: {written}").config.mode == 0o640
    assert load("", sets=[f"mode={written}"]).config.mode == 0o640


def test_values_of_set(load):
    loaded = load(sets=["layers=[a.*, b.*]", " group = 100", "device=", "memory_budget=1GiB", "heartbeat_s=2"])
    config = loaded.config
    assert config.layers == ("a.*", "b.*")
    assert (config.group, config.device, config.memory_budget, config.heartbeat_s) == (100, None, 1 << 30, 2.0)
    assert load(sets=["group=a=b"]).config.group == "a=b"


@pytest.mark.parametrize("text", ["pin", "=cuda", " =cuda", ""])
def test_a_set_without_key_or_value_is_a_usage_error(load, text):
    with pytest.raises(UsageError) as caught:
        load(sets=[text])
    assert caught.value.exit_status == 2
    assert "KEY=VALUE" in caught.value.message


def test_where_a_relative_model_starts(load, tmp_path):
    (tmp_path / "etc/sub/m").mkdir(parents=True)
    assert load("model: sub/m", model=None).config.model == tmp_path / "etc/sub/m"
    assert load("model: ~/m", model=None).config.model == tmp_path / "home/m"
    assert load("model: sub/m", sets=["model=m"], model=None).config.model == tmp_path / "m"
    assert load("model: sub/m", model=Path("m")).config.model == tmp_path / "m"
    assert load(model=Path("~/m")).config.model == tmp_path / "home/m"
    assert load("model: '[odd] name #1'", model=None).config.model == tmp_path / "etc/[odd] name #1"


def test_the_name_of_a_model_on_the_hub_is_no_path_unless_something_is_there(load, tmp_path):
    assert load(model=Path("org/name")).config.model == Path("org/name")
    assert load("model: org/name@refs/pr/1", model=None).config.model == Path("org/name@refs/pr/1")
    assert load(model=Path("./org/name/x")).config.model == tmp_path / "org/name/x"
    assert load(model=Path("name")).config.model == tmp_path / "name"
    (tmp_path / "org").mkdir()
    (tmp_path / "org/name").symlink_to("gone")  # a path all the same, and one to be told about
    assert load(model=Path("org/name")).config.model == tmp_path / "org/name"


def test_a_file_through_a_link_starts_the_model_beside_the_link(load, tmp_path):
    (tmp_path / "real.yaml").write_text("model: m")
    (tmp_path / "etc/ns.yaml").symlink_to(tmp_path / "real.yaml")
    assert load(model=None).config.model == tmp_path / "etc/m"


@pytest.mark.parametrize("sets", [(), ("model=",), ("model=~",)])
def test_no_model_names_the_places_searched(load, tmp_path, sets):
    with pytest.raises(ConfigError) as caught:
        load(model=None, sets=sets)
    assert caught.value.message == (
        f"no model: expected --model, or `model:` in {tmp_path}/etc/ns.yaml or {tmp_path}/home/.config/ftd/ns.yaml"
    )
    assert caught.value.remedy == "give the checkpoint's path with --model"
    with pytest.raises(ConfigError) as caught:
        load("pin: cuda\nmodel:\n", model=None, sets=sets)
    assert caught.value.message == f"no model: expected --model, or `model:` in {tmp_path}/etc/ns.yaml"


def test_a_daemon_that_receives_needs_no_model(load):
    assert load("receive: true", model=None).config.receive
    assert load("pin: none", model=None, sets=["receive=yes"]).config.model is None


@pytest.mark.parametrize("text", ["receive: false", "receive: null", "receive: 'true'", "receive: 1"])
def test_a_daemon_that_does_not_receive_needs_one(load, text):
    with pytest.raises(ConfigError, match=r"no model: expected --model"):
        load(text, model=None)


def test_a_model_and_receiving_are_refused_with_their_origins(load):
    with pytest.raises(ConfigError, match=r"receive: true \(.*line 1\) and model \(--model\): expected one of them"):
        load("receive: true")


def test_a_file_that_cannot_be_read_is_not_blamed_for_the_model_too(load):
    for text in (b"\xff", b"a: b: c"):
        with pytest.raises(ConfigError) as caught:
            load(text, model=None, sets=["pin=gpu"])
        assert "no model" not in caught.value.message
        assert "pin: found 'gpu'" in caught.value.message


def test_not_built_values_name_their_place(load, tmp_path):
    with pytest.raises(NotBuiltError) as caught:
        load("pin: cuda\nmetrics_address: :9\nnuma: none\n", sets=["push=never", "on_stop=keep"])
    place = f"file {tmp_path}/etc/ns.yaml, line 2"
    assert caught.value.remedy == f"leave out on_stop (--set) and metrics_address ({place})"
    with pytest.raises(ConfigError, match="unknown key 'x'"):
        load("x: 1\non_stop: keep\n")


def test_unknown_variables_are_warned_of(load):
    warnings = load(environ={"FTD_CONFG": "/x", "FTD_RUNTIMEDIR": "/r", "FT_ENABLED": "1", "FTDX": "1"}).warnings
    assert warnings == (
        "environment variable FTD_CONFG is not known and has no effect: the nearest known one is FTD_CONFIG",
        "environment variable FTD_RUNTIMEDIR is not known and has no effect: the nearest known one is FTD_RUNTIME_DIR",
    )
    assert load(environ={"FTD_RUNTIME_DIR": "/r", "FTD_CONFIG": "", "FTD_DETACHED_LOG": "/l"}).warnings == ()


def test_rendered_values(load, tmp_path, monkeypatch):
    monkeypatch.setattr("ftd.config.model.usable_cores", lambda: 8)
    origin = f"file {tmp_path}/etc/ns.yaml"
    loaded = load(
        "memory_budget: 150GiB\nmode: 640\nlayers: [a.*, '*.b']\n",
        sets=["group='100'", "allow_types=[argparse.Namespace]"],
    )
    assert render_origins(loaded) == [
        ("model", "/m", "--model"),
        ("receive", "false", "default"),
        ("pin", "auto", "default"),
        ("push", "auto", "default"),
        ("device", "auto", "default"),
        ("huge_pages", "auto", "default"),
        ("numa", "none", "default"),
        ("mode", "0640", origin),
        ("group", '"100"', "--set"),
        ("memory_budget", "150GiB", origin),
        ("read_threads", "8", "default"),
        ("verify", "fingerprint", "default"),
        ("heartbeat_s", "1.0", "default"),
        ("lease_timeout_s", "30.0", "default"),
        ("on_stop", "unlink", "default"),
        ("metrics_address", "null", "default"),
        ("allow_types", "[argparse.Namespace]", "--set"),
        ("layers", '[a.*, "*.b"]', origin),
    ]


texts = st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\0"), min_size=1, max_size=8)
configs = st.fixed_dictionaries(
    {
        "model": texts.filter(lambda text: "/" not in text and text != ".").map(lambda text: Path("/models") / text),
        "pin": st.sampled_from(["auto", "cuda", "mlock", "none"]),
        "device": st.none() | st.integers(0, 1023),
        "mode": st.sampled_from([0o600, 0o640, 0o644]),
        "group": st.none() | texts | st.integers(0, 2**32 - 2),
        "memory_budget": st.none() | st.integers(1, 2**62),
        "read_threads": st.integers(1, 256),
        "heartbeat_s": st.floats(1e-6, 10),
        "lease_timeout_s": st.floats(20.5, 1e6),
        "allow_types": st.none() | st.lists(st.sampled_from(["argparse.Namespace", "a.b.C", "é.É"]), max_size=2),
        "layers": st.none() | st.lists(st.sampled_from(["a.*", "*.b", "no", "1", "a,b", "é #x"]), max_size=3),
    }
)


@given(configs)
@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_rendered_values_are_read_back_as_the_same_configuration(load, values):
    config = DaemonConfig(**values)
    rendered = render_origins(module.Loaded(config, dict.fromkeys(DaemonConfig.model_fields, "default")))
    sets = [f"{key}={text}" for key, text, _ in rendered]
    assert load_daemon_config("ns", sets=sets, environ={"HOME": "/nowhere"}).config == config


@given(st.text(st.characters(blacklist_categories=("Cs",)), max_size=60), st.lists(st.text(max_size=12), max_size=3))
@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_nothing_that_a_user_writes_ends_in_a_traceback(load, text, values):
    keys = list(DaemonConfig.model_fields)
    sets = [f"{keys[len(value) % len(keys)]}={value}" for value in values]
    try:
        load(text.encode(), sets=sets)
    except (ConfigError, NotBuiltError) as error:
        assert error.exit_status == 2
        assert error.message
        assert error.remedy
        assert "\n" not in error.message
