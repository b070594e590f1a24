"""What of a pickle is refused before torch sees it, and what is known to run nothing."""

from __future__ import annotations

import contextlib
import gc
import itertools
import weakref
from collections.abc import Collection
from datetime import date

import pytest
import torch

from dcp_objstore.compat.archive import ArchiveError
from dcp_objstore.compat.inert_pickle import HostilePickleError
from dcp_objstore.compat.vet import vet
from tests.support import hostile as h, hostile_cases as c, pickles as p

# One of each kind of value that the arguments of calls have.
DELTA = h.called("datetime.timedelta", *[p.number(0)] * 3)
REFUSALS = (ArchiveError, HostilePickleError)
KINDS: dict[str, bytes] = {
    "none": p.NONE, "false": p.FALSE, "true": p.TRUE, "0": p.number(0), "1": p.number(1),
    "3": p.number(3), "-1": p.number(-1), "float": b"G" + bytes(8), "<": p.text("<"),
    "f4": p.text("f4"), "V8": p.text("V8"), "latin1": p.text("latin1"), "()": p.EMPTY_TUPLE,
    "latin-1": p.text("latin-1"), "(0,)": p.tupled(p.number(0)), "(1,)": p.tupled(p.number(1)),
    "(0, 0)": p.tupled(p.number(0), p.number(0)), "(true,)": p.tupled(p.TRUE), "set": b"\x8f",
    "list": p.listed(), "dict": p.mapped({}), "range": c.RANGE, "delta": DELTA,
    "zone": h.called("datetime.timezone", DELTA), "dtype": c.dtype(),
    "ndarray": b"cnumpy\nndarray\n", "class": b"ctorch\nSize\n",
    "no bytes": h.called("builtins.bytes"),
    **{f"{size} bytes": c.text_bytes(size) for size in (1, 4, 6, 10)},
}  # fmt: skip
NUMBER, TEXT = "0|1|3|-1", "<|f4|V8|latin1|latin-1"
TUPLE, BYTES = "(0,)|(1,)|()|(0, 0)|(true,)", "1 bytes|4 bytes|6 bytes|10 bytes"
PARTS = "list|dict|set"

# What precedes the arguments and follows them; how many there may be; and of each the kinds that
# the pickler writes there.
Form = tuple[bytes, bytes, Collection[int], list[str]]


def call(name: str, counts: Collection[int], *kinds: str) -> Form:
    return b"c%b\n%b\n(" % tuple(name.encode().rsplit(b".", 1)), b"tR", counts, [*kinds]


def state(made: bytes, *kinds: str) -> Form:
    return made + b"(", b"tb", [len(kinds)], [*kinds]


NEW, OLD = "numpy._core.multiarray", "numpy.core.multiarray"
BUFFER = b"c_io\nBytesIO\n)\x81"
DTYPE = h.called("numpy.dtype", p.text("f4"), p.FALSE, p.TRUE)
ARRAY = h.called(f"{NEW}._reconstruct", KINDS["ndarray"], KINDS["(0,)"], KINDS["1 bytes"])
INERT: dict[str, Form] = {
    "bytes": call("builtins.bytes", [0]),
    "range": call("builtins.range", [3], NUMBER, NUMBER, NUMBER),
    "range of Python 2": call("__builtin__.xrange", [3], NUMBER, NUMBER, NUMBER),
    "deque": call("collections.deque", [0, 1, 2], "()", f"none|{NUMBER}"),
    "date": call("datetime.date", [1], "4 bytes"),
    "datetime": call("datetime.datetime", [1, 2], "10 bytes", "zone"),
    "time": call("datetime.time", [1, 2], "6 bytes", "zone"),
    "timedelta": call("datetime.timedelta", [3], NUMBER, NUMBER, NUMBER),
    "timezone": call("datetime.timezone", [1, 2], "delta", TEXT),
    "dtype": call("numpy.dtype", [3], "f4", "false", "true"),
    "path": call("pathlib.PosixPath", [0, 1, 2], TEXT, TEXT),
    "path of Windows": call("pathlib.PureWindowsPath", [0, 1], TEXT),
    "scalar": call(f"{NEW}.scalar", [2], "dtype", "4 bytes"),
    "scalar of NumPy 1": call(f"{OLD}.scalar", [2], "dtype", "4 bytes"),
    "array": call(f"{NEW}._reconstruct", [3], "ndarray", "(0,)", "1 bytes"),
    "array of NumPy 1": call(f"{OLD}._reconstruct", [3], "ndarray", "(0,)", "1 bytes"),
    "state of a BytesIO": state(BUFFER, f"no bytes|{BYTES}", "0", "none|dict"),
    "state at its end": state(BUFFER, BYTES, "1|0", "none|dict"),
    "state of a dtype": state(DTYPE, "3", "<", *["none"] * 3, "-1", "-1", "0"),
    "state of an array": state(ARRAY, "1", "(1,)|()", "dtype", "true|false", "4 bytes"),
    "state without elements": state(ARRAY, "1", "(0,)|(0, 0)", "dtype", "true|false", "no bytes"),
}  # fmt: skip
# What torch allows whatever the arguments are.
HARMFUL: dict[str, Form] = {
    "encode": call("_codecs.encode", [2], TEXT, "latin1|latin-1"),
    "bytearray": call("builtins.bytearray", [0, 1], BYTES),
    "bytearray of text": call("builtins.bytearray", [0, 2], TEXT, "latin1|latin-1"),
    "set": call("builtins.set", [0, 1], PARTS),
    "Counter": call("collections.Counter", [0, 1], PARTS),
    "OrderedDict": call("collections.OrderedDict", [0, 1], PARTS),
    "Size": call("torch.Size", [0, 1], TUPLE),
}


def is_known(pickled: bytes) -> bool:
    """Whether it has something that torch refuses, and all in it is known to run nothing."""
    try:
        return bool(vet(h.v2(pickled)))
    except HostilePickleError:
        return False


def passes(pickled: bytes) -> bool:
    try:
        vet(h.v2(pickled))
    except HostilePickleError:
        return False
    return True


@pytest.mark.parametrize("name", [*INERT, *HARMFUL])
def test_arguments_that_the_pickler_does_not_write_are_not_taken_for_harmless(name):
    before, after, counts, places = {**INERT, **HARMFUL}[name]
    accepted = is_known if name in INERT else passes
    usual = [KINDS[kinds.partition("|")[0]] for kinds in places]
    for count in range(len(places) + 2):
        body = before + b"".join([*usual, p.NONE][:count]) + after
        assert accepted(body) is (count in counts), count
    for place, kind in itertools.product(range(len(places)), KINDS):
        parts = [*usual]
        parts[place] = KINDS[kind]
        is_right = kind in places[place].split("|")
        assert accepted(before + b"".join(parts) + after) is is_right, (place, kind)


ELEMENT_BYTES = {
    "b1": 1, "i1": 1, "i2": 2, "i4": 4, "i8": 8, "u1": 1, "u2": 2, "u4": 4, "u8": 8,
    "f2": 2, "f4": 4, "f8": 8, "c8": 8, "c16": 16,
}  # fmt: skip


@pytest.mark.parametrize("name", ELEMENT_BYTES)
def test_an_element_has_the_size_of_its_dtype(name):
    for size in (1, 2, 3, 4, 8, 16):
        scalar = h.called(f"{NEW}.scalar", c.dtype(name), c.text_bytes(size))
        assert is_known(scalar) is (size == ELEMENT_BYTES[name])


OTHERS: dict[str, bytes] = {
    "an entry of a Counter": h.called("collections.Counter") + p.NONE * 2 + b"s",
    "a new object in place of a call": b"cdatetime\ntimedelta\n(K\1K\1K\1t\x81",
    "a call in place of a new object": h.called("_io.BytesIO"),
    "an argument of what torch allows": h.called("torch.Size", p.tupled(DELTA)),
    "a state": DELTA + p.mapped({}) + b"b",
    "a state that is a tuple": h.called("collections.OrderedDict") + b")b",
    "an item": DELTA + p.NONE + b"a",
    "items": DELTA + b"(NNe",
    "an entry": DELTA + b"NNs",
    "a key that is a list": h.called("collections.OrderedDict") + b"]Ns",
    "a result that is called": h.called("builtins.set") + b")R",
    "a storage of too few words": p.tupled(p.text("storage")) + b"Q",
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_value_with_an_unknown_part_is_not_taken_for_harmless(name):
    assert is_known(p.listed(DELTA, *KINDS.values()))
    assert not is_known(p.listed(DELTA, OTHERS[name]))


def test_a_value_is_known_only_alone_and_in_the_protocol_of_torch():
    assert is_known(DELTA)
    assert not is_known(DELTA + p.NONE)
    for length in (1023, 1024):  # of a module's name
        named = p.listed(DELTA, b"c" + b"m" * length + b"\nn\n")
        assert is_known(named) is (length == 1023)
    for protocol in (b"", b"\x80\x03", b"\x80\x04"):
        assert not vet(h.archive(protocol + DELTA + b"."))


@pytest.mark.parametrize("name", c.ABUSES)
def test_what_abuses_a_value_that_runs_nothing_is_not_taken_for_harmless(name):
    found: frozenset[str] = frozenset()
    with contextlib.suppress(HostilePickleError):
        found = vet(c.ABUSES[name]())
    # In these, NumPy and torch find the fault.
    assert bool(found) is (
        name in {"a date that cannot be", "code after a date", "text where bytes should be"}
    )


# Sizes that torch compares with the storage before it allocates; and what it does not read.
LEFT_TO_TORCH = {
    "bytearray by a module's old name", "shape of 2**40", "negative stride", "storage offset 2**62",
    "string of 4 GiB", "packed, 128 MiB",
}  # fmt: skip


@pytest.mark.parametrize("name", c.TAKES)
def test_what_would_take_memory_is_refused_before_torch_sees_it(name):
    body = c.TAKES[name]()
    with contextlib.nullcontext() if name in LEFT_TO_TORCH else pytest.raises(REFUSALS):
        vet(body)


# Archives that are whole as far as they are read here: torch finds what is wrong.
READ = {"local header gone", "encrypted", "empty pickle", "memo that was not put", "cut off pickle"}


@pytest.mark.parametrize("name", c.BROKEN)
def test_an_archive_that_torch_does_not_write_is_refused_before_torch_sees_it(name):
    body = c.BROKEN[name]
    with contextlib.nullcontext() if name in READ else pytest.raises(REFUSALS):
        vet(body() if callable(body) else body)


@pytest.mark.parametrize(
    ("limit", "build"),
    [
        (1_000, lambda n: b"(" + b"".join(b"cm\nn%d\n" % k for k in range(n)) + b"t"),
        (5_000, lambda n: b"](" * n + b"e" * n),
        (64, lambda n: b")" + b"\x85" * n),
        (64, lambda n: b"}" + p.number(1 << (n - 1)) + b"Ns"),
        (9, lambda n: b"Nr" + n.to_bytes(4, "little")),
        # Where the parts, times their uses, are 1000 and 16 times the bytes of the pickle.
        (2167, lambda n: b"}(" + p.NONE * n + b"tq\0Ns" + b"h\0Ns" * 16),
        (380, lambda n: b"cm\nn\nq\1(" + p.NONE * n + b"tq\2R" + b"h\1h\2R" * 4),
    ],
    ids=["classes", "marks", "nested tuples", "bits of a key", "memo", "keys", "calls"],
)
def test_each_limit_is_where_it_is_said_to_be(limit, build):
    assert passes(build(limit))
    assert not passes(build(limit + 1))


def test_no_part_of_a_value_is_kept_until_the_collector_runs():
    view = memoryview(h.saved([torch.ones(3), date(2026, 1, 1)]))
    kept = weakref.ref(view)
    gc.disable()
    try:
        vet(view)
        del view
        assert kept() is None
    finally:
        gc.enable()
