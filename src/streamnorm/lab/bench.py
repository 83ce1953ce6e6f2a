"""From a grid to its results: say how long it will take, train what is missing, write one file."""

import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from .experiment import Say, about_images, train_all
from .grid import Grid
from .jobs import HERE, Carrier, Loader
from .online import Online, Trained, read_online
from .results import Result, read_run
from .runs import Run
from .store import check_writable
from .tasks import IMAGE_CHANCE


def run_grid(
    grid: Grid,
    out: Path,
    *,
    data_folder: Path | None = None,
    carrier: Carrier = HERE,
    training: bool = True,
    say: Say = lambda line: print(line, file=sys.stderr),
) -> Online:
    """The results of all runs of `grid`, written to `out`. What an earlier file there tells of is not trained again.

    Without `training`, of those runs that are there, or that the file in `out` tells of: nothing is written then, or
    downloaded. Where that file is all there is, not even the data is needed.
    """
    path, root = out / f"{grid.file_name}.json", out / "runs"
    before = read_online(path) if path.exists() else None
    if not training:
        return _there(grid, before, Loader(data_folder, offline=True), root, path)
    check_writable(out)
    load = Loader(data_folder)
    note, fingerprint = about_images(next(run for run, _ in grid.runs()), load, before, path)
    told = {(run.id, run.rate) for run in before.runs} if before else set()
    names = {
        run: f"{places[0].norm}, {run.samples} x {run.batches} at {rate:g}, seed {run.seed}"
        for (run, rate), places in grid.runs().items()
        if (run.address(fingerprint), rate) not in told
    }
    found = _online(grid, note, fingerprint, train_all(names, load, root, carrier, say), before)
    found.write(out)
    return found


def _there(grid: Grid, before: Online | None, load: Loader, root: Path, path: Path) -> Online:
    """By the runs that are there, and by `before`, the results in the file `path`, where there are none."""
    if before is not None:  # as they were measured
        grid = replace(grid, held_out=before.grid.held_out)
    if before is not None and not root.exists():
        return replace(before, grid=grid, runs=_rows(grid, before.fingerprint, {}, before.runs))
    unique = list(dict.fromkeys(run for run, _ in grid.runs()))
    note, fingerprint = about_images(unique[0], load, before, path)
    there = {run: read_run(root / run.address(fingerprint)) for run in unique}
    return _online(grid, note, fingerprint, {run: result for run, result in there.items() if result}, before)


def _online(grid: Grid, note: str, fingerprint: str, results: dict[Run, Result], before: Online | None) -> Online:
    rows = _rows(grid, fingerprint, results, before.runs if before else [])
    versions = [*(before.versions if before else []), *(result["versions"] for result in results.values())]
    distinct = list({str(each): each for each in versions}.values())
    return Online(grid, note, fingerprint, distinct, IMAGE_CHANCE, rows)


def _rows(grid: Grid, fingerprint: str, results: dict[Run, Result], told: Iterable[Trained]) -> list[Trained]:
    """Of all runs that are known: by their results, or else by `told`."""
    by_name = {(run.id, run.rate): run for run in told}
    rows = []
    for (run, rate), places in grid.runs().items():
        norms = tuple(place.norm for place in places)
        if run in results:
            rows.append(Trained.of(norms, rate, results[run]))
        elif row := by_name.get((run.address(fingerprint), rate)):
            rows.append(replace(row, norms=norms))
    return rows
