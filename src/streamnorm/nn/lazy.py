"""Streaming norms that find the number of their channels at the first call, as torch's lazy modules do."""

from collections.abc import Callable
from inspect import signature
from typing import Any, Concatenate, ParamSpec

from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import UninitializedParameter, is_lazy

from ..backends.memory import outside_inference_mode
from ..engine.context import Proxy
from .base import check_count
from .hints import hinted
from .loading import is_batchnorm
from .ranked import StreamingNorm1d, StreamingNorm2d, StreamingNorm3d
from .streaming import StreamingNorm

Settings = ParamSpec("Settings")


def _without_size(
    sized: Callable[Concatenate[Any, int, Settings], None],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, Settings], None]]:
    """The signature of a constructor, but for the size: the settings are listed once."""
    known = signature(sized)
    kept = [each for name, each in known.parameters.items() if name != "num_features"]

    def signed(init: Callable[..., None]) -> Callable[Concatenate[Any, Settings], None]:
        init.__signature__ = known.replace(parameters=kept)  # type: ignore[attr-defined]
        return init

    return signed


def _unsized(like: nn.Parameter) -> Any:
    return UninitializedParameter(device=like.device, dtype=like.dtype)  # type: ignore[call-arg]


@hinted
class LazyStreamingNorm(LazyModuleMixin, StreamingNorm):
    """A `StreamingNorm` that finds `num_features` at its first call, from the channels of the input.

    Until then it has no statistics, and its gain and bias are of no size, as in `nn.LazyBatchNorm1d`; optimizers and
    `streamnorm.attach` may have it already. The first call, in training or evaluation, makes it a `StreamingNorm`; a
    call that is refused leaves it as it is. A state_dict that is loaded gives it its size too.

    Args:
        all settings: as in `StreamingNorm`.

    Shape: as in `StreamingNorm`.

    Example:
        >>> import torch
        >>> norm = LazyStreamingNorm(p=1)
        >>> y = norm(torch.randn(1, 3))
        >>> norm
        StreamingNorm(3, p=1.0)
    """

    cls_to_become = StreamingNorm

    @_without_size(StreamingNorm.__init__)
    def __init__(self, **settings: Any) -> None:
        super().__init__(0, **settings)
        if self.weight is not None and self.bias is not None:
            self.weight, self.bias = _unsized(self.weight), _unsized(self.bias)

    def _check_size(self, num_features: int) -> None:
        """It comes with the first call."""

    def initialize_parameters(self, x: Tensor, mask: Tensor | None = None, step: int = 0) -> None:
        """Take the size of an input, if a call with it is not refused."""
        if isinstance(x, Proxy):
            raise TypeError(f"{self} has no size yet: run one batch through the model before torch.fx traces it")
        before = self.num_features
        try:
            if not before:
                self._expect(x.shape[self.channel_dim] if isinstance(x, Tensor) and x.ndim > 1 else 1)
            self._to_channels_first(x, mask)
        except BaseException:
            self.num_features = before
            raise
        self._settle()

    def _expect(self, size: int) -> None:
        check_count("num_features", size)
        self.num_features = size
        self._check(self.config)

    def _settle(self) -> None:
        """Parameters and state of the size that is known now; what was loaded stays."""
        with outside_inference_mode():
            if not self._stored.numel():
                self.reset_running_stats()
            parameters: tuple[Any, ...] = self.weight, self.bias
            for parameter, fill in zip(parameters, (nn.init.ones_, nn.init.zeros_), strict=True):
                if is_lazy(parameter):
                    parameter.materialize((self.num_features,))
                    fill(parameter)

    def reset_parameters(self) -> None:
        if self.num_features:
            super().reset_parameters()

    def __getstate__(self) -> dict[str, Any]:
        parameters: dict[str, Any] = self._parameters
        types = {name: each.dtype for name, each in parameters.items() if is_lazy(each)}
        return super().__getstate__() | {"_types": types}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """What torch pickles of a parameter without a size is no type and no place."""
        super().__setstate__({name: value for name, value in state.items() if name != "_types"})
        for name, dtype in state["_types"].items():
            self._parameters[name].data = self._stored.new_empty(0, dtype=dtype)  # type: ignore[union-attr]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        # Not by the mixin, which knows of no state; parameters without a size cannot be detached.
        as_they_are = keep_vars or self.has_uninitialized_params()
        super(LazyModuleMixin, self)._save_to_state_dict(destination, prefix, as_they_are)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        size = 0 if self.num_features else self._size_in(state_dict, prefix)
        if size:
            self._expect(size)
            self._settle()
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _size_in(self, state_dict: Any, prefix: str) -> int:
        """The channels of a layer that was saved; 0 if nothing there depends on them."""
        per_channel = self.ref.channels == "each" or is_batchnorm(state_dict, prefix)
        names = ["weight", "bias", *(["mean", "running_mean"] if per_channel else [])]
        saved = [state_dict.get(prefix + name) for name in names]
        vectors = [each for each in saved if isinstance(each, Tensor) and not is_lazy(each) and each.numel()]
        return vectors[0].shape[0] if vectors and vectors[0].ndim else 0


@hinted
class LazyStreamingNorm1d(LazyStreamingNorm, StreamingNorm1d):
    """A `StreamingNorm1d` that finds `num_features` at its first call; see `LazyStreamingNorm`.

    Args:
        all settings: as in `StreamingNorm`.

    Shape: as in `StreamingNorm1d`.

    Example:
        >>> import torch
        >>> norm = LazyStreamingNorm1d()
        >>> norm(torch.randn(1, 3)).shape
        torch.Size([1, 3])
    """

    cls_to_become = StreamingNorm1d


@hinted
class LazyStreamingNorm2d(LazyStreamingNorm, StreamingNorm2d):
    """A `StreamingNorm2d` that finds `num_features` at its first call; see `LazyStreamingNorm`.

    Args:
        all settings: as in `StreamingNorm`.

    Shape: as in `StreamingNorm2d`.

    Example:
        >>> import torch
        >>> norm = LazyStreamingNorm2d(channel_dim=-1)
        >>> _ = norm(torch.randn(1, 8, 8, 3))
        >>> norm
        StreamingNorm2d(3, channel_dim=-1)
    """

    cls_to_become = StreamingNorm2d


@hinted
class LazyStreamingNorm3d(LazyStreamingNorm, StreamingNorm3d):
    """A `StreamingNorm3d` that finds `num_features` at its first call; see `LazyStreamingNorm`.

    Args:
        all settings: as in `StreamingNorm`.

    Shape: as in `StreamingNorm3d`.

    Example:
        >>> import torch
        >>> norm = LazyStreamingNorm3d()
        >>> norm(torch.randn(1, 3, 4, 8, 8)).shape
        torch.Size([1, 3, 4, 8, 8])
    """

    cls_to_become = StreamingNorm3d
