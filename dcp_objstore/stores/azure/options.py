"""`AzureOptions`: the options of az://, in the spelling of adlfs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dcp_objstore.errors import ConfigError
from dcp_objstore.stores.options import (
    Schema,
    anon,
    check_certificates,
    check_endpoint,
    option,
    transport,
    verify,
)


@dataclass(frozen=True, kw_only=True, repr=False)
class AzureOptions(Schema):
    """The options of az://; None where not given."""

    account_name: str | None = option(
        "the storage account",
        native=("azure_storage_account_name",),
        called=("account",),
        environment=("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT"),
    )
    account_key: str | None = option(
        "its key",
        native=("access_key", "azure_storage_account_key", "azure_storage_access_key"),
        called=("key",),
        environment=(
            "AZURE_STORAGE_ACCOUNT_KEY",
            "AZURE_STORAGE_ACCESS_KEY",
            "AZURE_STORAGE_MASTER_KEY",
        ),
        secret=True,
    )
    sas_token: str | None = option(
        "a shared access signature",
        native=("sas_key", "azure_storage_sas_token", "azure_storage_sas_key"),
        environment=("AZURE_STORAGE_SAS_TOKEN", "AZURE_STORAGE_SAS_KEY"),
        secret=True,
    )
    connection_string: str | None = option(
        "account, key or signature, and endpoint in one",
        environment=("AZURE_STORAGE_CONNECTION_STRING",),
        secret=True,
    )
    credential: object = option(
        "credentials of azure-identity, a shared access signature, or the account's key",
        called=("bearer_token", "credentials", "token"),
        secret=True,
    )
    tenant_id: str | None = option(
        "of an application, with `client_id` and `client_secret`",
        native=("authority_id", "azure_tenant_id"),
        environment=("AZURE_STORAGE_TENANT_ID", "AZURE_TENANT_ID"),
    )
    client_id: str | None = option(
        "the application",
        native=("azure_client_id",),
        environment=("AZURE_STORAGE_CLIENT_ID", "AZURE_CLIENT_ID"),
    )
    client_secret: str | None = option(
        "its secret",
        native=("azure_client_secret",),
        environment=("AZURE_STORAGE_CLIENT_SECRET", "AZURE_CLIENT_SECRET"),
        secret=True,
    )
    anon: bool = anon("container")
    endpoint_url: str | None = option(
        "the account's URL or host, in another cloud than Azure's public one or on another server",
        also=("account_host",),
        native=("endpoint", "azure_storage_endpoint"),
        called=("account_url",),
        environment=("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
    )
    verify: bool | str = verify()
    transport: str | None = transport()

    def check(self) -> None:
        """Raise `ConfigError` for options that contradict each other."""
        ways = ("account_key", "sas_token", "connection_string", "credential", "client_secret")
        ways_used = [name for name in ways if getattr(self, name) is not None]
        ways_used += ["anon"] if self.anon else []
        if len(ways_used) > 1:
            raise ConfigError(f"choose one of {', '.join(map(repr, ways_used))} in storage_options")
        if self.client_secret is not None:
            application = ("client_id", "tenant_id")
            missing = [repr(name) for name in application if getattr(self, name) is None]
            if missing:
                raise ConfigError(
                    "storage_options need 'client_id', 'client_secret' and 'tenant_id';"
                    f" {', '.join(missing)} missing"
                )
        if self.endpoint_url is not None:
            check_endpoint(self.endpoint_url)

    def resolved(self) -> AzureOptions:
        """These options; account and endpoint of the environment are found with the credentials.

        Raises:
            ConfigError: the certificates to trust cannot be read.
        """
        return replace(self, verify=check_certificates(self.verify))
