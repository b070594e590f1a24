"""README.md and docs/: snippets run, commands and files exist, lists are those of the code."""

from __future__ import annotations

import importlib.util
import os
import re
import secrets
import subprocess
import sys
import tomllib
import types
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from typer.main import get_command

import dcp_objstore as dos
from dcp_objstore import errors
from dcp_objstore.cli.app import app
from tests.support import doc_tables
from tests.support.programs import run_in_forks
from tests.support.public_api import public_names

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.M | re.S)


QUICK_START = next(block for block in blocks(PAGES[0], "python") if "sys.argv" in block)


class Counted:
    """In place of a metrics or tracing library: any call returns itself, and is counted."""

    calls: ClassVar[Counter[str]] = Counter()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*_: object, **__: object) -> Counted:
            self.calls[name] += 1
            return self

        return call


@pytest.fixture(autouse=True)
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests do not install the libraries that the recipes are for."""
    for name in ("prometheus_client", "opentelemetry"):
        if importlib.util.find_spec(name) is None:
            module: Any = types.ModuleType(name)
            module.Counter = module.Histogram = lambda *_: Counted()
            module.trace = Counted()
            monkeypatch.setitem(sys.modules, name, module)


def run_snippets(page: Path) -> dict[str, Any]:
    """Run a page's snippets one after the other on a bucket in memory; return their names."""
    model = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    names: dict[str, Any] = {
        "state": {"w": torch.ones(3)},
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer),
        "step": 7,
        "steps": 2,
        "train": lambda state: 0.5,
        "loader": {"position": 3},
    }
    bucket = f"memory://{secrets.token_hex(4)}"
    if page.name == "upkeep.md":  # looks after steps that another page has saved
        for step in (1000, 2000):
            dos.save({"w": torch.ones(3)}, f"{bucket}/run/step-{step}")
    for block in blocks(page, "python"):
        if "sys.argv" in block:  # a program
            continue
        text = block
        if "endpoint_url" not in block:
            text = block.replace("s3://bucket", bucket).replace("gs://bucket", f"{bucket}/gs")
        exec(text, names)
    return names


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize("page", [one for one in PAGES if blocks(one, "python")], ids=name_of)
def test_every_snippet_of_a_page_runs_one_after_the_other(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_snippets(page)


def test_the_recipes_hear_of_each_part(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Counted.calls.clear()
    names = run_snippets(DOCS / "observability.md")
    # One of them may be installed, as a dependency of another: then only that it runs.
    stood_in = ["inc", "observe"] if isinstance(names["moved"], Counted) else []
    stood_in += ["start_span", "end"] if isinstance(names["trace"], Counted) else []
    assert all(Counted.calls[name] >= 3 for name in stood_in), Counted.calls
    if not isinstance(names["moved"], Counted):
        assert names["moved"].labels("PartUploaded", "0")._value.get() >= 12


def test_the_quick_start_trains_and_resumes(tmp_path):
    (tmp_path / "train.py").write_text(QUICK_START)
    shown = "UserWarning, RuntimeWarning, FutureWarning"
    (tmp_path / "twice.py").write_text(
        "import runpy, sys, warnings\n"
        f"for kind in ({shown}):\n    warnings.simplefilter('error', kind)\n"
        f"for steps in ('10', '20'):\n    sys.argv = ['', '{tmp_path.as_uri()}/run', steps]\n"
        "    runpy.run_path('train.py', run_name='__main__')\n"
    )
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    assert run_in_forks(["python", "twice.py"], tmp_path, alone, True).splitlines() == [
        "started at step 0, trained to step 10",
        "resumed from step 10, trained to step 20",
    ]


@pytest.mark.campaign
def test_the_quick_start_resumes_on_other_ranks_as_the_readme_says(tmp_path):
    (tmp_path / "train.py").write_text(QUICK_START)
    (commands,) = [block for block in blocks(PAGES[0], "sh") if "torchrun" in block]
    bin_of = Path(sys.executable).parent
    text = commands.replace("s3://bucket/first-run", f"{tmp_path.as_uri()}/run")
    ran = subprocess.run(
        ["bash", "-ec", text],
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{bin_of}:{os.environ['PATH']}"},
        check=True,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert "resumed from step 20, trained to step 40" in ran.stdout
    assert "step-40" in ran.stdout


def test_the_two_commands_are_those_that_install_and_run_everything():
    (commands,) = [block for block in blocks(PAGES[0], "sh") if "pytest" in block]
    lines = [line.partition("#")[0].strip() for line in commands.splitlines()]
    assert lines == [
        "pip install -e '.[demo]' && dcp-objstore demo",
        "pip install -e '.[test]' && pytest",
    ]
    assert "pip install -e '.[test]' && pytest\n" in (ROOT / ".ci" / "run").read_text()


def test_commands_that_the_pages_name_exist():
    known = set(get_command(app).commands)  # type: ignore[attr-defined]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = set(project["optional-dependencies"])
    for page in PAGES:
        text = page.read_text()
        code = "\n".join(blocks(page, "sh") + re.findall(r"`([^`\n]+)`", text))
        for option, command in re.findall(r"\bdcp-objstore (--\w+ \S+ )?([a-z]\w*)", code):
            assert command in known, (page, option, command)
        for path in re.findall(r"\btests/[\w/*.]+", text):
            assert list(ROOT.glob(path.rstrip("."))), (page, path)
        for module in re.findall(r"python -m ([\w.]+)", code):
            assert module.startswith("venv") or importlib.util.find_spec(module), (page, module)
        for extra in re.findall(r"\.\[(\w+)\]|dcp-objstore\[([\w,]+)\]", text):
            assert set("".join(extra).split(",")) <= extras, (page, extra)


def test_links_of_the_readme_lead_somewhere():
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", PAGES[0].read_text()):
        assert (ROOT / target).exists(), target


def test_every_page_is_in_the_navigation_or_in_the_index_of_the_decisions():
    site = (ROOT / "zensical.toml").read_text()
    named = set(re.findall(r'"([\w/-]+\.md)"', site))
    decisions = re.findall(r"\]\(([\w-]+\.md)\)", (DOCS / "design" / "index.md").read_text())
    named |= {f"design/{page}" for page in decisions}
    assert named == {str(page.relative_to(DOCS)) for page in PAGES[1:]}


def test_the_table_of_torchs_tests_names_each_of_ours_that_stands_for_one():
    text = (DOCS / "torch-tests.md").read_text().partition("## Out of scope")[0]
    shown = re.findall(r"^\| [^|]+ \| ([^|]*`[^|]*) \|$", text, re.M)
    named = {name for cell in shown for name in re.findall(r"`([^`]+)`", cell)}
    home = "tests/e2e/test_as_torch_tests_it.py"
    found = {name if "::" in name else f"{home}::{name}" for name in named}
    defined = {
        f"{path}::{name}"
        for path in {home, *(one.partition("::")[0] for one in found)}
        for name in re.findall(r"^ *def (test_\w+)", (ROOT / path).read_text(), re.M)
    }
    assert found <= defined
    assert {one for one in defined if one.startswith(home)} <= found


def test_the_code_that_a_decision_names_exists():
    for page in sorted((DOCS / "design").glob("*.md")):
        for path in re.findall(r"`([a-z0-9_/]+\.py)`", page.read_text()):
            assert (ROOT / path).exists() or (ROOT / "dcp_objstore" / path).exists(), (page, path)


def test_the_reference_has_every_public_name_once():
    text = "\n".join(page.read_text() for page in (DOCS / "reference").glob("*.md"))
    modules = {name: getattr(dos, name) for name in ("reports", "measure", "observe", "errors")}
    names = set(dos.__all__) - set(modules)
    names |= {f"{name}.{one}" for name, module in modules.items() for one in public_names(module)}
    assert sorted(re.findall(r"^::: dcp_objstore\.([\w.]+)$", text, re.M)) == sorted(names)


def test_the_table_of_errors_is_the_tree():
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|", (DOCS / "errors.md").read_text(), re.M)
    written = {group: set(re.findall(r"`(\w+)`", listed)) for group, listed in rows}
    tree = {name: one for name, one in vars(errors).items() if isinstance(one, type)}
    del tree["DcpObjstoreError"]
    groups = [name for name, one in tree.items() if one.__base__ is errors.DcpObjstoreError]
    assert written == {
        group: {name for name, one in tree.items() if issubclass(one, tree[group])} - {group}
        for group in groups
    }


@pytest.mark.parametrize("scheme", doc_tables.SCHEMES)
def test_the_tables_of_options_are_what_the_stores_take(scheme):
    written = doc_tables.between(doc_tables.OPTIONS_PAGE.read_text(), f"options {scheme}")
    assert written == doc_tables.options_table(scheme), "run `python -m tests.support.doc_tables`"
