"""`S3Options`: the options of s3://, in the spelling of s3fs."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Final

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

# "none" is not S3's: it turns the default off.
CHECKSUMS: Final = ("CRC64NVME", "SHA256", "CRC32", "CRC32C", "none")
_SSE: Final = ("AES256", "aws:kms", "aws:kms:dsse")
_SSE_WITHOUT_KMS: Final = (None, "AES256")
_TRUE: Final = ("1", "true", "on", "yes", "y")
_FALSE: Final = ("0", "false", "off", "no", "n")


@dataclass(frozen=True, kw_only=True, repr=False)
class S3Options(Schema):
    """The options of s3://; None where not given."""

    key: str | None = option(
        "access key id, together with `secret`",
        also=("client_kwargs.aws_access_key_id",),
        native=("access_key_id", "aws_access_key_id"),
        called=("access_key",),
        environment=("AWS_ACCESS_KEY_ID",),
        secret=True,
    )
    secret: str | None = option(
        "secret access key",
        also=("client_kwargs.aws_secret_access_key",),
        native=("secret_access_key", "aws_secret_access_key"),
        called=("secret_key",),
        environment=("AWS_SECRET_ACCESS_KEY",),
        secret=True,
    )
    token: str | None = option(
        "session token of temporary credentials",
        also=("client_kwargs.aws_session_token",),
        native=("session_token", "aws_session_token"),
        environment=("AWS_SESSION_TOKEN",),
        secret=True,
    )
    profile: str | None = option(
        "a profile of the shared AWS files, SSO included (needs boto3)",
        environment=("AWS_PROFILE", "AWS_DEFAULT_PROFILE"),
    )
    anon: bool = anon("bucket", ("skip_signature", "aws_skip_signature"))
    endpoint_url: str | None = option(
        "another server than AWS: `http(s)://host[:port][/path]`",
        also=("client_kwargs.endpoint_url",),
        native=("endpoint", "aws_endpoint", "aws_endpoint_url", "aws_endpoint_url_s3"),
        environment=("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    )
    region: str | None = option(
        "the bucket's region; default us-east-1",
        also=("region_name", "client_kwargs.region_name"),
        environment=("AWS_REGION", "AWS_DEFAULT_REGION"),
    )
    use_ssl: bool = option(
        "False: http for an endpoint without a scheme",
        default=True,
        also=("client_kwargs.use_ssl",),
        native=("allow_http",),
    )
    verify: bool | str = verify(also=("client_kwargs.verify",), environment=("AWS_CA_BUNDLE",))
    addressing_style: str | None = option(
        "`virtual`, `path` or `auto`: the bucket in the host's name or in the path;"
        " default `virtual` on AWS, `path` elsewhere",
        also=("config_kwargs.s3.addressing_style",),
        native=("virtual_hosted_style_request", "aws_virtual_hosted_style_request"),
    )
    requester_pays: bool = option(
        "True: the caller pays for the requests, not the bucket's owner",
        default=False,
        native=("request_payer", "aws_request_payer"),
        environment=("AWS_REQUEST_PAYER",),
    )
    sign_payload: bool = option(
        "True: signatures cover the bodies (0.7 CPU-seconds per GiB more)",
        default=False,
        native=("unsigned_payload", "aws_unsigned_payload"),
    )
    sse: str | None = option(
        "`AES256`, `aws:kms` or `aws:kms:dsse`",
        name="s3_additional_kwargs.ServerSideEncryption",
        native=("server_side_encryption", "aws_server_side_encryption"),
        environment=("AWS_SERVER_SIDE_ENCRYPTION",),
    )
    sse_kms_key_id: str | None = option(
        "the KMS key, where it is not the bucket's",
        name="s3_additional_kwargs.SSEKMSKeyId",
        native=("sse_kms_key_id", "aws_sse_kms_key_id"),
        environment=("AWS_SSE_KMS_KEY_ID",),
    )
    sse_bucket_key: bool | None = option(
        "one data key for the bucket: fewer requests to KMS",
        name="s3_additional_kwargs.BucketKeyEnabled",
        native=("sse_bucket_key_enabled", "aws_sse_bucket_key_enabled"),
        environment=("AWS_SSE_BUCKET_KEY_ENABLED",),
    )
    checksum_algorithm: str | None = option(
        "sent with each body, which the server then checks: `CRC64NVME` (default on AWS), `SHA256`"
        " or `none` (default elsewhere). Transports `boto3` and `fsspec` also send `CRC32` and"
        " `CRC32C`; what is not SHA256 or CRC32 they take from awscrt (`pip install"
        " 'botocore[crt]'`), without which their default on AWS is `none`",
        name="s3_additional_kwargs.ChecksumAlgorithm",
        native=("checksum_algorithm", "aws_checksum_algorithm"),
        environment=("AWS_CHECKSUM_ALGORITHM",),
    )
    transport: str | None = transport()

    def check(self) -> None:
        """Raise `ConfigError` for options that contradict each other."""
        if (self.key is None) != (self.secret is None):
            missing = "secret" if self.secret is None else "key"
            raise ConfigError(
                f"storage_options need both 'key' and 'secret'; {missing!r} is missing"
            )
        if self.token is not None and self.key is None:
            raise ConfigError("storage_options have a 'token' without 'key' and 'secret'")
        sources = [self.anon, self.key is not None, self.profile is not None]
        if sum(sources) > 1:
            raise ConfigError("choose one of 'anon', 'key' with 'secret', and 'profile'")
        if self.addressing_style not in (None, "path", "virtual", "auto"):
            raise ConfigError("'addressing_style' must be 'path', 'virtual' or 'auto'")
        if self.sse not in (None, *_SSE):
            raise ConfigError(f"'ServerSideEncryption' must be one of {', '.join(_SSE)}")
        kms_options = (self.sse_kms_key_id, self.sse_bucket_key)
        if any(value is not None for value in kms_options) and self.sse in _SSE_WITHOUT_KMS:
            raise ConfigError(
                "'SSEKMSKeyId' and 'BucketKeyEnabled' need 'ServerSideEncryption': 'aws:kms'"
            )
        if self.checksum_algorithm not in (None, *CHECKSUMS):
            raise ConfigError(f"'ChecksumAlgorithm' must be one of {', '.join(CHECKSUMS)}")
        if self.endpoint_url is not None:
            check_endpoint(self.endpoint_url)

    def resolved(self) -> S3Options:
        """These options, completed with the settings of the environment, credentials excepted.

        Raises:
            ConfigError: the certificates to trust cannot be read; the environment asks for a
                checksum or an encryption that does not exist, or names a KMS key where there is no
                encryption by KMS (obstore would send it with AES256, too, which AWS refuses).
        """
        payer = self.option("requester_pays").from_environment() or ""
        # The certificates of the environment count unless `verify` says otherwise.
        bundle = self.option("verify").from_environment() if self.verify is True else None
        options = replace(
            self,
            endpoint_url=self.or_environment("endpoint_url"),
            region=self.or_environment("region"),
            # "requester" is what S3's header says, "true" what obstore takes.
            requester_pays=self.requester_pays or payer.lower() in ("requester", "true"),
            verify=check_certificates(bundle or self.verify),
            sse=self.or_environment("sse"),
            checksum_algorithm=self.checksum_algorithm or _checksum_of_environment(),
        )
        if options.sse not in (None, *_SSE):
            raise ConfigError(f"the environment's {_SSE_VARIABLE} must be one of {', '.join(_SSE)}")
        # `check` refuses a key in the options without KMS, so a key here is the environment's.
        key_id, bucket_key = self.or_environment("sse_kms_key_id"), _flag(_BUCKET_KEY_VARIABLE)
        if options.sse in _SSE_WITHOUT_KMS:
            if key_id is not None or bucket_key:
                name = _BUCKET_KEY_VARIABLE if key_id is None else _KEY_ID_VARIABLE
                raise ConfigError(
                    f"the environment's {name} has no effect with {options.sse or 'no encryption'}:"
                    f" set 'ServerSideEncryption' or {_SSE_VARIABLE} to aws:kms, or unset it"
                )
            return options
        return replace(
            options,
            sse_kms_key_id=key_id,
            sse_bucket_key=bucket_key if self.sse_bucket_key is None else self.sse_bucket_key,
        )

    @property
    def encryption(self) -> dict[str, str | bool]:
        """The encryption, as arguments of S3's requests that write."""
        arguments = {
            "ServerSideEncryption": self.sse,
            "SSEKMSKeyId": self.sse_kms_key_id,
            "BucketKeyEnabled": self.sse_bucket_key,
        }
        return {name: value for name, value in arguments.items() if value is not None}


# The variable of each of these options, which messages name.
(CHECKSUM_VARIABLE,) = S3Options.option("checksum_algorithm").environment
(_SSE_VARIABLE,) = S3Options.option("sse").environment
(_KEY_ID_VARIABLE,) = S3Options.option("sse_kms_key_id").environment
(_BUCKET_KEY_VARIABLE,) = S3Options.option("sse_bucket_key").environment


def _checksum_of_environment() -> str | None:
    """Return the checksum algorithm that the environment names, in S3's spelling; None if unset.

    Raises:
        ConfigError: there is no such algorithm.
    """
    text = os.environ.get(CHECKSUM_VARIABLE)
    if text is None:
        return None
    algorithm = next((known for known in CHECKSUMS if known.lower() == text.lower()), None)
    if algorithm is None:
        raise ConfigError(
            f"{CHECKSUM_VARIABLE} is {text!r} in the environment; it must be one of"
            f" {', '.join(CHECKSUMS)}, or not be set"
        )
    return algorithm


def _flag(variable: str) -> bool | None:
    """A flag of the environment, in the values that obstore takes; None if unset or empty."""
    text = os.environ.get(variable, "").lower()
    if text not in ("", *_TRUE, *_FALSE):
        raise ConfigError(f"the environment's {variable} must be true or false")
    return text in _TRUE if text else None
