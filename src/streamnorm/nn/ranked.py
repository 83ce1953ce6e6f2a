"""Streaming norms for inputs of one rank, as torch has a batch norm for each: another shape is refused, not pooled."""

from typing import ClassVar

from torch import Tensor

from .hints import hinted
from .streaming import StreamingNorm

_BY_DIMS = {2: "StreamingNorm1d or ", 3: "StreamingNorm1d or ", 4: "StreamingNorm2d or ", 5: "StreamingNorm3d or "}


class _Ranked(StreamingNorm):
    """The check is one of those at the door, by which a call that is like the last one does not come."""

    _spaces: ClassVar[dict[int, str]]  # by the number of dimensions that an input may have, the spatial ones

    def _check_rank(self, x: Tensor) -> None:
        if isinstance(x, Tensor) and x.ndim not in self._spaces:
            raise ValueError(self._refusal(x))

    def _refusal(self, x: Tensor) -> str:
        parts = [("N", "C", space) if self.channel_dim == 1 else ("N", space, "C") for space in self._spaces.values()]
        layouts = " or ".join(f"({', '.join(filter(None, part))})" for part in parts)
        words = f"input of shape {tuple(x.shape)} has {x.ndim} dimension(s): {type(self).__name__} takes {layouts}"
        channels = x.shape[:1] if self.channel_dim == 1 else x.shape[-1:]
        if x.ndim + 1 in self._spaces and channels == (self.num_features,):
            return f"{words}; for one sample pass x.unsqueeze(0)"
        return f"{words}; use {_BY_DIMS.get(x.ndim, '')}StreamingNorm, which takes any" if x.ndim > 1 else words


@hinted
class StreamingNorm1d(_Ranked):
    """`StreamingNorm` for vectors and sequences: `(N, C)` or `(N, C, L)`, the inputs of `nn.BatchNorm1d`.

    The same layer, with the same state_dict; it refuses inputs with another number of dimensions.

    Args:
        num_features and all settings: as in `StreamingNorm`.

    Shape:
        - x: `(N, C)` or `(N, C, L)`, or `(N, L, C)` with `channel_dim=-1`; the output has the same shape.
        - mask, step: as in `StreamingNorm`.

    Example:
        >>> import torch
        >>> StreamingNorm1d(3)(torch.randn(1, 3)).shape
        torch.Size([1, 3])
    """

    _spaces: ClassVar = {2: "", 3: "L"}
    _dims = frozenset({1})  # what `to_batchnorm` makes of it, before any call


@hinted
class StreamingNorm2d(_Ranked):
    """`StreamingNorm` for images: `(N, C, H, W)`, the input of `nn.BatchNorm2d`.

    The same layer, with the same state_dict; it refuses inputs with another number of dimensions.

    Args:
        num_features and all settings: as in `StreamingNorm`.

    Shape:
        - x: `(N, C, H, W)`, or `(N, H, W, C)` with `channel_dim=-1`; the output has the same shape.
        - mask, step: as in `StreamingNorm`.

    Example:
        >>> import torch
        >>> StreamingNorm2d(3)(torch.randn(1, 3, 8, 8)).shape
        torch.Size([1, 3, 8, 8])
    """

    _spaces: ClassVar = {4: "H, W"}
    _dims = frozenset({4})


@hinted
class StreamingNorm3d(_Ranked):
    """`StreamingNorm` for volumes: `(N, C, D, H, W)`, the input of `nn.BatchNorm3d`.

    The same layer, with the same state_dict; it refuses inputs with another number of dimensions.

    Args:
        num_features and all settings: as in `StreamingNorm`.

    Shape:
        - x: `(N, C, D, H, W)`, or `(N, D, H, W, C)` with `channel_dim=-1`; the output has the same shape.
        - mask, step: as in `StreamingNorm`.

    Example:
        >>> import torch
        >>> StreamingNorm3d(3)(torch.randn(1, 3, 4, 8, 8)).shape
        torch.Size([1, 3, 4, 8, 8])
    """

    _spaces: ClassVar = {5: "D, H, W"}
    _dims = frozenset({5})
