"""A comparison as tables and sentences: for a terminal, and in Markdown."""

import math

from ..compare import Entry, Size, size_name
from ..compared import TEST, TRAINING, Cell, Compared, Verdict

JUDGED_BY = {TEST: "By the accuracy on test images:", TRAINING: "By the training loss, at the same rates:"}


def heading(found: Compared) -> str:
    plan = found.plan
    seeds = f"{plan.seeds} seed{'s' * (plan.seeds != 1)}"
    return f"{plan.net}: {plan.data}, {seeds}, {len(found.runs):,} runs"


def table(found: Compared) -> str:
    """Accuracy in per cent ± standard error @ learning rate."""
    rows = [["accuracy in %", *map(size_name, found.plan.sizes)]]
    rows += [[norm, *(_accuracy(found, norm, size) for size in found.plan.sizes)] for norm in found.plan.rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(f"{text:{width}}" for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([heading(found), *lines])


def markdown(found: Compared) -> str:
    """The generated part of a page: the command, both tables, the sentences."""
    parts = [f"`{found.plan.command}`", heading(found) + "."]
    for title, text in (("accuracy", _accuracy), ("training loss", _loss)):
        rows = [[title, *map(size_name, found.plan.sizes)], ["---"] * (len(found.plan.sizes) + 1)]
        rows += [[norm, *(text(found, norm, size) for size in found.plan.sizes)] for norm in found.plan.rows]
        parts.append("\n".join(f"| {' | '.join(row)} |" for row in rows))
    for part, title in JUDGED_BY.items():
        parts += [title, "\n".join(f"- {line}" for line in _sentences(found, part))]
    return "\n\n".join(parts)


def sentences(found: Compared, part: str = TEST) -> str:
    return "\n".join(_sentences(found, part))


def _sentences(found: Compared, part: str) -> list[str]:
    verdicts = found.verdicts(part)
    return list(map(_sentence, verdicts)) or ["No cell is judged yet, for want of runs or seeds."]


def _sentence(verdict: Verdict) -> str:
    if verdict.held_out is None:
        by = f"{verdict.difference:+.3f} ± {verdict.error:.3f} nats"
    else:
        by = f"{verdict.difference:+.1f} ± {verdict.error:.1f} (held out: {verdict.held_out:+.1f})"
    ways = {"lost": "is behind", "tie": "ties with", "won": "is ahead of"}
    mark = "Lost: " if verdict.outcome == "lost" else ""
    return f"{mark}{size_name(verdict.size)}: {verdict.ours} {ways[verdict.outcome]} {verdict.rival}, {by}."


def _cell(found: Compared, norm: str, size: Size) -> Cell | str:
    entry = Entry(found.plan.net, norm, *size)
    return found.cell(entry) or found.state(entry)


def _accuracy(found: Compared, norm: str, size: Size) -> str:
    cell = _cell(found, norm, size)
    return cell if isinstance(cell, str) else f"{_spread(*cell.accuracy, 1)} @ {cell.rate:g}"


def _loss(found: Compared, norm: str, size: Size) -> str:
    cell = _cell(found, norm, size)
    return "" if isinstance(cell, str) else _spread(*cell.loss, 3)


def _spread(mean: float, error: float, digits: int) -> str:
    return f"{mean:.{digits}f}" + ("" if math.isnan(error) else f" ± {error:.{digits}f}")
