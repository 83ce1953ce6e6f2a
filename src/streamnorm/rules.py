"""The algorithm of the paper: F, which streams statistics forward, and G, which streams their gradients backward.

Pure functions from state to state, in plain torch; `kernels/stream.h` does the same for the common case.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from . import stream
from .moments import (
    Moments,
    Statistic,
    all_finite,
    elements_per_statistic,
    fixed_center,
    measure,
    mini_batch_statistics,
    share_among_samples,
)
from .stream import State, Stream


@dataclass(frozen=True)
class Rules:
    """Everything that a streaming layer is told: which statistics it takes, and how it streams them."""

    statistic: Statistic
    alpha: tuple[float, ...]
    beta: tuple[float, ...]
    kappa: tuple[float, ...]
    warmup: float


class Call(NamedTuple):
    """What a training call keeps for its backward pass."""

    own: Moments  # S(x)
    mean: Tensor  # s_hat, shaped to broadcast against the input
    sigma: Tensor
    accept: Tensor  # bool scalar: S(x) was pushed
    w: Tensor  # of the warm start


def folded(rules: Rules, state: State) -> State:
    """The state with pending weight updates folded in."""
    k1, k2, k3, k4 = rules.kappa
    return replace(state, stats=stream.fold(state.stats, k1, k2), grads=stream.fold(state.grads, k3, k4))


def stream_statistics(rules: Rules, before: State, x: Tensor, mask: Tensor | None) -> tuple[State, Call]:
    """F and the warm start: s = S(x) is pushed into H1, and what H1 then blends to normalizes."""
    statistic, kept_shape = rules.statistic, rules.statistic.ref.kept_shape(x.shape)

    def center(mean: Tensor, present: Tensor | None) -> Tensor:
        if statistic.center != "running":
            return fixed_center(statistic.center, mean)
        running = before.mean.reshape(kept_shape)
        if not rules.warmup:
            return running.clone()  # kept for backward, when the state has moved on
        return torch.where(before.seen == 0, stream.layer_mean(mean, present), running)

    s = measure(x, statistic, mask, center)
    latest = layer = absent = torch.stack([before.mean, before.sigma])
    if rules.warmup or s.present is not None:
        layer = stream.layer_statistics(s.mean, s.sigma, s.present, statistic.p).to(latest.dtype)
        layer = layer.reshape(2, *(1 for _ in before.mean.shape))
    if s.present is not None:
        absent = torch.where(before.seen == 0, layer, latest)
    value, accept = mini_batch_statistics(s, absent)
    stats = stream.push(before.stats, value, accept)
    s_hat = stream.blend(stats, *rules.alpha)
    seen = before.seen + torch.where(accept, elements_per_statistic(s), 0).to(before.seen.dtype)
    w = torch.ones_like(seen)
    if rules.warmup:
        s_hat, w = stream.warm_start(s_hat, layer, seen, rules.warmup)
    s_hat = torch.where(accept, s_hat, latest)
    after = replace(before, stats=stats, mean=s_hat[0], sigma=s_hat[1], seen=seen)
    return after, Call(s, s_hat[0].reshape(kept_shape), s_hat[1].reshape(kept_shape), accept, w)


def window_statistics(rules: Rules, state: State) -> Tensor:
    """s_hat of a window as a whole, in the place of its latest call."""
    stats = state.stats
    s_hat = stream.blend(stats, *rules.alpha)
    if rules.warmup and s_hat.numel():
        layer = stream.layer_statistics(stats.short[0], stats.short[1], None, rules.statistic.p)
        s_hat, _ = stream.warm_start(s_hat, layer.reshape(2, *(1 for _ in state.mean.shape)), state.seen, rules.warmup)
    return s_hat


def stream_gradients(
    rules: Rules, grads: Stream, call: Call, grad_mean: Tensor, grad_sigma: Tensor, scale: Tensor | None
) -> tuple[Stream, tuple[Tensor, Tensor]]:
    """G: g = dE/ds_hat is pushed into H2; returns it, and what flows on into S(x) in place of g.

    `scale`: of the loss, where a scaler is attached.
    """
    g = torch.stack([grad_mean, grad_sigma]).to(grads.short.dtype).reshape(grads.short.shape)
    if scale is not None:
        g = g / scale
    grads = stream.push(grads, g, call.accept & all_finite(g))
    long, short, present = rules.beta
    g_hat = stream.blend(grads, long, short)
    if present:
        g_hat = g_hat + present * g
    g_hat = g_hat * (call.w if scale is None else call.w * scale)
    to_mean, to_sigma = g_hat.reshape(2, *grad_mean.shape).to(grad_mean.dtype)
    samples, there = call.own.mean.shape[0], call.own.present
    return grads, (share_among_samples(to_mean, samples, there), share_among_samples(to_sigma, samples, there))
