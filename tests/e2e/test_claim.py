"""A run's claim through the public door, on real servers, and with a real zombie."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import dcp_objstore as dos
from dcp_objstore.checkpoint import commit as commits
from dcp_objstore.checkpoint.catalogue import FORMAT, ClaimRecord, encode_claim
from dcp_objstore.checkpoint.marker import new_id
from dcp_objstore.checkpoint.names import new_nonce
from dcp_objstore.errors import (
    CheckpointExistsError,
    CommitLostError,
    ConfigError,
    InputError,
    SupersededError,
)
from dcp_objstore.stores import StoreSpec
from tests.support.campaign import cases
from tests.support.checkpoints import cause, edition, edition_in
from tests.support.proxy import Asked, NetworkProxy
from tests.support.ranks import pause, run_ranks, start_workers, try_ranks
from tests.support.upkeep import finish, upload
from tests.support.wrapped_stores import Fault, FaultStore, Request

Options = Mapping[str, object]


def state(value: int = 0) -> dict[str, Any]:
    return {"weight": torch.full((8,), float(value))}


def names(run: str, options: Options) -> list[str]:
    return [step.name for step in dos.steps(run, storage_options=options)]


def saver(claim: dos.RunClaim | None, options: Options) -> Callable[..., Any]:
    def save(step: int, **settings: Any) -> Any:
        url = f"{claim.url if claim else settings.pop('run')}/step-{step}"
        return dos.save(
            state(step), url, claim=claim, storage_options=options, progress=False, **settings
        )

    return save


@pytest.mark.backends("seaweed", "moto", "gcs", "azure")
def test_a_superseded_job_adds_replaces_and_deletes_nothing(bucket):
    run, options = bucket.at("run"), bucket.storage_options
    saver(None, options)(9, run=run)
    old = dos.claim_run(run, storage_options=options)
    save_old = saver(old, options)
    save_old(10)
    new = dos.claim_run(run + "/", storage_options=options)
    assert (old.number, new.number, new.url) == (1, 2, run)
    assert names(run, options) == ["step-9", "step-10"]
    with pytest.raises(SupersededError, match="stop this job"):
        save_old(11)
    with pytest.raises(SupersededError):
        save_old(10, overwrite=True)
    with pytest.raises(SupersededError):
        dos.delete(f"{run}/step-9", claim=old, storage_options=options)
    assert names(run, options) == ["step-9", "step-10"]

    report = saver(new, options)(11)
    found = dos.steps(run, storage_options=options)
    assert [step.name for step in found] == ["step-9", "step-10", "step-11"]
    assert found[-1].commit_id == report.commit_id
    assert (found[-1].claim, found[-1].url) == (2, f"{run}/step-11")
    assert dos.steps(run, newest=1, storage_options=options) == found[-1:]
    dos.delete(f"{run}/step-9", claim=new, storage_options=options)
    assert names(run, options) == ["step-10", "step-11"]
    for step in ("step-10", "step-11"):
        assert dos.open(f"{run}/{step}", storage_options=options).verify().ok


def test_what_does_not_count_can_be_removed_and_the_newest_that_counts_cannot(bucket):
    run, options = bucket.at("run"), bucket.storage_options
    old = dos.claim_run(run, storage_options=options)
    saver(old, options)(1)
    second = StoreSpec(f"{run}/step-2", options).open()
    token = commits.take_begin_token(second, overwrite=False, claim=old.number)
    uploaded = upload(second, ranks=1)
    new = dos.claim_run(run, storage_options=options)
    finish(second, token, uploaded)
    with pytest.raises(InputError, match="newest"):
        dos.delete(f"{run}/step-1", claim=new, storage_options=options)
    assert dos.delete(f"{run}/step-2", storage_options=options).objects == 1
    assert names(run, options) == ["step-1"]
    StoreSpec(run, options).open().put(f".probe-{new_nonce()}", b"a probe that died")
    swept = dos.sweep(run, storage_options=options).checkpoints
    assert swept[0].url == run
    assert swept[0].unknown == (), "_CLAIM is known"
    assert names(run, options) == ["step-1"]


def test_wrong_uses_of_a_claim_are_refused_before_anything_is_sent(bucket):
    run, options = bucket.at("run"), bucket.storage_options
    claim = dos.claim_run(run, storage_options=options)
    before = bucket.keys("run")
    for url in (f"{run}/a/step-1", bucket.at("other/step-1"), run):
        with pytest.raises(InputError, match="directly below"):
            dos.save(state(), url, claim=claim, storage_options=options)
        with pytest.raises(InputError, match="directly below"):
            dos.delete(url, claim=claim, storage_options=options)
    with pytest.raises(ConfigError, match="claim_run"):
        dos.save(state(), f"{run}/step-1", claim=1, storage_options=options)  # type: ignore[arg-type]
    assert bucket.keys("run") == before


def take_and_save(rank: int, world_size: int, run: str, options: Options) -> tuple[int, str]:
    claim = dos.claim_run(run, storage_options=options)
    saved = dos.save(
        dict(edition(f"claim {claim.number}", "shard0")),
        f"{run}/step-{claim.number}",
        claim=claim,
        storage_options=options,
        progress=False,
    )
    assert saved.commit_id is not None
    return claim.number, saved.commit_id


def take_with_one_wrong_rank(rank: int, world_size: int, run: str, options: Options) -> int:
    return dos.claim_run("s4://nothing" if rank == 0 else run, storage_options=options).number


@pytest.mark.backends("seaweed")
def test_all_ranks_have_the_same_claim_or_the_same_error(bucket):
    run, options = bucket.at("run"), bucket.storage_options
    for number in (1, 2):
        outcomes = run_ranks(2, take_and_save, run, options)
        assert outcomes[0] == outcomes[1]
        assert outcomes[0][0] == number
    assert names(run, options) == ["step-1", "step-2"]
    for outcome in try_ranks(2, take_with_one_wrong_rank, run, options):
        assert isinstance(outcome.error, dos.errors.InvalidUrlError), str(outcome)
    assert not dist.is_initialized()


@pytest.mark.backends("seaweed")
@pytest.mark.parametrize("beaten", cases([False, True], default=[False]))
def test_a_zombie_that_wakes_before_its_commit_adds_no_step(bucket, beaten):
    """Stopped by SIGSTOP as it asks for its commit; meanwhile a successor takes the run over."""
    run, options = bucket.at("run"), bucket.storage_options
    commits = 0

    def second_commit(asked: Asked) -> bool:
        nonlocal commits
        commits += asked.method == "PUT" and asked.name == "_COMMIT"
        return commits == 2

    with start_workers() as crew, NetworkProxy(options) as proxy:
        held = proxy.hold(second_commit)
        job = crew.start(2, save_two, run, proxy.storage_options)
        held.wait()
        pause(job)
        successor = dos.claim_run(run, storage_options=options)
        assert names(run, options) == ["step-1"]
        wanted = ["step-1"]
        if beaten:
            saver(successor, options)(2)
            wanted.append("step-2")
        held.release()
        job.signal(signal.SIGCONT)
        for outcome in job.end():
            assert isinstance(outcome.error, (SupersededError, CommitLostError)), str(outcome)
    assert names(run, options) == wanted
    assert edition_in(f"{run}/step-1", options, ["1", "2"]) == "1"
    if not beaten:
        marker_keys = [key for key in bucket.keys("run") if key.endswith("step-2/_COMMIT")]
        assert len(marker_keys) == 1, "it did commit, and that does not count"
        saver(successor, options)(2)
        assert names(run, options) == ["step-1", "step-2"]
        with pytest.raises(CheckpointExistsError):
            saver(successor, options)(2)


def save_two(rank: int, world_size: int, run: str, options: Options) -> None:
    claim = dos.claim_run(run, storage_options=options)
    for step in (1, 2):
        dos.save(
            dict(edition(str(step), "shard0")),
            f"{run}/step-{step}",
            claim=claim,
            storage_options=options,
            progress=False,
        )


def asked(requests: list[Request]) -> list[str]:
    return [f"{one.verb} {one.key}" for one in requests]


def test_a_save_that_would_not_count_is_refused_before_its_upload_and_leaves_nothing(
    bucket, requests
):
    run, options = bucket.at("run"), bucket.storage_options
    old = dos.claim_run(run, storage_options=options)
    dos.claim_run(run, storage_options=options)
    before = bucket.keys("run")
    url = f"{run}/step-1"
    for claim in (None, old):
        requests.clear()
        with pytest.raises(SupersededError, match="no claim" if claim is None else "stop this job"):
            saver(claim, options)(1, **({} if claim else {"run": run}))
        verbs = sorted(each.partition("-")[0] for each in asked(requests))
        assert verbs == ["delete .save", "get _CLAIM", "head .metadata", "put .save"]
        with pytest.raises(SupersededError):
            dos.async_save(state(), url, claim=claim, storage_options=options).result()
        writer = dos.ObjectStoreWriter(claim=claim, storage_options=options, progress=False)
        with pytest.raises(dcp.api.CheckpointException) as caught:
            dcp.save(state(), storage_writer=writer, checkpoint_id=url, no_dist=True)
        assert isinstance(cause(caught.value), SupersededError)
        assert writer.last_save is None
    assert bucket.keys("run") == before


def test_a_save_outside_of_runs_looks_once_above_it_and_goes_on_where_it_may_not(bucket, requests):
    options, run = bucket.storage_options, bucket.at("plain")
    saver(None, options)(1, run=run)
    assert asked(requests).count("get _CLAIM") == 1

    def refuse(verb: str, key: str, nth: int) -> Fault | None:
        return Fault("before", dos.errors.PermissionDeniedError("403")) if key == "_CLAIM" else None

    with pytest.MonkeyPatch.context() as patch:
        open_recorded = StoreSpec.open
        patch.setattr(StoreSpec, "open", lambda spec: FaultStore(open_recorded(spec), refuse))
        saver(None, options)(2, run=run)
    assert names(run, options) == ["step-1", "step-2"]


def test_a_save_into_a_run_whose_claim_is_damaged_says_so(bucket):
    run, options = bucket.at("run"), bucket.storage_options
    StoreSpec(run, options).open().put("_CLAIM", b"{}")
    with pytest.raises(dos.errors.CheckpointCorruptError, match="_CLAIM"):
        saver(None, options)(1, run=run)
    assert not [key for key in bucket.keys("run") if "step-1" in key]
    newer = ClaimRecord(format=FORMAT + 1, number=1, base=1, write_id=new_id())
    StoreSpec(run, options).open().put("_CLAIM", encode_claim(newer))
    with pytest.raises(dos.errors.UnsupportedError, match="_CLAIM"):
        saver(None, options)(1, run=run)
    assert not [key for key in bucket.keys("run") if "step-1" in key]
