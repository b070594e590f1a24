"""How an S3 store is to encrypt, from the options and the environment; for every client library.

The names and values of the variables are obstore's ("AmazonS3ConfigKey"), which reads them itself.
"""

from __future__ import annotations

import os
from typing import Final

from dcp_objstore.errors import ConfigError

SSE: Final = ("AES256", "aws:kms", "aws:kms:dsse")
_SSE: Final = "AWS_SERVER_SIDE_ENCRYPTION"
_KEY: Final = "AWS_SSE_KMS_KEY_ID"
_BUCKET_KEY: Final = "AWS_SSE_BUCKET_KEY_ENABLED"
_TRUE: Final = ("1", "true", "on", "yes", "y")
_FALSE: Final = ("0", "false", "off", "no", "n")


def sealing_of(
    sse: str | None, kms_key_id: str | None, bucket_key: bool | None
) -> dict[str, str | bool | None]:
    """Fill in from the environment what the options leave open.

    Args:
        sse: `ServerSideEncryption` of the options, as the others, or None.
        kms_key_id: `SSEKMSKeyId`.
        bucket_key: `BucketKeyEnabled`.

    Returns:
        The same three as `sse`, `sse_kms_key_id` and `sse_bucket_key`.

    Raises:
        ConfigError: the environment asks for what we cannot do, or names a key that nothing would
            encrypt with; obstore would send it with AES256 as well, which AWS refuses.
    """
    chosen = sse or os.environ.get(_SSE) or None
    if chosen not in (None, *SSE):
        raise ConfigError(f"the environment's {_SSE} must be one of {', '.join(SSE)}")
    key, flag = os.environ.get(_KEY) or None, _flag()
    if chosen in (None, "AES256"):
        if key is not None or flag:
            name = _BUCKET_KEY if key is None else _KEY
            raise ConfigError(
                f"the environment's {name} has no effect with {chosen or 'no encryption'}: set"
                f" 'ServerSideEncryption' or {_SSE} to aws:kms, or unset it"
            )
        return {"sse": chosen, "sse_kms_key_id": None, "sse_bucket_key": None}
    return {
        "sse": chosen,
        "sse_kms_key_id": key if kms_key_id is None else kms_key_id,
        "sse_bucket_key": flag if bucket_key is None else bucket_key,
    }


def _flag() -> bool | None:
    text = os.environ.get(_BUCKET_KEY, "").lower()
    if text not in ("", *_TRUE, *_FALSE):
        raise ConfigError(f"the environment's {_BUCKET_KEY} must be true or false")
    return text in _TRUE if text else None
