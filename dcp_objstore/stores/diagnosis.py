"""For a diagnosis: whose credentials a store is asked with, and what its server answers.

No secret is in it. The server is asked without credentials and by Python's own HTTP client, because
the transport does not show headers. Nothing but a diagnosis may rest on it.
"""

from __future__ import annotations

import urllib.request
from typing import NamedTuple

from dcp_objstore.errors import CredentialsError
from dcp_objstore.stores.credentials import Credentials
from dcp_objstore.stores.endpoint import answer_to, tls_context
from dcp_objstore.stores.options import parse
from dcp_objstore.stores.s3.endpoint import s3_server
from dcp_objstore.stores.s3.options import S3Options
from dcp_objstore.stores.schemes import find_credentials
from dcp_objstore.stores.spec import StoreSpec

# The time-out of questions without consequence: no user waits longer for an answer.
_TIMEOUT_SECONDS = 5


class Identity(NamedTuple):
    """The identity whose credentials a store is asked with.

    Attributes:
        source: the place where the credentials come from, in words.
        access_key: the id of an S3 access key, shortened; None where it is not seen here.
        account: an e-mail address or a storage account; None if the credentials do not name one.
    """

    source: str
    access_key: str | None
    account: str | None


class NamedServer(NamedTuple):
    """The server that requests go to.

    Attributes:
        endpoint_url: its URL; None for the provider's own.
        region: the region that requests are signed for; None where there are none.
    """

    endpoint_url: str | None
    region: str | None


def identify(spec: StoreSpec) -> Identity | None:
    """Find out whose credentials requests to a store are sent with.

    Returns:
        None for a store without credentials, and for a filesystem object, which has its own.

    Raises:
        CredentialsError: there are no credentials, or they cannot be read.
        ConfigError: see `StoreSpec`.
    """
    if not _has_credentials(spec):
        return None
    scheme = spec.parsed.scheme
    _, credentials = find_credentials(scheme, spec.storage_options, spec.stripped)
    key = _access_key(credentials) if scheme == "s3" else None
    return Identity(credentials.source, key, credentials.account_name)


def _has_credentials(spec: StoreSpec) -> bool:
    return spec.parsed.scheme in ("s3", "gs", "az") and "fs" not in spec.storage_options


def _access_key(credentials: Credentials) -> str | None:
    """Return the id of the S3 key, shortened; None where obstore finds the credentials itself."""
    if credentials.provider is None:
        return None
    try:
        return shortened(credentials.provider().get("access_key_id"))
    except Exception as error:
        # The provider may ask SSO, a process or another service. They fail with errors of any kind.
        raise CredentialsError(f"{credentials.source}: {error}") from error


def shortened(access_key: str | None) -> str | None:
    """Enough of an access key's id to recognise it by. It is not a secret."""
    if not access_key:
        return None
    if len(access_key) < 16:
        return f"{access_key[:4]}…"
    return f"{access_key[:4]}…{access_key[-4:]}"


def ask_region(spec: StoreSpec) -> str | None:
    """Send one HEAD of the bucket, without credentials; return its region, as AWS names it.

    Returns:
        None if the answer has no `x-amz-bucket-region`, or for another store than S3.

    Raises:
        StoreUnavailableError: no answer came within 5 s.
        CredentialsError, ConfigError: as for the store.
    """
    if spec.parsed.scheme != "s3" or not _has_credentials(spec):
        return None
    server = named_server(spec)
    endpoint = server.endpoint_url or f"https://s3.{server.region}.amazonaws.com"
    request = urllib.request.Request(f"{endpoint.rstrip('/')}/{spec.parsed.bucket}", method="HEAD")
    context = tls_context(parse(S3Options, spec.storage_options).verify)
    _, headers, _ = answer_to(request, context, _TIMEOUT_SECONDS, spec.url)
    region: str | None = headers["x-amz-bucket-region"]
    return region


def named_server(spec: StoreSpec) -> NamedServer:
    """Return the server that requests go to.

    Over s3fs, botocore finds the server that a profile names, and the store does not know it. So
    the profile is read here, too.

    Raises:
        CredentialsError, ConfigError: as for the store.
    """
    endpoint, region = spec.open().endpoint_url, None
    if spec.parsed.scheme == "s3" and _has_credentials(spec):
        found = find_credentials("s3", spec.storage_options, spec.stripped)
        endpoint_of_profile, region = s3_server(*found)
        endpoint = endpoint or endpoint_of_profile
    return NamedServer(endpoint, region)
