"""Tokens that the GCS door of moto hands out, and takes back."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import quote

from google.auth.credentials import Credentials

from tests.support.servers import MotoServer


def post(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=30) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def is_valid(server: MotoServer, token: str) -> bool:
    headers = {"Authorization": f"Bearer {token}"}
    request = urllib.request.Request(f"{server.gcs_endpoint_url}/dcp-tests", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=30):
            return True
    except urllib.error.HTTPError as error:
        assert error.code == 401
        return False


class ShortLived(Credentials):
    """Credentials of google-auth whose tokens the server soon refuses.

    Args:
        server: what hands out the tokens.
        lasting_seconds: how long each of them lasts, and all that follow the last; one that has
            ended when it is handed out says that it lasts an hour.
    """

    def __init__(self, server: MotoServer, *lasting_seconds: float) -> None:
        super().__init__()
        self.server = server
        self.lasting_seconds = lasting_seconds
        self.handed_out: list[str] = []

    def refresh(self, request: object) -> None:
        lasting = self.lasting_seconds[min(len(self.handed_out), len(self.lasting_seconds) - 1)]
        url = f"{self.server.gcs_endpoint_url}/o/token?lifetime={lasting}"
        self.token = post(url)["access_token"]
        self.handed_out.append(self.token)
        said = timedelta(seconds=lasting if lasting > 0 else 3600)
        self.expiry = (datetime.now(UTC) + said).replace(tzinfo=None)

    def revoke(self, token: str) -> None:
        post(f"{self.server.gcs_endpoint_url}/o/revoke?token={quote(token)}")
