"""Which schemes fsspec has a filesystem for, told without loading one."""

from __future__ import annotations

from importlib.util import find_spec

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


def is_known(scheme: str) -> bool:
    """Whether fsspec itself or an installed package brings a filesystem for the scheme.

    Known does not mean installed: the package may be missing still, which opening it tells.
    """
    if scheme in _ONLY_AS_OBJECTS or find_spec("fsspec") is None:
        return False
    from fsspec.registry import known_implementations, registry

    return scheme in known_implementations or scheme in registry
