"""Why streaming normalization diverges in small windows: one training, watched from inside.

    python benchmarks/divergence.py --data-dir FOLDER    # CIFAR-10; prints the table of docs/guard.md
    python benchmarks/divergence.py --data digits        # no download

Net A (128 units), one sample per update, plain SGD. Now and then the truth is measured on 256 images that are not
trained on: the moments of the present weights, and the gradient of the statistics in use. `--without` takes a part of
the guard out, `--momentum` adds what is not needed for a divergence but hastens it.
"""

import argparse
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from streamnorm import kernels, monitor, stream
from streamnorm.lab.data import load_images
from streamnorm.lab.models import build
from streamnorm.lab.runs import Norm, Run
from streamnorm.lab.tasks import ImageTask

PROBE = 256
PARTS = {"scale": "small windows count for less", "average": "exact average at first", "bound": "|g_hat| <= |g|"}


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


def take_out(parts: list[str]) -> None:
    """Ablation: the guard without some of its parts, on the plain path, which reads these functions."""
    whole = stream.guarded

    def guarded(weights, share, part=None):  # type: ignore[no-untyped-def]
        full = torch.ones_like(share)
        if "scale" in parts:  # a fold is still an exact average at first
            long, short = weights
            lost = torch.zeros_like(share) if part is None else (short - (long + short) * part).clamp(max=0)
            return long + lost, short - lost
        return whole(weights, share, None if "average" in parts else part) if share.lt(1) else whole(weights, full)

    stream.guarded = guarded
    if "bound" in parts:
        stream.bounded = lambda g_hat, g, share: g_hat


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--data", default="cifar10", choices=["cifar10", "digits"])
    arguments.add_argument("--data-dir", type=Path)
    arguments.add_argument("--long", type=float, default=0.7, help="alpha1 and kappa1; the rest is alpha2")
    arguments.add_argument("--rate", type=float, default=0.003)
    arguments.add_argument("--momentum", type=float, default=0.0)
    arguments.add_argument("--updates", type=int, default=4000)
    arguments.add_argument("--every", type=int, default=100)
    arguments.add_argument("--guard", action="store_true")
    arguments.add_argument("--without", nargs="*", default=[], choices=PARTS)
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--json", type=Path, help="write the looks here too")
    chosen = arguments.parse_args()
    torch.set_num_threads(1)
    norm = Norm("streaming", center="running", alpha=(chosen.long, round(1 - chosen.long, 6)), guard=chosen.guard)
    run = Run("A", norm, samples=1, width=128, data=chosen.data, seed=chosen.seed)
    task = ImageTask(run, load_images(chosen.data, chosen.data_dir))
    torch.manual_seed(chosen.seed)
    model = build(run)
    optimizer = torch.optim.SGD(model.parameters(), chosen.rate, momentum=chosen.momentum)
    x, y = task.standardised(task.test_x[:PROBE]), task.test_y[:PROBE]
    if chosen.without:
        kernels._enabled = False
        take_out(chosen.without)
    looks = []
    print("update    loss  log sigma_hat/sigma  |g_hat|/|g|  output rms  first weights")
    for update in range(chosen.updates):
        for image, label in task.batches(update // task.updates, update % task.updates):
            loss = F.cross_entropy(model(image), label)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        done = update + 1
        if done in (1, 10, 30) or done % chosen.every == 0 or not math.isfinite(loss.item()):
            now = look(model, done, x, y)
            looks.append(asdict(now))
            print(
                f"{done:6} {now.loss:7.3g} {now.sigma:+20.2f} {now.gradient:12.3g} {now.output:11.3g} {now.weights:14.3g}",
                flush=True,
            )
        if not math.isfinite(loss.item()):
            print(f"the loss is not finite after {done} updates")
            break
    if chosen.json:
        chosen.json.write_text(json.dumps({"settings": vars(chosen) | {"data_dir": None, "json": None}, "looks": looks}))


if __name__ == "__main__":
    main()
