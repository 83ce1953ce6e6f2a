"""Where MABN is ahead: how much of its lead is that it centralizes weights, which any norm can be given.

    python benchmarks/centralized.py --data-dir FOLDER --out benchmarks/results/centralized.json    # CIFAR-10
    python benchmarks/centralized.py --data digits --size 64        # no download
    python benchmarks/centralized.py --table benchmarks/results/centralized.json

Trainings of `streamnorm compare`, three seeds, at the rate that its held-out images chose for both norms. Accuracy in %
with its standard error: on training images that are held out, and on test images.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from tables import measure_on_images
from torch import nn

from streamnorm.lab import models, peers
from streamnorm.lab.compare import Entry, rate_of
from streamnorm.lab.data import Images
from streamnorm.lab.results import mean_and_error
from streamnorm.lab.train import train

SEEDS = 3
# Samples per batch, with one batch per update, and a rung of the ladder of rates: -6 is 0.001, -5 is 0.003.
CASES = ((1, -6), (2, -5))
# The norm, settings of it, and whether the weights before it are centralized, as MABN's are by itself.
ARMS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "streaming": ("streaming", {}, False),
    'streaming, center="mean"': ("streaming", {"center": "mean"}, False),
    "streaming, centralized weights": ("streaming", {}, True),
    "MABN": ("MABN", {}, False),
}


def measured(data: Images, size: int | None) -> dict[str, Any]:
    rows = []
    for samples, rung in CASES:
        row: dict[str, Any] = {"samples": samples, "rate": rate_of(rung), "accuracies": {}}
        for arm in ARMS:
            row["accuracies"][arm] = [scores(data, arm, samples, rung, seed, size) for seed in range(SEEDS)]
        rows.append(row)
        print(line(row), flush=True)
    return {"data": data.name, "note": data.note, "rows": rows}


def scores(data: Images, arm: str, samples: int, rung: int, seed: int, size: int | None) -> list[float]:
    norm, settings, centralized = ARMS[arm]
    run = Entry("convolutional-recurrent", norm, samples, 1).run(rung, seed, size, data.name)
    with TemporaryDirectory() as folder, patch.object(models, "_net", built(models._net, centralized)):
        result = train(replace(run, norm=replace(run.norm, **settings)), data, Path(folder))
    return [100 - 100 * float(result["curves"][part][-1]) for part in ("valid_error", "test_error")]


def built(make: Callable[..., nn.Module], centralized: bool) -> Callable[..., nn.Module]:
    def net(*given: Any) -> nn.Module:
        model = make(*given)
        if centralized:
            peers.centralize(model, skip=models.HEAD)
        return model

    return net


def line(row: dict[str, Any]) -> str:
    cells = []
    for found in row["accuracies"].values():
        cells.append(", ".join("{:.1f} ± {:.1f}".format(*mean_and_error(part)) for part in zip(*found, strict=True)))
    return f"| {row['samples']}x1 @ {row['rate']:g} | " + " | ".join(cells) + " |"


def table(result: dict[str, Any]) -> str:
    arms = list(result["rows"][0]["accuracies"])
    head = f"| convolutional-recurrent | {' | '.join(arms)} |\n|{'---|' * (1 + len(arms))}"
    return "\n".join([head, *map(line, result["rows"])])


if __name__ == "__main__":
    measure_on_images(__doc__, measured, table)
