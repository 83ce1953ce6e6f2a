"""Plain torch, on any device: the law that all other backends are tested against. It composes S, F, N and G of `core`.

Between forward and backward only the input and a few small tensors stay alive.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..core.algorithm import (
    Kept,
    center_of,
    fold_gradients,
    fold_statistics,
    from_vector,
    measured_again,
    stream_gradients,
    stream_input,
    stream_statistics,
    to_vector,
)
from ..core.config import Config
from ..core.state import H1 as H1_FIELDS
from ..core.state import State, Stream, from_h1, new_stream, write, write_stream
from ..core.statistics import Moments, back_through, fixed_center, measure, normalize, share_among_samples
from . import H2, PLAIN, Gradients, Measured, Plan, Result, Signature
from .memory import outside_inference_mode, require_memory


class Streams:
    """F and G alone."""

    def declines(self, config: Config, dtype: torch.dtype, device: str, masked: bool) -> str | None:
        return None

    def center(self, config: Config, latest: Tensor, seen: Tensor, mean: Tensor, present: Tensor | None) -> Tensor:
        return center_of(config, latest, seen, mean, present)

    def forward(self, config: Config, h1: Sequence[Tensor], s: Measured, memo: Any) -> Tensor:
        state, elements = from_h1(h1), s.elements
        if not isinstance(elements, Tensor):
            elements = s.mean.new_full((s.mean.shape[0], *(1 for _ in s.mean.shape[1:])), elements)
        own = Moments(s.mean, s.sigma, s.mean, elements, s.present)
        after, kept = stream_statistics(config, fold_statistics(config, state), own, s.samples, s.channels, s.begins)
        vector = to_vector(kept)
        write(state, after, H1_FIELDS)
        return vector

    def backward(self, config: Config, h2: Sequence[Tensor], kept: Tensor, g: Tensor, memo: Any) -> Tensor:
        its, grads = from_vector(kept, tuple(g.shape[1:])), Stream(*h2)
        after, g_hat = stream_gradients(config, fold_gradients(config, grads, its.window, its.total), its, g)
        write_stream(grads, after)
        return g_hat


class Plain:
    name, rank, sequences, streams, normalize = PLAIN, 100, None, Streams(), None

    def missing(self) -> str | None:
        return None

    def details(self) -> str:
        return ""

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
            after, own, kept = stream_input(config, fold_statistics(config, h1.state), wide, mask, begins)
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
        config, compute = plan.call.config, plan.call.compute
        dx, dgain, dbias = back_through(dy, x, weight, mask, mean, sigma, own, config, compute, gradient, needs[0])
        return dx, dgain if needs[1] else None, dbias if needs[2] else None

    def statistics(self, plan: Plan, saved: Any) -> tuple[Tensor, ...]:
        mini_batch = Moments(*saved)
        present = () if mini_batch.present is None else (mini_batch.present.clone(),)
        return mini_batch.mean, mini_batch.sigma, *present


def _unchanged(grad_mean: Tensor, grad_sigma: Tensor) -> tuple[Tensor, Tensor]:
    return grad_mean, grad_sigma


def stream_back(
    config: Any, kept: Kept, own: Moments, h2: H2, grad_mean: Tensor, grad_sigma: Tensor
) -> tuple[Tensor, Tensor]:
    """G into the tensors of H2, which is folded first."""
    shape = config.ref.statistic_shape(grad_mean.shape[1], tuple(grad_mean.shape[2:]))
    if h2.grads.long.shape != (2, *shape):  # the layer was reset since the forward pass: gradients for nobody
        h2 = h2._replace(grads=new_stream(shape, h2.grads.long))
    g = torch.stack([grad_mean, grad_sigma]).to(h2.grads.short.dtype).reshape(h2.grads.short.shape)
    grads = fold_gradients(config, h2.grads, kept.window, kept.total)
    grads, g_hat = stream_gradients(config, grads, kept, g, h2.scale)
    write_stream(h2.grads, grads)
    return share_among_samples(g_hat.reshape(2, *grad_mean.shape).to(grad_mean.dtype), own)


BACKEND = Plain()
