"""What the gains of norms begin with, in a recurrent network: a step adds up two norms, and squashes the sum.

    python benchmarks/gains.py --data-dir FOLDER --out benchmarks/results/gains.json    # CIFAR-10
    python benchmarks/gains.py --data digits --size 64        # no download
    python benchmarks/gains.py --table benchmarks/results/gains.json

Trainings of `streamnorm compare`, three seeds, each norm with each gain at the better of two rates by the images that
are held out. Accuracy in % on test images, with its standard error.
"""

from argparse import Namespace
from dataclasses import replace
from typing import Any

from tables import accuracies, best, measure_on_images, trained

from streamnorm.lab.compare import Entry, rate_of, size_name
from streamnorm.lab.data import Images

NET, GAINS = "recurrent", (1.0, 0.5)
# Samples per batch, batches per update, and rungs of the ladder of rates: -7 is 0.0003, -6 is 0.001, -4 is 0.01.
CASES = {(1, 1): (-7, -6), (2, 1): (-6, -5), (1, 32): (-4, -3)}
NORMS = {
    "layer norm": tuple(CASES),
    "Online Norm": ((1, 1), (2, 1)),  # at 1x32 it diverges: see the comparison
    "streaming": tuple(CASES),
}


def measured(data: Images, chosen: Namespace) -> dict[str, Any]:
    rows = []
    for norm, sizes in NORMS.items():
        for at in sizes:
            entry, row = Entry(NET, norm, *at).trained, {"norm": norm, "size": at, "cells": []}
            for gain in GAINS:
                row["cells"].append([rate_scored(data, entry, gain, rung, chosen) for rung in CASES[at]])
            rows.append(row)
            print(line(row), flush=True)
    return {"data": data.name, "note": data.note, "gains": GAINS, "rows": rows}


def rate_scored(data: Images, entry: Entry, gain: float, rung: int, chosen: Namespace) -> dict[str, Any]:
    runs = [replace(entry.run(rung, seed, chosen.size, data.name), gain=gain) for seed in range(chosen.seeds)]
    return {"rate": rate_of(rung), "scores": [accuracies(trained(run, data)) for run in runs]}


def line(row: dict[str, Any]) -> str:
    return f"| {size_name(row['size'])} | {row['norm']} | " + " | ".join(map(best, row["cells"])) + " |"


def table(result: dict[str, Any]) -> str:
    gains = [f"gain {gain:g}" for gain in result["gains"]]
    head = f"| {NET} | norm | {' | '.join(gains)} |\n|{'---|' * (2 + len(gains))}"
    return "\n".join([head, *map(line, result["rows"])])


if __name__ == "__main__":
    measure_on_images(__doc__, measured, table, seeds=3)
