"""One step of a recurrent layer: its gates, its products, and a norm for each of them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.grad import conv2d_weight

from ..state import Stateful

Factory = Callable[..., nn.Module]  # norm(hidden_size, device=..., dtype=...)
Hidden = tuple[Tensor, ...]
Recur = Callable[[int, Tensor], list[Tensor]]  # group of gates, hidden state -> its products, normalized
Activation = Callable[[Tensor], Tensor]


class Kind(NamedTuple):
    """What is recurrent: the gates, in the order of torch.nn, and one step."""

    gates: int
    groups: tuple[int, ...]  # how many gates share one recurrent product, in order
    states: int  # tensors that are carried from step to step: h, and c of an LSTM
    advance: Callable[[list[Tensor], Hidden, Recur, Activation, Activation], Hidden]


def _rnn(x: list[Tensor], hidden: Hidden, recur: Recur, f: Activation, cell: Activation) -> Hidden:
    """h_t = f(N(W_x x_t) + N(W_h h_{t-1}))"""
    (h,) = hidden
    return (f(x[0] + recur(0, h)[0]),)


def _gru(x: list[Tensor], hidden: Hidden, recur: Recur, f: Activation, cell: Activation) -> Hidden:
    """The paper's GRU, which resets the hidden state before its matrix product."""
    (h,) = hidden
    r, z = (torch.sigmoid(a + b) for a, b in zip(x[:2], recur(0, h), strict=True))
    new = f(x[2] + recur(1, h * r)[0])
    return (z * new + (1 - z) * h,)


def _gru_reset_after(x: list[Tensor], hidden: Hidden, recur: Recur, f: Activation, cell: Activation) -> Hidden:
    """torch's GRU, which resets the product: h_t = (1 - z) * new + z * h, in torch's order of operations."""
    (h,) = hidden
    of_r, of_z, of_new = recur(0, h)
    r, z = torch.sigmoid(x[0] + of_r), torch.sigmoid(x[1] + of_z)
    new = f(x[2] + r * of_new)
    return ((h - new) * z + new,)


def _lstm(x: list[Tensor], hidden: Hidden, recur: Recur, f: Activation, cell: Activation) -> Hidden:
    h, c = hidden
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


def grouped(values: Sequence[Any], lengths: Sequence[int]) -> list[Sequence[Any]]:
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
        self.normed_cell = norms is not None and norms.cell is not None
        self.goes_on, self.first = False, 0  # whether from the state of another sequence; the step that is walked first
        self.kind, self.product, self.norms, self.size = kind, product, norms, size
        self.weight = weight_hh
        rows = [group * size for group in kind.groups]
        self.weights = torch.split(weight_hh, rows)
        self.biases = [None] * len(rows) if bias_hh is None else list(torch.split(bias_hh, rows))
        self.norms_h = [None] * len(rows) if norms is None else grouped(list(norms.h), kind.groups)

    def of_input(self, products: Tensor, mask: Tensor | None, step: int) -> list[Tensor]:
        return self._normalized(products, None if self.norms is None else self.norms.x, mask, step)

    def of_hidden(self, group: int, products: Tensor, mask: Tensor | None, step: int) -> list[Tensor]:
        return self._normalized(products, self.norms_h[group], mask, step)

    def _normalized(
        self, products: Tensor, norms: Iterable[nn.Module] | None, mask: Tensor | None, step: int
    ) -> list[Tensor]:
        if norms is None:
            return list(torch.split(products, self.size, 1))
        pairs = zip(norms, self.split(products), strict=True)
        return [norm(gate, mask=mask, step=self._position(norm, step)) for norm, gate in pairs]

    def split(self, products: Tensor) -> list[Tensor]:
        """The products of each gate, as norms get them."""
        gates = torch.split(products, self.size, 1)
        if products.ndim == 2 or len(gates) == 1:
            return list(gates)
        return [gate.clone() for gate in gates]  # a copy costs less than a norm of images with gaps between them

    def _position(self, norm: nn.Module, step: int) -> int:
        """A streaming norm counts samples at step 0: where a sequence begins that does not go on from another one."""
        if not isinstance(norm, Stateful):
            return step
        return 0 if step == self.first and not self.goes_on else 1

    def cell(self, mask: Tensor | None, step: int) -> Activation:
        if self.norms is None or self.norms.cell is None:
            return lambda c: c
        norm = self.norms.cell
        return lambda c: cast(Tensor, norm(c, mask=mask, step=self._position(norm, step)))
