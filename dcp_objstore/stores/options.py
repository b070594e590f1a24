"""`Option` and `Schema`: how the options of a provider are declared, and `parse` by them.

A provider's schema is a frozen dataclass whose fields are made by `option`. Parsing, hints at other
spellings, names in the environment, what is secret and the table for users all come from there.
"""

from __future__ import annotations

import difflib
import functools
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Final, Self, TypeVar, get_args, get_origin, get_type_hints

from dcp_objstore.errors import ConfigError

S = TypeVar("S", bound="Schema")

_KEY = "option"
# Settings of obstore that need no option here, and why. Some may begin with `aws_`.
_NEEDLESS_NAMES: Final = {
    "s3_express": "a directory bucket is known by its name (…--x-s3)",
    "conditional_put": "conditional writes are tried out, not set",
    "bucket": "the URL names the bucket",
    "max_retries": "that is TransferConfig(max_retries=…)",
    "retry_timeout": "that is TransferConfig(retry_timeout_seconds=…)",
    "timeout": "that is TransferConfig(request_timeout_seconds=…)",
    "connect_timeout": "that is TransferConfig(connect_timeout_seconds=…)",
}


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a store.

    Attributes:
        meaning: the meaning of the option, in words for users.
        name: its name in `storage_options`, where a dot leads into a nested mapping. Default: the
            field's name.
        also: other spellings that are taken, as fsspec's filesystems have them.
        native: obstore's names for it. They are not taken; an error hints at the right name.
        called: other tools' names for it. They are not taken either.
        environment: variables that set it; the first that is set counts.
        secret: whether it holds a credential.
        field: its field of the schema; found there, like `kinds`.
        kinds: the types that a value may have.
    """

    meaning: str
    name: str = ""
    also: tuple[str, ...] = ()
    native: tuple[str, ...] = ()
    called: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()
    secret: bool = False
    field: str = ""
    kinds: tuple[type, ...] = ()

    @property
    def spellings(self) -> tuple[str, ...]:
        """The accepted spellings, the option's own name first."""
        return (self.name, *self.also)

    def from_environment(self) -> str | None:
        """The value of the first of its variables that is set and not empty."""
        return next((os.environ[name] for name in self.environment if os.environ.get(name)), None)


def option(meaning: str, *, default: Any = None, **declared: Any) -> Any:
    """Declare a field of a schema.

    Args:
        meaning: the meaning of the option, in words for users.
        default: the value where none is given.
        declared: further attributes of `Option`.
    """
    return field(default=default, metadata={_KEY: Option(meaning, **declared)})


def anon(place: str, native: Sequence[str] = ("skip_signature",)) -> Any:
    """Declare the option to send no credentials."""
    return option(
        f"no credentials: a public {place}", default=False, native=native, called=("anonymous",)
    )


def verify(**declared: Any) -> Any:
    """Declare the option of TLS certificates, whose value `check_certificates` reads."""
    return option(
        "False: any TLS certificate; a path: the certificates to trust",
        default=True,
        native=("allow_invalid_certificates", "root_certificate"),
        **declared,
    )


def transport() -> Any:
    """Declare the option that every store in a bucket has; `StoreSpec` moves it to its config."""
    return option("what carries the requests: `native` (default), `boto3` (S3 alone) or `fsspec`")


class Schema:
    """Base of the providers' schemas. A `repr` names the options that are set, without values."""

    def __repr__(self) -> str:
        names = [
            field.name
            for field in fields(self)  # type: ignore[arg-type]  # each schema is a dataclass
            if getattr(self, field.name) != field.default
        ]
        return f"{type(self).__name__}({', '.join(names)})"

    @classmethod
    @functools.cache
    def options(cls) -> Mapping[str, Option]:
        """The options by the names of their fields, with `field`, `kinds` and a name for each."""
        types = get_type_hints(cls)
        return {
            spec.name: replace(
                spec.metadata[_KEY],
                name=spec.metadata[_KEY].name or spec.name,
                field=spec.name,
                kinds=_kinds(types[spec.name]),
            )
            for spec in fields(cls)  # type: ignore[arg-type]  # each schema is a dataclass
        }

    @classmethod
    def option(cls, field_name: str) -> Option:
        """The option of a field."""
        return cls.options()[field_name]

    def or_environment(self, field_name: str) -> str | None:
        """The value of a field, or else that of the environment; None where neither has one."""
        own: str | None = getattr(self, field_name)
        return own or self.option(field_name).from_environment()

    def check(self) -> None:
        """Raise `ConfigError` for options that contradict each other."""

    def resolved(self) -> Self:
        """These options, completed with the settings of the environment, credentials excepted.

        Credentials of the environment have their own order; see `stores.credentials`.

        Raises:
            ConfigError: the environment has a wrong value, or a file cannot be read.
        """
        return self


def _kinds(annotation: Any) -> tuple[type, ...]:
    """The types in an annotation, without None."""
    if get_origin(annotation) is UnionType:
        return tuple(kind for kind in get_args(annotation) if kind is not NoneType)
    return (annotation,)


def parse(schema: type[S], options: object) -> S:
    """Parse options, and complete them with the settings of the environment.

    Args:
        schema: the provider's schema.
        options: the options as the user gave them; a value of None counts as not given.

    Raises:
        ConfigError: as `check_by` and `Schema.resolved`.
    """
    parsed, _ = check_by(schema, options)
    return parsed.resolved()


def check_by(schema: type[S], options: object, scheme: str = "") -> tuple[S, dict[str, Any]]:
    """Parse options; return them with a copy of what was given.

    Args:
        schema: the provider's schema.
        options: the options as the user gave them; a value of None counts as not given.
        scheme: the scheme, for messages.

    Raises:
        ConfigError: an unknown name (with the nearest known one), a wrong type, or options that
            contradict each other. Values are never repeated: they may be secrets.
    """
    spellings: dict[str, dict[str, Any]] = {}  # by field, then by spelling: the value given
    where = f"storage_options for {scheme}://" if scheme else "storage_options"
    copied = _check_mapping(schema, options, (), where=where, spellings=spellings)
    parsed = schema(**{name: _agreed_value(spelled) for name, spelled in spellings.items()})
    parsed.check()
    return parsed, copied


def check_endpoint(text: str) -> None:
    """Refuse an endpoint that may hold a secret; endpoints are shown by `repr` and in messages.

    Raises:
        ConfigError: it has a user, a query or a fragment. It is not repeated.
    """
    if any(character in text for character in "@?#"):
        raise ConfigError("an endpoint must read http(s)://host[:port], without credentials")


def check_certificates(verify: bool | str) -> bool | str:
    """Return `verify`, a path with the user's home put in.

    Raises:
        ConfigError: the certificates cannot be read.
    """
    if isinstance(verify, bool):
        return verify
    path = Path(verify).expanduser()
    try:
        path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"the certificates named by 'verify' or the environment cannot be read: {error}"
        ) from error
    return str(path)


def _agreed_value(spelled: Mapping[str, Any]) -> Any:
    """Return the value of an option that was given in one or several spellings."""
    first, *others = spelled.values()
    if any(value != first for value in others):
        raise ConfigError(
            f"storage_options contradict each other: {', '.join(spelled)}; say it once"
        )
    return first


def _names_at(schema: type[Schema], path: tuple[str, ...]) -> dict[str, Option | None]:
    """The names that the mapping at a path takes; None: the name of a mapping inside it.

    With an option `client_kwargs.region_name`, `client_kwargs` stands for None in the outermost
    mapping, whose path is empty, and `region_name` for the option at `("client_kwargs",)`.
    """
    known: dict[str, Option | None] = {}
    for option in schema.options().values():
        for spelling in option.spellings:
            *outer, name = spelling.split(".")
            if tuple(outer) == path:
                known[name] = option
            elif tuple(outer[: len(path)]) == path:
                known[outer[len(path)]] = None
    return known


def _check_mapping(
    schema: type[Schema],
    options: object,
    path: tuple[str, ...],
    *,
    where: str,
    spellings: dict[str, dict[str, Any]],
) -> dict[str, Any]:
    """Check a mapping of options and those nested in it; return a copy of it without Nones.

    Args:
        schema: the provider's schema.
        options: the mapping.
        path: the names that lead to it; empty for the outermost.
        where: the place of the options, for messages.
        spellings: for each field, the values by the spelling that they were given under. What
            this mapping has is added.
    """
    if not isinstance(options, Mapping):
        raise ConfigError(f"{where} must be a mapping, got {type(options).__name__}")
    known = _names_at(schema, path)
    copied: dict[str, Any] = {}
    for name, value in options.items():
        if name not in known:
            raise ConfigError(_unknown_name_text(schema, name, known, where))
        if value is None:
            continue
        option = known[name]
        # For messages, the place as in Python: `client_kwargs['region_name']`.
        outermost, *inner = (*path, name)
        spelled = outermost + "".join(f"[{step!r}]" for step in inner)
        if option is None:
            copied[name] = _check_mapping(
                schema, value, (*path, name), where=spelled, spellings=spellings
            )
        else:
            _check_value(name, value, option, where)
            spellings.setdefault(option.field, {})[spelled] = value
            copied[name] = dict(value) if isinstance(value, Mapping) else value
    return copied


def _check_value(name: str, value: object, option: Option, where: str) -> None:
    """Raise ConfigError unless an option has a value of its type that can be sent."""
    if not isinstance(value, option.kinds):
        kinds = " or ".join(kind.__name__ for kind in option.kinds)
        raise ConfigError(f"{name!r} in {where} must be {kinds}, got {type(value).__name__}")
    if not isinstance(value, str):
        return
    if not value.strip():
        # If it were taken as not given, another server or other credentials might be used.
        raise ConfigError(f"{name!r} in {where} is empty; give it a value, or leave it out")
    if option.secret and cannot_be_sent(value):
        raise ConfigError(f"{name!r} in {where} holds a line break or control character")


def cannot_be_sent(secret: str) -> bool:
    """Whether the transport would panic over it in a header. A key in JSON is not sent in one."""
    return not secret.lstrip().startswith("{") and re.search(r"[\x00-\x1f\x7f]", secret) is not None


def _unknown_name_text(
    schema: type[Schema], name: object, known: Mapping[str, Option | None], where: str
) -> str:
    """Say which option may be meant by an unknown name, and which are known."""
    text = str(name)
    if not known:
        return f"{where} take no options, got {text!r}"
    advice = _hint(schema, text, known)
    if advice is None:
        close = difflib.get_close_matches(text, known, cutoff=0.5)
        advice = f"did you mean {close[0]!r}?" if close else None
    advice_text = f"; {advice}" if advice else "."
    names = sorted(known, key=lambda spelling: known[spelling] is None)  # mappings last
    return f"unknown option {text!r} in {where}{advice_text} Known: {', '.join(names)}."


def _hint(schema: type[Schema], name: str, known: Collection[str]) -> str | None:
    """Return what to write instead of an unknown name that is another spelling of an option.

    Args:
        schema: the provider's schema.
        name: the name as it was given, inside one mapping of the options.
        known: the names that this mapping takes.
    """
    why = _NEEDLESS_NAMES.get(name.removeprefix("aws_"))
    if why is not None:
        return f"there is no need for it: {why}."
    for option in schema.options().values():
        # The names of the option, each without the mapping that it stands in.
        leaves = [spelling.rpartition(".")[2] for spelling in option.spellings]
        if name in leaves or name in option.native or name in option.called:
            name_here = next((leaf for leaf in leaves if leaf in known), None)
            # An option with a dot stands in a mapping, and the hint shows the whole of it.
            if name_here is not None or "." in option.name:
                return f"did you mean {_as_in_options(name_here or option.name)}?"
            return f"did you mean {_as_in_options(option.name)}, outside of this mapping?"
    return None


def _as_in_options(name: str) -> str:
    """Write an option as in Python: `'a'`, or `'a': {'b': …}` for the name `a.b`."""
    head, *inner = name.split(".")
    if not inner:
        return repr(head)
    return f"{head!r}: " + "".join(f"{{{part!r}: " for part in inner) + "…" + "}" * len(inner)
