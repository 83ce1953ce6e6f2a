"""How the runs of a figure ended, and what that says of its claims, as plain text for a terminal."""

from collections.abc import Sequence
from statistics import fmean

from ..claims import Verdict
from ..results import FigureResults, Result, ends, mean_and_error
from ..variations import words


def table(results: FigureResults) -> str:
    """The ends of all curves: mean and standard error over the runs that finished."""
    columns = ["train_loss", "train_error", "test_loss", "test_error"]
    known = {name for runs in results.curves.values() for name in runs[0]["chance"]}
    shown = [name for name in columns if name.split("_")[1] in known]
    heads = [name.replace("_", " ") + (" %" if "error" in name else "") for name in shown]
    width, seeds = max(map(len, results.curves)), len(results.seeds)
    told = [results.scale, *([words(results.variation)] if results.variation else [])]
    told += [f"{seeds} seed{'s' * (seeds != 1)}", f"on {', '.join(results.data)}"]
    lines = [f"{results.figure.title}: {', '.join(told)}"]
    lines.append(" " * width + "".join(f"{head:>18}" for head in heads) + f"{'seconds':>10}")
    for label, runs in results.curves.items():
        cells = [_cell(runs, name) for name in shown]
        odd = sorted({run["outcome"] for run in runs} - {"finished"})
        lines.append(
            f"{label:{width}}" + "".join(f"{cell:>18}" for cell in cells)
            + f"{fmean(run['seconds'] for run in runs):>10.0f}" + "".join(f"  {word}" for word in odd)
        )  # fmt: skip
    return "\n".join(lines)


def rates(results: FigureResults) -> str:
    """The learning rates of a figure that is not varied, and how they were chosen."""
    schedules = dict.fromkeys(tuple(map(tuple, run["settings"]["rates"])) for run in results.runs)
    told = [", then ".join(f"{rate:g} ({epochs:.3g})" for rate, epochs in each) for each in schedules]
    return f"Learning rate (epochs): {' or '.join(told)}; the paper's rates, the same for every norm, none tuned here."


def _cell(runs: Sequence[Result], name: str) -> str:
    values, digits = ends(runs, name), 1 if name.endswith("error") else 3
    if not values:
        return "-"
    mean, error = mean_and_error(values)
    return f"{mean:.{digits}f} ± {error:.{digits}f}" if len(values) > 1 else f"{mean:.{digits}f}"


def verdicts(claims: Sequence[Verdict]) -> str:
    """Every claim with its outcome and number."""
    several = len({claim.file_name for claim in claims}) > 1
    return "\n".join(
        f"{claim.outcome:20} {claim.text}{_number(claim)}" + (f" [{claim.file_name}]" if several else "")
        for claim in claims
    )


def _number(claim: Verdict) -> str:
    if not claim.values:
        return ""
    spread = f" ± {claim.error:.3f}" if len(claim.values) > 1 else ""
    return f": {claim.mean:+.3f}{spread} {claim.unit}"
