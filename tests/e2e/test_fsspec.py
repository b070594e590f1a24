"""DCP through fsspec: saved on 4 ranks, loaded on 2, by way of each filesystem that ranks share."""

from __future__ import annotations

import secrets
from collections.abc import Mapping

import pytest
import torch.distributed.checkpoint as dcp

import dcp_objstore as dos
from tests.support.checkpoints import cause
from tests.support.ranks import run_ranks, try_ranks
from tests.support.servers import BUCKET
from tests.support.states import TrainingJob, fill, tensor_state, wrong_keys
from tests.support.training_jobs import load_job, resume, save_job

Options = Mapping[str, object]


FSSPEC = {"transport": "fsspec"}


def saved_on_4_resumes_on_2(url: str, options: Options) -> None:
    options = {**options, **FSSPEC}
    run_ranks(4, save_job, url, options)
    run_ranks(2, load_job, url, options)
    # What is there is fenced by the conditional create: nobody saves over it unasked.
    for outcome in try_ranks(2, save_job, url, options):
        assert isinstance(cause(outcome.error), dos.errors.CheckpointExistsError)


def test_a_local_folder(tmp_path):
    saved_on_4_resumes_on_2(f"file://{tmp_path}/run/step-1", {})
    names = {path.name for path in (tmp_path / "run" / "step-1").iterdir()}
    assert {"_COMMIT", ".metadata"} < names
    assert not any(name.startswith(".dcp-objstore.") for name in names)
    # Written through fsspec, read by our own adapter.
    resume(TrainingJob(sharded=False), f"file://{tmp_path}/run/step-1", {})


@pytest.mark.backends("seaweed")
def test_s3fs(bucket):
    pytest.importorskip("s3fs", minversion="2025.5")
    saved_on_4_resumes_on_2(bucket.at("step-1"), bucket.storage_options)
    assert {"_COMMIT", ".metadata"} < set(bucket.keys("step-1"))
    assert bucket.uploads() == []
    resume(TrainingJob(sharded=False), bucket.at("step-1"), bucket.storage_options)


@pytest.mark.campaign
def test_gcsfs(fake_gcs):
    prefix = secrets.token_hex(4)
    saved_on_4_resumes_on_2(f"gs://{BUCKET}/{prefix}/step-1", fake_gcs.storage_options)
    assert {"_COMMIT", ".metadata"} < set(fake_gcs.keys(f"{prefix}/step-1/"))


def test_overwriting_is_refused_where_nothing_can_be_replaced_conditionally(tmp_path):
    url = f"file://{tmp_path}/step-1"
    state = tensor_state("plain")
    fill(state)
    dcp.save(dict(state), storage_writer=dos.ObjectStoreWriter(url, storage_options=FSSPEC))
    writer = dos.ObjectStoreWriter(url, storage_options=FSSPEC, overwrite=True)
    with pytest.raises(BaseException) as caught:
        dcp.save(dict(state), storage_writer=writer)
    assert isinstance(cause(caught.value), dos.errors.UnsupportedError)


def test_a_given_filesystem_without_a_create_needs_the_users_promise(tmp_path):
    import fsspec
    from fsspec.implementations.dirfs import DirFileSystem

    fs = DirFileSystem(path=str(tmp_path), fs=fsspec.filesystem("file"))
    options = {"fs": fs}
    state = tensor_state("plain")
    fill(state)
    writer = dos.ObjectStoreWriter("dir://step-1", storage_options=options)
    with pytest.raises(BaseException) as caught:
        dcp.save(dict(state), storage_writer=writer)
    assert isinstance(cause(caught.value), dos.errors.UnsupportedError)
    assert list((tmp_path / "step-1").iterdir()) == []
    writer = dos.ObjectStoreWriter("dir://step-1", storage_options=options, allow_unfenced=True)
    dcp.save(dict(state), storage_writer=writer)
    assert (tmp_path / "step-1" / ".metadata").exists()  # without a condition, too
    back = tensor_state("plain")
    dcp.load(
        dict(back), storage_reader=dos.ObjectStoreReader("dir://step-1", storage_options=options)
    )
    assert wrong_keys(back) == []
