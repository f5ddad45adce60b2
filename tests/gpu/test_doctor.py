"""`ftd doctor` beside a real GPU: it sees it, and makes no context there."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible"),
]

LOOK = """
import ctypes, json, os
from ftd.doctor.probe import look
gpus = look(os.environ).gpus
driver = ctypes.CDLL("libcuda.so.1")
active = []
for ordinal in range(len(gpus.read_only)):
    device, flags, state = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int(-1)
    assert driver.cuDeviceGet(ctypes.byref(device), ordinal) == 0
    assert driver.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(state)) == 0
    active.append(state.value)
print(json.dumps([gpus.driver, gpus.libcudart, gpus.problem, active]))
"""


def test_every_gpu_is_seen_and_none_gets_a_context() -> None:
    """CU-13."""
    done = subprocess.run([sys.executable, "-c", LOOK], capture_output=True, text=True, timeout=120, check=True)
    driver, libcudart, problem, active = json.loads(done.stdout)
    assert driver and "libcudart" in libcudart
    assert problem == ""
    assert active == [0] * torch.cuda.device_count()


@pytest.mark.parametrize("visible", ["", "-1"])
def test_hidden_gpus_are_a_warning_and_no_failure(visible: str) -> None:
    """CU-18."""
    done = subprocess.run(
        [sys.executable, "-m", "ftd", "doctor", "--json"],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": visible},
    )
    (gpu,) = [check for check in json.loads(done.stdout)["checks"] if check["name"] == "gpu"]
    assert gpu["verdict"] == "warning"
    assert f"CUDA_VISIBLE_DEVICES={visible!r}" in gpu["found"]
