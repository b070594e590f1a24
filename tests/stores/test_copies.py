"""Copies that GCS and Azure make: of whole objects, on a condition that the store itself keeps."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from email.message import Message
from typing import Any
from urllib.request import Request

import pytest
import torch
from google.oauth2.credentials import Credentials as OfGoogle

import dcp_objstore as dos
from dcp_objstore.config import MIB
from dcp_objstore.errors import (
    BucketNotFoundError,
    ConfigError,
    CorruptDataError,
    CredentialsError,
    DcpObjstoreError,
    ObjectNotFoundError,
    PermissionDeniedError,
    PreconditionFailedError,
    StoreUnavailableError,
    UnsupportedError,
)
from dcp_objstore.observe.events import NotCopied
from dcp_objstore.stores import ObjectStore, Version, open_store
from dcp_objstore.stores.obstore import copies
from dcp_objstore.stores.obstore.copies import Copier, copy_object
from dcp_objstore.stores.protocol import CopySource
from dcp_objstore.stores.retries import RetryPolicy
from dcp_objstore.stores.urls import parse_url
from tests.support.azurite import ACCOUNT, KEY
from tests.support.gcs_tokens import ShortLived, is_valid, post
from tests.support.proxy import Asked
from tests.support.scripted import Answer, fault_answer
from tests.support.servers import Bucket
from tests.support.states import same_bits, seeded
from tests.support.tampering import TamperingProxy
from tests.support.tls import make_certificate
from tests.support.verbs import ONCE

whole = pytest.mark.backends("gcs", "azure")
# Of what is the same above both stores, whose own copies the other tests look at.
by_gcs = pytest.mark.backends("gcs", "azure", default="gcs")
by_azure = pytest.mark.backends("gcs", "azure", default="azure")
DATA = b"the object"


@pytest.fixture
def proxy(bucket: Bucket) -> Iterator[TamperingProxy]:
    with TamperingProxy(bucket.storage_options) as proxy:
        yield proxy


def is_copy(asked: Asked) -> bool:
    return "/rewriteTo/" in asked.key or "x-ms-copy-source" in asked.headers


def is_answer_to_copy(answer: Answer) -> bool:
    return "x-ms-copy-id" in answer.headers or b'"done"' in answer.body


def put(bucket: Bucket, key: str = "from", data: bytes = DATA) -> CopySource:
    version = open_store(bucket.url, bucket.storage_options).put(key, data)
    return CopySource(bucket.at(key), 0, len(data), version)


def copy(
    store: ObjectStore, source: CopySource, moved: Callable[[int], None] = lambda _: None
) -> Version:
    return store.copy("to", [source], part_size_bytes=1, max_concurrency=1, moved=moved)


# --- the condition


@whole
def test_the_store_itself_keeps_the_condition(bucket, proxy):
    """The source is overwritten when it has been looked at, before the copy comes."""
    source = put(bucket)
    proxy.before(is_copy, lambda: bucket.put("from", b"other bytes"))
    store = open_store(bucket.url, proxy.storage_options, ONCE)
    with pytest.raises(PreconditionFailedError, match="in a copy of "):
        copy(store, source)
    assert bucket.keys() == ["from"]
    proxy.before(is_copy, lambda: bucket.delete("from"))
    with pytest.raises(ObjectNotFoundError, match="in a copy of "):
        copy(store, put(bucket))
    assert bucket.keys() == []


@whole
def test_a_copy_whose_answer_is_lost_is_made_again(bucket, proxy, monkeypatch):
    """It is lost, then cut off; or Azure is still at work on the copy of which it was."""
    source, lost, retried = put(bucket), [], list[str]()
    emit = "dcp_objstore.stores.retries.emit_retry"
    monkeypatch.setattr(emit, lambda key, *_: retried.append(key))
    at_work = Answer(409, {"x-ms-error-code": "PendingCopyOperation"}, b"")

    def lose(answer: Answer) -> Any:
        if not is_answer_to_copy(answer) or len(lost) == 2:
            return answer
        lost.append(answer)
        if len(lost) == 1:
            return None
        return at_work if bucket.kind == "azure" else answer._replace(body=answer.body[:7])

    proxy.rewrite = lose
    store = open_store(bucket.url, proxy.storage_options)
    version = copy(store, source)
    assert sum(map(is_copy, proxy.asked)) == 3
    assert retried == [f"{bucket.prefix}to"] * 2
    assert bucket.get("to") == DATA
    assert store.head("to").version == version


@whole
def test_what_a_copy_is_refused_for_is_told_apart(bucket, proxy):
    source = put(bucket)
    store = open_store(bucket.url, proxy.storage_options, ONCE)
    for fault, error in {
        "forbidden": PermissionDeniedError,
        "no object": ObjectNotFoundError,
        "precondition": PreconditionFailedError,
        "internal": StoreUnavailableError,
        "expired": CredentialsError,
    }.items():
        dialect: Any = "azure" if bucket.kind == "azure" else "gcs-json"
        answer = fault_answer(dialect, fault)  # type: ignore[arg-type]
        proxy.refuse(is_copy, answer)
        with pytest.raises(DcpObjstoreError) as caught:
            copy(store, source)
        assert type(caught.value) is error
        assert caught.value.object_key == "to"
        proxy.refuse(lambda asked: asked.method == "HEAD" and asked.key.endswith("/from"), answer)
        with pytest.raises(error):
            copy(store, source)
    proxy.refuse(is_copy, None)
    with pytest.raises(StoreUnavailableError):
        copy(store, source)
    proxy.refuse(is_copy, Answer(300, {}, b""))
    with pytest.raises(DcpObjstoreError, match="300"):
        copy(store, source)
    assert bucket.keys() == ["from"]


@whole
def test_a_certificate_that_is_not_valid_is_asked_for_once(bucket, tmp_path):
    source = put(bucket)
    with TamperingProxy(bucket.storage_options, make_certificate(tmp_path)) as proxy:
        store = open_store(bucket.url, {**proxy.storage_options, "verify": True})
        with pytest.raises(ConfigError, match="certificate"):
            copy(store, source)
        copy(open_store(bucket.url, proxy.storage_options), source)
    assert bucket.get("to") == DATA


# --- from where, with which credentials


@whole
def test_the_proxy_for_everything_is_taken(bucket, proxy, monkeypatch):
    source = put(bucket)
    proxy.refuse(lambda asked: True)
    monkeypatch.setenv("ALL_PROXY", proxy.endpoint_url)
    far = {**bucket.storage_options, "endpoint_url": "http://store.invalid"}
    with pytest.raises(PermissionDeniedError):
        copy(open_store(bucket.url, far, ONCE), source)
    assert [asked.method for asked in proxy.asked] == ["HEAD"]


@whole
def test_another_bucket_of_the_same_provider_is_a_source(bucket):
    other = f"copies-{secrets.token_hex(4)}"
    create_bucket(bucket, other)
    scheme = bucket.url[:2]
    source = open_store(f"{scheme}://{other}/a b=#?%20+é", bucket.storage_options)
    version = source.put("k", DATA)
    store = open_store(bucket.url, bucket.storage_options)
    copy(store, CopySource(f"{source.url}/k", 0, len(DATA), version))
    assert bucket.get("to") == DATA
    missing = CopySource(f"{scheme}://no-such-bucket/k", 0, len(DATA), version)
    with pytest.raises((ObjectNotFoundError, BucketNotFoundError)):
        copy(store, missing)
    with pytest.raises(UnsupportedError):
        copy(store, CopySource("s3://bucket/k", 0, len(DATA), version))


def create_bucket(bucket: Bucket, name: str) -> None:
    if bucket.kind == "azure":
        bucket.server.service.create_container(name)  # type: ignore[attr-defined]
    else:
        bucket.client().create_bucket(Bucket=name)


@pytest.mark.backends("gcs")
def test_each_request_names_the_project_that_pays_and_has_a_token_that_is_valid_then(
    bucket, proxy, gcs_server
):
    source, tokens = put(bucket), ShortLived(gcs_server, 600)
    options = {**proxy.storage_options, "token": tokens, "requester_pays": "payer"}
    store = open_store(bucket.url, options)
    copy(store, source)
    post(f"{gcs_server.gcs_endpoint_url}/o/revoke?token={tokens.handed_out[0]}")
    assert not is_valid(gcs_server, tokens.handed_out[0])
    copy(store, source)
    assert len(tokens.handed_out) == 2
    assert {asked.headers.get("x-goog-user-project") for asked in proxy.asked} == {"payer"}
    stale = open_store(bucket.url, {**proxy.storage_options, "token": tokens.handed_out[0]}, ONCE)
    with pytest.raises(CredentialsError) as caught:
        copy(stale, source)
    assert tokens.handed_out[0] not in f"{caught.value} {caught.value.__cause__}"
    broken = open_store(bucket.url, {**proxy.storage_options, "token": "tökén\u20ac"}, ONCE)
    with pytest.raises(CredentialsError) as caught:
        copy(broken, source)
    assert "\u20ac" not in f"{caught.value} {caught.value.__cause__} {caught.value.__context__}"
    ended = open_store(bucket.url, {**proxy.storage_options, "token": OfGoogle(None)}, ONCE)
    with pytest.raises(CredentialsError, match="RefreshError"):
        copy(ended, source)


@pytest.mark.backends("azure")
def test_a_key_copies_and_a_signature_does_not(bucket, azurite, monkeypatch):
    account = {"account_name": ACCOUNT, "endpoint_url": azurite.endpoint_url}
    signed = open_store(bucket.url, {**account, "sas_token": "sp=rw&sig=x"})
    assert not signed.capabilities.copies
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", KEY)
    source = put(bucket)
    copy(open_store(bucket.url, account), source)
    assert bucket.get("to") == DATA
    wrong = {**account, "account_key": "d3Jvbmcta2V5"}
    for options in (wrong, {**account, "account_key": "no base64"}):
        with pytest.raises((CredentialsError, PermissionDeniedError)) as caught:
            copy(open_store(bucket.url, options, ONCE), source)
        assert str(options["account_key"]) not in f"{caught.value} {caught.value.__cause__}"


# --- what takes long


@pytest.mark.backends("azure")
def test_a_copy_that_azure_has_only_begun_is_waited_for(bucket, proxy, monkeypatch):
    # Two pauses are allowed, and again after each step.
    monkeypatch.setattr(copies, "_PENDING", RetryPolicy(2, 60.0))
    source, told = put(bucket), iter(["0/10", "0/10", "4/10", "4/10", "4/10"])

    def pending(answer: Answer) -> Answer:
        if answer.headers.get("x-ms-copy-status") and (progress := next(told, None)):
            now = {"x-ms-copy-status": "pending", "x-ms-copy-progress": progress}
            return answer._replace(headers={**answer.headers, **now})
        return answer

    proxy.rewrite = pending
    moved: list[int] = []
    store = open_store(bucket.url, proxy.storage_options)
    version = copy(store, source, moved.append)
    assert moved == [4, 6]
    assert store.head("to").version == version


@pytest.mark.backends("azure")
@pytest.mark.parametrize("status", ["pending", "failed"])
def test_a_copy_that_azure_does_not_finish_is_aborted_and_removed(
    status, bucket, proxy, monkeypatch
):
    source = put(bucket)
    proxy.rewrite = lambda answer: (
        answer._replace(headers={**answer.headers, "x-ms-copy-status": status})
        if is_answer_to_copy(answer)
        else answer
    )
    monkeypatch.setattr(copies, "_PENDING", RetryPolicy(3, 60.0))
    with pytest.raises(StoreUnavailableError):
        copy(open_store(bucket.url, proxy.storage_options, ONCE), source)
    aborted = [asked for asked in proxy.asked if "comp=copy" in asked.query]
    assert [asked.headers["x-ms-copy-action"] for asked in aborted] == ["abort"]
    assert bucket.keys() == ["from"]


@pytest.mark.backends("gcs")
def test_a_copy_that_gcs_does_not_go_on_with_is_given_up(bucket, proxy, monkeypatch):
    source, stuck = put(bucket), b'{"done":false,"rewriteToken":"t","totalBytesRewritten":"4"}'
    proxy.refuse(is_copy, Answer(200, {"Content-Type": "application/json"}, stuck))
    monkeypatch.setattr(copies, "_PENDING", RetryPolicy(3, 60.0))
    moved: list[int] = []
    with pytest.raises(StoreUnavailableError, match="go on"):
        copy(open_store(bucket.url, proxy.storage_options, ONCE), source, moved.append)
    assert moved == [4]
    assert [asked.query[-15:] for asked in proxy.asked if is_copy(asked)][1:] == [
        "&rewriteToken=t"
    ] * 4
    assert bucket.keys() == ["from"]


# --- saves with a base


FROZEN = [f"frozen.{number}" for number in range(3)]


def save(bucket: Bucket, step: int, options: object = None, **settings: Any) -> Any:
    state = {key: seeded(key, (2 * MIB // 4,)) for key in FROZEN}
    state |= {"head": seeded(f"head {step}", (MIB // 4,)), "small": torch.ones(7)}
    settings = {"storage_options": options or bucket.storage_options, **settings}
    return dos.save(
        {**state, "step": step},
        bucket.at(f"step-{step}"),
        base="latest",
        progress=False,
        **settings,
    )


def assert_holds(bucket: Bucket, step: int) -> None:
    ckpt = dos.open(bucket.at(f"step-{step}"), storage_options=bucket.storage_options)
    assert ckpt.verify(deep=True, progress=False).ok
    found = ckpt.read(progress=False)
    assert all(same_bits(found[key], seeded(key, (2 * MIB // 4,))) for key in FROZEN)
    assert same_bits(found["head"], seeded(f"head {step}", (MIB // 4,)))
    assert found["step"] == step


def body_bytes(asked: Sequence[Asked]) -> int:
    return sum(int(one.headers.get("content-length", 0)) for one in asked)


@by_gcs
def test_a_save_has_whole_objects_copied_that_hold_nothing_else(bucket, proxy):
    events: list[Any] = []
    first, second = (save(bucket, step, on_event=events.append) for step in (1, 2))
    assert not any(isinstance(one, NotCopied) for one in events), "no part was asked for"
    assert first.copied_bytes == second.copied_bytes == 0
    assert (first.objects, second.objects) == (1, 2)
    assert_holds(bucket, 2)
    third = save(bucket, 3, proxy.storage_options)
    assert 6 * MIB < third.copied_bytes < 6 * MIB + 8192
    assert third.uploaded_bytes < MIB + 8192
    assert body_bytes(proxy.asked) < MIB + 64 * 1024
    assert third.objects == 2
    for key in bucket.keys("step-2"):
        bucket.delete(f"step-2/{key}")
    assert_holds(bucket, 3)
    fourth = save(bucket, 4)
    assert fourth.copied_bytes == third.copied_bytes
    assert bucket.uploads() == []
    assert_holds(bucket, 4)


# --- one copy, without a server


class Copying:
    """A provider that answers a HEAD and reports the given steps of a copy."""

    def __init__(
        self, *steps: tuple[int, bool], repeats: int = 1, size_bytes: int = 9, e_tag: str = '"e"'
    ) -> None:
        self.asked: list[str] = []
        self.moved: list[int] = []
        self.removed = 0
        self.head = Message()
        self.head["Content-Length"], self.head["ETag"] = str(size_bytes), e_tag
        self.copier = Copier("https://server", lambda *given: {"Signed": given[0]}, self.steps)
        self.given = steps * repeats

    def steps(self, copier: Copier, ask: Any, origin: Any, target: Any, head: Message) -> Any:
        assert (str(origin), str(target), head) == ("gs://bucket/from", "gs://bucket/k", self.head)
        yield from self.given

    def send(self, purpose: str, make: Callable[[], Request]) -> tuple[Message, bytes]:
        request = make()
        assert request.headers == {"Signed": request.get_method()}
        self.asked.append(f"{request.get_method()} {request.full_url}")
        assert purpose == "HEAD in a copy of gs://bucket/from"
        return self.head, b""

    def remove(self) -> None:
        self.removed += 1
        raise OSError("no")

    def run(self, *sources: CopySource) -> None:
        target = parse_url("gs://bucket/k")
        copy_object(self.copier, self.send, sources, target, self.moved.append, self.remove)


WHOLE = CopySource("gs://bucket/from", 0, 9, Version('"e"'))


def test_a_copy_reports_its_bytes_and_is_waited_for_until_it_goes_on(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("dcp_objstore.stores.retries.time.monotonic", lambda: clock[0])
    monkeypatch.setattr(
        "dcp_objstore.stores.retries.time.sleep",
        lambda seconds: clock.append(clock.pop() + seconds),
    )
    copying = Copying((0, False), (4, True), (4, True), (9, True))
    copying.run(WHOLE)
    assert copying.moved == [4, 5]
    assert copying.asked == ["HEAD https://server/bucket/from"]
    assert copying.removed == 0
    for is_there in (False, True):
        copying, clock[0] = Copying((4, is_there), repeats=10_000), 0.0
        with pytest.raises(StoreUnavailableError, match="does not go on"):
            copying.run(WHOLE)
        assert clock == [60.0]
        assert (copying.moved, copying.removed) == ([4], int(is_there))


def test_only_one_whole_object_in_the_known_state_is_copied():
    for sources, settings, kind in (
        ([replace(WHOLE, url="s3://bucket/from")], {}, UnsupportedError),
        ([replace(WHOLE, version=Version())], {}, UnsupportedError),
        ([WHOLE], {"e_tag": '"other"'}, PreconditionFailedError),
        ([WHOLE], {"size_bytes": 8}, CorruptDataError),
        ([WHOLE], {"size_bytes": 10}, UnsupportedError),
        ([replace(WHOLE, start=1)], {}, UnsupportedError),
        ([WHOLE, WHOLE], {}, UnsupportedError),
    ):
        copying = Copying((9, True), **settings)
        with pytest.raises(kind):
            copying.run(*sources)
        assert (copying.moved, copying.removed) == ([], 0)
    with pytest.raises(UnsupportedError):
        copy_object(None, Copying().send, [WHOLE], parse_url("gs://b/k"), print, print)  # type: ignore[arg-type]
