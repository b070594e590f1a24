"""`install`: torch's own storage classes save to and load from buckets with this library.

Frameworks name a URL or make torch's `FileSystemWriter`, and torch chooses a class for a URL from a
list that cannot be extended (2.9 to 2.15). So making exactly `FileSystemWriter`, `FileSystemReader`
or their fsspec forms for one of our URLs gives our writer or reader. That holds for names that were
imported earlier, too. Local paths and subclasses stay torch's.

Three things are hooked: `__new__` and `validate_checkpoint_id` of the two classes;
`dcp.async_save`, so that our writer stages; and torch's executors, for an `async_save` that was
imported earlier: their thread or child, which may find nothing installed, is given the writer. The
hooks stay for good, because Python cannot take `__new__` back from a class; without settings they
do nothing. A program that takes a URL for a local path makes a folder `s3:`; `doctor` reports it.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from dcp_objstore.config import Local, LocalFolder, TransferConfig, local_of
from dcp_objstore.distributed.groups import DCP_SAVES, own_group
from dcp_objstore.errors import ConfigError, UnsupportedError
from dcp_objstore.read.reader import ObjectStoreReader
from dcp_objstore.stores.spec import StoreSpec, checked_config
from dcp_objstore.stores.urls import parse_url
from dcp_objstore.torch_private import ProcessExecutor, ThreadExecutor
from dcp_objstore.write.writer import ObjectStoreWriter

SCHEMES = ("s3", "gs", "gcs", "az", "azure", "abfs", "abfss")
# The classes by name, because the fsspec forms import fsspec, and are public from torch 2.15 on.
_CLASSES = ("FileSystemWriter", "FsspecWriter", "FileSystemReader", "FsspecReader")


def url_in(path: object, schemes: Collection[str]) -> str | None:
    """Return the URL of one of the schemes that a path stands for; None for any other path.

    `pathlib` and `os.path.abspath` make "s3:/bucket/key" and "/somewhere/s3:/bucket/key" of a URL;
    that is undone.
    """
    if not isinstance(path, str | os.PathLike):
        return None
    parts = str(os.fspath(path)).split("/")
    for number, part in enumerate(parts):
        if part.endswith(":") and (scheme := part[:-1].lower()) in schemes:
            root = "/" if scheme == "file" else ""
            return f"{scheme}://{root}" + "/".join(parts[number + 1 :]).lstrip("/")
    return None


@dataclass(frozen=True)
class _Settings:
    """The arguments of `install`."""

    schemes: frozenset[str]
    overwrite: bool | None
    storage_options: Mapping[str, object]
    config: TransferConfig
    trust_pickle: bool
    allow_unfenced: bool
    local: Local | None


_Replacement = Callable[[_Settings, str, Mapping[str, Any]], object]


class _Installed:
    """What is installed in this process: the settings, or None."""

    settings: _Settings | None = None


class _Redirect(NamedTuple):
    """The settings, and the URL that a path stands for."""

    settings: _Settings
    url: str


def _redirect(path: object) -> _Redirect | None:
    """Return where the objects of a path go instead; None if the path stays torch's."""
    settings = _Installed.settings
    url = None if settings is None else url_in(path, settings.schemes)
    return None if settings is None or url is None else _Redirect(settings, url)


def _url(path: object) -> str | None:
    """Return the URL that a path stands for; None if the path stays torch's."""
    redirect = _redirect(path)
    return None if redirect is None else redirect.url


def installed_spec(path: object) -> StoreSpec | None:
    """Return the store that an installed URL leads to; None if the path stays the framework's."""
    if (redirect := _redirect(path)) is None:
        return None
    settings, url = redirect
    return StoreSpec(url, settings.storage_options, settings.config)


def for_urls(ours: Callable[..., Any], original: Callable[..., Any], position: int = 0) -> Any:
    """Return a function that calls `ours`, with the store first, for an installed URL.

    Args:
        ours: our function.
        original: the function for other arguments.
        position: the position of the argument that may be a URL. (Passed by its name, it is not
            looked at.)
    """

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        spec = installed_spec(args[position]) if len(args) > position else None
        return original(*args, **kwargs) if spec is None else ours(spec, *args, **kwargs)

    return call


class InstalledWriter(ObjectStoreWriter):
    """The writer that replaces a `FileSystemWriter` or `FsspecWriter` for an installed URL."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Aim at another checkpoint, whose URL may have become a path."""
        super().reset(_url(checkpoint_id) or checkpoint_id)


class InstalledReader(ObjectStoreReader):
    """The reader that replaces a `FileSystemReader` or `FsspecReader` for an installed URL."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Aim at another checkpoint, whose URL may have become a path."""
        super().reset(_url(checkpoint_id) or checkpoint_id)


class Installation:
    """The installation, which `install` returns. As a context manager it restores the one before.

        with dos.install():
            dcp.load(state, checkpoint_id="s3://bucket/run/step-1000")

    Without `with`, it stays until `uninstall`.
    """

    def __init__(self, before: _Settings | None) -> None:
        self._before = before

    def __enter__(self) -> Installation:
        return self

    def __exit__(self, *_: object) -> None:
        _Installed.settings = self._before


def install(
    *,
    schemes: Collection[str] = SCHEMES,
    overwrite: bool | None = None,
    storage_options: Mapping[str, object] | None = None,
    config: TransferConfig | None = None,
    trust_pickle: bool = False,
    allow_unfenced: bool = False,
    local: LocalFolder = None,
) -> Installation:
    """Make torch's storage classes save to and load from buckets with this library.

        dos.install()
        dcp.save(state, checkpoint_id="s3://bucket/run/step-1510")

    Call it once on every rank, before anything is saved or loaded. From then on
    `dcp.save(state, checkpoint_id="s3://bucket/run/step-1")`, `dcp.load`, `dcp.async_save` in both
    modes, `format_utils`, and a `FileSystemWriter`, `FileSystemReader`, `FsspecWriter` or
    `FsspecReader` that a framework makes for such a URL do what `ObjectStoreWriter` and
    `ObjectStoreReader` do. Local paths and subclasses of these classes stay torch's. A path that
    `pathlib` or `os.path.abspath` made of a URL ("s3:/bucket/run") is taken for that URL.

    Many frameworks write their own small files next to torch's. One that takes the URL for a
    local path makes a folder `s3:` in the working directory, and what it writes there does not
    reach the bucket. For some of them there is a module in `dcp_objstore.integrations`.

    A second call replaces the settings of the first.

    Args:
        schemes: the schemes of the URLs that are taken. Default: those of S3, GCS and Azure. Any
            other scheme that this library knows may be named, `file` and `memory` too.
        overwrite: whether a committed checkpoint is replaced. Default None: as the class that is
            made says, and torch's replace.
        storage_options: credentials and endpoint. Default: taken from the environment. Options
            that a `FsspecWriter` or `FsspecReader` is made with are added.
        config: sizes, concurrency and time-outs.
        trust_pickle: the argument of `ObjectStoreReader`.
        allow_unfenced: the argument of `ObjectStoreWriter`.
        local: a folder on each node, as a path or `dos.Local`, for copies from which a job that
            starts again reads. Default None: no copies.

    Returns:
        A context manager that, at its end, restores what was installed before.

    Options of torch's classes that say how files are written (`thread_count`,
    `single_file_per_rank`, `sync_files`, ...) have no meaning here and are ignored.

    Raises:
        ConfigError: `schemes` is empty or a single string, `config` is not a TransferConfig,
            or `local` is not a folder of this machine.
        InvalidUrlError: a scheme is unknown.
        UnsupportedError: this version of torch has no place to hook. Also raised by a class that is
            made with `_extensions` or `serialization_format`, which this library does not write.
    """
    if isinstance(schemes, str) or not schemes:
        raise ConfigError(f"schemes must name at least one scheme, as ('s3',), got {schemes!r}")
    for scheme in schemes:
        parse_url(f"{scheme}:///bucket" if scheme == "file" else f"{scheme}://bucket")
    settings = _Settings(
        schemes=frozenset(scheme.lower() for scheme in schemes),
        overwrite=overwrite,
        storage_options=storage_options or {},
        config=checked_config(config),
        trust_pickle=trust_pickle,
        allow_unfenced=allow_unfenced,
        local=local_of(local),
    )
    _hook()
    before, _Installed.settings = _Installed.settings, settings
    return Installation(before)


def uninstall() -> None:
    """Let torch's storage classes do again what they did.

        dos.install()
        dos.uninstall()

    Does nothing if they do.
    """
    _Installed.settings = None


@functools.cache
def _hook() -> None:
    """Put our functions in place of torch's, once in a process."""
    expected = {"checkpoint_id", "storage_writer"}
    executors: tuple[Any, ...] = (ThreadExecutor, ProcessExecutor)
    if any(
        not expected <= inspect.signature(executor.execute_save).parameters.keys()
        for executor in executors
    ):
        raise UnsupportedError(
            f"install() cannot hook torch {torch.__version__}: its hooks are for 2.9 to 2.15. Pass"
            " storage_writer=ObjectStoreWriter(url) to dcp.save instead"
        )
    classes: dict[Any, _Replacement] = {FileSystemWriter: _writer, FileSystemReader: _reader}
    for owner, make in classes.items():
        owner.__new__ = _new(owner, make)
        owner.validate_checkpoint_id = classmethod(_validate(owner))
    wrapped = _with_writer(state_dict_saver.async_save)
    dcp.async_save = state_dict_saver.async_save = wrapped  # type: ignore[attr-defined]
    for executor in executors:
        executor.execute_save = _with_writer(executor.execute_save)


def _is_torchs(kind: type) -> bool:
    """Whether it is one of torch's own four classes, and no subclass."""
    return kind.__name__ in _CLASSES and kind.__module__.startswith("torch.")


def _new(owner: Any, make: _Replacement) -> Callable[..., object]:
    """Return a `__new__` that makes a writer or reader of ours for a URL that is ours."""
    original: Any = owner.__new__

    def __new__(cls: Any, *args: Any, **kwargs: Any) -> object:  # noqa: N807 - it becomes that
        if _is_torchs(cls):
            try:
                arguments = inspect.signature(cls.__init__).bind(None, *args, **kwargs).arguments
            except TypeError:
                arguments = {}  # `__init__`, which Python calls next, raises it, too
            if redirect := _redirect(arguments.get("path")):
                return make(*redirect, arguments)
        # `object.__new__` takes no other arguments.
        return original(cls) if original is object.__new__ else original(cls, *args, **kwargs)

    # Programs look at the signature, to pass only options that this version of torch has.
    __new__.__signature__ = inspect.signature(owner.__init__)  # type: ignore[attr-defined]
    return __new__


def _validate(owner: Any) -> Callable[[type, Any], bool]:
    """Return a `validate_checkpoint_id` that accepts a URL that is ours, too."""
    original = owner.validate_checkpoint_id.__func__

    def validate_checkpoint_id(cls: type, checkpoint_id: Any) -> bool:
        is_valid: bool = original(cls, checkpoint_id)
        return is_valid or (_is_torchs(cls) and _url(checkpoint_id) is not None)

    return validate_checkpoint_id


def _writer(settings: _Settings, url: str, arguments: Mapping[str, Any]) -> InstalledWriter:
    """Make the writer that takes the place of a FileSystemWriter with these arguments."""
    kind = arguments.get("serialization_format")
    if arguments.get("_extensions") or (kind is not None and kind.name != "TORCH_SAVE"):
        raise UnsupportedError(
            "a FileSystemWriter with _extensions or serialization_format cannot write to a URL that"
            " install() took; leave them out",
            url=url,
        )
    overwrite = (
        arguments.get("overwrite", True) if settings.overwrite is None else settings.overwrite
    )
    writer = InstalledWriter(
        overwrite=overwrite,
        storage_options={**settings.storage_options, **arguments.get("kwargs", {})},
        config=settings.config,
        allow_unfenced=settings.allow_unfenced,
        local=settings.local,
    )
    # Not as an argument: a writer that is made with a URL refuses another `checkpoint_id` in its
    # first save, while torch's writer takes it.
    writer.reset(url)
    return writer


def _reader(settings: _Settings, url: str, arguments: Mapping[str, Any]) -> InstalledReader:
    """Make the reader that takes the place of a FileSystemReader with these arguments."""
    reader = InstalledReader(
        storage_options={**settings.storage_options, **arguments.get("kwargs", {})},
        config=settings.config,
        trust_pickle=settings.trust_pickle,
        local=settings.local,
    )
    reader.reset(url)  # not as an argument, as in `_writer`
    return reader


def _in_own_group(save: Callable[..., Any]) -> Callable[..., Any]:
    """Give `dcp.async_save`, or an executor of it, a group for saves with our writer.

    Without `process_group=`, the collectives of its thread run in the default group. If that is
    gloo's, they mix with those of the training, and both hang.
    """

    @functools.wraps(save)
    def saving(*args: Any, **settings: Any) -> Any:
        writer = settings.get("storage_writer")
        is_default = settings.get("process_group") is None and not settings.get("no_dist")
        if isinstance(writer, ObjectStoreWriter) and is_default:
            settings["process_group"] = own_group(DCP_SAVES, None, writer._target.config)
        return save(*args, **settings)

    return saving


def _with_writer(save: Callable[..., Any]) -> Callable[..., Any]:
    """Pass our writer, and a group for it, to a function that has only been given a URL."""
    save = _in_own_group(save)

    @functools.wraps(save)
    def with_writer(
        *args: Any, checkpoint_id: Any = None, storage_writer: Any = None, **kwargs: Any
    ) -> Any:
        if redirect := _redirect(checkpoint_id):
            if storage_writer is None:
                storage_writer = _writer(*redirect, {})
            # A child process has nothing installed, and would not take "s3:/bucket/run" for a URL.
            if isinstance(storage_writer, ObjectStoreWriter):
                checkpoint_id = redirect.url
        return save(*args, checkpoint_id=checkpoint_id, storage_writer=storage_writer, **kwargs)

    return with_writer
