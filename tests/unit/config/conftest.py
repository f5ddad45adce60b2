"""A loader that sees only what a test wrote: no /etc/ftd, no home directory, no environment of the machine."""

from pathlib import Path

import pytest

from ftd.config import locate
from ftd.config.load import load_daemon_config


@pytest.fixture
def load(tmp_path, monkeypatch):
    """`load(text, **arguments)` for namespace `ns`; `text` becomes `<tmp>/etc/ns.yaml`, the system's file."""
    system = tmp_path / "etc"
    system.mkdir()
    monkeypatch.setattr(locate, "SYSTEM_DIR", system)
    monkeypatch.chdir(tmp_path)

    def call(text=None, *, sets=(), model=Path("/m"), config_file=None, environ=None):
        if text is not None:
            (system / "ns.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
        environ = {"HOME": str(tmp_path / "home")} | (environ or {})
        return load_daemon_config("ns", config_file=config_file, sets=sets, model=model, environ=environ)

    return call
