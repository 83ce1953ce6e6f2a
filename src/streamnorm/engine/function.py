"""The one autograd.Function of the layers, whatever computes them, and that of whole recurrent sequences."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import backends
from ..backends import H2, Plan
from ..backends.memory import ORDINARY
from ..core.config import Statistic
from ..core.statistics import Center, Moments, differentiable_measure, masked, normalize
from . import compat
from .context import materialized, refuse_second_derivative, transformed
from .replay import Entry, own_h2

# H2 as it is when backward comes; the compiler gets its tensors beforehand.
Receiver = Callable[[], H2] | H2 | None


class Call(NamedTuple):
    """How a call is computed. A steady call is given a plain tuple of the same."""

    plan: Plan
    h1: Any  # H1 of a streaming layer, None where the plan has it; for other norms c of the p-th moment, or None
    h2: Receiver = None
    entry: Entry | None = None  # inside of activation checkpointing
    statistics: bool = False  # whether S(x) is asked for, beside the output
    begins: bool = True  # the samples are new, not those of the timestep before


class Normalize(torch.autograd.Function):
    """N(x, s_hat), gain and bias, differentiable once: forward streams into H1, backward into H2."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any, bias: Any, mask: Any, call: Call) -> Any:
        plan, h1, _, entry, statistics, begins = call
        if entry is not None and entry.again:
            y, saved, kept = plan.backend.repeat(plan, x, weight, bias, mask, entry.kept[1])
        else:
            y, saved, kept = plan.backend.forward(plan, x, weight, bias, mask, h1, begins)
        if entry is not None:
            entry.kept = plan.backend, kept
        ctx.call, ctx.kept = call, kept
        ctx.save_for_backward(x, weight, mask, *saved)
        if not statistics:
            return y
        found = plan.backend.statistics(plan, saved)
        ctx.mark_non_differentiable(*found)
        return y, *found

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            refuse_second_derivative()
        (plan, _, h2, entry, *_), (x, weight, mask, *saved) = ctx.call, ctx.saved_tensors
        if not (plan.call is None or plan.call.compiled) and compat.is_zero_tensor(dy):
            dy = dy.clone()  # zeros without memory cannot be written to; what a graph of the compiler gets has memory
        if h2 is not None and not isinstance(h2, H2):
            h2 = h2()
        if entry is not None:
            h2 = own_h2(entry, h2)
        gradients = plan.backend.backward(plan, dy, x, weight, mask, saved, ctx.kept, h2, ctx.needs_input_grad)
        return *gradients, None, None


# A training call of a streaming layer in eager mode, of which all has been looked at. Arguments as above.
stream = compat.apply_of(Normalize)


def normalize_mini_batch(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mask: Tensor | None,
    config: Statistic,
    center: Tensor | None,
    stored: torch.dtype,
    statistics: bool,
) -> tuple[Tensor, Moments | None]:
    """N(x, S(x)), differentiated exactly, and S(x) if it is asked for: sample and batch normalization.

    `center`: c of the p-th moment where it is not of this mini-batch. `stored`: the type of the statistics.
    """
    compiled = torch.compiler.is_compiling()
    call = backends.signature_of(config, x, weight, bias, mask, stored, compiled)
    plan = Plan(call, backends.LAW) if compiled else backends.choose(call, x, weight, bias)
    found = Normalize.apply(x, weight, bias, mask, Call(plan, center, statistics=statistics))  # type: ignore[no-untyped-call]
    if not statistics:
        return found, None
    y, mean, sigma, *present = found
    return y, Moments(mean, sigma, mean, mean, present[0] if present else None)


def normalize_ordinary(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mask: Tensor | None, config: Statistic, center: Center
) -> Tensor:
    """N(x, S(x)) in ordinary torch operations, for transforms: differentiable at will, but slower."""
    wide = masked(x.to(torch.promote_types(x.dtype, torch.float32)), mask)
    own = differentiable_measure(wide, config, mask, center)
    return evaluate(wide, own.mean, own.sigma, weight, bias, mask).to(x.dtype)


def evaluate(
    x: Tensor, mean: Tensor, sigma: Tensor, weight: Tensor | None, bias: Tensor | None, mask: Tensor | None
) -> Tensor:
    """N(x, s) with statistics that are constants: ordinary torch operations, differentiable at will."""
    if mask is None and _is_plain(x, mean, sigma, weight, bias):
        # One operation of torch's, with a variance of 1: what is squared might overflow.
        mean, sigma = mean.reshape(-1), sigma.reshape(-1)
        gain = sigma.reciprocal() if weight is None else weight / sigma
        return torch.batch_norm(x, gain, bias, mean, torch.ones_like(mean), False, 0.0, 0.0, False)
    in_place = not (torch.is_grad_enabled() or transformed())
    wide = x.to(torch.promote_types(x.dtype, mean.dtype))
    return normalize(wide, mean, sigma, weight, bias, mask, in_place).to(x.dtype)


def _is_plain(x: Tensor, mean: Tensor, sigma: Tensor, *affine: Tensor | None) -> bool:
    """Whether they are ordinary tensors of one type, with statistics per channel that nobody differentiates by."""
    if torch.compiler.is_compiling() or transformed() or not (x.is_cpu or x.is_cuda):
        return False
    if x.dtype not in (torch.float32, torch.float64) or not x.numel():
        return False
    if mean.shape[1] != x.shape[1] or mean.numel() != x.shape[1] or mean.requires_grad or sigma.requires_grad:
        return False
    for each in (x, mean, sigma, *affine):
        if each is not None and (type(each) not in ORDINARY or each.dtype != x.dtype):
            return False
    return x.is_contiguous() or (x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last))


class RunSequence(torch.autograd.Function):
    """A recurrent layer over a whole sequence: `call` of `backends.Sequence`, gains and biases norm by norm."""

    @staticmethod
    def forward(
        ctx: Any,
        products: Tensor,
        start: Tensor,
        weight: Tensor,
        call: backends.Sequence,
        backend: Any,
        states: Sequence[Any],
        receivers: Sequence[Callable[[], H2]],
        *affine: Any,
    ) -> Any:
        output, final, saved = backend.forward(call, products, start, weight, affine, states)
        ctx.call, ctx.backend, ctx.states, ctx.receivers = call, backend, states, receivers
        ctx.laid_out = [(tensor.shape, tensor.stride(), tensor.dtype, tensor.device) for tensor in saved]
        ctx.save_for_backward(*saved, *affine)
        return output, final

    @staticmethod
    def backward(ctx: Any, doutput: Tensor, dfinal: Tensor) -> tuple[Any, ...]:
        refuse_second_derivative("recurrent layers of streamnorm", ", or use a cell in a loop")
        kept, n = ctx.saved_tensors, len(ctx.laid_out)  # once: activation checkpointing hands each tensor out once
        saved = [backends.memory.as_laid_out(t, *like) for t, like in zip(kept[:n], ctx.laid_out, strict=True)]
        h2 = [receive() for receive in ctx.receivers]
        dproducts, dstart, dweight, vectors = ctx.backend.backward(
            ctx.call,
            materialized(doutput),
            materialized(dfinal),
            saved,
            kept[n:],
            ctx.states,
            h2,
            ctx.needs_input_grad[2],
        )
        needed = ctx.needs_input_grad[7:]
        daffine = (vector if wanted else None for vector, wanted in zip(vectors, needed, strict=True))
        return dproducts, dstart, dweight, None, None, None, None, *daffine


def run_sequence(
    products: Tensor,
    start: Tensor,
    weight: Tensor,
    affine: Sequence[Any],
    call: backends.Sequence,
    backend: Any,
    states: Sequence[Any],
    receivers: Sequence[Callable[[], H2]],
) -> tuple[Tensor, Tensor]:
    """Outputs of a recurrent layer in one direction, and the state of each sample at its end, as `start` is.

    `states`: those of the norms, as the backend has looked at them.
    """
    output, final = RunSequence.apply(products, start, weight, call, backend, states, receivers, *affine)  # type: ignore[no-untyped-call]
    return output, final
