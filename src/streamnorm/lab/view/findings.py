"""What all results of a folder say of the paper's claims, as Markdown between the marks of a page."""

import math
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from ..claims import NOT_RUN, OPEN, REPRODUCED, REVERSED, Verdict, judge, judge_all
from ..results import FigureResults
from ..store import write_text
from ..variations import words
from .cells import filled, line, with_tables
from .endings import rates, table, verdicts

SIGNS = {REPRODUCED: "✓", REVERSED: "✗", OPEN: "?", NOT_RUN: "\N{EN DASH}"}
CLAIMS, VARIED = "claims", "varied"  # the marks that a page must have; those of figures are optional
AS_IT_IS = "as it is"
FACTORS, ENOUGH = ("start", "rate"), 3  # settings by which something is multiplied; results for a drawing of them


def fill(path: Path, found: Sequence[FigureResults], folder: Path) -> None:
    """Put the claims into a page, what was varied, and each figure that has a place there; `folder` has its picture."""
    write_text(path, with_findings(path, found, folder))


def with_findings(path: Path, found: Sequence[FigureResults], folder: Path) -> str:
    """The page as it is then."""
    page = with_tables(path, CLAIMS, claims_table(judge_all(found)))
    where = Path(os.path.relpath(folder, path.parent)).as_posix()
    parts = {VARIED: "\n\n".join(varied_part(group, where) for group in groups(found))}
    parts |= {each.file_name: figure(each, where) for each in found if not each.variation}
    for name, text in parts.items():
        page = filled(page, name, text) or page
    return page


def summary(claims: Iterable[Verdict]) -> str:
    """How many claims there are, and how they were judged: each time, where one was judged at two scales."""
    claims = list(claims)
    counts, names = Counter(claim.outcome for claim in claims), {claim.name for claim in claims}
    told = [f"{counts[outcome]} {outcome}" for outcome in SIGNS if counts[outcome]]
    often = f", judged {len(claims)} times" if len(claims) > len(names) else ""
    return f"{len(names)} claim{'s' * (len(names) != 1)}{often}: {', '.join(told)}."


def claims_table(claims: Sequence[Verdict]) -> str:
    rows = [
        [claim.figure, claim.text, f"{SIGNS[claim.outcome]} {claim.outcome}", measured(claim), _scale(claim)]
        for claim in claims
    ]
    heads = ["figure", "claim", "outcome", "measured, positive is as claimed", "scale, seeds"]
    return "\n\n".join([summary(claims), _table(heads, rows)])


def _scale(claim: Verdict) -> str:
    return f"{claim.scale}, {len(claim.values)}{claim.protocol}" if claim.values else ""


def measured(claim: Verdict) -> str:
    """The mean over the seeds, with its standard error."""
    if not claim.values:
        return ""
    digits = digits_of(claim)
    spread = f" ± {claim.error:.{digits}f}" if math.isfinite(claim.error) else ""
    return f"{claim.mean:+.{digits}f}{spread} {claim.unit}"


def digits_of(claim: Verdict) -> int:
    """Decimals to show: two digits of the error."""
    known = math.isfinite(claim.error) and claim.error > 0
    return min(max(1 - math.floor(math.log10(claim.error)), 0), 5) if known else 3


def figure(results: FigureResults, where: str) -> str:
    """Its picture beside what the paper says, the command, its numbers and its claims."""
    shown = f"![{results.figure.title}]({where}/{results.file_name}.png)"
    said = f"The paper: *{results.figure.paper}*"
    made = f"```text\n$ {results.command}\n{table(results)}\n{verdicts(judge(results))}\n```"
    return "\n\n".join([said, shown, f"{rates(results)} {took(results)}", made])


def took(results: FigureResults) -> str:
    """By the clocks of the runs, one of which has one thread; they may have shared the machine with others."""
    return f"{len(results.runs)} runs, {sum(run['seconds'] for run in results.runs) / 60:.0f} minutes in all."


def groups(found: Sequence[FigureResults]) -> list[list[FigureResults]]:
    """Results that differ in what was varied alone, where anything was: the one that was not first."""
    by_key: dict[tuple[str, str, tuple[str, ...]], list[FigureResults]] = {}
    for each in found:
        by_key.setdefault((each.figure.name, each.scale, tuple(each.data)), []).append(each)
    return [
        sorted(group, key=lambda each: [(name, str(value).zfill(9)) for name, value in each.variation.items()])
        for group in by_key.values()
        if any(each.variation for each in group)
    ]


def columns(group: Sequence[FigureResults]) -> list[str]:
    return [f"{words(each.variation) or AS_IT_IS} ({len(each.seeds)})" for each in group]


def lines(group: Sequence[FigureResults]) -> list[tuple[str, list[Verdict]]]:
    """Claims, and how each of the results judges them; without those that only one of several can judge."""
    judged = [judge(each) for each in group]
    rows = [(claims[0].text, list(claims)) for claims in zip(*judged, strict=True)]
    least = min(len(group), 2)
    return [(text, claims) for text, claims in rows if sum(bool(claim.values) for claim in claims) >= least]


def drawings(group: Sequence[FigureResults]) -> dict[str, list[FigureResults]]:
    """What is drawn of a group, by names of files: results for a factor that alone was varied, if enough."""
    by_factor = {name: [each for each in group if each.variation.keys() <= {name}] for name in FACTORS}
    return {f"{group[0].file_name}-varied-{name}": each for name, each in by_factor.items() if drawable(each)}


def drawable(group: Sequence[FigureResults]) -> bool:
    return len(group) >= ENOUGH and bool(lines(group))


def varied_part(group: Sequence[FigureResults], where: str) -> str:
    shown = [f"![claims of {group[0].figure.name}, {name}]({where}/{name}.png)" for name in drawings(group)]
    made = [f"- {words(each.variation)}: `{each.command}`; {took(each)}" for each in group if each.variation]
    return "\n\n".join([varied_table(group), *shown, "\n".join(made)])


def varied_table(group: Sequence[FigureResults]) -> str:
    first = group[0]
    rows = [
        [text, *(f"{SIGNS[claim.outcome]} {measured(claim)}" if claim.values else "" for claim in claims)]
        for text, claims in lines(group)
    ]
    head = f"`{first.figure.name}`, {first.scale}; in brackets the seeds:"
    return "\n\n".join([head, _table(["claim", *columns(group)], rows)])


def _table(heads: list[str], rows: Iterable[list[str]]) -> str:
    return "\n".join(map(line, [heads, ["---"] * len(heads), *rows]))
