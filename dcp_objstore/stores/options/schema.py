"""`Option` and `Schema`: how the options of a provider are declared.

A provider's schema is a frozen dataclass whose fields are made by `option`. Parsing, hints at other
spellings, names in the environment, what is secret and the table for users all come from there.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

_KEY = "option"


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option of a store.

    Attributes:
        meaning: for users.
        name: in `storage_options`; a dot leads into a nested mapping.
        also: other spellings that are taken, as fsspec's filesystems have them.
        native: what obstore calls it; not taken, but recognized in a hint.
        called: what other tools call it; not taken, but recognized in a hint.
        environment: variables that set it; the first that is set counts.
        secret: whether it holds a credential.
        kinds: the types that a value may have.
    """

    meaning: str
    name: str
    also: tuple[str, ...]
    native: tuple[str, ...]
    called: tuple[str, ...]
    environment: tuple[str, ...]
    secret: bool
    kinds: tuple[type, ...]

    @property
    def spellings(self) -> tuple[str, ...]:
        """All spellings that are taken, the option's own name first."""
        return (self.name, *self.also)

    def from_environment(self) -> str | None:
        """The value of the first of its variables that is set and not empty."""
        return next((os.environ[name] for name in self.environment if os.environ.get(name)), None)


def option(
    meaning: str,
    *,
    default: Any = None,
    name: str = "",
    also: tuple[str, ...] = (),
    native: tuple[str, ...] = (),
    called: tuple[str, ...] = (),
    environment: tuple[str, ...] = (),
    secret: bool = False,
) -> Any:
    """Declare a field of a schema.

    Args:
        meaning: for users.
        default: the value where none is given.
        name: in `storage_options`, where it is not the field's own.
        also, native, called, environment, secret: as in `Option`.
    """
    declared = {
        "meaning": meaning,
        "name": name,
        "also": also,
        "native": native,
        "called": called,
        "environment": environment,
        "secret": secret,
    }
    return field(default=default, metadata={_KEY: declared})


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
        found = {}
        for one in fields(cls):  # type: ignore[arg-type]  # as above
            declared = one.metadata[_KEY]
            name = declared["name"] or one.name
            found[one.name] = Option(**{**declared, "name": name, "kinds": _kinds(types[one.name])})
        return found

    @classmethod
    def option(cls, field_name: str) -> Option:
        """The option of a field."""
        return cls.options()[field_name]

    def check(self) -> None:
        """Raise `ConfigError` for options that contradict each other."""


def _kinds(annotation: Any) -> tuple[type, ...]:
    """The types in an annotation, without None."""
    if get_origin(annotation) is UnionType:
        return tuple(kind for kind in get_args(annotation) if kind is not NoneType)
    return (annotation,)
