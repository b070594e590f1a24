"""`rights_of`: the rights that a request needs, by the providers' own tables.

S3: moto's table of actions, which follows "Actions, resources, and condition keys for Amazon S3",
and "Conditional writes". GCS: "IAM permissions for XML methods" and "... for JSON methods". Azure:
"Permissions for calling data operations".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from urllib.parse import parse_qs

from moto.s3.responses import ACTION_MAP

from tests.support.tampering import Asked

_BLOBS = "Microsoft.Storage/storageAccounts/blobServices/containers/blobs"


def rights_of(scheme: str, asked: Asked) -> set[str]:
    """None if it is not signed: `doctor` asks so for the server's time, which every answer has."""
    signed = "authorization" in asked.headers or re.search("(sig|signature)=", asked.query, re.I)
    return _RIGHTS_OF[scheme](asked) if signed else set()


def _s3(asked: Asked) -> set[str]:
    """Actions of IAM."""
    key = asked.key.strip("/").partition("/")[2]
    if not key and asked.method == "HEAD":
        return {"s3:ListBucket"}
    actions = ACTION_MAP["KEY" if key else "BUCKET"][asked.method]
    query = parse_qs(asked.query, keep_blank_values=True)
    named = [action for name, action in actions.items() if name in query]
    found = {f"s3:{named[0] if named else actions['DEFAULT']}"}
    return found | {"s3:GetObject"} if "if-match" in asked.headers else found


def s3_resource(asked: Asked) -> str:
    return f"arn:aws:s3:::{asked.key.strip('/')}"


def _gcs(asked: Asked) -> set[str]:
    """Permissions of Cloud Storage."""
    if "/rewriteTo/" in asked.key:
        return {"storage.objects.get", "storage.objects.create"}
    if asked.key.startswith("/storage/v1/b/"):
        assert asked.method == "GET"
        return {"storage.buckets.get"}
    query = parse_qs(asked.query, keep_blank_values=True)
    if not asked.key.strip("/").partition("/")[2]:
        assert asked.method == "GET"
        uploads = "uploads" in query
        return {"storage.multipartUploads.list" if uploads else "storage.objects.list"}
    create = {"storage.objects.create"}
    if asked.method in ("PUT", "POST"):
        if "uploads" in query or "uploadId" in query:
            return {"storage.multipartUploads.create", *create}
        replaces = asked.headers.get("x-goog-if-generation-match", "0") != "0"
        return {"storage.objects.delete", *create} if replaces else create
    by_method = {
        "GET": ("storage.objects.get", "storage.multipartUploads.listParts"),
        "HEAD": ("storage.objects.get", ""),
        "DELETE": ("storage.objects.delete", "storage.multipartUploads.abort"),
    }
    return {by_method[asked.method]["uploadId" in query]}


def _azure(asked: Asked) -> set[str]:
    """Data actions of Azure's roles. Deletions come as a batch, a POST."""
    verbs = {"GET": "read", "HEAD": "read", "PUT": "write", "POST": "delete", "DELETE": "delete"}
    return {f"{_BLOBS}/{verbs[asked.method]}"}


_RIGHTS_OF: Mapping[str, Callable[[Asked], set[str]]] = {"s3": _s3, "gs": _gcs, "az": _azure}
