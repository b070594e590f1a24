"""Draw the result of `scale`: seconds of each stage against chunks, with the lines through them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib import pyplot as plt

from benchmarks.scale import STAGES, Stage, extrapolated

# Colours that the colour-blind tell apart (Okabe and Ito).
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999")
_SHOWN = 4  # stages of each kind, those that take longest


def draw(result: Mapping[str, Any], path: str) -> None:
    """Write the plot to a file, whose name says the format."""
    mpl.use("Agg")
    figure, panels = plt.subplots(1, 2, figsize=(12, 6.2), sharex=True)
    for panel, on, title in zip(
        panels,
        ("coord.", "rank"),
        ("Coordinator, for all ranks together", "Each rank, by itself"),
        strict=True,
    ):
        _draw(panel, [stage for stage in STAGES if stage.on == on], result)
        panel.set_title(title, loc="left", fontsize=11)
    figure.suptitle(
        f"Llama {result['model']} with AdamW under FSDP2, {result['tensors']} tensors:"
        " time apart from the transfer of the data",
        fontsize=12,
    )
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw(panel: Any, stages: list[Stage], result: Mapping[str, Any]) -> None:
    sizes, fits = result["sizes"], result["fits"]
    chunks = np.array([size["chunks"] for size in sizes])
    reach = np.geomspace(chunks[0], max(result["chunks"], chunks[-1]), 50)

    def seconds(stage: Stage) -> list[float]:
        return [size["stages"][stage.name]["seconds"] for size in sizes]

    colours = iter(_COLOURS)
    for of, mark, style in (("DCP", "s", "--"), ("ours", "o", "-")):
        longest = sorted((one for one in stages if one.of == of), key=lambda s: -seconds(s)[-1])
        for stage in longest[:_SHOWN]:
            colour = next(colours)
            line = [extrapolated(fits[stage.name], at) for at in reach]
            panel.plot(reach, line, style, color=colour, linewidth=1.2)
            label = f"{of}: {stage.text}"
            panel.plot(chunks, seconds(stage), mark, color=colour, markersize=5, label=label)
    if result["chunks"] > chunks[-1]:
        panel.axvspan(chunks[-1], reach[-1], color="0.94", zorder=0)
        panel.annotate(
            "from the fit",
            (float(np.sqrt(chunks[-1] * reach[-1])), 0.95),
            xycoords=("data", "axes fraction"),
            ha="center",
            color="0.45",
        )
    panel.set(xscale="log", yscale="log", xlabel="chunks", ylabel="processor time, seconds")
    panel.grid(True, which="major", color="0.88", linewidth=0.6)
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(fontsize=8, frameon=False, ncol=2, loc="upper left", bbox_to_anchor=(-0.05, -0.12))
