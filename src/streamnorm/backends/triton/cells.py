"""The kernel of one timestep of the RNN, of the paper's GRU and of the LSTM, after their norms. Imported late.

A program has a tile of samples and units. `CELL` says what is computed: "rnn"; "gates" and then "state" of a GRU;
"lstm", and, where its cell state has a norm, "cell" after it. Activations that a cell keeps are in `inner`, each of
them (rows of all timesteps, units), `part` numbers: of an RNN h; of a GRU r, z, the new state and h * r; of an LSTM i,
f, g, o, f(N(c)) and, with a norm, c. What is carried from step to step is in `before`: h, and c of an LSTM.
"""

import triton
import triton.language as tl


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def squashed(x, RELU: tl.constexpr):
    """relu, or tanh within 2e-7; near 0 by a polynomial, as the quotient would cancel there."""
    if RELU:
        return tl.where(x < 0, 0.0, x)  # NaN stays
    else:
        size, z = tl.abs(x), x * x
        small = -5.70498872745e-3 * z + 2.06390887954e-2
        small = small * z - 5.37397155531e-2
        small = small * z + 1.33314422036e-1
        small = small * z - 3.33332819422e-1
        small = small * z * x + x
        large = 1.0 - 2.0 / (tl.exp(2.0 * size) + 1.0)
        return tl.where(size < 0.625, small, tl.where(x < 0, -large, large))


@triton.jit
def tile_at(row, rows, channels, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """Samples and units of a program, which of them there are, and where the samples of the timestep are."""
    sample = (tl.program_id(1) * HEIGHT + tl.arange(0, HEIGHT)).to(tl.int64)[:, None]
    channel = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    return sample, channel, (sample < rows) & (channel < channels)[None, :], row + sample


@triton.jit
def normed(x, inside, hats, affine, norm, norms, channel, channels, hat_stride):
    """N, gain and bias of one norm: (x - mean) * (gain / sigma) + bias."""
    real = channel < channels
    mean = tl.load(hats + norm * hat_stride + channel, mask=real, other=0.0)[None, :]
    sigma = tl.load(hats + norm * hat_stride + channels + channel, mask=real, other=1.0)
    gain = tl.load(affine + norm * channels + channel, mask=real, other=0.0)
    bias = tl.load(affine + (norms + norm) * channels + channel, mask=real, other=0.0)[None, :]
    return (tl.load(x, mask=inside, other=0.0) - mean) * (gain / sigma)[None, :] + bias


@triton.jit
def argument(GATE: tl.constexpr, GATES: tl.constexpr, given):
    """N(W_x x) + N(W_h h) of a gate."""
    products, recurrent, at, inside, hats, affine, norms, channel, channels, hat_stride = given
    there = at * (GATES * channels) + GATE * channels + channel[None, :]
    of_x = normed(products + there, inside, hats, affine, GATE, norms, channel, channels, hat_stride)
    of_h = normed(recurrent + there, inside, hats, affine, GATES + GATE, norms, channel, channels, hat_stride)
    return of_x + of_h


@triton.jit
def carry(value, before, final, sample, next_row, later, column, inside, channels):
    """On to the next timestep, or, for samples that end here, to the result."""
    tl.store(before + (next_row + sample) * channels + column, value, mask=inside & (sample < later))
    tl.store(final + sample * channels + column, value, mask=inside & (sample >= later))


@triton.jit
def loaded(place, inside):
    return tl.load(place, mask=inside, other=0.0)


@triton.jit
def gru_gates(given, h, inner, part, inside):
    """r and z, and h * r for the next product."""
    r = sigmoid(argument(0, 3, given))
    tl.store(inner, r, mask=inside)
    tl.store(inner + 3 * part, h * r, mask=inside)
    tl.store(inner + part, sigmoid(argument(1, 3, given)), mask=inside)


@triton.jit
def gru_state(given, h, inner, part, inside, RELU: tl.constexpr):
    new, z = squashed(argument(2, 3, given), RELU), loaded(inner + part, inside)
    tl.store(inner + 2 * part, new, mask=inside)
    return z * new + (1.0 - z) * h


@triton.jit
def lstm_gates(given, c, inner, part, inside, RELU: tl.constexpr):
    """The cell state, and the output gate."""
    i = sigmoid(argument(0, 4, given))
    tl.store(inner, i, mask=inside)
    g = squashed(argument(2, 4, given), RELU)
    tl.store(inner + 2 * part, g, mask=inside)
    f = sigmoid(argument(1, 4, given))
    tl.store(inner + part, f, mask=inside)
    o = sigmoid(argument(3, 4, given))
    tl.store(inner + 3 * part, o, mask=inside)
    return f * c + i * g, o


@triton.jit
def lstm_output(a, o, inner, part, inside, RELU: tl.constexpr):
    s = squashed(a, RELU)
    tl.store(inner + 4 * part, s, mask=inside)
    return o * s


@triton.jit(do_not_specialize=["row", "rows", "next_row", "later", "hats_at", "total", "samples"])
def step_forward(
    products,
    recurrent,
    hats,  # s_hat of all norms: mean and sigma side by side, `hat_stride` from norm to norm
    affine,  # (2 * norms, C): gains, biases
    before,
    inner,
    output,
    final,
    row,  # the first of the timestep
    rows,
    next_row,  # the first of the next timestep, and how many samples go on to it
    later,
    hats_at,
    total,  # rows of all timesteps
    samples,
    channels,
    norms,
    hat_stride,
    CELL: tl.constexpr,
    CELL_NORM: tl.constexpr,
    RELU: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The gates of a set, and the state after the timestep as far as it can be told."""
    sample, channel, inside, at = tile_at(row, rows, channels, HEIGHT, WIDTH)
    hats += hats_at
    given = products, recurrent, at, inside, hats, affine, norms, channel, channels, hat_stride
    column = channel[None, :]
    here, part = at * channels + column, total.to(tl.int64) * channels
    inner += here
    if CELL == "gates":
        gru_gates(given, loaded(before + here, inside), inner, part, inside)
    elif CELL == "lstm":
        c, o = lstm_gates(given, loaded(before + part + here, inside), inner, part, inside, RELU)
        last = final + samples.to(tl.int64) * channels
        carry(c, before + part, last, sample, next_row, later, column, inside, channels)
        if CELL_NORM:
            tl.store(inner + 5 * part, c, mask=inside)
        else:
            y = lstm_output(c, o, inner, part, inside, RELU)
    elif CELL == "cell":
        a = normed(inner + 5 * part, inside, hats, affine, 8, norms, channel, channels, hat_stride)
        y = lstm_output(a, loaded(inner + 3 * part, inside), inner, part, inside, RELU)
    elif CELL == "state":
        y = gru_state(given, loaded(before + here, inside), inner, part, inside, RELU)
    else:
        y = squashed(argument(0, 1, given), RELU)
        tl.store(inner, y, mask=inside)
    if CELL != "gates" and not (CELL == "lstm" and CELL_NORM):
        tl.store(output + here, y, mask=inside)
        carry(y, before, final, sample, next_row, later, column, inside, channels)
