"""Whose credentials a store is asked with, and where they come from; never a secret."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dcp_objstore.errors import CredentialsError
from dcp_objstore.stores.credentials.aws import find_s3_credentials
from dcp_objstore.stores.credentials.azure import find_azure_credentials
from dcp_objstore.stores.credentials.google import find_gcs_credentials
from dcp_objstore.stores.endpoint import is_aws, s3_server
from dcp_objstore.stores.options.azure import AzureOptions
from dcp_objstore.stores.options.gcs import GcsOptions
from dcp_objstore.stores.options.parse import parse
from dcp_objstore.stores.options.s3 import S3Options

if TYPE_CHECKING:
    from dcp_objstore.stores.spec import StoreSpec

# A question of no consequence: no user waits longer for its answer.
_STS_TIMEOUT_SECONDS = 5


@dataclass(frozen=True, slots=True)
class Identity:
    """Whose credentials a store is asked with.

    Attributes:
        source: where the credentials come from, in words.
        access_key: the id of an S3 access key, shortened; None where it is not seen here.
        account: an ARN, an e-mail address or a storage account; None if it is not known.
        unknown: why `account` is not known, or None.
        region: the region that requests are signed for; None where there are none.
    """

    source: str
    access_key: str | None = None
    account: str | None = None
    unknown: str | None = None
    region: str | None = None


def identify(spec: StoreSpec) -> Identity | None:
    """Find out whose credentials requests to a store are sent with.

    On AWS it asks STS (GetCallerIdentity, which needs no permission), through boto3.

    Returns:
        None for a store without credentials, and for a filesystem object, which has its own.

    Raises:
        CredentialsError: there are no credentials, or they cannot be read.
        ConfigError: see `StoreSpec`.
    """
    scheme = spec.parsed.scheme
    if "fs" in spec.storage_options:
        return None
    if scheme == "s3":
        return _s3(spec)
    if scheme == "gs":
        return _gcs(spec)
    if scheme == "az":
        azure = find_azure_credentials(parse(AzureOptions, spec.storage_options), spec.stripped)
        return Identity(azure.source, account=azure.account_name)
    return None


def _s3(spec: StoreSpec) -> Identity:
    settings = parse(S3Options, spec.storage_options)
    found = find_s3_credentials(settings, spec.stripped)
    endpoint, region = s3_server(settings, found)
    if settings.anon:
        return Identity(found.source, region=region)
    key = _access_key(found.provider, found.source)
    account = unknown = None
    if not (is_aws(endpoint) or os.environ.get("AWS_ENDPOINT_URL_STS")):
        unknown = "only AWS has a service that tells"
    elif importlib.util.find_spec("boto3") is None:
        unknown = "boto3 is not installed, which asks AWS: pip install 'dcp-objstore[s3]'"
    else:
        account, unknown = _caller(settings, region)
    return Identity(found.source, key, account, unknown, region)


def _access_key(provider: Any, source: str) -> str | None:
    if provider is None:
        return shortened(os.environ.get("AWS_ACCESS_KEY_ID"))
    try:
        return shortened(provider().get("access_key_id"))
    except Exception as error:
        # It asks SSO, a process or another service, which fail with errors of any kind.
        raise CredentialsError(f"{source}: {error}") from error


def shortened(access_key: str | None) -> str | None:
    """Enough of an access key's id to recognise it by. It is no secret."""
    if not access_key:
        return None
    if len(access_key) < 16:
        return f"{access_key[:4]}…"
    return f"{access_key[:4]}…{access_key[-4:]}"


def _caller(settings: S3Options, region: str) -> tuple[str | None, str | None]:
    """The ARN that STS answers, or None and why it does not."""
    import boto3
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError

    quick = Config(
        connect_timeout=_STS_TIMEOUT_SECONDS,
        read_timeout=_STS_TIMEOUT_SECONDS,
        retries={"total_max_attempts": 1},
    )
    try:
        session = boto3.Session(
            aws_access_key_id=settings.key,
            aws_secret_access_key=settings.secret,
            aws_session_token=settings.token,
            profile_name=settings.profile,
            region_name=region,
        )
        return str(session.client("sts", config=quick).get_caller_identity()["Arn"]), None
    except (BotoCoreError, ClientError) as error:
        return None, f"AWS does not tell who it is: {error}"


def _gcs(spec: StoreSpec) -> Identity:
    options = parse(GcsOptions, spec.storage_options)
    found = find_gcs_credentials(options, spec.stripped)
    if found.anonymous:
        return Identity(found.source)
    # Credentials of google-auth; a bare token has none.
    credentials = getattr(found.provider, "credentials", None)
    names = ("service_account_email", "signer_email")
    account = next((str(name) for one in names if (name := getattr(credentials, one, None))), None)
    unknown = None if account else "these credentials do not name one"
    return Identity(found.source, account=account, unknown=unknown)
