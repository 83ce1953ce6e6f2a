"""What the benchmark compares: the cases, their sizes and their targets, as data and small builders."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import loop
import torch
import torch.nn.functional as F
from nets import GroupNormOfSteps, LayerNormGRU, LayerNormLSTM, LayerNormRNN, NetB
from torch import nn

import streamnorm
from streamnorm import StreamingNorm
from streamnorm.lab.models import NetA

OURS = "streamnorm"
INPUT, HIDDEN, BATCH, STEPS = 100, 100, 32, 100  # of the recurrent cases
SYMBOLS = 84  # of the character model
POOL = 64  # samples to cycle through at batch size 1, where one sample alone would have no spread
GROUPS = partial(nn.GroupNorm, 8)
COPY = "copy + triad"
EMPTY = "an empty Function"
STEP = "a training step"
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


class Empty(torch.autograd.Function):
    """As many tensors in and out as our layer, and nothing computed: what torch asks of any layer written in Python."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight), torch.empty_like(weight)


class EmptyLayer(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))

    def forward(self, x):
        return Empty.apply(x, self.weight, self.bias)


class InstanceNorm(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))

    def forward(self, x):
        return F.instance_norm(x, weight=self.weight, bias=self.bias)


def tensors(shape, layout=torch.contiguous_format, dtype=torch.float32):
    """A leaf that wants its gradient, and the gradient of the output."""
    x, dy = (torch.randn(shape).to(dtype, memory_format=layout) for _ in range(2))
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
        EMPTY: EmptyLayer,
    }
    norms = {OURS: make, **{name: others[name] for name in names if name != COPY}}
    runs = {name: lambda norm=norm: forward_backward(norm(shape[1]), x, dy) for name, norm in norms.items()}
    return {**runs, COPY: lambda: copy_triad(x, dy)} if COPY in names else runs


def half_precision(shape, layout=torch.contiguous_format):
    """In bfloat16, with parameters in float32, as under autocast, and cast as a whole."""
    x, dy = tensors(shape, layout, torch.bfloat16)
    channels = shape[1]
    return {
        OURS: lambda: forward_backward(StreamingNorm(channels), x, dy),
        "nn.BatchNorm2d": lambda: forward_backward(nn.BatchNorm2d(channels), x, dy),
        "nn.BatchNorm2d, cast": lambda: forward_backward(nn.BatchNorm2d(channels).bfloat16(), x, dy),
        "ours, cast": lambda: forward_backward(StreamingNorm(channels).bfloat16(), x, dy),
        COPY: lambda: copy_triad(x, dy),
    }


def evaluation(layer, x):
    layer.eval()

    def call():
        with torch.no_grad():
            layer(x)

    return Run(call, layer, x)


def evaluated(shape):
    """A call in evaluation mode, without gradients."""
    x, norm = torch.randn(shape), nn.BatchNorm2d if len(shape) == 4 else nn.BatchNorm1d
    return {
        OURS: lambda: evaluation(StreamingNorm(shape[1]), x),
        f"nn.{norm.__name__}": lambda: evaluation(norm(shape[1]), x),
    }


def layer_cases():
    images = ("nn.BatchNorm2d", "nn.LayerNorm", "nn.GroupNorm", "F.instance_norm", COPY)
    vectors = ("nn.BatchNorm1d", "nn.LayerNorm", COPY, EMPTY)
    contiguous = {
        (32, 64, 32, 32): {"nn.BatchNorm2d": 0.55},
        (64, 128, 16, 16): {"nn.BatchNorm2d": 0.55},
        (1, 64, 32, 32): {"nn.BatchNorm2d": 0.65},
    }
    for shape, targets in contiguous.items():
        name = "layers/" + "x".join(map(str, shape))
        others = (*images, EMPTY) if shape[0] == 1 else images
        yield Case(name, partial(beside, StreamingNorm, others, shape), targets)
        last = partial(beside, StreamingNorm, others, shape, torch.channels_last)
        yield Case(name + "-channels_last", last, {"nn.BatchNorm2d": 1.0})
    for name, settings in {"p=1": {"p": 1}, "center=mean": {"center": "mean"}}.items():
        ours = partial(StreamingNorm, **settings)
        yield Case(f"layers/32x64x32x32-{name}", partial(beside, ours, ["nn.BatchNorm2d"], (32, 64, 32, 32)))
    half = {"nn.BatchNorm2d": 1.0, "nn.BatchNorm2d, cast": 1.0}
    yield Case("layers/32x64x32x32-bfloat16", partial(half_precision, (32, 64, 32, 32)), half)
    last = partial(half_precision, (32, 64, 32, 32), torch.channels_last)
    yield Case("layers/32x64x32x32-bfloat16-channels_last", last, half)
    if fused():
        for shape in ((32, 64, 32, 32), (64, 128, 16, 16)):
            yield Case("kernels/" + "x".join(map(str, shape)), partial(kernels_alone, shape), {COPY: 2.3})
    yield Case("layers/128x512", partial(beside, StreamingNorm, vectors, (128, 512)), {"nn.BatchNorm1d": 0.8})
    yield Case("layers/1x512", partial(beside, StreamingNorm, vectors, (1, 512)), more=300)
    for shape in ((32, 64, 32, 32), (1, 64, 32, 32), (1, 512)):
        yield Case("evaluation/" + "x".join(map(str, shape)), partial(evaluated, shape), more=30)


def net_b():
    x, target = torch.randn(1, 32, 3, 32, 32), torch.randint(10, (1, 32))
    norms = {OURS: StreamingNorm, "nn.BatchNorm2d": nn.BatchNorm2d, "nn.GroupNorm": GROUPS}
    return {name: lambda norm=norm: training_step(NetB(norm), x, target, 0.9) for name, norm in norms.items()}


def net_a():
    x, target = torch.randn(POOL, 1, 3072), torch.randint(10, (POOL, 1))
    norms = {OURS: StreamingNorm, "nn.LayerNorm": nn.LayerNorm}

    def model(norm):
        return NetA(lambda channels, steps: norm(channels), 512)

    return {name: lambda norm=norm: training_step(model(norm), x, target, 0.0) for name, norm in norms.items()}


def sequence(steps):
    return torch.randn(steps, BATCH, INPUT, requires_grad=True), torch.randn(steps, BATCH, HIDDEN)


def products(gates):
    """The matrix products of a recurrent layer with so many gates, forward and backward, and nothing else.

    Those of the hidden state as if all timesteps were known: no such layer can be faster with the same products.
    """
    rows, wide = STEPS * BATCH, gates * HIDDEN
    pairs = [(torch.randn(rows, size), torch.randn(wide, size)) for size in (INPUT, HIDDEN)]
    gradient = torch.randn(rows, wide)

    def call():
        for x, weight in pairs:
            torch.mm(x, weight.t())
            torch.mm(gradient, weight)
            torch.mm(gradient.t(), x)

    return Run(call)


def recurrent(kind, loop, gates):
    x, dy = sequence(STEPS)
    layers = {
        OURS: getattr(streamnorm, kind),
        f"torch.nn.{kind}": getattr(nn, kind),
        "LayerNorm loop": loop,
        "LayerNorm loop, input ahead": partial(loop, ahead=True),
    }
    runs = {name: lambda make=make: forward_backward(make(INPUT, HIDDEN), x, dy) for name, make in layers.items()}
    runs["its matrix products"] = lambda: products(gates)
    if fused():
        runs["our plain path"] = lambda: plain_path(runs[OURS]())
    return runs


def characters():
    """One-hot input of a character model: indices for us, which torch.nn does not take."""
    indices, dy = torch.randint(SYMBOLS, (STEPS, BATCH)), torch.randn(STEPS, BATCH, HIDDEN)
    vectors = F.one_hot(indices, SYMBOLS).float()
    return {
        OURS: lambda: forward_backward(streamnorm.GRU(SYMBOLS, HIDDEN), indices, dy),
        "torch.nn.GRU": lambda: forward_backward(nn.GRU(SYMBOLS, HIDDEN), vectors, dy),
    }


def videos():
    x, dy = torch.randn(8, 10, 16, 16, 16, requires_grad=True), torch.randn(8, 10, 32, 16, 16)
    norms = {OURS: StreamingNorm, "nn.GroupNorm": GroupNormOfSteps, "no norm": None}
    runs = {
        name: lambda norm=norm: forward_backward(streamnorm.ConvGRU(16, 32, norm=norm), x, dy)
        for name, norm in norms.items()
    }
    if fused():
        runs["our plain path"] = lambda: plain_path(runs[OURS]())
    return runs


def kernels_alone(shape):
    """The kernels by themselves, between tensors that are there already."""
    from streamnorm.backends.cpu import binding

    (x, dy), layer = tensors(shape), StreamingNorm(shape[1], warmup=1)
    layer(x)
    prepared = layer.__dict__["_known"].plan.prepared
    x, y, dx = x.detach(), torch.empty(shape), torch.empty(shape)
    dgain, dbias, kept = *torch.empty(2, shape[1]), prepared.new_kept()
    gain, bias = layer.weight, layer.bias

    def call():
        of, fixed = (prepared.element, prepared.settings), (*prepared.layout, torch.get_num_threads())
        fixed += tuple(t.data_ptr() for t in (x, gain, bias, kept))
        binding.layer_forward(*of, prepared.h1_record, *fixed, len(x), True, y.data_ptr())
        out = (t.data_ptr() for t in (dx, dgain, dbias))
        binding.layer_backward(*of, prepared.looked.h2_record, *fixed, dy.data_ptr(), 1.0, *out)

    return {OURS: lambda: Run(call), COPY: lambda: copy_triad(x, dy)}


def agent_step(norm, how):
    """A step of a small agent: it acts on one observation without learning, then learns from sixteen."""
    model = nn.Sequential(
        nn.Linear(8, 64), norm(64), nn.ReLU(), nn.Linear(64, 64), norm(64), nn.ReLU(), nn.Linear(64, 4)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    one, many, target = torch.randn(1, 8), torch.randn(16, 8), torch.randint(4, (16,))

    def act():
        with torch.no_grad():
            model(one)

    def call():
        if how == "paused":
            with streamnorm.paused(model):
                act()
        else:
            model.eval()
            act()
            model.train()
        optimizer.zero_grad()
        F.cross_entropy(model(many), target).backward()
        optimizer.step()

    return Run(call, model)


def agent(how):
    return {OURS: lambda: agent_step(StreamingNorm, how), "nn.LayerNorm": lambda: agent_step(nn.LayerNorm, how)}


def net_b_compiled():
    x, target = torch.randn(1, 32, 3, 32, 32), torch.randint(10, (1, 32))

    def step(norm):
        return training_step(torch.compile(NetB(norm), fullgraph=True), x, target, 0.9)

    return {
        OURS: lambda: step(StreamingNorm),
        "nn.BatchNorm2d, compiled": lambda: step(nn.BatchNorm2d),
        "ours, not compiled": lambda: training_step(NetB(StreamingNorm), x, target, 0.9),
    }


def lab_loop(run):
    return {OURS: lambda: Run(*loop.loop(run)), loop.BARE: lambda: Run(*loop.bare(run))}


def net_b_step():
    x, target = torch.randn(1, 32, 3, 32, 32), torch.randint(10, (1, 32))
    return training_step(NetB(StreamingNorm), x, target, 0.9)


def watched_step():
    """A training step and a look at the health of its layers."""
    run = net_b_step()

    def call():
        run.call()
        streamnorm.monitor(run.module)

    return Run(call, run.module)


def look():
    """The look alone, at a network that has been trained a little."""
    run = net_b_step()
    run.call()
    return Run(lambda: streamnorm.monitor(run.module), run.module)


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
    Case("compiled/net_b", net_b_compiled, {"nn.BatchNorm2d, compiled": 1.05, "ours, not compiled": 1.0}),
    Case("recurrent/RNN", partial(recurrent, "RNN", LayerNormRNN, 1)),
    Case("recurrent/GRU", partial(recurrent, "GRU", LayerNormGRU, 3), {"torch.nn.GRU": 0.5, "LayerNorm loop": 0.2}),
    Case("recurrent/GRU-one_hot", characters, {"torch.nn.GRU": 0.5}),
    Case("recurrent/LSTM", partial(recurrent, "LSTM", LayerNormLSTM, 4), {"torch.nn.LSTM": 0.6}),
    Case("recurrent/ConvGRU", videos),
    Case("net_a/batch1", net_a, {"nn.LayerNorm": 1.15}, more=300),
    Case("agent/eval", partial(agent, "eval"), more=30),
    Case("agent/paused", partial(agent, "paused"), more=30),
    Case(
        "memory/32x64x32x32",
        partial(beside, StreamingNorm, ["nn.BatchNorm2d"], (32, 64, 32, 32)),
        {"alive: the input": 1.01, "peak: nn.BatchNorm2d": 1.0},
        kind="memory",
    ),
    Case("lab/net_b-batch32", partial(lab_loop, loop.NET_B), {loop.BARE: 1.05}),
    Case("lab/net_a-batch1", partial(lab_loop, loop.NET_A), {loop.BARE: 1.25}),
    Case("monitor/net_b-batch32", lambda: {OURS: watched_step, STEP: net_b_step}, {STEP: 1.02}),
    Case("monitor/alone", lambda: {OURS: look, STEP: net_b_step}, {STEP: 0.02}),
    *growth_cases(),
]
