"""A grid as a drawing: accuracy against samples per batch, a line for each norm, a panel for each window."""

import math
from pathlib import Path
from typing import TYPE_CHECKING

from ..grid import norms_of
from ..online import Cell, Online
from ..results import PER_CENT
from ..store import write_bytes
from .lines import Line
from .looks import DASHED, DOTTED, MIXED, SOLID, Look
from .plot import WIDTH, drawn, explain, file_of, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawing

HEIGHT = 3.2  # inches, of the panels
BLACK, GREY, ORANGE, BLUE, GREEN = "#000000", "#6f7f8f", "#d98200", "#0064b0", "#00936b"
LOOKS = {
    "none": Look(GREY, DOTTED, "v", True),
    "layer norm": Look(ORANGE, DASHED, "s", False),
    "group norm": Look(ORANGE, DASHED, "s", False),
    "batch norm": Look(BLUE, MIXED, "^", False),
    "streaming, guard=False": Look(BLACK, DOTTED, "o", True),
    "streaming": Look(BLACK, SOLID, "o", False),
    "streaming (.97, .03), guard=False": Look(GREEN, DOTTED, "D", True),
    "streaming (.97, .03)": Look(GREEN, SOLID, "D", False),
}


def draw_grid(results: Online, folder: Path) -> list[Path]:
    """Write the drawing as PNG and as SVG; the paths. The same results give the same bytes."""
    paths = [folder / f"{results.grid.file_name}.{kind}" for kind in ("png", "svg")]
    for path in paths:
        with style():
            write_bytes(path, file_of(build_grid(results), path.suffix[1:]))
    return paths


def build_grid(results: Online) -> "Drawing":
    """The drawing, not yet written."""
    with style():
        from matplotlib.figure import Figure as Drawing

        grid, norms = results.grid, norms_of(results.grid.net)
        drawing = Drawing(figsize=(WIDTH, HEIGHT), layout="constrained")
        panels = drawing.subplots(1, len(grid.batches), squeeze=False, sharey=True)[0]
        for axes, batches in zip(panels, grid.batches, strict=True):
            for norm in norms:
                draw_norm(axes, results, norm, batches)
            if not axes.lines or not any(map(math.isfinite, axes.dataLim.intervaly)):
                axes.text(0.5, 0.6, "no cell has all its runs", transform=axes.transAxes, ha="center", color="0.35")
            axes.axhline(PER_CENT * (1 - results.chance["error"]), color="0.6", linewidth=0.8, zorder=1)
            axes.set_xscale("log", base=2)
            axes.set_xticks(grid.samples, [str(size) for size in grid.samples])
            axes.minorticks_off()
            axes.set_xlim(min(grid.samples) / 1.3, max(grid.samples) * 1.3)
            axes.set_title(f"{batches} batch{'es' * (batches > 1)} per update", fontsize=10)
            axes.set_xlabel("samples per batch")
        panels[0].set_ylabel("accuracy (%)")
        lines = [Line(norm, "", True, [0.0], [], [], []) for norm in norms if is_drawn(results, norm)]
        note = f"at the best of {len(grid.rates)} learning rates; bars: ± one standard error; thin line: guessing"
        height = explain(drawing, lines, LOOKS, note)
        drawing.set_size_inches(WIDTH, HEIGHT + height)
        title = f"Online learning, {grid.net}: {grid.size:,} samples of {grid.data}"
        drawing.suptitle(title, fontsize=11, fontweight="bold")
        return drawing


def is_drawn(results: Online, norm: str) -> bool:
    grid = results.grid
    return any(results.cell(norm, size, batches) for size in grid.samples for batches in grid.batches)


def draw_norm(axes: "Axes", results: Online, norm: str, batches: int) -> None:
    """Only where all runs of a cell are there; a line does not lead over one that is missing."""
    cells = [results.cell(norm, size, batches) for size in results.grid.samples]
    x = results.grid.samples
    mean, error = ([_value(cell, i) for cell in cells] for i in (0, 1))
    axes.errorbar(x, mean, error, elinewidth=0.8, **drawn(LOOKS[norm]))


def _value(cell: Cell | None, i: int) -> float:
    return float("nan") if cell is None else cell.best[i]
