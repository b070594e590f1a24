"""A stock `.metadata` is read whole; a hostile one runs nothing, changes nothing and is refused."""

from __future__ import annotations

import contextlib
import gc
import pickle

import pytest
import torch
from torch.distributed.checkpoint import filesystem, metadata as stock

from dcp_objstore.compat import foreign
from dcp_objstore.compat.foreign import decode_metadata
from dcp_objstore.errors import (
    CheckpointCorruptError,
    DcpObjstoreError,
    UnsupportedError,
    UntrustedPickleError,
)
from tests.support import pickles as p
from tests.support.hostile import fired
from tests.support.hostile_metadata import DAMAGED, EXECUTES, of_path
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


def test_stock_metadata_decodes_to_what_stock_torch_reads(stock_body):
    ours = decode_metadata(stock_body)
    same(ours, unpickled(stock_body))
    assert len(ours.state_dict_metadata) > 20
    assert all(type(info) is filesystem._StorageInfo for info in ours.storage_data.values())
    assert type(ours.storage_meta.checkpoint_id) is str


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_binary_protocol_decodes_alike(stock_body, protocol):
    theirs = unpickled(stock_body)
    same(decode_metadata(pickle.dumps(theirs, protocol)), theirs)


def test_hand_made_metadata_is_valid_so_that_only_the_hostile_part_is_refused():
    ordered = p.call("collections", "OrderedDict") + p.mapped({p.text("w"): p.tensor()})[1:]
    for body in (p.metadata(), p.metadata(ordered)):
        same(decode_metadata(body), unpickled(body))


@pytest.mark.parametrize(
    ("module", "cls", "parts", "expected"),
    [
        ("pathlib", "PosixPath", ("/", "a", "b"), "/a/b"),
        ("pathlib._local", "PosixPath", ("/a/b",), "/a/b"),
        ("pathlib", "WindowsPath", ("C:\\", "a"), "C:\\a"),
        ("pathlib", "PurePosixPath", ("/", "a"), "/a"),
        ("pathlib._local", "PureWindowsPath", ("C:\\", "a"), "C:\\a"),
        ("pathlib", "PosixPath", ("/", "bad\udcff"), "/bad?"),
    ],
)
def test_checkpoint_id_becomes_text(module, cls, parts, expected):
    place = p.call(module, cls, *map(p.text, parts))
    meta = p.made(p.METADATA, "StorageMeta", checkpoint_id=place, save_id=p.text("s"))
    decoded = decode_metadata(p.metadata(meta=meta)).storage_meta
    assert decoded == stock.StorageMeta(expected, "s")


def test_a_memory_format_is_found_by_its_number_and_by_its_name():
    formats = {
        "TORCH_CONTIGUOUS_FORMAT": torch.contiguous_format,
        "TORCH_CHANNELS_LAST": torch.channels_last,
        "TORCH_PRESERVE_FORMAT": torch.preserve_format,
    }
    shard = "torch.distributed._shard.sharded_tensor.metadata"
    for number, (name, wanted) in enumerate(formats.items()):
        for enum in ((p.METADATA, "_MEM_FORMAT_ENCODING"), (shard, "MEM_FORMAT_ENCODING")):
            by_name = [
                p.call(module, "getattr", p.name(*enum), p.text(name))
                for module in ("builtins", "__builtin__")
            ]
            for encoding in (p.call(*enum, p.number(number)), *by_name):
                tensor = p.tensor(p.properties(encoding=encoding))
                decoded = decode_metadata(p.metadata(p.mapped({p.text("w"): tensor})))
                assert decoded.state_dict_metadata["w"].properties.memory_format is wanted


def transforms_of(value: bytes) -> list[str] | None:
    storage = p.mapped({p.index(): p.info(transform_descriptors=value)})
    (info,) = decode_metadata(p.metadata(storage=storage)).storage_data.values()
    return info.transform_descriptors


def test_the_extensions_that_an_item_went_through_are_kept():
    assert transforms_of(p.listed(p.text("stream.zstd/1"))) == ["stream.zstd/1"]
    assert transforms_of(p.tupled(p.text("a"), p.text("b"))) == ["a", "b"]
    assert transforms_of(p.listed()) is None
    assert transforms_of(p.NONE) is None


def test_a_key_with_an_empty_part_is_refused_as_what_it_is():
    with pytest.raises(UnsupportedError, match=r"'shard//__0_0\.distcp'"):
        decode_metadata(of_path("shard//__0_0.distcp"))


def test_what_is_just_within_its_limits_is_read():
    zeros, ones = p.size(*[0] * 64), p.size(*[1] * 64)
    tensor = p.tensor(shape=ones, chunks=p.listed(p.chunk(zeros, ones)))
    transforms = p.listed(*[p.text("zstd")] * 4)
    info = p.info(
        p.text("a" * 1024), p.number(2**63 - 2), p.number(1), transform_descriptors=transforms
    )
    path = (-(2**63) + 1, *["a"] * 999)
    planner = p.tupled(p.number(path[0]), *map(p.text, path[1:]))
    body = p.metadata(
        p.mapped({p.text("w"): tensor}),
        p.mapped({p.index(p.text("w"), zeros): info}),
        p.mapped({p.text("w"): planner}),
        p.made(p.METADATA, "StorageMeta", modules=p.listed(), checkpoint_id=p.call(
            "pathlib", "PurePosixPath", *[p.text("a")] * 1000)),
    )  # fmt: skip
    same(decode_metadata(body), unpickled(body))
    # A key of 17 parts, and 100 marks, of which one is open around what is dropped.
    key = p.mapped({p.tupled(*[p.NONE] * 16): p.NONE})
    for dropped in (key, b"](" * 99 + b"e" * 99):
        decode_metadata(p.metadata(mcore_data=dropped))
    with pytest.raises(CheckpointCorruptError, match="marks"):
        decode_metadata(p.metadata(mcore_data=b"](" * 100 + b"e" * 100))


def test_a_body_has_an_entry_for_each_four_bytes_at_most():
    def with_modules(count: int) -> bytes:
        modules = b"](" + p.text("m") + b"q\1" + b"h\1" * (count - 1) + b"e"
        path = p.tupled(*[p.text("w")] * 3)  # counts as two
        meta = p.made(p.METADATA, "StorageMeta", modules=modules)
        return p.metadata(planner=p.mapped({p.text("w"): path}), meta=meta)

    # A tensor, its chunk and the place of that are entries, too.
    least = next(n for n in range(1, 1000) if n + 5 > len(with_modules(n)) // 4)
    assert len(decode_metadata(with_modules(least - 1)).storage_meta.modules) == least - 1
    with pytest.raises(CheckpointCorruptError, match="repeats its entries"):
        decode_metadata(with_modules(least))


def shared(value: bytes, uses: int) -> bytes:
    """A list of `value`, and of the same once more for each use; five bytes each."""
    return b"](" + value + b"r\xff\xff\0\0" + b"j\xff\xff\0\0" * uses + b"e"


@pytest.mark.timeout(60)  # one that looks at all of it at each use takes an hour for each of these
def test_what_the_memo_repeats_is_looked_at_once():
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


def test_a_body_above_the_limit_is_refused(stock_body, monkeypatch):
    monkeypatch.setattr(foreign, "MAX_METADATA_SIZE_BYTES", len(stock_body))
    decode_metadata(stock_body)
    with pytest.raises(CheckpointCorruptError, match="more than"):
        decode_metadata(stock_body + b".")


def test_the_global_asked_for_is_named():
    with pytest.raises(UntrustedPickleError, match=r"'os\.system'"):
        decode_metadata(p.whole(p.call("os", "system", p.text("true"))))


# --- hostile pickles ---------------------------------------------------------------------------


# What they do beside being refused, `test_hostile_inputs` looks at through the public doors.
@pytest.mark.parametrize(
    ("bodies", "kind"), [(EXECUTES, UntrustedPickleError), (DAMAGED, CheckpointCorruptError)]
)
def test_each_hostile_metadata_is_refused_by_its_kind_and_calls_nothing(bodies, kind):
    fired.clear()
    for what, body in bodies.items():
        with pytest.raises(kind):
            decode_metadata(body)
            pytest.fail(what)
    assert fired == []


@pytest.mark.parametrize("body", [p.metadata(), b"", EXECUTES["os.system"]])
def test_the_cyclic_collector_is_left_as_it_was(body):
    was = gc.isenabled()
    try:
        for wanted in (True, False):
            (gc.enable if wanted else gc.disable)()
            with contextlib.suppress(DcpObjstoreError):
                decode_metadata(body)
            assert gc.isenabled() is wanted
    finally:
        (gc.enable if was else gc.disable)()


def test_a_truncated_metadata_is_refused(stock_body):
    for length in range(0, len(stock_body), 7):
        with pytest.raises(CheckpointCorruptError):
            decode_metadata(stock_body[:length])
