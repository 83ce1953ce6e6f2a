"""Table 1 as a drawing: methods down, scenarios across, each cell the final test result."""

import math
from statistics import fmean
from textwrap import wrap
from typing import TYPE_CHECKING

from ..results import FigureResults, Result, ends, mean_and_error
from .lines import ERROR, chance_in, ending, measure_in, origin

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawing

Cells = dict[tuple[str, str], list[Result]]  # method, scenario
BEST, WORST, EMPTY = (0.85, 0.93, 0.99), (0.05, 0.27, 0.45), (0.93, 0.93, 0.93)


def draw_matrix(drawing: "Drawing", results: FigureResults) -> None:
    cells: Cells = {}
    for label, each in results.curves.items():
        scenario, _, method = label.rpartition(": ")
        cells[method, scenario] = each
    methods = list(dict.fromkeys(method for method, _ in cells))
    scenarios = list(dict.fromkeys(scenario for _, scenario in cells))
    axes = drawing.subplots()
    heads = []
    for j, scenario in enumerate(scenarios):
        column = [cells.get((method, scenario), []) for method in methods]
        unit = draw_column(axes, j, column)
        heads.append("\n".join([*wrap(scenario, 11), f"({unit})"]))
    axes.set_xticks(range(len(scenarios)), heads)
    axes.set_yticks(range(len(methods)), methods)
    axes.tick_params(length=0, labeltop=True, labelbottom=False)
    axes.set_xlim(-0.5, max(len(scenarios), 1) - 0.5)
    axes.set_ylim(max(len(methods), 1) - 0.5, -0.5)
    axes.grid(False)
    axes.spines[:].set_visible(False)
    seeds = max((len(each) for each in cells.values()), default=0)
    spread = f"mean of {seeds} seeds ± standard error" if seeds > 1 else "one seed"
    axes.set_xlabel(
        f"final test error or validation loss; {spread}; {origin(results)}\n"
        "the lighter, the nearer to the best of its column (bold), the darkest as bad as guessing",
        fontsize=8,
        labelpad=8,
    )
    drawing.set_size_inches(9.0, 1.9 + 0.55 * max(len(methods), 1))


def draw_column(axes: "Axes", j: int, column: list[list[Result]]) -> str:
    """One row per method; the unit of the numbers."""
    runs = [run for each in column for run in each]
    measure, chance = measure_in(runs), chance_in(runs) or 0.0
    done = [ends(each, f"test_{measure.name}") for each in column]
    best = min((fmean(values) for values in done if values), default=0.0)
    for i, each in enumerate(column):
        if not done[i]:
            draw_cell(axes, i, j, "\n".join(wrap(ending(each), 10)), EMPTY, "italic", "normal")
            continue
        mean, error = mean_and_error(done[i])
        far = (mean - best) / (chance - best) if mean < chance else 1.0
        # The root makes small distances visible: good methods are near each other.
        colour = tuple(b + (w - b) * math.sqrt(far) for b, w in zip(BEST, WORST, strict=True))
        number = f"{mean:.{1 if measure is ERROR else 2}f}"
        spread = "" if math.isnan(error) else f"\n± {error:.{1 if measure is ERROR else 2}f}"
        missing = f"\n{ending(each)}" if ending(each) else ""
        draw_cell(axes, i, j, number + spread + missing, colour, "normal", "bold" if mean == best else "normal")
    return measure.unit


def draw_cell(axes: "Axes", i: int, j: int, text: str, colour: tuple[float, ...], slant: str, weight: str) -> None:
    from matplotlib.patches import Rectangle

    light = 0.2126 * colour[0] + 0.7152 * colour[1] + 0.0722 * colour[2]
    axes.add_patch(Rectangle((j - 0.5, i - 0.5), 1, 1, facecolor=colour, edgecolor="white", linewidth=2))
    ink = "black" if light > 0.5 else "white"
    axes.text(j, i, text, ha="center", va="center", color=ink, fontsize=8.5, fontstyle=slant, fontweight=weight)
