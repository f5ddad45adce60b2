import threading

import pytest

from ftd.daemon import progress as module
from ftd.daemon.progress import LoadProgress
from ftd.shm.coord import Progress


@pytest.fixture
def progress(monkeypatch: pytest.MonkeyPatch) -> LoadProgress:
    times = iter(range(1000, 2000))
    monkeypatch.setattr(module, "monotonic_ns", lambda: next(times))
    return LoadProgress()


def test_a_load_from_its_start_to_its_end(progress: LoadProgress) -> None:
    assert (progress.snapshot(), progress.text()) == (Progress(), "reading headers")
    progress.enter("loading")
    progress.start(total=200)
    assert (progress.snapshot(), progress.text()) == (Progress(0, 200, 1000, 0), "loading 0 %")
    progress.add(50)
    progress.add(100)
    assert (progress.snapshot(), progress.text()) == (Progress(150, 200, 1000, 0), "loading 75 %")
    progress.add(50)
    progress.end()
    assert (progress.snapshot(), progress.text()) == (Progress(200, 200, 1000, 1001), "loading")


def test_a_stage_that_moves_no_bytes_tells_how_far_it_is_and_leaves_the_loads_alone(progress: LoadProgress) -> None:
    progress.start(total=200)
    progress.add(200)
    progress.end()
    progress.enter("pinning", total=400)
    assert progress.text() == "pinning 0 %"
    progress.tick(100)
    assert (progress.snapshot(), progress.text()) == (Progress(200, 200, 1000, 1001), "pinning 25 %")
    progress.enter("publishing")
    assert progress.text() == "publishing"
    progress.enter("pinning", total=400)
    progress.reset("waiting")
    assert progress.text() == "waiting"


def test_whatever_is_done_moves_it_and_looking_does_not(progress: LoadProgress) -> None:
    seen = [progress.moved]
    progress.enter("x")
    seen.append(progress.moved)
    progress.add(1)
    seen.append(progress.moved)
    progress.tick(7)
    seen.append(progress.moved)
    assert seen == sorted(set(seen))
    progress.snapshot()
    progress.text()
    progress.cancel()
    assert progress.moved == seen[-1]


def test_a_model_without_bytes_is_at_no_percent(progress: LoadProgress) -> None:
    progress.enter("loading")
    progress.start(total=0)
    assert progress.text() == "loading"


def test_it_is_asked_to_end_once_and_for_all(progress: LoadProgress) -> None:
    assert not progress.cancelled()
    progress.cancel()
    progress.cancel()
    assert progress.cancelled()


def test_no_byte_is_lost_between_threads(progress: LoadProgress) -> None:
    progress.start(total=4000)

    def count() -> None:
        for _ in range(1000):
            progress.add(1)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert progress.snapshot().bytes_done == 4000
