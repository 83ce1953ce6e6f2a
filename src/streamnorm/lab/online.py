"""What the runs of a grid have given: one small file per network, and the numbers that tables and goals read.

The best learning rate is chosen by images that are held out; in older files, which have none, by the test images.
One rule for all norms: a run has diverged if a loss is not finite or the test loss is ten times that of guessing, and
then counts as guessing. Only cells with all their runs have numbers.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, astuple, dataclass, fields, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from .grid import NETS, NORMS, Grid, can_run
from .results import PER_CENT, Result, mean_and_error
from .runs import located
from .shapes import ONLINE, OUTCOMES, fit, fit_device
from .store import read_json, refused, write_rows

DIVERGED = 10.0  # times the loss of guessing
ROW = {
    "norms": [int],
    "samples": int,
    "batches": int,
    "rate": float,
    "seed": int,
    "outcome": str,
    "test_error": (float, None),
    "test_loss": (float, None),
    "train_loss": (float, None),
    "seconds": float,
    "id": str,
    "valid_error": (float, None),
}
ABOUT = ("note", "fingerprint", "versions", "chance")  # a grid: what a file says of it in one field each


@dataclass(frozen=True)
class Trained:
    """One run. Its numbers are None where they are not finite."""

    norms: tuple[str, ...]  # the rows of the table that share it
    samples: int
    batches: int
    rate: float  # for one sample per update
    seed: int
    outcome: str
    test_error: float | None
    test_loss: float | None
    train_loss: float | None
    seconds: float
    id: str
    valid_error: float | None = None

    @classmethod
    def of(cls, norms: Iterable[str], rate: float, result: Result) -> "Trained":
        ends = ("test_error", "test_loss", "train_loss", "valid_error")
        return cls(norms=tuple(norms), rate=rate, **row_of(result, ends))


def row_of(result: Result, ends: Iterable[str]) -> dict[str, Any]:
    """What a row says of a run: its size and seed, how it ended, and where the curves in `ends` do."""
    same = {name: result["settings"][name] for name in ("samples", "batches", "seed")}
    same |= {name: result[name] for name in ("outcome", "seconds", "id")}
    return same | {name: (result["curves"].get(name) or [None])[-1] for name in ends}


def diverged(outcome: str, test_loss: float | None, chance: dict[str, float]) -> bool:
    return outcome != "finished" or test_loss is None or test_loss > DIVERGED * chance["loss"]


@dataclass(frozen=True)
class Cell:
    """A norm at one number of samples per batch and of batches per update, over all rates and seeds."""

    diverged: dict[float, int]  # runs, by rate
    means: dict[float, tuple[float, float]]  # accuracy in per cent and its standard error over the seeds, by rate
    chosen_by: dict[float, float]  # accuracy that chooses the rate

    @property
    def rate(self) -> float:
        """The best one."""
        return max(self.chosen_by, key=lambda rate: self.chosen_by[rate])

    @property
    def best(self) -> tuple[float, float]:
        return self.means[self.rate]

    @property
    def median(self) -> float:
        return median(mean for mean, _ in self.means.values())


@dataclass(frozen=True)
class Online:
    """All that is known of a grid."""

    grid: Grid
    note: str  # about the data
    fingerprint: str  # of the data
    versions: list[dict[str, str]]  # that trained it
    chance: dict[str, float]  # what guessing gives
    runs: list[Trained]

    @property
    def planned(self) -> int:
        return len(self.grid.runs())

    def has_diverged(self, run: Trained) -> bool:
        return diverged(run.outcome, run.test_loss, self.chance)

    def accuracy(self, run: Trained) -> float:
        """On the test images in per cent; that of guessing where the run has diverged."""
        return self._accuracy(run, run.test_error)

    def choosing(self, run: Trained) -> float:
        """The same on the images that choose the rate."""
        return self._accuracy(run, run.valid_error if self.grid.held_out else run.test_error)

    def _accuracy(self, run: Trained, error: float | None) -> float:
        return PER_CENT * (1 - (self.chance["error"] if error is None or self.has_diverged(run) else error))

    def of(self, norm: str, samples: int, batches: int) -> list[Trained]:
        place = (samples, batches)
        return [run for run in self.runs if norm in run.norms and (run.samples, run.batches) == place]

    def cell(self, norm: str, samples: int, batches: int) -> Cell | None:
        """None where a run is missing."""
        by_rate: dict[float, list[Trained]] = {rate: [] for rate in self.grid.rates}
        for run in self.of(norm, samples, batches):
            by_rate[run.rate].append(run)
        if any(len(runs) < self.grid.seeds for runs in by_rate.values()):
            return None
        return Cell(
            {rate: sum(map(self.has_diverged, runs)) for rate, runs in by_rate.items()},
            {rate: mean_and_error(map(self.accuracy, runs)) for rate, runs in by_rate.items()},
            {rate: fmean(map(self.choosing, runs)) for rate, runs in by_rate.items()},
        )

    def state(self, norm: str, samples: int, batches: int) -> str:
        """In words, of a cell that has no numbers."""
        if not can_run(self.grid.net, norm, samples):
            return "cannot run"
        done = len(self.of(norm, samples, batches))
        return f"{done} of {len(self.grid.rates) * self.grid.seeds} runs"

    @property
    def seconds(self) -> float:
        return fmean(run.seconds for run in self.runs) if self.runs else math.nan

    def write(self, folder: Path) -> Path:
        path = folder / f"{self.grid.file_name}.json"
        head = {"online": self.grid.net, "command": self.grid.command, "grid": located(asdict(self.grid))}
        head |= {"settings": settings(self.grid)} | {name: getattr(self, name) for name in ABOUT}
        head |= {"norms": list(NORMS), "columns": [field.name for field in fields(Trained)]}
        write_rows(path, head, map(_row, self.runs))
        return path


def settings(grid: Grid) -> dict[str, Any]:
    """Of all runs: those that they share, and their norms."""
    (run, _), *_ = grid.runs()
    shared = run.settings()
    for name in ("norm", "samples", "batches", "rates", "seed"):
        del shared[name]
    used = dict.fromkeys(place.norm for places in grid.runs().values() for place in places)
    return shared | {"norms": {norm: json.loads(json.dumps(asdict(NORMS[norm]))) for norm in used}}


def _row(run: Trained) -> tuple[Any, ...]:
    """Names are long, and said thousands of times: their places in the list of norms instead."""
    order = list(NORMS)
    return ([order.index(norm) for norm in run.norms], *astuple(run)[1:])


def read_online(path: Path) -> Online:
    content = read_json(path)
    try:
        fit(content, ONLINE)
        fit_device(content["grid"], "grid")
        fit({"held_out": 0} | content["grid"], {"held_out": int}, "grid")
        tuples = {name: tuple(content["grid"][name]) for name in ("samples", "batches", "rates")}
        grid = Grid(**content["grid"] | tuples)
        NETS[grid.net]
        names, columns = content["norms"], content["columns"]
        runs = [Trained(**dict(zip(columns, row, strict=True))) for row in content["runs"]]
        for i, run in enumerate(runs):
            fit(asdict(run) | {"norms": list(run.norms)}, ROW, f"runs[{i}]")
            if run.outcome not in OUTCOMES or not all(0 <= int(place) < len(names) for place in run.norms):
                raise ValueError(f"runs[{i}] has an outcome or a norm that there is not")
        runs = [replace(run, norms=tuple(names[int(i)] for i in run.norms)) for run in runs]
        return Online(grid=grid, runs=runs, **{name: content[name] for name in ABOUT})
    except (KeyError, TypeError, ValueError) as error:
        raise refused(path, "is no result of bench-online", error, "move it out of the folder") from error
