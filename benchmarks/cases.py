"""What the benchmark compares: the cases, their sizes and their targets, as data and small builders."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

import streamnorm
from streamnorm import StreamingNorm

OURS = "streamnorm"
INPUT, HIDDEN, BATCH, STEPS = 100, 100, 32, 100  # of the recurrent cases
POOL = 64  # samples to cycle through at batch size 1, where one sample alone would have no spread
GROUPS = partial(nn.GroupNorm, 8)
COPY = "copy + triad"
CODES = ("BA1", "BA2", "BA3", "BA4", "BA5", "BA6", "SP1", "SP2", "SP3", "SP4", "SP5")


class Run(NamedTuple):
    """What is timed, the module in it, and its input where memory is counted in units of it."""

    call: Callable[[], None]
    module: nn.Module | None = None
    x: torch.Tensor | None = None


Contenders = dict[str, Callable[[], Run]]


@dataclass(frozen=True)
class Case:
    """Contenders that run interleaved; the first is ours, or the smallest where `kind` is "growth".

    `targets`: what ours is to cost at most, by contender. `more`: calls before timing, after the first update; the
    warm-up of a streaming norm is 256 elements per statistic, so batch size 1 needs many.
    """

    name: str
    contenders: Callable[[], Contenders]
    targets: dict[str, float] = field(default_factory=dict)
    more: int = 3
    kind: str = "ratio"


def fused():
    """Whether the fused kernels are there and in use."""
    try:
        from streamnorm.kernels import available
    except ImportError:
        return False
    return available()


def forward_backward(layer, x, dy):
    def call():
        x.grad = None
        y = layer(x)
        (y[0] if isinstance(y, tuple) else y).backward(dy)

    return Run(call, layer, x)


def plain_path(run):
    """The same, without the fused kernels."""
    from streamnorm.kernels import disabled

    def call():
        with disabled():
            run.call()

    return Run(call, run.module, run.x)


def training_step(model, x, target, momentum):
    """One SGD step on the next of the mini-batches `x[i]`, `target[i]`."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=momentum)
    i = 0

    def call():
        nonlocal i
        optimizer.zero_grad()
        F.cross_entropy(model(x[i]), target[i]).backward()
        optimizer.step()
        i = (i + 1) % len(x)

    return Run(call, model)


def copy_triad(x, dy):
    """The traffic nobody can avoid: forward reads one tensor and writes one, backward reads two and writes one."""
    x, y, dx = x.detach(), torch.empty_like(x), torch.empty_like(x)

    def call():
        y.copy_(x)
        torch.add(x, dy, alpha=0.5, out=dx)

    return Run(call)


class InstanceNorm(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))

    def forward(self, x):
        return F.instance_norm(x, weight=self.weight, bias=self.bias)


def tensors(shape, layout=torch.contiguous_format):
    """A leaf that wants its gradient, and the gradient of the output."""
    x, dy = (torch.randn(shape).to(memory_format=layout) for _ in range(2))
    return x.requires_grad_(), dy


def beside(make, names, shape, layout=torch.contiguous_format):
    """The norm that `make` makes, beside those of the `names`."""
    x, dy = tensors(shape, layout)
    others = {
        "nn.BatchNorm2d": nn.BatchNorm2d,
        "nn.BatchNorm1d": nn.BatchNorm1d,
        "nn.LayerNorm": lambda channels: nn.LayerNorm(shape[1:]),
        "nn.GroupNorm": GROUPS,
        "F.instance_norm": InstanceNorm,
    }
    norms = {OURS: make, **{name: others[name] for name in names if name != COPY}}
    runs = {name: lambda norm=norm: forward_backward(norm(shape[1]), x, dy) for name, norm in norms.items()}
    return {**runs, COPY: lambda: copy_triad(x, dy)} if COPY in names else runs


def layer_cases():
    images = ("nn.BatchNorm2d", "nn.LayerNorm", "nn.GroupNorm", "F.instance_norm", COPY)
    vectors = ("nn.BatchNorm1d", "nn.LayerNorm", COPY)
    contiguous = {
        (32, 64, 32, 32): {"nn.BatchNorm2d": 0.55, COPY: 2.3},
        (64, 128, 16, 16): {"nn.BatchNorm2d": 0.55, COPY: 2.3},
        (1, 64, 32, 32): {"nn.BatchNorm2d": 0.65},
    }
    for shape, targets in contiguous.items():
        name = "layers/" + "x".join(map(str, shape))
        yield Case(name, partial(beside, StreamingNorm, images, shape), targets)
        last = partial(beside, StreamingNorm, images, shape, torch.channels_last)
        yield Case(name + "-channels_last", last, {"nn.BatchNorm2d": 1.0})
    for name, settings in {"p=1": {"p": 1}, "center=mean": {"center": "mean"}}.items():
        ours = partial(StreamingNorm, **settings)
        yield Case(f"layers/32x64x32x32-{name}", partial(beside, ours, ["nn.BatchNorm2d"], (32, 64, 32, 32)))
    yield Case("layers/128x512", partial(beside, StreamingNorm, vectors, (128, 512)), {"nn.BatchNorm1d": 0.8})
    yield Case("layers/1x512", partial(beside, StreamingNorm, vectors, (1, 512)), more=300)


class NetB(nn.Module):
    """A small residual network for CIFAR's size: two blocks with a transition between them."""

    def __init__(self, norm, width=64):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.first, self.second = self.block(norm, width), self.block(norm, width)
        down = nn.Conv2d(width, width, 3, stride=2, padding=1)
        self.transition = nn.Sequential(norm(width), nn.ReLU(), down)
        self.head = nn.Sequential(norm(width), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))

    @staticmethod
    def block(norm, width):
        half = [(norm(width), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1)) for _ in range(2)]
        return nn.Sequential(*half[0], *half[1])

    def forward(self, x):
        h = self.stem(x)
        h = self.transition(h + self.first(h))
        return self.head(h + self.second(h))


def net_b():
    x, target = torch.randn(1, 32, 3, 32, 32), torch.randint(10, (1, 32))
    norms = {OURS: StreamingNorm, "nn.BatchNorm2d": nn.BatchNorm2d, "nn.GroupNorm": GROUPS}
    return {name: lambda norm=norm: training_step(NetB(norm), x, target, 0.9) for name, norm in norms.items()}


def net_a():
    x, target = torch.randn(POOL, 1, 3072), torch.randint(10, (POOL, 1))

    def model(norm):
        sizes = ((3072, 512), (512, 512), (512, 512))
        layers = [part for a, b in sizes for part in (nn.Linear(a, b, bias=False), norm(b), nn.ReLU())]
        return nn.Sequential(*layers, nn.Linear(512, 10))

    norms = {OURS: StreamingNorm, "nn.LayerNorm": nn.LayerNorm}
    return {name: lambda norm=norm: training_step(model(norm), x, target, 0.0) for name, norm in norms.items()}


class LayerNormRNN(nn.Module):
    """h_t = tanh(LN(W_x x_t) + LN(W_h h_{t-1})). The input's side needs no loop: a layer norm looks at one row."""

    def __init__(self, size, hidden):
        super().__init__()
        self.of_x, self.of_h = nn.Linear(size, hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.norm_x, self.norm_h = nn.LayerNorm(hidden), nn.LayerNorm(hidden)

    def forward(self, x):
        h, outputs = x.new_zeros(x.shape[1], self.of_h.out_features), []
        for product in self.norm_x(self.of_x(x)).unbind():
            h = torch.tanh(product + self.norm_h(self.of_h(h)))
            outputs.append(h)
        return torch.stack(outputs)


class LayerNormGRU(nn.Module):
    """The equations of `streamnorm.GRU` with layer norms."""

    def __init__(self, size, hidden):
        super().__init__()
        self.of_x = nn.Linear(size, 3 * hidden, bias=False)
        self.gates, self.new = nn.Linear(hidden, 2 * hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.norms_x, self.norms_h = (nn.ModuleList(nn.LayerNorm(hidden) for _ in range(3)) for _ in range(2))

    def forward(self, x):
        products = [norm(gate).unbind() for norm, gate in zip(self.norms_x, self.of_x(x).chunk(3, -1), strict=True)]
        norm_r, norm_z, norm_new = self.norms_h
        h, outputs = x.new_zeros(x.shape[1], self.new.out_features), []
        for of_r, of_z, of_new in zip(*products, strict=True):
            h_r, h_z = self.gates(h).chunk(2, -1)
            r, z = torch.sigmoid(of_r + norm_r(h_r)), torch.sigmoid(of_z + norm_z(h_z))
            h = z * torch.tanh(of_new + norm_new(self.new(h * r))) + (1 - z) * h
            outputs.append(h)
        return torch.stack(outputs)


def sequence(steps):
    return torch.randn(steps, BATCH, INPUT, requires_grad=True), torch.randn(steps, BATCH, HIDDEN)


def recurrent(kind, loop):
    x, dy = sequence(STEPS)
    layers = {OURS: getattr(streamnorm, kind), f"torch.nn.{kind}": getattr(nn, kind), "LayerNorm loop": loop}
    runs = {name: lambda make=make: forward_backward(make(INPUT, HIDDEN), x, dy) for name, make in layers.items()}
    if fused():
        runs["our plain path"] = lambda: plain_path(runs[OURS]())
    return runs


def growth_of_layers(shapes):
    return {
        size: lambda shape=shape: forward_backward(StreamingNorm(shape[1]), *tensors(shape))
        for size, shape in shapes.items()
    }


def growth_of_sequences():
    return {
        str(steps): lambda steps=steps: forward_backward(streamnorm.GRU(INPUT, HIDDEN), *sequence(steps))
        for steps in (10, 20, 50, 100, 200)
    }


def growth_of_references():
    x, dy = tensors((16, 32, 16, 16))
    return {code: lambda code=code: forward_backward(StreamingNorm(32, ref=code), x, dy) for code in CODES}


def growth_cases():
    channels = {str(c): (8, c, 16, 16) for c in (16, 32, 64, 128, 256, 512)}
    batches = {str(n): (n, 64, 16, 16) for n in (1, 2, 4, 8, 16, 32, 64)}
    yield Case("growth/channels", partial(growth_of_layers, channels), kind="growth")
    yield Case("growth/batch", partial(growth_of_layers, batches), kind="growth")
    yield Case("growth/timesteps", growth_of_sequences, kind="growth")
    yield Case("growth/reference", growth_of_references, kind="growth")


CASES = [
    *layer_cases(),
    Case("net_b/batch32", net_b, {"nn.BatchNorm2d": 1.0}),
    Case("recurrent/RNN", partial(recurrent, "RNN", LayerNormRNN)),
    Case("recurrent/GRU", partial(recurrent, "GRU", LayerNormGRU), {"torch.nn.GRU": 0.5, "LayerNorm loop": 0.2}),
    Case("net_a/batch1", net_a, {"nn.LayerNorm": 1.15}, more=300),
    Case(
        "memory/32x64x32x32",
        partial(beside, StreamingNorm, ["nn.BatchNorm2d"], (32, 64, 32, 32)),
        {"alive: the input": 1.01, "peak: nn.BatchNorm2d": 1.0},
        kind="memory",
    ),
    *growth_cases(),
]
