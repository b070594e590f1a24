"""Hostile `.metadata`: pickles that run code, and malformed ones, by what is wrong with them."""

from __future__ import annotations

import pickle

from tests.support import hostile, pickles as p


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


CANARY = p.call(hostile.THIS, "fire", p.text("x"))
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
    "pickled by pickle": pickle.dumps(hostile.Reducer(hostile.fire, 1)),
    "pickled by protocol 2": pickle.dumps(hostile.Reducer(hostile.fire, 1), 2),
    "as a value of the metadata": p.metadata(version=CANARY),
    "in a dropped attribute": p.metadata(mcore_data=CANARY),
    "as a tensor": of_items(w=CANARY),
    "as a key": p.metadata(p.mapped({CANARY: p.tensor()})),
    "as a dtype": of_properties(p.name(hostile.THIS, "fire")),
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
    "Metadata of arguments": p.metadata().replace(b")\x81", b"N\x85\x81", 1),
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
    "OrderedDict as a new object": p.metadata(
        p.name("collections", "OrderedDict") + p.EMPTY_TUPLE + p.NEWOBJ),
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
    "equal hashes as keys": p.metadata(
        mcore_data=p.mapped({p.number(k * (2**61 - 1)): p.NONE for k in (9, 10)})),
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
    "shape with a state": of_items(w=p.tensor(
        shape=p.size(2, 3) + p.mapped({p.text("x"): p.NONE}) + p.BUILD)),
    "shape of two arguments": of_items(w=p.tensor(
        shape=p.call("torch", "Size", p.tupled(p.number(2), p.number(3)), p.NONE))),
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
    "another class as the properties": of_items(
        w=p.tensor(p.properties().replace(
            p.name(p.METADATA, "TensorProperties"), p.name(p.METADATA, "MetadataIndex")))),
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
    "checkpoint_id is a layout": p.metadata(
        meta=p.made(p.METADATA, "StorageMeta", checkpoint_id=p.call(
            "torch.serialization", "_get_layout", p.text("torch.strided")))),
    "checkpoint_id of numbers": p.metadata(
        meta=p.made(p.METADATA, "StorageMeta", checkpoint_id=p.call(
            "pathlib", "PosixPath", p.number(1)))),
    "checkpoint_id of 1001 parts": p.metadata(
        meta=p.made(p.METADATA, "StorageMeta", checkpoint_id=p.call(
            "pathlib", "PosixPath", *[p.text("a")] * 1001))),
    "modules is a dictionary": p.metadata(
        meta=p.made(p.METADATA, "StorageMeta", modules=p.mapped({}))),
    "modules are numbers": p.metadata(
        meta=p.made(p.METADATA, "StorageMeta", modules=p.listed(p.number(1)))),
    "one long list of chunks for many tensors": p.metadata(p.mapped({
        p.text("first"): p.tensor(chunks=b"]r\1\1\0\0(" + p.chunk() * 300 + b"e"),
        **{p.text(f"w{n}"): p.tensor(chunks=b"j\1\1\0\0") for n in range(300)},
    })),
}  # fmt: skip
