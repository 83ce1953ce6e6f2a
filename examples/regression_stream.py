"""Regression from a stream, one sample per update: why is layer norm better there, and what mends a streaming norm?

    python examples/regression_stream.py

One suspect at a time, on `approval` of docs/measured/streams.md and on streams made here, in which the inputs are
independent or move slowly, and the target is a fixed function of them or one that drifts. Networks, scaling and scores
are those of online_stream.py; the learning rates go further. What came of it is in docs/measured/reinforcement.md,
whose tables are written by

    python examples/regression_stream.py --out docs/results/regression --page docs/measured/reinforcement.md
"""

import argparse
import json
import math
import shlex
import sys
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev

import torch
from online_stream import (  # which says what to install where river is missing
    HIDDEN,
    STREAMS,
    command_of,
    number,
    preprocessing,
    prequential,
    river,
    score,
    stats,
    tqdm,
)
from pages import atomically, put
from torch import nn

import streamnorm
from streamnorm import SampleNorm, StreamingNorm

FEATURES, NOISE = 8, 0.1
EVERY = 5  # samples, an update is watched
LONG, ALL = (0.97, 0.03), (0.999, 0.001)
OWN, OFF = (0.0, 0.0, 1.0), (0.0, 0.0, 0.0)


def both(features, **settings):
    """A streaming norm, and a layer norm of what it gives: every sample has the same length."""
    return nn.Sequential(StreamingNorm(features, **settings), SampleNorm(features, affine=False))


# What is changed: the norm, and the largest part of its own error that an update may take away, to first order.
SUSPECTS = {
    "no norm": (None, None),
    "layer norm": (SampleNorm, None),
    "streaming norm": (StreamingNorm, None),
    "... no gradient of statistics, beta (0, 0, 0)": (partial(StreamingNorm, beta=OFF), None),
    "... the present gradient, beta (0, 0, 1)": (partial(StreamingNorm, beta=OWN), None),
    "... long memory, alpha (.97, .03)": (partial(StreamingNorm, alpha=LONG), None),
    "... memory of all, alpha (.999, .001), beta (0, 0, 0)": (partial(StreamingNorm, alpha=ALL, beta=OFF), None),
    "... warm start without end: statistics of the sample, beta (0, 0, 0)": (
        partial(StreamingNorm, warmup=1e9, beta=OFF),
        None,
    ),
    "... one mean and sigma for the layer, ref BA2": (partial(StreamingNorm, ref="BA2"), None),
    "... then layer norm": (both, None),
    "no norm, half steps": (None, 0.5),
    "layer norm, half steps": (SampleNorm, 0.5),
    "streaming norm, half steps": (StreamingNorm, 0.5),
}


class Regressor:
    """Two hidden layers and plain SGD, as in online_stream.py; features and targets are standardized as there."""

    def __init__(self, norm, bound, features, rate, seed):
        torch.manual_seed(seed)
        layers = []
        for inputs, outputs in pairwise([features, HIDDEN, HIDDEN]):
            layers += [nn.Linear(inputs, outputs), norm(outputs) if norm else nn.Identity(), nn.ReLU()]
        self.model = nn.Sequential(*layers, nn.Linear(HIDDEN, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), rate)
        self.rate, self.bound = rate, bound
        self.scaler, self.targets = preprocessing.StandardScaler(), stats.Var()
        self.calls, self.taken, self.carried = 0, [], []
        self.input = self.last = torch.zeros(1, features)

    def predict_one(self, x):
        self.scaler.learn_one(x)
        self.last = self.input
        self.input = torch.tensor([list(self.scaler.transform_one(x).values())], dtype=torch.float32)
        self.output = self.model(self.input)
        value = float(self.output.detach())
        return value * self.spread() + self.targets.mean.get() if math.isfinite(value) else None

    def learn_one(self, x, y):
        self.targets.update(y)
        target = (y - self.targets.mean.get()) / self.spread()
        error = float(self.output.detach()) - target
        self.optimizer.zero_grad()
        ((self.output - target).square().sum() / 2).backward()
        if self.bound:
            self.shorten(error)
        self.calls += 1
        looks = self.calls % EVERY == 0
        before = self.two() if looks else ()
        self.optimizer.step()
        own, last = (now - then for now, then in zip(self.two(), before, strict=True)) if looks else (0.0, 0.0)
        if error and own:
            self.taken.append(-own / error)  # what the update took of its own error, and how much of that arrives
            self.carried.append(last / own)  # at the sample before

    @torch.no_grad()
    def two(self):
        """The outputs for this sample and the one before, with the statistics as they are."""
        with streamnorm.paused(self.model):
            return self.model(torch.cat([self.input, self.last]))[:, 0].tolist()

    def shorten(self, error):
        """A step of rate * error * slope, slope = d output / d weights, takes rate * |slope|^2 of the error away."""
        gradients = [weight.grad for weight in self.model.parameters()]
        length = sum(float(each.square().sum()) for each in gradients)  # |error * slope|^2
        part = self.rate * length / error**2 if error else 0.0
        if part > self.bound:
            for each in gradients:
                each.mul_(self.bound / part)

    def spread(self):
        return self.targets.get() ** 0.5 or 1.0


def made(slow, drifts, samples):
    """Rows of a stream: inputs that are independent or move slowly, and the target of a network that may drift."""
    chance = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=chance)

    keep = 0.99 if slow else 0.0
    turn = 0.003 if drifts else 0.0  # the teacher's first weights are others after about 1 / turn samples
    x, first, second, rows = draw(FEATURES), draw(16, FEATURES), draw(16), []
    for _ in range(samples):
        x = keep * x + (1 - keep**2) ** 0.5 * draw(FEATURES)
        first = (1 - turn) * first + (1 - (1 - turn) ** 2) ** 0.5 * draw(16, FEATURES)
        y = float(second @ torch.tanh(first @ x / FEATURES**0.5) / 2 + NOISE * draw())
        rows.append((dict(enumerate(x.tolist())), y))
    return rows


def real(samples):
    return STREAMS["approval"][0](samples)


ROWS = {
    "approval": real,
    "independent": partial(made, False, False),
    "independent-drift": partial(made, False, True),
    "slow": partial(made, True, False),
}
LENGTH = 600  # of a stream that is made


def run(suspect, rows, rate, seed):
    norm, bound = SUSPECTS[suspect]
    model = Regressor(norm, bound, len(rows[0][0]), rate, seed)
    errors = [score(guess, y, 0) for guess, (_, y) in zip(prequential(model, rows), rows, strict=True)]
    found = {"rate": rate, "seed": seed, "score": fmean(errors)}
    for name, each in ("taken", model.taken), ("carried", model.carried):
        late = sorted(value for value in each[len(each) // 4 :] if math.isfinite(value)) or [0.0]
        found |= {f"{name}{part}": late[round(part / 100 * (len(late) - 1))] for part in (5, 50, 95)}
    return found


def study(name, suspects, samples, rates, seeds):
    """Every suspect at the rate that is best for the first seed, in hindsight."""
    rows = ROWS[name](samples or (1001 if name == "approval" else LENGTH))
    before = fmean(abs(one - two) for one, two in pairwise([0.0, *(y for _, y in rows)]))
    found = {}
    for suspect in tqdm(suspects, desc=name):
        tried = [run(suspect, rows, rate, 0) for rate in rates]
        best = min(tried, key=lambda each: each["score"])
        runs = [best, *(run(suspect, rows, best["rate"], seed) for seed in range(1, seeds))]
        found[suspect] = {"tried": {str(each["rate"]): each["score"] for each in tried}, "runs": runs}
    return {"samples": len(rows), "before": before, "suspects": found}


def table(stream):
    """Markdown: mean and standard error over seeds."""
    head = ["norm", "mean absolute error", "rate", "first seed at each rate", "an update takes, %", "it carries, %"]
    lines = [head, ["---"] * len(head), ["the label before", number(stream["before"], 3), "", "", "", ""]]
    for suspect, found in stream["suspects"].items():
        runs, scores = found["runs"], [each["score"] for each in found["runs"]]
        error = f" ± {number(stdev(scores) / len(scores) ** 0.5, 3)}" if len(scores) > 1 else ""
        tried = ", ".join(number(each, 3) for each in found["tried"].values())
        watched = []
        for name in ("taken", "carried"):
            parts = [number(100 * fmean(each[f"{name}{part}"] for each in runs), 0) for part in (50, 5, 95)]
            watched.append("{} ({} to {})".format(*parts))
        lines.append([suspect, number(fmean(scores), 3) + error, str(runs[0]["rate"]), tried, *watched])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def filled(text, results):
    """A page with the results."""
    tables = {name: table(stream) for name, stream in results["streams"].items()}
    return put(text, {"regression": command_of(results)} | tables)


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--streams", nargs="+", choices=ROWS, default=list(ROWS), metavar="NAME")
    options.add_argument("--suspects", nargs="+", choices=SUSPECTS, default=list(SUSPECTS), metavar="NORM")
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--samples", type=int, help="at most so many of each stream")
    options.add_argument("--rates", type=float, nargs="+", default=[0.003, 0.01, 0.03, 0.1], metavar="RATE")
    options.add_argument("--out", type=Path, default=Path("out/regression"), help="folder of results.json")
    options.add_argument("--page", type=Path, help="a Markdown page to put the tables into")
    chosen = options.parse_args()
    torch.set_num_threads(1)
    start, streams = time.perf_counter(), {}
    for name in chosen.streams:
        streams[name] = study(name, chosen.suspects, chosen.samples, chosen.rates, chosen.seeds)
        print(f"\n{name}, {streams[name]['samples']} samples\n\n{table(streams[name])}", flush=True)
    results = {
        "command": f"python examples/regression_stream.py {shlex.join(sys.argv[1:])}".strip(),
        "versions": f"torch {torch.__version__.split('+')[0]}, river {river.__version__}",
        "seeds": chosen.seeds,
        "seconds": time.perf_counter() - start,
        "streams": streams,
    }
    chosen.out.mkdir(parents=True, exist_ok=True)
    atomically(lambda part: part.write_text(json.dumps(results), encoding="utf-8"), chosen.out / "results.json")
    if chosen.page:
        atomically(
            lambda part: part.write_text(filled(chosen.page.read_text(encoding="utf-8"), results), encoding="utf-8"),
            chosen.page,
        )


if __name__ == "__main__":
    main()
