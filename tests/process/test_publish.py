"""Processes that publish to a real daemon: what arrives, and what is left when either end dies at any moment."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ftd_client
from ftd.daemon.notify import NotifyListener
from ftd.daemon.reception import SLOT_BYTES
from ftd.errors import (
    EXIT_MEMORY,
    EXIT_NOT_READY,
    AccessError,
    CreatorHungError,
    MemoryShortError,
    NotRunningError,
    PublishDamagedError,
    PublishRefusedError,
)
from ftd.shm.coord import observe
from ftd.shm.digest import PIECE_BYTES
from ftd.shm.names import SHM_DIR, Names
from ftd.shm.state import State
from ftd.wire.client import Asked
from ftd_client import handover, publishing
from tests.conftest import NOBODY
from tests.process.daemons import QUICK, Daemon, ftd, is_gone, refused, segments, wait_for
from tests.process.workers import Worker

Start = Callable[..., Daemon]
WorkerOf = Callable[[], Worker]

#: What a daemon without weights has in /dev/shm.
BARE = ["coord", "lock", "slots"]
#: Two lanes, whatever the machine.
RECEIVE = ("--receive", "--set", "pin=none", "--set", "read_threads=2")


def weights(seed: int = 0, extra_bytes: int = PIECE_BYTES) -> dict[str, torch.Tensor]:
    """Several pieces, several small tensors to a slot, ties, odd strides and types."""
    torch.manual_seed(seed)
    big = torch.randint(0, 256, (2 * PIECE_BYTES + extra_bytes + 77,), dtype=torch.uint8)
    return {
        "embed.weight": big,
        "lm_head.weight": big,
        "layers.0.turned": torch.randn(300, 7).t(),
        "layers.0.wide": torch.randn(1, 50).expand(40, 50),
        "layers.1.conj": torch.randn(5, 5, dtype=torch.complex64).t().conj(),
        "layers.1.f8": torch.randn(64).to(torch.float8_e4m3fn),
        "layers.10.nan": torch.tensor([float("nan"), -0.0, float("inf")], dtype=torch.bfloat16),
        "layers.2.flags": torch.rand(9) > 0.5,
        "empty": torch.empty(0, 3, dtype=torch.float16),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "名/前 🙂": torch.arange(10),
        **{f"layers.3.norm{i}": torch.randn(i + 1) for i in range(50)},
    }


def bits(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().resolve_conj().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def same(namespace: str, given: dict[str, torch.Tensor]) -> bool:
    """Whether a follower sees these very tensors, bit for bit."""
    with ftd_client.attach(namespace, timeout=0) as follower:
        seen = follower.state_dict()
        return seen.keys() == given.keys() and all(
            (seen[name].dtype, seen[name].shape, bits(seen[name]))
            == (given[name].dtype, given[name].shape, bits(given[name]))
            for name in given
        )


def waiting(daemon: Daemon) -> bool:
    """Whether it waits for a publisher, with nothing left of any other."""
    shown = daemon.status()
    return (shown["state"], shown["stage"]) == ("loading", "waiting for a publisher") and (
        segments(daemon.namespace) == BARE
    )


def wait_waiting(daemon: Daemon) -> None:
    wait_for("the daemon to wait for a publisher", lambda: waiting(daemon))


@pytest.fixture
def receiving(start: Start) -> Daemon:
    daemon = start(*RECEIVE, wait=False)
    wait_waiting(daemon)
    return daemon


# --- what workers are told ----------------------------------------------------------------------------------------


def publish(namespace: str, seed: int = 0) -> int:
    return ftd_client.publish(namespace, weights(seed)).generation


def hold(slots: int, go: Callable[[], bool]) -> None:
    """Beyond so many, slots are filled once `go` is true."""
    numbers = itertools.count(1)

    def held(*arguments: Any) -> Any:
        if next(numbers) > slots:
            wait_for("the word to go on", go)
        return handover.fill(*arguments)

    publishing.fill = held  # type: ignore[assignment]


def publish_held(namespace: str, slots: int) -> int:
    """Stands still once so many slots have gone, for as long as the daemon loads."""
    hold(slots, lambda: observe(Names(namespace)).state is not State.LOADING)
    return publish(namespace)


def publish_with_a_child(namespace: str) -> int:
    """The same behind its first slot, while a child that it forked there lives for as long as the daemon."""
    hold(1, lambda: False)
    held = publishing.fill

    def forked(*arguments: Any) -> Any:
        publishing.fill = held
        if os.fork() == 0:
            wait_for("the end of the daemon", lambda: not (SHM_DIR / Names(namespace).lock[1:]).exists())
            os._exit(0)
        return held(*arguments)

    publishing.fill = forked  # type: ignore[assignment]
    return publish(namespace)


def publish_and_die(namespace: str, words: int, said: bool) -> None:
    """kill -9 of itself right before it says its n-th word, or right after."""
    real, numbers = Asked._say, itertools.count(1)

    def say(self: Asked, *arguments: Any) -> None:
        number = next(numbers)
        if number == words and not said:
            os.kill(os.getpid(), signal.SIGKILL)
        real(self, *arguments)
        if number == words:
            os.kill(os.getpid(), signal.SIGKILL)

    Asked._say = say  # type: ignore[method-assign]
    publish(namespace)


def generation_when_ready(namespace: str) -> int:
    with ftd_client.attach(namespace, timeout=40) as follower:
        return follower.generation


# --- what arrives -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verify", ["none", "fingerprint", "full"])
def test_what_is_published_is_what_followers_see_bit_for_bit(start: Start, namespace: str, verify: str) -> None:
    daemon = start(*RECEIVE, "--set", f"verify={verify}", wait=False)
    wait_waiting(daemon)
    given = weights()
    published = ftd_client.publish(namespace, given, transform="t:1", source="engine 1", files={"config.json": b"{}"})
    assert daemon.look().state is State.READY
    assert same(namespace, given)
    shown = daemon.status()
    assert (shown["generation"], shown["fingerprint"]) == (published.generation, published.fingerprint)
    assert shown["model"]["digest"] == published.digest
    assert (shown["model"]["source"], shown["model"]["tensors"]) == ("engine 1", len(given))
    assert (
        shown["model"]["bytes"]
        == published.nbytes
        == sum(len(bits(t)) for n, t in given.items() if n != "lm_head.weight")
    )
    assert (shown["stage"], shown["warnings"]) == (None, [])
    with ftd_client.attach(namespace, timeout=0) as follower:
        assert follower.files() == {"config.json": b"{}"}
        tied = [follower.state_dict()[name].data_ptr() for name in ("embed.weight", "lm_head.weight")]
        assert len(set(tied)) == 1
    assert sorted(segments(namespace)) == ["coord", "g1.0", "g1.files", "g1.manifest", "lock", "slots"]
    assert ftd("verify", "-n", namespace).status == 0
    refused(ftd("verify", "-n", namespace, "--source"), 2, "came from a process", "engine 1")


def test_a_model_is_published_and_bound_to_another(receiving: Daemon, namespace: str) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.Linear(32, 64, bias=False))
    model.eval()
    ftd_client.publish(namespace, model)
    with torch.device("meta"):
        twin = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.Linear(32, 64, bias=False))
    with ftd_client.attach(namespace, timeout=0) as follower:
        follower.bind(twin)
        given = torch.randn(5, 64)
        assert twin.eval()(given).equal(model(given))


def test_what_the_publisher_does_afterwards_is_not_seen(receiving: Daemon, namespace: str, worker: WorkerOf) -> None:
    one = worker()
    assert one.do(publish, namespace) == 1
    one.kill()
    assert same(namespace, weights())


def test_equal_weights_have_equal_fingerprints_and_another_transform_has_another(start: Start, namespace: str) -> None:
    seen = []
    for transform in ("t:1", "t:1", "t:2"):
        daemon = start(*RECEIVE, wait=False)
        wait_waiting(daemon)
        seen.append(ftd_client.publish(namespace, {"a": torch.arange(5)}, transform=transform).fingerprint)
        assert daemon.terminate() == 0
    assert seen[0] == seen[1] != seen[2]


def test_nothing_at_all_can_be_published(receiving: Daemon, namespace: str) -> None:
    assert ftd_client.publish(namespace, {}).nbytes == 0
    assert same(namespace, {})


def test_attach_waits_for_the_publication(receiving: Daemon, namespace: str, worker: WorkerOf) -> None:
    follower = worker()
    follower.begin(generation_when_ready, namespace)
    ftd_client.publish(namespace, {"a": torch.zeros(3)})
    assert follower.result() == 1


def test_publish_waits_for_a_daemon(start: Start, namespace: str, worker: WorkerOf) -> None:
    one = worker()
    one.begin(publish, namespace)
    start(*RECEIVE, wait=False)
    assert one.result() == 1


class Scaled(torch.Tensor):
    """A quantised tensor as libraries make them: a wrapper of plain ones."""

    values: torch.Tensor
    scales: torch.Tensor

    @staticmethod
    def __new__(cls, values: torch.Tensor, scales: torch.Tensor) -> Scaled:
        made = torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=torch.float32)
        made.values, made.scales = values, scales
        return made

    def __tensor_flatten__(self) -> tuple[list[str], object]:
        return ["values", "scales"], None

    @classmethod
    def __torch_dispatch__(cls, function: Any, *_: Any) -> Any:
        raise NotImplementedError(function)


def test_a_tensor_subclass_is_refused_and_its_parts_are_published_as_the_page_says(
    receiving: Daemon, namespace: str
) -> None:
    """docs/client.md has this loop."""
    scaled = Scaled(torch.arange(6, dtype=torch.int8).view(2, 3), torch.tensor([0.5, 2.0]))
    model = {"layer.weight": scaled, "layer.bias": torch.ones(2)}
    with pytest.raises(PublishRefusedError, match=r"1 tensor cannot be published: 'layer.weight': .*Scaled") as caught:
        ftd_client.publish(namespace, model)
    assert "__tensor_flatten__" in caught.value.remedy
    assert waiting(receiving)
    plain: dict[str, torch.Tensor] = {}
    for name, tensor in model.items():
        if hasattr(tensor, "__tensor_flatten__"):
            plain |= {f"{name}.{part}": getattr(tensor, part) for part in tensor.__tensor_flatten__()[0]}
        else:
            plain[name] = tensor
    ftd_client.publish(namespace, plain)
    assert same(namespace, plain)
    assert set(plain) == {"layer.weight.values", "layer.weight.scales", "layer.bias"}


# --- what it looks like from outside ------------------------------------------------------------------------------


def test_it_is_ready_to_its_manager_once_it_waits(start: Start, namespace: str) -> None:
    """What publishes is ordered after the daemon's unit, and would never start if READY came with the weights."""
    with NotifyListener() as listener:
        start(*RECEIVE, wait=False, environ={"NOTIFY_SOCKET": listener.address})

        def heard(what: str) -> bool:
            fields = listener.receive(1)
            return fields is not None and what in "\n".join(f"{key}={value}" for key, value in fields.items())

        wait_for("READY", lambda: heard("READY=1\nSTATUS=waiting for a publisher"))
        ftd_client.publish(namespace, {"a": torch.zeros(3)})
        wait_for("the status of a ready daemon", lambda: heard("STATUS=ready: generation 1"))


def test_a_detached_start_returns_once_it_waits(namespace: str, runtime_dir: Path) -> None:
    done = ftd("start", "-n", namespace, *RECEIVE, "--detach")
    try:
        assert (done.status, "waiting for a publisher" in done.out) == (0, True), done
        shown = ftd("status", "-n", namespace)
        assert shown.status == EXIT_NOT_READY
        assert "waiting for a publisher" in shown.out
        ftd_client.publish(namespace, {"a": torch.zeros(3)})
        assert ftd("status", "-n", namespace).status == 0
    finally:
        assert ftd("stop", "-n", namespace).status == 0


def test_receive_stands_in_a_configuration_too(start: Start, namespace: str, tmp_path: Path) -> None:
    file = tmp_path / "ns.yaml"
    file.write_text("receive: true\npin: none\n")
    wait_waiting(start("--config", file, wait=False))
    assert ftd_client.publish(namespace, {"a": torch.zeros(3)}).generation == 1


def test_a_model_beside_receive_is_a_usage_error(namespace: str, runtime_dir: Path, model: Path) -> None:
    refused(ftd("start", "-n", namespace, "--receive", "--model", model), 2, "receive: true", "--model", "one of them")


def test_status_names_the_publisher_and_a_second_one_is_refused_by_its_name(
    receiving: Daemon, namespace: str, worker: WorkerOf
) -> None:
    one = worker()
    one.begin(publish_held, namespace, 2)
    wait_for("bytes", lambda: receiving.status()["progress"]["bytes_done"] > 0)
    shown = receiving.status()
    assert shown["state"] == "loading" and f"receiving from pid {one.pid} (" in shown["stage"]
    assert "g1.staging" not in segments(namespace)
    with pytest.raises(PublishRefusedError, match=f"is being published by pid {one.pid} "):
        ftd_client.publish(namespace, {"a": torch.zeros(3)})
    one.kill()
    wait_waiting(receiving)


def test_a_daemon_that_reads_a_checkpoint_takes_nothing(start: Start, namespace: str, model: Path) -> None:
    start("--model", model)
    with pytest.raises(
        PublishRefusedError, match="reads a checkpoint: expected one that waits for a publisher"
    ) as caught:
        ftd_client.publish(namespace, {"a": torch.zeros(3)})
    assert "--receive" in caught.value.remedy


def test_without_a_daemon_the_command_is_named(namespace: str, runtime_dir: Path) -> None:
    with pytest.raises(NotRunningError) as caught:
        ftd_client.publish(namespace, {"a": torch.zeros(3)}, timeout=0)
    assert caught.value.remedy == f"ftd start --namespace {namespace} --receive"


# --- what is refused ----------------------------------------------------------------------------------------------


def test_a_torn_write_is_found_and_the_next_publication_goes_well(
    receiving: Daemon, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def torn(slot: torch.Tensor, batch: Any, tensors: Any) -> list[memoryview]:
        views = handover.fill(slot, batch, tensors)
        honest = [memoryview(bytes(view)) for view in views]
        views[0][len(views[0]) // 2] ^= 1
        return honest

    with monkeypatch.context() as patched:
        patched.setattr(publishing, "fill", torn)
        with pytest.raises(PublishDamagedError, match="arrived with XXH3-128"):
            ftd_client.publish(namespace, weights())
    assert waiting(receiving)  # before the publisher hears of it
    (warning,) = receiving.status()["warnings"]
    assert f"pid {os.getpid()}" in warning and "arrived with XXH3-128" in warning
    ftd_client.publish(namespace, weights())
    assert same(namespace, weights())
    assert receiving.status()["warnings"] == []


def test_too_little_memory_is_refused_with_needed_and_free(start: Start, namespace: str) -> None:
    daemon = start(*RECEIVE, "--set", "memory_budget=3MiB", wait=False)
    wait_waiting(daemon)
    with pytest.raises(MemoryShortError, match=r"need \d+ bytes .* memory_budget has 3145728 free") as caught:
        ftd_client.publish(namespace, {"a": torch.zeros(1 << 20)})
    assert caught.value.exit_status == EXIT_MEMORY
    assert waiting(daemon)
    assert ftd_client.publish(namespace, {"a": torch.zeros(1 << 10)}).generation == 1


def test_another_user_may_not_publish(
    start: Start, namespace: str, runtime_dir: Path, in_child: Callable[..., Any]
) -> None:
    daemon = start(*RECEIVE, "--set", "mode=0644", wait=False)
    wait_waiting(daemon)
    runtime_dir.chmod(0o755)
    with pytest.raises(AccessError, match=f"publish_begin is refused to uid {NOBODY}"):
        in_child(lambda: ftd_client.publish(namespace, {"a": torch.zeros(3)}), uid=NOBODY)
    assert waiting(daemon)


def test_an_error_of_the_publisher_itself_leaves_nothing(
    receiving: Daemon, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patched:
        patched.setattr(publishing, "fill", broken)
        with pytest.raises(torch.OutOfMemoryError, match="no memory"):
            ftd_client.publish(namespace, weights())
    ftd_client.publish(namespace, weights())  # at once: what is left of the first one goes first
    assert same(namespace, weights())


def test_whatever_failed_before_there_is_room_for_more_than_half_of_dev_shm(
    in_child: Callable[..., Any], namespace: str, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crowd = SHM_DIR / "crowd"
    given = {"a": torch.ones(4 * PIECE_BYTES, dtype=torch.uint8)}  # here: torch's threads are not in a forked child

    def torn(slot: torch.Tensor, batch: list[handover.Piece], tensors: Any) -> list[memoryview]:
        views = handover.fill(slot, batch, tensors)
        honest = [memoryview(bytes(view)) for view in views]
        if batch[-1].offset >= 3 * PIECE_BYTES:
            views[-1][0] ^= 1
        return honest

    def crowded(slot: torch.Tensor, batch: list[handover.Piece], tensors: Any) -> list[memoryview]:
        if not crowd.exists():
            with crowd.open("wb", 0) as file, pytest.raises(OSError, match="No space"):
                while True:
                    file.write(bytes(1 << 16))
        return handover.fill(slot, batch, tensors)

    def scenario() -> None:
        with Daemon(namespace, *RECEIVE) as daemon:
            wait_waiting(daemon)
            for fill, error in ((torn, PublishDamagedError), (crowded, MemoryShortError)) * 2:
                monkeypatch.setattr(publishing, "fill", fill)
                with pytest.raises(error):
                    ftd_client.publish(namespace, given)
                crowd.unlink(missing_ok=True)
            monkeypatch.setattr(publishing, "fill", handover.fill)
            ftd_client.publish(namespace, given)
            assert same(namespace, given)
            assert "Traceback" not in daemon.log()

    in_child(scenario, shm="size=110m")


def test_what_was_staged_goes_although_the_error_is_kept(
    receiving: Daemon, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that tries again needs the room: up to 128 MiB."""

    def torn(slot: torch.Tensor, batch: Any, tensors: Any) -> list[memoryview]:
        assert staged()
        handover.fill(slot, batch, tensors)
        return [memoryview(b"?" * piece.nbytes) for piece in batch]

    def staged() -> list[str]:
        return [line for line in Path("/proc/self/maps").read_text().splitlines() if f"/ftd.{namespace}." in line]

    monkeypatch.setattr(publishing, "fill", torn)
    with pytest.raises(PublishDamagedError) as caught:
        ftd_client.publish(namespace, weights())
    assert staged() == [], caught


# --- death --------------------------------------------------------------------------------------------------------

#: begin, wait, describe, two lanes with 13 slots and an end each, commit.
WORDS = 21


@pytest.mark.parametrize("said", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("words", [*range(1, 10), 14, *range(18, WORDS + 1)])
def test_a_publisher_killed_at_any_word_leaves_nothing_and_the_next_one_can_begin(
    receiving: Daemon, namespace: str, worker: WorkerOf, words: int, said: bool
) -> None:
    one = worker()
    one.begin(publish_and_die, namespace, words, said)
    wait_for(f"{one.pid} to die", lambda: is_gone(one.pid))
    if (words, said) == (WORDS, True):  # all of it was there, so it may be published, and else nothing is
        wait_for("an end", lambda: waiting(receiving) or receiving.look().state is State.READY)
        if receiving.look().state is State.READY:
            assert same(namespace, weights())
            return
    wait_waiting(receiving)
    ftd_client.publish(namespace, weights(2))
    assert same(namespace, weights(2))
    assert "Traceback" not in receiving.log()


@pytest.mark.parametrize("slots", [1, 2, 7])
def test_a_publisher_killed_between_its_slots(receiving: Daemon, namespace: str, worker: WorkerOf, slots: int) -> None:
    one = worker()
    one.begin(publish_held, namespace, slots)
    wait_for("slots", lambda: receiving.status()["progress"]["bytes_done"] >= slots * SLOT_BYTES)
    assert receiving.status()["progress"]["bytes_done"] == slots * SLOT_BYTES
    one.kill()
    wait_waiting(receiving)
    ftd_client.publish(namespace, weights())
    assert same(namespace, weights())


def test_a_publisher_that_stands_still_is_waited_for(receiving: Daemon, namespace: str, worker: WorkerOf) -> None:
    one = worker()
    one.begin(publish_held, namespace, 1)
    wait_for("bytes", lambda: receiving.status()["progress"]["bytes_done"] > 0)
    one.freeze()
    assert receiving.status()["state"] == "loading"
    one.kill()
    wait_waiting(receiving)


def test_a_child_that_the_publisher_forked_does_not_keep_it_alive(
    receiving: Daemon, namespace: str, worker: WorkerOf
) -> None:
    one = worker()
    one.begin(publish_with_a_child, namespace)
    wait_for("bytes", lambda: receiving.status()["progress"]["bytes_done"] > 0)
    one.kill()
    wait_waiting(receiving)


def test_a_daemon_that_is_stopped_meanwhile_tells_the_publisher_and_leaves_nothing(
    receiving: Daemon, namespace: str, worker: WorkerOf
) -> None:
    one = worker()
    one.begin(publish_held, namespace, 1)
    wait_for("bytes", lambda: receiving.status()["progress"]["bytes_done"] > 0)
    assert receiving.terminate() == 0
    assert segments(namespace) == []
    with pytest.raises(ftd_client.FtdError):
        one.result()


@pytest.mark.parametrize("slots", [0, 2])
def test_a_daemon_that_is_killed_meanwhile_is_an_error_and_what_it_left_is_swept(
    receiving: Daemon, start: Start, namespace: str, worker: WorkerOf, slots: int
) -> None:
    one = worker()
    one.begin(publish_held, namespace, slots)
    wait_for("segments", lambda: "g1.0" in segments(namespace))
    receiving.kill()
    with pytest.raises(ftd_client.FtdError):
        one.result()
    daemon = start(*RECEIVE, wait=False)
    wait_for("a daemon", lambda: daemon.status()["stage"] == "waiting for a publisher")
    assert ftd_client.publish(namespace, weights()).generation == 2
    assert same(namespace, weights())
    wait_for("what was left to go", lambda: segments(namespace) == ["coord", "g2.0", "g2.manifest", "lock", "slots"])


def test_a_staging_segment_that_a_killed_daemon_left_is_swept(receiving: Daemon, namespace: str) -> None:
    receiving.kill()
    (SHM_DIR / f"ftd.{namespace}.g1.staging").touch()
    assert ftd("stop", "-n", namespace, "--force").status in (0, 3)
    assert segments(namespace) == []


def test_a_daemon_that_hangs_is_not_waited_for(start: Start, namespace: str, worker: WorkerOf) -> None:
    daemon = start(*RECEIVE, *QUICK, wait=False)
    wait_waiting(daemon)
    one = worker()
    one.begin(publish_held, namespace, 1)
    wait_for("bytes", lambda: daemon.status()["progress"]["bytes_done"] > 0)
    daemon.freeze()
    with pytest.raises(CreatorHungError, match="is hung: its heartbeat is"):
        one.result()
    daemon.thaw()
    wait_waiting(daemon)
