"""Rules of ours for norms of torch and of other libraries, which are known by name: nothing is imported for them."""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..core.config import is_number
from .making import Make
from .reporting import Reason

Factory = Callable[[Any, Make], nn.Module | Reason | str | None]

# How many dimensions the inputs of an old norm have.
DIMS = {
    nn.BatchNorm1d: 1,  # two or three
    nn.BatchNorm2d: 4,
    nn.BatchNorm3d: 5,
    nn.InstanceNorm1d: 3,
    nn.InstanceNorm2d: 4,
    nn.InstanceNorm3d: 5,
}


class NormAct(nn.Module):
    """A norm, then dropout, then an activation: what stands for a class that is all three at once.

    y = act(drop(norm(x))). In its state_dict the norm's keys have no prefix, as in the class that it stands for.

    Args:
        norm: the norm.
        drop: dropout, or `nn.Identity`.
        act: the activation, or `nn.Identity`.

    Example:
        >>> NormAct(nn.BatchNorm1d(3), nn.Identity(), nn.ReLU()).state_dict().keys()
        odict_keys(['weight', 'bias', 'running_mean', 'running_var', 'num_batches_tracked'])
    """

    def __init__(self, norm: nn.Module, drop: nn.Module, act: nn.Module) -> None:
        super().__init__()
        self.norm, self.drop, self.act = norm, drop, act

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.act(self.drop(self.norm(x))))

    def state_dict(self, *, prefix: str = "", **options: Any) -> Any:
        found = super().state_dict(prefix=prefix, **options)
        for key in [key for key in found if key.startswith(f"{prefix}norm.")]:
            found[prefix + key.removeprefix(f"{prefix}norm.")] = found.pop(key)
        return found

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        for key in [key for key in state_dict if key.startswith(prefix)]:
            name = key.removeprefix(prefix)
            if not name.startswith(("norm.", "drop.", "act.")):
                state_dict[f"{prefix}norm.{name}"] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *rest)


def batch_norm(old: Any, make: Make) -> nn.Module:
    """torch's batch and instance norms, and what has their attributes."""
    dims = next((dims for kind, dims in DIMS.items() if isinstance(old, kind)), None)
    return make(
        old.num_features,
        eps=old.eps,
        weight=old.weight,
        bias=old.bias,
        mean=old.running_mean,
        var=old.running_var,
        dims=dims,
    )


def group_norm(old: Any, make: Make) -> nn.Module:
    return make(old.num_channels, eps=old.eps, weight=old.weight, bias=old.bias)


def layer_norm(old: Any, make: Make, channel_dim: int = -1) -> nn.Module | Reason:
    shape = tuple(old.normalized_shape)
    if len(shape) > 1:
        return Reason(
            f"it normalizes over several dimensions, {shape}, and not over channels alone",
            "trains at any batch size as it is, with the statistics of each sample",
        )
    dims = 4 if channel_dim == 1 else None
    return make(shape[0], eps=old.eps, weight=old.weight, bias=old.bias, channel_dim=channel_dim, dims=dims)


def channels_first(old: Any, make: Make) -> nn.Module | Reason:
    """A layer norm at each location of `(N, C, H, W)`."""
    return layer_norm(old, make, channel_dim=1)


def by_data_format(old: Any, make: Make) -> nn.Module | Reason:
    """The layer norm of transformers' ConvNeXt, and its copies."""
    return layer_norm(old, make, channel_dim=1 if old.data_format == "channels_first" else -1)


def with_act(rule: Factory) -> Factory:
    """The same for a class that goes on with dropout and an activation, as those of timm do."""

    def made(old: Any, make: Make) -> Any:
        new = rule(old, make)
        drop, act = getattr(old, "drop", None), getattr(old, "act", getattr(old, "activation", None))
        if not isinstance(new, nn.Module):
            return new
        return NormAct(new, nn.Identity() if drop is None else drop, nn.Identity() if act is None else act)

    return made


def rms(old: Any, make: Make) -> nn.Module | Reason:
    """A rule for RMS norms, on request: a norm of ours with center="zero", with the same gain and no bias.

    Its sigma is about zero, as theirs; other than theirs it also subtracts the mean. A class that computes anything
    but x / sqrt(average x^2 + eps) * weight over the last dimension is left alone.

    Example:
        >>> from streamnorm import SampleNorm, convert
        >>> norm = convert(nn.RMSNorm(8), SampleNorm, ref="SP5", rules={nn.RMSNorm: convert.rms}, report=None)
        >>> norm.center, norm.bias
        ('zero', None)
    """
    weight = old._parameters.get("weight")
    if weight is None or weight.ndim != 1:
        return Reason("an RMS norm without a gain per channel, so its size is not known")
    eps = eps_of(old)
    eps = torch.finfo(weight.dtype).eps if eps is None else eps
    if not weight.is_meta and not _scales_by_rms(old, weight, eps):
        return Reason("it computes something else than x / sqrt(average x^2 + eps) * weight")
    return make(len(weight), eps=eps, weight=weight, channel_dim=-1, center="zero")


def eps_of(old: nn.Module) -> float | None:
    """By the names that libraries have for it."""
    values: list[Any] = [getattr(old, name, None) for name in ("eps", "variance_epsilon", "epsilon")]
    return next((float(value) for value in values if is_number(value)), None)


def is_rms(old: nn.Module) -> bool:
    """Whether a norm of an unknown class is an RMS norm, by what it computes."""
    weight, eps = old._parameters.get("weight"), eps_of(old)
    if weight is None or weight.ndim != 1 or weight.is_meta or eps is None or set(old._parameters) != {"weight"}:
        return False
    return _scales_by_rms(old, weight, eps)


@torch.no_grad()
def _scales_by_rms(old: nn.Module, weight: Tensor, eps: float) -> bool:
    """Whether a norm does to numbers of ordinary size what its name says, which is not known of its class."""
    x = torch.linspace(-1, 2, 2 * len(weight), device=weight.device).reshape(2, -1)
    try:
        y = type(old).forward(old, x.to(weight.dtype)).float()
    except (TypeError, ValueError, RuntimeError):  # a gate, other dimensions
        return False
    expected = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.float()
    near = 1e-4 if weight.dtype in (torch.float32, torch.float64) else 0.05
    return y.shape == expected.shape and torch.allclose(y, expected, rtol=near, atol=near)


TIMM: dict[str, Factory] = {
    "BatchNormAct2d": with_act(batch_norm),
    "SyncBatchNormAct": with_act(batch_norm),
    "GroupNorm": group_norm,
    "GroupNorm1": group_norm,
    "GroupNormAct": with_act(group_norm),
    "GroupNorm1Act": with_act(group_norm),
    "LayerNorm": layer_norm,
    "LayerNormFp32": layer_norm,
    "LayerNorm2d": channels_first,
    "LayerNorm2dFp32": channels_first,
    "LayerNormExp2d": channels_first,
    "LayerNormAct": with_act(layer_norm),
    "LayerNormActFp32": with_act(layer_norm),
    "LayerNormAct2d": with_act(channels_first),
    "LayerNormAct2dFp32": with_act(channels_first),
}
# One text, copied under many names.
DATA_FORMAT = """
    ConvNext ConvNextV2 DINOv3ConvNext Sam Sam2 Sam2Video Sam3Tracker Sam3TrackerVideo SamHQ EdgeTam EdgeTamVideo SegGpt
    GotOcr2 SLANeXt PPFormulaNet DeepseekVLHybrid DeepseekOcr2Sam UnlimitedOcrSam LwDetr RfDetr
"""
# Torch's own, by what computes, so that classes that only rename them are served.
BY_FORWARD: dict[Any, Factory] = {
    nn.BatchNorm1d.forward: batch_norm,
    nn.SyncBatchNorm.forward: batch_norm,
    nn.InstanceNorm1d.forward: batch_norm,
    nn.LayerNorm.forward: layer_norm,
    nn.GroupNorm.forward: group_norm,
}
LIBRARIES: dict[str, dict[str, Factory]] = {
    "timm": TIMM,
    "torchvision": {"LayerNorm2d": channels_first},
    "transformers": {f"{name}LayerNorm": by_data_format for name in DATA_FORMAT.split()}
    | {"BitGroupNormActivation": with_act(group_norm)},
}
NO_MEAN = Reason(
    "it subtracts no mean, so it is no kin of a streaming norm",
    'on request, rules={cls: streamnorm.convert.rms} makes a norm with center="zero" of it',
)
FROZEN = ("FrozenBatchNorm2d", "FrozenBatchNormAct2d")
# RMS norms by another name.
T5 = "T5 MT5 UMT5 LongT5 SwitchTransformers Pix2Struct Pop2Piano Udop"
RMS = {f"{name}LayerNorm" for name in T5.split()}


def known_rule(kind: type) -> Factory | None:
    """The rule for a class of another library, by its name and that of its package."""
    return LIBRARIES.get(kind.__module__.partition(".")[0], {}).get(kind.__name__)


def known_reason(kind: type) -> Reason | None:
    """Why the norms of a class stay, if its name says enough."""
    names = [base.__name__ for base in kind.__mro__]
    if any(name.endswith(FROZEN) for name in names):
        return Reason(
            "it is frozen, a constant scale and shift",
            "trains at any batch size as it is; the page on converting has a rule that thaws it",
        )
    return NO_MEAN if any("rmsnorm" in name.lower() or name in RMS for name in names) else None
