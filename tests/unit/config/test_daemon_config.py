"""The model of the daemon's configuration: defaults, accepted and refused values."""

import pytest
from pydantic import ValidationError

from ftd.config import model as module
from ftd.config.fields import size_text
from ftd.config.model import NOT_BUILT, DaemonConfig, expected_text
from ftd.errors import EXIT_USAGE, NotBuiltError
from ftd.units import parse_bytes

GIB = 1 << 30


def test_defaults_are_those_of_the_contract(monkeypatch):
    monkeypatch.setattr(module, "usable_cores", lambda: 64)
    assert DaemonConfig().model_dump() == {
        "model": None,
        "receive": False,
        "pin": "auto",
        "push": "auto",
        "device": None,
        "huge_pages": "auto",
        "numa": "none",
        "mode": 0o640,
        "group": None,
        "memory_budget": None,
        "read_threads": 16,
        "verify": "fingerprint",
        "heartbeat_s": 1.0,
        "lease_timeout_s": 30.0,
        "on_stop": "unlink",
        "metrics_address": None,
        "allow_types": None,
        "layers": None,
    }
    monkeypatch.setattr(module, "usable_cores", lambda: 3)
    assert DaemonConfig().read_threads == 3


@pytest.mark.parametrize(
    ("key", "given", "value"),
    [
        ("receive", True, True),
        ("pin", "mlock", "mlock"),
        ("device", "auto", None),
        ("device", "1", 1),
        ("device", 0, 0),
        ("huge_pages", "require", "require"),
        ("numa", "interleave", "interleave"),
        ("numa", "bind:1", "bind:1"),
        ("mode", "0640", 0o640),
        ("mode", "640", 0o640),
        ("mode", "0o640", 0o640),
        ("mode", 0o640, 0o640),
        ("mode", "600", 0o600),
        ("mode", "0644", 0o644),
        ("group", "inference", "inference"),
        ("group", 0, 0),
        ("memory_budget", "8GiB", 8 * GIB),
        ("memory_budget", "1.5 GB", 1_500_000_000),
        ("memory_budget", 4096, 4096),
        ("memory_budget", None, None),
        ("read_threads", 256, 256),
        ("read_threads", "8", 8),
        ("heartbeat_s", 0.001, 0.001),
        ("lease_timeout_s", 2.001, 2.001),
        ("layers", ["a.*", "b"], ("a.*", "b")),
        ("layers", [], ()),
    ],
)
def test_accepted(key, given, value):
    assert getattr(DaemonConfig(**{key: given}), key) == value


@pytest.mark.parametrize(
    ("key", "given"),
    [
        *((key, True) for key in DaemonConfig.model_fields if key != "receive"),
        *((key, False) for key in DaemonConfig.model_fields if key != "receive"),
        *((key, {}) for key in DaemonConfig.model_fields),
        *((key, "") for key in DaemonConfig.model_fields),
        *((key, float("nan")) for key in DaemonConfig.model_fields),
        *((key, float("inf")) for key in DaemonConfig.model_fields),
        *(
            (key, "nan")
            for key in ("heartbeat_s", "lease_timeout_s", "read_threads", "device", "memory_budget", "mode")
        ),
        ("model", "a\0b"),
        ("receive", None),
        ("receive", 1),
        ("receive", "true"),
        ("pin", None),
        ("pin", "CUDA"),
        ("device", -1),
        ("device", "cuda:0"),
        ("device", 1.5),
        ("device", 10**30),
        ("numa", "bind:"),
        ("numa", "bind:x"),
        ("numa", "bind:-1"),
        ("numa", "bind:0\n"),
        ("mode", "0755"),  # execute
        ("mode", "0660"),  # followers could change weights
        ("mode", "0646"),
        ("mode", "0440"),  # the owner cannot write
        ("mode", "0240"),  # the owner cannot read
        ("mode", "04640"),  # set-user-id
        ("mode", "0648"),
        ("mode", "-640"),
        ("mode", "416"),  # 0640 in decimal
        ("mode", 640),  # decimal 640 is 0o1200
        ("mode", 416.0),
        ("mode", None),
        ("group", -1),
        ("group", 2**32 - 1),  # chown(2) takes it for "leave as it is"
        ("group", 1.0),
        ("group", "a\0b"),
        ("memory_budget", 0),
        ("memory_budget", -1),
        ("memory_budget", 1.5),
        ("memory_budget", "8 gigs"),
        ("memory_budget", 2**63),
        ("memory_budget", "9" * 5000),
        ("read_threads", 0),
        ("read_threads", 257),
        ("read_threads", 1.5),
        ("read_threads", "9" * 5000),
        ("heartbeat_s", 0),
        ("heartbeat_s", -1),
        ("heartbeat_s", 10**400),
        ("lease_timeout_s", 2),  # not above twice the heartbeat
        ("lease_timeout_s", 1e9),  # poll(2) cannot wait that long
        ("layers", "a.*"),
        ("layers", [1]),
        ("layers", [["a"]]),
        ("layers", ["a.[0-9]"]),
        ("unknown", 1),
    ],
)
def test_refused(key, given):
    with pytest.raises(ValidationError) as caught:
        DaemonConfig(**{key: given})
    assert {error["loc"][0] for error in caught.value.errors()} == {key}


def test_lease_timeout_is_checked_against_a_heartbeat_that_outgrows_its_default():
    with pytest.raises(ValidationError) as caught:
        DaemonConfig(heartbeat_s=15)
    assert [error["loc"] for error in caught.value.errors()] == [("lease_timeout_s",)]
    assert DaemonConfig(heartbeat_s=15, lease_timeout_s=31).lease_timeout_s == 31


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("on_stop", "keep", "on_stop: 'keep' is not built yet in ftd 0.1.0; expected 'unlink'"),
        ("metrics_address", ":9", "metrics_address: ':9' is not built yet in ftd 0.1.0; expected no value"),
    ],
)
def test_not_built(key, value, message, monkeypatch):
    monkeypatch.setattr(module, "__version__", "0.1.0")
    with pytest.raises(NotBuiltError) as caught:
        DaemonConfig(**{key: value})
    assert caught.value.message == message
    assert caught.value.exit_status == EXIT_USAGE


def test_the_built_values_are_the_defaults():
    config = DaemonConfig()
    assert {key: getattr(config, key) for key in NOT_BUILT} == dict(NOT_BUILT)


def test_is_frozen():
    with pytest.raises(ValidationError):
        DaemonConfig().pin = "none"


@pytest.mark.parametrize("key", DaemonConfig.model_fields)
def test_every_field_is_documented_and_says_what_it_expects(key):
    assert DaemonConfig.model_fields[key].description
    assert expected_text(key)


@pytest.mark.parametrize("count", [1, 1000, 1024, 8 * GIB, 8 * GIB + 1, 3 << 40, 1 << 62])
def test_sizes_are_written_exactly(count):
    assert parse_bytes(size_text(count)) == count


def test_sizes_are_written_shortly():
    assert [size_text(8 * GIB), size_text(1536), size_text(1023)] == ["8GiB", "1536", "1023"]
