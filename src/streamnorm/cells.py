"""Recurrent cells for those who write their own loop, and what cells and sequence layers share."""

from collections.abc import Sequence
from math import prod, sqrt
from typing import Any

import torch
from torch import Tensor, nn

from .base import Device, check_count, check_dtype, mask_over_channels
from .moments import masked
from .recurrence import GRU_KIND, LSTM_KIND, RNN_KIND, Factory, Gates, Kind, Linear, Norms, Product, State
from .streaming import StreamingNorm

ACTIVATIONS = {"tanh": torch.tanh, "relu": torch.relu}


class RecurrentBase(nn.Module):
    """Weights and norms under the names of torch.nn; the sizes are in features or channels."""

    kind: Kind

    def __init__(
        self,
        product: Product,
        input_size: int,
        hidden_size: int,
        norm: Factory | None,
        nonlinearity: str,
        bias: bool,
        cell_norm: bool,
        suffixes: Sequence[tuple[str, int]],  # of each layer and direction: its name and the size of its input
        device: Device,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        check_dtype(dtype)
        if nonlinearity not in ACTIVATIONS:
            raise ValueError(f'nonlinearity={nonlinearity!r}: use "tanh" or "relu"')
        if norm is not None and not callable(norm):
            raise TypeError(
                f"norm={norm!r}: pass a class such as StreamingNorm, a function (size, device, dtype), or None"
            )
        if cell_norm and norm is None:
            raise ValueError("cell_norm=True needs a norm")
        self.product = product
        self.input_size, self.hidden_size = input_size, hidden_size
        self.nonlinearity = nonlinearity
        self.bias = bias and norm is None  # with a norm, its own bias serves
        rows = self.kind.gates * hidden_size
        for suffix, size in suffixes:
            for name, columns in (("weight_ih", size), ("weight_hh", hidden_size)):
                weight = torch.empty(product.weight_shape(rows, columns), device=device, dtype=dtype)
                self.register_parameter(name + suffix, nn.Parameter(weight))
            for name in ("bias_ih", "bias_hh"):
                vector = nn.Parameter(torch.empty(rows, device=device, dtype=dtype)) if self.bias else None
                self.register_parameter(name + suffix, vector)
        for suffix, _ in suffixes:
            norms = None if norm is None else Norms(norm, self.kind.gates, hidden_size, cell_norm, device, dtype)
            self.add_module("norms" + suffix, norms)
        self._init_weights()

    def _init_weights(self) -> None:
        """Uniform within 1/sqrt(size of what enters a hidden unit from the hidden state), as torch.nn does."""
        bound = 1 / sqrt(prod(self.product.weight_shape(1, self.hidden_size)))
        for parameter in self.parameters(recurse=False):
            nn.init.uniform_(parameter, -bound, bound)

    def reset_parameters(self) -> None:
        """New weights; norms as new, their statistics included."""
        self._init_weights()
        for module in self.modules():
            reset = getattr(module, "reset_parameters", None)
            if module is not self and callable(reset):
                reset()

    def _gates(self, suffix: str) -> Gates:
        weight, bias, norms = (getattr(self, name + suffix) for name in ("weight_hh", "bias_hh", "norms"))
        return Gates(self.kind, self.product, weight, bias, norms, self.hidden_size)

    def _input_products(self, x: Tensor, suffix: str) -> Tensor:
        weight, bias = getattr(self, "weight_ih" + suffix), getattr(self, "bias_ih" + suffix)
        if x.is_floating_point():
            return self.product(x, weight, bias)
        products = nn.functional.embedding(x, weight.t().contiguous())  # the columns that one-hot vectors would pick
        return products if bias is None else products + bias

    def _check_input(self, x: Tensor, dims: tuple[int, ...], features: int, layout: str) -> None:
        """`dims`: how many dimensions there may be; `features`: which of them holds the features."""
        if not isinstance(x, Tensor) or not x.is_floating_point():
            kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(f"input is {kind}: pass a floating point tensor {layout}")
        if x.ndim not in dims:
            raise ValueError(f"input of shape {tuple(x.shape)}: expected {layout}")
        if x.shape[features] != self.input_size:
            raise ValueError(f"input of shape {tuple(x.shape)} has {x.shape[features]} features, not {self.input_size}")

    def _states(self, hx: Any, shape: tuple[int, ...], x: Tensor) -> State:
        """The initial state, checked; zeros by default."""
        if not x.is_floating_point():
            x = next(self.parameters())  # indices have the type of no state
        if hx is None:
            return tuple(x.new_zeros(shape) for _ in range(self.kind.states))
        states = tuple(hx) if isinstance(hx, tuple | list) else (hx,)
        if not all(isinstance(s, Tensor) for s in states):
            raise TypeError(f"initial state is {type(hx).__name__}: pass {self.kind.states} tensor(s) of shape {shape}")
        if len(states) != self.kind.states or any(tuple(s.shape) != shape for s in states):
            got = ", ".join(str(tuple(s.shape)) for s in states)
            raise ValueError(f"initial state of shape {got}: expected {self.kind.states} x {shape}")
        for s in states:
            typed = s.dtype == x.dtype or (s.is_floating_point() and torch.is_autocast_enabled(x.device.type))
            if s.device != x.device or not typed:
                raise TypeError(f"initial state is {s.dtype} on {s.device}, the input {x.dtype} on {x.device}")
        return states

    def _packaged(self, state: State) -> Any:
        return state if self.kind.states > 1 else state[0]


class _Cell(RecurrentBase):
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
        self._check_input(input, (1, 2), -1, f"(N, {self.input_size}) or ({self.input_size},)")
        x = input.unsqueeze(0) if input.ndim == 1 else input
        before = self._states(hx, (*input.shape[:-1], self.hidden_size), input)
        before = tuple(s.unsqueeze(0) for s in before) if input.ndim == 1 else before
        state, rows = before, None
        if mask is not None:  # what a sample that takes no step holds may be anything, NaN included
            rows = mask_over_channels(mask, x)
            mask = rows.squeeze(1)
            x, state = masked(x, rows), tuple(masked(s, rows) for s in state)
        gates = self._gates("")

        def recur(group: int, h: Tensor) -> list[Tensor]:
            return gates.of_hidden(group, self.product(h, gates.weights[group], gates.biases[group]), mask, step)

        products = gates.of_input(self._input_products(x, ""), mask, step)
        after = self.kind.advance(products, state, recur, ACTIVATIONS[self.nonlinearity], gates.cell(mask, step))
        if rows is not None:
            after = tuple(torch.where(rows, new, old) for new, old in zip(after, before, strict=True))
        return self._packaged(tuple(s.squeeze(0) for s in after) if input.ndim == 1 else after)

    def extra_repr(self) -> str:
        return f"{self.input_size}, {self.hidden_size}, nonlinearity={self.nonlinearity!r}"


class _PlainCell(_Cell):
    """Cells whose state is the hidden state alone."""

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        norm: Factory | None = StreamingNorm,
        nonlinearity: str = "tanh",
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(input_size, hidden_size, norm, nonlinearity, bias, False, device, dtype)


class RNNCell(_PlainCell):
    """h' = f(N(W_x x) + N(W_h h)), each product with its own norm; see `RNN`.

    `cell(input, hx=None, mask=None, step=0)`: input `(N, input_size)`, state `(N, hidden_size)`. `step` is the
    timestep, for `TimeSpecificNorm`.

    >>> cell, h = RNNCell(3, 5), None
    >>> for t in range(4):
    ...     h = cell(torch.randn(2, 3), h, step=t)
    >>> h.shape
    torch.Size([2, 5])
    """

    kind = RNN_KIND


class GRUCell(_PlainCell):
    """One step of the paper's GRU, which resets the hidden state before its matrix product; see `GRU`.

    >>> GRUCell(3, 5)(torch.randn(2, 3)).shape
    torch.Size([2, 5])
    """

    kind = GRU_KIND


class LSTMCell(_Cell):
    """One step of a normalized LSTM, state `(h, c)`; see `LSTM`.

    >>> h, c = LSTMCell(3, 5, cell_norm=True)(torch.randn(2, 3))
    >>> h.shape, c.shape
    (torch.Size([2, 5]), torch.Size([2, 5]))
    """

    kind = LSTM_KIND

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        norm: Factory | None = StreamingNorm,
        cell_norm: bool = False,
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(input_size, hidden_size, norm, "tanh", bias, cell_norm, device, dtype)
