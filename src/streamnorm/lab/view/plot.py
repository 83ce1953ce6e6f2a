"""The figures, drawn like the paper's: training on the left, test on the right, epochs along the bottom."""

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from ..errors import MissingExtra
from ..results import FigureResults
from ..store import write_bytes
from .lines import LOSS, NEIGHBOURS, Line, best_region, chance_in, limits, lines_of, measure_of, origin
from .looks import Look, looks_of
from .matrix import draw_matrix

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawing

WIDTH = 9.0  # inches
PANEL, TALL, MANY = 3.3, 4.3, 8  # height of a row of panels: of a few lines, of many, and how many that is
MARKS = 5  # markers along a line
STYLE: dict[str, Any] = {
    "svg.hashsalt": "streamnorm",  # equal results, equal files
    "svg.fonttype": "none",  # text stays text
    "text.parse_math": False,  # and a label means itself
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "0.35",
    "axes.grid": True,
    "grid.color": "0.9",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
}


def draw(results: FigureResults, folder: Path) -> list[Path]:
    """Write the figure as PNG and as SVG; the paths. The same results give the same bytes."""
    paths = [folder / f"{results.file_name}.{kind}" for kind in ("png", "svg")]
    for path in paths:
        write_bytes(path, render(results, path.suffix[1:]))
    return paths


def render(results: FigureResults, kind: str) -> bytes:
    """The figure as the contents of a file; `kind`: "png" or "svg"."""
    with style():
        return file_of(build(results), kind)


def file_of(drawing: "Drawing", kind: str, description: str | None = None) -> bytes:
    """A drawing as the contents of a file, without the time it was made."""
    file = io.BytesIO()
    metadata = {"Description": description, "Date" if kind == "svg" else "Software": None}
    drawing.savefig(file, format=kind, dpi=150, metadata=metadata)
    return file.getvalue()


@contextmanager
def style() -> Iterator[None]:
    """The settings of matplotlib, whatever those of the user are; theirs return afterwards."""
    try:
        import matplotlib
    except ImportError as error:
        raise MissingExtra('drawing needs matplotlib: pip install "streamnorm[lab]"') from error
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        settings: Any = matplotlib.rcParams
        settings.update(STYLE)
        yield


def build(results: FigureResults) -> "Drawing":
    """The drawing, not yet written."""
    with style():
        from matplotlib.figure import Figure as Drawing

        drawing = Drawing(figsize=(WIDTH, PANEL), layout="constrained")
        engine: Any = drawing.get_layout_engine()
        engine.set(w_pad=0.08, h_pad=0.06, hspace=0.05)
        if results.figure.name == "table":
            draw_matrix(drawing, results)
        else:
            draw_panels(drawing, results)
        drawing.suptitle(results.figure.title, fontsize=11, fontweight="bold")
        return drawing


def draw_panels(drawing: "Drawing", results: FigureResults) -> None:
    measure = measure_of(results)
    looks = looks_of(results.curves)
    pairs = [lines_of(results, column) for column, _ in measure.parts]
    regions = [best_region(lines) if results.figure.zoom else None for lines in pairs]
    rows = 2 if any(regions) else 1
    grid = drawing.subplots(rows, 2, squeeze=False)
    for column, (lines, region, (_, title)) in enumerate(zip(pairs, regions, measure.parts, strict=True)):
        for axes, words in zip(grid[:, column], (title, f"{title}, enlarged"), strict=False):
            draw_lines(axes, lines, looks)
            axes.set_title(words, fontsize=10)
            axes.set_ylabel(f"{measure.name} ({measure.unit})")
        frame(grid[0, column], lines, chance_in(results.runs), region)
        if rows > 1:
            enlarge(grid[1, column], region)
        grid[-1, column].set_xlabel("epochs")
    height = explain(drawing, pairs[0], looks, note(results))
    drawing.set_size_inches(WIDTH, rows * (TALL if len(looks) > MANY else PANEL) + height)


def draw_lines(axes: "Axes", lines: Sequence[Line], looks: dict[str, Look]) -> None:
    for i, line in enumerate(lines):
        look = looks[line.label]
        if line.low != line.high:
            alpha = 0.16 if len(lines) < 5 else 0.09
            axes.fill_between(line.x, line.low, line.high, color=look.colour, alpha=alpha, linewidth=0)
        # Markers stand at other places on each line, so that lines which lie on each other are still seen.
        every = max(len(line.x) // MARKS, 1)
        axes.plot(line.x, line.mean, markevery=(i * every // len(lines), every), **drawn(look))


def drawn(look: Look) -> dict[str, Any]:
    return {
        "color": look.colour,
        "linestyle": (0, look.dashes) if look.dashes else "-",
        "linewidth": 1.5,
        "marker": look.marker,
        "markersize": 5.5,
        "markerfacecolor": "white" if look.hollow else look.colour,
        "markeredgecolor": look.colour if look.hollow else "white",
        "markeredgewidth": 1.1 if look.hollow else 0.7,
        "zorder": 3,
    }


def frame(axes: "Axes", lines: Sequence[Line], chance: float | None, region: tuple[float, ...] | None) -> None:
    """The limits of a panel, and in it those of the enlarged one."""
    span = limits(lines, chance)
    if span is None:
        axes.text(0.5, 0.5, "nothing to draw", transform=axes.transAxes, ha="center", va="center", color="0.35")
        axes.set_xticks([])
        axes.set_yticks([])
        return
    axes.set_ylim(*span)
    axes.set_xlim(0, 1.02 * max(x for line in lines for x in line.x))
    if region is not None:
        from matplotlib.patches import Rectangle

        left, right, low, high = region
        box = Rectangle((left, low), right - left, high - low, fill=False, edgecolor="0.45", linewidth=0.8, zorder=9)
        axes.add_patch(box)


def enlarge(axes: "Axes", region: tuple[float, ...] | None) -> None:
    if region is None:
        axes.set_axis_off()
        return
    left, right, low, high = region
    axes.set_xlim(left, right + 0.02 * (right - left))
    axes.set_ylim(low, high)


def explain(drawing: "Drawing", lines: Sequence[Line], looks: dict[str, Look], title: str) -> float:
    """The legend of what is drawn, below the panels where it hides nothing, and in words what is not; its height."""
    from matplotlib.lines import Line2D

    shown, others = [line for line in lines if line.x], [line.text for line in lines if not line.x]
    words = [title, *wrap(f"not drawn: {'; '.join(others)}", 130)] if others else [title]
    columns = max(1, min(6, len(shown), 105 // (9 + max((len(line.text) for line in shown), default=0))))
    drawing.legend(
        [Line2D([], [], **drawn(looks[line.label])) for line in shown],
        [line.text for line in shown],
        loc="outside lower center",
        ncols=columns,
        title="\n".join(words),
        title_fontsize=8,
        frameon=False,
        handlelength=3.4,
    )
    return 0.3 + 0.15 * len(words) + 0.19 * -(-len(shown) // columns)


def note(results: FigureResults) -> str:
    """What the lines are, on which data and at which scale."""
    seeds = max((len(each) for each in results.curves.values()), default=0)
    words = [origin(results)]
    if seeds > 1:
        words.append(f"line: mean of {seeds} seeds, band: from the least to the greatest")
    elif seeds:
        words.append("one seed")
    if measure_of(results) is LOSS:
        words.append(f"training: moving average of {NEIGHBOURS} mini-batches")
    return "; ".join(words)
