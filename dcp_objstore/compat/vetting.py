"""What torch would be made to do by the pickle of a value, looked at before torch unpickles it.

`weights_only=True` runs no code of the body's, but some that costs: 40 bytes can call
`bytearray(10**10)`, and a tuple nested a million deep ends the process when it becomes a key,
since hashing it recurses in C without a limit. (Both seen with torch 2.13.) So the opcodes that
torch knows are walked here without making anything, and what no `torch.save` writes is refused.

The walk goes exactly where torch's own goes: what torch stops at, ends it here too, and it is left
to torch to say why.
"""

from __future__ import annotations

import functools
import math
import struct
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable
from typing import Final

import torch

from dcp_objstore.compat.archive import Archive, ArchiveError
from dcp_objstore.errors import CheckpointCorruptError

_MAX_TUPLE_DEPTH: Final = 64
_MAX_MARKS: Final = 5_000  # Python's pickler ends at about a thousand, by its recursion limit
_MAX_KEY_BITS: Final = 64
_MAX_NAME_BYTES: Final = 1024
_Arguments = tuple[object, ...]
_FROM_TYPE: Final = "torch._tensor._rebuild_from_type_v2"
_QUANTIZED: Final = "torch._utils._rebuild_qtensor"
# They take a size as well as data; `torch.save` calls none of them.
_SIZED: Final = frozenset(
    f"{cls.__module__}.{cls.__name__}"
    for cls in (*torch._tensor_classes, *torch._storage_classes, torch.Tensor)
)


def vet(body: bytes | memoryview, key: str | None = None) -> None:
    """Return if torch may unpickle the value; it may still find it damaged or unsafe.

    Args:
        body: what `torch.save` wrote; only the archives that it writes since torch 1.6.

    Raises:
        CheckpointCorruptError: it is no such archive, or asks for what no value that was saved
            needs: memory without bytes for it, or nesting that would end the process.
    """
    try:
        archive = Archive(body)
        walk = _Walk(archive.read("data.pkl"), archive)
        walk.run()
    except ArchiveError as error:
        raise CheckpointCorruptError(
            f"the value is damaged, or not what torch.save writes: {error}", key=key
        ) from error
    except _HostileError as error:
        raise CheckpointCorruptError(
            f"the value is not what torch.save writes: {error}", key=key
        ) from error


class _HostileError(Exception):
    """What no `torch.save` writes."""


class _EndError(Exception):
    """Torch goes no further than here."""


class _Global:
    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class _Tuple:
    __slots__ = ("depth", "items")

    def __init__(self, items: tuple[object, ...], depth: int) -> None:
        self.items = items
        self.depth = depth


class _Made:
    """What a call gave. It may be a tuple, too, or a number."""

    __slots__ = ("depth", "name")

    def __init__(self, name: str, depth: int) -> None:
        self.name = name
        self.depth = depth


_OTHER: Final = object()  # a list, dictionary, set, float, None, or bool


class _Walk:
    def __init__(self, pickled: bytes, archive: Archive) -> None:
        self.body = pickled
        self.archive = archive
        self.pos = 0
        self.stack: list[object] = []
        self.marked: list[list[object]] = []
        self.memo: dict[int, object] = {}

    def run(self) -> None:
        if not self.body.startswith(b"\x80\x02"):
            return  # torch does not read it safely
        try:
            while True:
                opcode = self.body[self.pos]
                self.pos += 1
                handler = _HANDLERS.get(opcode)
                if handler is None:  # STOP, or what torch does not read
                    return
                handler(self)
        except (IndexError, KeyError, UnicodeDecodeError, struct.error, _EndError):
            return

    def take(self, length: int) -> bytes:
        taken = self.body[self.pos : self.pos + length]
        if len(taken) < length:
            raise _EndError
        self.pos += length
        return taken

    def number(self, form: str, width: int) -> int:
        return int(struct.unpack(form, self.take(width))[0])

    def pop_mark(self) -> list[object]:
        items = self.stack
        self.stack = self.marked.pop()
        return items

    def push_tuple(self, items: list[object]) -> None:
        depth = 1 + max((i.depth for i in items if isinstance(i, _Tuple | _Made)), default=0)
        if depth > _MAX_TUPLE_DEPTH:
            raise _HostileError(f"tuples are nested more than {_MAX_TUPLE_DEPTH} deep")
        self.stack.append(_Tuple(tuple(items), depth))

    def call(self) -> None:
        args, function = self.stack.pop(), self.stack.pop()
        if type(function) is not _Global:
            raise _EndError  # torch calls only what has a name
        if type(args) is not _Tuple:
            raise _HostileError(f"it calls {function.name[:200]} with what it made itself")
        self.check_call(function.name, args.items)
        if args.depth >= _MAX_TUPLE_DEPTH:
            raise _HostileError(f"calls are nested more than {_MAX_TUPLE_DEPTH} deep")
        self.stack.append(_Made(function.name, args.depth + 1))

    def check_call(self, name: str, args: tuple[object, ...]) -> None:
        wanted = _ARGUMENTS.get(name)
        if wanted is not None and not wanted(args):
            raise _HostileError(
                f"it calls {name[:200]} with other arguments than what it has saved"
            )
        if name in _SIZED and args:
            raise _HostileError(f"it calls {name}, which takes a size")
        if name == _QUANTIZED and len(args) > 2 and type(args[2]) is _Tuple:
            numbers = [item for item in args[2].items if type(item) is int]
            if math.prod(numbers) > 2 * self.archive.unpacked_bytes:
                raise _HostileError("a quantized tensor is larger than what is stored")
        if name == _FROM_TYPE and len(args) > 2:
            function, inner = args[0], args[2]
            if type(function) is not _Global or type(inner) is not _Tuple:
                raise _HostileError("it calls what it made itself")
            self.check_call(function.name, inner.items)

    def check_keys(self, keys: list[object]) -> None:
        # Whole numbers can be chosen so that all have one hash, if they may be large.
        if any(type(key) is int and key.bit_length() > _MAX_KEY_BITS for key in keys):
            raise _HostileError("a whole number with more than 64 bits is a key")

    def storage(self) -> None:
        place = self.stack.pop()
        if type(place) is not _Tuple or len(place.items) < 5:
            raise _EndError
        _, cls, name, _, count = place.items[:5]
        if type(cls) is not _Global or type(name) is not str or type(count) is not int:
            raise _HostileError("a storage is described in an unknown way")
        record = self.archive.records.get(f"{self.archive.root}/data/{name}".lower())
        itemsize = _itemsize(cls.name)
        if record is None or itemsize is None:
            raise _HostileError("a storage is not there, or of no known type")
        if not 0 <= count * itemsize <= record.size_bytes:
            raise _HostileError(f"a storage of {record.size_bytes} bytes says that it has others")
        self.stack.append(_Made("storage", 0))


def _one(kind: Callable[[object], bool]) -> Callable[[_Arguments], bool]:
    return lambda args: not args or (len(args) == 1 and kind(args[0]))


def _is_other(value: object) -> bool:
    return value is _OTHER


def _is_text_in_latin_1(args: _Arguments) -> bool:
    return len(args) == 2 and type(args[0]) is str and args[1] in ("latin1", "latin-1")


# What Python's pickler writes for these. With a number, or what yields one, they take memory for
# which there are no bytes; with a tensor they walk through its elements, stored or not.
_ARGUMENTS: Final[dict[str, Callable[[_Arguments], bool]]] = {
    "_codecs.encode": _is_text_in_latin_1,
    "builtins.bytearray": lambda args: (
        _one(lambda arg: type(arg) is _Made and arg.name == "_codecs.encode")(args)
        or _is_text_in_latin_1(args)
    ),
    "builtins.set": _one(_is_other),
    "collections.Counter": _one(_is_other),
    "collections.OrderedDict": _one(_is_other),
    "torch.Size": _one(lambda arg: type(arg) is _Tuple),
}


@functools.cache
def _itemsize(name: str) -> int | None:
    """Bytes per element of a storage class by its name, `torch.FloatStorage`; None: no such."""
    if name == "torch.storage.UntypedStorage":
        return 1
    classes = torch.storage._dtype_to_storage_type_map()
    return {f"torch.{cls}": dtype.itemsize for dtype, cls in classes.items()}.get(name)


def _global(w: _Walk) -> None:
    module, name = _line(w), _line(w)
    # As torch does, and pickle after it.
    if (module, name) in NAME_MAPPING:
        module, name = NAME_MAPPING[module, name]
    else:
        module = IMPORT_MAPPING.get(module, module)
    w.stack.append(_Global(f"{module}.{name}"))


def _line(w: _Walk) -> str:
    end = w.body.find(b"\n", w.pos, w.pos + _MAX_NAME_BYTES)
    if end < 0:
        raise _EndError  # no name that torch allows is that long
    text = w.body[w.pos : end].decode()
    w.pos = end + 1
    return text


def _protocol(w: _Walk) -> None:
    if w.number("B", 1) != 2:
        raise _HostileError("it changes its protocol on the way")


def _build(w: _Walk) -> None:
    w.stack.pop()
    if type(w.stack[-1]) is not _Made:
        raise _EndError  # torch builds only on what a call gave


def _append(w: _Walk) -> None:
    w.stack.pop()
    if not w.stack:
        raise _EndError


def _setitem(w: _Walk) -> None:
    w.stack.pop()
    w.check_keys([w.stack.pop()])


def _last(w: _Walk, count: int) -> None:
    items = w.stack[-count:]
    if len(items) < count:
        raise _EndError
    del w.stack[-count:]
    w.push_tuple(items)


def _put(w: _Walk, number: int) -> None:
    w.memo[number] = w.stack[-1]


def _mark(w: _Walk) -> None:
    if len(w.marked) >= _MAX_MARKS:
        raise _HostileError(f"marks are nested more than {_MAX_MARKS} deep")
    w.marked.append(w.stack)
    w.stack = []


def _of(value: object) -> Callable[[_Walk], None]:
    return lambda w: w.stack.append(value)


_HANDLERS: Final[dict[int, Callable[[_Walk], None]]] = {
    ord(code): handler
    for code, handler in {
        "\x80": _protocol,
        "c": _global,
        "\x81": _Walk.call,
        "R": _Walk.call,
        "b": _build,
        "a": _append,
        "e": lambda w: w.pop_mark() and None,
        "s": _setitem,
        "u": lambda w: w.check_keys(w.pop_mark()[::2]),
        "(": _mark,
        "t": lambda w: w.push_tuple(w.pop_mark()),
        "\x85": lambda w: _last(w, 1),
        "\x86": lambda w: _last(w, 2),
        "\x87": lambda w: _last(w, 3),
        ")": _of(_Tuple((), 0)),
        **dict.fromkeys("N\x88\x89]}\x8f", _of(_OTHER)),
        "J": lambda w: w.stack.append(w.number("<i", 4)),
        "K": lambda w: w.stack.append(w.number("B", 1)),
        "M": lambda w: w.stack.append(w.number("<H", 2)),
        "G": lambda w: (w.take(8), w.stack.append(_OTHER))[1],
        "X": lambda w: w.stack.append(w.take(w.number("<I", 4)).decode("utf-8", "surrogatepass")),
        "U": lambda w: (w.take(w.number("B", 1)), w.stack.append(_OTHER))[1],
        "Q": _Walk.storage,
        "h": lambda w: w.stack.append(w.memo[w.number("B", 1)]),
        "j": lambda w: w.stack.append(w.memo[w.number("<I", 4)]),
        "q": lambda w: _put(w, w.number("B", 1)),
        "r": lambda w: _put(w, w.number("<I", 4)),
        "\x8a": lambda w: w.stack.append(
            int.from_bytes(w.take(w.number("B", 1)), "little", signed=True)
        ),
    }.items()
}
