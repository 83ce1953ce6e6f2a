"""What a claim is measured by: a number for each seed that is positive where the claim holds."""

from collections.abc import Callable, Sequence
from statistics import fmean

from .results import FigureResults, final

Measure = Callable[[FigureResults, int], float]  # results, seed -> positive where the claim holds


def end(results: FigureResults, label: str, seed: int, name: str) -> float:
    """Where a curve ends: nats of loss, or points (per cent) of error."""
    return final(results.of(label, seed), name) * (100 if name.endswith("error") else 1)


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
    """The curve ends no more than `margin` above the best of the others."""

    def measure(results: FigureResults, seed: int) -> float:
        best = min(end(results, other, seed, name) for other in others)
        return margin - (end(results, label, seed, name) - best)

    return measure


def negated(measure: Measure) -> Measure:
    return lambda results, seed: -measure(results, seed)


def course_lower(name: str, ours: str, theirs: str) -> Measure:
    """Over the first half of the training, the curve `ours` is lower on average."""

    def course(results: FigureResults, label: str, seed: int) -> float:
        result = results.of(label, seed)
        if result["outcome"] != "finished":
            return final(result, name)
        half = sum(length for _, length in result["settings"]["rates"]) / 2
        curves = result["curves"]
        early = [value for epoch, value in zip(curves["epoch"], curves[name], strict=True) if epoch <= half]
        return fmean(early or curves[name])

    return lambda results, seed: course(results, theirs, seed) - course(results, ours, seed)


def reached_within(share: float, name: str, ours: str, theirs: str) -> Measure:
    """The curve `ours` reaches the end of `theirs` in less than `share` of the updates."""

    def measure(results: FigureResults, seed: int) -> float:
        goal, curves = final(results.of(theirs, seed), name), results.of(ours, seed)["curves"]
        updates = curves.get("update") or [1]
        reached = [
            u for u, value in zip(updates, curves.get(name, []), strict=False) if value is not None and value <= goal
        ]
        return share - (reached[0] / updates[-1] if reached else 1.0)

    return measure
