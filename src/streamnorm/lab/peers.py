"""Other norms for small batches, from their papers, for comparison; no part of the library.

All are called as ours are, `norm(x, mask=None, step=0)` with x of shape `(N, C, *space)`; they know no masks, and take
every timestep alike. Gain and bias are `weight` and `bias`. A norm may bring its own activation and its own end of a
residual branch: see `activation_for` and `end_for`.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from .. import RNN


def _over_batch(x: Tensor) -> Tensor:
    """The mean of each channel."""
    return x.mean([d for d in range(x.dim()) if d != 1])


def _over_space(x: Tensor) -> Tensor:
    """The mean of each channel of each sample, (N, C)."""
    return x.flatten(2).mean(2) if x.dim() > 2 else x


def _wide(v: Tensor, x: Tensor) -> Tensor:
    """A vector of C, or a matrix (N, C), against x."""
    return v.reshape(*((1,) * (2 - v.dim())), *v.shape, *((1,) * (x.dim() - 2)))


class Peer(nn.Module):
    """Gain and bias, and what all share."""

    weight: nn.Parameter
    bias: nn.Parameter

    def __init__(self, channels: int, eps: float, place: dict[str, Any]) -> None:
        super().__init__()
        self.channels, self.eps = channels, eps
        self.weight = nn.Parameter(torch.ones(channels, **place))
        self.bias = nn.Parameter(torch.zeros(channels, **place))

    def _keep(self, name: str, value: float, place: dict[str, Any], *rows: int) -> None:
        self.register_buffer(name, torch.full((*rows, self.channels), value, **place))

    def _affine(self, x: Tensor) -> Tensor:
        return x * _wide(self.weight, x) + _wide(self.bias, x)


class BatchRenorm(Peer):
    """Batch Renormalization (Ioffe 2017, arXiv:1702.03275, its Algorithm 1).

    With mean m and sigma s = sqrt(variance + eps) of the mini-batch and running M and S:
    r = s / S cut to [1/r_max, r_max], d = (m - M) / S cut to [-d_max, d_max], both without gradient;
    x_hat = (x - m) / s * r + d; then M += rate * (m - M), S += rate * (s - S). Evaluation: (x - M) / S.

    `schedule`: calls (a, b, c). r_max = 1 and d_max = 0, batch norm, in the first a calls; then d_max rises linearly to
    5 at call b and r_max to 3 at call c. In the paper 5,000, 25,000 and 40,000 steps of 130,000, with rate = 0.01.
    """

    R_MAX, D_MAX = 3.0, 5.0
    mean: Tensor
    sigma: Tensor
    calls: Tensor

    def __init__(
        self, channels: int, schedule: Sequence[int] = (5_000, 25_000, 40_000), rate: float = 0.01, eps: float = 1e-5,
        **place: Any,
    ) -> None:  # fmt: skip
        super().__init__(channels, eps, place)
        self.schedule, self.rate = tuple(schedule), rate
        self._keep("mean", 0.0, place)
        self._keep("sigma", 1.0, place)
        self.register_buffer("calls", torch.tensor(0))

    def bounds(self) -> tuple[float, float]:
        """r_max and d_max of the next call."""
        start, d_end, r_end = self.schedule
        past = int(self.calls) - start
        grown = [min(max(past / max(end - start, 1), 0.0), 1.0) for end in (r_end, d_end)]
        return 1 + (self.R_MAX - 1) * grown[0], self.D_MAX * grown[1]

    def forward(self, x: Tensor, mask: Tensor | None = None, step: int = 0) -> Tensor:
        if not self.training:
            return self._affine((x - _wide(self.mean, x)) / _wide(self.sigma, x))
        mean = _over_batch(x)
        centered = x - _wide(mean, x)
        sigma = (_over_batch(centered.square()) + self.eps).sqrt()
        m, s = mean.detach(), sigma.detach()
        r_max, d_max = self.bounds()
        r = (s / self.sigma).clamp(1 / r_max, r_max)
        d = ((m - self.mean) / self.sigma).clamp(-d_max, d_max)
        self.mean += self.rate * (m - self.mean)
        self.sigma += self.rate * (s - self.sigma)
        self.calls += 1
        return self._affine(centered * _wide(r / sigma, x) + _wide(d, x))


class OnlineNorm(Peer):
    """Online Normalization (Chiley et al. 2019, arXiv:1905.05894), sample by sample.

    Forward, of each sample with mean m and variance v over space (v = 0 without): y = (x - mu) / sqrt(var + eps) by the
    estimates of before, then var = a var + (1 - a) v + a (1 - a) (m - mu)^2 and mu = a mu + (1 - a) m, a = 0.999.
    Backward, for y' = dE/dy: z = y' - (1 - b) e_y y, and e_y += mean(z y); x' = z / sqrt(var + eps) - (1 - b) e_1, and
    e_1 += mean(x'), b = 0.99: a control that keeps x' nearly orthogonal to y and to 1. Then gain and bias, and layer
    scaling: each sample is divided by the root of its mean square over all channels and places, plus eps.
    """

    mean: Tensor
    var: Tensor
    error_y: Tensor
    error_1: Tensor

    def __init__(
        self, channels: int, forward_decay: float = 0.999, backward_decay: float = 0.99, eps: float = 1e-5, **place: Any
    ) -> None:
        super().__init__(channels, eps, place)
        self.forward_decay, self.backward_decay = forward_decay, backward_decay
        self._keep("mean", 0.0, place)
        self._keep("var", 1.0, place)
        self._keep("error_y", 0.0, place)
        self._keep("error_1", 0.0, place)

    def forward(self, x: Tensor, mask: Tensor | None = None, step: int = 0) -> Tensor:
        if self.training:
            y = cast(Tensor, _Controlled.apply(x, self))  # type: ignore[no-untyped-call]
        else:
            y = (x - _wide(self.mean, x)) / _wide((self.var + self.eps).sqrt(), x)
        y = self._affine(y)
        return y / (y.square().mean(list(range(1, y.dim())), keepdim=True) + self.eps).sqrt()


class _Controlled(torch.autograd.Function):
    """The part of online normalization that is its own forward and backward. Only vectors of C go through its loops."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: OnlineNorm) -> Tensor:
        a = layer.forward_decay
        means = _over_space(x)
        variances = _over_space((x - _wide(means, x)).square())
        mean, var = layer.mean, layer.var
        centers, scales = [], []
        for m, v in zip(means, variances, strict=True):
            centers.append(mean)
            scales.append(var)
            off = m - mean
            var = a * var + (1 - a) * v + a * (1 - a) * off.square()
            mean = mean + (1 - a) * off
        scale = _wide((torch.stack(scales) + layer.eps).sqrt(), x)
        y = (x - _wide(torch.stack(centers), x)) / scale
        layer.mean.copy_(mean)  # last: the first of the centers is this tensor
        layer.var.copy_(var)
        ctx.layer = layer
        ctx.save_for_backward(y, scale)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        layer, (y, scale) = ctx.layer, ctx.saved_tensors
        gain = 1 - layer.backward_decay
        gy, yy, g1, y1 = map(_over_space, (grad * y, y * y, grad, y))
        inverse = 1 / scale.flatten(1)
        error_y, error_1 = layer.error_y, layer.error_1
        before_y, before_1 = [], []
        for t in range(len(y)):
            before_y.append(error_y)
            before_1.append(error_1)
            error_1 = error_1 + (g1[t] - gain * error_y * y1[t]) * inverse[t] - gain * error_1
            error_y = error_y + gy[t] - gain * error_y * yy[t]
        controlled = grad - gain * _wide(torch.stack(before_y), y) * y
        found = controlled / scale - gain * _wide(torch.stack(before_1), y)
        layer.error_y.copy_(error_y)
        layer.error_1.copy_(error_1)
        return found, None


class MovingAverageBatchNorm(Peer):
    """MABN, Moving Average Batch Normalization (Yan et al. 2020, arXiv:2001.06838).

    No mean is subtracted: the weights before the norm are centralized instead (`centralize`). Of each call: the mean
    square q of x. Simple moving averages run over the last m calls, forward of q, backward of psi = mean(g z):
    z = x / sqrt(Q + eps) with Q the average of q; y = r z, r = sqrt(Q + eps) / sqrt(R + eps) cut to [1/5, 5], without
    gradient; R = 0.98 R + 0.02 Q after that, and Q at the first call. Backward, for g = dE/dz:
    dE/dx = (g - z Psi) / sqrt(Q + eps), Psi the average of psi. Evaluation: x / sqrt(R + eps).

    `schedule`: (m, warm, free). Until call max(m, warm) Q and Psi are those of the call alone, until call `free` r = 1.
    The authors' code takes m = 32 / samples per batch, as if for batches of 32, warm = 100, free = 1,000.
    """

    R_MAX, DECAY = 5.0, 0.98
    squares: Tensor
    gradients: Tensor
    running: Tensor
    calls: Tensor

    def __init__(
        self, channels: int, schedule: Sequence[int] = (16, 100, 1_000), eps: float = 1e-5, **place: Any
    ) -> None:
        super().__init__(channels, eps, place)
        self.schedule = tuple(schedule)
        self._keep("squares", 0.0, place, self.schedule[0])
        self._keep("gradients", 0.0, place, self.schedule[0])
        self._keep("running", 1.0, place)
        self.register_buffer("calls", torch.zeros(2, dtype=torch.int64))  # forward, backward

    def averaged(self, which: int, own: Tensor) -> Tensor:
        """`own`, of this call, is kept in the place of the oldest; the average over all kept, or `own` early on."""
        memory, warm, _ = self.schedule
        kept = (self.squares, self.gradients)[which]
        kept[int(self.calls[which]) % memory] = own
        self.calls[which] += 1
        return own if int(self.calls[which]) <= max(memory, warm) else kept.mean(0)

    def forward(self, x: Tensor, mask: Tensor | None = None, step: int = 0) -> Tensor:
        if self.training:
            return self._affine(cast(Tensor, _Averaged.apply(x, self)))  # type: ignore[no-untyped-call]
        return self._affine(x / _wide((self.running + self.eps).sqrt(), x))


class _Averaged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: MovingAverageBatchNorm) -> Tensor:
        average = layer.averaged(0, _over_batch(x.square()))
        scale, calls = (average + layer.eps).sqrt(), int(layer.calls[0])
        r = torch.ones_like(scale)
        if calls > layer.schedule[2]:
            r = (scale / (layer.running + layer.eps).sqrt()).clamp(1 / layer.R_MAX, layer.R_MAX)
        layer.running.copy_(average if calls == 1 else layer.DECAY * layer.running + (1 - layer.DECAY) * average)
        z = x / _wide(scale, x)
        ctx.layer = layer
        ctx.save_for_backward(z, scale, r)
        return z * _wide(r, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        z, scale, r = ctx.saved_tensors
        g = grad * _wide(r, z)
        psi = ctx.layer.averaged(1, _over_batch(g * z))
        return (g - z * _wide(psi, z)) / _wide(scale, z), None


class FilterResponseNorm(Peer):
    """FRN (Singh & Krishnan 2019, arXiv:1911.09737): x / sqrt(mean of x^2 over the space of a sample + eps).

    eps = 1e-6. Its activation is TLU, max(y, tau) with a threshold tau learned per channel, which begins at 0.
    """

    def __init__(self, channels: int, eps: float = 1e-6, **place: Any) -> None:
        super().__init__(channels, eps, place)

    def forward(self, x: Tensor, mask: Tensor | None = None, step: int = 0) -> Tensor:
        return self._affine(x / _wide((_over_space(x.square()) + self.eps).sqrt(), x))

    def own_activation(self) -> nn.Module:
        return ThresholdedLinear(self.channels)


class ThresholdedLinear(nn.Module):
    """TLU: max(y, tau)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.threshold = nn.Parameter(torch.zeros(channels))

    def forward(self, y: Tensor) -> Tensor:
        return torch.maximum(y, _wide(self.threshold, y))


class Nothing(nn.Module):
    """In the place of a norm."""

    def forward(self, x: Tensor, mask: Tensor | None = None, step: int = 0) -> Tensor:
        return x


class ZeroBranch(Nothing):
    """No norm; a residual branch ends in a learned factor that begins at 0 (SkipInit: De & Smith 2020).

    arXiv:2002.10444. In a net without branches it is no norm at all.
    """

    def own_end(self) -> nn.Module:
        return Gain()


class Gain(nn.Module):
    """A learned factor."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.zeros(()))

    def forward(self, h: Tensor) -> Tensor:
        return h * self.factor


def activation_for(norm: nn.Module) -> nn.Module:
    """What follows `norm`: its own activation, or a ReLU."""
    own = getattr(norm, "own_activation", None)
    return nn.ReLU() if own is None else cast(nn.Module, own())


def end_for(norm: nn.Module) -> nn.Module:
    """What a residual branch whose last norm is `norm` ends in."""
    own = getattr(norm, "own_end", None)
    return nn.Identity() if own is None else cast(nn.Module, own())


# Weights


class Centralized(nn.Module):
    """W -> W - its mean over the fan-in of each output filter."""

    def forward(self, raw: Tensor) -> Tensor:
        return raw - raw.mean(list(range(1, raw.dim())), keepdim=True)

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight


def _products(model: nn.Module, skip: str) -> list[nn.Module]:
    """The linear layers and convolutions, without what is called `skip`."""
    return [
        layer
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear | nn.Conv2d) and name.split(".")[-1] != skip
    ]


def centralize(model: nn.Module, skip: str) -> None:
    """Weight centralization of MABN, of all linear layers and convolutions but `skip`, and of recurrent layers."""
    for layer in _products(model, skip):
        parametrize.register_parametrization(layer, "weight", Centralized())
    for layer in [layer for layer in model.modules() if isinstance(layer, RNN)]:
        for name in ("weight_ih_l0", "weight_hh_l0"):
            parametrize.register_parametrization(layer, name, Centralized())


def start_as_he(model: nn.Module, skip: str) -> None:
    """Weights of variance 2 / fan-in (He et al. 2015), zero biases: where no norm sets the scale."""
    for layer in _products(model, skip):
        nn.init.kaiming_normal_(cast(Tensor, layer.weight), nonlinearity="relu")
        if isinstance(layer.bias, nn.Parameter):
            nn.init.zeros_(layer.bias)
