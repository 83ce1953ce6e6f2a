"""What a claim is measured by: a number for each seed that is positive where the claim holds."""

from collections.abc import Callable, Sequence
from statistics import fmean

from .results import FigureResults, final, finished, points, shown, value_at

Measure = Callable[[FigureResults, int], float]  # results, seed -> positive where the claim holds


def end(results: FigureResults, label: str, seed: int, name: str) -> float:
    return shown(results.of(label, seed), name)


def lower(name: str, ours: Sequence[str], theirs: Sequence[str]) -> Measure:
    """The mean of the curves `ours` ends below the mean of `theirs`."""

    def measure(results: FigureResults, seed: int) -> float:
        ends = [fmean(end(results, label, seed, name) for label in labels) for labels in (theirs, ours)]
        return ends[0] - ends[1]

    return measure


def best_lower(name: str, ours: Sequence[str], theirs: Sequence[str]) -> Measure:
    """The best of the curves `ours` ends below the best of `theirs`."""

    def measure(results: FigureResults, seed: int) -> float:
        ends = [min(end(results, label, seed, name) for label in labels) for labels in (theirs, ours)]
        return ends[0] - ends[1]

    return measure


def alike(name: str, labels: Sequence[str], margin: float) -> Measure:
    """All of the curves end within `margin` of each other."""

    def measure(results: FigureResults, seed: int) -> float:
        ends = [end(results, label, seed, name) for label in labels]
        return margin - (max(ends) - min(ends))

    return measure


def near_best(name: str, label: str, others: Sequence[str], margin: float) -> Measure:
    """The curve ends no more than `margin` above the best of the others, by their means over the seeds."""

    def measure(results: FigureResults, seed: int) -> float:
        best = min(others, key=lambda other: fmean(end(results, other, each, name) for each in results.seeds))
        return margin - (end(results, label, seed, name) - end(results, best, seed, name))

    return measure


def negated(measure: Measure) -> Measure:
    return lambda results, seed: -measure(results, seed)


def course_lower(name: str, ours: str, theirs: str) -> Measure:
    """Over the first half of the training, the curve `ours` is lower on average: at the epochs of the coarser one."""

    def measure(results: FigureResults, seed: int) -> float:
        runs = [results.of(label, seed) for label in (theirs, ours)]
        if len(finished(runs)) < len(runs):
            return final(runs[0], name) - final(runs[1], name)
        one, two = (points(run, name) for run in runs)
        half = one[-1][0] / 2
        epochs = [epoch for epoch, _ in min(one, two, key=len) if epoch <= half]
        pairs = [(value_at(one, epoch), value_at(two, epoch)) for epoch in epochs]
        return fmean(a - b for a, b in pairs if a is not None and b is not None)

    return measure


def reached_within(share: float, name: str, ours: str, theirs: str) -> Measure:
    """The curve `ours` reaches the end of `theirs` in less than `share` of the training."""

    def measure(results: FigureResults, seed: int) -> float:
        goal, run = final(results.of(theirs, seed), name), results.of(ours, seed)
        rows = points(run, name) if run["outcome"] == "finished" else []
        reached = [epoch for epoch, value in rows if value <= goal]
        return share - (reached[0] / rows[-1][0] if reached else 1.0)

    return measure
