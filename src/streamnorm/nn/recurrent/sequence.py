"""Normalized recurrent layers over sequences: RNN, GRU and LSTM."""

from typing import TYPE_CHECKING, Any, Generic, overload

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from ...engine.context import Proxy, check_memory, recorded
from ..base import Device, check_flag
from ..hints import hinted
from ..streaming import StreamingNorm
from .base import STATE, Carried, EitherGRU
from .packing import checked_packing
from .stacked import SequenceLayer
from .step import LSTM_KIND, RNN_KIND, Factory, Linear


class _Linear(SequenceLayer, Generic[Carried]):
    """Sequences of vectors, in the layouts of torch.nn."""

    def __init__(self, *sizes: int, batch_first: bool, **settings: Any) -> None:
        super().__init__(Linear(), *sizes, **settings)
        self.batch_first = check_flag("batch_first", batch_first)

    def forward(self, input: Tensor | PackedSequence, hx: Any = None, lengths: Any = None) -> tuple[Any, Any]:
        if isinstance(input, Proxy):
            return recorded(self, input, hx=hx, lengths=lengths)
        if isinstance(input, PackedSequence):
            if lengths is not None:
                raise ValueError("a PackedSequence has its lengths: pass lengths= only with a padded tensor")
            self._check_sequence(input.data, (2,), "a PackedSequence of (rows, features)")
            shape = (len(self._suffixes), checked_packing(input), self.hidden_size)
            packed, final = self._packed(input, self._states(hx, shape, STATE + ")", input.data), hx is not None)
            return packed, self._packaged(final)
        layout = "(N, T, features)" if self.batch_first else "(T, N, features)"
        self._check_sequence(input, (2, 3), f"{layout} or (T, features), or a PackedSequence")
        if input.ndim == (2 if input.is_floating_point() else 1):
            output, final = self._unbatched(input, hx, lengths)
            return output, self._packaged(final)
        output, final = self._padded(input.transpose(0, 1) if self.batch_first else input, hx, lengths)
        return output.transpose(0, 1) if self.batch_first else output, self._packaged(final)

    def _check_sequence(self, x: Tensor, dims: tuple[int, ...], layout: str) -> None:
        """`dims`: how many dimensions there may be. Whole numbers stand for one-hot vectors and have one less."""
        if not isinstance(x, Tensor) or x.dtype not in (torch.int32, torch.int64):
            self._check_input(x, dims, -1, layout)
            return
        if x.ndim + 1 not in dims:
            raise ValueError(f"indices of shape {tuple(x.shape)}: expected {layout}, without the features")
        check_memory(input=x)
        if x.numel() and not (0 <= int(x.min()) <= int(x.max()) < self.input_size):
            raise ValueError(
                f"indices from {int(x.min())} to {int(x.max())}: they stand for one-hot vectors of input_size="
                f"{self.input_size} and must be from 0 to {self.input_size - 1}"
            )

    def flatten_parameters(self) -> None:
        """Nothing: weights need no order in memory here. torch.nn has it, and code written for that calls it."""

    if TYPE_CHECKING:

        @overload
        def __call__(self, input: Tensor, hx: Carried | None = None, lengths: Any = None) -> tuple[Tensor, Carried]: ...

        @overload
        def __call__(
            self, input: PackedSequence, hx: Carried | None = None, lengths: None = None
        ) -> tuple[PackedSequence, Carried]: ...

        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


@hinted
class RNN(_Linear[Tensor]):
    """A normalized recurrent network, called like `torch.nn.RNN`: a norm on each product.

    h_t = f(N(W_x x_t) + N(W_h h_{t-1})). Training and evaluation are those of the norms; `StreamingNorm` has one set of
    statistics for all timesteps, so sequences may be longer than those trained on. By position it takes what torch.nn
    takes, in torch's order.

    Args:
        input_size: the number of features of the input.
        hidden_size: the number of features of the hidden state.
        num_layers: how many layers are stacked.
        nonlinearity: f, "tanh" or "relu".
        bias: of the products, without a norm; norms bring their own.
        batch_first: whether input and output are `(N, T, features)`.
        dropout: probability with which outputs are dropped between layers, in training.
        bidirectional: whether a second network goes through the sequence from its end.
        norm: makes a norm for each product, `norm(hidden_size, device=..., dtype=...)`: `StreamingNorm`, `SampleNorm`,
            `functools.partial(TimeSpecificNorm, steps=100)`, or None for torch's own network.
        device, dtype: of the parameters.

    Shape:
        - input: `(T, N, input_size)`, `(N, T, input_size)` with `batch_first`, one sequence `(T, input_size)`, or a
          PackedSequence. Whole numbers, without the features, stand for one-hot vectors.
        - hx: `(num_layers * directions, N, hidden_size)`, without N for one sequence; zeros if None.
        - lengths: `(N,)`, the real steps of each padded sample: what is behind them enters no statistic or gradient.
        - output: as the input, with `hidden_size * directions` features, 0 behind the lengths; h_n: as hx.

    Example:
        >>> rnn = RNN(3, 5, num_layers=2, batch_first=True)
        >>> output, h_n = rnn(torch.randn(4, 7, 3), lengths=[7, 5, 5, 2])
        >>> output.shape, h_n.shape
        (torch.Size([4, 7, 5]), torch.Size([2, 4, 5]))
    """

    kind = RNN_KIND

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        nonlinearity: str = "tanh",
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        *,
        norm: Factory | None = StreamingNorm,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            input_size,
            hidden_size,
            num_layers,
            batch_first=batch_first,
            norm=norm,
            nonlinearity=nonlinearity,
            bias=bias,
            dropout=dropout,
            bidirectional=bidirectional,
            device=device,
            dtype=dtype,
        )


@hinted
class GRU(EitherGRU, _Linear[Tensor]):
    """The paper's normalized GRU, called like `torch.nn.GRU` but by default not the same function.

    r, z = sigmoid(N(W_x x_t) + N(W_h h)); new = f(N(W_x x_t) + N(W_h (h * r))); h_t = z * new + (1 - z) * h. It resets
    the hidden state before its matrix product. Training and evaluation are those of the norms.

    Args:
        reset_after: reset the product, as torch does: new = f(N(W_x x_t) + r * N(W_h h)); h_t = (1 - z) * new + z * h,
            which is `torch.nn.GRU` if `norm=None`. Weights of one form are not loaded into the other.
        input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, norm, nonlinearity, device,
            dtype: as in `RNN`.

    Shape: as in `RNN`.

    Example:
        >>> output, h_n = GRU(3, 5)(torch.randn(7, 4, 3))
        >>> output.shape
        torch.Size([7, 4, 5])
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        *,
        norm: Factory | None = StreamingNorm,
        nonlinearity: str = "tanh",
        reset_after: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            input_size,
            hidden_size,
            num_layers,
            batch_first=batch_first,
            norm=norm,
            nonlinearity=nonlinearity,
            bias=bias,
            dropout=dropout,
            bidirectional=bidirectional,
            device=device,
            dtype=dtype,
        )
        self._choose(reset_after)


@hinted
class LSTM(_Linear[tuple[Tensor, Tensor]]):
    """A normalized LSTM, called like `torch.nn.LSTM`; not in the paper, by the same rule.

    i, f, g, o = N(W_x x_t) + N(W_h h); c_t = sigmoid(f) * c + sigmoid(i) * tanh(g); h_t = sigmoid(o) * tanh(c_t).

    Args:
        cell_norm: whether there is a norm on c_t inside the last tanh.
        input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, norm, device, dtype: see `RNN`.

    Shape: as in `RNN`; hx and the final state are pairs `(h, c)`.

    Example:
        >>> output, (h_n, c_n) = LSTM(3, 5)(torch.randn(7, 4, 3))
        >>> c_n.shape
        torch.Size([1, 4, 5])
    """

    kind = LSTM_KIND

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        *,
        norm: Factory | None = StreamingNorm,
        cell_norm: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            input_size,
            hidden_size,
            num_layers,
            batch_first=batch_first,
            norm=norm,
            cell_norm=cell_norm,
            bias=bias,
            dropout=dropout,
            bidirectional=bidirectional,
            device=device,
            dtype=dtype,
        )
