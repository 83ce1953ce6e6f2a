"""One page of all results: which of the paper's claims were reproduced, by what numbers, and how they were made."""

import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ..claims import REPRODUCED, REVERSED, Verdict
from ..errors import MissingExtra
from ..results import FigureResults, Result, ends, final, finished, mean_and_error
from ..scales import SCALES
from ..store import write_text
from ..variations import words
from .endings import rates
from .findings import SIGNS, columns, digits_of, drawings, groups, lines, summary, took
from .lines import ERROR, LOSS, Measure, ending, measure_of, origin
from .page import Html, folded, html, join, link, page, picture, table, tag, terms
from .plot import render
from .varied import render_varied

TITLE = "Streaming normalization: the paper's experiments, run again"
LEAD = (
    "The experiments of “Streaming Normalization: Towards Simpler and More Biologically-plausible Normalizations for "
    "Online and Recurrent Learning” (Liao, Kawaguchi and Poggio, 2016), trained with this implementation. For each "
    "figure of the paper: the curves, their final numbers, and whether they say what the paper says of them. A claim "
    "that does not hold here is shown as such."
)
RULE = (
    "Reproduced: every seed is as claimed, and the mean is more than two standard errors above zero. Not reproduced: "
    "the same, reversed. Everything else, and a single seed, is not enough evidence. Seeds are paired: a seed is the "
    "same first weights in every curve, and of images the same order. A run that cannot run or diverges counts as "
    "guessing."
)
COMMAND = "streamnorm run online --data digits"
KINDS = {REPRODUCED: "good", REVERSED: "bad"}  # how an outcome looks
NONE = "\N{EN DASH}"


def write_report(results: Sequence[FigureResults], claims: Sequence[Verdict], path: Path) -> None:
    """Write the page, a single file, to `path`."""
    write_text(path, report(results, claims))


def report(results: Sequence[FigureResults], claims: Sequence[Verdict]) -> str:
    lead = tag("p", LEAD, class_="lead")
    if not results:
        empty = join(["There are no results yet. This makes the first ones: ", tag("code", COMMAND)])
        return page(TITLE, lead, tag("p", empty))
    plain, tried = [each for each in results if not each.variation], groups(results)
    names = anchors(plain)
    entries = [("claims", "All claims"), *((names[each.file_name], heading(each)) for each in plain)]
    entries += [("varied", "What was varied")] if tried else []
    items = (tag("li", link(target, text)) for target, text in entries)
    contents = tag("nav", tag("ul", *items), aria_label="Contents")
    sections = [section(each, names[each.file_name], claims_of(each, claims)) for each in plain]
    sections += [variations(tried)] if tried else []
    opening = join([lead, tag("p", summary(claims), class_="summary"), contents], "\n")
    return page(TITLE, opening, join([all_claims(claims, names), *sections], "\n"))


def anchors(results: Iterable[FigureResults]) -> dict[str, str]:
    """File name to the name of its section: letters, digits and hyphens, each only once."""
    found: dict[str, str] = {}
    for each in results:
        name = "figure-" + re.sub(r"[^a-z0-9]+", "-", each.file_name.lower()).strip("-")
        taken = list(found.values()).count(name)
        found.setdefault(each.file_name, f"{name}--{len(found)}" if taken else name)
    return found


def heading(results: FigureResults) -> str:
    return f"{results.figure.title} ({origin(results)})"


def claims_of(results: FigureResults, claims: Iterable[Verdict]) -> list[Verdict]:
    return [claim for claim in claims if claim.file_name == results.file_name]


# Claims


def plural(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def all_claims(claims: Sequence[Verdict], names: dict[str, str]) -> Html:
    parts = [tag("h2", "All claims", id="claims")]
    if claims:
        heads = ("Claim", "Outcome", "Measured", "Figure", "Scale")
        rows = [
            (
                tag("span", claim.text, class_="wide"),
                outcome(claim),
                measured(claim) if claim.file_name else NONE,
                link(names[claim.file_name], claim.figure) if claim.file_name in names else claim.figure,
                claim.scale + claim.protocol,
            )
            for claim in claims
        ]
        parts.append(table("Mean ± standard error over the seeds; positive is as claimed.", heads, rows))
        parts.append(tag("p", RULE))
    return tag("section", *parts, aria_labelledby="claims")


def measured(claim: Verdict) -> Html:
    if not claim.values:
        return tag("small", "no seeds")
    digits = digits_of(claim)
    spread = f" ± {claim.error:.{digits}f}" if math.isfinite(claim.error) else ""
    below = tag("small", f"{claim.unit}, {plural(len(claim.values), 'seed')}")
    return join([keep(f"{signed(claim.mean, digits)}{spread}"), Html("<br>"), below])


def outcome(claim: Verdict) -> Html:
    mark = tag("span", SIGNS.get(claim.outcome, ""), aria_hidden="true")
    return tag("span", mark, f" {claim.outcome}", class_=f"outcome {KINDS.get(claim.outcome, 'open')}")


def variations(tried: Sequence[Sequence[FigureResults]]) -> Html:
    """The claims of a figure, beside what becomes of them with one setting changed in all curves."""
    parts = [tag("h2", "What was varied", id="varied")]
    for group in tried:
        rows = [
            (tag("span", text, class_="wide"), *(tried_out(claim) for claim in claims)) for text, claims in lines(group)
        ]
        caption = f"{heading(replace(group[0], variation={}))}. In brackets: seeds."
        parts.append(table(caption, ("Claim", *columns(group)), rows))
        for results in drawings(group).values():
            parts.append(
                shown(partial(render_varied, results), f"The table above as a drawing: {', '.join(columns(results))}.")
            )
        made = [(words(each.variation), join([tag("code", each.command), f"; {took(each)}"])) for each in group]
        parts.append(terms(pair for pair in made if pair[0]))
    return tag("section", *parts, aria_labelledby="varied")


def tried_out(claim: Verdict) -> Html:
    return join([outcome(claim), Html("<br>"), measured(claim)]) if claim.values else html(NONE)


def number(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def signed(value: float, digits: int) -> str:
    return "no number" if math.isnan(value) else f"{value:+.{digits}f}".replace("-", "\N{MINUS SIGN}")


# Figures


def section(results: FigureResults, name: str, claims: Sequence[Verdict]) -> Html:
    figure = results.figure
    parts = [
        tag("h2", heading(results), id=name),
        tag("p", f"{figure.caption} {rates(results)}"),
        tag("p", tag("strong", "The paper: "), figure.paper, class_="paper"),
        drawing(results),
        tag("h3", "Final numbers"),
        final_numbers(results),
        tag("h3", "Claims"),
        figure_claims(claims),
        tag("h3", "How this was made"),
        made(results),
        folded("All settings", *settings(results)),
    ]
    return tag("section", *parts, aria_labelledby=name)


def drawing(results: FigureResults) -> Html:
    return shown(partial(render, results), describe(results))


def shown(drawn: Callable[[str], bytes], description: str) -> Html:
    try:
        return picture(drawn("svg"), description)
    except MissingExtra as missing:
        return tag("p", f"The figure is not shown: {missing}")


def describe(results: FigureResults) -> str:
    """What the figure shows, for those who do not see it."""
    count = len(results.curves)
    if results.figure.name == "table":
        return f"{results.figure.title}. A matrix of {count} final test results; the numbers are in the table below."
    measure = measure_of(results)
    ends = {}
    for label, each in results.curves.items():
        if done := finished(each):
            ends[label] = measure.factor * mean_and_error(final(r, f"test_{measure.name}") for r in done)[0]
    text = f"{results.figure.title}. Training and test {measure.name} over the epochs, {count} curves."
    if ends:
        best, worst = min(ends, key=ends.__getitem__), max(ends, key=ends.__getitem__)
        text += f" Lowest test {measure.name} at the end: {best}, {number(ends[best])} {measure.unit}."
        text += f" Highest: {worst}, {number(ends[worst])} {measure.unit}."
    bad = [f"{label}: {ending(each)}" for label, each in results.curves.items() if ending(each)]
    return " ".join([text, *(f"{each}." for each in bad)])


def final_numbers(results: FigureResults) -> Html:
    measures = [measure for measure in (ERROR, LOSS) if any(has(each, measure) for each in results.curves.values())]
    columns = [(part, measure) for measure in measures for part in ("train", "test")]
    words = {"train": "Training", "test": "Test"}
    heads = [f"{words[part]} {measure.name} ({measure.unit})" for part, measure in columns]
    rows = [
        (
            keep(label),
            ending(each) or "finished",
            *(keep(spread(each, f"{part}_{measure.name}", measure)) for part, measure in columns),
            f"{len(finished(each))} of {len(each)}",
            keep(average(each, "updates")),
            keep(average(each, "seconds")),
        )
        for label, each in results.curves.items()
    ]
    caption = "Mean ± standard error over the runs that finished; updates and seconds are means per run."
    return table(caption, ("Curve", "Outcome", *heads, "Finished", "Updates", "Seconds"), rows)


def has(results: Iterable[Result], measure: Measure) -> bool:
    return any(measure.name in result["chance"] for result in results)


def keep(text: str) -> Html:
    return tag("span", text, class_="keep")


def spread(results: list[Result], column: str, measure: Measure) -> str:
    values = ends(results, column)
    if not values:
        return NONE
    mean, error = mean_and_error(values)
    digits = 2 if measure is ERROR else 3
    return f"{mean:.{digits}f}" + ("" if math.isnan(error) else f" ± {error:.{digits}f}")


def average(results: list[Result], field: str) -> str:
    return f"{mean_and_error(result[field] for result in results)[0]:,.0f}" if results else NONE


def figure_claims(claims: Sequence[Verdict]) -> Html:
    if not claims:
        return tag("p", "No claim is judged by these results.")
    rows = [
        (
            tag("span", claim.text, Html("<br>"), tag("small", claim.paper), class_="wide"),
            outcome(claim),
            measured(claim),
            join([keep(signed(value, digits_of(claim))) for value in claim.values], ", ") or NONE,
        )
        for claim in claims
    ]
    return table(
        "Positive is as claimed.", ("Claim, and where the paper says so", "Outcome", "Measured", "Each seed"), rows
    )


# Origin


def made(results: FigureResults) -> Html:
    runs = results.runs
    scale = SCALES.get(results.scale)
    pairs: list[tuple[str, object]] = [("Scale", f"{results.scale}: {scale.text}" if scale else results.scale)]
    names = ", ".join(results.data)
    pairs.append(("Data", f"{names}: {results.note}" if results.note else names))
    pairs.append(("Command", tag("code", results.command) if results.command else "not recorded"))
    pairs += [
        ("Versions", each) for each in unique(runs, lambda r: ", ".join(f"{k} {v}" for k, v in r["versions"].items()))
    ]
    pairs += [("Threads", ", ".join(unique(runs, lambda r: str(r["threads"]))))]
    messages = [f"{label}: {m}" for label, each in results.curves.items() for m in unique(each, lambda r: r["message"])]
    pairs += [("Message", each) for each in messages]
    return terms(pairs)


def unique(runs: Iterable[Result], of: Callable[[Result], str]) -> list[str]:
    return [each for each in dict.fromkeys(of(run) for run in runs) if each]


def settings(results: FigureResults) -> list[Html]:
    """Those that all curves share, once; then what differs, curve by curve."""
    curves = {label: curve_settings(each) for label, each in results.curves.items() if each}
    names = list(dict.fromkeys(name for each in curves.values() for name in each))
    differing = [name for name in names if len({each.get(name) for each in curves.values()}) > 1]
    shared = [
        (name, value) for each in list(curves.values())[:1] for name, value in each.items() if name not in differing
    ]
    tables = [table("The same for all curves", ("Setting", "Value"), shared)] if shared else []
    if differing:
        rows = [(label, *(each.get(name, NONE) for name in differing)) for label, each in curves.items()]
        tables.append(table("What differs", ("Curve", *differing), rows))
    return tables or [html("None recorded.")]


def curve_settings(results: list[Result]) -> dict[str, str]:
    """Of all seeds of a curve, flat and as text."""
    first = dict(results[0]["settings"])
    norm = {f"norm {name}": value for name, value in first.pop("norm").items()}
    first["seed"] = [result["settings"]["seed"] for result in results]
    more: dict[str, Any] = {"parameters": results[0]["parameters"], "data fingerprint": results[0]["data"]}
    more["runs"] = " ".join(result["id"] for result in results)
    return {
        name: value if isinstance(value, str) else json.dumps(value) for name, value in (first | norm | more).items()
    }
