"""The S3 gateway of Hugging Face's storage buckets, in front of a server that speaks S3.

Its rules are those of "S3 Compatibility" (huggingface.co/docs/hub/storage-buckets-s3):
- the namespace is in the endpoint's path: `https://s3.hf.co/<namespace>`;
- GetObject is answered with 302 and the place of the object at the edge of a CDN, which knows
  nothing of the caller. Only what calls itself botocore, aws-cli or aws-sdk-rust gets the bytes;
- UploadPartCopy is not supported; conditions are kept by PutObject (the server behind does that).

What the page does not say is played as the strictest service would do it: the edge refuses what
carries credentials beside the token of its URL.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping

from tests.support.proxy import parse_asked
from tests.support.scripted import Answer, HttpServer
from tests.support.tampering import TamperingProxy

NAMESPACE = "/some-team"
_PROXIED_FOR = ("botocore", "aws-cli", "aws-sdk-rust")


def carries_credentials(target: str, headers: Mapping[str, str]) -> bool:
    """Whether a request shows a key, a signature or a session token, in any place."""
    named = {name.lower(): value for name, value in headers.items()}
    texts = (target, *named.values())
    return bool({"authorization", "x-amz-security-token", "cookie"} & set(named)) or any(
        secret in text for text in texts for secret in ("X-Amz-Signature", "X-Amz-Security-Token")
    )


class Edge(HttpServer):
    """The CDN: it gives the object that a token stands for, to whoever has the token.

    Attributes:
        objects: the bytes of an object and its ETag at the gateway, by the place that has a token.
        requests: target and headers of every request so far.
        e_tag: the ETag of its answers; None: that of the gateway.
    """

    def __init__(self) -> None:
        self.objects: dict[str, tuple[bytes, str]] = {}
        self.requests: list[tuple[str, dict[str, str]]] = []
        self.e_tag: str | None = None
        super().__init__()

    def reply(self, method: str, target: str, headers: dict[str, str], body: bytes) -> Answer:
        self.requests.append((target, headers))
        if target not in self.objects or carries_credentials(target, headers):
            return Answer(400, {}, b"")
        data, e_tag = self.objects[target]
        named = {"ETag": self.e_tag or e_tag}
        asked = parse_asked(method, target, headers, 0)
        if asked.start is None:
            return Answer(200, named, data)
        part = data[asked.start : asked.end]
        named["Content-Range"] = f"bytes {asked.start}-{asked.start + len(part) - 1}/{len(data)}"
        return Answer(206, named, part)


class HfGateway(TamperingProxy):
    """The gateway; `edge` is the CDN.

    Args:
        storage_options: of the server behind it.

    Attributes:
        edge_host: the host of the CDN, by name; its port is another one in any case.
    """

    def __init__(self, storage_options: Mapping[str, object]) -> None:
        super().__init__(storage_options)
        self.edge, self.edge_host = Edge(), "localhost"
        endpoint_url = self.endpoint_url + NAMESPACE
        self.storage_options = {**storage_options, "endpoint_url": endpoint_url}

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self.edge.stop()

    def reply(
        self, method: str, target: str, headers: dict[str, str], body: bytes
    ) -> Answer | None:
        if not target.startswith(f"{NAMESPACE}/"):
            return Answer(404, {}, b"")
        # By this the server knows what was signed.
        headers = {**headers, "X-Forwarded-Prefix": NAMESPACE}
        target = target.removeprefix(NAMESPACE)
        asked = parse_asked(method, target, headers, 0)
        if "x-amz-copy-source" in asked.headers and "partNumber" in asked.query:
            self.asked.append(asked)
            text = b"<Error><Code>NotImplemented</Code><Message>Not supported.</Message></Error>"
            return Answer(501, {"Content-Type": "application/xml"}, text)
        is_object = method == "GET" and asked.key.strip("/").count("/") > 0
        agent = asked.headers.get("user-agent", "").lower()
        if not is_object or any(name in agent for name in _PROXIED_FOR):
            return super().reply(method, target, headers, body)
        answer = super().reply(method, target, headers, body)
        if answer is None or answer.status not in (200, 206):
            return answer
        e_tag = next(value for name, value in answer.headers.items() if name.lower() == "etag")
        place = f"/cas/{secrets.token_hex(8)}?X-Edge-Token={secrets.token_hex(8)}"
        self.edge.objects[place] = self._whole(asked.key), e_tag
        there = self.edge.endpoint_url.replace("127.0.0.1", self.edge_host)
        return Answer(302, {"Location": there + place}, b"")
