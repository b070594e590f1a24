"""Find credentials for GCS; nothing here ever prints one.

In this order: `anon`; `token`, in every form that gcsfs takes; the GOOGLE_* variables that obstore
names; Google's Application Default Credentials, a machine's metadata service last. google-auth
(extra `gcs`) reads all but bare access tokens.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC
from functools import partial
from pathlib import Path
from typing import Any

from dcp_objstore.errors import ConfigError, CredentialsError
from dcp_objstore.stores.credentials import (
    ANONYMOUS,
    Credentials,
    Renewing,
    class_and_line,
    fixed_credentials,
    is_installed,
    stripped_note,
)
from dcp_objstore.stores.gcs.options import GcsOptions

_INSTALL = "pip install 'dcp-objstore[gcs]'"
_SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"
_TOKEN_URI = "https://oauth2.googleapis.com/token"
# What google-auth needs of a key; its own error for a user's does not name what is missing.
_FIELDS = {
    "service_account": ("private_key", "client_email"),
    "authorized_user": ("client_id", "client_secret", "refresh_token"),
}
_ADVICE = (
    "log in again (gcloud auth application-default login), or use a source that renews them itself:"
    " a service account, credentials of google-auth"
)


def find_gcs_credentials(options: GcsOptions, stripped: tuple[str, ...] = ()) -> Credentials:
    """Find credentials for GCS in the order of the module's docstring.

    An endpoint other than Google's gets no token of the machine's metadata service, unless `token`
    asks for one.

    Args:
        options: the user's options.
        stripped: names of options that were left behind when the spec was pickled.

    Raises:
        CredentialsError: there are none, or google-auth is needed and is not installed.
        ConfigError: `token` has an unknown form.
    """
    return replace(_find(options, stripped), advice=_ADVICE)


def _find(options: GcsOptions, stripped: tuple[str, ...]) -> Credentials:
    """Do what `find_gcs_credentials` does, without the advice."""
    token = options.token
    if options.anon or token == "anon":
        return ANONYMOUS
    if token == "cloud":
        return _from_google_auth(_machine_credentials, "the machine's credentials (token='cloud')")
    if token is not None and token != "google_default":
        return _from_token(token)
    return _from_variables() or _from_defaults(options.endpoint_url, stripped)


def _from_variables() -> Credentials | None:
    """Read obstore's variables: a token, a key, or the path of one; None if none is set."""
    bearer = os.environ.get("GOOGLE_BEARER_TOKEN")
    if bearer:
        return fixed_credentials("GOOGLE_BEARER_TOKEN in the environment", token=bearer)
    for name in ("GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_PATH"):
        path = os.environ.get(name)
        if path:
            return _from_file(Path(path), f"the key that {name} names")
    key = os.environ.get("GOOGLE_SERVICE_ACCOUNT_KEY")
    return _from_text(key, "the key in GOOGLE_SERVICE_ACCOUNT_KEY") if key else None


def _from_defaults(endpoint_url: str | None, stripped: tuple[str, ...]) -> Credentials:
    """Return google-auth's application default credentials.

    Args:
        endpoint_url: the server, None for Google's. Another server gets no token of the machine's
            metadata service.
        stripped: names of options that were left behind when the spec was pickled.
    """
    advice = (
        "run `gcloud auth application-default login`, set GOOGLE_APPLICATION_CREDENTIALS, or pass"
        " storage_options={'token': …} ({'anon': True} for a public bucket)"
        + stripped_note(stripped)
    )

    def load(scopes: list[str]) -> Any:
        import google.auth
        from google.auth import compute_engine

        credentials, _ = google.auth.default(scopes=scopes)
        # `compute_engine.Credentials` are those of the metadata service.
        if endpoint_url is not None and isinstance(credentials, compute_engine.Credentials):
            raise CredentialsError(
                f"no credentials for GCS at {endpoint_url}, where no token of this machine is sent",
                advice=advice,
            )
        return credentials

    return _from_google_auth(load, "application default credentials", advice=advice)


def _from_token(token: object) -> Credentials:
    """Read every form of gcsfs's `token`, except the names of the ways by which gcsfs logs in.

    A text is a key in JSON, or the path of one if there is such a file, or else an access token.
    """
    what = "the key in storage_options['token']"
    if isinstance(token, Mapping):
        return _from_key(dict(token), what)
    if isinstance(token, str):
        if token in ("browser", "cache"):
            raise ConfigError(
                f"token={token!r} is gcsfs's own way to log in",
                advice="run `gcloud auth application-default login` and leave 'token' out",
            )
        if token.lstrip().startswith("{"):
            return _from_text(token, what)
        path = _existing_file(token)
        if path is not None:
            return _from_file(path, "the key that storage_options['token'] names")
        if token.endswith(".json"):
            raise CredentialsError("the credentials named by storage_options['token'] are missing")
        return fixed_credentials("storage_options", token=token)
    if hasattr(token, "refresh"):  # credentials of google-auth
        return _from_google_auth(lambda _: token, "storage_options")
    raise ConfigError(
        "'token' must be 'anon', 'google_default', 'cloud', an access token, a path to or the"
        " content of a key in JSON, or google-auth credentials; got"
        f" {type(token).__name__}"
    )


def _from_key(key: Mapping[str, Any], what: str) -> Credentials:
    """Read the content of a key; `what` names it in messages."""
    # gcsfs takes a user's refresh token without the type that gcloud writes with it.
    default_kind = "authorized_user" if "refresh_token" in key else "service_account"
    kind = str(key.get("type") or default_kind)
    missing = [name for name in _FIELDS.get(kind, ()) if not isinstance(key.get(name), str)]
    if missing:
        raise CredentialsError(
            f"{what} is no {kind} key: it lacks {', '.join(missing)} (or they are no text)"
        )
    key = {"token_uri": _TOKEN_URI, **key}

    def load(scopes: list[str]) -> Any:
        import google.auth
        from google.oauth2 import credentials, service_account

        # A kind that has its own loader is loaded by that: Google advises against the general one.
        user: Any = credentials.Credentials
        service: Any = service_account.Credentials
        if kind == "authorized_user":
            return user.from_authorized_user_info(key, scopes)
        if kind == "service_account":
            return service.from_service_account_info(key, scopes=scopes)
        return google.auth.load_credentials_from_dict(key, scopes=scopes)[0]  # type: ignore[no-untyped-call]

    return _from_google_auth(load, f"{what} ({kind})")


def _from_file(path: Path, what: str) -> Credentials:
    """Read a key from a file; `what` names it in messages."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # a UnicodeDecodeError is a ValueError
        reason = class_and_line(error)
    else:
        return _from_text(text, what)
    # Raised outside of the handler: see `class_and_line`.
    raise CredentialsError(f"{what} cannot be read: {reason}")


def _from_text(text: str, what: str) -> Credentials:
    """Read a key from its text; `what` names it in messages."""
    try:
        content = json.loads(text)
    except ValueError:
        # The error below must not have this one as its context: it holds the whole document.
        content = None
    if not isinstance(content, dict):
        raise CredentialsError(f"{what} is not a key in JSON")
    return _from_key(content, what)


def _existing_file(token: str) -> Path | None:
    """Return the file that a token names; None if it names none.

    What is too long for a path, or has no home to put in for its `~`, names none.
    """
    try:
        path = Path(token).expanduser()
        return path if path.is_file() else None
    except (OSError, RuntimeError):
        return None


def _from_google_auth(
    load: Callable[[list[str]], Any], source: str, *, advice: str = _ADVICE
) -> Credentials:
    """Read credentials by google-auth.

    Args:
        load: a function that returns credentials of google-auth for scopes.
        source: the place where they come from, in words for messages.
        advice: what to do if they cannot be read.

    Raises:
        CredentialsError: google-auth is not installed, or cannot read them.
    """
    if not is_installed("google.auth"):
        raise CredentialsError(
            f"{source}: google-auth, which reads them, is not installed: {_INSTALL}; or {advice}"
        )
    from google.auth.exceptions import GoogleAuthError

    try:
        credentials = load([_SCOPE])
        # Credentials of a user have no such attribute.
        email = getattr(credentials, "service_account_email", None)
        provider = Renewing(source, partial(_ask_google_auth, credentials), _ADVICE)
        return Credentials(source, provider, renew=provider.renew, account_name=email)
    except GoogleAuthError as error:
        failure = f"{source}: {error}"
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        # google-auth raises these for a file that is not a key; their text may quote one.
        failure = f"{source} cannot be used: {class_and_line(error)}"
    # Raised outside of the handlers, because the error of google-auth may hold the whole key.
    raise CredentialsError(failure.removesuffix("."), advice=advice)


def _ask_google_auth(credentials: Any, others: bool) -> Mapping[str, Any]:
    """Return the token of google-auth's credentials; renew it only if it has ended, or soon will.

    obstore's own provider renews the token each time. Credentials of a bare token cannot be
    renewed.

    Args:
        credentials: any credentials of google-auth.
        others: whether the present token was refused, so that another one is needed.
    """
    from google.auth.exceptions import GoogleAuthError
    from google.auth.transport.requests import Request

    if others or not credentials.valid:
        try:
            credentials.refresh(Request())
        except GoogleAuthError as error:
            raise CredentialsError(f"{type(error).__name__}: {error}") from error
    # google-auth's times are in UTC, but have no time zone.
    expires_at = credentials.expiry and credentials.expiry.replace(tzinfo=UTC)
    return {"token": credentials.token, "expires_at": expires_at}


def _machine_credentials(scopes: list[str]) -> Any:
    """Return credentials of google-auth that ask this machine's metadata service."""
    from google.auth import compute_engine

    return compute_engine.Credentials(scopes=scopes)  # type: ignore[no-untyped-call]
