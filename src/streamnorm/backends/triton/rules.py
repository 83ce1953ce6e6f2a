"""The rules of core/algorithm.py about a few numbers, or numbers side by side. Imported late: it needs triton.

All are given scalars or vectors of a program; weights are of `long` and `short`.
"""

import triton
import triton.language as tl


@triton.jit
def held(before, new, begins):
    """What a window holds after a call: what begins adds up, and timesteps of the same samples are one."""
    return tl.maximum(tl.where(begins != 0, before + new, before), new)


@triton.jit
def share_of(elements, GUARD: tl.constexpr, FULL: tl.constexpr, POWER: tl.constexpr):
    """How much a window of so many elements counts; 1 where their number is not known, 0, or nothing is guarded."""
    share = tl.minimum(tl.maximum(elements, 1e-30) / FULL, 1.0)
    if GUARD:
        share = tl.exp(POWER * tl.log(share))
        return tl.where(elements == 0, share * 0 + 1, share)
    else:
        return share * 0 + 1


@triton.jit
def lessened(LONG: tl.constexpr, SHORT: tl.constexpr, share, taken):
    """Weights of `long` and `short` in a window that is not full: what `short` loses `long` gains."""
    lost = taken * 0
    if LONG != 0:
        lost = tl.where(share < 1, SHORT - taken, lost)
    return LONG + lost, SHORT - lost


@triton.jit
def slowed(long, short, samples, part, MEMORY: tl.constexpr):
    """The same for evaluation: a window counts for no more than its samples are of the memory."""
    if MEMORY > 0:
        most = (long + short) * tl.maximum(samples / MEMORY, part)
        lost = tl.where(long != 0, tl.maximum(short - most, 0.0), most * 0)
        return long + lost, short - lost
    else:
        return long, short


@triton.jit
def lerp(start, end, share):
    """As torch.lerp rounds it."""
    return tl.where(share < 0.5, start + share * (end - start), end - (end - start) * (1 - share))


@triton.jit
def not_finite(values):
    """1 for NaN, inf, and what is so large that averaging could end in one of them: see `all_finite`."""
    return tl.where(tl.abs(4 * values) < float("inf"), 0, 1)


@triton.jit
def pushed(recent, value, share, accept):
    return tl.where(accept, lerp(recent, value, share), recent)


@triton.jit
def folded(lasting, recent, due, empty, long, short):
    after = tl.where(empty, recent, long * lasting + short * recent)
    return tl.where(due, after, lasting)
