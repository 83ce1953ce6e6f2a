"""Streaming layers under torch.compile: a training call is one operator forward and one backward.

An operator may say which tensors it writes into, so the compiler keeps the order of pushes; what it does inside is what
the layer does without the compiler: kernels where they apply, plain torch otherwise. H2 is folded by the backward
operator, because a tensor that both passes wrote to could not serve two calls before one backward pass.
"""

from dataclasses import replace
from functools import partial
from math import prod
from typing import Any, cast

import torch
from torch import Tensor

from . import checkpointing, kernels, stream
from .dispatch import back_through, compute_dtype, evaluate
from .fused import as_laid_out, layout_of
from .kernels import Layout
from .listener import layer_at
from .moments import Moments, Statistic
from .normref import NormRef
from .rules import Call, Rules, fold_gradients, fold_statistics, stream_gradients, stream_statistics
from .stream import State, Stream

_SETTINGS = (
    "bool samples, str channels, str space, float p, str center, float eps, "
    "float[] alpha, float[] beta, float[] kappa, float warmup, bool guard, bool fused"
)
_LIBRARY: Any = torch.library.Library("streamnorm", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define(
    f"forward_(Tensor x, Tensor? weight, Tensor? bias, Tensor? mask, {_SETTINGS}, Tensor(a!) long, Tensor(b!) short, "
    "Tensor(c!) count, Tensor(d!) empty, Tensor(e!) pending, Tensor(f!) mean, Tensor(g!) sigma, Tensor(h!) seen, "
    "Tensor(i!) elements, Tensor(j!) elements_before) -> (Tensor, Tensor)",
    tags=[torch.Tag.pt2_compliant_tag],
)
_LIBRARY.define(
    f"backward_(Tensor dy, Tensor x, Tensor? weight, Tensor? mask, Tensor kept, {_SETTINGS}, Tensor(a!) long, "
    "Tensor(b!) short, Tensor(c!) count, Tensor(d!) empty, Tensor(e!) pending) -> (Tensor, Tensor, Tensor)",
    tags=[torch.Tag.pt2_compliant_tag],
)


def stream_compiled(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mask: Tensor | None, rules: Rules, fused: bool, state: State
) -> Tensor:
    """A training call of a streaming layer, for the compiler to trace. `fused`: the kernels serve this layer."""
    s, r = rules.statistic, rules
    settings = (s.ref.samples, s.ref.channels, str(s.ref.space), s.p, s.center, s.eps)
    streaming = (list(r.alpha), list(r.beta), list(r.kappa), float(r.warmup), r.guard, fused)
    return cast(Tensor, _Compiled.apply(x, weight, bias, mask, (*settings, *streaming), state))  # type: ignore[no-untyped-call]


class _Compiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any, bias: Any, mask: Any, settings: tuple[Any, ...], state: State) -> Any:
        stats = state.stats
        streams = stats.long, stats.short, stats.count, stats.empty, stats.pending, state.mean, state.sigma
        counters = state.seen, state.elements, state.elements_before
        y, kept = torch.ops.streamnorm.forward_(x, weight, bias, mask, *settings, *streams, *counters)
        ctx.save_for_backward(x, weight, mask, kept)
        ctx.settings, ctx.grads = settings, state.grads  # H2 itself, not as it is now
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, weight, mask, kept = ctx.saved_tensors
        h2 = ctx.grads
        written = h2.long, h2.short, h2.count, h2.empty, h2.pending
        dx, dgain, dbias = torch.ops.streamnorm.backward_(dy, x, weight, mask, kept, *ctx.settings, *written)
        needs_x, needs_gain, needs_bias, *_ = ctx.needs_input_grad
        return dx if needs_x else None, dgain if needs_gain else None, dbias if needs_bias else None, None, None, None


def _rules(samples: bool, channels: str, space: str, p: float, center: str, eps: float, *streaming: Any) -> Rules:
    alpha, beta, kappa, warmup, guard = streaming
    ref = NormRef(samples, cast(Any, channels), "all" if space == "all" else int(space))
    return Rules(Statistic(ref, p, center, eps), tuple(alpha), tuple(beta), tuple(kappa), warmup, guard)


def _record(rules: Rules) -> bytes:
    s = rules.statistic
    streaming = rules.alpha, rules.beta, rules.kappa, rules.warmup, rules.guard
    return kernels.settings_record(s.p, s.center, *streaming, s.eps)


@torch.no_grad()
def _forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mask: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor]:
    *settings, fused, long, short, count, empty, pending, mean, sigma, seen, elements, elements_before = rest
    rules, h1 = _rules(*settings), Stream(long, short, count, empty, pending)
    h2 = stream.new_stream(tuple(mean.shape), mean)  # not this operator's business
    state = State(h1, h2, mean, sigma, seen, elements, elements_before, loss_scale=mean.new_zeros(()))
    repetition = checkpointing.begin(count.data_ptr(), True, partial(stream.copied, state))
    layer = layer_at(count if weight is None else weight)
    if repetition is not None:
        state = stream.copied(repetition.kept)
    elif layer is not None:
        layer._forward_runs(weight)
    if fused:
        if state.stats.pending:  # not by the kernels, which round otherwise; all processes of a group do it alike
            stream.write(state, fold_statistics(rules, state))
        x, weight, bias = _readable(x), _contiguous(weight), _contiguous(bias)
        y, kept = torch.empty_like(x), x.new_empty(kernels.kept_size(x.shape[1]))
        kernels.layer_forward(_record(rules), _addresses(state), cast(Layout, layout_of(x)), x, weight, bias, kept, y)
        return y, kept
    after, call = stream_statistics(rules, fold_statistics(rules, state), x.to(compute_dtype(x, mean)), mask)
    y = evaluate(x, call.mean, call.sigma, weight, bias, mask)
    stream.write(state, after)
    return _laid_out_like(x, y), _pack(call)


@torch.no_grad()
def _backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, mask: Tensor | None, kept: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    *settings, fused, long, short, count, empty, pending = rest
    rules, h2 = _rules(*settings), Stream(long, short, count, empty, pending)
    grads = fold_gradients(rules, h2, *kept[-2:].to(long.dtype))
    layer = layer_at(count if weight is None else weight)
    if layer is not None:
        layer._backward_runs()
    if fused:
        stream.write_stream(h2, grads)
        x, weight = _readable(x), _contiguous(weight)
        unused = stream.new_state((x.shape[1],), long)
        state = replace(unused, grads=h2)
        dx = torch.empty_like(x)
        sums = x.new_empty(x.shape[1]), x.new_empty(x.shape[1])
        dy = as_laid_out(dy, dx.shape, dx.stride())
        layout = cast(Layout, layout_of(x))
        kernels.layer_backward(_record(rules), _addresses(state), layout, x, weight, kept, dy, 1.0, (dx, *sums))
        return dx, *sums
    call = _unpack(kept, x, rules, mask is not None)

    def gradient(grad_mean: Tensor, grad_sigma: Tensor) -> tuple[Tensor, Tensor]:
        pushed, passed_on = stream_gradients(rules, grads, call, grad_mean, grad_sigma, None)
        stream.write_stream(h2, pushed)
        return passed_on

    parts = x, weight, mask, call.mean, call.sigma, call.own, rules.statistic
    result, dgain, dbias = back_through(dy, *parts, gradient, True)
    dtype = dgain.dtype if weight is None else weight.dtype
    return _laid_out_like(x, cast(Tensor, result)), dgain.to(dtype), dbias.to(dtype)


def _addresses(state: State) -> bytes:
    """Of a state that the caller holds."""
    channels = state.mean.numel()
    if not kernels.holds(state, channels):
        raise RuntimeError(
            "the state of a compiled streaming layer was moved or replaced since it was compiled: run torch.compile "
            "again, or call torch.compiler.reset() first"
        )
    return kernels.addresses(kernels.state_readers(state))


def _readable(x: Tensor) -> Tensor:
    """What the kernels can read, laid out as torch.empty_like lays out its result."""
    return x if layout_of(x) and torch.empty_like(x).stride() == x.stride() else x.contiguous()


def _contiguous(vector: Tensor | None) -> Tensor | None:
    return None if vector is None else vector.contiguous()


def _laid_out_like(x: Tensor, result: Tensor) -> Tensor:
    """The compiler was promised the strides of torch.empty_like."""
    like = torch.empty_like(x)
    return result if result.stride() == like.stride() else like.copy_(result)


def _shapes(x: Tensor, rules: Rules) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of s_hat and of S(x), as they broadcast against x."""
    shape = rules.statistic.ref.kept_shape(x.shape)
    return shape, ((1 if rules.statistic.ref.samples else x.shape[0]), *shape[1:])


def _pack(call: Call) -> Tensor:
    """What a call keeps, as one vector: an operator returns a fixed number of tensors."""
    own, dtype = call.own, call.own.mean.dtype
    present = torch.ones_like(own.mean) if own.present is None else own.present
    vectors = [own.mean, own.sigma, own.center, own.elements, present]
    parts = [vector.expand_as(own.mean) for vector in vectors] + [call.mean, call.sigma, *call[3:]]
    return torch.cat([part.to(dtype).flatten() for part in parts])


def _unpack(kept: Tensor, x: Tensor, rules: Rules, masked: bool) -> Call:
    hat, own = _shapes(x, rules)
    parts = torch.split(kept, [prod(own)] * 5 + [prod(hat)] * 2 + [1] * 5)
    mean, sigma, center, elements, present = (part.reshape(own) for part in parts[:5])
    accept, *numbers = (part.reshape(()) for part in parts[7:])
    moments = Moments(mean, sigma, center, elements, present.bool() if masked else None)
    return Call(moments, parts[5].reshape(hat), parts[6].reshape(hat), accept.bool(), *numbers)


def _forward_shapes(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    if "ac_graph_id" in torch.fx.traceback.get_current_meta():  # the compiler's mark of what it may run again
        raise RuntimeError(
            "the compiler would repeat a streaming layer in backward from a state that has moved on: compile inside "
            "the checkpoint, as in checkpoint(torch.compile(segment), x, use_reentrant=False)"
        )
    *settings, fused = rest[3:15]
    if fused:
        size = kernels.kept_size(x.shape[1])
    else:
        hat, own = _shapes(x, _rules(*settings))
        size = 5 * prod(own) + 2 * prod(hat) + 5
    return torch.empty_like(x), x.new_empty(size, dtype=compute_dtype(x, rest[-5]))


def _backward_shapes(dy: Tensor, x: Tensor, weight: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    dtype = compute_dtype(x, rest[-5]) if weight is None else weight.dtype
    return torch.empty_like(x), x.new_empty(x.shape[1], dtype=dtype), x.new_empty(x.shape[1], dtype=dtype)


_LIBRARY.impl("forward_", _forward, "CompositeExplicitAutograd")
_LIBRARY.impl("backward_", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("streamnorm::forward_", _forward_shapes, lib=_LIBRARY)
torch.library.register_fake("streamnorm::backward_", _backward_shapes, lib=_LIBRARY)
