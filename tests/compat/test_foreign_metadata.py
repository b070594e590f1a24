"""A stock `.metadata` is read whole; a hostile one runs nothing, changes nothing and is refused."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import filesystem, metadata as stock

from dcp_objstore.compat.foreign import decode_metadata
from dcp_objstore.errors import (
    CheckpointCorruptError,
    DcpObjstoreError,
    UnsupportedError,
    UntrustedPickleError,
)
from tests.support import pickles as p
from tests.support.stock_checkpoints import save_stock


@pytest.fixture(scope="module")
def stock_body(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return save_stock(tmp_path_factory.mktemp("stock") / "checkpoint")


def unpickled(body: bytes) -> stock.Metadata:
    """What stock torch makes of it, with the two differences that we promise."""
    value = pickle.loads(body)
    for entry in value.state_dict_metadata.values():
        properties = getattr(entry, "properties", None)
        if hasattr(properties, "strides"):  # torch 2.15 has them, and nothing uses them
            properties.strides = None
    if value.storage_meta is not None and value.storage_meta.checkpoint_id is not None:
        value.storage_meta.checkpoint_id = str(value.storage_meta.checkpoint_id)
    return value


def same(ours: stock.Metadata, theirs: stock.Metadata) -> None:
    assert ours == theirs
    # A MetadataIndex is equal whatever its `index` hint says.
    assert [i.index for i in ours.storage_data] == [i.index for i in theirs.storage_data]
    assert [type(i.offset) for i in ours.storage_data] == [
        type(i.offset) for i in theirs.storage_data
    ]


def test_stock_metadata_decodes_to_what_stock_torch_reads(stock_body: bytes) -> None:
    ours = decode_metadata(stock_body)
    same(ours, unpickled(stock_body))
    assert len(ours.state_dict_metadata) > 20
    assert all(type(info) is filesystem._StorageInfo for info in ours.storage_data.values())
    assert type(ours.storage_meta.checkpoint_id) is str


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_binary_protocol_decodes_alike(stock_body: bytes, protocol: int) -> None:
    theirs = unpickled(stock_body)
    same(decode_metadata(pickle.dumps(theirs, protocol)), theirs)


def test_metadata_of_many_chunks_decodes() -> None:
    chunks = [stock.ChunkStorageMetadata(torch.Size([row]), torch.Size([1])) for row in range(3000)]
    whole = stock.TensorStorageMetadata(stock.TensorProperties(), torch.Size([3000]), chunks)
    storage = {
        stock.MetadataIndex("w", [row], row): filesystem._StorageInfo("a/__0_0.distcp", row, 1)
        for row in range(3000)
    }
    theirs = stock.Metadata({"w": whole}, {"w": ("w",)}, storage)
    same(decode_metadata(pickle.dumps(theirs)), theirs)


def test_hand_made_metadata_is_valid_so_that_only_the_hostile_part_is_refused() -> None:
    same(decode_metadata(p.metadata()), unpickled(p.metadata()))


def test_torch_2_15_properties_with_strides_lose_only_the_strides() -> None:
    props = p.properties(None, None, p.TRUE, None, p.FALSE, p.tupled(p.number(3), p.number(1)))
    body = p.metadata(p.mapped({p.text("w"): p.tensor(props)}))
    decoded = decode_metadata(body).state_dict_metadata["w"].properties
    assert decoded == stock.TensorProperties(torch.float32, requires_grad=True)


def test_properties_from_before_torch_2_3_are_read() -> None:
    module = "torch.distributed._shard.sharded_tensor.metadata"
    props = p.properties(encoding=p.call(module, "MEM_FORMAT_ENCODING", p.number(0)))
    props = props.replace(p.text(p.METADATA), p.text(module), 1)
    body = p.metadata(p.mapped({p.text("w"): p.tensor(props)}))
    assert decode_metadata(body).state_dict_metadata["w"].properties == stock.TensorProperties()


def test_members_of_enums_that_python_3_11_0_to_3_11_3_wrote_by_name_are_read() -> None:
    for number, (name, memory_format) in enumerate(
        {
            "TORCH_CONTIGUOUS_FORMAT": torch.contiguous_format,
            "TORCH_CHANNELS_LAST": torch.channels_last,
            "TORCH_PRESERVE_FORMAT": torch.preserve_format,
        }.items()
    ):
        for module, cls in (
            (p.METADATA, "_MEM_FORMAT_ENCODING"),
            ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"),
        ):
            member = p.call("builtins", "getattr", p.name(module, cls), p.text(name))
            body = of_properties(None, None, p.FALSE, member)
            decoded = decode_metadata(body).state_dict_metadata["w"].properties
            assert decoded == stock.TensorProperties(torch.float32, memory_format=memory_format)
            by_value = of_properties(None, None, p.FALSE, p.call(module, cls, p.number(number)))
            assert decode_metadata(by_value).state_dict_metadata["w"].properties == decoded


def test_unknown_attributes_are_dropped() -> None:
    shape = p.mapped({p.text("shape"): p.tupled(p.number(4), p.number(4))})
    extra = p.call("collections", "OrderedDict") + b"(" + p.text("w") + shape + b"u"
    decoded = decode_metadata(p.metadata(mcore_data=extra, other=p.NONE))
    assert vars(decoded).keys() == vars(stock.Metadata({})).keys()


@pytest.mark.parametrize(
    ("module", "cls", "parts", "expected"),
    [
        ("pathlib", "PosixPath", ("/", "a", "b"), "/a/b"),
        ("pathlib._local", "PosixPath", ("/a/b",), "/a/b"),
        ("pathlib", "WindowsPath", ("C:\\", "a"), "C:\\a"),
        ("pathlib", "PosixPath", ("/", "bad\udcff"), "/bad?"),
    ],
)
def test_checkpoint_id_becomes_text(
    module: str, cls: str, parts: tuple[str, ...], expected: str
) -> None:
    place = p.call(module, cls, *map(p.text, parts))
    meta = p.made(p.METADATA, "StorageMeta", checkpoint_id=place, save_id=p.text("s"))
    decoded = decode_metadata(p.metadata(meta=meta)).storage_meta
    assert decoded == stock.StorageMeta(expected, "s")


def transforms_of(value: bytes) -> list[str] | None:
    storage = p.mapped({p.index(): p.info(transform_descriptors=value)})
    (info,) = decode_metadata(p.metadata(storage=storage)).storage_data.values()
    return info.transform_descriptors  # type: ignore[no-any-return]


def test_a_checkpoint_id_of_multi_storage_client_becomes_text() -> None:
    place = p.made(
        "multistorageclient.pathlib",
        "MultiStoragePath",
        _path=p.text("msc://profile/run/step-1"),
        _internal_path=p.call("pathlib", "PurePosixPath", p.text("run"), p.text("step-1")),
    )
    meta = p.made(p.METADATA, "StorageMeta", checkpoint_id=place)
    decoded = decode_metadata(p.metadata(meta=meta)).storage_meta
    assert decoded == stock.StorageMeta("msc://profile/run/step-1")


def test_the_extensions_that_an_item_went_through_are_kept() -> None:
    assert transforms_of(p.listed(p.text("stream.zstd/1"))) == ["stream.zstd/1"]
    assert transforms_of(p.tupled(p.text("a"), p.text("b"))) == ["a", "b"]
    assert transforms_of(p.listed()) is None
    assert transforms_of(p.NONE) is None


def test_a_key_with_an_empty_part_is_refused_as_what_it_is() -> None:
    with pytest.raises(UnsupportedError, match=r"'shard//__0_0\.distcp'"):
        decode_metadata(of_path("shard//__0_0.distcp"))


def shared(value: bytes, uses: int) -> bytes:
    """A list of `value`, and of the same once more for each use; five bytes each."""
    return b"](" + value + b"r\xff\xff\0\0" + b"j\xff\xff\0\0" * uses + b"e"


@pytest.mark.timeout(60)  # one that looks at all of it at each use takes an hour for each of these
def test_what_the_memo_repeats_is_looked_at_once() -> None:
    """Quadratic time would let 2 MB stop a job."""
    size = 400_000
    long = p.text("\u00fc" * size)
    decode_metadata(p.metadata(meta=p.made(
        p.METADATA, "StorageMeta", modules=shared(long, size // 5))))  # fmt: skip
    chunks = shared(p.chunk(), size // 5)
    decode_metadata(p.metadata(p.mapped({p.text("w" * size): p.tensor(chunks=chunks)})))
    key = b"(" + p.NONE * size + b"t"
    mapping = b"](" + key + b"r\xff\xff\0\0" + b"}(" + b"j\xff\xff\0\0N" * size + b"ue"
    with pytest.raises(CheckpointCorruptError):
        decode_metadata(p.metadata(mcore_data=mapping))


def test_a_body_above_the_limit_is_refused(stock_body: bytes) -> None:
    decode_metadata(stock_body, max_bytes=len(stock_body))
    with pytest.raises(CheckpointCorruptError, match="more than"):
        decode_metadata(stock_body, max_bytes=len(stock_body) - 1)


def test_the_global_asked_for_is_named() -> None:
    with pytest.raises(UntrustedPickleError, match=r"'os\.system'"):
        decode_metadata(p.whole(p.call("os", "system", p.text("true"))))


# --- hostile pickles ---------------------------------------------------------------------------

fired: list[object] = []


def fire(*args: object) -> object:
    """What a hostile pickle would run, if anything were run."""
    fired.append(args)
    return fire


class Reducer:
    def __reduce__(self) -> tuple[Any, ...]:
        return fire, (1,)


def of_items(**items: bytes) -> bytes:
    return p.metadata(p.mapped({p.text(key): value for key, value in items.items()}))


def of_path(path: str) -> bytes:
    return p.metadata(storage=p.mapped({p.index(): p.info(p.text(path))}))


def of_info(**fields: bytes) -> bytes:
    return p.metadata(storage=p.mapped({p.index(): p.info(**fields)}))


def of_properties(*fields: bytes | None) -> bytes:
    return of_items(w=p.tensor(p.properties(*fields)))  # type: ignore[arg-type]


def on_class(cls: str, module: str = p.METADATA) -> bytes:
    """BUILD with state upon the class itself: pickle would set attributes of the class."""
    return p.whole(p.name(module, cls) + p.mapped({p.text("__init__"): p.NONE}) + p.BUILD)


def slots_on_class(cls: str) -> bytes:
    state = p.tupled(p.NONE, p.mapped({p.text("version"): p.text("owned")}))
    return p.whole(p.name(p.METADATA, cls) + state + p.BUILD)


THIS = __name__
CANARY = p.call(THIS, "fire", p.text("x"))
ENUM = p.name(p.METADATA, "_MEM_FORMAT_ENCODING")
EXECUTES: dict[str, bytes] = {
    "os.system": p.whole(p.call("os", "system", p.text("touch canary"))),
    "posix.system": p.whole(p.call("posix", "system", p.text("touch canary"))),
    "eval": p.whole(p.call("builtins", "eval", p.text("fire()"))),
    "exec": p.whole(p.call("builtins", "exec", p.text("fire()"))),
    "getattr": p.whole(p.call("builtins", "getattr", p.name("torch", "Size"), p.text("x"))),
    "getattr of what is not listed": p.whole(
        p.call("builtins", "getattr", ENUM, p.text("__class__"))),
    "getattr of a getattr": p.whole(p.call("builtins", "getattr", p.call(
        "builtins", "getattr", ENUM, p.text("TORCH_CHANNELS_LAST")), p.text("value"))),
    "getattr through a dot": p.whole(
        p.call("builtins", "getattr", p.name("builtins", "getattr"), p.text("__self__.exec"))),
    "getattr of what was made": p.whole(
        p.call("builtins", "getattr", p.mapped({}), p.text("update"))),
    "getattr with a default": p.whole(
        p.call("builtins", "getattr", ENUM, p.text("TORCH_CHANNELS_LAST"), p.NONE)),
    "getattr in a dropped attribute": p.metadata(
        mcore_data=p.call("builtins", "getattr", ENUM, p.text("mro"))),
    "setattr": p.whole(p.call("builtins", "setattr", p.NONE, p.text("x"), p.NONE)),
    "import": p.whole(p.call("builtins", "__import__", p.text("antigravity"))),
    "subprocess": p.whole(p.call("subprocess", "Popen", p.text("touch canary"))),
    "our canary": p.whole(CANARY),
    "pickled by pickle": pickle.dumps(Reducer()),
    "pickled by protocol 2": pickle.dumps(Reducer(), 2),
    "as a value of the metadata": p.metadata(version=CANARY),
    "in a dropped attribute": p.metadata(mcore_data=CANARY),
    "as a tensor": of_items(w=CANARY),
    "as a key": p.metadata(p.mapped({CANARY: p.tensor()})),
    "as a dtype": of_properties(p.name(THIS, "fire")),
    "as checkpoint_id": p.metadata(meta=p.made(p.METADATA, "StorageMeta", checkpoint_id=CANARY)),
    "new object of a foreign class": p.whole(p.name("threading", "Thread") + b")\x81"),
    "torch.load": p.whole(p.call("torch", "load", p.text("x"))),
    "torch.hub": p.whole(p.call("torch.hub", "load", p.text("x"))),
    "attribute of an allowed class": p.whole(p.name(p.METADATA, "Metadata.__init__")),
    "attribute of an allowed module": p.whole(p.name(p.METADATA, "os.system")),
    "module spelled by the name": p.whole(p.name("torch", "serialization._get_layout")),
    "text global": b"\x80\x02cos\nsystem\nX\x01\x00\x00\x00x\x85R.",
    "dtype that does not exist": of_properties(p.name("torch", "float3")),
    "memo hides the name": p.whole(
        p.listed(p.text("os") + b"\x94", p.text("system") + b"\x94", b"h\x00h\x01\x93")),
    "copyreg": p.whole(p.call("copyreg", "_reconstructor", p.NONE, p.NONE, p.NONE)),
    "functools.partial": p.whole(p.call("functools", "partial", p.name("torch", "Size"))),
}  # fmt: skip

HUGE = (1 << 62).to_bytes(8, "little")
DAMAGED: dict[str, bytes] = {
    "empty": b"",
    "only STOP": b".",
    "no STOP": p.metadata()[:-1],
    "bytes after STOP": p.metadata() + b"N",
    "left on the stack": p.whole(p.NONE + p.metadata()[2:-1]),
    "an unknown opcode": p.whole(b"\xff"),
    "protocol 6": p.whole(p.NONE, 6),
    "protocol twice": b"\x80\x04\x80\x04N.",
    "INST": b"\x80\x02(ios\nsystem\n.",
    "OBJ": p.whole(b"(" + p.name("torch", "Size") + b"o"),
    "persistent id": p.whole(p.text("x") + b"Q"),
    "persistent id as text": p.whole(b"Px\n"),
    "extension registry": p.whole(b"\x82\x01"),
    "extension registry 2": p.whole(b"\x83\x01\x00"),
    "extension registry 4": p.whole(b"\x84\x01\x00\x00\x00"),
    "DUP": p.whole(p.listed(b"N2")),
    "POP_MARK": p.whole(p.NONE + b"(NN1"),
    "frozen sets": p.whole(b"(" + p.NONE + b"\x91"),
    "ADDITEMS": p.whole(b"\x8f(N\x90"),
    "a read-only buffer": p.whole(b"C\x00\x98", 5),
    "BUILD on what getattr gives": p.whole(
        p.call("builtins", "getattr", ENUM, p.text("TORCH_CHANNELS_LAST"))
        + p.tupled(p.NONE, p.mapped({p.text("name"): p.text("x")})) + p.BUILD),
    "out-of-band buffer": p.whole(b"\x97", 5),
    "NEWOBJ_EX": p.whole(p.name("torch", "Size") + b")}\x92"),
    "another value": p.whole(p.number(1)),
    "the class itself": p.whole(p.name(p.METADATA, "Metadata")),
    "Metadata as a call": p.whole(p.call(p.METADATA, "Metadata", p.mapped({}))),
    "Metadata as a call, then BUILD": p.metadata().replace(b")\x81", b")R", 1),
    "BUILD on Metadata": on_class("Metadata"),
    "BUILD on TensorProperties": on_class("TensorProperties"),
    "BUILD on MetadataIndex": on_class("MetadataIndex"),
    "BUILD on the enum": on_class("_MEM_FORMAT_ENCODING"),
    "BUILD on _StorageInfo": on_class("_StorageInfo", p.FILESYSTEM),
    "BUILD on torch.Size": on_class("Size", "torch"),
    "BUILD on _get_layout": on_class("_get_layout", "torch.serialization"),
    "BUILD on a dtype": on_class("float32", "torch"),
    "BUILD of slots on a class": slots_on_class("StorageMeta"),
    "BUILD twice": p.metadata().replace(
        b")\x81", b")\x81" + p.mapped({p.text("x"): p.NONE}) + p.BUILD, 1),
    "BUILD on a dictionary": p.whole(p.mapped({}) + p.mapped({}) + p.BUILD),
    "REDUCE of a result": p.whole(p.size(1) + p.EMPTY_TUPLE + p.REDUCE),
    "BUILD on a member of the enum": p.whole(
        p.call("builtins", "getattr", ENUM, p.text("TORCH_CHANNELS_LAST"))
        + p.mapped({p.text("_value_"): p.number(0)}) + p.BUILD),
    "memory format is another member": of_properties(None, None, p.FALSE, p.call(
        "builtins", "getattr", p.name("torch.distributed.checkpoint.planner", "WriteItemType"),
        p.text("SHARD"))),
    "NEWOBJ of getattr": of_properties(None, None, p.FALSE, p.name("builtins", "getattr")
        + p.tupled(ENUM, p.text("TORCH_CHANNELS_LAST")) + p.NEWOBJ),
    "REDUCE of a dtype": of_items(w=p.name("torch", "float32") + b")R"),
    "REDUCE without a tuple": p.whole(p.name("torch", "Size") + p.text("x") + p.REDUCE),
    "NEWOBJ of a function": of_properties(None, p.name("torch.serialization", "_get_layout")
                                          + p.tupled(p.text("torch.strided")) + p.NEWOBJ),
    "OrderedDict of arguments": p.metadata(p.call("collections", "OrderedDict", p.listed())),
    "SETITEMS on a class": p.whole(p.name(p.METADATA, "Metadata") + b"(NNu"),
    "APPEND on a class": p.whole(p.name(p.METADATA, "Metadata") + b"Na"),
    "odd SETITEMS": p.whole(b"}(Nu"),
    "list as a key": p.whole(b"}]Ns"),
    "a long tuple as a key": p.metadata(mcore_data=p.mapped({p.tupled(*[p.NONE] * 17): p.NONE})),
    "nested tuples as a key": p.whole(b"})" + b"\x85" * 200_000 + b"Ns"),
    "a long tuple as the arguments of many calls": p.metadata(
        mcore_data=b"]((" + p.NONE * 20_000 + b"tq\1" + p.name("torch", "Size") + b"q\2"
        + b"h\2h\1R" * 10_000 + b"e"),
    "a long tuple as the arguments of many new objects": p.metadata(
        mcore_data=b"]((" + p.NONE * 20_000 + b"tq\1" + p.name("torch", "Size") + b"q\2"
        + b"h\2h\1\x81" * 10_000 + b"e"),
    "a class as its own state": p.whole(p.name(p.METADATA, "Metadata") + b"q\1h\1b"),
    "state of a number": p.whole(p.number(1) + p.tupled(
        p.NONE, p.mapped({p.text("real"): p.number(2)})) + p.BUILD),
    "a memo number beyond the body": p.whole(b"Nr\xff\xff\0\0"),
    "equal hashes as keys": p.whole(p.mapped({p.number(k * (2**61 - 1)): p.NONE for k in (1, 2)})),
    "memo entry never made": p.whole(b"h\x07"),
    "memo entry from far away": p.whole(b"j\xff\xff\xff\xff"),
    "MEMOIZE on nothing": p.whole(b"\x94"),
    "huge memo number": p.whole(b"Nr\xff\xff\xff\x7f"),
    "itself in itself": p.whole(b"]q\x00h\x00a"),
    "itself as state": p.metadata(b"}q\x00" + p.text("w") + b"h\x00s"),
    "chunks that are themselves": of_items(w=p.tensor(chunks=b"]q\x05h\x05a")),
    "BINBYTES8": p.whole(b"\x8e" + HUGE),
    "BYTEARRAY8": p.whole(b"\x96" + HUGE, 5),
    "BINUNICODE8": p.whole(b"\x8d" + HUGE),
    "BINUNICODE": p.whole(b"X\xff\xff\xff\xff"),
    "BINBYTES": p.whole(b"B\xff\xff\xff\xff"),
    "LONG4": p.whole(b"\x8b\xff\xff\xff\x7f"),
    "LONG4 negative": p.whole(b"\x8b\xff\xff\xff\xff"),
    "FRAME": p.whole(b"\x95" + HUGE),
    "frame longer than the body": b"\x80\x04\x95" + HUGE + p.metadata()[2:],
    "text LONG": p.whole(b"L" + b"9" * 100_000 + b"L\n"),
    "text PUT": p.whole(b"Np99999999999\n"),
    "nested marks": p.whole(b"(" * 100_000),
    "nested lists": p.whole(b"](" * 100_000),
    "nested lists in a dropped attribute": p.metadata(mcore_data=b"](" * 200 + b"e" * 200),
    "nested tuples": p.whole(b")" + b"\x85" * 200_000),
    "nested tuples as a shape": of_items(
        w=p.tensor(shape=p.call("torch", "Size", b")" + b"\x85" * 200_000))),
    "not UTF-8": p.whole(b"\x8c\x02\xff\xff"),
    "surrogate in a key": of_items(**{"w\udc80": p.tensor()}),
    "number as a key": p.metadata(p.mapped({p.number(1): p.tensor()})),
    "no state_dict_metadata": p.whole(p.made(p.METADATA, "Metadata", storage_data=p.mapped({}))),
    "no storage_data": p.whole(p.made(p.METADATA, "Metadata", state_dict_metadata=p.mapped({}))),
    "state that is a tuple": p.whole(p.name(p.METADATA, "Metadata") + b")\x81)b"),
    "another class as the tensor": of_items(w=p.chunk()),
    "shape negative": of_items(w=p.tensor(shape=p.size(-2, 3))),
    "shape above 64 bits": of_items(w=p.tensor(shape=p.size(2**63, 3))),
    "shape times itemsize overflows": of_items(
        w=p.tensor(shape=p.size(2**31, 2**30), chunks=p.listed())),
    "overflow behind a zero": of_items(
        w=p.tensor(shape=p.size(0, 2**62, 2**62), chunks=p.listed())),
    "shape of bools": of_items(w=p.tensor(shape=p.call("torch", "Size", p.tupled(p.TRUE, p.TRUE)))),
    "shape of text": of_items(w=p.tensor(shape=p.call("torch", "Size", p.text("23")))),
    "shape is a plain tuple": of_items(w=p.tensor(shape=p.tupled(p.number(2), p.number(3)))),
    "65 dimensions": of_items(w=p.tensor(shape=p.size(*[1] * 65), chunks=p.listed())),
    "chunk outside": of_items(w=p.tensor(chunks=p.listed(p.chunk(p.size(1, 0))))),
    "chunk negative": of_items(w=p.tensor(chunks=p.listed(p.chunk(p.size(-1, 0))))),
    "chunk of fewer dimensions": of_items(w=p.tensor(chunks=p.listed(p.chunk(p.size(0))))),
    "chunks as a tuple": of_items(w=p.tensor(chunks=p.tupled(p.chunk()))),
    "four properties": of_items(w=p.tensor(
        p.name(p.METADATA, "TensorProperties") + b")\x81" + p.tupled(*[p.NONE] * 4) + b"b")),
    "properties without state": of_items(
        w=p.tensor(p.name(p.METADATA, "TensorProperties") + b")\x81")),
    "dtype as text": of_properties(p.text("float32")),
    "dtype is a class": of_properties(p.name("torch", "Size")),
    "layout unknown": of_properties(
        None, p.call("torch.serialization", "_get_layout", p.text("torch.os"))),
    "layout unhashable": of_properties(
        None, p.call("torch.serialization", "_get_layout", p.listed())),
    "requires_grad is a number": of_properties(None, None, p.number(1)),
    "memory format unknown": of_properties(
        None, None, p.FALSE, p.call(p.METADATA, "_MEM_FORMAT_ENCODING", p.number(3))),
    "memory format is a bool": of_properties(
        None, None, p.FALSE, p.call(p.METADATA, "_MEM_FORMAT_ENCODING", p.TRUE)),
    "absolute path": of_path("/etc/passwd"),
    "path upwards": of_path("../other/__0_0.distcp"),
    "path upwards inside": of_path("a/../../b"),
    "path of one dot": of_path("./a"),
    "path that ends in a slash": of_path("a/"),
    "path with NUL": of_path("a\0b"),
    "path with a line end": of_path("a\nb"),
    "path with a backslash": of_path("..\\b"),
    "path with a scheme": of_path("s3://bucket/b"),
    "path with a drive": of_path("C:b"),
    "path empty": of_path(""),
    "path too long": of_path("a" * 1025),
    "path with a surrogate": of_path("a\udc80"),
    "path is bytes": of_info(path=b"C\x01a"),
    "offset negative": of_info(offset=p.number(-1)),
    "offset above 64 bits": of_info(offset=p.number(2**63)),
    "offset is a float": of_info(offset=b"G\x00\x00\x00\x00\x00\x00\x00\x00"),
    "offset is a bool": of_info(offset=p.TRUE),
    "length negative": of_info(length=p.number(-24)),
    "end above 64 bits": of_info(offset=p.number(2**63 - 1), length=p.number(2)),
    "length of 255 bytes": of_info(length=b"\x8a\xff" + b"\x7f" * 255),
    "transforms are text": of_info(transform_descriptors=p.text("stream.zstd/1")),
    "transforms of numbers": of_info(transform_descriptors=p.listed(p.number(1))),
    "five transforms": of_info(transform_descriptors=p.listed(*[p.text("stream.zstd/1")] * 5)),
    "long name of a transform": of_info(transform_descriptors=p.listed(p.text("z" * 201))),
    "key of storage is text": p.metadata(storage=p.mapped({p.text("w"): p.info()})),
    "one chunk stored twice": p.metadata(
        storage=p.mapped({p.index(): p.info()}) + p.index() + p.info() + b"s"),
    "index without a key": p.metadata(
        storage=p.mapped({p.made(p.METADATA, "MetadataIndex"): p.info()})),
    "planner data is text": p.metadata(planner=p.text("x")),
    "planner path is a list": p.metadata(planner=p.mapped({p.text("w"): p.listed(p.text("w"))})),
    "planner path is nested": p.metadata(
        planner=p.mapped({p.text("w"): p.tupled(p.tupled(p.text("w")))})),
    "planner path is long": p.metadata(
        planner=p.mapped({p.text("w"): p.tupled(*[p.number(0)] * 1001)})),
    "version is a number": p.metadata(version=p.number(1)),
    "checkpoint_id is a number": p.metadata(
        meta=p.made(p.METADATA, "StorageMeta", checkpoint_id=p.number(1))),
    "checkpoint_id of numbers": p.metadata(
        meta=p.made(p.METADATA, "StorageMeta", checkpoint_id=p.call(
            "pathlib", "PosixPath", p.number(1)))),
    "modules is a dictionary": p.metadata(
        meta=p.made(p.METADATA, "StorageMeta", modules=p.mapped({}))),
    "modules are numbers": p.metadata(
        meta=p.made(p.METADATA, "StorageMeta", modules=p.listed(p.number(1)))),
    "one long list of chunks for many tensors": p.metadata(p.mapped({
        p.text("first"): p.tensor(chunks=b"]r\1\1\0\0(" + p.chunk() * 300 + b"e"),
        **{p.text(f"w{n}"): p.tensor(chunks=b"j\1\1\0\0") for n in range(300)},
    })),
}  # fmt: skip


WATCHED = {"import", "exec", "compile", "os", "subprocess", "pickle", "open", "socket"}
events: list[str] = []
watching = False


def watch(event: str, args: tuple[object, ...]) -> None:
    if watching and event.partition(".")[0] in WATCHED:
        events.append(event)


sys.addaudithook(watch)


def process_state() -> list[object]:
    """What a hostile BUILD or REDUCE would leave behind."""
    classes = (*(vars(stock)[name] for name in stock.__all__), stock._MEM_FORMAT_ENCODING,
               filesystem._StorageInfo, filesystem._StoragePrefix, torch.Size, torch.dtype,
               type(torch.serialization._get_layout), Path)  # fmt: skip
    return [
        *(dict(vars(cls)) for cls in classes),
        dict(vars(torch.serialization._get_layout)),
        set(sys.modules),
        torch.serialization.get_safe_globals(),
        dict(os.environ),
        Path.cwd(),
        gc.isenabled(),
        sys.getrecursionlimit(),
    ]


@contextlib.contextmanager
def nothing_happens(body: bytes) -> Iterator[None]:
    """Nothing runs, nothing changes, and memory stays in proportion to the body."""
    global watching
    fired.clear()
    events.clear()
    before = process_state()
    tracemalloc.start()
    watching = True
    try:
        yield
    finally:
        watching = False
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert fired == []
    assert events == []
    assert peak <= 100 * len(body) + 200_000
    assert process_state() == before


@pytest.mark.parametrize("what", EXECUTES)
def test_a_foreign_global_is_refused_by_name_and_not_touched(what: str) -> None:
    body = EXECUTES[what]
    with nothing_happens(body), pytest.raises(UntrustedPickleError):
        decode_metadata(body)


@pytest.mark.parametrize("what", DAMAGED)
def test_a_malformed_metadata_is_refused_and_changes_nothing(what: str) -> None:
    body = DAMAGED[what]
    with nothing_happens(body), pytest.raises(CheckpointCorruptError):
        decode_metadata(body)


@pytest.mark.parametrize("body", [p.metadata(), b"", EXECUTES["os.system"]])
def test_the_cyclic_collector_is_left_as_it_was(body: bytes) -> None:
    was = gc.isenabled()
    try:
        for wanted in (True, False):
            (gc.enable if wanted else gc.disable)()
            with contextlib.suppress(DcpObjstoreError):
                decode_metadata(body)
            assert gc.isenabled() is wanted
    finally:
        (gc.enable if was else gc.disable)()


def test_the_errors_travel_between_ranks() -> None:
    for body in (EXECUTES["os.system"], DAMAGED["path upwards"]):
        with pytest.raises(DcpObjstoreError) as caught:
            decode_metadata(body)
        copy = pickle.loads(pickle.dumps(caught.value))
        assert (type(copy), str(copy)) == (type(caught.value), str(caught.value))


def test_a_truncated_metadata_is_refused_at_every_length(stock_body: bytes) -> None:
    for length in range(len(stock_body)):
        with pytest.raises(CheckpointCorruptError):
            decode_metadata(stock_body[:length])
