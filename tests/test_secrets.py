"""Credentials appear nowhere but in requests, and requests go nowhere but to the user's store."""
# ruff: noqa: E501 - one case a line

from __future__ import annotations

import io
import logging
import pickle
import traceback
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import dcp_objstore as dos
from dcp_objstore.stores import StoreSpec, open_store
from tests.support import hostile
from tests.support.listening import Heard
from tests.support.scripted import Answer, HttpServer
from tests.support.tampering import TamperingProxy

KEY, SECRET, TOKEN = "AKIAPLANTED0KEY", "planted/0secret+XYZ", "planted-0-session-token"
USER, PASSWORD = "planted0user", "planted0password"
PLANTED = (KEY, SECRET, TOKEN, USER, PASSWORD, "planted0signature")
QUICK = dos.TransferConfig(max_retries=0, connect_timeout_seconds=2, request_timeout_seconds=5)


def hidden(*texts: object) -> None:
    """No planted credential is in any of these."""
    for text in texts:
        body = text if isinstance(text, bytes) else str(text).encode("utf-8", "replace")
        for secret in PLANTED:
            assert secret.encode() not in body, f"{secret} in {body[:2000]!r}"


def chain(error: BaseException) -> Iterator[BaseException]:
    seen: list[BaseException | None] = []
    todo: list[BaseException | None] = [error]
    while todo:
        one = todo.pop()
        if one is None or one in seen:
            continue
        seen.append(one)
        yield one
        todo += [one.__cause__, one.__context__]
        if isinstance(one, CheckpointException):
            todo += [failure[0] for failure in one.failures.values()]


def hidden_in_error(error: BaseException) -> None:
    """Neither in it nor in anything it came from, however it is shown or sent."""
    hidden("".join(traceback.format_exception(error)))
    for one in chain(error):
        hidden(one, repr(one), one.args, vars(one))
        if isinstance(one, dos.errors.DcpObjstoreError):
            hidden(pickle.dumps(one))


@pytest.fixture
def logs(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Everything that is logged or warned of, at the level of DEBUG; looked through afterwards."""
    caplog.set_level(logging.DEBUG)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        yield caplog
    # botocore and urllib3 log what they send, if asked to; we cannot change what they do.
    ours = [r for r in caplog.records if not r.name.startswith(("botocore", "boto3", "urllib3"))]
    hidden(*(record.getMessage() for record in ours), *(w.message for w in warned))
    hidden(*("".join(traceback.format_exception(*r.exc_info)) for r in ours if r.exc_info))


# --- a server that tells what it was told --------------------------------------------------------


class Telltale(HttpServer):
    """Answers every request with `status` and all the headers that came with it."""

    def __init__(self, status: int, code: str, form: str) -> None:
        self.status, self.code, self.form = status, code, form
        self.asked: list[str] = []
        super().__init__()

    def reply(self, method: str, target: str, headers: dict[str, str], body: bytes) -> Answer:
        self.asked.append(f"{method} {target}")
        return Answer(self.status, {}, self.body(" ".join(map(": ".join, headers.items()))))

    def body(self, headers: str) -> bytes:
        code, message = f"<Code>{self.code}</Code>", "<Message>no</Message>"
        told = (
            f"<AWSAccessKeyId>{KEY}</AWSAccessKeyId><StringToSign>{headers}</StringToSign>"
            f"<SignatureProvided>planted0signature</SignatureProvided><Token-0>{TOKEN}</Token-0>"
        )
        forms = {
            "as AWS": f"<?xml version='1.0'?><Error>{code}{message}{told}</Error>",
            "told first": f"<Error>{told}{message}{code}</Error>",
            "no message": f"<Error>{told}{code}</Error>",
            "told in the message": f"<Error>{code}<Message>Authorization: {headers}</Message></Error>",
            "no XML": f"denied: {headers} X-Amz-Signature=planted0signature&X-Amz-Credential={KEY}",
        }
        return forms[self.form].encode()


@pytest.fixture
def telltale(request: pytest.FixtureRequest) -> Iterator[Telltale]:
    with Telltale(*getattr(request, "param", (403, "AccessDenied", "as AWS"))) as server:
        yield server


def options(endpoint_url: str) -> dict[str, object]:
    return {"key": KEY, "secret": SECRET, "token": TOKEN, "endpoint_url": endpoint_url}


ACTS: dict[str, Callable[[str, dict[str, object]], object]] = {
    "open": lambda url, options: dos.open(url, storage_options=options, config=QUICK),
    "save": lambda url, options: dos.save(
        {"w": torch.ones(2)}, url, storage_options=options, config=QUICK, progress=False
    ),
    "dcp.load": lambda url, options: dcp.load(
        {"w": torch.ones(2)},
        storage_reader=dos.ObjectStoreReader(url, storage_options=options, config=QUICK),
        no_dist=True,
    ),
    "list": lambda url, options: list(open_store(url, options, QUICK).list()),
    "head": lambda url, options: open_store(url, options, QUICK).head("k"),
}


@pytest.mark.parametrize(
    "telltale",
    [
        (403, "SignatureDoesNotMatch", form)
        for form in ("as AWS", "told first", "no message", "told in the message", "no XML")
    ]
    + [(400, "ExpiredToken", "told in the message"), (500, "InternalError", "no message"),
       (403, "AccessDenied", "no XML"), (404, "NoSuchBucket", "told first"), (301, "Moved", "no XML")],
    indirect=True,
    ids=str,
)  # fmt: skip
def test_what_a_server_tells_back_is_not_repeated(telltale, logs, bare_environment):
    for act in ACTS.values():
        telltale.asked.clear()
        with pytest.raises((dos.errors.DcpObjstoreError, CheckpointException)) as caught:
            act("s3://bucket/run", options(telltale.endpoint_url))
        assert telltale.asked
        hidden_in_error(caught.value)


@pytest.mark.parametrize(
    "endpoint_url",
    ["http://127.0.0.1:1", "http://no-such-host.invalid", "https://127.0.0.1:1",
     f"http://{USER}:{PASSWORD}@127.0.0.1:1", f"http://127.0.0.1:1/?sig={PASSWORD}"],
)  # fmt: skip
def test_a_server_that_is_not_reached_hears_and_shows_nothing(endpoint_url, logs, bare_environment):
    for name in ("open", "save", "dcp.load"):
        with pytest.raises((dos.errors.DcpObjstoreError, CheckpointException)) as caught:
            ACTS[name]("s3://bucket/run", options(endpoint_url))
        hidden_in_error(caught.value)


# --- settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [f"s3://{KEY}:{SECRET}@bucket/x", f"{KEY}:{SECRET}@bucket/x", f"s3:/{KEY}:{SECRET}@bucket/x",
     f"http://{USER}:{PASSWORD}@host/x", f"file://{USER}:{PASSWORD}@host/x", f"gs://{USER}@b/x",
     f"s3://{USER}:{PASSWORD}@/x", f"s3a://{USER}:{PASSWORD}@bucket/x",
     f"s3://bucket//x?X-Amz-Signature=planted0signature&X-Amz-Security-Token={TOKEN}",
     f"az://account/x/../y?sv=1&sig={PASSWORD}"],
)  # fmt: skip
def test_a_url_with_credentials_is_refused_and_not_repeated(url):
    for make in (StoreSpec, dos.ObjectStoreWriter, dos.ObjectStoreReader, dos.open):
        with pytest.raises(dos.errors.DcpObjstoreError) as caught:
            make(url)  # type: ignore[operator]
        hidden_in_error(caught.value)


ENDPOINTS = (
    f"http://{USER}:{PASSWORD}@host:1", f"{USER}:{PASSWORD}@host", f"https://host/?sig={PASSWORD}",
)  # fmt: skip


@pytest.mark.parametrize(
    ("scheme", "options"),
    [(scheme, {"endpoint_url": endpoint}) for scheme in ("s3", "gs") for endpoint in ENDPOINTS]
    + [("s3", {"client_kwargs": {"endpoint_url": endpoint}}) for endpoint in ENDPOINTS]
    + [
        ("s3", {"key": KEY, "secret": SECRET, "sekret": SECRET}),
        ("s3", {"key": KEY}),
        ("s3", {"key": KEY, "secret": 7, "token": TOKEN}),
        ("s3", {"key": KEY, "secret": SECRET, "anon": True}),
        (
            "s3",
            {"client_kwargs": {"aws_access_key_id": KEY, "aws_secret_access_key": SECRET, "x": 1}},
        ),
        ("s3", {"client_kwargs": [KEY, SECRET]}),
        ("s3", {"key": KEY, "secret": f"{SECRET}\n"}),
        ("s3", {"client_kwargs": {"endpoint_url": 7, "aws_session_token": TOKEN}}),
    ],
    ids=str,
)
def test_wrong_options_are_named_without_their_values(scheme, options):
    with pytest.raises(dos.errors.ConfigError) as caught:
        StoreSpec(f"{scheme}://bucket/x", options)
    hidden_in_error(caught.value)


@pytest.mark.parametrize(
    "content",
    [f"aws_secret_access_key = {SECRET}\n", f"[default]\naws_secret_access_key {SECRET}\n",
     f"[default]\n[{SECRET}\n", f"[default]\naws_access_key_id={KEY}\naws_session_token={TOKEN}\n",
     f"[default]\n= {SECRET}\n"],
)  # fmt: skip
@pytest.mark.parametrize("profile", [None, "default"])
def test_a_broken_credentials_file_is_not_quoted(bare_environment, content, profile, logs):
    (bare_environment / "credentials").write_text(content)
    given = None if profile is None else {"profile": profile}
    with pytest.raises(dos.errors.CredentialsError) as caught:
        dos.open("s3://bucket/x", storage_options=given)
    hidden_in_error(caught.value)


@pytest.mark.parametrize(
    "token", [PASSWORD * 40, f"{PASSWORD}\0", f'{{"private_key": "{PASSWORD}"', f"~{USER}/{PASSWORD}"]
)  # fmt: skip
def test_a_google_token_is_not_quoted(bare_environment, token):
    given = {"token": token, "endpoint_url": "http://127.0.0.1:1"}
    with pytest.raises(dos.errors.DcpObjstoreError) as caught:
        spec = StoreSpec("gs://bucket/x", given, QUICK)
        hidden(repr(spec), pickle.dumps(spec))
        spec.open().head("k")
    hidden_in_error(caught.value)


# --- a save and a load that go well --------------------------------------------------------------


def forked(value: object) -> bytes:
    buffer = io.BytesIO()
    ForkingPickler(buffer, 5).dump(value)
    return buffer.getvalue()


@pytest.mark.parametrize("how", ["options", "environment", "profile"])
def test_nothing_shows_stores_or_pickles_the_credentials(bucket, how, logs, monkeypatch, bare_environment):  # fmt: skip
    key, secret = str(bucket.storage_options["key"]), str(bucket.storage_options["secret"])
    endpoint = bucket.storage_options["endpoint_url"]
    if bucket.kind == "moto":  # takes any
        key, secret = KEY, SECRET
    monkeypatch.setattr(f"{__name__}.PLANTED", (key, secret, *PLANTED))
    given: dict[str, object] = {"endpoint_url": endpoint}
    if how == "options":
        given |= {"key": key, "secret": secret}
    elif how == "environment":
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    else:
        (bare_environment / "credentials").write_text(
            f"[train]\naws_access_key_id={key}\naws_secret_access_key={secret}\n"
        )
        given["profile"] = "train"
    url = bucket.at("run")
    state = {"w": torch.arange(300_000.0), "step": 3}
    told, traces = Heard(), bare_environment / "traces"
    watched: Any = {"on_event": told, "trace": traces / "save.json"}
    writer = dos.ObjectStoreWriter(url, storage_options=given, **watched)
    dcp.save(dict(state), storage_writer=writer, no_dist=True)
    watched["trace"] = traces / "load.json"
    reader = dos.ObjectStoreReader(url, storage_options=given, **watched)
    loaded = {"w": torch.zeros(300_000), "step": 0}
    dcp.load(loaded, storage_reader=reader, no_dist=True)
    assert torch.equal(loaded["w"], state["w"])  # type: ignore[arg-type]
    opened = dos.open(url, storage_options=given)
    opened.read(progress=False)
    handle = dos.async_save(dict(state), bucket.at("later"), storage_options=given, progress=False)
    shown = [writer, reader, opened, writer.last_save, reader.last_load, opened.last_read, handle,
             handle.result(), opened["w"], opened["step"], opened.verify(progress=False), QUICK,
             StoreSpec(url, given), open_store(url, given), writer._target, reader._target]  # fmt: skip
    hidden(*map(repr, shown), *map(str, shown), *map(repr, told))
    assert len(told) > 8
    hidden(*((traces / f"{name}.json").read_bytes() for name in ("save", "load")))
    for value in (writer, reader, opened, StoreSpec(url, given)):
        hidden(pickle.dumps(value))
        if how == "options":
            assert secret.encode() in forked(value), "our child process needs them"
    for name in bucket.keys():  # noqa: SIM118 - no dict
        hidden(name, bucket.get(name))
    assert len(bucket.keys()) == 8


# --- endpoints and buckets come from the user alone ----------------------------------------------


def elsewhere(url: str) -> dict[str, hostile.Objects]:
    """Hostile checkpoints that name another place."""
    host = url.removeprefix("http:")
    named = hostile.tensor_index_elsewhere(url)
    return {
        "index key": hostile.with_key(f"{url}/other/x"),
        "index key of a bucket": hostile.with_key("s3://other/x"),
        "index key of a host": hostile.with_key(f"{host}/other/x"),
        "index key upwards": hostile.with_key("../../other/x"),
        "marker's index": hostile.with_field(
            "index", {"key": f"{url}/index", "size_bytes": 1, "sha256": "ab" * 32}
        ),
        "unknown fields of the marker": hostile.with_field("endpoint_url", url),
        "checkpoint_id": named,
        ".metadata key": hostile.foreign_path(f"{url}/other/x"),
        ".metadata key of a host": hostile.foreign_path(f"{host}/other/x"),
        ".metadata checkpoint_id": hostile.foreign_id(f"{url}/other"),
        ".metadata checkpoint_id of a bucket": hostile.foreign_id("s3://other/run"),
    }


@pytest.mark.backends("moto")
@pytest.mark.parametrize("what", elsewhere("http://127.0.0.1:1"))
def test_what_a_checkpoint_says_leads_to_no_other_server_bucket_or_prefix(bucket, telltale, what):
    for key, body in elsewhere(telltale.endpoint_url)[what].items():
        bucket.put(f"run/{key}", body)
    with TamperingProxy(bucket.storage_options) as proxy:
        given = proxy.storage_options
        for act in (
            lambda: dos.open(bucket.at("run"), storage_options=given).read(progress=False),
            lambda: dos.load(
                {"w": torch.zeros(2, 3)}, bucket.at("run"), storage_options=given, strict=False
            ),
        ):
            try:
                act()
            except dos.errors.DcpObjstoreError as error:
                assert not isinstance(error, dos.errors.RankFailedError)
        inside = f"/{bucket.name}/{bucket.prefix}run/"
        listing = f"/{bucket.name}"
        assert proxy.asked
        assert all(
            one.key.startswith(inside) or one.key.rstrip("/") == listing for one in proxy.asked
        ), [one.key for one in proxy.asked]
    assert telltale.asked == []
