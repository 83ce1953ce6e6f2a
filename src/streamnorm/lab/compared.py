"""What the runs of a comparison have given: one small file per net, the numbers of a cell, and who is ahead.

The learning rate is chosen by the validation images: the first seed walks to the best ones, all seeds decide between
those that are close. What is reported is the accuracy on the test images. A run has diverged by the same rule as in
`online`, and then counts as guessing.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, astuple, dataclass, fields, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from .compare import (
    NETS,
    NORMS,
    RIVALS,
    RUNGS,
    Entry,
    Plan,
    Size,
    best_rung,
    can_run,
    close_rungs,
    next_rungs,
    rate_of,
    size_name,
)
from .online import ABOUT, diverged, row_of
from .results import PER_CENT, Result, final, mean_and_error
from .runs import located
from .shapes import COMPARED, OUTCOMES, fit, fit_device
from .store import read_json, refused, write_rows

TEST, TRAINING = "test", "training"  # what norms are judged by
ROW = {
    "norm": str,
    "samples": int,
    "batches": int,
    "rate": float,
    "seed": int,
    "outcome": str,
    "valid_error": (float, None),
    "test_error": (float, None),
    "test_loss": (float, None),
    "train_loss": (float, None),
    "seconds": float,
    "id": str,
}


@dataclass(frozen=True)
class Scored:
    """One run. Its numbers are None where they are not finite."""

    norm: str
    samples: int
    batches: int
    rate: float
    seed: int
    outcome: str
    valid_error: float | None
    test_error: float | None
    test_loss: float | None
    train_loss: float | None  # of the last tenth of the training
    seconds: float
    id: str

    @classmethod
    def of(cls, norm: str, rate: float, result: Result) -> "Scored":
        loss = final(result, "train_loss") if result["outcome"] == "finished" else None
        ends = row_of(result, ("valid_error", "test_error", "test_loss"))
        return cls(norm=norm, rate=rate, train_loss=loss, **ends)


@dataclass(frozen=True)
class Cell:
    """An entry at its rate: accuracy on the test images in per cent, training loss; mean and standard error each."""

    rate: float
    accuracy: tuple[float, float]
    loss: tuple[float, float]
    held_out: float  # accuracy on the validation images

    def score(self, part: str) -> tuple[float, float]:
        """What norms are judged by, more is better: the accuracy, or the training loss with its sign changed."""
        return self.accuracy if part == TEST else (-self.loss[0], self.loss[1])


@dataclass(frozen=True)
class Verdict:
    """How one of ours does at a size: against the best of its rivals."""

    size: Size
    ours: str
    rival: str
    difference: float  # positive where ours is better: in per cent of the test images, or in nats of the training loss
    error: float  # of the difference, over the seeds
    held_out: float | None  # the same difference on the validation images; None for the training loss

    @property
    def outcome(self) -> str:
        if abs(self.difference) <= self.error:
            return "tie"
        return "won" if self.difference > 0 else "lost"


@dataclass(frozen=True)
class Compared:
    plan: Plan
    note: str  # about the data
    fingerprint: str  # of the data
    versions: list[dict[str, str]]  # that trained it
    chance: dict[str, float]  # what guessing gives
    runs: list[Scored]

    def has_diverged(self, run: Scored) -> bool:
        return diverged(run.outcome, run.test_loss, self.chance)

    def accuracy(self, run: Scored, part: str) -> float:
        """In per cent, on the "valid" or the "test" images; that of guessing where the run has diverged."""
        error = run.valid_error if part == "valid" else run.test_error
        return PER_CENT * (1 - (self.chance["error"] if error is None or self.has_diverged(run) else error))

    def of(self, entry: Entry) -> list[Scored]:
        at = entry.trained
        place = (at.norm, at.samples, at.batches)
        return [run for run in self.runs if (run.norm, run.samples, run.batches) == place]

    def walked(self, entry: Entry) -> dict[int, float]:
        """Accuracy on the validation images by rung, with the first seed."""
        return {RUNGS[run.rate]: self.accuracy(run, "valid") for run in self.of(entry) if run.seed == 0}

    def seeds_at(self, entry: Entry, rung: int) -> dict[int, Scored]:
        """The runs at a rung, by seed."""
        return {run.seed: run for run in self.of(entry) if RUNGS[run.rate] == rung and run.seed < self.plan.seeds}

    def rate(self, entry: Entry) -> float | None:
        """The best of those that are close, by the mean of all seeds; None while any run is missing."""
        if self.missing(entry, self.plan.seeds):
            return None
        means = {rung: self.held_out(entry, rung) for rung in close_rungs(self.walked(entry))}
        return rate_of(best_rung(means, entry.start))

    def held_out(self, entry: Entry, rung: int) -> float:
        """Accuracy on the validation images at a rung, the mean of the seeds."""
        return fmean(self.accuracy(run, "valid") for run in self.seeds_at(entry, rung).values())

    def missing(self, entry: Entry, seeds: int) -> list[tuple[int, int]]:
        """Rungs and seeds that are to be trained next."""
        walked = self.walked(entry)
        if rungs := next_rungs(walked, entry.start):
            return [(rung, 0) for rung in rungs]
        there = {rung: self.seeds_at(entry, rung) for rung in close_rungs(walked)}
        return [(rung, seed) for rung, runs in there.items() for seed in range(seeds) if seed not in runs]

    def cell(self, entry: Entry) -> Cell | None:
        """None where a run is missing."""
        rate = self.rate(entry)
        if rate is None:
            return None
        runs = self.seeds_at(entry, RUNGS[rate]).values()
        losses = [self.chance["loss"] if run.train_loss is None else run.train_loss for run in runs]
        tested = mean_and_error(self.accuracy(run, "test") for run in runs)
        return Cell(rate, tested, mean_and_error(losses), self.held_out(entry, RUNGS[rate]))

    def state(self, entry: Entry) -> str:
        """In words, of a cell that has no numbers."""
        if not can_run(entry.net, entry.norm, entry.samples):
            return "cannot run"
        runs = self.of(entry)
        return f"{len(runs)} run{'s' * (len(runs) != 1)}, no rate yet"

    def verdicts(self, part: str = TEST) -> list[Verdict]:
        """Of all sizes where ours and all its rivals have their runs; those that are lost first.

        `part`: by the accuracy on the test images, or by the training loss.
        """
        found = []
        for size in self.plan.sizes:
            for ours, rivals in RIVALS.items():
                present = [norm for norm in self.plan.rows if norm in rivals and can_run(self.plan.net, norm, size[0])]
                cells = {norm: self.cell(Entry(self.plan.net, norm, *size)) for norm in present}
                mine = self.cell(Entry(self.plan.net, ours, *size)) if ours in self.plan.rows else None
                theirs = {norm: cell for norm, cell in cells.items() if cell is not None}
                if mine is None or not present or len(theirs) < len(present) or self.plan.seeds < 2:
                    continue
                rival = max(theirs, key=lambda norm: theirs[norm].score(part)[0])
                (a, a_error), (b, b_error) = mine.score(part), theirs[rival].score(part)
                held_out = mine.held_out - theirs[rival].held_out if part == TEST else None
                found.append(Verdict(size, ours, rival, a - b, math.hypot(a_error, b_error), held_out))
        return sorted(found, key=lambda verdict: ("lost", "tie", "won").index(verdict.outcome))

    def with_runs(self, results: Iterable[tuple[Entry, int, Result]]) -> "Compared":
        """And these, by entry and rung."""
        new = [(Scored.of(entry.norm, rate_of(rung), result), result["versions"]) for entry, rung, result in results]
        there = {run.id for run in self.runs}
        versions = {json.dumps(each): each for each in [*self.versions, *(version for _, version in new)]}
        runs = [*self.runs, *(run for run, _ in new if run.id not in there)]
        return replace(self, runs=runs, versions=list(versions.values()))

    def write(self, folder: Path) -> Path:
        path = folder / f"{self.plan.file_name}.json"
        plan = located(asdict(self.plan)) | {"sizes": [list(size) for size in self.plan.sizes], "norms": self.plan.rows}
        head = {"compare": self.plan.net, "command": self.plan.command, "plan": plan, "settings": settings(self.plan)}
        head |= {name: getattr(self, name) for name in ABOUT} | {"columns": [field.name for field in fields(Scored)]}
        write_rows(path, head, map(astuple, self.order()))
        return path

    def order(self) -> list[Scored]:
        """The runs of the plan, whatever the order in which they ended."""
        norms = list(NORMS)
        return sorted(self.runs, key=lambda r: (norms.index(r.norm), r.batches, r.samples, r.rate, r.seed))


def settings(plan: Plan) -> dict[str, Any]:
    """What all runs of a plan share."""
    run = plan.run(Entry(plan.net, plan.rows[0], *plan.sizes[0]), 0, 0)
    own = ("norm", "samples", "batches", "rates", "seed", "train_size", "evaluate", "standardized", "kept_scale")
    return {name: value for name, value in run.settings().items() if name not in own}


def read_compared(path: Path) -> Compared:
    content = read_json(path)
    try:
        fit(content, COMPARED)
        fit_device(content["plan"], "plan")
        told = content["plan"]
        plan = Plan(**told | {"sizes": tuple(map(tuple, told["sizes"])), "norms": tuple(told["norms"])})
        NETS[plan.net]
        runs = [Scored(**dict(zip(content["columns"], row, strict=True))) for row in content["runs"]]
        for i, run in enumerate(runs):
            fit(asdict(run), ROW, f"runs[{i}]")
            if run.outcome not in OUTCOMES or run.norm not in NORMS or run.rate not in RUNGS:
                raise ValueError(f"runs[{i}] has an outcome, a norm or a rate that there is not")
        return Compared(plan=plan, runs=runs, **{name: content[name] for name in ABOUT})
    except (KeyError, TypeError, ValueError) as error:
        raise refused(path, "is no result of compare", error, "move it out of the folder") from error


def named(entry: Entry) -> str:
    return f"{entry.net}, {entry.norm}, {size_name((entry.samples, entry.batches))}"
