"""Normalizations side by side on scikit-learn's bundled digits, at 1, 2 and 32 samples per batch.

    make demo

Every run updates the weights once per 32 samples (decoupled accumulation and update), so the columns differ only in how
many samples the norm sees at once. Each cell is trained at every learning rate and shown at its own best one: that with
the highest accuracy on validation digits, mean over the seeds. The accuracy shown is that of the same runs on test
digits, by which nothing is chosen; both in evaluation mode.
"""

import argparse
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

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

OURS = "streaming norm"
NORMS = {
    "fully-connected": ["none", "batch norm", "layer norm", OURS],
    "convolutional": ["none", "batch norm", "layer norm", "group norm", OURS],
}
BATCHES = [1, 2, 32]
BY_SAMPLE = ["none", "layer norm", "group norm"]  # the same function for every split of a window: trained once, as 32
PER_UPDATE = 32
RATES = [0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5]
TRAINING, VALIDATION = 1200, 237  # digits; the other 360 are the test


class Cell(NamedTuple):
    net: str
    norm: str
    batch: int


class Scores(NamedTuple):
    """A cell at the rate that was chosen for it: accuracies in percent, one per seed."""

    rate: float
    validation: list[float]
    test: list[float]


def norm(name, channels, convolutional):
    return {
        "none": nn.Identity,
        "batch norm": lambda: (nn.BatchNorm2d if convolutional else nn.BatchNorm1d)(channels),
        "layer norm": lambda: nn.GroupNorm(1, channels),  # over channels and space; on vectors it is nn.LayerNorm
        "group norm": lambda: nn.GroupNorm(4, channels),
        OURS: lambda: StreamingNorm(channels),
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


@cache
def load():
    """Digits to train on, for validation and for the test: three pairs of images and labels."""
    digits = load_digits()
    x, y = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1), torch.tensor(digits.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    x = (x - x[:TRAINING].mean()) / x[:TRAINING].std()
    sizes = [TRAINING, VALIDATION, len(x) - TRAINING - VALIDATION]
    return list(zip(x.split(sizes), y.split(sizes), strict=True))


def train(job, epochs=1, limit=TRAINING):
    """One training; returns the accuracies on validation and test digits, or the reason why it could not run."""
    cell, rate, seed = job
    torch.set_num_threads(1)
    torch.manual_seed(seed)  # the same first weights and the same order of digits for every norm and rate
    (x, y), *held_out = load()
    x, y = x[:limit], y[:limit]
    model = network(cell.net, cell.norm)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    optimizer = DecoupledUpdate(optimizer, PER_UPDATE // cell.batch)
    try:
        for _ in range(epochs):
            order = torch.randperm(len(x))
            for i in range(0, len(x) - len(x) % PER_UPDATE, cell.batch):
                chosen = order[i : i + cell.batch]
                optimizer.zero_grad()
                F.cross_entropy(model(x[chosen]), y[chosen]).backward()
                optimizer.step()
    except ValueError as refused:
        return str(refused).split(", got")[0]
    model.eval()
    with torch.no_grad():
        return [100 * float((model(images).argmax(1) == labels).float().mean()) for images, labels in held_out]


def trained(cell):
    """The cell whose runs this one shows."""
    return cell._replace(batch=PER_UPDATE) if cell.norm in BY_SAMPLE else cell


def choose(by_rate):
    """The scores at the best rate by validation (of equals the lowest), from the outcomes over seeds at each rate."""
    scores = []
    for rate, outcomes in sorted(by_rate.items()):
        for outcome in outcomes:
            if isinstance(outcome, str):
                return outcome  # cannot run
        scores.append(Scores(rate, *map(list, zip(*outcomes, strict=True))))
    return max(scores, key=lambda each: statistics.mean(each.validation))


def show(found):
    if isinstance(found, str):
        return "cannot run"
    spread = f" ± {statistics.stdev(found.test):.1f}" if len(found.test) > 1 else ""
    return f"{statistics.mean(found.test):.1f}{spread} @ {found.rate:g}"


def table(results):
    """In Markdown: a row per network and norm, a column per size of batch."""
    rows = [["", *(f"{batch} per batch" for batch in BATCHES)]]
    for net, norms in NORMS.items():
        rows += [[f"{net}, {name}", *(show(results[Cell(net, name, b)]) for b in BATCHES)] for name in norms]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"| {' | '.join(text.ljust(width) for text, width in zip(row, widths, strict=True))} |" for row in rows]
    return "\n".join([lines[0], f"|{'|'.join('-' * (width + 2) for width in widths)}|", *lines[1:]])


def compare(ours, theirs, name):
    """In words. Seeds are paired; ahead or behind means in every seed, and by more than two standard errors."""
    differences = [a - b for a, b in zip(ours.test, theirs.test, strict=True)]
    if len(differences) < 2:
        return f"no verdict from one seed ({differences[0]:+.1f} to {name})"
    mean, error = statistics.mean(differences), statistics.stdev(differences) / len(differences) ** 0.5
    verdict = "a tie with"
    if min(differences) > 0 and mean > 2 * error:
        verdict = "ahead of"
    elif max(differences) < 0 and mean < -2 * error:
        verdict = "behind"
    return f"{verdict} {name} ({mean:+.1f} ± {error:.1f})"


def verdicts(results):
    """Streaming norm beside whichever of the others has the best test accuracy, cell by cell."""
    for net, norms in NORMS.items():
        for batch in BATCHES:
            found = {name: results[Cell(net, name, batch)] for name in norms}
            others = {name: s for name, s in found.items() if name != OURS and not isinstance(s, str)}
            best = max(others, key=lambda name: statistics.mean(others[name].test))
            yield f"- {net}, {batch} per batch: {compare(found[OURS], others[best], best)}"


def remarks(results, rates):
    """What did not run, and which choice has no neighbour on one side."""
    for cell in sorted(set(map(trained, results))):
        found = results[cell]
        where = f"{cell.net}, {cell.norm}, {cell.batch} per batch"
        if isinstance(found, str):
            yield f"{where}: cannot run. {found}"
        elif found.rate in (min(rates), max(rates)):
            yield f"{where}: the best rate, {found.rate:g}, is the last of the ladder; one beyond may do better"


def draw(results, path):
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
    looks = dict(zip(NORMS["convolutional"], zip("xosvD", ["C0", "C1", "C2", "C4", "C3"], strict=True), strict=True))
    for panel, (net, norms) in zip(panels, NORMS.items(), strict=True):
        for shift, name in enumerate(norms):
            found = [results[Cell(net, name, batch)] for batch in BATCHES]
            places = [i for i, each in enumerate(found) if not isinstance(each, str)]
            means = [statistics.mean(found[i].test) for i in places]
            low = [m - min(found[i].test) for i, m in zip(places, means, strict=True)]
            high = [max(found[i].test) - m for i, m in zip(places, means, strict=True)]
            beside = [i + 0.06 * (shift - len(norms) / 2) for i in places]
            marker, color = looks[name]
            panel.errorbar(beside, means, yerr=[low, high], marker=marker, color=color, capsize=3, label=name)
            for i in set(range(len(BATCHES))) - set(places):
                panel.annotate(f"{name} cannot run", (i, 0.05), xycoords=("data", "axes fraction"), rotation=90)
        panel.set(title=net, xlabel="samples per batch", xticks=range(len(BATCHES)), xticklabels=BATCHES)
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("test accuracy, % (mean and range)")
    panels[1].legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seeds", type=int, default=5)
    options.add_argument("--rates", type=float, nargs="+", default=RATES, help="learning rates to choose from")
    options.add_argument("--epochs", type=int, default=1)
    options.add_argument("--limit", type=int, default=TRAINING, help="training digits to use")
    options.add_argument("--out", type=Path, default=Path("out/digits.png"))
    given = options.parse_args()

    start = time.perf_counter()
    cells = [Cell(net, name, batch) for net, norms in NORMS.items() for name in norms for batch in BATCHES]
    distinct = sorted(set(map(trained, cells)), key=lambda cell: cell.batch)  # the slow ones, small batches, first
    jobs = [(cell, rate, seed) for cell in distinct for rate in given.rates for seed in range(given.seeds)]
    outcomes = {cell: {rate: [] for rate in given.rates} for cell in distinct}
    work = partial(train, epochs=given.epochs, limit=given.limit)
    with ProcessPoolExecutor(max_workers=2, mp_context=get_context("spawn")) as pool:
        done = tqdm(pool.map(work, jobs), total=len(jobs), desc="training", unit="run")
        for (cell, rate, _), outcome in zip(jobs, done, strict=True):
            outcomes[cell][rate].append(outcome)
    results = {cell: choose(outcomes[trained(cell)]) for cell in cells}

    print(f"\nTest accuracy in percent, mean ± standard deviation over {given.seeds} seed(s), @ the learning rate,")
    print(f"the best by validation of {', '.join(f'{rate:g}' for rate in given.rates)}.\n")
    print(table(results))
    print(f"\n{OURS} beside the best of the others: mean difference and its standard error. A tie, unless all seeds")
    print("agree and the difference is above two standard errors.\n")
    print("\n".join(verdicts(results)))
    print("", *remarks(results, given.rates), sep="\n")
    draw(results, given.out)
    print(f"\nfigure: {given.out}\n{len(jobs)} runs, {given.epochs} epoch(s), {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
