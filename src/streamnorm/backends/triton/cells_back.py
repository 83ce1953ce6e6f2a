"""The kernel of the way back through one timestep: to the gradients before the activations, and their sums.

See cells.py for what is meant by `CELL`, `inner` and `before`. Imported late.
"""

import triton
import triton.language as tl

from .cells import loaded, tile_at
from .passes import sign


@triton.jit
def unsquashed(dy, y, RELU: tl.constexpr):
    """The gradient before relu or tanh, which are known by their value."""
    if RELU:
        return tl.where(y <= 0, 0.0, dy)
    else:
        return dy * (1.0 - y * y)


@triton.jit
def sum_side(da, x, inside, kept, sums, channel, channels, parts, SIGNS: tl.constexpr):
    """Sums of da, of da * (x - mean), and of sign(x - center), for one norm: see `sum_gradients`."""
    real = channel < channels
    values = tl.load(x, mask=inside, other=0.0)
    mean = tl.load(kept + 3 * channels + channel, mask=real, other=0.0)[None, :]
    out = sums + tl.program_id(1) * channels + channel
    tl.store(out, tl.sum(da, 0), mask=real)
    tl.store(out + parts * channels, tl.sum(tl.where(inside, da * (values - mean), 0.0), 0), mask=real)
    if SIGNS:
        center = tl.load(kept + channels + channel, mask=real, other=0.0)[None, :]
        signs = tl.sum(tl.where(inside, sign(values - center), 0.0), 0)
        tl.store(out + 2 * parts * channels, signs, mask=real)


@triton.jit
def sum_gate(
    da, GATE: tl.constexpr, GATES: tl.constexpr, FIRST: tl.constexpr, COUNT: tl.constexpr, given, SIGNS: tl.constexpr
):
    """Keeps da, the gradient before an activation, and sums it up for both norms of the gate."""
    place, products, recurrent, at, inside, kept, sums, channel, channels, parts = given
    da = tl.where(inside, da, 0.0)
    tl.store(place + GATE * channels, da, mask=inside)
    there = at * (GATES * channels) + GATE * channels + channel[None, :]
    size, each = 5 * channels + 6, (2 + SIGNS) * parts * channels
    out = sums + (GATE - FIRST) * each
    sum_side(da, products + there, inside, kept + GATE * size, out, channel, channels, parts, SIGNS)
    kept += (GATES + GATE) * size
    sum_side(da, recurrent + there, inside, kept, out + COUNT * each, channel, channels, parts, SIGNS)


@triton.jit
def arriving(d, dfinal, sample, later, column, inside, channels):
    """The gradient of what is carried: from the timestep after, or, for samples that end here, from the result."""
    there = sample * channels + column
    found = tl.load(d + there, mask=inside & (sample < later), other=0.0)
    return found + tl.load(dfinal + there, mask=inside & (sample >= later), other=0.0)


@triton.jit
def gru_state_back(given, dh, h, d, inner, part, RELU: tl.constexpr, SIGNS: tl.constexpr):
    """To the new state, to z, and straight on to the state before."""
    place, inside, channels = given[0], given[4], given[8]
    z, new = loaded(inner + part, inside), loaded(inner + 2 * part, inside)
    tl.store(place + channels, dh * (new - h) * (z * (1.0 - z)), mask=inside)
    tl.store(d, dh * (1.0 - z), mask=inside)
    sum_gate(unsquashed(dh * z, new, RELU), 2, 3, 2, 1, given, SIGNS)


@triton.jit
def gru_gates_back(given, dreset, h, d, inner, SIGNS: tl.constexpr):
    """To r, and on to the state before; z is known by now."""
    place, inside, channels = given[0], given[4], given[8]
    r = loaded(inner, inside)
    tl.store(d, loaded(d, inside) + dreset * r, mask=inside)
    sum_gate(dreset * h * (r * (1.0 - r)), 0, 3, 0, 2, given, SIGNS)
    sum_gate(loaded(place + channels, inside), 1, 3, 0, 2, given, SIGNS)


@triton.jit
def lstm_output_back(dh, inner, part, inside, RELU: tl.constexpr):
    """To the output gate, and to the cell state or what its norm made of it."""
    o, s = loaded(inner + 3 * part, inside), loaded(inner + 4 * part, inside)
    return dh * s * (o * (1.0 - o)), unsquashed(dh * o, s, RELU)


@triton.jit
def lstm_gates_back(given, to_o, dc, c, d, inner, part, RELU: tl.constexpr, SIGNS: tl.constexpr):
    """To all gates, and straight on to the cell state before."""
    inside = given[4]
    sum_gate(to_o, 3, 4, 0, 4, given, SIGNS)
    f = loaded(inner + part, inside)
    tl.store(d, dc * f, mask=inside)
    sum_gate(dc * c * (f * (1.0 - f)), 1, 4, 0, 4, given, SIGNS)
    i, g = loaded(inner, inside), loaded(inner + 2 * part, inside)
    sum_gate(dc * g * (i * (1.0 - i)), 0, 4, 0, 4, given, SIGNS)
    sum_gate(unsquashed(dc * i, g, RELU), 2, 4, 0, 4, given, SIGNS)


@triton.jit(do_not_specialize=["row", "rows", "later", "step", "total", "samples", "parts"])
def step_backward(
    doutput,
    dfinal,
    d,  # (1 or 2, samples, C): of what is carried; replaced by what goes straight on to the step before
    dreset,  # (samples, C): of h * r in a GRU
    products,
    recurrent,
    kept,
    before,
    inner,
    da,  # written: (samples, gates * C)
    dcell,  # of the cell state, from its norm: in the place of the first gate's product
    sums,  # written
    row,
    rows,
    later,
    step,
    total,
    samples,
    channels,
    norms,
    parts,
    GATES: tl.constexpr,
    CELL: tl.constexpr,
    CELL_NORM: tl.constexpr,
    RELU: tl.constexpr,
    SIGNS: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """From the gradients of what is carried, and of the output, to those before the activations, and their sums."""
    sample, channel, inside, at = tile_at(row, rows, channels, HEIGHT, WIDTH)
    column = channel[None, :]
    here, part, of_sample = at * channels + column, total.to(tl.int64) * channels, sample * channels + column
    kept += step.to(tl.int64) * norms * (5 * channels + 6)
    inner += here
    place = da + sample * (GATES * channels) + column
    given = place, products, recurrent, at, inside, kept, sums, channel, channels, parts
    if CELL != "gates" and not (CELL == "lstm" and CELL_NORM):
        dh = arriving(d, dfinal, sample, later, column, inside, channels) + loaded(doutput + here, inside)
    if CELL == "rnn":
        sum_gate(unsquashed(dh, loaded(inner, inside), RELU), 0, 1, 0, 1, given, SIGNS)
    elif CELL == "state":
        gru_state_back(given, dh, loaded(before + here, inside), d + of_sample, inner, part, RELU, SIGNS)
    elif CELL == "gates":
        from_product, h = loaded(dreset + of_sample, inside), loaded(before + here, inside)
        gru_gates_back(given, from_product, h, d + of_sample, inner, SIGNS)
    elif CELL == "cell":
        to_o, to_s = lstm_output_back(dh, inner, part, inside, RELU)
        to_s = tl.where(inside, to_s, 0.0)
        tl.store(place, to_s, mask=inside)
        tl.store(place + 3 * channels, to_o, mask=inside)
        of_norm = kept + 8 * (5 * channels + 6)
        sum_side(to_s, inner + 5 * part, inside, of_norm, sums, channel, channels, parts, SIGNS)
    else:
        if CELL_NORM:
            to_o, to_c = loaded(place + 3 * channels, inside), loaded(dcell + at * (4 * channels) + column, inside)
        else:
            to_o, to_c = lstm_output_back(dh, inner, part, inside, RELU)
        of_c = samples.to(tl.int64) * channels
        dc = arriving(d + of_c, dfinal + of_c, sample, later, column, inside, channels) + to_c
        c = loaded(before + part + here, inside)
        lstm_gates_back(given, to_o, dc, c, d + of_c + of_sample, inner, part, RELU, SIGNS)
