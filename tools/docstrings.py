"""Docstrings as the reference shows them: whole, also where one says "as in `RNN`".

A docstring has the sections Args (or Attributes), Shape and Example. An argument that is described elsewhere gets the
description from there, so that the reference has it in place and the source has it once.
"""

import re
from collections.abc import Callable
from textwrap import dedent, indent

SECTION = re.compile(r"^(Args|Attributes|Shape|Returns|Example):(.*)\n((?:(?: .*)?\n)*)", re.MULTILINE)
ELSEWHERE = re.compile(r"(?:as in|see) `(\w+)`")
ALL, FIRST = "all settings", "num_features"  # "num_features and all settings: as in `StreamingNorm`"
Lookup = Callable[[str], str]  # the docstring of a public name


def sections(docstring: str) -> dict[str, str]:
    """The text of each section by its name, without what comes before the first."""
    return {
        name: (rest.strip() + "\n" + dedent(body)).strip() for name, rest, body in SECTION.findall(docstring + "\n")
    }


def arguments(docstring: str, lookup: Lookup) -> dict[str, str]:
    """The description of each argument, or attribute, by its name."""
    found = sections(docstring)
    described: dict[str, str] = {}
    for entry in re.split(r"\n(?=\S)", found.get("Args", found.get("Attributes", ""))):
        names, _, text = " ".join(entry.split()).partition(": ")
        place = ELSEWHERE.match(text)
        there = arguments(lookup(place[1]), lookup) if place else {}
        if names.endswith(ALL):
            described |= {name: words for name, words in there.items() if name != FIRST or FIRST in names}
            continue
        for name in names.split(", ") if text else ():
            described[name] = there[name] if place else text
    return described


def shape(docstring: str, lookup: Lookup) -> str:
    """The list of shapes."""
    text = sections(docstring).get("Shape", "")
    place = ELSEWHERE.match(text)
    if place is None:
        return text
    more = " ".join(text[place.end() :].strip("; .").split())
    return "\n".join([shape(lookup(place[1]), lookup), *([f"- {more}."] if more else [])])


def completed(docstring: str, lookup: Lookup) -> str:
    """The docstring in the form that the reference is made of."""
    docstring += "\n"
    found = sections(docstring)

    def written(match: re.Match[str]) -> str:
        name = match[1]
        if ALL in found[name].partition(":")[0]:
            return f"**Arguments:** {found[name]}\n\n"
        if name in ("Args", "Attributes"):
            lines = "\n".join(f"{each}: {text}" for each, text in arguments(docstring, lookup).items())
            return f"{name}:\n{indent(lines, '    ')}\n\n"
        if name == "Shape":
            return f"**Shape:**\n\n{shape(docstring, lookup)}\n\n"
        if name == "Example":
            return f"Examples:\n{indent(found[name], '    ')}\n\n"
        return match[0]

    return SECTION.sub(written, docstring).strip()
