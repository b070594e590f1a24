"""The tables in `docs/` that are made from code: between two marks, compared by tests.

`python -m tests.support.doc_tables` writes the option tables. What each store keeps is an outcome
of tests, written by the plugin `tests.support.guarantees`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from dcp_objstore.stores.schemes import SCHEMAS

ROOT: Final = Path(__file__).parents[2]
OPTIONS_PAGE: Final = ROOT / "docs" / "options.md"
STORES_PAGE: Final = ROOT / "docs" / "stores.md"
SCHEMES: Final = ("s3", "gs", "az")


def between(text: str, mark: str) -> str | None:
    """Return what stands between `<!-- mark -->` and `<!-- /mark -->`; None without the marks."""
    found = re.search(rf"<!-- {mark} -->\n(.*?)\n?<!-- /{mark} -->", text, re.S)
    return found[1] if found else None


def replaced(text: str, mark: str, table: str) -> str:
    """Return the text with a table between the marks."""
    assert between(text, mark) is not None, f"there is no <!-- {mark} -->"
    before, begin, rest = text.partition(f"<!-- {mark} -->\n")
    _, end, after = rest.partition(f"<!-- /{mark} -->")
    return f"{before}{begin}{table}\n{end}{after}"


def options_table(scheme: str) -> str:
    """The options of a scheme as a Markdown table."""
    rows = SCHEMAS[scheme].options().values()
    if not rows:
        return f"`{scheme}://` has no options."
    lines = [
        "| `storage_options` | what it does | environment | also taken | obstore's name |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| `{row.name}` | {row.meaning} | {_code(row.environment)} | {_code(row.also)} |"
        f" {_code(row.native[:1])} |"
        for row in rows
    ]
    return "\n".join(lines)


def _code(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def write_options() -> None:
    """Bring the option tables of the documentation up to date."""
    text = OPTIONS_PAGE.read_text(encoding="utf-8")
    for scheme in SCHEMES:
        text = replaced(text, f"options {scheme}", options_table(scheme))
    OPTIONS_PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write_options()
