"""What is drawn of a curve: the mean over its seeds, how far they lie apart, and in words how its runs ended."""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from ..results import FigureResults, Result, points

Points = list[tuple[float, float]]  # epochs, value
STEEP = 0.03  # share of the training, at its start, whose values may lie above the panel
NEIGHBOURS = 50  # in the moving average of a text's training loss, as in the paper
WORDS = {"refused": "cannot run"}  # other outcomes are their own word


@dataclass(frozen=True)
class Measure:
    """What the curves of a figure show. `name` is that of a column of a run: `train_<name>`, `test_<name>`."""

    name: str
    factor: float  # from the column to the unit
    unit: str
    parts: tuple[tuple[str, str], ...]  # column, what it is called


ERROR = Measure("error", 100.0, "%", (("train_error", "Training"), ("test_error", "Test")))
LOSS = Measure("loss", 1.0, "nats", (("train_loss", "Training"), ("test_loss", "Validation")))


@dataclass(frozen=True)
class Line:
    """The mean, least and greatest value over the seeds, at each of `x` (epochs)."""

    label: str
    ending: str  # how the runs ended, "" where all of them finished
    finished: bool  # whether any did: its last value then is a result
    x: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]

    @property
    def text(self) -> str:
        return f"{self.label}: {self.ending}" if self.ending else self.label


def measure_of(results: FigureResults) -> Measure:
    chances = [result["chance"] for each in results.curves.values() for result in each]
    if not chances:
        return LOSS if results.figure.curves[0].run.is_text else ERROR
    return ERROR if any("error" in chance for chance in chances) else LOSS


def origin(results: FigureResults) -> str:
    """At which scale and on which data, in a few words: of files the name alone."""
    return f"{results.scale} scale, {', '.join(Path(name).name for name in results.data)}"


def lines_of(results: FigureResults, column: str) -> list[Line]:
    measure = measure_of(results)
    smooth = measure is LOSS and column.startswith("train")
    return [line_of(label, each, column, measure.factor, smooth) for label, each in results.curves.items()]


def line_of(label: str, results: list[Result], column: str, factor: float, smooth: bool) -> Line:
    """Where some runs finished, the line is theirs; where none did, it goes as far as they came."""
    done = finished(results)
    runs = [rows for result in done or results if (rows := points_of(result, column, factor))]
    if smooth:
        runs = [smoothed(points) for points in runs]
    x = [epoch for epoch, _ in max(runs, key=len, default=[])]
    values = [[v for points in runs if (v := value_at(points, epoch)) is not None] for epoch in x]
    parts = ([f(each) for each in values] for f in (fmean, min, max))
    return Line(label, ending(results), bool(done), x, *parts)


def finished(results: list[Result]) -> list[Result]:
    return [result for result in results if result["outcome"] == "finished"]


def ending(results: list[Result]) -> str:
    """How the runs of a curve ended, in words; nothing if all of them finished."""
    if not results:
        return "no results"
    counts = Counter(result["outcome"] for result in results if result["outcome"] != "finished")
    words = {WORDS.get(outcome, outcome): count for outcome, count in counts.items()}
    return ", ".join(w if count == len(results) else f"{count} of {len(results)} {w}" for w, count in words.items())


def points_of(result: Result, column: str, factor: float) -> Points:
    """Rows without a finite value are left out."""
    return [(epoch, value * factor) for epoch, value in points(result, column) if value is not None]


def smoothed(points: Points) -> Points:
    """Moving average over the neighbours; at the ends over as many as there are on both sides, as Matlab's smooth."""
    values, half = [value for _, value in points], neighbours(len(points)) // 2
    sides = [min(half, i, len(points) - 1 - i) for i in range(len(points))]
    return [
        (x, fmean(values[i - side : i + side + 1])) for i, ((x, _), side) in enumerate(zip(points, sides, strict=True))
    ]


def neighbours(rows: int) -> int:
    """50 as in the paper, or a tenth of the rows if that is less."""
    return min(NEIGHBOURS, rows // 10)


def value_at(points: Points, epoch: float) -> float | None:
    """Linear between the rows, None outside of them."""
    i = bisect_left(points, epoch, key=lambda point: point[0])
    if i == len(points) or (i == 0 and points[0][0] > epoch):
        return None
    right, above = points[i]
    if right == epoch:
        return above
    left, below = points[i - 1]
    return below + (above - below) * (epoch - left) / (right - left)


def chance_of(results: FigureResults) -> float | None:
    """What guessing gives, in the unit of the figure."""
    measure = measure_of(results)
    chances = [result["chance"].get(measure.name) for each in results.curves.values() for result in each]
    return max((chance * measure.factor for chance in chances if chance is not None), default=None)


def limits(lines: Sequence[Line], chance: float | None) -> tuple[float, float] | None:
    """Of the values to show: without the steep fall at the very start, and a little beyond chance at most, however far
    a diverging curve goes."""
    values = [value for line in lines for value in line.low]
    if not values:
        return None
    start = STEEP * max(x for line in lines for x in line.x)
    later = [value for line in lines for x, value in zip(line.x, line.high, strict=True) if x >= start]
    low, high = min(values), max(later)
    if chance is not None and low < chance:
        high = min(high, 1.08 * chance)
    margin = 0.04 * (high - low) or 0.5
    return max(low - margin, 0.0), high + margin


def best_region(lines: Sequence[Line]) -> tuple[float, float, float, float] | None:
    """x from, x to, y from, y to: the second half of the training, as high as the better half of the lines."""
    ended = sorted((line for line in lines if line.finished and line.x), key=lambda line: line.mean[-1])
    best = ended[: max(2, math.ceil(len(ended) / 2))]
    if not best:
        return None
    stop = max(line.x[-1] for line in best)
    start = stop / 2
    late = [v for line in best for x, v in zip(line.x, line.mean, strict=True) if x >= start]
    margin = 0.1 * (max(late) - min(late)) or 0.05 * max(late) or 0.5
    return start, stop, max(min(late) - margin, 0.0), max(late) + margin
