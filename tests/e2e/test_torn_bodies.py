"""Answers that are not the bytes asked for, and objects that go while ranks load.

The store is a real one behind a proxy. What is wrong once is read again and never noticed; what
stays wrong is one error, the same on every rank, with the object, the tensor and the block. Both
on the ways that bytes take: through the direct lane (large blocks) or the transport (small), and
fetched by each rank for itself or by one for all.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import dcp_objstore as dos
from dcp_objstore.cli.seaweedfs import SeaweedServer
from dcp_objstore.config import MIB
from dcp_objstore.errors import (
    CheckpointCorruptError,
    CheckpointGoneError,
    DcpObjstoreError,
    StoreUnavailableError,
)
from tests.support import tampering
from tests.support.campaign import cases
from tests.support.launcher import Outcome
from tests.support.proxy import Asked
from tests.support.ranks import run_ranks, try_ranks
from tests.support.servers import BUCKET, Bucket
from tests.support.states import same_bits, seeded
from tests.support.tampering import TamperingProxy

pytestmark = pytest.mark.backends("seaweed")

Options = Mapping[str, object]
Shape = tuple[int, int]
RANKS = 3
# Each of the two ranks that save has half of it: of 6 MiB, in two blocks; and of 6 KiB.
SHAPES: dict[str, Shape] = {"large": (3072, 1024), "small": (12, 256)}
LAST_BLOCK = {"large": 1, "small": 0}
CONFIG = dos.TransferConfig(
    max_retries=2, retry_timeout_seconds=20, request_size_bytes=4 * MIB, peer_timeout_seconds=60
)
ANSWERS: dict[str, tampering.Change] = {
    "cut short": tampering.cut,
    "200 with all of it": tampering.whole_object,
    "200 with another length": tampering.wrong_length,
}
# Which way bytes take changes nothing in what is found out of their object.
sized = pytest.mark.parametrize("size", cases(SHAPES, default=["large"]))
shared = pytest.mark.parametrize(
    "read_once",
    [
        pytest.param(True, id="read once"),
        pytest.param(False, id="each alone", marks=pytest.mark.campaign),
    ],
)


def save(rank: int, world: int, url: str, options: Options, shape: Shape) -> None:
    tensor = distribute_tensor(seeded("w", shape), init_device_mesh("cpu", (world,)), [Shard(0)])
    dos.save({"w": tensor, "norm": torch.ones(99)}, url, storage_options=options, progress=False)


def load(
    rank: int, world: int, url: str, options: Options, shape: Shape, read_once: bool
) -> dos.reports.LoadReport:
    state = {"w": torch.zeros(shape), "norm": torch.zeros(99)}
    report = dos.load(
        state, url, storage_options=options, config=CONFIG, progress=False, read_once=read_once
    )
    assert same_bits(state["w"], seeded("w", shape))
    assert same_bits(state["norm"], torch.ones(99))
    return report


class Torn:
    """A checkpoint behind a proxy.

    Attributes:
        proxy: of the test.
        victim: the key of the object of the second rank that saved.
        at: where in it the last byte of that rank's part of `w` lies.
    """

    def __init__(self, bucket: Bucket, size: str) -> None:
        self.bucket, self.size, self.shape = bucket, size, SHAPES[size]
        self.url = bucket.at("step-1")
        run_ranks(2, save, self.url, bucket.storage_options, self.shape)
        (self.victim,) = [key for key in bucket.keys("step-1") if key.startswith("__1_")]
        payload = seeded("w", self.shape)[self.shape[0] // 2 :].numpy().tobytes()
        body = bucket.get(f"step-1/{self.victim}")
        self.at = body.index(payload) + len(payload) - 1

    proxy: TamperingProxy

    def meant(self, asked: Asked) -> bool:
        """Whether it asks for the block with that byte."""
        return asked.covers(self.victim, self.at)

    def load(self, read_once: bool) -> list[Outcome]:
        """Through the proxy, on all ranks."""
        arguments = (self.url, self.proxy.storage_options, self.shape, read_once)
        return try_ranks(RANKS, load, *arguments)

    def error(self, read_once: bool) -> DcpObjstoreError:
        """The one error that a load raises on every rank, but for who else has it."""
        errors = []
        for outcome in self.load(read_once):
            assert isinstance(outcome.error, DcpObjstoreError), outcome
            errors.append(outcome.error)
        assert len({(type(error), str(error)) for error in errors}) == 1
        return errors[0]

    def delete_data(self) -> None:
        """Remove every data object that there is."""
        for key in self.bucket.keys("step-1"):
            if key.endswith(".distcp"):
                self.bucket.delete(f"step-1/{key}")

    def replace(self) -> None:
        """Save something else in its place."""
        writer = dos.ObjectStoreWriter(
            self.url, storage_options=self.bucket.storage_options, overwrite=True, progress=False
        )
        dcp.save({"w": torch.ones(3)}, storage_writer=writer, no_dist=True)


@pytest.fixture(scope="module", params=list(SHAPES))
def kept(request: pytest.FixtureRequest, seaweed: SeaweedServer) -> Torn:
    """For tests that leave the store as it is."""
    options, url = seaweed.storage_options, f"s3://{BUCKET}/torn-{secrets.token_hex(4)}"
    return Torn(Bucket("seaweed", url, options, options), request.param)


@pytest.fixture
def torn(kept: Torn) -> Iterator[Torn]:
    with TamperingProxy(kept.bucket.storage_options) as kept.proxy:
        yield kept


@pytest.fixture
def tear(bucket: Bucket) -> Iterator[Callable[[str], Torn]]:
    def make(size: str) -> Torn:
        torn = Torn(bucket, size)
        torn.proxy = proxy
        return torn

    with TamperingProxy(bucket.storage_options) as proxy:
        yield make


def change(torn: Torn, how: str) -> Any:
    return ANSWERS.get(how) or tampering.flipped(torn.at)


@shared
@pytest.mark.parametrize("how", cases([*ANSWERS, "damaged"], default=["damaged"]))
def test_a_wrong_answer_is_asked_for_again_and_then_an_error_on_every_rank(torn, how, read_once):
    torn.proxy.tamper(change(torn, how), torn.meant, times=1)
    for outcome in torn.load(read_once):
        assert not outcome.failed, outcome
    asked = [asked for asked in torn.proxy.asked if torn.meant(asked)]
    assert len(asked) == (1 if read_once else RANKS) + 1
    assert any(one.signed_url for one in asked) == (torn.size == "large")
    torn.proxy.tamper(change(torn, how), torn.meant)
    error = torn.error(read_once)
    # That connections break says nothing of the object; a later request may get it.
    expected = StoreUnavailableError if how == "cut short" else CheckpointCorruptError
    assert type(error) is expected, error
    assert (error.object_key, error.key) == (torn.victim, "w")
    assert f"block {LAST_BLOCK[torn.size]} of" in str(error)
    assert error.rank is not None
    # The direct lane, the transport, and both once more.
    asked = [asked for asked in torn.proxy.asked if torn.meant(asked)][len(asked) :]
    if how != "cut short":
        assert 2 <= len(asked) <= 4 * RANKS


@sized
@shared
@pytest.mark.parametrize(
    "what", cases(["replaced", "deleted", "damaged"], default=["replaced", "damaged"])
)
def test_objects_that_go_in_the_middle_are_one_error_that_says_why_on_every_rank(
    tear, what, size, read_once
):
    torn = tear(size)

    def act() -> None:
        torn.delete_data()
        if what == "replaced":
            torn.replace()
        elif what == "deleted":
            torn.bucket.delete("step-1/_COMMIT")

    torn.proxy.before(torn.meant, act)
    error = torn.error(read_once)
    # While the commit stands, objects that are missing are damage.
    assert type(error) is (CheckpointCorruptError if what == "damaged" else CheckpointGoneError)
    assert what == "damaged" or what in str(error)
    # Which tensor and which block depends on who was where.
    assert error.object_key is not None and error.object_key.endswith(".distcp")
    assert error.key is not None and f" of {error.key}" in str(error)


@shared
def test_a_checkpoint_replaced_in_mid_load_loads_while_its_objects_exist(tear, read_once):
    torn = tear("large")
    torn.proxy.before(torn.meant, torn.replace)
    reports = [outcome.value for outcome in torn.load(read_once)]
    assert len({report.commit_id for report in reports}) == 1
