"""What a figure's runs have given: one small file per figure and scale, and the numbers that plots and claims read."""

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from .errors import LabError
from .figures import FIGURES, Figure
from .runs import DEFAULT_DEVICE, file_name
from .shapes import fit_figure, fit_run
from .store import read_json, refused, write_json
from .variations import Variation, file_words, read_variation

Result = dict[str, Any]  # of one run, as `train` writes it
Points = list[tuple[float, float]]  # epochs and values
RESULT = "result.json"  # in the folder of a run
PER_CENT = 100.0  # errors are kept as shares
LAST = 0.1  # share of the training that its final loss is a mean over


@dataclass(frozen=True)
class FigureResults:
    """All seeds of all curves of a figure at one scale."""

    figure: Figure
    scale: str
    data: list[str]  # the names of the data
    note: str  # about the data
    command: str  # that trained this
    curves: dict[str, list[Result]]  # by label, one result per seed, in order of the seeds
    variation: Variation = field(default_factory=dict)  # what was changed in all curves

    @property
    def seeds(self) -> list[int]:
        """Those that every curve has."""
        each = [{result["settings"]["seed"] for result in results} for results in self.curves.values()]
        return sorted(set.intersection(*each)) if each else []

    @property
    def runs(self) -> list[Result]:
        """Of all curves."""
        return [result for results in self.curves.values() for result in results]

    def of(self, label: str, seed: int) -> Result:
        return next(result for result in self.curves[label] if result["settings"]["seed"] == seed)

    @property
    def late(self) -> bool:
        """Whether it was tested after the updates of windows, as all was at first, and not as in the paper."""
        return any(not run["settings"].get("test_first", False) for run in self.runs)

    @property
    def file_name(self) -> str:
        """Figure, scale, the data where it is not the figure's own, what was varied, and where it was trained."""
        own = {curve.run.data for curve in self.figure.curves}
        other = [Path(name).stem for name in self.data if name not in own]
        device = next((run["settings"]["device"] for run in self.runs if "device" in run["settings"]), DEFAULT_DEVICE)
        return file_name(self.figure.name, self.scale, data=[*other, *file_words(self.variation)], device=device)

    def write(self, folder: Path) -> Path:
        path = folder / f"{self.file_name}.json"
        fields = {name: getattr(self, name) for name in ("scale", "data", "note", "command", "curves")}
        told = {"variation": self.variation} if self.variation else {}
        write_json(path, {"figure": self.figure.name} | told | fields)
        return path


def read_results(path: Path) -> FigureResults:
    content = read_json(path)
    try:
        fit_figure(content)
        for name, value in content.get("variation", {}).items():
            read_variation(f"{name}={value}")
        return FigureResults(FIGURES[content.pop("figure")], **content)
    except (ValueError, KeyError, TypeError, LabError) as error:
        raise refused(path, "is no result of streamnorm", error, "move it out of the folder") from error


def read_run(folder: Path) -> Result | None:
    """The result of the run that lives in `folder`; None while there is none."""
    path = folder / RESULT
    if not path.exists():
        return None
    content = read_json(path)
    try:
        fit_run(content)
        if content["id"] != folder.name:
            raise ValueError(f"it is of run {content['id']}")
    except ValueError as error:
        raise refused(path, "is no result of this run", error, "remove it and run again") from error
    return dict(content)


def read_folder(folder: Path) -> list[FigureResults]:
    """All results in `folder`, in the order of the figures."""
    paths = sorted(path for path in folder.glob("*.json") if not is_other(path))
    found = [read_results(path) for path in paths]
    order = list(FIGURES)
    return sorted(found, key=lambda each: order.index(each.figure.name))


def is_other(path: Path) -> bool:
    """Whether this is what `bench-online` or `compare` has written: no figure, but it may lie in the same folder."""
    content = read_json(path)
    return isinstance(content, dict) and ("online" in content or "compare" in content)


def points(result: Result, name: str) -> Points:
    """A curve: epochs and values, without the rows that have none."""
    curves = result["curves"]
    rows = zip(curves["epoch"], curves[name], strict=True) if name in curves else ()
    return [(epoch, value) for epoch, value in rows if value is not None]


def value_at(rows: Points, epoch: float) -> float | None:
    """Linear between the rows, None outside of them."""
    i = bisect_left(rows, epoch, key=lambda row: row[0])
    if i == len(rows) or (i == 0 and rows[0][0] > epoch):
        return None
    right, above = rows[i]
    if right == epoch:
        return above
    left, below = rows[i - 1]
    return below + (above - below) * (epoch - left) / (right - left)


def final(result: Result, name: str) -> float:
    """The end of a curve; what guessing gives where the run could not run or did not end.

    A training value is a mean since the row before, and rows of other batch sizes lie elsewhere: its end is the mean
    over the last tenth of the training, the same span in every curve.
    """
    rows = points(result, name)
    if result["outcome"] != "finished" or not rows:
        return float(result["chance"][name.split("_")[1]])
    return _mean_over(rows, (1 - LAST) * rows[-1][0]) if name.startswith("train_") else rows[-1][1]


def _mean_over(rows: Points, start: float) -> float:
    """The mean from epoch `start` to the end of values that each hold since the row before."""
    total, before = 0.0, 0.0
    for epoch, value in rows:
        total += value * max(epoch - max(before, start), 0.0)
        before = epoch
    return total / (before - start)


def shown(result: Result, name: str) -> float:
    """The end of a curve in the unit that people read: nats of loss, or points (per cent) of error."""
    return final(result, name) * (PER_CENT if name.endswith("error") else 1.0)


def finished(results: Iterable[Result]) -> list[Result]:
    return [result for result in results if result["outcome"] == "finished"]


def ends(results: Sequence[Result], name: str) -> list[float]:
    """The ends of a curve in its finished runs, in nats or per cent; none where they do not have this measure."""
    kind = name.split("_")[1]
    return [shown(result, name) for result in finished(results) if kind in result["chance"]]


def mean_and_error(values: Iterable[float]) -> tuple[float, float]:
    """The mean, and its standard error; nan with less than two values."""
    values = list(values)
    error = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return fmean(values) if values else math.nan, error
