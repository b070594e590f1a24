"""Where credentials for GCS come from, in order; nothing here ever prints one.

`anon`; `token`, in every form that gcsfs takes; GOOGLE_* variables of obstore; Application Default
Credentials; a machine's metadata service. Service accounts and users' credentials are used by
obstore itself, the other kinds by google-auth (extra `gcs`) through `obstore.auth.google`.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC
from pathlib import Path
from typing import Any

from dcp_objstore.errors import (
    ConfigError,
    CredentialsError,
    DcpObjstoreError,
    UnsupportedError,
)
from dcp_objstore.stores.credentials.base import Credentials, lost, metadata_answers, without_text
from dcp_objstore.stores.options.gcs import GcsOptions

_INSTALL = "pip install 'dcp-objstore[gcs]'"
_SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"
# What obstore needs of a key; google-auth checks those that it reads.
_FIELDS = {
    "service_account": ("private_key", "private_key_id", "client_email"),
    "authorized_user": ("client_id", "client_secret", "refresh_token"),
}
_VARIABLES = (
    "GOOGLE_SERVICE_ACCOUNT",
    "GOOGLE_SERVICE_ACCOUNT_PATH",
    "GOOGLE_SERVICE_ACCOUNT_KEY",
)


_ADVICE = (
    "log in again (gcloud auth application-default login), or use a source that renews them itself:"
    " a service account, credentials of google-auth"
)


def find_gcs_credentials(
    options: GcsOptions, base_url: str | None, stripped: tuple[str, ...] = ()
) -> Credentials:
    """Find credentials for GCS in the order of the module's docstring.

    Args:
        options: the user's options.
        base_url: an endpoint other than Google's, which is not asked for Google credentials
            without a `token`.
        stripped: names of options that were left behind when the spec was pickled.

    Raises:
        CredentialsError: there are none, or google-auth is needed and is not installed.
        ConfigError: `token` has a form that we do not know.
    """
    return replace(_find(options, base_url, stripped), advice=_ADVICE)


def find_gcs_token(
    options: GcsOptions, base_url: str | None, stripped: tuple[str, ...] = ()
) -> Callable[[], str] | None:
    """What gives an access token each time, for requests of our own; None: anonymous.

    What obstore reads itself is read by google-auth here.

    Raises:
        UnsupportedError: google-auth is needed and is not installed.
        CredentialsError, ConfigError: as `find_gcs_credentials`; the first also when it is called.
    """
    found = find_gcs_credentials(options, base_url, stripped)
    if found.anonymous:
        return None
    if found.provider is None:
        if not _google_auth_is_there():
            raise UnsupportedError(
                f"{found.source} are read by google-auth here, which is not installed: {_INSTALL}"
            )
        found = _by_google_auth(found)
    provider = found.provider
    assert provider is not None

    def token() -> str:
        try:
            return str(provider()["token"])
        except DcpObjstoreError:
            raise
        except Exception as error:
            # It asks Google or another service, by libraries that raise what they like.
            raise CredentialsError(f"{found.source}: {error}") from error

    return token


def _by_google_auth(found: Credentials) -> Credentials:
    """What obstore would read: a key that is given or named, or the machine's defaults."""
    environ = os.environ
    text = found.config.get("service_account_key") or environ.get("GOOGLE_SERVICE_ACCOUNT_KEY")
    named = (
        found.config.get("application_credentials")
        or environ.get("GOOGLE_SERVICE_ACCOUNT")
        or environ.get("GOOGLE_SERVICE_ACCOUNT_PATH")
    )
    bearer = environ.get("GOOGLE_BEARER_TOKEN")
    if not found.config and bearer:
        return Credentials(found.source, lambda: {"token": bearer, "expires_at": None})
    if text and not named:
        return _loaded(_parsed(text, "the service account's key"))
    if named:
        return _loaded(_parsed(_text(Path(named)), "the key that is named"))
    return _from_google_auth(_default_credentials, found.source)


def _find(options: GcsOptions, base_url: str | None, stripped: tuple[str, ...]) -> Credentials:
    token = options.token
    if options.anon or token == "anon":
        return Credentials("anonymous", config={"skip_signature": True})
    if token == "cloud":
        return _from_google_auth(_machine_credentials, "the machine's credentials (token='cloud')")
    if token is not None and token != "google_default":
        return _from_gcs_token(token)
    found = _from_google_environment(base_url)
    if found is not None:
        return found
    raise CredentialsError(
        "no credentials for GCS: run `gcloud auth application-default login`, set"
        " GOOGLE_APPLICATION_CREDENTIALS, or pass storage_options={'token': …}"
        " ({'anon': True} for a public bucket)" + lost(stripped)
    )


def _from_google_environment(base_url: str | None) -> Credentials | None:
    if any(os.environ.get(name) for name in (*_VARIABLES, "GOOGLE_BEARER_TOKEN")):
        renewable = not os.environ.get("GOOGLE_BEARER_TOKEN")
        return Credentials("GOOGLE_* in the environment", renewable=renewable)
    kind = _adc_kind()
    if kind in ("service_account", "authorized_user"):
        return Credentials(f"application default credentials ({kind})", renewable=True)
    if kind is not None:
        return _from_google_auth(_default_credentials, f"application default credentials ({kind})")
    host = os.environ.get("GCE_METADATA_HOST") or "metadata.google.internal"
    if base_url is None and metadata_answers(
        f"http://{host}", "GET", "/", {"Metadata-Flavor": "Google"}
    ):
        return Credentials("instance metadata", renewable=True)
    return None


def _from_gcs_token(token: object) -> Credentials:
    """Every form of gcsfs's `token` but the names of methods that are others' business."""
    if isinstance(token, Mapping):
        return _from_gcs_key(dict(token))
    if isinstance(token, str):
        if token in ("browser", "cache"):
            raise ConfigError(
                f"token={token!r} is gcsfs's own way to log in; run `gcloud auth"
                " application-default login` and leave 'token' out"
            )
        if token.lstrip().startswith("{"):
            return _from_gcs_key(_parsed(token, "the key in storage_options['token']"))
        path = _existing(token)
        if path is not None:
            key = _parsed(_text(path), "the key that storage_options['token'] names")
            if _is_native(_kind_of_key(key)):
                _check_fields(key)
                return Credentials(
                    "storage_options",
                    config={"application_credentials": str(path)},
                    renewable=True,
                )
            return _from_gcs_key(key)
        if token.endswith(".json"):
            raise CredentialsError("the credentials named by storage_options['token'] are missing")
        # Through a provider, so that a service account in the environment does not win.
        return Credentials("storage_options", lambda: {"token": token, "expires_at": None})
    if hasattr(token, "refresh"):
        return _from_google_auth(lambda _: token, "storage_options")
    raise ConfigError(
        "'token' must be 'anon', 'google_default', 'cloud', an access token, a path to or the"
        " content of a key in JSON, or google-auth credentials; got"
        f" {type(token).__name__}"
    )


def _from_gcs_key(key: dict[str, Any]) -> Credentials:
    """The content of a key: a service account's by obstore, the others by google-auth."""
    kind = _kind_of_key(key)
    if kind == "service_account" and _is_native(kind):
        _check_fields(key)
        config = {"service_account_key": json.dumps(key)}
        return Credentials("storage_options", config=config, renewable=True)
    return _loaded(key)


def _loaded(key: Mapping[str, Any]) -> Credentials:
    """The content of a key, by google-auth."""
    kind = _kind_of_key(key)
    key = {**key, "type": kind}

    def load(scopes: list[str]) -> Any:
        import google.auth
        from google.oauth2 import credentials, service_account

        # One loader for each kind that has one: Google advises against the general one.
        by_user: Any = credentials.Credentials
        by_service: Any = service_account.Credentials
        general: Any = google.auth
        if kind == "authorized_user":
            return by_user.from_authorized_user_info(key, scopes)
        if kind == "service_account":
            return by_service.from_service_account_info(key, scopes=scopes)
        return general.load_credentials_from_dict(key, scopes=scopes)[0]

    return _from_google_auth(load, f"the {kind} credentials of storage_options['token']")


def _kind_of_key(key: Mapping[str, Any]) -> str:
    # gcsfs takes a user's refresh token without the type that gcloud writes beside it.
    kind = key.get("type") or ("authorized_user" if "refresh_token" in key else "service_account")
    return str(kind)


def _check_fields(key: Mapping[str, Any]) -> None:
    """Raise `CredentialsError` unless a key has what its kind needs; its values are not shown."""
    kind = _kind_of_key(key)
    missing = [name for name in _FIELDS.get(kind, ()) if not isinstance(key.get(name), str)]
    if missing:
        raise CredentialsError(
            f"the key in storage_options['token'] is no {kind} key: it lacks {', '.join(missing)}"
            " (or they are no text)"
        )


def _is_native(kind: str) -> bool:
    """Whether obstore reads it, and would not mix it with what the environment holds."""
    mixed = any(os.environ.get(name) for name in (*_VARIABLES, "GOOGLE_BEARER_TOKEN"))
    return kind in ("service_account", "authorized_user") and not mixed


def _parsed(text: str, what: str) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except ValueError:
        content = None  # a JSONDecodeError carries the whole document
    if not isinstance(content, dict):
        raise CredentialsError(f"{what} is not a key in JSON")
    return content


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        wrong = without_text(error)
    raise CredentialsError(f"the key that storage_options['token'] names cannot be read: {wrong}")


def _existing(token: str) -> Path | None:
    """The key that a token names, if it does; a token may be too long for a name, for one."""
    try:
        path = Path(token).expanduser()
        return path if path.is_file() else None
    except (OSError, ValueError, RuntimeError):
        return None


def _google_auth_is_there() -> bool:
    return (
        importlib.util.find_spec("google") is not None
        and importlib.util.find_spec("google.auth") is not None
    )


def _from_google_auth(load: Callable[[list[str]], Any], source: str) -> Credentials:
    """By google-auth; `load` gets the scopes, and imports what it needs of it."""
    if not _google_auth_is_there():
        raise CredentialsError(
            f"{source} are read by google-auth, which is not installed: {_INSTALL}"
        )
    from google.auth.exceptions import GoogleAuthError

    wrong = None
    try:
        provider = _Provider(source, load([_SCOPE]))
        return Credentials(source, provider, renewable=True, renew=provider.renew)
    except GoogleAuthError as error:
        raise CredentialsError(f"{source}: {error}") from error
    except (ValueError, KeyError) as error:
        wrong = without_text(error)  # may quote a key
    raise CredentialsError(f"{source} cannot be used: {wrong}")


class _Provider:
    """obstore's provider, asked only for a token that is not valid (for long) any more.

    obstore's own always renews, which credentials made of a bare token cannot.
    """

    def __init__(self, source: str, credentials: Any) -> None:
        from obstore.auth.google import GoogleCredentialProvider

        self.credentials = credentials
        self._source = source
        self._renew = GoogleCredentialProvider(credentials)

    def __call__(self) -> Any:
        found = self.credentials
        if not getattr(found, "valid", False):
            return self._renew()
        # google-auth's times are UTC and do not say so.
        expires_at = found.expiry and found.expiry.replace(tzinfo=UTC)
        return {"token": found.token, "expires_at": expires_at}

    def renew(self) -> None:
        """Have another token: the one that we have was refused, however long it is said to last.

        Raises:
            CredentialsError: there is none to be had.
        """
        from google.auth.exceptions import GoogleAuthError

        try:
            self._renew()
        except GoogleAuthError as error:
            raise CredentialsError(
                f"the store does not, or no longer, accept the credentials (source:"
                f" {self._source}), and there are no others: {error}. Pass new ones, {_ADVICE}"
            ) from error


def _default_credentials(scopes: list[str]) -> Any:
    import google.auth

    return google.auth.default(scopes=scopes)[0]


def _machine_credentials(scopes: list[str]) -> Any:
    from google.auth import compute_engine

    engine: Any = compute_engine
    return engine.Credentials(scopes=scopes)


def _adc_kind() -> str | None:
    """The `type` in the file of application default credentials, or None if there is no file."""
    named = os.environ.get("GOOGLE_APPLICATION_CREDENTIALS")
    folder = Path(os.environ.get("CLOUDSDK_CONFIG") or "~/.config/gcloud").expanduser()
    path = Path(named) if named else folder / "application_default_credentials.json"
    if not path.is_file():
        if named:
            raise CredentialsError("GOOGLE_APPLICATION_CREDENTIALS names a file that is not there")
        return None
    wrong = None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        wrong = f"application default credentials cannot be read: {without_text(error)}"
    if wrong is not None:  # a JSONDecodeError carries the whole document
        raise CredentialsError(wrong)
    kind = content.get("type") if isinstance(content, dict) else None
    if not isinstance(kind, str):
        raise CredentialsError("application default credentials have no 'type'")
    return kind
