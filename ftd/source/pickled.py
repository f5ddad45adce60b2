"""Reads a pickle without unpickling it: a closed list of opcodes and of names, and nothing is ever imported or called.

What the stream builds becomes plain values: numbers, text, bytes, lists, tuples, `Mapping`s, and for everything that
has a name the values of `ftd/source/torchnames.py`. Opcodes are those that Python's pickler writes in protocols 2 to 5
for the values of a state dict (https://docs.python.org/3/library/pickletools.html); the rest is refused.

Memory is bounded by the stream: nothing is allocated for a length before its bytes are there, the memo grows by
entries and not by index, keys are never hashed, and containers are counted.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from ftd.errors import SourceError
from ftd.source.torchnames import Mapping, Named, Names, Opaque, call
from ftd.source.wording import DOWNLOAD_AGAIN

#: Largest pickle that is read, like the header of a safetensors file. That of 100,000 tensors takes about 20 MB.
MAX_PICKLE_BYTES = 100_000_000
#: Tuples, lists, dicts, pairs of dicts and results of calls: each takes some hundred bytes here and one there. The
#: pickle of 500,000 tensors has as many.
MAX_VALUES = 4_000_000
#: Longest name of a module or of what it holds.
_MAX_NAME_BYTES = 1024
_PROTOCOLS = range(2, 6)


class EndsEarlyError(Exception):
    """The stream goes on behind the bytes that were given."""


def read_pickle(data: bytes, start: int, names: Names, storage_of: Callable[[Any], Any]) -> tuple[Any, int]:
    """The value that the pickle at `start` stands for, and where it ends.

    Args:
        names: which names are known; told those that are not.
        storage_of: the storage that a persistent id stands for.

    Raises:
        EndsEarlyError: `data` ends first.
        SourceError: it breaks the format or uses what is not on the list; messages carry no path.
    """
    machine = _Machine(data, start, names, storage_of)
    try:
        return machine.run(), machine.at
    except (IndexError, KeyError, ValueError, TypeError, OverflowError) as error:
        raise SourceError(
            f"has a pickle that cannot be read at byte {machine.at}: {type(error).__name__}", DOWNLOAD_AGAIN
        ) from None


class _Machine:
    def __init__(self, data: bytes, start: int, names: Names, storage_of: Callable[[Any], Any]) -> None:
        self.at = start
        self._data, self._names, self._storage_of = data, names, storage_of
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        self._room = MAX_VALUES

    def run(self) -> Any:
        data, end = self._data, len(self._data)
        while self.at < end:
            opcode = data[self.at]
            self.at += 1
            if opcode == _STOP:
                return self._stack.pop()
            step = _STEPS.get(opcode)
            if step is None:
                raise SourceError(
                    f"has the pickle opcode 0x{opcode:02x} at byte {self.at - 1}, which no state dict needs",
                    DOWNLOAD_AGAIN,
                )
            step(self)
        raise EndsEarlyError

    # --- the stream

    def _take(self, count: int) -> bytes:
        end = self.at + count
        if end > len(self._data):
            raise EndsEarlyError
        taken = self._data[self.at : end]
        self.at = end
        return taken

    def _number(self, form: struct.Struct) -> Any:
        try:
            (value,) = form.unpack_from(self._data, self.at)
        except struct.error:
            raise EndsEarlyError from None
        self.at += form.size
        return value

    def _line(self) -> str:
        end = self._data.find(b"\n", self.at, self.at + _MAX_NAME_BYTES)
        if end < 0:
            if len(self._data) - self.at < _MAX_NAME_BYTES:
                raise EndsEarlyError
            raise ValueError
        line = self._data[self.at : end].decode()
        self.at = end + 1
        return line

    # --- the stack

    def _make(self, value: Any) -> None:
        self._count(1)
        self._stack.append(value)

    def _count(self, values: int) -> None:
        self._room -= values
        if self._room < 0:
            raise SourceError(f"holds more than {MAX_VALUES} values in containers", "save the state dict alone")

    def _marked(self) -> list[Any]:
        mark = self._marks.pop()
        items = self._stack[mark:]
        del self._stack[mark:]
        return items

    # --- opcodes

    def protocol(self) -> None:
        version = self._take(1)[0]
        if version not in _PROTOCOLS:
            raise SourceError(f"is a pickle of protocol {version}, expected 2 to 5", "save it by torch.save again")

    def frame(self) -> None:
        self._take(8)  # only says how much to read at once

    def mark(self) -> None:
        self._marks.append(len(self._stack))

    def constant(self, value: Any) -> None:
        self._stack.append(value)

    def number(self, form: struct.Struct) -> None:
        self._stack.append(self._number(form))

    def long(self, form: struct.Struct) -> None:
        self._stack.append(int.from_bytes(self._take(self._number(form)), "little", signed=True))

    def text(self, form: struct.Struct) -> None:
        self._stack.append(self._take(self._number(form)).decode("utf-8", "surrogatepass"))

    def raw(self, form: struct.Struct) -> None:
        self._stack.append(self._take(self._number(form)))

    def empty(self, kind: Callable[[], Any]) -> None:
        self._make(kind())

    def tuple_of(self, count: int) -> None:
        if count > len(self._stack):
            raise IndexError
        items = tuple(self._stack[len(self._stack) - count :])
        del self._stack[len(self._stack) - count :]
        self._make(items)

    def tuple_marked(self) -> None:
        self._make(tuple(self._marked()))

    def list_marked(self) -> None:
        self._make(self._marked())

    def append(self) -> None:
        value = self._stack.pop()
        self._extend([value])

    def appends(self) -> None:
        self._extend(self._marked())

    def _extend(self, values: list[Any]) -> None:
        target = self._stack[-1]
        if isinstance(target, list):
            target.extend(values)
        elif not isinstance(target, Opaque):
            raise TypeError

    def set_item(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._update([key, value])

    def set_items(self) -> None:
        self._update(self._marked())

    def dict_marked(self) -> None:
        pairs = self._marked()
        self._make(Mapping())
        self._update(pairs)

    def _update(self, flat: list[Any]) -> None:
        target = self._stack[-1]
        if isinstance(target, Mapping):
            self._count(len(flat) // 2)
            target.pairs.extend(zip(flat[::2], flat[1::2], strict=True))
        elif not isinstance(target, Opaque):
            raise TypeError

    def name(self) -> None:
        module = self._line()
        self._stack.append(self._names.find(module, self._line()))

    def name_from_stack(self) -> None:
        attribute, module = self._stack.pop(), self._stack.pop()
        if not isinstance(module, str) or not isinstance(attribute, str):
            raise TypeError
        self._stack.append(self._names.find(module[:_MAX_NAME_BYTES], attribute[:_MAX_NAME_BYTES]))

    def reduce(self) -> None:
        arguments, function = self._stack.pop(), self._stack.pop()
        if not isinstance(arguments, tuple) or not isinstance(function, Named | Opaque):
            raise TypeError
        self._make(call(function, arguments))

    def new_with_keywords(self) -> None:
        self._stack.pop()  # keywords: nothing that is known takes any
        self.reduce()

    def build(self) -> None:
        self._stack.pop()  # attributes: of a state dict, its `_metadata`; nothing that is known is made of them
        if not isinstance(self._stack[-1], Mapping | Opaque):
            raise TypeError

    def persistent(self) -> None:
        self._stack.append(self._storage_of(self._stack.pop()))

    def put(self, form: struct.Struct) -> None:
        self._memo[self._number(form)] = self._stack[-1]

    def memoize(self) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def get(self, form: struct.Struct) -> None:
        self._stack.append(self._memo[self._number(form)])

    def pop(self) -> None:
        self._stack.pop()


_U8, _U16, _I32, _U32, _U64, _F64 = (struct.Struct(form) for form in ("<B", "<H", "<i", "<I", "<Q", ">d"))
_STOP = ord(".")
_Step = Callable[[_Machine], None]


def _with(step: Callable[[_Machine, Any], None], value: Any) -> _Step:
    return lambda machine: step(machine, value)


_STEPS: dict[int, _Step] = {
    0x80: _Machine.protocol, 0x95: _Machine.frame, ord("("): _Machine.mark, ord("0"): _Machine.pop,
    ord("N"): _with(_Machine.constant, None), 0x88: _with(_Machine.constant, True),
    0x89: _with(_Machine.constant, False), ord(")"): _with(_Machine.constant, ()),
    ord("K"): _with(_Machine.number, _U8), ord("M"): _with(_Machine.number, _U16),
    ord("J"): _with(_Machine.number, _I32), ord("G"): _with(_Machine.number, _F64),
    0x8A: _with(_Machine.long, _U8), 0x8B: _with(_Machine.long, _U32),
    ord("X"): _with(_Machine.text, _U32), 0x8C: _with(_Machine.text, _U8), 0x8D: _with(_Machine.text, _U64),
    # text as Python 2 wrote it
    ord("U"): _with(_Machine.text, _U8), ord("T"): _with(_Machine.text, _U32),
    ord("B"): _with(_Machine.raw, _U32), ord("C"): _with(_Machine.raw, _U8), 0x8E: _with(_Machine.raw, _U64),
    0x96: _with(_Machine.raw, _U64),
    ord("]"): _with(_Machine.empty, list), ord("}"): _with(_Machine.empty, Mapping),
    0x8F: _with(_Machine.empty, list),
    0x85: _with(_Machine.tuple_of, 1), 0x86: _with(_Machine.tuple_of, 2), 0x87: _with(_Machine.tuple_of, 3),
    ord("t"): _Machine.tuple_marked, ord("l"): _Machine.list_marked, ord("d"): _Machine.dict_marked,
    0x91: _Machine.tuple_marked,
    ord("a"): _Machine.append, ord("e"): _Machine.appends, 0x90: _Machine.appends,
    ord("s"): _Machine.set_item, ord("u"): _Machine.set_items,
    ord("c"): _Machine.name, 0x93: _Machine.name_from_stack,
    ord("R"): _Machine.reduce, 0x81: _Machine.reduce, 0x92: _Machine.new_with_keywords, ord("b"): _Machine.build,
    ord("Q"): _Machine.persistent,
    ord("q"): _with(_Machine.put, _U8), ord("r"): _with(_Machine.put, _U32), 0x94: _Machine.memoize,
    ord("h"): _with(_Machine.get, _U8), ord("j"): _with(_Machine.get, _U32),
}  # fmt: skip
