"""What streaming normalization should achieve in online learning, judged cell by cell against the usual norm."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product

from .grid import OURS, RIVALS, is_convolutional
from .online import Cell, Online

Judge = Callable[[Cell, Cell], str | None]  # ours, theirs -> why it is lost, None if it is reached
FEW = 2  # samples per batch, at most, where a convolutional net should gain


@dataclass
class Goal:
    """Cells by name, samples x batches."""

    text: str
    reached: list[str] = field(default_factory=list)
    lost: dict[str, str] = field(default_factory=dict)  # and why
    open: list[str] = field(default_factory=list)  # not all runs are there, or one seed only


def goals(results: Online) -> list[Goal]:
    """Every goal for a network, with the cells that reach it."""
    net, samples = results.grid.net, results.grid.samples
    rival = RIVALS[net]
    steady = f"diverges at no learning rate more often than {rival}"
    found = [_judge(results, Goal(steady), samples, _diverges_no_more)]
    if is_convolutional(net):
        few = tuple(each for each in samples if each <= FEW)
        better = f"is more than one standard error of the difference above {rival} at 1 and 2 samples per batch"
        found.append(_judge(results, Goal(better), few, _better))
    else:
        near = f"is at most one standard error of the difference below {rival}"
        found.append(_judge(results, Goal(near), samples, _not_below))
    return found


def tally(results: Online) -> dict[str, int]:
    """Cells where ours is ahead, level or behind: by more than two standard errors of the difference, or not."""
    found = {"ahead": 0, "level": 0, "behind": 0}
    for size, batches in product(results.grid.samples, results.grid.batches):
        ours, theirs = (results.cell(norm, size, batches) for norm in (OURS, RIVALS[results.grid.net]))
        if ours is not None and theirs is not None and results.grid.seeds > 1:
            above, error = ours.best[0] - theirs.best[0], _error(ours, theirs)
            found["level" if abs(above) <= 2 * error else "ahead" if above > 0 else "behind"] += 1
    return found


def at_an_end(results: Online) -> list[str]:
    """Cells of ours and of its rival whose best rate is the first or the last one tried."""
    rates = results.grid.rates
    found = []
    for norm, batches, size in product((OURS, RIVALS[results.grid.net]), results.grid.batches, results.grid.samples):
        cell = results.cell(norm, size, batches)
        if cell is not None and cell.rate in (min(rates), max(rates)):
            found.append(f"{norm} in {size} x {batches} ({cell.rate:g})")
    return found


def _judge(results: Online, goal: Goal, samples: tuple[int, ...], judge: Judge) -> Goal:
    for batches in results.grid.batches:
        for size in samples:
            name = f"{size} x {batches}"
            ours, theirs = (results.cell(norm, size, batches) for norm in (OURS, RIVALS[results.grid.net]))
            if ours is None or theirs is None or results.grid.seeds < 2:
                goal.open.append(name)
            elif (why := judge(ours, theirs)) is not None:
                goal.lost[name] = why
            else:
                goal.reached.append(name)
    return goal


def _diverges_no_more(ours: Cell, theirs: Cell) -> str | None:
    """Stricter than never where the other does not: not more often at any rate."""
    rates = [f"{rate:g}" for rate, count in ours.diverged.items() if count > theirs.diverged[rate]]
    return f"at {', '.join(rates)}" if rates else None


def _not_below(ours: Cell, theirs: Cell) -> str | None:
    """The best means differ by no more than the root of the sum of the squares of their standard errors."""
    below, error = theirs.best[0] - ours.best[0], _error(ours, theirs)
    return None if below <= error else f"{-below:+.1f} ± {error:.1f}"


def _better(ours: Cell, theirs: Cell) -> str | None:
    above, error = ours.best[0] - theirs.best[0], _error(ours, theirs)
    return None if above > error else f"{above:+.1f} ± {error:.1f}"


def _error(ours: Cell, theirs: Cell) -> float:
    """Of the difference."""
    return math.hypot(ours.best[1], theirs.best[1])
