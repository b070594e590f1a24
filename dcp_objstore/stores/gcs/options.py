"""`GcsOptions`: the options of gs://, in the spelling of gcsfs."""

from __future__ import annotations

import os
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

_EMULATOR = "STORAGE_EMULATOR_HOST"  # of Google's libraries: the emulator to use


@dataclass(frozen=True, kw_only=True, repr=False)
class GcsOptions(Schema):
    """The options of gs://; None where not given."""

    token: object = option(
        "`google_default`, `cloud`, `anon`, an access token, a key in JSON or its path, or"
        " credentials of google-auth",
        native=("service_account_key", "service_account", "application_credentials"),
        called=("bearer_token", "credentials"),
        environment=(
            "GOOGLE_BEARER_TOKEN",
            "GOOGLE_SERVICE_ACCOUNT",
            "GOOGLE_SERVICE_ACCOUNT_PATH",
            "GOOGLE_SERVICE_ACCOUNT_KEY",
            "GOOGLE_APPLICATION_CREDENTIALS",
        ),
        secret=True,
    )
    anon: bool = anon("bucket")
    project: str | None = option("the project that pays, with `requester_pays`")
    requester_pays: bool | str = option(
        "True, or the name of the project that pays for the requests",
        default=False,
        called=("user_project",),
    )
    endpoint_url: str | None = option(
        "another server than Google's",
        also=("base_url",),
        called=("endpoint",),
        environment=("GOOGLE_BASE_URL", _EMULATOR),
    )
    verify: bool | str = verify()
    transport: str | None = transport()

    def check(self) -> None:
        """Raise `ConfigError` for options that contradict each other."""
        payer = self.requester_pays
        if isinstance(payer, str) and self.project not in (None, payer):
            raise ConfigError(
                "'requester_pays' and 'project' name two projects that are to pay; say it once"
            )
        if payer is True and self.project is None:
            raise ConfigError("'requester_pays': name the project that pays in 'project' as well")
        if self.endpoint_url is not None:
            check_endpoint(self.endpoint_url)

    def resolved(self) -> GcsOptions:
        """These options, with the endpoint that the environment names if they have none.

        An endpoint that STORAGE_EMULATOR_HOST names is an emulator. As in Google's own libraries,
        it is asked without credentials if the options have none.

        Raises:
            ConfigError: the certificates to trust cannot be read.
        """
        endpoint_url = self.or_environment("endpoint_url")
        is_emulated = endpoint_url is not None and endpoint_url == os.environ.get(_EMULATOR)
        # STORAGE_EMULATOR_HOST may be `host:port`, of a server without TLS.
        if endpoint_url is not None and is_emulated and "://" not in endpoint_url:
            endpoint_url = f"http://{endpoint_url}"
        return replace(
            self,
            endpoint_url=endpoint_url,
            anon=self.anon or (is_emulated and self.token is None),
            verify=check_certificates(self.verify),
        )

    @property
    def payer(self) -> str | None:
        """The project that pays for requests; None: the bucket's owner."""
        if isinstance(self.requester_pays, str):
            return self.requester_pays
        return self.project if self.requester_pays else None
