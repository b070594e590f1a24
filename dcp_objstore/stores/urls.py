"""Store URLs: taken apart and checked once, here.

A URL is taken literally, as the AWS command line and fsspec do: `%`, `?`, `#` and spaces after
the bucket are part of the key. Nothing is percent-decoded.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

from dcp_objstore.errors import InvalidUrlError

Scheme = Literal["s3", "gs", "az", "file", "memory"]
SCHEMES: tuple[Scheme, ...] = ("s3", "gs", "az", "file", "memory")
_ALIASES: dict[str, Scheme] = {
    "s3": "s3",
    "gs": "gs",
    "gcs": "gs",
    "az": "az",
    "azure": "az",
    "abfs": "az",
    "abfss": "az",
    "file": "file",
    "memory": "memory",
}
# Spellings that other tools use for what we have under another name.
_FOREIGN = {
    "s3a": "s3",
    "s3n": "s3",
    "minio": "s3",
    "wasb": "az",
    "wasbs": "az",
    "adl": "az",
    "local": "file",
    "mem": "memory",
}
# They stand around another filesystem or inside one object, or are no stores at all. What they
# need more than a URL, only a filesystem object has: storage_options={"fs": filesystem}.
_ONLY_AS_OBJECTS = frozenset(
    {
        "async_wrapper",
        "asynclocal",
        "asyncwrapper",
        "blockcache",
        "cached",
        "dask",
        "data",
        "dir",
        "file",
        "filecache",
        "generic",
        "http",
        "https",
        "gist",
        "git",
        "libarchive",
        "local",
        "memory",
        "pyscript",
        "reference",
        "root",
        "simplecache",
        "tar",
        "zip",
    }
)
# `abfss://container@account.dfs.core.windows.net/prefix`, as Hadoop and Azure's portal write it.
_AZURE_ACCOUNT = re.compile(r"([a-z0-9-]+)@([a-z0-9]{3,24})\.(?:dfs|blob)\.[a-z.]+\Z")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\Z")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


@dataclass(frozen=True, slots=True)
class StoreUrl:
    """A checked URL.

    Attributes:
        scheme: one of `SCHEMES`; `gcs` became `gs`, and `azure`, `abfs` and `abfss` became `az`. Or
            a foreign one, that fsspec knows.
        bucket: the bucket (Azure: the container); for `memory` the name of the store; empty for
            `file`. Of a foreign scheme all that stands before the first slash: a host, a container,
            or nothing.
        prefix: what all keys start with, without slashes at its ends; for `file` the absolute
            path of the root.
    """

    scheme: str
    bucket: str
    prefix: str

    def __str__(self) -> str:
        """The URL in its normal form, without a slash at the end."""
        if self.scheme == "file":
            return f"file://{self.prefix}"
        return f"{self.scheme}://{self.bucket}" + (f"/{self.prefix}" if self.prefix else "")


def parse_url(url: object, also: Collection[str] = ()) -> StoreUrl:
    """Take a URL apart.

    Args:
        url: `s3://bucket/prefix`, `gs://` or `gcs://bucket/prefix`, `az://container/prefix` (also
            `azure`, `abfs` and `abfss`), `file:///absolute/path` or `memory://name/prefix`; or one
            of a scheme that fsspec knows (`sftp://host/prefix`, `hf://…`). A slash at the end is
            dropped.
        also: schemes that are known besides: those of a filesystem that the caller has.

    Raises:
        InvalidUrlError: not a `str`, no or an unknown scheme, no bucket, credentials inside the
            URL, or a prefix with an empty, `.` or `..` segment.
    """
    if not isinstance(url, str):
        raise InvalidUrlError(_not_a_string(url))
    head, found, rest = url.partition("://")
    if not found or "/" in head or "@" in head:
        raise InvalidUrlError(_no_scheme(url))
    if "::" in head:
        raise InvalidUrlError(
            f"{_shown(url)} chains filesystems; make the outer one yourself, with fsspec, and pass"
            " storage_options={'fs': filesystem}"
        )
    scheme = _ALIASES.get(head.lower())
    if scheme is None:
        if head.lower() in also or (
            head.lower() not in _FOREIGN and is_known_to_fsspec(head.lower())
        ):
            return _foreign_url(url, head.lower(), rest)
        raise InvalidUrlError(_unknown_scheme(head))
    if scheme == "file":
        return _file_url(url, rest)
    bucket, _, prefix = rest.partition("/")
    if "@" in bucket:
        azure = _AZURE_ACCOUNT.match(bucket) if scheme == "az" else None
        if azure:
            raise InvalidUrlError(
                f"the storage account does not belong in an az:// URL: write"
                f" {_shown(f'az://{azure[1]}/{prefix}')} with storage_options="
                f"{{'account_name': {azure[2]!r}}}"
            )
        # The URL is not repeated: what stands before the @ may be a secret.
        raise InvalidUrlError(
            f"credentials do not belong in a {scheme}:// URL; pass storage_options="
            "{'key': …, 'secret': …} or set the environment"
        )
    if not bucket:
        what = {"memory": "store name", "az": "container"}.get(scheme, "bucket")
        raise InvalidUrlError(
            f"{_shown(url)} names no {what}; write {scheme}://{what.rsplit(maxsplit=1)[-1]}/prefix"
        )
    if not _BUCKET.match(bucket):
        raise InvalidUrlError(
            f"{_shown(url)} has no bucket name: letters, digits, '.', '-' and '_' only"
        )
    if scheme == "az" and "\\" in prefix:
        raise InvalidUrlError(f"{_shown(url)} has a backslash, which Azure makes a '/'; remove it")
    return StoreUrl(
        scheme, bucket, _check_segments(prefix.removesuffix("/"), _shown(url), empty_ok=True)
    )


def is_known_to_fsspec(scheme: str) -> bool:
    """Whether fsspec itself or an installed package brings a filesystem for the scheme.

    Known does not mean installed: the package may be missing still, which opening it tells.
    """
    if scheme in _ONLY_AS_OBJECTS or find_spec("fsspec") is None:
        return False
    from fsspec.registry import known_implementations, registry

    return scheme in known_implementations or scheme in registry


def is_supported_url(url: object) -> bool:
    """Whether `parse_url` takes it."""
    try:
        parse_url(url)
    except InvalidUrlError:
        return False
    return True


def check_key(key: str) -> str:
    """Return a key as it is, or raise `InvalidUrlError` if no store could hold it.

    A key is a non-empty `str` of `/`-separated segments, none of them empty, `.` or `..`, without
    control characters.
    """
    if not isinstance(key, str) or not key:
        raise InvalidUrlError(f"an object key must be a non-empty str, got {key!r}")
    return _check_segments(key, repr(key))


def check_prefix(prefix: str) -> str:
    """Return a prefix for `list` without its final slash, or raise `InvalidUrlError`."""
    if prefix == "":
        return prefix
    if not isinstance(prefix, str) or not prefix.endswith("/"):
        raise InvalidUrlError(f"a prefix to list must be empty or end in '/', got {prefix!r}")
    return check_key(prefix[:-1])


def _shown(url: str) -> str:
    """A refused URL for a message, without what may be a secret: a user's name, or a query."""
    head, found, rest = url.rpartition("://")
    rest, query, _ = rest.partition("?")
    if "@" in url:
        return repr(f"***{url[url.rindex('@') :].partition('?')[0]}")
    return repr(f"{head}{found}{rest}{'?***' if query else ''}")


def _check_segments(text: str, shown: str, *, empty_ok: bool = False) -> str:
    if empty_ok and not text:
        return text
    if any(segment in ("", ".", "..") for segment in text.split("/")):
        raise InvalidUrlError(f"{shown} has an empty, '.' or '..' segment; remove it")
    if _CONTROL.search(text):
        raise InvalidUrlError(f"{shown} contains a control character")
    return text


def _file_url(url: str, rest: str) -> StoreUrl:
    if "@" in rest.partition("/")[0]:
        raise InvalidUrlError(f"{_shown(url)} names a user; a folder's URL reads file:///path")
    path = rest.removeprefix("localhost") if rest.startswith("localhost/") else rest
    if not path.startswith("/"):
        raise InvalidUrlError(
            f"{_shown(url)} is not absolute: write file:///path (three slashes), for example"
            f" file://{os.path.abspath(path or '.')}"  # noqa: PTH100  text for a message only
        )
    trimmed = path.strip("/")
    if not trimmed:
        raise InvalidUrlError(f"{url!r} is the root of the file system; name a folder in it")
    return StoreUrl("file", "", "/" + _check_segments(trimmed, _shown(url)))


# Where `org:repo@branch` is no user with a password.
_COLON_IS_NO_PASSWORD = ("github",)


def _foreign_url(url: str, scheme: str, rest: str) -> StoreUrl:
    authority, _, prefix = rest.partition("/")
    user, at, _ = authority.rpartition("@")
    if at and ":" in user and scheme not in _COLON_IS_NO_PASSWORD:
        # Not repeated: it is a password.
        raise InvalidUrlError(
            f"a password does not belong in a {scheme}:// URL; pass it in storage_options"
        )
    if scheme in ("http", "https") and "?" in rest:
        raise InvalidUrlError(
            f"{_shown(url)} has a query; keys would follow it. Pass what the server wants to know"
            " in storage_options"
        )
    if not authority and not prefix.strip("/"):
        raise InvalidUrlError(f"{_shown(url)} names no place; write {scheme}://place/prefix")
    if authority:
        _check_segments(authority, _shown(url))
    shown = _shown(url)
    return StoreUrl(
        scheme, authority, _check_segments(prefix.removesuffix("/"), shown, empty_ok=True)
    )


def _not_a_string(url: object) -> str:
    if isinstance(url, os.PathLike):
        # Path('s3://b/k') has already become 's3:/b/k': it cannot be repaired safely.
        return (
            f"a URL must be a str, got {type(url).__name__}: pathlib turns '://' into ':/';"
            " write 's3://bucket/prefix' or 'file:///path'"
        )
    return f"a URL must be a str, got {type(url).__name__}"


def _no_scheme(url: str) -> str:
    broken = re.match(r"([A-Za-z0-9]+):/(?!/)(.*)", url)
    if broken and (broken[1].lower() in _ALIASES or is_known_to_fsspec(broken[1].lower())):
        whole = f"{broken[1]}://{broken[2]}"
        return f"{_shown(url)} has lost a slash (pathlib does that): write {_shown(whole)}"
    known = ", ".join(f"{scheme}://" for scheme in SCHEMES)
    return f"{_shown(url)} has no scheme; use one of {known} (for a local folder: file:///path)"


def _unknown_scheme(head: str) -> str:
    close = difflib.get_close_matches(head.lower(), list(_ALIASES), n=1, cutoff=0.5)
    nearest = _FOREIGN.get(head.lower(), close[0] if close else None)
    hint = f"; did you mean {nearest}://?" if nearest else ""
    known = ", ".join(f"{scheme}://" for scheme in SCHEMES) + " and those of fsspec"
    return (
        f"unknown scheme '{head}://'{hint} Known are {known}."
        if hint
        else (f"unknown scheme '{head}://'; known are {known}")
    )
