"""Out of memory: an error, the state as before, and a layer that goes on when there is memory again."""

import os
import subprocess
import sys

import pytest
from test_kernels import needs_kernels

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits the address space of a process")

# In a process of its own, whose limit is raised in steps until the call goes through: somewhere between, each of its
# large allocations is the one that fails. A thread keeps its scratch memory, so every attempt has a thread of its own.
CODE = """
import os, resource, sys, threading, time
import torch, streamnorm

MB = 2**20
torch.set_num_threads(1)


def limited(room, call):
    in_use = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + room, resource.RLIM_INFINITY))
    try:
        call()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def attempt(room, call):
    '''Which error there was.'''
    errors = []

    def run():
        try:
            limited(room, call)
        except (MemoryError, RuntimeError) as error:
            errors.append((type(error), str(error)))  # not the error, whose traceback would hold on to memory

    threads = len(os.listdir("/proc/self/task"))
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    while len(os.listdir("/proc/self/task")) > threads:  # it gives its scratch memory back at its very end
        time.sleep(0.001)
    assert all(kind is MemoryError or "can't allocate memory" in words for kind, words in errors), errors
    return errors[0][0] if errors else None


def make(kind):
    if kind in ("rows", "planes"):
        net = streamnorm.StreamingNorm(MB, guard=False)  # large, against what the allocator has in reserve
        return net, torch.randn(2, MB, *((2,) if kind == "planes" else ()), requires_grad=True)
    size = {"RNN": 900, "GRU": 500, "LSTM": 400}[kind]
    return getattr(streamnorm, kind)(2, size), torch.randn(2, 3, 2)


def test(kind, direction):
    net, x = make(kind)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)

    def forward():
        y = net(x)
        output, *state = (y,) if isinstance(y, torch.Tensor) else y
        return (output, *(state[0] if state and isinstance(state[0], tuple) else state))

    torch.autograd.backward(forward(), gradients := [torch.ones_like(y) for y in forward()])
    optimizer.step()  # an update that a failed call must not fold in
    errors = []
    for room in range(0, 400, 8 if kind in ("rows", "planes") else 2):
        outputs = forward() if direction == "backward" else None
        optimizer.zero_grad()
        x.grad = None
        before = {name: value.clone() for name, value in net.state_dict().items()}
        for norm in net.modules():  # what was handed out would be copied, by torch, before the kernel runs
            norm._shared = False
        call = forward if direction == "forward" else lambda: torch.autograd.backward(outputs, gradients)
        errors.append(attempt(room * MB, call))
        same = all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
        assert same == (errors[-1] is not None), (kind, direction, room, errors)
        if errors[-1] is None:
            break
    assert errors[-1] is None, (kind, direction, "never enough")
    assert MemoryError in errors, (kind, direction, "the kernels never asked for what was not there")


for kind in sys.argv[1:]:
    for direction in ("forward", "backward"):
        test(kind, direction)
"""


@needs_kernels
@pytest.mark.parametrize("kinds", [("rows", "planes"), ("RNN", "GRU", "LSTM")], ids=["layer", "sequence"])
def test_a_call_without_memory_changes_nothing(kinds):
    # Large blocks are given back when they are freed: none is left over for the next attempt. One thread, in threads
    # too: OpenMP ends the process where it has no memory for another.
    limits = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_ARENA_MAX": "1"}
    environment = os.environ | limits | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", CODE, *kinds], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, (done.returncode, done.stderr)
