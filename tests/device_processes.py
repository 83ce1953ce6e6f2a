"""Two processes whose layers are on a second device: see other_device.py. Run by tests/test_devices.py, by torchrun."""

import sys
from pathlib import Path

import other_device
import torch
import torch.distributed as dist
from distributed_cases import Net, batch, inputs, snapshot
from other_device import NAME, READ
from torch import nn

import streamnorm
from streamnorm import StreamingNorm
from streamnorm.lab.devices import on_cpu


def merged(device, rank):
    """The states of a model after each of three updates, and of each update what was sent, read and moved."""
    net = Net().to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    streamnorm.attach(optimizer, net)
    states, work = [], []
    for step in range(3):
        x, y = (part.to(device) for part in batch(rank, 2 + rank, step))
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        other_device.seen.clear(), other_device.sent.clear(), other_device.moved.clear()
        optimizer.step()
        work.append({"sent": list(other_device.sent), "reads": other_device.seen[READ], "moved": other_device.moved[:]})
        states.append(on_cpu(snapshot(net)))
    return {"states": states, "work": work}


def skipped(device, rank):
    """A step that a scaler leaves out: known on the device alone."""
    norm = StreamingNorm(3, dtype=torch.float64, process_group="world").to(device)
    states = []
    for window, found_inf in enumerate((0.0, 1.0, 0.0)):
        for x, dy in inputs(window, rank):
            norm(x.to(device).requires_grad_()).backward(dy.to(device))
        found = torch.tensor(found_inf).to(device)
        other_device.seen.clear(), other_device.sent.clear()
        streamnorm.engine.listener.on_step([norm], found)
        work = {"reads": other_device.seen[READ], "sent": list(other_device.sent)}
        states.append(work | {"state": on_cpu(snapshot(norm))})
    return states


def different(device, rank):
    """Layers that differ are refused on the device too."""
    norm = StreamingNorm(3, p=1 + rank, process_group="world").to(device)
    norm(torch.randn(4, 3).to(device)).sum().backward()
    try:
        norm.weights_updated()
    except RuntimeError as error:
        return str(error)
    return ""


def refused(rank):
    """That the device would notice: a message of the CPU."""
    try:
        dist.all_reduce(torch.ones(2))
    except RuntimeError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    found = {}
    with streamnorm.backends.use(streamnorm.backends.LAW.name):
        found["cpu"] = merged("cpu", rank), skipped("cpu", rank)
        with other_device.there():
            found[NAME] = merged(NAME, rank), skipped(NAME, rank)
            found["different"], found["refused"] = different(NAME, rank), refused(rank)
    torch.save(found, Path(sys.argv[1]) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
