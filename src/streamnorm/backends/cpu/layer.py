"""A call of a layer by the C++ kernels: a channel is finished while it is in the cache."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core.config import Config
from ...core.state import State, write_stream
from .. import H2, Gradients, Plan, Result, Signature
from ..memory import as_laid_out, is_vector
from . import binding
from .binding import Layout, Looked, Readers, address, all_plain, still, suits
from .sequence import Sequences


class Prepared(NamedTuple):
    """What calls of a layer have in common, as long as nothing about it changes. It holds what it writes into."""

    shape: torch.Size  # what `binding.fits` compares
    stride: tuple[int, ...]
    channels: int
    h1: Readers
    h1_record: bytes
    settings: bytes
    kept_size: int
    layout: Layout
    looked: Looked
    keeps_layout: bool  # whether torch.empty_like lays out an output as the kernels write it


class Cpu:
    name, rank = "cpu", 10
    sequences = Sequences()

    def missing(self) -> str | None:
        return binding.missing()

    def declines(self, call: Signature) -> str | None:
        config, unserved = call.config, binding.unserved(call.config)
        types = {call.dtype, call.stored, call.gain, call.bias} - {None}
        reasons = {
            "it serves streaming layers": not isinstance(config, Config),
            f"it serves the CPU, not {call.device}": call.device != "cpu",
            "it serves float32 throughout": types != {torch.float32},
            unserved or "": unserved,
            "it takes no mask": call.masked,
            "the input is neither contiguous nor channels last": call.layout == "other" and not call.compiled,
            "a tensor is not an ordinary one in memory": not call.ordinary,
        }
        return next((reason for reason, applies in reasons.items() if applies), None)

    def prepare(self, call: Signature, x: Tensor, weight: Any, bias: Any, state: State | None) -> Any:
        channels = x.shape[1]
        if call.compiled:  # tensors have no memory yet
            return all(vector is None or vector.shape == (channels,) for vector in (weight, bias)) or None
        if state is None or not (is_vector(weight, channels) and is_vector(bias, channels) and all_plain(x)):
            return None
        layout, looked = _layout(x), binding.look(state, channels)
        if layout is None or looked is None:
            return None
        settings = binding.settings_record(call.config)
        compared = x.shape, x.stride(), channels, looked.h1, looked.h1_record
        return Prepared(
            *compared, settings, binding.kept_size(channels), layout, looked, x.is_contiguous() or x.ndim > 2
        )

    def steady(self, prepared: Prepared) -> Callable[[Tensor, Any, Any], bool]:
        return partial(binding.fits, *prepared[:5])

    def forward(self, plan: Plan, x: Tensor, weight: Any, bias: Any, mask: Any, h1: Any, begins: bool) -> Result:
        prepared = plan.prepared
        y, kept = torch.empty_like(x) if prepared.keeps_layout else _like(x), x.new_empty(prepared.kept_size)
        gain, shift = 0 if weight is None else weight.data_ptr(), 0 if bias is None else bias.data_ptr()
        given = x.data_ptr(), gain, shift, kept.data_ptr(), prepared.shape[0], begins, y.data_ptr()
        binding.layer_forward(prepared.settings, prepared.h1_record, *prepared.layout, torch.get_num_threads(), *given)
        return y, (), (kept, x.stride(), y.stride())

    def repeat(self, plan: Plan, x: Tensor, weight: Any, bias: Any, mask: Any, kept: Any) -> Result:
        y = _like(x)
        given = map(address, (x, weight, bias, kept[0], y))
        binding.layer_repeat(plan.prepared.settings, *plan.prepared.layout, torch.get_num_threads(), *given)
        return y, (), kept

    def backward(
        self, plan: Plan, dy: Tensor, x: Tensor, weight: Any, mask: Any, saved: Any, kept: Any, h2: H2, needs: Any
    ) -> Gradients:
        (numbers, x_strides, strides), layout = kept, plan.prepared.layout
        channels = layout[2]
        if not suits(x_strides, strides, channels, x, dy, weight):
            # Hooks may have moved what was saved, or it was moved under autograd's hands; gradients are of any kind.
            dy = as_laid_out(dy, dy.shape, strides)
            x, layout = as_laid_out(x, dy.shape, strides), (*layout[:4], channels)
            weight = None if weight is None else as_laid_out(weight, (channels,), (1,))
        dx = torch.empty_like(dy) if needs[0] else None
        dgain, dbias = numbers.new_empty(channels), numbers.new_empty(channels)
        prepared, scale = plan.prepared, 1.0 if h2.scale is None else float(h2.scale)
        looked = prepared.looked
        if h2.grads is looked.grads and still(looked.h2, looked.h2_record):
            written, record = h2.grads, looked.h2_record
        else:
            written, record = binding.writable(h2.grads, channels)
        gain, out = 0 if weight is None else weight.data_ptr(), 0 if dx is None else dx.data_ptr()
        given = x.data_ptr(), gain, 0, numbers.data_ptr(), dy.data_ptr(), scale, out, dgain.data_ptr(), dbias.data_ptr()
        binding.layer_backward(prepared.settings, record, *layout, torch.get_num_threads(), *given)
        if written is not h2.grads:
            write_stream(h2.grads, written)
        return dx, dgain if needs[1] else None, dbias if needs[2] else None

    def pack(self, plan: Plan, result: Result) -> Tensor:
        numbers: Tensor = result[2][0]
        return numbers

    def unpack(self, plan: Plan, x: Tensor, mask: Any, packed: Tensor) -> tuple[Any, Any]:
        return (), (packed, x.stride(), _like(x).stride())

    def packed_size(self, call: Signature, x: Tensor) -> int:
        return binding.kept_size(x.shape[1])

    def statistics(self, plan: Plan, saved: Any) -> tuple[Tensor, ...]:
        raise RuntimeError("the kernels serve streaming layers, which keep their statistics themselves")


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
