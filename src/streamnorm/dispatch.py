"""The one place that chooses how a layer is computed. Today there is one way, plain torch.

A layer hands over what S found and what to normalize with, and a function that says which gradient of the statistics
flows on. Between forward and backward only the input and a few small tensors stay alive.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from . import moments as plain
from .moments import Moments, channelwise
from .normref import NormRef

# Given dE/d(mean) and dE/d(sigma) of the statistics that normalized, the gradients to send into S(x).
Gradient = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
# Given the means of the references and which of them a mask left present, c of the p-th moment.
Center = Callable[[Tensor, Tensor | None], Tensor]


@dataclass(frozen=True)
class Statistic:
    """Which statistics a layer takes, fixed when it is built: everything S depends on but the data."""

    ref: NormRef
    p: float
    center: str  # "mean", "running" or "zero"
    eps: float


@dataclass(frozen=True)
class Call:
    """One call of a layer: S(x), the statistics that normalize, and how their gradient flows on."""

    statistic: Statistic
    own: Moments
    mean: Tensor
    sigma: Tensor
    mask: Tensor | None
    gradient: Gradient


def measure(x: Tensor, statistic: Statistic, mask: Tensor | None, center: Center) -> Moments:
    """S(x), without gradient."""
    with torch.no_grad():
        ref = statistic.ref
        elements = plain.count_elements(x, ref, mask)
        mean = plain.reference_mean(x, ref, mask, elements)
        present = None
        if mask is not None and isinstance(elements, Tensor):
            present = (elements >= (2 if statistic.center == "mean" else 1)).expand_as(mean)
        c = center(mean, present)
        sigma = plain.reference_sigma(x, c, ref, mask, elements, statistic.p, statistic.eps)
        return Moments(mean, sigma, c, elements, present)


def apply(x: Tensor, weight: Tensor | None, bias: Tensor | None, call: Call) -> Tensor:
    """N(x, s_hat), gain and bias, differentiable once."""
    return cast(Tensor, _Normalize.apply(x, weight, bias, call))  # type: ignore[no-untyped-call]


def evaluate(
    x: Tensor, mean: Tensor, sigma: Tensor, weight: Tensor | None, bias: Tensor | None, mask: Tensor | None
) -> Tensor:
    """N(x, s) with statistics that are constants: ordinary torch operations, differentiable at will."""
    return plain.normalize(x.to(compute_dtype(x, mean)), mean, sigma, weight, bias, mask).to(x.dtype)


def compute_dtype(x: Tensor, statistics: Tensor) -> torch.dtype:
    """Arithmetic is done in the wider of the input's and the statistics' type, which is float32 at least."""
    return torch.promote_types(x.dtype, statistics.dtype)


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, call: Call) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias, ctx.call = bias is not None, call
        return evaluate(x, call.mean, call.sigma, weight, bias, call.mask)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "streamnorm layers have no second derivative in training: create_graph=True reached one. "
                "Call backward without create_graph, or put the layer in evaluation mode first."
            )
        saved, weight = ctx.saved_tensors
        call, dtype = ctx.call, compute_dtype(saved, ctx.call.mean)
        x, dy = saved.to(dtype), dy.to(dtype)
        if call.mask is not None:  # what lies under a mask may be anything, NaN included
            x, dy = torch.where(call.mask, x, 0), torch.where(call.mask, dy, 0)
        gain = x.new_ones(()) if weight is None else channelwise(weight, x).to(dtype)

        # Sums over everything that shares both statistics and gain.
        cell = [call.mean.shape[0], x.shape[1], *call.mean.shape[2:]]
        dbias = dy.sum_to_size(cell)
        dgain = (x - call.mean).mul_(dy).sum_to_size(cell) / call.sigma

        # y = gain * (x - mean) / sigma + bias: dE/dmean = -dbias * gain / sigma, dE/dsigma = -dgain * gain / sigma.
        per_unit = gain / call.sigma
        grad_mean = -(dbias * per_unit).sum_to_size(call.mean.shape)
        grad_sigma = -(dgain * per_unit).sum_to_size(call.mean.shape)
        grad_mean, grad_sigma = call.gradient(grad_mean, grad_sigma)

        dx = None
        if ctx.needs_input_grad[0]:
            kind = call.statistic
            through = plain.pull_back(
                x, call.own, grad_mean, grad_sigma, kind.center == "mean", kind.ref, call.mask, kind.p
            )
            dx = (dy * per_unit).add_(through).to(saved.dtype)
        return (
            dx,
            _per_channel(dgain).to(weight.dtype) if ctx.needs_input_grad[1] else None,
            _per_channel(dbias).to(dy.dtype if weight is None else weight.dtype) if ctx.needs_input_grad[2] else None,
            None,
        )


def _per_channel(cell: Tensor) -> Tensor:
    return cell.sum([d for d in range(cell.ndim) if d != 1])
