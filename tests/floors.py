"""The tests with other versions of what this library needs, in a fresh environment out of the tree.

    python -m tests.floors lowest            the lowest versions that pyproject.toml allows
    python -m tests.floors torch 2.9.1       another torch
    python -m tests.floors frameworks        what pip chooses next to frameworks; installs nothing

Options of pytest may follow, and paths of tests in place of those that would run.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Collection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
# What users install; the other extras are for tests, demo and documentation.
OF_USERS = ("s3", "gcs", "azure", "fsspec", "zstd", "cli")

# The rooms that call what is at its lowest version.
LOWEST_TESTS = (
    *("tests/contract", "tests/stores", "tests/transfer", "tests/checkpoint", "tests/cli"),
    *("tests/state", "tests/read", "tests/write", "tests/inspect", "tests/e2e/test_fsspec.py"),
)
TORCH_TESTS = (
    *("tests/state", "tests/read", "tests/write", "tests/e2e", "tests/compat", "tests/inspect"),
    *("tests/integrations", "tests/run", "tests/distributed", "tests/test_torch_private.py"),
)
FRAMEWORKS = (
    ("torchtitan",),
    ("lightning", "accelerate", "transformers", "datasets"),
    ("ray[train]",),
)


def name_of(requirement: str) -> str:
    """The name of the package that a requirement is of."""
    found = re.match(r"[\w.-]+", requirement)
    assert found is not None, requirement
    return found[0].lower()


def lowest() -> dict[str, str]:
    """Each package that users get with this one, but torch, at the lowest version allowed."""
    asked = [*PROJECT["dependencies"], *(one for extra in OF_USERS for one in EXTRAS[extra])]
    pinned = {name_of(one): one.replace(">=", "==") for one in asked}
    assert all("==" in one for one in pinned.values()), pinned
    del pinned["torch"]
    return pinned


def requirements(pinned: dict[str, str]) -> list[str]:
    """What the tests need, with these versions; anything else is the newest that fits."""
    asked = [
        *PROJECT["dependencies"],
        *(one for extra in (*OF_USERS, "test") for one in EXTRAS[extra]),
    ]
    rest = [one for one in asked if name_of(one) != PROJECT["name"]]
    # One with extras stays, next to the version that it is pinned to.
    return [*pinned.values(), *(one for one in rest if name_of(one) not in pinned or "[" in one)]


def run_tests(pinned: dict[str, str], tests: Collection[str], arguments: list[str]) -> int:
    """Install and test; return pytest's exit status."""
    if not any((ROOT / one.partition("::")[0]).exists() for one in arguments):
        arguments = [*arguments, *tests]
    with tempfile.TemporaryDirectory() as folder:
        python = make_environment(Path(folder), pinned)
        return subprocess.call([python, "-m", "pytest", *arguments], cwd=ROOT)


def make_environment(folder: Path, pinned: dict[str, str]) -> str:
    """Make a virtual environment with these versions; return its Python."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = str(folder / "bin" / "python")
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join(one.partition(";")[0] for one in pinned.values()))
    # In place of a constraint of the machine's own, which might exclude what is to be tested.
    os.environ["PIP_CONSTRAINT"] = str(constraints)
    os.environ["PATH"] = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--upgrade", "pip"], check=True)
    subprocess.run([*pip, *requirements(pinned)], cwd=ROOT, check=True)
    subprocess.run([*pip, "--no-deps", "--editable", "."], cwd=ROOT, check=True)
    return python


def versions_of(*asked: str) -> dict[str, str]:
    """What pip would install in an empty environment, by name."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
    found = subprocess.run(
        [*pip, "--report", "-", *asked], cwd=ROOT, check=True, stdout=subprocess.PIPE
    )
    made = json.loads(found.stdout)["install"]
    return {one["metadata"]["name"].lower(): one["metadata"]["version"] for one in made}


def check_frameworks() -> int:
    """Compare what pip chooses with and without this library; 1 if a framework's changes."""
    changed = 0
    torch = next(one for one in EXTRAS["test"] if name_of(one) == "torch")
    for frameworks in FRAMEWORKS:
        alone = versions_of(torch, *frameworks)
        beside = versions_of(torch, *frameworks, ".[fsspec]")
        print(f"{' '.join(frameworks)}: {len(alone)} packages")
        shown = dict.fromkeys([*map(name_of, frameworks), "datasets", "fsspec", "s3fs", "gcsfs"])
        print("   ", ", ".join(f"{name} {beside[name]}" for name in shown if name in beside))
        for name, version in alone.items():
            if beside.get(name) != version:
                print(f"    {name} {version} becomes {beside.get(name)}")
                changed |= name in ("torch", *map(name_of, frameworks))
    return changed


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.floors",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("lowest")
    commands.add_parser("torch").add_argument("version")
    commands.add_parser("frameworks")
    given, arguments = parser.parse_known_args()
    if given.command == "frameworks":
        return check_frameworks()
    if given.command == "torch":
        return run_tests({"torch": f"torch=={given.version}"}, TORCH_TESTS, arguments)
    return run_tests(lowest(), LOWEST_TESTS, arguments)


if __name__ == "__main__":
    sys.exit(main())
