"""docs/permissions.md lists the rights that jobs ask for; `doctor` names one that is missing."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from moto.iam.access_control import IAMPolicy, PermissionResult

import dcp_objstore as dos
from dcp_objstore.checkpoint.names import data_key, new_nonce
from dcp_objstore.config import MIB, TransferConfig
from dcp_objstore.doctor import check_up
from dcp_objstore.errors import PermissionDeniedError
from dcp_objstore.stores import StoreSpec
from tests.support.campaign import cases
from tests.support.proxy import Asked
from tests.support.rights import rights_of, s3_resource
from tests.support.scripted import Dialect, fault_answer
from tests.support.servers import Bucket
from tests.support.tampering import TamperingProxy
from tests.support.unfinished_uploads import begin_upload
from tests.support.upkeep import AgedStore, Ages, tear

PAGE = (Path(__file__).parents[2] / "docs" / "permissions.md").read_text()
DIALECTS: Mapping[str, Dialect] = {"s3": "s3", "gs": "gcs-xml", "az": "azure"}
CONFIG = TransferConfig(max_retries=0, part_size_bytes=5 * MIB)
Options = Mapping[str, object]


def small() -> dict[str, Any]:
    return {"weight": torch.ones(8), "step": 1}


def large() -> dict[str, Any]:
    return {"weight": torch.ones(11 * MIB // 4)}  # three parts


def save(bucket: Bucket, options: Options, proxy: TamperingProxy) -> None:
    keywords: Any = {"storage_options": options, "config": CONFIG, "progress": False}
    dos.save(large(), bucket.at("run/step-1"), **keywords)
    copied = dos.save(large(), bucket.at("based"), base=bucket.at("run/step-1"), **keywords)
    assert copied.uploaded_bytes == 0
    dos.save(small(), bucket.at("run/step-1"), overwrite=True, **keywords)
    dos.async_save(small(), bucket.at("run/step-2"), **keywords).result()
    denied = fault_answer(DIALECTS[bucket.url[:2]], "forbidden")
    proxy.refuse(lambda asked: "partNumber=2" in asked.query, denied)
    if bucket.kind != "azure":  # there, nothing is to be aborted
        with pytest.raises(PermissionDeniedError):
            dos.save(large(), bucket.at("run/step-3"), **keywords)
    proxy.refuse(lambda asked: False)


def load(bucket: Bucket, options: Options, proxy: TamperingProxy) -> None:
    url = bucket.at("run/step-2")
    dos.load(small(), url, storage_options=options, progress=False)
    found = dos.open(url, storage_options=options)
    assert found.verify(deep=True).ok
    assert dos.read_state_dict(url, storage_options=options)["step"] == 1


def manage(bucket: Bucket, options: Options, proxy: TamperingProxy) -> None:
    for start in (2, 5):  # the second job goes on where the first ended
        with dos.CheckpointManager(
            bucket.at("run"), keep=dos.KeepLatest(1), save_every=1, storage_options=options
        ) as run:
            assert run.load(small()) == start
            for step in range(start + 1, start + 4):
                run.step(step, small())
    for thread in threading.enumerate():
        if thread.name == "dcp_objstore-sweep":
            thread.join()  # it may be removing objects: the manager does not wait for it


def collect(bucket: Bucket, options: Options, proxy: TamperingProxy) -> None:
    """Upkeep in a run with a step, with a save that died, and with an upload that nobody ended."""
    url = bucket.at("run/step-8")
    dos.pin(url, "paper", storage_options=options)
    dos.unpin(url, "paper", storage_options=options)
    dos.repair(url, storage_options=options)
    dos.delete(url, storage_options=options, allow_newest=True)
    assert sum(one.deleted for one in dos.sweep(bucket.url, storage_options=options).checkpoints)


def doctor(bucket: Bucket, options: Options, proxy: TamperingProxy) -> None:
    assert "failed" not in {one.status for one in check_up(bucket.at("run"), options)}


# One check needs both, and cannot tell which of them is missing.
UPLOADS = {"s3:ListBucketMultipartUploads", "s3:ListMultipartUploadParts"}
PAIRS = {
    **dict.fromkeys(UPLOADS, UPLOADS),
    "s3:GetObject": {"s3:PutObject"},
    "s3:PutObject": {"s3:GetObject"},
}
JOBS = {"save": save, "load": load, "manager": manage, "sweep": collect, "doctor": doctor}


def leave_behind(bucket: Bucket) -> None:
    """A save that died, with an upload that nobody ended."""
    tear(StoreSpec(bucket.at("run/step-9"), bucket.storage_options).open())
    if bucket.kind != "azure":
        begin_upload(bucket, f"run/step-9/{data_key(0, 0, new_nonce())}")


def table(scheme: str) -> dict[str, set[str]]:
    """The rights of each job, from the page."""
    found = re.search(rf"<!-- rights {scheme} -->\n(.*?)<!-- /rights -->", PAGE, re.S)
    assert found is not None
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in found[1].strip().split("\n")]
    header, _, *rights = rows
    return {
        job: {row[0].strip("`") for row in rights if row[number] == "\u2713"}
        for number, job in enumerate(header)
        if job in JOBS
    }


def code(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", PAGE, re.S)
    assert found is not None
    return found[1]


def policy(bucket: str, prefix: str) -> dict[str, Any]:
    """The IAM policy of the page, for a prefix of a bucket."""
    parsed: dict[str, Any] = json.loads(
        code("json").replace("my-bucket", bucket).replace("my-prefix", prefix)
    )
    return parsed


def granted(scheme: str) -> set[str]:
    """All rights that the page grants: in the policy, in the list of the role."""
    if scheme == "s3":
        return {action for one in policy("b", "p")["Statement"] for action in one["Action"]}
    if scheme == "gs":
        return set(re.findall(r"^- (\S+)$", code("yaml"), re.M))
    return set().union(*table("az").values())


def is_allowed(by: Mapping[str, Any], asked: Asked) -> bool:
    rules = IAMPolicy(json.dumps(by))
    return all(
        rules.is_action_permitted(right, s3_resource(asked)) == PermissionResult.PERMITTED
        for right in rights_of("s3", asked)
    )


@pytest.mark.backends("moto", "gcs", "azure")
def test_the_page_lists_the_rights_that_each_job_asks_for(bucket, through):
    ages: Ages = {}
    through(lambda store: AgedStore(store, ages))
    asked: dict[str, list[Asked]] = {}
    with TamperingProxy(bucket.storage_options) as proxy:
        for name, job in JOBS.items():
            if name not in ("save", "load"):
                leave_behind(bucket)
                AgedStore(StoreSpec(bucket.url, bucket.storage_options).open(), ages).age()
            begun = len(proxy.asked)
            job(bucket, proxy.storage_options, proxy)
            asked[name] = proxy.asked[begun:]
    asked["manager"] += asked["save"] + asked["load"]
    scheme = bucket.url[:2]
    needed = {
        name: set().union(*(rights_of(scheme, one) for one in requests))
        for name, requests in asked.items()
    }
    assert needed == table(scheme)
    assert set().union(*needed.values()) == granted(scheme)
    if scheme == "s3":
        here = policy(bucket.name, bucket.prefix.strip("/"))
        assert all(is_allowed(here, one) for one in asked["manager"] + asked["sweep"])
        elsewhere = policy(bucket.name, "elsewhere")
        assert not any(is_allowed(elsewhere, one) for one in asked["load"])


@pytest.mark.backends("seaweed")
@pytest.mark.parametrize(
    "right", cases(sorted(granted("s3")), default=["s3:ListBucket", "s3:ListMultipartUploadParts"])
)
def test_doctor_names_the_right_that_is_missing(bucket, right):
    begin_upload(bucket, "run/step-1/theirs")
    with TamperingProxy(bucket.storage_options) as proxy:
        proxy.refuse(lambda asked: right in rights_of("s3", asked))
        found = list(check_up(bucket.at("run"), proxy.storage_options))
    named = [one for one in found if re.search(rf"{right}\b", one.advice)]
    assert named
    assert {one.status for one in named} <= {"failed", "not made"}
    # On what the policy allows it, and nothing else is said to be missing.
    allowed = policy(bucket.name, f"{bucket.prefix}run")["Statement"]
    place = next(one["Resource"] for one in allowed if right in one["Action"])
    assert all(f"{right} " in one.advice and place in one.advice for one in named)
    missing = re.findall(r"s3:\w+", " ".join(one.advice for one in found))
    assert set(missing) <= {right, *PAIRS.get(right, ())}


@pytest.mark.backends("seaweed")
def test_doctor_names_a_right_to_list_that_holds_for_a_prefix_alone(bucket):
    """Every listing is allowed. But S3 answers 403 where there is no object."""
    denied = fault_answer("s3", "forbidden")
    assert denied is not None
    with TamperingProxy(bucket.storage_options) as proxy:
        proxy.rewrite = lambda answer: denied if answer.status == 404 else answer
        found = {one.check: one for one in check_up(bucket.at("run"), proxy.storage_options)}
        with pytest.raises(PermissionDeniedError):
            dos.save(small(), bucket.at("run/step-1"), storage_options=proxy.storage_options)
    assert (found["list"].status, found["read"].status) == ("ok", "failed")
    assert f"s3:ListBucket on arn:aws:s3:::{bucket.name}, without" in found["read"].advice


@pytest.mark.backends("seaweed")
def test_without_the_right_to_delete_a_save_commits(bucket):
    url = bucket.at("run/step-1")
    with TamperingProxy(bucket.storage_options) as proxy:
        proxy.refuse(lambda asked: asked.method == "DELETE")
        dos.save(small(), url, storage_options=proxy.storage_options)
    assert dos.open(url, storage_options=bucket.storage_options).verify(deep=True).ok
