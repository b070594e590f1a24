"""`storage_options` in fsspec's spelling: known names, aliases, secrets, and settings made of them.

The names are those of s3fs, gcsfs and adlfs, so that options move over unchanged; their names that
only tune fsspec itself (`default_block_size`, `listings_expiry_time`, …) are errors here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dcp_objstore.errors import ConfigError
from dcp_objstore.stores.options import table
from dcp_objstore.stores.options.encryption import SSE, sealing_of

# What each option must be. A tuple of types as for isinstance.
_TEXT = (str,)
_FLAG = (bool,)
_S3: dict[str, tuple[type, ...]] = {
    "key": _TEXT,
    "secret": _TEXT,
    "token": _TEXT,
    "profile": _TEXT,
    "anon": _FLAG,
    "endpoint_url": _TEXT,
    "region": _TEXT,
    "region_name": _TEXT,
    "use_ssl": _FLAG,
    "verify": (bool, str),
    "addressing_style": _TEXT,
    "requester_pays": _FLAG,
    "sign_payload": _FLAG,
    "client_kwargs": (Mapping,),
    "config_kwargs": (Mapping,),
    "s3_additional_kwargs": (Mapping,),
    "transport": _TEXT,
}
_ALSO = {"region": ("region_name",)}
_S3_CLIENT: dict[str, tuple[type, ...]] = {
    "endpoint_url": _TEXT,
    "region_name": _TEXT,
    "use_ssl": _FLAG,
    "verify": (bool, str),
    "aws_access_key_id": _TEXT,
    "aws_secret_access_key": _TEXT,
    "aws_session_token": _TEXT,
}
_S3_CONFIG: dict[str, tuple[type, ...]] = {"s3": (Mapping,)}
_S3_ADDRESSING: dict[str, tuple[type, ...]] = {"addressing_style": _TEXT}
_S3_EXTRA: dict[str, tuple[type, ...]] = {
    "ServerSideEncryption": _TEXT,
    "SSEKMSKeyId": _TEXT,
    "BucketKeyEnabled": _FLAG,
    "ChecksumAlgorithm": _TEXT,
}
# "none" is ours: it turns the default off.
CHECKSUMS = ("CRC64NVME", "SHA256", "CRC32", "CRC32C", "none")
_GS: dict[str, tuple[type, ...]] = {
    "token": (object,),
    "project": _TEXT,
    "requester_pays": (bool, str),
    "anon": _FLAG,
    "endpoint_url": _TEXT,
    "base_url": _TEXT,
    "verify": (bool, str),
    "transport": _TEXT,
}
_AZ: dict[str, tuple[type, ...]] = {
    "account_name": _TEXT,
    "account_key": _TEXT,
    "sas_token": _TEXT,
    "connection_string": _TEXT,
    "credential": (object,),
    "tenant_id": _TEXT,
    "client_id": _TEXT,
    "client_secret": _TEXT,
    "anon": _FLAG,
    "account_host": _TEXT,
    "endpoint_url": _TEXT,
    "verify": (bool, str),
}
_KNOWN = {"s3": _S3, "gs": _GS, "az": _AZ, "file": dict[str, tuple[type, ...]](), "memory": {}}
_SECRETS = {
    "key",
    "secret",
    "token",
    "aws_access_key_id",
    "aws_secret_access_key",
    "aws_session_token",
    "account_key",
    "sas_token",
    "connection_string",
    "credential",
    "client_secret",
}
# Names that fsspec's filesystems give to what is no secret. Any other option of a scheme that is
# not in `_KNOWN` is taken for one.
_PUBLIC_NAMES = {
    "account_name",
    "anon",
    "auto_mkdir",
    "default_location",
    "endpoint_override",
    "endpoint_type",
    "endpoint_url",
    "host",
    "port",
    "profile",
    "project",
    "project_id",
    "protocol",
    "region",
    "region_name",
    "timeout",
    "use_ssl",
    "verify",
}
_FILESYSTEM = "fs"
# Values of GCS's `token` that name a method.
PUBLIC_TOKENS = ("anon", "google_default", "cloud")


@dataclass(frozen=True)
class S3Settings:
    """The S3 options under one name each; None where not given."""

    key: str | None = None
    secret: str | None = None
    token: str | None = None
    profile: str | None = None
    anon: bool = False
    endpoint_url: str | None = None
    region: str | None = None
    use_ssl: bool = True
    verify: bool | str = True
    addressing_style: str | None = None
    requester_pays: bool = False
    sign_payload: bool = False
    sse: str | None = None
    sse_kms_key_id: str | None = None
    sse_bucket_key: bool | None = None
    checksum_algorithm: str | None = None

    def __repr__(self) -> str:
        return f"S3Settings(endpoint_url={self.endpoint_url!r}, region={self.region!r})"


def check_options(scheme: str, options: Mapping[str, object] | None) -> dict[str, object]:
    """A copy of the options, after checking names, types and combinations.

    Args:
        scheme: `s3`, `gs`, `az`, `file` or `memory`; of any other the filesystem knows the options.
        options: as the user gave them. A value of None counts as not given.

    Raises:
        ConfigError: an unknown name (with the nearest known one), a wrong type, or options that
            contradict each other. Values are never repeated: they may be secrets.
    """
    if options is None:
        return {}
    if scheme not in _KNOWN:
        return _foreign(options, scheme)
    given = _checked(options, _KNOWN[scheme], f"storage_options for {scheme}://", scheme)
    endpoints = [given.get(name) for name in ("endpoint_url", "base_url", "account_host")]
    if scheme == "s3":
        endpoints.append(_of_options(given).endpoint_url)
    elif scheme == "gs":
        the_one({name: given.get(name) for name in ("endpoint_url", "base_url")})
        payer = given.get("requester_pays")
        if isinstance(payer, str) and given.get("project") not in (None, payer):
            raise ConfigError(
                "'requester_pays' and 'project' name two projects that are to pay; say it once"
            )
    elif scheme == "az":
        the_one({name: given.get(name) for name in ("endpoint_url", "account_host")})
    for endpoint in endpoints:
        if endpoint is not None:
            check_endpoint(endpoint)
    return given


def check_endpoint(text: str) -> None:
    """Refuse an endpoint that may hold a secret; it is shown by `repr` and in messages.

    Raises:
        ConfigError: it has a user, a query or a fragment. It is not repeated.
    """
    if any(character in text for character in "@?#"):
        raise ConfigError("an endpoint must read http(s)://host[:port], without credentials")


def s3_settings(options: Mapping[str, Any]) -> S3Settings:
    """Gather the options and their aliases inside `client_kwargs` and `config_kwargs`.

    How the store is to encrypt comes from the environment where the options leave it open.

    Raises:
        ConfigError: see `check_options` and `sealing_of`.
    """
    found = _of_options(options)
    sealing: dict[str, Any] = sealing_of(found.sse, found.sse_kms_key_id, found.sse_bucket_key)
    return replace(found, **sealing)


def _of_options(options: Mapping[str, Any]) -> S3Settings:
    client = _checked(options.get("client_kwargs", {}), _S3_CLIENT, "client_kwargs")
    config = _checked(options.get("config_kwargs", {}), _S3_CONFIG, "config_kwargs")
    inner = _checked(config.get("s3", {}), _S3_ADDRESSING, "config_kwargs['s3']")
    extra = _checked(options.get("s3_additional_kwargs", {}), _S3_EXTRA, "s3_additional_kwargs")

    def one(name: str, inside: str) -> Any:
        """The option, or the same setting in `client_kwargs`; both must say the same."""
        named = {spelled: options.get(spelled) for spelled in (name, *_ALSO.get(name, ()))}
        return the_one({**named, f"client_kwargs[{inside!r}]": client.get(inside)})

    use_ssl, verify = one("use_ssl", "use_ssl"), one("verify", "verify")
    found = S3Settings(
        key=one("key", "aws_access_key_id"),
        secret=one("secret", "aws_secret_access_key"),
        token=one("token", "aws_session_token"),
        profile=options.get("profile"),
        anon=bool(options.get("anon", False)),
        endpoint_url=one("endpoint_url", "endpoint_url"),
        region=one("region", "region_name"),
        use_ssl=True if use_ssl is None else use_ssl,
        verify=True if verify is None else verify,
        addressing_style=the_one(
            {
                "addressing_style": options.get("addressing_style"),
                "config_kwargs['s3']['addressing_style']": inner.get("addressing_style"),
            }
        ),
        requester_pays=bool(options.get("requester_pays", False)),
        sign_payload=bool(options.get("sign_payload", False)),
        sse=extra.get("ServerSideEncryption"),
        sse_kms_key_id=extra.get("SSEKMSKeyId"),
        sse_bucket_key=extra.get("BucketKeyEnabled"),
        checksum_algorithm=extra.get("ChecksumAlgorithm"),
    )
    _check_s3(found)
    return found


def the_one(named: Mapping[str, Any]) -> Any:
    """The value of a setting that may be spelled in several ways; None where nobody gave it.

    Raises:
        ConfigError: they contradict each other. No value is repeated.
    """
    given = {name: value for name, value in named.items() if value is not None}
    values = list(given.values())
    if any(value != values[0] for value in values):
        raise ConfigError(f"storage_options contradict each other: {', '.join(given)}; say it once")
    return values[0] if values else None


def _check_s3(found: S3Settings) -> None:
    if (found.key is None) != (found.secret is None):
        missing = "secret" if found.secret is None else "key"
        raise ConfigError(f"storage_options need both 'key' and 'secret'; {missing!r} is missing")
    if found.token is not None and found.key is None:
        raise ConfigError("storage_options have a 'token' without 'key' and 'secret'")
    chosen = [found.anon, found.key is not None, found.profile is not None]
    if sum(chosen) > 1:
        raise ConfigError("choose one of 'anon', 'key' with 'secret', and 'profile'")
    if found.addressing_style not in (None, "path", "virtual", "auto"):
        raise ConfigError("'addressing_style' must be 'path', 'virtual' or 'auto'")
    if found.sse not in (None, *SSE):
        raise ConfigError(f"'ServerSideEncryption' must be one of {', '.join(SSE)}")
    of_kms = (found.sse_kms_key_id, found.sse_bucket_key)
    if any(value is not None for value in of_kms) and found.sse in (None, "AES256"):
        raise ConfigError(
            "'SSEKMSKeyId' and 'BucketKeyEnabled' need 'ServerSideEncryption': 'aws:kms'"
        )
    if found.checksum_algorithm not in (None, *CHECKSUMS):
        raise ConfigError(f"'ChecksumAlgorithm' must be one of {', '.join(CHECKSUMS)}")


def is_foreign(scheme: str) -> bool:
    """Whether the options of a scheme are not ours to know."""
    return scheme not in _KNOWN


def is_secret(name: str, value: object = None, *, foreign: bool = False) -> bool:
    """Whether an option holds, or may hold, a credential.

    Args:
        name: of the option.
        value: of the option.
        foreign: the scheme is none of ours, so only what is known to be public is.
    """
    if name == _FILESYSTEM:
        return True  # its own options hold what it logs in with
    if foreign:
        odd = isinstance(value, str) and any(character in value for character in "@?")
        return name not in _PUBLIC_NAMES or isinstance(value, Mapping) or odd
    return name in _SECRETS and not (isinstance(value, str) and value in PUBLIC_TOKENS)


def secret_names(options: Mapping[str, object], *, foreign: bool = False) -> list[str]:
    """Names of all options, nested ones too, that hold credentials."""
    names = [name for name, value in options.items() if is_secret(name, value, foreign=foreign)]
    for value in options.values():
        if isinstance(value, Mapping) and not foreign:
            names += secret_names(value)
    return sorted(names)


def public_options(
    options: Mapping[str, object], *, mask: bool, foreign: bool = False
) -> dict[str, object]:
    """The options without credentials, or, with `mask`, with `***` in their place."""
    shown: dict[str, object] = {}
    for name, value in options.items():
        if is_secret(name, value, foreign=foreign):
            if mask:
                shown[name] = f"<{type(value).__name__}>" if name == _FILESYSTEM else "***"
        elif isinstance(value, Mapping):
            shown[name] = public_options(value, mask=mask)
        else:
            shown[name] = value
    return shown


def _foreign(options: object, scheme: str) -> dict[str, object]:
    where = f"storage_options for {scheme}://"
    if not isinstance(options, Mapping):
        raise ConfigError(f"{where} must be a mapping, got {type(options).__name__}")
    if not all(isinstance(name, str) for name in options):
        raise ConfigError(f"the names of {where} must be str")
    return {
        name: dict(value) if isinstance(value, Mapping) else value
        for name, value in options.items()
        if value is not None
    }


def _checked(
    options: object, known: Mapping[str, tuple[type, ...]], where: str, scheme: str = "s3"
) -> dict[str, Any]:
    if not isinstance(options, Mapping):
        raise ConfigError(f"{where} must be a mapping, got {type(options).__name__}")
    result: dict[str, Any] = {}
    for name, value in options.items():
        if name not in known:
            raise ConfigError(table.unknown(name, known, where, scheme))
        if value is None:
            continue
        if not isinstance(value, known[name]):
            kinds = " or ".join(kind.__name__ for kind in known[name])
            raise ConfigError(f"{name!r} in {where} must be {kinds}, got {type(value).__name__}")
        if isinstance(value, str) and not value.strip():
            # Taken as not given, it would lead to another server or to other credentials.
            raise ConfigError(f"{name!r} in {where} is empty; give it a value, or leave it out")
        if name in _SECRETS and isinstance(value, str) and _cannot_be_sent(value):
            raise ConfigError(f"{name!r} in {where} holds a line break or control character")
        result[name] = dict(value) if isinstance(value, Mapping) else value
    return result


def _cannot_be_sent(secret: str) -> bool:
    """Whether it cannot be in a header, where the transport would panic; a key in JSON is none."""
    return not secret.lstrip().startswith("{") and re.search(r"[\x00-\x1f\x7f]", secret) is not None
