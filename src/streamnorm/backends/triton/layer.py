"""A call of a layer by the Triton kernels: no number is read by the host, forward or backward.

So a step can be captured in a CUDA graph: folds, pushes and the mark of an update are writes on the device, which a
replay repeats. The state has to be where it will stay: one that was read since the last call is copied by the next,
and a graph would repeat that copy. Make a training call after the last look at the state, then capture.
"""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core.config import Config
from ...core.state import State, to_dict, write_stream
from .. import H2, Gradients, Plan, Result, Signature
from ..memory import as_laid_out, has_memory, is_ordinary, is_plain, require_memory
from . import launch
from .sequence import Sequences
from .streams import DEVICE, INTERPRETED, Streams, unserved
from .tensors import holds, is_vector, writable
from .tiling import Tiling, tiling_of

TYPES = (torch.float32, torch.bfloat16, torch.float16)


class Prepared(NamedTuple):
    """What calls of a layer have in common. It holds the state that it writes into."""

    state: State
    tiling: Tiling
    kinds: tuple[Any, ...]  # of input, gain and bias: see `_kind`
    readers: tuple[Callable[[], int], ...]  # of the addresses of the state
    addresses: list[int]  # what they gave


class Triton:
    name, sequences, streams, normalize = "triton", Sequences(), Streams(), None
    # No other backend but plain torch serves a GPU. Run by NumPy it serves the CPU, where it is for tests only.
    rank = 99 if INTERPRETED else 15

    def missing(self) -> str | None:
        if find_spec("triton") is None:
            return "triton is not installed"
        if INTERPRETED or torch.cuda.is_available():
            return None
        return "there is no GPU that torch can use"

    def details(self) -> str:
        return "interpreted" if INTERPRETED else ""

    def declines(self, call: Signature) -> str | None:
        config = call.config
        reasons = {
            "it serves streaming layers": not isinstance(config, Config),
            f"it serves the device {DEVICE}, not {call.device}": call.device != DEVICE,
            f"it serves float32, bfloat16 and float16, not {call.dtype}": call.dtype not in TYPES,
            "its statistics are in float32": call.stored != torch.float32,
            "gain and bias have to be in float32, bfloat16 or float16": not {call.gain, call.bias} <= {None, *TYPES},
            unserved(config) or "": unserved(config),
            "it takes no mask": call.masked,
            "the input is neither contiguous nor channels last": call.layout == "other",
            "a tensor is not an ordinary one in memory": not call.ordinary,
        }
        return next((reason for reason, applies in reasons.items() if applies), None)

    def prepare(self, call: Signature, x: Tensor, weight: Any, bias: Any, state: State | None) -> Any:
        channels = x.shape[1]
        if state is None or not (is_vector(weight, channels) and is_vector(bias, channels)):
            return None
        tiling, tensors = tiling_of(x), to_dict(state)
        if tiling is None or channels * tiling.space >= 2**31 or not holds(tensors, channels, x.device):
            return None
        readers = tuple(tensor.data_ptr for tensor in tensors.values())
        kinds = tuple(map(_kind, (x, weight, bias)))
        return Prepared(state, tiling, kinds, readers, [read() for read in readers])

    def steady(self, prepared: Prepared) -> Callable[[Tensor, Any, Any], bool]:
        return partial(_fits, prepared)

    def forward(self, plan: Plan, x: Tensor, weight: Any, bias: Any, mask: Any, h1: Any, begins: bool) -> Result:
        state, tiling = plan.prepared[:2]
        kept = launch.stream(plan.call.config, state, x, tiling, x.shape[0], begins)
        return _normalized(plan, x, weight, bias, kept)

    def repeat(self, plan: Plan, x: Tensor, weight: Any, bias: Any, mask: Any, kept: Any) -> Result:
        return _normalized(plan, x, weight, bias, kept[0])

    def backward(
        self, plan: Plan, dy: Tensor, x: Tensor, weight: Any, mask: Any, saved: Any, kept: Any, h2: H2, needs: Any
    ) -> Gradients:
        (numbers, x_strides, strides), tiling = kept, plan.prepared.tiling
        # Hooks may have moved what was saved, or it was moved under autograd's hands; gradients are of any kind.
        dtype, device = plan.call.dtype, numbers.device
        dy = as_laid_out(dy, dy.shape, strides, dtype, device)
        require_memory(x)
        if x.stride() != x_strides or not is_plain(x, dtype, device):
            x = as_laid_out(x, dy.shape, strides, dtype, device)
            tiling = tiling if tiling.planes else tiling._replace(stride=tiling.channels)
        if weight is not None:
            weight = as_laid_out(weight, (tiling.channels,), (1,), weight.dtype, device)
        grads, scale = writable(h2.grads, tiling.channels, numbers), h2.scale
        scale = None if scale is None else scale.to(numbers.device)
        config = plan.call.config
        vectors = launch.stream_back(config, grads, dy, x, weight, numbers, tiling, scale)
        if grads is not h2.grads:
            write_stream(h2.grads, grads)
        dx = torch.empty_like(dy) if needs[0] else None
        if dx is not None:
            launch.pull_back(config, dy, x, numbers, vectors, tiling, dx)
        return dx, vectors[0] if needs[1] else None, vectors[1] if needs[2] else None

    def statistics(self, plan: Plan, saved: Any) -> tuple[Tensor, ...]:
        raise RuntimeError("the kernels serve streaming layers, which keep their statistics themselves")


def _normalized(plan: Plan, x: Tensor, weight: Any, bias: Any, kept: Tensor) -> Result:
    y = _like(x)
    launch.normalize(x, weight, bias, kept, plan.prepared.tiling, y)
    return y, (), (kept, x.stride(), y.stride())


def _like(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    return x.new_empty(x.shape) if x.ndim == 2 and not y.is_contiguous() else y


def _kind(tensor: Tensor | None) -> Any:
    """What kernels depend on, of a tensor that they read."""
    return None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


def _fits(prepared: Prepared, x: Tensor, weight: Any, bias: Any) -> bool:
    """Whether a call is like the one that was looked at."""
    for tensor, kind in zip((x, weight, bias), prepared.kinds, strict=True):
        if tensor is not None and not (is_ordinary(tensor) and tensor.layout == torch.strided and has_memory(tensor)):
            return False
        if _kind(tensor) != kind:
            return False
    return [read() for read in prepared.readers] == prepared.addresses
