"""What is drawn of a curve: the mean over its seeds, how far they lie apart, and in words how its runs ended."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from ..results import PER_CENT, FigureResults, Points, Result, finished, points, value_at
from ..variations import words

STEEP = 0.03  # share of the training, at its start, whose values may lie above the panel
NEIGHBOURS = 50  # mini-batches in the moving average of a text's training loss, as in the paper
WORDS = {"refused": "cannot run"}  # other outcomes are their own word


@dataclass(frozen=True)
class Measure:
    """What the curves of a figure show. `name` is that of a column of a run: `train_<name>`, `test_<name>`."""

    name: str
    factor: float  # from the column to the unit
    unit: str
    parts: tuple[tuple[str, str], ...]  # column, what it is called


ERROR = Measure("error", PER_CENT, "%", (("train_error", "Training"), ("test_error", "Test")))
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
    if not results.runs:
        return LOSS if results.figure.curves[0].run.is_text else ERROR
    return measure_in(results.runs)


def measure_in(runs: Sequence[Result]) -> Measure:
    """Error where there is any run that has one."""
    return ERROR if any(ERROR.name in run["chance"] for run in runs) else LOSS


def origin(results: FigureResults) -> str:
    """At which scale, on which data, and what was varied, in a few words: of files the name alone."""
    told = [f"{results.scale} scale", *(Path(name).name for name in results.data)]
    return ", ".join([*told, *([words(results.variation)] if results.variation else [])])


def lines_of(results: FigureResults, column: str) -> list[Line]:
    measure = measure_of(results)
    smooth = measure is LOSS and column.startswith("train")
    return [line_of(label, each, column, measure.factor, smooth) for label, each in results.curves.items()]


def line_of(label: str, results: list[Result], column: str, factor: float, smooth: bool) -> Line:
    """Where some runs finished, the line is theirs; where none did, it goes as far as they came."""
    done = finished(results)
    runs = [points(result, column) for result in done or results]
    if column.startswith("train"):
        runs = [without_stub(rows) for rows in runs]
    if smooth:
        runs = [smoothed(rows, window_of(result)) for rows, result in zip(runs, done or results, strict=True)]
    x = [epoch for epoch, _ in max(runs, key=len, default=[])]
    values = [[factor * v for rows in runs if (v := value_at(rows, epoch)) is not None] for epoch in x]
    parts = ([f(each) for each in values] for f in (fmean, min, max))
    return Line(label, ending(results), bool(done), x, *parts)


def ending(results: list[Result]) -> str:
    """How the runs of a curve ended, in words; nothing if all of them finished."""
    if not results:
        return "no results"
    counts = Counter(result["outcome"] for result in results if result["outcome"] != "finished")
    words = {WORDS.get(outcome, outcome): count for outcome, count in counts.items()}
    return ", ".join(w if count == len(results) else f"{count} of {len(results)} {w}" for w, count in words.items())


def without_stub(rows: Points) -> Points:
    """A training value is a mean since the row before; a last one over less than half of a row is mostly chance."""
    if len(rows) > 2 and rows[-1][0] - rows[-2][0] < (rows[-2][0] - rows[-3][0]) / 2:
        return rows[:-1]
    return rows


def smoothed(rows: Points, window: int) -> Points:
    """Moving average over `window` rows; at the ends over as many as there are on both sides, as Matlab's smooth."""
    values, half = [value for _, value in rows], window // 2
    sides = [min(half, i, len(rows) - 1 - i) for i in range(len(rows))]
    return [
        (x, fmean(values[i - side : i + side + 1])) for i, ((x, _), side) in enumerate(zip(rows, sides, strict=True))
    ]


def window_of(result: Result) -> int:
    """How many rows the paper's moving average covers: a row is the mean over the mini-batches since the last."""
    return round(NEIGHBOURS / int(result["settings"]["evaluate"]))


def chance_in(runs: Sequence[Result]) -> float | None:
    """What guessing gives, in the unit of the runs."""
    measure = measure_in(runs)
    chances = [run["chance"][measure.name] for run in runs if measure.name in run["chance"]]
    return measure.factor * max(chances) if chances else None


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
