"""Ctrl-C at any moment of a load: nothing runs on, waits or stays."""

from __future__ import annotations

import random
import signal
import threading
import time

import pytest

from ftd_client.bind import fit
from ftd_client.load import cargo as module
from ftd_client.load.cargo import Cargo
from ftd_client.load.move import move
from ftd_client.load.placement import Placement
from ftd_client.load.pull import Pull
from ftd_client.views import SharedWeights
from tests.fake_cuda import FakeCuda
from tests.unit.client.load.served import eventually
from tests.unit.client.load.test_cargo import check, cuda, daemon, on_meta, weights

__all__ = ["cuda", "daemon", "weights"]  # fixtures, which look at what is left, too
LOADS = 40


@pytest.mark.parametrize("with_daemon", [False, True])
def test_interrupts(
    request: pytest.FixtureRequest,
    weights: SharedWeights,
    cuda: FakeCuda,
    monkeypatch: pytest.MonkeyPatch,
    with_daemon: bool,
) -> None:
    if with_daemon:
        request.getfixturevalue("daemon")
    monkeypatch.setattr(module, "_FIRST_BYTES", (1, 1))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        began_s = time.monotonic()
        assert _is_loaded(weights, cuda)
        whole_s = time.monotonic() - began_s
        draw = random.Random(with_daemon)
        loaded = [_is_loaded_interrupted(weights, cuda, draw.uniform(0, 1.3 * whole_s)) for _ in range(LOADS)]
    finally:
        signal.signal(signal.SIGINT, before)
    assert not all(loaded)


def test_the_next_interrupt_may_come_before_the_end_holds_it_back(
    weights: SharedWeights, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a launcher passes on what the terminal sent to both: nobody would tell the pull that nothing comes."""

    class Interrupted(Cargo):
        def __exit__(self, kind: object, *_: object) -> None:
            raise KeyboardInterrupt

    def finish(self: Pull) -> None:
        signal.raise_signal(signal.SIGINT)
        real(self)

    real = Pull.finish
    monkeypatch.setattr(Pull, "finish", finish)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt) as kept, Interrupted(weights, Placement("cuda:0")) as cargo:
            cargo.depart(on_meta())
    finally:
        signal.signal(signal.SIGINT, before)
    eventually("pulls wait", lambda: not [t for t in threading.enumerate() if t.name.startswith("ftd-pull")])
    del kept


def _is_loaded(weights: SharedWeights, cuda: FakeCuda) -> bool:
    model = on_meta()
    try:
        with Cargo(weights, Placement("cuda:0")) as cargo:
            cargo.depart(model)
            move(model, Placement("cuda:0"), cargo, fit(model, weights))
    except KeyboardInterrupt:
        return False
    check(model, weights, cuda)
    return True


def _is_loaded_interrupted(weights: SharedWeights, cuda: FakeCuda, after_s: float) -> bool:
    main = threading.main_thread().ident or 0
    sender = threading.Timer(after_s, lambda: signal.pthread_kill(main, signal.SIGINT))
    loaded = False
    try:
        sender.start()
        loaded = _is_loaded(weights, cuda)
        sender.join()
    except KeyboardInterrupt:  # when all was there
        pass
    sender.join()
    names = ("ftd-pull", "ftd-load")
    eventually("threads are left", lambda: not [t for t in threading.enumerate() if t.name.startswith(names)])
    assert cuda.is_idle and cuda.registered == {}
    return loaded
