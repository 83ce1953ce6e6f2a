"""What a batch's own gradient is worth in a window of several batches: the paper's rule with three beta.

    python benchmarks/own_gradient.py --data-dir FOLDER --out benchmarks/results/own_gradient.json    # CIFAR-10
    python benchmarks/own_gradient.py --data digits --size 64        # no download
    python benchmarks/own_gradient.py --table benchmarks/results/own_gradient.json

Trainings of `streamnorm compare` at one rate and one seed, without the guard. Accuracy in %: on training images that
are held out, and on test images.
"""

from argparse import Namespace
from dataclasses import replace
from typing import Any

from tables import accuracies, measure_on_images, trained

from streamnorm.lab.compare import Entry, rate_of
from streamnorm.lab.data import Images

BETAS = ((0.7, 0.3, 0.0), (0.7, 0.15, 0.15), (0.7, 0.0, 0.3))
# Net, samples per batch, batches per update, and a rung of the ladder of rates: -3 is 0.03, -4 is 0.01.
CASES = (
    ("convolutional-recurrent", 1, 32, -3),
    ("convolutional-recurrent", 2, 16, -3),
    ("resnet-8", 1, 32, -3),
    ("resnet-8", 2, 16, -3),
    ("fully-connected", 2, 16, -4),
    ("recurrent", 1, 32, -4),
)


def measured(data: Images, chosen: Namespace) -> dict[str, Any]:
    rows = []
    for net, samples, batches, rung in CASES:
        entry = Entry(net, "streaming", samples, batches)
        row = {"net": net, "samples": samples, "batches": batches, "rate": rate_of(rung)}
        row["accuracies"] = [scores(data, entry, rung, beta, chosen.size) for beta in BETAS]
        rows.append(row)
        print(line(row), flush=True)
    return {"data": data.name, "note": data.note, "betas": BETAS, "rows": rows}


def scores(data: Images, entry: Entry, rung: int, beta: tuple[float, float, float], size: int | None) -> list[float]:
    run = entry.run(rung, 0, size, data.name)
    return accuracies(trained(replace(run, norm=replace(run.norm, beta=beta, guard=False)), data))


def line(row: dict[str, Any]) -> str:
    cells = ["{:.1f}, {:.1f}".format(*found) for found in row["accuracies"]]
    return f"| {row['net']}, {row['samples']}x{row['batches']} @ {row['rate']:g} | " + " | ".join(cells) + " |"


def table(result: dict[str, Any]) -> str:
    betas = [f"({', '.join(f'{part:g}' for part in beta)})" for beta in result["betas"]]
    return "\n".join([f"| beta | {' | '.join(betas)} |\n|{'---|' * (1 + len(betas))}", *map(line, result["rows"])])


if __name__ == "__main__":
    measure_on_images(__doc__, measured, table)
