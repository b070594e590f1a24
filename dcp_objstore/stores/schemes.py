"""The schemes of URLs: each has a schema of its options, and a source of its credentials.

The names are those of s3fs, gcsfs and adlfs, so that options move over unchanged; their names that
only tune fsspec itself (`default_block_size`, `listings_expiry_time`, …) are errors here. The
options of schemes that have no schema are known to their filesystem alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

from dcp_objstore.errors import ConfigError
from dcp_objstore.stores.azure.credentials import find_azure_credentials
from dcp_objstore.stores.azure.options import AzureOptions
from dcp_objstore.stores.credentials import Credentials
from dcp_objstore.stores.gcs.credentials import find_gcs_credentials
from dcp_objstore.stores.gcs.options import GcsOptions
from dcp_objstore.stores.options import Schema, check_by, parse
from dcp_objstore.stores.s3.credentials import find_s3_credentials
from dcp_objstore.stores.s3.options import S3Options


@dataclass(frozen=True, kw_only=True, repr=False)
class NoOptions(Schema):
    """The options of file:// and memory://, which have none."""


SCHEMAS: Final[Mapping[str, type[Schema]]] = {
    "s3": S3Options,
    "gs": GcsOptions,
    "az": AzureOptions,
    "file": NoOptions,
    "memory": NoOptions,
}
# Of nested options the innermost name: what is secret is so wherever it stands.
_SECRET_NAMES: Final = frozenset(
    spelling.rpartition(".")[2]
    for schema in SCHEMAS.values()
    for option in schema.options().values()
    if option.secret
    for spelling in option.spellings
)
_OUTERMOST_NAMES: Final = frozenset(
    spelling.partition(".")[0]
    for schema in SCHEMAS.values()
    for option in schema.options().values()
    for spelling in option.spellings
)
# Names of fsspec's filesystems for options that are not secrets. Without a schema, any other option
# may be one.
_PUBLIC_NAMES: Final = {
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
# The option that holds a filesystem of fsspec, with its own options and credentials.
FILESYSTEM: Final = "fs"
# Values of GCS's `token` that name a method.
_PUBLIC_TOKENS: Final = ("anon", "google_default", "cloud")


def check_options(scheme: str, options: Mapping[str, object] | None) -> dict[str, object]:
    """Return a copy of the options, after checking names, types and combinations.

    Args:
        scheme: the scheme of the URL.
        options: the options as the user gave them; a value of None counts as not given.

    Raises:
        ConfigError: as `check_by`; a filesystem that does not fit.
    """
    if options is None:
        return {}
    if isinstance(options, Mapping) and options.get(FILESYSTEM) is not None:
        return _check_filesystem(options, scheme)
    if is_foreign(scheme):
        return _check_foreign(options, scheme)
    _, copied = check_by(SCHEMAS[scheme], options, scheme)
    return copied


def protocols(fs: object) -> Collection[str]:
    """The schemes of a filesystem object; empty if it is none."""
    names = getattr(fs, "protocol", ())
    return (names,) if isinstance(names, str) else tuple(names)


def is_foreign(scheme: str) -> bool:
    """Whether only a filesystem of fsspec knows the options of a scheme."""
    return scheme not in SCHEMAS


def are_known(options: Mapping[str, object]) -> bool:
    """Whether schemas know the names of all options; each may be of another scheme's."""
    return _OUTERMOST_NAMES.issuperset(options)


def is_secret(name: str, value: object = None, *, foreign: bool = False) -> bool:
    """Whether an option holds, or may hold, a credential.

    Args:
        name: the name of the option.
        value: the value of the option.
        foreign: whether the scheme has no schema; then all but well-known options are secrets.
    """
    if name == FILESYSTEM:
        return True  # it holds its own credentials
    if foreign:
        may_be_url_with_secret = isinstance(value, str) and ("@" in value or "?" in value)
        # A mapping may hold a secret under any name.
        return name not in _PUBLIC_NAMES or may_be_url_with_secret or isinstance(value, Mapping)
    # GCS's `token` may name a method instead, such as "anon".
    is_method = isinstance(value, str) and value in _PUBLIC_TOKENS
    return name in _SECRET_NAMES and not is_method


def secret_names(options: Mapping[str, object], *, foreign: bool = False) -> list[str]:
    """Names of all options, nested ones too, that hold credentials."""
    names = [name for name, value in options.items() if is_secret(name, value, foreign=foreign)]
    for value in options.values():
        if isinstance(value, Mapping) and not foreign:  # a foreign one is secret as a whole
            names += secret_names(value)
    return sorted(names)


def public_options(
    options: Mapping[str, object], *, mask: bool, foreign: bool = False
) -> dict[str, object]:
    """Return the options without credentials, or with `***` in their place if `mask` is true."""
    shown: dict[str, object] = {}
    for name, value in options.items():
        if is_secret(name, value, foreign=foreign):
            if mask:
                shown[name] = f"<{type(value).__name__}>" if name == FILESYSTEM else "***"
        elif isinstance(value, Mapping):  # of a scheme with a schema: a foreign one is a secret
            shown[name] = public_options(value, mask=mask)
        else:
            shown[name] = value
    return shown


def _check_filesystem(options: Mapping[str, object], scheme: str) -> dict[str, object]:
    """Check options with a filesystem of fsspec in `fs`, and return them."""
    from fsspec import AbstractFileSystem

    fs = options[FILESYSTEM]
    if any(value is not None for name, value in options.items() if name != FILESYSTEM):
        raise ConfigError("with a filesystem in 'fs', its options are its own; pass nothing else")
    if not isinstance(fs, AbstractFileSystem):
        raise ConfigError(f"'fs' must be a filesystem of fsspec, got {type(fs).__name__}")
    if scheme not in protocols(fs):
        fitting = " or ".join(f"{name}://" for name in protocols(fs))
        raise ConfigError(
            f"{scheme}:// does not fit the {type(fs).__name__} in 'fs'; its URLs begin with"
            f" {fitting}"
        )
    if getattr(fs, "asynchronous", False):
        raise ConfigError("the filesystem in 'fs' is asynchronous; make it without asynchronous=")
    return {FILESYSTEM: fs}


def _check_foreign(options: object, scheme: str) -> dict[str, object]:
    """Check the options of a scheme that only fsspec knows, and return a copy of them."""
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


_FINDERS: dict[str, Callable[..., Credentials]] = {
    "s3": find_s3_credentials,
    "gs": find_gcs_credentials,
    "az": find_azure_credentials,
}


def find_credentials(
    scheme: str, options: object, stripped: tuple[str, ...]
) -> tuple[Any, Credentials]:
    """Return the parsed options of `s3`, `gs` or `az`, and the credentials.

    Args:
        scheme: the scheme of the URL.
        options: the options that `check_options` has checked.
        stripped: names of options that were left behind when the spec was pickled.

    Raises:
        CredentialsError: there are none.
        ConfigError: see `parse`.
    """
    settings = parse(SCHEMAS[scheme], options)
    return settings, _FINDERS[scheme](settings, stripped)
