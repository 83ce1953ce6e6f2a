"""What all norms share: their statistic, gain and bias, and the checks at the door."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from .dispatch import apply, materialized, native_operator
from .encoders import watch_encoders
from .kernels import in_memory
from .moments import Moments, Statistic
from .native import Results
from .normref import CODES, NormRef, resolve
from .transforms import refuse_transforms

Device = torch.device | str | int | None


class Norm(nn.Module):
    """Base of the public norms, never used by itself."""

    _paused = 0  # depth of `paused` contexts
    _dims: frozenset[int] = frozenset()  # see `remember`

    def __init__(
        self,
        num_features: int,
        *,
        ref: str | NormRef,
        p: float,
        center: str,
        eps: float,
        affine: bool,
        channel_dim: int,
        device: Device,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        watch_encoders(Norm)
        check_count("num_features", num_features)
        if not (is_number(p) and p >= 1):
            raise ValueError(f"p={p!r}: the order of the moment must be a finite number of at least 1")
        if not (is_number(eps) and eps >= 0):
            raise ValueError(f"eps={eps!r}: must be a finite number of at least 0")
        if center not in ("mean", "running", "zero"):
            raise ValueError(f'center={center!r}: use "mean" (setting A), "running" (B) or "zero" (C)')
        check_channel_dim(channel_dim)
        check_dtype(dtype)
        self.num_features = num_features
        self.ref = resolve(ref)
        self.p = float(p)
        self.center = center
        self.eps = float(eps)
        self.affine = bool(affine)
        self.channel_dim = channel_dim
        pooled = num_features if self.ref.channels == "all" else 1
        if center == "mean" and not self.ref.samples and self.ref.space == 1 and pooled == 1:
            raise ValueError(
                f"{self.ref} with num_features={num_features} has one element per statistic, from which "
                'center="mean" leaves nothing: use center="zero", or a larger reference'
            )
        self.weight: nn.Parameter | None = None
        self.bias: nn.Parameter | None = None
        if affine:
            self.weight, self.bias = new_affine(num_features, device, dtype)

    @property
    def collects(self) -> bool:
        """Whether a call now takes statistics of its input."""
        return True

    @property
    def learns(self) -> bool:
        """Whether a call now changes the statistics that the norm keeps."""
        return self.training and not self._paused

    @property
    def stored(self) -> Tensor | None:
        """The stored mean, if the norm keeps one; its shape is that of all stored statistics."""
        return None

    @property
    def statistic(self) -> Statistic:
        """What S depends on but the data."""
        return Statistic(self.ref, self.p, self.center, self.eps)

    def reset_running_stats(self) -> None:
        """Forget the statistics, if the norm keeps any."""

    def reset_parameters(self) -> None:
        """Gain 1, bias 0, and no statistics, as in `nn.BatchNorm`."""
        self.reset_running_stats()
        reset_affine(self.weight, self.bias)

    def enter(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Check a call and give its input as `(N, C, *space)` and its mask as `(N, 1, *space)`."""
        if self.learns:
            refuse_transforms(type(self).__name__)
        x = channels_second(x, self.num_features, self.channel_dim)
        if mask is not None:
            mask = mask_over_channels(mask, x)
        if self.collects:
            self.check_elements(x)
        self._check_space(x)
        if not torch.compiler.is_compiling():
            check_memory(input=x, **self._parameters)
            x = materialized(x)
            self.remember(x.ndim if mask is None else 0)
        return x, mask

    def check_elements(self, x: Tensor) -> None:
        """Whether statistics can be taken of `(N, C, *space)`."""
        fewest = self.ref.fewest_elements(x.shape) if x.numel() else 0
        if fewest == 0:
            raise ValueError(f"input of shape {tuple(x.shape)} is empty: statistics need at least one element")
        if fewest == 1 and self.center == "mean":
            more = "larger batches" if self.ref.samples else "a larger reference"
            raise ValueError(
                f"input of shape {tuple(x.shape)} has one element per statistic ({self.ref}), from which "
                f'center="mean" leaves nothing: use StreamingNorm with center="running", or {more}'
            )

    def remember(self, dims: int) -> None:
        """Note how many dimensions inputs have, which decides what can stand for the layer.

        0: there was a mask or a timestep, as only norms of ours take them.
        """
        if dims not in self._dims:  # attributes of modules are slow to set
            self._dims |= {dims}

    def remember_step(self) -> None:
        """The same for a call that was given a timestep."""
        if not torch.compiler.is_compiling():
            self.remember(0)

    def leave(self, y: Tensor) -> Tensor:
        """Undo the change of layout of `enter`."""
        return y if self.channel_dim == 1 else y.movedim(1, -1)

    def native(self, x: Tensor, mask: Tensor | None, stored: Tensor | None = None) -> Results | None:
        """N(x, S(x)) by torch's own operator, the mean and 1 / sigma; None where there is none that applies."""
        if self.p != 2 or self.center != "mean" or self.eps == 0:
            return None
        weight, bias = self.weight, self.bias
        operator = native_operator(self.ref, x, mask, weight, bias, stored)
        return operator(x, weight, bias, self.eps) if operator else None

    def normalize_by_own(self, x: Tensor, own: Moments, mask: Tensor | None) -> Tensor:
        """N(x, S(x)), differentiated exactly: sample and batch normalization."""
        y = apply(
            x, self.weight, self.bias, mask, own.mean, own.sigma, own, self.statistic, lambda mean, sigma: (mean, sigma)
        )
        return self.leave(y)

    def view(self, mean: Tensor, sigma: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Stored statistics, shaped to broadcast against the input; 0 and 1 where nothing is stored yet."""
        if mean.numel() == 0:
            shape = tuple(1 for _ in x.shape)
            return mean.new_zeros(shape), sigma.new_ones(shape)
        shape = self.ref.kept_shape(x.shape)
        return mean.reshape(shape), sigma.reshape(shape)

    def statistic_shape(self, x: Tensor) -> tuple[int, ...]:
        """Shape of a stored statistic for this input."""
        return self.ref.statistic_shape(self.num_features, tuple(x.shape[2:]))

    def initial_shape(self) -> tuple[int, ...]:
        """Shape of a stored statistic before the first call: empty where it depends on the spatial size."""
        return (0,) if self.ref.located else self.ref.statistic_shape(self.num_features, ())

    def _check_space(self, x: Tensor) -> None:
        """References with a location belong to one spatial size, that of the first training call."""
        stored = self.stored if self.ref.located else None
        if stored is not None and stored.numel() and tuple(stored.shape) != self.statistic_shape(x):
            bound = tuple(stored.shape[self.ref.channels == "each" :])
            raise ValueError(
                f"input has spatial size {tuple(x.shape[2:])}, but {self.ref} keeps statistics per location and this "
                f"layer is bound to {bound}: call reset_running_stats() first, or use a reference without a location"
            )

    def can_hold(self, shape: torch.Size) -> bool:
        """Whether statistics of this shape may replace the stored ones: the same, or either not bound to a size yet."""
        stored = self.stored
        if stored is None or shape == stored.shape:
            return stored is not None
        legal = shape == (0,) or self.ref.channels == "all" or shape[:1] == (self.num_features,)
        return self.ref.located and legal and (stored.numel() == 0 or shape == (0,))

    def arguments(self, **own: object) -> dict[str, object]:
        """The constructor's arguments, but for the size."""
        code = {ref: code for code, ref in CODES.items()}.get(self.ref, self.ref)
        common = {"ref": code, "p": self.p, "center": self.center}
        return common | own | {"eps": self.eps, "affine": self.affine, "channel_dim": self.channel_dim}

    def settings(self, **own: object) -> str:
        """The same for `extra_repr`."""
        return ", ".join([str(self.num_features)] + [f"{k}={v!r}" for k, v in self.arguments(**own).items()])

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        # A copy is not paused, and makes its own plans.
        return {key: value for key, value in state.items() if key not in ("_paused", "_plan", "_known", "_sent")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        watch_encoders(Norm)  # in another process this may be the first norm
        super().__setstate__(state)  # type: ignore[no-untyped-call]


def new_affine(num_features: int, device: Device, dtype: torch.dtype | None) -> tuple[nn.Parameter, nn.Parameter]:
    return (
        nn.Parameter(torch.ones(num_features, device=device, dtype=dtype)),
        nn.Parameter(torch.zeros(num_features, device=device, dtype=dtype)),
    )


def reset_affine(weight: Tensor | None, bias: Tensor | None) -> None:
    if weight is not None:
        nn.init.ones_(weight)
    if bias is not None:
        nn.init.zeros_(bias)


def statistics_like(device: Device, dtype: torch.dtype | None) -> Tensor:
    """An empty tensor of the type and place of a new layer's statistics."""
    dtype = torch.promote_types(dtype or torch.get_default_dtype(), torch.float32)
    return torch.empty(0, device=device, dtype=dtype)


def moved(tensor: Tensor, fn: Any) -> Tensor:
    """`fn` of `nn.Module._apply`, except that counters keep their type and statistics stay float32 or wider."""
    result: Tensor = fn(tensor)
    dtype = torch.promote_types(result.dtype, torch.float32) if tensor.is_floating_point() else tensor.dtype
    return result if result.dtype == dtype else tensor.to(device=result.device, dtype=dtype)


def outside_inference_mode() -> AbstractContextManager[Any]:
    """For tensors that outlive the call: what is made in inference mode could not be used in training later."""
    if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():
        return nullcontext()
    return torch.inference_mode(False)


def is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return isfinite(value)
    except OverflowError:  # an integer too large for a float
        return False


def numbers(name: str, values: Sequence[float], meaning: str) -> tuple[float, ...]:
    """`values` as floats, one for each word of `meaning`."""
    wanted = len(meaning.split())
    if isinstance(values, str) or not isinstance(values, Sequence) or not all(map(is_number, values)):
        raise ValueError(f"{name}={values!r}: must be {wanted} finite numbers ({meaning})")
    if len(values) != wanted:
        raise ValueError(f"{name}={values!r} has {len(values)} numbers: it takes {wanted} ({meaning})")
    return tuple(map(float, values))


def check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        shape = ", not a shape" if isinstance(value, tuple | list) else ""
        raise ValueError(f"{name}={value!r}: must be a whole number of at least 1{shape}")


def check_dtype(dtype: torch.dtype | None) -> None:
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"dtype={dtype}: normalization needs a real floating point type")


def check_channel_dim(channel_dim: object) -> None:
    if type(channel_dim) is not int or channel_dim not in (1, -1):
        raise ValueError(f"channel_dim={channel_dim!r}: use 1 for (N, C, *space) or -1 for (N, *space, C)")


def channels_second(x: Tensor, num_features: int, channel_dim: int) -> Tensor:
    """The input as `(N, C, *space)`, checked."""
    if not isinstance(x, Tensor):
        raise TypeError(f"input is {type(x).__name__}: pass a torch.Tensor")
    if x.is_nested:
        raise TypeError(
            "input is a nested tensor: pass a padded one and a mask; in an nn.TransformerEncoder whose layers got this "
            "norm after it was built, set encoder.use_nested_tensor = False"
        )
    if x.layout != torch.strided:
        raise TypeError(f"input has layout {x.layout}: normalization needs a dense tensor, such as x.to_dense()")
    if not x.is_floating_point():
        raise TypeError(f"input has dtype {x.dtype}: normalization needs real floating point, such as x.float()")
    layout = "(N, C, *space)" if channel_dim == 1 else "(N, *space, C)"
    if x.ndim < 2:
        one = "; for one sample pass x.unsqueeze(0)" if x.shape == (num_features,) else ""
        raise ValueError(f"input of shape {tuple(x.shape)} has {x.ndim} dimension(s): expected {layout}{one}")
    if x.shape[channel_dim] != num_features:
        single = channel_dim == 1 and x.shape[0] == num_features
        one = "; for one sample (C, *space) pass x.unsqueeze(0)" if single else ""
        raise ValueError(
            f"input of shape {tuple(x.shape)} has {x.shape[channel_dim]} channels in dimension {channel_dim}, the "
            f"layer has num_features={num_features}: expected {layout} (see channel_dim){one}"
        )
    return x if channel_dim == 1 else x.movedim(-1, 1)


def check_memory(**tensors: Tensor | None) -> None:
    """Refuse tensors whose storage was resized under them: torch and the kernels would read beyond its end."""
    for name, tensor in tensors.items():
        if tensor is not None and not in_memory(tensor):
            raise ValueError(
                f"{name} of shape {tuple(tensor.shape)} has {tensor.untyped_storage().nbytes()} bytes of memory, fewer "
                "than its shape needs: the storage was resized or freed; resize it back, or give the values anew"
            )


def mask_over_channels(mask: Tensor, x: Tensor) -> Tensor:
    """The mask as `(N, 1, *space)`, checked."""
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        kind = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"mask is {kind}: pass a bool tensor, True where the activation is real")
    wanted = x.shape[:1] + x.shape[2:]
    try:
        return mask.expand(wanted).unsqueeze(1)
    except RuntimeError:
        raise ValueError(
            f"mask of shape {tuple(mask.shape)} does not broadcast to (N, *space) = {tuple(wanted)}"
        ) from None
