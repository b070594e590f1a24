"""The clients of a bucket, by the scheme of its URL: those of obstore, and filesystems of fsspec.

Options of s3:// and gs:// are checked by their schemas, and become those of s3fs and gcsfs. Options
of other schemes are known to their filesystem alone. Any of them may be a secret, so all but a few
well-known ones are treated as secrets.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

from dcp_objstore.config import TransferConfig
from dcp_objstore.errors import (
    ConfigError,
    CredentialsError,
    DcpObjstoreError,
    StoreUnavailableError,
)
from dcp_objstore.stores.azure.client import azure_factory
from dcp_objstore.stores.credentials import stripped_note
from dcp_objstore.stores.endpoint import tls_context
from dcp_objstore.stores.errors import is_of
from dcp_objstore.stores.fsspec.filesystems import Filesystems, judge_fsspec
from dcp_objstore.stores.gcs.client import gcs_factory, make_gcsfs
from dcp_objstore.stores.gcs.options import GcsOptions
from dcp_objstore.stores.obstore.clients import Clients
from dcp_objstore.stores.obstore.factory import ClientFactory, memory_factory
from dcp_objstore.stores.options import parse
from dcp_objstore.stores.s3.client import s3_factory
from dcp_objstore.stores.s3.options import S3Options
from dcp_objstore.stores.s3.s3fs import S3FS, S3Filesystems, judge_s3fs, make_s3fs, sending_once
from dcp_objstore.stores.s3.upload import Checksums
from dcp_objstore.stores.schemes import FILESYSTEM, find_credentials, is_foreign, is_secret
from dcp_objstore.stores.urls import StoreUrl

_FACTORIES: dict[str, Callable[..., ClientFactory]] = {
    "s3": s3_factory,
    "gs": gcs_factory,
    "az": azure_factory,
}
# A secret that is shorter is a part of many words, so it is hidden only where it stands alone.
_SHORT_CHARACTERS = 4


def make_clients(
    url: StoreUrl,
    options: Mapping[str, Any],
    config: TransferConfig,
    stripped: tuple[str, ...] = (),
) -> Clients:
    """Make the clients of obstore for the bucket of a URL.

    Args:
        url: a URL of the bucket; its prefix is not used.
        options: the options that `check_options` has checked.
        config: time-outs and retries.
        stripped: names of options that were left behind when the spec was pickled.

    Raises:
        CredentialsError: there are no credentials.
        ConfigError: an endpoint or certificate that cannot be used.
    """
    if url.scheme == "memory":
        return Clients(url, memory_factory(url), config)
    settings, credentials = find_credentials(url.scheme, options, stripped)
    trust = cache(partial(tls_context, settings.verify))
    factory = _FACTORIES[url.scheme](url, settings, credentials)
    return Clients(url, factory, config, trust=trust, credentials=credentials)


def make_filesystems(
    url: StoreUrl,
    options: Mapping[str, Any],
    config: TransferConfig,
    stripped: tuple[str, ...] = (),
) -> Filesystems:
    """Make the filesystems of fsspec for a URL. New ones are not shared with fsspec's other users.

    A filesystem in `options` is used as it is, but its cache of listings is switched off. In the
    place of an s3fs, a new one with the same options is used, which sends each request once.

    Args:
        url: a URL of the bucket; its prefix is not used.
        options: the options that were checked.
        config: time-outs and retries, for s3fs and gcsfs. Others have their own.
        stripped: names of options that were left behind when the spec was pickled.

    Raises:
        ConfigError: the filesystem's package is not installed, or it does not take the options.
        CredentialsError: options were left behind when the spec was pickled, or are refused.
        StoreUnavailableError: the filesystem connects at once, and cannot.
    """
    if stripped:
        raise CredentialsError(
            f"a filesystem cannot be made of what is left{stripped_note(stripped)}"
        )
    try:
        return _fsspec_for(url, options, config)
    except DcpObjstoreError:
        raise
    except Exception as error:  # noqa: BLE001  each filesystem raises errors of its own
        judge = judge_s3fs if url.scheme == "s3" else judge_fsspec
        kind = type(judge(error).error)
        text = _without_secrets(str(error), options, foreign=is_foreign(url.scheme))
        text = text or f"it says no more; its options are {', '.join(options) or 'none'}"
        if kind is StoreUnavailableError:
            text += "; check the host, the port and that the server runs"
        if kind not in (CredentialsError, StoreUnavailableError):
            kind = ConfigError  # nothing but the options can have been wrong
        # Not `from error`: its text and its frames may show a secret.
        raise kind(
            f"fsspec cannot make a filesystem for {url.scheme}://: {type(error).__name__}: {text}"
        ) from None


def _fsspec_for(url: StoreUrl, options: Mapping[str, Any], config: TransferConfig) -> Filesystems:
    """Make the filesystems of fsspec for a URL."""
    if FILESYSTEM in options:
        fs = options[FILESYSTEM]
        endpoint_url = getattr(fs, "endpoint_url", None)
        if is_of(type(fs), S3FS):  # this package sends requests again, so s3fs must not
            fs = sending_once(type(fs), *fs.storage_args, **fs.storage_options)
            return S3Filesystems(
                url, config, fs, endpoint_url=endpoint_url, checksums=Checksums(None)
            )
        return Filesystems(url, config, fs, endpoint_url=endpoint_url)

    from fsspec.registry import get_filesystem_class

    cls = get_filesystem_class(url.scheme)
    if url.scheme == "s3":
        return make_s3fs(cls, url, parse(S3Options, options), config)
    if url.scheme == "gs":
        return make_gcsfs(url, parse(GcsOptions, options), config)
    # The URL itself may have options in it, such as the host of sftp://host/path.
    options = {**cls._get_kwargs_from_urls(str(url)), **options, "skip_instance_cache": True}
    endpoint = options.get("endpoint_url")
    endpoint_url = endpoint if isinstance(endpoint, str) else None
    return Filesystems(url, config, cls(**options), endpoint_url=endpoint_url)


def _without_secrets(text: str, options: Mapping[str, Any], *, foreign: bool) -> str:
    """Return a text with `***` for the values of options that may be secret."""
    for name, value in options.items():
        if isinstance(value, Mapping):
            text = _without_secrets(text, value, foreign=foreign)
        elif isinstance(value, str) and value and is_secret(name, value, foreign=foreign):
            pattern = re.escape(value)
            if len(value) < _SHORT_CHARACTERS:  # it may be a part of any word, so only alone
                pattern = rf"(?<!\w){pattern}(?!\w)"
            text = re.sub(pattern, "***", text)
    return text
