"""Find the credentials for a bucket of any provider."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dcp_objstore.stores.credentials.aws import find_s3_credentials
from dcp_objstore.stores.credentials.azure import find_azure_credentials
from dcp_objstore.stores.credentials.base import Credentials
from dcp_objstore.stores.credentials.google import find_gcs_credentials
from dcp_objstore.stores.options.schema import parse
from dcp_objstore.stores.options.schemes import SCHEMAS

_FIND: dict[str, Callable[..., Credentials]] = {
    "s3": find_s3_credentials,
    "gs": find_gcs_credentials,
    "az": find_azure_credentials,
}


def find_credentials(
    scheme: str, options: object, stripped: tuple[str, ...]
) -> tuple[Any, Credentials]:
    """Return the parsed options of `s3`, `gs` or `az`, and the credentials.

    Args:
        scheme: the scheme of the URL.
        options: the options that `check_options` has checked.
        stripped: names of options that were left behind when the spec was pickled.

    Raises:
        CredentialsError: there are none.
        ConfigError: see `parse`.
    """
    settings = parse(SCHEMAS[scheme], options)
    return settings, _FIND[scheme](settings, stripped)
