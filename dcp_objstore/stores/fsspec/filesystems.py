"""Make the filesystems of fsspec that carry a store's requests.

Options of s3:// and gs:// are checked by their schemas and become those of s3fs and gcsfs. Options
of other schemes are known to their filesystem alone. Any of them may be a secret, so all but a few
well-known ones are treated as secrets.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dcp_objstore.errors import (
    ConfigError,
    CredentialsError,
    DcpObjstoreError,
    ForkedProcessError,
    StoreUnavailableError,
)
from dcp_objstore.stores.credentials.aws import keys_of_environment
from dcp_objstore.stores.credentials.base import Credentials, lost
from dcp_objstore.stores.endpoint import s3_server, server_url
from dcp_objstore.stores.errors import is_of
from dcp_objstore.stores.fsspec.errors import judge_fsspec
from dcp_objstore.stores.options.gcs import GcsOptions
from dcp_objstore.stores.options.s3 import S3Options
from dcp_objstore.stores.options.schema import parse
from dcp_objstore.stores.options.schemes import FILESYSTEM, is_foreign, is_secret
from dcp_objstore.stores.retries import READ_PROGRESS_SECONDS, Requests
from dcp_objstore.stores.s3.checksums import Checksums, checksums_for
from dcp_objstore.stores.s3.settings import botocore_settings

if TYPE_CHECKING:
    from dcp_objstore.config import TransferConfig
    from dcp_objstore.stores.urls import StoreUrl

_SHORT = 4  # a value that is shorter is a part of many words
S3FS = "s3fs.S3FileSystem"  # others call themselves `s3` as well


class Filesystems(Requests):
    """The filesystems that carry the requests to one bucket.

    What failed over s3fs is sent again by its adapter. Other filesystems have retries of their own,
    which cannot be seen from here.

    Args:
        url: a URL of the bucket; its prefix is not used.
        config: time-outs and retries.
        read: the filesystem for reads.
        write: the filesystem for writes. It differs in its time-outs, where those are ours to set.
        endpoint_url: the server, where the filesystem has such an option.
        checksums: the checksums that go with bodies over s3fs.
    """

    def __init__(
        self,
        url: StoreUrl,
        config: TransferConfig,
        read: Any,
        write: Any = None,
        *,
        endpoint_url: str | None = None,
        checksums: Checksums | None = None,
    ) -> None:
        """Keep the filesystems, and switch off their caches of listings."""
        super().__init__(
            config,
            judge_fsspec,
            endpoint_url=endpoint_url,
            scheme=url.scheme,
            bucket=url.bucket,
        )
        self.read = read
        self.write = read if write is None else write
        self.checksums = checksums or Checksums(None)
        self.request_timeout_seconds = config.request_timeout_seconds
        self._pid = os.getpid()
        for fs in (self.read, self.write):
            if hasattr(getattr(fs, "dircache", None), "use_listings_cache"):
                # A checkpoint must not be judged by what was there some time ago. Set here, because
                # not every filesystem takes the option: sftp's passes all it is given to paramiko.
                fs.dircache.use_listings_cache = False

    def check_process(self) -> None:
        """Raise `ForkedProcessError` if the process was forked from the one that made them."""
        if self._pid != os.getpid() and self.read.async_impl:
            raise ForkedProcessError(
                f"this store was opened in process {self._pid}, from which process {os.getpid()}"
                " was forked; its event loop is not here. Open it again in this process"
            )


def make_filesystems(
    url: StoreUrl,
    options: Mapping[str, Any],
    config: TransferConfig,
    stripped: tuple[str, ...] = (),
) -> Filesystems:
    """The filesystems for a URL. Never those of fsspec's own cache: they are for this use.

    A filesystem that was given is used as it is, but its cache of listings is switched off; of s3fs
    a copy is used, with the same options, that sends each request once.

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
        raise CredentialsError(f"a filesystem cannot be made of what is left{lost(stripped)}")
    try:
        return _make(url, options, config)
    except DcpObjstoreError:
        raise
    except Exception as error:  # noqa: BLE001  each filesystem has its own
        kind = type(judge_fsspec(error).error)
        text = _hidden(str(error), options, foreign=is_foreign(url.scheme))
        text = text or f"it says no more; its options are {', '.join(options) or 'none'}"
        if kind is StoreUnavailableError:
            text += "; check the host, the port and that the server runs"
        # Not `from error`: its text and its frames may show a secret.
        kept = (CredentialsError, StoreUnavailableError)
        raise (kind if kind in kept else ConfigError)(
            f"fsspec cannot make a filesystem for {url.scheme}://: {type(error).__name__}: {text}"
        ) from None


def _make(url: StoreUrl, options: Mapping[str, Any], config: TransferConfig) -> Filesystems:
    if FILESYSTEM in options:
        fs = options[FILESYSTEM]
        endpoint_url = getattr(fs, "endpoint_url", None)
        if is_of(type(fs), S3FS):
            fs = _new_s3fs(type(fs), *fs.storage_args, **fs.storage_options)
        return Filesystems(url, config, fs, endpoint_url=endpoint_url)

    from fsspec.registry import get_filesystem_class

    cls = get_filesystem_class(url.scheme)
    if url.scheme == "s3":
        return _s3(cls, url, parse(S3Options, options), config)
    if url.scheme == "gs":
        return _gs(url, parse(GcsOptions, options), config)
    options = {**cls._get_kwargs_from_urls(str(url)), **options, "skip_instance_cache": True}
    fs = cls(**options)
    endpoint = options.get("endpoint_url")
    return Filesystems(
        url, config, fs, endpoint_url=endpoint if isinstance(endpoint, str) else None
    )


def _s3(cls: Any, url: StoreUrl, settings: S3Options, config: TransferConfig) -> Filesystems:
    """Make two filesystems of s3fs, which differ in how long they wait for the next bytes."""
    if not (settings.anon or settings.key or settings.profile):
        keys_of_environment()  # may not be fit to be sent
    # What is not given here, botocore looks up in the profile.
    endpoint_url, _ = s3_server(settings, Credentials("fsspec"))
    filesystems = [
        _new_s3fs(
            cls,
            endpoint_url=endpoint_url,
            anon=settings.anon,
            key=settings.key,
            secret=settings.secret,
            token=settings.token,
            profile=settings.profile,
            use_ssl=settings.use_ssl,
            requester_pays=settings.requester_pays,
            s3_additional_kwargs=settings.encryption,
            client_kwargs={
                "verify": None if settings.verify is True else settings.verify,
                "region_name": settings.region,
            },
            config_kwargs=botocore_settings(
                config, settings.addressing_style, seconds, sign_payload=settings.sign_payload
            ),
        )
        for seconds in (
            min(READ_PROGRESS_SECONDS, config.request_timeout_seconds),
            config.request_timeout_seconds,
        )
    ]
    checksums = checksums_for(settings, endpoint_url)
    return Filesystems(url, config, *filesystems, endpoint_url=endpoint_url, checksums=checksums)


def _gs(url: StoreUrl, options: GcsOptions, config: TransferConfig) -> Filesystems:
    """Make a filesystem of gcsfs."""
    if options.verify is not True:
        raise ConfigError("gcsfs has no 'verify'; use the native transport")
    import aiohttp

    # The registered class asks Google over gRPC what kind of bucket it is, for verbs that are not
    # used here: a minute of waiting for each bucket where the server is another.
    from gcsfs.core import GCSFileSystem

    endpoint_url = options.endpoint_url and server_url(options.endpoint_url, use_ssl=True)
    fs = GCSFileSystem(
        endpoint_url=endpoint_url,
        token="anon" if options.anon else options.token,
        requester_pays=options.payer or False,
        requests_timeout=aiohttp.ClientTimeout(
            total=config.request_timeout_seconds, sock_connect=config.connect_timeout_seconds
        ),
        skip_instance_cache=True,
        **({} if options.project is None else {"project": options.project}),
    )
    return Filesystems(url, config, fs, endpoint_url=endpoint_url)


def _new_s3fs(cls: Any, /, *args: Any, **options: Any) -> Any:
    """Make a filesystem of our own, whose botocore sends each request once."""
    config = {**(options.pop("config_kwargs", None) or {}), "retries": {"total_max_attempts": 1}}
    options["skip_instance_cache"] = True
    return cls(*args, config_kwargs=config, **options)


def _hidden(text: str, options: Mapping[str, Any], *, foreign: bool) -> str:
    """The text without what may be secret; what is short only where it stands by itself."""
    for name, value in options.items():
        if isinstance(value, Mapping):
            text = _hidden(text, value, foreign=foreign)
        elif isinstance(value, str) and value and is_secret(name, value, foreign=foreign):
            pattern = re.escape(value)
            if len(value) < _SHORT:
                pattern = rf"(?<!\w){pattern}(?!\w)"
            text = re.sub(pattern, "***", text)
    return text
