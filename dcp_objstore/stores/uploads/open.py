"""Open the uploads below a URL: S3's and GCS's through boto3, those of `file://` as files."""

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
        UnsupportedError: it is neither S3 nor GCS, or boto3 is not installed; says what to do
            instead.
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
    own = spec.config.transport == "native" and "fs" not in spec.storage_options
    if url.scheme != "s3" and not (url.scheme == "gs" and own):
        raise UnsupportedError(
            f"unfinished uploads to {url.scheme}:// cannot be listed; a lifecycle rule of the"
            " bucket removes them"
        )
    if importlib.util.find_spec("boto3") is None:
        extras = "s3" if url.scheme == "s3" else "gcs,s3"
        raise UnsupportedError(
            "boto3 is not installed, which lists unfinished uploads: pip install"
            f" 'dcp-objstore[{extras}]'"
        )
    if url.scheme == "gs":
        from dcp_objstore.stores.uploads.gcs import GcsUploads

        return GcsUploads(spec)
    with boto_errors(spec.url):
        clients = spec.boto3_clients()
        client = clients.get("write")
    root = f"{url.prefix}/" if url.prefix else ""
    return S3Uploads(client, clients, bucket=url.bucket, root=root, extra=clients.payer)
