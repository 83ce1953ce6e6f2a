"""Normalizations side by side on scikit-learn's bundled digits, at 1, 2 and 32 samples per batch.

    make demo

Every run updates the weights once per 32 samples (decoupled accumulation and update), so the columns differ only in how
many samples the norm sees at once. Accuracy is on held-out digits, in evaluation mode: mean and standard deviation
over seeds.
"""

import argparse
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import pairwise, product
from multiprocessing import get_context
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from streamnorm import DecoupledUpdate, StreamingNorm

try:
    import matplotlib
    from sklearn.datasets import load_digits
    from tqdm import tqdm
except ImportError as missing:
    sys.exit(f"{missing}: the demo needs its extras, pip install 'streamnorm[lab]'")

NORMS = ["none", "batch norm", "layer norm", "streaming norm"]
NETS = ["fully-connected", "convolutional"]
BATCHES = [1, 2, 32]
PER_UPDATE = 32


def norm(name, channels, convolutional):
    return {
        "none": nn.Identity,
        "batch norm": lambda: (nn.BatchNorm2d if convolutional else nn.BatchNorm1d)(channels),
        "layer norm": lambda: nn.GroupNorm(1, channels),  # over channels and space; on vectors it is nn.LayerNorm
        "streaming norm": lambda: StreamingNorm(channels),
    }[name]()


def network(net, name):
    if net == "fully-connected":
        sizes = [64, 64, 64]
        hidden = [(nn.Linear(a, b), norm(name, b, False), nn.ReLU()) for a, b in pairwise(sizes)]
        return nn.Sequential(nn.Flatten(), *(layer for block in hidden for layer in block), nn.Linear(64, 10))
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), norm(name, 16, True), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, stride=2, padding=1), norm(name, 32, True), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(32 * 4 * 4, 10)),
    )


def load():
    digits = load_digits()
    x = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1)
    x, y = (x - x.mean()) / x.std(), torch.tensor(digits.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    return x[order], y[order]


def run(net, name, batch, seed, epochs, limit):
    """Train once; returns the test accuracy, or the reason why it could not run."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    x, y = load()
    test_x, test_y, x, y = x[1437:], y[1437:], x[:1437][:limit], y[:1437][:limit]
    model = network(net, name)
    optimizer = DecoupledUpdate(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), PER_UPDATE // batch)
    try:
        for _ in range(epochs):
            order = torch.randperm(len(x))
            for i in range(0, len(x) - len(x) % PER_UPDATE, batch):
                chosen = order[i : i + batch]
                optimizer.zero_grad()
                F.cross_entropy(model(x[chosen]), y[chosen]).backward()
                optimizer.step()
    except ValueError as refused:
        return str(refused).split(", got")[0]
    with torch.no_grad():
        return 100 * float((model.eval()(test_x).argmax(1) == test_y).float().mean())


def cell(outcomes):
    accuracies = [value for value in outcomes if isinstance(value, float)]
    if len(accuracies) < len(outcomes):
        return "cannot run"
    spread = statistics.stdev(accuracies) if len(accuracies) > 1 else 0.0
    return f"{statistics.mean(accuracies):.1f} ± {spread:.1f}"


def table(results):
    print(f"\nTest accuracy in percent. {'Samples per batch:':>28}" + "".join(f"{b:>15}" for b in BATCHES))
    for net in NETS:
        print(net)
        for name in NORMS:
            cells = (cell(results[net, name, b]) for b in BATCHES)
            print(f"  {name:<52}" + "".join(f"{c:>15}" for c in cells))
    for (net, name, batch), outcomes in results.items():
        for reason in {value for value in outcomes if isinstance(value, str)}:
            print(f"\n{net}, {name}, {batch} per batch cannot run: {reason}")


def draw(results, path):
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
    for panel, net in zip(panels, NETS, strict=True):
        for shift, (name, marker) in enumerate(zip(NORMS, "xosD", strict=True)):
            runs = {b: [v for v in results[net, name, b] if isinstance(v, float)] for b in BATCHES}
            places = [i for i, b in enumerate(BATCHES) if runs[b]]
            means = [statistics.mean(runs[BATCHES[i]]) for i in places]
            low = [m - min(runs[BATCHES[i]]) for i, m in zip(places, means, strict=True)]
            high = [max(runs[BATCHES[i]]) - m for i, m in zip(places, means, strict=True)]
            beside = [i + 0.06 * (shift - 1.5) for i in places]
            panel.errorbar(beside, means, yerr=[low, high], marker=marker, capsize=3, label=name)
            for i in set(range(len(BATCHES))) - set(places):
                panel.annotate(f"{name} cannot run", (i, 0.05), xycoords=("data", "axes fraction"), rotation=90)
        panel.set(title=net, xlabel="samples per batch", xticks=range(len(BATCHES)), xticklabels=BATCHES)
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("test accuracy, % (mean and range)")
    panels[1].legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    print(f"\nfigure: {path}")


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--epochs", type=int, default=1)
    options.add_argument("--limit", type=int, default=1437, help="training digits to use")
    options.add_argument("--out", type=Path, default=Path("out/digits.png"))
    chosen = options.parse_args()
    results = {key: [] for key in product(NETS, NORMS, BATCHES)}
    start = time.perf_counter()
    with ProcessPoolExecutor(max_workers=2, mp_context=get_context("spawn")) as pool:
        jobs = {
            pool.submit(run, *key, seed, chosen.epochs, chosen.limit): key
            for key in sorted(results, key=lambda key: key[-1])  # the slow ones, one sample per batch, first
            for seed in range(chosen.seeds)
        }
        for job in tqdm(as_completed(jobs), total=len(jobs), desc="training", unit="run"):
            results[jobs[job]].append(job.result())
    table(results)
    draw(results, chosen.out)
    print(f"{chosen.seeds} seeds, {chosen.epochs} epoch(s), {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
