"""`Checkpoint.verify`: all damage is found, named, and distinguished."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import dcp_objstore as dos
from dcp_objstore.config import MIB
from dcp_objstore.errors import CredentialsError, StoreUnavailableError, UnsupportedError
from dcp_objstore.stores.spec import StoreSpec
from tests.support.states import seeded
from tests.support.wrapped_stores import ChangingStore

BLOCK = 4 * MIB
SIZE = 9 * MIB // 4  # elements of a tensor of two blocks and a bit


def saved(place: Path, state: dict[str, Any]) -> tuple[dos.Checkpoint, Path]:
    dos.save(state, place.as_uri(), progress=False)
    (path,) = place.glob("*.distcp")
    return dos.open(place.as_uri()), path


@pytest.fixture
def large(tmp_path: Path) -> tuple[dos.Checkpoint, Path]:
    state = {"w": torch.arange(SIZE, dtype=torch.float32), "v": seeded("v", (100,)), "step": 5}
    return saved(tmp_path / "step-1", state)


def place_of(path: Path, number: int) -> int:
    """Where element `number` of `w` lies in the object."""
    needle = torch.arange(number, number + 8, dtype=torch.float32).numpy().tobytes()
    return path.read_bytes().index(needle)


def flip(path: Path, at: int) -> None:
    body = bytearray(path.read_bytes())
    body[at] ^= 0x10
    path.write_bytes(body)


@pytest.mark.parametrize("deep", [False, True])
def test_an_intact_checkpoint_is_ok(large, deep):
    ckpt, path = large
    assert ckpt.verify(deep=deep) == dos.reports.VerifyReport(
        url=ckpt.url,
        commit_id=ckpt.commit_id,
        objects=1,
        blocks=5,
        total_bytes=path.stat().st_size if deep else ckpt.total_bytes,
        quick=False,
        deep=deep,
        damaged=(),
    )


def test_every_damaged_block_is_named_not_the_first_alone(large):
    ckpt, path = large
    flip(path, place_of(path, 10))
    flip(path, place_of(path, BLOCK // 2 + 10))
    flip(path, path.read_bytes().index(seeded("v", (100,)).numpy().tobytes()))
    report = ckpt.verify()
    assert not report.ok
    found = {(d.what, d.object_key, d.key, d.block) for d in report.damaged}
    assert found == {("block", path.name, key, n) for key, n in [("w", 0), ("w", 2), ("v", 0)]}
    assert all(path.name in damage.text for damage in report.damaged)


def test_an_object_that_has_grown_is_reported(large):
    ckpt, path = large
    path.write_bytes(path.read_bytes() + b"more")
    (damage,) = ckpt.verify().damaged
    assert damage.what == "size"


def test_a_block_that_differs_only_once_is_not_damaged(large, through):
    ckpt, _ = large
    seen: set[int] = set()

    def damage_at_first(key: str, at: int, body: memoryview) -> None:
        if at not in seen:
            seen.add(at)
            body[100] ^= 1

    through(lambda store: ChangingStore(store, damage_at_first))
    assert ckpt.verify().ok
    assert seen


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("error", [KeyboardInterrupt, CredentialsError, StoreUnavailableError])
def test_a_verification_that_ends_early_names_the_damage_so_far(tmp_path, monkeypatch, deep, error):
    state = {"w": torch.arange(6 * MIB, dtype=torch.float32), "step": 5}  # six blocks
    _, path = saved(tmp_path / "step-1", state)
    for element in (10, 6 * MIB - 10):
        flip(path, place_of(path, element))
    config = dos.TransferConfig(request_size_bytes=4 * MIB, download_concurrency=1)
    ckpt = dos.open((tmp_path / "step-1").as_uri(), config=config)
    whole = ckpt.verify(deep=deep)
    assert [one.block for one in whole.damaged] == [0, 5]
    fourth = place_of(path, 3 * MIB)

    def interrupt(key: str, at: int, body: memoryview) -> None:
        if at >= fourth:
            raise error("ended")

    opened = StoreSpec.open
    with monkeypatch.context() as patched:
        patched.setattr(StoreSpec, "open", lambda spec: ChangingStore(opened(spec), interrupt))
        with pytest.raises(error) as ended:
            ckpt.verify(deep=deep)
    (damage,) = ended.value.__notes__
    assert damage == f"damaged so far: {whole.damaged[0].text}"


@pytest.mark.parametrize("quick", [False, True])
def test_a_checkpoint_without_digests_says_so(tmp_path, quick):
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "stock")
    with pytest.raises(UnsupportedError, match="without digests"):
        dos.open((tmp_path / "stock").as_uri()).verify(quick=quick)


@pytest.mark.backends("seaweed")
def test_what_arrives_in_pieces_is_compared_piece_by_piece(bucket):
    """Over plain HTTP a request of several blocks arrives block by block."""
    url, options = bucket.at("step-1"), bucket.storage_options
    state = {"a": torch.arange(3 * MIB, dtype=torch.int32), "b": torch.ones(3)}
    dos.save(state, url, storage_options=options, progress=False)
    ckpt = dos.open(url, storage_options=options)
    report = ckpt.verify(deep=True, progress=False)
    assert (report.ok, report.blocks) == (True, 4)
    (name,) = [name for name in bucket.keys("step-1") if name.endswith(".distcp")]
    body = bytearray(bucket.get(f"step-1/{name}"))
    first = body.index(state["a"].numpy()[:1000].tobytes())
    for number in (0, 2):
        body[first + number * BLOCK + 17] ^= 1
    bucket.put(f"step-1/{name}", bytes(body))
    damaged = ckpt.verify(deep=True, progress=False).damaged
    found = sorted((one.what, one.key, one.block) for one in damaged)
    assert found == [("block", "a", number) for number in (0, 2)]
