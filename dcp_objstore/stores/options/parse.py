"""Parse `storage_options` by a schema: names, types, nested mappings and several spellings."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping
from typing import Any, Final, TypeAlias, TypeVar

from dcp_objstore.errors import ConfigError
from dcp_objstore.stores.options.schema import Option, Schema

S = TypeVar("S", bound=Schema)
# A name leads to an option, or into a nested mapping of names.
_Names: TypeAlias = "dict[str, tuple[str, Option] | _Names]"

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


def parse(schema: type[S], options: object, scheme: str = "") -> S:
    """Parse options into a schema.

    Args:
        schema: of the provider.
        options: as the user gave them; a value of None counts as not given.
        scheme: for messages.

    Raises:
        ConfigError: an unknown name (with the nearest known one), a wrong type, or options that
            contradict each other. Values are never repeated: they may be secrets.
    """
    return read(schema, options, scheme)[0]


def read(schema: type[S], options: object, scheme: str = "") -> tuple[S, dict[str, Any]]:
    """Parse options into a schema; return it with a copy of the options as they were given.

    Raises:
        ConfigError: as `parse`.
    """
    given: dict[str, dict[str, Any]] = {}
    where = f"storage_options for {scheme}://" if scheme else "storage_options"
    copied = _read(schema, options, _names(schema), where, "", given)
    found = schema(**{name: the_one(spelled) for name, spelled in given.items()})
    found.check()
    return found, copied


def the_one(named: Mapping[str, Any]) -> Any:
    """Return the value of a setting that may be spelled in several ways; None where none is given.

    Raises:
        ConfigError: they contradict each other. No value is repeated.
    """
    given = {name: value for name, value in named.items() if value is not None}
    values = list(given.values())
    if any(value != values[0] for value in values):
        raise ConfigError(f"storage_options contradict each other: {', '.join(given)}; say it once")
    return values[0] if values else None


def check_endpoint(text: str) -> None:
    """Refuse an endpoint that may hold a secret; endpoints are shown by `repr` and in messages.

    Raises:
        ConfigError: it has a user, a query or a fragment. It is not repeated.
    """
    if any(character in text for character in "@?#"):
        raise ConfigError("an endpoint must read http(s)://host[:port], without credentials")


def _names(schema: type[Schema]) -> _Names:
    """The names that a schema takes, as a tree."""
    names: _Names = {}
    for field_name, option in schema.options().items():
        for spelling in option.spellings:
            *path, leaf = spelling.split(".")
            place = names
            for step in path:
                inner = place.setdefault(step, {})
                assert isinstance(inner, dict)
                place = inner
            place[leaf] = (field_name, option)
    return names


def _read(
    schema: type[Schema],
    options: object,
    names: _Names,
    where: str,
    within: str,
    given: dict[str, dict[str, Any]],
) -> dict[str, Any]:
    """Check one mapping and those nested in it; add the values to `given` and return a copy.

    Args:
        within: the path of the mapping, as Python would write it; empty for the outermost.
        given: by the names of fields, the values under each spelling.
    """
    if not isinstance(options, Mapping):
        raise ConfigError(f"{where} must be a mapping, got {type(options).__name__}")
    copied: dict[str, Any] = {}
    for name, value in options.items():
        if name not in names:
            raise ConfigError(_unknown(schema, name, names, where))
        if value is None:
            continue
        known = names[name]
        if isinstance(known, dict):
            if not isinstance(value, Mapping):
                raise ConfigError(
                    f"{name!r} in {where} must be Mapping, got {type(value).__name__}"
                )
            place = f"{within}[{name!r}]" if within else name
            copied[name] = _read(schema, value, known, place, place, given)
            continue
        field_name, option = known
        _check_value(name, value, option, where)
        spelled = f"{within}[{name!r}]" if within else name
        given.setdefault(field_name, {})[spelled] = value
        copied[name] = dict(value) if isinstance(value, Mapping) else value
    return copied


def _check_value(name: str, value: object, option: Option, where: str) -> None:
    if not isinstance(value, option.kinds):
        kinds = " or ".join(kind.__name__ for kind in option.kinds)
        raise ConfigError(f"{name!r} in {where} must be {kinds}, got {type(value).__name__}")
    if not isinstance(value, str):
        return
    if not value.strip():
        # Taken as not given, it would lead to another server or to other credentials.
        raise ConfigError(f"{name!r} in {where} is empty; give it a value, or leave it out")
    if option.secret and _cannot_be_sent(value):
        raise ConfigError(f"{name!r} in {where} holds a line break or control character")


def _cannot_be_sent(secret: str) -> bool:
    """Whether it cannot be in a header, where the transport would panic; a key in JSON is none."""
    return not secret.lstrip().startswith("{") and re.search(r"[\x00-\x1f\x7f]", secret) is not None


def _unknown(schema: type[Schema], name: object, known: _Names, where: str) -> str:
    """Say which option may be meant by an unknown name, and which are known."""
    text = str(name)
    if not known:
        return f"{where} take no options, got {text!r}"
    advice = _hint(schema, text, known)
    if advice is None:
        close = difflib.get_close_matches(text, list(known), n=1, cutoff=0.5)
        advice = f"did you mean {close[0]!r}?" if close else None
    said = f"; {advice}" if advice else "."
    listed = sorted(known, key=lambda one: isinstance(known[one], dict))  # mappings last
    return f"unknown option {text!r} in {where}{said} Known: {', '.join(listed)}."


def _hint(schema: type[Schema], name: str, known: Collection[str]) -> str | None:
    """What to write instead of an unknown name that is another spelling of an option.

    Args:
        schema: of the provider.
        name: as it was given, inside one mapping of the options.
        known: the names that this mapping takes.
    """
    if name in _NEEDLESS:
        return f"there is no need for it: {_NEEDLESS[name]}."
    for option in schema.options().values():
        leaves = [spelling.rpartition(".")[2] for spelling in option.spellings]
        if name in leaves or name in option.native or name in option.called:
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
