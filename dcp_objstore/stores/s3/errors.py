"""Read botocore's errors, for boto3 and s3fs.

Unlike obstore's, botocore's errors carry status and code as attributes, and connections that fail
have their own classes, so no text is read here.
"""

from __future__ import annotations

import http.client
import ssl
from dataclasses import replace
from functools import partial
from typing import Any

from dcp_objstore.contexts import drop_frames
from dcp_objstore.errors import ConfigError, CredentialsError, DcpObjstoreError
from dcp_objstore.stores import errors
from dcp_objstore.stores.errors import ErrorDetails, Meaning

# These need a bucket and nothing else, so that no object can be missing.
_NEED_A_BUCKET = ("ListObjectsV2", "PutObject", "CreateMultipartUpload")
# The `args` of a KeyError over an answer that lacks what every store's has. The last is missing
# where a 200 brings an error as its body.
_LACKS = (("ETag",), ("UploadId",), ("CopyPartResult",))
_NOT_CONNECTED = "botocore.EndpointConnectionError botocore.ProxyConnectionError"
# What a request met that got no answer: types (see `is_of`), and what they mean. The first counts.
_NO_ANSWERS = {
    "botocore.CredentialRetrievalError botocore.LoginError botocore.NoAuthTokenError"
    " botocore.NoCredentialsError botocore.PartialCredentialsError botocore.ProfileNotFound"
    " botocore.SSOError botocore.TokenRetrievalError": Meaning(
        CredentialsError, "there are no credentials, or they could not be renewed"
    ),
    _NOT_CONNECTED: errors.NOT_CONNECTED,
    "botocore.ConnectTimeoutError botocore.ReadTimeoutError": errors.LATE,
    "botocore.HTTPClientError botocore.ConnectionError dcp_objstore.BrokenOffError"
    " builtins.OSError": errors.LOST,
    # botocore asks which region a redirect means, and is redirected again.
    "builtins.RecursionError": Meaning(
        ConfigError, "the store redirects every request", "check endpoint_url and the region"
    ),
    "botocore.BotoCoreError builtins.ValueError builtins.TypeError": Meaning(
        ConfigError, "boto3 refused the request"
    ),
}
# After these the store has not got the request.
_UNSENT = (*_NOT_CONNECTED.split(), "botocore.ConnectTimeoutError")


def read_botocore(error: Exception, *, conditional: bool = False) -> ErrorDetails:
    """Read what an operation of botocore raised.

    Args:
        error: an exception of botocore, or one raised from it.
        conditional: whether the request had an `If-Match`.
    """
    refusal = client_error(error)
    if refusal is not None:
        return _refusal_details(refusal, conditional)
    # An adapter looked in an answer for what every store's answer has.
    if isinstance(error, KeyError) and error.args in _LACKS:
        text = f"its answer has no {error.args[0]}"
        return ErrorDetails(text=text, meaning=errors.NO_STORE_ANSWERED)
    # No answer came.
    types = [type(cause) for cause in errors.led_to(error)]
    return ErrorDetails(
        text=str(error),
        meaning=_meaning_of_silence(error),
        connected=not any(errors.is_of(cls, *_UNSENT) for cls in types),
        timed_out=any(errors.is_of(cls, "botocore.ReadTimeoutError") for cls in types),
    )


judge_botocore = partial(errors.judge, read=read_botocore)


def client_error(error: BaseException) -> Any:
    """Return the `ClientError`, an answer, that an error is or was raised from; None if none."""
    for cause in errors.causes(error):
        if errors.is_of(type(cause), "botocore.ClientError"):
            return cause
    return None


def code_of(error: BaseException) -> str:
    """The store's `<Code>` in an answer; its status as text where the answer had no body.

    Empty where there was no answer.
    """
    refusal = client_error(error)
    return "" if refusal is None else str(refusal.response.get("Error", {}).get("Code", ""))


def status_of(error: BaseException) -> int | None:
    """The HTTP status of an answer; None where there was none."""
    refusal = client_error(error)
    status: int | None = None
    if refusal is not None:
        status = refusal.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    return status


def is_upload_gone(error: BaseException) -> bool:
    """Whether an answer says that a multipart upload was completed or aborted."""
    return code_of(error) == errors.NO_SUCH_UPLOAD


def drop_request(error: BaseException) -> None:
    """Remove what an error keeps of its request, because a body is the caller's memory."""
    from botocore.exceptions import HTTPClientError

    drop_frames(errors.led_to(error))
    for cause in errors.led_to(error):
        if isinstance(cause, HTTPClientError):
            cause.request = None


def _refusal_details(refusal: Any, conditional: bool) -> ErrorDetails:
    """Return what a `ClientError` says, with a text like `403 Forbidden: AccessDenied: no rights`.

    For an answer without a body, botocore fills in the status as the code, and as the message the
    words for the status. Both are left out here.
    """
    status, code = status_of(refusal), code_of(refusal) or None
    if code == str(status):
        code = None
    phrase = f"{status} {http.client.responses.get(status or 0, '')}".rstrip()
    message = refusal.response.get("Error", {}).get("Message") or ""
    if message in phrase:
        message = ""
    text = ": ".join(filter(None, (phrase, code, message)))
    details = ErrorDetails(text=text, status=status, code=code, conditional=conditional)
    # If no object can be missing, a store says 404 for the bucket alone, and adds a code. So a 404
    # without one comes from another server. An `If-Match` needs an object, which may be missing.
    needs_no_object = refusal.operation_name in _NEED_A_BUCKET and not conditional
    if status == http.client.NOT_FOUND and code is None and needs_no_object:
        return replace(details, meaning=errors.NO_BUCKET)
    return details


def _meaning_of_silence(error: Exception) -> Meaning:
    """Return why a request got no answer: by the errors that led to this one, else by its type."""
    for cause in errors.led_to(error):
        if isinstance(cause, ssl.SSLCertVerificationError):
            return errors.WRONG_CERTIFICATE
        # aiohttp's error is an SSLError without a reason; what it was raised from has one.
        reason = getattr(cause, "reason", None)
        if isinstance(cause, ssl.SSLError) and reason == "WRONG_VERSION_NUMBER":
            return errors.NO_TLS
        # Not isinstance: RemoteDisconnected, a connection that was closed, is a subclass.
        if type(cause) is http.client.BadStatusLine:
            return errors.NO_HTTP
    for types, meaning in _NO_ANSWERS.items():
        if errors.is_of(type(error), *types.split()):
            return meaning
    return Meaning(DcpObjstoreError)
