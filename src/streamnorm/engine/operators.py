"""Streaming layers under torch.compile: S, N and dS/dx are ordinary operations, which the compiler fuses with others.

F and G, which write the streams, are operators on vectors, served by the backend that fits the device. An operator may
say which tensors it writes into, so the compiler keeps the order of pushes. Forward owns H1 and backward H2: a tensor
that both wrote to could not serve two calls before one backward pass.
"""

from typing import Any

import torch
from torch import Tensor

from .. import backends
from ..backends import H1, H2, Gradients, Measured, Plan, Result
from ..core.algorithm import NUMBERS, fold_gradients, fold_statistics, from_vector, samples_of, tested
from ..core.config import Config, from_text
from ..core.state import H1 as H1_FIELDS
from ..core.state import PARTS, State, Stream, from_h1, of_h1, write, write_stream
from ..core.statistics import Moments, back_through, fixed_center, measure, normalize, share_among_samples
from . import compat, replay
from .function import Call, Normalize
from .listener import layer_of

_WRITTEN = "abcdefghijklmnopqrstuvwxyz"


def _declared(names: tuple[str, ...]) -> str:
    return ", ".join(f"Tensor({letter}!) {name}" for letter, name in zip(_WRITTEN, names, strict=False))


_LIBRARY: Any = torch.library.Library("streamnorm", "DEF")  # type: ignore[no-untyped-call]
for _schema in (
    # c of the p-th moment that comes from the state. An operator, since what it gives is kept until backward: the
    # compiler could make anything else anew there, from a state that has moved on.
    "center(Tensor mean, Tensor? present, Tensor layer, str config, str among, Tensor running, Tensor seen) -> Tensor",
    # F. Elements and samples as tensors only where a mask or a window makes them differ.
    "push_statistics_(Tensor own_mean, Tensor own_sigma, Tensor? own_elements, Tensor? present, Tensor? own_samples, "
    "SymInt number, SymInt batch, SymInt channels, bool begins, Tensor? weight, Tensor layer, str config, str among, "
    f"{_declared(H1_FIELDS)}) -> Tensor",
    # G
    "push_gradients_(Tensor g, Tensor kept, Tensor layer, str config, str among, "
    f"{_declared(tuple(f'grads_{part}' for part in PARTS))}) -> Tensor",
):
    _LIBRARY.define(_schema, tags=[torch.Tag.pt2_compliant_tag])


class Operators:
    """What the autograd.Function takes for a backend while the compiler traces it."""

    def forward(self, plan: Plan, x: Tensor, weight: Any, bias: Any, mask: Any, h1: H1, begins: bool) -> Result:
        (tag, text, among), config, ref = plan.prepared, plan.call.config, plan.call.config.ref
        state, wide = h1.state, x.to(plan.call.compute)
        own = measure(wide, config, mask, lambda *its: _center_for(plan, state, *its))
        differ = mask is not None or ref.window
        counts = own.elements if differ else None, own.present, samples_of(x, mask) if mask is not None else None
        numbers = 0 if differ else ref.fewest_elements(x.shape), x.shape[0], x.shape[1]
        kept = torch.ops.streamnorm.push_statistics_(
            own.mean, own.sigma, *counts, *numbers, begins, weight, tag, text, among, *of_h1(state)
        )
        its = from_vector(kept, (1, *own.mean.shape[1:]))
        y = normalize(wide, its.mean, its.sigma, weight, bias, mask)
        return y.to(x.dtype), (kept, *own), None

    def backward(
        self, plan: Plan, dy: Tensor, x: Tensor, weight: Any, mask: Any, saved: Any, _: Any, h2: H2, needs: Any
    ) -> Gradients:
        kept, own, config, compute = saved[0], Moments(*saved[1:]), plan.call.config, plan.call.compute
        its = from_vector(kept, (1, *own.mean.shape[1:]))
        rest = config, compute, lambda *g: _pass_on(plan, kept, own, h2, *g), needs[0]
        found = back_through(dy, x, weight, mask, its.mean, its.sigma, own, *rest)
        like = compute if weight is None else weight.dtype
        return found[0], found[1].to(like) if needs[1] else None, found[2].to(like) if needs[2] else None


def _center_for(plan: Plan, state: State, mean: Tensor, present: Tensor | None) -> Tensor:
    if plan.call.config.center != "running":
        return fixed_center(plan.call.config.center, mean)
    found: Tensor = torch.ops.streamnorm.center(mean, present, *plan.prepared, state.mean, state.seen)
    return found


def _pass_on(
    plan: Plan, kept: Tensor, own: Moments, h2: H2, grad_mean: Tensor, grad_sigma: Tensor
) -> tuple[Tensor, Tensor]:
    g = torch.stack([grad_mean, grad_sigma]).to(kept.dtype).reshape(h2.grads.short.shape)
    streams = [getattr(h2.grads, part) for part in PARTS]
    g_hat = torch.ops.streamnorm.push_gradients_(g, kept, *plan.prepared, *streams)
    return share_among_samples(g_hat.reshape(2, *grad_mean.shape).to(grad_mean.dtype), own)


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
    call = backends.signature_of(config, x, weight, bias, mask, state.mean.dtype, compiled=True)
    plan = Plan(call, _OPERATORS, (tag, config.text, backends.among))
    return Normalize.apply(x, weight, bias, mask, Call(plan, H1(state), H2(state.grads), begins=begins))  # type: ignore[no-untyped-call, no-any-return]


@torch.no_grad()
def _center(
    mean: Tensor, present: Tensor | None, tag: Tensor, text: str, among: str, running: Tensor, seen: Tensor
) -> Tensor:
    entry = replay.begin(~int(tag), False)  # another number than that of the push
    if entry is not None and entry.again:
        found: Tensor = entry.kept.clone()
        return found
    config = from_text(text)
    streams = backends.streams(config, mean.dtype, mean.device.type, present is not None, among)
    found = streams.center(config, running, seen, mean, present)
    if entry is not None:
        entry.kept = found.clone()
    return found


@torch.no_grad()
def _push_statistics(
    mean: Tensor,
    sigma: Tensor,
    elements: Tensor | None,
    present: Tensor | None,
    samples: Tensor | None,
    number: int,
    batch: int,
    channels: int,
    begins: bool,
    weight: Tensor | None,
    tag: Tensor,
    text: str,
    among: str,
    *h1: Tensor,
) -> Tensor:
    caller = int(tag)
    entry = replay.begin(caller, True)
    if entry is not None and entry.again:
        kept: Tensor = entry.kept.clone()
        return kept
    config, layer = from_text(text), layer_of(caller)
    if layer is not None:
        layer._on_forward(weight)
        if layer._folds_alike:
            state = from_h1(h1)
            write(state, fold_statistics(config, state), H1_FIELDS)
    counts = number if elements is None else elements, present, batch if samples is None else samples
    streams = backends.streams(config, mean.dtype, mean.device.type, present is not None, among)
    kept = streams.forward(config, h1, Measured(mean, sigma, *counts, channels, begins), _memo_of(layer))
    if layer is not None and layer._live is not None:
        layer._follow(tested(config, from_h1(h1)))
    if entry is not None:
        entry.kept = kept.clone()
    return kept


@torch.no_grad()
def _push_gradients(g: Tensor, kept: Tensor, tag: Tensor, text: str, among: str, *h2: Tensor) -> Tensor:
    config, layer = from_text(text), layer_of(int(tag))
    if layer is not None:
        layer._on_backward()
        if layer._folds_alike:
            grads, its = Stream(*h2), from_vector(kept.to(torch.float64), tuple(g.shape[1:]))
            write_stream(grads, fold_gradients(config, grads, its.window, its.total))
    streams = backends.streams(config, g.dtype, g.device.type, False, among)
    return streams.backward(config, h2, kept, g, _memo_of(layer))


def _memo_of(layer: Any) -> dict[Any, Any]:
    return {} if layer is None else layer.__dict__.setdefault("_memo", {})


def _center_like(mean: Tensor, *_: Any) -> Tensor:
    _refuse_repetition()
    return mean.new_empty((1, *mean.shape[1:]))


def _kept_like(mean: Tensor, *rest: Any) -> Tensor:
    _refuse_repetition()
    state = from_h1(rest[-len(H1_FIELDS) :])
    return state.mean.new_empty(2 * state.mean.numel() + NUMBERS)


def _gradients_like(g: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(g)


def _refuse_repetition() -> None:
    if compat.repeats_in_backward():
        raise RuntimeError(
            "the compiler would repeat a streaming layer in backward from a state that has moved on: compile inside "
            "the checkpoint, as in checkpoint(torch.compile(segment), x, use_reentrant=False)"
        )


for _name, _body, _shape in (
    ("center", _center, _center_like),
    ("push_statistics_", _push_statistics, _kept_like),
    ("push_gradients_", _push_gradients, _gradients_like),
):
    _LIBRARY.impl(_name, _body, "CompositeExplicitAutograd")
    torch.library.register_fake(f"streamnorm::{_name}", _shape, lib=_LIBRARY)
