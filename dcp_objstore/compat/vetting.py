"""What torch would be made to do by the pickle of a value, looked at before torch unpickles it.

`weights_only=True` runs no code of the body's, but some that costs: 40 bytes can call
`bytearray(10**10)`, and a tuple nested a million deep ends the process when it becomes a key,
since hashing it recurses in C without a limit. (Both seen with torch 2.13.) So the opcodes that
torch knows are walked here without making anything, and what no `torch.save` writes is refused.

The walk goes exactly where torch's own goes: what torch stops at, ends it here too, and it is left
to torch to say why.

Some common values run nothing when they are unpickled, and torch still refuses them: a `BytesIO`, a
`datetime`, an array of NumPy's. The walk knows exactly what Python's pickler writes for these
(`_INERT_CALLS`, `_INERT_STATES`), so that they can be allowed without declaring anything to torch,
which would hold for the whole process. Only a pickle that consists of nothing but such values and
what torch allows is known to be harmless; one that departs from these forms is left to torch, which
refuses it.
"""

from __future__ import annotations

import enum
import functools
import http
import math
import pathlib
import re
import signal
import socket
import struct
import uuid
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable
from typing import Final

import torch

from dcp_objstore import torch_private
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
    f"{cls.__module__}.{cls.__name__}" for cls in (*torch_private.legacy_classes(), torch.Tensor)
)


def vet(body: bytes | memoryview, key: str | None = None) -> frozenset[str]:
    """Return if torch may unpickle the value; it may still find it damaged or unsafe.

    Args:
        body: what `torch.save` wrote; only the archives that it writes since torch 1.6.

    Returns:
        Names of globals in it that torch refuses by default. With these allowed, the value runs
        nothing, also where it is unpickled without `weights_only`. Empty where that is not known.

    Raises:
        CheckpointCorruptError: it is no such archive, or asks for what no value that was saved
            needs: memory without bytes for it, or nesting that would end the process.
    """
    try:
        archive = Archive(body)
        walk = _Walk(archive.read("data.pkl"), archive)
        walk.run()
        # Decimals can be chosen so that all have one hash.
        if not walk.is_known or (walk.hashes_items and _DECIMAL in walk.inert):
            return frozenset()
        return frozenset(walk.inert)
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
    __slots__ = ("depth", "has_inert", "items")

    def __init__(self, items: tuple[object, ...], depth: int) -> None:
        self.items = items
        self.depth = depth
        self.has_inert = any(map(_is_inert, items))


class _Made:
    """What a call gave. It may be a tuple, too, or a number.

    `size_bytes` is that of bytes, or of an element of a NumPy dtype; else None.
    """

    __slots__ = ("depth", "is_built", "name", "size_bytes")

    def __init__(self, name: str, depth: int, size_bytes: int | None = None) -> None:
        self.name = name
        self.depth = depth
        self.size_bytes = size_bytes
        self.is_built = False


def _is_inert(value: object) -> bool:
    if isinstance(value, _Tuple):
        return value.has_inert
    return isinstance(value, _Global | _Made) and value.name in _INERT


_NONE: Final = object()
_TRUE: Final = object()
_FALSE: Final = object()
_OTHER: Final = object()  # a list, dictionary, set, or float


class _Walk:
    def __init__(self, pickled: bytes, archive: Archive) -> None:
        self.body = pickled
        self.archive = archive
        self.pos = 0
        self.stack: list[object] = []
        self.marked: list[list[object]] = []
        self.memo: dict[int, object] = {}
        self.inert: set[str] = set()  # names of `_INERT` that were met
        # Whether all of it was read, and has only known forms.
        self.is_known = True
        self.hashes_items = False  # of lists, which are not looked into

    def run(self) -> None:
        if not self.body.startswith(b"\x80\x02"):
            self.is_known = False
            return  # torch does not read it safely
        try:
            while True:
                opcode = self.body[self.pos]
                self.pos += 1
                handler = _HANDLERS.get(opcode)
                if handler is None:  # STOP, or what torch does not read
                    self.is_known &= opcode == _STOP
                    return
                handler(self)
        except (IndexError, KeyError, UnicodeDecodeError, struct.error, _EndError):
            self.is_known = False

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

    def call(self, *, is_new: bool) -> None:
        args, function = self.stack.pop(), self.stack.pop()
        if type(function) is not _Global:
            raise _EndError  # torch calls only what has a name
        if type(args) is not _Tuple:
            raise _HostileError(f"it calls {function.name[:200]} with what it made itself")
        self.check_call(function.name, args.items)
        if function.name in _INERT:
            form = (_INERT_NEW if is_new else _INERT_CALLS).get(function.name)
            self.is_known = self.is_known and form is not None and form(args.items)
        else:
            # What torch allows may do more with such a value than torch had in mind.
            self.is_known = self.is_known and not args.has_inert
            self.hashes_items |= function.name in _HASHING and bool(args.items)
        if args.depth >= _MAX_TUPLE_DEPTH:
            raise _HostileError(f"calls are nested more than {_MAX_TUPLE_DEPTH} deep")
        size_bytes = _size_of_made(function.name, args.items) if self.is_known else None
        self.stack.append(_Made(function.name, args.depth + 1, size_bytes))

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
        self.is_known &= not any(
            key.has_inert if isinstance(key, _Tuple) else _is_made(key, _DECIMAL) for key in keys
        )

    def check_target(self, *names: str) -> None:
        """Whether items are added to a list or dictionary, or to what one of these calls gave."""
        target = self.stack[-1]
        self.is_known &= target is _OTHER or (type(target) is _Made and target.name in names)

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


# --- values that run nothing -----------------------------------------------------------------

_STOP: Final = ord(".")
_DECIMAL: Final = "decimal.Decimal"
_DEQUE: Final = "collections.deque"
_DICTIONARIES: Final = ("collections.OrderedDict", "collections.Counter")
_HASHING: Final = frozenset({"builtins.set", *_DICTIONARIES})
_DTYPE: Final = "numpy.dtype"
_ARRAY: Final = "numpy.ndarray"
_NUMPY: Final = ("numpy._core.multiarray", "numpy.core.multiarray")  # of NumPy 2, and 1
# Others have elements that are no numbers: text, records, or any Python object.
_NUMPY_DTYPES: Final = {
    "b1": 1,
    **{f"{kind}{size}": size for kind in "iu" for size in (1, 2, 4, 8)},
    "f2": 2,
    "f4": 4,
    "f8": 8,
    "c8": 8,
    "c16": 16,
}
_MAX_DIMENSIONS: Final = 32
_MAX_EXTENT: Final = 2**58
_Form = Callable[[_Arguments], bool]


def _are(*kinds: type) -> _Form:
    """Arguments of exactly these types."""
    return lambda args: tuple(map(type, args)) == kinds


def _is_made(value: object, *names: str) -> bool:
    return type(value) is _Made and value.name in names


def _size_of(value: object) -> int | None:
    """The length of bytes; None for anything else."""
    if type(value) is _Made and value.name in ("_codecs.encode", "builtins.bytes"):
        return value.size_bytes
    return None


def _size_of_made(name: str, args: _Arguments) -> int | None:
    """`_Made.size_bytes` of what a call gives, which has a known form."""
    if name == "_codecs.encode" and type(args[0]) is str:
        return len(args[0])
    if name == "builtins.bytes":
        return 0
    return _NUMPY_DTYPES[args[0]] if name == _DTYPE else None  # type: ignore[index]


def _time(size_bytes: int) -> _Form:
    """Packed into so many bytes; perhaps a time zone."""
    return lambda args: (
        0 < len(args) <= 2
        and _size_of(args[0]) == size_bytes
        and all(_is_made(zone, "datetime.timezone") for zone in args[1:])
    )


def _is_deque(args: _Arguments) -> bool:
    """Empty, perhaps with a limit; its items are appended."""
    if not args:
        return True
    start = args[0]
    return (
        len(args) <= 2
        and type(start) is _Tuple
        and not start.items
        and all(limit is _NONE or type(limit) is int for limit in args[1:])
    )


def _is_zone(args: _Arguments) -> bool:
    return (
        0 < len(args) <= 2
        and _is_made(args[0], "datetime.timedelta")
        and all(type(name) is str for name in args[1:])
    )


def _is_dtype(args: _Arguments) -> bool:
    """A copy: without that it would be NumPy's own, and its state that of the process."""
    return (
        len(args) == 3
        and type(args[0]) is str
        and args[0] in _NUMPY_DTYPES
        and args[1] is _FALSE
        and args[2] is _TRUE
    )


def _is_empty_array(args: _Arguments) -> bool:
    return (
        len(args) == 3
        and type(args[0]) is _Global
        and args[0].name == _ARRAY
        and type(args[1]) is _Tuple
        and args[1].items == (0,)
        and _size_of(args[2]) == 1
    )


def _is_numpy_scalar(args: _Arguments) -> bool:
    if len(args) != 2 or not _is_made(args[0], _DTYPE):
        return False
    size_bytes = _size_of(args[1])
    return size_bytes is not None and size_bytes == args[0].size_bytes  # type: ignore[attr-defined]


def _one_of(cls: type[enum.Enum]) -> _Form:
    """The value of a member; other values could make new members of a flag."""
    values = frozenset((type(member.value), member.value) for member in cls)
    return lambda args: len(args) == 1 and (type(args[0]), args[0]) in values


_ENUM_MODULES: Final = (http, re, signal, socket, uuid)
_ENUMS: Final = {
    f"{module.__name__}.{name}": value
    for module in _ENUM_MODULES
    for name, value in vars(module).items()
    if isinstance(value, type)
    and issubclass(value, enum.Enum)
    and (value.__module__, value.__qualname__) == (module.__name__, name)
}
# In some versions of Python members are pickled by the name that they have in their module.
_MEMBERS: Final = frozenset(
    f"{module.__name__}.{name}"
    for module in _ENUM_MODULES
    for name, value in vars(module).items()
    if isinstance(value, enum.Enum)
)
_PATHS: Final = frozenset(
    f"{module}.{cls.__name__}"
    for cls in (type(pathlib.Path()), pathlib.PurePosixPath, pathlib.PureWindowsPath)
    for module in ("pathlib", cls.__module__)
)

# What Python's pickler writes, by what is called, and what of its arguments it must be sure of:
# that nothing is iterated over, called or allocated for which there are no bytes.
_INERT_CALLS: Final[dict[str, _Form]] = {
    "builtins.bytes": _are(),  # empty; others are made by _codecs.encode
    "builtins.range": _are(int, int, int),
    _DEQUE: _is_deque,
    "datetime.date": _time(4),
    "datetime.datetime": _time(10),
    "datetime.time": _time(6),
    "datetime.timedelta": _are(int, int, int),
    "datetime.timezone": _is_zone,
    _DECIMAL: _are(str),
    _DTYPE: _is_dtype,
    **dict.fromkeys(_PATHS, lambda args: all(type(part) is str for part in args)),
    **{f"{module}._reconstruct": _is_empty_array for module in _NUMPY},
    **{f"{module}.scalar": _is_numpy_scalar for module in _NUMPY},
    **{name: _one_of(cls) for name, cls in _ENUMS.items()},
}
_INERT_NEW: Final[dict[str, _Form]] = {"_io.BytesIO": _are()}
_INERT: Final = frozenset({*_INERT_CALLS, *_INERT_NEW, *_MEMBERS, _ARRAY})


def _is_buffer(_: _Made, state: object) -> bool:
    """A BytesIO: its bytes, its position, and no attributes."""
    if type(state) is not _Tuple or len(state.items) != 3:
        return False
    body, position, attributes = state.items
    size_bytes = _size_of(body)
    return (
        size_bytes is not None
        and type(position) is int
        and 0 <= position <= size_bytes
        and attributes is _NONE
    )


def _is_dtype_state(_: _Made, state: object) -> bool:
    """Version, byte order, and nothing that only dtypes with fields have."""
    return (
        type(state) is _Tuple
        and len(state.items) == 8
        and state.items[1] in ("<", ">", "|", "=")
        and (state.items[0], *state.items[2:]) == (3, _NONE, _NONE, _NONE, -1, -1, 0)
    )


def _is_array_state(_: _Made, state: object) -> bool:
    """Version, shape, dtype, order, and as many bytes as these say."""
    if type(state) is not _Tuple or len(state.items) != 5:
        return False
    version, shape, dtype, order, body = state.items
    if type(shape) is not _Tuple or not _is_made(dtype, _DTYPE) or order not in (_TRUE, _FALSE):
        return False
    sizes = [size for size in shape.items if type(size) is int and 0 <= size <= _MAX_EXTENT]
    return (
        version == 1
        and len(sizes) == len(shape.items) <= _MAX_DIMENSIONS
        # Not only where a size of 0 hides it.
        and math.prod(size or 1 for size in sizes) <= _MAX_EXTENT
        and _size_of(body) == math.prod(sizes) * dtype.size_bytes  # type: ignore[attr-defined]
    )


_INERT_STATES: Final[dict[str, Callable[[_Made, object], bool]]] = {
    "collections.OrderedDict": lambda _, state: state is _OTHER,
    "_io.BytesIO": _is_buffer,
    _DTYPE: _is_dtype_state,
    **{f"{module}._reconstruct": _is_array_state for module in _NUMPY},
}


@functools.cache
def _itemsize(name: str) -> int | None:
    """Bytes per element of a storage class by its name, `torch.FloatStorage`; None: no such."""
    if name == "torch.storage.UntypedStorage":
        return 1
    classes = torch_private.storage_classes()
    return {f"torch.{cls}": dtype.itemsize for dtype, cls in classes.items()}.get(name)


def _global(w: _Walk) -> None:
    module, name = _line(w), _line(w)
    # As torch does, and pickle after it.
    if (module, name) in NAME_MAPPING:
        module, name = NAME_MAPPING[module, name]
    else:
        module = IMPORT_MAPPING.get(module, module)
    found = _Global(f"{module}.{name}")
    if found.name in _INERT:
        w.inert.add(found.name)
    w.stack.append(found)


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
    state = w.stack.pop()
    made = w.stack[-1]
    if type(made) is not _Made:
        raise _EndError  # torch builds only on what a call gave
    if made.is_built:  # the first state may hold what is to be called with the second
        raise _HostileError("it sets the state of one object twice")
    made.is_built = True
    form = _INERT_STATES.get(made.name)
    w.is_known = w.is_known and form is not None and form(made, state)


def _append(w: _Walk) -> None:
    w.stack.pop()
    if not w.stack:
        raise _EndError
    w.check_target(_DEQUE)


def _appends(w: _Walk) -> None:
    w.pop_mark()
    w.check_target(_DEQUE)


def _setitem(w: _Walk) -> None:
    w.stack.pop()
    w.check_keys([w.stack.pop()])
    w.check_target(*_DICTIONARIES)


def _setitems(w: _Walk) -> None:
    w.check_keys(w.pop_mark()[::2])
    w.check_target(*_DICTIONARIES)


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
        "\x81": lambda w: w.call(is_new=True),
        "R": lambda w: w.call(is_new=False),
        "b": _build,
        "a": _append,
        "e": _appends,
        "s": _setitem,
        "u": _setitems,
        "(": _mark,
        "t": lambda w: w.push_tuple(w.pop_mark()),
        "\x85": lambda w: _last(w, 1),
        "\x86": lambda w: _last(w, 2),
        "\x87": lambda w: _last(w, 3),
        ")": _of(_Tuple((), 0)),
        "N": _of(_NONE),
        "\x88": _of(_TRUE),
        "\x89": _of(_FALSE),
        **dict.fromkeys("]}\x8f", _of(_OTHER)),
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
