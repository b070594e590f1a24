"""A server that accepts each access key for a few requests only, and a source of fresh ones.

with ExpiringKeys(bucket.s3_options, uses=5) as server:
    environment = short_lived_profile(tmp_path, server.endpoint_url)

Counted, not timed, so that a key expires in the middle of a save however fast that is. It does not
check signatures; use it before a server that does not either (moto).
"""

from __future__ import annotations

import http.client
import re
import stat
import sys
import threading
from collections import Counter
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

_REFUSAL = (
    b"<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"
)
_SIGNED_BY = re.compile(r"Credential=([^/&]+)/")
_DROPPED = ("connection", "expect", "host", "content-length", "transfer-encoding")


class ExpiringKeys(ThreadingHTTPServer):
    """HTTP/1.1 on loopback, in front of another server.

    Args:
        storage_options: of the server behind it.
        uses: requests for which a key is accepted; then the answer is 400 ExpiredToken, as of AWS.

    Attributes:
        endpoint_url: for clients that are to go through it.
        used: how often each access key id was accepted.
        refused: requests with a key that had expired.
    """

    daemon_threads = True

    def __init__(self, storage_options: Mapping[str, object], uses: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.behind = urlsplit(str(storage_options["endpoint_url"])).netloc
        self.endpoint_url = f"http://127.0.0.1:{self.server_address[1]}"
        self.used: Counter[str] = Counter()
        self.refused = 0
        self._uses = uses
        self._lock = threading.Lock()

    def accepts(self, key: str) -> bool:
        """Count a request that is signed by a key."""
        with self._lock:
            fresh = self.used[key] < self._uses
            self.used[key] += fresh
            self.refused += not fresh
        return fresh

    def __enter__(self) -> ExpiringKeys:
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, *_: Any) -> None:
        """Clients may go away in the middle of an answer."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ExpiringKeys

    def _do(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        # In a header, or in a signed URL.
        signed = _SIGNED_BY.search(self.headers.get("Authorization", "") or unquote(self.path))
        status, headers, answer = 400, [("Content-Length", str(len(_REFUSAL)))], _REFUSAL
        if signed is not None and self.server.accepts(signed[1]):
            status, headers, answer = self._ask(body)
        self.send_response_only(status)
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _do  # noqa: N815 - http.server's names

    def _ask(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        connection = http.client.HTTPConnection(self.server.behind, timeout=30)
        headers = {n: v for n, v in self.headers.items() if n.lower() not in _DROPPED}
        connection.request(self.command, self.path, body, headers)
        found = connection.getresponse()
        received = found.read()
        length = found.getheader("Content-Length", str(len(received)))
        kept = [(n, v) for n, v in found.getheaders() if n.lower() not in _DROPPED]
        connection.close()
        return found.status, [*kept, ("Content-Length", length)], received

    def log_message(self, *_: Any) -> None:
        pass


def short_lived_profile(folder: Path, endpoint_url: str, seconds: int = 1) -> dict[str, str]:
    """Write a profile whose `credential_process` gives other keys each time it is asked.

    Args:
        seconds: after which they expire, as the process says.

    Returns:
        The environment that makes it the profile in use.
    """
    script = folder / "keys"
    script.write_text(
        f"#!{sys.executable}\n"
        "import datetime, json, secrets\n"
        f"until = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds={seconds})\n"
        "print(json.dumps({'Version': 1, 'AccessKeyId': 'ASIA' + secrets.token_hex(8),"
        " 'SecretAccessKey': secrets.token_hex(16), 'SessionToken': secrets.token_hex(16),"
        " 'Expiration': until.isoformat()}))\n"
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    config = folder / "config"
    config.write_text(
        f"[profile short]\ncredential_process = {script}\nendpoint_url = {endpoint_url}\n"
    )
    return {
        "AWS_CONFIG_FILE": str(config),
        "AWS_SHARED_CREDENTIALS_FILE": str(folder / "none"),
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_PROFILE": "short",
    }
