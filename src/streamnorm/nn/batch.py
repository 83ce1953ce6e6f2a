"""Batch normalization: statistics of the mini-batch in training, running estimates in evaluation."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..backends.memory import outside_inference_mode
from ..core.config import Statistic, is_number
from ..core.reference import NormRef, code_of
from ..core.statistics import fixed_center, mini_batch_statistics
from ..engine import replay
from ..engine.context import Proxy, recorded, transformed
from ..engine.function import evaluate, normalize_mini_batch, normalize_ordinary
from .base import Device, check_count, moved, statistics_like
from .hints import hinted
from .live import NAMES, LiveStatistics
from .loading import BATCHNORM_KEYS, batchnorm_statistics, estimate_faults, is_batchnorm


class _RunningNorm(LiveStatistics):
    """Batch statistics in training; in evaluation running estimates of them, in a leading dimension per timestep."""

    mean: Tensor
    sigma: Tensor

    def __init__(
        self,
        num_features: int,
        config: Statistic,
        steps: tuple[int, ...],
        momentum: float,
        affine: bool,
        channel_dim: int,
        device: Device,
        dtype: Any,
    ) -> None:
        super().__init__(num_features, config, affine=affine, channel_dim=channel_dim, device=device, dtype=dtype)
        if not (is_number(momentum) and 0 <= momentum <= 1):
            raise ValueError(f"momentum={momentum!r}: must be a number from 0 to 1")
        self.momentum = float(momentum)
        self._sets = steps  # () or (steps,)
        like = statistics_like(device, dtype)
        self.register_buffer("mean", like.new_zeros((*steps, *self._initial_shape())))
        self.register_buffer("sigma", like.new_ones((*steps, *self._initial_shape())))

    def _check(self, config: Statistic) -> None:
        super()._check(config)
        if not config.ref.samples:
            raise ValueError(
                f"{type(self).__name__} ref={code_of(config.ref)!r} pools no samples: use BA1-BA6, or SampleNorm"
            )

    def reset_running_stats(self) -> None:
        """Forget the running estimates, and the spatial size that they are bound to."""
        shape = (*self._sets, *self._initial_shape())
        self.mean, self.sigma = self.mean.new_zeros(shape), self.sigma.new_ones(shape)
        self._show()

    def _latest(self) -> tuple[Tensor, Tensor]:
        return self.mean, self.sigma

    def _take_over(self, mean: Tensor, sigma: Tensor) -> None:
        self.mean.copy_(mean)
        self.sigma.copy_(sigma)

    @property
    def _collects(self) -> bool:
        return self.training

    @property
    def _stored(self) -> Tensor:
        return self.mean[(0,) * len(self._sets)]

    def _normalize(self, x: Tensor, mask: Tensor | None, index: tuple[int, ...], learns: bool) -> Tensor:
        """`index`: which set of running estimates serves. `learns`: it is updated by this call, in training."""
        if not (mask is not None or self.training or torch.compiler.is_compiling()) and self._live is None:
            y = self._at_once(x, self.mean[index], self.sigma[index])
            if y is not None:
                return y
        x, mask = self._to_channels_first(x, mask)
        self._release()
        mean, sigma = self._as_written(self.mean, self.sigma)
        estimates, training, learns = (mean[index], sigma[index]), self.training, learns and self._learns
        entry = replay.begin(id(self), learns)
        if entry is not None and entry.again:
            learns, (training, estimates) = False, entry.kept
        elif entry is not None:
            entry.kept = training, tuple(each.clone() for each in estimates)
        weight, bias = self.weight, self.bias
        if not training:
            return self._restore_layout(evaluate(x, *self._shaped(estimates, x), weight, bias, mask))
        center = self._shaped(estimates, x)[0] if self.center == "running" else None
        if transformed():

            def chosen(mean: Tensor, present: Tensor | None) -> Tensor:
                return fixed_center(self.center, mean) if center is None else center

            return self._restore_layout(normalize_ordinary(x, weight, bias, mask, self.config, chosen))
        y, found = normalize_mini_batch(x, weight, bias, mask, self.config, center, self.mean.dtype, learns)
        if found is not None:
            with outside_inference_mode(), torch.no_grad():
                self._bind(self._statistic_shape(x))
                if self._live is not None:  # the running averages go on from there, as those of an nn.BatchNorm
                    self._take_over(*self._as_written(self.mean, self.sigma))
                s, accept = mini_batch_statistics(found, torch.stack([self.mean[index], self.sigma[index]]))
                self._learn(s[0], s[1], accept, index)
                self._follow()
        return self._restore_layout(y)

    def _shaped(self, estimates: tuple[Tensor, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        mean, sigma = estimates
        if torch.is_grad_enabled() or transformed():  # copies: backward may come after later calls changed the buffers
            mean, sigma = mean.clone(), sigma.clone()
        return self._shaped_like_input(mean, sigma, x)

    def _bind(self, shape: tuple[int, ...]) -> None:
        """The first training call binds the spatial size."""
        if not self.mean.numel():
            full = (*self._sets, *shape)
            self.mean, self.sigma = self.mean.new_zeros(full), self.sigma.new_ones(full)

    def _learn(self, mean: Tensor, sigma: Tensor, accept: Tensor, index: tuple[int, ...]) -> None:
        """r <- (1 - momentum) * r + momentum * s, or r where the mini-batch is not accepted."""
        for buffer, s in ((self.mean, mean), (self.sigma, sigma)):
            running = buffer[index]
            running.lerp_(torch.where(accept, s, running), self.momentum)

    def _apply(self, fn: Any, recurse: bool = True) -> "_RunningNorm":
        kept = {name: moved(getattr(self, name), fn) for name in ("mean", "sigma")}
        super()._apply(fn, recurse)
        self._buffers.update(kept)
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        self._keep_writes()
        super()._save_to_state_dict(destination, prefix, keep_vars)
        self._save_live(destination, prefix)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        names, sets = (prefix + "mean", prefix + "sigma"), len(self._sets)
        foreign = is_batchnorm(state_dict, prefix)
        known = BATCHNORM_KEYS if foreign else NAMES
        given = {k: v for k, v in state_dict.items() if k.removeprefix(prefix) not in known}
        if foreign:
            initial = self.mean.new_zeros(self.mean.shape), self.sigma.new_ones(self.sigma.shape)
            given |= zip(names, batchnorm_statistics(state_dict, prefix, self.eps) or initial, strict=True)
        faults = estimate_faults(state_dict, prefix, self.eps)
        if faults:
            rest[-1].extend(faults)
            given |= {names[0]: self.mean.clone(), names[1]: self.sigma.clone()}  # as they are
        given |= {name: given[name].to(self.mean.dtype) for name in names if name in given}
        shapes = {tuple(given[name].shape) for name in names if name in given}
        shape = torch.Size(next(iter(shapes), ()))
        whole = len(shapes) == 1 and all(name in given for name in names)
        others = shape != self.mean.shape  # else those that are there are written to: somebody may hold them
        if whole and others and shape[:sets] == self._sets and self._can_hold(shape[sets:]):
            self.mean, self.sigma = self.mean.new_empty(shape), self.sigma.new_empty(shape)  # filled by torch below
        super()._load_from_state_dict(given, prefix, *rest)
        self._show()


@hinted
class GeneralBatchNorm(_RunningNorm):
    """General Batch Normalization: statistics of the mini-batch in training, running estimates in evaluation.

    y = weight * (x - mean) / sigma + bias, with the mean and sigma = (average |x - c|^p + eps^(p/2))^(1/p) of the
    reference.

    Training: mean and sigma are those of the mini-batch s, differentiated exactly, and the running estimates follow,
    r <- (1 - momentum) * r + momentum * s, unless a value is not finite. Evaluation uses r. With `ref="BA1"` and p=2
    training is exactly `nn.BatchNorm`; evaluation differs a little, as r averages the mean and the biased sigma, where
    torch averages the unbiased variance. References with a location (BA3-BA6) are bound to the spatial size of the
    first training call.

    Args:
        num_features: the number of channels C.
        ref: which activations share statistics, BA1-BA6 of the paper or a `NormRef` with `samples=True`.
        p: the order of the moment, at least 1.
        center: c is the "mean" of the reference (setting A of the paper), the "running" estimate before the call (B),
            or "zero" (C).
        momentum: what a mini-batch counts in the running estimates, from 0 to 1.
        eps: added inside of the root of sigma.
        affine: whether there are gain and bias, learned per channel.
        channel_dim: 1 for input `(N, C, *space)`, -1 for `(N, *space, C)`.
        device: of parameters and running estimates.
        dtype: of parameters; running estimates are float32 at least.

    Shape:
        - x: `(N, C, *space)`, or `(N, *space, C)` with `channel_dim=-1`; the output has the same shape.
        - mask: broadcasts to `(N, *space)`, True where the activation is real; the output is 0 elsewhere.
        - step: ignored.

    Example:
        >>> norm = GeneralBatchNorm(3)
        >>> _ = norm(torch.randn(8, 3, 4, 4) + 5)
        >>> norm.mean.shape
        torch.Size([3])
    """

    def __init__(
        self,
        num_features: int,
        *,
        ref: str | NormRef = "BA1",
        p: float = 2.0,
        center: str = "mean",
        momentum: float = 0.1,
        eps: float = 1e-5,
        affine: bool = True,
        channel_dim: int = 1,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        config = Statistic(ref, p, center, eps)  # type: ignore[arg-type]
        super().__init__(num_features, config, (), momentum, affine, channel_dim, device, dtype)

    def forward(self, x: Tensor, mask: Tensor | None = None, step: int = 0) -> Tensor:
        if isinstance(x, Proxy):
            return recorded(self, x, mask=mask, step=step)
        if step:
            self._remember_step()
        return self._normalize(x, mask, (), learns=True)

    def _arguments(self) -> dict[str, Any]:
        return super()._arguments() | {"momentum": self.momentum}

    if TYPE_CHECKING:

        def __call__(self, x: Tensor, mask: Tensor | None = None, step: int = 0) -> Tensor: ...


@hinted
class TimeSpecificNorm(_RunningNorm):
    """General Batch Normalization with one set of running estimates per timestep; gain and bias are shared.

    y = weight * (x - mean) / sigma + bias, as in `GeneralBatchNorm`.

    Training: statistics are those of the mini-batch, and the running estimates of timestep `step` follow; past the last
    of `steps` timesteps none does. Evaluation uses the estimates of the timestep, past the last those of the last.

    Args:
        num_features: the number of channels C.
        steps: the number of timesteps that have running estimates of their own.
        ref, p, center, momentum, eps, affine, channel_dim, device, dtype: as in `GeneralBatchNorm`.

    Shape:
        - x: `(N, C, *space)`, or `(N, *space, C)` with `channel_dim=-1`; the output has the same shape.
        - mask: broadcasts to `(N, *space)`, True where the activation is real; the output is 0 elsewhere.
        - step: the position in the sequence, from 0 on.

    Example:
        >>> norm = TimeSpecificNorm(3, steps=10)
        >>> for t in range(12):
        ...     y = norm(torch.randn(8, 3), step=t)
        >>> norm.mean.shape
        torch.Size([10, 3])
    """

    def __init__(
        self,
        num_features: int,
        steps: int,
        *,
        ref: str | NormRef = "BA1",
        p: float = 2.0,
        center: str = "mean",
        momentum: float = 0.1,
        eps: float = 1e-5,
        affine: bool = True,
        channel_dim: int = 1,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_count("steps", steps)
        config = Statistic(ref, p, center, eps)  # type: ignore[arg-type]
        super().__init__(num_features, config, (steps,), momentum, affine, channel_dim, device, dtype)
        self.steps = steps

    def forward(self, x: Tensor, mask: Tensor | None = None, step: int = 0) -> Tensor:
        if isinstance(x, Proxy):
            return recorded(self, x, mask=mask, step=step)
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise ValueError(f"step={step!r}: must be the position in the sequence, a whole number of at least 0")
        return self._normalize(x, mask, (min(step, self.steps - 1),), learns=step < self.steps)

    def _arguments(self) -> dict[str, Any]:
        return super()._arguments() | {"steps": self.steps, "momentum": self.momentum}

    if TYPE_CHECKING:

        def __call__(self, x: Tensor, mask: Tensor | None = None, step: int = 0) -> Tensor: ...
