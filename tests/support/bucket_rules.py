"""What a bucket does by itself with unfinished uploads."""

from __future__ import annotations

from dcp_objstore.doctor.access import covering_days
from dcp_objstore.stores import StoreSpec
from dcp_objstore.stores.spec import open_bucket_uploads


def incomplete_upload_rule(spec: StoreSpec) -> int | None:
    """After how many days the bucket removes unfinished uploads below a URL; None: never."""
    uploads = open_bucket_uploads(spec)
    return covering_days(uploads.lifecycle_rules(), uploads.prefix)
