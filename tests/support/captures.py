"""The pictures of `docs/command-line.md`: what commands show on a terminal of 80 columns.

`python -m tests.support.captures` makes them again.
"""

from __future__ import annotations

import io
import re
import sys
import tempfile
from pathlib import Path

import torch
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

import dcp_objstore as dos
from tests.support.command_line import on_terminal

IMAGES = Path(__file__).parents[2] / "docs" / "images"
COLUMNS = 80
# By the name of the picture: the command, with the run at RUN, and its exit status.
RUN = "file:///tmp/run"
COMMANDS = {"inspect": (["inspect", f"{RUN}/step-40"], 0), "verify": (["verify", "--run", RUN], 4)}
# Without web fonts: a page makes no requests to other servers.
_FORMAT = re.sub(r"@font-face \{\{.*?\}\}\n", "", CONSOLE_SVG_FORMAT, flags=re.S)


def save_run(url: str, folder: Path) -> None:
    """Save three steps of a small transformer, and damage one of them."""
    for step in (20, 30, 40):
        torch.manual_seed(step)
        layer = torch.nn.TransformerEncoderLayer(64, 4, 256)
        model = torch.nn.ModuleDict(
            {
                "embed": torch.nn.Embedding(1000, 64),
                "encoder": torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False),
                "head": torch.nn.Linear(64, 1000, bias=False),
            }
        )
        dos.save({"model": model, "step": step}, f"{url}/step-{step}", progress=False)
    (data,) = (folder / "step-30").glob("*.distcp")
    body = bytearray(data.read_bytes())
    body[100_000] ^= 0xFF
    data.write_bytes(body)


def make(images: Path) -> None:
    """Make all pictures."""
    with tempfile.TemporaryDirectory() as name:
        url = f"file://{name}/run"
        save_run(url, Path(name) / "run")
        for picture, (words, status) in COMMANDS.items():
            arguments = [word.replace(RUN, url) for word in words]
            shown = on_terminal(COLUMNS, *arguments, status=status).replace(url, RUN)
            # What a progress bar has drawn is overwritten by what follows it.
            lines = [line.rpartition("\r")[2] for line in shown.rstrip().split("\n")]
            console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
            console.print(Text.from_ansi("\n".join(lines)))
            console.save_svg(
                str(images / f"{picture}.svg"),
                title=f"dcp-objstore {' '.join(words)}",
                code_format=_FORMAT,
                unique_id=picture,
            )


def text_of(picture: Path) -> str:
    """Return the text of a picture, without ids, times and sizes of what differs each time."""
    text = " ".join(re.findall(r"<text[^>]*>(.*?)</text>", picture.read_text(), re.S))
    return re.sub(r"[0-9a-f]{24,32}|\d{4}-\d\d-\d\d&#160;\d\d:\d\d", "…", text)


if __name__ == "__main__":
    make(Path(sys.argv[1]) if len(sys.argv) > 1 else IMAGES)
