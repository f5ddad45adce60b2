"""A worker process of the demo: `python -m ftd_client.demo.worker ORDER`, started by `crew.WorkerProcess`.

ORDER is JSON: `kind` (`ftd` or `from_pretrained`), `source` (a namespace or a model directory), `sentences`, and
`scratch`, a directory of its own. It says that it has imported, and then takes a step for each line of its input:
loads and answers with times and embeddings; and, if it is of the second kind, puts a deep copy in the model's place
and answers with the embeddings of that. It ends with its input.
"""

from __future__ import annotations

import copy
import gc
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

from torch import nn

from ftd.clock import NS, monotonic_ns
from ftd.errors import FtdError, InternalError
from ftd_client.demo import models
from ftd_client.follower import attach


def main() -> None:
    order = json.loads(sys.argv[1])
    # libraries may print: only answers go to the pipe
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        try:
            _say(answers, {"imported": True})
            with ExitStack() as stack:
                steps = _ftd(order, stack) if order["kind"] == "ftd" else _from_pretrained(order)
                for _ in sys.stdin:
                    _say(answers, next(steps))
        except FtdError as error:
            _say(answers, {"error": error.to_dict()})
            sys.exit(1)
        except Exception as error:
            _say(answers, {"error": InternalError(f"{type(error).__name__}: {error}").to_dict()})
            raise


def _ftd(order: Mapping[str, Any], stack: ExitStack) -> Iterator[dict[str, Any]]:
    """What a worker does in production: attach, build on meta, bind. Nothing but the namespace is known before."""
    directory = Path(order["scratch"])
    began_ns = monotonic_ns()
    follower = stack.enter_context(attach(order["source"]))
    attached_ns = monotonic_ns()
    follower.write_files(directory)
    wrote_ns = monotonic_ns()
    cls = _imported_class(directory)
    model, build_ms, bind_ms = models.bound_model(follower, cls, directory)
    attach_ms, files_ms = (attached_ns - began_ns) / NS * 1e3, (wrote_ns - attached_ns) / NS * 1e3
    yield {
        "attach_ms": attach_ms,
        "build_ms": files_ms + build_ms,
        "bind_ms": bind_ms,
        "ready_ms": attach_ms + files_ms + build_ms + bind_ms,
        **_embedded(model, directory, order["sentences"]),
    }


def _from_pretrained(order: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    directory = Path(order["source"])
    cls = _imported_class(directory)
    model, ready_ms = models.pretrained_model(cls, directory)
    yield {"ready_ms": ready_ms, **_embedded(model, directory, order["sentences"])}
    model = copy.deepcopy(model)
    gc.collect()  # modules are full of cycles: the mapping goes with the last tensor over it
    yield _embedded(model, directory, order["sentences"])


def _imported_class(directory: Path) -> type[nn.Module]:
    """The model's class; its import is no part of anybody's times."""
    return models.model_class(models.read_config(directory))


def _embedded(model: nn.Module, directory: Path, sentences: Sequence[str]) -> dict[str, Any]:
    inputs = models.make_inputs(models.read_config(directory), directory, sentences)
    embedded = models.embed(model, inputs)
    return {
        "model": type(model).__name__,
        "labels": [one.label for one in inputs],
        "vectors": embedded.vectors,
        "digest": embedded.digest,
        "first_ms": embedded.first_ms,
    }


def _say(answers: IO[str], answer: Mapping[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
