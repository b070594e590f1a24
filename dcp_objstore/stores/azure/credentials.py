"""Find the Azure storage account, its endpoint and credentials; nothing here ever prints one.

In this order: `anon`; `connection_string`; `account_key`; `sas_token`; `client_id` with
`client_secret` and `tenant_id`; `credential`; AZURE_STORAGE_CONNECTION_STRING; the AZURE_*
variables that obstore names; azure-identity's DefaultAzureCredential (extra `azure`); a
machine's managed identity. The names are those of adlfs; `connection_string` is taken apart as the
Azure documentation says ("Configure Azure Storage connection strings").
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any
from urllib.parse import parse_qs

from dcp_objstore.errors import ConfigError, CredentialsError
from dcp_objstore.stores.azure.options import AzureOptions
from dcp_objstore.stores.credentials import (
    ANONYMOUS,
    Credentials,
    Renewing,
    asked_by_clients,
    fixed_credentials,
    is_installed,
    metadata_answers,
    stripped_note,
)

_INSTALL = "pip install 'dcp-objstore[azure]'"
# Account, key and endpoint of the storage emulators; the key is public knowledge, part of the
# documentation ("Use the Azurite emulator").
_EMULATOR = (
    "AccountName=devstoreaccount1;AccountKey=Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVEr"
    "Cz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==;BlobEndpoint=http://127.0.0.1:10000/devstoreaccount1"
)
# Variables of which one is enough, and obstore's name for what it holds.
_SECRETS = {
    "AZURE_STORAGE_TOKEN": "token",
    **dict.fromkeys(AzureOptions.option("account_key").environment, "access_key"),
    **dict.fromkeys(AzureOptions.option("sas_token").environment, "sas_token"),
}
_APPLICATION = ("client_id", "client_secret", "tenant_id")
# With all variables of one of these, obstore asks Azure AD for tokens.
_IDENTITIES = (
    *zip(*(AzureOptions.option(name).environment for name in _APPLICATION), strict=True),
    ("AZURE_FEDERATED_TOKEN_FILE", "AZURE_CLIENT_ID", "AZURE_TENANT_ID"),
    ("AZURE_USE_AZURE_CLI",),
)
_ADVICE = (
    "log in again (az login), or use a source that renews them itself: a managed identity, an"
    " application's client_secret, credentials of azure-identity"
)


def find_azure_credentials(options: AzureOptions, stripped: tuple[str, ...] = ()) -> Credentials:
    """Find account, endpoint and credentials in the order of the module's docstring.

    Args:
        options: the options that `check_options` has checked.
        stripped: names of options that were left behind when the spec was pickled.

    Returns:
        The credentials, which name the account, too, and the endpoint unless it is in Azure's
        public cloud.

    Raises:
        CredentialsError: there are none, or azure-identity is needed and is not installed.
        ConfigError: no account is named, or options have no effect.
    """
    from_options = _from_options(options)
    # If pickling has left a secret behind, the user is not told that these have no effect.
    if options.client_secret is None and "client_secret" not in stripped:
        unused = [name for name in ("client_id", "tenant_id") if getattr(options, name) is not None]
        if unused:
            raise ConfigError(
                f"{', '.join(map(repr, unused))} in storage_options have no effect without"
                " 'client_secret'; pass a 'credential' of azure-identity"
            )
    # The settings of a connection string. A string in the environment counts only if the options
    # name no credentials: those in the options may be for another account.
    parts = {}
    if options.connection_string is not None:
        parts = _connection_parts(options.connection_string)
    elif from_options is None:
        parts = _connection_of_environment(options.account_name)
    endpoint = _endpoint(options, parts)
    account = (
        options.account_name
        or parts.get("accountname")
        or AzureOptions.option("account_name").from_environment()
        or _account_of(endpoint)
    )
    if account is None:
        raise ConfigError(
            "which storage account? Pass storage_options={'account_name': …}, or set"
            " AZURE_STORAGE_ACCOUNT_NAME or AZURE_STORAGE_CONNECTION_STRING"
            f"{stripped_note(stripped)}"
        )
    credentials = from_options or _from_connection(parts) or _from_environment(endpoint)
    if credentials is None:
        raise CredentialsError(
            f"no credentials for Azure: run `az login` with azure-identity installed ({_INSTALL}),"
            " set AZURE_STORAGE_CONNECTION_STRING or AZURE_STORAGE_ACCOUNT_KEY, or pass"
            f" storage_options{stripped_note(stripped)}"
        )
    return replace(credentials, advice=_ADVICE, endpoint_url=endpoint, account_name=account)


def _from_options(options: AzureOptions) -> Credentials | None:
    """Return the credentials that the storage options name; None if they name none.

    `find_azure_credentials` reads a connection string, because it may also name the account.
    """
    if options.anon:
        return ANONYMOUS
    if options.account_key is not None:
        return fixed_credentials("storage_options", access_key=options.account_key)
    if options.sas_token is not None:
        return _sas("storage_options", options.sas_token)
    if options.client_secret is not None:
        config = {
            "client_id": options.client_id,
            "client_secret": options.client_secret,
            "tenant_id": options.tenant_id,
            # So that a key in the environment does not win.
            "credential_type": "client_secret",
        }
        # obstore's clients ask for tokens themselves.
        return Credentials("storage_options", config=config, renew=asked_by_clients)
    return None if options.credential is None else _from_credential(options.credential)


def _from_credential(credential: object) -> Credentials:
    """Read adlfs's `credential`: an object of azure-identity, or the text of a SAS or a key."""
    if isinstance(credential, str):
        if "sig=" in credential:
            return _sas("storage_options", credential)
        return fixed_credentials("storage_options", access_key=credential)
    get_token = getattr(credential, "get_token", None)
    if get_token is None:
        raise ConfigError(
            "'credential' must be a SAS token, an account key, or an object of azure.identity; got"
            f" {type(credential).__name__}"
        )
    if inspect.iscoroutinefunction(get_token):
        raise ConfigError(
            "'credential' is one of azure.identity.aio, which gives tokens only inside its own"
            " event loop; pass the class of the same name from azure.identity"
        )
    return _identity("storage_options", credential)


def _from_connection(parts: Mapping[str, str]) -> Credentials | None:
    """Return the credentials in the settings of a connection string; None without a string."""
    if "accountkey" in parts:
        return fixed_credentials("the connection string", access_key=parts["accountkey"])
    if "sharedaccesssignature" in parts:
        return _sas("the connection string", parts["sharedaccesssignature"])
    return None


def _from_environment(endpoint: str | None) -> Credentials | None:
    """Return the credentials of this machine, the first that there are; None if none.

    Args:
        endpoint: the endpoint that the user has named; None: Azure's. Only for Azure's is the
            metadata service a source of credentials here.
    """
    for name, kind in _SECRETS.items():
        value = os.environ.get(name)
        if value:
            return fixed_credentials(
                f"{name} in the environment", **{kind: value.removeprefix("?")}
            )
    for names in _IDENTITIES:
        if all(os.environ.get(name) for name in names):
            return Credentials(f"{names[0]} in the environment", renew=asked_by_clients)
    if is_installed("azure.identity"):
        return _identity("azure-identity's DefaultAzureCredential", None)
    if endpoint is None and metadata_answers(
        "http://169.254.169.254",
        "GET",
        "/metadata/instance?api-version=2021-02-01",
        {"Metadata": "true"},
    ):
        return Credentials("managed identity", renew=asked_by_clients)
    return None


def _identity(source: str, credential: Any) -> Credentials:
    """Return credentials whose tokens an object of azure-identity gives; None: its default chain.

    Raises:
        CredentialsError: azure-identity is not installed.
    """
    if not is_installed("azure.identity"):
        raise CredentialsError(f"'credential' needs azure-identity, not installed: {_INSTALL}")
    provider = Renewing(source, _of_azure_identity(credential), _ADVICE)
    return Credentials(source, provider, renew=provider.renew)


def _of_azure_identity(credential: Any) -> Callable[[bool], Mapping[str, Any]]:
    """Return the function that a `Renewing` asks; it returns tokens of azure-identity.

    If a token was refused, a new default chain is made, which has no token in its cache. The cache
    of the user's own object cannot be cleared, so it may return the refused token again.

    Args:
        credential: the user's object of azure-identity; None: its default chain.
    """
    from obstore.auth.azure import AzureCredentialProvider

    provider: Any = None

    def ask(others: bool) -> Mapping[str, Any]:
        nonlocal provider
        try:
            if others or provider is None:
                provider = AzureCredentialProvider(credential)
            token: Mapping[str, Any] = provider()
        except Exception as error:
            raise CredentialsError(str(error)) from error
        return token

    return ask


def _sas(source: str, token: str) -> Credentials:
    """Return a shared access signature; the source says when it ends.

    Its text has that time under `se` ("Create a service SAS").
    """
    token = token.removeprefix("?")
    end_times = parse_qs(token).get("se")
    until = f": a signature that ends at {end_times[0]}" if end_times else ""
    return fixed_credentials(source + until, sas_token=token)


def _connection_of_environment(account: str | None) -> dict[str, str]:
    """Parse AZURE_STORAGE_CONNECTION_STRING; empty if `account` is another than its own."""
    text = AzureOptions.option("connection_string").from_environment()
    parts = _connection_parts(text) if text else {}
    return parts if account in (None, parts.get("accountname")) else {}


def _connection_parts(text: str) -> dict[str, str]:
    """Parse a connection string into its settings, by their names in lower case.

    Raises:
        ConfigError: it has another form. It is not repeated: it holds a key.
    """
    parts: dict[str, str] = {}
    for item in text.strip().strip(";").split(";"):
        name, equals, value = item.strip().partition("=")
        if not equals or not name:
            raise ConfigError(
                "the Azure connection string must read 'AccountName=…;AccountKey=…', settings"
                " separated by ';'"
            )
        parts[name.strip().lower()] = value.strip()
    if parts.get("usedevelopmentstorage", "").lower() == "true":
        return {**_connection_parts(_EMULATOR), **parts}
    if "accountkey" not in parts and "sharedaccesssignature" not in parts:
        raise ConfigError(
            "the Azure connection string holds neither AccountKey nor SharedAccessSignature"
        )
    return parts


def _endpoint(options: AzureOptions, parts: Mapping[str, str]) -> str | None:
    """Return the endpoint of the blob service: of options, connection string, or environment.

    None if none of these names one: then it is in Azure's public cloud.
    """
    endpoint_url = options.endpoint_url or parts.get("blobendpoint")
    if endpoint_url:
        return endpoint_url
    # A connection string may name another cloud by its domain, instead of the whole endpoint.
    suffix = parts.get("endpointsuffix", "core.windows.net")
    if suffix != "core.windows.net" and "accountname" in parts:
        protocol = parts.get("defaultendpointsprotocol", "https")
        return f"{protocol}://{parts['accountname']}.blob.{suffix}"
    return AzureOptions.option("endpoint_url").from_environment()


def _account_of(endpoint: str | None) -> str | None:
    """Return the account in `https://account.blob.core.windows.net`; None if there is none."""
    host = (endpoint or "").rpartition("://")[2].partition("/")[0]
    account, _, rest = host.partition(".")
    return account if account and rest.startswith("blob.") else None
