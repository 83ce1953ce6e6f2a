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
    guard: bool


class Call(NamedTuple):
    """What a training call keeps for its backward pass."""

    own: Moments  # S(x)
    mean: Tensor  # s_hat, shaped to broadcast against the input
    sigma: Tensor
    accept: Tensor  # bool scalar: S(x) was pushed
    w: Tensor  # of the warm start
    share: Tensor  # that its window holds of a full one, for the guard; 1 without
    window: Tensor  # elements of the window before, and all that had been seen with it: what a fold of H2 goes by
    total: Tensor


def folded(rules: Rules, state: State) -> State:
    """The state with pending weight updates folded in."""
    grads = fold_gradients(rules, state.grads, state.elements, state.seen)
    return replace(fold_statistics(rules, state), grads=grads)


def fold_statistics(rules: Rules, state: State) -> State:
    """The same for H1, which closes its window."""
    due = stream.is_due(state.stats)
    weights = _fold_weights(rules, rules.kappa[:2], state.elements, state.seen)
    return replace(
        state,
        stats=stream.fold(state.stats, *weights),
        elements=torch.where(due, 0, state.elements),
        elements_before=torch.where(due, state.elements, state.elements_before),
    )


def fold_gradients(rules: Rules, grads: Stream, elements: Tensor, seen: Tensor) -> Stream:
    """The same for H2; `elements`: of the window that H1 has closed, `seen`: all at its end."""
    return stream.fold(grads, *_fold_weights(rules, rules.kappa[2:], elements, seen))


def _fold_weights(
    rules: Rules, kappa: tuple[float, ...], elements: Tensor, seen: Tensor
) -> tuple[Tensor | float, Tensor | float]:
    if not rules.guard:
        return kappa[0], kappa[1]
    return stream.guarded(kappa, _share(rules, elements), elements / seen.clamp(min=1))


def window_share(rules: Rules, elements: Tensor, before: Tensor) -> Tensor:
    """What the present window holds of a full one. What it will hold is not known: at least as much as the last."""
    return _share(rules, torch.where(before > 0, torch.maximum(elements, before), 0))


def _share(rules: Rules, elements: Tensor) -> Tensor:
    full = (elements == 0) | (not rules.guard)  # 0: not known
    return torch.where(full, 1, (elements / stream.FULL).clamp(max=1))


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
    if rules.warmup:
        accept = accept & all_finite(layer)  # a sum over the layer overflows before its parts do
    stats = stream.push(before.stats, value, accept)
    new = torch.where(accept, elements_per_statistic(s), 0).to(before.seen.dtype)
    seen, elements = before.seen + new, before.elements + new
    share = window_share(rules, elements, before.elements_before)
    s_hat = stream.blend(stats, *stream.guarded(rules.alpha, share))
    w = torch.ones_like(seen, dtype=latest.dtype)
    if rules.warmup:
        s_hat, w = stream.warm_start(s_hat, layer, seen, rules.warmup)
    s_hat = torch.where(accept, s_hat, latest)
    after = replace(before, stats=stats, mean=s_hat[0], sigma=s_hat[1], seen=seen, elements=elements)
    mean, sigma = s_hat[0].reshape(kept_shape), s_hat[1].reshape(kept_shape)
    return after, Call(s, mean, sigma, accept, w, share, before.elements_before, seen - elements)


def window_statistics(rules: Rules, state: State) -> Tensor:
    """s_hat of a window as a whole, in the place of its latest call."""
    stats = state.stats
    share = window_share(rules, state.elements, state.elements_before)
    s_hat = stream.blend(stats, *stream.guarded(rules.alpha, share))
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
    g_hat = stream.blend(grads, *stream.guarded((long, short), call.share))
    if present:
        g_hat = g_hat + present * g
    g_hat = stream.bounded(g_hat.flatten(), g.flatten(), call.share)
    g_hat = g_hat * (call.w if scale is None else call.w * scale)
    to_mean, to_sigma = g_hat.reshape(2, *grad_mean.shape).to(grad_mean.dtype)
    samples, there = call.own.mean.shape[0], call.own.present
    return grads, (share_among_samples(to_mean, samples, there), share_among_samples(to_sigma, samples, there))
