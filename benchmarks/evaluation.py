"""What a memory for evaluation is worth: one training of a ResNet-8, tested again and again as it goes on.

    python benchmarks/evaluation.py --data-dir FOLDER --out benchmarks/results/evaluation.json    # CIFAR-10
    python benchmarks/evaluation.py --data digits        # no download
    python benchmarks/evaluation.py --table benchmarks/results/evaluation.json

Training does not depend on `eval_memory`, so the trainings of a row are one and the same, and only the tests differ:
ten of them in the second half of a pass over the images, at a constant rate. Accuracy in %: the average of the ten, and
after it their standard deviation. SGD with momentum 0.9.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
import torch.nn.functional as F
from tables import measure_or_show
from torch import Tensor, nn

from streamnorm.lab.data import Images, load_images
from streamnorm.lab.models import build
from streamnorm.lab.runs import Norm, Run

MEMORIES = (0, 16, 64, 256)
# Samples per batch, batches per update, learning rate.
SIZES = ((1, 1, 0.001), (2, 1, 0.002), (1, 32, 0.03), (32, 1, 0.03))


def halved(images: Tensor, data: Images) -> Tensor:
    """Standardized, at 16 x 16."""
    mean, std = (part.reshape(3, 1, 1) for part in (data.mean, data.std))
    return F.avg_pool2d((images.float() - mean) / std, 2)


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    model.eval()
    with torch.no_grad():
        right = sum(int((model(a).argmax(1) == b).sum()) for a, b in zip(x.split(500), y.split(500), strict=True))
    model.train()
    return 100 * right / len(y)


def tests(
    data: Images, samples: int, batches: int, rate: float, norm: Norm, ws: bool, size: int, looks: int
) -> Iterator[float]:
    """So many accuracies of one training."""
    torch.manual_seed(0)
    model = build(Run("resnet", norm, width=16, side=16, standardized=ws))
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    order = torch.randperm(len(data.train))[:size]
    x, y = halved(data.train[order], data), data.train_labels[order]
    tested = halved(data.test[:2000], data), data.test_labels[:2000]
    starts = range(0, size - samples + 1, samples)
    times = {len(starts) * (looks + i + 1) // (2 * looks) - 1 for i in range(looks)}
    for i, start in enumerate(starts):
        (F.cross_entropy(model(x[start : start + samples]), y[start : start + samples]) / batches).backward()
        if i in times:
            yield accuracy(model, *tested)
        if (i + 1) % batches == 0:
            optimizer.step()
            optimizer.zero_grad()


def measured(data: Images, size: int, looks: int) -> dict[str, Any]:
    rows = []
    for samples, batches, rate in SIZES:
        for ws in (False, True):
            found = []
            for memory in MEMORIES:
                norm = Norm("streaming", center="running", guard=True, eval_memory=memory)
                found.append(list(tests(data, samples, batches, rate, norm, ws, size, looks)))
            row = {"samples": samples, "batches": batches, "rate": rate, "ws": ws, "accuracies": found}
            rows.append(row)
            print(line(row), flush=True)
    return {"data": data.name, "note": data.note, "size": size, "memories": list(MEMORIES), "rows": rows}


def line(row: dict[str, Any]) -> str:
    cells = [f"{fmean(found):.1f} ({stdev(found):.1f})" for found in row["accuracies"]]
    name = f"{row['samples']} x {row['batches']}" + (" + WS" if row["ws"] else "")
    return f"| {name} | " + " | ".join(cells) + " |"


def table(result: dict[str, Any]) -> str:
    memories = ["0, the latest" if memory == 0 else f"{memory} samples" for memory in result["memories"]]
    head = f"| samples x batches | {' | '.join(memories)} |\n|{'---|' * (1 + len(memories))}"
    return "\n".join([head, *map(line, result["rows"])])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", choices=("cifar10", "digits"), default="cifar10")
    parser.add_argument("--data-dir", type=Path, help="where CIFAR-10 is")
    parser.add_argument("--size", type=int, default=6000, help="images that are trained on")
    parser.add_argument("--looks", type=int, default=10, help="tests of a training")
    measure_or_show(
        parser, lambda chosen: measured(load_images(chosen.data, chosen.data_dir), chosen.size, chosen.looks), table
    )


if __name__ == "__main__":
    main()
