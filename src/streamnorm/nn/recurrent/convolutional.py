"""Convolutional recurrent layers: the scenario "recurrent and convolutional" of the paper's Table 1."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...engine.context import Proxy, recorded
from ..base import Device
from ..hints import hinted
from ..streaming import StreamingNorm
from .base import EitherGRU
from .stacked import SequenceLayer
from .step import RNN_KIND, Convolution, Factory


class _Convolutional(SequenceLayer):
    """Sequences of images `(N, T, C, H, W)`; convolutions keep the size."""

    def __init__(self, *sizes: int, kernel_size: int, **settings: Any) -> None:
        if type(kernel_size) is not int or kernel_size < 1 or kernel_size % 2 == 0:
            raise ValueError(f"kernel_size={kernel_size!r}: must be an odd whole number, so that the size is kept")
        super().__init__(Convolution(kernel_size), *sizes, **settings)
        self.kernel_size = kernel_size

    def forward(self, input: Tensor, hx: Tensor | None = None, lengths: Any = None) -> tuple[Tensor, Tensor]:
        if isinstance(input, Proxy):
            return recorded(self, input, hx=hx, lengths=lengths)
        self._check_input(input, (4, 5), -3, "(N, T, C, H, W) or (T, C, H, W)")
        if input.ndim == 4:
            output, (final,) = self._unbatched(input, hx, lengths)
            return output, final
        output, (final,) = self._padded(input.transpose(0, 1), hx, lengths)
        return output.transpose(0, 1), final

    if TYPE_CHECKING:

        def __call__(self, input: Tensor, hx: Tensor | None = None, lengths: Any = None) -> tuple[Tensor, Tensor]: ...


@hinted
class ConvRNN(_Convolutional):
    """A normalized recurrent network with convolutions in place of matrix products, for sequences of images.

    h_t = f(N(W_x * x_t) + N(W_h * h_{t-1})), where * is a convolution that keeps the size. Training and evaluation are
    those of the norms.

    Args:
        input_channels: the number of channels of the input.
        hidden_channels: the number of channels of the hidden state.
        num_layers: how many layers are stacked.
        kernel_size: side of the convolutions, an odd number.
        norm: makes a norm for each product, as in `RNN`.
        nonlinearity: f, "tanh" or "relu".
        bias: of the convolutions, without a norm; norms bring their own.
        device, dtype: of the parameters.

    Shape:
        - input: `(N, T, input_channels, H, W)`, or one sequence `(T, input_channels, H, W)`.
        - hx: `(num_layers, N, hidden_channels, H, W)`, without N for one sequence; zeros if None.
        - lengths: `(N,)`, the real steps of each padded sample.
        - output: `(N, T, hidden_channels, H, W)`, 0 behind the lengths; h_n: as hx.

    Example:
        >>> output, h_n = ConvRNN(3, 8)(torch.randn(2, 5, 3, 16, 16))
        >>> output.shape, h_n.shape
        (torch.Size([2, 5, 8, 16, 16]), torch.Size([1, 2, 8, 16, 16]))
    """

    kind = RNN_KIND

    def __init__(
        self,
        input_channels: int,
        hidden_channels: int,
        num_layers: int = 1,
        *,
        kernel_size: int = 3,
        norm: Factory | None = StreamingNorm,
        nonlinearity: str = "tanh",
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            input_channels,
            hidden_channels,
            num_layers,
            kernel_size=kernel_size,
            norm=norm,
            nonlinearity=nonlinearity,
            bias=bias,
            device=device,
            dtype=dtype,
        )


@hinted
class ConvGRU(EitherGRU, _Convolutional):
    """The paper's normalized GRU with convolutions in place of matrix products.

    The formulas of `GRU`, with the convolutions of `ConvRNN`.

    Args:
        reset_after: reset the product, as torch does; see `GRU`.
        input_channels, hidden_channels, num_layers, kernel_size, norm, nonlinearity, bias, device, dtype: as in
            `ConvRNN`.

    Shape: as in `ConvRNN`.

    Example:
        >>> output, h_n = ConvGRU(3, 8)(torch.randn(2, 5, 3, 16, 16))
        >>> output.shape
        torch.Size([2, 5, 8, 16, 16])
    """

    def __init__(
        self,
        input_channels: int,
        hidden_channels: int,
        num_layers: int = 1,
        *,
        kernel_size: int = 3,
        norm: Factory | None = StreamingNorm,
        nonlinearity: str = "tanh",
        reset_after: bool = False,
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            input_channels,
            hidden_channels,
            num_layers,
            kernel_size=kernel_size,
            norm=norm,
            nonlinearity=nonlinearity,
            bias=bias,
            device=device,
            dtype=dtype,
        )
        self._choose(reset_after)
