"""The kernels as differentiable functions. `dispatch` says when they apply, the plain path what they compute."""

import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from . import kernels
from .kernels import Layout
from .stream import State, from_dict, to_dict, write_stream

# Called in backward: the state that gradients are streamed into, its record if that is known, the scale of the loss.
Receiver = Callable[[], tuple[State, bytes | None, float]]


class LayerCall(NamedTuple):
    """A training call of a layer, apart from its tensors. `record`: of the state, which is written to."""

    layout: Layout
    settings: bytes
    record: bytes
    receiver: Receiver


def layout_of(x: Tensor) -> Layout | None:
    """How the kernels read x: as planes `(N, C, S)`, as rows `(M, C)`, or not at all."""
    samples, channels = x.shape[:2]
    if x.ndim == 2:
        return (1, samples, channels, 1, x.stride(0)) if x.stride(1) == 1 else None
    space = x.numel() // (samples * channels)
    if x.is_contiguous():
        return (1, samples, channels, 1, channels) if space == 1 else (0, samples, channels, space, 0)
    return (1, samples * space, channels, 1, channels) if x.movedim(1, -1).is_contiguous() else None


def stream_layer(x: Tensor, weight: Tensor | None, bias: Tensor | None, call: LayerCall) -> Tensor:
    """A training call of StreamingNorm."""
    return cast(Tensor, _StreamLayer.apply(x, weight, bias, call))  # type: ignore[no-untyped-call]


class _StreamLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any, bias: Any, call: LayerCall) -> Tensor:
        layout, settings, record, _ = call
        y = torch.empty_like(x)
        if layout[0] and not y.is_contiguous() and x.ndim == 2:
            y = x.new_empty(x.shape)
        kept = torch.empty(kernels.kept_size(layout[2]), dtype=torch.float32)
        kernels.layer_forward(settings, record, layout, x, weight, bias, kept, y)
        ctx.call, ctx.strides = call, (x.stride(), y.stride())
        ctx.save_for_backward(x, weight, kept)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        x, weight, kept = ctx.saved_tensors
        (layout, settings, _, receiver), (x_strides, strides) = ctx.call, ctx.strides
        if x.stride() != x_strides or dy.stride() != strides:  # hooks may have moved what was saved
            x, dy = as_laid_out(x, x_strides), as_laid_out(dy, strides)
        needs_x, needs_gain, needs_bias, _ = ctx.needs_input_grad
        dx = torch.empty_like(dy) if needs_x else None
        dgain = torch.empty(layout[2], dtype=torch.float32)
        dbias = torch.empty(layout[2], dtype=torch.float32)
        state, record, scale = receiver()
        narrow = state
        if record is None:
            narrow = as_float32(state)
            record = kernels.state_record(narrow)
        kernels.layer_backward(settings, record, layout, x, weight, kept, dy, scale, (dx, dgain, dbias))
        if narrow is not state:
            write_stream(state.grads, narrow.grads)
        return dx, dgain if needs_gain else None, dbias if needs_bias else None, None


class SequencePlan(NamedTuple):
    """What a recurrent layer is, apart from its tensors. `receivers`: as above, one per norm."""

    settings: bytes
    gates: int  # 1: RNN, 3: GRU
    relu: bool
    training: bool
    reverse: bool
    sizes: Sequence[int]
    states: Sequence[State]
    receivers: Sequence[Receiver]


def stream_sequence(
    products: Tensor, start: Tensor, weight: Tensor, gains: Sequence[Any], biases: Sequence[Any], plan: SequencePlan
) -> tuple[Tensor, Tensor]:
    """A recurrent layer in one direction over a packed sequence: its outputs, and the state of each sample at its end.

    `products` are those of the input, `(rows, gates * hidden)`; gains and biases are given norm by norm, those of the
    input's products first.
    """
    output, final = _StreamSequence.apply(products, start, weight, plan, *gains, *biases)  # type: ignore[no-untyped-call]
    return output, final


class _StreamSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, products: Tensor, start: Tensor, weight: Tensor, plan: SequencePlan, *affine: Any) -> Any:
        rows, (wide, hidden), norms = products.shape[0], weight.shape, 2 * plan.gates
        kept = products.new_empty((len(plan.sizes) if plan.training else 0, norms * kernels.kept_size(hidden)))
        recurrent, before = products.new_empty((rows, wide)), products.new_empty((rows, hidden))
        inner = products.new_empty((4 if plan.gates == 3 else 1, rows, hidden))
        output, final = torch.empty_like(before), torch.empty_like(start)
        saved = products, start, weight, recurrent, before, inner, kept
        fixed = _sequence_arguments(plan, hidden, affine, [(state, 1.0) for state in plan.states])
        kernels.sequence_forward(fixed, (*saved, output, final))
        ctx.plan = plan
        ctx.save_for_backward(*saved, *affine)
        return output, final

    @staticmethod
    def backward(ctx: Any, doutput: Tensor, dfinal: Tensor) -> tuple[Any, ...]:
        refuse_second_derivative("recurrent layers of streamnorm", ", or use a cell in a loop")
        plan: SequencePlan = ctx.plan
        kept = ctx.saved_tensors  # once: activation checkpointing hands each tensor out once
        saved = [tensor.contiguous() for tensor in kept[:7]]
        products, start, weight, recurrent, before, inner, _ = saved
        affine, hidden = kept[7:], weight.shape[1]
        received = [receive() for receive in plan.receivers]
        narrow = [(as_float32(state), scale) for state, _, scale in received]
        dproducts, drecurrent, dstart = map(torch.empty_like, (products, recurrent, start))
        sums = weight.new_empty((2 * plan.gates, 2, hidden))
        doutput, dfinal = as_laid_out(doutput, before.stride()), as_laid_out(dfinal, start.stride())
        fixed = _sequence_arguments(plan, hidden, affine, narrow)
        kernels.sequence_backward(fixed, (*saved, doutput, dfinal, dproducts, drecurrent, dstart, sums))
        for (state, *_), (copy, _) in zip(received, narrow, strict=True):
            if copy is not state:
                write_stream(state.grads, copy.grads)

        dweight = None
        if ctx.needs_input_grad[2]:
            dweight = torch.empty_like(weight)
            split = hidden if plan.gates == 1 else 2 * hidden  # the last gate of a GRU multiplies h * r
            torch.mm(drecurrent[:, :split].t(), before, out=dweight[:split])
            if plan.gates == 3:
                torch.mm(drecurrent[:, split:].t(), inner[3], out=dweight[split:])
        needed = ctx.needs_input_grad[4:]
        vectors = (*sums[:, 0], *sums[:, 1])
        daffine = (vector if wanted else None for vector, wanted in zip(vectors, needed, strict=True))
        return dproducts, dstart, dweight, None, *daffine


def _sequence_arguments(
    plan: SequencePlan, hidden: int, affine: Sequence[Any], states: Sequence[tuple[State, float]]
) -> tuple[Any, ...]:
    norms = len(affine) // 2
    quads = [(affine[i], affine[norms + i], *states[i]) for i in range(norms)]
    steps, sizes = len(plan.sizes), struct.pack(f"{len(plan.sizes)}q", *plan.sizes)
    settings = (plan.settings, plan.gates, kernels.norm_records(quads))
    return *settings, int(plan.relu), int(plan.training), int(plan.reverse), steps, hidden, sizes


def refuse_second_derivative(who: str = "streamnorm layers", way_out: str = "") -> None:
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{who} have no second derivative in training: create_graph=True reached one. "
            f"Call backward without create_graph, or put the layer in evaluation mode first{way_out}."
        )


def as_laid_out(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    """The tensor, or a float32 copy of it that has these strides."""
    if tensor.stride() == strides and tensor.dtype == torch.float32:
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=torch.float32, device=tensor.device).copy_(tensor)


def as_float32(state: State) -> State:
    """The state itself, or a copy if the layer was moved between forward and backward."""
    if state.mean.dtype == torch.float32 and state.mean.is_cpu:
        return state

    def narrow(tensor: Tensor) -> Tensor:
        return tensor.to("cpu", torch.float32 if tensor.is_floating_point() else tensor.dtype)

    return from_dict({name: narrow(tensor) for name, tensor in to_dict(state).items()})
