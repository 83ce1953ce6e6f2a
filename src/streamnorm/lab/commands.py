"""What the command line does."""

import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from .claims import Verdict, judge
from .errors import LabError
from .experiment import run_figure
from .figures import FIGURES, Figure
from .plot import draw, style
from .report import write_report
from .results import FigureResults, final, mean_and_error, read_folder
from .scales import SCALES


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
    jobs: int,
    command: str,
) -> None:
    """Train figures, and show what came out: a table, the claims, a drawing."""
    figures = _figures(names)
    with style():  # needs matplotlib: said before the hours of work, not after
        pass
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
            jobs=jobs,
            command=command,
        )
        print(table(results))
        print(verdicts(judge(results)))
        for path in draw(results, out):
            print(path)


def report(out: Path, path: Path) -> None:
    """Draw and judge all results in a folder again, and write them as one page."""
    found = read_folder(out)
    if not found:
        raise LabError(f"no results in {out}: make some, for example with: streamnorm run online --out {out}")
    claims = [verdict for results in found for verdict in judge(results)]
    write_report(found, claims, path)
    print(verdicts(claims))
    print(path)


def _figures(names: Sequence[str]) -> list[Figure]:
    if "all" in names:
        return list(FIGURES.values())
    for name in names:
        if name not in FIGURES:
            raise LabError(f"no figure called {name!r}: there are {', '.join(FIGURES)}, or all")
    return [FIGURES[name] for name in dict.fromkeys(names)]


def table(results: FigureResults) -> str:
    """The ends of all curves: mean and standard error over the seeds."""
    columns = ["train_loss", "train_error", "test_loss", "test_error"]
    first = next(iter(results.curves.values()))[0]
    shown = [name for name in columns if name.split("_")[1] in first["chance"]]
    heads = [name.replace("_", " ") + (" %" if "error" in name else "") for name in shown]
    width = max(map(len, results.curves))
    lines = [f"{results.figure.title}: {results.scale}, {len(results.seeds)} seeds, on {', '.join(results.data)}"]
    lines.append(" " * width + "".join(f"{head:>18}" for head in heads) + f"{'seconds':>10}")
    for label, runs in results.curves.items():
        cells = [_cell([final(run, name) for run in runs], 100 if "error" in name else 1) for name in shown]
        odd = sorted({run["outcome"] for run in runs} - {"finished"})
        lines.append(
            f"{label:{width}}" + "".join(f"{cell:>18}" for cell in cells)
            + f"{fmean(run['seconds'] for run in runs):>10.0f}" + "".join(f"  {word}" for word in odd)
        )  # fmt: skip
    return "\n".join(lines)


def _cell(values: list[float], factor: float) -> str:
    mean, error = mean_and_error(value * factor for value in values)
    digits = 1 if factor == 100 else 3
    return f"{mean:.{digits}f} ± {error:.{digits}f}" if len(values) > 1 else f"{mean:.{digits}f}"


def verdicts(claims: Sequence[Verdict]) -> str:
    lines = [
        f"{claim.outcome:20} {claim.text}: {claim.mean:+.3f} ± {claim.error:.3f} {claim.unit}"
        + (f" [{claim.scale}]" if len({other.scale for other in claims}) > 1 else "")
        for claim in claims
    ]
    return "\n".join(lines)
