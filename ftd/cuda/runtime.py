"""The only caller of the CUDA runtime: libcudart by ctypes, without torch.

A process must use the copy of libcudart that torch loaded: another copy has its own last error, and a refused call
would surface in torch's next one. So a loaded copy comes first, then the one torch would load, then the system's.
The daemon never imports torch (1.4 s and 146 MB of private memory).
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from ftd.errors import FtdError

#: cudaHostRegister flags (driver_types.h)
HOST_REGISTER_PORTABLE = 1
_SUCCESS = 0


class CudaError(FtdError):
    """A CUDA call was refused. The last error is already cleared: later CUDA work is not affected."""

    code = "cuda"


class CudaRuntime(Protocol):
    """The calls that the product makes; tests put a fake here. Every method raises `CudaError`."""

    def device_count(self) -> int:
        """GPUs that this process may see. Creates no context."""

    def use_device(self, ordinal: int) -> None:
        """Makes `ordinal` the calling thread's device and creates its context (about 530 MiB of its memory)."""

    def host_register(self, address: int, nbytes: int) -> None:
        """Page-locks memory for copies to every device (portable)."""

    def host_unregister(self, address: int) -> None:
        """Undoes `host_register`."""


class Cudart:
    """libcudart of this process."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.cudaGetErrorString.restype = ctypes.c_char_p
        library.cudaHostRegister.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint]
        library.cudaHostUnregister.argtypes = [ctypes.c_void_p]
        library.cudaFree.argtypes = [ctypes.c_void_p]

    def device_count(self) -> int:
        count = ctypes.c_int(0)
        self._call("cudaGetDeviceCount", ctypes.byref(count))
        return count.value

    def use_device(self, ordinal: int) -> None:
        self._call("cudaSetDevice", ctypes.c_int(ordinal))
        self._call("cudaFree", None)  # the documented way to create the context now

    def host_register(self, address: int, nbytes: int) -> None:
        self._call("cudaHostRegister", address, nbytes, HOST_REGISTER_PORTABLE)

    def host_unregister(self, address: int) -> None:
        self._call("cudaHostUnregister", address)

    def _call(self, name: str, *args: object) -> None:
        status = getattr(self._library, name)(*args)
        if status != _SUCCESS:
            text = (self._library.cudaGetErrorString(status) or b"unknown error").decode()
            self._library.cudaGetLastError()  # else it would surface in somebody's next call
            raise CudaError(f"{name}: {text} (error {status})")


def load_runtime() -> tuple[CudaRuntime | None, str]:
    """The runtime and `""`, or None and why there is none to use: no library, no driver, no visible GPU."""
    library = next((lib for lib in map(_try_load, _candidates()) if lib is not None), None)
    if library is None:
        return None, "no libcudart was found"
    runtime = Cudart(library)
    try:
        count = runtime.device_count()
    except CudaError as error:
        return None, f"{error.message}{_missing_nodes()}"
    return (runtime, "") if count else (None, f"no GPU is visible{_missing_nodes()}")


def _candidates() -> Iterator[str]:
    loaded = re.findall(r"(/\S*libcudart[-.0-9a-f]*\.so\S*)", Path("/proc/self/maps").read_text())
    yield from dict.fromkeys(loaded)
    for package, pattern in (("nvidia", "*/lib/libcudart.so.*"), ("torch", "lib/libcudart*.so*")):
        spec = importlib.util.find_spec(package)  # finds, without importing
        for folder in (spec.submodule_search_locations if spec else None) or ():
            yield from map(str, sorted(Path(folder).glob(pattern), reverse=True))
    yield from ("libcudart.so.13", "libcudart.so.12", "libcudart.so.11.0", "libcudart.so")
    yield from map(str, sorted(Path("/usr/local/cuda/lib64").glob("libcudart.so.*"), reverse=True))


def _try_load(path: str) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(path)
    except OSError:
        return None


def _missing_nodes() -> str:
    """Device nodes that a hardened unit or container may hide, where the driver is loaded."""
    if not Path("/proc/driver/nvidia/version").exists():
        return ""
    missing = [node for node in ("/dev/nvidiactl", "/dev/nvidia-uvm") if not Path(node).exists()]
    if not any(Path("/dev").glob("nvidia[0-9]*")):
        missing.append("/dev/nvidia0")
    return f"; missing: {', '.join(missing)}" if missing else ""
