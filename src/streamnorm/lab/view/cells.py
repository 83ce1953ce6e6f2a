"""A grid as tables: for a terminal, and in Markdown between the marks of a page."""

import math
import re
from pathlib import Path

from ..errors import LabError
from ..goals import Goal, at_an_end, goals, tally
from ..grid import RIVALS, norms_of
from ..online import Cell, Online
from ..store import write_text

MARKS = "<!-- {name} -->", "<!-- end of {name} -->"  # around the generated part of a page


def shown(results: Online) -> list[str]:
    """The norms that have a run; all while none has."""
    norms = norms_of(results.grid.net)
    begun = {norm for run in results.runs for norm in run.norms}
    return [norm for norm in norms if norm in begun] or norms


def heading(results: Online) -> str:
    grid, left_out = results.grid, [norm for norm in norms_of(results.grid.net) if norm not in shown(results)]
    return (
        f"{grid.net}: {grid.size:,} samples of {grid.data}, {_several(len(grid.rates), 'learning rate')}, "
        f"{_several(grid.seeds, 'seed')}; {len(results.runs):,} of {results.planned:,} runs; "
        f"the best rate by {f'{grid.held_out:,} held-out' if grid.held_out else 'the test'} images"
        + (f"; not measured: {' and '.join(left_out)}" if left_out else "")
    )


def _several(count: int, word: str) -> str:
    return f"{count} {word}{'s' * (count != 1)}"


# Terminal


def table(results: Online) -> str:
    """Accuracy at the best rate, at the median one, and how many runs diverged: a block per batches per update."""
    grid, norms = results.grid, shown(results)
    width = max(map(len, norms))
    lines = [heading(results), "accuracy in %: at the best rate (median of the rates) [runs that diverged]"]
    for batches in grid.batches:
        lines.append(
            f"{_window(batches):{width}}" + "".join(f"{_several(size, 'sample'):>18}" for size in grid.samples)
        )
        for norm in norms:
            texts = [_short(results, norm, size, batches) for size in grid.samples]
            lines.append(f"{norm:{width}}" + "".join(f"{text:>18}" for text in texts))
    return "\n".join(lines)


def verdicts(results: Online) -> str:
    return "\n".join(f"streaming {text}" for text in map(_verdict, goals(results)))


def _short(results: Online, norm: str, samples: int, batches: int) -> str:
    cell = results.cell(norm, samples, batches)
    if cell is None:
        return results.state(norm, samples, batches)
    return f"{cell.best[0]:.1f} ({cell.median:.1f})" + _count(cell)


def _count(cell: Cell) -> str:
    return f" [{sum(cell.diverged.values())}]" if any(cell.diverged.values()) else ""


def _window(batches: int) -> str:
    return f"{batches} batch{'es' * (batches > 1)} per update"


def _verdict(goal: Goal) -> str:
    """How many cells reach a goal; those that do not by name."""
    judged = len(goal.reached) + len(goal.lost)
    if not judged:
        return f"{goal.text}: open in all cells, for want of runs or seeds"
    words = [f"{goal.text}: in {len(goal.reached)} of {judged} cells"]
    if goal.lost:
        words.append("not in " + ", ".join(f"{name} ({why})" for name, why in goal.lost.items()))
    if goal.open:
        words.append("open, for want of runs, in " + ", ".join(goal.open))
    return "; ".join(words)


# Markdown


def markdown(results: Online) -> str:
    """The generated part of a page: tables, then goals."""
    grid = results.grid
    parts = [f"`{grid.command}`", heading(results) + "."]
    for batches in grid.batches:
        heads = [_window(batches), *(_several(size, "sample") for size in grid.samples)]
        rows = [[norm, *(_long(results, norm, size, batches) for size in grid.samples)] for norm in shown(results)]
        parts.append("\n".join(map(line, [heads, ["---"] * len(heads), *rows])))
    parts.append("\n".join([*(f"- Streaming {_verdict(goal)}." for goal in goals(results)), *_limits(results)]))
    return "\n\n".join(parts)


def _limits(results: Online) -> list[str]:
    """How much the differences say, and whether the ladder of rates was long enough."""
    lines, counts = [], tally(results)
    if judged := sum(counts.values()):
        each = ", ".join(f"{word} in {count}" for word, count in counts.items())
        beside = f"Beside {RIVALS[results.grid.net]} streaming is {each} of {judged} cells"
        lines.append(f"- {beside}; level: within two standard errors of the difference.")
    if ends := at_an_end(results):
        lines.append(f"- Best at the first or the last rate, beyond which it may be better still: {', '.join(ends)}.")
    return lines


def line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _long(results: Online, norm: str, samples: int, batches: int) -> str:
    cell = results.cell(norm, samples, batches)
    if cell is None:
        return results.state(norm, samples, batches)
    mean, error = cell.best
    spread = "" if math.isnan(error) else f" ± {error:.1f}"
    return f"{mean:.1f}{spread} @ {cell.rate:g} ({cell.median:.1f})" + _count(cell)


def filled(page: str, name: str, text: str) -> str | None:
    """`page` with `text` between its marks for `name`; None where it has none."""
    start, end = (mark.format(name=name) for mark in MARKS)
    parts = re.split(f"(?<={re.escape(start)}\n).*(?={re.escape(end)})", page, flags=re.DOTALL)
    return f"{parts[0]}\n{text}\n\n{parts[1]}" if len(parts) == 2 else None


def with_tables(path: Path, name: str, text: str) -> str:
    """The page at `path` with `text` in its place; says what is wrong with the page if it has none."""
    try:
        page = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LabError(f"--page {path} cannot be read ({error}): pass a Markdown page") from error
    new = filled(page, name, text)
    if new is None:
        start, end = (mark.format(name=name) for mark in MARKS)
        raise LabError(f"--page {path} has no place for the tables: put the lines {start} and {end} there")
    return new


def fill(path: Path, results: Online) -> None:
    """Put the tables into a page."""
    write_text(path, with_tables(path, results.grid.file_name, markdown(results)))
