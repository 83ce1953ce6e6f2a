"""The ResNet-8 of the comparison without the guard and without a memory for evaluation: how the layer was before them.

    python benchmarks/without_guard.py --data-dir FOLDER --out benchmarks/results/without_guard.json    # CIFAR-10
    python benchmarks/without_guard.py --data digits --size 64        # no download
    python benchmarks/without_guard.py --table benchmarks/results/without_guard.json

Trainings of `streamnorm compare`. The first seed has three rates, of which images that are held out choose one for all
three seeds. Accuracy on test images in % with its standard error @ learning rate.
"""

from argparse import Namespace
from dataclasses import replace
from typing import Any

from tables import accuracies, measure_on_images, trained

from streamnorm.lab.compare import Entry, rate_of
from streamnorm.lab.data import Images
from streamnorm.lab.results import mean_and_error

NET, SEEDS = "resnet-8", 3
SIZES = ((2, 1),)
NORMS = ("streaming", "streaming + WS")


def measured(data: Images, chosen: Namespace) -> dict[str, Any]:
    rows = []
    for samples, batches in SIZES:
        row: dict[str, Any] = {"samples": samples, "batches": batches, "norms": {}}
        for norm in NORMS:
            entry = Entry(NET, norm, samples, batches)
            rungs = range(entry.start - 1, entry.start + 2)
            first = {rung: scores(data, entry, rung, 0, chosen.size) for rung in rungs}
            best = max(rungs, key=lambda rung: first[rung][0])
            others = [scores(data, entry, best, seed, chosen.size) for seed in range(1, SEEDS)]
            row["norms"][norm] = {"rate": rate_of(best), "accuracies": [first[best], *others]}
        rows.append(row)
        print(line(row), flush=True)
    return {"data": data.name, "note": data.note, "rows": rows}


def scores(data: Images, entry: Entry, rung: int, seed: int, size: int | None) -> list[float]:
    """On held-out images, and on test images."""
    run = entry.run(rung, seed, size, data.name)
    return accuracies(trained(replace(run, norm=replace(run.norm, guard=False, eval_memory=0.0)), data))


def line(row: dict[str, Any]) -> str:
    cells = []
    for found in row["norms"].values():
        mean, error = mean_and_error(test for _, test in found["accuracies"])
        cells.append(f"{mean:.1f} ± {error:.1f} @ {found['rate']:g}")
    return f"| {row['samples']}x{row['batches']} | " + " | ".join(cells) + " |"


def table(result: dict[str, Any]) -> str:
    norms = list(result["rows"][0]["norms"])
    head = f"| {NET}, without guard | {' | '.join(norms)} |\n|{'---|' * (1 + len(norms))}"
    return "\n".join([head, *map(line, result["rows"])])


if __name__ == "__main__":
    measure_on_images(__doc__, measured, table)
