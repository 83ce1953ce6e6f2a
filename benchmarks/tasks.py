"""A long stream of changing tasks: how well a network predicts while it learns, one sample per update.

    python benchmarks/tasks.py --out benchmarks/results/tasks.json    # 15 minutes on one core; scikit-learn's digits
    python benchmarks/tasks.py --table benchmarks/results/tasks.json

Twenty tasks of 1,000 digits each. Every task permutes the labels, or the pixels, anew, and the network is never told.
Each digit is first predicted, then learned from. 64-64-64-10, plain SGD at a constant rate, the best of four rates for
each norm. Numbers are accuracies in % over all tasks, then over the last five: a norm that wears out falls.
"""

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from tables import measure_or_show
from torch import Tensor, nn

from streamnorm import SampleNorm, StreamingNorm
from streamnorm.lab.results import mean_and_error

NORMS = {"layer norm": SampleNorm, "streaming": StreamingNorm}
KINDS = {"labels": 10, "pixels": 64}
RATES = (0.003, 0.01, 0.03, 0.1)


def digits() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    data = load_digits()
    x = torch.tensor(data.data, dtype=torch.float32) / 16
    return (x - x.mean(0)) / (x.std(0) + 0.1), torch.tensor(data.target)


def online(norm: Any, kind: str, rate: float, seed: int, tasks: int, samples: int) -> list[float]:
    """The accuracy in each task, of predictions made before the label was shown."""
    torch.manual_seed(seed)
    sizes = [(64, 64), (64, 64)]
    layers = [layer for a, b in sizes for layer in (nn.Linear(a, b, bias=False), norm(b), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    (images, labels), accuracies = digits(), []
    for _ in range(tasks):
        permutation, right = torch.randperm(KINDS[kind]), 0
        for i in torch.randint(len(images), (samples,)).tolist():
            x, y = images[i : i + 1], labels[i : i + 1]
            x, y = (x, permutation[y]) if kind == "labels" else (x[:, permutation], y)
            logits = model(x)
            right += int(logits.argmax() == y)
            optimizer.zero_grad()
            F.cross_entropy(logits, y).backward()
            optimizer.step()
        accuracies.append(100 * right / samples)
    return accuracies


def measured(seeds: int, tasks: int, samples: int) -> dict[str, Any]:
    rows = []
    for kind in KINDS:
        for name, norm in NORMS.items():
            for rate in RATES:
                found = [online(norm, kind, rate, seed, tasks, samples) for seed in range(seeds)]
                rows.append({"kind": kind, "norm": name, "rate": rate, "accuracies": found})
                print(kind, name, rate, *(f"{sum(each) / tasks:.1f}" for each in found), flush=True)
    return {"tasks": tasks, "samples": samples, "seeds": seeds, "torch": torch.__version__, "rows": rows}


def table(result: dict[str, Any]) -> str:
    lines = ["| permuted | norm | all tasks | the last five | rate | at each rate |", "|---|---|---|---|---|---|"]
    for kind in KINDS:
        for norm in NORMS:
            rows = [row for row in result["rows"] if (row["kind"], row["norm"]) == (kind, norm)]
            whole = {row["rate"]: mean_and_error(sum(each) / len(each) for each in row["accuracies"]) for row in rows}
            best = max(whole, key=lambda rate: whole[rate][0])
            last = next(row["accuracies"] for row in rows if row["rate"] == best)
            late = mean_and_error(sum(each[-5:]) / len(each[-5:]) for each in last)
            cells = [f"{mean:.1f} ± {error:.1f}" for mean, error in (whole[best], late)]
            each = ", ".join(f"{mean:.1f}" for mean, _ in whole.values())
            lines.append(f"| {kind} | {norm} | {cells[0]} | {cells[1]} | {best:g} | {each} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tasks", type=int, default=20)
    parser.add_argument("--samples", type=int, default=1000, help="of a task")
    measure_or_show(parser, lambda chosen: measured(chosen.seeds, chosen.tasks, chosen.samples), table)


if __name__ == "__main__":
    main()
