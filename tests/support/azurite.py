"""Azurite, Microsoft's own emulator of Azure Blob Storage, and a container on it for one test.

It comes from npm: `npm install --prefix "$VIRTUAL_ENV" azurite`; looked for there and on PATH.
Where it is stricter or laxer than Azure, as far as we know: a wrong key is `AuthorizationFailure`
(Azure: `AuthenticationFailed`), and blocks that nobody committed make `If-None-Match: *` fail.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import hmac
import json
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.servers import BUCKET, Bucket, Server

# Both are public: they stand in Microsoft's documentation of the emulator.
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


HOUR_SECONDS = 3600


class Azurite(Server):
    """One server, in memory, on a port of its own choice.

    Args:
        certificate: PEM of a certificate and of its key. The server then speaks TLS, and takes the
            access tokens of Azure AD: it checks when they end, not who signed them.

    Attributes:
        endpoint_url: of the account.
    """

    def __init__(self, certificate: tuple[Path, Path] | None = None) -> None:
        binary = _binary()
        if binary is None:
            pytest.skip('Azurite is not installed: npm install --prefix "$VIRTUAL_ENV" azurite')
        options = ["--inMemoryPersistence", "--disableTelemetry", "--skipApiVersionCheck"]
        self._certificate = certificate
        if certificate is not None:
            cert, key = map(str, certificate)
            options += ["--cert", cert, "--key", key, "--oauth", "basic"]
        command = [binary, "--blobHost", "127.0.0.1", "--blobPort", "0", "--silent", *options]
        super().__init__(command, r"successfully listens on (https?://127\.0\.0\.1:\d+)")
        self.endpoint_url = f"{self.started[1]}/{ACCOUNT}"
        self.service.create_container(BUCKET)

    @property
    def storage_options(self) -> dict[str, object]:
        return {"account_name": ACCOUNT, "account_key": KEY, "endpoint_url": self.endpoint_url}

    @property
    def connection_string(self) -> str:
        return f"AccountName={ACCOUNT};AccountKey={KEY};BlobEndpoint={self.endpoint_url};"

    @functools.cached_property
    def service(self) -> Any:
        """Microsoft's own client, to look behind our back."""
        from azure.storage.blob import BlobServiceClient

        trusted = {} if self._certificate is None else {"connection_verify": self._certificate[0]}
        return BlobServiceClient.from_connection_string(self.connection_string, **trusted)


def _binary() -> str | None:
    installed = Path(sys.prefix) / "node_modules" / ".bin"
    return shutil.which("azurite-blob", path=str(installed)) or shutil.which("azurite-blob")


@dataclass
class AzureBucket(Bucket):
    """A fresh prefix of a container; looks into it with Microsoft's client."""

    server: Azurite | None = None

    def client(self) -> Any:
        """A `ContainerClient` of azure-storage-blob."""
        assert self.server is not None
        return self.server.service.get_container_client(self.name)

    def sizes(self, below: str = "") -> dict[str, int]:
        start = self._full(f"{below.strip('/')}/" if below else "")
        listed = self.client().list_blobs(name_starts_with=start)
        return {blob.name.removeprefix(start): blob.size for blob in listed}

    def get(self, key: str) -> bytes:
        body: bytes = self.client().download_blob(self._full(key)).readall()
        return body

    def put(self, key: str, data: bytes) -> None:
        self.client().upload_blob(self._full(key), data, overwrite=True)

    def delete(self, key: str) -> None:
        self.client().delete_blob(self._full(key))

    def uploads(self) -> list[str]:
        """Keys with blocks that nobody committed. Azure cannot abort: they go after a week."""
        committed = set(self.keys())
        client = self.client()
        listed = client.list_blobs(name_starts_with=self.prefix, include=["uncommittedblobs"])
        return sorted(
            blob.name for blob in listed if blob.name.removeprefix(self.prefix) not in committed
        )

    def part_sizes(self, key: str) -> list[int] | None:
        committed, _ = self.client().get_blob_client(self._full(key)).get_block_list()
        return [block.size for block in committed]


class Token(NamedTuple):
    token: str
    expires_on: int


class Identity:
    """Of the kind of azure-identity: its tokens end when they like, and say in an hour."""

    def __init__(self, *lasting_seconds: float) -> None:
        self.lasting_seconds = list(lasting_seconds)
        self.handed_out: list[str] = []

    def get_token(self, *_: str, tenant_id: str | None = None) -> Token:
        lasting = self.lasting_seconds[min(len(self.handed_out), len(self.lasting_seconds) - 1)]
        self.handed_out.append(access_token(lasting))
        return Token(self.handed_out[-1], int(time.time()) + HOUR_SECONDS)


def access_token(lasting_seconds: float) -> str:
    """A JWT (RFC 7519) with the claims of Azure AD's access tokens."""
    now = int(time.time())
    claims = {
        "aud": "https://storage.azure.com",
        "iss": "https://sts.windows-ppe.net/ab1f708d-50f6-404c-a006-d71b2ac7a606/",
        "iat": now - HOUR_SECONDS,
        "nbf": now - HOUR_SECONDS,
        "exp": now + lasting_seconds,
    }
    head = json.dumps({"alg": "HS256", "typ": "JWT"}).encode()
    parts = [base64.urlsafe_b64encode(part) for part in (head, json.dumps(claims).encode())]
    signature = hmac.digest(b"nobody checks it", b".".join(parts), hashlib.sha256)
    parts.append(base64.urlsafe_b64encode(signature))
    return b".".join(part.rstrip(b"=") for part in parts).decode()
