"""`Checkpoint.verify` of many objects: all damage in one go, what is none, and bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch.distributed as dist

import dcp_objstore as dos
from dcp_objstore.errors import CheckpointGoneError, ObjectNotFoundError, StoreUnavailableError
from dcp_objstore.observe.report import Damage
from dcp_objstore.stores import ObjectStore
from tests.support.ranks import run_ranks
from tests.support.states import seeded
from tests.support.wrapped_stores import Fault, FaultStore, Verb

RANKS = 4


def save_own_tensors(rank: int, world: int, url: str, options: Mapping[str, object]) -> None:
    """Each rank saves a tensor of its own, in an object of its own."""
    own = {f"of-rank-{rank}": seeded(f"of-rank-{rank}", (300, 7))}
    dos.save(own, url, storage_options=options, progress=False)
    dist.barrier()


@pytest.fixture(scope="module")
def spread(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saved by four ranks: four objects."""
    place = tmp_path_factory.mktemp("run") / "step-1"
    run_ranks(RANKS, save_own_tensors, place.as_uri(), {})
    return place


@pytest.fixture
def copied(spread: Path, tmp_path: Path) -> Path:
    """The same, to be damaged."""
    place = tmp_path / "step-1"
    place.mkdir()
    for path in spread.iterdir():
        (place / path.name).write_bytes(path.read_bytes())
    return place


def object_of(place: Path, rank: int) -> Path:
    (path,) = place.glob(f"__{rank}_*.distcp")
    return path


def payload_of(place: Path, rank: int) -> tuple[Path, int]:
    path = object_of(place, rank)
    return path, path.read_bytes().index(seeded(f"of-rank-{rank}", (300, 7)).numpy().tobytes())


def flip(path: Path, at: int) -> None:
    body = bytearray(path.read_bytes())
    body[at] ^= 1
    path.write_bytes(body)


def test_damage_of_every_kind_is_found_in_one_go(copied):
    def block_of(rank: int) -> Damage:
        path, start = payload_of(copied, rank)
        held = f"of-rank-{rank}[0:300, 0:7]"
        text = (
            f"{held}: block 0, bytes [{start}, {start + 8400}) of {path.name}, differs from what"
            " was saved"
        )
        return Damage(path.name, "block", f"of-rank-{rank}", 0, (held,), text)

    damaged = [block_of(0), block_of(2)]
    flipped, start = payload_of(copied, 0)
    flip(flipped, start + 8399)
    lost = object_of(copied, 1)
    lost.unlink()
    held, text = "of-rank-1[0:300, 0:7]", f"{lost.name}: the object is missing; it held "
    damaged.append(Damage(lost.name, "missing", elements=(held,), text=text + held))
    cut, start = payload_of(copied, 2)
    text = f"{cut.name}: has {start + 100} bytes, {cut.stat().st_size} were saved"
    cut.write_bytes(cut.read_bytes()[: start + 100])
    damaged.append(Damage(cut.name, "size", text=text))
    framed, start = payload_of(copied, 3)
    flip(framed, start - 1)  # the padding before the payload
    text = f"{framed.name}: framing or padding differs from what was saved"

    ckpt = dos.open(copied.as_uri())
    assert list(ckpt.verify().damaged) == sorted(damaged)
    damaged.append(Damage(framed.name, "framing", text=text))
    assert list(ckpt.verify(deep=True).damaged) == sorted(damaged)


def fails_to_read(
    name: str, error: BaseException, before: Callable[[], object] = lambda: None
) -> Callable[[ObjectStore], ObjectStore]:
    """One object cannot be read any more though it is there when it is asked for."""

    def plan(verb: Verb, key: str, _nth: int) -> Fault | None:
        if (verb, key) != ("open_range", name):
            return None
        before()
        return Fault("before", error)

    return lambda store: FaultStore(store, plan)


def test_what_is_no_damage_is_raised(copied, through):
    ckpt = dos.open(copied.as_uri())
    name = object_of(copied, 1).name
    through(fails_to_read(name, StoreUnavailableError("away", object_key=name)))
    with pytest.raises(StoreUnavailableError, match="away"):
        ckpt.verify()


def test_a_checkpoint_that_is_replaced_meanwhile_is_gone_not_damaged(copied, through):
    ckpt = dos.open(copied.as_uri())
    lost = object_of(copied, 1).name

    def replace() -> None:
        dos.save({"other": seeded("other", (3,))}, copied.as_uri(), overwrite=True, progress=False)

    through(fails_to_read(lost, ObjectNotFoundError("not there", object_key=lost), replace))
    with pytest.raises(CheckpointGoneError, match="replaced"):
        ckpt.verify()
