"""The kernels as differentiable functions. `dispatch` says when they apply, the plain path what they compute."""

import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import kernels
from .kernels import Layout, Readers
from .stream import State, new_state, to_dict, write, write_stream

# Called in backward: the state that gradients are streamed into, its record if it was looked at, the scale of the loss.
Receiver = Callable[[], tuple[State, bytes | None, float]]


class Plan(NamedTuple):
    """How the kernels serve a layer, as long as nothing about it changes: not the layer, but what it writes into."""

    settings: bytes
    kept_size: int
    state: State
    readers: Readers
    record: bytes  # what the readers gave when the state was looked at
    grads_readers: Readers  # the same for H2 alone
    grads_record: bytes


def plan_of(settings: bytes, state: State) -> Plan:
    """For a state that the kernels hold."""
    readers = kernels.state_readers(state)
    record, ours = kernels.addresses(readers), readers[kernels.GRADS]
    kept_size = kernels.kept_size(state.mean.numel())
    return Plan(settings, kept_size, state, readers, record, ours, kernels.addresses(ours))


def layout_of(x: Tensor) -> Layout | None:
    """How the kernels read x: as planes `(N, C, S)`, as rows `(M, C)`, or not at all."""
    samples, channels = x.shape[:2]
    if x.ndim == 2:
        return (1, samples, channels, 1, x.stride(0)) if x.stride(1) == 1 else None
    space = x.numel() // (samples * channels)
    if x.is_contiguous():
        return (1, samples, channels, 1, channels) if space == 1 else (0, samples, channels, space, 0)
    return (1, samples * space, channels, 1, channels) if x.movedim(1, -1).is_contiguous() else None


class _StreamLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any, bias: Any, call: tuple[Layout, Plan, Receiver]) -> Tensor:
        layout, plan, _ = call
        y = torch.empty_like(x)
        if layout[0] and not y.is_contiguous() and x.ndim == 2:
            y = x.new_empty(x.shape)
        kept = torch.empty(plan.kept_size, dtype=torch.float32)
        kernels.layer_forward(plan.settings, plan.record, layout, x, weight, bias, kept, y)
        # What the kernel kept is nobody else's: no hook on saved tensors gets it, so it needs no looking at again.
        ctx.call, ctx.strides, ctx.kept = call, (x.stride(), y.stride()), kept
        ctx.save_for_backward(x, weight)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            refuse_second_derivative()
        x, weight = ctx.saved_tensors
        (layout, plan, receiver), (x_strides, strides), channels = ctx.call, ctx.strides, ctx.call[0][2]
        if not (
            x.stride() == x_strides
            and dy.stride() == strides
            and x.shape == dy.shape
            and kernels.all_plain(x, dy)
            and kernels.all_vectors(channels, weight)
        ):  # hooks may have moved what was saved, or it was moved under autograd's hands; gradients are of any kind
            dy = as_laid_out(dy, dy.shape, strides)
            x, layout = as_laid_out(x, dy.shape, strides), (*layout[:4], channels)
            weight = None if weight is None else as_laid_out(weight, (channels,), (1,))
        needs_x, needs_gain, needs_bias, _ = ctx.needs_input_grad
        dx = torch.empty_like(dy) if needs_x else None
        dgain = torch.empty(channels, dtype=torch.float32)
        dbias = torch.empty(channels, dtype=torch.float32)
        state, record, scale = receiver()
        written = state if record else as_kernels_hold(state, channels)
        record = record or kernels.addresses(kernels.state_readers(written))
        kernels.layer_backward(plan.settings, record, layout, x, weight, ctx.kept, dy, scale, (dx, dgain, dbias))
        if written is not state:
            write_stream(state.grads, written.grads)
        return dx, dgain if needs_gain else None, dbias if needs_bias else None, None


# A training call of StreamingNorm: of the input, gain, bias, and (layout, plan, receiver). All has been looked at, so
# what `Function.apply` of torch does about torch.func is left out.
stream_layer: Callable[..., Tensor] = super(torch.autograd.Function, _StreamLayer).apply


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
        ctx.plan, ctx.laid_out = plan, [(tensor.shape, tensor.stride()) for tensor in saved]
        ctx.save_for_backward(*saved, *affine)
        return output, final

    @staticmethod
    def backward(ctx: Any, doutput: Tensor, dfinal: Tensor) -> tuple[Any, ...]:
        refuse_second_derivative("recurrent layers of streamnorm", ", or use a cell in a loop")
        plan: SequencePlan = ctx.plan
        kept = ctx.saved_tensors  # once: activation checkpointing hands each tensor out once
        saved = [as_laid_out(tensor, *like) for tensor, like in zip(kept, ctx.laid_out, strict=False)]
        products, start, weight, recurrent, before, inner, _ = saved
        hidden = weight.shape[1]
        affine = [None if vector is None else as_laid_out(vector, (hidden,), (1,)) for vector in kept[7:]]
        doutput = as_laid_out(doutput, before.shape, before.stride())
        dfinal = as_laid_out(dfinal, start.shape, start.stride())
        received = [receive() for receive in plan.receivers]
        written = [(as_kernels_hold(state, hidden), scale) for state, _, scale in received]
        dproducts, drecurrent, dstart = map(torch.empty_like, (products, recurrent, start))
        sums = weight.new_empty((2 * plan.gates, 2, hidden))
        dweight = torch.empty_like(weight) if ctx.needs_input_grad[2] else None  # before anything is streamed
        fixed = _sequence_arguments(plan, hidden, affine, written)
        kernels.sequence_backward(fixed, (*saved, doutput, dfinal, dproducts, drecurrent, dstart, sums))
        for (state, *_), (copy, _) in zip(received, written, strict=True):
            if copy is not state:
                write_stream(state.grads, copy.grads)

        if dweight is not None:
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


def as_laid_out(tensor: Tensor, shape: Sequence[int], strides: Sequence[int]) -> Tensor:
    """The tensor, or a float32 copy of it that has these strides, as the kernels will read it.

    Where it comes from, a hook on saved tensors or a backward pass, it may be anything but of another shape.
    """
    if tensor.shape != shape:
        raise RuntimeError(
            f"backward was given {tuple(tensor.shape)} where forward saved {tuple(shape)}: a hook on saved tensors may "
            "move what it packs, but has to give it back in its shape"
        )
    if tensor.stride() == strides and kernels.is_plain(tensor, torch.float32):
        return tensor
    result = torch.empty_strided(shape, strides, dtype=torch.float32)
    result.copy_(tensor)
    return result


def as_kernels_hold(state: State, channels: int) -> State:
    """The state itself, or a copy if the layer was moved between forward and backward."""
    if kernels.holds(state, channels):
        return state
    like = new_state((channels,), torch.empty(0))
    tensors, wanted = to_dict(state), to_dict(like)
    for name, tensor in tensors.items():
        if tensor.shape != wanted[name].shape or tensor.is_meta or not kernels.in_memory(tensor):
            raise RuntimeError(
                f"{name} of a streaming layer was replaced between its forward and its backward pass (shape "
                f"{tuple(tensor.shape)} on {tensor.device}, for {channels} channels): its gradients have nowhere to go"
            )
    write(like, state)
    return like
