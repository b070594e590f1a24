"""Unpickle foreign data without importing, calling or changing anything.

Python's C unpickler does the work. Two things make it safe:

- Every global is a `Global`, a class made here. A call of it is only recorded, in a `Node`. An
  allowlist of real classes would not be enough: BUILD can change an allowlisted class for the whole
  process, and REDUCE calls allowlisted functions with any arguments.
- `scan` examines the opcodes first. The unpickler allocates the size that an opcode claims before
  it looks for the bytes, makes room in the memo for all numbers below one that is used, and hashes
  nested tuples by recursion in C without a limit, which ends the process.

The meaning of the opcodes is that of the standard library's `pickletools`.
"""

from __future__ import annotations

import pickle
import pickletools
from collections.abc import Callable
from typing import Final, NamedTuple

_MAX_TUPLE_DEPTH: Final = 64
_MAX_NAME_BYTES: Final = 1024
# The size of the largest int in a key of a dictionary. Larger ones could be chosen so that all have
# the same hash.
_MAX_KEY_BITS: Final = 64
# The work that keys and calls may cost for each byte of the body. Real pickles stay below 4.
_WORK_PER_BYTE: Final = 16


# What `scan` knows about a value, as `(depth, parts, is_large)`: how deep tuples and calls are
# nested in it, how many parts they have in total, and whether a part is a number that is too large
# for a key. (With a NamedTuple `scan` takes 1.6 times as long.)
_Shape = tuple[int, int, bool]
_LEAF: Final[_Shape] = (0, 1, False)
_LARGE: Final[_Shape] = (0, 1, True)


class HostilePickleError(Exception):
    """The pickle contains something that no pickler writes."""


class Dialect(NamedTuple):
    """The content that pickles of one kind may have.

    Attributes:
        opcodes: codes of the opcodes.
        max_marks: how deep MARK may be nested.
        max_key_parts: number of parts of the largest tuple that is a key; None to limit only the
            total work.
    """

    opcodes: frozenset[int]
    max_marks: int
    max_key_parts: int | None = None


class Global(type):
    """The type of the classes that stand in for globals. A call of one is only recorded.

    Attributes:
        name: full name of the global, `module.name`.
    """

    name: str

    def __call__(cls, *args: object) -> object:
        """Record a call (REDUCE)."""
        return cls.result(args, is_new=False)  # type: ignore[attr-defined]


class Node(metaclass=Global):
    """The record of an object: `name(*args)`, and the `state` that BUILD has set.

    `is_new` is true for a new object of a class (NEWOBJ), and false for a call (REDUCE).
    """

    __slots__ = ("args", "is_new", "state")

    name = ""
    args: tuple[object, ...]
    is_new: bool
    state: object

    def __new__(cls, *args: object) -> object:  # type: ignore[misc]
        """Record a new object (NEWOBJ)."""
        return cls.result(args, is_new=True)

    @classmethod
    def result(cls, args: tuple[object, ...], *, is_new: bool) -> object:
        """Return the result of NEWOBJ or REDUCE."""
        node = object.__new__(cls)
        node.args, node.is_new, node.state = args, is_new, None
        return node

    def __setstate__(self, state: object) -> None:
        """Record the state of the object (BUILD)."""
        if self.state is not None or state is None:
            raise HostilePickleError("it sets the state of one object twice, or to nothing")
        self.state = state


def stand_in(base: type[Node], name: str, **attributes: object) -> Global:
    """Return a subclass of `base` that stands in for the global `name`."""
    return Global(name, (base,), {"__slots__": (), "name": name, **attributes})


def opcodes(codes: str) -> frozenset[int]:
    """Return `Dialect.opcodes` for the one-character codes of `pickletools`."""
    return frozenset(map(ord, codes))


def scan(body: bytes, dialect: Dialect) -> tuple[int, bool]:
    """Walk through the opcodes without making any object.

    For a hostile body this takes about 50 times as much memory as the body.

    Returns:
        The number of bytes that are safe to unpickle, and whether they are a whole pickle of one
        value. If not, they end before an opcode that is unknown, cut off, or lacks something on the
        stack, and unpickling them ends in an EOFError.

    Raises:
        HostilePickleError: unpickling could end the process, or take time or memory out of
            proportion to the body.
    """
    ended = _Scan(body, dialect)
    try:
        ended.run()
    except LookupError:  # in the body, on the stack, in the memo, or among the opcodes
        return ended.start, False
    has_one_value = len(ended.stack) == 1 and not ended.marked
    return ended.start + len(pickle.STOP), has_one_value


class _Scan:
    """A scan: the stack and those set aside by MARK, with a `_Shape` for each value.

    Each method that takes an argument carries out an opcode. `self.stack[-1]` alone raises the
    LookupError of `scan` if the opcode needs one more value.
    """

    def __init__(self, body: bytes, dialect: Dialect) -> None:
        self.body = body
        self.dialect = dialect
        self.start = 0  # offset of the current opcode
        self.stack: list[_Shape] = []
        self.marked: list[list[_Shape]] = []
        self.memo: dict[int, _Shape] = {}
        self.work_left = 1000 + _WORK_PER_BYTE * len(body)

    def run(self) -> None:
        """Go on to the opcode STOP. The most frequent opcodes are handled in place.

        Raises:
            LookupError: the opcode at `start` is unknown or cut off, or lacks something on the
                stack or in the memo. (`IndexError` and `KeyError` are such errors.)
            HostilePickleError: as for `scan`.
        """
        body, stack, memo = self.body, self.stack, self.memo
        opcodes = {code: _OPCODES[code] for code in self.dialect.opcodes}
        pos = 0
        while True:
            self.start = pos
            width, is_prefix, effect = opcodes[body[pos]]
            pos += 1
            if effect is _MEMOIZE:
                memo[len(memo)] = stack[-1]
                continue
            argument = body[pos : pos + width]
            pos += width
            if is_prefix:
                width = int.from_bytes(argument, "little")
                argument = body[pos : pos + width]
                pos += width
            if pos > len(body):  # the argument is cut off
                raise LookupError
            if effect is _PUSH:
                stack.append(_LEAF)
            elif effect is _GET:
                stack.append(memo[int.from_bytes(argument, "little")])
            elif effect is _STOP:
                return
            elif effect is _GLOBAL:
                for _ in ("module", "name"):  # each is a line of text
                    pos = 1 + body.find(b"\n", pos, pos + _MAX_NAME_BYTES)
                    if not pos:  # `find` returned -1
                        raise LookupError
                stack.append(_LEAF)
            else:
                effect(self, argument)  # type: ignore[operator]
                # MARK begins a new stack; taking the items since MARK returns to the one before it.
                stack = self.stack

    def pop_mark(self) -> list[_Shape]:
        """Return the values since the last MARK, and go back to the stack before it."""
        items = self.stack
        self.stack = self.marked.pop()
        return items

    def tuple_of(self, items: list[_Shape]) -> _Shape:
        """Return the shape of a tuple of these values."""
        if items.count(_LEAF) == len(items):  # the most frequent case, where this is far quicker
            return 1, 1 + len(items), False
        depth, parts, is_large = 0, 0, False
        for item_depth, item_parts, item_is_large in items:
            depth = max(depth, item_depth)
            parts += item_parts
            is_large |= item_is_large
        return self.wrapped((depth, parts, is_large))

    def wrapped(self, shape: _Shape) -> _Shape:
        """Return the shape of a tuple or call whose content has this shape."""
        depth, parts, is_large = shape
        if depth >= _MAX_TUPLE_DEPTH:
            raise HostilePickleError(
                f"tuples or calls are nested more than {_MAX_TUPLE_DEPTH} deep"
            )
        return depth + 1, parts + 1, is_large

    def check_keys(self, keys: list[_Shape]) -> None:
        """Raise HostilePickleError unless hashing these keys is safe and cheap."""
        if keys.count(_LEAF) == len(keys):
            return
        most = self.dialect.max_key_parts
        for _, parts, is_large in keys:
            if is_large or (most is not None and parts > most):
                raise HostilePickleError("a key of a dictionary is too large")
            self.spend(parts)

    def spend(self, amount: int) -> None:
        """Count the work of unpickling; a body that repeats a value may give more than it has."""
        self.work_left -= amount
        if self.work_left < 0:
            raise HostilePickleError("it repeats its values more often than its size allows")

    def put(self, argument: bytes) -> None:
        number = int.from_bytes(argument, "little")
        if number > len(self.body):  # the unpickler makes room for all numbers below
            raise HostilePickleError(f"it numbers a value {number}")
        self.memo[number] = self.stack[-1]

    def global_from_stack(self, _: bytes) -> None:
        """Put a global in place of its module and name."""
        self.stack.pop()
        self.stack[-1] = _LEAF

    def persistent(self, _: bytes) -> None:
        """Put what `persistent_load` returns in place of its argument."""
        self.stack[-1] = _LEAF

    def call(self, _: bytes) -> None:
        """Put the result in place of the global; hashing it may hash its arguments."""
        depth, parts, is_large = self.wrapped(self.stack.pop())
        self.spend(4 * parts)  # the arguments are copied
        self.stack[-1] = depth, 1, is_large

    def take_one(self, _: bytes) -> None:
        """Take an item of a list, or the state of an object."""
        self.stack.pop()
        self.stack[-1]

    def take_all(self, _: bytes) -> None:
        """Take items of a list."""
        self.pop_mark()
        self.stack[-1]

    def set_item(self, _: bytes) -> None:
        self.stack.pop()
        self.check_keys([self.stack.pop()])
        self.stack[-1]

    def set_items(self, _: bytes) -> None:
        self.check_keys(self.pop_mark()[::2])
        self.stack[-1]

    def tuple(self, _: bytes) -> None:
        items = self.pop_mark()
        self.stack.append(self.tuple_of(items))

    def tuple_of_one(self, _: bytes) -> None:
        self.stack[-1] = self.wrapped(self.stack[-1])

    def tuple_of_last(self, count: int) -> None:
        """Make a tuple of the last `count` values."""
        items = self.stack[-count:]
        if len(items) < count:
            raise LookupError
        self.stack[-count:] = [self.tuple_of(items)]

    def long(self, argument: bytes) -> None:
        """Push an int of any size."""
        bits = int.from_bytes(argument, "little", signed=True).bit_length()
        self.stack.append(_LEAF if bits <= _MAX_KEY_BITS else _LARGE)

    def mark(self, _: bytes) -> None:
        if len(self.marked) >= self.dialect.max_marks:
            raise HostilePickleError("marks are nested too deep")
        self.marked.append(self.stack)
        self.stack = []

    def protocol(self, _: bytes) -> None:
        if self.start:  # PROTO is the first opcode if there is one
            raise HostilePickleError("it changes its protocol on the way")


_Effect = str | Callable[[_Scan, bytes], None]
_PUSH, _MEMOIZE, _GET, _GLOBAL, _STOP = "PUSH", "MEMOIZE", "GET", "GLOBAL", "STOP"
# All other opcodes of a `Dialect` only push a value.
_EFFECTS: Final[dict[str, _Effect]] = {
    "PROTO": _Scan.protocol,
    "FRAME": lambda *_: None,
    "STOP": _STOP,
    "GLOBAL": _GLOBAL,
    "STACK_GLOBAL": _Scan.global_from_stack,
    "BINPERSID": _Scan.persistent,
    "REDUCE": _Scan.call,
    "NEWOBJ": _Scan.call,
    "BUILD": _Scan.take_one,
    "APPEND": _Scan.take_one,
    "APPENDS": _Scan.take_all,
    "SETITEM": _Scan.set_item,
    "SETITEMS": _Scan.set_items,
    "TUPLE": _Scan.tuple,
    "TUPLE1": _Scan.tuple_of_one,
    "TUPLE2": lambda scan, _: scan.tuple_of_last(2),
    "TUPLE3": lambda scan, _: scan.tuple_of_last(3),
    "LONG1": _Scan.long,
    "MARK": _Scan.mark,
    "MEMOIZE": _MEMOIZE,
    "BINGET": _GET,
    "LONG_BINGET": _GET,
    "BINPUT": _Scan.put,
    "LONG_BINPUT": _Scan.put,
}
# The sizes of arguments that are the length of what follows them, by pickletools' codes for these.
_LENGTH_PREFIXES: Final = {
    pickletools.TAKEN_FROM_ARGUMENT1: 1,
    pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}


class _Opcode(NamedTuple):
    """How `scan` treats an opcode.

    Attributes:
        width: the size of its argument in bytes.
        is_prefix: whether the argument is the length of data that follows it.
        effect: what it does to the stack.
    """

    width: int
    is_prefix: bool
    effect: _Effect


def _opcode(opcode: pickletools.OpcodeInfo) -> _Opcode:
    """Return how `scan` treats an opcode."""
    length = 0 if opcode.arg is None else opcode.arg.n
    effect = _EFFECTS.get(opcode.name, _PUSH)
    # A negative length that is no prefix is that of lines of text: only GLOBAL has such arguments.
    return _Opcode(_LENGTH_PREFIXES.get(length, max(0, length)), length in _LENGTH_PREFIXES, effect)


_OPCODES: Final = {ord(opcode.code): _opcode(opcode) for opcode in pickletools.opcodes}
