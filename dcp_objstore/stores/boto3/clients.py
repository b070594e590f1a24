"""boto3 clients for one bucket, made where they are used: each process makes its own.

A forked child finds none of its parent's here and makes new ones. It closes nothing: sockets and
locks of the parent's stay as the fork left them, unused.
"""

from __future__ import annotations

import http.client
import importlib.util
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from dcp_objstore.config import TransferConfig
from dcp_objstore.errors import ConfigError
from dcp_objstore.observe.dispatch import emit_retry
from dcp_objstore.stores.credentials.aws import no_s3_credentials, open_boto3_session
from dcp_objstore.stores.credentials.base import Credentials
from dcp_objstore.stores.endpoint import is_virtual, s3_server
from dcp_objstore.stores.options.parse import parse
from dcp_objstore.stores.options.s3 import S3Options
from dcp_objstore.stores.s3.checksums import checksums_for

if TYPE_CHECKING:
    from dcp_objstore.stores.urls import StoreUrl

# As in `obstore.clients`: the longest wait of a read for the next bytes, and the longest wait for a
# server that has never answered.
_READ_PROGRESS_TIMEOUT_SECONDS = 30.0
_FIRST_RETRY_TIMEOUT_SECONDS = 5.0
# Where botocore keeps what belongs to one request.
_KEY = "dcp_objstore_key"
_STARTED = "dcp_objstore_started"
_LAST = "dcp_objstore_last_error"


@dataclass
class _OfProcess:
    """What one process has made."""

    session: Any
    endpoint_url: str | None
    region: str
    lock: Any = field(default_factory=threading.Lock)
    clients: dict[str, Any] = field(default_factory=dict)


class Boto3Clients:
    """Makes each client on first use. They differ because time-outs and retries are per client.

    Args:
        url: its prefix is not used.
        options: as checked by `check_options`.
        config: time-outs, retries, and how many connections there may be.
        stripped: names of options that were left behind when the spec was pickled.

    Attributes:
        endpoint_url: the server, or None for AWS.
        max_retries: of one request.
        payer: arguments of every request to a bucket whose requests the caller pays for.
        sealing: arguments of every write: how the store is to encrypt.
        checksums: that go with bodies.

    Raises:
        CredentialsError: there are none.
        ConfigError: boto3 is not installed; an endpoint or certificate that we cannot use; a
            checksum that needs awscrt, which is not installed.
    """

    def __init__(
        self,
        url: StoreUrl,
        options: Mapping[str, Any],
        config: TransferConfig,
        stripped: tuple[str, ...] = (),
    ) -> None:
        if importlib.util.find_spec("boto3") is None:
            raise ConfigError("boto3 is not installed: pip install 'dcp-objstore[s3]'")
        self._url = url
        self._settings = parse(S3Options, options)
        self._config = config
        self._stripped = stripped
        self.max_retries = config.max_retries
        self._of_process: dict[int, _OfProcess] = {}
        self.payer = {"RequestPayer": "requester"} if self._settings.requester_pays else {}
        self.sealing = self._settings.encryption
        self.endpoint_url = self._mine().endpoint_url
        self.checksums = checksums_for(self._settings, self.endpoint_url)

    def get(self, use: Literal["read", "write", "once"]) -> Any:
        """The client for a use.

        Args:
            use: `write` retries and waits `request_timeout_seconds` for an answer; `once` is the
                same without retries; `read` retries and gives up sooner on a body that makes no
                progress.
        """
        mine = self._mine()
        with mine.lock:
            if use not in mine.clients:
                mine.clients[use] = self._make(use, mine)
            return mine.clients[use]

    def _mine(self) -> _OfProcess:
        pid = os.getpid()
        found = self._of_process.get(pid)
        # `setdefault` is atomic: of two threads that come here together, one session is kept.
        return found or self._of_process.setdefault(pid, self._open())

    def _open(self) -> _OfProcess:
        settings = self._settings
        found = open_boto3_session(
            "the AWS settings" if settings.profile is None else f"profile {settings.profile!r}",
            aws_access_key_id=settings.key,
            aws_secret_access_key=settings.secret,
            aws_session_token=settings.token,
            profile_name=settings.profile,
            region_name=settings.region,
        )
        if not settings.anon and not found.has_credentials:
            raise no_s3_credentials(self._stripped)
        known = Credentials("boto3", region=found.region, endpoint_url=found.endpoint_url)
        endpoint, region = s3_server(settings, known)
        return _OfProcess(found.session, endpoint, region)

    def _make(self, name: str, mine: _OfProcess) -> Any:
        config, settings = self._config, self._settings
        seconds = config.request_timeout_seconds
        if name == "read":
            seconds = min(_READ_PROGRESS_TIMEOUT_SECONDS, seconds)
        client = mine.session.client(
            "s3",
            endpoint_url=mine.endpoint_url,
            region_name=mine.region,
            use_ssl=settings.use_ssl,
            # None leaves it to AWS_CA_BUNDLE and the profile.
            verify=None if settings.verify is True else settings.verify,
            config=_botocore_config(
                settings,
                virtual=is_virtual(settings, mine.endpoint_url, self._url.bucket),
                connect_timeout=config.connect_timeout_seconds,
                read_timeout=seconds,
                # A save and a load may run at the same time.
                max_pool_connections=config.upload_concurrency + config.download_concurrency,
                retries={
                    "mode": "standard",
                    "total_max_attempts": 1 if name == "once" else 1 + config.max_retries,
                },
            ),
        )
        _Patience(config.retry_timeout_seconds).watch(client)
        return client


class _Patience:
    """Ends botocore's retries after a time, too: it counts tries only.

    A server that has never answered is given up sooner: a wrong endpoint is likelier than an
    outage.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._reached = False

    def watch(self, client: Any) -> None:
        client.meta.events.register("before-parameter-build.s3", self._is_asked)
        client.meta.events.register_first("before-call.s3", self._begins)
        client.meta.events.register_first("needs-retry.s3", self._answered)
        client.meta.events.register("request-created.s3", self._sends)

    def _is_asked(self, params: dict[str, Any], context: dict[str, Any], **_: object) -> None:
        context[_KEY] = params.get("Key", "")

    def _begins(self, context: dict[str, Any], **_: object) -> None:
        context[_STARTED] = time.monotonic()

    def _sends(self, request: Any, **_: object) -> None:
        """Tell the save or load that the request belongs to of a retry."""
        context = request.context
        attempt = context.get("retries", {}).get("attempt", 1)
        if attempt > 1 and _STARTED in context:
            error = context.get(_LAST, "no answer")
            emit_retry(context.get(_KEY, ""), attempt, error, context[_STARTED])

    def _answered(
        self,
        request_dict: Any,
        operation: Any,
        response: Any = None,
        caught_exception: Exception | None = None,
        **_: object,
    ) -> None:
        """When it is too late for a retry, raise what botocore would raise after the last one."""
        from botocore.exceptions import ClientError

        if caught_exception is not None:
            request_dict["context"][_LAST] = type(caught_exception).__name__
        elif response is not None:
            request_dict["context"][_LAST] = f"HTTP status {response[0].status_code}"
        self._reached = self._reached or response is not None
        seconds = self._seconds
        if not self._reached:
            seconds = min(seconds, _FIRST_RETRY_TIMEOUT_SECONDS)
        if time.monotonic() - request_dict["context"][_STARTED] <= seconds:
            return
        if caught_exception is not None:
            raise caught_exception
        if response is not None and response[0].status_code >= http.client.MULTIPLE_CHOICES:
            raise ClientError(response[1], operation.name)


def _botocore_config(settings: S3Options, *, virtual: bool, **transfer: Any) -> Any:
    import botocore
    from botocore.config import Config

    return Config(
        s3={
            "addressing_style": "virtual" if virtual else "path",
            # SHA-256 of every body costs 1 CPU-second per GiB; see `obstore.makers`.
            "payload_signing_enabled": settings.sign_payload,
        },
        # By default botocore computes CRC32 of every body in Python's zlib and sends it in a
        # trailer over TLS, which some stores that speak S3 refuse; see `s3.checksums`.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        **({"signature_version": botocore.UNSIGNED} if settings.anon else {}),
        **transfer,
    )
