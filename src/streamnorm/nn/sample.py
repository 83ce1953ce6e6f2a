"""Sample normalization: layer norm, instance norm and their relatives."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..core.config import Statistic
from ..core.reference import NormRef, code_of
from ..core.statistics import fixed_center
from ..engine.context import Proxy, recorded, transformed
from ..engine.function import normalize_mini_batch, normalize_ordinary
from .base import Device, Norm
from .hints import hinted


@hinted
class SampleNorm(Norm):
    """Sample Normalization: each sample is normalized by its own statistics.

    y = weight * (x - mean) / sigma + bias, with the mean and sigma = (average |x - c|^p + eps^(p/2))^(1/p) of the
    sample's reference. Training and evaluation are alike; no statistics are kept.

    Args:
        num_features: the number of channels C.
        ref: which activations share statistics: "SP1" is layer norm over channels and space, "SP2" instance norm, "SP5"
            layer norm at every location; or a `NormRef` with `samples=False`.
        p: the order of the moment, at least 1.
        center: c is the "mean" of the reference (setting A of the paper) or "zero" (C).
        eps: added inside of the root of sigma.
        affine: whether there are gain and bias, learned per channel.
        channel_dim: 1 for input `(N, C, *space)`, -1 for `(N, *space, C)`.
        device: of the parameters.
        dtype: of the parameters.

    Shape:
        - x: `(N, C, *space)`, or `(N, *space, C)` with `channel_dim=-1`; the output has the same shape.
        - mask: broadcasts to `(N, *space)`, True where the activation is real; the output is 0 elsewhere.
        - step: ignored.

    Example:
        >>> norm = SampleNorm(3)
        >>> norm(torch.randn(2, 3, 8, 8)).shape
        torch.Size([2, 3, 8, 8])
    """

    def __init__(
        self,
        num_features: int,
        *,
        ref: str | NormRef = "SP1",
        p: float = 2.0,
        center: str = "mean",
        eps: float = 1e-5,
        affine: bool = True,
        channel_dim: int = 1,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        config = Statistic(ref, p, center, eps)  # type: ignore[arg-type]
        super().__init__(num_features, config, affine=affine, channel_dim=channel_dim, device=device, dtype=dtype)

    def _check(self, config: Statistic) -> None:
        super()._check(config)
        if config.ref.samples:
            raise ValueError(f"SampleNorm ref={code_of(config.ref)!r} pools samples: use SP1-SP5, or GeneralBatchNorm")
        if config.center == "running":
            raise ValueError('SampleNorm keeps no running mean: use center="mean" or "zero", or StreamingNorm')

    @property
    def _learns(self) -> bool:
        return False

    def forward(self, x: Tensor, mask: Tensor | None = None, step: int = 0) -> Tensor:
        if isinstance(x, Proxy):
            return recorded(self, x, mask=mask, step=step)
        x, mask = self._to_channels_first(x, mask)
        if transformed():
            y = normalize_ordinary(x, self.weight, self.bias, mask, self.config, self._center)
        else:
            stored = torch.promote_types(x.dtype, torch.float32)
            y, _ = normalize_mini_batch(x, self.weight, self.bias, mask, self.config, None, stored, False)
        return self._restore_layout(y)

    def _center(self, mean: Tensor, present: Tensor | None) -> Tensor:
        return fixed_center(self.center, mean)

    if TYPE_CHECKING:

        def __call__(self, x: Tensor, mask: Tensor | None = None, step: int = 0) -> Tensor: ...
