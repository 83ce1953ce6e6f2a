"""Kernels over all norms of a timestep of a recurrent layer: those of single layers, once per norm. Imported late.

A set of norms is of `COUNT` gates: first those of the input's products, then those of the hidden state's; or it is the
one norm on a cell state, and `recurrent` is None. Each norm has a state of its own, so kernels get a table of
addresses, a row per norm. It is written on the device by each call, out of tensors that the call holds: nothing is
copied from the host, and no address outlives the call that read it.
"""

import triton
import triton.language as tl

from ...core.algorithm import KEPT_NUMBERS
from ...core.state import H1, H2
from .gradients import push_gradients
from .passes import pull_back, sum_powers
from .statistics import push_statistics

# The order of a row is that of the kernels' own arguments.
assert [name for name in push_statistics.arg_names if name in H1] == list(H1)
assert KEPT_NUMBERS == ("w", "accept", "weight_share", "window", "total", "own")  # numbers 0 to 5 in kernels, 6 in all
assert [name for name in push_gradients.arg_names if name in H2] == [name for name in H2 if name != "loss_scale"]
# What differs from timestep to timestep, or from set to set: kernels are not compiled anew for it.
PLACE = ("step", "row", "rows", "first_norm", "first_gate", "gates", "norms")


@triton.jit
def note_addresses(table, tensors):
    for index in tl.static_range(len(tensors)):
        tl.store(table + index, tensors[index].to(tl.int64))


@triton.jit
def h1_of(table, norm, PLACE: tl.constexpr, KIND: tl.constexpr):
    return tl.load(table + norm * 15 + PLACE).to(tl.pointer_type(KIND))


@triton.jit
def h2_of(table, norm, PLACE: tl.constexpr, KIND: tl.constexpr):
    return tl.load(table + norm * 5 + PLACE).to(tl.pointer_type(KIND))


@triton.jit
def norm_of(index, first, gates, COUNT: tl.constexpr):
    """The number of a norm among all of the layer."""
    return first + index % COUNT + (index // COUNT) * gates


@triton.jit
def side_of(index, of_input, of_hidden, COUNT: tl.constexpr):
    """What belongs to the product of a norm."""
    if of_hidden is None:
        return of_input
    else:
        return tl.where(index < COUNT, of_input, of_hidden)


@triton.jit(do_not_specialize=[*PLACE, "tiles", "each", "parts"])
def sum_gates(
    products,
    recurrent,
    table,
    sums_before,
    sums,  # (norms of the set, 1 + 2 * parts, C): see `sum_powers`
    row,  # the first of the timestep
    rows,
    channels,
    stride,
    first_norm,
    first_gate,
    gates,
    tiles,
    each,
    parts,
    P: tl.constexpr,
    OWN: tl.constexpr,
    RUNNING: tl.constexpr,
    WARMUP: tl.constexpr,
    COUNT: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """S of all norms: sums."""
    index = tl.program_id(2)
    norm = norm_of(index, first_norm, gates, COUNT)
    x = side_of(index, products, recurrent, COUNT) + row.to(tl.int64) * stride
    x += (first_gate + index % COUNT) * channels
    place = index * (1 + 2 * parts) * channels
    near = sums_before if sums_before is None else sums_before + place
    seen, mean = h1_of(table, norm, 7, tl.float64), h1_of(table, norm, 5, tl.float32)
    sum_powers(
        x, seen, mean, near, sums + place, rows, channels, 1, stride, tiles, each, parts, rows,
        P, OWN, RUNNING, WARMUP, False, HEIGHT, WIDTH,
    )  # fmt: skip


@triton.jit(do_not_specialize=[*PLACE, "begins", "tiles", "blocks", "parts"])
def stream_gates(
    products,
    recurrent,
    table,
    sums,
    kept,  # written: (steps, norms, 5 * C + 6)
    step,
    row,
    rows,
    begins,
    channels,
    stride,
    first_norm,
    first_gate,
    gates,
    norms,
    tiles,
    blocks,
    parts,
    P: tl.constexpr,
    OWN: tl.constexpr,
    RUNNING: tl.constexpr,
    EPS: tl.constexpr,
    FLOOR: tl.constexpr,
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
    COUNT: tl.constexpr,
    TILE_HEIGHT: tl.constexpr,
    TILE_WIDTH: tl.constexpr,
    TALL: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """F, a program for each norm."""
    index = tl.program_id(0)
    norm = norm_of(index, first_norm, gates, COUNT)
    x = side_of(index, products, recurrent, COUNT) + row.to(tl.int64) * stride
    x += (first_gate + index % COUNT) * channels
    push_statistics(
        x, sums + index * (1 + 2 * parts) * channels, None, None,
        kept + (step.to(tl.int64) * norms + norm) * (5 * channels + 6),
        h1_of(table, norm, 0, tl.float32), h1_of(table, norm, 1, tl.float32), h1_of(table, norm, 2, tl.int64),
        h1_of(table, norm, 3, tl.int1), h1_of(table, norm, 4, tl.int1), h1_of(table, norm, 5, tl.float32),
        h1_of(table, norm, 6, tl.float32), h1_of(table, norm, 7, tl.float64), h1_of(table, norm, 8, tl.float64),
        h1_of(table, norm, 9, tl.float64), h1_of(table, norm, 10, tl.float64), h1_of(table, norm, 11, tl.float64),
        h1_of(table, norm, 12, tl.float32), h1_of(table, norm, 13, tl.float32), h1_of(table, norm, 14, tl.float32),
        rows, rows, begins, channels, parts, rows, 1, stride, tiles, blocks,
        P, OWN, RUNNING, EPS, FLOOR, ALPHA_LONG, ALPHA_SHORT, KAPPA_LONG, KAPPA_SHORT, WARMUP, GUARD, MEMORY, FULL,
        POWER, ALIKE, LARGE, OWN_SHARE, False, TILE_HEIGHT, TILE_WIDTH, TALL, WIDTH,
    )  # fmt: skip


@triton.jit(do_not_specialize=[*PLACE, "parts"])
def stream_gate_gradients(
    table,
    sums,  # (norms of the set, 2 * parts, C), with SIGNS parts more: see `sum_gradients`
    gains,  # (norms, C)
    kept,
    scales,  # of the loss, for each norm
    flow,  # scratch: (norms, 2, C)
    vectors,  # written: (norms, 5, C)
    totals,  # added to: (norms, 2, C), dgain and dbias
    step,
    rows,
    channels,
    first_norm,
    gates,
    norms,
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
    COUNT: tl.constexpr,
    TALL: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """G, a program for each norm."""
    index = tl.program_id(0)
    norm = norm_of(index, first_norm, gates, COUNT)
    found, total = vectors + norm * 5 * channels, totals + norm * 2 * channels
    push_gradients(
        sums + index * (2 + SIGNS) * parts * channels, None, None, gains + norm * channels,
        kept + (step.to(tl.int64) * norms + norm) * (5 * channels + 6),
        h2_of(table, norm, 0, tl.float32), h2_of(table, norm, 1, tl.float32), h2_of(table, norm, 2, tl.int64),
        h2_of(table, norm, 3, tl.int1), h2_of(table, norm, 4, tl.int1), scales if scales is None else scales + norm,
        flow + norm * 2 * channels, found, rows, channels, parts,
        P, SIGNS, BETA_LONG, BETA_SHORT, BETA_PRESENT, KAPPA_LONG, KAPPA_SHORT, GUARD, FULL, POWER, TALL, WIDTH,
    )  # fmt: skip
    tl.debug_barrier()
    for first in range(0, 2 * channels, WIDTH):
        at = first + tl.arange(0, WIDTH)
        real = at < 2 * channels
        added = tl.load(total + at, mask=real, other=0.0) + tl.load(found + at, mask=real, other=0.0)
        tl.store(total + at, added, mask=real)


@triton.jit(do_not_specialize=[*PLACE, "tiles"])
def pull_gates_back(
    da,  # (rows, gates * C)
    products,
    recurrent,
    kept,
    vectors,
    dproducts,
    drecurrent,
    row,
    step,
    rows,
    channels,
    stride,
    wide,
    first_norm,
    first_gate,
    gates,
    norms,
    tiles,
    P: tl.constexpr,
    COUNT: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """dx of all norms. That of a cell state lies where the product of the first gate would, `wide` from row to row."""
    index = tl.program_id(2)
    norm = norm_of(index, first_norm, gates, COUNT)
    column, first = (first_gate + index % COUNT) * channels, row.to(tl.int64)
    x = side_of(index, products, recurrent, COUNT) + first * stride + column
    dx = side_of(index, dproducts, drecurrent, COUNT) + first * wide + column
    numbers = kept + (step.to(tl.int64) * norms + norm) * (5 * channels + 6)
    slopes = vectors + norm * 5 * channels + 2 * channels
    pull_back(da + column, x, numbers, slopes, dx, rows, channels, 1, stride, wide, tiles, 1, P, False, HEIGHT, WIDTH)
