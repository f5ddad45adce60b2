"""What users mistype, and where daemons cannot live: status 2, the rule in the message, no work begun."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from ftd.daemon.status import report
from ftd.errors import EXIT_USAGE
from tests.process.daemons import Daemon, ftd, left_in, refused, segments

Start = Callable[..., Daemon]

RULE = "1 to 64 of A-Z a-z 0-9 . _ -"


class TestNamespaces:
    """SH-15: judged before anything is looked at, by every command alike."""

    @pytest.mark.parametrize("name", ["", "..", "a/b", ".hidden", "a\n", "x" * 65])
    def test_are_refused(self, name: str, runtime_dir: Path, model: Path) -> None:
        refused(ftd("start", f"--namespace={name}", "--model", model), EXIT_USAGE, RULE)
        assert list(runtime_dir.iterdir()) == []

    @pytest.mark.parametrize("command", [("start", "--model", "x", "--detach"), ("status",), ("stop",)])
    def test_are_refused_by_every_command(self, command: tuple[str, ...], runtime_dir: Path) -> None:
        refused(ftd(*command, "--namespace=../x"), EXIT_USAGE, RULE, "'../x'")
        assert list(runtime_dir.iterdir()) == []

    def test_the_longest(self, start: Start, runtime_dir: Path, namespace: str, model: Path) -> None:
        longest = namespace.ljust(64, "x")
        with Daemon(longest, "--model", model) as daemon:
            daemon.wait_ready()
            assert ftd("status", "-n", longest).status == 0

    def test_only_digits(self, runtime_dir: Path, model: Path) -> None:
        name = f"{os.getpid()}00"
        with Daemon(name, "--model", model) as daemon:
            daemon.wait_ready()
            assert daemon.status()["namespace"] == name
        assert segments(name) == []


class TestCommandLine:
    """Usage and configuration."""

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (("start",), ("--namespace",)),
            (("start", "-n", "x", "--detatch"), ("--detatch",)),
            (("start", "-n", "x", "--model", "", "--detach"), ("--model: found ''",)),
            (("stop", "-n", "x", "--timeout", "soon"), ("soon",)),
            (("status", "-n", "x", "--wait-ready", "-1"), ("-1",)),
            (("status", "--wait-ready", "1"), ("--wait-ready",)),
        ],
    )
    def test_usage(self, arguments: tuple[str, ...], words: tuple[str, ...], runtime_dir: Path) -> None:
        refused(ftd(*arguments), EXIT_USAGE, *words)

    @pytest.mark.parametrize(
        ("sets", "words"),
        [
            (("read_thread=2",), ("read_thread", "read_threads")),
            (("read_threads=many",), ("read_threads", "many")),
            (("heartbeat_s=1", "lease_timeout_s=1"), ("lease_timeout_s", "heartbeat_s")),
            (("nonsense",), ("nonsense",)),
        ],
    )
    def test_configuration(
        self, sets: tuple[str, ...], words: tuple[str, ...], namespace: str, runtime_dir: Path, model: Path
    ) -> None:
        arguments = [part for value in sets for part in ("--set", value)]
        refused(ftd("start", "-n", namespace, "--model", model, *arguments), EXIT_USAGE, *words)
        assert segments(namespace) == []
        assert report(namespace, os.environ)["failure"]["code"] in ("config", "usage")

    def test_no_model_at_all(self, namespace: str, runtime_dir: Path, tmp_path: Path) -> None:
        nowhere = {"XDG_CONFIG_HOME": str(tmp_path), "FTD_CONFIG": ""}
        line = refused(ftd("start", "-n", namespace, environ=nowhere), EXIT_USAGE, "model")
        assert namespace in line
        assert segments(namespace) == []

    @pytest.mark.parametrize(
        "arguments",
        [
            ("reload", "-n", "x", "--model", "y"),
            ("sweep", "--dry-run"),
            ("top", "-n", "x"),
        ],
    )
    def test_commands_that_are_not_built(self, arguments: tuple[str, ...], runtime_dir: Path) -> None:
        refused(ftd(*arguments), EXIT_USAGE, f"ftd {arguments[0]}", "not built yet")

    @pytest.mark.parametrize("value", ["on_stop=keep", "metrics_address=127.0.0.1:9000"])
    def test_values_that_are_not_built(self, value: str, namespace: str, runtime_dir: Path, model: Path) -> None:
        result = ftd("start", "-n", namespace, "--model", model, "--set", value)
        refused(result, EXIT_USAGE, value.split("=", maxsplit=1)[0], "not built yet")
        assert segments(namespace) == []

    def test_values_that_are_built_may_be_said(
        self, start: Start, namespace: str, runtime_dir: Path, model: Path
    ) -> None:
        sets = ("push=auto", "numa=none", "verify=fingerprint", "on_stop=unlink")
        daemon = start("--model", model, *(part for value in sets for part in ("--set", value)))
        assert daemon.status()["state"] == "ready"


class TestRuntimeDirectory:
    """Where no socket can live, said before a segment exists."""

    @pytest.mark.parametrize("kind", ["a file", "below a file", "relative", "open to all"])
    def test_is_unusable(self, kind: str, namespace: str, tmp_path: Path, model: Path) -> None:
        path = tmp_path / "run"
        if kind in ("a file", "below a file"):
            path.write_text("mine")
        if kind == "open to all":
            path.mkdir()
            path.chmod(0o777)
        given = {"below a file": str(path / "deeper"), "relative": "run/ftd"}.get(kind, str(path))
        for detach in ((), ("--detach",)) if kind == "a file" else ((),):
            result = ftd("start", "-n", namespace, "--model", model, *detach, environ={"FTD_RUNTIME_DIR": given})
            refused(result, EXIT_USAGE, given)
            assert "FTD_RUNTIME_DIR" in result.err
        assert segments(namespace) == []
        assert kind not in ("a file", "below a file") or path.read_text() == "mine"

    @pytest.mark.parametrize(("length", "fits"), [(107, True), (108, False)])
    def test_the_socket_path(
        self, start: Start, namespace: str, runtime_dir: Path, model: Path, length: int, fits: bool
    ) -> None:
        """US-01: so many bytes of path; the kernel takes 107. The reason is kept where a directory can keep it."""
        folder = runtime_dir / ("d" * (length - len(f"{runtime_dir}//{namespace}.sock")))
        environ = {"FTD_RUNTIME_DIR": str(folder)}
        if fits:
            assert start("--model", model, environ=environ).look().locked
            assert ftd("status", "-n", namespace, environ=environ).status == 0
            return
        result = ftd("start", "-n", namespace, "--model", model, environ=environ)
        refused(result, EXIT_USAGE, f"{length} bytes", "at most 107")
        assert segments(namespace) == []
        shown = ftd("status", "-n", namespace, "--json", environ=environ)
        assert (shown.status, shown.json["failure"]["code"]) == (1, "runtime_dir")

    @pytest.mark.parametrize("kind", ["file", "link"])
    def test_something_else_at_the_sockets_path(
        self, kind: str, namespace: str, runtime_dir: Path, model: Path
    ) -> None:
        """US-05: what no daemon made is never deleted."""
        path = runtime_dir / f"{namespace}.sock"
        {
            "file": lambda: path.write_text("mine"),
            "link": lambda: path.symlink_to("nowhere"),
        }[kind]()
        mode = path.lstat().st_mode
        refused(ftd("start", "-n", namespace, "--model", model), EXIT_USAGE, str(path), "expected nothing")
        assert segments(namespace) == []
        assert stat.S_IFMT(path.lstat().st_mode) == stat.S_IFMT(mode)
        assert ftd("stop", "-n", namespace, "--force").status == 3
        assert path.is_symlink() or path.exists()

    def test_a_socket_that_a_killed_daemon_left(
        self, start: Start, namespace: str, runtime_dir: Path, model: Path
    ) -> None:
        """US-03: nobody answers there, so it is reclaimed."""
        start("--model", model).kill()
        assert f"{namespace}.sock" in left_in(runtime_dir)
        assert start("--model", model).status()["state"] == "ready"


def test_no_command_at_all_shows_the_commands() -> None:
    result = ftd()
    assert (result.status, result.out) == (EXIT_USAGE, "")
    assert result.err.startswith("Usage: ftd") and "\n  start " in result.err
