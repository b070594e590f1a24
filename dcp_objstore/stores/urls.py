"""Store URLs, parsed and checked.

A URL is taken literally, as the AWS command line and fsspec do: `%`, `?`, `#` and spaces after
the bucket are part of the key. Nothing is percent-decoded.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal, get_args

from dcp_objstore.errors import InvalidUrlError

Scheme = Literal["s3", "gs", "az", "file", "memory"]
_SCHEMES_TEXT = ", ".join(f"{scheme}://" for scheme in get_args(Scheme))
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
# Names that other tools give to these schemes. They are not taken; an error says ours. Names that
# are nearly ours need no entry.
_OTHER_NAMES = {
    "s3a": "s3",
    "minio": "s3",
    "wasb": "az",
    "wasbs": "az",
    "adl": "az",
    "local": "file",
}
# Schemes of fsspec that are no stores, or that have another name here.
_NO_STORES = ("data", "http", "https", "local")
# `abfss://container@account.dfs.core.windows.net/prefix`, as Hadoop and Azure's portal write it.
_AZURE_ACCOUNT = re.compile(r"([a-z0-9-]+)@([a-z0-9]{3,24})\.(?:dfs|blob)\.[a-z.]+\Z")
# Addresses that consoles and other tools show, and the scheme of what they are of. S3: "Methods for
# accessing a general purpose bucket"; Google: "Request endpoints"; Azure: "Resource URI syntax".
_WEB_ADDRESSES = (
    (re.compile(r"https?://(?P<bucket>[^/]+)\.s3[.-][^/]*amazonaws\.com(?P<key>/.*)?\Z"), "s3"),
    (re.compile(r"https?://s3[.-][^/]*amazonaws\.com/(?P<bucket>[^/]+)(?P<key>/.*)?\Z"), "s3"),
    (
        re.compile(
            r"https?://storage\.(?:cloud\.google|googleapis)\.com/(?P<bucket>[^/]+)(?P<key>/.*)?\Z"
        ),
        "gs",
    ),
    (
        re.compile(r"https?://[^/]+\.blob\.core\.[^/]+/(?P<bucket>[^/]+)(?P<key>/.*)?\Z"),
        "az",
    ),
)
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\Z")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


@dataclass(frozen=True, slots=True)
class StoreUrl:
    """A checked URL.

    Attributes:
        scheme: a `Scheme` (`gs` for `gcs`; `az` for `azure`, `abfs` and `abfss`), or one that
            only fsspec knows.
        bucket: the bucket (Azure: the container); for `memory` the name of the store; empty for
            `file`. With another scheme all that stands before the first slash: a host, a container,
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
    """Parse a URL.

    Args:
        url: `s3://bucket/prefix`, `gs://` or `gcs://bucket/prefix`, `az://container/prefix` (also
            `azure`, `abfs` and `abfss`), `file:///absolute/path` or `memory://name/prefix`; or one
            of a scheme that fsspec knows (`sftp://host/prefix`, `hf://…`). A slash at the end is
            dropped.
        also: further schemes to take: those of a filesystem that the caller has.

    Raises:
        InvalidUrlError: not a `str`, no or an unknown scheme, no bucket, credentials inside the
            URL, or a prefix with an empty, `.` or `..` segment.
    """
    if not isinstance(url, str):
        raise InvalidUrlError(_not_a_string_text(url))
    head, separator, rest = url.partition("://")
    # With a '/' or '@' before it, the `://` is not behind a scheme.
    if not separator or "/" in head or "@" in head:
        raise InvalidUrlError(_no_scheme_text(url))
    if "::" in head:
        raise InvalidUrlError(
            f"{_masked(url)} chains filesystems; make the outer one yourself, with fsspec, and pass"
            " storage_options={'fs': filesystem}"
        )
    name = head.lower()
    scheme = _ALIASES.get(name)
    if scheme == "file":
        return _file_url(url, rest)
    if scheme is not None:
        return _bucket_url(url, scheme, rest)
    # Another tool's name of our schemes (s3a) is an error that says ours, even if fsspec knows it.
    if name in also or (name not in _OTHER_NAMES and is_known_to_fsspec(name)):
        return _fsspec_url(url, name, rest)
    our_url = _from_web_address(url)
    if our_url is not None:
        raise InvalidUrlError(f"{_masked(url)} is an address on the web: write {_masked(our_url)}")
    raise InvalidUrlError(_unknown_scheme_text(head))


def is_known_to_fsspec(scheme: str) -> bool:
    """Whether fsspec itself or an installed package has a filesystem for the scheme.

    Known does not mean installed: if its package is missing, opening the store fails.
    """
    if scheme in _NO_STORES or find_spec("fsspec") is None:
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

    A key is made of `/`-separated segments, none of them empty, `.` or `..`, without
    control characters.
    """
    return _checked_segments(key, repr(key))


def check_prefix(prefix: str) -> str:
    """Return a prefix for `list` without its final slash, or raise `InvalidUrlError`."""
    if prefix == "":
        return prefix
    if not prefix.endswith("/"):
        raise InvalidUrlError(f"a prefix to list must be empty or end in '/', got {prefix!r}")
    return check_key(prefix[:-1])


def _masked(url: str) -> str:
    """Return a refused URL in quotes for a message, without what may be a secret.

    That is all before the last `@` (a user's name, a password), and the query.
    """
    head, separator, rest = url.rpartition("://")
    rest, query, _ = rest.partition("?")
    if "@" in url:
        return repr(f"***{url[url.rindex('@') :].partition('?')[0]}")
    return repr(f"{head}{separator}{rest}{'?***' if query else ''}")


def _checked_segments(text: str, shown: str) -> str:
    """Return a key or prefix, unless no store could hold it; `shown` is its name in the error."""
    if any(segment in ("", ".", "..") for segment in text.split("/")):
        raise InvalidUrlError(f"{shown} has an empty, '.' or '..' segment; remove it")
    if _CONTROL.search(text):
        raise InvalidUrlError(f"{shown} contains a control character")
    return text


def _checked_url_prefix(prefix: str, url: str) -> str:
    """Return the prefix of a URL without its final slash; it may be empty."""
    prefix = prefix.removesuffix("/")
    return prefix and _checked_segments(prefix, _masked(url))


def _bucket_url(url: str, scheme: Scheme, rest: str) -> StoreUrl:
    """Read the URL of a bucket; say what is wrong with one that cannot be."""
    bucket, _, prefix = rest.partition("/")
    # A match is a URL as Hadoop writes it: `container@account.dfs.core.windows.net`.
    hadoops = _AZURE_ACCOUNT.match(bucket) if scheme == "az" else None
    if hadoops:
        container, account = hadoops.groups()
        raise InvalidUrlError(
            f"the storage account does not belong in an az:// URL: write"
            f" {_masked(f'az://{container}/{prefix}')} with storage_options="
            f"{{'account_name': {account!r}}}"
        )
    if "@" in bucket:
        # The URL is not repeated: what stands before the @ may be a secret.
        raise InvalidUrlError(
            f"credentials do not belong in a {scheme}:// URL; pass storage_options="
            "{'key': …, 'secret': …} or set the environment"
        )
    if not bucket:
        what = {"memory": "store", "az": "container"}.get(scheme, "bucket")
        raise InvalidUrlError(f"{_masked(url)} names no {what}; write {scheme}://{what}/prefix")
    if bucket.startswith("arn:"):
        raise InvalidUrlError(
            f"{_masked(url)} names an access point by its ARN: write its alias in place of the ARN"
            " (aws s3control get-access-point shows it)"
        )
    if not _BUCKET.match(bucket):
        raise InvalidUrlError(
            f"{_masked(url)} has no bucket name: letters, digits, '.', '-' and '_' only"
        )
    if scheme == "az" and "\\" in prefix:
        raise InvalidUrlError(f"{_masked(url)} has a backslash, which Azure makes a '/'; remove it")
    return StoreUrl(scheme, bucket, _checked_url_prefix(prefix, url))


def _file_url(url: str, rest: str) -> StoreUrl:
    """Parse a file:// URL."""
    if "@" in rest.partition("/")[0]:
        raise InvalidUrlError(f"{_masked(url)} names a user; a folder's URL reads file:///path")
    path = rest.removeprefix("localhost") if rest.startswith("localhost/") else rest
    if not path.startswith("/"):
        raise InvalidUrlError(
            f"{_masked(url)} is not absolute: write file:///path (three slashes), for example"
            f" file://{os.path.abspath(path or '.')}"  # noqa: PTH100  text for a message only
        )
    trimmed = path.strip("/")
    if not trimmed:
        raise InvalidUrlError(f"{url!r} is the root of the file system; name a folder in it")
    return StoreUrl("file", "", "/" + _checked_segments(trimmed, _masked(url)))


def _fsspec_url(url: str, scheme: str, rest: str) -> StoreUrl:
    """Parse a URL of a scheme that only fsspec knows."""
    authority, _, prefix = rest.partition("/")
    user, _, _ = authority.rpartition("@")
    # github://org:repo@branch holds no password.
    if ":" in user and scheme != "github":
        # The URL is not repeated, because it holds a password.
        raise InvalidUrlError(
            f"a password does not belong in a {scheme}:// URL; pass it in storage_options"
        )
    if not authority and not prefix.strip("/"):
        raise InvalidUrlError(f"{_masked(url)} names no place; write {scheme}://place/prefix")
    if authority:
        _checked_segments(authority, _masked(url))
    return StoreUrl(scheme, authority, _checked_url_prefix(prefix, url))


def _not_a_string_text(url: object) -> str:
    """Say what to write in the place of an object that is not a URL."""
    if isinstance(url, os.PathLike):
        # Path('s3://b/k') has already become 's3:/b/k': it cannot be repaired safely.
        return (
            f"a URL must be a str, got {type(url).__name__}: pathlib turns '://' into ':/';"
            " write 's3://bucket/prefix' or 'file:///path'"
        )
    swapped = "; the state comes first, then the URL" if isinstance(url, Mapping) else ""
    return f"a URL must be a str, got {type(url).__name__}{swapped}"


def _no_scheme_text(url: str) -> str:
    """Say what is wrong with a URL without `://`; pathlib makes `s3:/b/k` of `s3://b/k`."""
    scheme, _, rest = url.partition(":/")
    name = scheme.lower()
    is_scheme = name in _ALIASES or is_known_to_fsspec(name)
    if is_scheme and rest:
        whole = f"{scheme}://{'/' if name == 'file' else ''}{rest}"
        return f"{_masked(url)} has lost a slash (pathlib does that): write {_masked(whole)}"
    return f"{_masked(url)} has no scheme; use one of {_SCHEMES_TEXT} (for a local folder: file:///path)"


def _from_web_address(url: str) -> str | None:
    """Return what to write for the address of a bucket or an object on the web; None for others."""
    address = url.partition("?")[0]
    for pattern, scheme in _WEB_ADDRESSES:
        match = pattern.match(address)
        if match is not None:
            return f"{scheme}://{match['bucket']}{match['key'] or ''}"
    return None


def _unknown_scheme_text(head: str) -> str:
    """Say which schemes are known, and which one may be meant."""
    close = difflib.get_close_matches(head.lower(), _ALIASES, cutoff=0.5)
    nearest = _OTHER_NAMES.get(head.lower(), close[0] if close else None)
    hint = f"did you mean {nearest}://? Known" if nearest else "known"
    return f"unknown scheme '{head}://'; {hint} are {_SCHEMES_TEXT} and those of fsspec"
