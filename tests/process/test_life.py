"""A daemon's life as the command line shows it: start, status, attach, stop, and their exit statuses."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

import ftd_client
from ftd.errors import EXIT_ALREADY_RUNNING, EXIT_NOT_READY, EXIT_NOT_RUNNING, EXIT_OK, EXIT_USAGE
from ftd.shm.numa import memory_nodes
from ftd.shm.state import State
from tests.process.checkpoints import TINY, TINY_DIGESTS, digests, held, tiny
from tests.process.daemons import QUICK, Command, Daemon, ftd, is_gone, left_in, polls, refused, segments, wait_for
from tests.process.workers import bytes_of

Start = Callable[..., Daemon]

#: The status object of the contract, to the last field.
FIELDS = {
    "namespace", "state", "stage", "pid", "uptime_s", "heartbeat_age_s", "generation", "fingerprint", "model",
    "segments", "progress", "followers", "pin", "push", "push_obstacle", "failure", "warnings", "versions",
}  # fmt: skip
FOLLOWER_FIELDS = {
    "pid", "state", "device", "generation", "attached_s", "heartbeat_age_s", "planned_bytes", "resident_bytes",
    "streamed_bytes", "pinned_bytes", "pin",
}  # fmt: skip


def read(namespace: str) -> dict[str, str]:
    """Digests of every tensor, by a follower that comes and goes."""
    with ftd_client.attach(namespace, timeout=0) as weights:
        return digests({name: bytes_of(tensor) for name, tensor in weights.state_dict().items()})


class TestStartAndStop:
    """The whole way, in the foreground and detached."""

    def test_in_the_foreground(self, start: Start, namespace: str, runtime_dir: Path, model: Path) -> None:
        daemon = start("--model", model)
        assert ftd("status", "-n", namespace).status == EXIT_OK
        assert read(namespace) == TINY_DIGESTS
        assert set(segments(namespace)) == {"lock", "coord", "slots", "g1.0", "g1.manifest", "g1.files"}
        stopped = ftd("stop", "-n", namespace)
        assert (stopped.status, stopped.out) == (EXIT_OK, f"{namespace}: stopped\n")
        assert daemon.ended() == EXIT_OK
        assert segments(namespace) == [] and left_in(runtime_dir) == []
        assert f"ready: generation 1, {len(TINY)} tensors" in daemon.log()

    def test_detached(self, namespace: str, runtime_dir: Path, model: Path) -> None:
        """Returns at READY: an attach that does not wait succeeds; the daemon is a session of its own."""
        started = ftd("start", "-n", namespace, "--model", model, "--detach")
        try:
            assert started.status == EXIT_OK and "ready" in started.out, started
            assert read(namespace) == TINY_DIGESTS
            shown = ftd("status", "-n", namespace, "--json").json
            assert f"pid {shown['pid']}" in started.out
            assert os.getsid(shown["pid"]) == shown["pid"]
            assert left_in(runtime_dir) == [f"{namespace}.log", f"{namespace}.sock"]
        finally:
            assert ftd("stop", "-n", namespace).status == EXIT_OK
        assert segments(namespace) == []
        wait_for("the daemon's end", lambda: is_gone(shown["pid"]))
        assert left_in(runtime_dir) == []

    def test_detached_failure_is_the_daemons_own(self, namespace: str, runtime_dir: Path, tmp_path: Path) -> None:
        failed = ftd("start", "-n", namespace, "--model", tmp_path / "nothing", "--detach")
        message = refused(failed, 2, str(tmp_path / "nothing"), "missing")
        shown = ftd("status", "-n", namespace, "--json")
        assert shown.status == 1
        assert message == f"ftd: {shown.json['failure']['message']}"
        assert segments(namespace) == []
        assert left_in(runtime_dir) == [f"{namespace}.failed.json", f"{namespace}.log"]

    def test_weights_outlive_the_daemon(self, start: Start, namespace: str, runtime_dir: Path, model: Path) -> None:
        """What a follower mapped stays readable after an orderly stop."""
        daemon = start("--model", model)
        with ftd_client.attach(namespace, timeout=0) as weights:
            assert ftd("stop", "-n", namespace).status == EXIT_OK
            assert daemon.ended() == EXIT_OK
            assert segments(namespace) == []
            found = digests({name: bytes_of(tensor) for name, tensor in weights.state_dict().items()})
        assert found == TINY_DIGESTS

    def test_sidecar_files_travel(self, start: Start, namespace: str, runtime_dir: Path, model: Path) -> None:
        start("--model", model)
        with ftd_client.attach(namespace, timeout=0) as weights:
            assert set(weights.files()) == {"config.json", "tokenizer.json"}
            assert weights.files()["config.json"] == (model / "config.json").read_bytes()

    def test_a_detached_daemon_that_is_killed(self, namespace: str, runtime_dir: Path, tmp_path: Path) -> None:
        """The parent says so instead of waiting for ever."""
        model = tiny(tmp_path / "model")
        with held(model / "config.json"):
            command = Command("start", "-n", namespace, "--model", model, "--detach")
            wait_for("segments", lambda: "g1.0" in segments(namespace))
            os.kill(ftd("status", "-n", namespace, "--json").json["pid"], 9)
            result = command.result()
        refused(result, 1, "ended with status -9")
        assert ftd("stop", "-n", namespace, "--force").status == EXIT_OK
        assert left_in(runtime_dir) == [f"{namespace}.log"]

    def test_a_parent_that_is_killed(
        self, namespace: str, runtime_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The detached daemon belongs to nobody: it becomes ready, and is stopped like any other."""
        monkeypatch.setenv("TMPDIR", str(runtime_dir))  # what kill -9 leaves there goes with it
        model = tiny(tmp_path / "model")
        with held(model / "config.json"):
            command = Command("start", "-n", namespace, "--model", model, "--detach")
            wait_for("segments", lambda: "g1.0" in segments(namespace))
            os.kill(command.pid, 9)
            assert command.result().status == -9
        assert ftd("status", "-n", namespace, "--wait-ready", "30").status == EXIT_OK
        assert read(namespace) == TINY_DIGESTS
        assert ftd("stop", "-n", namespace).status == EXIT_OK
        assert segments(namespace) == []

    def test_by_a_configuration_file(
        self, start: Start, namespace: str, runtime_dir: Path, tmp_path: Path, model: Path
    ) -> None:
        """Found by the namespace's name, as the unit starts it; every log line is JSON where that was asked for."""
        (tmp_path / "ftd").mkdir()
        (tmp_path / "ftd" / f"{namespace}.yaml").write_text(f"model: {model}\nheartbeat_s: 0.05\nmode: 0644\n")
        daemon = start("--log-format", "json", environ={"XDG_CONFIG_HOME": str(tmp_path), "FTD_CONFIG": ""})
        assert daemon.status()["model"]["source"] == str(model)
        assert daemon.terminate() == EXIT_OK
        lines = [json.loads(line) for line in daemon.log().splitlines()]
        assert [line["message"].split()[0] for line in lines] == ["ready:", "stopping"]


class TestSecondStart:
    """SH-10, LK-11: at most one daemon a namespace, wherever the second one looks from."""

    def test_is_refused_and_harms_nothing(self, start: Start, namespace: str, runtime_dir: Path, model: Path) -> None:
        daemon = start("--model", model)
        before = segments(namespace)
        for extra in ((), ("--detach",)):
            refused(
                ftd("start", "-n", namespace, "--model", model, *extra),
                EXIT_ALREADY_RUNNING, "already running", f"pid {daemon.pid}", "ready",
            )  # fmt: skip
        assert segments(namespace) == before
        assert read(namespace) == TINY_DIGESTS
        assert ftd("status", "-n", namespace).status == EXIT_OK

    def test_from_another_runtime_directory(self, start: Start, namespace: str, runtime_dir: Path, model: Path) -> None:
        daemon = start("--model", model)
        with tempfile.TemporaryDirectory(prefix="ftd-") as other:
            refused(
                ftd("start", "-n", namespace, "--model", model, environ={"FTD_RUNTIME_DIR": other}),
                EXIT_ALREADY_RUNNING, f"pid {daemon.pid}",
            )  # fmt: skip
            assert left_in(Path(other)) == []
            # who looks from there sees it all the same: shared memory says where its socket is
            shown = ftd("status", "-n", namespace, "--json", environ={"FTD_RUNTIME_DIR": other})
            assert (shown.status, shown.json["state"]) == (EXIT_OK, "ready")

    def test_while_the_first_loads(self, start: Start, namespace: str, runtime_dir: Path, tmp_path: Path) -> None:
        model = tiny(tmp_path)
        with held(model / "config.json"):
            daemon = start("--model", model, wait=False)
            daemon.wait(State.LOADING)
            refused(ftd("start", "-n", namespace, "--model", model), EXIT_ALREADY_RUNNING, "loading")
        daemon.wait_ready()
        assert read(namespace) == TINY_DIGESTS

    def test_replace(self, start: Start, namespace: str, runtime_dir: Path, model: Path) -> None:
        """`--replace` stops the first and takes its place; the follower of the first is told and goes on."""
        first = start("--model", model)
        told: list[str] = []
        with ftd_client.attach(namespace, timeout=0, on_lost=told.append) as weights:
            second = start("--model", model, "--replace")
            assert first.ended() == EXIT_OK
            assert second.status()["pid"] == second.pid
            wait_for("on_lost", lambda: told)
            assert told == ["stopped"] and weights.lost == "stopped"
            assert weights.generation == 1
            assert digests({n: bytes_of(t) for n, t in weights.state_dict().items()}) == TINY_DIGESTS

    def test_replace_of_nothing_starts(self, start: Start, namespace: str, runtime_dir: Path, model: Path) -> None:
        assert start("--model", model, "--replace").status()["state"] == "ready"

    def test_a_namespace_is_no_pattern(self, start: Start, namespace: str, runtime_dir: Path, model: Path) -> None:
        """SH-10: stopping `a` leaves `a_b`, `a.b` and `a.g1` alone, whose names begin alike."""
        start("--model", model)
        others = [Daemon(f"{namespace}{tail}", "--model", model) for tail in ("_b", ".b", ".g1")]
        try:
            for other in others:
                other.wait_ready()
            before = {other.namespace: segments(other.namespace) for other in others}
            assert ftd("stop", "-n", namespace).status == EXIT_OK
            assert {other.namespace: segments(other.namespace) for other in others} == before
            for other in others:
                assert read(other.namespace) == TINY_DIGESTS
        finally:
            for other in others:
                other.end()


class TestNotRunning:
    """Stop and status of what does not run."""

    def test_exit_statuses(self, namespace: str, runtime_dir: Path) -> None:
        refused(ftd("stop", "-n", namespace), EXIT_NOT_RUNNING, namespace, "not running")
        refused(ftd("stop", "-n", namespace, "--force"), EXIT_NOT_RUNNING, namespace, "not running")
        assert ftd("status", "-n", namespace).status == EXIT_NOT_RUNNING
        shown = ftd("status", "-n", namespace, "--json")
        assert shown.status == EXIT_NOT_RUNNING
        assert (shown.json["state"], shown.json["failure"], shown.json["warnings"]) == ("stopped", None, [])

    def test_the_last_failure_is_kept_until_somebody_stops_it(
        self, namespace: str, runtime_dir: Path, tmp_path: Path
    ) -> None:
        assert ftd("start", "-n", namespace, "--model", tmp_path / "nothing").status == 2
        shown = ftd("status", "-n", namespace, "--json")
        assert (shown.status, shown.json["state"], shown.json["failure"]["code"]) == (1, "failed", "config")
        refused(ftd("stop", "-n", namespace), EXIT_NOT_RUNNING, "its last start failed")
        assert ftd("status", "-n", namespace).status == EXIT_NOT_RUNNING
        assert left_in(runtime_dir) == []

    def test_a_good_start_forgets_the_failure(
        self, start: Start, namespace: str, runtime_dir: Path, model: Path
    ) -> None:
        assert ftd("start", "-n", namespace, "--model", model / "nothing").status == 2
        assert start("--model", model).status()["failure"] is None
        assert ftd("stop", "-n", namespace).status == EXIT_OK
        assert ftd("status", "-n", namespace).status == EXIT_NOT_RUNNING


class TestStatus:
    """What scripts read."""

    def test_the_object_is_the_contracts(self, start: Start, namespace: str, runtime_dir: Path, model: Path) -> None:
        daemon = start("--model", model)
        with ftd_client.attach(namespace, timeout=0):
            shown = ftd("status", "-n", namespace, "--json").json
        assert set(shown) == FIELDS
        assert set(shown["model"]) == {"source", "tensors", "bytes", "dtypes", "digest"}
        assert shown["model"] | {"source": "", "digest": ""} == {
            "source": "", "tensors": 4, "bytes": 896, "dtypes": {"BF16": 384, "F32": 512}, "digest": "",
        }  # fmt: skip
        assert [set(segment) for segment in shown["segments"]] == [
            {"name", "bytes", "page_bytes", "huge_bytes", "pinned_bytes", "node_bytes"}
        ]
        assert set(shown["progress"]) == {"bytes_done", "bytes_total", "bytes_per_s", "eta_s"}
        assert (shown["progress"]["bytes_done"], shown["progress"]["bytes_total"]) == (896, 896)
        assert [set(follower) for follower in shown["followers"]] == [FOLLOWER_FIELDS]
        assert shown["followers"][0]["pid"] == os.getpid()
        assert (shown["followers"][0]["state"], shown["followers"][0]["generation"]) == ("attached", 1)
        assert set(shown["versions"]) == {"ftd", "protocol", "torch"}
        assert (shown["pid"], shown["state"], shown["generation"], shown["failure"]) == (daemon.pid, "ready", 1, None)

    @pytest.mark.skipif(not memory_nodes(), reason="this kernel has no NUMA")
    def test_placed_weights_are_told_by_node(
        self, start: Start, namespace: str, runtime_dir: Path, model: Path
    ) -> None:
        """CU-17."""
        daemon = start("--model", model, "--set", "numa=interleave")
        (segment,) = daemon.status()["segments"]
        assert sum(segment["node_bytes"].values()) == segment["bytes"]
        assert "numa: interleave: " in daemon.log() and " on node " in daemon.log()
        assert "NODES" in ftd("status", "-n", namespace).out
        assert read(namespace) == TINY_DIGESTS

    @pytest.mark.parametrize("numa", ["bind:999", "elsewhere"])
    def test_a_placement_that_cannot_be_is_refused_by_name(
        self, namespace: str, runtime_dir: Path, model: Path, numa: str
    ) -> None:
        refused(ftd("start", "-n", namespace, "--model", model, "--set", f"numa={numa}"), EXIT_USAGE, "numa")
        assert segments(namespace) == []

    @pytest.mark.parametrize("state", ["stopped", "failed", "loading", "hung"])
    def test_the_object_has_its_fields_in_every_state(
        self, start: Start, namespace: str, runtime_dir: Path, tmp_path: Path, state: str
    ) -> None:
        model = tiny(tmp_path / "model")
        if state == "failed":
            ftd("start", "-n", namespace, "--model", tmp_path / "nothing")
        with held(model / "config.json"):
            if state in ("loading", "hung"):
                daemon = start("--model", model, *QUICK, wait=False)
                daemon.wait_segments()
                if state == "hung":
                    daemon.freeze()
                    wait_for("a late heartbeat", lambda: daemon.look().state is State.HUNG)
            shown = ftd("status", "-n", namespace, "--json")
        assert (shown.json["state"], set(shown.json)) == (state, FIELDS)
        assert set(shown.json["progress"]) == {"bytes_done", "bytes_total", "bytes_per_s", "eta_s"}
        if state == "loading":
            assert shown.status == EXIT_NOT_READY
            assert shown.json["progress"]["bytes_done"] == 0
            daemon.wait_ready()
            kept = daemon.status()["progress"]
            assert kept["bytes_done"] == kept["bytes_total"] == 896

    def test_list(self, start: Start, namespace: str, runtime_dir: Path, model: Path) -> None:
        """Ready and failed side by side: the worst decides the status; other namespaces of the host don't matter."""
        start("--model", model)
        ftd("start", "-n", f"{namespace}-b", "--model", model / "nothing")
        try:
            shown = ftd("status", "--json")
            ours = {row["namespace"]: row for row in shown.json if row["namespace"].startswith(namespace)}
            assert shown.status == 1
            assert {name: row["state"] for name, row in ours.items()} == {
                namespace: "ready",
                f"{namespace}-b": "failed",
            }
            assert all(set(row) == FIELDS for row in ours.values())
            table = ftd("status")
            assert table.status == 1 and namespace in table.out
        finally:
            assert ftd("stop", "-n", f"{namespace}-b").status == EXIT_NOT_RUNNING
        rows = ftd("status", "--json").json
        assert [row["state"] for row in rows if row["namespace"].startswith(namespace)] == ["ready"]

    def test_wait_ready(self, start: Start, namespace: str, runtime_dir: Path, tmp_path: Path) -> None:
        """Waits for READY, no longer than told, and not for what failed."""
        model = tiny(tmp_path / "model")
        with held(model / "config.json"):
            daemon = start("--model", model, wait=False)
            daemon.wait(State.LOADING)
            late = ftd("status", "-n", namespace, "--wait-ready", "0.3")
            assert late.status == EXIT_NOT_READY and late.wall_s >= 0.3
        assert ftd("status", "-n", namespace, "--wait-ready", "30").status == EXIT_OK
        assert daemon.terminate() == EXIT_OK
        nobody = ftd("status", "-n", namespace, "--wait-ready", "0.2")
        assert nobody.status == EXIT_NOT_RUNNING

    def test_wait_ready_ends_with_a_failure(
        self, start: Start, namespace: str, runtime_dir: Path, tmp_path: Path
    ) -> None:
        model = tiny(tmp_path / "model")
        with held(model / "config.json") as config:
            daemon = start("--model", model, wait=False)
            daemon.wait_segments()
            waiting = Command("status", "-n", namespace, "--wait-ready", "60")
            wait_for("its first look", lambda: polls(waiting.pid))
            os.ftruncate(config, 1)
        assert daemon.ended() == 1
        assert waiting.result().status == 1


class TestJsonErrors:
    """With `--json` an error is an object on standard output."""

    @pytest.mark.parametrize(
        ("arguments", "status", "code"),
        [
            (("status", "-n", "a/b", "--json"), 2, "namespace"),
            (("status", "--json", "--wait-ready", "1"), 2, "usage"),
            (("sweep", "--json"), 2, "not_built"),
            (("verify", "-n", "x", "--json"), 3, "not_running"),
        ],
    )
    def test_is_an_object(self, arguments: tuple[str, ...], status: int, code: str, runtime_dir: Path) -> None:
        result = ftd(*arguments)
        assert (result.status, result.err) == (status, "")
        assert set(result.json) == {"error"} and set(result.json["error"]) == {"code", "message", "remedy"}
        assert result.json["error"]["code"] == code
        assert json.dumps(result.json["error"]["remedy"]) != '""'
