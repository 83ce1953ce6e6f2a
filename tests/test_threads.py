"""Threads that share a layer never touch freed memory, and those that do not share one do not disturb each other.

The first in a short form; `make test-sanitized` runs the long one.
"""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import stress_threads
import torch
from torch import nn

from streamnorm import StreamingNorm


@pytest.mark.parametrize("target", stress_threads.TARGETS)
def test_training_and_reading_at_once_does_not_crash(target):
    script = Path(stress_threads.__file__)
    call = [sys.executable, "-W", "ignore", str(script), "--seconds", "1.5", target]
    done = subprocess.run(call, capture_output=True, text=True)
    assert done.returncode == 0, (done.returncode, done.stdout, done.stderr)


def trained(seed):
    """Every tensor of a small model after some updates, of two batches each."""
    random = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 16), StreamingNorm(16), nn.ReLU(), nn.Linear(16, 2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=random))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(30):
        optimizer.zero_grad()
        for _ in range(2):
            model(torch.randn(2, 6, generator=random)).square().mean().backward()
        optimizer.step()
    return model.state_dict()


def test_models_that_are_trained_at_once_are_as_if_trained_alone():
    """To the last bit, with a GIL and without."""
    seeds = range(4)
    alone = [trained(seed) for seed in seeds]
    with ThreadPoolExecutor(len(seeds)) as pool:
        for one, other in zip(pool.map(trained, seeds), alone, strict=True):
            assert all(torch.equal(value, other[name]) for name, value in one.items())
