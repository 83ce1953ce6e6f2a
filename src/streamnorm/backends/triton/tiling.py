"""How activations are shared out among programs of a GPU: tiles, and how many of them a program takes.

Sizes follow from the shape alone, so the same call has the same order of summation, and the same bits, everywhere.
"""

from typing import NamedTuple

from torch import Tensor

# A program is 4 warps, so a thread of a warp of 32 holds 16 elements of a tile: 64 bytes of float32 on their way from
# memory at a time, four loads of the widest kind.
TILE = 2048
# The widest run of memory within a tile. Planes are read along locations. Rows are read along channels, where a tile
# takes few of them, so that many programs share the rows: 64 channels are 128 bytes of bfloat16, a line of the cache.
LOCATIONS, CHANNELS = 1024, 64
# Programs that add up. GPUs of today have some 100 multiprocessors, which take several programs each to hide the time
# that memory takes to answer. What the programs found is read again by the single program of F and G: a few numbers for
# each of them where a program has one channel, and `CHANNELS` times as many where it has rows.
ADDERS_OF_PLANES, ADDERS_OF_ROWS = 1024, 256
# A program of a recurrent timestep holds a dozen numbers for each element.
STEP_TILE = 1024
MOST_PARTS = 128  # of a channel, for the same reason
WRITERS = 4096  # programs that write an output: nobody reads after them
VECTOR = 1024  # numbers of a vector, or of a block of partial sums, that F and G hold at a time


class Tiling(NamedTuple):
    """How kernels read `(N, C, *space)`: a block is a channel of planes, or some channels of rows."""

    planes: bool
    samples: int  # rows, where it is read as rows
    channels: int
    space: int  # locations of a plane; 1 for rows
    stride: int  # from sample to sample, or from row to row
    height: int  # of a tile: samples or rows
    width: int  # of a tile: locations or channels
    blocks: int
    tiles: int  # of each block

    @property
    def elements(self) -> int:
        return self.samples * self.space

    def shared_out(self, programs: int, most: int | None = None) -> tuple[int, int]:
        """Parts of a block, and the tiles of each, for about so many programs in all."""
        parts = max(1, min(self.tiles, -(-programs // self.blocks), most or self.tiles))
        each = -(-self.tiles // parts)
        return -(-self.tiles // each), each

    def adders(self) -> tuple[int, int]:
        return self.shared_out(ADDERS_OF_PLANES if self.planes else ADDERS_OF_ROWS, MOST_PARTS)

    def writers(self) -> tuple[int, int]:
        return self.shared_out(WRITERS, 65535)  # the most that a grid has in its second direction


def power_of_two(n: int) -> int:
    """The next one: tiles have no other sizes."""
    return 1 << (n - 1).bit_length()


def tiling_of(x: Tensor) -> Tiling | None:
    """How x is read: as planes `(N, C, S)`, as rows `(M, C)`, or not at all."""
    samples, channels = x.shape[:2]
    space = x.numel() // (samples * channels)
    if x.ndim == 2:
        return of_rows(samples, channels, x.stride(0)) if x.stride(1) == 1 or channels == 1 else None
    if x.is_contiguous() and space > 1:
        width = min(power_of_two(space), LOCATIONS)
        height = min(power_of_two(samples), TILE // width)
        tiles = -(-samples // height) * -(-space // width)
        return Tiling(True, samples, channels, space, channels * space, height, width, channels, tiles)
    if x.is_contiguous() or x.movedim(1, -1).is_contiguous():
        return of_rows(samples * space, channels, channels)
    return None


def of_rows(rows: int, channels: int, stride: int, most: int | None = None) -> Tiling:
    """`most`: elements of a tile."""
    width = min(power_of_two(channels), CHANNELS)
    height = min(power_of_two(rows), max(1, (most or TILE) // width))
    return Tiling(False, rows, channels, 1, stride, height, width, -(-channels // width), -(-rows // height))


def vector_block(channels: int, parts: int) -> tuple[int, int]:
    """Channels, and partial sums of each, that F and G take at a time."""
    width = min(power_of_two(channels), VECTOR)
    return width, min(power_of_two(parts), max(1, 2 * VECTOR // width))
