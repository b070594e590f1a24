"""Find credentials for S3; nothing here ever prints one.

In this order: `anon`; `key` and `secret`; `profile`; AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY;
AWS_PROFILE; web identity and container variables; the shared AWS files; instance metadata.
boto3 (extra `s3`) reads profiles, SSO and the shared files, as every other tool does; obstore does
the rest.
"""

from __future__ import annotations

import configparser
import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dcp_objstore.errors import CredentialsError
from dcp_objstore.stores.credentials.base import (
    ANONYMOUS,
    Credentials,
    asked_by_clients,
    fixed,
    lost,
    metadata_answers,
    without_text,
)
from dcp_objstore.stores.credentials.renewal import Renewing
from dcp_objstore.stores.options.s3 import S3Options

_INSTALL_S3 = "pip install 'dcp-objstore[s3]'"
# Settings of a profile that hold or lead to credentials.
_PROFILE_CREDENTIALS = (
    "aws_access_key_id",
    "credential_process",
    "credential_source",
    "login_session",
    "role_arn",
    "sso_account_id",
    "sso_session",
    "sso_start_url",
    "web_identity_token_file",
)
# obstore reads these, and what they lead to.
_NATIVE_VARIABLES = (
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)


def find_s3_credentials(settings: S3Options, stripped: tuple[str, ...] = ()) -> Credentials:
    """Find credentials for S3 in the order of the module's docstring.

    Args:
        settings: the user's options.
        stripped: names of options that were left behind when the spec was pickled.

    Raises:
        CredentialsError: there are none, or the profile does not exist, or boto3 is needed to
            read them and is not installed.
    """
    found = _from_options(settings) or _from_environment() or _from_machine()
    if found is None:
        raise no_s3_credentials(stripped)
    return found


def no_s3_credentials(stripped: tuple[str, ...]) -> CredentialsError:
    """The error where none are found."""
    return CredentialsError(
        "no credentials for S3: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE,"
        " or pass storage_options={'key': …, 'secret': …} ({'anon': True} for a public bucket)"
        + lost(stripped)
    )


def _from_options(settings: S3Options) -> Credentials | None:
    if settings.anon:
        return ANONYMOUS
    if settings.key is not None:
        return fixed(
            "storage_options",
            access_key_id=settings.key,
            secret_access_key=settings.secret,
            token=settings.token,
        )
    if settings.profile is not None:
        return _from_boto3(settings.profile, f"profile {settings.profile!r}")
    return None


def _from_environment() -> Credentials | None:
    key, secret, profile = (
        S3Options.option(name).from_environment() for name in ("key", "secret", "profile")
    )
    if key and secret:
        return Credentials("AWS_ACCESS_KEY_ID in the environment")
    if profile:
        return _from_boto3(profile, f"AWS_PROFILE={profile}")
    for name in _NATIVE_VARIABLES:
        if os.environ.get(name):
            return Credentials(f"{name} in the environment", renew=asked_by_clients)
    return None


def _from_machine() -> Credentials | None:
    if _default_profile_has_credentials():
        return _from_boto3(None, "the default profile of the shared AWS files")
    disabled = os.environ.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true"
    if not disabled and metadata_answers(
        os.environ.get("AWS_METADATA_ENDPOINT") or "http://169.254.169.254",
        "PUT",
        "/latest/api/token",
        {"X-aws-ec2-metadata-token-ttl-seconds": "60"},
    ):
        return Credentials("instance metadata", renew=asked_by_clients)
    return None


def _from_boto3(profile: str | None, source: str) -> Credentials:
    if importlib.util.find_spec("boto3") is None:
        raise CredentialsError(f"{source} is read by boto3, which is not installed: {_INSTALL_S3}")
    found = open_boto3_session(source, profile_name=profile)
    if not found.has_credentials:
        raise CredentialsError(f"{source} holds no credentials")

    def load() -> Any:
        return open_boto3_session(source, profile_name=profile).session.get_credentials()

    provider = Renewing(source, load)
    return Credentials(
        source,
        provider,
        renew=provider.renew,
        region=found.region,
        endpoint_url=found.endpoint_url,
    )


@dataclass(frozen=True)
class Boto3Session:
    """A session of boto3 and what its profile says.

    Attributes:
        session: a `boto3.Session`.
        has_credentials: whether boto3's chain finds any; it has then been asked.
        region: the profile's (or the environment's) region, or None.
        endpoint_url: the profile's endpoint for S3, or None.
    """

    session: Any
    has_credentials: bool
    region: str | None
    endpoint_url: str | None


def open_boto3_session(source: str, **arguments: Any) -> Boto3Session:
    """Make a session of boto3, which reads the AWS files and finds credentials now.

    Args:
        source: what is read, in words, for messages.
        arguments: of `boto3.Session`.

    Raises:
        CredentialsError: the profile does not exist, or the files cannot be read.
    """
    import boto3
    from botocore.exceptions import BotoCoreError, ProfileNotFound

    wrong = None
    try:
        session = boto3.Session(**arguments)
        found = session.get_credentials()
        scoped = session._session.get_scoped_config()
    except ProfileNotFound as error:
        raise CredentialsError(f"{source}: {error}") from error
    except (BotoCoreError, configparser.Error) as error:
        wrong = f"{source}: the AWS settings cannot be read: {without_text(error)}"
    if wrong is not None:
        raise CredentialsError(wrong)
    services = scoped.get("services")
    endpoint = scoped.get("endpoint_url")
    if services:
        named = session._session.full_config.get("services", {}).get(services, {})
        endpoint = (named.get("s3") or {}).get("endpoint_url", endpoint)
    return Boto3Session(session, found is not None, session.region_name, endpoint)


def _default_profile_has_credentials() -> bool:
    """Whether the shared files give the default profile credentials (boto3 need not be there)."""
    for variable, default in (
        ("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"),
        ("AWS_CONFIG_FILE", "~/.aws/config"),
    ):
        parser = configparser.RawConfigParser(strict=False, allow_no_value=True)
        path = Path(os.environ.get(variable) or default).expanduser()
        wrong = None
        try:
            parser.read(path, encoding="utf-8")
        except (configparser.Error, UnicodeDecodeError) as error:
            wrong = f"the AWS settings in {path.name} cannot be read: {without_text(error)}"
        if wrong is not None:
            raise CredentialsError(wrong)
        if parser.has_section("default") and any(
            parser.has_option("default", name) for name in _PROFILE_CREDENTIALS
        ):
            return True
    return False
