"""The command: everything in its order, said line by line, and kept as JSON."""

import json
import sys
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from ..devices import find
from ..store import check_writable, write_text
from .cases import DECLINED, OK, Row, agree, agree_on_sequences
from .system import about, lines
from .times import Time, measure

Report = dict[str, Any]


def check(device: str, *, times: bool, rounds: int, compiling: float, out: Path | None) -> bool:
    """Whether all backends agree on the device; the report goes to `out`, if it is given."""
    place = find(device)
    if out is not None:
        check_writable(out.parent)
    told = about()
    _say(lines(told))
    print(f"\nOn {place}, against plain torch in float64: the largest difference, in parts of the largest value")
    rows = []
    for row in chain(agree(place), agree_on_sequences(place)):
        rows.append(row)
        if row.outcome != DECLINED:
            print(line_of(row), flush=True)
    _say(declined(rows))
    good = all(row.is_good for row in rows)
    bad = sum(not row.is_good for row in rows)
    print(f"{'all agree' if good else f'{bad} do not agree'}\n")
    measured = _measured(place, rounds, compiling) if times else []
    if out is not None:
        content: Report = {"check": 1, "device": str(place), "good": good, "about": told}
        content |= {"agreement": [row._asdict() for row in rows], "times": [each._asdict() for each in measured]}
        write_text(out, json.dumps(content, indent=1, allow_nan=False) + "\n")
        print(out)
    return good


def _measured(device: torch.device, rounds: int, compiling: float) -> list[Time]:
    print(f"Forward + backward on {device}, or a training step of a small convolutional net; ours / theirs")
    print(f"{'':15} {'':8} {'':12} {'ours':>9} {'theirs':>9} {'ratio':>6}")
    found = []
    for each in measure(device, rounds, compiling, lambda line: print(line, file=sys.stderr, flush=True)):
        found.append(each)
        print(time_of(each), flush=True)
    return found


def line_of(row: Row) -> str:
    """Of a case that was tried."""
    head = f"{row.backend:10} {row.case:20} {row.outcome:8}"
    if row.words:
        return f"{head} {row.words}"
    text = f"{head} {row.difference:.1e} of {row.tolerance:.0e}"
    if row.outcome != OK:
        text += f", {row.where}" if row.where else ""
    return text if row.repeats else f"{text}; the same input gives other bits the second time"


def declined(rows: Iterable[Row]) -> list[str]:
    """The cases that backends leave to others, by their reasons."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.outcome == DECLINED:
            reasons.setdefault((row.backend, row.words), []).append(row.case)
    return [f"{name} leaves to others: {', '.join(cases)} ({words})" for (name, words), cases in reasons.items()]


def time_of(each: Time) -> str:
    head = f"{each.case:15} {'compiled' if each.compiled else 'eager':8} {each.against:12}"
    if each.words:
        return f"{head} {each.words}"
    return f"{head} {each.ours:6.2f} ms {each.theirs:6.2f} ms {each.ratio:6.2f}"


def _say(said: Iterable[str]) -> None:
    for line in said:
        print(line, flush=True)
