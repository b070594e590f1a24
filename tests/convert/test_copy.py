"""Copies of checkpoints: the same bytes under a commit of their own, or nothing."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import dcp_objstore as dos
from dcp_objstore.checkpoint.clock import Clock
from dcp_objstore.checkpoint.commit import put_tombstone
from dcp_objstore.checkpoint.names import data_key, parse_data_key
from dcp_objstore.cli.seaweedfs import SeaweedServer
from dcp_objstore.config import MIB
from dcp_objstore.errors import (
    CheckpointCorruptError,
    CheckpointExistsError,
    CheckpointGoneError,
    CheckpointNotFoundError,
    CommitLostError,
    SupersededError,
    UnsupportedError,
)
from dcp_objstore.observe import events
from dcp_objstore.stores import ObjectStore, StoreSpec
from tests.support.checkpoints import assert_nothing_visible
from tests.support.listening import Heard, of
from tests.support.proxy import Asked, NetworkProxy
from tests.support.servers import BUCKET, Bucket, Folder, MotoServer
from tests.support.states import same_bits, seeded
from tests.support.wrapped_stores import Fault, FaultStore, Lacking, Plan

# Several objects, and one of several parts.
CONFIG = dos.TransferConfig(part_size_bytes=5 * MIB, max_object_size_bytes=5 * MIB)


def state() -> dict[str, Any]:
    parts = {str(number): seeded(f"part{number}", (3 * MIB // 4,)) for number in range(4)}
    return {"wide": seeded("wide", (1000, 2900)), "parts": parts, "half": torch.ones(3), "step": 7}


def save(url: str, options: Mapping[str, object] | None = None) -> None:
    dos.save(
        state(),
        url,
        storage_options=options,
        config=CONFIG,
        user_metadata={"loss": 0.5},
        progress=False,
    )


def assert_same(ckpt: dos.Checkpoint) -> None:
    want = {"wide": state()["wide"], "half": torch.ones(3)}
    want |= {f"parts.{number}": tensor for number, tensor in state()["parts"].items()}
    found = ckpt.read(progress=False)
    assert found.pop("step") == 7
    assert found.keys() == want.keys()
    assert all(same_bits(found[key], want[key]) for key in want)


def below(options: Mapping[str, object], scheme: str, **more: Any) -> Bucket:
    place = f"{scheme}://{BUCKET}/copy-{secrets.token_hex(4)}"
    return Bucket("copy", place, options, more.get("s3", options))


@pytest.fixture
def remote(seaweed: SeaweedServer) -> Bucket:
    return below(seaweed.storage_options, "s3")


@pytest.fixture
def local(tmp_path: Path) -> Folder:
    (tmp_path / "here").mkdir()
    return Folder("file", (tmp_path / "here").as_uri(), {})


def copy(source: Bucket, target: Bucket, **settings: Any) -> dos.reports.CopyReport:
    options: dict[str, Any] = {
        "storage_options": target.storage_options,
        "source_storage_options": source.storage_options,
        "config": CONFIG,
        "progress": False,
    }
    return dos.copy_checkpoint(source.at("step-7"), target.at("step-7"), **{**options, **settings})


@pytest.mark.parametrize(
    "way", ["s3 to file", "file to s3", pytest.param("s3 to gs", marks=pytest.mark.campaign)]
)
def test_a_copy_has_the_same_bytes_and_each_is_fetched_once(way, remote, local, request, requests):
    source, target = {
        "s3 to file": lambda: (remote, local),
        "file to s3": lambda: (local, remote),
        "s3 to gs": lambda: (remote, _google(request.getfixturevalue("gcs_server"))),
    }[way]()
    save(source.at("step-7"), source.storage_options)
    dos.pin(source.at("step-7"), "paper", storage_options=source.storage_options)
    before = dos.open(source.at("step-7"), storage_options=source.storage_options)
    requests.clear()
    report = copy(source, target)
    ranges = [(one.key, one.start, one.end) for one in requests if one.verb == "open_range"]
    ckpt = dos.open(target.at("step-7"), storage_options=target.storage_options)
    assert_same(ckpt)
    assert ckpt.verify(deep=True, progress=False).ok
    bytes_of = [
        [one.get(f"step-7/{key}") for key in keys]
        for one, keys in ((source, before.objects), (target, ckpt.objects))
    ]
    assert bytes_of[0] == bytes_of[1]
    assert not {*before.objects} & {*ckpt.objects}
    assert len(ckpt.objects) == report.objects > 4
    total_bytes = sum(map(len, bytes_of[0]))
    assert report.total_bytes == report.sent_bytes == total_bytes
    assert sum((end or 0) - (start or 0) for _, start, end in ranges) == total_bytes
    assert "copy" not in {one.verb for one in requests}
    assert len(set(ranges)) == len(ranges)
    assert ckpt.user_metadata == {"loss": 0.5}
    assert (ckpt.commit_id, report.url) == (report.commit_id, target.at("step-7"))
    assert ckpt.commit_id != before.commit_id
    assert len(target.keys("step-7")) == len(ckpt.objects) + 3, "no beacon"
    assert target.uploads() == []
    dos.delete(
        target.at("step-7"), allow_newest=True, storage_options=target.storage_options
    )  # the pin was not copied


def test_a_copy_tells_what_it_sends_and_asks_no_store_that_does_not_copy(
    requests, tmp_path, caplog
):
    root, heard = f"memory://{secrets.token_hex(6)}", Heard()
    save(f"{root}/step-7")
    requests.clear()
    with caplog.at_level(logging.INFO, logger="dcp_objstore"):
        report = dos.copy_checkpoint(
            f"{root}/step-7",
            f"{root}/kept",
            config=CONFIG,
            on_event=heard,
            trace=tmp_path / "t.json",
            progress=False,
        )
    assert caplog.text.count(f"saved {root}/kept: ") == 1
    assert "copy" not in {one.verb for one in requests}
    assert {(event.url, event.rank) for event in heard} == {(report.url, 0)}
    (plan,) = of(events.Planned, heard)
    assert (plan.operation, plan.items, plan.objects) == ("save", 7, report.objects)
    assert plan.size_bytes == report.total_bytes == report.sent_bytes
    parts = of(events.PartUploaded, heard)
    assert len(parts) == plan.requests == report.objects + 2, "one has three parts"
    (saved,) = of(events.Saved, heard)
    assert (saved.report.total_bytes, saved.report.objects) == (report.total_bytes, report.objects)
    assert (report.source, report.url) == (f"{root}/step-7", f"{root}/kept")
    assert dos.open(report.url).world_size == 1
    assert (tmp_path / "t.json").exists()


def _google(server: MotoServer) -> Bucket:
    return below(server.gcs_storage_options, "gs", s3=server.storage_options)


def test_damage_is_named_and_nothing_is_committed(local):
    save(local.at("step-7"))
    ckpt = dos.open(local.at("step-7"))
    key = next(key for key in ckpt.objects if len(local.get(f"step-7/{key}")) > 8 * MIB)
    whole = local.get(f"step-7/{key}")
    target = Folder("file", local.at("kept"), {})
    for damaged, said in (
        (whole[: 9 * MIB] + bytes(8) + whole[9 * MIB + 8 :], "wide.*block 2"),
        (whole[:-1] + b"!", "around"),
        (whole[: 9 * MIB], "wide"),
    ):
        local.put(f"step-7/{key}", damaged)
        with pytest.raises(CheckpointCorruptError, match=key) as caught:
            copy(local, target, streamed=True)
        assert_nothing_visible(target, "step-7")
        assert said.partition(".*")[0] in str(caught.value)
        assert said.rpartition(".*")[2] in str(caught.value)
        assert not any(f"_{ckpt.objects.index(key)}." in one for one in target.keys("step-7"))
    local.delete(f"step-7/{key}")
    with pytest.raises(CheckpointCorruptError, match="missing"):
        copy(local, target, streamed=True)
    assert_nothing_visible(target, "step-7")
    local.put(f"step-7/{key}", whole)
    again = copy(local, target, streamed=True)
    assert again.sent_bytes < again.total_bytes, "what was whole is not sent again"


def test_what_stands_in_the_way_is_refused(local, tmp_path):
    target = Folder("file", local.at("kept"), {})
    with pytest.raises(CheckpointNotFoundError):
        copy(local, target)
    dcp.save({"w": torch.ones(3)}, checkpoint_id=local.at("step-7").removeprefix("file://"))
    with pytest.raises(UnsupportedError, match="import"):
        copy(local, target)
    assert target.keys() == []
    shutil.rmtree(local.at("step-7").removeprefix("file://"))
    save(local.at("step-7"))
    first = copy(local, target)
    with pytest.raises(CheckpointExistsError, match="overwrite") as refused:
        copy(local, target)
    assert refused.value.rank is None, "a copy has no ranks"
    assert dos.open(first.url).commit_id == first.commit_id
    again = copy(local, target, overwrite=True)
    assert again.sent_bytes == again.total_bytes, "nothing that a sweep may remove is used"
    assert_same(dos.open(again.url))
    dos.pin(again.url, "paper")
    with pytest.raises(CheckpointExistsError, match="paper"):
        copy(local, target, overwrite=True)
    claim = dos.claim_run(target.url)
    with pytest.raises(SupersededError):
        copy(local, target, overwrite=True)
    url = target.at("step-8")
    dos.copy_checkpoint(again.url, url, claim=claim, progress=False)
    assert_same(dos.open(url))


@pytest.mark.parametrize("streamed", [True, False])
def test_a_source_that_is_deleted_meanwhile_is_gone(streamed, local, monkeypatch):
    save(local.at("step-7"))
    target = Folder("file", local.at("kept"), {})
    lock, deleted = threading.Lock(), []

    def delete_first(verb: str, key: str, nth: int) -> Fault | None:
        if verb in ("open_range", "copy"):
            with lock:
                if not deleted:
                    dos.delete(local.at("step-7"), allow_newest=True)
                    deleted.append(key)
        return None

    faulty(monkeypatch, local, delete_first)
    with pytest.raises(CheckpointGoneError, match="deleted"):
        copy(local, target, streamed=streamed)
    assert_nothing_visible(target, "step-7")


@pytest.mark.parametrize("scheme", ["s3", "file"])
def test_between_urls_of_one_store_no_byte_of_data_is_read(scheme, remote, local, requests):
    source = remote if scheme == "s3" else local
    target, further = (
        (Bucket if scheme == "s3" else Folder)(
            source.kind, source.at(name), source.storage_options, source.s3_options
        )
        for name in ("kept", "further")
    )
    save(source.at("step-7"), source.storage_options)
    requests.clear()
    report = copy(source, target)
    assert report.copied_bytes == report.sent_bytes == report.total_bytes
    asked = {one.verb for one in requests}
    assert {"copy"} == asked & {"copy", "open_range", "put_stream"}
    assert target.uploads() == []
    ckpt = dos.open(report.url, storage_options=target.storage_options)
    assert ckpt.verify(deep=True, progress=False).ok
    assert_same(ckpt)
    assert copy(target, further).copied_bytes == report.total_bytes
    requests.clear()
    again = copy(source, target, streamed=True, overwrite=True)
    assert (again.copied_bytes, again.sent_bytes) == (0, report.total_bytes)
    assert "copy" not in {one.verb for one in requests}
    assert copy(target, further, overwrite=True).copied_bytes == report.total_bytes


def test_an_object_that_was_overwritten_is_read_and_found_damaged(local):
    save(local.at("step-7"))
    target = Folder("file", local.at("kept"), {})
    local.flip_byte(f"step-7/{largest(local)}", 6 * MIB)
    with pytest.raises(CheckpointCorruptError, match="wide"):
        copy(local, target)
    assert_nothing_visible(target, "step-7")


def test_what_the_store_copies_is_as_good_as_the_source(local, monkeypatch):
    """Bytes that rot under the same ETag are copied as they are, but for `streamed`."""
    save(local.at("step-7"))
    target = Folder("file", local.at("kept"), {})
    place = Path(local.at(f"step-7/{largest(local)}").removeprefix("file://"))
    status = place.stat()
    with place.open("r+b") as file:
        file.seek(6 * MIB)
        (byte,) = file.read(1)
        file.seek(6 * MIB)
        file.write(bytes([byte ^ 1]))
    os.utime(place, ns=(status.st_atime_ns, status.st_mtime_ns))
    with monkeypatch.context() as patched:
        faulty(patched, target, before_the_index)
        with pytest.raises(KeyboardInterrupt):
            copy(local, target)
    with pytest.raises(CheckpointCorruptError, match="wide"):
        copy(local, target, streamed=True)  # takes nothing over that nobody has read
    report = copy(local, target)
    assert report.sent_bytes == 0
    found = dos.open(report.url).verify(deep=True, progress=False)
    assert [one.key for one in found.damaged] == ["wide"]


@pytest.fixture
def proxy(seaweed: SeaweedServer) -> Iterator[NetworkProxy]:
    with NetworkProxy(seaweed.storage_options) as proxy:
        yield proxy


def largest(bucket: Bucket) -> str:
    """The key of the object with several parts."""
    return max(
        dos.open(bucket.at("step-7"), storage_options=bucket.storage_options).objects,
        key=lambda key: len(bucket.get(f"step-7/{key}")),
    )


def data(bucket: Bucket) -> int:
    """Number of data objects."""
    return sum(key.endswith(".distcp") for key in bucket.keys("step-7"))


def until(holds: Callable[[], bool]) -> None:
    ends_at = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < ends_at
        time.sleep(0.05)


@pytest.mark.usefixtures("usual_signals")
def test_ctrl_c_leaves_no_upload_and_the_next_copy_sends_the_rest(remote, proxy):
    save(remote.at("step-7"), remote.storage_options)
    key = largest(remote)
    target = Bucket("seaweed", remote.at("kept"), remote.storage_options, remote.s3_options)
    ranges: list[Asked] = []

    def second_range(asked: Asked) -> bool:
        if asked.name == key and asked.method == "GET":
            ranges.append(asked)
        return asked.name == key and len(ranges) > 1

    held = proxy.hold(second_range)

    def interrupt() -> None:
        held.wait()
        until(lambda: data(target) >= 4)
        signal.raise_signal(signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        copy(remote, target, source_storage_options=proxy.storage_options)
    thread.join()
    assert_nothing_visible(target, "step-7")  # while the source still does not answer
    proxy.hang_up()
    report = copy(remote, target)
    assert report.sent_bytes == len(remote.get(f"step-7/{key}"))
    ckpt = dos.open(report.url, storage_options=target.storage_options)
    assert ckpt.verify(deep=True, progress=False).ok
    assert_same(ckpt)


def test_after_sigkill_the_next_copy_sends_the_rest_and_gc_removes_what_it_left(
    remote, proxy, local, tmp_path
):
    save(remote.at("step-7"), remote.storage_options)
    key, objects = largest(remote), len(remote.keys("step-7")) - 3
    proxy.hold(lambda asked: asked.name == key and asked.method == "GET")
    options = proxy.storage_options
    environment = {
        "AWS_ACCESS_KEY_ID": str(options["key"]),
        "AWS_SECRET_ACCESS_KEY": str(options["secret"]),
        "AWS_ENDPOINT_URL": str(options["endpoint_url"]),
        "AWS_REGION": "us-east-1",
    }
    job = subprocess.Popen(
        [sys.executable, "-m", "dcp_objstore", "cp", remote.at("step-7"), local.at("step-7")],
        env={**os.environ, **environment},
    )
    try:
        until(lambda: data(local) == objects - 1)
    finally:
        job.kill()
        job.wait()
    proxy.hang_up()
    assert_nothing_visible(local, "step-7", uploads=True)
    other = Folder("file", (tmp_path / "other").as_uri(), {})
    shutil.copytree(local.url.removeprefix("file://"), tmp_path / "other")

    report = copy(remote, local)
    assert report.sent_bytes == len(remote.get(f"step-7/{key}"))
    assert dos.open(report.url).verify(deep=True, progress=False).ok
    assert_same(dos.open(report.url))
    age(local)
    dos.sweep(local.url)
    assert len(local.keys("step-7")) == objects + 3
    assert_same(dos.open(report.url))

    age(other)
    dos.sweep(other.url)
    assert other.keys() == ["step-7/_COMMIT"]  # the fence
    assert other.uploads() == []
    assert copy(remote, other).sent_bytes == report.total_bytes


def age(bucket: Folder) -> None:
    long_ago = time.time() - 2 * 24 * 3600
    for path in Path(bucket.url.removeprefix("file://")).rglob("*"):
        os.utime(path, (long_ago, long_ago))


def faulty(patched: pytest.MonkeyPatch, target: Bucket, plan: Plan) -> None:
    """Have the plan followed by stores that are opened at the target from now on."""
    really_open = StoreSpec.open

    def opened(spec: StoreSpec) -> ObjectStore:
        store = really_open(spec)
        return FaultStore(store, plan) if spec.url.startswith(target.url) else store

    patched.setattr(StoreSpec, "open", opened)


def before_the_index(verb: str, key: str, nth: int) -> Fault | None:
    return Fault("before", KeyboardInterrupt()) if key.startswith("index") else None


@pytest.mark.parametrize("lacks", [["atomic_put"], ["conditional_create", "conditional_update"]])
def test_what_a_store_does_not_guard_is_sent_again(lacks, local, monkeypatch, through):
    save(local.at("step-7"))
    target = Folder("file", local.at("kept"), {})
    with monkeypatch.context() as patched:
        faulty(patched, target, before_the_index)
        with pytest.raises(KeyboardInterrupt):
            copy(local, target)
    sent = data(target)
    through(lambda store: Lacking(store, *lacks))
    report = copy(local, target, allow_unfenced=True)
    assert report.sent_bytes == report.total_bytes
    assert data(target) == sent + report.objects


def test_of_an_interrupted_copy_only_objects_that_are_whole_are_used(local, monkeypatch):
    save(local.at("step-7"))
    target = Folder("file", local.at("kept"), {})
    with monkeypatch.context() as patched:
        faulty(patched, target, before_the_index)
        with pytest.raises(KeyboardInterrupt):
            copy(local, target)
    arrived = sorted(Path(target.at("step-7").removeprefix("file://")).glob("*.distcp"))
    body, name = arrived[0].read_bytes(), parse_data_key(arrived[0].name)
    # One has another size, and one of a number that the checkpoint does not have.
    arrived[0].write_bytes(body[:-1])
    (arrived[0].parent / data_key(0, len(arrived), name.nonce)).write_bytes(body)
    report = copy(local, target)
    assert report.sent_bytes == len(body)
    assert dos.open(report.url).verify(deep=True, progress=False).ok
    assert len(dos.open(report.url).objects) == len(arrived)


def test_a_sweep_defeats_a_copy_that_names_what_the_sweep_may_remove(local, monkeypatch):
    save(local.at("step-7"))
    target = Folder("file", local.at("kept"), {})
    store, fences = StoreSpec(target.at("step-7"), None, None).open(), []

    def fence(verb: str, key: str, nth: int) -> Fault | None:
        if verb == "list" and not fences:
            fences.append(put_tombstone(store, Clock(10).tries()))
        return None

    for plan, error in ((before_the_index, KeyboardInterrupt), (fence, CommitLostError)):
        with monkeypatch.context() as patched:
            faulty(patched, target, plan)
            with pytest.raises(error):
                copy(local, target)
    assert fences != [None]
    sent = data(target)
    report = copy(local, target)
    assert report.sent_bytes == report.total_bytes
    assert data(target) == sent + report.objects
    assert_same(dos.open(report.url))
