"""A real daemon that pins with CUDA and pushes to another process, and every refusal that it may meet there.

The GPU is a stand-in, see `cuda_host`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from ftd.errors import FtdError, NoAnswerError, PushRefusedError
from ftd_client.load import pull as pulling
from ftd_client.load.slots import SLOT_BYTES, SLOTS
from tests.process.checkpoints import digests
from tests.process.cuda_host import CHUNK_BYTES, CudaHost, pull_all, push, stream
from tests.process.daemons import QUICK, Daemon, ftd, wait_for
from tests.unit.source.checkpoint_files import Tensors, filled, valid_file, write

Start = Callable[..., Daemon]

LAYERS, LAYER_BYTES = 11, 9 << 20


@pytest.fixture(scope="module")
def tensors() -> Tensors:
    """Several chunks; layers cross their borders."""
    return {f"layers.{number}.weight": filled("U8", (LAYER_BYTES,)) for number in range(LAYERS)}


@pytest.fixture(scope="module")
def wanted(tensors: Tensors) -> dict[str, str]:
    return digests({name: data for name, (_, _, data) in tensors.items()})


@pytest.fixture(scope="module")
def large(tensors: Tensors, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("large"), {"model.safetensors": valid_file(tensors)})


@pytest.fixture
def begin(cuda_host: CudaHost, start: Start, large: Path) -> Iterator[Callable[..., Daemon]]:
    """`begin(*arguments, **variables)`: a daemon on that host."""

    def begun(*arguments: str, wait: bool = True, **environ: str) -> Daemon:
        return start("--model", large, *QUICK, *arguments, wait=wait, environ={**cuda_host.daemon.environ, **environ})

    yield begun


def pinned_bytes(shown: dict[str, Any]) -> int:
    return sum(segment["pinned_bytes"] for segment in shown["segments"])


def total_bytes(shown: dict[str, Any]) -> int:
    return sum(segment["bytes"] for segment in shown["segments"])


def is_pinned_otherwise(shown: dict[str, Any]) -> None:
    """As well as without a GPU: by mlock, where this user may."""
    assert (shown["pin"], pinned_bytes(shown)) in (("mlock", total_bytes(shown)), ("none", 0))


def test_what_is_pinned_is_pushed_and_what_is_stopped_is_unpinned(
    cuda_host: CudaHost, begin: Callable[..., Daemon], namespace: str, wanted: dict[str, str]
) -> None:
    """CU-05, CU-08: chunks of whole segments, which never overlap, and end in reverse."""
    daemon = begin()
    shown = daemon.status()
    assert (shown["state"], shown["pin"], shown["push_obstacle"], shown["warnings"]) == ("ready", "cuda", None, [])
    assert pinned_bytes(shown) == total_bytes(shown)
    chunks = [(int(start, 16), int(size)) for start, size, *_ in cuda_host.daemon.told("register")]
    assert len(chunks) == -(-total_bytes(shown) // CHUNK_BYTES) > 2
    assert all(start + size == following for (start, size), (following, _) in pairwise(chunks))
    for turn in (1, 2):
        assert cuda_host.do(push, namespace) == wanted
        (row,) = daemon.status()["push"]
        assert (row["pushed_bytes"], row["clients"]) == (turn * total_bytes(shown), 0)
        assert row["gpu"] == "GPU-10101010-1010-1010-1010-101010101010"
    assert cuda_host.do(pull_all, namespace) == wanted
    assert cuda_host.daemon.told("context") == [["0"]]
    assert daemon.terminate() == 0
    ended = [(int(start, 16), int(size)) for start, size in cuda_host.daemon.told("unregister")]
    assert ended == chunks[::-1]


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("fail cudaHostRegister 1 2", "after 0 B: cudaHostRegister"),
        ("fail cudaHostRegister 3 2", "after 64.00 MiB: cudaHostRegister"),
        (f"register_max {CHUNK_BYTES - 1}", "after 0 B: cudaHostRegister"),
        (f"register_total {2 * CHUNK_BYTES}", "after 64.00 MiB: cudaHostRegister"),
        ("fail cudaSetDevice 0 46", "refused to pin the weights: cudaSetDevice"),
        ("fail cudaFree 1 2", "refused to pin the weights: cudaFree"),
        ("fail cudaGetDeviceCount 0 999", "pin: cuda is not possible: cudaGetDeviceCount"),
        ("fail cudaGetDeviceCount 2 999", "refused to pin the weights: cudaGetDeviceCount"),
        ("sticky cudaHostRegister 2 700", "after 32.00 MiB: cudaHostRegister"),
    ],
)
def test_a_refusal_to_pin_is_undone_told_and_gone_with_the_next_start(
    cuda_host: CudaHost, begin: Callable[..., Daemon], namespace: str, wanted: dict[str, str], said: str, words: str
) -> None:
    """CU-02, CU-05: every call, the n-th call, above n bytes, in total above n bytes, an error that stays."""
    cuda_host.daemon.say(said)
    daemon = begin()
    shown = daemon.status()
    assert (shown["state"], shown["failure"]) == ("ready", None)
    is_pinned_otherwise(shown)
    assert words in shown["warnings"][0] and words.rpartition(": ")[2] in shown["push_obstacle"]
    assert words in daemon.log()
    begun = [row[0] for row in cuda_host.daemon.told("register")]
    ended = [row[0] for row in cuda_host.daemon.told("unregister")]
    assert ended == begun[::-1] or ("sticky" in said and not ended)
    with pytest.raises(PushRefusedError, match="pushes nothing: its pages are not registered with CUDA"):
        cuda_host.do(push, namespace)
    assert cuda_host.do(pull_all, namespace) == wanted
    assert daemon.terminate() == 0

    cuda_host.daemon.say()
    daemon = begin()
    assert daemon.status()["pin"] == "cuda"
    assert cuda_host.do(push, namespace) == wanted


@pytest.mark.parametrize("name", ["cudaMemcpyAsync", "cudaEventRecord", "cudaEventSynchronize"])
def test_a_refusal_in_the_midst_of_a_push_ends_it_and_no_other(
    cuda_host: CudaHost, begin: Callable[..., Daemon], namespace: str, wanted: dict[str, str], name: str
) -> None:
    """CU-02: the follower hears of it and pulls."""
    cuda_host.daemon.say(f"fail {name} 3 2")
    begin()
    with pytest.raises(FtdError, match=f"{name}: "):
        cuda_host.do(push, namespace)
    assert cuda_host.do(pull_all, namespace) == wanted
    assert cuda_host.do(push, namespace) == wanted


def test_whatever_is_refused_in_a_push_the_next_one_is_whole(
    cuda_host: CudaHost, begin: Callable[..., Daemon], namespace: str, wanted: dict[str, str]
) -> None:
    """CU-02: every call that a push makes."""
    daemon = begin()
    for name in (
        "cudaStreamCreateWithFlags", "cudaIpcOpenMemHandle", "cuMemGetAddressRange_v2", "cudaEventCreateWithFlags",
        "cudaMemcpyAsync", "cudaEventRecord", "cudaEventSynchronize", "cudaIpcCloseMemHandle",
    ):  # fmt: skip
        cuda_host.daemon.say(f"fail {name} 0 2")
        with pytest.raises(FtdError, match=f"{name}: "):
            cuda_host.do(push, namespace)
        assert f"{name}: " in daemon.log()
        assert daemon.status()["state"] == "ready"
    assert cuda_host.follower.told("FREED"), "what is not closed stays open, whatever the follower is told"
    cuda_host.follower.forget()
    cuda_host.daemon.say()
    assert cuda_host.do(push, namespace) == wanted
    shown = daemon.status()
    assert (shown["pin"], shown["push_obstacle"], shown["warnings"]) == ("cuda", None, [])


def test_contexts_are_made_only_where_they_are_asked_for_and_gpus_are_found_by_uuid(
    cuda_host: CudaHost, begin: Callable[..., Daemon], namespace: str, wanted: dict[str, str]
) -> None:
    """CU-13, CU-18: the daemon's first GPU is not the follower's."""
    cuda_host.daemon.say("devices 3")
    one, zero = "GPU-11111111-1111-1111-1111-111111111111", "GPU-10101010-1010-1010-1010-101010101010"
    daemon = begin("--set", "device=1", CUDA_VISIBLE_DEVICES=f"2,{one},{zero}")
    assert cuda_host.daemon.told("context") == [["1"]]
    assert cuda_host.do(push, namespace) == wanted
    assert cuda_host.daemon.told("context") == [["1"], ["2"]]
    assert [row["gpu"] for row in daemon.status()["push"]] == [zero]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("", "no GPU is visible"),
        ("-1", "no GPU is visible"),
        ("3", "no GPU is visible"),
        ("GPU-11111111-1111-1111-1111-111111111111", None),
        ("MIG-a0a0a0a0-a0a0-a0a0-a0a0-a0a0a0a0a0a0", None),
    ],
)
def test_what_cuda_makes_visible_is_what_there_is(
    cuda_host: CudaHost, begin: Callable[..., Daemon], namespace: str, wanted: dict[str, str], given: str, words: str
) -> None:
    """CU-18: the variable is CUDA's to read; empty is a host without a GPU, of which nothing has to be said."""
    cuda_host.daemon.say("devices 2")
    daemon = begin(CUDA_VISIBLE_DEVICES=given)
    shown = daemon.status()
    assert shown["state"] == "ready"
    if words is None:
        assert (shown["pin"], shown["warnings"]) == ("cuda", [])
        expected = f"{given.replace('MIG', 'GPU')}"
    else:
        is_pinned_otherwise(shown)
        assert not [text for text in shown["warnings"] if "CUDA" in text or "GPU" in text]
        assert shown["push_obstacle"] == f"its pages are not registered with CUDA: {words}"
        expected = words
    with pytest.raises(PushRefusedError, match=expected):
        cuda_host.do(push, namespace)  # to a GPU that the daemon does not see
    assert cuda_host.do(pull_all, namespace) == wanted


@pytest.mark.parametrize("how", ["mlock", "none"])
def test_pinning_without_cuda_makes_no_context(
    cuda_host: CudaHost, begin: Callable[..., Daemon], namespace: str, wanted: dict[str, str], how: str
) -> None:
    shown = begin("--set", f"pin={how}").status()
    is_pinned_otherwise(shown)
    assert shown["push_obstacle"] == f"its pages are not registered with CUDA: its configuration says pin: {how}"
    assert cuda_host.daemon.told("context") == []
    assert cuda_host.do(pull_all, namespace) == wanted


class TestSlowPinning:
    """CU-09."""

    def test_the_heart_beats_and_status_tells_how_far_it_is(
        self, cuda_host: CudaHost, begin: Callable[..., Daemon], namespace: str, wanted: dict[str, str]
    ) -> None:
        cuda_host.daemon.say("register_ms_per_mib 12")
        daemon = begin(wait=False)
        seen: list[dict[str, Any]] = []

        def ready() -> bool:
            shown = daemon.status()
            if shown["pid"] == daemon.pid:
                seen.append(shown)
            return bool(seen) and seen[-1]["state"] == "ready"

        wait_for("the weights to be pinned", ready)
        assert {shown["state"] for shown in seen} <= {"loading", "ready"}
        assert max(shown["heartbeat_age_s"] for shown in seen) < 1.0  # every 0.05 s, on a machine that does more
        stages = [shown["stage"] or "" for shown in seen]
        pinning = [int(stage.split()[1]) for stage in stages if stage.startswith("pinning ")]
        assert pinning == sorted(pinning) and len(set(pinning)) >= 3
        assert cuda_host.do(push, namespace) == wanted

    def test_a_stop_does_not_wait_for_the_rest(self, cuda_host: CudaHost, begin: Callable[..., Daemon]) -> None:
        cuda_host.daemon.say("register_ms_per_mib 12")
        daemon = begin(wait=False)
        wait_for("a chunk to be pinned", lambda: cuda_host.daemon.told("register"))
        assert daemon.terminate() == 0
        begun, ended = cuda_host.daemon.told("register"), cuda_host.daemon.told("unregister")
        assert [row[0] for row in ended] == [row[0] for row in begun[::-1]]
        assert len(begun) < LAYERS * LAYER_BYTES / CHUNK_BYTES


class TestGpuIsLost:
    """CU-19: the weights stay served, state says so, and nothing hangs or is started over and over."""

    @pytest.mark.parametrize("pin", ["auto", "cuda"])
    def test_before_the_start(
        self, cuda_host: CudaHost, begin: Callable[..., Daemon], namespace: str, wanted: dict[str, str], pin: str
    ) -> None:
        cuda_host.daemon.say("lost 999")
        daemon = begin("--set", f"pin={pin}")
        shown = daemon.status()
        is_pinned_otherwise(shown)
        assert "pin: cuda is not possible: cudaGetDeviceCount: " in shown["warnings"][0]
        assert "(error 999)" in shown["push_obstacle"]
        assert "(error 999)" in ftd("status", "-n", namespace).out
        assert cuda_host.do(pull_all, namespace) == wanted
        assert daemon.terminate() == 0

    def test_while_it_serves_and_back_again(
        self, cuda_host: CudaHost, begin: Callable[..., Daemon], namespace: str, wanted: dict[str, str]
    ) -> None:
        daemon = begin()
        assert cuda_host.do(push, namespace) == wanted
        cuda_host.daemon.say("lost 999")
        wait_for("the loss to be told", lambda: daemon.status()["warnings"])
        shown = daemon.status()
        assert (shown["state"], shown["pin"]) == ("ready", "cuda")
        (warning,) = shown["warnings"]
        assert "GPU-10101010-1010-1010-1010-101010101010 is lost: " in warning and "(error 999)" in warning
        assert "its GPUs are lost: " in shown["push_obstacle"]
        wait_for("the loss to be logged", lambda: "is lost: " in daemon.log())
        with pytest.raises(PushRefusedError, match="its GPUs are lost"):
            cuda_host.do(push, namespace)
        assert cuda_host.do(pull_all, namespace) == wanted

        cuda_host.daemon.say()
        wait_for("the GPU to answer", lambda: not daemon.status()["warnings"])
        wait_for("that to be logged", lambda: "answers again" in daemon.log())
        assert cuda_host.do(push, namespace) == wanted

    def test_in_the_midst_of_a_push(
        self, cuda_host: CudaHost, begin: Callable[..., Daemon], namespace: str, wanted: dict[str, str]
    ) -> None:
        daemon = begin()
        cuda_host.daemon.say("copy_ms_per_mib 4")
        cuda_host.worker.begin(push, namespace, os.environ["FTD_RUNTIME_DIR"])
        wait_for("the push to begin", lambda: cuda_host.daemon.told("opened"))
        cuda_host.daemon.say("lost 719")
        with pytest.raises(FtdError, match=r"\(error 719\)"):
            cuda_host.worker.result()
        assert cuda_host.do(pull_all, namespace) == wanted
        assert daemon.status()["state"] == "ready"
        stopped = ftd("stop", "-n", namespace, "--timeout", "10")
        assert (stopped.status, daemon.ended()) == (0, 0), stopped.err
        cuda_host.follower.forget()  # a process that lost its GPU cannot close what it had opened

    def test_a_driver_that_never_returns_holds_up_no_stop(
        self, cuda_host: CudaHost, begin: Callable[..., Daemon], namespace: str
    ) -> None:
        """The follower gets no answer, which would say that nothing is copied any more, before the daemon is dead."""
        daemon = begin()
        cuda_host.daemon.say("fail cudaEventSynchronize 0 -1")
        cuda_host.worker.begin(push, namespace, os.environ["FTD_RUNTIME_DIR"])
        wait_for("the push to begin", lambda: cuda_host.daemon.told("opened"))
        assert daemon.status()["state"] == "ready"
        stopped = ftd("stop", "-n", namespace, "--timeout", "20")
        assert (stopped.status, daemon.ended()) == (0, 0), stopped.err
        assert "a GPU does not answer" in daemon.log()
        with pytest.raises(NoAnswerError):
            cuda_host.worker.result()

    def test_a_context_that_is_broken_for_good_is_told_until_the_restart(
        self, cuda_host: CudaHost, begin: Callable[..., Daemon], namespace: str, wanted: dict[str, str]
    ) -> None:
        daemon = begin()
        cuda_host.daemon.say("sticky cudaMemcpyAsync 2 700")
        with pytest.raises(FtdError):
            cuda_host.do(push, namespace)
        cuda_host.follower.forget()
        cuda_host.daemon.say()
        wait_for("the loss to be told", lambda: "is lost" in str(daemon.status()["warnings"]))
        with pytest.raises(PushRefusedError, match="are lost"):
            cuda_host.do(push, namespace)
        assert cuda_host.do(pull_all, namespace) == wanted
        ftd(
            "start",
            "-n",
            namespace,
            "--replace",
            "--detach",
            "--model",
            *_again(daemon),
            environ=cuda_host.daemon.environ,
        )
        assert daemon.ended() == 0
        try:
            assert cuda_host.do(push, namespace) == wanted
        finally:
            assert ftd("stop", "-n", namespace).status == 0


def _again(daemon: Daemon) -> list[str]:
    return [str(daemon.status()["model"]["source"])]


class TestFollower:
    """What a follower page-locks for itself, beside a daemon that has the same pages page-locked."""

    def test_hosts_of_a_follower_share_registrations_of_what_may_not_be_written(
        self, cuda_host: CudaHost, begin: Callable[..., Daemon], namespace: str
    ) -> None:
        """CU-01, CU-08: whole chunks, once; and undone in reverse."""
        begin()
        for turn in (1, 2):
            for seen in cuda_host.worker.do(stream, namespace, os.environ["FTD_RUNTIME_DIR"], 2):
                assert (seen.kind, seen.pinned_bytes, seen.refusal) == ("cuda", seen.total_bytes, "")
            begun, ended = cuda_host.follower.told("register"), cuda_host.follower.told("unregister")
            assert len(begun) == len(ended) == turn * -(-seen.total_bytes // CHUNK_BYTES)
            assert {permissions for *_, permissions in begun} == {"r--s"}
        assert not cuda_host.follower.told("refused")

    def test_a_gpu_without_read_only_registration_costs_no_copy_of_the_model(
        self, cuda_host: CudaHost, begin: Callable[..., Daemon], namespace: str, wanted: dict[str, str]
    ) -> None:
        """CU-04: the ladder ends in staged copies. The only memory of it that is page-locked are its own slots, and no
        call is made that is known to fail. smaps is looked at where it streams and where it loads."""
        begin()
        cuda_host.follower.say("read_only 0")
        (seen,) = cuda_host.worker.do(stream, namespace, os.environ["FTD_RUNTIME_DIR"])
        assert (seen.kind, seen.pinned_bytes) == ("staged", 0)
        assert seen.refusal == "cuda:0 registers no read-only memory"
        assert cuda_host.do(pull_all, namespace) == wanted
        slots = cuda_host.follower.told("register")
        assert slots and {permissions for *_, permissions in slots} == {"rw-p"}
        threads = min(pulling.THREADS, len(os.sched_getaffinity(0)))
        assert max(int(size) for _, size, _ in slots) == threads * SLOTS * SLOT_BYTES
        assert not cuda_host.follower.told("refused")
        assert cuda_host.do(push, namespace) == wanted

    @pytest.mark.parametrize(
        ("said", "kind", "chunks"),
        [
            ("fail cudaHostRegister 0 2", "none", 0),
            (f"register_total {2 * CHUNK_BYTES}", "staged", 2),
            (f"register_max {CHUNK_BYTES - 1}", "staged", 0),
            ("register_max 4096", "none", 0),
            ("fail cudaDeviceGetAttribute 0 2", "staged", 0),
        ],
    )
    def test_whatever_is_refused_costs_speed_alone(
        self,
        cuda_host: CudaHost,
        begin: Callable[..., Daemon],
        namespace: str,
        wanted: dict[str, str],
        said: str,
        kind: str,
        chunks: int,
    ) -> None:
        """CU-02, CU-05."""
        begin()
        cuda_host.follower.say(said)
        (seen,) = cuda_host.worker.do(stream, namespace, os.environ["FTD_RUNTIME_DIR"])
        assert (seen.kind, seen.pinned_bytes) == (kind, chunks * CHUNK_BYTES)
        assert cuda_host.do(pull_all, namespace) == wanted
        begun, ended = cuda_host.follower.told("register"), cuda_host.follower.told("unregister")
        assert sorted(row[0] for row in begun) == sorted(row[0] for row in ended)
        cuda_host.follower.say()
        assert cuda_host.do(push, namespace) == wanted
