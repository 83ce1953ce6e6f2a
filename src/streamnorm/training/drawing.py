"""The picture of a model's health: a row for each layer, a tick for each channel."""

from os import PathLike
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DARK, BLUE, ORANGE, RED = "0.25", "#0064b0", "#d98200", "#c1121f"
TALLEST = 40  # rows that keep their full height
SMALLEST = 1e-4  # what is smaller is drawn here


class Row(NamedTuple):
    """A layer: numbers of each channel, and two of the layer."""

    name: str
    sigma: list[float]
    ill: list[bool]  # dead or exploding
    drift_mean: list[float]
    drift_sigma: list[float]
    gradient: tuple[float, float]  # ratio, cosine
    notes: str
    points_away: bool  # the streamed gradient, from the true one


def draw(rows: list[Row], path: str | PathLike[str] | None) -> "Figure":
    """The figure, written to `path` if there is one; its ending says in which format."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('drawing needs matplotlib: pip install "streamnorm[lab]"') from error
    if not rows:
        raise ValueError("there is no streaming layer in this model, so there is nothing to draw")
    height = 1.5 + 0.42 * min(len(rows), TALLEST) + 0.1 * max(len(rows) - TALLEST, 0)
    figure = Figure(figsize=(10.5, height), layout="constrained")
    spread, drift, gradient = figure.subplots(1, 3, sharey=True, width_ratios=(1.1, 1.1, 0.8))
    places = range(len(rows), 0, -1)  # the first layer on top
    for place, row in zip(places, rows, strict=True):
        named = "{}" if place == 1 else "_{}"  # one entry each in the legends
        ill = [value for value, is_ill in zip(row.sigma, row.ill, strict=True) if is_ill]
        ticks(spread, row.sigma, place, DARK, named.format("median"))
        spread.plot(at_least(ill), [place] * len(ill), "d", color=RED, label=named.format("dead or exploding"))
        ticks(drift, row.drift_mean, place + 0.17, BLUE, named.format("mean, in sigmas"))
        ticks(drift, row.drift_sigma, place - 0.17, ORANGE, named.format("sigma, relative"))
        colours = DARK, RED if row.points_away else ORANGE
        for value, marker, colour, words in zip(row.gradient, "ox", colours, ("length", "cosine"), strict=True):
            gradient.plot(value, place, marker, color=colour, label=named.format(words))
    frame(spread, "sigma of each channel", "log")
    frame(drift, "drift: this window against the past", "log")
    frame(gradient, "streamed against true gradient", "linear")
    drift.axvline(1, color="0.6", linewidth=0.8, linestyle="--")
    gradient.axvline(1, color="0.6", linewidth=0.8, linestyle="--")
    gradient.set_xlim(left=min(0.0, gradient.get_xlim()[0]))
    spread.set_yticks(list(places), [f"{row.name}\n{row.notes}".strip() for row in rows], fontsize=8)
    for words, row in zip(spread.get_yticklabels(), rows, strict=True):
        words.set_color(RED if any(row.ill) or row.points_away else "black")
    spread.set_ylim(0.4, len(rows) + 0.6)
    if path is not None:
        figure.savefig(path, dpi=150)
    return figure


def at_least(values: list[float]) -> list[float]:
    """What a logarithmic axis can show."""
    return [max(value, SMALLEST) for value in values]


def ticks(axes: "Axes", values: list[float], place: float, colour: str, label: str) -> None:
    """Every channel as a faint tick, so that many make a dark band and one alone is still seen; the median as a dot."""
    if values:
        values = sorted(at_least(values))
        style: dict[str, Any] = {"color": colour, "linestyle": "none"}
        axes.plot(values, [place] * len(values), marker="|", markersize=9, alpha=0.45, **style)
        axes.plot(values[len(values) // 2], place, marker="o", markersize=4.5, label=label, **style)


def frame(axes: "Axes", title: str, scale: Any) -> None:
    axes.set_title(title, fontsize=9.5)
    axes.set_xscale(scale)
    axes.grid(axis="x", color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(labelsize=8, left=False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, 0), borderaxespad=2.6, ncols=2, frameon=False)
