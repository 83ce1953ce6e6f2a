"""What a setting does to the claims of a figure, as a drawing: what was measured against its value."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..results import FigureResults
from ..store import write_bytes
from ..variations import SETTINGS
from .findings import drawing_of, factor_of, lines, varied_table
from .lines import Line
from .looks import DASHES, MARKERS, Look
from .plot import WIDTH, drawn, explain, file_of, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

HEIGHT = 2.6  # inches, of the panel
COLOURS = ("#000000", "#d98200", "#0064b0", "#00936b")
NOTE = "above 0 a claim holds; bars: ± one standard error"


def draw_varied(group: Sequence[FigureResults], folder: Path) -> list[Path]:
    """Write the drawing, if there is one of these, as PNG and as SVG, with the numbers as description; the paths."""
    if factor_of(group) is None:
        return []
    paths = [folder / f"{drawing_of(group)}.{kind}" for kind in ("png", "svg")]
    for path in paths:
        with style():
            write_bytes(path, file_of(build_varied(group), path.suffix[1:], varied_table(group)))
    return paths


def build_varied(group: Sequence[FigureResults]) -> "Drawing":
    """The drawing, not yet written."""
    with style():
        from matplotlib.figure import Figure as Drawing

        drawing = Drawing(figsize=(WIDTH, HEIGHT), layout="constrained")
        axes, name, first = drawing.subplots(), factor_of(group) or "", group[0]
        factors = [float(each.variation.get(name, 1)) for each in group]
        looks, shown = {}, []
        for number, (text, claims) in enumerate(lines(group)):
            look = Look(COLOURS[number % len(COLOURS)], DASHES[number % len(DASHES)], MARKERS[number % 6], False)
            looks[text] = look
            shown.append(Line(text, "", True, [0.0], [], [], []))
            judged = [(x, claim) for x, claim in zip(factors, claims, strict=True) if claim.values]
            x, y, error = zip(*sorted((x, claim.mean, claim.error) for x, claim in judged), strict=True)
            axes.errorbar(x, y, yerr=error, **drawn(look))
        axes.axhline(0, color="0.35", linewidth=0.8)
        axes.set_xscale("log")
        axes.set_xticks(factors, [f"{value:g}" for value in factors])
        axes.minorticks_off()
        axes.set_xlabel(SETTINGS[name].text)
        axes.set_ylabel(lines(group)[0][1][0].unit)
        drawing.set_size_inches(WIDTH, HEIGHT + explain(drawing, shown, looks, NOTE))
        title = f"{first.figure.title}, {first.scale}: claims against {name}"
        drawing.suptitle(title, fontsize=11, fontweight="bold")
        return drawing
