"""What a bucket does by itself with unfinished uploads and with what is overwritten."""

from __future__ import annotations

from typing import Literal

from dcp_objstore.doctor.access import covering_days
from dcp_objstore.stores import StoreSpec
from dcp_objstore.stores.spec import open_bucket_uploads


def incomplete_upload_rule(spec: StoreSpec) -> int | None:
    """After how many days the bucket removes unfinished uploads below a URL; None: never."""
    uploads = open_bucket_uploads(spec)
    return covering_days(uploads.lifecycle_rules(), uploads.prefix)


def versioning(spec: StoreSpec) -> Literal["Enabled", "Suspended"] | None:
    """Whether the bucket keeps what is overwritten and deleted."""
    return open_bucket_uploads(spec).versioning()
