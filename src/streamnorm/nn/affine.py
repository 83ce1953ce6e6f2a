"""Gain and bias alone."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..core.statistics import channelwise
from ..engine.context import Proxy, check_memory, recorded
from .base import Device, check_channel_dim, check_count, check_dtype, new_affine, reset_affine, to_channels_first
from .hints import hinted


@hinted
class Affine(nn.Module):
    """Gain and bias per channel, the step that the paper keeps apart from normalization.

    y = weight * x + bias, in training and evaluation alike.

    Args:
        num_features: the number of channels C.
        channel_dim: 1 for input `(N, C, *space)`, -1 for `(N, *space, C)`.
        device: of the parameters.
        dtype: of the parameters.

    Shape:
        - x: `(N, C, *space)`, or `(N, *space, C)` with `channel_dim=-1`; the output has the same shape.

    Example:
        >>> Affine(3)(torch.ones(2, 3, 4)).shape
        torch.Size([2, 3, 4])
    """

    def __init__(
        self, num_features: int, *, channel_dim: int = 1, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        check_count("num_features", num_features)
        check_channel_dim(channel_dim)
        check_dtype(dtype)
        self.num_features = num_features
        self.channel_dim = channel_dim
        self.weight, self.bias = new_affine(num_features, device, dtype)

    def reset_parameters(self) -> None:
        """Gain 1, bias 0."""
        reset_affine(self.weight, self.bias)

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(x, Proxy):
            return recorded(self, x)
        check_memory(input=x if isinstance(x, Tensor) else None, weight=self.weight, bias=self.bias)
        y = to_channels_first(x, self.num_features, self.channel_dim)
        y = (y * channelwise(self.weight, y) + channelwise(self.bias, y)).to(x.dtype)
        return y if self.channel_dim == 1 else y.movedim(1, -1)

    def extra_repr(self) -> str:
        return f"{self.num_features}, channel_dim={self.channel_dim}"

    if TYPE_CHECKING:

        def __call__(self, x: Tensor) -> Tensor: ...
