"""From a grid to its results: say how long it will take, train what is missing, write one file."""

import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from .data import Images
from .errors import LabError
from .experiment import Say, train_all
from .grid import Grid
from .jobs import HERE, Carrier, Loader
from .online import Online, Trained, read_online
from .results import Result
from .runs import Run
from .store import check_writable
from .tasks import IMAGE_CHANCE
from .train import is_done, train


def run_grid(
    grid: Grid,
    out: Path,
    *,
    data_folder: Path | None = None,
    carrier: Carrier = HERE,
    training: bool = True,
    say: Say = lambda line: print(line, file=sys.stderr),
) -> Online:
    """The results of all runs of `grid`, written to `out`.

    Without `training`, of those runs that are there, or that the file in `out` tells of. Where that file is all there
    is, not even the data is needed.
    """
    check_writable(out)
    path, root = out / f"{grid.file_name}.json", out / "runs"
    before = read_online(path) if path.exists() and not training else None
    if before is not None and not root.exists():
        found = replace(before, grid=grid, runs=_rows(grid, before.fingerprint, {}, before.runs))
    else:
        found = _found(grid, before, Loader(data_folder), root, carrier if training else None, say)
    found.write(out)
    return found


def _found(grid: Grid, before: Online | None, load: Loader, root: Path, carrier: Carrier | None, say: Say) -> Online:
    """By runs trained by `carrier`; by those that are there, and `before`, where there are none."""
    unique = list(dict.fromkeys(run for run, _ in grid.runs()))
    images = load(unique[0])
    assert isinstance(images, Images)
    if before is not None and before.fingerprint != images.fingerprint:
        raise LabError(f"{grid.file_name}.json beside {root} is about other images: choose another --out, or move it")
    if carrier is not None:
        names = {
            run: f"{places[0].norm}, {run.samples} x {run.batches} at {rate:g}, seed {run.seed}"
            for (run, rate), places in grid.runs().items()
        }
        results = train_all(names, load, root, carrier, say)
    else:  # `train` then reads them
        results = {run: train(run, images, root) for run in unique if is_done(run, images, root)}
    rows = _rows(grid, images.fingerprint, results, before.runs if before else [])
    versions = [*(before.versions if before else []), *(result["versions"] for result in results.values())]
    distinct = list({str(each): each for each in versions}.values())
    return Online(grid, images.note, images.fingerprint, distinct, IMAGE_CHANCE, rows)


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
