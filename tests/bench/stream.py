"""Streaming beside its peers: `python -m tests.bench.stream [--device cuda:0] [--tiny] [--only NAME …]`.

One model, one checkpoint, one run; every contestant in a process of its own. Prints a JSON line for each, then the
times, the targets, and the machine. Peers that are not installed are skipped by name. About 7 minutes on an H200,
half of which FlexTensor plans. `--device cpu --tiny` runs the same code anywhere; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from tests.bench import llama, machine, peers, verdict
from tests.bench.attach import NAMESPACE, daemon
from tests.bench.contest import Contest, Row

#: A contestant that takes longer has failed; FlexTensor's memory mode planned for 178 s on the box of FACTS.
_MOST_S = 300
OURS = ("ftd_all_streamed", "ftd_memory", "ftd_own_tensors", "ftd_hooks")
NAMES = (*peers.CONTESTANTS, *OURS)
_MARK = "ROW "


def prepare(contest: Contest) -> Row:
    """Writes the checkpoint, and leaves it in the page cache."""
    from safetensors.torch import save_file

    model = llama.random(contest.shape, contest.on)
    save_file({name: tensor.cpu() for name, tensor in model.state_dict().items()}, contest.checkpoint)
    return {"bytes": Path(contest.checkpoint).stat().st_size}


def contestant(name: str) -> Callable[[Contest], Row]:
    if name == "prepare":
        return prepare
    if name in peers.CONTESTANTS:
        return peers.CONTESTANTS[name]
    from tests.bench import streamed  # the peers' processes do without ftd

    return streamed.CONTESTANTS[name]


def take_part(name: str, contest: Contest) -> None:
    """In the contestant's own process: one row on standard output."""
    try:
        row = contestant(name)(contest)
    except peers.Skip as reason:
        row = {"skipped": str(reason)}
    print(_MARK + json.dumps(row), flush=True)


def run(name: str, contest: Contest) -> Row:
    """In a process of its own; a failure is a row as well."""
    command = [sys.executable, "-m", "tests.bench.stream", "--contestant", name, "--contest", contest.text()]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_MOST_S)
    except subprocess.TimeoutExpired:
        return {"error": f"took more than {_MOST_S} s"}
    found = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
    if found:
        return json.loads(found[-1].removeprefix(_MARK))
    sys.stderr.write(done.stderr)
    # the last line that begins at the margin: an error's remedy follows it, indented
    said = [line for line in done.stderr.splitlines() if line[:1].strip()]
    return {"error": said[-1][:200] if said else f"exit status {done.returncode}"}


def contend(contest: Contest, names: tuple[str, ...]) -> dict[str, Row]:
    rows: dict[str, Row] = {}

    def show(name: str, row: Row) -> Row:
        print(json.dumps({"contestant": name} | row), flush=True)
        rows[name] = row
        return row

    for name in names:
        if name not in OURS:
            show(name, run(name, contest))
    ours = tuple(name for name in names if name in OURS)
    if not ours:
        return rows
    resident, peer = rows.get("resident", {}), rows.get("flextensor_memory", {})
    given = replace(
        contest,
        weight_bytes=peer.get("gpu_bytes", {}).get(str(contest.fewest), contest.weight_bytes),
        activation_bytes=resident.get("activation_bytes"),
    )
    with daemon(Path(contest.checkpoint)):
        for name in ours:
            show(name, run(name, given))
    return rows


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    options.add_argument("--tiny", action="store_true", help="a model of kilobytes")
    options.add_argument("--only", nargs="+", choices=NAMES, default=NAMES)
    options.add_argument("--folder", help="where the checkpoint is written [the temporary folder]")
    options.add_argument("--contestant", help=argparse.SUPPRESS)
    options.add_argument("--contest", help=argparse.SUPPRESS)
    asked = options.parse_args()
    if asked.contestant:
        take_part(asked.contestant, Contest.parse(asked.contest))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the daemon is stopped and the files go
    counts = (4, 16, 32, 48) if asked.tiny else (64, 4096, 16384, 32768)
    shape = llama.TINY if asked.tiny else llama.FULL
    held = llama.layer_bytes(llama.skeleton(shape))
    with tempfile.TemporaryDirectory(prefix="ftd-bench-", dir=asked.folder) as folder:
        contest = Contest(
            asked.device,
            asked.tiny,
            counts,
            os.path.join(folder, "model.safetensors"),
            NAMESPACE,
            # FACTS: a budget of 4.19 GB, of which FlexTensor used 4.49 GB; the model has 6.98 GB
            budget_bytes=int(0.6 * held),
            weight_bytes=int(0.643 * held),
        )
        if "error" in (made := run("prepare", contest)):
            raise SystemExit(f"no checkpoint: {made['error']}")
        rows = contend(contest, tuple(asked.only))
    print()
    for name, value in machine.facts():
        print(f"{name + ':':12}{value}")
    if "link_bytes_per_s" in rows.get("resident", {}):
        print(f"{'link:':12}{rows['resident']['link_bytes_per_s'] / 1e9:.1f} GB/s, {held / 1e9:.2f} GB of layers")
    print("\n" + verdict.markdown(verdict.times(rows, counts)))
    judged = [("what", "measured", "target", "met"), *verdict.targets(rows, counts, shape.layers)]
    print("\n" + verdict.markdown(iter(judged)))


if __name__ == "__main__":
    main()
