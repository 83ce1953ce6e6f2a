"""Streams of statistics: long-term and short-term averages, the function F (and G) of the paper.

H1 (statistics) and H2 (their gradients) are two `Stream`s. The rules are pure functions, which return new tensors;
`write` puts a result into the tensors that a layer keeps. kernels/stream.h is the twin of this file.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

FULL = 32  # elements per statistic in a window from which on the guard does nothing


@dataclass(frozen=True)
class Stream:
    """`short`: exact average since the last weight update. `long`: exponential average of those."""

    long: Tensor  # (2, *statistic): row 0 mean, row 1 sigma
    short: Tensor
    count: Tensor  # int64 scalar: pushes since the last weight update
    empty: Tensor  # bool scalar: no fold yet, so `long` means nothing
    pending: Tensor  # bool scalar: a weight update is waiting to be folded in


@dataclass(frozen=True)
class State:
    """Everything a streaming layer remembers."""

    stats: Stream  # H1
    grads: Stream  # H2
    mean: Tensor  # the latest s_hat, for evaluation
    sigma: Tensor
    seen: Tensor  # reference elements per statistic so far, for the warm start: a counter, as the next two
    elements: Tensor  # of those, in the window since the last weight update
    elements_before: Tensor  # in the window before; 0 if there was none
    loss_scale: Tensor  # of the latest push into H2; 0 where no scaler was ever attached


# The names of the fields, by which a state is saved.
STREAMS = ("stats", "grads")
PARTS = tuple(field.name for field in fields(Stream))
NUMBERS = tuple(field.name for field in fields(State) if field.name not in STREAMS)
COUNTERS = frozenset({"seen", "elements", "elements_before"})  # of elements, see `new_counter`
NAMES = frozenset([f"{name}_{part}" for name in STREAMS for part in PARTS] + list(NUMBERS))  # of `to_dict`


def dtype_of(name: str, statistics: torch.dtype, device: torch.device) -> torch.dtype:
    """The type of a tensor of a state, by its name in `to_dict`."""
    if name in COUNTERS:
        return counter_dtype(device)
    part = name.rpartition("_")[2]
    return torch.int64 if part == "count" else torch.bool if part in ("empty", "pending") else statistics


def new_stream(shape: tuple[int, ...], like: Tensor) -> Stream:
    return Stream(
        long=like.new_zeros((2, *shape)),
        short=like.new_zeros((2, *shape)),
        count=like.new_zeros((), dtype=torch.int64),
        empty=like.new_ones((), dtype=torch.bool),
        pending=like.new_zeros((), dtype=torch.bool),
    )


def new_state(shape: tuple[int, ...], like: Tensor) -> State:
    return State(
        stats=new_stream(shape, like),
        grads=new_stream(shape, like),
        mean=like.new_zeros(shape),
        sigma=like.new_ones(shape),
        seen=new_counter(like),
        elements=new_counter(like),
        elements_before=new_counter(like),
        loss_scale=like.new_zeros(()),
    )


def new_counter(like: Tensor) -> Tensor:
    """0, in a type that goes on counting: float32 stands still at 2^24. Averages of elements need not be whole."""
    return torch.zeros((), dtype=counter_dtype(like.device), device=like.device)


def counter_dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64  # which Apple's GPUs do not have


def push(stream: Stream, value: Tensor, accept: Tensor) -> Stream:
    """count += 1; short += (value - short) / count. Nothing changes where `accept` is False."""
    count = stream.count + accept
    value = torch.where(accept, value, stream.short)
    share = count.clamp(min=1).to(value.dtype).reciprocal()
    return replace(stream, short=torch.lerp(stream.short, value, share), count=count)


def guarded(weights: Sequence[float], share: Tensor, part: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`weights` of `long` and `short` for a window that holds only `share` of a full one.

    Few elements count for less, and what `short` loses `long` gains. `part`: what the window is of everything so far;
    in a fold it counts for at least so much, which averages exactly until the exponential takes over. Nothing changes
    for a full window, or where `long` counts for nothing.
    """
    long, short = weights
    taken = share * short if part is None else torch.maximum(share * short, (long + short) * part)
    lost = torch.where((share < 1) & (long != 0), short - taken, 0)
    return long + lost, short - lost


def bounded(g_hat: Tensor, g: Tensor, share: Tensor) -> Tensor:
    """The vector `g_hat`, made no longer than `g` where the window is not full."""
    (own, of_own), (streamed, of_streamed) = by_largest(g), by_largest(g_hat)
    ratio = own.norm(dim=-1, keepdim=True) / streamed.norm(dim=-1, keepdim=True) * of_own  # over of_streamed
    return torch.where((share < 1) & (ratio < of_streamed), streamed * ratio, g_hat)


def by_largest(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Vectors over their largest magnitude, and that: what is squared then neither overflows nor vanishes."""
    largest = vectors.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(vectors.dtype).tiny)
    return vectors / largest, largest


def blend(stream: Stream, long: Tensor | float, short: Tensor | float) -> Tensor:
    """long * stream.long + short * stream.short, an empty `long` being replaced by `short`."""
    return long * torch.where(stream.empty, stream.short, stream.long) + short * stream.short


def fold(stream: Stream, keep: Tensor | float, take: Tensor | float) -> Stream:
    """A pending weight update: long = keep * long + take * short (the first time, short), count = 0.

    Nothing changes where nothing was pushed. `short` stays until the next push replaces it.
    """
    due = is_due(stream)
    long = torch.where(stream.empty, stream.short, keep * stream.long + take * stream.short)
    return replace(
        stream,
        long=torch.where(due, long, stream.long),
        count=stream.count * ~due,
        empty=stream.empty & ~due,
        pending=torch.zeros_like(stream.pending),
    )


def is_due(stream: Stream) -> Tensor:
    """Whether a fold has something to do."""
    return stream.pending & (stream.count > 0)


def drop(stream: Stream, dropped: Tensor) -> Stream:
    """Forget the pushes since the last weight update where `dropped` is True."""
    return replace(stream, short=torch.where(dropped, stream.long, stream.short), count=stream.count * ~dropped)


def layer_mean(mean: Tensor, present: Tensor | None) -> Tensor:
    """Average of all means of a call, those without a real element (masked input) left out."""
    return mean.mean() if present is None else torch.where(present, mean, 0).sum() / present.sum().clamp(min=1)


def layer_statistics(mean: Tensor, sigma: Tensor, present: Tensor | None, p: float) -> Tensor:
    """Statistics of the layer as a whole, two numbers: average mean, and the p-th root of the average sigma^p."""
    largest = (sigma if present is None else torch.where(present, sigma, 0)).amax()
    largest = largest.clamp(min=torch.finfo(sigma.dtype).tiny)
    power = layer_mean((sigma / largest) ** p, present)
    return torch.stack([layer_mean(mean, present), largest * power ** (1 / p)])


def warm_start(s_hat: Tensor, layer: Tensor, seen: Tensor, warmup: float) -> tuple[Tensor, Tensor]:
    """s_hat <- w * s_hat + (1 - w) * layer with w = min(1, seen / warmup); returns it and w."""
    w = (seen / warmup).clamp(max=1).to(s_hat.dtype)
    return torch.lerp(layer, s_hat, w), w


def bind(state: State, shape: tuple[int, ...]) -> State:
    """Give a state whose statistics are empty, not bound to a spatial size yet, their shape."""
    if state.mean.numel():
        return state
    fresh = new_state(shape, state.mean)
    return replace(
        fresh,
        stats=replace(fresh.stats, pending=state.stats.pending),
        grads=replace(fresh.grads, pending=state.grads.pending),
        loss_scale=state.loss_scale,
    )


def write(state: State, new: State) -> None:
    """Copy the values of `new` into the tensors of `state`."""
    for kept, value in zip(to_dict(state).values(), to_dict(new).values(), strict=True):
        if value is not kept:
            kept.copy_(value)


def write_stream(stream: Stream, new: Stream) -> None:
    """The same for one of its streams."""
    for part in PARTS:
        getattr(stream, part).copy_(getattr(new, part))


def copied(state: State) -> State:
    return from_dict({name: tensor.clone().contiguous() for name, tensor in to_dict(state).items()})


def recounted(state: State) -> State:
    """A state whose counters may be of an older type."""
    tensors = to_dict(state)
    counters = {name: tensors[name].to(counter_dtype(tensors[name].device)) for name in COUNTERS}
    return from_dict(tensors | counters)


def to_dict(state: State) -> dict[str, Tensor]:
    """The tensors of a state under flat names: `mean`, `stats_long`, ..."""
    streams = {f"{name}_{part}": getattr(getattr(state, name), part) for name in STREAMS for part in PARTS}
    return streams | {name: getattr(state, name) for name in NUMBERS}


def from_dict(tensors: dict[str, Tensor]) -> State:
    """The inverse of `to_dict`."""
    stats, grads = (Stream(**{part: tensors[f"{name}_{part}"] for part in PARTS}) for name in STREAMS)
    return State(stats, grads, **{name: tensors[name] for name in NUMBERS})
