"""`environments`: each of the other libraries in a virtual environment of its own.

Their pins differ (s3fs holds botocore back for all others), and what is measured should be what a
user of one of them installs. An environment stands in this one's folder and goes with it. What is
installed here (torch, this library) is seen there too, so that a peer brings no torch of its own.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from pathlib import Path

from benchmarks.peers import PEERS, environment_of, site_packages
from benchmarks.table import Result, Table


def environments(peers: Sequence[str]) -> tuple[Table, Result]:
    """Make an environment for each peer that needs one, or bring it up to date."""
    rows: list[list[str | None]] = []
    problems: dict[str, str] = {}
    for name in peers:
        requirements = PEERS[name].requirements
        if not requirements:
            continue
        print(f"{name}: pip install {' '.join(requirements)} ...", file=sys.stderr, flush=True)
        folder = environment_of(name)
        make(folder)
        python = str(folder / "bin" / "python")
        pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--upgrade"]
        if subprocess.run([*pip, *requirements], check=False).returncode != 0:
            problems[name] = "failed: pip says above why"
        else:
            versions = [f"{of} {version}" for of, version in PEERS[name].versions().items()]
            rows.append([PEERS[name].label, " ".join(versions), str(folder)])
    notes = [f"{PEERS[name].label}: {problem}" for name, problem in problems.items()]
    return Table("", ["peer", "installed", "environment"], rows, notes), {
        "command": "environments",
        "environments": {name: str(environment_of(name)) for name in peers},
        "problems": problems,
    }


def make(folder: Path) -> None:
    """Make an environment without pip, in which this one's packages can be imported."""
    venv.EnvBuilder(with_pip=False, symlinks=True).create(folder)
    # By `addsitedir`: this tree may be installed by a .pth file, which a path alone would not read.
    here = sysconfig.get_path("purelib")
    line = f"import site; site.addsitedir({here!r})\n"
    (site_packages(folder) / "this-environment.pth").write_text(line)
