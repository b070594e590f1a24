"""Where credentials come from, in order, on a server that checks them."""

from __future__ import annotations

import configparser
import json
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from google.auth import compute_engine
from google.auth.credentials import AnonymousCredentials
from obstore.exceptions import GenericError

import dcp_objstore as dos
from dcp_objstore.errors import ConfigError, CredentialsError
from dcp_objstore.stores import StoreSpec, open_store
from dcp_objstore.stores.credentials import (
    ANONYMOUS,
    Credentials,
    Renewing,
    asked_by_clients,
    class_and_line,
    is_installed,
    metadata_answers,
)
from dcp_objstore.stores.diagnosis import shortened
from dcp_objstore.stores.gcs.credentials import find_gcs_credentials
from dcp_objstore.stores.gcs.options import GcsOptions
from dcp_objstore.stores.obstore.clients import Clients
from dcp_objstore.stores.obstore.direct import SignedGet
from dcp_objstore.stores.obstore.errors import RefusedError
from dcp_objstore.stores.obstore.factory import ClientFactory
from dcp_objstore.stores.options import parse
from dcp_objstore.stores.s3.credentials import find_s3_credentials, of_botocore
from dcp_objstore.stores.s3.options import S3Options
from dcp_objstore.stores.urls import parse_url
from tests.support.proxy import Asked
from tests.support.scripted import Answer, RawServer, ScriptedServer, fault_answer
from tests.support.servers import Bucket, MotoServer
from tests.support.states import fill, tensor_state, wrong_keys
from tests.support.tampering import TamperingProxy

both = pytest.mark.parametrize("transport", ["native", "boto3"])
both_ways = pytest.mark.parametrize("has_boto3", [True, False], indirect=True)
pytestmark = [pytest.mark.usefixtures("bare_environment"), pytest.mark.backends("seaweed")]


@pytest.fixture(autouse=True)
def has_boto3(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether boto3 is installed; by default it is."""
    if not getattr(request, "param", True):
        monkeypatch.setitem(sys.modules, "boto3", None)


def write_profile(folder: Path, name: str, bucket: Bucket, secret: object = None) -> None:
    options = bucket.storage_options
    credentials = (
        f"[{name}]\naws_access_key_id = {options['key']}\n"
        f"aws_secret_access_key = {secret or options['secret']}\n"
    )
    (folder / "credentials").write_text(credentials)
    section = name if name == "default" else f"profile {name}"
    endpoint = f"[{section}]\nregion = eu-west-3\nendpoint_url = {options['endpoint_url']}\n"
    (folder / "config").write_text(endpoint)


def works(bucket: Bucket, options: dict[str, object] | None = None, **more: object) -> bool:
    open_store(bucket.url, {**(options or {}), **more}).put("k", b"x")
    # Not through boto3, which remembers the environment of its first session.
    return open_store(bucket.url, bucket.storage_options).head("k").size_bytes == 1


@both
def test_no_credentials_at_all(bucket, transport):
    with pytest.raises(CredentialsError, match="AWS_ACCESS_KEY_ID"):
        open_store(bucket.url, {"transport": transport})


def test_a_metadata_service_that_is_not_there(bucket, monkeypatch):
    monkeypatch.delenv("AWS_EC2_METADATA_DISABLED")
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(CredentialsError, match="no credentials"):
        open_store(bucket.url)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(CredentialsError, match="AWS_EC2_METADATA_SERVICE_ENDPOINT"):
        open_store(bucket.url)


@both
def test_a_profile_by_option_by_variable_and_by_default(
    bucket, bare_environment, monkeypatch, transport
):
    write_profile(bare_environment, "train", bucket)
    assert works(bucket, profile="train", transport=transport)
    with monkeypatch.context() as patch:
        patch.setenv("AWS_PROFILE", "train")
        assert works(bucket, transport=transport)
    write_profile(bare_environment, "default", bucket)
    assert works(bucket, transport=transport)


@both
def test_keys_of_the_environment_come_before_aws_profile_and_options_before_both(
    bucket, bare_environment, monkeypatch, transport
):
    write_profile(bare_environment, "train", bucket, secret="wrong")
    monkeypatch.setenv("AWS_PROFILE", "train")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", str(bucket.storage_options["key"]))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", str(bucket.storage_options["secret"]))
    endpoint_url = bucket.storage_options["endpoint_url"]
    assert works(bucket, endpoint_url=endpoint_url, transport=transport)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    assert works(bucket, {**bucket.storage_options}, transport=transport)


@both
def test_a_profile_that_does_not_exist(bucket, monkeypatch, transport):
    with pytest.raises(CredentialsError, match="missing-profile"):
        open_store(bucket.url, {"profile": "missing-profile", "transport": transport})
    monkeypatch.setenv("AWS_PROFILE", "missing-profile")
    with pytest.raises(CredentialsError, match="missing-profile"):
        open_store(bucket.url, {"transport": transport})


@pytest.mark.parametrize("how", ["option", "variable"])
def test_a_profile_without_boto3_says_what_to_install(bucket, bare_environment, monkeypatch, how):
    write_profile(bare_environment, "train", bucket)
    monkeypatch.setitem(sys.modules, "boto3", None)
    options: dict[str, object] | None = {"profile": "train"} if how == "option" else None
    if how == "variable":
        monkeypatch.setenv("AWS_PROFILE", "train")
    with pytest.raises(CredentialsError) as caught:
        open_store(bucket.url, options)
    assert "pip install 'dcp-objstore[s3]'" in str(caught.value)
    assert str(bucket.storage_options["secret"]) not in str(caught.value)


def test_keys_work_without_boto3(bucket, monkeypatch):
    monkeypatch.setitem(sys.modules, "boto3", None)
    assert works(bucket, dict(bucket.storage_options))


@pytest.fixture
def metadata_service(bucket: Bucket) -> Iterator[str]:
    """Answers as an EC2 instance's metadata service (IMDSv2) does."""
    answer = {
        "AccessKeyId": bucket.storage_options["key"],
        "SecretAccessKey": bucket.storage_options["secret"],
        "Token": "",
        "Expiration": "2099-01-01T00:00:00Z",
        "Code": "Success",
        "LastUpdated": "2026-01-01T00:00:00Z",
        "Type": "AWS-HMAC",
    }
    base = "/latest/meta-data/iam/security-credentials/"

    known = {"/latest/api/token": "t", base: "role", base + "role": json.dumps(answer)}
    with ScriptedServer() as server:
        server.answer = lambda _, target, __: (
            200 if target in known else 404,
            {},
            known.get(target, "").encode(),
        )
        yield server.endpoint_url


@both_ways
def test_the_metadata_service_of_an_instance_is_used(bucket, metadata_service, monkeypatch):
    monkeypatch.delenv("AWS_EC2_METADATA_DISABLED")
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", metadata_service)
    assert works(bucket, {"endpoint_url": bucket.storage_options["endpoint_url"]})


@both_ways
@pytest.mark.parametrize(
    "variable", ["AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"]
)
def test_a_token_file_that_is_not_there_is_named_without_a_request(monkeypatch, variable):
    monkeypatch.setenv(variable, "/nowhere/token")
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::1:role/x")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    with ScriptedServer(lambda *_: None) as server:
        with pytest.raises(CredentialsError, match="/nowhere/token"):
            open_store("s3://bucket/x", {"endpoint_url": server.endpoint_url}).head("k")
        assert server.requests == []


@pytest.mark.parametrize(
    "variable",
    [
        "AWS_CONTAINER_AUTHORIZATION_TOKEN",
        "AWS_CONTAINER_CREDENTIALS_FULL_URI",
        "AWS_EC2_METADATA_SERVICE_ENDPOINT_MODE",
        "AWS_ENDPOINT_URL_STS",
        "AWS_USE_FIPS_ENDPOINT",
        "AWS_USE_DUALSTACK_ENDPOINT",
    ],
)
def test_a_variable_that_takes_boto3_is_refused_by_name_without_it(monkeypatch, variable):
    monkeypatch.setitem(sys.modules, "boto3", None)
    monkeypatch.setitem(sys.modules, "botocore.session", None)
    monkeypatch.setenv(variable, "true")
    if not variable.endswith("FULL_URI"):  # with which obstore takes the token of a file
        monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", __file__)
    of_endpoint = "_USE_" in variable
    options: dict[str, object] | None = {"key": "a", "secret": "b"} if of_endpoint else None
    with pytest.raises((ConfigError, CredentialsError), match=f"(?s){variable}.*pip install"):
        open_store("s3://bucket/x", options)


@pytest.mark.parametrize("has_boto3", [False], indirect=True)
def test_without_boto3_obstore_is_left_what_it_finds_by_itself(monkeypatch):
    agent = "AWS_CONTAINER_CREDENTIALS_FULL_URI"
    for more, name, value in (
        ({}, "AWS_WEB_IDENTITY_TOKEN_FILE", __file__),
        ({}, "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "/x"),
        ({"AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE": __file__}, agent, "http://x"),
    ):
        with monkeypatch.context() as patch:
            for variable, text in {**more, name: value}.items():
                patch.setenv(variable, text)
            found = find_s3_credentials(S3Options())
        assert found.source == f"{name} in the environment"
        assert found.renew is asked_by_clients
        assert found.provider is None


@pytest.mark.parametrize("has_boto3", [False], indirect=True)
@pytest.mark.parametrize("endpoint_url", [None, "http://metadata"])
def test_without_boto3_the_metadata_service_is_asked_for_a_token(monkeypatch, endpoint_url):
    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr(
        "dcp_objstore.stores.s3.credentials.metadata_answers",
        lambda *request: asked.append(request) or True,
    )
    monkeypatch.delenv("AWS_EC2_METADATA_DISABLED")
    if endpoint_url is not None:
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", endpoint_url)
    server = endpoint_url or "http://169.254.169.254"
    assert find_s3_credentials(S3Options()) == Credentials(
        "instance metadata", config={"metadata_endpoint": server}, renew=asked_by_clients
    )
    headers = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
    assert asked == [(server, "PUT", "/latest/api/token", headers)]


@pytest.mark.parametrize("has_boto3", [False], indirect=True)
@pytest.mark.parametrize("file", ["credentials", "config"])
def test_without_boto3_no_file_with_credentials_is_passed_over(bare_environment, file):
    place = bare_environment / file
    for name in (
        "aws_access_key_id",
        "credential_process",
        "credential_source",
        "login_session",
        "role_arn",
        "sso_account_id",
        "sso_session",
        "sso_start_url",
        "web_identity_token_file",
    ):
        place.write_bytes(f"[profile x]\nregion = \xff\n\t{name} = value\n".encode("latin-1"))
        with pytest.raises(CredentialsError, match=f"{file} of the .* pip install"):
            find_s3_credentials(S3Options())
    place.write_text("[profile x]\nregion = r\n# role_arn = value\nno_role_arn = value\n")
    with pytest.raises(CredentialsError, match="no credentials for S3"):
        find_s3_credentials(S3Options())


@pytest.mark.parametrize(
    ("settings", "endpoint_url", "style"),
    [
        ("", None, None),
        ("endpoint_url = http://general", "http://general", None),
        ("endpoint_url = http://general\nservices = local", "http://of.s3", None),
        ("endpoint_url = http://general\nservices = others", "http://general", None),
        ("endpoint_url = http://general\nservices = missing", "http://general", None),
        ("s3 =\n  addressing_style = path", None, "path"),
        ("s3 = text", None, None),
    ],
)
def test_a_profile_may_name_the_endpoint_of_s3_by_its_services(
    bare_environment, settings, endpoint_url, style
):
    services = "[services local]\ns3 =\n  endpoint_url = http://of.s3\n"
    services += "[services others]\nsts =\n  endpoint_url = http://of.sts\n"
    keys = "aws_access_key_id = a\naws_secret_access_key = b\nregion = r"
    for section, options, source in (
        ("profile p", S3Options(profile="p"), "profile 'p'"),
        ("default", S3Options(), "boto3 (config-file)"),
    ):
        (bare_environment / "config").write_text(f"[{section}]\n{keys}\n{settings}\n{services}")
        found = find_s3_credentials(options)
        assert (found.source, found.region) == (source, "r")
        assert (found.endpoint_url, found.addressing_style) == (endpoint_url, style)


@pytest.mark.parametrize("transport", ["native", "boto3", "fsspec"])
@pytest.mark.parametrize(
    "variable", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"]
)
def test_a_variable_with_a_line_break_is_an_error_that_names_it_and_not_its_value(
    bare_environment, monkeypatch, variable, transport
):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "hidden")
    monkeypatch.setenv(variable, "hidden\n")
    with pytest.raises(CredentialsError, match="line break") as caught:
        open_store("s3://bucket/x", {"transport": transport})
    assert variable.removeprefix("AWS_").lower().removeprefix("session_") in str(caught.value)
    assert "hidden" not in str(caught.value)
    keys = "aws_access_key_id = a\naws_secret_access_key = b\n"
    (bare_environment / "config").write_text(f"[profile p]\n{keys}")
    for named in ({"anon": True}, {"key": "a", "secret": "b"}, {"profile": "p"}):
        open_store("s3://bucket/x", {**named, "transport": transport})


def test_other_clouds_variables_with_a_line_break_are_refused_as_well(monkeypatch):
    for variable in ("GOOGLE_BEARER_TOKEN", "AZURE_STORAGE_ACCOUNT_KEY"):
        monkeypatch.setenv(variable, "hidden\n")
    for url, options in ("gs://bucket/x", None), ("az://container/x", {"account_name": "a"}):
        with pytest.raises(CredentialsError, match="line break"):
            open_store(url, options)


@pytest.mark.parametrize("transport", ["native", "boto3", "fsspec"])
def test_an_empty_session_token_is_none(monkeypatch, transport):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "")
    with ScriptedServer(lambda *_: Answer(200, {"ETag": '"e"'}, b"")) as server:
        options = {"endpoint_url": server.endpoint_url, "transport": transport}
        open_store("s3://bucket/x", options).put("k", b"x")
        sent = {name.lower() for _, _, headers in server.requests for name in headers}
    assert "authorization" in sent
    assert "x-amz-security-token" not in sent


# GCS
GCS_SCOPES = ["https://www.googleapis.com/auth/devstorage.read_write"]


def test_no_google_credentials():
    with pytest.raises(CredentialsError, match="gcloud auth application-default login"):
        open_store("gs://bucket/x")


def test_google_credentials_need_google_auth(bare_environment, monkeypatch):
    path = bare_environment / "key.json"
    path.write_text(json.dumps({"type": "service_account"}))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(path))
    monkeypatch.setitem(sys.modules, "google", None)
    with pytest.raises(CredentialsError) as caught:
        open_store("gs://bucket/x")
    assert "pip install 'dcp-objstore[gcs]'" in str(caught.value)


@pytest.mark.parametrize("content", ["", "{}"])
def test_broken_google_credentials(bare_environment, monkeypatch, content):
    path = bare_environment / "key.json"
    path.write_text(content)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(path))
    with pytest.raises(CredentialsError, match="application default credentials"):
        open_store("gs://bucket/x")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(path) + ".missing")
    with pytest.raises(CredentialsError, match="not found"):
        open_store("gs://bucket/x")
    for kind in (ValueError, KeyError, AttributeError, TypeError):

        def default(kind: type[Exception] = kind, **_: object) -> None:
            raise kind("SECRET")

        monkeypatch.setattr("google.auth.default", default)
        with pytest.raises(CredentialsError, match=f"cannot be used: {kind.__name__}") as caught:
            open_store("gs://bucket/x")
        assert "SECRET" not in f"{caught.value} {caught.value.__context__}"


def test_no_token_of_this_machine_goes_to_another_server_unless_it_is_asked_for(monkeypatch):
    of_machine = compute_engine.Credentials()  # type: ignore[no-untyped-call]
    asked = list[list[str]]()
    monkeypatch.setattr(
        "google.auth.default", lambda scopes: asked.append(scopes) or (of_machine, None)
    )
    for options in (GcsOptions(), GcsOptions(token="google_default")):
        found: Any = find_gcs_credentials(options).provider
        assert found.ask.args[0] is of_machine
    assert asked == [GCS_SCOPES] * 2
    with pytest.raises(CredentialsError, match="no token of this machine is sent"):
        find_gcs_credentials(GcsOptions(endpoint_url="http://elsewhere"))
    assert find_gcs_credentials(GcsOptions(token="cloud", endpoint_url="http://elsewhere")).provider
    of_user = AnonymousCredentials()  # type: ignore[no-untyped-call]
    monkeypatch.setattr("google.auth.default", lambda scopes: (of_user, None))
    assert find_gcs_credentials(GcsOptions(endpoint_url="http://elsewhere")).provider


@pytest.mark.filterwarnings("ignore:The load_credentials_from_dict method:DeprecationWarning")
def test_forms_of_a_google_token(bare_environment, monkeypatch):
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", "/somebody/elses.json")
    path = bare_environment / "key.json"
    key = {"refresh_token": "r", "client_id": "1", "client_secret": "secret"}
    path.write_text(json.dumps(key))
    assert find_gcs_credentials(GcsOptions(token="anon")).config == {"skip_signature": True}
    assert find_gcs_credentials(GcsOptions(anon=True)).config == {"skip_signature": True}
    for form in (str(path), key, json.dumps(key)):
        found: Any = find_gcs_credentials(GcsOptions(token=form)).provider
        assert found.ask.args[0].refresh_token == "r"
        assert found.ask.args[0].scopes == GCS_SCOPES
        assert "secret" not in repr(found)
    pool = {"type": "external_account", "audience": "a", "subject_token_type": "t"}
    pool |= {"token_url": "https://sts.googleapis.com/v1/token", "credential_source": {"file": "f"}}
    federated: Any = find_gcs_credentials(GcsOptions(token=pool)).provider
    assert federated.ask.args[0].scopes == GCS_SCOPES
    machine: Any = find_gcs_credentials(GcsOptions(token="cloud")).provider
    assert "compute_engine" in type(machine.ask.args[0]).__module__
    assert machine.ask.args[0].scopes == GCS_SCOPES
    provider = find_gcs_credentials(GcsOptions(token="ya29.x")).provider
    assert provider is not None
    assert provider() == {"token": "ya29.x", "expires_at": None}
    assert "ya29" not in repr(find_gcs_credentials(GcsOptions(token="ya29.x")))
    for odd in ("~nobody-of-that-name/key", "x" * 5000):
        assert find_gcs_credentials(GcsOptions(token=odd)).source == "storage_options"
    with pytest.raises(CredentialsError, match="missing"):
        find_gcs_credentials(GcsOptions(token="/nowhere/key.json"))
    with pytest.raises(ConfigError, match="token"):
        find_gcs_credentials(GcsOptions(token=7))


# Tokens of what obstore reads itself come by google-auth


@pytest.fixture
def service_key(gcs_server: MotoServer) -> dict[str, str]:
    """Of a service account whose tokens the GCS door hands out."""
    pytest.importorskip("cryptography")
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import rsa

    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return {
        "type": "service_account",
        "client_email": "somebody@example.iam.gserviceaccount.com",
        "private_key": private.decode(),
        "private_key_id": "1",
        "token_uri": f"{gcs_server.gcs_endpoint_url}/o/token?lifetime=3600",
    }


def test_a_service_account_gives_tokens_wherever_its_key_is(
    bare_environment, service_key, monkeypatch
):
    text = json.dumps(service_key)
    place = bare_environment / "key.json"
    place.write_text(text)
    tokens = []

    def ask(**options: object) -> None:
        found = find_gcs_credentials(parse(GcsOptions, options))
        assert found.account_name == service_key["client_email"]
        assert "gcloud auth application-default login" in found.advice
        provider = found.provider
        assert provider is not None
        tokens.append(provider()["token"])
        assert provider()["token"] == tokens[-1]  # asked for once
        assert provider.ask.args[0].scopes == GCS_SCOPES

    of_google = {name: value for name, value in service_key.items() if name != "token_uri"}
    assert find_gcs_credentials(GcsOptions(token=of_google)).provider
    ask(token=service_key)
    ask(token=str(place))
    for name, value in (
        ("GOOGLE_SERVICE_ACCOUNT", str(place)),
        ("GOOGLE_SERVICE_ACCOUNT_PATH", str(place)),
        ("GOOGLE_SERVICE_ACCOUNT_KEY", text),
        ("GOOGLE_APPLICATION_CREDENTIALS", str(place)),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            ask()
    (bare_environment / "application_default_credentials.json").write_text(text)
    ask()
    assert len(set(tokens)) == 7
    assert all(token.startswith("ya29.handed-out-") for token in tokens)
    monkeypatch.setenv("GOOGLE_BEARER_TOKEN", "ya29.given")
    given = find_gcs_credentials(GcsOptions()).provider
    assert given is not None
    assert given()["token"] == "ya29.given"


def test_shared_files_that_cannot_be_read_are_an_error_that_names_them(
    bucket, bare_environment, monkeypatch
):
    """Where boto3, which would read them, is not installed."""
    (bare_environment / "credentials").write_text("[default]\n")
    read_text = Path.read_text

    def refused(path: Path, *args: Any, **settings: Any) -> str:
        if path.parent == bare_environment:
            raise PermissionError(13, "Permission denied")
        return read_text(path, *args, **settings)

    monkeypatch.setattr(Path, "read_text", refused)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(CredentialsError, match="credentials of the shared AWS files cannot be"):
        open_store(bucket.url, {"endpoint_url": bucket.storage_options["endpoint_url"]})


MIB = 1024 * 1024
CONFIG = dos.TransferConfig(
    transport="boto3", part_size_bytes=5 * MIB, request_size_bytes=4 * MIB, max_retries=2
)
SHAPES = {"big": (3001, 4096), "small": (3, 3)}  # 12 MiB of bytes
USES = 5


class ExpiringKeys(TamperingProxy):
    """Accepts each key for `USES` requests: counted, so that one expires however fast a save is.

    Attributes:
        used: how often each access key id was accepted.
        expired: requests with a key that had expired.
    """

    def __init__(self, bucket: Bucket) -> None:
        super().__init__(bucket.storage_options)
        self.used: Counter[str] = Counter()
        self.expired = 0
        self.refuse(self._is_expired, fault_answer("s3", "expired"))

    def _is_expired(self, asked: Asked) -> bool:
        with self._lock:
            fresh = bool(asked.access_key) and self.used[asked.access_key] < USES
            self.used[asked.access_key] += fresh
            self.expired += not fresh
        return not fresh


def short_lived_profile(folder: Path, endpoint_url: str) -> dict[str, str]:
    """The environment of a profile whose `credential_process` gives other keys at every call."""
    script = folder / "keys"
    script.write_text(
        f"#!{sys.executable} -SE\n"  # starts in a third of the time
        "import time\n"
        # botocore renews what ends within 10 minutes, and refuses what has ended when it comes
        "until = time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime(time.time() + 60))\n"
        'print(\'{"Version": 1, "AccessKeyId": "ASIA%d", "SecretAccessKey": "s",\'\n'
        '      \' "SessionToken": "t", "Expiration": "%s"}\' % (time.time_ns(), until))\n'
    )
    script.chmod(0o700)
    (folder / "config").write_text(
        f"[profile short]\ncredential_process = {script}\nendpoint_url = {endpoint_url}\n"
    )
    return {"AWS_PROFILE": "short"}


@pytest.mark.backends("moto")
def test_keys_that_expire_in_the_middle_of_a_save_are_renewed(bucket, monkeypatch, tmp_path):
    state = tensor_state("plain", SHAPES, torch.uint8)
    fill(state)
    back = tensor_state("plain", SHAPES, torch.uint8)
    with ExpiringKeys(bucket) as server:
        for name, value in short_lived_profile(tmp_path, server.endpoint_url).items():
            monkeypatch.setenv(name, value)
        dos.save(dict(state), bucket.at("step-1"), config=CONFIG, progress=False)
        saved_with = len(server.used)
        dos.load(back, bucket.at("step-1"), config=CONFIG, progress=False)
    assert wrong_keys(back) == []
    assert saved_with >= 3, "the save was too short to show anything"
    assert len(server.used) > saved_with
    assert server.expired == 0
    assert bucket.uploads() == []


def test_of_requests_that_are_refused_together_one_renews_what_all_of_them_use():
    renewed: list[int] = []
    credentials = Credentials("a place", renew=lambda: renewed.append(len(uses)))
    factory = ClientFactory(lambda *_: object(), sign=lambda _, key: SignedGet(key))
    clients = Clients(
        parse_url("s3://bucket"), factory, dos.TransferConfig(), credentials=credentials
    )
    first, lane, uses = clients.get("read"), clients.lane, list[object]()
    expired = GenericError("status code: 400 <Error><Code>ExpiredToken</Code></Error>")

    def refused_at_first() -> str:
        uses.append(clients.get("read"))
        if len(uses) == 1:
            clients.renew(expired)  # that of another request, meanwhile
            raise expired
        return "answer"

    assert clients.with_fresh_credentials(refused_at_first) == "answer"
    assert renewed == [1]
    assert uses[1] is not first
    assert clients.lane is not lane


def test_while_credentials_are_renewed_no_client_is_made_and_no_other_renews():
    made, renewed, meanwhile = list[int](), list[int](), list[tuple[int, int]]()
    expired = GenericError("status code: 400 <Error><Code>ExpiredToken</Code></Error>")

    def renew() -> None:
        renewed.append(1)
        for thread in others:
            thread.start()
            thread.join(0.05)
        meanwhile.append((len(made), len(renewed)))

    factory = ClientFactory(lambda *_: made.append(1))
    clients = Clients(
        parse_url("s3://bucket"),
        factory,
        dos.TransferConfig(),
        credentials=Credentials("a place", renew=renew),
    )
    others = [
        threading.Thread(target=clients.get, args=("read",)),
        threading.Thread(target=clients.renew, args=(expired, 0)),
    ]
    clients.renew(expired)
    for thread in others:
        thread.join(30)
    assert meanwhile == [(0, 1)]
    assert (len(made), len(renewed)) == (1, 1)


def test_only_refused_credentials_in_whose_place_others_may_do_are_renewed():
    def clients_with(credentials: Credentials) -> Clients:
        factory = ClientFactory(lambda *_: object())
        return Clients(
            parse_url("s3://bucket"), factory, dos.TransferConfig(), credentials=credentials
        )

    renewed: list[int] = []
    given = Credentials("a place", advice="log in")
    renewing = Credentials("a place", renew=lambda: renewed.append(1), advice="log in")
    for credentials, codes in (
        (ANONYMOUS, ""),
        (given, "ExpiredToken AuthenticationFailed"),
        (renewing, "ExpiredToken AuthenticationFailed InvalidAccessKeyId"),
    ):
        for code in ("ExpiredToken", "AuthenticationFailed", "InvalidAccessKeyId", "AccessDenied"):
            refused = clients_with(credentials).were_refused(RefusedError("no", 403, code))
            assert refused is (code in codes.split()), (credentials, code)
    for code, says in (
        ("ExpiredToken", "the store no longer accepts the credentials"),
        ("AuthenticationFailed", "the store does not, or no longer, accept the credentials"),
    ):
        error = RefusedError("the reason", 403, code)

        def request(error=error) -> None:
            raise error

        for credentials, why in ((given, "cannot be refreshed"), (renewing, "refused as well")):
            with pytest.raises(CredentialsError, match=f"{says} .source: a place.*{why}") as told:
                clients_with(credentials).with_fresh_credentials(request)
            assert told.value.advice == "pass new ones, log in"
            assert "the reason" in str(told.value)
            assert told.value.__cause__ is error
    assert renewed == [1, 1]
    denied = RefusedError("no", 403, "AccessDenied")
    answers = iter([RefusedError("no", 400, "ExpiredToken"), denied, denied])

    def then_denied() -> None:
        raise next(answers)

    for count in (3, 3):  # renewed by the first of these alone
        with pytest.raises(RefusedError) as caught:
            clients_with(renewing).with_fresh_credentials(then_denied)
        assert caught.value is denied
        assert len(renewed) == count


@pytest.mark.parametrize(
    ("key", "shown"),
    [
        ("AKIA0123456789AB", "AKIA…89AB"),
        ("AKIA0123456789A", "AKIA…"),
        ("abc", "abc…"),
        ("", None),
        (None, None),
    ],
)
def test_of_an_access_key_only_its_ends_are_shown_and_of_a_short_one_its_beginning(key, shown):
    assert shortened(key) == shown


@pytest.mark.parametrize("process", ["/bin/false", "/nowhere/to/be/seen"])
def test_a_credential_process_that_fails_is_an_error_about_credentials(tmp_path, process):
    (tmp_path / "config").write_text(f"[profile broken]\ncredential_process = {process}\n")
    with pytest.raises(CredentialsError, match="profile 'broken'"):
        open_store("s3://bucket/x", {"profile": "broken"}, CONFIG)


def test_a_profile_without_credentials_is_not_passed_over(bare_environment):
    (bare_environment / "config").write_text("[profile p]\nregion = r\n")
    with pytest.raises(CredentialsError, match="profile 'p' holds no credentials"):
        open_store("s3://bucket/x", {"profile": "p"})


NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)


def test_botocore_is_asked_to_load_others_only_after_a_refusal():
    def keys(access_key: str | None, **more: object) -> Any:
        frozen = SimpleNamespace(access_key=access_key, secret_key="s", token="t")
        return SimpleNamespace(get_frozen_credentials=lambda: frozen, **more)

    loaded = iter([keys("first", _expiry_time=NOW), keys("second"), None, keys("third")])
    ask = of_botocore(lambda: next(loaded))
    first = {"access_key_id": "first", "secret_access_key": "s", "token": "t", "expires_at": NOW}
    assert ask(False) == ask(False) == first
    assert ask(True) == ask(False) == {**first, "access_key_id": "second", "expires_at": None}
    with pytest.raises(CredentialsError, match="none were found"):
        ask(True)
    assert ask(False)["access_key_id"] == "third"
    with pytest.raises(StopIteration):
        ask(True)
    with pytest.raises(StopIteration):  # and not the third, which were refused
        ask(False)
    with pytest.raises(CredentialsError, match=r"(?s)none were found.*aws sso login"):
        Renewing("a place", of_botocore(lambda: keys(None)))()


def test_credentials_are_asked_for_again_before_they_end():
    """Ten minutes before, or once two thirds of a shorter life are over."""
    for life, due_after in ((120, 110), (30, 20), (15, 10), (None, None)):
        now, asked = NOW, list[bool]()
        ends_at = None if life is None else NOW + timedelta(minutes=life)

        def ask(others: bool, asked=asked, ends_at=ends_at) -> dict[str, object]:
            asked.append(others)
            return {"token": len(asked), "expires_at": ends_at}

        provider = Renewing("a place", ask, now=lambda: now)  # noqa: B023  called at once
        due_at = None if due_after is None else NOW + timedelta(minutes=due_after)
        assert provider() == provider() == {"token": 1, "expires_at": due_at}
        assert provider.refresh_threshold == timedelta(0)  # obstore comes no sooner
        now = (due_at or NOW) - timedelta(seconds=1)
        assert provider()["token"] == 1
        now += timedelta(seconds=1)
        assert provider()["token"] == (1 if life is None else 2)
        provider.renew()
        assert asked == [*[False] * (1 if life is None else 2), True]
        assert provider()["token"] == len(asked)


def test_credentials_are_asked_for_by_one_thread_at_a_time():
    asked, meanwhile = list[bool](), list[int]()

    def ask(others: bool) -> dict[str, object]:
        asked.append(others)
        if len(asked) == 1:
            for thread in threads:
                thread.start()
                thread.join(0.05)
            meanwhile.append(len(asked))
        return {"token": "t", "expires_at": None}

    provider = Renewing("a place", ask)
    threads = [threading.Thread(target=provider), threading.Thread(target=provider.renew)]
    provider()
    for thread in threads:
        thread.join(30)
    assert meanwhile == [1]
    assert sorted(asked) == [False, True]


def test_credentials_that_cannot_be_renewed_count_until_they_end():
    now, answers = NOW, list[Any]()

    def ask(_: bool) -> dict[str, object]:
        if isinstance(answers[-1], Exception):
            raise answers[-1]
        return {"token": "t", "expires_at": answers[-1]}

    provider = Renewing("a place", ask, "log in", now=lambda: now)
    answers.append(CredentialsError("gone"))
    with pytest.raises(CredentialsError, match=r"a place: .* \(gone\)") as caught:
        provider()
    assert caught.value.advice == "pass new ones, log in"
    zone = timezone(timedelta(hours=2))
    answers.append((NOW + timedelta(minutes=30)).astimezone(zone))
    assert provider()["expires_at"].tzinfo is UTC
    answers.append(ValueError("SECRET"))
    for minutes, again_after in ((20, 10), (29, 10), (29 + 55 / 60, 5)):
        now = NOW + timedelta(minutes=minutes)
        expected = {"token": "t", "expires_at": now + timedelta(seconds=again_after)}
        assert provider() == {**expected}, minutes
        assert provider()["expires_at"].tzinfo is UTC
    now = NOW + timedelta(minutes=30)
    with pytest.raises(CredentialsError, match=r"\(ValueError\)") as caught:
        provider()
    assert caught.value.__cause__ is None and caught.value.__context__ is None
    with pytest.raises(CredentialsError):
        provider.renew()  # those of before were refused, however long they last
    answers.append(None)
    assert provider() == {"token": "t", "expires_at": None}
    answers.append(ValueError("SECRET"))
    with pytest.raises(CredentialsError):
        provider.renew()


def test_of_a_parsers_error_only_its_class_and_lines_are_shown():
    for content, shown in (("{SECRET", "JSONDecodeError, line 1"), ("{\nSECRET", "line 2")):
        with pytest.raises(ValueError) as caught:
            json.loads(content)
        assert class_and_line(caught.value).endswith(shown)
    with pytest.raises(configparser.ParsingError) as parsing:
        configparser.ConfigParser().read_string("[a]\nSECRET\nb = 1\nSECRET\n")
    assert class_and_line(parsing.value) == "ParsingError, line 2, 4"
    assert class_and_line(OSError("SECRET")) == "OSError"


def test_a_metadata_service_is_one_that_answers_and_has_not_failed():
    for answer, requests, is_there in (
        (Answer(200, {}, b""), 1, True),
        (Answer(499, {}, b""), 1, True),
        (Answer(500, {}, b""), 1, False),
        (None, 2, False),
    ):
        with ScriptedServer(lambda *_, answer=answer: answer) as server:
            asked = metadata_answers(server.endpoint_url + "/", "PUT", "/token", {"X-Of": "mine"})
            assert asked is is_there
            assert [row[:2] for row in server.requests] == [("PUT", "/token")] * requests
            assert server.requests[0][2]["X-Of"] == "mine"
    with RawServer(b"this is no HTTP\r\n\r\n") as other:
        assert not metadata_answers(f"http://{other.address}", "PUT", "/token", {})
        assert len(other.heads) == 2


def test_a_module_of_a_namespace_package_is_installed_only_with_its_package():
    names = ("importlib.util", "importlib.none_such", "none_such.util")
    assert [is_installed(name) for name in names] == [True, False, False]


def test_credentials_that_were_left_behind_by_a_pickle_are_named():
    spec = StoreSpec("s3://bucket/x", {"key": "k", "secret": "s"}, CONFIG)
    bare = StoreSpec(spec.url, None, CONFIG, ("key", "secret"))
    with pytest.raises(CredentialsError, match="key, secret were given"):
        bare.open()
