"""Why streaming normalization diverges in small windows: one training, watched from inside.

    python benchmarks/divergence.py --data-dir FOLDER  # CIFAR-10; writes the numbers of docs/design/guard.md with --out
    python benchmarks/divergence.py --data digits        # no download
    python benchmarks/divergence.py --table benchmarks/results/divergence.json

Net A (128 units), one sample per update, plain SGD. Now and then the truth is measured on 256 images that are not
trained on: the moments of the present weights, and the gradient of the statistics in use. Some arms take a part of the
guard out: "scale", small windows count for less; "average", folds average exactly at first; "bound", |g_hat| <= |g|.
"""

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from streamnorm import backends, monitor
from streamnorm.core import algorithm as stream
from streamnorm.lab.data import load_images
from streamnorm.lab.models import build
from streamnorm.lab.runs import Norm, Run
from streamnorm.lab.store import write_json
from streamnorm.lab.tasks import ImageTask

PROBE = 256


MEASURES = ("loss", "sigma", "gradient", "output", "weights")
COLUMNS = ("drift", "gradient", "output", "weights")


@dataclass(frozen=True)
class Look:
    """The worst of the three layers, at one moment."""

    update: int
    loss: float  # on the probe
    sigma: float  # log(sigma_hat / true sigma), the average over channels: below 0, outputs are too large
    gradient: float  # length of the streamed gradient of the statistics over that of the true one
    output: float  # rms of what the layer gives
    weights: float  # length of the first layer's


def look(model: nn.Module, update: int, x: torch.Tensor, y: torch.Tensor) -> Look:
    h, leaves, sigmas, outputs = x.flatten(1), [], [], []
    for product, norm in zip(model.products, model.norms, strict=True):
        h = product(h)
        mean, sigma = (s.clone().requires_grad_() for s in (norm.mean, norm.sigma))
        true = h.detach().var(0, unbiased=False).add(norm.eps).sqrt()
        sigmas.append(float((sigma.detach() / true).log().mean()))
        h = norm.weight * (h - mean) / sigma + norm.bias
        outputs.append(float(h.detach().square().mean().sqrt()))
        leaves.append((mean, sigma))
        h = torch.relu(h)
    loss = F.cross_entropy(model.head(h), y)
    exact = torch.autograd.grad(loss, [leaf for pair in leaves for leaf in pair])
    ratios = []
    for norm, *g in zip(model.norms, exact[::2], exact[1::2], strict=True):
        health = monitor(norm)[""]
        streamed = health.gradient_ratio * float(norm.grads.short.norm())
        ratios.append(streamed / float(torch.stack(g).norm()))
    weights = float(model.products[0].weight.detach().norm())
    return Look(update, loss.item(), max(sigmas, key=abs), max(ratios), max(outputs), weights)


@dataclass(frozen=True)
class Arm:
    """A training of one sample per update."""

    long: float  # alpha1 and kappa1; the rest is alpha2
    rate: float = 0.003
    guard: bool = False
    without: tuple[str, ...] = ()
    momentum: float = 0.0


ARMS = {
    "paper": Arm(0.7),
    "guard": Arm(0.7, guard=True),
    "guard without scale": Arm(0.7, guard=True, without=("scale",)),
    "paper, longest memory": Arm(0.997),
    "paper, longest memory, momentum": Arm(0.997, rate=0.0003, momentum=0.9),
    "guard, longest memory": Arm(0.997, guard=True),
    "guard without average, longest memory": Arm(0.997, guard=True, without=("average",)),
    "paper, high rate": Arm(0.7, rate=0.03),
    "guard, high rate": Arm(0.7, rate=0.03, guard=True),
    "guard without bound, high rate": Arm(0.7, rate=0.03, guard=True, without=("bound",)),
}


@contextmanager
def taken_out(parts: Sequence[str]) -> Iterator[None]:
    """Ablation: the guard without some of its parts, on the plain path, which reads these functions."""
    whole, bounded = stream.guarded, stream.bounded

    def guarded(weights: Sequence[float], share: torch.Tensor, part: torch.Tensor | None = None) -> Any:
        if "scale" not in parts:
            return whole(weights, share, None if "average" in parts else part)
        long, short = weights  # a fold is still an exact average at first
        more = 0 if part is None else torch.where(share < 1, ((long + short) * part - short).clamp(min=0), 0)
        return long - more, short + more

    if "bound" in parts:
        stream.bounded = lambda g_hat, g, share: g_hat
    stream.guarded = guarded
    try:
        with backends.use("plain") if parts else nullcontext():
            yield
    finally:
        stream.guarded, stream.bounded = whole, bounded


def train(arm: Arm, data: str, folder: Path | None, updates: int, every: int, seed: int = 0) -> list[Look]:
    """What was seen on the way, at the end at the latest; it ends early when a loss is not finite."""
    norm = Norm("streaming", center="running", alpha=(arm.long, round(1 - arm.long, 6)), guard=arm.guard)
    run = Run("A", norm, samples=1, width=128, data=data, seed=seed)
    task = ImageTask(run, load_images(data, folder))
    torch.manual_seed(seed)
    model = build(run)
    optimizer = torch.optim.SGD(model.parameters(), arm.rate, momentum=arm.momentum)
    images, labels = task.test
    x, y = task.standardised(images[:PROBE]), labels[:PROBE]
    looks = []
    for update in range(1, updates + 1):
        (image, label), *_ = task.batches(*divmod(update - 1, task.updates))
        loss = F.cross_entropy(model(image), label)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        finite = math.isfinite(loss.item())
        if update % every == 0 or not finite:
            looks.append(look(model, update, x, y))
            print(line(looks[-1]), flush=True)
        if not finite:
            print(f"the loss is not finite after {update} updates")
            break
    return looks


def line(now: Look) -> str:
    return (
        f"{now.update:6} {now.loss:8.3g} {now.sigma:+12.2f} {now.gradient:10.3g} {now.output:10.3g} {now.weights:10.3g}"
    )


def table(found: dict[str, Any]) -> str:
    """Where the warm start ends, and at the end."""
    rows = ["| | memory, rate | update 250: " + " | ".join(["loss", *COLUMNS, "update 1500: loss", *COLUMNS]) + " |"]
    rows.append("|---" * 12 + "|")
    for name, each in found.items():
        arm, looks = each["arm"], {now["update"]: now for now in each["looks"]}
        cells = [cell(looks[at][key]) if at in looks else "" for at in (250, 1500) for key in MEASURES]
        if 1500 not in looks:
            cells[5] = f"not finite at {max(looks)}"
        rows.append(f"| {name} | {arm['long']}, {arm['rate']} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def cell(value: float | None) -> str:
    return "" if value is None else f"{value:.2g}" if abs(value) < 100 else f"{value:.0e}".replace("e+0", "e")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--data", default="cifar10", choices=["cifar10", "digits"])
    arguments.add_argument("--data-dir", type=Path, help="where the data is (default: a cache folder)")
    arguments.add_argument("--only", nargs="*", default=list(ARMS), choices=ARMS, metavar="ARM", help=", ".join(ARMS))
    arguments.add_argument("--updates", type=int, default=1500)
    arguments.add_argument("--every", type=int, default=50)
    arguments.add_argument("--out", type=Path, help="write what was seen here, as JSON")
    arguments.add_argument("--table", type=Path, metavar="FILE", help="only print such a file as a table")
    chosen = arguments.parse_args()
    if chosen.table:
        print(table(json.loads(chosen.table.read_text(encoding="utf-8"))))
        return
    torch.set_num_threads(1)
    found = {}
    for name in chosen.only:
        arm = ARMS[name]
        print(f"{name}: {arm}\nupdate     loss  log sigma/true  |g_hat|/|g|  rms  |first weights|")
        with taken_out(arm.without):
            looks = train(arm, chosen.data, chosen.data_dir, chosen.updates, chosen.every)
        found[name] = {"arm": asdict(arm), "looks": [asdict(now) for now in looks]}
    if chosen.out:
        write_json(chosen.out, json.loads(json.dumps(found).replace("NaN", "null").replace("Infinity", "null")))


if __name__ == "__main__":
    main()
