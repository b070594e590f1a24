"""`dcp-objstore doctor`: right about each kind of store and fault, and nothing of it stays."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from dcp_objstore.config import TransferConfig
from dcp_objstore.doctor import Finding, check_up, runner
from dcp_objstore.doctor.checks import Verdict, ok
from dcp_objstore.doctor.objects import ObjectChecks
from dcp_objstore.doctor.runner import CONFIG, findings, table
from dcp_objstore.doctor.scratch import Stop
from dcp_objstore.errors import ConfigError, InvalidUrlError
from dcp_objstore.stores import StoreSpec
from tests.support.command_line import environment, run_here
from tests.support.proxy import Asked, Hold, NetworkProxy
from tests.support.scripted import ScriptedServer
from tests.support.servers import BUCKET, READ_ONLY, WRITE_ONLY, Bucket
from tests.support.tampering import TamperingProxy
from tests.support.unfinished_uploads import PART, Before, begin_upload

CHECKS = [
    "versions",
    "working directory",
    "credentials",
    "endpoint",
    "bucket",
    "put",
    "list",
    "read",
    "multipart",
    "abort",
    "conditional put",
    "delete",
    "lifecycle",
    "unfinished uploads",
    "clean-up",
]
TRANSPORTS = ("native", "boto3", "fsspec")
# The package that has to be there.
CARRIERS = {("s3", "boto3"): "boto3", ("s3", "fsspec"): "s3fs", ("gs", "fsspec"): "gcsfs"}
IMPATIENT = replace(CONFIG, max_retries=0)
PAGE = b"<html>Welcome</html>"


def examine(
    url: str, options: Mapping[str, object] | None = None, config: TransferConfig = IMPATIENT
) -> dict[str, Finding]:
    found = list(check_up(url, options, config=config))
    assert sorted(one.check for one in found) == sorted(CHECKS)  # each made once, or told why not
    assert all(one.text for one in found)
    assert all(one.advice for one in found if one.status in ("failed", "warning")), found
    return {one.check: one for one in found}


def seen_first(spec: StoreSpec) -> dict[str, Finding]:
    """The checks that come before any of objects."""
    objects = ObjectChecks(spec)
    found = findings(spec, objects, table(spec, objects)[: CHECKS.index("put")])
    return {one.check: one for one in found}


def pasted_rules(advice: str) -> dict[str, Any]:
    """The rules in the command that adds one."""
    rules = next(
        argument
        for command in re.findall("`(.*?)`", advice)
        for argument in shlex.split(command)
        if argument.startswith("{")
    )
    parsed: dict[str, Any] = json.loads(rules)
    return parsed


def names(found: Mapping[str, Finding], status: str) -> set[str]:
    return {name for name, one in found.items() if one.status == status}


def test_a_good_store_passes_and_is_left_as_it_was(bucket):
    before = Before(bucket)
    found = examine(bucket.url, bucket.storage_options)
    assert names(found, "failed") | names(found, "not made") == set()
    assert names(found, "warning") <= {"lifecycle", "unfinished uploads"}
    assert found["conditional put"].details == {
        "conditional_create": True,
        "conditional_update": True,
    }
    before.check()


@pytest.mark.backends("moto")
def test_old_unfinished_uploads_are_told_with_their_bytes(bucket):
    """moto dates every upload years back."""
    before = Before(bucket)
    found = examine(bucket.url, bucket.storage_options)
    assert found["unfinished uploads"].status == "warning"
    assert found["unfinished uploads"].details["old_bytes"] == len(PART)
    assert "sweep" in found["unfinished uploads"].advice
    before.check()


@pytest.mark.backends("moto")
def test_lifecycle_rules_are_seen(bucket, moto_server):
    moto_server.create_bucket("ruled")
    client = bucket.client()
    rule = {
        "ID": "x",
        "Status": "Enabled",
        "Filter": {"Prefix": "run/"},
        "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 3},
    }
    client.put_bucket_lifecycle_configuration(
        Bucket="ruled", LifecycleConfiguration={"Rules": [rule]}
    )
    covered = examine("s3://ruled/run", bucket.storage_options)
    assert (covered["lifecycle"].status, covered["lifecycle"].details) == ("ok", {"days": 3})
    other = examine("s3://ruled/other", bucket.storage_options)["lifecycle"]
    assert other.status == "warning"
    theirs, advised = pasted_rules(other.advice)["Rules"]
    assert theirs["ID"] == "x"  # the command replaces all rules
    assert advised["Filter"] == {"Prefix": "other/"}


@pytest.mark.backends("gcs", "azure")
def test_gcs_and_azure_pass(bucket):
    found = examine(bucket.url, bucket.storage_options)
    assert names(found, "failed") == set()
    assert {"credentials", "endpoint", "multipart", "delete"} <= names(found, "ok")
    assert bucket.keys() == []
    assert bucket.uploads() == []
    if bucket.kind == "azure":
        rules = ("lifecycle", "unfinished uploads")
        assert {found[rule].status for rule in rules} == {"not applicable"}
        assert "a week" in found["lifecycle"].text
    else:
        assert pasted_rules(found["lifecycle"].advice)["rule"][0]["condition"] == {
            "age": 2,
            "matchesPrefix": [bucket.prefix],
        }


def test_memory_and_folders_pass_and_are_left_as_they_were(tmp_path):
    assert names(examine("memory://doctor/x"), "failed") == set()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "theirs").write_bytes(b"theirs")
    for folder in ("run", "run/absent/deep", "other"):
        found = examine(f"file://{tmp_path}/{folder}")
        assert names(found, "failed") == set()
        local = {
            *("endpoint", "credentials", "bucket", "abort"),
            *("lifecycle", "unfinished uploads"),
        }
        assert names(found, "not applicable") == local
        assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == [
            "run",
            "run/theirs",
        ]


WITHOUT_ROOT = """
import importlib.metadata, json, os, sys
from dcp_objstore.doctor import check_up
import dcp_objstore.stores.local
importlib.metadata.version("obstore")  # imports what lies in root's home, if this Python does
if os.getuid() == 0:  # no permission stops root
    os.setuid(65534)
found = {one.check: (one.status, one.text, one.advice) for one in check_up(sys.argv[1])}
assert "torch" not in sys.modules
print(json.dumps(found))
"""


def test_a_folder_that_may_not_be_written_is_told():
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "theirs").write_bytes(b"theirs")
        Path(folder).chmod(0o555)
        done = subprocess.run(
            [sys.executable, "-c", WITHOUT_ROOT, f"file://{folder}"],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        Path(folder).chmod(0o755)
        found = json.loads(done.stdout)
        assert found["put"][0] == "failed"
        assert folder in found["put"][2]
        assert found["read"][0] == "not made"
        assert found["clean-up"][0] == "ok"
        assert [path.name for path in Path(folder).iterdir()] == ["theirs"]


@pytest.mark.backends("seaweed")
def test_a_reader_is_told_which_right_is_missing(bucket):
    before = Before(bucket)
    found = examine(bucket.url, {**bucket.storage_options, **READ_ONLY})
    assert names(found, "failed") == {"put", "multipart"}
    assert {"list", "clean-up"} <= names(found, "ok")
    assert f"s3:PutObject on arn:aws:s3:::{BUCKET}/" in found["put"].advice
    assert found["put"].details["error"] == "PermissionDeniedError"
    before.check()


@pytest.mark.backends("seaweed")
def test_a_writer_is_told_which_right_is_missing(bucket):
    before = Before(bucket)
    found = examine(bucket.url, {**bucket.storage_options, **WRITE_ONLY})
    assert names(found, "failed") == {"list", "read", "conditional put"}
    assert found["list"].advice == f"allow s3:ListBucket on arn:aws:s3:::{BUCKET}"
    assert "s3:GetObject" in found["read"].advice
    assert names(found, "not made") >= {"lifecycle", "unfinished uploads"}
    before.check()


@pytest.mark.backends("seaweed")
def test_what_may_not_be_deleted_or_aborted_is_told(bucket):
    with TamperingProxy(bucket.storage_options) as proxy:
        proxy.refuse(lambda asked: asked.method == "DELETE")
        found = examine(bucket.url, proxy.storage_options)
    assert names(found, "failed") == {"abort", "delete", "clean-up"}
    assert "s3:DeleteObject" in found["delete"].advice
    assert "s3:AbortMultipartUpload" in found["abort"].advice
    where = found["clean-up"].details["url"]
    assert str(where) in found["clean-up"].advice
    assert all(str(where).endswith(key.partition("/")[0]) for key in bucket.keys())  # noqa: SIM118


@pytest.mark.backends("seaweed")
def test_wrong_credentials_bucket_and_endpoint_are_told_apart(bucket):
    options = bucket.storage_options
    wrong = examine(bucket.url, {**options, "secret": "wrong" * 5})
    assert names(wrong, "failed") == {"credentials"}
    absent = examine("s3://absent/run", options)
    assert names(absent, "failed") == {"bucket"}
    assert "'absent'" in absent["bucket"].advice
    for endpoint in ("http://127.0.0.1:1", "http://absent.invalid"):
        nowhere = examine(bucket.url, {**options, "endpoint_url": endpoint})
        assert names(nowhere, "failed") == {"endpoint"}
        assert nowhere["put"].text == "the check of the endpoint has failed"
    tls = str(options["endpoint_url"]).replace("http://", "https://")
    assert names(examine(bucket.url, {**options, "endpoint_url": tls}), "failed") == {"endpoint"}


def test_without_credentials_nothing_else_is_tried(monkeypatch):
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    found = examine("s3://bucket/run")
    assert names(found, "failed") == {"credentials"}
    assert "AWS_ACCESS_KEY_ID" in found["credentials"].text


def test_a_clock_for_which_the_store_refuses_requests_is_named():
    body = b"<Error><Code>RequestTimeTooSkewed</Code><Message>too large</Message></Error>"
    with ScriptedServer(lambda *_: (403, {"Content-Type": "application/xml"}, body)) as server:
        options = {**WRITE_ONLY, "endpoint_url": server.endpoint_url}
        found = seen_first(StoreSpec("s3://bucket/run", options, IMPATIENT))["credentials"]
    assert found.status == "failed"
    assert "RequestTimeTooSkewed" in found.text
    assert "clock" in found.advice


@pytest.mark.backends("seaweed")
def test_an_unsigned_body_that_is_refused_is_told(bucket):
    def unsigned(asked: Asked) -> bool:
        unsigned = asked.headers.get("x-amz-content-sha256") == "UNSIGNED-PAYLOAD"
        return unsigned and asked.method == "PUT"

    with TamperingProxy(bucket.storage_options) as proxy:
        proxy.refuse(unsigned)
        found = examine(bucket.url, proxy.storage_options)
        assert "'sign_payload': True" in found["put"].advice
        signing = examine(bucket.url, {**proxy.storage_options, "sign_payload": True})
    assert names(signing, "failed") == set()
    assert bucket.keys() == []


# Any web server with a page of its own for what it has not.
STORES = {
    "s3": {"key": "key-of-nobody", "secret": "secret-of-nobody"},
    "gs": {"anon": True},
    "az": {"account_name": "account", "account_key": "c2VjcmV0LW9mLW5vYm9keQ=="},
}


@pytest.mark.parametrize(("scheme", "transport"), [*((one, "native") for one in STORES), *CARRIERS])
@pytest.mark.parametrize("status", [200, 404])
def test_no_web_server_passes_for_a_store(status, scheme, transport):
    if transport != "native":
        pytest.importorskip(CARRIERS[scheme, transport])
    with ScriptedServer(lambda *_: (status, {}, PAGE)) as web:
        options = {**STORES[scheme], "endpoint_url": web.endpoint_url, "transport": transport}
        spec = StoreSpec(f"{scheme}://absent-bucket/run", options, IMPATIENT)
        found = seen_first(spec)
    assert "failed" in {found["endpoint"].status, found["bucket"].status}
    assert found["bucket"].status in ("not made", "failed")


@pytest.mark.backends("seaweed", "moto")
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_store_is_known_over_each_transport(bucket, transport):
    if transport != "native":
        pytest.importorskip(CARRIERS["s3", transport])
    options = {**bucket.storage_options, "transport": transport}
    for url, wrong in ((bucket.url, set()), ("s3://no-such-bucket/run", {"bucket"})):
        found = seen_first(StoreSpec(url, options))
        assert names(found, "warning") == set()
        assert names(found, "failed") == wrong


@pytest.mark.backends("seaweed")
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_server_that_the_environment_names_is_the_one_told(bucket, transport, monkeypatch):
    if transport != "native":
        pytest.importorskip(CARRIERS["s3", transport])
    for name, value in environment(bucket.storage_options).items():
        monkeypatch.setenv(name, value)
    spec = StoreSpec(bucket.url, {"transport": transport}, IMPATIENT)
    found = seen_first(spec)
    assert found["endpoint"].details["endpoint_url"] == bucket.storage_options["endpoint_url"]
    assert found["bucket"].status == "ok"


@pytest.mark.parametrize(
    ("name", "value"),
    [("AWS_ENDPOINT_URL", "ftp://host"), ("AWS_CHECKSUM_ALGORITHM", "md5"), ("verify", "/nowhere")],
)
def test_a_wrong_setting_is_not_taken_for_missing_credentials(name, value, monkeypatch):
    options = dict(STORES["s3"])
    if name == "verify":
        options["verify"] = value
    else:
        monkeypatch.setenv(name, value)
    found = seen_first(StoreSpec("s3://bucket/run", options, IMPATIENT))
    assert found["endpoint"].status == "failed"
    assert names(found, "failed") == {"endpoint"}
    assert found["bucket"].status == "not made"


@pytest.mark.backends("seaweed")
def test_a_filesystem_object_has_its_own_credentials_and_server(bucket):
    s3fs = pytest.importorskip("s3fs")
    fs = s3fs.S3FileSystem(**bucket.storage_options, skip_instance_cache=True)
    spec = StoreSpec(bucket.url, {"fs": fs}, IMPATIENT)
    found = seen_first(spec)
    assert {one.status for one in found.values()} == {"ok"}
    assert found["endpoint"].details["endpoint_url"] == bucket.storage_options["endpoint_url"]


def test_a_transport_that_is_not_installed_is_a_finding(monkeypatch):
    registry = pytest.importorskip("fsspec.registry")
    monkeypatch.delitem(registry._registry, "s3", raising=False)
    monkeypatch.setitem(sys.modules, "s3fs", None)
    options = {**STORES["s3"], "endpoint_url": "http://127.0.0.1:9", "transport": "fsspec"}
    found = seen_first(StoreSpec("s3://not-installed/run", options, IMPATIENT))
    assert "s3fs" in found["endpoint"].text
    assert found["endpoint"].status == "failed"
    assert found["bucket"].status == "not made"


@pytest.mark.backends("moto")
def test_commands_can_be_pasted_whatever_the_prefix_holds(bucket):
    """moto dates every upload years back."""
    url = f"{bucket.url}/it's a run #1?"
    begin_upload(bucket, "it's a run #1?/step-1/theirs")
    found = examine(url, bucket.storage_options)
    (command,) = re.findall("`(.*?)`", found["unfinished uploads"].advice)
    assert shlex.split(command)[:3] == ["dcp-objstore", "sweep", url]
    (rule,) = pasted_rules(found["lifecycle"].advice)["Rules"]
    assert rule["Filter"] == {"Prefix": f"{bucket.prefix}it's a run #1?/"}


def test_a_folder_that_cannot_be_made_is_told(tmp_path):
    """Nobody can make one below /proc: the system says that there is no such place."""
    (tmp_path / "taken").write_bytes(b"theirs")
    folders = [f"{tmp_path}/taken/run"]
    if sys.platform == "linux":
        folders.append("/proc/absent/run")
    for folder in folders:
        found = examine(f"file://{folder}")
        assert found["put"].status == "failed"
        assert folder in found["put"].advice
        assert "server" not in found["put"].advice
    assert (tmp_path / "taken").read_bytes() == b"theirs"


def test_the_right_region_is_told():
    moved = (301, {"x-amz-bucket-region": "eu-west-3"}, b"")  # as AWS answers
    with ScriptedServer(lambda *_: moved) as elsewhere:
        options = {**WRITE_ONLY, "endpoint_url": elsewhere.endpoint_url}
        found = examine("s3://bucket/run", options)
    assert names(found, "failed") == {"bucket"}
    assert "AWS_REGION=eu-west-3" in found["bucket"].advice
    assert "'region': 'eu-west-3'" in found["bucket"].advice
    assert found["bucket"].text == "it is in eu-west-3, but requests go to us-east-1"
    assert found["bucket"].details == {"region": "eu-west-3"}


@pytest.mark.backends("moto")
def test_the_access_key_is_told_and_no_more_of_it_than_needed(bucket):
    options = {**bucket.storage_options, "key": "AKIAIOSFODNN7EXAMPLE"}
    found = examine(bucket.url, options)["credentials"]
    assert found.details["access_key"] == "AKIA…MPLE"
    assert "IOSFODNN7" not in repr(found)
    assert found.details["source"] == "storage_options"


def test_a_wrong_url_or_option_is_an_error_before_anything_is_asked():
    with pytest.raises(InvalidUrlError):
        next(check_up("bucket/run"))
    with pytest.raises(ConfigError):
        next(check_up("s3://bucket/run", {"endpoint": "x"}))


@pytest.mark.backends("seaweed")
def test_the_table_fits_80_columns_without_colours_and_the_status_tells(bucket):
    url, options = f"s3://{BUCKET}/table", bucket.storage_options
    good = run_here("doctor", url, **environment(bucket.storage_options))
    assert (good.returncode, good.stderr) == (0, "")
    assert "\x1b" not in good.stdout
    argument = "{"  # of a command, which stays whole
    assert max(len(line) for line in good.stdout.splitlines() if argument not in line) <= 80
    assert "fit to hold checkpoints" in good.stdout
    reader = environment({**bucket.storage_options, **READ_ONLY})
    bad = run_here("doctor", url, **reader)
    assert bad.returncode == 1
    assert "FAILED: put, multipart" in bad.stdout
    told = run_here("doctor", url, "--json", **reader)
    assert told.returncode == 1
    answer = json.loads(told.stdout)
    assert (answer["url"], answer["ok"]) == (url, False)
    assert sorted(one["check"] for one in answer["checks"]) == sorted(CHECKS)
    assert run_here("doctor", "s3:/bucket").returncode == 2
    other = run_here("--transport", "boto3", "doctor", url, **environment(options))
    assert other.returncode == 0, other.stdout
    assert "fit to hold checkpoints" in other.stdout
    assert Bucket("seaweed", url, options, options).keys() == []


@pytest.mark.usefixtures("usual_signals")
@pytest.mark.backends("seaweed")
def test_nothing_stays_after_ctrl_c(bucket):
    """In the midst of an upload in parts, and with a PUT on its way."""
    before = Before(bucket)
    for name in ("multipart", "put"):
        with NetworkProxy(bucket.storage_options) as proxy:
            held = proxy.hold(lambda asked, name=name: asked.name == name and asked.size_bytes > 0)

            def interrupt(held: Hold = held) -> None:
                held.wait()
                os.kill(os.getpid(), signal.SIGINT)
                held.release()

            thread = threading.Thread(target=interrupt)
            thread.start()
            with pytest.raises(KeyboardInterrupt):
                list(check_up(bucket.url, proxy.storage_options))
            thread.join()
        before.check()


def test_a_stream_that_is_closed_makes_no_further_check_and_nothing_stays(tmp_path, monkeypatch):
    stops, made = list[Stop](), list[str]()

    class SeenStop(Stop):
        def __init__(self) -> None:
            super().__init__()
            stops.append(self)

    def wait(objects: ObjectChecks) -> Verdict:
        made.append("list")
        assert stops[0].wait(60)
        return ok("listed")

    monkeypatch.setattr(runner, "Stop", SeenStop)
    monkeypatch.setattr(ObjectChecks, "listing", wait)
    monkeypatch.setattr(ObjectChecks, "read", lambda _: made.append("read"))
    stream = check_up(f"file://{tmp_path}/run")
    for finding in stream:
        if finding.check == "put":
            break
    stream.close()
    assert set(made) <= {"list"}
    assert list(tmp_path.rglob("*")) == []


def test_an_error_that_no_check_expects_ends_the_stream(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "table", Mock(side_effect=ZeroDivisionError))
    with pytest.raises(ZeroDivisionError):
        list(check_up(f"file://{tmp_path}/run"))


def test_a_server_that_never_answers_is_given_up():
    import socket

    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        quick = replace(IMPATIENT, request_timeout_seconds=1)
        found = examine("s3://bucket/run", {**WRITE_ONLY, "endpoint_url": endpoint}, config=quick)
    assert names(found, "failed") == {"endpoint"}
