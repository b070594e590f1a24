"""`Option` and `Schema`: how the options of a provider are declared.

A provider's schema is a frozen dataclass whose fields are made by `option`. Parsing, hints at other
spellings, names in the environment, what is secret and the table for users all come from there.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from types import NoneType, UnionType
from typing import Any, Self, get_args, get_origin, get_type_hints

_KEY = "option"


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a store.

    Attributes:
        meaning: for users.
        name: in `storage_options`; a dot leads into a nested mapping. Default: the field's name.
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
        meaning: for users.
        default: the value where none is given.
        declared: further attributes of `Option`.
    """
    return field(default=default, metadata={_KEY: Option(meaning, **declared)})


def transport() -> Any:
    """Declare the option that every store in a bucket has; `StoreSpec` moves it to its config."""
    return option("what carries the requests: `native` (default), `boto3` (S3 alone) or `fsspec`")


class Schema:
    """Base of the providers' schemas. A `repr` names the options that are set, without values."""

    def __repr__(self) -> str:
        given = [
            one.name
            for one in fields(self)  # type: ignore[arg-type]  # each schema is a dataclass
            if getattr(self, one.name) != one.default
        ]
        return f"{type(self).__name__}({', '.join(given)})"

    @classmethod
    @functools.cache
    def options(cls) -> Mapping[str, Option]:
        """The options by the names of their fields."""
        types = get_type_hints(cls)
        return {
            one.name: replace(
                one.metadata[_KEY],
                name=one.metadata[_KEY].name or one.name,
                field=one.name,
                kinds=_kinds(types[one.name]),
            )
            for one in fields(cls)  # type: ignore[arg-type]  # as above
        }

    @classmethod
    def option(cls, field_name: str) -> Option:
        """The option of a field."""
        return cls.options()[field_name]

    def or_environment(self, field_name: str) -> str | None:
        """The value of a field, or else that of the environment; None where neither has one."""
        given: str | None = getattr(self, field_name)
        return given or self.option(field_name).from_environment()

    def check(self) -> None:
        """Raise `ConfigError` for options that contradict each other."""

    def resolved(self) -> Self:
        """These options, completed with the settings of the environment, credentials excepted.

        Credentials of the environment have an order of their own; see `stores.credentials`.

        Raises:
            ConfigError: the environment has a wrong value, or a file cannot be read.
        """
        return self


def _kinds(annotation: Any) -> tuple[type, ...]:
    """The types in an annotation, without None."""
    if get_origin(annotation) is UnionType:
        return tuple(kind for kind in get_args(annotation) if kind is not NoneType)
    return (annotation,)
