"""What a figure's runs have given: one small file per figure and scale, and the numbers that plots and claims read."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from .errors import StoreError
from .figures import FIGURES, Figure
from .store import read_json, write_json

Result = dict[str, Any]  # of one run, as `train` writes it


@dataclass(frozen=True)
class FigureResults:
    """All seeds of all curves of a figure at one scale."""

    figure: Figure
    scale: str
    data: list[str]  # the names of the data
    note: str  # about the data
    command: str  # that trained this
    curves: dict[str, list[Result]]  # by label, one result per seed, in order of the seeds

    @property
    def seeds(self) -> list[int]:
        """Those that every curve has."""
        each = [{result["settings"]["seed"] for result in results} for results in self.curves.values()]
        return sorted(set.intersection(*each)) if each else []

    def of(self, label: str, seed: int) -> Result:
        return next(result for result in self.curves[label] if result["settings"]["seed"] == seed)

    @property
    def file_name(self) -> str:
        """Figure, scale, and the data where it is not the figure's own."""
        own = {curve.run.data for curve in self.figure.curves}
        other = [Path(name).stem for name in self.data if name not in own]
        return "-".join([self.figure.name, self.scale, *other])

    def write(self, folder: Path) -> Path:
        path = folder / f"{self.file_name}.json"
        fields = {name: getattr(self, name) for name in ("scale", "data", "note", "command", "curves")}
        write_json(path, {"figure": self.figure.name} | fields)
        return path


def read_results(path: Path) -> FigureResults:
    content = read_json(path)
    try:
        figure = FIGURES[content.pop("figure")]
        return FigureResults(figure, **content)
    except (KeyError, TypeError, AttributeError) as error:
        raise StoreError(f"{path} is no result of streamnorm ({error}): move it out of the folder") from error


def read_folder(folder: Path) -> list[FigureResults]:
    """All results in `folder`, in the order of the figures."""
    found = [read_results(path) for path in sorted(folder.glob("*.json"))]
    order = list(FIGURES)
    return sorted(found, key=lambda each: order.index(each.figure.name))


def points(result: Result, name: str) -> list[tuple[float, float | None]]:
    """A curve: epochs and values.

    A training value is the mean since the row before. The last row may cover only a few updates and be mostly chance:
    it is joined to the one before.
    """
    curves = result["curves"]
    if name not in curves:
        return []
    rows = list(zip(curves["update"], curves["epoch"], curves[name], strict=True))
    if name.startswith("train_") and len(rows) > 2:
        (start, *_), (middle, _, one), (end, epoch, two) = rows[-3:]
        before, last = middle - start, end - middle
        if last < before and one is not None and two is not None:
            rows[-2:] = [(end, epoch, (one * before + two * last) / (before + last))]
    return [(epoch, value) for _, epoch, value in rows]


def final(result: Result, name: str) -> float:
    """The end of a curve; what guessing gives where the run could not run or did not end."""
    rows = points(result, name)
    value = rows[-1][1] if rows and result["outcome"] == "finished" else None
    return float(result["chance"][name.split("_")[1]] if value is None else value)


def mean_and_error(values: Iterable[float]) -> tuple[float, float]:
    """The mean, and its standard error; nan with less than two values."""
    values = list(values)
    error = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return fmean(values) if values else math.nan, error
