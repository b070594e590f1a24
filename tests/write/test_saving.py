"""One save's edges: what follows the commit, planners of one's own, copies of a writer."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import logging
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar
from unittest.mock import Mock

import msgspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    create_default_global_save_plan,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import (
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)

import dcp_objstore as dos
from dcp_objstore.compat.dot_metadata import StockDotMetadata
from dcp_objstore.errors import InputError, PermissionDeniedError, UntrustedPickleError
from dcp_objstore.observe.events import AnyEvent, Hashed
from dcp_objstore.observe.report import size_text
from dcp_objstore.stores import ObjectStore, StoreSpec
from dcp_objstore.write import (
    layout,
    session as session_module,
    upload_items as uploading,
    writer as writer_module,
)
from tests.support.checkpoints import cause, memory_url
from tests.support.wrapped_stores import Request, WatchedStore, refusing

MIB = 1024 * 1024


def keys(url: str) -> set[str]:
    return {meta.key for meta in StoreSpec(url).open().list()}


def assert_loads(url: str) -> None:
    tensor = torch.zeros(5)
    dcp.load({"t": tensor}, storage_reader=dos.ObjectStoreReader(url), no_dist=True)
    assert tensor.eq(1).all()


# --- after the commit ---


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.INFO, logger="dcp_objstore"):
        yield caplog


@pytest.mark.parametrize(
    "error",
    [PermissionDeniedError("not you"), RuntimeError("transport bug"), TypeError("no field")],
)
def test_a_metadata_object_that_cannot_be_made_or_put_only_warns(
    error, monkeypatch, through, logged
):
    if isinstance(error, TypeError):
        monkeypatch.setattr(session_module, "encode_metadata", Mock(side_effect=error))
    else:
        through(refusing(".metadata", error))
    writer = dos.ObjectStoreWriter(url := memory_url())
    dcp.save({"t": torch.ones(5)}, storage_writer=writer, no_dist=True)
    assert writer.last_save is not None
    assert writer.last_save.commit_id is not None
    (warned,) = (r.getMessage() for r in logged.records if r.levelname == "WARNING")
    assert ".metadata" in warned
    assert str(error) in warned
    assert {"_COMMIT", ".metadata"} & keys(url) == {"_COMMIT"}
    assert_loads(url)


def test_an_interrupt_after_the_commit_leaves_the_report(monkeypatch):
    monkeypatch.setattr(session_module, "encode_metadata", Mock(side_effect=KeyboardInterrupt))
    writer = dos.ObjectStoreWriter(url := memory_url())
    with pytest.raises((KeyboardInterrupt, CheckpointException)):
        dcp.save({"t": torch.ones(5)}, storage_writer=writer, no_dist=True)
    assert writer.last_save is not None
    assert writer.last_save.commit_id is not None
    assert_loads(url)


class ClaimedMeanwhile(WatchedStore):
    """A store in which another job claims the run as a step is committed."""

    run = ""

    @contextlib.contextmanager
    def _around(self, request: Request) -> Iterator[None]:
        yield
        if (request.verb, request.key) == ("put", "_COMMIT") and self.run:
            run, ClaimedMeanwhile.run = self.run, ""
            dos.claim_run(run)


def test_a_step_that_does_not_count_leaves_no_report(through, monkeypatch):
    run = memory_url()
    claim = dos.claim_run(run)
    writer = dos.ObjectStoreWriter(f"{run}/step-1", claim=claim)
    monkeypatch.setattr(ClaimedMeanwhile, "run", run)
    through(ClaimedMeanwhile)
    with pytest.raises(CheckpointException) as caught:
        dcp.save({"t": torch.ones(5)}, storage_writer=writer, no_dist=True)
    assert isinstance(cause(caught.value), dos.errors.SupersededError)
    assert writer.last_save is None
    assert not ClaimedMeanwhile.run


def test_the_metadata_that_a_save_returns_is_pickled_without_an_object_per_chunk():
    state = {f"layer.{number}": torch.ones(3) for number in range(3)}
    saved = dcp.save(state, storage_writer=dos.ObjectStoreWriter(memory_url()), no_dist=True)
    (chunk,) = saved.state_dict_metadata["layer.1"].chunks
    assert (chunk.offsets, chunk.sizes) == ((0,), (3,))
    assert saved.version == "1.0.0"
    body = pickle.dumps(saved)  # DCP does this, to hand it to all ranks
    assert pickle.loads(body) == saved
    assert b"ChunkStorageMetadata" not in body


def test_without_stock_metadata_the_checkpoint_loads_and_a_repair_writes_it(tmp_path):
    url = f"file://{tmp_path}/checkpoint"
    dos.save({"t": torch.ones(5)}, url, stock_metadata=False)
    assert "_COMMIT" in keys(url)
    assert ".metadata" not in keys(url)
    assert_loads(url)
    assert dos.repair(url).dot_metadata == "written"
    loaded = {"t": torch.zeros(5)}
    dcp.load(loaded, storage_reader=dcp.FileSystemReader(tmp_path / "checkpoint"), no_dist=True)
    assert loaded["t"].eq(1).all()


class Text(str):
    """A string of a class of its own, as the keys of some state dicts are."""

    __slots__ = ()


def test_stock_torch_reads_a_state_whose_keys_are_of_a_class_of_their_own(tmp_path):
    dos.save({Text("a"): {Text("t"): torch.ones(5)}}, f"file://{tmp_path}/checkpoint")
    body = (tmp_path / "checkpoint/.metadata").read_bytes()
    assert b"Text" not in body
    assert type(pickle.loads(body).planner_data["a.t"][0]) is str


# --- planners of one's own ---


class Bare(SavePlanner):
    """Has what torch's interface asks for, and nothing else of torch's own planner."""

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, *_: Any, **__: Any) -> None:
        self.held = state_dict

    def create_local_plan(self) -> SavePlan:
        return create_default_local_save_plan(self.held, True)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        return self.held[write_item.index.fqn]


def test_a_planner_that_has_only_the_interface_of_torch_saves():
    url = memory_url()
    writer = dos.ObjectStoreWriter(url, progress=False)
    dcp.save({"t": torch.ones(5)}, storage_writer=writer, planner=Bare(), no_dist=True)
    assert_loads(url)


class OwnFormatSaver(DefaultSavePlanner):
    """Writes values in a format of its own."""

    def resolve_data(self, write_item: WriteItem) -> Any:
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(b"own:" + str(self.lookup_object(write_item.index)).encode())
        return super().resolve_data(write_item)


class OwnFormatLoader(DefaultLoadPlanner):
    """Reads them back."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.original_state_dict[read_item.dest_index.fqn] = value.read().removeprefix(b"own:")


def test_values_in_a_planners_own_format_are_saved_with_a_warning_and_come_back():
    url = memory_url()
    writer = dos.ObjectStoreWriter(url)
    with pytest.warns(UserWarning, match=r"'step'.*trust_pickle=True") as caught:
        for at in (url, f"{url}-2"):
            planner = OwnFormatSaver()
            dcp.save({"step": 7}, storage_writer=writer, checkpoint_id=at, planner=planner)
    ours = [one for one in caught if "trust_pickle" in str(one.message)]
    assert len(ours) == 1, "once per key"
    with pytest.warns(UserWarning, match="trust_pickle"):  # a copy has not warned yet
        again = copy.deepcopy(writer)
        dcp.save({"step": 7}, storage_writer=again, checkpoint_id=f"{url}-3", planner=planner)
    state: dict[str, Any] = {"step": 0}
    reader = dos.ObjectStoreReader(url, trust_pickle=True)
    dcp.load(state, storage_reader=reader, planner=OwnFormatLoader(), no_dist=True)
    assert state == {"step": b"7"}
    assert isinstance(refused(url), (UntrustedPickleError, dos.errors.CheckpointCorruptError))


def refused(url: str) -> BaseException:
    with pytest.raises(CheckpointException) as caught:
        dcp.load({"step": 0}, storage_reader=dos.ObjectStoreReader(url), no_dist=True)
    return cause(caught.value)


class Casting(DefaultSavePlanner):
    """Converts tensors as they are written, after they have been described to DCP."""

    def __init__(self, convert: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.convert = convert

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002 - DCP's
        found = super().transform_object(write_item, object)
        return self.convert(found) if isinstance(found, torch.Tensor) else found


@pytest.mark.filterwarnings("ignore:loading .* converted to:UserWarning")
@pytest.mark.parametrize(
    ("dtype", "to"),
    [
        (torch.float32, torch.float16),
        (torch.float16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
    ],
    ids=str,
)
def test_what_a_planner_converts_loads_with_the_numbers_that_it_saved(tmp_path, dtype, to):
    url = tmp_path.as_uri()
    count = 600_000  # one tensor that is gathered, and one that is not
    state = {"small": torch.arange(4, dtype=dtype), "large": (torch.arange(count) % 251).to(dtype)}
    writer = dos.ObjectStoreWriter(url, progress=False)
    dcp.save(state, storage_writer=writer, planner=Casting(lambda t: t.to(to)), no_dist=True)
    opened = dos.open(url)
    assert opened.verify(deep=True, progress=False).ok
    for key, saved in state.items():
        assert opened[key].dtype == to  # type: ignore[union-attr]
        assert torch.equal(opened[key].read(), saved.to(to))
    for reader in (dos.ObjectStoreReader(url, progress=False), dcp.FileSystemReader(tmp_path)):
        into = {key: torch.zeros_like(saved) for key, saved in state.items()}
        dcp.load(into, storage_reader=reader, no_dist=True)
        for key, saved in state.items():
            assert torch.equal(into[key], saved)
    # What a repair would write in place of `.metadata` is the same.
    index = next(tmp_path.glob("index.*")).read_bytes()
    assert StockDotMetadata().describes((tmp_path / ".metadata").read_bytes(), index)


def test_a_planner_makes_the_next_tensor_when_the_last_one_is_gone():
    """A planner that converts a state would otherwise need memory for more of it at a time."""
    alive: list[int] = []
    made: list[weakref.ref[torch.Tensor]] = []

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        alive.append(sum(one() is not None for one in made))
        converted = tensor.double()
        made.append(weakref.ref(converted))
        return converted

    state = {f"t{n}": torch.ones(100) for n in range(3)}
    dcp.save(
        state,
        storage_writer=dos.ObjectStoreWriter(memory_url()),
        planner=Casting(convert),
        no_dist=True,
    )
    assert alive == [0, 0, 0]


def test_an_index_that_readers_would_refuse_is_not_committed(monkeypatch):
    url = memory_url()
    build = writer_module.build_index

    def too_short(*args: Any) -> Any:
        index, objects = build(*args)
        entry = msgspec.structs.replace(index.objects[0], size_bytes=1)
        return dataclasses.replace(index, objects=(entry,)), objects

    monkeypatch.setattr(writer_module, "build_index", too_short)
    with pytest.raises(dos.errors.RankFailedError, match="not committed"):
        dos.save({"w": torch.ones(3)}, url, progress=False)
    assert not [key for key in keys(url) if not key.endswith(".distcp")]


def of_dtype(dtype: torch.dtype) -> torch.Tensor:
    if str(dtype).startswith(("torch.qu", "torch.qi")):
        return torch.quantize_per_tensor(torch.linspace(-2, 2, 64), 0.1, 3, dtype)
    return torch.arange(64, dtype=torch.uint8).remainder(2).view(dtype)


ANY_DTYPE = sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)}, key=str)


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, that some of these will go
@pytest.mark.parametrize("dtype", ANY_DTYPE, ids=str)
def test_a_tensor_of_any_dtype_loads_again_or_is_refused_before_anything_is_sent(dtype):
    url = memory_url()
    tensor, other = of_dtype(dtype), torch.arange(3)
    try:
        dos.save({"t": tensor, "other": other}, url, progress=False)
    except dos.errors.UnsupportedError as error:
        assert error.key == "t"
        assert str(dtype).removeprefix("torch.") in str(error)
        assert keys(url) == set()
        return
    zeros = of_dtype(dtype)
    (zeros.untyped_storage()).fill_(0)
    into = {"t": zeros, "other": torch.zeros_like(other)}
    dos.load(into, url, progress=False)
    assert torch.equal(into["other"], other)
    assert into["t"].untyped_storage().tolist() == tensor.untyped_storage().tolist()


# --- copies ---


@pytest.mark.backends("seaweed")
@pytest.mark.parametrize("aimed", [True, False], ids=["with-url", "without-url"])
def test_deep_copies_work_with_the_credentials_that_were_given(bucket, aimed):
    options = bucket.storage_options
    url = bucket.at("step-1") if aimed else None
    writer = copy.deepcopy(dos.ObjectStoreWriter(url, storage_options=options))
    reader = copy.deepcopy(dos.ObjectStoreReader(url, storage_options=options))
    for n in (1, 2):
        at = bucket.at(f"step-{n}")
        planned = {"checkpoint_id": None if aimed and n == 1 else at, "no_dist": True}
        dcp.save({"t": torch.ones(5)}, storage_writer=writer, **planned)
        assert "_COMMIT" in bucket.keys(f"step-{n}")
        tensor = torch.zeros(5)
        dcp.load({"t": tensor}, storage_reader=reader, **planned)
        assert tensor.eq(1).all()
    secret = str(options["secret"]).encode()
    assert secret not in pickle.dumps(writer)
    assert secret not in pickle.dumps(reader)


@pytest.mark.parametrize("url", ["sftp://host/run/step-1", None])
def test_a_pickle_holds_no_option_that_only_a_filesystem_knows(url):
    options = {"host": "host", "password": "very-secret-indeed"}
    for made in (
        dos.ObjectStoreWriter(url, storage_options=options),
        dos.ObjectStoreReader(url, storage_options=options),
    ):
        assert b"very-secret" not in pickle.dumps(made)
        assert b"very-secret" not in pickle.dumps(copy.deepcopy(made))


# --- what is logged ---


def test_sizes_are_given_in_a_unit_that_fits():
    texts = {0: "0 B", 0.4: "0 B", 1023: "1023 B", 1024: "1.00 KiB"}
    texts |= {MIB * 3 // 2: "1.50 MiB", 2048 * MIB: "2.00 GiB"}
    assert {size: size_text(size) for size in texts} == texts


# --- changes during a save ---


def test_a_small_tensor_changed_during_a_save_leaves_a_checkpoint_that_loads(monkeypatch):
    state = {"t": torch.ones(elements := 200_000)}
    digest_of = layout.small_digest

    def changing(payload: Any) -> bytes:
        state["t"].add_(1)
        return digest_of(payload)

    monkeypatch.setattr(layout, "small_digest", changing)
    url = memory_url()
    dos.save(state, url)
    loaded = {"t": torch.zeros(elements)}
    dos.load(loaded, url)
    assert state["t"].eq(2).all()
    assert loaded["t"].eq(1).all()


class ChangingStore(WatchedStore):
    """Calls `change` before, or after, it puts an object of tensors."""

    def __init__(self, inner: ObjectStore, when: str, change: Callable[[], object]) -> None:
        super().__init__(inner)
        self._when, self._change = when, change

    @contextlib.contextmanager
    def _around(self, request: Request) -> Iterator[None]:
        is_data = request.key.endswith(".distcp") and request.verb.startswith("put")
        if is_data and self._when == "before":
            self._change()
        yield
        if is_data and self._when == "after":
            self._change()

    def put_stream(self, key: str, buffers: Iterator[Any], **settings: Any) -> Any:
        held = list(buffers)
        return super().put_stream(key, iter(held), **settings)


@pytest.mark.parametrize("part_mib", [16, 5], ids=["put", "put_stream"])
@pytest.mark.parametrize("when", ["before", "after", "never"])
def test_a_tensor_that_changes_before_it_is_sent_fails_the_save_and_after_is_told(
    when, part_mib, through, logged
):
    """If its bytes are not those of the digests, the checkpoint would never load."""
    tensor, url, hashed = torch.zeros(3 * MIB), memory_url(), threading.Semaphore(0)

    def hear(event: AnyEvent) -> None:
        for _ in range(event.size_bytes // MIB if isinstance(event, Hashed) else 0):
            hashed.release()

    def change() -> None:
        assert all(hashed.acquire(timeout=10) for _ in range(12))
        tensor.add_(1)

    through(lambda store: ChangingStore(store, when, change))
    config = dos.TransferConfig(part_size_bytes=part_mib * MIB)
    if when == "before":
        with pytest.raises(InputError, match="changed while it was being saved") as caught:
            dos.save({"t": tensor}, url, config=config, on_event=hear)
        assert (caught.value.key, caught.value.rank) == ("t", 0)
        assert "_COMMIT" not in keys(url)
        return
    dos.save({"t": tensor}, url, config=config, on_event=hear)
    assert ("t changed while it was being saved" in logged.text) == (when == "after")
    loaded = torch.ones_like(tensor)
    dos.load({"t": loaded}, url)
    assert tensor.eq(when == "after").all()
    assert loaded.eq(0).all()


class Keeping(WatchedStore):
    """Refuses every object of data, and keeps what it was handed of it."""

    kept: ClassVar[list[Any]] = []

    def put(self, key: str, data: Any, **settings: Any) -> Any:
        if not key.endswith(".distcp"):
            return super().put(key, data, **settings)
        self.kept.extend(data)
        raise PermissionDeniedError("no")


def test_the_memory_of_tensors_is_not_read_once_their_save_has_failed(through, monkeypatch):
    layouts: list[layout.Layout] = []

    class Noted(layout.Layout):
        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings)
            layouts.append(self)

    monkeypatch.setattr(uploading, "Layout", Noted)
    through(Keeping)
    tensor = torch.zeros(2 * MIB)
    with pytest.raises(PermissionDeniedError):
        dos.save({"t": tensor}, memory_url())
    tensor += 1
    assert Keeping.kept
    Keeping.kept.clear()
    assert layouts[0].changed == []
