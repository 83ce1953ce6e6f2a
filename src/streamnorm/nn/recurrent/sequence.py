"""Normalized recurrent layers over sequences: RNN, GRU and LSTM."""

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from ...core.config import is_number
from ...engine.context import Proxy, check_memory, recorded
from ..base import Device, Norm, check_count
from ..hints import hinted
from ..streaming import StreamingNorm
from .base import ACTIVATIONS, STATE, EitherGRU, RecurrentBase
from .loop import explained, run_packed
from .packing import checked_lengths, checked_packing
from .step import LSTM_KIND, RNN_KIND, Factory, Hidden, Linear, Product


class SequenceLayer(RecurrentBase):
    """Layers and directions over a sequence."""

    def __init__(
        self,
        product: Product,
        input_size: int,
        hidden_size: int,
        num_layers: int,
        *,
        norm: Factory | None,
        nonlinearity: str = "tanh",
        bias: bool = True,
        cell_norm: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        for name, value in (("input_size", input_size), ("hidden_size", hidden_size), ("num_layers", num_layers)):
            check_count(name, value)
        if not (is_number(dropout) and 0 <= dropout <= 1):
            raise ValueError(f"dropout={dropout!r}: must be a number from 0 to 1")
        if dropout and num_layers == 1:
            warnings.warn(f"dropout={dropout} acts between layers, and num_layers=1 has none", stacklevel=5)
        directions = ["", "_reverse"] if bidirectional else [""]
        suffixes = [
            (f"_l{layer}{direction}", hidden_size * len(directions) if layer else input_size)
            for layer in range(num_layers)
            for direction in directions
        ]
        super().__init__(product, input_size, hidden_size, norm, nonlinearity, bias, cell_norm, suffixes, device, dtype)
        self.num_layers = num_layers
        self.dropout = float(dropout)
        self.bidirectional = bidirectional
        self._suffixes = [suffix for suffix, _ in suffixes]

    def _run(self, data: Tensor, sizes: list[int], start: Hidden, goes_on: bool) -> tuple[Tensor, Hidden]:
        """All layers over packed data `(rows, features, *space)`; states are `(layers * directions, N, ...)`."""
        f, finals, directions = ACTIVATIONS[self.nonlinearity], [], 1 + self.bidirectional
        taken = [
            self._taken(suffix, self.hidden_size * directions if i >= directions else self.input_size, data)
            for i, suffix in enumerate(self._suffixes)
        ]
        self._check_affine()
        self._check_norms(data, sizes)
        for i in range(0, len(self._suffixes), directions):
            if i and self.dropout:
                data = nn.functional.dropout(data, self.dropout, self.training)
            outputs = []
            for j, (gates, weight, bias) in enumerate(taken[i : i + directions]):
                gates.goes_on = goes_on
                products = self._input_products(data, weight, bias)
                first = tuple(s[i + j] for s in start)
                output, final = run_packed(gates, products, sizes, first, f, reverse=j == 1, late=self.training)
                outputs.append(output)
                finals.append(final)
            data = torch.cat(outputs, 1) if self.bidirectional else outputs[0]
        return data, tuple(torch.stack(states) for states in zip(*finals, strict=True))

    def _explained(self, x: Tensor, mask: Tensor | None) -> list[str]:
        """For `streamnorm.backends.explain`: of a padded sequence, by the first layer and direction."""
        x = x.transpose(0, 1) if getattr(self, "batch_first", False) else x
        gates, weight, bias = self._taken(self._suffixes[0], self.input_size, x)
        products = self._input_products(x.flatten(0, 1), weight, bias)
        return explained(gates, products, x.shape[1], ACTIVATIONS[self.nonlinearity])

    def _check_norms(self, data: Tensor, sizes: list[int]) -> None:
        """Ask the norms before the first timestep whether they can take the smallest."""
        shape = (min(sizes), self.hidden_size, *data.shape[2:])
        for norm in self.modules():
            if isinstance(norm, Norm):
                try:
                    norm._to_channels_first(torch.empty(shape, device="meta"), None)
                except ValueError as refused:
                    if shape[0] == max(sizes):
                        raise
                    raise ValueError(
                        f"timestep {sizes.index(shape[0])} has {shape[0]} sample(s): {refused}; or batch sequences "
                        "so that the longest have company"
                    ) from None

    def _padded(self, x: Tensor, hx: Any, lengths: Any) -> tuple[Tensor, Hidden]:
        """A sequence `(T, N, ...)`: packed if there are lengths, run, and padded again with zeros."""
        steps, batch = x.shape[:2]
        if steps == 0 or batch == 0:
            raise ValueError(f"input has {steps} timesteps of {batch} samples: a sequence needs at least one of each")
        shape = (len(self._suffixes), batch, self.hidden_size, *x.shape[3:])
        start = self._states(hx, shape, STATE + (", H, W)" if x.ndim > 3 else ")"), x)
        if lengths is None:
            output, final = self._run(x.flatten(0, 1), [batch] * steps, start, hx is not None)
            return output.reshape(steps, batch, *output.shape[1:]), final
        falling, order = torch.sort(checked_lengths(lengths, steps, batch), descending=True, stable=True)
        order = order.to(x.device)
        packed = pack_padded_sequence(x.index_select(1, order), falling)
        packed, final = self._packed(PackedSequence(packed.data, packed.batch_sizes, order), start, hx is not None)
        return pad_packed_sequence(packed, total_length=steps)[0], final

    def _packed(self, packed: PackedSequence, start: Hidden, goes_on: bool) -> tuple[PackedSequence, Hidden]:
        data, sizes, order, back = packed
        if order is not None:
            start = tuple(s.index_select(1, order) for s in start)
        output, final = self._run(data, sizes.tolist(), start, goes_on)
        if back is not None:
            final = tuple(s.index_select(1, back) for s in final)
        return PackedSequence(output, sizes, order, back), final

    def extra_repr(self) -> str:
        shown = {name: getattr(self, name) for name in ("num_layers", "nonlinearity", "dropout", "bidirectional")}
        return f"{self.input_size}, {self.hidden_size}, " + ", ".join(f"{k}={v!r}" for k, v in shown.items())


class _Linear(SequenceLayer):
    """Sequences of vectors, in the layouts of torch.nn."""

    def __init__(self, *sizes: int, batch_first: bool, **settings: Any) -> None:
        super().__init__(Linear(), *sizes, **settings)
        self.batch_first = batch_first

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
            return self._unbatched(input, hx, lengths)
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

    def _unbatched(self, x: Tensor, hx: Any, lengths: Any) -> tuple[Tensor, Any]:
        if lengths is not None:
            raise ValueError("lengths= needs a batch: input (T, features) is one sequence")
        if hx is not None:
            wanted = (len(self._suffixes), self.hidden_size), "(num_layers * directions, hidden_size)"
            hx = tuple(s.unsqueeze(1) for s in self._states(hx, *wanted, x))
        output, final = self._padded(x.unsqueeze(1), hx, None)
        return output.squeeze(1), self._packaged(tuple(s.squeeze(1) for s in final))

    def extra_repr(self) -> str:
        return super().extra_repr() + f", batch_first={self.batch_first}"


@hinted
class RNN(_Linear):
    """A normalized recurrent network, called like `torch.nn.RNN`: a norm on each product.

    h_t = f(N(W_x x_t) + N(W_h h_{t-1})). Training and evaluation are those of the norms; `StreamingNorm` has one set of
    statistics for all timesteps, so sequences may be longer than those trained on.

    Args:
        input_size: the number of features of the input.
        hidden_size: the number of features of the hidden state.
        num_layers: how many layers are stacked.
        norm: makes a norm for each product, `norm(hidden_size, device=..., dtype=...)`: `StreamingNorm`, `SampleNorm`,
            `functools.partial(TimeSpecificNorm, steps=100)`, or None for torch's own network.
        nonlinearity: f, "tanh" or "relu".
        bias: of the products, without a norm; norms bring their own.
        batch_first: whether input and output are `(N, T, features)`.
        dropout: probability with which outputs are dropped between layers, in training.
        bidirectional: whether a second network goes through the sequence from its end.
        device, dtype: of the parameters.

    Shape:
        - input: `(T, N, input_size)`, `(N, T, input_size)` with `batch_first`, one sequence `(T, input_size)`, or a
          PackedSequence. Whole numbers, without the features, stand for one-hot vectors.
        - hx: `(num_layers * directions, N, hidden_size)`; zeros if None.
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
        *,
        norm: Factory | None = StreamingNorm,
        nonlinearity: str = "tanh",
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
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
class GRU(EitherGRU, _Linear):
    """The paper's normalized GRU, called like `torch.nn.GRU` but by default not the same function.

    r, z = sigmoid(N(W_x x_t) + N(W_h h)); new = f(N(W_x x_t) + N(W_h (h * r))); h_t = z * new + (1 - z) * h. It resets
    the hidden state before its matrix product. Training and evaluation are those of the norms.

    Args:
        reset_after: reset the product, as torch does: new = f(N(W_x x_t) + r * N(W_h h)); h_t = (1 - z) * new + z * h,
            which is `torch.nn.GRU` if `norm=None`. Weights of one form are not loaded into the other.
        input_size, hidden_size, num_layers, norm, nonlinearity, bias, batch_first, dropout, bidirectional, device,
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
        *,
        norm: Factory | None = StreamingNorm,
        nonlinearity: str = "tanh",
        reset_after: bool = False,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
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
class LSTM(_Linear):
    """A normalized LSTM, called like `torch.nn.LSTM`; not in the paper, by the same rule.

    i, f, g, o = N(W_x x_t) + N(W_h h); c_t = sigmoid(f) * c + sigmoid(i) * tanh(g); h_t = sigmoid(o) * tanh(c_t).

    Args:
        cell_norm: whether there is a norm on c_t inside the last tanh.
        input_size, hidden_size, num_layers, norm, bias, batch_first, dropout, bidirectional, device, dtype: see `RNN`.

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
        *,
        norm: Factory | None = StreamingNorm,
        cell_norm: bool = False,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
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
