"""Find credentials for S3; nothing here ever prints one.

In this order: `anon`; `key` and `secret`; `profile`; AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY;
then whatever boto3 (extra `s3`) finds: AWS_PROFILE, web identity, the shared AWS files with SSO, a
container's agent, instance metadata. Without boto3, obstore finds the simplest of these, and what
takes boto3 is refused by name.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from dcp_objstore.errors import CredentialsError
from dcp_objstore.stores.credentials import (
    ANONYMOUS,
    Credentials,
    Renewing,
    asked_by_clients,
    class_and_line,
    fixed_credentials,
    metadata_answers,
    stripped_note,
)
from dcp_objstore.stores.errors import NO_S3_CREDENTIALS, SET_S3_CREDENTIALS
from dcp_objstore.stores.s3.options import S3Options

_NEEDS_BOTO3 = "is read by boto3, which is not installed: pip install 'dcp-objstore[s3]'"
# Settings in the shared AWS files that hold or lead to credentials.
_CREDENTIAL_SETTING = re.compile(
    r"^[ \t]*(aws_access_key_id|credential_process|credential_source|login_session|role_arn"
    r"|sso_account_id|sso_session|sso_start_url|web_identity_token_file)[ \t]*=",
    re.MULTILINE,
)
_SHARED_FILES = {
    "AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials",
    "AWS_CONFIG_FILE": "~/.aws/config",
}
_AGENT_TOKEN_FILE = "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"
_TOKEN_FILES = ("AWS_WEB_IDENTITY_TOKEN_FILE", _AGENT_TOKEN_FILE)
# boto3 reads these, and obstore does not.
_BOTO3_VARIABLES = (
    "AWS_CONTAINER_AUTHORIZATION_TOKEN",
    "AWS_EC2_METADATA_SERVICE_ENDPOINT_MODE",
    "AWS_ENDPOINT_URL_STS",
)
# obstore reads these, and what they lead to.
_OBSTORE_VARIABLES = ("AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI")
# Of a container's agent. obstore asks it only where the agent's token is in a file, as EKS has it.
_AGENT = "AWS_CONTAINER_CREDENTIALS_FULL_URI"
_METADATA = "AWS_EC2_METADATA_SERVICE_ENDPOINT"
_METADATA_OF_OBSTORE = "AWS_METADATA_ENDPOINT"  # obstore's name for it


def find_s3_credentials(settings: S3Options, stripped: tuple[str, ...] = ()) -> Credentials:
    """Find credentials for S3 in the order of the module's docstring.

    Args:
        settings: the user's options.
        stripped: names of options that were left behind when the spec was pickled.

    Raises:
        CredentialsError: there are none, or the profile does not exist, or boto3 is needed to
            read them and is not installed.
    """
    credentials = _from_options(settings) or keys_of_environment() or _from_machine()
    if credentials is None:
        raise no_s3_credentials(stripped)
    return credentials


def no_s3_credentials(stripped: tuple[str, ...]) -> CredentialsError:
    """Return the error to raise where no credentials are found."""
    return CredentialsError(NO_S3_CREDENTIALS + stripped_note(stripped), advice=SET_S3_CREDENTIALS)


def _from_options(settings: S3Options) -> Credentials | None:
    """Return the credentials that the storage options name; None if they name none."""
    if settings.anon:
        return ANONYMOUS
    if settings.key is not None:
        return fixed_credentials(
            "storage_options",
            access_key_id=settings.key,
            secret_access_key=settings.secret,
            token=settings.token,
        )
    if settings.profile is not None:
        return _from_boto3(settings.profile, f"profile {settings.profile!r}")
    return None


def keys_of_environment() -> Credentials | None:
    """Return the keys in the environment's variables; None if key or secret is missing.

    Raises:
        CredentialsError: one of them has a character that cannot be sent in a header.
    """
    key, secret, token = (
        S3Options.option(name).from_environment() for name in ("key", "secret", "token")
    )
    if not (key and secret):
        return None
    source = "AWS_ACCESS_KEY_ID in the environment"
    return fixed_credentials(source, access_key_id=key, secret_access_key=secret, token=token)


def _from_machine() -> Credentials | None:
    """Return the credentials of this machine: what boto3 finds, or what obstore can find alone.

    Raises:
        CredentialsError: a setting names a file or profile that does not exist, or only boto3 can
            read it, which is not installed; or it is obstore's name of a setting of AWS.
    """
    # obstore's own name of this setting counts neither with boto3 nor in `_from_instance`.
    if os.environ.get(_METADATA_OF_OBSTORE):
        raise CredentialsError(f"{_METADATA_OF_OBSTORE} is not read: set {_METADATA} in its place")
    profile = S3Options.option("profile").from_environment()
    if profile:
        return _from_boto3(profile, f"AWS_PROFILE={profile}")
    for name in _TOKEN_FILES:
        path = os.environ.get(name)
        if path and not Path(path).is_file():
            raise CredentialsError(f"{name} in the environment names no file: {path!r}")
    if importlib.util.find_spec("boto3") is not None:
        return _from_boto3(None, None)
    # From here on without boto3. First, settings that only boto3 reads are refused by name.
    for name in (*_BOTO3_VARIABLES, _AGENT):
        is_read_by_obstore = name == _AGENT and os.environ.get(_AGENT_TOKEN_FILE)
        if os.environ.get(name) and not is_read_by_obstore:
            raise CredentialsError(f"{name} in the environment {_NEEDS_BOTO3}")
    # With one of these settings, each client of obstore finds credentials by itself.
    for name in (*_OBSTORE_VARIABLES, _AGENT):
        if os.environ.get(name):
            return Credentials(f"{name} in the environment", renew=asked_by_clients)
    _check_shared_files()
    return _from_instance()


def _check_shared_files() -> None:
    """Raise if the AWS files have credentials: boto3, which is not installed, would read them.

    obstore does not read these files. What it finds in their place, such as the role of the
    instance, may belong to somebody else than the user means.
    """
    for variable, default in _SHARED_FILES.items():
        path = Path(os.path.expandvars(os.environ.get(variable) or default)).expanduser()
        try:
            text = path.read_text(errors="replace") if path.is_file() else ""
        except OSError as error:
            what = f"{path.name} of the shared AWS files cannot be read: {error.strerror}"
            raise CredentialsError(what) from error
        if _CREDENTIAL_SETTING.search(text):
            raise CredentialsError(f"{path.name} of the shared AWS files {_NEEDS_BOTO3}")


def _from_instance() -> Credentials | None:
    """Return credentials that obstore gets from the metadata service; None if there is none."""
    if os.environ.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
        return None
    endpoint = os.environ.get(_METADATA) or "http://169.254.169.254"
    # The service is asked for a session token, as its clients do first. The token is not used: it
    # only matters whether there is an answer.
    token_seconds = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
    if not metadata_answers(endpoint, "PUT", "/latest/api/token", token_seconds):
        return None
    config = {"metadata_endpoint": endpoint}
    return Credentials("instance metadata", config=config, renew=asked_by_clients)


def _from_boto3(profile: str | None, setting: str | None) -> Credentials | None:
    """Return the credentials that boto3 finds.

    Args:
        profile: the profile to read; None: boto3 chooses.
        setting: the setting that names the profile, in words for errors; None if the user has
            named no profile.

    Returns:
        The credentials; None if boto3 finds none and `setting` is None.

    Raises:
        CredentialsError: boto3 is not installed, or a profile that the user has named cannot be
            read or has no credentials.
    """
    # Without a `setting`, the caller has found that boto3 is installed.
    if importlib.util.find_spec("boto3") is None:
        raise CredentialsError(f"{setting} {_NEEDS_BOTO3}")
    opened = open_boto3_session(setting or "the AWS settings", profile_name=profile)
    if opened.method is None:
        if setting is None:
            return None
        raise CredentialsError(f"{setting} holds no credentials")
    source = setting or f"boto3 ({opened.method})"

    def load() -> Any:
        # Always a new session: an earlier one would return the credentials that were refused.
        return open_boto3_session(source, profile_name=profile).session.get_credentials()

    provider = Renewing(source, of_botocore(load))
    return replace(opened.profile, source=source, provider=provider, renew=provider.renew)


class Boto3Session(NamedTuple):
    """A session of boto3 and what its profile says.

    Attributes:
        session: a `boto3.Session`.
        method: the way by which boto3's chain found credentials, in its own word; None: no way.
        profile: the settings of the profile, or else of the environment.
    """

    session: Any
    method: str | None
    profile: Credentials


def open_boto3_session(source: str, **arguments: Any) -> Boto3Session:
    """Make a session of boto3, which reads the AWS files and finds credentials now.

    Args:
        source: the place that is read, in words, for messages.
        arguments: the arguments of `boto3.Session`.

    Raises:
        CredentialsError: the profile does not exist, or the AWS files cannot be read.
    """
    import boto3
    from botocore.exceptions import BotoCoreError, ProfileNotFound

    failure = None
    try:
        session = boto3.Session(**arguments)
        core = session._session  # the session of botocore below it
        credentials = session.get_credentials()
        settings = core.get_scoped_config()
    except ProfileNotFound as error:  # a BotoCoreError whose text holds only the profile's name
        raise CredentialsError(f"{source}: {error}") from error
    except (BotoCoreError, OSError) as error:
        failure = f"{source}: the AWS settings cannot be read: {class_and_line(error)}"
    if failure is not None:  # raised outside of the handler: see `class_and_line`
        raise CredentialsError(failure)
    # A profile may name a section `[services NAME]`, whose endpoint for S3 wins.
    services = core.full_config.get("services", {}).get(settings.get("services")) or {}
    s3 = settings.get("s3")  # a mapping if settings are indented below it, otherwise text
    profile = Credentials(
        source,
        region=session.region_name,
        endpoint_url=(services.get("s3") or {}).get("endpoint_url", settings.get("endpoint_url")),
        addressing_style=s3.get("addressing_style") if isinstance(s3, dict) else None,
        core=core,
    )
    return Boto3Session(session, None if credentials is None else credentials.method, profile)


def session_of(settings: S3Options) -> Boto3Session:
    """Make the session that options ask for.

    Raises:
        CredentialsError: as `open_boto3_session` and `keys_of_environment`.
    """
    has_profile = settings.profile is not None
    if not (has_profile or settings.anon or settings.key):
        # Only to raise an error if these keys cannot be sent; boto3 reads them by itself.
        keys_of_environment()
    return open_boto3_session(
        f"profile {settings.profile!r}" if has_profile else "the AWS settings",
        aws_access_key_id=settings.key,
        aws_secret_access_key=settings.secret,
        aws_session_token=settings.token,
        profile_name=settings.profile,
        region_name=settings.region,
    )


def of_botocore(load: Callable[[], Any]) -> Callable[[bool], Mapping[str, Any]]:
    """Return the function that a `Renewing` asks; it returns the credentials that `load` reads.

    botocore renews credentials by itself before they end. So `load` is called a second time only
    if they were refused, and `Renewing` asks for others.
    """
    credentials: Any = None

    def ask(others: bool) -> Mapping[str, Any]:
        nonlocal credentials
        if others or credentials is None:
            # If `load` raises, the next call must not return the ones that were refused.
            credentials = None
            credentials = load()
        frozen = None if credentials is None else credentials.get_frozen_credentials()
        if frozen is None or frozen.access_key is None:
            raise CredentialsError("none were found")
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            # No public attribute says when they end. `tests/e2e/test_credentials_expire.py` fails
            # if botocore removes this one.
            "expires_at": getattr(credentials, "_expiry_time", None),
        }

    return ask
