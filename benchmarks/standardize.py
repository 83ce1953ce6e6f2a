"""What weight standardization costs: network B with and without it, a training step and a forward pass in evaluation.

python benchmarks/standardize.py --rounds 30

Both sides run interleaved in one process on one thread. The ratio is taken per round, and its median and quartiles are
printed; "fused" is `fuse` of both.
"""

import argparse
from collections.abc import Callable
from statistics import median, quantiles
from time import perf_counter

import torch
import torch.nn.functional as F
from nets import NetB
from torch import nn

from streamnorm import StreamingNorm, fuse, weight_standardize

Call = Callable[[], object]


def networks(batch: int) -> tuple[nn.Module, nn.Module]:
    """Without and with standardized weights, both with statistics."""
    plain, standardized = NetB(StreamingNorm), NetB(StreamingNorm)
    weight_standardize(standardized, skip="head", report=None)
    for model in (plain, standardized):
        for _ in range(2):
            model(torch.randn(max(2, batch), 3, 32, 32)).sum().backward()
            model.zero_grad()
    return plain, standardized


def training(model: nn.Module, batch: int) -> Call:
    optimizer = torch.optim.SGD(model.train().parameters(), lr=1e-3)
    x, target = torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,))

    def call() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), target).backward()
        optimizer.step()

    return call


def evaluation(model: nn.Module, batch: int) -> Call:
    x = torch.randn(batch, 3, 32, 32)
    model.eval()

    def call() -> None:
        with torch.no_grad():
            model(x)

    return call


def ratios(ours: Call, theirs: Call, rounds: int) -> list[float]:
    for _ in range(2):
        ours(), theirs()
    found = []
    for i in range(rounds):
        times = {}
        for call in (ours, theirs) if i % 2 else (theirs, ours):
            start = perf_counter()
            call()
            times[call] = perf_counter() - start
        found.append(times[ours] / times[theirs])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32], help="samples per batch")
    args = parser.parse_args()
    if args.rounds < 2:
        parser.error("--rounds must be at least 2")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    print("| with / without | samples | median | quartiles |\n|---|---|---|---|")
    for batch in args.batches:
        rounds = args.rounds * (10 if batch < 8 else 1)
        plain, standardized = networks(batch)
        fused = [fuse(model, report=None) for model in (plain, standardized)]
        pairs = {
            "training step": [training(standardized, batch), training(plain, batch)],
            "evaluation": [evaluation(standardized, batch), evaluation(plain, batch)],
            "evaluation, fused": [evaluation(fused[1], batch), evaluation(fused[0], batch)],
        }
        for name, (ours, theirs) in pairs.items():
            for model in (plain, standardized):
                model.train(name == "training step")
            found = ratios(ours, theirs, rounds)
            low, _, high = quantiles(found, n=4)
            print(f"| {name} | {batch} | {median(found):.3f} | {low:.3f} to {high:.3f} |", flush=True)


if __name__ == "__main__":
    main()
