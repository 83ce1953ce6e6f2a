"""Kernels over activations: sums for S(x) and for its gradient, N, and dx. Imported late: it needs triton.

A program works on a part of a block: a channel of planes, or `WIDTH` channels of rows. Tiles are (HEIGHT, WIDTH), and
vectors over channels have WIDTH numbers: for planes all of them are those of the one channel. Sums go into memory of
their own, part by part, and are added up in a fixed order by whoever reads them.
"""

import triton
import triton.language as tl


@triton.jit
def channels_of(block, channels, PLANES: tl.constexpr, WIDTH: tl.constexpr):
    """The channels of a block, which of them there are, and which of those to write for."""
    lane = tl.arange(0, WIDTH)
    if PLANES:
        return block + tl.zeros_like(lane), lane >= 0, lane == 0
    else:
        channel = block * WIDTH + lane
        return channel, channel < channels, channel < channels


@triton.jit
def tile_of(tile, block, samples, channels, space, PLANES: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """Rows, columns and what of it is there. Rows are 64 bit: there may be more than 2^31 elements."""
    if PLANES:
        across = tl.cdiv(space, WIDTH)
        row = (tile // across) * HEIGHT + tl.arange(0, HEIGHT)
        location = (tile % across) * WIDTH + tl.arange(0, WIDTH)
        inside = (row < samples)[:, None] & (location < space)[None, :]
        return row.to(tl.int64)[:, None], (block * space + location)[None, :], inside
    else:
        row = tile * HEIGHT + tl.arange(0, HEIGHT)
        column = block * WIDTH + tl.arange(0, WIDTH)
        inside = (row < samples)[:, None] & (column < channels)[None, :]
        return row.to(tl.int64)[:, None], column[None, :], inside


@triton.jit
def down(lanes, PLANES: tl.constexpr):
    """The sum of a tile for each of its channels."""
    columns = tl.sum(lanes, 0)
    if PLANES:
        return tl.zeros_like(columns) + tl.sum(columns, 0)
    else:
        return columns


@triton.jit
def typical(
    x,
    block,
    samples,
    channels,
    space,
    stride,
    PLANES: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The average of the finite elements in the first tile: about it, squares of data far from 0 lose no digits."""
    row, column, inside = tile_of(0, block, samples, channels, space, PLANES, HEIGHT, WIDTH)
    values = tl.load(x + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    there = inside & (tl.abs(values) < float("inf"))
    count = down(there.to(tl.float32), PLANES)
    return down(tl.where(there, values, 0.0), PLANES) / tl.maximum(count, 1.0)


@triton.jit
def powers_about(
    x,
    center,
    block,
    first,
    last,
    samples,
    channels,
    space,
    stride,
    P: tl.constexpr,
    PLANES: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Sums of x - center and |x - center|^p over tiles `first` to `last`, a vector each."""
    distance = tl.zeros((HEIGHT, WIDTH), tl.float32)
    power = tl.zeros((HEIGHT, WIDTH), tl.float32)
    for tile in range(first, last):
        row, column, inside = tile_of(tile, block, samples, channels, space, PLANES, HEIGHT, WIDTH)
        values = tl.load(x + row * stride + column, mask=inside, other=0.0).to(tl.float32)
        d = tl.where(inside, values - center[None, :], 0.0)
        distance += d
        power += d * d if P == 2 else tl.abs(d)
    return down(distance, PLANES), down(power, PLANES)


@triton.jit
def added_up(sums, channel, real, channels, parts, TALL: tl.constexpr, WIDTH: tl.constexpr):
    """Partial sums (parts, C) of some channels in float64, always in the same order."""
    total = tl.zeros((WIDTH,), tl.float64)
    for first in range(0, parts, TALL):
        part = first + tl.arange(0, TALL)
        inside = (part < parts)[:, None] & real[None, :]
        found = tl.load(sums + part[:, None] * channels + channel[None, :], mask=inside, other=0.0)
        total += tl.sum(found.to(tl.float64), 0)
    return total


@triton.jit(do_not_specialize=["samples", "elements", "tiles", "each", "parts"])
def sum_powers(
    x,
    seen,  # of the state, as is `mean`
    mean,
    sums_before,  # of a pass before this one, for the mean
    sums,  # (1 + 2 * parts, C): what the sums are about, sums of x - c, sums of |x - c|^p
    samples,
    channels,
    space,
    stride,
    tiles,
    each,
    parts,
    elements,
    P: tl.constexpr,
    OWN: tl.constexpr,
    RUNNING: tl.constexpr,
    WARMUP: tl.constexpr,
    PLANES: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """About the center of the p-th moment where that is known, else about something near: see `push_statistics`."""
    block, part = tl.program_id(0), tl.program_id(1)
    channel, real, written = channels_of(block, channels, PLANES, WIDTH)
    if RUNNING:
        center = tl.load(mean + channel, mask=real, other=0.0)
    else:
        center = tl.zeros((WIDTH,), tl.float32)
    if sums_before is not None:
        near = tl.load(sums_before + channel, mask=real, other=0.0)
        if PLANES:
            alone = block + tl.arange(0, 1)
            total = added_up(sums_before + channels, alone, alone >= 0, channels, parts, 128, 1)
        else:
            total = added_up(sums_before + channels, channel, real, channels, parts, 16, WIDTH)
        center = (near + total / elements.to(tl.float64)).to(tl.float32)
    elif OWN:
        center = typical(x, block, samples, channels, space, stride, PLANES, HEIGHT, WIDTH)
    elif RUNNING and WARMUP > 0:
        if tl.load(seen) == 0:
            center = typical(x, block, samples, channels, space, stride, PLANES, HEIGHT, WIDTH)
    last = tl.minimum((part + 1) * each, tiles)
    distance, power = powers_about(
        x, center, block, part * each, last, samples, channels, space, stride, P, PLANES, HEIGHT, WIDTH
    )
    out = sums + channel
    if part == 0:
        tl.store(out, center, mask=written)
    tl.store(out + (1 + part) * channels, distance, mask=written)
    tl.store(out + (1 + parts + part) * channels, power, mask=written)


@triton.jit(do_not_specialize=["samples", "tiles", "each"])
def normalize(
    x,
    gain,
    bias,
    kept,  # 5 vectors: mean, center and sigma of S(x), then s_hat
    y,
    samples,
    channels,
    space,
    stride,
    out_stride,
    tiles,
    each,
    PLANES: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """y = (x - mean) * (gain / sigma) + bias."""
    block, part = tl.program_id(0), tl.program_id(1)
    channel, real, _ = channels_of(block, channels, PLANES, WIDTH)
    mean = tl.load(kept + 3 * channels + channel, mask=real, other=0.0)[None, :]
    sigma = tl.load(kept + 4 * channels + channel, mask=real, other=1.0)
    if gain is None:
        unit = (1.0 / sigma)[None, :]
    else:
        unit = (tl.load(gain + channel, mask=real, other=0.0).to(tl.float32) / sigma)[None, :]
    if bias is None:
        shift = tl.zeros_like(mean)
    else:
        shift = tl.load(bias + channel, mask=real, other=0.0).to(tl.float32)[None, :]
    for tile in range(part * each, tl.minimum((part + 1) * each, tiles)):
        row, column, inside = tile_of(tile, block, samples, channels, space, PLANES, HEIGHT, WIDTH)
        values = tl.load(x + row * stride + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(y + row * out_stride + column, (values - mean) * unit + shift, mask=inside)


@triton.jit
def sign(values):
    return (values > 0).to(tl.float32) - (values < 0).to(tl.float32)  # 0 for NaN, as torch has it


@triton.jit(do_not_specialize=["samples", "tiles", "each", "parts"])
def sum_gradients(
    dy,
    x,
    kept,
    sums,  # (2 * parts, C): sums of dy and of dy * (x - mean); with SIGNS parts more, of sign(x - center)
    samples,
    channels,
    space,
    stride,
    dy_stride,
    tiles,
    each,
    parts,
    SIGNS: tl.constexpr,
    PLANES: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    block, part = tl.program_id(0), tl.program_id(1)
    channel, real, written = channels_of(block, channels, PLANES, WIDTH)
    mean = tl.load(kept + 3 * channels + channel, mask=real, other=0.0)[None, :]
    center = tl.load(kept + channels + channel, mask=real, other=0.0)[None, :]
    direct = tl.zeros((HEIGHT, WIDTH), tl.float32)
    product = tl.zeros((HEIGHT, WIDTH), tl.float32)
    signs = tl.zeros((HEIGHT, WIDTH), tl.float32)
    for tile in range(part * each, tl.minimum((part + 1) * each, tiles)):
        row, column, inside = tile_of(tile, block, samples, channels, space, PLANES, HEIGHT, WIDTH)
        values = tl.load(x + row * stride + column, mask=inside, other=0.0).to(tl.float32)
        slope = tl.load(dy + row * dy_stride + column, mask=inside, other=0.0).to(tl.float32)
        direct += slope
        product += tl.where(inside, slope * (values - mean), 0.0)
        if SIGNS:
            signs += tl.where(inside, sign(values - center), 0.0)
    out = sums + part * channels + channel
    tl.store(out, down(direct, PLANES), mask=written)
    tl.store(out + parts * channels, down(product, PLANES), mask=written)
    if SIGNS:
        tl.store(out + 2 * parts * channels, down(signs, PLANES), mask=written)


@triton.jit(do_not_specialize=["samples", "tiles", "each"])
def pull_back(
    dy,
    x,
    kept,
    slopes,  # (3, C): unit, slope and offset
    dx,
    samples,
    channels,
    space,
    stride,
    dy_stride,
    tiles,
    each,
    P: tl.constexpr,
    PLANES: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """dx = dy * unit + (x - center) * slope + offset, with the sign of x - center for p = 1."""
    block, part = tl.program_id(0), tl.program_id(1)
    channel, real, _ = channels_of(block, channels, PLANES, WIDTH)
    center = tl.load(kept + channels + channel, mask=real, other=0.0)[None, :]
    unit = tl.load(slopes + channel, mask=real, other=0.0)[None, :]
    slope = tl.load(slopes + channels + channel, mask=real, other=0.0)[None, :]
    offset = tl.load(slopes + 2 * channels + channel, mask=real, other=0.0)[None, :]
    for tile in range(part * each, tl.minimum((part + 1) * each, tiles)):
        row, column, inside = tile_of(tile, block, samples, channels, space, PLANES, HEIGHT, WIDTH)
        d = tl.load(x + row * stride + column, mask=inside, other=0.0).to(tl.float32) - center
        direct = tl.load(dy + row * dy_stride + column, mask=inside, other=0.0).to(tl.float32)
        if P == 1:
            d = sign(d)
        tl.store(dx + row * dy_stride + column, direct * unit + d * slope + offset, mask=inside)
