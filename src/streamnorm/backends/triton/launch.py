"""Starting the kernels: S and F, N, and backward G and dx. Each launch stands here once.

Memory traffic of a call in elements of its input: forward reads x twice and writes y, 3; backward reads x and dy twice
and writes dx, 5. Batch norm has to do the same. With p = 1 about the mini-batch's own mean x is read once more forward.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from math import sqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core.algorithm import ALIKE, FULL, LARGE, NUMBERS, OWN, POWER
from ...core.config import Config
from ...core.state import H1, PARTS, State, Stream, of_h1
from .tiling import Tiling, vector_block

# How a setting is told to kernels, which are compiled for it. Those that are not here are not known.
_TOLD: dict[str, Callable[[Any], dict[str, Any]]] = {
    "p": lambda p: {"P": int(p)},
    "center": lambda center: {"OWN": center == "mean", "RUNNING": center == "running"},
    "eps": lambda eps: {"EPS": eps, "FLOOR": sqrt(eps)},
    "alpha": lambda alpha: {"ALPHA_LONG": alpha[0], "ALPHA_SHORT": alpha[1]},
    "beta": lambda beta: {"BETA_LONG": beta[0], "BETA_SHORT": beta[1], "BETA_PRESENT": beta[2]},
    "kappa": lambda kappa: {"KAPPA": kappa},
    "warmup": lambda warmup: {"WARMUP": float(warmup)},
    "guard": lambda guard: {"GUARD": guard},
    "eval_memory": lambda samples: {"MEMORY": samples},
}
KNOWN = tuple(_TOLD)


class Kernels(NamedTuple):
    sum_powers: Any
    push_statistics: Any
    normalize: Any
    sum_gradients: Any
    push_gradients: Any
    pull_back: Any
    note_addresses: Any
    sum_gates: Any
    stream_gates: Any
    step_forward: Any
    step_backward: Any
    stream_gate_gradients: Any
    pull_gates_back: Any


@cache
def kernels() -> Kernels:
    """All of them, imported by the first call: until then nobody needs triton."""
    from . import cells, cells_back, gates, gradients, passes, statistics

    return Kernels(
        passes.sum_powers,
        statistics.push_statistics,
        passes.normalize,
        passes.sum_gradients,
        gradients.push_gradients,
        passes.pull_back,
        gates.note_addresses,
        gates.sum_gates,
        gates.stream_gates,
        cells.step_forward,
        cells_back.step_backward,
        gates.stream_gate_gradients,
        gates.pull_gates_back,
    )


@cache
def takes_tuples() -> bool:
    from triton import language

    return hasattr(language, "tuple")


@cache
def settings_of(config: Config, backward: bool) -> dict[str, Any]:
    """Everything that kernels are told of the settings, for one of the passes."""
    told: dict[str, Any] = {"FULL": FULL, "POWER": POWER, "ALIKE": ALIKE, "LARGE": LARGE}
    told["OWN_SHARE"] = OWN if config.guard and config.beta[0] else 0.0
    for name, tell in _TOLD.items():
        told |= tell(getattr(config, name))
    long, short = told.pop("KAPPA")[2 * backward :][:2]
    return told | {"KAPPA_LONG": long, "KAPPA_SHORT": short, "SIGNS": config.p == 1 and told["OWN"]}


# A product and a sum are rounded one by one, as in plain torch, whatever triton takes for its default.
_WARPS = {"num_warps": 4, "enable_fp_fusion": False}
# The single program of F and G has a multiprocessor for itself. NVIDIA's assembler would spill some registers, to let
# others in, if it was not told that 128 are fine. AMD's compiler spills none, and does not take the option.
ALONE: dict[str, Any] = {"num_warps": 8, "enable_fp_fusion": False}
ALONE |= {} if torch.version.hip else {"maxnreg": 128}


def run(
    kernel: Any, grid: tuple[int, ...], given: dict[str, Any], told: dict[str, Any], options: dict[str, Any] = _WARPS
) -> None:
    """What a kernel does not ask for it does not get."""
    names = kernel.arg_names
    given, told = ({name: each[name] for name in names if name in each} for each in (given, told))
    start(kernel, grid, given, told | options)


def start(kernel: Any, grid: tuple[int, ...], given: dict[str, Any], options: dict[str, Any]) -> None:
    """The one door: all launches pass through it."""
    kernel[grid](**given, **options)


def on_device_of(tensor: Tensor) -> AbstractContextManager[Any]:
    """Launches go to the current device: that of the tensor."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def _of_tiles(tiling: Tiling) -> tuple[dict[str, Any], dict[str, Any]]:
    sizes = {"samples": tiling.samples, "channels": tiling.channels, "space": tiling.space, "stride": tiling.stride}
    return sizes | {"tiles": tiling.tiles}, {"PLANES": tiling.planes, "HEIGHT": tiling.height, "WIDTH": tiling.width}


def kept_size(channels: int) -> int:
    """Numbers that a call keeps: mean, center and sigma of S(x), s_hat; then those of `Kept`, from w on."""
    return 5 * channels + NUMBERS


# ---- forward --------------------------------------------------------------------------------------------------------


def stream(config: Config, state: State, x: Tensor, tiling: Tiling, samples: int, begins: bool) -> Tensor:
    """S and F: two launches, three for p = 1 about the mini-batch's own mean. Returns what the call keeps."""
    told, channels = settings_of(config, False), tiling.channels
    (sizes, shape), (parts, each) = _of_tiles(tiling), tiling.adders()
    given = sizes | {"each": each, "parts": parts, "elements": tiling.elements, "x": x}
    given |= {"seen": state.seen, "mean": state.mean}
    with on_device_of(x):
        sums = None
        for _ in range(1 + told["SIGNS"]):
            before, sums = sums, state.mean.new_empty((1 + 2 * parts, channels))
            scratch = {"sums_before": before, "sums": sums}
            run(kernels().sum_powers, (tiling.blocks, parts), given | scratch, told | shape)
        return _push(config, state, None, sums, x, tiling, samples, begins, parts)


def push_statistics(
    config: Config, state: State, mean: Tensor, sigma: Tensor, elements: int, samples: int, begins: bool
) -> Tensor:
    """F on vectors: S(x) is pushed into H1, in place. Returns what a call keeps; see `kept_size`.

    `elements`: of the call, per statistic; `samples`: of the call; `begins`: they are new in the window.
    """
    tiling = Tiling(False, elements, mean.shape[0], 1, 0, 1, 1, 0, 0)
    with on_device_of(mean):
        return _push(config, state, (mean, sigma), None, None, tiling, samples, begins, 1)


def _push(
    config: Config, state: State, own: Any, sums: Any, x: Any, tiling: Tiling, samples: int, begins: bool, parts: int
) -> Tensor:
    channels = tiling.channels
    kept = state.mean.new_empty(kept_size(channels))
    given: dict[str, Any] = dict(zip(H1, of_h1(state), strict=True))
    given |= {"x": x, "sums": sums, "kept": kept, "channels": channels, "parts": parts}
    given |= dict(zip(("own_mean", "own_sigma"), own or (None, None), strict=True))
    given |= {"new": tiling.elements, "here": samples, "begins": int(begins)}
    given |= {"samples_of_x": tiling.samples, "space": tiling.space, "stride": tiling.stride}
    given |= {"tiles": tiling.tiles, "blocks": tiling.blocks}
    width, tall = vector_block(channels, parts)
    shape = {"PLANES": tiling.planes, "TILE_HEIGHT": tiling.height, "TILE_WIDTH": tiling.width}
    told = settings_of(config, False) | shape | {"WIDTH": width, "TALL": tall}
    run(kernels().push_statistics, (1,), given, told, ALONE)
    return kept


def normalize(x: Tensor, weight: Any, bias: Any, kept: Tensor, tiling: Tiling, y: Tensor) -> None:
    """N, gain and bias: one launch."""
    (sizes, shape), (parts, each) = _of_tiles(tiling), tiling.writers()
    given = sizes | {"each": each, "x": x, "gain": weight, "bias": bias, "kept": kept, "y": y}
    given |= {"out_stride": tiling.stride if tiling.planes else tiling.channels}
    with on_device_of(x):
        run(kernels().normalize, (tiling.blocks, parts), given, shape)


# ---- backward -------------------------------------------------------------------------------------------------------


def stream_back(
    config: Config, grads: Stream, dy: Tensor, x: Tensor, weight: Any, kept: Tensor, tiling: Tiling, scale: Any
) -> Tensor:
    """Sums of dy, and G: two launches. Returns vectors `(5, C)`: dgain, dbias, and three for `pull_back`."""
    told, channels = settings_of(config, True), tiling.channels
    (sizes, shape), (parts, each) = _of_tiles(tiling), tiling.adders()
    sums, vectors = kept.new_empty(((2 + told["SIGNS"]) * parts, channels)), kept.new_empty((5, channels))
    given = sizes | {"each": each, "parts": parts, "dy": dy, "x": x, "kept": kept, "sums": sums}
    given |= {"dy_stride": tiling.stride if tiling.planes else channels}
    with on_device_of(x):
        run(kernels().sum_gradients, (tiling.blocks, parts), given, told | shape)
        _push_back(config, grads, None, sums, weight, kept, scale, vectors, tiling.elements, parts)
    return vectors


def push_gradients(
    config: Config, grads: Stream, kept: Tensor, grad_mean: Tensor, grad_sigma: Tensor, scale: Tensor | None
) -> Tensor:
    """G on vectors: g = dE/ds_hat is pushed into H2, in place. Returns what flows on into S(x) in its place, (2, C).

    `kept`: s_hat and the numbers of `push_statistics`; `scale`: of the loss, where a scaler is attached.
    """
    with on_device_of(kept):
        return _push_back(config, grads, (grad_mean, grad_sigma), None, None, kept, scale, None, 1, 1)


def _push_back(
    config: Config,
    grads: Stream,
    own: Any,
    sums: Any,
    weight: Any,
    kept: Tensor,
    scale: Any,
    vectors: Any,
    elements: int,
    parts: int,
) -> Tensor:
    channels = grads.long.shape[1]
    flow = torch.empty_like(grads.long)
    given: dict[str, Any] = {f"grads_{part}": getattr(grads, part) for part in PARTS}
    given |= dict(zip(("own_mean", "own_sigma"), own or (None, None), strict=True))
    given |= {"sums": sums, "gain": weight, "kept": kept, "scale": scale, "flow": flow, "vectors": vectors}
    given |= {"channels": channels, "elements": elements, "parts": parts}
    width, tall = vector_block(channels, parts)
    told = settings_of(config, True) | {"WIDTH": width, "TALL": tall}
    run(kernels().push_gradients, (1,), given, told, ALONE)
    return flow


def pull_back(config: Config, dy: Tensor, x: Tensor, kept: Tensor, vectors: Tensor, tiling: Tiling, dx: Tensor) -> None:
    """dx: one launch."""
    (sizes, shape), (parts, each) = _of_tiles(tiling), tiling.writers()
    given = sizes | {"each": each, "dy": dy, "x": x, "kept": kept, "slopes": vectors[2:], "dx": dx}
    given |= {"dy_stride": tiling.stride if tiling.planes else tiling.channels}
    with on_device_of(x):
        run(kernels().pull_back, (tiling.blocks, parts), given, settings_of(config, True) | shape)
