"""`nearest`: the saved names that are most like one that is not there."""

from __future__ import annotations

import difflib
import heapq
import os

# Comparing two names takes some 50 microseconds, so only the likely ones are compared.
_COMPARED = 200


def nearest(key: str, saved: list[str]) -> list[str]:
    """Return up to three saved names that are most like `key`."""
    inside = [name for name in saved if name.startswith(f"{key}.")]
    if inside:
        return inside[:3]
    # Names with one prefix more or less, such as `model.` or `module.`; shortest prefix first.
    shifted = [name for name in saved if name.endswith(f".{key}") or key.endswith(f".{name}")]
    shifted.sort(key=lambda name: abs(len(name) - len(key)))

    def in_common(name: str) -> int:
        """Count the equal characters at the start and at the end."""
        start = os.path.commonprefix((key, name))  # noqa: RUF071 - by character on purpose
        end = os.path.commonprefix((key[::-1], name[::-1]))  # noqa: RUF071 - as above
        return len(start) + len(end)

    likely = heapq.nlargest(_COMPARED, saved, key=in_common)
    alike = [name for name in difflib.get_close_matches(key, likely) if name not in shifted]
    return [*shifted, *alike][:3]
