"""CU-19: a GPU that goes away under a running daemon is noticed, told, and may come back."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator

import pytest

from ftd.clock import Deadline
from ftd.daemon.gpus import Gpus
from tests.fake_cuda import FakeCuda

BOUND_S = 20.0
ONE = "GPU-01010101-0101-0101-0101-010101010101"


@pytest.fixture
def cuda() -> FakeCuda:
    return FakeCuda()


@pytest.fixture
def gpus() -> Iterator[Gpus]:
    with contextlib.closing(Gpus(every_s=0.001, silent_s=0.1)) as made:
        yield made


def eventually(what: str, condition: Callable[[], bool]) -> None:
    deadline = Deadline.after(BOUND_S)
    while not condition():
        assert not deadline.expired(), what
        deadline.pause(0.002)


def test_no_gpu_is_asked_that_has_no_context(cuda: FakeCuda, gpus: Gpus) -> None:
    assert (gpus.lost(), gpus.all_lost, gpus.warnings) == ({}, None, [])
    gpus.watch(cuda, 1)
    gpus.watch(cuda, 1)
    eventually("two questions", lambda: cuda.counts["ask_device"] > 1)
    assert (gpus.lost(), gpus.all_lost, gpus.warnings) == ({}, None, [])
    assert cuda.contexts == {1}
    assert len([thread for thread in threading.enumerate() if thread.name == "ftd-gpu-1"]) == 1


@pytest.mark.parametrize("call", ["ask_device", "use_device"])
def test_one_that_refuses_is_lost_until_it_answers(
    cuda: FakeCuda, gpus: Gpus, call: str, caplog: pytest.LogCaptureFixture
) -> None:
    gpus.watch(cuda, 0)
    cuda.refuse = {call}
    eventually("the loss", lambda: bool(gpus.lost()))
    assert gpus.lost() == {cuda.uuids[0]: f"{call}: refused (error 2)"}
    assert gpus.all_lost == f"{call}: refused (error 2)"
    (warning,) = gpus.warnings
    assert warning.startswith(f"{ONE} is lost: {call}: refused (error 2). The weights stay served")
    for _ in range(2):
        gpus.log_changes()
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert ONE in caplog.text and "error 2" in caplog.text
    cuda.refuse = set()
    eventually("its return", lambda: not gpus.lost())
    for _ in range(2):
        gpus.log_changes()
    assert [record.levelno for record in caplog.records] == [logging.ERROR, logging.WARNING]
    assert caplog.records[-1].getMessage() == f"{ONE} answers again"


def test_a_driver_that_says_nothing_is_lost_and_holds_up_nobody(cuda: FakeCuda, gpus: Gpus) -> None:
    go = threading.Event()

    def before(name: str, _count: int) -> None:
        if name == "ask_device" and cuda.current == 0:
            assert go.wait(BOUND_S)

    cuda.before = before
    gpus.watch(cuda, 0)
    gpus.watch(cuda, 1)
    eventually("the silence", lambda: bool(gpus.lost()))
    assert list(gpus.lost()) == [cuda.uuids[0]]
    assert gpus.lost()[cuda.uuids[0]].startswith("no answer for ")
    assert gpus.all_lost is None, "the other one answers"
    gpus.close()  # returns
    go.set()


def test_a_gpu_that_has_no_name_any_more_is_not_watched(cuda: FakeCuda, gpus: Gpus) -> None:
    cuda.refuse = {"device_uuid"}
    before = threading.enumerate()  # threads of others may take a while to end
    gpus.watch(cuda, 0)
    assert gpus.lost() == {}
    assert not [thread for thread in threading.enumerate() if thread.name == "ftd-gpu-0" and thread not in before]


def test_closed_it_asks_no_more(cuda: FakeCuda, gpus: Gpus) -> None:
    before = threading.enumerate()
    gpus.watch(cuda, 0)
    eventually("a question", lambda: cuda.counts["ask_device"] > 0)
    (thread,) = [one for one in threading.enumerate() if one.name == "ftd-gpu-0" and one not in before]
    gpus.close()
    thread.join(BOUND_S)
    assert not thread.is_alive()
