"""Tokens that the GCS door of moto hands out, and takes back."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from datetime import UTC, datetime, timedelta
from typing import Any

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
    """Credentials of google-auth whose tokens the server soon refuses."""

    def __init__(self, server: MotoServer, lifetime_seconds: float) -> None:
        super().__init__()
        self.server = server
        self.lifetime_seconds = lifetime_seconds
        self.handed_out: list[str] = []

    def refresh(self, request: object) -> None:
        url = f"{self.server.gcs_endpoint_url}/o/token?lifetime={self.lifetime_seconds}"
        self.token = post(url)["access_token"]
        self.handed_out.append(self.token)
        lifetime = timedelta(seconds=self.lifetime_seconds)
        self.expiry = (datetime.now(UTC) + lifetime).replace(tzinfo=None)
