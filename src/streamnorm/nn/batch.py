"""The layers that take their statistics from the sample or the mini-batch, and gain and bias alone."""

from typing import Any

import torch
from torch import Tensor, nn

from . import checkpointing
from .base import (
    Device,
    Norm,
    channels_second,
    check_channel_dim,
    check_count,
    check_dtype,
    is_number,
    moved,
    new_affine,
    outside_inference_mode,
    reset_affine,
    statistics_like,
)
from .dispatch import apply_ordinary, compute_dtype, evaluate
from .hints import hinted
from .loading import BATCHNORM_KEYS, batchnorm_statistics, estimate_faults, is_batchnorm
from .moments import Center, all_finite, channelwise, fixed_center, measure, mini_batch_statistics
from .normref import NormRef
from .transforms import transformed


@hinted
class SampleNorm(Norm):
    """Sample Normalization: each sample is normalized by its own statistics, in training and evaluation alike.

    y = weight * (x - mean) / sigma + bias, with the mean and sigma = (average |x - c|^p + eps^(p/2))^(1/p) of the
    sample's reference: "SP1" is layer norm over channels and space, "SP2" instance norm, "SP5" layer norm at every
    location. `center`: c is the "mean" of the reference (setting A of the paper) or "zero" (C).

    Shapes: input and output `(N, C, *space)`, or `(N, *space, C)` with `channel_dim=-1`. `mask` broadcasts to
    `(N, *space)` and is True where the activation is real; the output is 0 elsewhere. `step` is ignored.

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
        super().__init__(
            num_features,
            ref=ref,
            p=p,
            center=center,
            eps=eps,
            affine=affine,
            channel_dim=channel_dim,
            device=device,
            dtype=dtype,
        )
        if self.ref.samples:
            raise ValueError(f"SampleNorm ref={ref!r} pools samples: use SP1-SP5, or GeneralBatchNorm")
        if center == "running":
            raise ValueError('SampleNorm keeps no running mean: use center="mean" or "zero", or StreamingNorm')

    def forward(self, x: Tensor, mask: Tensor | None = None, step: int = 0) -> Tensor:
        x, mask = self.enter(x, mask)
        if transformed():
            return self.leave(apply_ordinary(x, self.weight, self.bias, mask, self.statistic, self._center))
        native = self.native(x, mask)
        if native:
            return self.leave(native[0])
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return self.normalize_by_own(x, measure(wide, self.statistic, mask, self._center), mask)

    @property
    def learns(self) -> bool:
        return False

    def _center(self, mean: Tensor, present: Tensor | None) -> Tensor:
        return fixed_center(self.center, mean)

    def extra_repr(self) -> str:
        return self.settings()


class _RunningNorm(Norm):
    """Batch statistics in training; in evaluation running estimates of them, in a leading dimension per timestep."""

    mean: Tensor
    sigma: Tensor

    def __init__(
        self, num_features: int, steps: tuple[int, ...], momentum: float, device: Device, dtype: Any, **statistic: Any
    ) -> None:
        super().__init__(num_features, device=device, dtype=dtype, **statistic)
        if not self.ref.samples:
            raise ValueError(
                f"{type(self).__name__} ref={statistic['ref']!r} pools no samples: use BA1-BA6, or SampleNorm"
            )
        if not (is_number(momentum) and 0 <= momentum <= 1):
            raise ValueError(f"momentum={momentum!r}: must be a number from 0 to 1")
        self.momentum = float(momentum)
        self._sets = steps  # () or (steps,)
        like = statistics_like(device, dtype)
        self.register_buffer("mean", like.new_zeros((*steps, *self.initial_shape())))
        self.register_buffer("sigma", like.new_ones((*steps, *self.initial_shape())))

    def reset_running_stats(self) -> None:
        """Forget the running estimates, and the spatial size that they are bound to."""
        shape = (*self._sets, *self.initial_shape())
        self.mean, self.sigma = self.mean.new_zeros(shape), self.sigma.new_ones(shape)

    @property
    def collects(self) -> bool:
        return self.training

    @property
    def stored(self) -> Tensor:
        return self.mean[(0,) * len(self._sets)]

    def normalize(self, x: Tensor, mask: Tensor | None, index: tuple[int, ...], learns: bool) -> Tensor:
        """`index`: which set of running estimates serves. `learns`: it is updated by this call, in training."""
        x, mask = self.enter(x, mask)
        estimates, training, learns = (self.mean[index], self.sigma[index]), self.training, learns and self.learns
        repetition = checkpointing.begin(id(self), learns, lambda: (self.training, tuple(e.clone() for e in estimates)))
        if repetition is not None:
            learns, (training, estimates) = False, repetition.kept
        if not training:
            return self.leave(evaluate(x, *self._shaped(estimates, x), self.weight, self.bias, mask))
        if transformed():
            center = self._center(estimates, x)
            return self.leave(apply_ordinary(x, self.weight, self.bias, mask, self.statistic, center))
        native = self.native(x, mask, self.mean)
        if native:
            y, mean, inverse = native
            if learns:
                sigma = inverse.reciprocal()
                self._learn(mean, sigma, all_finite(sigma), index)  # where the mean is not finite, sigma is not either
            return self.leave(y)

        with outside_inference_mode():
            wide = x.to(compute_dtype(x, self.mean))
            own = measure(wide, self.statistic, mask, self._center(estimates, x))
        y = self.normalize_by_own(x, own, mask)
        if learns:
            with outside_inference_mode(), torch.no_grad():
                self._bind(self.statistic_shape(x))
                s, accept = mini_batch_statistics(own, torch.stack([self.mean[index], self.sigma[index]]))
                self._learn(s[0], s[1], accept, index)
        return y

    def _center(self, estimates: tuple[Tensor, Tensor], x: Tensor) -> Center:
        before = self._shaped(estimates, x)[0] if self.center == "running" else None
        return lambda mean, present: fixed_center(self.center, mean) if before is None else before

    def _shaped(self, estimates: tuple[Tensor, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        mean, sigma = estimates
        if torch.is_grad_enabled() or transformed():  # copies: backward may come after later calls changed the buffers
            mean, sigma = mean.clone(), sigma.clone()
        return self.view(mean, sigma, x)

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
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._buffers.update(kept)
        return self

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        names, sets = (prefix + "mean", prefix + "sigma"), len(self._sets)
        given = dict(state_dict)
        if is_batchnorm(state_dict, prefix):
            given = {k: v for k, v in given.items() if k.removeprefix(prefix) not in BATCHNORM_KEYS}
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
        if whole and shape[:sets] == self._sets and self.can_hold(shape[sets:]):
            self.mean, self.sigma = self.mean.new_empty(shape), self.sigma.new_empty(shape)  # filled by torch below
        super()._load_from_state_dict(given, prefix, *rest)


@hinted
class GeneralBatchNorm(_RunningNorm):
    """General Batch Normalization: statistics of the mini-batch in training, running estimates in evaluation.

    y = weight * (x - mean) / sigma + bias. With `ref="BA1"` and p=2, training is exactly `nn.BatchNorm`. Evaluation
    differs a little: r <- (1 - momentum) * r + momentum * s averages the mean and the biased sigma, where torch
    averages the unbiased variance. `center`: c of sigma = (average |x - c|^p + eps^(p/2))^(1/p) is the "mean" of the
    reference (setting A), the "running" estimate before the call (B), or "zero" (C).

    A mini-batch with values that are not finite leaves the running estimates alone. References with a location (BA3-6)
    are bound to the spatial size of the first training call. Shapes and `mask` as in `SampleNorm`.

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
        super().__init__(
            num_features,
            (),
            momentum,
            device,
            dtype,
            ref=ref,
            p=p,
            center=center,
            eps=eps,
            affine=affine,
            channel_dim=channel_dim,
        )

    def forward(self, x: Tensor, mask: Tensor | None = None, step: int = 0) -> Tensor:
        if step:
            self.remember_step()
        return self.normalize(x, mask, (), learns=True)

    def extra_repr(self) -> str:
        return self.settings(momentum=self.momentum)


@hinted
class TimeSpecificNorm(_RunningNorm):
    """General Batch Normalization with one set of running estimates per timestep; gain and bias are shared.

    `step` of a call is its position in the sequence. Past the last of `steps` timesteps the last set serves in
    evaluation, and training there updates none.

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
        super().__init__(
            num_features,
            (steps,),
            momentum,
            device,
            dtype,
            ref=ref,
            p=p,
            center=center,
            eps=eps,
            affine=affine,
            channel_dim=channel_dim,
        )
        self.steps = steps

    def forward(self, x: Tensor, mask: Tensor | None = None, step: int = 0) -> Tensor:
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise ValueError(f"step={step!r}: must be the position in the sequence, a whole number of at least 0")
        return self.normalize(x, mask, (min(step, self.steps - 1),), learns=step < self.steps)

    def extra_repr(self) -> str:
        return self.settings(steps=self.steps, momentum=self.momentum)


@hinted
class Affine(nn.Module):
    """Gain and bias per channel: y = weight * x + bias, the step that the paper keeps apart from normalization.

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
        y = channels_second(x, self.num_features, self.channel_dim)
        y = (y * channelwise(self.weight, y) + channelwise(self.bias, y)).to(x.dtype)
        return y if self.channel_dim == 1 else y.movedim(1, -1)

    def extra_repr(self) -> str:
        return f"{self.num_features}, channel_dim={self.channel_dim}"
