"""Recurrent cells, for those who write their own loop."""

from typing import TYPE_CHECKING, Any, Generic

import torch
from torch import Tensor

from ...core.statistics import masked
from ...engine.context import Proxy, recorded
from ..base import Device, check_count, mask_over_channels
from ..hints import hinted
from ..streaming import StreamingNorm
from .base import ACTIVATIONS, Carried, EitherGRU, RecurrentBase
from .step import LSTM_KIND, RNN_KIND, Factory, Linear


class _Cell(RecurrentBase, Generic[Carried]):
    """One step, with the arguments of torch.nn's cells."""

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        norm: Factory | None,
        nonlinearity: str,
        bias: bool,
        cell_norm: bool,
        device: Device,
        dtype: torch.dtype | None,
    ) -> None:
        check_count("input_size", input_size)
        check_count("hidden_size", hidden_size)
        names = [("", input_size)]
        super().__init__(Linear(), input_size, hidden_size, norm, nonlinearity, bias, cell_norm, names, device, dtype)

    def forward(self, input: Tensor, hx: Any = None, mask: Tensor | None = None, step: int = 0) -> Any:
        """`mask` `(N,)` is True for samples that take this step; the others keep their state."""
        if isinstance(input, Proxy):
            return recorded(self, input, hx=hx, mask=mask, step=step)
        self._check_input(input, (1, 2), -1, f"(N, {self.input_size}) or ({self.input_size},)")
        x = input.unsqueeze(0) if input.ndim == 1 else input
        meaning = "(hidden_size,)" if input.ndim == 1 else "(N, hidden_size)"
        before = self._states(hx, (*input.shape[:-1], self.hidden_size), meaning, input)
        before = tuple(s.unsqueeze(0) for s in before) if input.ndim == 1 else before
        state, rows = before, None
        if mask is not None:  # what a sample that takes no step holds may be anything, NaN included
            rows = mask_over_channels(mask, x)
            mask = rows.squeeze(1)
            x, state = masked(x, rows), tuple(masked(s, rows) for s in state)
        gates, weight, bias = self._taken("", self.input_size, input)
        self._check_affine()

        def recur(group: int, h: Tensor) -> list[Tensor]:
            return gates.of_hidden(group, self.product(h, gates.weights[group], gates.biases[group]), mask, step)

        products = gates.of_input(self._input_products(x, weight, bias), mask, step)
        after = self.kind.advance(products, state, recur, ACTIVATIONS[self.nonlinearity], gates.cell(mask, step))
        if rows is not None:
            after = tuple(torch.where(rows, new, old) for new, old in zip(after, before, strict=True))
        return self._packaged(tuple(s.squeeze(0) for s in after) if input.ndim == 1 else after)

    if TYPE_CHECKING:

        def __call__(
            self, input: Tensor, hx: Carried | None = None, mask: Tensor | None = None, step: int = 0
        ) -> Carried: ...


@hinted
class RNNCell(_Cell[Tensor]):
    """One step of a normalized recurrent network, called like `torch.nn.RNNCell`; see `RNN`.

    h' = f(N(W_x x) + N(W_h h)), each product with its own norm. Training and evaluation are those of the norms.

    Args:
        input_size: the number of features of the input.
        hidden_size: the number of features of the hidden state.
        bias: of the products, without a norm; norms bring their own.
        nonlinearity: f, "tanh" or "relu".
        norm: makes a norm for each product, as in `RNN`; None for torch's own cell.
        device, dtype: of the parameters.

    Shape:
        - input: `(N, input_size)`, or `(input_size,)` for one sample.
        - hx: `(N, hidden_size)`, or `(hidden_size,)`; zeros if None. The output has the same shape.
        - mask: `(N,)`, True for samples that take this step; the others keep their hidden state.
        - step: the timestep, for `TimeSpecificNorm`.

    Example:
        >>> cell, h = RNNCell(3, 5), None
        >>> for t in range(4):
        ...     h = cell(torch.randn(2, 3), h, step=t)
        >>> h.shape
        torch.Size([2, 5])
    """

    kind = RNN_KIND

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        nonlinearity: str = "tanh",
        *,
        norm: Factory | None = StreamingNorm,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(input_size, hidden_size, norm, nonlinearity, bias, False, device, dtype)


@hinted
class GRUCell(EitherGRU, _Cell[Tensor]):
    """One step of the paper's GRU, which resets the hidden state before its matrix product; see `GRU`.

    r, z = sigmoid(N(W_x x) + N(W_h h)); new = f(N(W_x x) + N(W_h (h * r))); h' = z * new + (1 - z) * h.

    Args:
        reset_after: one step of torch's GRU instead, which is `torch.nn.GRUCell` if `norm=None`.
        input_size, hidden_size, norm, nonlinearity, bias, device, dtype: as in `RNNCell`.

    Shape: as in `RNNCell`.

    Example:
        >>> GRUCell(3, 5)(torch.randn(2, 3)).shape
        torch.Size([2, 5])
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        *,
        norm: Factory | None = StreamingNorm,
        nonlinearity: str = "tanh",
        reset_after: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(input_size, hidden_size, norm, nonlinearity, bias, False, device, dtype)
        self._choose(reset_after)


@hinted
class LSTMCell(_Cell[tuple[Tensor, Tensor]]):
    """One step of a normalized LSTM, called like `torch.nn.LSTMCell`; see `LSTM`.

    i, f, g, o = N(W_x x) + N(W_h h); c' = sigmoid(f) * c + sigmoid(i) * tanh(g); h' = sigmoid(o) * tanh(c').

    Args:
        cell_norm: whether there is a norm on c' inside the last tanh.
        input_size, hidden_size, norm, bias, device, dtype: as in `RNNCell`.

    Shape: as in `RNNCell`; hx and the output are pairs `(h, c)`.

    Example:
        >>> h, c = LSTMCell(3, 5, cell_norm=True)(torch.randn(2, 3))
        >>> h.shape, c.shape
        (torch.Size([2, 5]), torch.Size([2, 5]))
    """

    kind = LSTM_KIND

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        *,
        norm: Factory | None = StreamingNorm,
        cell_norm: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(input_size, hidden_size, norm, "tanh", bias, cell_norm, device, dtype)
