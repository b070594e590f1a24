"""The public names with their signatures, as text; not those for frameworks, which may be absent.

`python -m tests.support.public_api` writes it to `tests/public_api.txt`.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Final

SAVED: Final = Path(__file__).parents[1] / "public_api.txt"
MODULES: Final = (
    "dcp_objstore",
    "dcp_objstore.errors",
    "dcp_objstore.reports",
    "dcp_objstore.measure",
    "dcp_objstore.observe",
    "dcp_objstore.observe.events",
)
# Their constructors are internal.
_MADE_BY_US: Final = ("AsyncSaveHandle", "Checkpoint", "Installation", "TensorEntry", "ValueEntry")
_SPECIAL: Final = ("__enter__", "__exit__", "__getitem__", "__iter__", "__len__")


def public_api() -> str:
    """Return a line for each public name, parameter, method and property."""
    return "\n".join(line for name in MODULES for line in _module(name)) + "\n"


def _module(name: str) -> Iterator[str]:
    module = importlib.import_module(name)
    yield f"# {name}"
    for public in public_names(module):
        value = getattr(module, public)
        if inspect.isclass(value):
            yield from _class(public, value)
        elif callable(value):
            yield from _callable(public, value)
        else:
            yield f"{public}: {'module' if inspect.ismodule(value) else value}"
    yield ""


def public_names(module: ModuleType) -> list[str]:
    """Return what a module says is public, or the classes that it defines."""
    if hasattr(module, "__all__"):
        return sorted(module.__all__)
    return sorted(
        name
        for name, value in vars(module).items()
        if inspect.isclass(value) and value.__module__ == module.__name__ and name[0] != "_"
    )


def _class(name: str, value: type) -> Iterator[str]:
    bases = ", ".join(base.__name__ for base in value.__bases__)
    head = f"class {name}({bases})"
    inherited = issubclass(value, Exception) and "__init__" not in vars(value)
    if inherited or name in _MADE_BY_US:
        yield head
    else:
        yield from _callable(head, value)
    for member, kept in sorted(vars(value).items()):
        if member.startswith("_") and member not in _SPECIAL:
            continue
        if isinstance(kept, property):
            yield f"    {member}: {inspect.signature(_getter(kept)).return_annotation}"
        elif isinstance(kept, (classmethod, staticmethod)) or inspect.isfunction(kept):
            yield from (f"    {line}" for line in _callable(member, getattr(value, member)))


def _getter(kept: property) -> Any:
    return kept.fget


def _callable(name: str, value: Any) -> Iterator[str]:
    """Return a name, and below it a line for each parameter and for what is returned."""
    yield name
    try:
        signature = inspect.signature(value)
    except ValueError:
        return  # the constructor is written in C
    for parameter in signature.parameters.values():
        if parameter.name == "self":
            continue
        star = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        text = f"    {star}{parameter.name}"
        if parameter.annotation is not parameter.empty:
            text += f": {parameter.annotation}"
        if parameter.default is not parameter.empty:
            text += f" = {parameter.default!r}"
        yield text + (" (by keyword)" if parameter.kind is parameter.KEYWORD_ONLY else "")
    if signature.return_annotation not in (signature.empty, None, "None"):
        yield f"    -> {signature.return_annotation}"


if __name__ == "__main__":
    SAVED.write_text(public_api())
