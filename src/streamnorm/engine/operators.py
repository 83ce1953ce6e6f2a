"""Streaming layers under torch.compile: a training call is one operator forward and one backward.

An operator may say which tensors it writes into, so the compiler keeps the order of pushes. Inside, the backend that
serves the call does what it does without the compiler; it is chosen by the same rule when the graph is made and when
it runs. The forward operator owns H1 and the backward operator H2: a tensor that both wrote to could not serve two
calls before one backward pass.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .. import backends
from ..backends import H1, H2, Gradients, Plan, Result, Signature
from ..core.algorithm import fold_gradients, fold_statistics
from ..core.config import Config, from_text
from ..core.state import H1 as H1_FIELDS
from ..core.state import PARTS, State, Stream, from_dict, new_state, of_h1, to_dict, write, write_stream
from . import compat, replay
from .function import Call, Normalize
from .listener import layer_of

_WRITTEN = "abcdefghijklmnopqrstuvwxyz"
_SETTINGS = "Tensor layer, str config, str among"


def _declared(names: tuple[str, ...]) -> str:
    return ", ".join(f"Tensor({letter}!) {name}" for letter, name in zip(_WRITTEN, names, strict=False))


_H2_FIELDS = tuple(f"grads_{part}" for part in PARTS)
_LIBRARY: Any = torch.library.Library("streamnorm", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define(
    f"forward_(Tensor x, Tensor? weight, Tensor? bias, Tensor? mask, bool begins, {_SETTINGS}, {_declared(H1_FIELDS)}) "
    "-> (Tensor, Tensor)",
    tags=[torch.Tag.pt2_compliant_tag],
)
_LIBRARY.define(
    f"backward_(Tensor dy, Tensor x, Tensor? weight, Tensor? mask, Tensor kept, {_SETTINGS}, {_declared(_H2_FIELDS)}) "
    "-> (Tensor, Tensor, Tensor)",
    tags=[torch.Tag.pt2_compliant_tag],
)


class Operators:
    """What the autograd.Function takes for a backend while the compiler traces it."""

    def forward(self, plan: Plan, x: Tensor, weight: Any, bias: Any, mask: Any, h1: H1, begins: bool) -> Result:
        y, kept = torch.ops.streamnorm.forward_(x, weight, bias, mask, begins, *plan.prepared, *of_h1(h1.state))
        return y, (kept,), None

    def backward(
        self, plan: Plan, dy: Tensor, x: Tensor, weight: Any, mask: Any, saved: Any, kept: Any, h2: H2, needs: Any
    ) -> Gradients:
        written = [getattr(h2.grads, part) for part in PARTS]
        dx, dgain, dbias = torch.ops.streamnorm.backward_(dy, x, weight, mask, saved[0], *plan.prepared, *written)
        return dx if needs[0] else None, dgain if needs[1] else None, dbias if needs[2] else None


_OPERATORS: Any = Operators()


def stream_compiled(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mask: Tensor | None,
    tag: Tensor,
    config: Config,
    state: State,
    begins: bool,
) -> Tensor:
    """A training call of a streaming layer, for the compiler to trace. `tag`: the layer's `_name_tag`."""
    plan = Plan(None, _OPERATORS, (tag, config.text, backends.among))  # type: ignore[arg-type]
    return Normalize.apply(x, weight, bias, mask, Call(plan, H1(state), H2(state.grads), begins=begins))  # type: ignore[no-untyped-call, no-any-return]


def _signature(x: Tensor, weight: Any, bias: Any, mask: Any, text: str, stored: torch.dtype) -> Signature:
    return backends.signature_of(from_text(text), x, weight, bias, mask, stored, compiled=True)


def _plan(call: Signature, among: str, x: Tensor, weight: Any, bias: Any, state: State | None) -> Plan:
    """The choice is that of the graph; tensors have memory now, and are looked at."""
    backend = backends.choose(call, x, weight, bias, state, backends.named(among)).backend
    now = call._replace(compiled=False)
    prepared = backend.prepare(now, x, weight, bias, state)
    if prepared is None:
        raise RuntimeError(
            "the state of a compiled streaming layer was moved or replaced since it was compiled: run torch.compile "
            "again, or call torch.compiler.reset() first"
        )
    return Plan(now, backend, prepared)


@torch.no_grad()
def _forward(
    x: Tensor, weight: Any, bias: Any, mask: Any, begins: bool, tag: Tensor, text: str, among: str, *h1: Tensor
) -> tuple[Tensor, Tensor]:
    tensors = dict(zip(H1_FIELDS, h1, strict=True))
    like = tensors["mean"]
    unused = to_dict(new_state(tuple(like.shape), like))  # H2 is not this operator's business
    state = from_dict(unused | tensors)
    layer = layer_of(tag)
    entry = replay.begin(int(tag), True)
    given = x
    x, weight, bias = _readable(x), _contiguous(weight), _contiguous(bias)
    plan = _plan(_signature(x, weight, bias, mask, text, like.dtype), among, x, weight, bias, state)
    if entry is not None and entry.again:
        result = plan.backend.repeat(plan, x, weight, bias, mask, entry.kept[1])
    else:
        if layer is not None:
            layer._on_forward(weight)
            if layer._folds_alike:
                write(state, fold_statistics(plan.call.config, state), H1_FIELDS)
        result = plan.backend.forward(plan, x, weight, bias, mask, H1(state), begins)
    if entry is not None:
        entry.kept = plan.backend, result[2]
    return _laid_out_like(given, result[0]), plan.backend.pack(plan, result)


@torch.no_grad()
def _backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mask: Tensor | None,
    kept: Tensor,
    tag: Tensor,
    text: str,
    among: str,
    *grads: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    h2 = Stream(*grads)
    layer = layer_of(tag)
    given = x
    x, weight = _readable(x), _contiguous(weight)
    call = _signature(x, weight, weight, mask, text, h2.long.dtype)
    like = h2.long.new_empty(h2.long.shape[1:])
    state = replace(new_state(tuple(like.shape), like), grads=h2)  # H1 is not this operator's business
    plan = _plan(call, among, x, weight, weight, state)
    if layer is not None:
        layer._on_backward()
        if layer._folds_alike:
            window, total = kept[-2:].to(torch.float64)
            write_stream(h2, fold_gradients(plan.call.config, h2, window, total))
    saved, its = plan.backend.unpack(plan, x, mask, kept)
    dx, dgain, dbias = plan.backend.backward(plan, dy, x, weight, mask, saved, its, H2(h2), (True, True, True))
    dtype = call.compute if weight is None else weight.dtype
    return _laid_out_like(given, dx), dgain.to(dtype), dbias.to(dtype)  # type: ignore[arg-type, union-attr]


def _readable(x: Tensor) -> Tensor:
    """What backends can read, laid out as torch.empty_like lays out its result."""
    known = backends.layout_of(x) != "other" and torch.empty_like(x).stride() == x.stride()
    return x if known else x.contiguous()


def _contiguous(vector: Tensor | None) -> Tensor | None:
    return None if vector is None else vector.contiguous()


def _laid_out_like(x: Tensor, result: Tensor) -> Tensor:
    """The compiler was promised the strides of torch.empty_like."""
    like = torch.empty_like(x)
    return result if result.stride() == like.stride() else like.copy_(result)


def _forward_shapes(
    x: Tensor, weight: Any, bias: Any, mask: Any, begins: bool, tag: Tensor, text: str, among: str, *h1: Tensor
) -> tuple[Tensor, Tensor]:
    if compat.repeats_in_backward():
        raise RuntimeError(
            "the compiler would repeat a streaming layer in backward from a state that has moved on: compile inside "
            "the checkpoint, as in checkpoint(torch.compile(segment), x, use_reentrant=False)"
        )
    stored = h1[H1_FIELDS.index("mean")].dtype
    call = _signature(x, weight, bias, mask, text, stored)
    backend = backends.choose(call, x, weight, bias, None, backends.named(among)).backend
    return torch.empty_like(x), x.new_empty(backend.packed_size(call, x), dtype=call.compute)


def _backward_shapes(
    dy: Tensor, x: Tensor, weight: Tensor | None, mask: Any, kept: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = kept.dtype if weight is None else weight.dtype
    return torch.empty_like(x), x.new_empty(x.shape[1], dtype=dtype), x.new_empty(x.shape[1], dtype=dtype)


_LIBRARY.impl("forward_", _forward, "CompositeExplicitAutograd")
_LIBRARY.impl("backward_", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("streamnorm::forward_", _forward_shapes, lib=_LIBRARY)
torch.library.register_fake("streamnorm::backward_", _backward_shapes, lib=_LIBRARY)
