"""What the lab's training loop adds to the network's own forward, backward and step."""

from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F

from streamnorm.lab.data import Images
from streamnorm.lab.figures import FIGURES
from streamnorm.lab.models import build
from streamnorm.lab.train import Training, make_optimizer

BARE = "the bare step"


class Endless(Training):
    """Without evaluations, whose cost is a matter of how often they are asked for."""

    def due(self):
        return False


def images(count=2_000):
    pixels, labels = torch.randint(256, (count, 3, 32, 32), dtype=torch.uint8), torch.randint(10, (count,))
    mean, std = torch.full((3,), 127.5), torch.full((3,), 73.9)
    return Images("random", pixels, labels, pixels[:10], labels[:10], mean, std, "", "")


def loop(run):
    """One weight update as a run of the lab makes it: picking and standardising images, the log, signals, progress."""
    training = Endless(run, images(), Path())

    def call():
        training.total = training.done + 1
        training.go_on(lambda done, total, loss: None, every=1e9)

    return call, training.model


def bare(run):
    """The same weight update on batches that are there already."""
    model = build(run)
    optimizer = make_optimizer(run, model)
    x = torch.randn(run.batches, run.samples, 3, 32, 32)
    target = torch.randint(10, (run.batches, run.samples))

    def call():
        for i in range(run.batches):
            F.cross_entropy(model(x[i]), target[i]).backward()
            optimizer.step()

    return call, model


# Evaluations, and the length of the gradient that they log, are left out.
NET_B, NET_A = (
    replace(run, evaluate=10**9) for run in (FIGURES["conv"]["streaming"], FIGURES["online"]["streaming 1 x 32"])
)
