"""From a figure to its results: choose the scale, say how long it will take, train what is missing."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch

from .data import Images
from .errors import DataError, LabError
from .figures import Figure
from .jobs import HERE, Carrier, Loader, run_all, seconds
from .progress import Bar
from .results import FigureResults
from .runs import DEFAULT_DEVICE, IMAGES, Run
from .scales import Scale, scaled
from .store import check_writable
from .train import Row, is_done
from .variations import Variation, varied

Say = Callable[[str], None]


def run_figure(
    figure: Figure,
    scale: Scale,
    out: Path,
    *,
    data: Sequence[str] = (),
    data_folder: Path | None = None,
    seeds: int | None = None,
    carrier: Carrier = HERE,
    device: str = DEFAULT_DEVICE,
    variation: Variation | None = None,
    labels: Sequence[str] = (),
    command: str = "",
    say: Say = lambda line: print(line, file=sys.stderr),
) -> FigureResults:
    """Train every curve of `figure` for each seed, and write the results to `out`.

    `data`: other images, or another text, than the figure's own. `variation`: what is changed in all curves. `labels`:
    some of the curves, in place of all.
    """
    check_writable(out)
    load, variation = Loader(data_folder), variation or {}
    wanted = [curve for curve in figure.curves if curve.label in labels or not labels]
    curves = [(curve.label, scaled(curve.run, scale, _data_for(curve.run, data))) for curve in wanted]
    places = [(label, replace(varied(run, variation), device=device)) for label, run in curves]
    runs = [(label, run.with_seed(seed)) for seed in range(seeds or scale.seeds) for label, run in places]
    unique = list(dict.fromkeys(run for _, run in runs))  # curves may share a run
    names = {run: f"{label}, seed {run.seed}" for label, run in runs}
    results = train_all({run: names[run] for run in unique}, load, out / "runs", carrier, say)
    by_label = {label: [results[run] for other, run in runs if other == label] for label, _ in curves}
    sets = {run.data: load(run) for _, run in runs}
    notes = [each.note for each in sets.values() if isinstance(each, Images)]
    found = FigureResults(figure, scale.name, list(sets), "; ".join(notes), command, by_label, variation)
    found.write(out)
    return found


def train_all(
    names: dict[Run, str],
    load: Loader,
    root: Path,
    carrier: Carrier,
    say: Say,
    known: dict[Run, float] | None = None,
) -> dict[Run, Row]:
    """The results of runs, each shown under its name while it is trained. `known`: see `estimate`."""
    runs = list(names)
    bar = Bar(list(names.values()), estimate(runs, load, root, carrier, say, known))
    try:
        return dict(zip(runs, run_all(runs, load, root, carrier, bar), strict=True))
    finally:
        bar.close()


class Told(Protocol):
    """What a file of results tells of its images."""

    @property
    def note(self) -> str: ...

    @property
    def fingerprint(self) -> str: ...


def about_images(run: Run, load: Loader, before: Told | None, path: Path) -> tuple[str, str]:
    """Note and fingerprint of the images of a run, and of `before`, the results in the file `path`.

    Those of `before` serve where the images would have to be downloaded, and may not.
    """
    try:
        images = load(run)
    except DataError:
        if before is None or not load.offline:
            raise
        return before.note, before.fingerprint
    assert isinstance(images, Images)
    if before is not None and before.fingerprint != images.fingerprint:
        raise LabError(f"{path} is about other images: choose another --out, or move it")
    return images.note, images.fingerprint


def _data_for(run: Run, data: Sequence[str]) -> str | None:
    """The choice of data of the kind that the run learns from, if there is one."""
    fitting = [name for name in data if run.is_text != (name in IMAGES)]
    return fitting[-1] if fitting else None


def estimate(
    runs: list[Run], load: Loader, root: Path, carrier: Carrier, say: Say, known: dict[Run, float] | None = None
) -> list[float]:
    """Seconds that each of `runs` will take, by a few updates of each kind, and a word about it.

    `known`: what was measured before, by kind; more is added.
    """
    missing = {run: _kind(run) for run in runs if not is_done(run, load(run), root)}
    known = {} if known is None else known
    threads, room = torch.get_num_threads(), carrier.room(len(missing))
    if missing:
        say(f"{len(missing)} runs to train, {len(runs) - len(missing)} done before; measuring how long they take ...")
        torch.set_num_threads(room.threads)
        for run, kind in missing.items():
            if kind not in known:
                known[kind] = seconds(run, load)
        torch.set_num_threads(threads)
    costs = [known[missing[run]] if run in missing else 0.0 for run in runs]
    if missing:
        say(f"about {duration(max(sum(costs) / room.at_once, max(costs)))} {room.words}")
    return costs


def _kind(run: Run) -> Run:
    """The same for runs that take equally long: neither seeds nor learning rates matter."""
    return replace(run, seed=0, rates=((0.0, run.epochs),))


def duration(length: float) -> str:
    if length < 90:
        return f"{length:.0f} s"
    return f"{length / 60:.0f} min" if length < 5400 else f"{length / 3600:.1f} h"
