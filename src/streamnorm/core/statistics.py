"""S and N in plain torch: mean and p-th moment over a reference, and normalization by them.

Everything here takes input as `(N, C, *space)` and keeps pooled dimensions as 1, so statistics broadcast
against activations. A mask `(N, 1, *space)` is True where the activation is real.
"""

from collections.abc import Callable, Iterator
from functools import reduce
from itertools import product
from math import inf, sqrt
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .config import Statistic
from .reference import NormRef


class Moments(NamedTuple):
    """What S returned for one call, and what its gradient needs."""

    mean: Tensor
    sigma: Tensor
    center: Tensor  # c of the p-th moment
    elements: Tensor  # per statistic; broadcasts against `mean`
    present: Tensor | None  # with a mask: which statistics have the elements they need


# Given the means of the references and which of them a mask left present, c of the p-th moment.
Center = Callable[[Tensor, Tensor | None], Tensor]
# Given dE/d(mean) and dE/d(sigma) of the statistics that normalized, the gradients to send into S(x).
Gradient = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def measure(x: Tensor, statistic: Statistic, mask: Tensor | None, center: Center) -> Moments:
    """S(x), without gradient."""
    with torch.no_grad():
        return differentiable_measure(x, statistic, mask, center)


def differentiable_measure(x: Tensor, statistic: Statistic, mask: Tensor | None, center: Center) -> Moments:
    """The same for torch to differentiate, at a higher price. What is masked in `x` has to be finite."""
    ref = statistic.ref
    elements = count_elements(x, ref, mask)
    if torch.compiler.is_compiling() and statistic.p == 2 and mask is None and not ref.window:
        return _measure_at_once(x, statistic, center, elements)
    mean = reference_mean(x, ref, mask, elements)
    present = None
    if mask is not None:
        present = elements >= (2 if statistic.center == "mean" else 1)
        if ref.window:  # what only padding would use is not there either, whatever its window sees
            present = present & (mask.any(0, keepdim=True) if ref.samples else mask)
        present = present.expand_as(mean)
    c = center(mean, present)
    sigma = reference_sigma(x, c, statistic, mask, elements)
    return Moments(mean, sigma, c, elements, present)


def _measure_at_once(x: Tensor, statistic: Statistic, center: Center, elements: Tensor) -> Moments:
    """The same for p = 2 in one pass over x, which compilers make of this; without one it is slower."""
    variance, mean = torch.var_mean(x, _pooled_dims(x, statistic.ref), correction=0, keepdim=True)
    c = center(mean, None)
    return Moments(mean, (variance + (mean - c).square() + statistic.eps).sqrt(), c, elements, None)


def count_elements(x: Tensor, ref: NormRef, mask: Tensor | None) -> Tensor:
    """Real elements in the reference of each statistic."""
    samples = 1 if ref.samples else x.shape[0]
    if mask is None and not ref.window:
        return x.new_full((samples, *(1 for _ in x.shape[1:])), ref.fewest_elements(x.shape))
    real = x.new_ones((x.shape[0], 1, *x.shape[2:])) if mask is None else mask.to(x.dtype)
    per_channel = _gather(real, ref)
    return per_channel * x.shape[1] if ref.channels == "all" else per_channel


def reference_mean(x: Tensor, ref: NormRef, mask: Tensor | None, elements: Tensor) -> Tensor:
    """Average over the reference; 0 where a mask left no element."""
    return _gather(masked(x, mask), ref) / elements.clamp(min=1)


def reference_sigma(x: Tensor, center: Tensor, statistic: Statistic, mask: Tensor | None, elements: Tensor) -> Tensor:
    """sigma = (average |x - center|^p + eps^(p/2))^(1/p), with the largest |x - center| factored out."""
    ref, p, floor = statistic.ref, statistic.p, sqrt(statistic.eps)
    n, pooled = elements.clamp(min=1), _pooled_dims(x, ref)
    if p == 2:
        return (_sum_of_squares(x, center, ref, mask, elements) / n + statistic.eps).sqrt()
    if p == 1:
        return _total(_pool(d, pooled) for d in _distances(x, center, ref, mask)) / n + floor
    largest = center.new_zeros(())
    for d in _distances(x, center, ref, mask):
        largest = torch.maximum(largest, d.amax(pooled, keepdim=True) if pooled else d)
    largest = largest.clamp(min=max(floor, torch.finfo(x.dtype).tiny))
    total = _total(_pool(d.div_(largest).pow_(p), pooled) for d in _distances(x, center, ref, mask))
    power: Tensor = total / n + (floor / largest) ** p
    return largest * power ** (1 / p)


def normalize(
    x: Tensor,
    mean: Tensor,
    sigma: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mask: Tensor | None,
    in_place: bool = False,
) -> Tensor:
    """N(x, s) = (x - mean) / sigma, then gain and bias per channel; 0 where masked.

    `in_place`: nothing is to be differentiated or transformed, so that memory can be spared.
    """
    gain = sigma.reciprocal() if weight is None else channelwise(weight, x) / sigma
    y = masked(x, mask) - mean
    if not in_place:
        y = y * gain
        y = y if bias is None else y + channelwise(bias, x)
    else:  # the same in place: nobody else holds y
        y.mul_(gain)
        y = y if bias is None else y.add_(channelwise(bias, x))
    return masked(y, mask)


def pull_back(
    x: Tensor, mini_batch: Moments, grad_mean: Tensor, grad_sigma: Tensor, statistic: Statistic, mask: Tensor | None
) -> Tensor:
    """(dS/dx)^T g: the gradient of the statistics carried to the activations they were taken from.

    With u = (x - c) / sigma, for x in the reference of a statistic with n elements:
    (1) dmean/dx = 1/n;  (2) dsigma/dx = |u|^(p-1) sign(u) / n;
    (3) if c is the reference's own mean, dsigma/dmean = -average of |u|^(p-1) sign(u), which is 0 for p = 2.
    """
    ref, p, n = statistic.ref, statistic.p, mini_batch.elements.clamp(min=1)
    per_mean, per_sigma = ((grad / n).expand_as(mini_batch.sigma) for grad in (grad_mean, grad_sigma))
    if p == 2:
        slope = per_sigma / mini_batch.sigma
        offset = per_mean - mini_batch.center * slope
        dx = (x * _spread(slope, ref)).add_(_spread(offset, ref))
    else:
        if statistic.center == "mean":
            pooled = _pooled_dims(x, ref)
            slopes = (
                _slope(near, mini_batch.center, mini_batch.sigma, inside, p)
                for near, inside in _neighbours(x, ref, mask)
            )
            per_mean = per_mean - per_sigma * (_total(_pool(slope, pooled) for slope in slopes) / n)
        sides = zip(
            _shifts(per_mean, ref),
            _shifts(per_sigma, ref),
            _shifts(mini_batch.center.expand_as(per_mean), ref),
            _shifts(mini_batch.sigma, ref, border=inf),
            strict=True,
        )
        dx = _total(
            _slope(x, center, sigma, None, p).mul_(sigma_share).add_(mean_share)
            for mean_share, sigma_share, center, sigma in sides
        )
    return masked(dx, mask)


def back_through(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mask: Tensor | None,
    mean: Tensor,
    sigma: Tensor,
    mini_batch: Moments,
    statistic: Statistic,
    compute: torch.dtype,
    gradient: Gradient,
    needs_dx: bool,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """The gradients of the input, the gain and the bias of y = N(x, s_hat), gain and bias.

    `compute`: the type of the arithmetic.
    """
    given = x.dtype
    x, dy = masked(x.to(compute), mask), masked(dy.to(compute), mask)
    gain = x.new_ones(()) if weight is None else channelwise(weight, x).to(compute)

    # Sums over everything that shares both statistics and gain.
    cell = [mean.shape[0], x.shape[1], *mean.shape[2:]]
    dbias = dy.sum_to_size(cell)
    dgain = (x - mean).mul_(dy).sum_to_size(cell) / sigma

    # y = gain * (x - mean) / sigma + bias: dE/dmean = -dbias * gain / sigma, dE/dsigma = -dgain * gain / sigma.
    per_unit = gain / sigma
    grad_mean, grad_sigma = gradient(
        -(dbias * per_unit).sum_to_size(mean.shape), -(dgain * per_unit).sum_to_size(mean.shape)
    )
    dx = None
    if needs_dx:
        through = pull_back(x, mini_batch, grad_mean, grad_sigma, statistic, mask)
        dx = through.add_(dy * per_unit).to(given)
    return dx, _per_channel(dgain), _per_channel(dbias)


def mini_batch_statistics(mini_batch: Moments, latest: Tensor) -> tuple[Tensor, Tensor]:
    """s of the mini-batch `(2, *statistic)` (averaged over samples where each has its own), and whether to accept it.

    A statistic that a mask left without data keeps its `latest` value. A mini-batch with a value that is not finite,
    or without any real element, is not accepted.
    """
    both = torch.stack([mini_batch.mean, mini_batch.sigma])
    if mini_batch.present is None:
        s = (both if both.shape[1] == 1 else both.mean(1)).reshape(latest.shape).to(latest.dtype)
        return s, all_finite(s)
    samples = mini_batch.present.sum(0)
    s = torch.where(mini_batch.present, both, 0).sum(1) / samples.clamp(min=1)
    has_data = (samples > 0).reshape(latest.shape[1:])
    s = torch.where(has_data, s.reshape(latest.shape).to(latest.dtype), latest)
    return s, all_finite(s) & has_data.any()


def share_among_samples(g: Tensor, mini_batch: Moments) -> tuple[Tensor, Tensor]:
    """The gradients of the averages over samples, mean and sigma, for the statistics of each sample."""
    present = mini_batch.present
    shared = g / mini_batch.mean.shape[0] if present is None else g * present / present.sum(0).clamp(min=1)
    return shared[0], shared[1]


def elements_per_statistic(mini_batch: Moments) -> Tensor:
    """Elements of a call per statistic, in all samples; on average where border windows or a mask make them differ."""
    if mini_batch.present is None:
        return mini_batch.elements.sum(0).mean()
    return (mini_batch.elements * mini_batch.present).sum() / mini_batch.present.any(0).sum().clamp(min=1)


def fixed_center(center: str, mean: Tensor) -> Tensor:
    """c of the p-th moment where it needs no memory: the reference's own `mean`, or 0."""
    return mean if center == "mean" else mean.new_zeros(())


def all_finite(values: Tensor) -> Tensor:
    """Whether there is no NaN or inf, nor a number so large that averaging it could end in one.

    Only NaN and inf differ from themselves by NaN, which alone is not equal to itself.
    """
    large = 4 * values  # averages take differences of two such numbers
    difference = (large - large).sum()
    return difference == difference


def channelwise(vector: Tensor, x: Tensor) -> Tensor:
    """A vector over channels, shaped to broadcast against `(N, C, *space)`."""
    return vector if x.ndim == 2 and vector.ndim == 1 else vector.reshape(1, -1, *(1 for _ in x.shape[2:]))


def _per_channel(cell: Tensor) -> Tensor:
    return cell.sum([d for d in range(cell.ndim) if d != 1])


def masked(values: Tensor, mask: Tensor | None) -> Tensor:
    """0 where masked. Not a product: what lies under a mask may be anything, NaN included."""
    return values if mask is None else torch.where(mask, values, 0)


def _slope(x: Tensor, center: Tensor, sigma: Tensor, inside: Tensor | None, p: float) -> Tensor:
    """|u|^(p-1) sign(u): bounded by n, since |u| <= n^(1/p)."""
    u = (x - center).div_(sigma)
    return masked(u.sign_() if p == 1 else u.abs().pow_(p - 1).copysign_(u), inside)


def _sum_of_squares(x: Tensor, center: Tensor, ref: NormRef, mask: Tensor | None, elements: Tensor) -> Tensor:
    if not ref.window:
        return _gather(masked((x - center).pow_(2), mask), ref)
    # Sliding windows: sum (x-c)^2 = sum x^2 - 2c sum x + n c^2 costs two box filters instead of window^dims passes.
    # It cancels where c is far from 0, so it is done about a common origin and in float64.
    origin = masked(x, mask).mean().double()
    real, c = masked(x.double() - origin, mask), center.double() - origin
    total = _gather(real.square(), ref) - 2 * c * _gather(real, ref) + elements * c.square()
    return total.clamp(min=0).to(x.dtype)


def _distances(x: Tensor, center: Tensor, ref: NormRef, mask: Tensor | None) -> Iterator[Tensor]:
    """|x - center| for each member of the references, 0 for what is not there, as tensors the caller may change."""
    for near, inside in _neighbours(x, ref, mask):
        yield masked((near - center).abs_(), inside)


def _neighbours(x: Tensor, ref: NormRef, mask: Tensor | None) -> Iterator[tuple[Tensor, Tensor | None]]:
    """x as each location of its window sees it, and whether there is anything; x itself without a window."""
    if not ref.window:
        yield x, mask
        return
    real = x.new_ones((1, 1, *x.shape[2:]), dtype=torch.bool) if mask is None else mask
    yield from zip(_shifts(x, ref), _shifts(real, ref), strict=True)


def _shifts(values: Tensor, ref: NormRef, border: float = 0) -> Iterator[Tensor]:
    """`values` moved to each offset of the window, `border` coming in from outside."""
    if not ref.window:
        yield values
        return
    half, space = ref.window // 2, values.shape[2:]
    padded = F.pad(values, [half] * (2 * len(space)), value=border)
    for offset in product(range(ref.window), repeat=len(space)):
        moved = padded
        for dim, (start, size) in enumerate(zip(offset, space, strict=True), start=2):
            moved = moved.narrow(dim, start, size)
        yield moved


def _gather(values: Tensor, ref: NormRef) -> Tensor:
    """Sum over each reference."""
    return _spread(_pool(values, _pooled_dims(values, ref)), ref)


def _spread(statistics: Tensor, ref: NormRef) -> Tensor:
    """Sum over the statistics whose window holds each location; broadcasting does the rest."""
    if ref.window:
        half = ref.window // 2
        for dim in range(2, statistics.ndim):
            after, size = statistics.ndim - 1 - dim, statistics.shape[dim]
            padded = F.pad(statistics, [0, 0] * after + [half, half])
            statistics = padded.narrow(dim, 0, size).clone()
            for offset in range(1, ref.window):
                statistics.add_(padded.narrow(dim, offset, size))
    return statistics


def _pooled_dims(x: Tensor, ref: NormRef) -> list[int]:
    space = [] if ref.located else list(range(2, x.ndim))
    return [0] * ref.samples + [1] * (ref.channels == "all") + space


def _total(parts: Iterator[Tensor]) -> Tensor:
    return reduce(torch.add, parts)


def _pool(values: Tensor, dims: list[int]) -> Tensor:
    return values.sum(dims, keepdim=True) if dims else values  # torch sums everything over no dims
