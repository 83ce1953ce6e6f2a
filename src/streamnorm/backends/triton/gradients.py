"""G on the vectors of a state, by a single program, as F: the guard's bound is a length over all channels."""

import triton
import triton.language as tl

from .passes import added_up
from .rules import folded, lerp, lessened, not_finite, pushed, share_of


@triton.jit(do_not_specialize=["elements", "parts"])
def push_gradients(
    sums,  # of dy; None where dE/ds_hat is given as `own_mean` and `own_sigma`
    own_mean,
    own_sigma,
    gain,
    kept,
    grads_long,
    grads_short,
    grads_count,
    grads_empty,
    grads_pending,
    scale,  # of the loss
    flow,  # written: (2, C), what goes into S(x)
    vectors,  # written: (5, C), dgain, dbias, then unit, slope and offset for dx
    elements,
    channels,
    parts,
    P: tl.constexpr,
    SIGNS: tl.constexpr,
    BETA_LONG: tl.constexpr,
    BETA_SHORT: tl.constexpr,
    BETA_PRESENT: tl.constexpr,
    KAPPA_LONG: tl.constexpr,
    KAPPA_SHORT: tl.constexpr,
    GUARD: tl.constexpr,
    FULL: tl.constexpr,
    POWER: tl.constexpr,
    TALL: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """G: fold H2 where that is due, push g = dE/ds_hat, and what flows on in its place; then the slopes for dx."""
    lane = tl.arange(0, WIDTH)
    numbers = kept + (2 if sums is None else 5) * channels  # s_hat alone is before them where S(x) was given
    w, accepted, weight_share = tl.load(numbers), tl.load(numbers + 1), tl.load(numbers + 2)
    window, counted = tl.load(numbers + 3).to(tl.float64), tl.load(numbers + 4).to(tl.float64)
    own = tl.load(numbers + 5)
    pushes, was_empty = tl.load(grads_count), tl.load(grads_empty) != 0
    due = (tl.load(grads_pending) != 0) & (pushes > 0)
    factor = w * 0 + 1
    if scale is not None:
        factor = tl.load(scale).to(tl.float32)

    # g, by the sums of dy and dy * (x - mean).
    bad = tl.zeros((WIDTH,), tl.int32)
    squares = tl.zeros((WIDTH,), tl.float64)
    for first in range(0, channels, WIDTH):
        channel = first + lane
        real = channel < channels
        if sums is None:
            to_mean = tl.load(own_mean + channel, mask=real, other=0.0)
            to_sigma = tl.load(own_sigma + channel, mask=real, other=0.0)
        else:
            hat = tl.load(kept + 4 * channels + channel, mask=real, other=1.0)
            unit = 1.0 / hat
            if gain is not None:
                unit = tl.load(gain + channel, mask=real, other=0.0).to(tl.float32) / hat
            dbias = added_up(sums, channel, real, channels, parts, TALL, WIDTH).to(tl.float32)
            product = added_up(sums + parts * channels, channel, real, channels, parts, TALL, WIDTH)
            dgain = product.to(tl.float32) / hat
            to_mean, to_sigma = -dbias * unit, -dgain * unit
            tl.store(vectors + channel, dgain, mask=real)
            tl.store(vectors + channels + channel, dbias, mask=real)
            tl.store(vectors + 2 * channels + channel, unit, mask=real)
            if SIGNS:
                signs = added_up(sums + 2 * parts * channels, channel, real, channels, parts, TALL, WIDTH)
                tl.store(vectors + 4 * channels + channel, (signs / elements).to(tl.float32), mask=real)
        to_mean, to_sigma = to_mean / factor, to_sigma / factor
        tl.store(flow + channel, to_mean, mask=real)
        tl.store(flow + channels + channel, to_sigma, mask=real)
        bad |= tl.where(real, not_finite(to_mean) | not_finite(to_sigma), 0)
        of_mean, of_sigma = tl.where(real, to_mean, 0.0).to(tl.float64), tl.where(real, to_sigma, 0.0).to(tl.float64)
        squares += of_mean * of_mean + of_sigma * of_sigma
    accept = (tl.max(bad, 0) == 0) & (accepted != 0)
    length = tl.sum(squares, 0)
    tl.debug_barrier()

    share = share_of(window, GUARD, FULL, POWER)
    taken = tl.maximum(share * KAPPA_SHORT, (KAPPA_LONG + KAPPA_SHORT) * (window / tl.maximum(counted, 1.0)))
    fold_long, fold_short = lessened(KAPPA_LONG, KAPPA_SHORT, share, taken)
    wide_share = weight_share.to(tl.float64)
    long, short = lessened(BETA_LONG, BETA_SHORT, wide_share, wide_share * BETA_SHORT)
    empty = was_empty & (due == 0)
    count = tl.where(due, pushes * 0, pushes) + accept.to(tl.int64)
    push = 1.0 / tl.maximum(count, 1).to(tl.float32)

    squares = tl.zeros((WIDTH,), tl.float64)
    for first in range(0, 2 * channels, WIDTH):
        at = first + lane
        real = at < 2 * channels
        g = tl.load(flow + at, mask=real, other=0.0)
        recent = tl.load(grads_short + at, mask=real, other=0.0)
        lasting = tl.load(grads_long + at, mask=real, other=0.0)
        lasting = folded(lasting, recent, due, was_empty, fold_long.to(tl.float32), fold_short.to(tl.float32))
        recent = pushed(recent, g, push, accept)
        mixed = tl.where(accept & (own > 0), lerp(recent, g, own), recent)
        hat = long.to(tl.float32) * tl.where(empty, recent, lasting) + short.to(tl.float32) * mixed
        if BETA_PRESENT != 0:
            hat += BETA_PRESENT * g
        tl.store(grads_short + at, recent, mask=real)
        tl.store(grads_long + at, lasting, mask=real)
        tl.store(flow + at, hat, mask=real)
        squares += tl.where(real, hat, 0.0).to(tl.float64) * tl.where(real, hat, 0.0).to(tl.float64)
    streamed = tl.sum(squares, 0)
    guards = (weight_share < 1) & (length < streamed)  # no longer than g itself
    shorter = tl.where(guards, tl.sqrt(length / tl.where(guards, streamed, 1.0)), 1.0).to(tl.float32)
    tl.debug_barrier()

    for first in range(0, channels, WIDTH):
        channel = first + lane
        real = channel < channels
        to_mean = tl.load(flow + channel, mask=real, other=0.0) * shorter * (w * factor)
        to_sigma = tl.load(flow + channels + channel, mask=real, other=0.0) * shorter * (w * factor)
        tl.store(flow + channel, to_mean, mask=real)
        tl.store(flow + channels + channel, to_sigma, mask=real)
        if sums is not None:
            spread = tl.load(kept + 2 * channels + channel, mask=real, other=1.0)
            slope, offset = to_sigma / elements, to_mean / elements
            if P == 2:
                slope = slope / spread
            else:
                slope = slope * tl.where(tl.abs(spread) < float("inf"), 1.0, 0.0)
                if SIGNS:
                    offset -= slope * tl.load(vectors + 4 * channels + channel, mask=real, other=0.0)
            tl.store(vectors + 3 * channels + channel, slope, mask=real)
            tl.store(vectors + 4 * channels + channel, offset, mask=real)

    tl.store(grads_count, count)
    tl.store(grads_empty, empty)
    tl.store(grads_pending, due & (due == 0))
