"""`StoreSpec`: which store, how and with what credentials, as a value without open connections.

A spec travels (DCP pickles writers into the child of a process-mode `async_save`); a client does
not. So clients are made where they are used and kept per process.
"""

from __future__ import annotations

import importlib.util
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from dcp_objstore.config import TransferConfig
from dcp_objstore.errors import ConfigError, UnsupportedError
from dcp_objstore.stores.retries import guard_fork
from dcp_objstore.stores.schemes import (
    check_options,
    is_foreign,
    protocols,
    public_options,
    secret_names,
)
from dcp_objstore.stores.urls import StoreUrl, parse_url

if TYPE_CHECKING:
    from dcp_objstore.stores.local import LocalUploads
    from dcp_objstore.stores.protocol import ObjectStore
    from dcp_objstore.stores.s3.boto3 import Boto3Clients, Boto3Store
    from dcp_objstore.stores.s3.unfinished import S3Uploads

C = TypeVar("C")

_MAX_CACHED_CLIENTS = 32
# The providers' variables: credentials and settings come from them.
_VARIABLES = ("AWS_", "GOOGLE_", "CLOUDSDK_", "AZURE_", "STORAGE_EMULATOR_", "SSL_CERT_")


# The clients of this process, the least recently used first.
_clients: OrderedDict[object, Any] = OrderedDict()
_clients_lock = threading.Lock()


@dataclass(frozen=True, repr=False, eq=False, init=False)
class StoreSpec:
    """A store's URL, options and settings; immutable.

    `repr` and `pickle.dumps` leave out credentials that were given in `storage_options`; pickling
    for a child process by `multiprocessing` (spawn, pipes, queues) carries them.

    Attributes:
        url: the root, in its normal form.
        storage_options: options in fsspec spelling; see `dcp_objstore.stores.options`. Or
            `{"fs": filesystem}`: a filesystem of fsspec, which then carries the requests. It counts
            as a secret as a whole. Empty where none were given.
        config: time-outs and retries, and the transport, even if that was given as a storage
            option. Default `TransferConfig()`.
        stripped: names of the credentials that pickling left out.
        parsed: the URL taken apart.

    Raises:
        InvalidUrlError: see `parse_url`.
        ConfigError: an unknown or contradictory storage option; a transport that does not fit;
            `config` is not a TransferConfig.
    """

    url: str
    storage_options: Mapping[str, object]
    config: TransferConfig
    stripped: tuple[str, ...]
    parsed: StoreUrl = field(init=False)

    def __init__(
        self,
        url: str,
        storage_options: Mapping[str, object] | None = None,
        config: TransferConfig | None = None,
        stripped: tuple[str, ...] = (),
    ) -> None:
        """Check everything that needs no connection."""
        fs = storage_options.get("fs") if isinstance(storage_options, Mapping) else None
        parsed = parse_url(url, protocols(fs))
        own_options, config = _with_transport(storage_options, checked_config(config))
        options = check_options(parsed.scheme, own_options)
        _opener(parsed.scheme, options, config)  # raises for a transport that does not fit
        vars(self).update(  # a frozen dataclass refuses `self.url = …`
            url=str(parsed),
            storage_options=options,
            config=config,
            stripped=stripped,
            parsed=parsed,
        )

    def at(self, url: str) -> StoreSpec:
        """Return a spec for another URL, with the same options and settings.

        Raises:
            InvalidUrlError, ConfigError: as for a new spec.
        """
        return StoreSpec(url, self.storage_options, self.config, self.stripped)

    def child(self, name: str) -> StoreSpec:
        """Return a spec for a name below this URL; without a name, this one."""
        return self.at(f"{self.url}/{name}") if name else self

    def parent(self) -> tuple[StoreSpec | None, str]:
        """Return the spec of the prefix that this one lies in, and this one's name there.

        At a store's root, and right below the root of a file system, they are None and "".
        """
        url, _, name = self.url.rpartition("/")
        if not self.parsed.prefix or url.endswith("://"):
            return None, ""
        return self.at(url), name

    def open(self) -> ObjectStore:
        """Open the store.

        Clients are made on first use and shared by all specs of this process that agree in all but
        the prefix.

        Raises:
            CredentialsError: there are no credentials.
            ForkedProcessError: in a child forked after a store was used.
        """
        return _opener(self.parsed.scheme, self.storage_options, self.config)(self)

    def open_child(self, name: str) -> ObjectStore:
        """Open the store at a name below this URL; the same errors as those of `open`."""
        return self.child(name).open()

    def boto3_clients(self) -> Boto3Clients:
        """Clients of boto3 for an s3:// URL, whatever the transport; shared like those of `open`.

        Raises:
            ConfigError, CredentialsError: see `Boto3Clients`.
        """
        from dcp_objstore.stores.s3.boto3 import Boto3Clients

        return self._shared(Boto3Clients)

    def _shared(self, make: Callable[..., C]) -> C:
        """Return the clients that `make` makes for this bucket; made once for equal arguments."""
        guard_fork()
        url, options = self.parsed, self.storage_options
        # The environment is part of the key: credentials in it may have been renewed.
        names = [name for name in os.environ if name.startswith(_VARIABLES)]
        environment = frozenset((name, os.environ.get(name)) for name in names)
        key = (make, url.scheme, url.bucket, _hashable(options), self.config, environment)
        with _clients_lock:
            if key not in _clients:
                _clients[key] = make(url, options, self.config, self.stripped)
                if len(_clients) > _MAX_CACHED_CLIENTS:
                    _clients.popitem(last=False)  # the least recently used
            _clients.move_to_end(key)
            return cast("C", _clients[key])

    def __repr__(self) -> str:
        foreign = is_foreign(self.parsed.scheme)
        shown = public_options(self.storage_options, mask=True, foreign=foreign)
        return f"StoreSpec({self.url!r}, storage_options={shown!r}, config={self.config!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StoreSpec) and self._compared() == other._compared()

    def __hash__(self) -> int:
        return hash(self._compared())

    def _compared(self) -> tuple[object, ...]:
        """What makes two specs equal: not what pickling left out."""
        return (self.url, _hashable(self.storage_options), self.config)

    def __copy__(self) -> StoreSpec:
        return self

    def __deepcopy__(self, _memo: object) -> StoreSpec:
        return self  # immutable; and copying by `__reduce__` would lose the credentials

    def __reduce__(self) -> tuple[object, ...]:
        """Reduce for `pickle.dumps`: without secrets, but with their names, for a helpful error."""
        options, foreign = self.storage_options, is_foreign(self.parsed.scheme)
        kept = public_options(options, mask=False, foreign=foreign)
        gone = tuple(sorted({*self.stripped, *secret_names(options, foreign=foreign)}))
        return StoreSpec, (self.url, kept, self.config, gone)


def _reduce_for_child(spec: StoreSpec) -> tuple[Any, ...]:
    return StoreSpec, (spec.url, spec.storage_options, spec.config, spec.stripped)


# `multiprocessing` pickles with this class: for spawned children and over its pipes and queues.
ForkingPickler.register(StoreSpec, _reduce_for_child)


def checked_config(config: TransferConfig | None) -> TransferConfig:
    """Return the settings, the default ones for None.

    Raises:
        ConfigError: it is something else.
    """
    if config is not None and not isinstance(config, TransferConfig):
        raise ConfigError(
            f"config must be a TransferConfig, got {type(config).__name__}; write"
            " config=TransferConfig(max_retries=2), for example"
        )
    return config or TransferConfig()


def _open_local(spec: StoreSpec) -> ObjectStore:
    from dcp_objstore.stores.local import LocalStore

    return LocalStore(spec.parsed, spec.config)


def _open_obstore(spec: StoreSpec) -> ObjectStore:
    """Open a store over obstore; with boto3 where it is installed, for what obstore cannot do."""
    # Imported now, and not in the thread of a request, during which the process may fork.
    import obstore.store  # noqa: F401

    from dcp_objstore.stores.clients import make_clients
    from dcp_objstore.stores.obstore.store import ObstoreStore

    has_boto3 = spec.parsed.scheme == "s3" and importlib.util.find_spec("boto3") is not None
    over_boto3 = partial(_open_boto3, spec) if has_boto3 else None
    return ObstoreStore(spec.parsed, spec._shared(make_clients), over_boto3)


def _open_boto3(spec: StoreSpec) -> Boto3Store:
    from dcp_objstore.stores.s3.boto3 import Boto3Store

    return Boto3Store(spec.parsed, spec.boto3_clients())


def _open_fsspec(spec: StoreSpec) -> ObjectStore:
    """Open a store over a filesystem of fsspec; that over s3fs is a class of its own."""
    from dcp_objstore.stores.clients import make_filesystems
    from dcp_objstore.stores.fsspec.store import FsspecStore
    from dcp_objstore.stores.s3.s3fs import S3Filesystems, S3fsStore

    filesystems = spec._shared(make_filesystems)
    if isinstance(filesystems, S3Filesystems):
        return S3fsStore(spec.parsed, filesystems)
    return FsspecStore(spec.parsed, filesystems)


# What opens a store, by its scheme and the transport; fsspec carries requests to any store.
_OPEN: dict[tuple[str, str], Callable[[StoreSpec], ObjectStore]] = {
    ("az", "native"): _open_obstore,
    ("file", "native"): _open_local,
    ("gs", "native"): _open_obstore,
    ("memory", "native"): _open_obstore,
    ("s3", "native"): _open_obstore,
    ("s3", "boto3"): _open_boto3,
}


def _with_transport(
    options: Mapping[str, object] | None, config: TransferConfig
) -> tuple[Mapping[str, object] | None, TransferConfig]:
    """Return the options without `transport`, and the settings with the transport from there.

    Raises:
        ConfigError: there is no such transport, or the options and the settings name two.
    """
    if not isinstance(options, Mapping) or options.get("transport") is None:
        return options, config
    chosen = options["transport"]
    # "native" is the default, so `config` may have it without the caller's choice.
    if config.transport not in ("native", chosen):
        raise ConfigError(
            f"storage_options say transport={chosen!r}, TransferConfig says {config.transport!r};"
            " say it once"
        )
    rest = {name: value for name, value in options.items() if name != "transport"}
    return rest, replace(config, transport=chosen)  # type: ignore[arg-type]  # it checks that


def _opener(
    scheme: str, options: Mapping[str, object], config: TransferConfig
) -> Callable[[StoreSpec], ObjectStore]:
    """Return the function that opens a store over the configured transport.

    Raises:
        ConfigError: the transport does not carry requests there; says which ones do.
    """
    # A filesystem in the options and a scheme without a schema are for fsspec alone.
    transport, needs_fsspec = config.transport, "fs" in options or is_foreign(scheme)
    # "native" is the default, so it does not contradict what needs fsspec.
    if transport == "fsspec" or (transport == "native" and needs_fsspec):
        return _open_fsspec
    if needs_fsspec or (scheme, transport) not in _OPEN:
        fitting = [name for to, name in _OPEN if to == scheme and not needs_fsspec]
        raise ConfigError(
            f"transport {transport!r} does not carry {scheme}:// with these options; use"
            f" {' or '.join(map(repr, [*fitting, 'fsspec']))}"
        )
    return _OPEN[scheme, transport]


def open_store(
    url: str,
    storage_options: Mapping[str, object] | None = None,
    config: TransferConfig | None = None,
) -> ObjectStore:
    """Open the store at a URL.

    Args:
        url: `s3://`, `gs://`, `az://`, `file://`, `memory://`, or what fsspec knows; see
            `parse_url`.
        storage_options: options in fsspec spelling (`key`, `secret`, `endpoint_url`, …).
        config: time-outs and retries; `TransferConfig()` by default.

    Raises:
        InvalidUrlError, ConfigError, CredentialsError, ForkedProcessError: see `StoreSpec`.
    """
    return StoreSpec(url, storage_options, config).open()


def options_of_other(
    other_options: Mapping[str, object] | None,
    url: str | os.PathLike[str],
    options: Mapping[str, object] | None,
    other: str | os.PathLike[str],
) -> Mapping[str, object] | None:
    """Return the options for the other of the two places of a copy, or of an import, for example.

    They are those given, or `options` if none were given and both places have the same scheme.

    Args:
        other_options: the options that the caller gave for `other`; None if it gave none.
        url: the URL that `options` are for.
        options: credentials and endpoint of `url`.
        other: the path or URL of the other place.
    """
    scheme, other_scheme = (os.fspath(place).partition("://")[0] for place in (url, other))
    if other_options is None and scheme == other_scheme:
        return options
    return other_options


def _hashable(value: object) -> object:
    """Return a hashable stand-in: mappings and sequences by content, the rest as it is.

    What is left and cannot be hashed is represented by its id.
    """
    if isinstance(value, Mapping):
        return tuple(sorted((str(key), _hashable(item)) for key, item in value.items()))
    if isinstance(value, (list, tuple)):
        return tuple(_hashable(item) for item in value)
    try:
        hash(value)
    except TypeError:
        return id(value)
    return value


def open_uploads(spec: StoreSpec) -> S3Uploads | LocalUploads:
    """Open the unfinished uploads below a URL; on `file://` the temporary objects.

    Raises:
        As `open_bucket_uploads`.
    """
    from dcp_objstore.stores.local import LocalUploads

    if spec.parsed.scheme == "file":
        return LocalUploads(Path(spec.parsed.prefix))
    return open_bucket_uploads(spec)


def open_bucket_uploads(spec: StoreSpec) -> S3Uploads:
    """Open the multipart uploads below a URL, and what the bucket does with them.

    Raises:
        UnsupportedError: it is not S3, or boto3 is not installed; says what to do instead.
        ConfigError, CredentialsError: as for the store.
    """
    from dcp_objstore.stores.s3.unfinished import S3Uploads, boto_errors

    url = spec.parsed
    if url.scheme in ("file", "memory"):
        raise UnsupportedError(f"{url.scheme}:// has no multipart uploads")
    if url.scheme != "s3":
        remover = "Azure after a week" if url.scheme == "az" else "a lifecycle rule"
        raise UnsupportedError(
            f"unfinished uploads to {url.scheme}:// cannot be listed; they are removed by {remover}"
        )
    if importlib.util.find_spec("boto3") is None:
        raise UnsupportedError(
            "boto3 is not installed, which lists unfinished uploads: pip install 'dcp-objstore[s3]'"
        )
    with boto_errors(spec.url):
        clients = spec.boto3_clients()
        client = clients.get("write")
    root = f"{url.prefix}/" if url.prefix else ""
    return S3Uploads(client, clients, bucket=url.bucket, root=root, payer=clients.payer)
