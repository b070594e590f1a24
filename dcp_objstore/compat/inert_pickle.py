"""Parse a pickle into inert values: nothing is imported, called, or built from it.

This is a small pickle machine of our own in place of `pickle.Unpickler`. An allowlisting
`find_class` is not enough: BUILD on an allowlisted class changes that class for the whole process,
REDUCE calls allowlisted functions with any argument, and the C unpickler allocates what an opcode
claims (BINBYTES8, LONG_BINPUT) before it looks for the bytes. Here a global is only a name, a call
is only a record of it, every length is checked against the body before it is used, and the memo
grows by one entry per opcode. So memory stays within about 100 times the body, whatever it says.

It knows the opcodes that protocols 2 to 5 write for the plain data and objects of a `.metadata`
(meanings: the documentation strings of the standard library's `pickletools`), no others.
"""

from __future__ import annotations

import pickletools
import struct
from collections.abc import Callable, Container
from typing import Final

from dcp_objstore.errors import CheckpointCorruptError, UntrustedPickleError

# The stock pickler nests marks about six deep; more is no `.metadata`.
_MAX_MARKS: Final = 100
_MAX_KEY_PARTS: Final = 16
_ORDERED_DICT: Final = "collections.OrderedDict"
# CPython 3.11.0 to 3.11.3 pickle a member of an enum as `getattr(class, name)`, others as
# `class(value)`.
GETATTR: Final = frozenset({"builtins.getattr", "__builtin__.getattr"})
_OPCODE_NAMES: Final = {ord(opcode.code): opcode.name for opcode in pickletools.opcodes}

_U16 = struct.Struct("<H").unpack_from
_U32 = struct.Struct("<I").unpack_from
_I32 = struct.Struct("<i").unpack_from
_U64 = struct.Struct("<Q").unpack_from
_F64 = struct.Struct(">d").unpack_from


class Global:
    """The name of a global that the pickle asked for, as `module.name`; never the global."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class Node:
    """A record of one object: `name(*args)`, with `state` set by BUILD afterwards.

    `made` tells NEWOBJ (a new object of a class) from REDUCE (a call).
    """

    __slots__ = ("args", "made", "name", "state")

    def __init__(self, name: str, args: tuple[object, ...], made: bool) -> None:
        self.name = name
        self.args = args
        self.made = made
        self.state: object = None


def parse(body: bytes, allowed: Container[str]) -> object:
    """The value of the pickle `body`, made of plain Python data, `Global` and `Node`.

    Args:
        body: the whole pickle; nothing may follow it.
        allowed: the globals that may be named, as `module.name`. Where one of `GETATTR` is among
            them, a call of it with an allowed global yields `Global("module.name.attribute")`, if
            that is allowed too; other calls of it are refused.

    The result may share and even contain itself (the memo allows it), so walk it to a fixed depth
    only. Dictionary keys are scalars, tuples of scalars, or `Node` (by identity).

    Raises:
        UntrustedPickleError: the pickle asks for a global outside `allowed`; names it.
        CheckpointCorruptError: it is truncated, malformed or uses an opcode outside our list.
    """
    machine = _Machine(body, allowed)
    try:
        return machine.run()
    except (IndexError, KeyError, struct.error, UnicodeDecodeError) as error:
        # An empty stack, an unknown memo entry, bytes missing, or a string that is not UTF-8.
        raise machine.damaged(f"truncated or malformed ({type(error).__name__})") from error


class _Machine:
    """Stack, stacks set aside by MARK, memo and position: the state of one parse."""

    def __init__(self, body: bytes, allowed: Container[str]) -> None:
        self.body = body
        self.allowed = allowed
        self.pos = 0
        self.stack: list[object] = []
        self.marked: list[list[object]] = []
        self.memo: dict[int, object] = {}
        self.globals: dict[str, Global] = {}

    def run(self) -> object:
        """Execute up to STOP. The opcodes that are three quarters of all are handled in place."""
        body, memo, stack = self.body, self.memo, self.stack
        handlers, constants = _HANDLERS, _CONSTANTS
        pos = 0
        while True:
            opcode = body[pos]
            pos += 1
            if opcode == 0x94:  # MEMOIZE
                memo[len(memo)] = stack[-1]
            elif opcode == 0x68:  # BINGET
                stack.append(memo[body[pos]])
                pos += 1
            elif opcode == 0x6A:  # LONG_BINGET
                stack.append(memo[_U32(body, pos)[0]])
                pos += 4
            elif opcode in constants:
                stack.append(constants[opcode])
            elif opcode == 0x85:  # TUPLE1
                stack[-1] = (stack[-1],)
            elif opcode == 0x4B:  # BININT1
                stack.append(body[pos])
                pos += 1
            elif opcode == 0x2E:  # STOP
                break
            else:
                self.pos = pos
                handler = handlers.get(opcode)
                if handler is None:
                    name = _OPCODE_NAMES.get(opcode, f"0x{opcode:02x}")
                    raise self.damaged(f"opcode {name}, which torch does not write here")
                handler(self)
                pos, stack = self.pos, self.stack
        self.pos = pos
        value = stack.pop()
        if stack or self.marked or pos != len(body):
            raise self.damaged("something is left over at its end")
        return value

    def damaged(self, what: str) -> CheckpointCorruptError:
        """The error for a pickle that no stock torch wrote."""
        return CheckpointCorruptError(f"not a readable .metadata, near byte {self.pos}: {what}")

    def take(self, length: int) -> bytes:
        """The next `length` bytes, which must be there."""
        end = self.pos + length
        if end > len(self.body):
            raise self.damaged(f"{length} bytes announced, {len(self.body) - self.pos} left")
        taken = self.body[self.pos : end]
        self.pos = end
        return taken

    def line(self) -> str:
        """The next newline-terminated string."""
        end = self.body.find(b"\n", self.pos)
        if end < 0:
            raise self.damaged("a line without an end")
        text = self.body[self.pos : end].decode("utf-8")
        self.pos = end + 1
        return text

    def pop_mark(self) -> list[object]:
        """The items since the last MARK; the stack from before it is current again."""
        items = self.stack
        self.stack = self.marked.pop()
        return items

    def push_global(self, module: object, name: object) -> None:
        """Push the name `module.name`, where it is allowed."""
        if type(module) is not str or type(name) is not str:
            raise self.damaged("a global whose name is not a string")
        full = f"{module}.{name}"
        found = self.globals.get(full)
        if found is None:
            # A dot inside `name` would be a walk through attributes; no stock class needs one,
            # and `full` would no longer say where the module ends.
            if "." in name or full not in self.allowed:
                raise UntrustedPickleError(
                    f"the .metadata asks for {full[:200]!r}, which is not among the classes that "
                    "stock torch.distributed.checkpoint writes; it was not unpickled"
                )
            found = self.globals[full] = Global(full)
        self.stack.append(found)

    def attribute(self, args: tuple[object, ...]) -> Global:
        """The name of an attribute of a global, where that is allowed; see `parse`."""
        if len(args) != 2 or type(args[0]) is not Global or type(args[1]) is not str:
            raise UntrustedPickleError("the .metadata calls getattr on what it made itself")
        full = f"{args[0].name}.{args[1]}"
        if "." in args[1] or full not in self.allowed:
            raise UntrustedPickleError(
                f"the .metadata asks for {full[:200]!r}, which stock torch.distributed.checkpoint"
                " does not write; it was not unpickled"
            )
        return self.globals.setdefault(full, Global(full))

    def set_items(self, target: object, items: list[object]) -> None:
        """Put alternating keys and values into the dictionary `target`."""
        if type(target) is not dict or len(items) % 2:
            raise self.damaged("SETITEMS without a dictionary or a value")
        for number in range(0, len(items), 2):
            key = items[number]
            kind = type(key)
            if kind is not str and kind is not Node and not _is_plain_key(key):
                raise self.damaged(f"a dictionary key of type {kind.__name__}")
            target[key] = items[number + 1]


def _is_plain_key(key: object) -> bool:
    """Whether hashing `key` is safe and cheap.

    Hashing nested tuples recurses in C without a limit, a long one is hashed anew for every use of
    it, and large integers can be chosen so that their hashes are all the same.
    """
    if type(key) is tuple:
        return len(key) <= _MAX_KEY_PARTS and all(
            type(part) is not tuple and _is_plain_key(part) for part in key
        )
    if type(key) is int:
        return -(2**31) <= key < 2**31
    return type(key) in {str, bytes, bool, type(None)}


def _proto(m: _Machine) -> None:
    if m.pos != 1 or not 2 <= m.body[m.pos] <= 5:
        raise m.damaged("an unknown pickle protocol")
    m.pos += 1


def _frame(m: _Machine) -> None:
    (length,) = _U64(m.body, m.pos)
    m.pos += 8
    if length > len(m.body) - m.pos:
        raise m.damaged(f"a frame of {length} bytes, {len(m.body) - m.pos} left")


def _mark(m: _Machine) -> None:
    if len(m.marked) >= _MAX_MARKS:
        raise m.damaged(f"more than {_MAX_MARKS} nested marks")
    m.marked.append(m.stack)
    m.stack = []


def _global(m: _Machine) -> None:
    module = m.line()
    m.push_global(module, m.line())


def _stack_global(m: _Machine) -> None:
    name, module = m.stack.pop(), m.stack.pop()
    m.push_global(module, name)


def _reduce(m: _Machine) -> None:
    args, function = m.stack.pop(), m.stack.pop()
    if type(function) is not Global or type(args) is not tuple:
        raise m.damaged("REDUCE without a global and a tuple")
    if function.name in GETATTR:
        m.stack.append(m.attribute(args))
        return
    # SETITEMS must find a dictionary under it; the order of a plain one is kept too.
    empty = function.name == _ORDERED_DICT and not args
    m.stack.append({} if empty else Node(function.name, args, made=False))


def _newobj(m: _Machine) -> None:
    args, cls = m.stack.pop(), m.stack.pop()
    if type(cls) is not Global or type(args) is not tuple:
        raise m.damaged("NEWOBJ without a global and a tuple")
    m.stack.append(Node(cls.name, args, made=True))


def _build(m: _Machine) -> None:
    state, target = m.stack.pop(), m.stack[-1]
    if type(target) is not Node or target.state is not None or state is None:
        raise m.damaged("BUILD on something that is not a new object")
    target.state = state


def _append(m: _Machine) -> None:
    item, target = m.stack.pop(), m.stack[-1]
    if type(target) is not list:
        raise m.damaged("APPEND without a list")
    target.append(item)


def _appends(m: _Machine) -> None:
    items, target = m.pop_mark(), m.stack[-1]
    if type(target) is not list:
        raise m.damaged("APPENDS without a list")
    target.extend(items)


def _setitem(m: _Machine) -> None:
    value, key = m.stack.pop(), m.stack.pop()
    m.set_items(m.stack[-1], [key, value])


def _setitems(m: _Machine) -> None:
    items = m.pop_mark()
    m.set_items(m.stack[-1], items)


def _dict(m: _Machine) -> None:
    made: dict[object, object] = {}
    m.set_items(made, m.pop_mark())
    m.stack.append(made)


def _list(m: _Machine) -> None:
    items = m.pop_mark()
    m.stack.append(items)


def _tuple(m: _Machine) -> None:
    items = m.pop_mark()
    m.stack.append(tuple(items))


def _tuple2(m: _Machine) -> None:
    second, first = m.stack.pop(), m.stack.pop()
    m.stack.append((first, second))


def _tuple3(m: _Machine) -> None:
    third, second, first = m.stack.pop(), m.stack.pop(), m.stack.pop()
    m.stack.append((first, second, third))


def _binint(m: _Machine) -> None:
    m.stack.append(_I32(m.body, m.pos)[0])
    m.pos += 4


def _binint2(m: _Machine) -> None:
    m.stack.append(_U16(m.body, m.pos)[0])
    m.pos += 2


def _long1(m: _Machine) -> None:
    m.stack.append(int.from_bytes(m.take(m.take(1)[0]), "little", signed=True))


def _binfloat(m: _Machine) -> None:
    m.stack.append(_F64(m.body, m.pos)[0])
    m.pos += 8


def _text(width: Callable[[_Machine], int]) -> Callable[[_Machine], None]:
    """An opcode that pushes a string. Surrogates pass, as in pickle: paths may hold them."""

    def push(m: _Machine) -> None:
        m.stack.append(m.take(width(m)).decode("utf-8", "surrogatepass"))

    return push


def _bytes(width: Callable[[_Machine], int]) -> Callable[[_Machine], None]:
    """An opcode that pushes bytes."""

    def push(m: _Machine) -> None:
        m.stack.append(m.take(width(m)))

    return push


def _width1(m: _Machine) -> int:
    return m.take(1)[0]


def _width4(m: _Machine) -> int:
    return int(_U32(m.take(4))[0])


def _width8(m: _Machine) -> int:
    return int(_U64(m.take(8))[0])


def _put(width: Callable[[_Machine], int]) -> Callable[[_Machine], None]:
    """An opcode that stores the top of the stack under a number (a dictionary: any number)."""

    def put(m: _Machine) -> None:
        m.memo[width(m)] = m.stack[-1]

    return put


# EMPTY_TUPLE, NONE, NEWTRUE, NEWFALSE: immutable, so one object serves all.
_CONSTANTS: Final[dict[int, object]] = {0x29: (), 0x4E: None, 0x88: True, 0x89: False}
_HANDLERS: Final[dict[int, Callable[[_Machine], None]]] = {
    ord(code): handler
    for code, handler in {
        "\x80": _proto,
        "\x95": _frame,
        "(": _mark,
        "c": _global,
        "\x93": _stack_global,
        "R": _reduce,
        "\x81": _newobj,
        "b": _build,
        "a": _append,
        "e": _appends,
        "s": _setitem,
        "u": _setitems,
        "d": _dict,
        "l": _list,
        "t": _tuple,
        "\x86": _tuple2,
        "\x87": _tuple3,
        "]": lambda m: m.stack.append([]),
        "}": lambda m: m.stack.append({}),
        "J": _binint,
        "M": _binint2,
        "\x8a": _long1,
        "G": _binfloat,
        "\x8c": _text(_width1),
        "X": _text(_width4),
        "\x8d": _text(_width8),
        "C": _bytes(_width1),
        "B": _bytes(_width4),
        "q": _put(_width1),
        "r": _put(_width4),
    }.items()
}
