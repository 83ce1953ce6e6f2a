"""What layers and a training step cost on a device, beside norms of torch.nn: as they are, and compiled."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from ... import StreamingNorm
from ..devices import synchronize
from ..race import Call, race, ratio, settled

OURS = "streamnorm"
SHAPES = ((32, 64, 32, 32), (1, 64, 32, 32), (128, 512))
STEP = "training step"
BATCH, WIDTH, SIDE = 32, 16, 32  # of the training step
ROUND_SECONDS = 0.05
SETTLING_SECONDS = 0.1
MORE_CALLS = 20
LATE = "not tried: the compiler has had its time, see --compile-seconds"

Make = Callable[..., nn.Module]  # a norm, of (channels, *space)


def _layer_norm(*sizes: int) -> nn.Module:
    return nn.LayerNorm(list(sizes))


NORMS: dict[str, Make] = {
    OURS: lambda channels, *space: StreamingNorm(channels),
    "nn.BatchNorm": lambda channels, *space: (nn.BatchNorm2d if space else nn.BatchNorm1d)(channels),
    "nn.LayerNorm": _layer_norm,
    "nn.GroupNorm": lambda channels, *space: nn.GroupNorm(8, channels),
}


class Time(NamedTuple):
    """Of one contender in one case; `ratio`: ours / theirs, the median over the rounds."""

    case: str
    compiled: bool
    against: str
    ours: float = 0.0  # milliseconds, as the next
    theirs: float = 0.0
    ratio: float = 0.0
    words: str = ""  # why there are no numbers


class Contender(NamedTuple):
    module: nn.Module
    call: Call


def layer(make: Make, shape: tuple[int, ...], device: torch.device, compiled: bool) -> Contender:
    """Forward and backward of a layer alone."""
    module = make(*shape[1:]).to(device)
    called: Any = torch.compile(module) if compiled else module
    x, dy = (torch.randn(shape).to(device) for _ in range(2))
    x.requires_grad_()

    def call() -> None:
        x.grad = None
        called(x).backward(dy)

    return Contender(module, call)


def net(make: Make) -> nn.Module:
    """Three convolutions with a norm each, and a Linear."""
    sizes = [(3, WIDTH, SIDE, 1), (WIDTH, 2 * WIDTH, SIDE // 2, 2), (2 * WIDTH, 2 * WIDTH, SIDE // 2, 1)]
    parts: list[nn.Module] = []
    for inputs, outputs, side, stride in sizes:
        convolution = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        parts += [convolution, make(outputs, side, side), nn.ReLU()]
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * WIDTH, 10))


def step(make: Make, device: torch.device, compiled: bool) -> Contender:
    """Forward, backward and an update by SGD."""
    module = net(make).to(device)
    called: Any = torch.compile(module) if compiled else module
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)
    x, y = torch.randn(BATCH, 3, SIDE, SIDE).to(device), torch.randint(10, (BATCH,)).to(device)

    def call() -> None:
        optimizer.zero_grad()
        F.cross_entropy(called(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return Contender(module, call)


def measure(
    device: torch.device, rounds: int, compiling: float, say: Callable[[str], None] = lambda line: None
) -> Iterator[Time]:
    """All cases as they are, then compiled, as long as the compiler has not had `compiling` seconds yet."""
    builders: dict[str, Callable[..., Contender]] = {
        STEP: partial(step, device=device),
        **{"x".join(map(str, shape)): partial(layer, shape=shape, device=device) for shape in SHAPES},
    }
    until = math.inf
    for compiled in (False, True):
        if compiled:
            until = time.perf_counter() + compiling
        for case, build in builders.items():
            if time.perf_counter() < until:
                say(f"measuring {case}{', compiled' * compiled} ...")
            makers = {name: partial(build, make, compiled=compiled) for name, make in NORMS.items()}
            yield from _timed(case, compiled, *_ready(makers, device, until), rounds, device)


def _ready(
    makers: Mapping[str, Callable[[], Contender]], device: torch.device, until: float
) -> tuple[dict[str, tuple[Call, float]], dict[str, str]]:
    """Those that run, settled, with the seconds of a call; and why the others do not. None is begun after `until`."""
    ready: dict[str, tuple[Call, float]] = {}
    failed: dict[str, str] = {}
    for name, make in makers.items():
        if time.perf_counter() >= until and len(ready) != 1:  # one alone says nothing: ours has a rival at least
            failed[name] = LATE
            continue
        torch.manual_seed(0)
        try:
            module, call = make()
            call()
        except Exception as error:  # no compiler, not enough memory, an operator that is not there: all of it is news
            words = str(error).strip().splitlines() or [""]
            failed[name] = f"{type(error).__name__}: {words[0][:200]}"
            continue
        ready[name] = call, settled(call, module, MORE_CALLS, SETTLING_SECONDS, partial(synchronize, device))
    return ready, failed


def _timed(
    case: str,
    compiled: bool,
    ready: dict[str, tuple[Call, float]],
    failed: dict[str, str],
    rounds: int,
    device: torch.device,
) -> Iterator[Time]:
    if OURS in failed:
        yield Time(case, compiled, "", words=failed[OURS])
        return
    times = race(ready, rounds, ROUND_SECONDS, partial(synchronize, device))
    ms = {name: 1e3 * median(each) for name, each in times.items()}
    for name in NORMS:
        if name in failed:
            yield Time(case, compiled, name, ms[OURS], words=failed[name])
        elif name != OURS:
            yield Time(case, compiled, name, ms[OURS], ms[name], ratio(times[OURS], times[name]))
