"""The timesteps of a packed sequence, and what is launched at each of them: three kernels for all norms of a set."""

from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

from .. import Sequence
from . import launch, tiling
from .launch import kernels, run
from .tiling import Tiling, of_rows, vector_block


class Step(NamedTuple):
    """A timestep, in the order in which a sequence is walked."""

    t: int
    row: int  # its first row
    rows: int
    earlier: int  # samples that were there a step before: the others begin here
    later: int  # samples that go on: the others end here
    next_row: int  # the first row of the step after it


@lru_cache(maxsize=64)
def walk(sizes: tuple[int, ...], reverse: bool) -> tuple[Step, ...]:
    """In the direction of the sequence; against it, for backward, it is read from its end."""
    firsts = [0, *accumulate(sizes)]
    order = range(len(sizes))[:: -1 if reverse else 1]
    steps = []
    for place, t in enumerate(order):
        around = [order[place - 1] if place else None, order[place + 1] if place + 1 < len(order) else None]
        earlier, later = (0 if other is None else min(sizes[other], sizes[t]) for other in around)
        steps.append(Step(t, firsts[t], sizes[t], earlier, later, 0 if around[1] is None else firsts[around[1]]))
    return tuple(steps)


class Set(NamedTuple):
    """Norms that are streamed at once: of some gates, for both of their products, or the one on a cell state."""

    cell: str  # what becomes of them: `CELL` of cells.py
    gate: int  # the first
    gates: int
    norm: int  # the number of the first norm
    norms: int


CARRIED = {1: 1, 3: 1, 4: 2}  # tensors that are carried from step to step, by gates: h, and c of an LSTM
INNER = {1: 1, 3: 4, 4: 5}  # activations that a cell keeps: see cells.py


def sets_of(call: Sequence) -> list[Set]:
    if call.gates == 1:
        return [Set("rnn", 0, 1, 0, 2)]
    if call.gates == 3:  # the reset gate goes into the product of the new state
        return [Set("gates", 0, 2, 0, 4), Set("state", 2, 1, 2, 2)]
    return [Set("lstm", 0, 4, 0, 8), *([Set("cell", 0, 1, 8, 1)] if call.cell_norm else [])]


class Walker:
    """What launches at the timesteps of a sequence have in common."""

    def __init__(self, call: Sequence, hidden: int, tensors: dict[str, Any]) -> None:
        self.call, self.hidden, self.tensors = call, hidden, tensors
        self.norms = 2 * call.gates + call.cell_norm
        self.sums_tiling = of_rows(call.sizes[0], hidden, 0)
        self.tiling = of_rows(call.sizes[0], hidden, 0, tiling.STEP_TILE)
        self.signs = launch.settings_of(call.config, True)["SIGNS"]
        self.most_norms = max(each.norms for each in sets_of(call))
        self.most_parts = min(self.sums_tiling.tiles, tiling.MOST_PARTS)
        self.told = {"CELL_NORM": call.cell_norm, "RELU": call.relu, "GATES": call.gates}
        self.sizes = {"channels": hidden, "gates": call.gates, "norms": self.norms, "wide": call.gates * hidden}
        self.sizes |= {"total": sum(call.sizes), "samples": call.sizes[0]}

    def given(self, step: Step, each: Set) -> dict[str, Any]:
        """Everything that kernels may ask of a timestep."""
        found = self.tensors | self.sizes
        found |= {"row": step.row, "rows": step.rows, "next_row": step.next_row, "later": step.later, "step": step.t}
        found |= {"first_norm": each.norm, "first_gate": each.gate, "stride": self.sizes["wide"]}
        if each.cell == "cell":
            found |= {"products": self.tensors["cells"], "recurrent": None, "stride": self.hidden}
            found |= {"dproducts": self.tensors.get("drecurrent"), "drecurrent": None}
        return found

    def tiled(self, step: Step, given: Tiling) -> Tiling:
        """The shape of a tile is that of the largest timestep: kernels are compiled for it once."""
        return given._replace(samples=step.rows, tiles=-(-step.rows // given.height))

    def forward(self, step: Step, each: Set) -> None:
        """One launch, and in training those of `stream` before it."""
        hat_stride, hats_at = 2 * self.hidden, 0
        if self.call.training:
            self.stream(step, each)
            hat_stride = launch.kept_size(self.hidden)
            hats_at = step.t * self.norms * hat_stride + 3 * self.hidden
        tiles = self.tiled(step, self.tiling)
        given = self.given(step, each) | {"hats_at": hats_at, "hat_stride": hat_stride}
        told = self.told | {"CELL": each.cell, "HEIGHT": tiles.height, "WIDTH": tiles.width}
        run(kernels().step_forward, (tiles.blocks, tiles.tiles), given, told)

    def stream(self, step: Step, each: Set) -> None:
        """S and F of a set: two launches, three for p = 1 about the mini-batch's own mean."""
        told = launch.settings_of(self.call.config, False) | {"COUNT": each.gates}
        tiles = self.tiled(step, self.sums_tiling)
        (parts, many), given = tiles.adders(), self.given(step, each)
        given |= {"tiles": tiles.tiles, "blocks": tiles.blocks, "each": many, "parts": parts}
        given |= {"begins": int(step.earlier == 0 and not self.call.goes_on), "sums_before": None}
        shape = {"HEIGHT": tiles.height, "WIDTH": tiles.width}
        run(kernels().sum_gates, (tiles.blocks, parts, each.norms), given, told | shape)
        if told["SIGNS"]:
            given |= {"sums_before": given["sums"], "sums": given["sums_again"]}
            run(kernels().sum_gates, (tiles.blocks, parts, each.norms), given, told | shape)
        width, tall = vector_block(self.hidden, self.most_parts)
        shape = {"TILE_HEIGHT": tiles.height, "TILE_WIDTH": tiles.width, "WIDTH": width, "TALL": tall}
        run(kernels().stream_gates, (each.norms,), given, told | shape, launch.ALONE)

    def backward(self, step: Step, each: Set) -> None:
        """The way back through a set, to the gradients of its products: three launches."""
        config, tiles = self.call.config, self.tiled(step, self.tiling)
        told = launch.settings_of(config, True) | self.told | {"CELL": each.cell, "COUNT": each.gates}
        given, shape = self.given(step, each), {"HEIGHT": tiles.height, "WIDTH": tiles.width}
        given |= {"parts": tiles.tiles, "tiles": tiles.tiles}
        own = {name: self.tensors[name] for name in ("products", "recurrent")}
        run(kernels().step_backward, (tiles.blocks, tiles.tiles), given | own, told | shape)
        width, tall = vector_block(self.hidden, self.tiling.tiles)
        block = {"WIDTH": width, "TALL": tall}
        run(kernels().stream_gate_gradients, (each.norms,), given, told | block, launch.ALONE)
        run(kernels().pull_gates_back, (tiles.blocks, tiles.tiles, each.norms), given, told | shape)
