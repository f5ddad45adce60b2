"""The caller of libcudart, against a library that is no libcudart: what is asked, cleared and reported."""

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ftd.cuda import runtime
from ftd.cuda.runtime import NO_DRIVER, NO_GPU, CudaError, Cudart, load_runtime


class Library:
    """Stands for a CDLL: every function gives the status that it was told to, and leaves a last error behind."""

    def __init__(self, statuses: dict[str, int] | None = None, devices: int = 1) -> None:
        self.statuses, self.devices = statuses or {}, devices
        self.calls: list[tuple[Any, ...]] = []
        self.last_error = 0
        self.gives: Any = 7
        for name in runtime._ARGTYPES:
            setattr(self, name, _Function(self, name))
        self.cudaGetErrorString = lambda status: b"out of memory" if status == 2 else None
        self.cudaGetErrorString.restype = None  # type: ignore[attr-defined]
        self.cudaGetLastError = self._clear

    def _clear(self) -> int:
        status, self.last_error = self.last_error, 0
        return status


class _Function:
    argtypes: list[Any]

    def __init__(self, library: Library, name: str) -> None:
        self._library, self._name = library, name

    def __call__(self, *args: Any) -> int:
        for arg, argtype in zip(args, self.argtypes, strict=True):
            argtype.from_param(arg)  # as ctypes would
        self._library.calls.append((self._name, *(_plain(arg) for arg in args)))
        for arg in args:
            if hasattr(arg, "_obj"):
                value = self._library.devices if self._name == "cudaGetDeviceCount" else self._library.gives
                arg._obj.value = value
        status = self._library.statuses.get(self._name, 0)
        self._library.last_error = status or self._library.last_error
        return status


def _plain(arg: Any) -> Any:
    return "→" if hasattr(arg, "_obj") else getattr(arg, "value", arg)


def _cudart(library: Library) -> Cudart:
    return Cudart(library)  # type: ignore[arg-type]


def test_calls_are_made_as_the_runtime_wants_them() -> None:
    library = Library(devices=3)
    cuda = _cudart(library)
    assert cuda.device_count() == 3
    cuda.use_device(2)
    cuda.host_register(4096, 8192)
    cuda.host_unregister(4096)
    cuda.ask_device()
    assert library.calls[1:] == [
        ("cudaSetDevice", 2),
        ("cudaFree", None),
        ("cudaHostRegister", 4096, 8192, 1),  # portable: for copies to every device
        ("cudaHostUnregister", 4096),
        ("cudaMemGetInfo", "→", "→"),
    ]


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("cudaGetDeviceCount", lambda cuda: cuda.device_count()),
        ("cudaDeviceGetAttribute", lambda cuda: cuda.device_attribute(113, 0)),
        ("cudaSetDevice", lambda cuda: cuda.use_device(0)),
        ("cudaFree", lambda cuda: cuda.use_device(0)),
        ("cudaHostRegister", lambda cuda: cuda.host_register(4096, 1)),
        ("cudaHostUnregister", lambda cuda: cuda.host_unregister(4096)),
        ("cudaMemcpyAsync", lambda cuda: cuda.memcpy_h2d_async(1, 2, 3, 4)),
        ("cudaStreamCreateWithFlags", lambda cuda: cuda.stream_create()),
        ("cudaStreamDestroy", lambda cuda: cuda.stream_destroy(5)),
        ("cudaStreamWaitEvent", lambda cuda: cuda.stream_wait_event(5, 6)),
        ("cudaStreamSynchronize", lambda cuda: cuda.stream_synchronize(5)),
        ("cudaStreamIsCapturing", lambda cuda: cuda.stream_is_capturing(5)),
        ("cudaEventCreateWithFlags", lambda cuda: cuda.event_create()),
        ("cudaEventDestroy", lambda cuda: cuda.event_destroy(6)),
        ("cudaEventRecord", lambda cuda: cuda.event_record(6, 5)),
        ("cudaEventQuery", lambda cuda: cuda.event_query(6)),
        ("cudaEventSynchronize", lambda cuda: cuda.event_synchronize(6)),
    ],
)
def test_a_refused_call_is_an_error_that_leaves_nothing_behind(name: str, call: Callable[[Cudart], Any]) -> None:
    """A last error that stays would surface in the next call of whoever shares the library."""
    library = Library({name: 2})
    with pytest.raises(CudaError, match=rf"{name}: out of memory \(error 2\)"):
        call(_cudart(library))
    assert library.last_error == 0


def test_streams_and_events_are_asked_for_as_the_runtime_wants_them() -> None:
    """The numbers are those of driver_types.h: kind 1 is host to device, stream flag 1 keeps off the default stream,
    event flag 2 records no time."""
    library = Library()
    cuda = _cudart(library)
    address = 0x7F00_0000_1000
    library.gives = address
    assert (cuda.stream_create(), cuda.event_create()) == (address,) * 2
    cuda.memcpy_h2d_async(address, address + 1, 6 << 30, address + 2)
    cuda.stream_wait_event(0, address)
    cuda.event_record(address, 0)
    cuda.stream_synchronize(address)
    cuda.event_synchronize(address)
    cuda.event_destroy(address)
    cuda.stream_destroy(address)
    cuda.host_register(4096, 8192, read_only=True)
    assert library.calls == [
        ("cudaStreamCreateWithFlags", "→", 1),
        ("cudaEventCreateWithFlags", "→", 2),
        ("cudaMemcpyAsync", address, address + 1, 6 << 30, 1, address + 2),
        ("cudaStreamWaitEvent", 0, address, 0),
        ("cudaEventRecord", address, 0),
        ("cudaStreamSynchronize", address),
        ("cudaEventSynchronize", address),
        ("cudaEventDestroy", address),
        ("cudaStreamDestroy", address),
        ("cudaHostRegister", 4096, 8192, 9),
    ]


def test_facts_are_read() -> None:
    library = Library()
    cuda = _cudart(library)
    assert cuda.device_attribute(runtime.READ_ONLY_REGISTRATION, 1) == 7
    assert library.calls == [("cudaDeviceGetAttribute", "→", 113, 1)]
    library.gives = 1
    assert cuda.stream_is_capturing(0)
    library.gives = 0
    assert not cuda.stream_is_capturing(0)


def test_a_pinned_copy_is_the_copy_and_the_event_behind_it() -> None:
    held = Library()
    other = Library({"cudaMemcpyAsync": 1})
    Cudart(other, held).copy_pinned(1, 2, 3, 4, 5)  # type: ignore[arg-type]
    assert held.calls[-2:] == [("cudaMemcpyAsync", 1, 2, 3, 1, 4), ("cudaEventRecord", 5, 4)]
    for name in ("cudaMemcpyAsync", "cudaEventRecord"):
        held = Library({name: 1})
        with pytest.raises(CudaError, match=name):
            Cudart(other, held).copy_pinned(1, 2, 3, 4, 5)  # type: ignore[arg-type]


def test_an_event_that_is_not_done_is_no_error_and_leaves_none() -> None:
    library = Library({"cudaEventQuery": 600})
    assert not _cudart(library).event_query(6)
    assert library.last_error == 0
    assert _cudart(Library()).event_query(6)


def test_the_bound_calls_are_those_of_the_library() -> None:
    """Every name that is bound is in the library that is installed here, if one is: ctypes raises otherwise."""
    loaded = next((lib for lib in map(runtime._try_load, runtime._candidates()) if lib is not None), None)
    if loaded is None:
        pytest.skip("no libcudart")
    Cudart(loaded)


def test_an_error_without_a_text_has_its_number() -> None:
    with pytest.raises(CudaError, match=r"cudaFree: unknown error \(error 999\)"):
        _cudart(Library({"cudaFree": 999})).use_device(0)


@pytest.mark.skipif(any(Path("/dev").glob("nvidia[0-9]*")), reason="has a GPU")
def test_a_host_without_a_gpu_has_a_reason_and_no_torch() -> None:
    before = "torch" in sys.modules
    found, reason = load_runtime()
    assert found is None
    assert reason
    assert ("torch" in sys.modules) == before


def test_without_a_library_that_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "_candidates", lambda: iter(["/nowhere/libcudart.so.13"]))
    assert load_runtime() == (None, "no libcudart was found")


@pytest.mark.parametrize(
    ("library", "reason"),
    [
        (Library({"cudaGetDeviceCount": 2}), "cudaGetDeviceCount: out of memory (error 2)"),
        (Library({"cudaGetDeviceCount": 100}), NO_GPU),
        (Library({"cudaGetDeviceCount": 35}), "cudaGetDeviceCount: unknown error (error 35)"),
        (Library(devices=0), NO_GPU),
    ],
)
def test_a_library_without_a_gpu_is_not_used(monkeypatch: pytest.MonkeyPatch, library: Library, reason: str) -> None:
    monkeypatch.setattr(runtime, "_candidates", lambda: iter(["/nowhere", "here"]))
    monkeypatch.setattr(runtime, "_try_load", lambda path, *_, **__: library if path == "here" else None)
    monkeypatch.setattr(runtime, "_has_driver", lambda: True)
    monkeypatch.setattr(runtime, "_missing_nodes", lambda: "; missing: /dev/nvidiactl")
    assert load_runtime() == (None, f"{reason}; missing: /dev/nvidiactl")


def test_a_library_without_a_driver_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch brings libcudart to hosts that never had a GPU."""
    monkeypatch.setattr(runtime, "_candidates", lambda: iter(["here"]))
    monkeypatch.setattr(runtime, "_try_load", lambda *_: Library({"cudaGetDeviceCount": 35}))
    monkeypatch.setattr(runtime, "_has_driver", lambda: False)
    assert load_runtime() == (None, NO_DRIVER)


def test_the_first_library_that_loads_is_the_one(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()
    monkeypatch.setattr(runtime, "_candidates", lambda: iter(["/nowhere", "here"]))
    monkeypatch.setattr(runtime, "_try_load", lambda path, *_, **__: library if path == "here" else None)
    found, reason = load_runtime()
    assert isinstance(found, Cudart)
    assert reason == ""
    # once torch, which is loaded here, has its copy, that one stays the one
    monkeypatch.setattr(runtime, "_candidates", lambda: iter(()))
    assert load_runtime() == (found, "")


@pytest.fixture(autouse=True)
def _found_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "_in_use", [])
    monkeypatch.setitem(sys.modules, "torch", sys)


def test_what_is_loaded_already_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two copies of the library have a last error each: it must be the one that torch uses."""
    monkeypatch.setitem(sys.modules, "torch", sys)  # which says nothing of a release of CUDA
    monkeypatch.setattr(runtime, "_try_load", lambda name, **_: name == "libcudart.so.12")
    assert next(runtime._candidates()) == "libcudart.so.12"


@pytest.mark.parametrize(("release", "first"), [("12.8", "libcudart.so.12"), ("13.0", "libcudart.so.13")])
def test_of_several_that_are_loaded_torchs_comes_first(
    monkeypatch: pytest.MonkeyPatch, release: str, first: str
) -> None:
    torch = SimpleNamespace(version=SimpleNamespace(cuda=release))
    monkeypatch.setitem(sys.modules, "torch", torch)  # type: ignore[arg-type]
    monkeypatch.setattr(runtime, "_try_load", lambda *_, **__: object())
    assert next(runtime._candidates()) == first


def test_another_packages_release_is_not_taken_for_torchs_of_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Old wheels of torch carry a copy whose name has a hash, which only the maps tell."""
    torch = SimpleNamespace(version=SimpleNamespace(cuda="11.8"))
    monkeypatch.setitem(sys.modules, "torch", torch)  # type: ignore[arg-type]
    monkeypatch.setattr(runtime, "_try_load", lambda name, **_: name == "libcudart.so.12")
    maps = "7f00-7f01 r-xp 00000000 08:01 1  /opt/x/lib/libcudart-0a1b.so.11.0\n"
    real = Path.read_text
    monkeypatch.setattr(
        Path, "read_text", lambda self, *a, **k: maps if str(self) == "/proc/self/maps" else real(self, *a, **k)
    )
    assert next(runtime._candidates()) == "/opt/x/lib/libcudart-0a1b.so.11.0"


def test_what_is_loaded_under_a_name_of_its_own_comes_before_what_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "_try_load", lambda *_, **__: None)
    maps = (
        "7f00-7f01 r-xp 00000000 08:01 1  /opt/x/lib/libcudart-0a1b.so.13\n" * 2
        + "7f02-7f03 r-xp 0 08:01 1 /lib/libc.so.6\n"
    )
    real = Path.read_text
    monkeypatch.setattr(
        Path, "read_text", lambda self, *a, **k: maps if str(self) == "/proc/self/maps" else real(self, *a, **k)
    )
    found = list(runtime._candidates())
    assert found[0] == "/opt/x/lib/libcudart-0a1b.so.13"
    assert found.count(found[0]) == 1
    assert found.index("libcudart.so.13") < found.index("libcudart.so.12")


def test_a_file_that_is_no_library_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "libcudart.so.13").write_bytes(b"no library")
    assert runtime._try_load(str(tmp_path / "libcudart.so.13")) is None
    assert isinstance(runtime._try_load("libc.so.6"), ctypes.CDLL)
