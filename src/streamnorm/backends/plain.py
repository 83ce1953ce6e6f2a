"""Plain torch, on any device: the law that all other backends are tested against. It composes S, F, N and G of `core`.

Between forward and backward only the input and a few small tensors stay alive.
"""

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..core.algorithm import Kept, fold_gradients, fold_statistics, measured_again, stream_gradients, stream_statistics
from ..core.state import H1 as H1_FIELDS
from ..core.state import State, new_stream, write, write_stream
from ..core.statistics import (
    Moments,
    channelwise,
    fixed_center,
    masked,
    measure,
    normalize,
    pull_back,
)
from . import H2, PLAIN, Gradients, Plan, Result, Signature
from .memory import outside_inference_mode, require_memory

# Given dE/d(mean) and dE/d(sigma) of the statistics that normalized, the gradients to send into S(x).
Gradient = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class Plain:
    name, rank, sequences = PLAIN, 100, None

    def missing(self) -> str | None:
        return None

    def declines(self, call: Signature) -> str | None:
        return None

    def prepare(self, call: Signature, x: Tensor, weight: Any, bias: Any, state: State | None) -> Any:
        return ()

    def steady(self, prepared: Any) -> None:
        return None

    def forward(self, plan: Plan, x: Tensor, weight: Any, bias: Any, mask: Any, h1: Any, begins: bool) -> Result:
        config, wide = plan.call.config, x.to(plan.call.compute)
        if not plan.call.streaming:
            with outside_inference_mode():
                own = measure(
                    wide, config, mask, lambda mean, _: fixed_center(config.center, mean) if h1 is None else h1
                )
            return self._normalized(plan, x, weight, bias, mask, own, None)
        with outside_inference_mode():
            after, own, kept = stream_statistics(config, fold_statistics(config, h1.state), wide, mask, begins)
        result = self._normalized(plan, x, weight, bias, mask, own, kept)
        with outside_inference_mode():
            write(h1.state, after, H1_FIELDS)
        return result

    def repeat(self, plan: Plan, x: Tensor, weight: Any, bias: Any, mask: Any, kept: Any) -> Result:
        own = measured_again(plan.call.config, x.to(plan.call.compute), mask, kept)
        return self._normalized(plan, x, weight, bias, mask, own, kept)

    def _normalized(
        self, plan: Plan, x: Tensor, weight: Any, bias: Any, mask: Any, own: Moments, kept: Kept | None
    ) -> Result:
        mean, sigma = (own.mean, own.sigma) if kept is None else (kept.mean, kept.sigma)
        y = normalize(x.to(plan.call.compute), mean, sigma, weight, bias, mask, in_place=True)
        return y.to(x.dtype), tuple(own), kept

    def backward(
        self, plan: Plan, dy: Tensor, x: Tensor, weight: Any, mask: Any, saved: Any, kept: Any, h2: Any, needs: Any
    ) -> Gradients:
        own = Moments(*saved)
        if not plan.call.compiled:
            require_memory(dy, x, weight, mask, *saved)
        if kept is None:
            mean, sigma, gradient = own.mean, own.sigma, _unchanged
        else:
            mean, sigma, gradient = kept.mean, kept.sigma, partial(stream_back, plan.call.config, kept, own, h2)
        dx, dgain, dbias = back_through(dy, x, weight, mask, mean, sigma, own, plan, gradient, needs[0])
        return dx, dgain if needs[1] else None, dbias if needs[2] else None

    def pack(self, plan: Plan, result: Result) -> Tensor:
        _, saved, kept = result
        own = Moments(*saved)  # type: ignore[arg-type]
        present = torch.ones_like(own.mean) if own.present is None else own.present
        vectors = [own.mean, own.sigma, own.center, own.elements, present]
        parts = [vector.expand_as(own.mean) for vector in vectors] + [kept.mean, kept.sigma, *kept[3:]]
        return torch.cat([part.to(plan.call.compute).flatten() for part in parts])

    def unpack(self, plan: Plan, x: Tensor, mask: Any, packed: Tensor) -> tuple[Any, Any]:
        hat, own = _shapes(plan.call, x)
        parts = torch.split(packed, [prod(own)] * 5 + [prod(hat)] * 2 + [1] * 5)
        mean, sigma, center, elements, present = (part.reshape(own) for part in parts[:5])
        accept, *numbers = (part.reshape(()) for part in parts[7:])
        moments = Moments(mean, sigma, center, elements, None if mask is None else present.bool())
        return moments, Kept(parts[5].reshape(hat), parts[6].reshape(hat), None, accept.bool(), *numbers)

    def packed_size(self, call: Signature, x: Tensor) -> int:
        hat, own = _shapes(call, x)
        return 5 * prod(own) + 2 * prod(hat) + 5

    def statistics(self, plan: Plan, saved: Any) -> tuple[Tensor, ...]:
        mini_batch = Moments(*saved)
        present = () if mini_batch.present is None else (mini_batch.present.clone(),)
        return mini_batch.mean, mini_batch.sigma, *present


def _shapes(call: Signature, x: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of s_hat and of S(x), as they broadcast against x."""
    ref = call.config.ref
    shape = ref.kept_shape(x.shape)
    return shape, ((1 if ref.samples else x.shape[0]), *shape[1:])


def _unchanged(grad_mean: Tensor, grad_sigma: Tensor) -> tuple[Tensor, Tensor]:
    return grad_mean, grad_sigma


def stream_back(
    config: Any, kept: Kept, own: Moments, h2: H2, grad_mean: Tensor, grad_sigma: Tensor
) -> tuple[Tensor, Tensor]:
    """G into the tensors of H2, which is folded first."""
    shape = config.ref.statistic_shape(grad_mean.shape[1], tuple(grad_mean.shape[2:]))
    if h2.grads.long.shape != (2, *shape):  # the layer was reset since the forward pass: gradients for nobody
        h2 = h2._replace(grads=new_stream(shape, h2.grads.long))
    grads = fold_gradients(config, h2.grads, kept.window, kept.total)
    grads, passed_on = stream_gradients(config, grads, kept, own, grad_mean, grad_sigma, h2.scale)
    write_stream(h2.grads, grads)
    return passed_on


def back_through(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mask: Tensor | None,
    mean: Tensor,
    sigma: Tensor,
    own: Moments,
    plan: Plan,
    gradient: Gradient,
    needs_dx: bool,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """The gradients of the input, the gain and the bias of y = N(x, s_hat), gain and bias."""
    dtype, given = plan.call.compute, x.dtype
    x, dy = masked(x.to(dtype), mask), masked(dy.to(dtype), mask)
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
        through = pull_back(x, own, grad_mean, grad_sigma, plan.call.config, mask)
        dx = through.add_(dy * per_unit).to(given)
    return dx, _per_channel(dgain), _per_channel(dbias)


def _per_channel(cell: Tensor) -> Tensor:
    return cell.sum([d for d in range(cell.ndim) if d != 1])


BACKEND = Plain()
