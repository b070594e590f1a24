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
from tests.support.hostile_metadata import DAMAGED, EXECUTES, fired, of_path, of_properties
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


def test_metadata_of_many_chunks_decodes():
    chunks = [stock.ChunkStorageMetadata(torch.Size([row]), torch.Size([1])) for row in range(3000)]
    whole = stock.TensorStorageMetadata(stock.TensorProperties(), torch.Size([3000]), chunks)
    storage = {
        stock.MetadataIndex("w", [row], row): filesystem._StorageInfo("a/__0_0.distcp", row, 1)
        for row in range(3000)
    }
    theirs = stock.Metadata({"w": whole}, {"w": ("w",)}, storage)
    same(decode_metadata(pickle.dumps(theirs)), theirs)


def test_hand_made_metadata_is_valid_so_that_only_the_hostile_part_is_refused():
    same(decode_metadata(p.metadata()), unpickled(p.metadata()))


def test_torch_2_15_properties_with_strides_lose_only_the_strides():
    props = p.properties(None, None, p.TRUE, None, p.FALSE, p.tupled(p.number(3), p.number(1)))
    body = p.metadata(p.mapped({p.text("w"): p.tensor(props)}))
    decoded = decode_metadata(body).state_dict_metadata["w"].properties
    assert decoded == stock.TensorProperties(torch.float32, requires_grad=True)


def test_properties_from_before_torch_2_3_are_read():
    module = "torch.distributed._shard.sharded_tensor.metadata"
    props = p.properties(encoding=p.call(module, "MEM_FORMAT_ENCODING", p.number(0)))
    props = props.replace(p.text(p.METADATA), p.text(module), 1)
    body = p.metadata(p.mapped({p.text("w"): p.tensor(props)}))
    assert decode_metadata(body).state_dict_metadata["w"].properties == stock.TensorProperties()


def test_members_of_enums_that_python_3_11_0_to_3_11_3_wrote_by_name_are_read():
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


def test_unknown_attributes_are_dropped():
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
def test_checkpoint_id_becomes_text(module, cls, parts, expected):
    place = p.call(module, cls, *map(p.text, parts))
    meta = p.made(p.METADATA, "StorageMeta", checkpoint_id=place, save_id=p.text("s"))
    decoded = decode_metadata(p.metadata(meta=meta)).storage_meta
    assert decoded == stock.StorageMeta(expected, "s")


def transforms_of(value: bytes) -> list[str] | None:
    storage = p.mapped({p.index(): p.info(transform_descriptors=value)})
    (info,) = decode_metadata(p.metadata(storage=storage)).storage_data.values()
    return info.transform_descriptors  # type: ignore[no-any-return]


def test_a_checkpoint_id_of_multi_storage_client_becomes_text():
    place = p.made(
        "multistorageclient.pathlib",
        "MultiStoragePath",
        _path=p.text("msc://profile/run/step-1"),
        _internal_path=p.call("pathlib", "PurePosixPath", p.text("run"), p.text("step-1")),
    )
    meta = p.made(p.METADATA, "StorageMeta", checkpoint_id=place)
    decoded = decode_metadata(p.metadata(meta=meta)).storage_meta
    assert decoded == stock.StorageMeta("msc://profile/run/step-1")


def test_the_extensions_that_an_item_went_through_are_kept():
    assert transforms_of(p.listed(p.text("stream.zstd/1"))) == ["stream.zstd/1"]
    assert transforms_of(p.tupled(p.text("a"), p.text("b"))) == ["a", "b"]
    assert transforms_of(p.listed()) is None
    assert transforms_of(p.NONE) is None


def test_a_key_with_an_empty_part_is_refused_as_what_it_is():
    with pytest.raises(UnsupportedError, match=r"'shard//__0_0\.distcp'"):
        decode_metadata(of_path("shard//__0_0.distcp"))


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


def test_a_body_above_the_limit_is_refused(stock_body):
    decode_metadata(stock_body, max_bytes=len(stock_body))
    with pytest.raises(CheckpointCorruptError, match="more than"):
        decode_metadata(stock_body, max_bytes=len(stock_body) - 1)


def test_the_global_asked_for_is_named():
    with pytest.raises(UntrustedPickleError, match=r"'os\.system'"):
        decode_metadata(p.whole(p.call("os", "system", p.text("true"))))


# --- hostile pickles ---------------------------------------------------------------------------

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
def test_a_foreign_global_is_refused_by_name_and_not_touched(what):
    body = EXECUTES[what]
    with nothing_happens(body), pytest.raises(UntrustedPickleError):
        decode_metadata(body)


@pytest.mark.parametrize("what", DAMAGED)
def test_a_malformed_metadata_is_refused_and_changes_nothing(what):
    body = DAMAGED[what]
    with nothing_happens(body), pytest.raises(CheckpointCorruptError):
        decode_metadata(body)


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


def test_the_errors_travel_between_ranks():
    for body in (EXECUTES["os.system"], DAMAGED["path upwards"]):
        with pytest.raises(DcpObjstoreError) as caught:
            decode_metadata(body)
        copy = pickle.loads(pickle.dumps(caught.value))
        assert (type(copy), str(copy)) == (type(caught.value), str(caught.value))


def test_a_truncated_metadata_is_refused(stock_body):
    for length in range(0, len(stock_body), 7):
        with pytest.raises(CheckpointCorruptError):
            decode_metadata(stock_body[:length])
