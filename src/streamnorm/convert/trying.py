"""Norms of classes that are not known: what they compute is tried out on a few numbers, with a copy."""

import math
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from inspect import Parameter, signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .known import BY_FORWARD, Factory, eps_of
from .making import Make

SPATIAL = {-1: (0, 1, 2), 1: (1, 2, 3)}  # dimensions to try beside those of samples and channels, by `channel_dim`
TRIED = "tried out on a few numbers"


@torch.no_grad()
def tried_rule(old: nn.Module) -> Factory | None:
    """A rule for a norm with a forward of its own that computes what torch's do, in training and in evaluation."""
    tensors = [tensor for tensor in (*old._parameters.values(), *old._buffers.values()) if tensor is not None]
    simple = not old._modules and set(old._parameters) <= {"weight", "bias"} and "forward" not in vars(old)
    if not simple or type(old).train is not nn.Module.train or any(t.is_meta or t.ndim > 1 for t in tensors):
        return None
    try:
        with torch.random.fork_rng(devices=[]):
            return _tried(old) if _takes_one_argument(old) else None
    except Exception:  # it is somebody's own code that runs, on inputs that it may not be made for
        return None


def _takes_one_argument(norm: nn.Module) -> bool:
    parameters = signature(type(norm).forward).parameters.values()
    return [each.kind for each in parameters] == [Parameter.POSITIONAL_OR_KEYWORD] * 2  # itself, and the input


def _tried(old: nn.Module) -> Factory | None:
    forward = next(
        (vars(base)["forward"] for base in type(old).__mro__ if vars(base).get("forward") in BY_FORWARD), None
    )
    if forward is not None and not isinstance(old, nn.LayerNorm):
        return _noted(BY_FORWARD[forward]) if _computes_as(old, forward) else None
    size, eps = _size(old), eps_of(old)
    if size is None or size < 2 or eps is None or old._buffers:
        return None
    found = {channel_dim: _served(old, size, eps, channel_dim) for channel_dim in SPATIAL}
    fitting = [channel_dim for channel_dim, dims in found.items() if dims]
    if len(fitting) != 1:  # none, or it depends on the number of dimensions
        return None
    dims = found[fitting[0]]
    return _noted(
        partial(_layer_norm, size=size, eps=eps, channel_dim=fitting[0], dims=dims[0] if len(dims) == 1 else None)
    )


def _layer_norm(old: Any, make: Make, *, size: int, eps: float, channel_dim: int, dims: int | None) -> nn.Module:
    weight, bias = (old._parameters.get(name) for name in ("weight", "bias"))
    return make(size, eps=eps, weight=weight, bias=bias, channel_dim=channel_dim, dims=dims)


def _noted(rule: Factory) -> Factory:
    def made(old: Any, make: Make) -> Any:
        new = rule(old, make)
        make.remarks.append(TRIED)
        return new

    return made


def _size(norm: nn.Module) -> int | None:
    """The number of channels, by its gain or by what torch's layer norm keeps."""
    weight, shape = norm._parameters.get("weight"), getattr(norm, "normalized_shape", None)
    if weight is not None:
        return len(weight)
    shape = (shape,) if isinstance(shape, int) else shape
    return int(shape[0]) if isinstance(shape, tuple | list | torch.Size) and len(shape) == 1 else None


def _served(old: nn.Module, size: int, eps: float, channel_dim: int) -> list[int]:
    """The numbers of dimensions with which it is a layer norm over the channels; none if it is another for any."""
    dims = []
    for count in SPATIAL[channel_dim]:
        shape = _shape(size, count, channel_dim)
        for training in (True, False):
            norm = _with_other_parameters(old).train(training)
            x = _numbers(shape, norm)
            x[0] *= math.sqrt(eps)  # where eps counts
            try:
                y = type(norm).forward(norm, x)
            except (RuntimeError, ValueError, IndexError, AssertionError):  # no such inputs
                break
            if not isinstance(y, Tensor) or y.shape != x.shape:
                break
            last = F.layer_norm(x.movedim(channel_dim, -1), (size,), _of(norm, "weight"), _of(norm, "bias"), eps)
            if not _same(y, last.movedim(-1, channel_dim)):
                return []
        else:
            dims.append(len(shape))
    return dims


def _computes_as(old: nn.Module, forward: Callable[..., Tensor]) -> bool:
    """Whether results and running statistics are those of a forward of torch, for all inputs that it takes."""
    served = 0
    for count in range(4):
        one, other = _with_other_parameters(old), _with_other_parameters(old)
        for training in (True, False):
            x = _numbers(_shape(_channels(old), count), old)
            try:
                expected = forward(other.train(training), x.clone())
            except (RuntimeError, ValueError):  # of another number of dimensions
                break
            y = type(old).forward(one.train(training), x.clone())
            pairs = [(y, expected), *zip(one._buffers.values(), other._buffers.values(), strict=True)]
            if not all(_same(a, b) for a, b in pairs):
                return False
            served += 1
    return served > 0


def _shape(size: int, count: int, channel_dim: int = 1) -> tuple[int, ...]:
    """Of an input with so many spatial dimensions, none of which could be taken for the channels."""
    samples, *space = [other for other in (3, 4, 5, 6, 7) if other != size][: count + 1]
    return (samples, size, *space) if channel_dim == 1 else (samples, *space, size)


def _channels(norm: Any) -> int:
    return int(norm.num_channels if isinstance(norm, nn.GroupNorm) else norm.num_features)


def _with_other_parameters(norm: nn.Module) -> nn.Module:
    """A copy whose gain and bias are neither 1 and 0 nor the same for two channels."""
    copied = deepcopy(norm).float()
    for name, shift in (("weight", 1.0), ("bias", 0.0)):
        parameter = _of(copied, name)
        if parameter is not None:
            parameter.copy_(shift + 0.5 * _numbers(tuple(parameter.shape), norm))
    return copied


def _of(norm: nn.Module, name: str) -> Tensor | None:
    return norm._parameters.get(name)


def _numbers(shape: tuple[int, ...], norm: nn.Module) -> Tensor:
    """Numbers of ordinary size without a pattern."""
    like = next((t for t in (*norm._parameters.values(), *norm._buffers.values()) if t is not None), torch.empty(0))
    count = torch.arange(math.prod(shape), dtype=torch.float64, device=like.device)
    return ((1.7 * count).sin() + (0.3 * count * count).cos()).float().reshape(shape)


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.shape == other.shape and one.dtype == other.dtype and torch.allclose(one, other, rtol=1e-4, atol=1e-4)
