"""Find credentials for S3; nothing here ever prints one.

In this order: `anon`; `key` and `secret`; `profile`; AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY;
AWS_PROFILE; web identity and container variables; the shared AWS files; instance metadata.
boto3 (extra `s3`) reads profiles, SSO and the shared files, as every other tool does; obstore does
the rest.
"""

from __future__ import annotations

import configparser
import importlib.util
import logging
import os
import shlex
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
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
from dcp_objstore.stores.errors import NO_S3_CREDENTIALS
from dcp_objstore.stores.options.s3 import S3Options

logger = logging.getLogger("dcp_objstore")

# boto3 renews credentials this long before they end, not earlier.
_MARGIN = timedelta(minutes=10)
_AGAIN_AFTER = timedelta(seconds=10)
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
    credentials = _from_options(settings) or _from_environment() or _from_machine()
    if credentials is None:
        raise no_s3_credentials(stripped)
    return credentials


def no_s3_credentials(stripped: tuple[str, ...]) -> CredentialsError:
    """The error where none are found."""
    return CredentialsError(NO_S3_CREDENTIALS + lost(stripped))


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
    session = open_boto3_session(source, profile_name=profile)
    if not session.has_credentials:
        raise CredentialsError(f"{source} holds no credentials")

    def load() -> Any:
        return open_boto3_session(source, profile_name=profile).session.get_credentials()

    provider = Renewing(source, load)
    return Credentials(
        source,
        provider,
        renew=provider.renew,
        region=session.region,
        endpoint_url=session.endpoint_url,
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
        source: the place that is read, in words, for messages.
        arguments: the arguments of `boto3.Session`.

    Raises:
        CredentialsError: the profile does not exist, or the files cannot be read.
    """
    import boto3
    from botocore.exceptions import BotoCoreError, ProfileNotFound

    wrong = None
    try:
        session = boto3.Session(**arguments)
        credentials = session.get_credentials()
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
    return Boto3Session(session, credentials is not None, session.region_name, endpoint)


def session_of(settings: S3Options) -> Boto3Session:
    """Make the session that options ask for.

    Raises:
        CredentialsError: as `open_boto3_session`.
    """
    named = settings.profile is not None
    return open_boto3_session(
        f"profile {settings.profile!r}" if named else "the AWS settings",
        aws_access_key_id=settings.key,
        aws_secret_access_key=settings.secret,
        aws_session_token=settings.token,
        profile_name=settings.profile,
        region_name=settings.region,
    )


def _default_profile_has_credentials() -> bool:
    """Whether the shared files give the default profile credentials (boto3 need not be there)."""
    for variable, default in (
        ("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"),
        ("AWS_CONFIG_FILE", "~/.aws/config"),
    ):
        parser = configparser.RawConfigParser(strict=False, allow_no_value=True)
        path = Path(os.path.expandvars(os.environ.get(variable) or default)).expanduser()
        wrong = None
        try:
            parser.read(path, encoding="utf-8")
        except (configparser.Error, UnicodeDecodeError) as error:
            wrong = f"the AWS settings in {path.name} cannot be read: {without_text(error)}"
        if wrong is not None:
            raise CredentialsError(wrong)
        named = [["default"]]
        if variable == "AWS_CONFIG_FILE":
            named.append(["profile", "default"])
        if any(
            parser.has_option(section, name)
            for section in parser.sections()
            if _words(section) in named
            for name in _PROFILE_CREDENTIALS
        ):
            return True
    return False


def _words(section: str) -> list[str]:
    """Split the name of a section, as botocore does."""
    try:
        return shlex.split(section)
    except ValueError:
        return []


class Renewing:
    """The credentials of a profile for obstore, renewed before they end.

    boto3 knows when temporary credentials end (SSO, an assumed role, `credential_process`), and
    renews them in their last 10 minutes, but only when it is asked. obstore's own helper asks every
    half hour, so credentials that last an hour or less expire in the middle of a save. This asks 10
    minutes before they end, or once two thirds of a shorter life are over. A request with all its
    retries, which keep their first signature, takes less time than what is left then.

    It is a provider of obstore, which calls it again when `expires_at` has come.

    Args:
        source: the place where they come from, in words.
        load: reads botocore's credentials again and returns them, or None.
        now: the time, for tests.
    """

    # obstore's default, 5 minutes, calls for each request in that time; `expires_at` is early.
    refresh_threshold = timedelta(0)

    def __init__(
        self,
        source: str,
        load: Callable[[], Any],
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._source = source
        self._load = load
        self._now = now
        self._lock = threading.Lock()
        self._held: Any = None
        self._kept: dict[str, Any] | None = None
        self._ends_at: datetime | None = None

    def __repr__(self) -> str:
        return f"Renewing({self._source!r})"

    def __call__(self) -> dict[str, Any]:
        """Credentials for now.

        Raises:
            CredentialsError: there are none, or none any more.
        """
        with self._lock:
            kept = self._kept
            if kept is not None and (
                kept["expires_at"] is None or self._now() < kept["expires_at"]
            ):
                return dict(kept)
            self._kept = self._fetch()
            return dict(self._kept)

    def renew(self) -> None:
        """Forget credentials that were refused: the next request reads them again."""
        with self._lock:
            self._held = self._kept = self._ends_at = None

    def _fetch(self) -> dict[str, Any]:
        """Ask botocore for credentials. If it has none, those of before count while they last."""
        from botocore.exceptions import BotoCoreError

        failure = None
        try:
            if self._held is None:
                self._held = self._load()
            frozen = self._held.get_frozen_credentials() if self._held is not None else None
        except BotoCoreError as error:
            # Not its text, which may quote what a credential process printed.
            failure, frozen = type(error).__name__, None
        if frozen is None or frozen.access_key is None:
            return self._as_before(failure or "none were found")
        now = self._now()
        # Not public; `tests/e2e/test_credentials_expire.py` fails should it go.
        self._ends_at = getattr(self._held, "_expiry_time", None)
        until = None
        if self._ends_at is not None:
            early = self._ends_at - min(_MARGIN, (self._ends_at - now) / 3)
            until = early.astimezone(UTC)  # obstore takes no other time zone, not even an equal one
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": until,
        }

    def _as_before(self, failure: str) -> dict[str, Any]:
        """Return the present credentials while they last: the next renewal may succeed."""
        now = self._now()
        if self._kept is not None and self._ends_at is not None and now < self._ends_at:
            logger.warning("%s: the credentials could not be renewed (%s)", self._source, failure)
            return {
                **self._kept,
                "expires_at": min(now + _AGAIN_AFTER, self._ends_at).astimezone(UTC),
            }
        raise CredentialsError(
            f"{self._source}: the credentials could not be renewed ({failure}). Log in again (aws"
            " sso login), or look at what gives them, and try again"
        )
