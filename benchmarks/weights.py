"""What is done to the weights, in a network whose residual branches end in a convolution: centralized, standardized.

    python benchmarks/weights.py --data-dir FOLDER --out benchmarks/results/weights.json    # CIFAR-10
    python benchmarks/weights.py --data digits --size 64        # no download
    python benchmarks/weights.py --table benchmarks/results/weights.json

Trainings of `streamnorm compare`, three seeds, each norm at the better of two rates by the images that are held out.
Accuracy in % on test images, with its standard error.
"""

from argparse import Namespace
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

from tables import accuracies, best, changed_networks, measure_on_images, trained
from torch import nn

from streamnorm.lab import models, peers
from streamnorm.lab.compare import Entry, rate_of
from streamnorm.lab.data import Images

NET = "convolutional-recurrent"
# Samples per batch, with one batch per update, and rungs of the ladder of rates: -6 is 0.001, -5 is 0.003.
CASES = ((1, (-6, -5)), (2, (-5, -4)))


class Arm(NamedTuple):
    norm: str
    centralized: bool = False
    standardized: bool = False
    kept_scale: bool = False


ARMS = {
    "weights as they are": {"streaming": Arm("streaming"), "group norm": Arm("group norm")},
    "centralized": {"streaming": Arm("streaming", centralized=True), "MABN": Arm("MABN")},
    "standardized to variance 1": {
        "streaming": Arm("streaming", standardized=True),
        "group norm": Arm("group norm", standardized=True),
    },
    "standardized, scale kept": {
        "streaming": Arm("streaming", standardized=True, kept_scale=True),
        "group norm": Arm("group norm", standardized=True, kept_scale=True),
    },
}


def measured(data: Images, chosen: Namespace) -> dict[str, Any]:
    rows = []
    for weights, arms in ARMS.items():
        for norm, arm in arms.items():
            row: dict[str, Any] = {"weights": weights, "norm": norm, "cells": []}
            for samples, rungs in CASES:
                row["cells"].append([rate_scored(data, arm, samples, rung, chosen) for rung in rungs])
            rows.append(row)
            print(line(row), flush=True)
    return {"data": data.name, "note": data.note, "sizes": [samples for samples, _ in CASES], "rows": rows}


def rate_scored(data: Images, arm: Arm, samples: int, rung: int, chosen: Namespace) -> dict[str, Any]:
    runs = [Entry(NET, arm.norm, samples, 1).run(rung, seed, chosen.size, data.name) for seed in range(chosen.seeds)]
    runs = [replace(run, standardized=arm.standardized, kept_scale=arm.kept_scale) for run in runs]
    with changed_networks(centralize) if arm.centralized else nullcontext():
        return {"rate": rate_of(rung), "scores": [accuracies(trained(run, data)) for run in runs]}


def centralize(model: nn.Module) -> None:
    peers.centralize(model, skip=models.HEAD)


def line(row: dict[str, Any]) -> str:
    return f"| {row['weights']} | {row['norm']} | " + " | ".join(map(best, row["cells"])) + " |"


def table(result: dict[str, Any]) -> str:
    head = f"| {NET} | norm | {' | '.join(f'{size}x1' for size in result['sizes'])} |"
    return "\n".join([head, f"|{'---|' * (2 + len(result['sizes']))}", *map(line, result["rows"])])


if __name__ == "__main__":
    measure_on_images(__doc__, measured, table, seeds=3)
