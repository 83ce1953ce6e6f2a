"""The norm that takes the place of another: its parameters, type, place, eps and statistics are carried over."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..core.config import is_number
from ..engine.merging import WORLD
from ..nn.base import Norm
from ..nn.batch import GeneralBatchNorm, TimeSpecificNorm
from ..nn.streaming import StreamingNorm
from .places import title
from .reporting import AFRESH


class Make:
    """What a rule of `convert` gets beside the old module: it makes the norm that the call of `convert` asked for.

    Args:
        old: the module to be replaced; it is only read.
        norm: what `convert` was given as `norm`.
        settings: the further arguments that `convert` was given, which win over those of the rule.
        like: a tensor that lends type and place to a norm without tensors of its own.
    """

    def __init__(
        self, old: nn.Module, norm: Callable[..., nn.Module], settings: dict[str, Any], like: Tensor | None
    ) -> None:
        self.old, self.norm, self.settings, self.like = old, norm, settings, like
        self.remarks: list[str] = []  # for the report

    def __call__(
        self,
        num_features: int,
        *,
        eps: float = 1e-5,
        channel_dim: int = 1,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        mean: Tensor | None = None,
        var: Tensor | None = None,
        dims: int | None = None,
        **settings: Any,
    ) -> nn.Module:
        """A new norm.

        Args:
            num_features: the number of channels.
            eps: that the old one adds to a variance.
            channel_dim: 1 if the old one takes `(N, C, *space)`, -1 for `(N, *space, C)`.
            weight: the gain; a Parameter stays the same object, of another tensor a Parameter is made.
            bias: the same.
            mean: running mean, of shape `(num_features,)`, with which evaluation begins.
            var: running variance, the same.
            dims: how many dimensions inputs have, if that is known: `to_batchnorm` asks for it.
            settings: further arguments of the norm.
        """
        like = next((tensor for tensor in (weight, bias, mean) if tensor is not None), self.like)
        given: dict[str, Any] = {
            "eps": eps,
            "affine": weight is not None or bias is not None,
            "channel_dim": channel_dim,
            "device": None if like is None else like.device,
            "dtype": None if like is None else like.dtype,
        }
        kind, momentum = self.norm if isinstance(self.norm, type) else object, getattr(self.old, "momentum", None)
        if issubclass(kind, GeneralBatchNorm | TimeSpecificNorm) and is_number(momentum):
            given["momentum"] = momentum
        new = self.norm(num_features, **(given | settings | self.settings))
        if not isinstance(new, nn.Module):
            raise TypeError(f"norm made {type(new).__name__}: it must make an nn.Module")
        synchronized = isinstance(self.old, nn.SyncBatchNorm) and "process_group" not in self.settings
        if isinstance(new, StreamingNorm) and synchronized:
            new.process_group = new.process_group or self.old.process_group or WORLD
        self._keep(new, {"weight": weight, "bias": bias})
        if isinstance(new, Norm):
            if dims is not None:
                new._remember(dims)
            self._start(new, mean, var, eps)
            if isinstance(new, StreamingNorm) and not new.affine and new.process_group is not None:
                self.remarks.append(
                    "without parameters, and merged over processes: streamnorm.attach tells it of weight updates"
                )
        return new

    def _keep(self, new: nn.Module, tensors: dict[str, Tensor | None]) -> None:
        """Gain and bias are the ones that are given."""
        kept = {name: tensor for name, tensor in tensors.items() if getattr(new, name, None) is not None}
        if all(tensor is None for tensor in kept.values()):
            return  # asked for with affine=True, in place of a norm that had no gain
        for name, tensor in kept.items():
            shape = tuple(getattr(new, name).shape)
            if tensor is not None and tensor.shape != shape:
                raise ValueError(
                    f"norm made a {name} of shape {shape}, but {title(self.old)} has one of shape {tuple(tensor.shape)}"
                )
            if tensor is not None and not isinstance(tensor, nn.Parameter):
                if tensor.requires_grad:
                    raise TypeError(f"{name} is computed from other parameters: pass a Parameter or a constant")
                tensor = nn.Parameter(tensor.clone())
            setattr(new, name, tensor)

    def _start(self, new: Norm, mean: Tensor | None, var: Tensor | None, eps: float) -> None:
        """Hand running statistics over, if there are any, and remark where that cannot be done."""
        if (mean is None) != (var is None):
            raise ValueError("a rule gave one of mean= and var=: pass both, or none to start afresh")
        if new._stored is None:
            if mean is not None:
                self.remarks.append("keeps no statistics")
            return
        if mean is None or var is None:
            self.remarks.append(AFRESH)
            return
        if mean.shape != (new.num_features,) or var.shape != mean.shape:
            shapes = f"{tuple(mean.shape)} and {tuple(var.shape)}"
            raise ValueError(f"mean and var of shapes {shapes}: both must be (num_features,) = ({new.num_features},)")
        if getattr(new, "mean").shape != mean.shape:  # noqa: B009
            self.remarks.append(f"{AFRESH}: {new.ref} has no place for one statistic per channel")
            return
        if mean.is_meta:
            return
        wide = torch.promote_types(var.dtype, torch.float32)  # in which torch takes the root
        state = {"running_mean": mean, "running_var": var.to(wide)}
        tracked = self.old._buffers.get("num_batches_tracked")
        # Sigma with the eps it was trained with, so that evaluation does not change; the new one serves from now on.
        settled, new.eps = new.eps, eps
        new.load_state_dict(state if tracked is None else state | {"num_batches_tracked": tracked}, strict=False)
        new.eps = settled
