"""Examine the pickle of a value before torch unpickles it.

With `weights_only=True` torch runs no code from the pickle, but it can still be made to do harm: 40
bytes can call `bytearray(10**10)`, and a tuple that is nested a million deep ends the process when
it is used as a key, because it is hashed by recursion in C without a limit. (Both were seen with
torch 2.13.) So the pickle is first unpickled with stand-ins (`inert_pickle`), and each call is
checked when it would be made. A call that no `torch.save` writes is refused. Where torch would
stop, this stops too, and torch reports why.

Torch refuses some common values although unpickling them runs no code: a `BytesIO`, a `datetime`, a
NumPy array. It is known exactly what Python's pickler writes for these (`_INERT_CALLS`,
`_INERT_STATES`), so they are allowed here. (Declaring them to torch would allow them in the whole
process.) A pickle is known to be harmless only if it consists of nothing but such values and what
torch allows. Any other is left to torch, which refuses it.
"""

from __future__ import annotations

import functools
import io
import math
import pathlib
import pickle
import weakref
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable
from typing import Any, Final

import torch

from dcp_objstore import torch_private
from dcp_objstore.compat.archive import Archive
from dcp_objstore.compat.inert_pickle import (
    Dialect,
    Global,
    HostilePickleError,
    Node,
    opcodes,
    scan,
    stand_in,
)

# What torch's unpickler reads. Python's pickler nests about a thousand marks, by its recursion
# limit.
_DIALECT: Final = Dialect(
    opcodes("\x80.c\x81Rbaesu(t\x85\x86\x87)N\x88\x89]}\x8fJKMGXUQhjqr\x8a"),
    max_marks=5_000,
)
_MAX_GLOBALS: Final = 1_000  # the most different ones
_Arguments = tuple[Any, ...]
_FROM_TYPE: Final = "torch._tensor._rebuild_from_type_v2"
_QUANTIZED: Final = "torch._utils._rebuild_qtensor"
# Calls that take a size as well as data; `torch.save` makes none of them.
_SIZED: Final = frozenset(
    f"{cls.__module__}.{cls.__name__}" for cls in (*torch_private.legacy_classes(), torch.Tensor)
)


def vet(body: bytes | memoryview) -> frozenset[str]:
    """Check that torch may unpickle a value, although it may still find it damaged or unsafe.

    Args:
        body: an archive that `torch.save` wrote (torch 1.6 or later).

    Returns:
        The names of the globals in it that torch refuses by default but that run no code, even if
        the value is unpickled without `weights_only`. Empty if this is not known.

    Raises:
        ArchiveError: the body is not such an archive.
        HostilePickleError: it needs something that no saved value needs: memory without bytes for
            it, or nesting that would end the process.
    """
    archive = Archive(body)
    pickled = archive.read("data.pkl")

    def size_of(name: str) -> int:
        """Return the size of the record of a storage; `Archive` has names in lower case."""
        record = archive.records.get(f"{archive.root}/data/{name}".lower())
        return 0 if record is None else record.size_bytes

    end, is_whole = scan(pickled, _DIALECT)
    dry_run = _DryUnpickler(pickled[:end], archive.unpacked_bytes, size_of)
    dry_run.run()
    # Protocol 2 is what `torch.save` writes. (Torch's own unpickler reads other protocols, too, as
    # far as they have the same opcodes.)
    is_known = is_whole and dry_run.is_known and pickled.startswith(b"\x80\x02")
    if not is_known or any(dry_run.attributes):  # no BytesIO may have an attribute
        return frozenset()
    return frozenset(dry_run.inert)


class _TorchEndsError(Exception):
    """Ends the dry run where torch's unpickler raises an error and reads no further."""


class _Result(Node):
    """The result of a call, which tells the `dry_run` how the pickle uses it.

    `find_class` makes a subclass for each global, with its `name` and the `dry_run` that reads it.
    """

    __slots__ = ()
    dry_run: _DryUnpickler

    @classmethod
    def result(cls, args: _Arguments, *, is_new: bool) -> object:
        """Check the call, then record it as `Node` does."""
        cls.dry_run.check_result(cls.name, args, is_new=is_new)
        return super().result(args, is_new=is_new)

    def __setstate__(self, state: object) -> None:
        """Record the state (BUILD), and whether the pickler writes such a one for this class."""
        # This refuses a second state: the first may hold a function that the second is passed to.
        super().__setstate__(state)
        has_form = _INERT_STATES.get(self.name)
        self.dry_run.note(has_form is not None and self.dry_run.is_known and has_form(self, state))

    def append(self, _: object) -> None:
        """Take an item (APPEND, APPENDS), as only a deque does."""
        self.dry_run.note(self.name == _DEQUE)

    def __setitem__(self, key: object, _: object) -> None:
        """Take an entry (SETITEM, SETITEMS), as only an OrderedDict does.

        Like any dictionary, refuse a key without a hash.
        """
        hash(key)
        self.dry_run.note(self.name == _ORDERED_DICT)

    def __call__(self, *_: object) -> None:
        """Be called (REDUCE), which torch refuses: it calls only globals."""
        raise _TorchEndsError


def _has_inert(value: object) -> bool:
    """Return whether this is something of `_INERT`, or a tuple that has such a thing in it."""
    if type(value) is tuple:
        return any(map(_has_inert, value))
    return isinstance(value, Global | Node) and value.name in _INERT


class _DryUnpickler(pickle.Unpickler):
    """Unpickles a value with stand-ins, and checks how they are used.

    Args:
        pickled: the part of the pickle that `scan` has passed.
        stored_bytes: the unpacked size of the archive that has the storages.
        size_of: returns the size of a storage by its name; 0 if there is none.

    Attributes:
        inert: the names of `_INERT` that the pickle has.
        is_known: whether each part so far is what Python's pickler writes for values of `_INERT`,
            or is nothing but what torch allows. Once it is false it stays false.
        attributes: attributes of the BytesIO objects. They are still empty when a state is set, and
            the pickle can add to them later, so `vet` looks at them at the end.
    """

    def __init__(self, pickled: bytes, stored_bytes: int, size_of: Callable[[str], int]) -> None:
        super().__init__(io.BytesIO(pickled), encoding="bytes")
        self.stored_bytes = stored_bytes
        self.size_of = size_of
        self.storage_names: set[str] = set()
        self.free_bytes = stored_bytes  # bytes of the archive that no storage has taken yet
        self.globals: dict[str, Global] = {}
        self.inert: set[str] = set()
        self.is_known = True
        self.attributes: list[dict[object, object]] = []

    def run(self) -> None:
        """Unpickle as far as torch would.

        Raises:
            HostilePickleError: the pickle needs something that no saved value needs.
        """
        try:
            self.load()
        except (_TorchEndsError, EOFError):
            # Torch's unpickler ends here, too, and raises an error.
            self.is_known = False
        except (HostilePickleError, MemoryError):
            raise
        except Exception as error:
            # Torch could go on where this unpickler does not, and what follows was not seen.
            raise HostilePickleError(f"{type(error).__name__}: {str(error)[:200]}") from error

    def note(self, is_known: bool) -> None:
        """Record whether a part of the pickle is one of those that `is_known` describes."""
        self.is_known = self.is_known and is_known

    def find_class(self, module: str, name: str) -> Global:
        """Return the stand-in for a global, which the pickle's opcode GLOBAL asks for.

        Add it to `inert` if it is one of `_INERT`.
        """
        # Names of Python 2 are mapped as in torch and pickle.
        if (module, name) in NAME_MAPPING:
            module, name = NAME_MAPPING[module, name]
        else:
            module = IMPORT_MAPPING.get(module, module)
        full_name = f"{module}.{name}"
        if full_name in _INERT:
            self.inert.add(full_name)
        if full_name not in self.globals:
            if len(self.globals) >= _MAX_GLOBALS:
                raise HostilePickleError(f"it names more than {_MAX_GLOBALS} classes")
            # A weak reference: a class is a reference cycle, and would keep the archive in memory
            # until the next garbage collection.
            dry_run = weakref.proxy(self)
            self.globals[full_name] = stand_in(_Result, full_name, dry_run=dry_run)
        return self.globals[full_name]

    def check_result(self, name: str, args: _Arguments, *, is_new: bool) -> None:
        """Refuse a harmful call, and note whether it is one that the pickler writes."""
        self.check_call(name, args)
        if name in _INERT:
            has_form = (_INERT_NEW if is_new else _INERT_CALLS).get(name)
            self.note(has_form is not None and self.is_known and has_form(args))
        else:
            # What torch allows may do more with such a value than torch had in mind.
            self.note(not _has_inert(args))

    def check_call(self, name: str, args: _Arguments) -> None:
        """Refuse a call whose arguments would run code or take memory out of all proportion.

        An argument that is absent raises an IndexError, by which `run` refuses the pickle, too.
        """
        has_form = _SAFE_ARGUMENTS.get(name)
        if has_form is not None and not has_form(args):
            raise HostilePickleError(
                f"it calls {name[:200]} with arguments that torch.save does not write"
            )
        if name in _SIZED and args:
            raise HostilePickleError(f"it calls {name}, which takes a size")
        # _rebuild_qtensor(storage, storage_offset, size, ...) allocates before it looks whether the
        # storage is large enough. A byte has up to four elements (quint2x4).
        if name == _QUANTIZED:
            sizes = [size for size in args[2] if type(size) is int]  # torch refuses all others
            if math.prod(sizes) > 4 * self.stored_bytes:
                raise HostilePickleError("a quantized tensor is larger than what is stored")
        # _rebuild_from_type_v2(function, type, arguments, state) calls the function.
        if name == _FROM_TYPE:
            function, arguments = args[0], args[2]
            if not isinstance(function, Global) or type(arguments) is not tuple:
                raise HostilePickleError("it calls what it made itself")
            self.check_call(function.name, arguments)

    def persistent_load(self, description: Any) -> object:
        """Return the stand-in for the storage of a tensor (BINPERSID).

        Args:
            description: a tuple such as ("storage", torch.FloatStorage, "0", "cpu", 6), where "0"
                is the name of the storage and 6 the number of its elements.
        """
        _, cls, name, _, count = description[:5]  # what fails here is refused by `run`
        if not isinstance(cls, Global) or type(name) is not str or type(count) is not int:
            raise HostilePickleError("a storage is described in an unknown way")
        size_bytes = self.size_of(name)
        itemsize = _itemsize(cls.name)
        if itemsize is None:
            raise HostilePickleError("a storage is of no known type")
        # Torch makes one storage for each name, and many names can lead to one record ("a", "A").
        if name not in self.storage_names:
            self.storage_names.add(name)
            self.free_bytes -= count * itemsize
        if not 0 <= count * itemsize <= size_bytes or self.free_bytes < 0:
            raise HostilePickleError(f"a storage of {size_bytes} bytes says that it has others")
        return _STORAGE


_STORAGE: Final = object()  # stands for any storage

# --- forms: whether arguments or a state are what Python's pickler writes --------------------

_Form = Callable[[_Arguments], bool]


def _none_or_one(is_right: Callable[[object], bool]) -> _Form:
    """Return a form: no argument, or a single one for which `is_right` returns true."""
    return lambda args: not args or (len(args) == 1 and is_right(args[0]))


def _is_collection(value: object) -> bool:
    return type(value) in (list, dict, set)


def _is_text_in_latin_1(args: _Arguments) -> bool:
    """Return whether these are a text and "latin1", as the pickler writes bytes."""
    return len(args) == 2 and type(args[0]) is str and args[1] in ("latin1", "latin-1")


# The arguments that Python's pickler writes where torch allows the call with any. A number (or
# something that gives one) would allocate memory without bytes for it; a tensor would be iterated
# over, whether stored or not.
_SAFE_ARGUMENTS: Final[dict[str, _Form]] = {
    "_codecs.encode": _is_text_in_latin_1,
    "builtins.bytearray": lambda args: (
        _none_or_one(lambda arg: _is_result_of(arg, "_codecs.encode"))(args)
        or _is_text_in_latin_1(args)
    ),
    "builtins.set": _none_or_one(_is_collection),
    "collections.Counter": _none_or_one(_is_collection),
    "collections.OrderedDict": _none_or_one(_is_collection),
    "torch.Size": _none_or_one(lambda arg: type(arg) is tuple),
}


# --- values that run nothing -----------------------------------------------------------------


_DEQUE: Final = "collections.deque"
_ORDERED_DICT: Final = "collections.OrderedDict"
_DTYPE: Final = "numpy.dtype"
_ARRAY: Final = "numpy.ndarray"
_NUMPY: Final = ("numpy._core.multiarray", "numpy.core.multiarray")  # NumPy 2, and 1
# The elements of other dtypes are not numbers but text, records, or any Python objects.
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


def _of_types(*types: type) -> _Form:
    """Return a form: arguments of exactly these types."""
    return lambda args: tuple(map(type, args)) == types


def _is_exactly(value: object, wanted: tuple[object, ...]) -> bool:
    """Return whether two tuples have equal items of the same types (1, 1.0 and True differ)."""
    return type(value) is tuple and _of_types(*map(type, wanted))(value) and value == wanted


def _is_result_of(value: object, name: str) -> bool:
    """Return whether this is what a call of the global `name` has returned."""
    return isinstance(value, _Result) and value.name == name


def _length_of_bytes(value: object) -> int | None:
    """Return the length of a bytes value; None for anything else.

    The pickler writes b"ab" as `_codecs.encode("ab", "latin1")`, and b"" as `bytes()`.
    """
    if isinstance(value, _Result) and value.name == "_codecs.encode":
        return len(value.args[0])  # type: ignore[arg-type]
    return 0 if _is_result_of(value, "builtins.bytes") else None


def _numpy_element_bytes(dtype: object) -> int:
    """Return the element size of a dtype that has passed `_is_dtype`."""
    return _NUMPY_DTYPES[dtype.args[0]]  # type: ignore[attr-defined]


def _time(size_bytes: int) -> _Form:
    """Return a form: a time packed into so many bytes, and perhaps a time zone."""
    return lambda args: (
        0 < len(args) <= 2
        and _length_of_bytes(args[0]) == size_bytes
        and all(_is_result_of(zone, "datetime.timezone") for zone in args[1:])
    )


def _is_deque(args: _Arguments) -> bool:
    """Return whether the deque is empty, perhaps with a limit; its items are appended later."""
    if not args:
        return True
    start = args[0]
    return (
        len(args) <= 2
        and start == ()
        and all(limit is None or type(limit) is int for limit in args[1:])
    )


def _is_zone(args: _Arguments) -> bool:
    """Return whether these are the difference to UTC, and perhaps a name."""
    return (
        0 < len(args) <= 2
        and _is_result_of(args[0], "datetime.timedelta")
        and all(type(name) is str for name in args[1:])
    )


def _is_dtype(args: _Arguments) -> bool:
    """Return whether these are a name such as "f4", `align=False` and `copy=True`.

    Without a copy a state would be set on NumPy's own dtype.
    """
    return (
        len(args) == 3
        and type(args[0]) is str
        and args[0] in _NUMPY_DTYPES
        and args[1] is False
        and args[2] is True
    )


def _is_empty_array(args: _Arguments) -> bool:
    """Return whether these are `(ndarray, (0,), b"b")`; the state has the shape and the dtype."""
    return (
        len(args) == 3
        and isinstance(args[0], Global)
        and args[0].name == _ARRAY
        and _is_exactly(args[1], (0,))
        and _length_of_bytes(args[2]) == 1
    )


def _is_numpy_scalar(args: _Arguments) -> bool:
    """Return whether these are a dtype, and the bytes of one element."""
    if len(args) != 2 or not _is_result_of(args[0], _DTYPE):
        return False
    return _length_of_bytes(args[1]) == _numpy_element_bytes(args[0])


_PATHS: Final = frozenset(
    f"{module}.{cls.__name__}"
    for cls in (type(pathlib.Path()), pathlib.PurePosixPath, pathlib.PureWindowsPath)
    for module in ("pathlib", cls.__module__)
)

# The arguments that Python's pickler writes in each call. They ensure that nothing is called, and
# that nothing is iterated over or allocated without bytes for it. A form takes for granted that
# what is in the arguments has passed its own form, so it is asked only while `is_known` is true.
_INERT_CALLS: Final[dict[str, _Form]] = {
    "builtins.bytes": _of_types(),  # empty; others are made by _codecs.encode
    "builtins.range": _of_types(int, int, int),
    _DEQUE: _is_deque,
    "datetime.date": _time(4),
    "datetime.datetime": _time(10),
    "datetime.time": _time(6),
    "datetime.timedelta": _of_types(int, int, int),
    "datetime.timezone": _is_zone,
    _DTYPE: _is_dtype,
    **dict.fromkeys(_PATHS, lambda args: all(type(part) is str for part in args)),
    **{f"{module}._reconstruct": _is_empty_array for module in _NUMPY},
    **{f"{module}.scalar": _is_numpy_scalar for module in _NUMPY},
}
# The same for new objects (NEWOBJ).
_INERT_NEW: Final[dict[str, _Form]] = {"_io.BytesIO": _of_types()}
# `_ARRAY` is never called: it is an argument of `_reconstruct`.
_INERT: Final = frozenset({*_INERT_CALLS, *_INERT_NEW, _ARRAY})


def _is_buffer(result: _Result, state: object) -> bool:
    """Return whether this is the state of a BytesIO: bytes, position, no attributes."""
    if type(state) is not tuple or len(state) != 3:
        return False
    body, position, attributes = state
    size_bytes = _length_of_bytes(body)
    # The pickler writes None until something has looked for an attribute of the object, as DCP
    # does, and a dict from then on.
    if type(attributes) is dict:
        result.dry_run.attributes.append(attributes)
    return (
        size_bytes is not None
        and type(position) is int
        and 0 <= position <= size_bytes
        and (attributes is None or type(attributes) is dict)
    )


def _is_dtype_state(_: _Result, state: object) -> bool:
    """Return whether this is a dtype's state: version, byte order, and no fields."""
    return (
        type(state) is tuple
        and len(state) == 8
        and state[1] in ("<", ">", "|", "=")
        and _is_exactly((state[0], *state[2:]), (3, None, None, None, -1, -1, 0))
    )


def _is_array_state(_: _Result, state: object) -> bool:
    """Return whether this is an array's state: version, shape, dtype, order, and its bytes."""
    if type(state) is not tuple or len(state) != 5:
        return False
    version, shape, dtype, order, body = state
    if type(shape) is not tuple or not _is_result_of(dtype, _DTYPE) or type(order) is not bool:
        return False
    sizes = [size for size in shape if type(size) is int and 0 <= size <= _MAX_EXTENT]
    return (
        _is_exactly((version,), (1,))
        and len(sizes) == len(shape) <= _MAX_DIMENSIONS
        # NumPy multiplies the other sizes even if one is 0, and must not overflow.
        and math.prod(size or 1 for size in sizes) <= _MAX_EXTENT
        and _length_of_bytes(body) == math.prod(sizes) * _numpy_element_bytes(dtype)
    )


# The states that Python's pickler writes for results of these calls (BUILD).
_INERT_STATES: Final[dict[str, Callable[[_Result, object], bool]]] = {
    _ORDERED_DICT: lambda _, state: type(state) is dict,
    "_io.BytesIO": _is_buffer,
    _DTYPE: _is_dtype_state,
    **{f"{module}._reconstruct": _is_array_state for module in _NUMPY},
}


@functools.cache
def _itemsize(name: str) -> int | None:
    """Return the element size of a storage class by its name; None if there is no such class."""
    if name == "torch.storage.UntypedStorage":
        return 1
    classes = torch_private.storage_classes()
    return {f"torch.{cls}": dtype.itemsize for dtype, cls in classes.items()}.get(name)
