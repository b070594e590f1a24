"""Make the filesystems of fsspec that carry a store's requests.

Options of s3:// and gs:// are checked by their schemas and become those of s3fs and gcsfs. Options
of other schemes are known to their filesystem alone. Any of them may be a secret, so all but a few
well-known ones are treated as secrets.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from types import MethodType
from typing import TYPE_CHECKING, Any

from dcp_objstore.errors import (
    ConfigError,
    CredentialsError,
    DcpObjstoreError,
    ForkedProcessError,
    StoreUnavailableError,
)
from dcp_objstore.stores.credentials.base import Credentials
from dcp_objstore.stores.endpoint import s3_server, server_url
from dcp_objstore.stores.fsspec.errors import translate_fsspec
from dcp_objstore.stores.fsspec.greeting import (
    ANSWER_TIMEOUT_SECONDS,
    CONNECT_TIMEOUT_SECONDS,
    Greeting,
)
from dcp_objstore.stores.fsspec.kinds import is_gcsfs, is_s3fs
from dcp_objstore.stores.options.gcs import GcsOptions
from dcp_objstore.stores.options.parse import parse
from dcp_objstore.stores.options.s3 import S3Options
from dcp_objstore.stores.options.schemes import is_foreign, is_secret
from dcp_objstore.stores.s3.checksums import Checksums, checksums_for

if TYPE_CHECKING:
    from dcp_objstore.config import TransferConfig
    from dcp_objstore.stores.urls import StoreUrl

_SHORT = 4  # shorter than that, a value is a part of many words
FILESYSTEM = "fs"  # the option that holds a filesystem object


@dataclass(frozen=True, slots=True)
class Filesystems:
    """A filesystem and the same without retries.

    Attributes:
        fs: for everything.
        once: for requests that are sent once; the same object where retries are not ours to set.
        endpoint_url: the server, where the filesystem has such an option.
        checksums: that go with bodies over s3fs.
        greeting: the first contact with the server, where it is ours to make.
        pid: the process that made them.
    """

    fs: Any
    once: Any
    endpoint_url: str | None
    checksums: Checksums = field(default_factory=lambda: Checksums(None))
    greeting: Greeting | None = None
    pid: int = field(default_factory=os.getpid)

    def prepare(self) -> None:
        """Make the first contact with the server, unless it has been made.

        Raises:
            ForkedProcessError: the process was forked from the one that made the filesystems.
            StoreUnavailableError: see `Greeting.once`.
        """
        if self.pid != os.getpid() and self.fs.async_impl:
            raise ForkedProcessError(
                f"this store was opened in process {self.pid}, from which process {os.getpid()}"
                " was forked; its event loop is not here. Open it again in this process"
            )
        if self.greeting is not None:
            self.greeting.once()


def protocols(fs: object) -> Collection[str]:
    """The schemes of a filesystem object; empty if it is none."""
    found = getattr(fs, "protocol", ())
    return (found,) if isinstance(found, str) else tuple(found)


def check_filesystem(scheme: str, options: Mapping[str, object]) -> dict[str, object]:
    """Check `storage_options={"fs": …}` for a URL.

    Raises:
        ConfigError: it is no filesystem, does not fit the URL, is one for coroutines, or there are
            other options.
    """
    from fsspec import AbstractFileSystem

    fs = options[FILESYSTEM]
    if len(options) > 1:
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


def make_filesystems(
    url: StoreUrl,
    options: Mapping[str, Any],
    config: TransferConfig,
    stripped: tuple[str, ...] = (),
) -> Filesystems:
    """The filesystems for a URL. Never those of fsspec's own cache: they are for this use.

    A filesystem that was given is used as it is, but its cache of listings is switched off.

    Args:
        url: its prefix is not used.
        options: as checked.
        config: time-outs and retries, for s3fs and gcsfs. Others have their own.
        stripped: names of options that were left behind when the spec was pickled.

    Raises:
        ConfigError: the filesystem's package is not installed, or it does not take the options.
        CredentialsError: options were left behind when the spec was pickled, or are refused.
        StoreUnavailableError: the filesystem connects at once, and cannot.
    """
    if stripped:
        raise CredentialsError(
            f"{', '.join(stripped)} were given, but pickling left them out, as it may go to disk;"
            " give them again. multiprocessing carries them to its children"
        )
    if FILESYSTEM in options:
        fs = options[FILESYSTEM]
        _forget_listings(fs)
        return _with_once(fs, endpoint_url=getattr(fs, "endpoint_url", None))
    try:
        return _make(url, options, config)
    except DcpObjstoreError:
        raise
    except Exception as error:  # noqa: BLE001  each filesystem has its own
        kind = type(translate_fsspec(error))
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
    from fsspec.registry import get_filesystem_class

    plain = {"use_listings_cache": False, "skip_instance_cache": True}
    if url.scheme == "s3":
        cls = get_filesystem_class("s3")
        settings = parse(S3Options, options)
        given = _s3(settings, config)
        endpoint_url = given["endpoint_url"]
        fs = cls(**given, **plain)
        _set_tries(fs, 1 + config.max_retries)
        checksums = checksums_for(settings, endpoint_url)
        found = replace(_with_once(fs, endpoint_url=endpoint_url), checksums=checksums)
        return _with_greeting(found, url, config)
    if url.scheme == "gs":
        gcs = parse(GcsOptions, options)
        endpoint_url = gcs.endpoint_url and server_url(gcs.endpoint_url, use_ssl=True)
        cls = get_filesystem_class("gs")
        if endpoint_url is not None:
            # The newer class asks Google over gRPC what kind of bucket it is: a minute of
            # waiting for each where the server is another.
            from gcsfs.core import GCSFileSystem

            cls = GCSFileSystem
        fs = cls(**_gs(gcs, endpoint_url, config), **plain)
        _set_tries(fs, 1 + config.max_retries)
        return _with_greeting(_with_once(fs, endpoint_url=endpoint_url), url, config)
    cls = get_filesystem_class(url.scheme)
    if url.scheme in ("file", "memory"):
        fs = cls(skip_instance_cache=True)
        return Filesystems(fs, fs, None)
    of_url = cls._get_kwargs_from_urls(str(url))
    fs = cls(**{**of_url, **options, **plain})
    _forget_listings(fs)
    endpoint = options.get("endpoint_url")
    return Filesystems(fs, fs, endpoint if isinstance(endpoint, str) else None)


def _with_once(fs: Any, endpoint_url: str | None) -> Filesystems:
    if not is_s3fs(fs) and not is_gcsfs(fs):
        return Filesystems(fs, fs, endpoint_url)
    options = dict(fs.storage_options)
    if is_s3fs(fs):
        config_kwargs = {**(options.get("config_kwargs") or {}), "retries": _no_retries()}
        options["config_kwargs"] = config_kwargs
    once = type(fs)(*fs.storage_args, **{**options, "skip_instance_cache": True})
    _set_tries(once, 1)
    return Filesystems(fs, once, endpoint_url)


def _with_greeting(found: Filesystems, url: StoreUrl, config: TransferConfig) -> Filesystems:
    once, endpoint_url = found.once, found.endpoint_url
    connect = min(CONNECT_TIMEOUT_SECONDS, config.connect_timeout_seconds)
    answer = min(ANSWER_TIMEOUT_SECONDS, config.request_timeout_seconds)

    def make() -> Any:
        options = dict(once.storage_options)
        if is_s3fs(once):
            of_client = {"connect_timeout": connect, "read_timeout": answer}
            options["config_kwargs"] = {**options["config_kwargs"], **of_client}
        else:
            import aiohttp

            timeout = aiohttp.ClientTimeout(total=answer, sock_connect=connect)
            options["requests_timeout"] = timeout
        fs = type(once)(*once.storage_args, **{**options, "skip_instance_cache": True})
        _set_tries(fs, 1)
        return fs

    return replace(found, greeting=Greeting(make, url.bucket, endpoint_url))


def _no_retries() -> dict[str, int]:
    return {"total_max_attempts": 1}


def _set_tries(fs: Any, tries: int) -> None:
    """How often s3fs (around botocore's own retries) and gcsfs send a request."""
    if is_s3fs(fs):
        fs.retries = min(tries, type(fs).retries)
        return
    from gcsfs.retry import retry_request

    # gcsfs has the number fixed in a decorator.
    plain = getattr(type(fs)._request, "__wrapped__", None)
    if plain is not None and tries == 1:
        fs._request = MethodType(plain, fs)  # the decorator would log the error, with its frames
    elif plain is not None:
        fs._request = MethodType(retry_request(retries=tries)(plain), fs)


def _forget_listings(fs: Any) -> None:
    """A checkpoint must not be judged by what was there some time ago."""
    cache = getattr(fs, "dircache", None)
    if cache is not None and hasattr(cache, "use_listings_cache"):
        cache.use_listings_cache = False
    fs.invalidate_cache()


def _s3(settings: S3Options, config: TransferConfig) -> dict[str, Any]:
    style = settings.addressing_style
    # What is not told here, botocore looks up in the profile.
    endpoint_url, _ = s3_server(settings, Credentials("fsspec"))
    given: dict[str, Any] = {
        "anon": settings.anon,
        "key": settings.key,
        "secret": settings.secret,
        "token": settings.token,
        "endpoint_url": endpoint_url,
        "use_ssl": settings.use_ssl,
        "requester_pays": settings.requester_pays,
        "s3_additional_kwargs": settings.encryption,
        "client_kwargs": {
            "verify": None if settings.verify is True else settings.verify,
            **({"region_name": settings.region} if settings.region else {}),
        },
        "config_kwargs": {
            # Bodies are not signed unless asked for, as over the native transport: that and
            # botocore's checksum cost more than sending them. TLS and our digests protect them.
            "s3": {
                "payload_signing_enabled": settings.sign_payload,
                **({"addressing_style": style} if style else {}),
            },
            "request_checksum_calculation": "when_required",
            "response_checksum_validation": "when_required",
            "connect_timeout": config.connect_timeout_seconds,
            "read_timeout": config.request_timeout_seconds,
            "retries": {"mode": "standard", "total_max_attempts": 1 + config.max_retries},
            "max_pool_connections": 2 * max(config.upload_concurrency, config.download_concurrency),
        },
    }
    if settings.profile is not None:
        given["profile"] = settings.profile
    return given


def _gs(options: GcsOptions, endpoint_url: str | None, config: TransferConfig) -> dict[str, Any]:
    if options.verify is not True:
        raise ConfigError("gcsfs has no 'verify'; use the native transport")
    import aiohttp

    token = "anon" if options.anon else options.token
    given: dict[str, Any] = {
        "token": token,
        "endpoint_url": endpoint_url,
        "requests_timeout": aiohttp.ClientTimeout(
            total=config.request_timeout_seconds, sock_connect=config.connect_timeout_seconds
        ),
    }
    if options.project is not None:
        given["project"] = options.project
    if options.payer is not None:
        given["requester_pays"] = options.payer
    return given


def _hidden(text: str, options: Mapping[str, Any], *, foreign: bool) -> str:
    """The text without what may be secret; what is short only where it stands by itself."""
    for name, value in options.items():
        if isinstance(value, Mapping):
            text = _hidden(text, value, foreign=foreign)
        elif isinstance(value, str) and value and is_secret(name, value, foreign=foreign):
            found = re.escape(value)
            if len(value) < _SHORT:
                found = rf"(?<!\w){found}(?!\w)"
            text = re.sub(found, "***", text)
    return text
