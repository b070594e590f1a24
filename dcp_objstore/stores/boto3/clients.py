"""boto3 clients for one bucket, made where they are used: each process makes its own.

A forked child finds none of its parent's here and makes new ones. It closes nothing: sockets and
locks of the parent's stay as the fork left them, unused.
"""

from __future__ import annotations

import importlib.util
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dcp_objstore.config import TransferConfig
from dcp_objstore.errors import ConfigError
from dcp_objstore.stores.credentials.aws import no_s3_credentials, open_boto3_session
from dcp_objstore.stores.credentials.base import Credentials
from dcp_objstore.stores.endpoint import is_virtual, s3_server
from dcp_objstore.stores.options.parse import parse
from dcp_objstore.stores.options.s3 import S3Options
from dcp_objstore.stores.retries import READ_PROGRESS_SECONDS, Requests
from dcp_objstore.stores.s3.checksums import checksums_for
from dcp_objstore.stores.s3.errors import judge_botocore
from dcp_objstore.stores.s3.settings import botocore_settings
from dcp_objstore.stores.s3.store import Use

if TYPE_CHECKING:
    from dcp_objstore.stores.urls import StoreUrl


@dataclass
class _OfProcess:
    """The session and the clients of one process."""

    session: Any
    endpoint_url: str | None
    region: str
    lock: Any = field(default_factory=threading.Lock)
    clients: dict[str, Any] = field(default_factory=dict)


class Boto3Clients(Requests):
    """Makes each client on first use. They differ because time-outs are per client.

    Args:
        url: its prefix is not used.
        options: as checked by `check_options`.
        config: time-outs, retries, and how many connections there may be.
        stripped: names of options that were left behind when the spec was pickled.

    Attributes:
        endpoint_url: the server, or None for AWS.
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
        self._of_process: dict[int, _OfProcess] = {}
        self.payer = {"RequestPayer": "requester"} if self._settings.requester_pays else {}
        self.sealing = self._settings.encryption
        self.endpoint_url = self._mine().endpoint_url
        super().__init__(config, judge_botocore, self.endpoint_url, url.scheme, url.bucket)
        self.checksums = checksums_for(self._settings, self.endpoint_url)

    def get(self, use: Use) -> Any:
        """The client for a use, which sends each request once.

        Args:
            use: `write` waits `request_timeout_seconds` for an answer, `small` less; `read` gives
                up sooner on a body that makes no progress.
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

    def _make(self, use: Use, mine: _OfProcess) -> Any:
        import botocore
        from botocore.config import Config

        config, settings = self._config, self._settings
        seconds = config.request_timeout_seconds
        if use == "read":
            seconds = min(READ_PROGRESS_SECONDS, seconds)
        elif use == "small":
            seconds = self.small_timeout_seconds
        virtual = is_virtual(settings, mine.endpoint_url, self._url.bucket)
        style = "virtual" if virtual else "path"
        given = botocore_settings(config, style, seconds, sign_payload=settings.sign_payload)
        if settings.anon:
            given["signature_version"] = botocore.UNSIGNED
        return mine.session.client(
            "s3",
            endpoint_url=mine.endpoint_url,
            region_name=mine.region,
            use_ssl=settings.use_ssl,
            # None leaves it to AWS_CA_BUNDLE and the profile.
            verify=None if settings.verify is True else settings.verify,
            config=Config(**given),
        )
