"""Averaged weights on handwritten digits, trained with one sample per batch: which statistics do they need?

python benchmarks/averaging.py --seeds 3
"""

import argparse
import copy
from itertools import pairwise

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from streamnorm import StreamingNorm, update_stats


def network(depth: int, width: int) -> nn.Module:
    sizes = [64] + [width] * depth
    layers = [part for a, b in pairwise(sizes) for part in (nn.Linear(a, b), StreamingNorm(b), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def accuracy(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    return float((model.eval()(x).argmax(1) == y).float().mean()) * 100


def run(seed: int, args: argparse.Namespace) -> dict[str, float]:
    torch.manual_seed(seed)
    data, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(data))
    x, y = torch.tensor(data, dtype=torch.float32)[order] / 8 - 1, torch.tensor(labels)[order]
    held = slice(1297, None)
    model = network(args.depth, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    averaged = {
        "EMA": AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.98)),
        "SWA": AveragedModel(model),
    }
    batches = [x[i : i + 1] for i in range(args.samples)]
    for epoch in range(args.epochs):
        for i in torch.randperm(args.samples).tolist():
            (nn.functional.cross_entropy(model.train()(x[i : i + 1]), y[i : i + 1]) / 16).backward()
            if i % 16 == 0:
                optimizer.step()
                optimizer.zero_grad()
                if epoch >= args.epochs // 2:
                    averaged["SWA"].update_parameters(model)
                averaged["EMA"].update_parameters(model)
    results = {"last weights": accuracy(model, x[held], y[held])}
    for name, each in averaged.items():
        results[f"{name}, statistics of the first weights"] = accuracy(each, x[held], y[held])
        borrowed = copy.deepcopy(model)
        borrowed.load_state_dict(borrowed.state_dict() | dict(each.module.named_parameters()))
        results[f"{name}, statistics of the last weights"] = accuracy(borrowed, x[held], y[held])
        for passes in (1, 2):
            update_stats(each, batches, passes=passes)
            results[f"{name}, `update_stats`, {passes} pass(es)"] = accuracy(each, x[held], y[held])
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--samples", type=int, default=1297)
    args = parser.parse_args()
    runs = [run(seed, args) for seed in range(args.seeds)]
    print("| weights and statistics | accuracy (%), each seed |\n|---|---|")
    for name in runs[0]:
        print(f"| {name} |", ", ".join(f"{each[name]:.1f}" for each in runs), "|")


if __name__ == "__main__":
    main()
