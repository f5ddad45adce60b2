"""The part of a run that streams: who takes part, and what they found as rows.

About 3 minutes on an H200, and 4 more where FlexTensor is installed, most of which it plans.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from tests.bench.child import Found, measure
from tests.bench.rows import Row, at_most
from tests.bench.run import Run
from tests.bench.served import NAMESPACE, CommandError, served
from tests.bench.stream import llama, peers, verdict
from tests.bench.stream.contest import Contest

#: A contestant that takes longer has failed; FlexTensor's memory mode planned for 187 s.
_MOST_S = 300
OURS = ("ftd_all_streamed", "ftd_memory", "ftd_own_tensors", "ftd_hooks")
NAMES = (*peers.CONTESTANTS, *OURS)


def rows(run: Run) -> Iterator[Row]:
    counts = (4, 16, 32, 48) if run.tiny else (64, 4096, 16384, 32768)
    shape = llama.TINY if run.tiny else llama.FULL
    held = llama.layer_bytes(llama.skeleton(shape))
    contest = Contest(
        run.device,
        run.tiny,
        counts,
        str(run.folder / "streamed.safetensors"),
        NAMESPACE,
        # FACTS: a budget of 4.19 GB, of which FlexTensor used 4.49 GB; the model has 6.98 GB
        budget_bytes=int(0.6 * held),
        weight_bytes=int(0.643 * held),
    )
    made = _part_of("prepare", contest)
    if "error" in made:
        yield Row("stream", "checkpoint", problem=made["error"])
        return
    found: dict[str, Found] = {}
    for name, one in _contend(contest, run.wanted(NAMES)):
        found[name] = one
        for row in verdict.rows(name, found, shape.layers):
            # how fast kilobytes or a CPU are is promised to nobody; that outputs are equal is
            judged = (run.cuda and not run.tiny) or row.target == at_most(0)
            yield row if judged else replace(row, target=None)
    Path(contest.checkpoint).unlink()


def _contend(contest: Contest, names: list[str]) -> Iterator[tuple[str, Found]]:
    found: dict[str, Found] = {}
    for name in names:
        if name not in OURS:
            found[name] = _part_of(name, contest)
            yield name, found[name]
    ours = [name for name in names if name in OURS]
    if not ours:
        return
    resident, peer = found.get("resident", {}), found.get("flextensor_memory", {})
    given = replace(
        contest,
        weight_bytes=peer.get("gpu_bytes", {}).get(str(contest.fewest), contest.weight_bytes),
        activation_bytes=resident.get("activation_bytes"),
    )
    try:
        with served(Path(contest.checkpoint), _MOST_S):
            for name in ours:
                yield name, _part_of(name, given)
    except CommandError as error:
        yield ours[0], {"error": str(error)}


def _part_of(name: str, contest: Contest) -> Found:
    return measure("tests.bench.stream.part:take_part", most_s=_MOST_S, name=name, contest=contest.plain())


def take_part(name: str, contest: dict[str, object]) -> Found:
    """In the contestant's own process."""
    given = Contest.of(contest)
    if name == "prepare":
        return _prepare(given)
    if name in peers.CONTESTANTS:
        return peers.CONTESTANTS[name](given)
    from tests.bench.stream import streamed  # the peers' processes do without ftd

    return streamed.CONTESTANTS[name](given)


def _prepare(contest: Contest) -> Found:
    """Writes the checkpoint, and leaves it in the page cache."""
    from safetensors.torch import save_file

    model = llama.random(contest.shape, contest.on)
    save_file({name: tensor.cpu() for name, tensor in model.state_dict().items()}, contest.checkpoint)
    return {}
