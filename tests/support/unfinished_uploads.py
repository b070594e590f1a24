"""Multipart uploads that nobody completes, and the bucket rules that are about them."""

from __future__ import annotations

from tests.support.servers import Bucket

PART = b"x" * 5 * 1024 * 1024


def begin_upload(bucket: Bucket, key: str, parts: int = 1) -> str:
    client = bucket.client()
    full = bucket.prefix + key
    upload_id: str = client.create_multipart_upload(Bucket=bucket.name, Key=full)["UploadId"]
    for number in range(1, parts + 1):
        client.upload_part(
            Bucket=bucket.name, Key=full, UploadId=upload_id, PartNumber=number, Body=PART
        )
    return upload_id


class Before:
    """Something of somebody else's, and the assertion that it is all there is."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        bucket.put("step-1/_COMMIT", b"theirs")
        begin_upload(bucket, "step-1/theirs")

    def check(self) -> None:
        assert self.bucket.keys() == ["step-1/_COMMIT"]
        assert self.bucket.get("step-1/_COMMIT") == b"theirs"
        assert self.bucket.uploads() == [f"{self.bucket.prefix}step-1/theirs"]
