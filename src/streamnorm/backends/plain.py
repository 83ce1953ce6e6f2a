"""The one place that chooses how a layer is computed: by the kernels for the CPU where they apply, by an operator that
torch has for it, or in plain torch.

On the plain path a layer hands over what S found and what to normalize with, and a function that says which gradient
of the statistics flows on. Between forward and backward only the input and a few small tensors stay alive.
"""

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor

from . import kernels, native
from . import moments as plain
from .fused import layout_of, refuse_second_derivative
from .kernels import Layout, in_memory, is_plain, is_vector
from .moments import Center, Moments, Statistic, channelwise
from .normref import CODES, NormRef
from .transforms import transformed

BATCH_NORM, LAYER_NORM, INSTANCE_NORM = CODES["BA1"], CODES["SP1"], CODES["SP2"]
# Given dE/d(mean) and dE/d(sigma) of the statistics that normalized, the gradients to send into S(x).
Gradient = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def fused_layout(x: Tensor, mask: Tensor | None) -> Layout | None:
    """How the kernels read the input of a call; None where they cannot: that is a matter for the plain path."""
    return layout_of(x) if mask is None and kernels.available() and is_plain(x, torch.float32) else None


@lru_cache(maxsize=256)
def _fused_settings(statistic: tuple[Any, ...], streaming: tuple[Any, ...]) -> bytes | None:
    ref, p, center, eps = statistic
    alpha, beta, kappa, warmup, guard = streaming
    fits = p in (1, 2) and ref == BATCH_NORM
    return kernels.settings_record(p, center, alpha, beta, kappa, warmup, guard, eps) if fits else None


def fused_settings(
    statistic: tuple[Any, ...], streaming: tuple[Any, ...], vectors: Iterable[Tensor | None], size: int
) -> bytes | None:
    """The settings of a streaming layer for the kernels; None where they do not serve it.

    `statistic`: the fields of a Statistic; `streaming`: alpha, beta, kappa, warmup and guard; `vectors`: gain, bias
    and a stored statistic, of `size` numbers each.
    """
    return _fused_settings(statistic, streaming) if all(is_vector(vector, size) for vector in vectors) else None


def fuses_compiled(statistic: Statistic, x: Tensor, vectors: Iterable[Tensor | None], size: int) -> bool:
    """Whether a compiled call ends in the kernels; asked while the compiler traces, when tensors have no memory yet."""
    fits = statistic.p in (1, 2) and statistic.ref == BATCH_NORM and kernels.available()
    there = [vector for vector in vectors if vector is not None]
    sized = all(vector.numel() == size for vector in there)
    return fits and sized and all(t.dtype == torch.float32 and t.device.type == "cpu" for t in (x, *there))


def fuses_sequence(*tensors: Tensor) -> bool:
    """Whether the kernels take these tensors of a recurrent layer."""
    if not kernels.available() or transformed():
        return False
    return all(is_plain(t, torch.float32) and t.is_contiguous() and in_memory(t) for t in tensors)


def native_operator(
    ref: NormRef, x: Tensor, mask: Tensor | None, weight: Tensor | None, bias: Tensor | None, stored: Tensor | None
) -> native.Operator | None:
    """torch's operator for a call with p = 2 about the own mean of the reference; None where there is none.

    `stored`: a statistic that the layer keeps, in whose type it wants its arithmetic.
    """
    if mask is not None or kernels.plain_forced() or torch.compiler.is_compiling():
        return None
    dtype, size = x.dtype, x.shape[1]
    if dtype not in (torch.float32, torch.float64) or not is_plain(x, dtype):
        return None
    if not (is_vector(weight, size, dtype) and is_vector(bias, size, dtype)):
        return None
    if stored is not None and not is_plain(stored, dtype):
        return None
    if weight is None and bias is not None:  # of which torch's group norm has no gradient
        return None
    if ref == BATCH_NORM:
        return native.batch_norm
    if ref == LAYER_NORM and x.ndim == 2:
        return native.layer_norm
    if not x.is_contiguous():  # torch would return another layout, or lose digits
        return None
    return native.group_norm if ref == LAYER_NORM else native.instance_norm if ref == INSTANCE_NORM else None


def apply(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mask: Tensor | None,
    mean: Tensor,
    sigma: Tensor,
    own: Moments,
    statistic: Statistic,
    gradient: Gradient,
) -> Tensor:
    """N(x, s_hat), gain and bias, differentiable once. `mean`, `sigma`: s_hat; `own`: S(x)."""
    result = _Normalize.apply(x, weight, bias, mask, mean, sigma, own, statistic, gradient)  # type: ignore[no-untyped-call]
    return cast(Tensor, result)


def apply_ordinary(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mask: Tensor | None, statistic: Statistic, center: Center
) -> Tensor:
    """N(x, S(x)), gain and bias in ordinary torch operations, for transforms: differentiable at will, but slower."""
    wide = plain.masked(x.to(torch.promote_types(x.dtype, torch.float32)), mask)
    own = plain.differentiable_measure(wide, statistic, mask, center)
    return evaluate(wide, own.mean, own.sigma, weight, bias, mask).to(x.dtype)


def evaluate(
    x: Tensor, mean: Tensor, sigma: Tensor, weight: Tensor | None, bias: Tensor | None, mask: Tensor | None
) -> Tensor:
    """N(x, s) with statistics that are constants: ordinary torch operations, differentiable at will."""
    return plain.normalize(x.to(compute_dtype(x, mean)), mean, sigma, weight, bias, mask).to(x.dtype)


def materialized(tensor: Tensor) -> Tensor:
    """With memory of its own, which a tensor of zeros that autograd made may lack: it cannot be written to.

    What the compiler hands to a graph has memory.
    """
    return tensor if torch.compiler.is_compiling() or not tensor._is_zerotensor() else tensor.clone()


def compute_dtype(x: Tensor, statistics: Tensor) -> torch.dtype:
    """Arithmetic is done in the wider of the input's and the statistics' type, which is float32 at least."""
    return torch.promote_types(x.dtype, statistics.dtype)


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Any, bias: Any, mask: Any, mean: Tensor, sigma: Tensor, *rest: Any
    ) -> Tensor:
        own, ctx.statistic, ctx.gradient = rest
        # Through save_for_backward, so that they are freed after backward and a change in place is noticed.
        ctx.save_for_backward(x, weight, mask, mean, sigma, *own)
        return evaluate(x, mean, sigma, weight, bias, mask)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        dy = materialized(dy)
        x, weight, mask, mean, sigma, *moments = ctx.saved_tensors
        call = x, weight, mask, mean, sigma, Moments(*moments)
        dx, dgain, dbias = back_through(dy, *call, ctx.statistic, ctx.gradient, ctx.needs_input_grad[0])
        _, needs_gain, needs_bias, *_ = ctx.needs_input_grad
        return dx, dgain if needs_gain else None, dbias if needs_bias else None, *[None] * 6


def back_through(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mask: Tensor | None,
    mean: Tensor,
    sigma: Tensor,
    own: Moments,
    statistic: Statistic,
    gradient: Gradient,
    needs_dx: bool,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """The gradients of the input, the gain and the bias of a call of `apply`."""
    dtype, given = compute_dtype(x, mean), x.dtype
    x, dy = plain.masked(x.to(dtype), mask), plain.masked(dy.to(dtype), mask)
    gain = x.new_ones(()) if weight is None else channelwise(weight, x).to(dtype)

    # Sums over everything that shares both statistics and gain.
    cell = [mean.shape[0], x.shape[1], *mean.shape[2:]]
    dbias = dy.sum_to_size(cell)
    dgain = (x - mean).mul_(dy).sum_to_size(cell) / sigma

    # y = gain * (x - mean) / sigma + bias: dE/dmean = -dbias * gain / sigma, dE/dsigma = -dgain * gain / sigma.
    per_unit = gain / sigma
    grad_mean, grad_sigma = gradient(
        -(dbias * per_unit).sum_to_size(mean.shape), -(dgain * per_unit).sum_to_size(mean.shape)
    )
    dx = None
    if needs_dx:
        through = plain.pull_back(x, own, grad_mean, grad_sigma, statistic, mask)
        dx = through.add_(dy * per_unit).to(given)
    return dx, _per_channel(dgain), _per_channel(dbias)


def _per_channel(cell: Tensor) -> Tensor:
    return cell.sum([d for d in range(cell.ndim) if d != 1])
