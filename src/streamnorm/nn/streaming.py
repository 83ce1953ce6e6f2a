"""Streaming Normalization: the layer of the paper."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core.config import Config
from ..core.reference import NormRef
from ..engine.context import Proxy, recorded
from ..engine.merging import check_group
from .base import Device
from .calls import Calls
from .hints import hinted


@hinted
class StreamingNorm(Calls):
    """Streaming Normalization: statistics of everything seen so far, for any batch size, one included.

    y = weight * (x - mean) / sigma + bias, where mean and sigma are s_hat = alpha1 * long + alpha2 * short of H1, and
    sigma of a mini-batch is (average |x - c|^p + eps^(p/2))^(1/p). `short` is the exact average since the last weight
    update, `long` the exponential average of those averages, with weights `kappa`.

    Training: a call folds a weight update that has happened since the last call into H1, pushes s = S(x) and normalizes
    with s_hat. Its backward pass does the same with H2: it folds, pushes g = dE/ds_hat, and g_hat = beta1 * long +
    beta2 * short + beta3 * g flows on through S(x) instead of g. A mini-batch with values that are not finite is not
    pushed. Evaluation changes nothing; it uses the latest s_hat, or where windows are small a longer average.

    Optimizers of torch tell the layer of weight updates by themselves; see `streamnorm.attach` for the exceptions.
    State: `mean`, `sigma` (the latest s_hat), `stats` (H1), `grads` (H2), `eval_mean`, `eval_sigma` (what evaluation
    uses), all of it in `state_dict()`. `running_mean` and `running_var` are the latter by the names of `nn.BatchNorm`:
    tensors that stay the same, and may be written to.

    Args:
        num_features: the number of channels C.
        ref: which activations share statistics, a code of the paper (BA1-BA6, SP1-SP5) or a `NormRef`.
        p: the order of the moment, at least 1.
        center: c is the "running" mean (setting B of the paper), the "mean" of the reference (A), or "zero" (C).
        alpha: weights of `long` and `short` in s_hat.
        beta: weights of `long`, `short` and the present gradient in g_hat.
        kappa: weights of `long` and `short` in a fold of H1, then of H2; alpha for both if None.
        warmup: elements per statistic for which the layer turns gradually from a layer norm into a streaming norm; 0
            switches that off. Not the paper's.
        guard: whether windows between weight updates with fewer than 256 elements per statistic count for less, and
            pass on no longer a gradient than their own. Locations of one sample count for twelve elements at most, and
            a sequence counts once. Full windows follow the paper exactly, with one exception: after a full
            window, half of `short` in g_hat is the call's own gradient, if its samples have 32 locations or more per
            statistic and beta1 is not 0; with one call per update that changes nothing. Not the paper's.
        eval_memory: samples that evaluation averages over, at least: a window of n samples counts for n / eval_memory
            there, if that is less than its weight in training. 0 is the paper's latest s_hat. None: 64 with the
            guard, 0 without. Training does not depend on it. Not the paper's.
        eps: added inside of the root of sigma.
        affine: whether there are gain and bias, learned per channel.
        channel_dim: 1 for input `(N, C, *space)`, -1 for `(N, *space, C)`.
        process_group: whose processes merge their windows after each weight update: a group of torch.distributed,
            "world" for all of them, or None.
        device: of parameters and statistics.
        dtype: of parameters; statistics are float32 at least.

    Shape:
        - x: `(N, C, *space)`, or `(N, *space, C)` with `channel_dim=-1`; the output has the same shape.
        - mask: broadcasts to `(N, *space)`, True where the activation is real; the output is 0 elsewhere.
        - step: the timestep of a sequence, whose samples count once, at step 0.

    Example:
        >>> norm = StreamingNorm(3)
        >>> y = norm(torch.randn(1, 3))  # one sample
        >>> norm.stats.long.shape, int(norm.stats.count)
        (torch.Size([2, 3]), 1)
    """

    def __init__(
        self,
        num_features: int,
        *,
        ref: str | NormRef = "BA1",
        p: float = 2.0,
        center: str = "running",
        alpha: Sequence[float] = (0.7, 0.3),
        beta: Sequence[float] = (0.7, 0.3, 0.0),
        kappa: Sequence[float] | None = None,
        warmup: float = 256,
        guard: bool = True,
        eval_memory: float | None = None,
        eps: float = 1e-5,
        affine: bool = True,
        channel_dim: int = 1,
        process_group: object = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        config = Config(ref, p, center, eps, alpha, beta, kappa, warmup, guard, eval_memory)  # type: ignore[arg-type]
        super().__init__(num_features, config, affine=affine, channel_dim=channel_dim, device=device, dtype=dtype)
        check_group(process_group)
        self.process_group = process_group
        self._begin_state(device, dtype)

    def forward(self, x: Tensor, mask: Tensor | None = None, step: int = 0) -> Tensor:
        """Algorithm 5 of the paper; its backward pass is Algorithm 6."""
        # A training call folds if the weights were updated, pushes s = S(x) into H1 and normalizes with the s_hat that
        # H1 blends to; its backward pass folds, pushes g = dE/ds_hat into H2 and sends on the g_hat that H2 blends to.
        # In evaluation the statistics are constants.
        if isinstance(x, Proxy):
            return recorded(self, x, mask=mask, step=step)
        compute, arguments = self._begin(x, mask, step)
        return self._restore_layout(compute(*arguments))

    def _arguments(self) -> dict[str, Any]:
        return super()._arguments() | {"process_group": self.process_group}

    if TYPE_CHECKING:

        def __call__(self, x: Tensor, mask: Tensor | None = None, step: int = 0) -> Tensor: ...
