"""What a setting does to the claims of a figure, as a drawing: what was measured against its value."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..results import FigureResults
from ..store import write_bytes
from ..variations import SETTINGS
from .findings import drawings, lines, varied_table
from .lines import Line
from .looks import DASHES, MARKERS, OTHERS, Look
from .plot import WIDTH, drawn, explain, file_of, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

HEIGHT = 2.6  # inches, of the panel
NOTE = "above 0 a claim holds; bars: ± one standard error"


def draw_varied(group: Sequence[FigureResults], folder: Path) -> list[Path]:
    """Write what there is to draw as PNG and as SVG, with the numbers as description; the paths."""
    paths = []
    for name, results in drawings(group).items():
        for kind in ("png", "svg"):
            paths.append(folder / f"{name}.{kind}")
            write_bytes(paths[-1], render_varied(results, kind))
    return paths


def render_varied(group: Sequence[FigureResults], kind: str) -> bytes:
    """The drawing as the contents of a file; `kind`: "png" or "svg"."""
    with style():
        return file_of(build_varied(group), kind, varied_table(group))


def build_varied(group: Sequence[FigureResults]) -> "Drawing":
    """The drawing, not yet written."""
    with style():
        from matplotlib.figure import Figure as Drawing

        drawing = Drawing(figsize=(WIDTH, HEIGHT), layout="constrained")
        first, rows = group[0], lines(group)
        units = list(dict.fromkeys(claims[0].unit for _, claims in rows))
        panels = dict(zip(units, drawing.subplots(1, len(units), squeeze=False)[0], strict=True))
        name = next(name for each in group for name in each.variation)
        factors = [float(each.variation.get(name, 1)) for each in group]
        looks, shown = {}, []
        for number, (text, claims) in enumerate(rows):
            look = Look(OTHERS[number % len(OTHERS)], DASHES[number % len(DASHES)], MARKERS[number % 6], False)
            looks[text] = look
            shown.append(Line(text, "", True, [0.0], [], [], []))
            judged = [(x, claim) for x, claim in zip(factors, claims, strict=True) if claim.values]
            x, y, error = zip(*sorted((x, claim.mean, claim.error) for x, claim in judged), strict=True)
            panels[claims[0].unit].errorbar(x, y, yerr=error, **drawn(look))
        for unit, axes in panels.items():
            axes.axhline(0, color="0.35", linewidth=0.8)
            axes.set_xscale("log")
            axes.set_xticks(factors, [f"{value:g}" for value in factors])
            axes.minorticks_off()
            axes.set_xlabel(SETTINGS[name].text)
            axes.set_ylabel(unit)
        drawing.set_size_inches(WIDTH, HEIGHT + explain(drawing, shown, looks, NOTE))
        title = f"{first.figure.title}, {first.scale}: claims against {name}"
        drawing.suptitle(title, fontsize=11, fontweight="bold")
        return drawing
