"""What fills a plan's memory and demand: nothing is given back while a copy may still write to it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ftd_client.stream.installed import Loader
from ftd_client.stream.link import LinkError

from .toys import Toy


@pytest.mark.parametrize("ask", [Loader.load, Loader.lend])
def test_a_load_that_fails_lets_go_of_no_memory_that_is_still_written(ask: Callable[..., object]) -> None:
    toy = Toy([[100, 100]] * 2)
    toy.link.drain()
    toy.link.fail = True
    before = len(toy.link.jobs)
    with pytest.raises(LinkError, match="injected"):
        ask(toy.loader, toy.params[:2])
    (job,) = toy.link.jobs[before:]
    assert len(job.copies) == 2
    assert job.done, "its memory is somebody else's by now"


def test_one_interrupted_lets_go_of_none_either(monkeypatch: pytest.MonkeyPatch) -> None:
    toy = Toy([[100]] * 2)

    def interrupted(_ticket: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(toy.link, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        toy.loader.load(toy.params[:1])
    assert all(job.done for job in toy.link.jobs)
