"""A training of one layer as a case, its results by a backend on a device, and how far they are from the law's.

The law is plain torch in float64 on the CPU. No backend is known here by its name; the tests use the same functions.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ... import GeneralBatchNorm, SampleNorm, StreamingNorm, TimeSpecificNorm, backends
from ..runs import DEFAULT_DEVICE

STEPS = 3
KINDS: dict[str, Callable[..., Any]] = {
    "streaming": StreamingNorm,
    "batch": GeneralBatchNorm,
    "steps": lambda size, **settings: TimeSpecificNorm(size, STEPS, **settings),
    "sample": SampleNorm,
    "instance": partial(SampleNorm, ref="SP2"),
}
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x.contiguous(),
    "channels last": lambda x: x.movedim(1, -1).contiguous().movedim(-1, 1),
    "with gaps": lambda x: torch.cat([x, x], 1)[:, : x.shape[1]],
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "expanded": lambda x: x[:1].expand(x.shape),
}
# How far a result may be from the law's, in parts of the largest value: by the type that it is given in.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16

Fed = tuple[Tensor, Tensor, Tensor | None]  # of a call: the input, the gradient that comes back, and the mask
Feed = Callable[[Any], Fed]  # makes that for a layer, one call after the other
Seen = dict[str, Tensor]  # all that can be seen of a training, by name


@dataclass(frozen=True)
class Case:
    """A layer, its inputs, and how it is trained."""

    kind: str = "streaming"
    shape: tuple[int, ...] = (6, 5, 4)  # (N, C, *space)
    settings: dict[str, Any] = field(default_factory=dict)
    layouts: tuple[str, str] = ("contiguous", "contiguous")  # of the input and of the gradient that comes back
    dtypes: tuple[torch.dtype, torch.dtype] = (F32, F32)  # of the input and of the layer
    absent: tuple[str, ...] = ()  # of ("weight", "bias")
    masked: bool = False
    windows: tuple[tuple[int, ...], ...] = ((1,), (2,), (1, 1))  # per update: calls before each of its backward passes
    chained: bool = False  # the calls before a backward pass get what the one before gave
    scale: float = 1.0  # of the input
    bad: tuple[Any, ...] = ()  # a value, whether it is in "x" or "dy", the call, and the sample
    seed: int = 0


def data(shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """An input with an offset per channel, and a gradient: neither's sums over a channel are near 0 by chance.

    The first channel is the farthest from 0, and may be the only one.
    """
    wide = (1, -1, *(1 for _ in shape[2:]))
    offset, scale = (torch.linspace(*ends, shape[1], dtype=F64).view(wide) for ends in ((3.0, 0.5), (2.0, 0.5)))
    z = torch.randn(shape, dtype=F64)
    return offset + scale * z, 0.5 + 0.5 * z + 0.5 * torch.randn(shape, dtype=F64)


def away_from_center(x: Tensor, layer: Any) -> Tensor:
    """Without elements so close to c that rounding decides their sign, on which the gradient for p = 1 depends."""
    dims = range(x.ndim)
    kept = [0] * (not layer.ref.samples) + [1] * (layer.ref.channels == "each")
    c = x.mean([d for d in dims if d not in kept], keepdim=True)
    if layer.center == "zero":
        c = torch.zeros_like(c)
    elif layer.center == "running" and isinstance(layer, StreamingNorm):
        started = layer.state_dict()["seen"] > 0 or not layer.warmup
        c = layer.mean.view([x.shape[d] if d in kept else 1 for d in dims]) if started else c.mean()
    distance, least = x - c, 1e-3 * x.std()
    return torch.where(distance.abs() < least, c + least.copysign(distance), x)


def layer_of(case: Case) -> Any:
    torch.manual_seed(case.seed)
    layer = KINDS[case.kind](case.shape[1], dtype=case.dtypes[1], **case.settings)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.uniform_(0.5, 2)
    for name in case.absent:
        setattr(layer, name, None)
    return layer


def feeder(case: Case) -> Feed:
    """Makes the data of one call after the other."""
    torch.manual_seed(case.seed + 1)
    number = iter(range(1000))

    def feed(layer: Any) -> Fed:
        x, dy = data(case.shape)
        x = x * case.scale
        if layer.p == 1 and not case.chained and not layer.ref.located:
            x = away_from_center(x, layer)
        mask = None
        if case.masked:
            mask = torch.rand(case.shape[0], *case.shape[2:]) < 0.7
            mask.view(-1)[:2] = True
            mask[1:, ...] |= ~mask[1:].flatten(1).any(1).view(-1, *(1 for _ in case.shape[2:]))
        if case.bad and case.bad[2] == next(number):
            value, place, _, sample = case.bad
            (x if place == "x" else dy)[sample, 2].view(-1)[:1] = value
        x, dy = x.to(case.dtypes[0]), dy.to(case.dtypes[0])
        if layer.channel_dim == -1:
            x, dy = x.movedim(1, -1).contiguous(), dy.movedim(1, -1).contiguous()
        x, dy = (LAYOUTS[layout](t) for layout, t in zip(case.layouts, (x, dy), strict=True))
        return x, dy, mask

    return feed


def state_of(layer: Any) -> Seen:
    """Everything that a layer remembers; mean and sigma by themselves, as they have sizes of their own."""
    found: Seen = {}
    for name, value in layer.state_dict().items():
        if name in ("weight", "bias"):
            continue
        rows = enumerate(value) if name.endswith(("long", "short")) else [("", value)]
        found |= {f"{name} {row}".strip(): part.clone() for row, part in rows}
    return found


def train(
    layer: Any, case: Case, feed: Feed, called: Callable[..., Tensor] | None = None, between: bool = True
) -> Seen:
    """All that can be seen of a training: outputs, gradients, and the state after every pass.

    `between`: also after forward passes, before their backward pass.
    """
    called, call = layer if called is None else called, 0
    found: Seen = {}
    for update, passes in enumerate(case.windows):
        for number, calls in enumerate(passes):
            layer.zero_grad()
            xs, ys, dys = list[Tensor](), list[Tensor](), list[Tensor]()
            for i in range(calls):
                x, dy, mask = feed(layer)
                xs.append(x.detach().requires_grad_())
                given = xs[-1] + 0.5 * ys[-1] if case.chained and ys else xs[-1]
                ys.append(called(given, mask=mask, step=call % (STEPS + 1)))
                dys.append(dy)
                call += 1
                seen = state_of(layer) if between else {}
                found |= {f"{update}.{number} after call {i}: {name}": value for name, value in seen.items()}
            torch.autograd.backward(ys, dys)
            results: dict[str, Any] = {f"output {i}": y.detach() for i, y in enumerate(ys)}
            results |= {f"gradient of input {i}": x.grad for i, x in enumerate(xs)}
            results |= {f"gradient of {name}": p.grad.clone() for name, p in layer.named_parameters()}
            found |= {f"{update}.{number}: {name}": value for name, value in (results | state_of(layer)).items()}
        if case.kind == "streaming":
            layer.weights_updated()
    layer.eval()
    with torch.no_grad():
        found["evaluation"] = layer(x.detach(), mask=mask)
    return found


def law_of(case: Case) -> tuple[Seen, list[Fed]]:
    """The case by plain torch in float64, and the data of each call, in the types of the case."""
    layer, fed, feed = deepcopy(layer_of(case)).double(), list[Fed](), feeder(case)

    def make(layer: Any) -> Fed:
        fed.append(feed(layer))
        x, dy, mask = fed[-1]
        return x.double(), dy.double(), mask

    with backends.use(backends.LAW.name):
        return train(layer, case, make), fed


def replayed(fed: list[Fed], device: str = DEFAULT_DEVICE, layouts: tuple[str, str] | None = None) -> Feed:
    """Feeds what was fed before; `layouts`: anew, as gaps do not go from one device to another."""
    again: Iterator[Fed] = iter(fed)

    def feed(layer: Any) -> Fed:
        x, dy, mask = next(again)
        x, dy, mask = x.to(device), dy.to(device), None if mask is None else mask.to(device)
        if layouts is not None:
            x, dy = (LAYOUTS[layout](t) for layout, t in zip(layouts, (x, dy), strict=True))
        return x, dy, mask

    return feed


def on(layer: Any, device: str) -> Any:
    """The layer there; nothing is done to one that is there already."""
    return layer if device == DEFAULT_DEVICE else layer.to(device)


def arithmetic(case: Case) -> float:
    """The tolerance of the types that a case is computed and remembered in."""
    return max(TOLERANCE[torch.promote_types(dtype, F32)] for dtype in case.dtypes)


def trained_by(
    backend: str,
    case: Case,
    fed: list[Fed],
    device: str = DEFAULT_DEVICE,
    where: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Seen:
    """The case by a backend, on the data of `law_of`. `where`: a context for the backend alone."""
    layouts = None if device == DEFAULT_DEVICE else case.layouts
    with backends.use(backend), where():
        return train(on(layer_of(case), device), case, replayed(fed, device, layouts))


class Differs(AssertionError):
    """Two results are not alike in something that no tolerance is about: their shapes, or what is not finite."""


def difference(actual: Tensor, expected: Tensor) -> float:
    """The largest, in parts of the largest value that is expected; whole numbers and flags differ by 0 or 1."""
    actual, expected = actual.detach().cpu(), expected.detach().cpu()
    if actual.shape != expected.shape:
        raise Differs(f"of shape {tuple(actual.shape)}, not {tuple(expected.shape)}")
    if not expected.is_floating_point() or not expected.numel():
        return float(not torch.equal(actual, expected))
    finite = expected.isfinite()
    if not torch.equal(actual.isfinite(), finite):
        raise Differs("not finite in other places")
    actual, expected = (torch.where(finite, t, 0).double() for t in (actual, expected))
    error, size = float((actual - expected).abs().max()), float(expected.abs().max())
    return error / size if size else float(error > 0)
