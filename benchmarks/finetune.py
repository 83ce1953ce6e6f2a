"""A network with batch norms, converted and trained on with one image per update: what evaluation should average over.

    python benchmarks/finetune.py --out benchmarks/results/finetune.json    # scikit-learn's digits, no download
    python benchmarks/finetune.py --table benchmarks/results/finetune.json

Five passes with batch norms and 32 images per update, `convert`, then 500 updates by one image each. One training for
each seed, tested three ways. Accuracy on test images in %: the mean of the seeds, and the worst of them.
"""

import argparse
from statistics import fmean
from typing import Any

import torch
from nets import NetB
from tables import measure_or_show
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, cross_entropy

from streamnorm import StreamingNorm, convert, update_stats
from streamnorm.lab.data import load_images

PASSES, UPDATES = 5, 500
ARMS = ("the latest s_hat", "64 samples", "after update_stats")


def measured(seeds: int) -> dict[str, Any]:
    data = load_images("digits")
    train, test = (shrunk(data.train), data.train_labels), (shrunk(data.test), data.test_labels)
    return {"rows": [{"seed": seed, "accuracies": trained(seed, train, test)} for seed in range(seeds)]}


def shrunk(images: Tensor) -> Tensor:
    """To 16 x 16, about 0."""
    return avg_pool2d(images.float() / 255, 2) * 2 - 1


def trained(seed: int, train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor]) -> list[float]:
    torch.manual_seed(seed)
    images, labels = train
    model = NetB(nn.BatchNorm2d, width=16)
    order = torch.cat([torch.randperm(len(images)) for _ in range(PASSES)])
    update(model, images, labels, order.split(32), 0.03)
    convert(model, report=lambda line: None)
    update(model, images, labels, torch.randperm(len(images))[:UPDATES].split(1), 0.0003)
    norms = [module for module in model.modules() if isinstance(module, StreamingNorm)]
    memory = norms[0].eval_memory
    found = []
    for eval_memory in (0.0, memory):
        for norm in norms:
            norm.eval_memory = eval_memory
        found.append(accuracy(model, *test))
    update_stats(model, images.split(32))
    return [*found, accuracy(model, *test)]


def update(model: nn.Module, images: Tensor, labels: Tensor, batches: Any, rate: float) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    model.train()
    for batch in batches:
        optimizer.zero_grad()
        cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    model.eval()
    return 100 * (model(images).argmax(1) == labels).float().mean().item()


def table(result: dict[str, Any]) -> str:
    columns = list(zip(*(row["accuracies"] for row in result["rows"]), strict=True))
    cells = [f"{fmean(each):.1f}, {min(each):.1f}" for each in columns]
    head = f"| tested by | {' | '.join(ARMS)} |\n|{'---|' * (1 + len(ARMS))}"
    return f"{head}\n| {len(result['rows'])} seeds: mean, worst | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=6)
    measure_or_show(parser, lambda chosen: measured(chosen.seeds), table)


if __name__ == "__main__":
    main()
