"""No call uses memory that it does not hold."""

import gc
import json
import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from attacks import ATTACKS

from streamnorm import GRU, StreamingNorm


@pytest.fixture(scope="module")
def outcomes():
    """Freed memory is overwritten at once, so that using it cannot go unnoticed."""
    script = Path(__file__).with_name("attacks.py")
    run = subprocess.run(
        [sys.executable, str(script)],
        env=os.environ | {"MALLOC_PERTURB_": "165"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.parametrize("name", ATTACKS)
def test_memory_that_moves(outcomes, name):
    assert outcomes[name] == ""


def learn(layer, done):
    torch.set_num_threads(1)
    for _ in range(3):
        layer(torch.randn(4, 2)).sum().backward()
    done.put(int(layer.stats.count))


@pytest.mark.parametrize("shared", [False, True])
def test_statistics_are_shared_with_other_processes_if_memory_is(shared):
    """Sent to a real process, which trains the layer."""
    layer = StreamingNorm(2)
    layer.state_dict()
    if shared:
        layer.share_memory()
    context = torch.multiprocessing.get_context("spawn")
    done = context.SimpleQueue()
    process = context.Process(target=learn, args=(layer, done))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert done.get() == 3
    assert int(layer.stats.count) == (3 if shared else 0)


@pytest.mark.parametrize("make", [lambda: StreamingNorm(4), lambda: GRU(3, 4), lambda: StreamingNorm(4, ref="BA6")])
def test_a_trained_layer_is_freed_without_the_collector(make):
    layer = make()
    x = torch.randn(5, 2, 3) if isinstance(layer, GRU) else torch.randn(2, 4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            y = layer(x)
            (y[0] if isinstance(y, tuple) else y).sum().backward()
            optimizer.step()
        alive = [weakref.ref(module) for module in layer.modules()]
        del layer, optimizer, y
        assert not any(each() is not None for each in alive)
    finally:
        gc.enable()
