"""What `Checkpoint.verify` looks at besides payloads, and objects that vanish while it reads."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import dcp_objstore as dos
from dcp_objstore.checkpoint.marker import decode_marker, encode_marker
from dcp_objstore.compat.dot_metadata import StockDotMetadata
from dcp_objstore.config import MIB, TransferConfig
from dcp_objstore.errors import CheckpointGoneError, CorruptDataError, ObjectNotFoundError
from dcp_objstore.inspect.verify import _Framing
from tests.support.ranks import run_ranks
from tests.support.states import seeded
from tests.support.wrapped_stores import ChangingStore, Fault, FaultStore, Verb


def save_rows(rank: int, world: int, url: str, options: Mapping[str, object]) -> None:
    mesh = init_device_mesh("cpu", (world,))
    state = {"w": distribute_tensor(seeded("w", (2000, 2000)), mesh, [Shard(0)])}
    dos.save(state, url, storage_options=options, progress=False)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Saved by two ranks: an object from each, two blocks of the tensor."""
    place = (tmp_path_factory.mktemp("run") / "step-1").as_uri()
    run_ranks(2, save_rows, place, {})
    return place


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize(
    ("kind", "what"), [(ObjectNotFoundError, "missing"), (CorruptDataError, "size")]
)
def test_an_object_that_vanishes_while_it_is_read_is_reported_and_the_rest_compared(
    url, through, kind, what, deep
):
    config = TransferConfig(download_concurrency=1, request_size_bytes=4 * MIB)
    ckpt = dos.open(url, config=config)
    assert ckpt.verify(deep=deep).blocks == 4
    lost = ckpt.objects[0]

    def plan(verb: Verb, key: str, nth: int) -> Fault | None:
        if (verb, key) != ("open_range", lost):
            return None
        return Fault("before", kind("gone or cut since", object_key=lost))

    through(lambda store: FaultStore(store, plan))
    report = ckpt.verify(deep=deep)
    (damage,) = report.damaged
    assert (damage.what, damage.object_key) == (what, lost)
    assert (report.objects, report.blocks) == (2, 2)


def test_framing_that_differs_only_in_one_transfer_is_not_damaged(url, through):
    ckpt = dos.open(url)
    damaged = []

    def damage_at_first(key: str, at: int, body: memoryview) -> None:
        if at == 0 and not damaged:
            damaged.append(key)
            body[3] ^= 1  # in the header of the first item

    through(lambda store: ChangingStore(store, damage_at_first))
    assert ckpt.verify(deep=True).ok
    assert damaged


def test_of_the_framing_only_what_came_before_its_turn_is_kept():
    framing = _Framing()
    for number in (1, 0, 2, 4, 3):
        framing.add(number, bytes([number]))
        assert len(framing._early) <= 1
    assert framing._early == {}
    in_order = _Framing()
    in_order.add(0, b"\0\1\2\3\4")
    assert framing.digest() == in_order.digest()


def test_a_marker_that_counts_other_things_than_the_index_is_found(tmp_path):
    dos.save({"w": seeded("w", (4,)), "step": 2}, (tmp_path / "a").as_uri(), progress=False)
    path = tmp_path / "a" / "_COMMIT"
    marker = decode_marker(path.read_bytes())
    counts = msgspec.structs.replace(marker.counts, tensors=2)
    path.write_bytes(encode_marker(msgspec.structs.replace(marker, counts=counts)))
    ckpt = dos.open((tmp_path / "a").as_uri())
    assert ckpt.verify().ok
    (damage,) = ckpt.verify(deep=True).damaged
    assert (damage.what, damage.object_key) == ("counts", "_COMMIT")


def flip(path: Path) -> None:
    body = bytearray(path.read_bytes())
    body[len(body) // 2] ^= 0xFF
    path.write_bytes(body)


@pytest.mark.parametrize("name", ["_COMMIT", "index.*"])
def test_marker_and_index_of_an_opened_checkpoint_are_read_again(tmp_path, name):
    place = tmp_path / "a"
    dos.save({"w": seeded("w", (4,))}, place.as_uri(), progress=False)
    ckpt = dos.open(place.as_uri())
    (path,) = place.glob(name)
    flip(path)
    for quick in (True, False):
        report = ckpt.verify(quick=quick)
        (damage,) = report.damaged
        assert (damage.what, damage.object_key) == ("unreadable", path.name)
        assert damage.text.startswith(f"{path.name}: ")
        assert report == dos.reports.VerifyReport(
            url=ckpt.url,
            commit_id=None,
            objects=0,
            blocks=0,
            total_bytes=0,
            quick=quick,
            deep=False,
            damaged=(damage,),
        )
    path.unlink()
    if name == "_COMMIT":
        with pytest.raises(CheckpointGoneError, match="deleted"):
            ckpt.verify()
    else:
        assert [damage.what for damage in ckpt.verify().damaged] == ["unreadable"]


def test_an_opened_checkpoint_that_was_replaced_is_not_taken_for_the_new_one(tmp_path):
    place = (tmp_path / "a").as_uri()
    dos.save({"w": seeded("w", (4,))}, place, progress=False)
    ckpt = dos.open(place)
    dos.save({"w": seeded("v", (4,))}, place, overwrite=True, progress=False)
    with pytest.raises(CheckpointGoneError, match="replaced"):
        ckpt.verify()
    assert dos.open(place).verify(deep=True).ok


def test_a_dot_metadata_that_misleads_stock_torch_is_found_and_repaired(tmp_path, monkeypatch):
    place, state = tmp_path / "a", {"v": torch.ones(2000), "w": torch.zeros(2000)}
    dos.save(state, place.as_uri(), progress=False)
    path, whole = place / ".metadata", (place / ".metadata").read_bytes()
    swapped = pickle.loads(whole)  # decodes, and leads to other elements
    one, two = swapped.storage_data
    places = swapped.storage_data
    places[one], places[two] = places[two], places[one]
    flip(path)
    ckpt = dos.open(place.as_uri())
    for body in (path.read_bytes(), whole[:-9], b"", pickle.dumps(swapped)):
        path.write_bytes(body)
        assert ckpt.verify().ok
        (damage,) = ckpt.verify(deep=True).damaged
        assert (damage.what, damage.object_key) == ("metadata", ".metadata")
        assert "repair" in damage.text
        assert dos.repair(place.as_uri()).dot_metadata == "written"
        assert ckpt.verify(deep=True).ok
    found = {key: torch.full((2000,), 7.0) for key in state}
    dcp.load(found, checkpoint_id=place, no_dist=True)
    assert all(map(torch.equal, found.values(), state.values()))
    answers = [False, True]
    monkeypatch.setattr(StockDotMetadata, "describes", lambda *_: answers.pop(0))
    assert ckpt.verify(deep=True).ok  # one transfer was damaged
    assert not answers


def test_a_checkpoint_without_a_dot_metadata_is_whole(tmp_path):
    place = (tmp_path / "a").as_uri()
    dos.save({"w": seeded("w", (4,))}, place, stock_metadata=False, progress=False)
    assert dos.open(place).verify(deep=True).ok
