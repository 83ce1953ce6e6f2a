"""What a streaming norm costs beside nn.BatchNorm2d: time of forward + backward, and memory kept in between.

    make bench

Both layers run interleaved in one process, in many short rounds; the ratio is taken per round, and its median and
quartiles are printed. Memory is what the profiler's allocation record says is alive after the forward pass, less the
output (the input was there before).
"""

import argparse
import os
import platform
import statistics
import time

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from streamnorm import StreamingNorm

SHAPE = (32, 64, 32, 32)
CALLS = 4


def train_step(layer, x, dy):
    x.grad = None
    layer(x).backward(dy)


def time_of(layer, x, dy):
    start = time.perf_counter()
    for _ in range(CALLS):
        train_step(layer, x, dy)
    return (time.perf_counter() - start) / CALLS


def time_ratio(make, x, dy, rounds):
    ours, theirs = make(SHAPE[1]), nn.BatchNorm2d(SHAPE[1])
    for layer in (ours, theirs):
        for _ in range(10):
            train_step(layer, x, dy)
        if isinstance(layer, StreamingNorm):
            layer.weights_updated()  # past the first fold, and far past the warm-up
    times = [(time_of(ours, x, dy), time_of(theirs, x, dy)) for _ in range(rounds)]
    low, middle, high = statistics.quantiles([a / b for a, b in times], n=4)
    return low, middle, high, *(1e3 * statistics.median(side) for side in zip(*times, strict=True))


def bytes_alive(layer, x):
    layer(x).sum().backward()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        y = layer(x)
    alive = sum(event.self_cpu_memory_usage for event in record.events())
    return alive - y.numel() * y.element_size()


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=60)
    chosen = options.parse_args()
    allocator = {k: v for k, v in os.environ.items() if k.startswith("MALLOC_")} or "default"
    print(f"torch {torch.__version__}, {platform.processor() or platform.machine()}, allocator {allocator}")
    print(f"forward + backward on {SHAPE} float32, {chosen.rounds} interleaved rounds of {CALLS} calls\n")
    variants = {
        "StreamingNorm": StreamingNorm,
        "StreamingNorm p=1": lambda n: StreamingNorm(n, p=1),
        'StreamingNorm center="mean"': lambda n: StreamingNorm(n, center="mean"),
    }
    print(f"{'':30}{'threads':>8}{'ratio':>8}{'quartiles':>14}{'ours ms':>9}{'BN ms':>8}")
    for layout in (torch.contiguous_format, torch.channels_last):
        x = torch.randn(SHAPE).to(memory_format=layout).requires_grad_()
        dy = torch.randn(SHAPE).to(memory_format=layout)
        print(f"{str(layout).removeprefix('torch.')}:")
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for name, make in variants.items():
                low, middle, high, ours, theirs = time_ratio(make, x, dy, chosen.rounds)
                print(f"{name:30}{threads:8}{middle:8.2f}{low:8.2f}-{high:.2f}{ours:9.2f}{theirs:8.2f}")
    size = x.numel() * x.element_size()
    print("\nalive between forward and backward, less input and output, in units of the input:")
    for name, make in {**variants, "nn.BatchNorm2d": nn.BatchNorm2d}.items():
        x = torch.randn(SHAPE, requires_grad=True)
        print(f"{name:30}{bytes_alive(make(SHAPE[1]), x) / size:8.4f}")


if __name__ == "__main__":
    main()
