"""Make the filesystems of fsspec that carry a store's requests.

Options of s3:// and gs:// are checked by their schemas and become those of s3fs and gcsfs. Options
of other schemes are known to their filesystem alone. Any of them may be a secret, so all but a few
well-known ones are treated as secrets.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from types import MethodType
from typing import TYPE_CHECKING, Any

from dcp_objstore.config import at_most
from dcp_objstore.errors import (
    ConfigError,
    CredentialsError,
    DcpObjstoreError,
    ForkedProcessError,
    PermissionDeniedError,
    StoreUnavailableError,
)
from dcp_objstore.stores.credentials.base import Credentials
from dcp_objstore.stores.endpoint import s3_server, server_url
from dcp_objstore.stores.errors import Failure
from dcp_objstore.stores.fsspec.errors import judge_fsspec, translate_fsspec
from dcp_objstore.stores.fsspec.kinds import is_gcsfs, is_s3fs
from dcp_objstore.stores.options.gcs import GcsOptions
from dcp_objstore.stores.options.parse import parse
from dcp_objstore.stores.options.s3 import S3Options
from dcp_objstore.stores.options.schemes import is_foreign, is_secret
from dcp_objstore.stores.retries import READ_PROGRESS_SECONDS, Requests
from dcp_objstore.stores.s3.checksums import Checksums, checksums_for

if TYPE_CHECKING:
    from dcp_objstore.config import TransferConfig
    from dcp_objstore.stores.urls import StoreUrl

_SHORT = 4  # shorter than that, a value is a part of many words
FILESYSTEM = "fs"  # the option that holds a filesystem object


class Filesystems(Requests):
    """The filesystems that carry the requests to one bucket.

    s3fs and gcsfs send each request once here; what failed is sent again by the adapters. Other
    filesystems have retries of their own, which cannot be seen from here.

    Args:
        url: its prefix is not used.
        config: time-outs and retries.
        read: for reads.
        write: for writes. It differs in its time-outs, where those are ours to set.
        endpoint_url: the server, where the filesystem has such an option.
        checksums: that go with bodies over s3fs.
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
        super().__init__(config, self._judge_error, endpoint_url, url.scheme, url.bucket)
        self.read = read
        self.write = read if write is None else write
        self.endpoint_url = endpoint_url
        self.checksums = checksums or Checksums(None)
        self.request_timeout_seconds = config.request_timeout_seconds
        self._pid = os.getpid()

    def check_process(self) -> None:
        """Raise `ForkedProcessError` if the process was forked from the one that made them."""
        if self._pid != os.getpid() and self.read.async_impl:
            raise ForkedProcessError(
                f"this store was opened in process {self._pid}, from which process {os.getpid()}"
                " was forked; its event loop is not here. Open it again in this process"
            )

    def translate(self, error: Exception) -> DcpObjstoreError:
        """Translate what they raised."""
        # gcsfs makes an OSError without an errno of a 403, and of nothing else.
        bare = PermissionDeniedError if is_gcsfs(self.read) else StoreUnavailableError
        return translate_fsspec(error, bare)

    def _judge_error(self, error: Exception) -> Failure:
        return judge_fsspec(error, self.translate(error))


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

    A filesystem that was given is used as it is, but its cache of listings is switched off; of s3fs
    and gcsfs a copy is used, with the same options, that sends each request once.

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
        endpoint_url = getattr(fs, "endpoint_url", None)
        return Filesystems(url, config, _sending_once(fs), endpoint_url=endpoint_url)
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
    # Reads have a shorter time-out between bytes that arrive.
    progress_seconds = min(READ_PROGRESS_SECONDS, config.request_timeout_seconds)
    if url.scheme == "s3":
        cls = get_filesystem_class("s3")
        settings = parse(S3Options, options)
        found = []
        for seconds in (progress_seconds, config.request_timeout_seconds):
            given = _s3(settings, config, seconds)
            found.append(_without_retries(cls(**given, **plain)))
        checksums = checksums_for(settings, given["endpoint_url"])
        return Filesystems(
            url, config, *found, endpoint_url=given["endpoint_url"], checksums=checksums
        )
    if url.scheme == "gs":
        gcs = parse(GcsOptions, options)
        endpoint_url = gcs.endpoint_url and server_url(gcs.endpoint_url, use_ssl=True)
        cls = get_filesystem_class("gs")
        if endpoint_url is not None:
            # The newer class asks Google over gRPC what kind of bucket it is: a minute of
            # waiting for each where the server is another.
            from gcsfs.core import GCSFileSystem

            cls = GCSFileSystem
        found = [
            _without_retries(cls(**_gs(gcs, endpoint_url, config, seconds), **plain))
            for seconds in (progress_seconds, None)
        ]
        return Filesystems(url, config, *found, endpoint_url=endpoint_url)
    cls = get_filesystem_class(url.scheme)
    if url.scheme in ("file", "memory"):
        return Filesystems(url, config, cls(skip_instance_cache=True))
    of_url = cls._get_kwargs_from_urls(str(url))
    fs = cls(**{**of_url, **options, **plain})
    _forget_listings(fs)
    endpoint = options.get("endpoint_url")
    endpoint_url = endpoint if isinstance(endpoint, str) else None
    return Filesystems(url, config, fs, endpoint_url=endpoint_url)


def _sending_once(fs: Any) -> Any:
    """A copy of a filesystem without retries of its own; itself where those are not ours to set."""
    if not is_s3fs(fs) and not is_gcsfs(fs):
        return fs
    options = {**fs.storage_options, "skip_instance_cache": True, "use_listings_cache": False}
    if is_s3fs(fs):
        options["config_kwargs"] = {**_botocore_once(), **(options.get("config_kwargs") or {})}
        options["config_kwargs"]["retries"] = {"total_max_attempts": 1}
    return _without_retries(type(fs)(*fs.storage_args, **options))


def _without_retries(fs: Any) -> Any:
    """Switch off what s3fs does around botocore's retries, and gcsfs in a decorator."""
    if is_s3fs(fs):
        fs.retries = 1
        return fs
    from fsspec.asyn import sync

    # The decorator would also log an error, with its frames.
    plain = getattr(type(fs)._request, "__wrapped__", None)
    if plain is not None:
        fs._request = MethodType(plain, fs)
    _without_resending(sync(fs.loop, fs._set_session))
    return fs


def _without_resending(session: Any) -> Any:
    """Keep a session of aiohttp from sending a GET, PUT or DELETE again whose connection broke.

    aiohttp has no public switch. A conditional PUT that is sent twice may fail by its own success.
    """
    if hasattr(session, "_retry_connection"):
        session._retry_connection = False
    return session


def _botocore_once() -> dict[str, Any]:
    """Settings of s3fs's botocore by which neither it nor aiohttp sends a request again."""
    from aiobotocore.httpsession import AIOHTTPSession

    class OnceSession(AIOHTTPSession):  # type: ignore[misc]
        async def _get_session(self, proxy_url: Any) -> Any:
            return _without_resending(await super()._get_session(proxy_url))

    return {"http_session_cls": OnceSession, "retries": {"total_max_attempts": 1}}


def _forget_listings(fs: Any) -> None:
    """A checkpoint must not be judged by what was there some time ago."""
    cache = getattr(fs, "dircache", None)
    if cache is not None and hasattr(cache, "use_listings_cache"):
        cache.use_listings_cache = False
    fs.invalidate_cache()


def _s3(settings: S3Options, config: TransferConfig, read_seconds: float) -> dict[str, Any]:
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
            "read_timeout": read_seconds,
            **_botocore_once(),
            "max_pool_connections": 2
            * max(at_most(config.upload_concurrency), at_most(config.download_concurrency)),
        },
    }
    if settings.profile is not None:
        given["profile"] = settings.profile
    return given


def _gs(
    options: GcsOptions,
    endpoint_url: str | None,
    config: TransferConfig,
    read_seconds: float | None,
) -> dict[str, Any]:
    if options.verify is not True:
        raise ConfigError("gcsfs has no 'verify'; use the native transport")
    import aiohttp

    token = "anon" if options.anon else options.token
    given: dict[str, Any] = {
        "token": token,
        "endpoint_url": endpoint_url,
        "requests_timeout": aiohttp.ClientTimeout(
            total=config.request_timeout_seconds,
            sock_connect=config.connect_timeout_seconds,
            sock_read=read_seconds,
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
