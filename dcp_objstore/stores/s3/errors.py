"""Translate botocore's errors, for boto3 and s3fs: by the store's code, by status, by type.

Unlike obstore's, botocore's errors carry status and code as attributes, and connections that fail
have classes of their own, so no text is read here.
"""

from __future__ import annotations

import http.client
import re
import ssl
from dataclasses import replace
from typing import Any

from dcp_objstore.errors import (
    ConfigError,
    CredentialsError,
    DcpObjstoreError,
    PreconditionFailedError,
    StoreUnavailableError,
)
from dcp_objstore.stores.errors import (
    NO_STORE,
    Failure,
    advice_on,
    causes,
    failure,
    is_of,
    kind_of_answer,
    led_to,
    redact,
    redacted,
)

_NO_SUCH_KEY = "NoSuchKey"
# And nothing else, so that no object can be missing.
_NEED_A_BUCKET = ("ListObjectsV2", "PutObject", "CreateMultipartUpload")
_NO_SUCH_UPLOAD = "NoSuchUpload"
# What every answer of a store has. The last is missing where a 200 brings an error as its body.
_NAMED_IN_ANSWERS = (("ETag",), ("UploadId",), ("CopyPartResult",))
# botocore counts its own retries, which are off.
_RETRIES_OF_BOTOCORE = re.compile(r" \(reached max retries: \d+\)")
# What a request met that got no answer: types (see `is_of`), the error to raise, and words for it.
_NO_ANSWERS: tuple[tuple[str, type[DcpObjstoreError], str], ...] = (
    (
        "botocore.CredentialRetrievalError botocore.LoginError botocore.NoAuthTokenError"
        " botocore.NoCredentialsError botocore.PartialCredentialsError botocore.ProfileNotFound"
        " botocore.SSOError botocore.TokenRetrievalError",
        CredentialsError,
        "there are no credentials, or they could not be renewed",
    ),
    (
        "botocore.EndpointConnectionError botocore.ProxyConnectionError",
        StoreUnavailableError,
        "no connection could be made; check endpoint_url and that the server runs",
    ),
    (
        "botocore.ConnectTimeoutError botocore.ReadTimeoutError",
        StoreUnavailableError,
        "no answer in time; check endpoint_url, the network and any proxy or firewall",
    ),
    (
        "botocore.HTTPClientError botocore.ConnectionError dcp_objstore.BrokenOffError"
        " builtins.OSError",
        StoreUnavailableError,
        "the connection to the store was lost",
    ),
    (
        # botocore asks which region a redirect means, and is redirected again.
        "builtins.RecursionError",
        ConfigError,
        "the store redirects every request; check endpoint_url and the region",
    ),
    (
        "botocore.BotoCoreError builtins.ValueError builtins.TypeError",
        ConfigError,
        "boto3 refused the request",
    ),
)
_UNSENT = (*_NO_ANSWERS[1][0].split(), "botocore.ConnectTimeoutError")


def translate_botocore(error: Exception, *, conditional: bool = False) -> DcpObjstoreError:
    """Translate what an operation of botocore raised.

    Credentials and signatures that a store repeats are left out, in the text and in `error`.

    Args:
        conditional: the request had an `If-Match`: an absent key then fails the precondition.
    """
    if isinstance(error, DcpObjstoreError):
        return error
    redact(error)
    answered = client_error(error)
    if answered is not None:
        return _answer(answered, conditional)
    if isinstance(error, KeyError) and error.args in _NAMED_IN_ANSWERS:
        # A write may have taken effect all the same.
        return StoreUnavailableError(f"{NO_STORE}: its answer has no {error.args[0]}")
    kind, what = _no_answer(error)
    return kind(f"{what}: {redacted(str(error))}")


def judge_botocore(error: Exception, found: DcpObjstoreError | None = None) -> Failure:
    """Say what an exception of botocore means, for the loop that sends requests again.

    Args:
        error: of botocore, or raised from one.
        found: its translation, where that is not `translate_botocore(error)`.
    """
    chain = [type(one) for one in led_to(error)]
    judged = failure(
        found or translate_botocore(error),
        status_of(error),
        code_of(error),
        connected=not any(is_of(one, *_UNSENT) for one in chain),
        timed_out=any(is_of(one, "botocore.ReadTimeoutError") for one in chain),
    )
    # What completed it may have been an earlier try.
    return replace(judged, may_pass=judged.may_pass and not is_upload_gone(error))


def client_error(error: BaseException) -> Any:
    """Return the `ClientError`, an answer, that an error is or was raised from; None if none."""
    return next((one for one in causes(error) if is_of(type(one), "botocore.ClientError")), None)


def code_of(error: BaseException) -> str:
    """The store's `<Code>` in an answer; its status as text where the answer had no body."""
    found = client_error(error)
    return "" if found is None else str(found.response.get("Error", {}).get("Code", ""))


def status_of(error: BaseException) -> int | None:
    """The HTTP status of an answer."""
    found = client_error(error)
    status: int | None = None
    if found is not None:
        status = found.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    return status


def is_upload_gone(error: BaseException) -> bool:
    """Whether an answer says that a multipart upload was completed or aborted."""
    return code_of(error) == _NO_SUCH_UPLOAD


def without_frames(error: BaseException) -> BaseException:
    """Return the error without references to its request, whose body is the caller's memory."""
    from botocore.exceptions import HTTPClientError

    for one in led_to(error):
        one.with_traceback(None)
        if isinstance(one, HTTPClientError):
            one.request = None
    return error


def _answer(error: Any, conditional: bool) -> DcpObjstoreError:
    status, code = status_of(error), code_of(error)
    text = _RETRIES_OF_BOTOCORE.sub("", str(error))
    kind = kind_of_answer(status, code) or DcpObjstoreError
    if code == _NO_SUCH_KEY and conditional:
        kind = PreconditionFailedError  # If-Match on an absent key: 404 on AWS and moto
    if code == _NO_SUCH_UPLOAD:
        return StoreUnavailableError(f"the store lost this upload before its end: {text}")
    missing = status == http.client.NOT_FOUND and code in ("", str(status))
    if missing and not conditional and error.operation_name in _NEED_A_BUCKET:
        return ConfigError(f"{NO_STORE}, and that the bucket exists: {text} (status {status})")
    advice = advice_on(kind, status, code) or type(error).__name__
    return kind(f"{advice}: {text}")


def _no_answer(error: Exception) -> tuple[type[DcpObjstoreError], str]:
    """Return the error for a request that got no answer, and what happened, in words."""
    for cause in led_to(error):
        if isinstance(cause, ssl.SSLCertVerificationError):
            return ConfigError, (
                "the server's TLS certificate is not valid here; for a certificate of your own set"
                " storage_options={'verify': 'path of the CA'}"
            )
        # aiohttp's error is an SSLError without a reason; what it was raised from has one.
        reason = getattr(cause, "reason", None)
        if isinstance(cause, ssl.SSLError) and reason == "WRONG_VERSION_NUMBER":
            return ConfigError, (
                "the server does not speak TLS; endpoint_url should begin with http:// if it really"
                " has no TLS"
            )
        # RemoteDisconnected is a BadStatusLine, too.
        if type(cause) is http.client.BadStatusLine:
            return ConfigError, (
                "the server's answer is no HTTP; endpoint_url should begin with https:// if it"
                " speaks TLS"
            )
    for names, kind, what in _NO_ANSWERS:
        if is_of(type(error), *names.split()):
            return kind, what
    return DcpObjstoreError, type(error).__name__
