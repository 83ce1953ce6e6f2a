"""A call of a layer by the C++ kernels: a channel is finished while it is in the cache."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core.config import Config
from ...core.state import State, write_stream
from .. import H2, Gradients, Plan, Result, Signature
from ..memory import as_laid_out, has_memory, is_plain, is_vector
from . import binding
from .binding import ELEMENTS, Layout, Looked, Readers, address, still, suits
from .sequence import Sequences
from .streams import Streams


class Prepared(NamedTuple):
    """What calls of a layer have in common, as long as nothing about it changes. It holds what it writes into."""

    shape: torch.Size  # what `binding.fits` compares
    stride: tuple[int, ...]
    dtype: torch.dtype  # of input and output
    gain: torch.dtype | None
    bias: torch.dtype | None
    channels: int
    h1: Readers
    h1_record: bytes
    element: int  # the place of `dtype` in ELEMENTS
    widens: bool  # whether gain or bias have to be made float32
    settings: bytes
    new_kept: Callable[[], Tensor]  # memory for what a call keeps, in float32
    layout: Layout
    looked: Looked
    keeps_layout: bool  # whether torch.empty_like lays out an output as the kernels write it


class Cpu:
    name, rank = "cpu", 10
    sequences, streams = Sequences(), Streams()

    def missing(self) -> str | None:
        return binding.missing()

    def details(self) -> str:
        return binding.details()

    def declines(self, call: Signature) -> str | None:
        config, unserved = call.config, binding.unserved(call.config)
        types = {call.dtype, call.gain, call.bias} - {None}
        reasons = {
            "it serves streaming layers": not isinstance(config, Config),
            f"it serves the CPU, not {call.device}": call.device != "cpu",
            "it serves float32 and bfloat16, with statistics in float32": (
                call.stored != torch.float32 or not types <= set(ELEMENTS)
            ),
            unserved or "": unserved,
            "it takes no mask": call.masked,
            "the input is neither contiguous nor channels last": call.layout == "other",
            "a tensor is not an ordinary one in memory": not call.ordinary,
        }
        return next((reason for reason, applies in reasons.items() if applies), None)

    def prepare(self, call: Signature, x: Tensor, weight: Any, bias: Any, state: State | None) -> Any:
        channels = x.shape[1]
        vectors = all(vector is None or is_vector(vector, channels, vector.dtype) for vector in (weight, bias))
        if state is None or not (vectors and is_plain(x, call.dtype) and has_memory(x)):
            return None
        layout, looked = _layout(x), binding.look(state, channels)
        if layout is None or looked is None:
            return None
        types = call.dtype, call.gain, call.bias
        return Prepared(
            *(x.shape, x.stride(), *types, channels, looked.h1, looked.h1_record),
            element=ELEMENTS.index(call.dtype),
            widens=not {call.gain, call.bias} <= {torch.float32, None},
            settings=binding.settings_record(call.config),
            new_kept=partial(state.mean.new_empty, binding.kept_size(channels)),
            layout=layout,
            looked=looked,
            keeps_layout=x.is_contiguous() or x.ndim > 2,
        )

    def steady(self, prepared: Prepared) -> Callable[[Tensor, Any, Any], bool]:
        return partial(binding.fits, *prepared[:8])

    def forward(self, plan: Plan, x: Tensor, weight: Any, bias: Any, mask: Any, h1: Any, begins: bool) -> Result:
        prepared = plan.prepared
        y, kept = torch.empty_like(x) if prepared.keeps_layout else _like(x), prepared.new_kept()
        if prepared.widens:
            weight, bias = _wide(weight, prepared.channels), _wide(bias, prepared.channels)
        gain, shift = 0 if weight is None else weight.data_ptr(), 0 if bias is None else bias.data_ptr()
        given = x.data_ptr(), gain, shift, kept.data_ptr(), prepared.shape[0], begins, y.data_ptr()
        of = prepared.element, prepared.settings, prepared.h1_record
        binding.layer_forward(*of, *prepared.layout, torch.get_num_threads(), *given)
        return y, (), (kept, x.stride(), y.stride())

    def repeat(self, plan: Plan, x: Tensor, weight: Any, bias: Any, mask: Any, kept: Any) -> Result:
        y, prepared = _like(x), plan.prepared
        tensors = x, *(_wide(vector, prepared.channels) for vector in (weight, bias)), kept[0], y
        of = prepared.element, prepared.settings
        binding.layer_repeat(*of, *prepared.layout, torch.get_num_threads(), *map(address, tensors))
        return y, (), kept

    def normalize(self, x: Tensor, mean: Tensor, sigma: Tensor, gain: Any, bias: Any) -> Tensor | None:
        if not x.is_cpu:
            return None
        y = torch.empty_like(x)
        return y if binding.layer_normalize(x, mean, sigma, gain, bias, y, torch.get_num_threads()) else None

    def backward(
        self, plan: Plan, dy: Tensor, x: Tensor, weight: Any, mask: Any, saved: Any, kept: Any, h2: H2, needs: Any
    ) -> Gradients:
        (numbers, x_strides, strides), prepared = kept, plan.prepared
        layout, channels, dtype = prepared.layout, prepared.channels, prepared.dtype
        if prepared.widens:
            weight = _wide(weight, channels)
        if not suits(x_strides, strides, dtype, channels, x, dy, weight):
            # Hooks may have moved what was saved, or it was moved under autograd's hands; gradients are of any kind.
            dy = as_laid_out(dy, dy.shape, strides, dtype)
            x, layout = as_laid_out(x, dy.shape, strides, dtype), (*layout[:4], channels)
            weight = _wide(weight, channels)
        dx = torch.empty_like(dy) if needs[0] else None
        dgain, dbias = numbers.new_empty(channels), numbers.new_empty(channels)
        looked, scale = prepared.looked, 1.0 if h2.scale is None else float(h2.scale)
        if h2.grads is looked.grads and still(looked.h2, looked.h2_record):
            written, record = h2.grads, looked.h2_record
        else:
            written, record = binding.writable(h2.grads, channels)
        gain, out = 0 if weight is None else weight.data_ptr(), 0 if dx is None else dx.data_ptr()
        given = x.data_ptr(), gain, 0, numbers.data_ptr(), dy.data_ptr(), scale, out, dgain.data_ptr(), dbias.data_ptr()
        of = prepared.element, prepared.settings, record
        binding.layer_backward(*of, *layout, torch.get_num_threads(), *given)
        if written is not h2.grads:
            write_stream(h2.grads, written)
        return dx, dgain if needs[1] else None, dbias if needs[2] else None

    def statistics(self, plan: Plan, saved: Any) -> tuple[Tensor, ...]:
        raise RuntimeError("the kernels serve streaming layers, which keep their statistics themselves")


def _wide(vector: Tensor | None, channels: int) -> Tensor | None:
    """A gain or bias, as kernels read it."""
    return None if vector is None else as_laid_out(vector, (channels,), (1,))


def _like(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    return x.new_empty(x.shape) if x.ndim == 2 and not y.is_contiguous() else y


def _layout(x: Tensor) -> Layout | None:
    """How the kernels read x: as planes `(N, C, S)`, as rows `(M, C)`, or not at all."""
    samples, channels = x.shape[:2]
    if x.ndim == 2:
        return (1, samples, channels, 1, x.stride(0)) if x.stride(1) == 1 else None
    space = x.numel() // (samples * channels)
    if x.is_contiguous():
        return (1, samples, channels, 1, channels) if space == 1 else (0, samples, channels, space, 0)
    return (1, samples * space, channels, 1, channels) if x.movedim(1, -1).is_contiguous() else None
