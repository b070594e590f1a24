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


@dataclass(frozen=True)
class Guarantee:
    """One column.

    Attributes:
        name: heading of the column.
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
    Guarantee("parallel parts", "a stream is uploaded part by part, in parallel", ("multipart",)),
    Guarantee("equal parts", "all parts but the last have the same size", ("equal_parts",)),
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
    """Markdown: a row for each endpoint, a column for each guarantee, and the legend."""
    lines = [["store", *(one.name for one in GUARANTEES)]]
    lines.append(["---", *(":-:" for _ in GUARANTEES)])
    lines.extend([endpoint, *cells] for endpoint, cells in sorted(rows.items()))
    legend = "\n".join(f"- *{one.name}*: {one.meaning}." for one in GUARANTEES)
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return (
        f"{text}\n\n{KEPT} kept; {LACKING} lacking, declared, and refused where it is asked for;"
        f" {FOREIGN} no such thing there.\n\n{legend}"
    )


def parse(text: str) -> dict[str, list[str]]:
    """The rows of the table between the marks; none if there are no marks."""
    lines = [line for line in (between(text, MARK) or "").splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    if not cells:
        return {}
    if cells[0][1:] != [one.name for one in GUARANTEES]:
        return {}  # the columns have changed: only what runs now is known
    return {row[0]: row[1:] for row in cells[2:]}


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
