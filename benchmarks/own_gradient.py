"""What a batch's own gradient is worth in a window of several batches: the paper's rule with three beta.

    python benchmarks/own_gradient.py --data-dir FOLDER --out benchmarks/results/own_gradient.json    # CIFAR-10
    python benchmarks/own_gradient.py --data digits --size 64        # no download
    python benchmarks/own_gradient.py --table benchmarks/results/own_gradient.json

Trainings of `streamnorm compare` at one rate and one seed, without the guard. Accuracy in %: on training images that
are held out, and on test images.
"""

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tables import measure_on_images

from streamnorm.lab.compare import Entry, rate_of
from streamnorm.lab.data import Images
from streamnorm.lab.train import train

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


def measured(data: Images, size: int | None) -> dict[str, Any]:
    rows = []
    for net, samples, batches, rung in CASES:
        entry = Entry(net, "streaming", samples, batches)
        row = {"net": net, "samples": samples, "batches": batches, "rate": rate_of(rung)}
        row["accuracies"] = [scores(data, entry, rung, beta, size) for beta in BETAS]
        rows.append(row)
        print(line(row), flush=True)
    return {"data": data.name, "note": data.note, "betas": BETAS, "rows": rows}


def scores(data: Images, entry: Entry, rung: int, beta: tuple[float, float, float], size: int | None) -> list[float]:
    run = entry.run(rung, 0, size, data.name)
    with TemporaryDirectory() as folder:
        result = train(replace(run, norm=replace(run.norm, beta=beta, guard=False)), data, Path(folder))
    return [100 - 100 * float(result["curves"][part][-1]) for part in ("valid_error", "test_error")]


def line(row: dict[str, Any]) -> str:
    cells = ["{:.1f}, {:.1f}".format(*found) for found in row["accuracies"]]
    return f"| {row['net']}, {row['samples']}x{row['batches']} @ {row['rate']:g} | " + " | ".join(cells) + " |"


def table(result: dict[str, Any]) -> str:
    betas = [f"({', '.join(f'{part:g}' for part in beta)})" for beta in result["betas"]]
    return "\n".join([f"| beta | {' | '.join(betas)} |\n|{'---|' * (1 + len(betas))}", *map(line, result["rows"])])


if __name__ == "__main__":
    measure_on_images(__doc__, measured, table)
