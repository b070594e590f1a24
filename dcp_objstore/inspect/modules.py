"""`Module`: the tensors and values of a checkpoint as a tree of modules, with totals."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar


class Entry(Protocol):
    """A tensor or value of a checkpoint."""

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        ...


E = TypeVar("E", bound=Entry)


# A name may be all dots. Its further parts stay together, because each level has the whole name
# before it, and the tree is walked by recursion.
_MAX_DEPTH = 64


@dataclass(frozen=True, slots=True)
class Module(Generic[E]):
    """A module of a checkpoint: everything whose keys begin with its name and a dot.

    Attributes:
        name: its name, such as "model.layers.0"; empty for the root.
        entries: the tensors and values directly in it, by the last part of their keys.
        modules: the modules directly in it, by the last part of their names.
    """

    name: str
    entries: dict[str, E] = field(default_factory=dict)
    modules: dict[str, Module[E]] = field(default_factory=dict)

    def walk(self) -> Iterator[E]:
        """Iterate over all tensors and values in it, at any depth."""
        yield from self.entries.values()
        for module in self.modules.values():
            yield from module.walk()

    @property
    def total_bytes(self) -> int:
        """Number of bytes of all tensors and values in it, without framing."""
        return sum(entry.nbytes for entry in self.walk())

    def bytes_by_dtype(self) -> dict[str, int]:
        """Return the bytes of all tensors in it by dtype, the largest first; "value" for values.

        The dtype is named as in torch, such as "bfloat16", or "unknown".
        """
        sums: dict[str, int] = {}
        for entry in self.walk():
            name = dtype_name(entry)
            sums[name] = sums.get(name, 0) + entry.nbytes
        return dict(sorted(sums.items(), key=lambda item: -item[1]))


def dtype_name(entry: Entry) -> str:
    """Return torch's name of a tensor's dtype; "unknown", or "value" if it is none."""
    name: str = getattr(entry, "dtype_name", "value")
    return name


def module_tree(entries: Mapping[str, E]) -> Module[E]:
    """Arrange entries in a tree by the dots in their keys, at most 64 deep."""
    root: Module[E] = Module("")
    for key, entry in entries.items():
        *parts, last = key.split(".", _MAX_DEPTH)
        module = root
        for part in parts:
            if part not in module.modules:
                name = f"{module.name}.{part}" if module.name else part
                module.modules[part] = Module(name)
            module = module.modules[part]
        module.entries[last] = entry
    return root
