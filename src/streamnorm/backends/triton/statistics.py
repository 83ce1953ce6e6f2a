"""F on the vectors of a state, by a single program: some of its rules are about all channels. Imported late.

The warm start is an average over all channels, and one value that is not finite keeps a call from being pushed.
Vectors are passed over a few times, in blocks of `WIDTH` channels, with a barrier where a pass reads what another one
wrote. Counters are float64, as in the state; averages over channels are added up in it.
"""

import triton
import triton.language as tl

from .passes import added_up, channels_of, powers_about
from .rules import folded, held, lerp, lessened, not_finite, pushed, share_of, slowed


@triton.jit(do_not_specialize=["new", "here", "begins", "samples_of_x", "tiles", "blocks", "parts"])
def push_statistics(
    x,  # and `sums` of it; both None where S(x) is given as `own_mean` and `own_sigma`
    sums,
    own_mean,
    own_sigma,
    kept,  # written: 5 vectors and 6 numbers
    stats_long,
    stats_short,
    stats_count,
    stats_empty,
    stats_pending,
    mean,
    sigma,
    seen,
    elements,
    elements_before,
    counted,
    samples,
    eval_long,
    eval_mean,
    eval_sigma,
    new,  # elements of the call per statistic, its samples, and whether they are new in the window
    here,
    begins,
    channels,
    parts,
    samples_of_x,  # and the rest of its tiling
    space,
    stride,
    tiles,
    blocks,
    P: tl.constexpr,
    OWN: tl.constexpr,
    RUNNING: tl.constexpr,
    EPS: tl.constexpr,
    FLOOR: tl.constexpr,  # its root
    ALPHA_LONG: tl.constexpr,
    ALPHA_SHORT: tl.constexpr,
    KAPPA_LONG: tl.constexpr,
    KAPPA_SHORT: tl.constexpr,
    WARMUP: tl.constexpr,
    GUARD: tl.constexpr,
    MEMORY: tl.constexpr,
    FULL: tl.constexpr,
    POWER: tl.constexpr,
    ALIKE: tl.constexpr,
    LARGE: tl.constexpr,
    OWN_SHARE: tl.constexpr,
    PLANES: tl.constexpr,
    TILE_HEIGHT: tl.constexpr,
    TILE_WIDTH: tl.constexpr,
    TALL: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """F: fold H1 where that is due, push S(x), blend to s_hat, warm start, and the memory for evaluation."""
    lane = tl.arange(0, WIDTH)
    elements_of_call = new.to(tl.float64)
    had_seen, had, had_before = tl.load(seen), tl.load(elements), tl.load(elements_before)
    had_counted, had_samples, pushes = tl.load(counted), tl.load(samples), tl.load(stats_count)
    was_empty = tl.load(stats_empty) != 0
    due = (tl.load(stats_pending) != 0) & (pushes > 0)
    starts = had_seen == 0  # there is no running mean yet

    # Means. `kept` holds the p-th powers in the place of sigma, until the center is known.
    total = tl.zeros((WIDTH,), tl.float64)
    for first in range(0, channels, WIDTH):
        channel = first + lane
        real = channel < channels
        if sums is None:
            own = tl.load(own_mean + channel, mask=real, other=0.0)
        else:
            about = tl.load(sums + channel, mask=real, other=0.0)
            away = added_up(sums + channels, channel, real, channels, parts, TALL, WIDTH) / elements_of_call
            power = added_up(sums + (1 + parts) * channels, channel, real, channels, parts, TALL, WIDTH)
            power = power / elements_of_call
            if P == 2:  # about the mean, where that is not about the center
                own_power = power - away * away
                own_power = tl.where(own_power < 0, 0.0, own_power)  # NaN stays
                if OWN:
                    power = own_power
                elif RUNNING and WARMUP > 0:
                    power = tl.where(starts, own_power, power)
            own = (about + away).to(tl.float32)
            tl.store(kept + 2 * channels + channel, power.to(tl.float32), mask=real)
        tl.store(kept + channel, own, mask=real)
        total += tl.where(real, own, 0.0).to(tl.float64)
    layer_mean = (tl.sum(total, 0) / channels).to(tl.float32)
    tl.debug_barrier()

    if P == 1 and RUNNING and WARMUP > 0 and sums is not None:
        if starts:  # once in a training: the first center is the layer's mean, which is known only now
            for block in range(blocks):
                at, _, written = channels_of(block, channels, PLANES, TILE_WIDTH)
                level = tl.zeros((TILE_WIDTH,), tl.float32) + layer_mean
                _, found = powers_about(
                    x,
                    level,
                    block,
                    0,
                    tiles,
                    samples_of_x,
                    channels,
                    space,
                    stride,
                    P,
                    PLANES,
                    TILE_HEIGHT,
                    TILE_WIDTH,
                )
                tl.store(kept + 2 * channels + at, found / elements_of_call.to(tl.float32), mask=written)
            tl.debug_barrier()

    # Sigma, and whether the call is pushed.
    bad = tl.zeros((WIDTH,), tl.int32)
    total = tl.zeros((WIDTH,), tl.float64)
    for first in range(0, channels, WIDTH):
        channel = first + lane
        real = channel < channels
        own = tl.load(kept + channel, mask=real, other=0.0)
        center = own
        if RUNNING:
            center = tl.load(mean + channel, mask=real, other=0.0)
            if WARMUP > 0:
                center = tl.where(starts, layer_mean, center)
        elif not OWN:
            center = tl.zeros_like(own)
        if sums is None:
            spread = tl.load(own_sigma + channel, mask=real, other=0.0)
        else:
            power = tl.load(kept + 2 * channels + channel, mask=real, other=0.0).to(tl.float64)
            if P == 2:
                away = (own - center).to(tl.float64)
                if OWN:
                    power += away * away  # 0, or NaN for a mean that is not finite
                elif RUNNING and WARMUP > 0:
                    power = tl.where(starts, power + away * away, power)
                spread = tl.sqrt((power + EPS).to(tl.float32))
            else:
                spread = (power + FLOOR).to(tl.float32)
        tl.store(kept + channels + channel, center, mask=real)
        tl.store(kept + 2 * channels + channel, spread, mask=real)
        bad |= tl.where(real, not_finite(own) | not_finite(spread), 0)
        wide = tl.where(real, spread, 0.0).to(tl.float64)
        total += wide * wide if P == 2 else wide
    accept = tl.max(bad, 0) == 0
    layer_power = tl.sum(total, 0) / channels
    layer_sigma = (tl.sqrt(layer_power) if P == 2 else layer_power).to(tl.float32)
    tl.debug_barrier()

    # A fold closes the window before.
    part = had / tl.maximum(had_counted, 1.0)
    share = share_of(had, GUARD, FULL, POWER)
    taken = tl.maximum(share * KAPPA_SHORT, (KAPPA_LONG + KAPPA_SHORT) * part)
    fold_long, fold_short = lessened(KAPPA_LONG, KAPPA_SHORT, share, taken)
    test_long, test_short = slowed(fold_long, fold_short, had_samples, part, MEMORY)
    before = tl.where(due, had, had_before)
    had = tl.where(due, had * 0, had)
    had_samples = tl.where(due, had_samples * 0, had_samples)
    empty = was_empty & (due == 0)
    count = tl.where(due, pushes * 0, pushes) + accept.to(tl.int64)

    # What the present window holds.
    more = tl.where(accept, elements_of_call, elements_of_call * 0)
    more_samples = tl.where(accept, here.to(tl.float64), elements_of_call * 0)
    now_seen = had_seen + more
    now = held(had, tl.minimum(more, more_samples * ALIKE), begins)
    now_samples = held(had_samples, more_samples, begins)
    now_counted = had_counted + (now - had)
    share = share_of(tl.where(before > 0, tl.maximum(now, before), before * 0), GUARD, FULL, POWER)
    long, short = lessened(ALPHA_LONG, ALPHA_SHORT, share, share * ALPHA_SHORT)
    lasting_long, lasting_short = slowed(long, short, now_samples, 0.0, MEMORY)
    w = (tl.minimum(now_seen / WARMUP, 1.0) if WARMUP > 0 else now_seen * 0 + 1).to(tl.float32)
    push = 1.0 / tl.maximum(count, 1).to(tl.float32)

    for first in range(0, 2 * channels, WIDTH):  # means, then sigmas
        at = first + lane
        real = at < 2 * channels
        is_mean = at < channels
        recent = tl.load(stats_short + at, mask=real, other=0.0)
        lasting = tl.load(stats_long + at, mask=real, other=0.0)
        lasting = folded(lasting, recent, due, was_empty, fold_long.to(tl.float32), fold_short.to(tl.float32))
        tested = tl.load(eval_long + at, mask=real, other=0.0)
        tested = folded(tested, recent, due, was_empty, test_long.to(tl.float32), test_short.to(tl.float32))
        own = tl.load(kept + tl.where(is_mean, at, at + channels), mask=real, other=0.0)
        recent = pushed(recent, own, push, accept)
        hat = long.to(tl.float32) * tl.where(empty, recent, lasting) + short.to(tl.float32) * recent
        test = tl.where(empty, recent, tested)
        test = lasting_long.to(tl.float32) * test + lasting_short.to(tl.float32) * recent
        if WARMUP > 0:
            layer = tl.where(is_mean, layer_mean, layer_sigma)
            hat, test = lerp(layer, hat, w), lerp(layer, test, w)
        is_sigma = real & (at >= channels)
        latest = tl.load(mean + at, mask=is_mean, other=0.0)
        latest += tl.load(sigma + at - channels, mask=is_sigma, other=0.0)
        tested_before = tl.load(eval_mean + at, mask=is_mean, other=0.0)
        tested_before += tl.load(eval_sigma + at - channels, mask=is_sigma, other=0.0)
        hat, test = tl.where(accept, hat, latest), tl.where(accept, test, tested_before)
        tl.store(stats_short + at, recent, mask=real)
        tl.store(stats_long + at, lasting, mask=real)
        tl.store(eval_long + at, tested, mask=real)
        tl.store(mean + at, hat, mask=is_mean)
        tl.store(sigma + at - channels, hat, mask=is_sigma)
        tl.store(eval_mean + at, test, mask=is_mean)
        tl.store(eval_sigma + at - channels, test, mask=is_sigma)
        tl.store(kept + 3 * channels + at, hat, mask=real)

    tl.store(stats_count, count)
    tl.store(stats_empty, empty)
    tl.store(stats_pending, due & (due == 0))
    tl.store(seen, now_seen)
    tl.store(elements, now)
    tl.store(elements_before, before)
    tl.store(counted, now_counted)
    tl.store(samples, now_samples)
    numbers = kept + 5 * channels
    tl.store(numbers, w)
    tl.store(numbers + 1, accept.to(tl.float32))
    tl.store(numbers + 2, share.to(tl.float32))
    tl.store(numbers + 3, before.to(tl.float32))
    tl.store(numbers + 4, (now_counted - now).to(tl.float32))
    large = accept & (more >= LARGE * more_samples) & (before >= FULL)
    tl.store(numbers + 5, tl.where(large, OWN_SHARE, 0.0).to(tl.float32))
