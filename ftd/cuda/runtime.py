"""The only caller of the CUDA runtime: libcudart by ctypes, without torch.

A process must use the copy of libcudart that torch loaded: another copy has its own last error, and a refused call
would surface in torch's next one. So a loaded copy comes first, then the one torch would load, then the system's.
The daemon never imports torch (1.4 s and 146 MB of private memory).
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol
from uuid import UUID

from ftd.errors import FtdError

# Flags, enumerators and error numbers: driver_types.h of CUDA 13, unchanged since 11.1
HOST_REGISTER_PORTABLE = 1
HOST_REGISTER_READ_ONLY = 8
#: cudaDevAttrHostRegisterReadOnlySupported, for `device_attribute`
READ_ONLY_REGISTRATION = 113
_SUCCESS = 0
_INSUFFICIENT_DRIVER = 35
_NO_DEVICE = 100
_NOT_READY = 600
_MEMCPY_HOST_TO_DEVICE = 1
_STREAM_NON_BLOCKING = 1
_EVENT_DISABLE_TIMING = 2
_CAPTURE_NONE = 0
_IPC_LAZY_PEER_ACCESS = 1
#: CUDA_IPC_HANDLE_SIZE and CUuuid of cuda.h
IPC_HANDLE_BYTES = 64
UUID_BYTES = 16


class CudaError(FtdError):
    """A CUDA call was refused. The last error is already cleared: later CUDA work is not affected.

    Attributes:
        status: cudaError_t; 0 where it was not a call of the runtime.
    """

    code = "cuda"
    status = 0


#: What `load_runtime` says on a host that has no GPU, or hides all from this process on purpose. Of anything else a
#: person should know.
NO_LIBRARY = "no libcudart was found"
NO_DRIVER = "no NVIDIA driver is loaded"
NO_GPU = "no GPU is visible"
ABSENT = frozenset({NO_LIBRARY, NO_DRIVER, NO_GPU})


class CudaRuntime(Protocol):
    """The calls that the product makes; tests put a fake here. Every method raises `CudaError`.

    Streams and events are handles, as torch's `cuda_stream` and `cuda_event` are; stream 0 is the default stream.
    A call that names no device works on the calling thread's, and creates its context where there is none.
    """

    def device_count(self) -> int:
        """GPUs that this process may see. Creates no context."""

    def device_attribute(self, attribute: int, ordinal: int) -> int:
        """A cudaDeviceAttr of a GPU. Creates no context."""

    def device_uuid(self, ordinal: int) -> bytes:
        """16 bytes that name a GPU, or the slice of one that the process may see, on every host and in every process:
        ordinals differ between processes. Creates no context."""

    def use_device(self, ordinal: int) -> None:
        """Makes `ordinal` the calling thread's device and creates its context (about 530 MiB of its memory)."""

    def ask_device(self) -> None:
        """Asks the calling thread's device for what only it can tell: refused once it is lost."""

    def host_register(self, address: int, nbytes: int, *, read_only: bool = False) -> None:
        """Page-locks memory for copies to every device (portable).

        Args:
            read_only: the mapping may not be written; the device must have `READ_ONLY_REGISTRATION`.
        """

    def host_unregister(self, address: int) -> None:
        """Undoes `host_register`."""

    def allocation_of(self, address: int) -> tuple[int, int]:
        """Start and bytes of the device allocation that holds `address`."""

    def ipc_export(self, address: int) -> bytes:
        """64 bytes by which another process opens the allocation that holds `address`, while it lives."""

    def ipc_open(self, handle: bytes) -> int:
        """Address in this process of an allocation that another exported. It must lie on the calling thread's device.
        Opened twice it has one address, and is counted."""

    def ipc_close(self, address: int) -> None:
        """Undoes `ipc_open`; to be called before its owner frees it, and once no copy into it is under way."""

    def memcpy_h2d_async(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        """Queues a copy. From memory that is not page-locked it returns once the bytes have been staged."""

    def copy_pinned(self, dst: int, src: int, nbytes: int, stream: int, event: int) -> None:
        """`memcpy_h2d_async` from page-locked memory, and `event_record` behind it. For threads that copy side by side:
        it keeps the interpreter lock, which each of them would wait for again after every call that lets go of it."""

    def stream_create(self) -> int:
        """A stream of the calling thread's device that does not synchronise with the default stream."""

    def stream_destroy(self, stream: int) -> None:
        """Returns at once; what is queued still runs."""

    def stream_wait_event(self, stream: int, event: int) -> None:
        """What `stream` gets from now on runs after what `event` holds now, whatever is recorded in it later."""

    def stream_synchronize(self, stream: int) -> None:
        """Blocks until all that was queued is done."""

    def stream_is_capturing(self, stream: int) -> bool:
        """Whether what the stream gets goes into a CUDA graph."""

    def event_create(self) -> int:
        """An event of the calling thread's device; an event and the streams it is recorded on must be of one."""

    def event_destroy(self, event: int) -> None:
        """Returns at once; waits that were queued still hold."""

    def event_record(self, event: int, stream: int) -> None:
        """Lets `event` hold all that `stream` was given so far, in place of what it held."""

    def event_query(self, event: int) -> bool:
        """Whether what it holds is done; an event that was never recorded is."""

    def event_synchronize(self, event: int) -> None:
        """Blocks until what it holds is done."""


class Cudart:
    """libcudart of this process.

    The calls of forwards and loads are bound once and without a lookup: about a microsecond each on top of CUDA's own.
    """

    def __init__(self, library: ctypes.CDLL, held: ctypes.CDLL | None = None) -> None:
        """
        Args:
            held: the same library by functions that keep the interpreter lock.
        """
        self._library = library
        self._driver: ctypes.CDLL | None = None
        library.cudaGetErrorString.restype = ctypes.c_char_p
        for name, argtypes in _ARGTYPES.items():
            getattr(library, name).argtypes = argtypes
        for name in ("cudaMemcpyAsync", "cudaEventRecord", "cudaEventQuery"):
            getattr(held or library, name).argtypes = _ARGTYPES[name]
        self._held = held or library
        self._memcpy_async = library.cudaMemcpyAsync
        self._stream_wait_event = library.cudaStreamWaitEvent
        self._stream_is_capturing = library.cudaStreamIsCapturing
        self._event_record = library.cudaEventRecord
        self._event_synchronize = library.cudaEventSynchronize

    def device_count(self) -> int:
        count = ctypes.c_int(0)
        self._call("cudaGetDeviceCount", ctypes.byref(count))
        return count.value

    def device_attribute(self, attribute: int, ordinal: int) -> int:
        value = ctypes.c_int(0)
        self._call("cudaDeviceGetAttribute", ctypes.byref(value), attribute, ordinal)
        return value.value

    def device_uuid(self, ordinal: int) -> bytes:
        self.device_count()  # the driver's own functions want it initialised, which this does
        device, uuid = ctypes.c_int(0), ctypes.create_string_buffer(UUID_BYTES)
        self._call_driver("cuDeviceGet", ctypes.byref(device), ordinal)
        self._call_driver("cuDeviceGetUuid_v2", uuid, device)
        return uuid.raw

    def use_device(self, ordinal: int) -> None:
        self._call("cudaSetDevice", ordinal)
        self._call("cudaFree", None)  # the documented way to create the context now

    def ask_device(self) -> None:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._call("cudaMemGetInfo", ctypes.byref(free), ctypes.byref(total))

    def host_register(self, address: int, nbytes: int, *, read_only: bool = False) -> None:
        flags = HOST_REGISTER_PORTABLE | (HOST_REGISTER_READ_ONLY if read_only else 0)
        self._call("cudaHostRegister", address, nbytes, flags)

    def host_unregister(self, address: int) -> None:
        self._call("cudaHostUnregister", address)

    def allocation_of(self, address: int) -> tuple[int, int]:
        start, nbytes = ctypes.c_void_p(), ctypes.c_size_t()
        self._call_driver("cuMemGetAddressRange_v2", ctypes.byref(start), ctypes.byref(nbytes), address)
        return start.value or 0, nbytes.value

    def ipc_export(self, address: int) -> bytes:
        handle = _IpcHandle()
        self._call("cudaIpcGetMemHandle", ctypes.byref(handle), address)
        return bytes(handle)

    def ipc_open(self, handle: bytes) -> int:
        address = ctypes.c_void_p()
        given = _IpcHandle.from_buffer_copy(handle)
        self._call("cudaIpcOpenMemHandle", ctypes.byref(address), given, _IPC_LAZY_PEER_ACCESS)
        return address.value or 0

    def ipc_close(self, address: int) -> None:
        self._call("cudaIpcCloseMemHandle", address)

    def memcpy_h2d_async(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        status = self._memcpy_async(dst, src, nbytes, _MEMCPY_HOST_TO_DEVICE, stream)
        if status:
            raise self._refused("cudaMemcpyAsync", status)

    def copy_pinned(self, dst: int, src: int, nbytes: int, stream: int, event: int) -> None:
        status = self._held.cudaMemcpyAsync(dst, src, nbytes, _MEMCPY_HOST_TO_DEVICE, stream)
        if status:
            raise self._refused("cudaMemcpyAsync", status)
        status = self._held.cudaEventRecord(event, stream)
        if status:
            raise self._refused("cudaEventRecord", status)

    def stream_create(self) -> int:
        stream = ctypes.c_void_p()
        self._call("cudaStreamCreateWithFlags", ctypes.byref(stream), _STREAM_NON_BLOCKING)
        return stream.value or 0

    def stream_destroy(self, stream: int) -> None:
        self._call("cudaStreamDestroy", stream)

    def stream_wait_event(self, stream: int, event: int) -> None:
        status = self._stream_wait_event(stream, event, 0)
        if status:
            raise self._refused("cudaStreamWaitEvent", status)

    def stream_synchronize(self, stream: int) -> None:
        self._call("cudaStreamSynchronize", stream)

    def stream_is_capturing(self, stream: int) -> bool:
        state = ctypes.c_int(0)
        status = self._stream_is_capturing(stream, ctypes.byref(state))
        if status:
            raise self._refused("cudaStreamIsCapturing", status)
        return state.value != _CAPTURE_NONE

    def event_create(self) -> int:
        event = ctypes.c_void_p()
        self._call("cudaEventCreateWithFlags", ctypes.byref(event), _EVENT_DISABLE_TIMING)
        return event.value or 0

    def event_destroy(self, event: int) -> None:
        self._call("cudaEventDestroy", event)

    def event_record(self, event: int, stream: int) -> None:
        status = self._event_record(event, stream)
        if status:
            raise self._refused("cudaEventRecord", status)

    def event_query(self, event: int) -> bool:
        status = self._held.cudaEventQuery(event)
        if status == _NOT_READY:
            self._library.cudaGetLastError()  # it counts as an error, and would surface in somebody's next call
            return False
        if status:
            raise self._refused("cudaEventQuery", status)
        return True

    def event_synchronize(self, event: int) -> None:
        status = self._event_synchronize(event)
        if status:
            raise self._refused("cudaEventSynchronize", status)

    def _call(self, name: str, *args: object) -> None:
        status = getattr(self._library, name)(*args)
        if status != _SUCCESS:
            raise self._refused(name, status)

    def _call_driver(self, name: str, *args: object) -> None:
        """Of libcuda: what the runtime has no function for. It leaves no last error."""
        if self._driver is None:
            self._driver = ctypes.CDLL("libcuda.so.1")  # loaded already: the runtime needs it
            for known, argtypes in _DRIVER_ARGTYPES.items():
                getattr(self._driver, known).argtypes = argtypes
        status = getattr(self._driver, name)(*args)
        if status != _SUCCESS:
            raise CudaError(f"{name}: error {status}")

    def _refused(self, name: str, status: int) -> CudaError:
        text = (self._library.cudaGetErrorString(status) or b"unknown error").decode()
        self._library.cudaGetLastError()  # else it would surface in somebody's next call
        error = CudaError(f"{name}: {text} (error {status})")
        error.status = status
        return error


class _IpcHandle(ctypes.Structure):
    """cudaIpcMemHandle_t: passed by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * IPC_HANDLE_BYTES),)


_POINTER, _SIZE, _INT, _UINT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_uint
_ARGTYPES: dict[str, list[type]] = {
    "cudaGetDeviceCount": [_POINTER],
    "cudaDeviceGetAttribute": [_POINTER, _INT, _INT],
    "cudaSetDevice": [_INT],
    "cudaFree": [_POINTER],
    "cudaMemGetInfo": [_POINTER, _POINTER],
    "cudaHostRegister": [_POINTER, _SIZE, _UINT],
    "cudaHostUnregister": [_POINTER],
    "cudaIpcGetMemHandle": [_POINTER, _POINTER],
    "cudaIpcOpenMemHandle": [_POINTER, _IpcHandle, _UINT],
    "cudaIpcCloseMemHandle": [_POINTER],
    "cudaMemcpyAsync": [_POINTER, _POINTER, _SIZE, _INT, _POINTER],
    "cudaStreamCreateWithFlags": [_POINTER, _UINT],
    "cudaStreamDestroy": [_POINTER],
    "cudaStreamWaitEvent": [_POINTER, _POINTER, _UINT],
    "cudaStreamSynchronize": [_POINTER],
    "cudaStreamIsCapturing": [_POINTER, _POINTER],
    "cudaEventCreateWithFlags": [_POINTER, _UINT],
    "cudaEventDestroy": [_POINTER],
    "cudaEventRecord": [_POINTER, _POINTER],
    "cudaEventQuery": [_POINTER],
    "cudaEventSynchronize": [_POINTER],
}

_DRIVER_ARGTYPES: dict[str, list[type]] = {
    "cuDeviceGet": [_POINTER, _INT],
    "cuDeviceGetUuid_v2": [_POINTER, _INT],
    "cuMemGetAddressRange_v2": [_POINTER, _POINTER, _POINTER],
}


def load_runtime() -> tuple[CudaRuntime | None, str]:
    """The runtime and `""`, or None and why there is none to use: no library, no driver, no visible GPU."""
    if _in_use:
        return _in_use[0], ""
    path, library = next(((path, lib) for path in _candidates() if (lib := _try_load(path))), ("", None))
    if library is None:
        return None, NO_LIBRARY
    runtime = Cudart(library, _try_load(path, ctypes.PyDLL))
    try:
        count = runtime.device_count()
    except CudaError as error:
        if error.status == _INSUFFICIENT_DRIVER and not _has_driver():
            return None, NO_DRIVER
        reason = NO_GPU if error.status == _NO_DEVICE else error.message
        return None, f"{reason}{_missing_nodes()}"
    if count and "torch" in sys.modules:
        _in_use.append(runtime)
    return (runtime, "") if count else (None, f"{NO_GPU}{_missing_nodes()}")


#: Over the copy that torch loaded, once it did.
_in_use: list[CudaRuntime] = []

_SONAMES = ("libcudart.so.13", "libcudart.so.12", "libcudart.so.11.0", "libcudart.so")


def _candidates() -> Iterator[str]:
    # the linker knows at once what reading the maps of a process with torch in it takes 1.2 ms to find; only torch's
    # own release, since another package may have loaded another one
    release = getattr(getattr(sys.modules.get("torch"), "version", None), "cuda", None) or ""
    names = [name for name in _SONAMES if name.startswith(f"libcudart.so.{release.partition('.')[0]}")]
    yield from (name for name in names if _try_load(name, mode=os.RTLD_NOW | os.RTLD_NOLOAD))
    loaded = re.findall(r"(/\S*libcudart[-.0-9a-f]*\.so\S*)", Path("/proc/self/maps").read_text())
    yield from dict.fromkeys(loaded)
    for package, pattern in (("nvidia", "*/lib/libcudart.so.*"), ("torch", "lib/libcudart*.so*")):
        spec = importlib.util.find_spec(package)  # finds, without importing
        for folder in (spec.submodule_search_locations if spec else None) or ():
            yield from map(str, sorted(Path(folder).glob(pattern), reverse=True))
    yield from _SONAMES
    yield from map(str, sorted(Path("/usr/local/cuda/lib64").glob("libcudart.so.*"), reverse=True))


def _try_load(path: str, kind: type[ctypes.CDLL] = ctypes.CDLL, mode: int = ctypes.DEFAULT_MODE) -> ctypes.CDLL | None:
    try:
        return kind(path, mode=mode)
    except OSError:
        return None


def gpu_name(uuid: bytes) -> str:
    """A GPU as nvidia-smi writes it: `"GPU-01234567-89ab-cdef-0123-456789abcdef"`."""
    return f"GPU-{UUID(bytes=uuid)}"


def _has_driver() -> bool:
    return Path("/proc/driver/nvidia/version").exists()


def _missing_nodes() -> str:
    """Device nodes that a hardened unit or container may hide, where the driver is loaded."""
    if not _has_driver():
        return ""
    missing = [node for node in ("/dev/nvidiactl", "/dev/nvidia-uvm") if not Path(node).exists()]
    if not any(Path("/dev").glob("nvidia[0-9]*")):
        missing.append("/dev/nvidia0")
    return f"; missing: {', '.join(missing)}" if missing else ""
