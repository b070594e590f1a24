"""Every storage option of a store: in fsspec's spelling, in obstore's, and in the environment.

It is data, for the tables of docs/options.md and for hints at an option that has another spelling
here.
`tests/test_stores_options.py` compares it with what `options` takes and with what obstore knows.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Option:
    """One setting.

    Attributes:
        name: in `storage_options`; a dot leads into a nested mapping.
        meaning: for users.
        also: other spellings that are taken, as s3fs has them.
        native: what obstore calls it; not taken, but named in a hint.
        environment: variables that set it, the first that is set counts.
    """

    name: str
    meaning: str
    also: tuple[str, ...] = ()
    native: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()


_TRANSPORT: Final = Option(
    "transport", "what carries the requests: `native` (default), `boto3` (S3 alone) or `fsspec`"
)
_S3: Final[Sequence[Option]] = (
    Option(
        "key",
        "access key id, together with `secret`",
        ("client_kwargs.aws_access_key_id",),
        ("access_key_id", "aws_access_key_id"),
        ("AWS_ACCESS_KEY_ID",),
    ),
    Option(
        "secret",
        "secret access key",
        ("client_kwargs.aws_secret_access_key",),
        ("secret_access_key", "aws_secret_access_key"),
        ("AWS_SECRET_ACCESS_KEY",),
    ),
    Option(
        "token",
        "session token of temporary credentials",
        ("client_kwargs.aws_session_token",),
        ("session_token", "aws_session_token"),
        ("AWS_SESSION_TOKEN",),
    ),
    Option(
        "profile",
        "a profile of the shared AWS files, SSO included (needs boto3)",
        environment=("AWS_PROFILE", "AWS_DEFAULT_PROFILE"),
    ),
    Option(
        "anon", "no credentials: a public bucket", native=("skip_signature", "aws_skip_signature")
    ),
    Option(
        "endpoint_url",
        "another server than AWS: `http(s)://host[:port]`",
        ("client_kwargs.endpoint_url",),
        ("endpoint", "aws_endpoint", "aws_endpoint_url", "aws_endpoint_url_s3"),
        ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    ),
    Option(
        "region",
        "the bucket's region; default us-east-1",
        ("region_name", "client_kwargs.region_name"),
        ("aws_region", "default_region", "aws_default_region"),
        ("AWS_REGION", "AWS_DEFAULT_REGION"),
    ),
    Option(
        "use_ssl",
        "False: http for an endpoint without a scheme",
        ("client_kwargs.use_ssl",),
        ("allow_http",),
    ),
    Option(
        "verify",
        "False: any TLS certificate; a path: the certificates to trust",
        ("client_kwargs.verify",),
        ("allow_invalid_certificates", "root_certificate"),
    ),
    Option(
        "addressing_style",
        "`virtual`, `path` or `auto`: the bucket in the host's name or in the path;"
        " default `virtual` on AWS, `path` elsewhere",
        ("config_kwargs.s3.addressing_style",),
        ("virtual_hosted_style_request", "aws_virtual_hosted_style_request"),
    ),
    Option(
        "requester_pays",
        "we pay for the requests",
        native=("request_payer", "aws_request_payer"),
        environment=("AWS_REQUEST_PAYER",),
    ),
    Option(
        "sign_payload",
        "True: signatures cover the bodies (0.7 CPU-seconds per GiB more)",
        native=("unsigned_payload", "aws_unsigned_payload"),
    ),
    Option(
        "s3_additional_kwargs.ServerSideEncryption",
        "`AES256`, `aws:kms` or `aws:kms:dsse`",
        native=("server_side_encryption", "aws_server_side_encryption"),
        environment=("AWS_SERVER_SIDE_ENCRYPTION",),
    ),
    Option(
        "s3_additional_kwargs.SSEKMSKeyId",
        "the KMS key, where it is not the bucket's",
        native=("sse_kms_key_id", "aws_sse_kms_key_id"),
        environment=("AWS_SSE_KMS_KEY_ID",),
    ),
    Option(
        "s3_additional_kwargs.BucketKeyEnabled",
        "one data key for the bucket: fewer requests to KMS",
        native=("sse_bucket_key_enabled", "aws_sse_bucket_key_enabled"),
        environment=("AWS_SSE_BUCKET_KEY_ENABLED",),
    ),
    Option(
        "s3_additional_kwargs.ChecksumAlgorithm",
        "sent with each body, which the server then checks: `CRC64NVME` (default on AWS), `SHA256`"
        " or `none` (default elsewhere). Transports `boto3` and `fsspec` also send `CRC32` and"
        " `CRC32C`; what is not SHA256 or CRC32 they take from awscrt (`pip install"
        " 'botocore[crt]'`), without which their default on AWS is `none`",
        native=("checksum_algorithm", "aws_checksum_algorithm"),
        environment=("AWS_CHECKSUM_ALGORITHM",),
    ),
    _TRANSPORT,
)

_VERIFY: Final = Option(
    "verify",
    "False: any TLS certificate; a path: the certificates to trust",
    native=("allow_invalid_certificates", "root_certificate"),
)
_GS: Final[Sequence[Option]] = (
    Option(
        "token",
        "`google_default`, `cloud`, `anon`, an access token, a key in JSON or its path, or"
        " credentials of google-auth",
        native=("service_account_key", "service_account", "application_credentials"),
        environment=(
            "GOOGLE_APPLICATION_CREDENTIALS",
            "GOOGLE_SERVICE_ACCOUNT",
            "GOOGLE_SERVICE_ACCOUNT_KEY",
            "GOOGLE_BEARER_TOKEN",
        ),
    ),
    Option("anon", "no credentials: a public bucket", native=("skip_signature",)),
    Option("project", "the project that pays, with `requester_pays`"),
    Option("requester_pays", "True, or the name of the project that pays for the requests"),
    Option(
        "endpoint_url",
        "another server than Google's",
        ("base_url",),
        environment=("GOOGLE_BASE_URL",),
    ),
    _VERIFY,
    _TRANSPORT,
)
_AZ: Final[Sequence[Option]] = (
    Option(
        "account_name",
        "the storage account",
        native=("azure_storage_account_name",),
        environment=("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT"),
    ),
    Option(
        "account_key",
        "its key",
        native=("access_key", "azure_storage_account_key", "azure_storage_access_key"),
        environment=("AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_ACCESS_KEY"),
    ),
    Option(
        "sas_token",
        "a shared access signature",
        native=("sas_key", "azure_storage_sas_token", "azure_storage_sas_key"),
        environment=("AZURE_STORAGE_SAS_TOKEN", "AZURE_STORAGE_SAS_KEY"),
    ),
    Option(
        "connection_string",
        "account, key or signature, and endpoint in one",
        environment=("AZURE_STORAGE_CONNECTION_STRING",),
    ),
    Option("credential", "credentials of azure-identity, or a token"),
    Option(
        "tenant_id",
        "of an application, with `client_id` and `client_secret`",
        native=("authority_id", "azure_tenant_id"),
        environment=("AZURE_STORAGE_TENANT_ID", "AZURE_TENANT_ID"),
    ),
    Option(
        "client_id",
        "the application",
        native=("azure_client_id",),
        environment=("AZURE_STORAGE_CLIENT_ID", "AZURE_CLIENT_ID"),
    ),
    Option(
        "client_secret",
        "its secret",
        native=("azure_client_secret",),
        environment=("AZURE_STORAGE_CLIENT_SECRET", "AZURE_CLIENT_SECRET"),
    ),
    Option("anon", "no credentials: a public container", native=("skip_signature",)),
    Option("account_host", "the account's host, in another cloud than Azure's public one"),
    Option(
        "endpoint_url",
        "the account's URL",
        native=("endpoint", "azure_storage_endpoint"),
        environment=("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
    ),
    _VERIFY,
)

OPTIONS: Final[Mapping[str, Sequence[Option]]] = {
    "s3": _S3,
    "gs": _GS,
    "az": _AZ,
    "file": (),
    "memory": (),
}

# Settings of obstore that need no option here, and why.
_NEEDLESS: Final = {
    "s3_express": "a directory bucket is known by its name (…--x-s3)",
    "aws_s3_express": "a directory bucket is known by its name (…--x-s3)",
    "conditional_put": "conditional writes are tried out, not set",
    "aws_conditional_put": "conditional writes are tried out, not set",
    "bucket": "the URL names the bucket",
    "aws_bucket": "the URL names the bucket",
    "max_retries": "that is TransferConfig(max_retries=…)",
    "retry_timeout": "that is TransferConfig(retry_timeout_seconds=…)",
    "timeout": "that is TransferConfig(request_timeout_seconds=…)",
    "connect_timeout": "that is TransferConfig(connect_timeout_seconds=…)",
}


def hint(scheme: str, name: str, known: Collection[str]) -> str | None:
    """What is to be written instead of an unknown name that another spelling of an option has.

    Args:
        scheme: of the store.
        name: as it was given, inside one mapping of the options.
        known: the names that this mapping takes.
    """
    if name in _NEEDLESS:
        return f"there is no need for it: {_NEEDLESS[name]}."
    for option in OPTIONS.get(scheme, ()):
        leaves = [other.rpartition(".")[2] for other in (option.name, *option.also)]
        if name in leaves or name in option.native:
            here = next((leaf for leaf in leaves if leaf in known), None)
            outside = ", outside of this mapping" if here is None and "." not in option.name else ""
            return f"did you mean {_written(here or option.name)}{outside}?"
    return None


def _written(name: str) -> str:
    """A name, or where it is in the nested mappings."""
    head, *inner = name.split(".")
    if not inner:
        return repr(head)
    return f"{head!r}: " + "".join(f"{{{part!r}: " for part in inner) + "…" + "}" * len(inner)


def markdown(scheme: str) -> str:
    """The options of a store as a Markdown table."""
    rows = OPTIONS[scheme]
    if not rows:
        return f"`{scheme}://` has no options."
    lines = [
        "| `storage_options` | what it does | environment | also taken | obstore's name |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| `{row.name}` | {row.meaning} | {_code(row.environment)} | {_code(row.also)} |"
        f" {_code(row.native[:1])} |"
        for row in rows
    ]
    return "\n".join(lines)


def _code(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


# What other tools call an option: the first of these names that a store has is meant.
_OTHER_NAMES: dict[str, tuple[str, ...]] = {
    "access_key": ("key", "account_key"),
    "access_key_id": ("key",),
    "aws_access_key_id": ("key",),
    "secret_key": ("secret",),
    "secret_access_key": ("secret",),
    "aws_secret_access_key": ("secret",),
    "session_token": ("token",),
    "aws_session_token": ("token",),
    "bearer_token": ("token", "credential"),
    "token": ("credential",),
    "credentials": ("token", "credential"),
    "service_account": ("token",),
    "service_account_key": ("token",),
    "application_credentials": ("token",),
    "user_project": ("requester_pays",),
    "key": ("account_key",),
    "sas_key": ("sas_token",),
    "account": ("account_name",),
    "endpoint": ("endpoint_url",),
    "account_url": ("endpoint_url",),
    "anonymous": ("anon",),
    "skip_signature": ("anon",),
}


def unknown(name: object, known: Mapping[str, object], where: str, scheme: str) -> str:
    """What to say of a name that is not known: which one may be meant, and which are known."""
    text = str(name)
    close = difflib.get_close_matches(text, list(known), n=1, cutoff=0.5)
    meant = [other for other in _OTHER_NAMES.get(text, ()) if other in known]
    nearest = next(iter([*meant, *close]), None)
    advice = f"; did you mean {nearest!r}?" if nearest else ""
    spelled = hint(scheme, text, known)
    advice = f"; {spelled}" if spelled else advice
    if not known:
        return f"{where} take no options, got {text!r}"
    advice = advice if advice.endswith(("?", ".")) else f"{advice}."
    return f"unknown option {text!r} in {where}{advice} Known: {', '.join(known)}."
