"""The networks of the paper's experiments, with any norm (section 6 of the design; A and D are reconstructed).

A norm is made by `make(channels, steps)` and called as `norm(x, step=t)`: t counts the calls in one forward pass, which
time-specific norms need to know.
"""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, cast

from torch import Tensor, nn

from .. import GRU, RNN, GeneralBatchNorm, SampleNorm, StreamingNorm, TimeSpecificNorm, weight_standardize
from ..core.config import SETTINGS
from . import peers
from .peers import Nothing, activation_for, end_for
from .runs import Norm, Run

Make = Callable[[int, int], nn.Module]
SIDE = 32  # of an image
HEAD = "head"  # the name of a last layer, which no norm follows
PEERS: dict[str, Callable[..., nn.Module]] = {
    "renorm": peers.BatchRenorm,
    "online": peers.OnlineNorm,
    "mabn": peers.MovingAverageBatchNorm,
    "frn": peers.FilterResponseNorm,
}


def make_norm(norm: Norm, channels: int, steps: int, **place: object) -> nn.Module:
    """The layer that `norm` describes; `steps`: how often it is called in one forward pass."""
    common: Any = {"ref": norm.ref, "p": norm.p, "center": norm.center, "eps": norm.eps} | place
    if norm.kind == "sample":
        return SampleNorm(channels, **common)
    if norm.kind == "batch":
        return GeneralBatchNorm(channels, momentum=norm.momentum, **common)
    if norm.kind == "timed":
        return TimeSpecificNorm(channels, steps, momentum=norm.momentum, **common)
    if norm.kind == "streaming":
        own: Any = {name: getattr(norm, name) for name in SETTINGS if hasattr(norm, name)}
        return StreamingNorm(channels, **own, **place)  # type: ignore[arg-type]
    if norm.kind == "group":
        return GroupNorm(4, channels, eps=norm.eps)
    if norm.kind in PEERS:  # a schedule is in mini-batches, and each calls the layer `steps` times
        schedule: Any = {"schedule": [steps * count for count in norm.schedule]} if norm.schedule else {}
        return PEERS[norm.kind](channels, **schedule, **place)
    if norm.kind in ("none", "zero"):
        return Nothing() if norm.kind == "none" else peers.ZeroBranch()
    known = ", ".join(["sample, batch, timed, streaming", *PEERS, "zero"])
    raise ValueError(f"norm kind {norm.kind!r}: must be {known}, group or none")


class GroupNorm(nn.GroupNorm):
    """Called as the other norms are."""

    def forward(self, x: Tensor, mask: Tensor | None = None, step: int = 0) -> Tensor:
        return super().forward(x)


def build(run: Run, symbols: int = 0) -> nn.Module:
    """The network of a run; `symbols`: those of the text. Seed torch first: the weights are drawn here."""
    model = _net(run, symbols)
    if run.net == "resnet" or run.norm.kind == "zero":
        peers.start_as_he(model, skip=HEAD)
    if run.norm.kind == "mabn":
        peers.centralize(model, skip=HEAD)
    if run.start != 1.0:
        enlarge(model, run.start)
    if run.gain != 1.0:
        begin_with(model, run.gain)
    if run.standardized:
        weight_standardize(
            model, keep_scale=run.kept_scale, skip=lambda name, layer: name.split(".")[-1] == HEAD, report=None
        )
    return model


def enlarge(model: nn.Module, factor: float) -> None:
    """Multiply the first weights, but those of norms and of the last layer."""
    for name, weight in model.named_parameters():
        if weight.dim() > 1 and HEAD not in name.split("."):
            weight.data.mul_(factor)


def begin_with(model: nn.Module, gain: float) -> None:
    """The gains of norms: the weights that are vectors."""
    for name, weight in model.named_parameters():
        if weight.dim() == 1 and name.endswith("weight"):
            nn.init.constant_(weight, gain)


def _net(run: Run, symbols: int) -> nn.Module:
    make = partial(make_norm, run.norm)
    if run.net == "A":
        return NetA(make, run.width)
    if run.net == "C":
        return NetC(make, run.width, *run.unroll, tied=run.tied)
    if run.net == "D":
        return NetD(make, run.width, run.unroll[0])
    if run.net == "rows":
        return NetRows(run)
    if run.net == "resnet":
        return ResNet(make, run.width)
    if run.is_text:
        return CharModel(run, symbols)
    raise ValueError(f"net {run.net!r}: must be A, C, D, resnet, rows, rnn or gru")


class NetA(nn.Module):
    """Fully connected: three times Linear - norm - ReLU, and a Linear."""

    def __init__(self, make: Make, width: int) -> None:
        super().__init__()
        sizes = [3 * SIDE * SIDE, width, width, width]
        self.products = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in pairwise(sizes))
        self.norms = nn.ModuleList(make(size, 1) for size in sizes[1:])
        self.activations = nn.ModuleList(map(activation_for, self.norms))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = x.flatten(1)
        for product, norm, activation in zip(self.products, self.norms, self.activations, strict=True):
            h = activation(norm(product(h)))
        return cast(Tensor, self.head(h))


class Transition(nn.Module):
    """Norm - ReLU - convolution."""

    def __init__(self, norm: nn.Module, convolution: nn.Module) -> None:
        super().__init__()
        self.norm, self.activation, self.convolution = norm, activation_for(norm), convolution

    def forward(self, h: Tensor, step: int = 0) -> Tensor:
        return cast(Tensor, self.convolution(self.activation(self.norm(h, step=step))))


class Block(nn.Module):
    """h + Conv(ReLU(N2(Conv(ReLU(N1(h))))))"""

    def __init__(self, make: Make, width: int, steps: int) -> None:
        super().__init__()
        self.one = Transition(make(width, steps), conv3x3(width, width))
        self.two = Transition(make(width, steps), conv3x3(width, width))
        self.end = end_for(self.two.norm)

    def forward(self, h: Tensor, step: int = 0) -> Tensor:
        return cast(Tensor, h + self.end(self.two(self.one(h, step), step)))


class Readout(nn.Module):
    """ReLU(N(h)), average over space, Linear."""

    def __init__(self, make: Make, width: int) -> None:
        super().__init__()
        self.norm, self.head = make(width, 1), nn.Linear(width, 10)
        self.activation = activation_for(self.norm)

    def forward(self, h: Tensor) -> Tensor:
        return cast(Tensor, self.head(self.activation(self.norm(h)).mean((2, 3))))


class NetC(nn.Module):
    """Residual: a block repeated `first` times, a transition to half the size, a block repeated `second` times.

    Tied, a block repeats with the same weights and the same norms: a convolutional RNN. With `first = second = 1` this
    is net B.
    """

    def __init__(self, make: Make, width: int, first: int, second: int, tied: bool = True) -> None:
        super().__init__()
        self.tied, self.repeats = tied, (first, second)
        self.stem = conv3x3(3, width)
        self.stages = nn.ModuleList(
            nn.ModuleList(Block(make, width, k if tied else 1) for _ in range(1 if tied else k)) for k in self.repeats
        )
        self.transition = Transition(make(width, 1), conv3x3(width, width, stride=2))
        self.readout = Readout(make, width)

    def forward(self, x: Tensor) -> Tensor:
        h = self._stage(0, self.stem(x))
        return cast(Tensor, self.readout(self._stage(1, self.transition(h))))

    def _stage(self, i: int, h: Tensor) -> Tensor:
        blocks = cast(nn.ModuleList, self.stages[i])
        for t in range(self.repeats[i]):
            h = blocks[0](h, t) if self.tied else blocks[t](h)
        return h


class NetD(nn.Module):
    """Densely recurrent: two states, each fed by both at every step."""

    def __init__(self, make: Make, width: int, steps: int) -> None:
        super().__init__()
        self.steps = steps
        self.stem = conv3x3(3, width)
        up = nn.ConvTranspose2d(width, width, 4, stride=2, padding=1)
        self.t11, self.t22, self.t12, self.t21 = (
            Transition(make(width, steps), convolution)
            for convolution in (conv3x3(width, width), conv3x3(width, width), conv3x3(width, width, stride=2), up)
        )
        self.readout = Readout(make, width)

    def forward(self, x: Tensor) -> Tensor:
        one = self.stem(x)
        two = one.new_zeros(*one.shape[:2], one.shape[2] // 2, one.shape[3] // 2)
        for t in range(self.steps):
            one, two = one + self.t11(one, t) + self.t21(two, t), two + self.t22(two, t) + self.t12(one, t)
        return cast(Tensor, self.readout(two))


class ResNet(nn.Module):
    """ResNet-8: Conv3x3 - norm - ReLU, three stages of one basic block each, average over space, Linear.

    The stages have width, 2 width and 4 width channels; the second and the third halve the side of the image.
    """

    def __init__(self, make: Make, width: int) -> None:
        super().__init__()
        self.stem, self.norm = conv3x3(3, width), make(width, 1)
        self.activation = activation_for(self.norm)
        sizes = [width, width, 2 * width, 4 * width]
        self.stages = nn.Sequential(*(BasicBlock(make, a, b) for a, b in pairwise(sizes)))
        self.head = nn.Linear(sizes[-1], 10)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stages(self.activation(self.norm(self.stem(x))))
        return cast(Tensor, self.head(h.mean((2, 3))))


class BasicBlock(nn.Module):
    """ReLU(N2(Conv(ReLU(N1(Conv(h))))) + shortcut(h)), with N3(Conv1x1(h)) for a shortcut where the shape changes."""

    def __init__(self, make: Make, inputs: int, outputs: int) -> None:
        super().__init__()
        stride = 1 if inputs == outputs else 2
        self.one, self.norm_one = conv3x3(inputs, outputs, stride), make(outputs, 1)
        self.two, self.norm_two = conv3x3(outputs, outputs), make(outputs, 1)
        self.inner, self.outer, self.end = (
            activation_for(self.norm_one),
            activation_for(self.norm_two),
            end_for(self.norm_two),
        )
        self.shortcut = nn.Sequential()
        if stride > 1:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride=stride), make(outputs, 1))

    def forward(self, h: Tensor) -> Tensor:
        branch = self.norm_two(self.two(self.inner(self.norm_one(self.one(h)))))
        return cast(Tensor, self.outer(self.end(branch) + self.shortcut(h)))


class NetRows(nn.Module):
    """An RNN that reads an image from the top, a strip of `chunk` rows at a step, and a Linear on its last state."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.strip = run.chunk
        norm = None if run.norm.kind in ("none", "zero") else partial(make_norm, run.norm, steps=SIDE // run.chunk)
        self.recurrent = RNN(3 * SIDE * run.chunk, run.width, norm=norm)
        self.head = nn.Linear(run.width, 10)

    def forward(self, x: Tensor) -> Tensor:
        # (T, N, 3, strip, 32)
        strips = x.unflatten(2, (-1, self.strip)).movedim(2, 0)  # type: ignore[no-untyped-call]
        _, state = self.recurrent(strips.flatten(2))
        return cast(Tensor, self.head(cast(Tensor, state)[-1]))


class CharModel(nn.Module):
    """A recurrent layer over characters, and a Linear to the next character's logits."""

    def __init__(self, run: Run, symbols: int) -> None:
        super().__init__()
        layer = {"rnn": RNN, "gru": GRU}[run.net]
        self.recurrent = layer(symbols, run.width, norm=partial(make_norm, run.norm, steps=run.chunk))
        self.head = nn.Linear(run.width, symbols)

    def forward(self, text: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """`text` `(T, N)` -> logits `(T, N, symbols)` and the state to go on from."""
        output, state = self.recurrent(text, state)
        return self.head(output), cast(Tensor, state).detach()


def conv3x3(inputs: int, outputs: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1)
