"""From a grid to its results: say how long it will take, train what is missing, write one file."""

import sys
from pathlib import Path

from .data import Images
from .experiment import Say, estimate
from .grid import Grid
from .jobs import Loader, run_all
from .online import Online, Trained
from .progress import Bar
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
    jobs: int = 1,
    training: bool = True,
    command: str = "",
    say: Say = lambda line: print(line, file=sys.stderr),
) -> Online:
    """The results of all runs of `grid`, written to `out`; of those that are there, where `training` is not wanted."""
    check_writable(out)
    load, planned = Loader(data_folder), grid.runs()
    unique = list(dict.fromkeys(run for run, _ in planned))
    root = out / "runs"
    if training:
        results = _trained(unique, load, root, jobs, say)
    else:
        done = [run for run in unique if is_done(run, load(run), root)]
        results = {run: train(run, load(run), root) for run in done}  # which reads them
        say(f"{len(results)} of {len(unique)} runs are trained")
    rows = [
        Trained.of((place.norm for place in places), base, results[run])
        for (run, base), places in planned.items()
        if run in results
    ]
    images = load(unique[0])
    assert isinstance(images, Images)
    versions = {str(result["versions"]): result["versions"] for result in results.values()}
    about = (images.note, images.fingerprint, command, list(versions.values()))
    found = Online(grid, *about, IMAGE_CHANCE, rows)
    found.write(out)
    return found


def _trained(runs: list[Run], load: Loader, root: Path, jobs: int, say: Say) -> dict[Run, Result]:
    costs = estimate(runs, load, root, jobs, say)
    bar = Bar([f"{run.norm.kind} {run.samples} x {run.batches}, seed {run.seed}" for run in runs], costs)
    try:
        return dict(zip(runs, run_all(runs, load, root, jobs, bar), strict=True))
    finally:
        bar.close()
