"""What the command line does. Mistakes are answered before torch is imported: see `starting`."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from .claims import judge, judge_all
from .compare import Plan, norms_of
from .errors import LabError
from .figures import FIGURES, Figure
from .grid import Grid, held_out_of, rates_of
from .results import read_folder
from .runs import IMAGES
from .scales import SCALES
from .starting import stoppable
from .store import write_text
from .variations import Variation
from .view import cells, contest, findings
from .view.endings import table, verdicts
from .view.panels import draw_grid
from .view.plot import draw, style
from .view.report import write_report
from .view.versus import draw_compared

if TYPE_CHECKING:
    from .jobs import Carrier


def list_figures() -> None:
    """Every figure with its curves and what the paper says."""
    for figure in FIGURES.values():
        print(f"{figure.name:13} {figure.title} ({len(figure.curves)} curves)")
        print(f"{'':13} paper: {figure.paper}\n")


def run(
    names: Sequence[str],
    scale: str,
    out: Path,
    data: Sequence[str],
    data_folder: Path | None,
    seeds: int | None,
    curves: Sequence[str],
    variation: Variation,
    jobs: int,
    cluster: str | None,
    device: str,
    command: str,
) -> None:
    """Train figures, and show what came out: a table, the claims, a drawing."""
    figures = _figures(names)
    _check_curves(figures, curves)
    _check_data(figures, data)
    _check_folder(data_folder)
    with stoppable():
        with style():  # needs matplotlib: said before the hours of work, not after
            pass
        from .experiment import run_figure
    _check_device(device)
    with _carrier(jobs, cluster) as carrier:
        for figure in figures:
            if len(figures) > 1:
                print(f"== {figure.name}", file=sys.stderr)
            results = run_figure(
                figure,
                SCALES[scale],
                out,
                data=data,
                data_folder=data_folder,
                seeds=seeds,
                carrier=carrier,
                device=device,
                variation=variation,
                labels=curves,
                command=command,
            )
            print(table(results))
            print(verdicts(judge(results)))
            for path in (out / f"{results.file_name}.json", *draw(results, out)):
                print(path)


def bench_online(
    nets: Sequence[str],
    samples: tuple[int, ...],
    batches: tuple[int, ...],
    rates: int | tuple[float, ...] | None,
    size: int,
    seeds: int,
    data: str,
    data_folder: Path | None,
    jobs: int,
    cluster: str | None,
    device: str,
    out: Path,
    training: bool,
    rewriting: bool,
    page: Path | None,
) -> None:
    """Measure online learning, and show what came out: a table, the goals, a drawing, and a page of tables.

    Without `training` nothing is written but the page, unless `rewriting`.
    """
    held_out = held_out_of(data)
    of_all = seeds, min(size, IMAGES[data] - held_out), data, device, held_out
    grids = [Grid(net, samples, batches, _rates(net, rates), *of_all) for net in dict.fromkeys(nets)]
    _check_folder(data_folder)
    if page is not None:
        for grid in grids:
            cells.with_tables(page, grid.file_name, "")  # a page without marks: said before the work too
    writing = _is_written(training, rewriting)
    with stoppable():
        if writing:
            with style():
                pass
        from .bench import run_grid
    if training:
        _check_device(device)
    with _carrier(jobs, cluster if training else None) as carrier:
        for grid in grids:
            found = run_grid(grid, out, data_folder=data_folder, carrier=carrier, training=training)
            print(cells.table(found))
            print(cells.verdicts(found))
            if rewriting:
                found.write(out)
            written = [out / f"{grid.file_name}.json", *draw_grid(found, out)] if writing else []
            if page is not None:
                cells.fill(page, found)
                written.append(page)
            for path in written:
                print(path)


def compare(
    plans: Sequence[Plan],
    data_folder: Path | None,
    jobs: int,
    cluster: str | None,
    out: Path,
    training: bool,
    rewriting: bool,
    page: Path | None,
) -> None:
    """Compare norms, and show what came out: tables, and where ours is behind. What is written: see `bench_online`."""
    writing = _is_written(training, rewriting)
    for plan in plans:
        if not plan.rows:
            raise LabError(f"--norms has none that {plan.net} can have: there are {', '.join(norms_of(plan.net))}")
        for entry in plan.entries(plan.rows, plan.sizes):
            images = plan.run(entry, 0, 0).train_size or 0
            if images < entry.window:
                raise LabError(f"{images} training images make no update of {entry.window}: use more images")
    _check_folder(data_folder)
    if page is not None:
        for plan in plans:
            cells.with_tables(page, plan.file_name, "")
    with stoppable():
        from .comparing import compare as train_and_compare
    for plan in plans if training else ():
        _check_device(plan.device)
    with _carrier(jobs, cluster if training else None) as carrier:
        compared = train_and_compare(plans, out, data_folder=data_folder, carrier=carrier, training=training)
    for found in compared:
        print(contest.table(found))
        for part, title in contest.JUDGED_BY.items():
            print(title, contest.sentences(found, part), sep="\n")
        if rewriting:
            found.write(out)
        written = [out / f"{found.plan.file_name}.{kind}" for kind in ("json", "md")] if writing else []
        if writing:
            write_text(written[-1], contest.markdown(found) + "\n")
            written += draw_compared(found, out)
        if page is not None:
            write_text(page, cells.with_tables(page, found.plan.file_name, contest.markdown(found)))
            written.append(page)
        for path in written:
            print(path)


def check(device: str, times: bool, rounds: int, compiling: float, out: Path | None) -> bool:
    """Whether this machine computes what it should; with times, beside norms of torch."""
    with stoppable():
        from .check.run import check as check_all
    return check_all(device, times=times, rounds=rounds, compiling=compiling, out=out)


def _is_written(training: bool, rewriting: bool) -> bool:
    """Whether files in --out are written."""
    if training and rewriting:
        raise LabError("--rewrite is for --no-train: a command that trains writes its files anyway")
    return training or rewriting


def _rates(net: str, wanted: int | tuple[float, ...] | None) -> tuple[float, ...]:
    """Those that were asked for; of a network's own rates all, or so many in the middle."""
    own = rates_of(net)
    if not isinstance(wanted, int):
        return wanted or own
    if wanted > len(own):
        raise LabError(f"--rates {wanted}: {net} has {len(own)} of its own; list others, such as 0.01,0.1")
    start = (len(own) - wanted) // 2
    return own[start : start + wanted]


def report(out: Path, path: Path, page: Path | None) -> None:
    """Draw and judge all results in a folder again, and write them as one page; and into a page of Markdown."""
    found = read_folder(out)
    if not found:
        raise LabError(f"no results in {out}: make some, for example with: streamnorm run online --out {out}")
    if page is not None:
        findings.fill(page, found, out)
    claims = judge_all(found)
    write_report(found, claims, path)
    print(verdicts([claim for claim in claims if claim.values]))
    print(findings.summary(claims))
    for written in (path, *([page] if page else [])):
        print(written)


def _figures(names: Sequence[str]) -> list[Figure]:
    if "all" in names:
        return list(FIGURES.values())
    for name in names:
        if name not in FIGURES:
            raise LabError(f"no figure called {name!r}: there are {', '.join(FIGURES)}, or all")
    return [FIGURES[name] for name in dict.fromkeys(names)]


def _check_curves(figures: Sequence[Figure], labels: Sequence[str]) -> None:
    for figure in figures:
        known = [curve.label for curve in figure.curves]
        if unknown := [label for label in labels if label not in known]:
            raise LabError(f"--curves {unknown[0]!r} is none of {figure.name}: there are {', '.join(known)}")


def _check_folder(folder: Path | None) -> None:
    if folder is not None and not folder.exists():
        raise LabError(f"--data-dir {folder} does not exist: pass the folder that holds the data")


def _check_device(name: str) -> None:
    """Before any work."""
    with stoppable():
        from .devices import find
    find(name)


@contextmanager
def _carrier(jobs: int, cluster: str | None) -> "Iterator[Carrier]":
    """Who trains: so many processes, or the workers of a cluster."""
    with stoppable():
        from .jobs import Processes
    if cluster is None:
        yield Processes(jobs)
        return
    with stoppable():
        from .cluster import Cluster
    with Cluster(cluster) as carrier:
        yield carrier


def _check_data(figures: Sequence[Figure], data: Sequence[str]) -> None:
    """Refuse data that none of the figures can learn from."""
    names, kinds = (
        ", ".join(figure.name for figure in figures),
        {curve.run.is_text for f in figures for curve in f.curves},
    )
    for name in data:
        if name in IMAGES and kinds == {True}:
            raise LabError(f"{names} learns from text, not from {name}: use --data shakespeare or a text file")
        if name not in IMAGES and kinds == {False}:
            raise LabError(f"{names} learns from images, not from {name}: use --data {' or '.join(IMAGES)}")
        if name not in (*IMAGES, "shakespeare") and not Path(name).exists():
            raise LabError(f"no text called {name!r}: pass shakespeare or the path of a text file")
