"""Norms for deployment: they are affine in evaluation, so an `nn.BatchNorm` or two constants can stand for them."""

from collections.abc import Mapping
from inspect import signature
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from ..engine.context import Proxy, evaluating, recorded
from ..nn.base import Norm, check_channel_dim, mask_over_channels, to_channels_first
from ..nn.batch import GeneralBatchNorm, TimeSpecificNorm
from ..nn.live import LiveStatistics
from ..nn.recurrent.step import Norms
from ..nn.streaming import StreamingNorm
from .places import Places, Report, find_places, is_compiled, names_of, opened, returned, say, swap, title

Model = TypeVar("Model", bound=nn.Module)
BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d

# By the number of dimensions that a norm remembers; 1 is what was an nn.BatchNorm1d, for inputs with two or three.
BATCHNORMS: dict[int, type[BatchNorm]] = {
    1: nn.BatchNorm1d,
    2: nn.BatchNorm1d,
    3: nn.BatchNorm1d,
    4: nn.BatchNorm2d,
    5: nn.BatchNorm3d,
}
FORWARDS = {kind.forward for kind in (StreamingNorm, GeneralBatchNorm, TimeSpecificNorm)}


class FixedAffine(nn.Module):
    """A norm as it is in evaluation: constants per timestep, channel and location.

    y = scale * x + shift, in training and evaluation alike.

    Args:
        scale: `(steps, C, *space)`, or `(steps, C)` for every spatial size; past the last step the last one serves.
        shift: the same.
        channel_dim: 1 for input `(N, C, *space)`, -1 for `(N, *space, C)`.

    Shape:
        - x: `(N, C, *space)`, or `(N, *space, C)` with `channel_dim=-1`; the output has the same shape.
        - mask: broadcasts to `(N, *space)`, True where the activation is real; the output is 0 elsewhere.

    Example:
        >>> FixedAffine(torch.full((1, 3), 2.0), torch.ones(1, 3))(torch.ones(1, 3))
        tensor([[3., 3., 3.]])
    """

    scale: Tensor
    shift: Tensor

    def __init__(self, scale: Tensor, shift: Tensor, *, channel_dim: int = 1) -> None:
        super().__init__()
        check_channel_dim(channel_dim)
        if scale.ndim < 2 or scale.shape != shift.shape:
            shapes = f"{tuple(scale.shape)} and {tuple(shift.shape)}"
            raise ValueError(f"scale and shift of shape {shapes}: both must be (steps, C, *space)")
        self.num_features = scale.shape[1]
        self.channel_dim = channel_dim
        self.register_buffer("scale", scale)
        self.register_buffer("shift", shift)

    def forward(self, x: Tensor, mask: Tensor | None = None, step: int = 0) -> Tensor:
        # torch.jit.script leaves out the checks, and takes the rest as it is written.
        if not torch.jit.is_scripting():  # type: ignore[attr-defined]
            if isinstance(x, Proxy):
                return recorded(self, x, mask=mask, step=step)
            channels_first = to_channels_first(x, self.num_features, self.channel_dim)
            if mask is not None:
                mask_over_channels(mask, channels_first)
        given = x.dtype
        x = x if self.channel_dim == 1 else x.movedim(-1, 1)
        index = min(step, self.scale.shape[0] - 1)
        scale, shift = self.scale[index], self.shift[index]
        size, space = list(x.shape[2:]), list(scale.shape[1:])
        if len(space) > 0 and space != size:
            raise ValueError(f"input has spatial size {size}, but the constants are for {space}")
        shape = [scale.shape[0]] + space + [1] * (len(size) - len(space))
        y = torch.addcmul(shift.reshape(shape), x.to(torch.promote_types(given, scale.dtype)), scale.reshape(shape))
        if mask is not None:
            y = torch.where(mask.expand([x.shape[0]] + size).unsqueeze(1), y, 0)  # noqa: RUF005
        return (y if self.channel_dim == 1 else y.movedim(1, -1)).to(given)

    def extra_repr(self) -> str:
        steps, _, *space = self.scale.shape
        return f"{self.num_features}, steps={steps}, space={tuple(space) or 'any'}, channel_dim={self.channel_dim}"


def to_batchnorm(model: Model, *, example: Any = None, inplace: bool = False, report: Report = print) -> Model:
    """A copy of a model for deployment, without streamnorm's norms: evaluation is the same.

    References without a location (BA1, BA2, SP1, SP2) become `nn.BatchNorm1d`, 2d or 3d. The others, those with
    `channel_dim=-1` and those inside recurrent layers become a `FixedAffine`. `SampleNorm` is left alone: it is not
    affine.

    Args:
        model: a model with norms of streamnorm.
        example: an input (a tensor, a tuple of arguments, or a dict of them by name), which is run once in evaluation.
            Which batch norm it is depends on the number of dimensions of the input, which a norm remembers from its
            calls, and `convert` from what it replaced; a model that was only loaded needs an example, or its norms
            become `FixedAffine`.
        inplace: True changes the model itself and keeps its Parameter objects.
        report: gets a line for each norm.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), StreamingNorm(8))
        >>> _ = model(torch.randn(16, 4))
        >>> deployed = to_batchnorm(model.eval())
        1: StreamingNorm(8) -> BatchNorm1d(8)
    """
    root = opened(model, "to_batchnorm", inplace)
    run_example(root, example)
    places = find_places(root)
    replacements, lines = deployed(root, places)
    changed = swap(root, places, replacements)
    say(report, list(lines.values()), root)
    return cast(Model, returned(model, root, changed, inplace))


def run_example(model: nn.Module, example: Any) -> Any:
    """What the model gives for an example in evaluation, with the same random numbers each time; None if there is none.

    A dict has arguments by name; it is one argument itself if `forward` knows no such names.
    """
    if example is None:
        return None
    with evaluating(model), torch.random.fork_rng(devices=[]):
        if isinstance(example, tuple):
            return model(*example)
        if isinstance(example, Mapping) and _takes(model, example):
            return model(**example)
        return model(example)


def _takes(model: nn.Module, names: Mapping[str, Any]) -> bool:
    try:
        signature(model.forward).bind(**names)
    except TypeError:
        return False
    return True


def deployed(model: nn.Module, places: Places) -> tuple[dict[nn.Module, nn.Module], dict[nn.Module, str]]:
    """What takes the place of each norm, and what to say about it."""
    recurrent = inside_recurrent_layers(model)
    replacements: dict[nn.Module, nn.Module] = {}
    lines: dict[nn.Module, str] = {}
    for norm, where in places.items():
        if isinstance(norm, Norm):
            reason = _why_not(norm) or ("it was compiled by itself" if is_compiled(where) else None)
            if reason is None:
                replacements[norm], remark = _made(norm, norm in recurrent)
            outcome = f"left alone: {reason}" if reason else f"-> {title(replacements[norm])}{remark}"
            lines[norm] = f"{names_of(where)}: {title(norm)} {outcome}"
    return replacements, lines


def inside_recurrent_layers(model: nn.Module) -> set[nn.Module]:
    """The norms that recurrent layers call, with a timestep."""
    return {module for norms in model.modules() if isinstance(norms, Norms) for module in norms.modules()}


def _why_not(norm: Norm) -> str | None:
    if norm._stored is None:
        return "it normalizes each sample by its own statistics, also in evaluation"
    if not norm.num_features:
        return "it is lazy and has no size yet: run one batch through the model, or pass example="
    if type(norm).forward not in FORWARDS or "forward" in vars(norm):
        return "its class computes something else, by a forward of its own"
    return None


def _made(norm: Norm, recurrent: bool) -> tuple[nn.Module, str]:
    per_step = isinstance(norm, TimeSpecificNorm)
    scale, shift = constants(norm)
    fixed = FixedAffine(scale, shift, channel_dim=norm.channel_dim)
    if per_step or recurrent or norm.ref.located or norm.channel_dim != 1:
        return fixed, ""
    if not norm._dims:
        return fixed, " (for any number of dimensions: pass example= for an nn.BatchNorm)"
    kinds = {BATCHNORMS.get(dims) for dims in norm._dims}  # None where no batch norm serves: a mask, many dimensions
    kind = kinds.pop()
    variance = statistics(norm)[1].square()
    if kinds or kind is None or not bool(((variance > 0) & variance.isfinite()).all()):
        return fixed, ""
    return _batchnorm(norm, kind), ""


def statistics(norm: Norm) -> tuple[Tensor, Tensor]:
    """Mean and sigma of evaluation, as `(steps, C or 1, *space)`."""
    kept = cast(LiveStatistics, norm)
    mean, sigma = (vector.detach() for vector in kept._as_written(*kept._latest()))
    if not isinstance(norm, TimeSpecificNorm):
        mean, sigma = mean[None], sigma[None]
    if not mean.numel():  # not bound to a spatial size yet
        return mean.new_zeros(len(mean), 1), sigma.new_ones(len(sigma), 1)
    return (mean, sigma) if norm.ref.channels == "each" else (mean.unsqueeze(1), sigma.unsqueeze(1))


def constants(norm: Norm) -> tuple[Tensor, Tensor]:
    """Scale and shift of evaluation, as `(steps, C, *space)`."""
    mean, sigma = statistics(norm)
    shape = (len(mean), norm.num_features, *mean.shape[2:])
    column = (norm.num_features, *(1 for _ in shape[2:]))
    scale = sigma.reciprocal().expand(shape).clone()
    if norm.weight is not None:
        scale *= norm.weight.detach().reshape(column)
    shift = -mean * scale
    if norm.bias is not None:
        shift += norm.bias.detach().reshape(column)
    return scale, shift


def _batchnorm(norm: Norm, kind: type[BatchNorm]) -> BatchNorm:
    (mean,), (sigma,) = statistics(norm)
    variance = sigma.square()
    # sigma is sqrt(eps) at least, but for rounding, and for an eps that was raised after the statistics were taken.
    eps = min(norm.eps, float(variance.min()))
    affine = norm.weight is not None or norm.bias is not None
    momentum = norm.momentum if isinstance(norm, GeneralBatchNorm) else 0.1
    new = kind(norm.num_features, eps, momentum, affine, device=sigma.device, dtype=sigma.dtype)
    for name in ("weight", "bias"):
        value = getattr(norm, name)
        if value is not None:
            # The same object if it can be: a batch norm wants gain, bias and statistics of one type.
            kept = norm._parameters.get(name) if value.dtype == sigma.dtype else None
            fresh = nn.Parameter(value.detach().to(sigma.dtype, copy=True), value.requires_grad)
            setattr(new, name, fresh if kept is None else kept)
    if isinstance(norm, StreamingNorm) and float(norm._state.seen) == 0:
        return new  # as fresh, so that it is known for such
    with torch.no_grad():
        new.get_buffer("running_mean").copy_(mean)
        new.get_buffer("running_var").copy_(variance - eps)
        new.get_buffer("num_batches_tracked").fill_(1)
    return new
