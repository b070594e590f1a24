"""Open the uploads below a URL: S3's through boto3, those of `file://` as files."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from dcp_objstore.errors import UnsupportedError
from dcp_objstore.stores.local import LocalUploads
from dcp_objstore.stores.uploads.s3 import S3Uploads, boto_errors

if TYPE_CHECKING:
    from dcp_objstore.stores.spec import StoreSpec


def open_uploads(spec: StoreSpec) -> S3Uploads | LocalUploads:
    """Open the unfinished uploads below a URL; on `file://` the temporary objects.

    Raises:
        As `open_bucket_uploads`.
    """
    if spec.parsed.scheme == "file":
        return LocalUploads(Path(spec.parsed.prefix))
    return open_bucket_uploads(spec)


def open_bucket_uploads(spec: StoreSpec) -> S3Uploads:
    """Open the multipart uploads below a URL, and what the bucket does with them.

    Raises:
        UnsupportedError: it is not S3, or boto3 is not installed; says what to do instead.
        ConfigError, CredentialsError: as for the store.
    """
    url = spec.parsed
    if url.scheme in ("file", "memory"):
        raise UnsupportedError(f"{url.scheme}:// has no multipart uploads")
    if url.scheme == "az":
        raise UnsupportedError(
            "unfinished uploads to az:// cannot be listed; Azure removes their blocks by itself, a"
            " week after the last one"
        )
    if url.scheme != "s3":
        raise UnsupportedError(
            f"unfinished uploads to {url.scheme}:// cannot be listed; a lifecycle rule of the"
            " bucket removes them"
        )
    if importlib.util.find_spec("boto3") is None:
        raise UnsupportedError(
            "boto3 is not installed, which lists unfinished uploads: pip install 'dcp-objstore[s3]'"
        )
    with boto_errors(spec.url):
        clients = spec.boto3_clients()
        client = clients.get("write")
    root = f"{url.prefix}/" if url.prefix else ""
    return S3Uploads(client, clients, bucket=url.bucket, root=root, extra=clients.payer)
