"""The hostile inputs, by family. `hostile.CASES` has them once this module is imported."""
# ruff: noqa: E501 - one case a line

from __future__ import annotations

import collections
import os
import struct
from typing import Any

import torch

from tests.support import hostile as h, indexes, pickles as p
from tests.support.hostile import add, add_all
from tests.support.hostile_metadata import DAMAGED, EXECUTES

BIG = 1 << 62
HUGE8 = BIG.to_bytes(8, "little")


# --- .metadata -----------------------------------------------------------------------------------


def many_times_one_chunk(count: int) -> bytes:
    offsets, sizes = p.size(*[0] * 64), p.size(*[1] * 64)
    chunks = b"](" + p.chunk(offsets, sizes) + b"q\1" + b"h\1" * count + b"e"
    return p.metadata(
        p.mapped({p.text("w"): p.tensor(shape=sizes, chunks=chunks)}),
        p.mapped({p.index(p.text("w"), offsets): p.info()}),
        mcore_data=p.text("x" * 3 * count),  # a body of that size may have so many entries
    )


def in_boxes(shape: tuple[int, ...], boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> bytes:
    chunks = {box: p.chunk(p.size(*box[0]), p.size(*box[1])) for box in boxes}
    tensor = p.tensor(shape=p.size(*shape), chunks=p.listed(*[chunks[box] for box in boxes]))
    places = {p.index(p.text("w"), p.size(*offsets)): p.info() for offsets, _ in chunks}
    return p.metadata(p.mapped({p.text("w"): tensor}), p.mapped(places))


def add_metadata() -> None:
    """Those of the decoder's own tests, through the public doors, and what those lack."""
    add_all(".metadata runs code", h.foreign, EXECUTES, h.REFUSED)
    add_all(".metadata is damaged", h.foreign, DAMAGED, h.REFUSED)
    canary = p.call(h.THIS, "fire", p.text("x"))
    metadata = p.name(p.METADATA, "Metadata")
    slots = p.tupled(p.NONE, p.mapped({p.text("__class__"): metadata}))
    add_all(".metadata runs code", h.foreign, {
        "STACK_GLOBAL with a dotted module": p.whole(p.name("os.path", "os.system")),
        "STACK_GLOBAL of a number": p.whole(p.number(1) + p.text("x") + b"\x93"),
        "INST of an allowed class": b"\x80\x02(i" + p.METADATA.encode() + b"\nMetadata\n.",
        "BUILD with __setstate__": p.whole(p.made(p.METADATA, "Metadata", __setstate__=canary)),
        "BUILD with __reduce__": p.metadata(__reduce_ex__=canary),
        "builtins.type": p.whole(p.call("builtins", "type", p.text("X"), p.EMPTY_TUPLE, p.mapped({}))),
        "builtins.vars": p.whole(p.call("builtins", "vars", metadata)),
        "operator.attrgetter": p.whole(p.call("operator", "attrgetter", p.text("__class__"))),
        "types.FunctionType": p.whole(p.name("types", "FunctionType")),
        "torch.jit.load": p.whole(p.call("torch.jit", "load", p.text("x"))),
        "torch._dynamo": p.whole(p.name("torch._dynamo", "config")),
        "numpy": p.whole(p.call("numpy.core.multiarray", "_reconstruct", p.NONE)),
        "pickle.loads": p.whole(p.call("pickle", "loads", p.text("x"))),
        "pty.spawn": p.whole(p.call("pty", "spawn", p.text("x"))),
        "unicode look-alike of torch": p.whole(p.name("t\u043erch", "Size")),
        "NUL in a global's name": p.whole(p.name("torch\0", "Size")),
        "newline in a global's name": p.whole(p.name("torch\nos", "system")),
    }, h.REFUSED)  # fmt: skip
    add_all(".metadata changes classes", h.foreign, {
        "slots state with __class__": p.whole(metadata + p.EMPTY_TUPLE + p.NEWOBJ + slots + p.BUILD),
        "OrderedDict": p.whole(p.name("collections", "OrderedDict") + p.mapped({p.text("get"): p.NONE}) + p.BUILD),
        "an OrderedDict's state": p.whole(p.call("collections", "OrderedDict") + p.mapped({p.text("x"): p.NONE}) + p.BUILD),
        "PosixPath": p.whole(p.name("pathlib", "PosixPath") + p.mapped({p.text("__new__"): p.NONE}) + p.BUILD),
    }, h.REFUSED)  # fmt: skip
    add_all(".metadata takes memory", h.foreign, {
        "LONG1 cut off": p.whole(b"\x8a\xff1"),
        "BINUNICODE8 of 2**64 - 1": p.whole(b"\x8d" + b"\xff" * 8),
        "FRAME of 2**64 - 1": b"\x80\x04\x95" + b"\xff" * 8 + b"N.",
        "memo number 2**32 - 1, got": p.whole(b"Nr\xff\xff\xff\xffj\xff\xff\xff\xff"),
        "GET as text": p.whole(b"g99999999999999999999\n"),
        "DUP bomb": p.whole(b"]" + b"2" * 50_000),
        "tuple of tuples of tuples": p.whole(b"N" + b"".join(b"q\0h\0h\0\x87" for _ in range(2_000))),
        "billion laughs of lists": p.whole(b"]q\0" + b"".join(b"](" + b"h\0" * 10 + b"eq\0" for _ in range(500))),
        "billion laughs as modules": p.metadata(meta=p.made(p.METADATA, "StorageMeta", modules=(
            b"](" + p.text("m") + b"q\0" + b"h\0" * 10 + b"eq\0"
            + b"".join(b"](" + b"h\0" * 10 + b"eq\0" for _ in range(20))))),
        "100,000 empty lists": p.whole(b"]" * 100_000),
        "100,000 nested lists": p.whole(b"]" * 100_000 + b"a" * 99_999),
        "100,000 nested dictionaries": p.whole(b"}" + b"N}" * 50_000 + b"s" * 50_000),
        "100,000 nested calls": p.whole(b"".join([p.name("torch", "Size"), b"q\0", b"h\0" * 50_000, b")", b"R\x85" * 50_000])),
        "100,000 times one string": p.metadata(mcore_data=h.nested(b"](" + p.text("x" * 50_000) + b"q\0", 1) + b"h\0" * 100_000 + b"e", version=p.number(3)),
        "text INT of 5000 digits": p.whole(b"I" + b"9" * 5_000 + b"\n"),
        "text LONG of 5000 digits": p.whole(b"L" + b"9" * 5_000 + b"L\n"),
        "shape of 10,000 dimensions": p.metadata(p.mapped({p.text("w"): p.tensor(shape=p.size(*[1] * 10_000))})),
        "shape that multiplies to 2**64": p.metadata(p.mapped({p.text("w"): p.tensor(shape=p.size(1 << 32, 1 << 32))})),
        "shape of 2**62 elements of 4 bytes": p.metadata(p.mapped({p.text("w"): p.tensor(shape=p.size(1 << 62, 1))})),
        "shape hidden behind a 0": p.metadata(p.mapped({p.text("w"): p.tensor(shape=p.size(0, 1 << 63))})),
        "length of 2**62": p.metadata(storage=p.mapped({p.index(): p.info(length=h.long_number(BIG))})),
        "length of 2**42": p.metadata(storage=p.mapped({p.index(): p.info(length=h.long_number(1 << 42))})),
        "value of 2**62 bytes": p.metadata(
            p.mapped({p.text("step"): p.made(p.METADATA, "BytesStorageMetadata")}),
            p.mapped({p.index(p.text("step"), p.NONE): p.info(length=h.long_number(BIG))})),
        "2000 values of 60 GiB": p.metadata(
            p.mapped({p.text(f"v{n}"): p.made(p.METADATA, "BytesStorageMetadata") for n in range(2_000)}),
            p.mapped({p.index(p.text(f"v{n}"), p.NONE): p.info(length=h.long_number(60 << 30)) for n in range(2_000)})),
        "value of 32 GiB in a small object": p.metadata(
            p.mapped({p.text("step"): p.made(p.METADATA, "BytesStorageMetadata")}),
            p.mapped({p.index(p.text("step"), p.NONE): p.info(length=h.long_number(32 << 30))})),
        "tensor of 64 TiB without chunks": p.metadata(p.mapped({p.text("w"): p.tensor(shape=p.size(1 << 44, 1), chunks=p.listed())})),
        "one chunk of 64 dimensions, 20 times": many_times_one_chunk(20),
    }, h.REFUSED)  # fmt: skip
    huge = p.metadata(
        p.mapped({p.text("w"): p.tensor(shape=p.size(1 << 44, 1), chunks=p.listed(p.chunk(sizes=p.size(1 << 44, 1))))}),
        p.mapped({p.index(): p.info(length=h.long_number(1 << 46))}))  # fmt: skip
    add(".metadata claims much", "tensor of 64 TiB", lambda: h.foreign(huge), h.REFUSED)
    zeros = (0,) * 24
    interlocked = [
        (zeros, (1,) * 24),
        ((1, *zeros[1:]), (1, 1) + (2,) * 22),
        ((1, 1, *zeros[2:]), (1, 1) + (2,) * 22),
        ((0, 1, *zeros[2:]), (1, 1) + (2,) * 22),
    ]
    add_all(".metadata takes time", lambda boxes: h.foreign(in_boxes(*boxes)), {
        "4,000 chunks of nearly all of 16 million cells": lambda: (
            (8,) * 8, [((n,) * 8, (1,) * 8) for n in range(8)] + [((0,) * 8, (8,) * 7 + (7,))] * 4_000),
        "a hole behind 24 dimensions": lambda: ((2,) * 24, interlocked),
    }, h.REFUSED)  # fmt: skip
    paths = {
        "up": "../x", "two slashes": "//host/x", "http": "http://169.254.169.254/latest",
        "file": "file:///etc/passwd", "UNC": "\\\\host\\x", "DEL": "a\x7f", "dot": ".", "dots": "..",
        "inner empty": "a//b",
    }  # fmt: skip
    add_all(".metadata leaves the checkpoint", lambda path: h.foreign(
        p.metadata(storage=p.mapped({p.index(): p.info(p.text(path))}))), paths, h.REFUSED)  # fmt: skip
    odd = {
        "full-width dots": "\uff0e\uff0e/x", "fraction slash": "..\u2044x", "right-to-left": "\u202ex",
        "percent-encoded": "%2e%2e/x", "encoded slash": "..%2fx", "question mark": "x?y=z", "tilde": "~/x",
        "variable": "$HOME/x", "glob": "*",
    }  # fmt: skip
    # Keys like others, of objects that are not there.
    add_all(".metadata names odd keys", lambda path: h.foreign(
        p.metadata(storage=p.mapped({p.index(): p.info(p.text(path))}))), odd, h.CORRUPT)  # fmt: skip
    add_all(".metadata has impossible ranges", h.foreign_tensor_info, {
        "beyond the object": {"offset": p.number(1 << 20)},
        "text length": {"length": p.text("1")},
        "empty": {"length": p.number(0)},
    }, h.REFUSED)  # fmt: skip


# --- index ---------------------------------------------------------------------------------------


def set_at(*path: Any, value: Any) -> Any:
    def edit(plain: list[Any]) -> None:
        place: Any = plain
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = value

    return lambda: edit


def add_index() -> None:
    chunks = indexes.Chunk((0, 0), (2, 3), h.item(0, h.PAYLOAD))
    add_all("index leaves the checkpoint", h.with_key, {
        "up": "../x", "inner": "a/../../x", "absolute": "/etc/passwd", "host": "//host/x",
        "s3": "s3://other/x", "http": "http://169.254.169.254/", "file": "file:///etc/passwd",
        "gs": "GS://other/x", "NUL": "a\0b", "newline": "a\nb", "backslash": "..\\x", "empty": "",
        "dot": ".", "dots": "..", "slash at the end": "a/", "long": "x" * 1025,
        "long in UTF-8": "\u00fc" * 513, "DEL": "a\x7f",
    })  # fmt: skip
    add_all("index has impossible ranges", lambda changes: h.with_item(**changes), {
        "negative offset": {"offset": -1},
        "negative length": {"length": -1},
        "negative payload offset": {"payload_offset": -1},
        "negative payload length": {"payload_length": -24},
        "offset 2**63 - 1": {"offset": 2**63 - 1},
        "offset + length over 2**63": {"offset": 2**63 - 1, "length": 2**63 - 1},
        "payload end over 2**64": {"payload_offset": 2**63, "payload_length": 2**63},
        "item longer than its object": {"length": 1 << 40},
        "payload longer than its item": {"length": 23},
        "payload before its item": {"offset": 1, "length": 30},
        "object -1": {"object_number": -1},
        "object 1": {"object_number": 1},
        "object 2**63": {"object_number": 2**63},
        "no digest": {"digests": b""},
        "short digest": {"digests": b"x" * 15},
        "a million digests": {"digests": b"x" * 16_000_000},
        "in the bytes of the value": {"offset": 1, "payload_offset": 1},
        "wrong digest": {"digests": b"x" * 16},
    })  # fmt: skip
    add_all("index has impossible shapes", lambda changes: h.with_tensor(**changes), {
        "negative": {"shape": (-2, -3)},
        "2**63": {"shape": (2**63, 1)},
        "2**32 x 2**32": {"shape": (2**32, 2**32)},
        "2**62 float32": {"shape": (2**62,), "chunks": ()},
        "overflow behind a 0": {"shape": (0, 2**62, 2**62), "chunks": ()},
        "100 dimensions": {"shape": (1,) * 100, "chunks": ()},
        "64 TiB without chunks": {"shape": (2**44, 1), "chunks": ()},
        "without chunks": {"chunks": ()},
        "chunk twice": {"chunks": (chunks, chunks)},
        "chunks overlap": {"shape": (3, 3), "chunks": (chunks, indexes.Chunk((1, 0), (2, 3), chunks.item))},
        "chunks overlap and leave elements out": {"chunks": tuple(
            indexes.Chunk(at, sizes, h.item(8 * n, h.PAYLOAD[8 * n : 8 * n + 8]))
            for n, (at, sizes) in enumerate((((0, 0), (2, 1)), ((0, 1), (1, 2)), ((1, 0), (1, 2))))
        )},
        "chunk of too few": {"shape": (4, 3)},
        "other dimensions": {"shape": (6,)},
        "dtype None": {"dtype": "None"},
        "dtype nn": {"dtype": "nn"},
        "dtype load": {"dtype": "load"},
        "dtype with a dot": {"dtype": "float32.__class__"},
        "dtype of other size": {"dtype": "float64"},
        "dtype without memory": {"dtype": "quint4x2"},
        "layout load": {"layout": "load"},
        "layout sparse_coo": {"layout": "float32"},
        "memory format load": {"memory_format": "load"},
    }, h.REFUSED)  # fmt: skip
    add_all("index has impossible shapes", lambda changes: h.with_chunk(**changes), {
        "chunk outside": {"offsets": (1, 0)},
        "chunk at -1": {"offsets": (-1, 0)},
        "chunk of -2 x -3": {"sizes": (-2, -3)},
        "chunk that overflows": {"offsets": (2**63 - 1, 0), "sizes": (2**63 - 1, 3)},
        "chunk of 70 dimensions": {"offsets": (0,) * 70, "sizes": (1,) * 70},
        "raw payload said to be pickled": {"pickled": 1},
        "pickled 2": {"pickled": 2},
        "pickled 255": {"pickled": 255},
    }, h.REFUSED)  # fmt: skip
    add_all("index has impossible objects", lambda changes: h.with_object(**changes), {
        "negative size": {"size_bytes": -1},
        "size 2**64 - 1": {"size_bytes": 2**64 - 1},
        "short framing digest": {"framing_digest": b""},
        "long framing digest": {"framing_digest": b"x" * 1_000_000},
    })  # fmt: skip

    def placed(place: tuple[str | int, ...], *keys: str) -> h.Objects:
        data = h.PAYLOAD + h.STEP * len(keys)
        places = range(len(h.PAYLOAD), len(data), len(h.STEP))
        values = {key: h.item(at, h.STEP) for key, at in zip(keys, places, strict=True)}
        index = h.index_of(data, blobs=values, flatten_mapping={k: (k, *place) for k in values})
        return h.sealed(indexes.encode(index), {h.DATA_KEY: data})

    # A load into a state does not look at the places.
    add_all("index places keys in lists", lambda place: placed(*place), {
        "999 long ones, one in the other": ((99_999,) * 999, "v"),
        "as many as there are keys": ((99_999,), *map(str, range(200))),
        "in a place of no list": ((2**40,), "v"),
        "before the first": ((-1,), "v"),
    }, (*h.CORRUPT, "value"))  # fmt: skip
    add_all("index places keys deep", lambda place: placed(place, "v"), {
        "200,000 dicts": ("a",) * 200_000,
        "200,000 lists": (0,) * 200_000,
        "just too deep": ("a",) * 1_000,
    })  # fmt: skip
    add("key of many parts", "100,000 dots", lambda: placed((), "." * 100_000), h.HARMLESS)
    body = indexes.encode(h.index_of(h.DATA))
    head = b"\x97\x02"
    add_all("index is no msgpack", h.ours, {
        "empty": b"",
        "nil": b"\xc0",
        "text": b"<html>",
        "pickle": b"\x80\x04N.",
        "array of 2**32 - 1": b"\xdd\xff\xff\xff\xff",
        "objects: array of 2**32 - 1": head + b"\xdd\xff\xff\xff\xff",
        "objects: nested arrays of 65535": head + b"\xdc\xff\xff" * 10_000,
        "tensors: array of 2**32 - 1": head + b"\x90\xdd\xff\xff\xff\xff",
        "key of 4 GiB": head + b"\x90\x91\x98\xdb\xff\xff\xff\xff",
        "shape: array of 2**31": head + b"\x90\x91\x98\xa1w\xdd\x80\0\0\0",
        "column of 4 GiB": head + b"\x90\x90\x90\x99\xc6\xff\xff\xff\xff",
        "digests of 4 GiB": head + b"\x91\x94\xa1a\1\xc0\xc6\xff\xff\xff\xff",
        "nested arrays": b"\x91" * 100_000,
        "nested maps": b"\x81\xa1a" * 100_000,
        "nested as an unknown field": b"\x98" + body[1:] + b"\x91" * 100_000 + b"\x90",
        "newer format, nested": b"\x92\x03" + b"\x91" * 100_000,
        "newer format, array of 2**32 - 1": b"\x92\x03\xdd\xff\xff\xff\xff",
        "extension": head + b"\xc9\xff\xff\xff\xff\1",
        "timestamp": head + b"\xd7\xff" + b"\xff" * 8,
        "reserved byte": b"\xc1",
        "half": body[: len(body) // 2],
        "trailing": body + b"\xc0",
        "twice": body * 2,
        "no UTF-8": body.replace(DATA_KEY, b"\xff" * len(DATA_KEY)),
        "key no UTF-8": body.replace(b"\x91\xa4step", b"\x91\xa4\xff\xfe\xfd\xfc"),
    }, (*h.CORRUPT, *h.UNSUPPORTED))  # fmt: skip
    add_all("index has other types", h.with_raw, {
        "format 0": set_at(0, value=0),
        "format 1": set_at(0, value=1),
        "format 3": set_at(0, value=3),
        "format 2**63": set_at(0, value=2**63),
        "format -1": set_at(0, value=-1),
        "format 1.0": set_at(0, value=1.5),
        "format true": set_at(0, value=True),
        "objects a map": set_at(1, value={}),
        "key bytes": set_at(1, 0, 0, value=b"x"),
        "size NaN": set_at(1, 0, 1, value=float("nan")),
        "size 1e308": set_at(1, 0, 1, value=1e308),
        "tensor a number": set_at(2, 0, value=1),
        "number as key": set_at(2, 0, 0, value=5),
        "shape of floats": set_at(2, 0, 1, value=[2.5, 3.0]),
        "dtype a number": set_at(2, 0, 2, value=1),
        "chunks null": set_at(2, 0, 7, value=None),
        "-1 chunks": set_at(2, 0, 7, value=-1),
        "0 chunks": set_at(2, 0, 7, value=0),
        "2 chunks": set_at(2, 0, 7, value=2),
        "2**62 chunks": set_at(2, 0, 7, value=2**62),
        "2**64 - 1 chunks": set_at(2, 0, 7, value=2**64 - 1),
        "value and tensor": set_at(3, 0, value="w"),
        "value twice": set_at(3, value=["step", "step"]),
        "columns null": set_at(4, value=None),
        "columns missing": set_at(4, value=[b"\0\0"] * 8),
        "column of text": set_at(4, 0, value="\0\0"),
        "column of numbers": set_at(4, 0, value=[0, 0]),
        "column of 3 bytes": set_at(4, 0, value=b"\0\0\0"),
        "column of 6 bytes": set_at(4, 0, value=b"\0" * 6),
        "column of 32 bytes": set_at(4, 0, value=b"\0" * 32),
        "column empty": set_at(4, 1, value=b""),
        "digest in halves": set_at(4, 8, value=b"x" * 24),
        "flatten mapping of maps": set_at(5, "w", value=[{}]),
        "checkpoint_id a number": set_at(6, value=[1, None, []]),
    }, (*h.CORRUPT, *h.UNSUPPORTED))  # fmt: skip


DATA_KEY = h.DATA_KEY.encode()

# --- marker --------------------------------------------------------------------------------------


def add_marker() -> None:
    good = h.ours()["_COMMIT"]
    add_all("marker is no JSON", h.with_marker_body, {
        "empty": b"", "null": b"null", "number": b"1", "text": b"<html>", "NUL": b"\0" * 100,
        "half": good[: len(good) // 2], "twice": good * 2, "trailing": good + b" ",
        "BOM": b"\xef\xbb\xbf" + good, "UTF-16": good.decode().encode("utf-16"),
        "digest of zeros": good[:-66] + b"0" * 64 + b'"}', "no digest": good[: good.rindex(b",")] + b"}",
        "too large": good + b" " * 70_000,
        "nested arrays": b'{"format":1,"x":' + b"[" * 50_000,
        "nested objects": b'{"format":1,"x":' + b'{"a":' * 10_000,
        "huge exponent as format": b'{"format":1e999999999}',
        "huge number as format": b'{"format":' + b"9" * 5_000 + b"}",
        "no UTF-8": b'{"format":1,"state":"\xff\xfe"}',
        "newer format": b'{"format":3}', "format 2**62": b'{"format":4611686018427387904}',
    }, (*h.CORRUPT, *h.UNSUPPORTED))  # fmt: skip
    ref = {"key": h.INDEX_KEY, "size_bytes": 10, "sha256": "ab" * 32}
    fields: dict[str, tuple[str, object]] = {
        "state unknown": ("state", "maybe"), "state null": ("state", None),
        "commit_id of traversal": ("commit_id", "../../x"), "commit_id upper": ("commit_id", "C" * 32),
        "write_id long": ("write_id", "d" * 33), "generation 0": ("generation", 0),
        "generation 2**63": ("generation", 2**63), "generation 1e400": ("generation", 1e300),
        "log of 1000": ("log", ["a" * 32] * 1_000), "log of text": ("log", "a" * 32),
        "world size -1": ("world_size", -1), "world size 2**64": ("world_size", 2**64),
        "no time zone": ("created_at", "2026-01-02T00:00:00"), "year 99999": ("created_at", "99999-01-01T00:00:00Z"),
        "month 13": ("created_at", "2026-13-01T00:00:00Z"), "counts negative": ("counts", {"tensors": -1}),
        "counts 2**70": ("counts", {"total_bytes": 2**70}), "pins of 1000": ("pins", ["x"] * 1_000),
        "pin empty": ("pins", [""]), "metadata a list": ("user_metadata", [1]),
        "no index": ("index", None),
        "index of 2**40 bytes": ("index", {**ref, "size_bytes": 2**40}),
        "index of -1 bytes": ("index", {**ref, "size_bytes": -1}),
        "index of 2 GiB": ("index", {**ref, "size_bytes": 2**31}),
        "index of other digest": ("index", ref),
        "index digest short": ("index", {**ref, "sha256": "ab"}),
        "index that is missing": ("index", {**ref, "key": "index.ffffffffffffffff.msgpack"}),
        "index is the marker": ("index", {**ref, "key": "_COMMIT"}),
        "deleted, and an index": ("state", "deleted"),
    }  # fmt: skip
    add_all("marker has impossible fields", lambda pair: h.with_field(*pair), fields,
            (*h.CORRUPT, *h.UNSUPPORTED, "CheckpointNotFoundError"))  # fmt: skip
    keys = ("../index", "/etc/passwd", "//host/index", "s3://other/index", "http://host/index",
            "file:///etc/passwd", "a\0b", "a\\b", "", ".", "x" * 1_025, "a//b", "a/", "\ud800")  # fmt: skip
    add_all("marker leaves the checkpoint", lambda key: h.with_field("index", {**ref, "key": key}),
            {ascii(key)[:40]: key for key in keys})  # fmt: skip
    add_all("marker is ambiguous", h.with_marker_json, {
        "state twice": lambda: lambda body: body[:-1] + b',"state":"maybe"}',
        "index twice": lambda: lambda body: body[:-1] + b',"index":{"key":"../x","size_bytes":1,"sha256":"' + b"ab" * 32 + b'"}}',
        "format twice": lambda: lambda body: body[:-1] + b',"format":3}',
        "NaN": lambda: lambda body: body[:-1] + b',"world_size":NaN}',
        "Infinity": lambda: lambda body: body[:-1] + b',"world_size":Infinity}',
        "world size 1e1000000": lambda: lambda body: body[:-1] + b',"world_size":1e1000000}',
        "lone surrogate": lambda: lambda body: body[:-1] + b',"commit_id":"\\ud800"}',
    }, (*h.CORRUPT, *h.UNSUPPORTED))  # fmt: skip


# --- values and blobs ----------------------------------------------------------------------------


def text_bytes(size: int) -> bytes:
    return h.called("_codecs.encode", p.text("b" * size), p.text("latin1"))


def dtype(name: str = "f4", *, copied: bool = True, state: bytes | None = None) -> bytes:
    made = h.called("numpy.dtype", p.text(name), p.FALSE, p.TRUE if copied else p.FALSE)
    order = p.tupled(
        p.number(3), p.text("<"), p.NONE, p.NONE, p.NONE, p.number(-1), p.number(-1), p.number(0)
    )
    return made + (order if state is None else state) + p.BUILD


def array(shape: bytes, of: bytes, body: bytes, first: bytes | None = None) -> bytes:
    made = h.called(
        "numpy._core.multiarray._reconstruct",
        b"cnumpy\nndarray\n",
        first or p.tupled(p.number(0)),
        text_bytes(1),
    )
    return made + p.tupled(p.number(1), shape, of, p.FALSE, body) + p.BUILD


def buffer(*state: bytes) -> bytes:
    return b"c_io\nBytesIO\n)\x81" + p.tupled(*state) + b"b"


RANGE = h.called("builtins.range", p.number(0), h.long_number(1 << 40), p.number(1))
STATUS = h.called("http.HTTPStatus", p.number(200))
OTHER_ORDER = p.tupled(
    p.number(3), p.text(">"), p.NONE, p.NONE, p.NONE, p.number(-1), p.number(-1), p.number(0)
)
# As the pickler writes them, so that only what is changed below is what is refused.
USES: dict[str, Any] = {
    "range": lambda: h.v2(RANGE),
    "BytesIO": lambda: h.v2(buffer(text_bytes(3), p.number(2), p.NONE)),
    "BytesIO that was looked at": lambda: h.v2(buffer(text_bytes(3), p.number(2), b"}")),
    "dtype": lambda: h.v2(dtype()),
    "array": lambda: h.v2(array(p.tupled(p.number(2)), dtype(), text_bytes(8))),
    "scalar": lambda: h.v2(h.called("numpy._core.multiarray.scalar", dtype("f8"), text_bytes(8))),
    "set": lambda: h.v2(h.called("builtins.set", p.listed(p.number(1)))),
    "four elements a byte": lambda: h.saved(torch.quantize_per_channel(
        torch.zeros(2, 9_000), torch.ones(2), torch.zeros(2), 0, torch.quint2x4)),
    "time zone": lambda: h.v2(h.called("datetime.timezone", h.called("datetime.timedelta", *[p.number(0)] * 3))),
    "path": lambda: h.v2(h.called("pathlib.PurePosixPath", p.text("x"))),
    "sizes in the first of two zip64 fields": lambda: h.with_extra(
        h.archive(h.PICKLE_OF_4, {"data/0": bytes(16)}),
        struct.pack("<HHH2H", 9, 2, 1, 1, 16) + struct.pack("<2Q2H2Q", 16, 16, 1, 16, BIG, BIG)),
}  # fmt: skip
# Of values that are allowed because they run nothing, by what is made of them.
ABUSES: dict[str, Any] = {
    "NumPy's own dtype is changed": lambda: h.v2(dtype(copied=False, state=OTHER_ORDER)),
    "a member of an enum is changed": lambda: h.v2(STATUS + p.mapped({p.text("phrase"): p.text("x")}) + b"b"),
    "slots of a member of an enum": lambda: h.v2(STATUS + p.tupled(p.NONE, p.mapped({p.text("phrase"): p.text("x")})) + b"b"),
    "a member by _rebuild_from_type_v2": lambda: h.v2(h.called("torch._tensor._rebuild_from_type_v2", b"chttp\nHTTPStatus\n", b"chttp\nHTTPStatus\n", p.tupled(p.number(200)), p.mapped({p.text("phrase"): p.text("x")}))),
    "a new member of a flag": lambda: h.v2(h.called("re.RegexFlag", p.number(1 << 30))),
    "an item of a member": lambda: h.v2(STATUS + p.text("a") + p.NONE + b"s"),
    "a BytesIO with attributes": lambda: h.v2(buffer(text_bytes(1), p.number(0), p.mapped({p.text("read"): b"cbuiltins\nset\n"}))),
    "a BytesIO that gets attributes later": lambda: h.v2(p.tupled(buffer(text_bytes(1), p.number(0), b"}q\x05"), b"h\x05" + p.text("read") + b"cbuiltins\nset\n" + b"s")),
    "a BytesIO that writes far away": lambda: h.v2(buffer(text_bytes(1), h.long_number(BIG), p.NONE)),
    "an array by a __setstate__ of its own": lambda: h.v2(
        h.called("collections.OrderedDict") + p.mapped({p.text("__setstate__"): b"cnumpy\nndarray\n"}) + b"b" + p.listed(h.long_number(1 << 40)) + b"b"),
    "new bytes(2**33)": lambda: h.v2(b"cbuiltins\nbytes\n" + p.tupled(h.long_number(1 << 33)) + b"\x81"),
    "Parameter(range(2**40))": lambda: h.v2(h.called("torch.nn.parameter.Parameter", RANGE)),
    "an empty array of 2**40": lambda: h.v2(array(p.tupled(p.number(0)), dtype(), text_bytes(0), p.tupled(h.long_number(1 << 40)))),
    "a new ndarray of 2**40": lambda: h.v2(b"cnumpy\nndarray\n" + p.tupled(p.tupled(h.long_number(1 << 40))) + b"\x81"),
    "an array of more than its bytes": lambda: h.v2(array(p.tupled(h.long_number(1 << 40)), dtype(), text_bytes(8))),
    "an array of -2 x -1": lambda: h.v2(array(p.tupled(p.number(-2), p.number(-1)), dtype(), text_bytes(8))),
    "an array of 33 dimensions": lambda: h.v2(array(p.tupled(*[p.number(1)] * 33), dtype(), text_bytes(4))),
    "an array that overflows behind a 0": lambda: h.v2(array(p.tupled(p.number(0), h.long_number(BIG), h.long_number(BIG)), dtype(), text_bytes(0))),
    "an array of objects": lambda: h.v2(array(p.tupled(p.number(1)), dtype("O8"), p.listed(p.NONE))),
    "an array whose bytes are objects": lambda: h.v2(array(p.tupled(p.number(1)), dtype("O8"), text_bytes(8))),
    "an array of 2**31-byte elements": lambda: h.v2(array(p.tupled(p.number(0)), dtype("V2147483647"), text_bytes(0))),
    "a scalar that is a pickle": lambda: h.v2(h.called("numpy._core.multiarray.scalar", dtype("O8"), text_bytes(8))),
    "a class that is changed": lambda: h.v2(b"cdatetime\ndatetime\n" + p.tupled(p.NONE, p.mapped({p.text("x"): p.NONE})) + b"b"),
    "a date that cannot be": lambda: h.v2(h.called("datetime.date", text_bytes(4))),
    "a time zone of code": lambda: h.v2(h.called("datetime.datetime", text_bytes(10), h.called("builtins.eval", p.text("1")))),
    "appended to a Path": lambda: h.v2(h.called("pathlib.PosixPath", p.text("x")) + p.NONE + b"a"),
    "a key of 65 bits": lambda: h.v2(p.mapped({p.number(1 << 64): p.NONE})),
    "decimals of equal hash": lambda: h.v2(p.mapped({h.called("decimal.Decimal", p.text(str(k * (2**61 - 1)))): p.NONE for k in range(1, 3_000)})),
    "decimals of equal hash in a set": lambda: h.v2(h.called("builtins.set", p.listed(*[h.called("decimal.Decimal", p.text(str(k * (2**61 - 1)))) for k in range(1, 3_000)]))),
    "code after a date": lambda: h.v2(p.tupled(h.called("datetime.timedelta", p.number(1), p.number(0), p.number(0)), h.called("tests.support.hostile.fire", p.NONE))),
    "code in an opcode that torch does not read": lambda: h.v2(h.called("datetime.timedelta", p.number(1), p.number(0), p.number(0)) + b"(ctests.support.hostile\nfire\no"),
    "code by the name of another module": lambda: h.v2(p.tupled(STATUS, b"chttp\nHTTPStatus.__class__\n")),
    "text where bytes should be": lambda: h.v2(h.called("datetime.date", h.called("_codecs.encode", p.text("\u0394" * 4), p.text("latin1")))),
}  # fmt: skip


RUNS: dict[str, Any] = {
    "os.system": lambda: h.saved(h.Reducer(os.system, "touch canary")),
    "canary": lambda: h.saved(h.Reducer(h.fire, 1)),
    "canary in a tensor's attributes": lambda: h.saved({"a": [h.Reducer(h.fire, 1)]}),
    "canary in old format": lambda: h.saved(h.Reducer(h.fire, 1), _use_new_zipfile_serialization=False),
    "canary as a bare pickle": lambda: h.pickled(h.Reducer(h.fire, 1)),
    "canary in protocol 4": lambda: h.saved(h.Reducer(h.fire, 1), pickle_protocol=4),
    "setattr of a class": lambda: h.saved(h.Reducer(setattr, collections.OrderedDict, "x", 1)),
    "setattr of torch": lambda: h.saved(h.Reducer(setattr, torch.Tensor, "x", 1)),
    "BUILD on a class": lambda: h.v2(b"ccollections\nOrderedDict\n" + p.mapped({p.text("get"): p.NONE}) + b"b"),
    "BUILD of slots on a class": lambda: h.v2(b"ctorch\nSize\n" + p.tupled(p.NONE, p.mapped({p.text("x"): p.NONE})) + b"b"),
    "BUILD on torch.Tensor": lambda: h.v2(b"ctorch\nTensor\n" + p.mapped({p.text("x"): p.NONE}) + b"b"),
    "dotted global": lambda: h.v2(b"ctorch\n_utils.os.system\n"),
    "INST": lambda: h.v2(b"(ios\nsystem\n"),
    "EXT": lambda: h.v2(b"\x82\1"),
    "persistent id of code": lambda: h.v2(p.tupled(p.text("module"), p.text("x")) + b"Q"),
    "add_safe_globals": lambda: h.saved(h.Reducer(torch.serialization.add_safe_globals, [h.fire])),
    "copyreg": lambda: h.v2(h.called("copyreg.pickle", p.NONE, p.NONE)),
    "by the old name of a module": lambda: h.v2(h.called("exceptions.eval", p.text("1"))),
    "codec that is a module": lambda: h.v2(h.called("_codecs.encode", p.text("x"), p.text("bz2"))),
    "torch.load": lambda: h.v2(h.called("torch.load", p.text("x"))),
    "TorchScript": lambda: h.archive(h.pickled(1), {"constants.pkl": h.pickled(()), "code/x.py": b"fire()"}),
    "protocol changed on the way": lambda: h.archive(b"\x80\x02\x80\x05\x8c\x01xN."),
}  # fmt: skip
TAKES: dict[str, Any] = {
    "bytearray(2**33)": lambda: h.v2(h.called("builtins.bytearray", h.long_number(1 << 33))),
    "bytearray by its old name": lambda: h.v2(h.called("__builtin__.bytearray", h.long_number(1 << 33))),
    "bytearray by a module's old name": lambda: h.v2(h.called("exceptions.bytearray", h.long_number(1 << 33))),
    "bytearray(*torch.Size)": lambda: h.v2(b"cbuiltins\nbytearray\n" + h.called("torch.Size", p.tupled(h.long_number(1 << 33))) + b"R"),
    "bytearray twice": lambda: h.v2(p.listed(*[h.called("builtins.bytearray", h.long_number(1 << 31))] * 4)),
    "torch.Tensor(2**33)": lambda: h.v2(h.called("torch.Tensor", h.long_number(1 << 33))),
    "torch.FloatTensor(2**33)": lambda: h.v2(h.called("torch.FloatTensor", h.long_number(1 << 33))),
    "new torch.Tensor(2**33)": lambda: h.v2(b"ctorch\nTensor\n" + p.tupled(h.long_number(1 << 33)) + b"\x81"),
    "UntypedStorage(2**33)": lambda: h.v2(h.called("torch.storage.UntypedStorage", h.long_number(1 << 33))),
    "a Tensor through _rebuild_from_type_v2": lambda: h.v2(h.called(
        "torch._tensor._rebuild_from_type_v2", b"ctorch\nTensor\n", b"ctorch\nTensor\n", p.tupled(h.long_number(1 << 33)), p.NONE)),
    "a Tensor of a Size through _rebuild_from_type_v2": lambda: h.v2(h.called(
        "torch._tensor._rebuild_from_type_v2", b"ctorch\nTensor\n", b"ctorch\nTensor\n", h.called("torch.Size", p.tupled(h.long_number(1 << 33))), p.NONE)),
    "storage says 2**40": lambda: h.archive(h.PICKLE_OF_4.replace(b"K\4t", h.long_number(1 << 40) + b"t"), {"data/0": bytes(16)}),
    "storage says -4": lambda: h.archive(h.PICKLE_OF_4.replace(b"K\4t", p.number(-4) + b"t"), {"data/0": bytes(16)}),
    "one storage by two names": lambda: h.archive(
        b"\x80\x02" + p.tupled(h.storage("a", 1_000), h.storage("A", 1_000)) + b".", {"data/a": bytes(4_000)}),
    "storage of an unknown type": lambda: h.archive(
        b"\x80\x02" + h.storage("a", 1, "Size") + b".", {"data/a": bytes(4)}),
    "storage is missing": lambda: h.archive(h.PICKLE_OF_4),
    "shape of 2**40": lambda: h.archive(h.PICKLE_OF_4.replace(b"K\4\x85", h.long_number(1 << 40) + b"\x85"), {"data/0": bytes(16)}),
    "negative stride": lambda: h.archive(h.PICKLE_OF_4.replace(b"K\1\x85", p.number(-1) + b"\x85"), {"data/0": bytes(16)}),
    "storage offset 2**62": lambda: h.archive(h.PICKLE_OF_4.replace(b"QK\0", b"Q" + h.long_number(BIG)), {"data/0": bytes(16)}),
    "qtensor of 2**40": lambda: h.archive(
        b"\x80\x02" + h.called("torch._utils._rebuild_qtensor", p.tupled(p.text("storage"), b"ctorch\nQInt8Storage\n", p.text("0"), p.text("cpu"), b"K\x10") + b"Q",
        b"K\0", p.tupled(h.long_number(1 << 33)), p.tupled(b"K\1"), p.tupled(b"ctorch\nper_tensor_affine\n", b"G" + bytes(8), b"K\0"), p.FALSE, p.NONE) + b".", {"data/0": bytes(16)}),
    "qtensor of a list of 2**33": lambda: h.v2(h.called("torch._utils._rebuild_qtensor", p.NONE, b"K\0", p.listed(h.long_number(1 << 33)))),
    "tuples as a key, a million deep": lambda: h.v2(b"})" + b"\x85" * 1_000_000 + b"Ns"),
    "tuples in a set, a million deep": lambda: h.v2(b"cbuiltins\nset\n](" + b")" + b"\x85" * 1_000_000 + b"e\x85R"),
    "sizes as a key, 100,000 deep": lambda: h.v2(b"}ctorch\nSize\nq\0" + b"h\0" * 100_000 + b")" + b"\x85R" * 100_000 + b"Ns"),
    "marks, a million": lambda: h.v2(b"(" * 1_000_000),
    "equal hashes as keys": lambda: h.v2(p.mapped({p.number(k * (2**61 - 1)): p.NONE for k in range(1, 3_000)})),
    "string of 4 GiB": lambda: h.v2(b"X\xff\xff\xff\xff"),
    "codec of quadratic time": lambda: h.v2(h.called("_codecs.encode", p.text("\u00fc" * 200_000), p.text("punycode"))),
    "bytearray(2**33), without a protocol": lambda: h.archive(h.called("builtins.bytearray", h.long_number(1 << 33)) + b"."),
    "bytearray(2**33), in protocol 3": lambda: h.archive(b"\x80\x03" + h.called("builtins.bytearray", h.long_number(1 << 33)) + b"."),
    "tuples as a key, a million deep, without a protocol": lambda: h.archive(b"})" + b"\x85" * 1_000_000 + b"Ns."),
    "old format, tuples as a key, a million deep": lambda: h.old(b"\x80\x02})" + b"\x85" * 1_000_000 + b"Ns."),
    "old format, tuples in the facts of the machine": lambda: h.old(b"\x80\x02N.", b"\x80\x02})" + b"\x85" * 1_000_000 + b"Ns."),
    "old format, storage says 2**40": lambda: h.old(h.PICKLE_OF_4.replace(b"K\4t", h.long_number(1 << 40) + b"Nt")),
    "old format, a thousand storages of all bytes": lambda: h.old(b"\x80\x02" + p.listed(*[
        p.tupled(p.text("storage"), b"ctorch\nFloatStorage\n", p.text(str(n)), p.text("cpu"), p.number(1 << 14), p.NONE) + b"Q"
        for n in range(1_000)]) + b"."),
    "old format, a module": lambda: h.old(b"\x80\x02" + p.tupled(p.text("module"), b"ctorch\nSize\n", p.NONE, p.NONE) + b"Q."),
    "packed tuples, 5 MB": lambda: h.archive(b"\x80\x02](" + b"N\x85" * 2_500_000 + b"e.", packed=True),
    "packed, 128 MiB": lambda: h.bomb(1 << 27),
    "packed pickle": lambda: h.packed_text(1 << 27),
    "two directories": lambda: h.two_directories(1 << 27),
    "one record under many names": lambda: h.overlapping(5_000),
    "record says 3 GiB": lambda: h.claims(h.archive(b"\x80\x02K\7.", {"data/0": b"x" * 99}, packed=True), b"archive/data/0", 3 << 30),
}  # fmt: skip
GOOD = h.saved(torch.zeros(2, 3))
# Not archives, or none with a whole pickle.
BROKEN: dict[str, Any] = {
    "empty": b"", "only the start": b"PK\3\4", "half": GOOD[: len(GOOD) // 2], "trailing": GOOD + b"x",
    "comment": lambda: GOOD[:-2] + b"\1\0x", "comment that is cut off": GOOD[:-2] + b"\1\0", "front": b"PK\3\4" + GOOD, "zeros": bytes(100),
    "two of one name": lambda: h.archive(b"\x80\x02K\7.", {"data.pkl": b"\x80\x02K\x08."}),
    "two but for case": lambda: h.archive(b"\x80\x02K\7.", {"DATA.pkl": b"\x80\x02K\x08."}),
    "no data.pkl": lambda: h.archive(b"\x80\x02K\7.").replace(b"data.pkl", b"dato.pkl"),
    "record names upwards": lambda: h.archive(b"\x80\x02K\7.").replace(b"archive/data.pkl", b"../../../etc/pwd"),
    "local header gone": lambda: b"PK\3\4" + bytes(26) + GOOD[30:],
    "encrypted": lambda: h.archive(b"\x80\x02K\7.").replace(b"PK\1\2\x14\3\x14\0\0\0", b"PK\1\2\x14\3\x14\0\1\0"),
    "sizes in no zip64 field": lambda: h.with_extra(h.archive(h.PICKLE_OF_4, {"data/0": bytes(16)}), b""),
    "empty pickle": lambda: h.archive(b""), "STOP alone": lambda: h.archive(b"\x80\x02."),
    "memo that was not put": lambda: h.v2(b"h\x07"), "cut off pickle": lambda: h.archive(b"\x80\x02K"),
}  # fmt: skip


def add_values() -> None:
    add_all("our value abuses what runs nothing", h.our_value, ABUSES, h.REFUSED)
    for what, wrap in (("our value", h.our_value), ("our tensor blob", h.our_blob),
                       ("foreign value", h.foreign_value), ("foreign tensor", h.foreign_tensor)):  # fmt: skip
        add_all(f"{what} runs code", wrap, RUNS, h.REFUSED)
        add_all(f"{what} takes memory", wrap, TAKES, h.REFUSED)
        add_all(f"{what} is damaged", wrap, BROKEN, h.REFUSED)
    add("our value is odd", "directory of 2**32 - 1, as the zip64 one counts",
        lambda: h.our_value(GOOD[:-10] + b"\xff" * 8 + b"\0\0"), h.HARMLESS)  # fmt: skip
    deep = b"]" * 200_000 + b"a" * 199_999
    add("our value is odd", "lists, 200,000 deep", lambda: h.our_value(h.v2(deep)), h.HARMLESS)
    add("our value is odd", "a list that is in itself",
        lambda: h.our_value(h.v2(b"]q\0h\0a")), h.HARMLESS)  # fmt: skip
    add("our tensor blob is odd", "a value where a tensor should be",
        lambda: h.our_blob(h.saved(7)), h.CORRUPT)  # fmt: skip
    add("our tensor blob is odd", "another shape",
        lambda: h.our_blob(h.saved(torch.zeros(3, 2))), h.CORRUPT)  # fmt: skip
    add("foreign tensor is odd", "another shape",
        lambda: h.foreign_tensor(h.saved(torch.zeros(1))), h.CORRUPT)  # fmt: skip


def add_zstd() -> None:
    good = h.saved(torch.zeros(2, 3))
    add_all("zstd", h.zstd, {
        "bomb": lambda: h.frame(bytes(1 << 25)),
        "bomb in many frames": lambda: h.frame(bytes(1 << 22), repeat=500),
        "window of 1 GiB": lambda: h.frame(bytes(1 << 20), window_log=30),
        "content size of 2**62": b"\x28\xb5\x2f\xfd\xe0" + HUGE8 + b"\1\0\0",
        "window descriptor of 2 TiB": b"\x28\xb5\x2f\xfd\x00\xff" + b"\1\0\0",
        "block of 2 MiB of one byte": b"\x28\xb5\x2f\xfd\x00\x58" + b"\xfb\xff\xff\0",
        "skippable of 4 GiB": b"\x50\x2a\x4d\x18\xff\xff\xff\xff",
        "dictionary": b"\x28\xb5\x2f\xfd\x03\x58\xff\xff\xff\xff\1\0\0",
        "cut off": lambda: h.frame(good)[:-20],
        "no frame": good,
        "empty": b"",
        "packed archive inside": lambda: h.frame(h.bomb(1 << 27)),
        "bytearray inside": lambda: h.frame(h.v2(h.called("builtins.bytearray", h.long_number(1 << 33)))),
    }, h.REFUSED)  # fmt: skip
    names = {"unknown": "stream.evil/1", "other version": "stream.zstd/9", "path": "../../x", "code": "os.system",
             "empty": "", "long": "x" * 10_000}  # fmt: skip
    add_all("zstd by another name", lambda name: h.foreign_tensor(
        good, transform_descriptors=p.listed(p.text(name))), names, h.REFUSED)  # fmt: skip
    many = p.listed(*[p.text("stream.zstd/1")] * 1_000)
    add("zstd by another name", "a thousand times",
        lambda: h.foreign_tensor(good, transform_descriptors=many), h.REFUSED)  # fmt: skip


add_metadata()
add_index()
add_marker()
add_values()
add_zstd()

# Valid ones, by which a worker makes what is made once in a process.
add("valid", "foreign value", lambda: h.foreign_value(h.saved(7)), h.HARMLESS)
add("valid", "zstd", lambda: h.zstd(h.frame(h.saved(torch.zeros(2, 3)))), h.HARMLESS)
add("valid", "tensor blob", lambda: h.our_blob(h.saved(torch.zeros(2, 3))), h.HARMLESS)
add("valid", "ours", h.ours, h.HARMLESS)
add("valid", "foreign", lambda: h.foreign_tensor(h.saved(torch.zeros(2, 3))), h.HARMLESS)
