"""A recurrent layer over a packed sequence: a loop over timesteps, or one call of a backend that has them all.

A sequence is kept packed, as `PackedSequence` does: the samples sorted by falling length, the rows of each timestep one
after the other, so that a sample that has ended is simply not there. Padding is dropped, never masked.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ... import backends
from ...engine.compat import has_hooks
from ...engine.context import refuse_second_derivative, transformed
from ...engine.function import run_sequence
from ..ranked import StreamingNorm1d
from ..streaming import StreamingNorm
from .step import GRU_KIND, LSTM_KIND, RNN_KIND, Activation, Gates, Hidden, Linear, Product, grouped


class _LateWeight(torch.autograd.Function):
    """A zero for every product of a weight in a loop; its gradient is the gradient of all products at once.

    The loop computes zero_t + h_t W with W detached, so the steps carry gradient to h_t alone, and the gradient of W is
    one product after the loop instead of one per timestep. `_Finish` hands over the h_t in `used` during backward.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, used: list[Tensor], product: Product, shape: tuple[int, ...]) -> Tensor:
        ctx.used, ctx.product, ctx.weight_shape = used, product, weight.shape
        return weight.new_zeros(()).expand(shape)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        h = torch.cat(ctx.used).to(dy.dtype)
        ctx.used.clear()
        return ctx.product.weight_gradient(h, dy, ctx.weight_shape), None, None, None


class _Finish(torch.autograd.Function):
    """The end of a loop with late weights: joins the outputs, and keeps the h_t for the gradients of the weights.

    Its backward runs before that of any step. The h_t are saved by autograd, so they are freed with the graph and a
    change in place is noticed.
    """

    @staticmethod
    def forward(ctx: Any, used: list[list[Tensor]], lengths: list[int], *parts: Tensor) -> tuple[Tensor, ...]:
        """`lengths`: how many of the `parts` are joined to each result."""
        ctx.used, ctx.groups, ctx.lengths = used, [len(each) for each in used], lengths
        ctx.rows = [len(part) for part in parts]
        ctx.save_for_backward(*(h for each in used for h in each))
        for each in used:
            each.clear()
        return tuple(torch.cat(list(group)) for group in grouped(parts, lengths))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        refuse_second_derivative("recurrent layers of streamnorm", ", or use a cell in a loop")
        for each, saved in zip(ctx.used, grouped(ctx.saved_tensors, ctx.groups), strict=True):
            each[:] = saved
        rows = grouped(ctx.rows, ctx.lengths)
        return None, None, *(part for g, n in zip(gradients, rows, strict=True) for part in torch.split(g, list(n)))


def run_packed(
    gates: Gates, products: Tensor, sizes: Sequence[int], start: Hidden, f: Activation, reverse: bool, late: bool
) -> tuple[Tensor, Hidden]:
    """One layer in one direction over a packed sequence; `products` are those of the input, all timesteps at once.

    `sizes[t]`: samples that reach timestep t, never rising. `late`: the gradient of the recurrent weight is taken after
    the loop, which rules out second derivatives. Returns the packed outputs, and the state of each sample after its own
    last step.
    """
    compiling = torch.compiler.is_compiling()  # the compiler unrolls the loop; each norm is an operator to it
    whole = None if compiling else _in_one_call(gates, products, sizes, start, f, reverse)
    if whole is not None:
        return whole
    steps = range(len(sizes))
    inputs = torch.split(products, list(sizes))
    late = late and not compiling and not transformed() and torch.is_grad_enabled() and gates.weights[0].requires_grad
    used: list[list[Any]] = [[None] * len(sizes) for _ in gates.weights]
    zeros = [_late_zeros(gates, group, used[group], products, sizes) if late else () for group in range(len(used))]
    outputs: list[Any] = [None] * len(sizes)
    ended: list[Hidden] = []
    state = tuple(s[:0] for s in start) if reverse else start
    gates.first = len(sizes) - 1 if reverse else 0
    for t in reversed(steps) if reverse else steps:
        here = state[0].shape[0]
        if sizes[t] < here:
            ended.append(tuple(s[sizes[t] :] for s in state))
            state = tuple(s[: sizes[t]] for s in state)
        elif sizes[t] > here:  # going backward in time, samples begin at their own last step
            state = tuple(torch.cat([s, s0[here : sizes[t]]]) for s, s0 in zip(state, start, strict=True))

        def recur(group: int, h: Tensor, t: int = t) -> list[Tensor]:
            weight = gates.weights[group]
            if late:
                used[group][t] = h.detach()
                product = gates.product.add(zeros[group][t], h, weight.detach())
            else:
                product = gates.product(h, weight, gates.biases[group])
            return gates.of_hidden(group, product, None, t)

        state = gates.kind.advance(gates.of_input(inputs[t], None, t), state, recur, f, gates.cell(None, t))
        outputs[t] = state[0]
    ended.append(state)
    parts = [outputs, *(list(part) for part in zip(*reversed(ended), strict=True))]
    if late:
        joined = _Finish.apply(used, [len(part) for part in parts], *(each for part in parts for each in part))  # type: ignore[no-untyped-call]
    else:
        joined = tuple(torch.cat(part) for part in parts)
    output, *final = joined
    return output, tuple(final)


class Whole(NamedTuple):
    """A sequence that a backend computes in one call, as the loop would, hooks and all."""

    backend: Any
    norms: list[Any]
    call: backends.Sequence
    tensors: tuple[Tensor, Tensor, Tensor]  # products of the input, first state, recurrent weight
    affine: list[Any]


def _in_one_call(
    gates: Gates, products: Tensor, sizes: Sequence[int], start: Hidden, f: Activation, reverse: bool
) -> tuple[Tensor, Hidden] | None:
    """The whole sequence, if a backend serves it; else None."""
    whole = served(gates, products, sizes, start, f, reverse)
    if isinstance(whole, str):
        return None
    runner = whole.backend.sequences
    opened = [norm._begin_sequence(runner) for norm in whole.norms]
    streamed = [state for state, _ in opened], [receive for _, receive in opened]
    output, final = run_sequence(*whole.tensors, whole.affine, whole.call, runner, *streamed)
    for norm in whole.norms:
        if norm._live is not None and norm._collects:
            norm._follow()
    return output, final.unbind() if len(start) > 1 else (final,)


def served(
    gates: Gates, products: Tensor, sizes: Sequence[int], start: Hidden, f: Activation, reverse: bool
) -> Whole | str:
    """How a sequence is computed in one call; or why it takes the loop, in a few words."""
    norms = _alike(gates, products, sizes, start)
    if isinstance(norms, str):
        return norms
    training = norms[0]._collects
    if torch.is_grad_enabled():
        if not training:
            return "evaluation can be differentiated twice"
        # Where nothing that leads to a norm needs a gradient, nor gain and bias, none is streamed.
        reached = products.requires_grad and gates.weight.requires_grad
        if not (reached or all(norm.affine and norm.weight.requires_grad for norm in norms)):
            return "some norm gets no gradient"
        # c may be all that the loss reads; then only the gradient of the weight reaches the last output gate.
        if gates.kind.states > 1 and not gates.weight.requires_grad:
            return "with a frozen weight some gate may get no gradient"
    tested = not norms[0].training and norms[0].eval_memory > 0
    kind = gates.kind.gates, gates.normed_cell, f is torch.relu, reverse, training, tested, gates.goes_on
    call = backends.Sequence(*kind, tuple(sizes), norms[0].config)
    affine = [norm.weight for norm in norms] + [norm.bias for norm in norms]
    tensors = products, torch.stack(start) if len(start) > 1 else start[0], gates.weight
    why: dict[str, str] = {}
    for backend in backends.active().backends:
        runner = backend.sequences
        if runner is None:
            continue
        declined = runner.declines(call, tensors, affine)
        if declined is None and all(norm._look(runner) is not None for norm in norms):
            return Whole(backend, norms, call, tensors, affine)
        why[backend.name] = declined or "the state of a norm is not one that it can write into"
    if len(why) > 1:
        return "; ".join(f"{name}: {reason}" for name, reason in why.items())
    return next(iter(why.values()), "no backend has whole sequences")


def _alike(gates: Gates, products: Tensor, sizes: Sequence[int], start: Hidden) -> list[Any] | str:
    """The norms, if all of them stream in the same way and nothing else hangs on their calls; else why not."""
    kind, size = gates.kind, gates.size
    if kind not in (RNN_KIND, GRU_KIND, LSTM_KIND) or gates.product != Linear():
        return "backends have the RNN, the paper's GRU and the LSTM on vectors"
    if gates.norms is None or transformed():
        return "it has no norms, or is transformed"
    # Backends know these sizes, and take the tensors at their word.
    wide, shapes = kind.gates * size, [tensor.shape for tensor in (products, gates.weight, *start)]
    known = [(sum(sizes), wide), (wide, size), *[(max(sizes), size)] * kind.states]
    if shapes != known or any(bias is not None for bias in gates.biases):
        return "a weight is of another size, or there is a bias beside those of the norms"
    norms: list[Any] = [*gates.norms.x, *gates.norms.h, *([gates.norms.cell] if gates.normed_cell else [])]
    if len(set(norms)) < len(norms):  # called in another order
        return "one norm serves several products"
    if not all(type(norm) in (StreamingNorm, StreamingNorm1d) and norm.num_features == size for norm in norms):
        return "not all norms are a StreamingNorm"
    if not all(not has_hooks(norm) and norm._scaler is None for norm in norms):
        return "a norm has hooks or a scaler"
    first = norms[0]
    same = all((norm.config, norm._collects) == (first.config, first._collects) for norm in norms)
    return norms if same else "the norms have different settings or modes"


def explained(gates: Gates, products: Tensor, batch: int, f: Activation) -> list[str]:
    """What serves a sequence without padding, and why no backend has all of it, in sentences."""
    start = tuple(products.new_zeros(batch, gates.size, *products.shape[2:]) for _ in range(gates.kind.states))
    found = served(gates, products, [batch] * (len(products) // batch), start, f, False)
    if not isinstance(found, str):
        return [f"{found.backend.name} serves whole sequences of this layer."]
    said = [f"A loop over timesteps serves this layer: {found}."]
    if gates.norms is None:
        return said
    one: Any = gates.norms.x[0]
    return [*said, f"Of its norms: {backends.explain(one, gates.split(products[:batch])[0])}"]


def _late_zeros(gates: Gates, group: int, used: list[Any], like: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """What is added to the products of a group at each timestep: the bias, if any, and the way to the gradient."""
    weight, bias = gates.weights[group], gates.biases[group]
    shape = (like.shape[0], weight.shape[0], *like.shape[2:])
    zeros = cast(Tensor, _LateWeight.apply(weight, used, gates.product, shape))  # type: ignore[no-untyped-call]
    if bias is not None:
        zeros = zeros + bias.reshape(-1, *(1 for _ in shape[2:]))
    return torch.split(zeros, list(sizes))
