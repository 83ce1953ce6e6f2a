"""Streams of statistics: long-term and short-term averages, the function F (and G) of the paper.

H1 (statistics) and H2 (their gradients) are two `Stream`s. The rules are pure functions, which return new tensors;
`write` puts a result into the tensors that a layer keeps. kernels/stream.h is the twin of this file.
"""

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Stream:
    """`short`: exact average since the last weight update. `long`: exponential average of those."""

    long: Tensor  # (2, *statistic): row 0 mean, row 1 sigma
    short: Tensor
    count: Tensor  # int64 scalar: pushes since the last weight update
    empty: Tensor  # bool scalar: no fold yet, so `long` means nothing


@dataclass(frozen=True)
class State:
    """Everything a streaming layer remembers."""

    stats: Stream  # H1
    grads: Stream  # H2
    mean: Tensor  # the latest s_hat, for evaluation
    sigma: Tensor
    seen: Tensor  # reference elements per statistic so far, for the warm start
    pending: Tensor  # bool scalar: a weight update is waiting to be folded in
    loss_scale: Tensor  # of the latest push into H2; 0 where no scaler was ever attached


def new_stream(shape: tuple[int, ...], like: Tensor) -> Stream:
    return Stream(
        long=like.new_zeros((2, *shape)),
        short=like.new_zeros((2, *shape)),
        count=like.new_zeros((), dtype=torch.int64),
        empty=like.new_ones((), dtype=torch.bool),
    )


def new_state(shape: tuple[int, ...], like: Tensor) -> State:
    return State(
        stats=new_stream(shape, like),
        grads=new_stream(shape, like),
        mean=like.new_zeros(shape),
        sigma=like.new_ones(shape),
        seen=like.new_zeros(()),
        pending=like.new_zeros((), dtype=torch.bool),
        loss_scale=like.new_zeros(()),
    )


def push(stream: Stream, value: Tensor, accept: Tensor) -> Stream:
    """count += 1; short += (value - short) / count. Nothing changes where `accept` is False."""
    count = stream.count + accept
    value = torch.where(accept, value, stream.short)
    share = count.clamp(min=1).to(value.dtype).reciprocal()
    return replace(stream, short=torch.lerp(stream.short, value, share), count=count)


def all_finite(values: Tensor) -> Tensor:
    """Whether there is no NaN or inf: only those differ from themselves by something else than 0."""
    return (values - values).sum() == 0


def blend(stream: Stream, long: float, short: float) -> Tensor:
    """long * stream.long + short * stream.short, an empty `long` being replaced by `short`."""
    return long * torch.where(stream.empty, stream.short, stream.long) + short * stream.short


def fold(stream: Stream, updated: Tensor, keep: float, take: float) -> Stream:
    """A weight update: long = keep * long + take * short (the first time, short), count = 0.

    Nothing changes where `updated` is False or nothing was pushed. `short` stays until the next push replaces it.
    """
    due = updated & (stream.count > 0)
    long = torch.where(stream.empty, stream.short, keep * stream.long + take * stream.short)
    return replace(
        stream,
        long=torch.where(due, long, stream.long),
        count=stream.count * ~due,
        empty=stream.empty & ~due,
    )


def drop(stream: Stream, dropped: Tensor) -> Stream:
    """Forget the pushes since the last weight update where `dropped` is True."""
    return replace(stream, count=stream.count * ~dropped)


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
    w = (seen / warmup).clamp(max=1)
    return torch.lerp(layer, s_hat, w), w


def bind(state: State, shape: tuple[int, ...]) -> State:
    """Give a state whose statistics are empty, not bound to a spatial size yet, their shape."""
    if state.mean.numel():
        return state
    return replace(new_state(shape, state.seen), pending=state.pending, loss_scale=state.loss_scale)


def write(state: State, new: State) -> None:
    """Copy the values of `new` into the tensors of `state`."""
    for kept, value in zip(to_dict(state).values(), to_dict(new).values(), strict=True):
        if value is not kept:
            kept.copy_(value)


def copied(state: State) -> State:
    return from_dict({name: tensor.clone() for name, tensor in to_dict(state).items()})


def to_dict(state: State) -> dict[str, Tensor]:
    """The tensors of a state under flat names: `mean`, `stats_long`, ..."""
    streams = {
        f"{name}_{field.name}": getattr(getattr(state, name), field.name)
        for name in ("stats", "grads")
        for field in fields(Stream)
    }
    return streams | {f.name: getattr(state, f.name) for f in fields(State) if f.name not in ("stats", "grads")}


def from_dict(tensors: dict[str, Tensor]) -> State:
    """The inverse of `to_dict`."""
    parts: dict[str, Any] = {
        name: Stream(**{field.name: tensors[f"{name}_{field.name}"] for field in fields(Stream)})
        for name in ("stats", "grads")
    }
    parts |= {field.name: tensors[field.name] for field in fields(State) if field.name not in parts}
    return State(**parts)
