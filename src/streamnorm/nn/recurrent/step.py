"""The machinery of recurrent layers: what a step is, how products are taken, and the loop over a packed sequence.

A sequence is kept packed, as `PackedSequence` does: the samples sorted by falling length, the rows of each timestep one
after the other, so that a sample that has ended is simply not there. Padding is dropped, never masked.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.grad import conv2d_weight

from .dispatch import fuses_sequence
from .fused import SequencePlan, refuse_second_derivative, stream_sequence
from .streaming import StreamingNorm
from .transforms import transformed

Factory = Callable[..., nn.Module]  # norm(hidden_size, device=..., dtype=...)
State = tuple[Tensor, ...]
Recur = Callable[[int, Tensor], list[Tensor]]  # group of gates, hidden state -> its products, normalized
Activation = Callable[[Tensor], Tensor]


class Kind(NamedTuple):
    """What is recurrent: the gates, in the order of torch.nn, and one step."""

    gates: int
    groups: tuple[int, ...]  # how many gates share one recurrent product, in order
    states: int
    advance: Callable[[list[Tensor], State, Recur, Activation, Activation], State]


def _rnn(x: list[Tensor], state: State, recur: Recur, f: Activation, cell: Activation) -> State:
    """h_t = f(N(W_x x_t) + N(W_h h_{t-1}))"""
    (h,) = state
    return (f(x[0] + recur(0, h)[0]),)


def _gru(x: list[Tensor], state: State, recur: Recur, f: Activation, cell: Activation) -> State:
    """The paper's GRU, which resets the hidden state before its matrix product."""
    (h,) = state
    r, z = (torch.sigmoid(a + b) for a, b in zip(x[:2], recur(0, h), strict=True))
    new = f(x[2] + recur(1, h * r)[0])
    return (z * new + (1 - z) * h,)


def _gru_reset_after(x: list[Tensor], state: State, recur: Recur, f: Activation, cell: Activation) -> State:
    """torch's GRU, which resets the product: h_t = (1 - z) * new + z * h, in torch's order of operations."""
    (h,) = state
    of_r, of_z, of_new = recur(0, h)
    r, z = torch.sigmoid(x[0] + of_r), torch.sigmoid(x[1] + of_z)
    new = f(x[2] + r * of_new)
    return ((h - new) * z + new,)


def _lstm(x: list[Tensor], state: State, recur: Recur, f: Activation, cell: Activation) -> State:
    h, c = state
    i, forget, g, o = (a + b for a, b in zip(x, recur(0, h), strict=True))
    c = torch.sigmoid(forget) * c + torch.sigmoid(i) * f(g)
    return torch.sigmoid(o) * f(cell(c)), c


RNN_KIND = Kind(1, (1,), 1, _rnn)
GRU_KIND = Kind(3, (2, 1), 1, _gru)
GRU_RESET_AFTER_KIND = Kind(3, (3,), 1, _gru_reset_after)
LSTM_KIND = Kind(4, (4,), 2, _lstm)


@dataclass(frozen=True)
class Linear:
    """Matrix products: activations are `(N, features)`."""

    def weight_shape(self, out_features: int, in_features: int) -> tuple[int, ...]:
        return out_features, in_features

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, weight, bias)

    def add(self, z: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return torch.addmm(z, x, weight.t())

    def weight_gradient(self, x: Tensor, dy: Tensor, shape: torch.Size) -> Tensor:
        return dy.t() @ x


@dataclass(frozen=True)
class Convolution:
    """Convolutions that keep the size: activations are `(N, channels, H, W)`."""

    kernel_size: int

    def weight_shape(self, out_channels: int, in_channels: int) -> tuple[int, ...]:
        return out_channels, in_channels, self.kernel_size, self.kernel_size

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.conv2d(x, weight, bias, padding=self.kernel_size // 2)

    def add(self, z: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return z + self(x, weight)

    def weight_gradient(self, x: Tensor, dy: Tensor, shape: torch.Size) -> Tensor:
        grad = conv2d_weight(x, shape, dy, padding=self.kernel_size // 2)  # type: ignore[no-untyped-call]
        return cast(Tensor, grad)


Product = Linear | Convolution


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
        return tuple(torch.cat(list(group)) for group in _grouped(parts, lengths))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        refuse_second_derivative("recurrent layers of streamnorm", ", or use a cell in a loop")
        for each, saved in zip(ctx.used, _grouped(ctx.saved_tensors, ctx.groups), strict=True):
            each[:] = saved
        rows = _grouped(ctx.rows, ctx.lengths)
        return None, None, *(part for g, n in zip(gradients, rows, strict=True) for part in torch.split(g, list(n)))


def _grouped(values: Sequence[Any], lengths: Sequence[int]) -> list[Sequence[Any]]:
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    return [values[start : start + length] for start, length in zip(starts, lengths, strict=True)]


class Norms(nn.Module):
    """One norm per product and gate of a layer, and one for the cell state if asked for."""

    def __init__(
        self, norm: Factory, gates: int, hidden_size: int, cell: bool, device: Any, dtype: torch.dtype | None
    ) -> None:
        super().__init__()

        def make() -> nn.Module:
            made = norm(hidden_size, device=device, dtype=dtype)
            if not isinstance(made, nn.Module) or "mask" not in signature(made.forward).parameters:
                raise TypeError(
                    f"norm made {type(made).__name__}, which is not called as norm(x, mask=None, step=0): use a norm "
                    "of streamnorm, such as SampleNorm for layer norm"
                )
            return made

        self.x = nn.ModuleList(make() for _ in range(gates))
        self.h = nn.ModuleList(make() for _ in range(gates))
        self.cell = make() if cell else None


class Gates:
    """The products of one layer and direction, split into gates and normalized."""

    def __init__(
        self, kind: Kind, product: Product, weight_hh: Tensor, bias_hh: Tensor | None, norms: Norms | None, size: int
    ) -> None:
        self.kind, self.product, self.norms, self.size = kind, product, norms, size
        self.weight = weight_hh
        rows = [group * size for group in kind.groups]
        self.weights = torch.split(weight_hh, rows)
        self.biases = [None] * len(rows) if bias_hh is None else list(torch.split(bias_hh, rows))
        self.norms_h = [None] * len(rows) if norms is None else _grouped(list(norms.h), kind.groups)

    def of_input(self, products: Tensor, mask: Tensor | None, step: int) -> list[Tensor]:
        return self._normalized(products, None if self.norms is None else self.norms.x, mask, step)

    def of_hidden(self, group: int, products: Tensor, mask: Tensor | None, step: int) -> list[Tensor]:
        return self._normalized(products, self.norms_h[group], mask, step)

    def _normalized(
        self, products: Tensor, norms: Iterable[nn.Module] | None, mask: Tensor | None, step: int
    ) -> list[Tensor]:
        gates = torch.split(products, self.size, 1)
        if norms is None:
            return list(gates)
        return [norm(gate, mask=mask, step=step) for norm, gate in zip(norms, gates, strict=True)]

    def cell(self, mask: Tensor | None, step: int) -> Activation:
        if self.norms is None or self.norms.cell is None:
            return lambda c: c
        norm = self.norms.cell
        return lambda c: cast(Tensor, norm(c, mask=mask, step=step))


def run_packed(
    gates: Gates, products: Tensor, sizes: Sequence[int], start: State, f: Activation, reverse: bool, late: bool
) -> tuple[Tensor, State]:
    """One layer in one direction over a packed sequence; `products` are those of the input, all timesteps at once.

    `sizes[t]`: samples that reach timestep t, never rising. `late`: the gradient of the recurrent weight is taken after
    the loop, which rules out second derivatives. Returns the packed outputs, and the state of each sample after its own
    last step.
    """
    # The compiler unrolls the loop; each norm is an operator to it.
    compiling = torch.compiler.is_compiling()
    norms = None if compiling else _fused(gates, products, sizes, start)
    if norms:
        return _run_fused(gates, norms, products, sizes, start[0], f, reverse)
    steps = range(len(sizes))
    inputs = torch.split(products, list(sizes))
    late = late and not compiling and not transformed() and torch.is_grad_enabled() and gates.weights[0].requires_grad
    used: list[list[Any]] = [[None] * len(sizes) for _ in gates.weights]
    zeros = [_late_zeros(gates, group, used[group], products, sizes) if late else () for group in range(len(used))]
    outputs: list[Any] = [None] * len(sizes)
    ended: list[State] = []
    state = tuple(s[:0] for s in start) if reverse else start
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


def _fused(gates: Gates, products: Tensor, sizes: Sequence[int], start: State) -> list[StreamingNorm] | None:
    """The norms, if the kernels compute the same as the loop over timesteps, hooks and all; else None."""
    kind, size = gates.kind, gates.size
    if kind not in (RNN_KIND, GRU_KIND) or gates.product != Linear() or gates.norms is None:
        return None
    # The kernels know these sizes, and take the tensors at their word.
    wide, shapes = kind.gates * size, (products.shape, gates.weight.shape, start[0].shape)
    if shapes != ((sum(sizes), wide), (wide, size), (max(sizes), size)) or any(b is not None for b in gates.biases):
        return None
    norms = [*gates.norms.x, *gates.norms.h]
    if len(set(norms)) < 2 * kind.gates:  # one norm for several products is called in another order
        return None
    if not all(type(norm) is StreamingNorm and not has_hooks(norm) and norm._scaler is None for norm in norms):
        return None
    if any(norm.num_features != size for norm in norms):
        return None
    settings = norms[0].fused_settings()
    if settings is None or any((n.fused_settings(), n.collects) != (settings, norms[0].collects) for n in norms):
        return None
    if torch.is_grad_enabled():
        # Evaluation can be differentiated twice on the plain path. And where nothing that leads to a norm needs a
        # gradient, nor gain and bias, none is streamed.
        reached = products.requires_grad and gates.weight.requires_grad
        if not norms[0].collects or not (reached or all(norm.affine and norm.weight.requires_grad for norm in norms)):
            return None
    return norms if fuses_sequence(products, start[0], gates.weight) else None


def has_hooks(module: nn.Module) -> bool:
    """Whether calling the module may do more than its class says."""
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    everywhere = ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks")
    return any(hooks) or "forward" in vars(module) or any(getattr(nn.modules.module, name, ()) for name in everywhere)


def _run_fused(
    gates: Gates, norms: list[StreamingNorm], products: Tensor, sizes: Sequence[int], start: Tensor, f: Any, back: bool
) -> tuple[Tensor, State]:
    begun, settings = [norm.begin_call() for norm in norms], cast(bytes, norms[0].fused_settings())
    states = [each.state for each in begun]
    receivers = [norm.receiver(each) for norm, each in zip(norms, begun, strict=True)]
    training = begun[0].collects
    plan = SequencePlan(settings, gates.kind.gates, f is torch.relu, training, back, sizes, states, receivers)
    gains, biases = [norm.weight for norm in norms], [norm.bias for norm in norms]
    output, final = stream_sequence(products, start, gates.weight, gains, biases, plan)
    return output, (final,)


def _late_zeros(gates: Gates, group: int, used: list[Any], like: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """What is added to the products of a group at each timestep: the bias, if any, and the way to the gradient."""
    weight, bias = gates.weights[group], gates.biases[group]
    shape = (like.shape[0], weight.shape[0], *like.shape[2:])
    zeros = cast(Tensor, _LateWeight.apply(weight, used, gates.product, shape))  # type: ignore[no-untyped-call]
    if bias is not None:
        zeros = zeros + bias.reshape(-1, *(1 for _ in shape[2:]))
    return torch.split(zeros, list(sizes))
