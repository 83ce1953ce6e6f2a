"""What a norm of each reference costs beside the convolution after it, in net C of the figures at `quick`.

    python benchmarks/references.py --out benchmarks/results/references.json    # half a minute
    python benchmarks/references.py --table benchmarks/results/references.json

Forward and backward on (32, 16, 32, 32), milliseconds of one core (CPU time, not the clock), median of the rounds; the
convolution is 3x3, with a bias. SP: `SampleNorm`, BA: `GeneralBatchNorm`, as the figures have them.
"""

import argparse
from collections.abc import Callable
from statistics import median
from time import process_time
from typing import Any

import torch
from tables import measure_or_show
from torch import Tensor, nn

from streamnorm import GeneralBatchNorm, SampleNorm
from streamnorm.core.reference import CODES

SHAPE = 32, 16, 32, 32
WARMING = 3


def measured(rounds: int) -> dict[str, Any]:
    norms = {code: (SampleNorm if code.startswith("SP") else GeneralBatchNorm)(SHAPE[1], ref=code) for code in CODES}
    layers = {"conv 3x3": nn.Conv2d(SHAPE[1], SHAPE[1], 3, padding=1), **norms}
    torch.manual_seed(0)
    x, dy = torch.randn(SHAPE, requires_grad=True), torch.randn(SHAPE)
    times: dict[str, list[float]] = {name: [] for name in layers}
    for number in range(WARMING + rounds):  # interleaved
        for name, layer in layers.items():
            seconds = once(layer, x, dy)
            if number >= WARMING:
                times[name].append(seconds)
    return {"milliseconds": {name: 1e3 * median(each) for name, each in times.items()}}


def once(layer: Callable[[Tensor], Tensor], x: Tensor, dy: Tensor) -> float:
    start = process_time()
    layer(x).backward(dy)
    return process_time() - start


def table(result: dict[str, Any]) -> str:
    found = result["milliseconds"]
    cells = [f"{value:.0f}" for value in found.values()]
    return "\n".join([f"| {' | '.join(found)} |", "|" + "---|" * len(found), f"| {' | '.join(cells)} |"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    measure_or_show(parser, lambda chosen: measured(chosen.rounds), table)


if __name__ == "__main__":
    main()
