"""What a store may guarantee, and a table of who keeps it, made from the outcomes of the tests.

`pytest -n 0 tests/stores --guarantees-table docs/stores.md` writes the rows of the endpoints that
ran (others run with `-m campaign`) between the two marks in that file and leaves the other rows.
This is a pytest plugin.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.doc_tables import between, replaced

MARK = "guarantees"
KEPT, LACKING, FAILED, FOREIGN, UNTRIED = "✓", "–", "✗", "n/a", "?"  # noqa: RUF001
_MARKS = f"({FAILED} failed, {FOREIGN}: there is no such thing there, {UNTRIED} not tried.)"


@dataclass(frozen=True)
class Guarantee:
    """One guarantee.

    Attributes:
        name: what it is called in the table.
        meaning: for the legend below the table.
        needs: the fields of `Capabilities` without which a store lacks it; none: every store has to
            keep it.
    """

    name: str
    meaning: str
    needs: tuple[str, ...] = ()


GUARANTEES = (
    Guarantee("any key", "spaces, `#?%`, quotes and every script come back as they were"),
    Guarantee("exact ranges", "exactly the bytes asked for; a short body is an error", ("ranges",)),
    Guarantee("read after write", "every verb sees a write or a removal at once, others' too"),
    Guarantee("list is whole", "all keys, also beyond the 1,000 of a page, and no others"),
    Guarantee("typed errors", "statuses and error bodies of the provider become one type each"),
    Guarantee(
        "one creator of 64",
        "of 64 conditional creates exactly one succeeds",
        ("conditional_create",),
    ),
    Guarantee(
        "compare and swap", "of 16 updates of a version one succeeds", ("conditional_update",)
    ),
    Guarantee("quoted ETags", "an update takes an ETag as it was given", ("quoted_e_tags",)),
    Guarantee("parallel parts", "a stream is uploaded part by part, in parallel", ("multipart",)),
    Guarantee("equal parts", "all parts but the last have the same size"),
    Guarantee("clean abort", "a stream that breaks off leaves nothing", ("clean_abort",)),
    Guarantee("whole or not", "nobody ever sees a part of an object", ("atomic_put",)),
    Guarantee("bounded memory", "a stream's buffers are released while it goes on"),
    Guarantee(
        "listed versions",
        "a listed token serves a conditional write",
        ("listed_versions", "conditional_update"),
    ),
    Guarantee("true times", "an object's time is when it was written", ("modified_times",)),
    Guarantee("copies", "makes an object of another one, in a known state", ("copies",)),
    Guarantee("copied ranges", "makes an object of ranges of others", ("copies", "range_copies")),
)
BY_NAME = {one.name: one for one in GUARANTEES}


def guarantee(name: str) -> pytest.MarkDecorator:
    """Say which guarantee a test of the contract is about."""
    assert name in BY_NAME, name
    return pytest.mark.guarantee(name)


def of_kind(value: Any, kind: str | None) -> Any:
    """What a contract class declares, for all endpoints or by kind of bucket."""
    return value.get(kind or "") if isinstance(value, Mapping) else value


@dataclass
class Outcomes:
    """Of one run: per endpoint and guarantee, what its tests came to."""

    seen: dict[str, dict[str, set[str]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(set))
    )

    def add(self, endpoint: str, name: str, outcome: str) -> None:
        self.seen[endpoint][name].add(outcome)

    def rows(self) -> dict[str, list[str]]:
        order = (FAILED, LACKING, KEPT, FOREIGN)
        return {
            endpoint: [
                next((cell for cell in order if cell in found.get(one.name, ())), UNTRIED)
                for one in GUARANTEES
            ]
            for endpoint, found in self.seen.items()
            if set().union(*found.values()) != {FOREIGN}  # its server is not installed here
        }


def table(rows: Mapping[str, list[str]]) -> str:
    """Markdown: for each endpoint what it lacks, and what each guarantee means.

    Most endpoints keep most of them. A matrix of all would be wider than a page.
    """
    lines = [["store", "lacks"], ["---", "---"]]
    lines.extend([endpoint, _exceptions(cells)] for endpoint, cells in sorted(rows.items()))
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    legend = "\n".join(f"- *{one.name}*: {one.meaning}." for one in GUARANTEES)
    return f"{text}\n\nThe guarantees are these. {_MARKS}\n\n{legend}"


def _exceptions(cells: list[str]) -> str:
    other = [
        one.name if cell == LACKING else f"{one.name} {cell}"
        for one, cell in zip(GUARANTEES, cells, strict=True)
        if cell != KEPT
    ]
    return ", ".join(other) or "nothing"


def parse(text: str) -> dict[str, list[str]]:
    """The rows of the table between the marks; none if there are no marks."""
    inside = between(text, MARK) or ""
    if [line.split("*")[1] for line in inside.splitlines() if line.startswith("- *")] != [*BY_NAME]:
        return {}  # the guarantees have changed: only what runs now is known
    lines = [line.strip("| ").split(" | ") for line in inside.splitlines() if line.startswith("|")]
    return {endpoint: _cells(exceptions) for endpoint, exceptions in lines[2:]}


def _cells(exceptions: str) -> list[str]:
    cells = dict.fromkeys(BY_NAME, KEPT)
    for text in exceptions.split(", "):
        name, _, cell = text.rpartition(" ")
        if text in cells:
            cells[text] = LACKING
        elif name in cells:
            cells[name] = cell
    return [*cells.values()]


def write_table(place: Path, rows: Mapping[str, list[str]]) -> None:
    """Put the rows between the marks of a file, next to those that it has; or make the file."""
    text = place.read_text() if place.exists() else f"<!-- {MARK} -->\n<!-- /{MARK} -->\n"
    place.write_text(replaced(text, MARK, table({**parse(text), **rows})))


_OUTCOMES = pytest.StashKey[Outcomes]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--guarantees-table", type=Path, help="write what each store keeps there")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "guarantee(name): what a test of the store contract is about"
    )
    config.stash[_OUTCOMES] = Outcomes()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report: Any = yield
    mark = item.get_closest_marker("guarantee")
    endpoint = endpoint_of(item)
    if mark is None or endpoint is None:
        return report
    outcomes, name = item.config.stash[_OUTCOMES], mark.args[0]
    if report.failed:
        outcomes.add(endpoint, name, FAILED)
    elif report.skipped:
        outcomes.add(endpoint, name, FOREIGN)
    elif call.when == "call":
        claims = item.funcargs.get("capabilities")  # type: ignore[attr-defined]
        lacking = claims is not None and not all(
            getattr(claims, needed) for needed in BY_NAME[name].needs
        )
        outcomes.add(endpoint, name, LACKING if lacking else KEPT)
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    place = session.config.getoption("--guarantees-table")
    if place is not None:
        write_table(place, session.config.stash[_OUTCOMES].rows())


def endpoint_of(item: pytest.Item) -> str | None:
    """The name of the endpoint that a test of the contract runs on; None: not for the table."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    found: str | None = of_kind(getattr(item.cls, "endpoint", None), params.get("bucket"))  # type: ignore[attr-defined]
    return found
