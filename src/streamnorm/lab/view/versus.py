"""A comparison as a drawing: accuracy against samples per batch, a line for each norm, a panel for each training."""

from pathlib import Path
from typing import TYPE_CHECKING

from ..compare import FULL, WS, Entry, Size
from ..compared import Compared
from ..results import PER_CENT
from ..store import write_bytes
from .contest import table
from .lines import Line
from .looks import DASHED, SOLID, Look
from .plot import WIDTH, drawn, explain, file_of, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawing

HEIGHT = 3.6  # inches, of the panels
SPREAD = 0.3  # of the distance between two sizes, in which the norms stand
NOTE = """each at its own best learning rate, chosen by held-out images; mean of {seeds} seeds
bars: ± one standard error; thin line: guessing; WS: weight standardization"""
COLOURS = {
    "none": ("#6f7f8f", "v"),
    "batch norm": ("#0064b0", "^"),
    "layer norm": ("#d98200", "s"),
    "group norm": ("#d98200", "s"),
    "Batch Renorm": ("#3a9bdc", "<"),
    "Online Norm": ("#00936b", "D"),
    "MABN": ("#aa4499", "P"),
    "FRN + TLU": ("#8a7a1f", ">"),
    "streaming": ("#000000", "o"),
}


def draw_compared(found: Compared, folder: Path) -> list[Path]:
    """Write the drawing as PNG and as SVG, with the numbers as description; the paths."""
    paths = [folder / f"{found.plan.file_name}.{kind}" for kind in ("png", "svg")]
    for path in paths:
        with style():
            write_bytes(path, file_of(build_compared(found), path.suffix[1:], table(found)))
    return paths


def build_compared(found: Compared) -> "Drawing":
    """The drawing, not yet written. Trainings of different length are not joined by a line."""
    with style():
        from matplotlib.figure import Figure as Drawing

        drawing = Drawing(figsize=(WIDTH, HEIGHT), layout="constrained")
        parts = {
            "an update after each batch": [size for size in found.plan.sizes if size[0] * size[1] < FULL],
            f"{FULL} samples per update": [size for size in found.plan.sizes if size[0] * size[1] == FULL],
        }
        parts = {title: sorted(sizes) for title, sizes in parts.items() if sizes}
        panels = drawing.subplots(1, max(len(parts), 1), squeeze=False, sharey=True)[0]
        for axes, (title, sizes) in zip(panels, parts.items(), strict=False):
            draw_panel(axes, found, sizes)
            axes.set_title(title, fontsize=10)
        panels[0].set_ylabel("test accuracy (%)")
        lines = [Line(norm, "", True, [0.0], [], [], []) for norm in found.plan.rows if is_drawn(found, norm)]
        looks = {norm: look_of(norm) for norm in found.plan.rows}
        height = explain(drawing, lines, looks, NOTE.format(seeds=found.plan.seeds))
        drawing.set_size_inches(WIDTH, HEIGHT + height)
        title = f"Norms for small batches: {found.plan.net}, {found.plan.data}"
        drawing.suptitle(title, fontsize=11, fontweight="bold")
        return drawing


def draw_panel(axes: "Axes", found: Compared, sizes: list[Size]) -> None:
    """Norms stand side by side at each size, so that none hides another."""
    norms = [norm for norm in found.plan.rows if is_drawn(found, norm)]
    for i, norm in enumerate(norms):
        cells = [found.cell(Entry(found.plan.net, norm, *size)) for size in sizes]
        mean, error = ([float("nan") if cell is None else cell.accuracy[k] for cell in cells] for k in (0, 1))
        x = [place + SPREAD * (i / len(norms) - 0.5) for place in range(len(sizes))]
        axes.errorbar(x, mean, error, elinewidth=0.8, **drawn(look_of(norm)))
    axes.axhline(PER_CENT * (1 - found.chance["error"]), color="0.6", linewidth=0.8, zorder=1)
    split = len({batches for _, batches in sizes}) > 1
    axes.set_xticks(range(len(sizes)), [f"{s}\n({n} batch{'es' * (n > 1)})" if split else str(s) for s, n in sizes])
    axes.set_xlim(-0.4, len(sizes) - 0.6)
    axes.set_xlabel("samples per batch")


def is_drawn(found: Compared, norm: str) -> bool:
    return any(found.cell(Entry(found.plan.net, norm, *size)) for size in found.plan.sizes)


def look_of(norm: str) -> Look:
    """With weight standardization dashed and hollow."""
    colour, marker = COLOURS[norm.removesuffix(WS)]
    standardized = norm.endswith(WS)
    return Look(colour, DASHED if standardized else SOLID, marker, standardized)
