"""Algorithms 5 and 6 of the paper: F streams statistics in the forward pass, G their gradients in the backward pass.

Pure functions from state to state, in plain torch: long, short and count of a stream (push, blend, fold), the guard of
small windows and large samples, the warm start, and F and G made of these.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from .config import Config
from .state import State, Stream
from .statistics import (
    Moments,
    all_finite,
    elements_per_statistic,
    fixed_center,
    measure,
    mini_batch_statistics,
)

FULL = 256  # elements per statistic in a window from which on it counts whole
POWER = 2 / 3  # a smaller one counts for its part of that to this power
ALIKE = 12  # locations of a sample count for so many elements at most: neighbours are alike
LARGE = 32  # locations per statistic, from which on a sample has a spread of its own
OWN = 0.5  # of `short` of the gradients is a call's own, after a full window, if samples are large
KEPT_NUMBERS = ("w", "accept", "weight_share", "window", "total", "own")  # of `Kept`, as a vector has them
NUMBERS = len(KEPT_NUMBERS)


class Kept(NamedTuple):
    """What a training call keeps of F for its backward pass, and for a call that repeats it."""

    mean: Tensor  # s_hat, shaped to broadcast against the input
    sigma: Tensor
    center: Tensor | None  # c of the p-th moment, where it came from the state
    accept: Tensor  # bool scalar: S(x) was pushed
    w: Tensor  # of the warm start
    weight_share: Tensor  # by which its window counts against a full one, for the guard; 1 without
    window: Tensor  # elements of the window before, and of all windows with it: what a fold of H2 goes by
    total: Tensor
    own: Tensor  # OWN where the guard makes that much of `short` of the gradients the call's own, else 0


def to_vector(kept: Kept) -> Tensor:
    """What a call keeps as one vector of the type of the statistics: s_hat, then the numbers."""
    parts = [getattr(kept, name) for name in ("mean", "sigma", *KEPT_NUMBERS)]
    return torch.cat([part.flatten().to(kept.mean.dtype) for part in parts])


def from_vector(vector: Tensor, shape: tuple[int, ...]) -> Kept:
    """The inverse but for the center; `shape`: of s_hat against the input."""
    mean, sigma = vector[:-NUMBERS].reshape(2, *shape)
    w, accept, *others = vector[-NUMBERS:]
    return Kept(mean, sigma, None, accept != 0, w, *others)


# ---- Algorithm 5: F -------------------------------------------------------------------------------------------------


def stream_input(
    config: Config, before: State, x: Tensor, mask: Tensor | None, begins: bool = True
) -> tuple[State, Moments, Kept]:
    """S and F: the statistics of a mini-batch, pushed."""
    s = measure(x, config, mask, lambda *own: center_of(config, before.mean, before.seen, *own))
    after, kept = stream_statistics(config, before, s, samples_of(x, mask), x.shape[1], begins)
    return after, s, kept


def stream_statistics(
    config: Config, before: State, s: Moments, samples: Tensor | int, channels: int, begins: bool
) -> tuple[State, Kept]:
    """F and the warm start: s = S(x) is pushed into H1, and what H1 then blends to normalizes.

    `begins`: the samples are new, not those of the timestep before.
    """
    kept_shape = (1, *s.mean.shape[1:])
    latest = layer = absent = torch.stack([before.mean, before.sigma])
    if config.warmup or s.present is not None:
        layer = layer_statistics(s.mean, s.sigma, s.present, config.p).to(latest.dtype)
        layer = layer.reshape(2, *(1 for _ in before.mean.shape))
    if s.present is not None:
        absent = torch.where(before.seen == 0, layer, latest)
    value, accept = mini_batch_statistics(s, absent)
    if config.warmup:
        accept = accept & all_finite(layer)  # a sum over the layer overflows before its parts do
    stats = push(before.stats, value, accept)
    new = torch.where(accept, elements_per_statistic(s), 0).to(before.seen.dtype)
    here = torch.where(accept, samples, 0).to(new.dtype)
    per_location = channels if config.ref.channels == "all" else 1
    unlike = torch.minimum(new, here * (ALIKE * per_location))
    large = accept & (new >= here * (LARGE * per_location)) & (before.elements_before >= FULL)
    own = torch.where(large & (config.guard and config.beta[0] != 0), OWN, 0.0).to(latest.dtype)
    seen, elements = before.seen + new, held(before.elements, unlike, begins)
    here, counted = held(before.samples, here, begins), before.counted + (elements - before.elements)
    weight_share = window_share(config, elements, before.elements_before)
    weights = guarded(config.alpha, weight_share)
    s_hat, lasting = blend(stats, *weights), evaluation_blend(config, before.eval_long, stats, weights, here)
    w = torch.ones_like(seen, dtype=latest.dtype)
    if config.warmup:
        w = warmed_up(seen, config.warmup).to(latest.dtype)
        s_hat, lasting = torch.lerp(layer, s_hat, w), torch.lerp(layer, lasting, w)
    s_hat = torch.where(accept, s_hat, latest)
    lasting = torch.where(accept, lasting, torch.stack([before.eval_mean, before.eval_sigma]))
    after = replace(before, stats=stats, mean=s_hat[0], sigma=s_hat[1], seen=seen, elements=elements)
    after = replace(after, counted=counted, samples=here, eval_mean=lasting[0], eval_sigma=lasting[1])
    mean, sigma = s_hat[0].reshape(kept_shape), s_hat[1].reshape(kept_shape)
    center = s.center if config.center == "running" else None
    return after, Kept(mean, sigma, center, accept, w, weight_share, before.elements_before, counted - elements, own)


def center_of(config: Config, latest: Tensor, seen: Tensor, mean: Tensor, present: Tensor | None) -> Tensor:
    """c of the p-th moment for a call that begins with this state; `mean`: of the mini-batch."""
    if config.center != "running":
        return fixed_center(config.center, mean)
    running = latest.reshape(1, *mean.shape[1:]).to(mean.dtype)
    if not config.warmup:
        return running.clone()  # kept for backward, when the state has moved on
    return torch.where(seen == 0, layer_mean(mean, present), running)


def measured_again(config: Config, x: Tensor, mask: Tensor | None, kept: Kept) -> Moments:
    """S(x) of a call that was made before."""
    return measure(
        x, config, mask, lambda mean, _: fixed_center(config.center, mean) if kept.center is None else kept.center
    )


def window_statistics(config: Config, state: State) -> tuple[Tensor, Tensor]:
    """s_hat of a window as a whole, in the place of its latest call, and what evaluation uses."""
    stats = state.stats
    weights = guarded(config.alpha, window_share(config, state.elements, state.elements_before))
    s_hat = blend(stats, *weights)
    lasting = evaluation_blend(config, state.eval_long, stats, weights, state.samples)
    if config.warmup and s_hat.numel():
        layer = layer_statistics(stats.short[0], stats.short[1], None, config.p)
        layer, w = layer.reshape(2, *(1 for _ in state.mean.shape)), warmed_up(state.seen, config.warmup)
        s_hat, lasting = torch.lerp(layer, s_hat, w.to(layer.dtype)), torch.lerp(layer, lasting, w.to(layer.dtype))
    return s_hat, lasting


# ---- Algorithm 6: G -------------------------------------------------------------------------------------------------


def stream_gradients(
    config: Config, grads: Stream, kept: Kept, g: Tensor, scale: Tensor | None = None
) -> tuple[Stream, Tensor]:
    """G: g = dE/ds_hat, `(2, *statistic)`, is pushed into H2; returns it, and what flows on in place of g.

    `scale`: of the loss, where a scaler is attached.
    """
    if scale is not None:
        g = g / scale
    accept = kept.accept & all_finite(g)
    grads = push(grads, g, accept)
    long, short, present = config.beta
    recent = torch.where(accept & (kept.own > 0), torch.lerp(grads.short, g, OWN), grads.short)
    g_hat = blend(grads, *guarded((long, short), kept.weight_share), recent)
    if present:
        g_hat = g_hat + present * g
    g_hat = bounded(g_hat.flatten(), g.flatten(), kept.weight_share).reshape(g.shape)
    return grads, g_hat * (kept.w if scale is None else kept.w * scale)


# ---- a weight update ------------------------------------------------------------------------------------------------


def fold_statistics(config: Config, state: State) -> State:
    """A pending weight update folded into H1, which closes its window."""
    due = is_due(state.stats)
    weights = _fold_weights(config, config.kappa[:2], state.elements, state.counted)
    lasting = slowed(config, weights, state.samples, state.elements / state.counted.clamp(min=1))
    return replace(
        state,
        stats=fold(state.stats, *weights),
        eval_long=fold(replace(state.stats, long=state.eval_long), *lasting).long,
        samples=torch.where(due, 0, state.samples),
        elements=torch.where(due, 0, state.elements),
        elements_before=torch.where(due, state.elements, state.elements_before),
    )


def fold_gradients(config: Config, grads: Stream, window: Tensor, total: Tensor) -> Stream:
    """The same for H2; `window`: elements of the window that H1 has closed, `total`: those of all windows with it."""
    return fold(grads, *_fold_weights(config, config.kappa[2:], window, total))


def folded(config: Config, state: State) -> State:
    """Both, where no call does it: a process without a batch."""
    state = fold_statistics(config, state)
    grads = fold_gradients(config, state.grads, state.elements_before, state.counted - state.elements)
    return replace(state, grads=grads)


def _fold_weights(
    config: Config, kappa: tuple[float, ...], elements: Tensor, counted: Tensor
) -> tuple[Tensor | float, Tensor | float]:
    if not config.guard:
        return kappa[0], kappa[1]
    return guarded(kappa, _share(config, elements), elements / counted.clamp(min=1))


# ---- streams --------------------------------------------------------------------------------------------------------


def push(stream: Stream, value: Tensor, accept: Tensor) -> Stream:
    """count += 1; short += (value - short) / count. Nothing changes where `accept` is False."""
    count = stream.count + accept
    value = torch.where(accept, value, stream.short)
    share = count.clamp(min=1).to(value.dtype).reciprocal()
    return replace(stream, short=torch.lerp(stream.short, value, share), count=count)


def blend(stream: Stream, long: Tensor | float, short: Tensor | float, recent: Tensor | None = None) -> Tensor:
    """long * stream.long + short * stream.short, an empty `long` being replaced by `short`.

    `recent`: in place of stream.short, but not in that of an empty `long`.
    """
    recent = stream.short if recent is None else recent
    return long * torch.where(stream.empty, stream.short, stream.long) + short * recent


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


# ---- the guard (ours) -----------------------------------------------------------------------------------------------


def held(before: Tensor, new: Tensor, begins: bool) -> Tensor:
    """What a window holds after a call: what begins adds up, and timesteps of the same samples are one."""
    return torch.maximum(before + new if begins else before, new)


def window_share(config: Config, elements: Tensor, before: Tensor) -> Tensor:
    """How much the present window counts. What it will hold is not known: at least as much as the last."""
    return _share(config, torch.where(before > 0, torch.maximum(elements, before), 0))


def _share(config: Config, elements: Tensor) -> Tensor:
    full = (elements == 0) | (not config.guard)  # 0: not known
    return torch.where(full, 1, (elements / FULL).clamp(max=1) ** POWER)


def guarded(weights: Sequence[float], weight_share: Tensor, part: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`weights` of `long` and `short` for a window that counts for `weight_share` of a full one.

    Few elements count for less, and what `short` loses `long` gains. `part`: what the window is of everything so far;
    in a fold it counts for at least so much, which averages exactly until the exponential takes over. Nothing changes
    for a full window, or where `long` counts for nothing.
    """
    long, short = weights
    taken = weight_share * short if part is None else torch.maximum(weight_share * short, (long + short) * part)
    lost = torch.where((weight_share < 1) & (long != 0), short - taken, 0)
    return long + lost, short - lost


def bounded(g_hat: Tensor, g: Tensor, weight_share: Tensor) -> Tensor:
    """The vector `g_hat`, made no longer than `g` where the window is not full."""
    (own, of_own), (streamed, of_streamed) = by_largest(g), by_largest(g_hat)
    ratio = own.norm(dim=-1, keepdim=True) / streamed.norm(dim=-1, keepdim=True) * of_own  # over of_streamed
    return torch.where((weight_share < 1) & (ratio < of_streamed), streamed * ratio, g_hat)


def by_largest(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Vectors over their largest magnitude, and that: what is squared then neither overflows nor vanishes."""
    largest = vectors.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(vectors.dtype).tiny)
    return vectors / largest, largest


# ---- a memory for evaluation (ours) ----------------------------------------------------------------------------------


def slowed(
    config: Config, weights: tuple[Tensor | float, Tensor | float], samples: Tensor, part: Tensor | float = 0.0
) -> tuple[Tensor | float, Tensor | float]:
    """`weights` of `long` and `short`, for evaluation: a window of n samples counts for n / eval_memory at most.

    What `short` loses `long` gains. `part`: what the window is of everything so far; it counts for at least so much.
    Nothing changes for a window of many samples, or where `long` counts for nothing.
    """
    if not config.eval_memory:
        return weights
    long, short = weights
    most = (long + short) * (samples / config.eval_memory).clamp(min=part)
    lost = (short - most).clamp(min=0) * (long != 0)
    return long + lost, short - lost


def tested(config: Config, state: State) -> tuple[Tensor, Tensor]:
    """Mean and sigma for evaluation."""
    return (state.eval_mean, state.eval_sigma) if config.eval_memory else (state.mean, state.sigma)


def evaluation_blend(
    config: Config, eval_long: Tensor, stats: Stream, weights: tuple[Tensor | float, Tensor | float], samples: Tensor
) -> Tensor:
    """What evaluation uses: `short` and the memory for evaluation; `weights`: those of s_hat."""
    return blend(replace(stats, long=eval_long), *slowed(config, weights, samples))


def samples_of(x: Tensor, mask: Tensor | None) -> Tensor | int:
    """How many samples a mini-batch has: those with nothing but padding do not count."""
    return x.shape[0] if mask is None else mask.flatten(1).any(1).sum()


# ---- the warm start (ours) ------------------------------------------------------------------------------------------


def layer_mean(mean: Tensor, present: Tensor | None) -> Tensor:
    """Average of all means of a call, those without a real element (masked input) left out."""
    return mean.mean() if present is None else torch.where(present, mean, 0).sum() / present.sum().clamp(min=1)


def layer_statistics(mean: Tensor, sigma: Tensor, present: Tensor | None, p: float) -> Tensor:
    """Statistics of the layer as a whole, two numbers: average mean, and the p-th root of the average sigma^p."""
    largest = (sigma if present is None else torch.where(present, sigma, 0)).amax()
    largest = largest.clamp(min=torch.finfo(sigma.dtype).tiny)
    power = layer_mean((sigma / largest) ** p, present)
    return torch.stack([layer_mean(mean, present), largest * power ** (1 / p)])


def warmed_up(seen: Tensor, warmup: float) -> Tensor:
    """w = min(1, seen / warmup) of s_hat <- w * s_hat + (1 - w) * layer."""
    return (seen / warmup).clamp(max=1)
