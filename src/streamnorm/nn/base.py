"""What all norms share: their statistic, gain and bias, and the checks at the door."""

from dataclasses import fields, replace
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from ..backends import active, reasons, signature_of
from ..core.config import Statistic
from ..core.reference import code_of
from ..core.state import State
from ..engine.compat import is_rewritten
from ..engine.context import check_memory, materialized, refuse_transforms
from ..engine.replay import is_watched
from .encoders import watch_encoders

Device = torch.device | str | int | None


def setting(name: str, meaning: str) -> Any:
    """An attribute of a norm that stands in its `config`. It can be set, and is checked again."""

    def read(norm: Any) -> Any:
        return getattr(norm.config, name)

    def write(norm: Any, value: Any) -> None:
        config = replace(norm.config, **{name: value})
        norm._check(config)
        norm.config = config

    return property(read, None if name == "ref" else write, doc=meaning)  # statistics belong to their reference


class Norm(nn.Module):
    """Base of the public norms, never used by itself."""

    _paused = 0  # depth of `paused` contexts
    _dims: frozenset[int] = frozenset()  # see `_remember`
    config: Statistic
    _config_type: type[Statistic] = Statistic

    def __init__(
        self,
        num_features: int,
        config: Statistic,
        *,
        affine: bool,
        channel_dim: int,
        device: Device,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        watch_encoders(Norm)
        self._check_size(num_features)
        check_channel_dim(channel_dim)
        check_dtype(dtype)
        self.num_features = num_features
        self._check(config)
        self.config = config
        self.affine = bool(affine)
        self.channel_dim = channel_dim
        self.weight: nn.Parameter | None = None
        self.bias: nn.Parameter | None = None
        if affine:
            self.weight, self.bias = new_affine(num_features, device, dtype)

    def _check_size(self, num_features: int) -> None:
        check_count("num_features", num_features)

    def _check(self, config: Statistic) -> None:
        """Refuse settings that this kind of norm cannot have."""
        ref, pooled = config.ref, self.num_features if config.ref.channels == "all" else 1
        if config.center == "mean" and not ref.samples and ref.space == 1 and pooled == 1:
            raise ValueError(
                f"{ref} with num_features={self.num_features} has one element per statistic, from which "
                'center="mean" leaves nothing: use center="zero", or a larger reference'
            )

    ref = setting("ref", "Which activations share statistics.")
    p = setting("p", "The order of the moment.")
    center = setting("center", "What the p-th moment is taken about.")
    eps = setting("eps", "Added inside of the root of sigma.")

    @property
    def _collects(self) -> bool:
        """Whether a call now takes statistics of its input."""
        return True

    @property
    def _learns(self) -> bool:
        """Whether a call now changes the statistics that the norm keeps."""
        return self.training and not self._paused

    @property
    def _stored(self) -> Tensor | None:
        """The stored mean, if the norm keeps one; its shape is that of all stored statistics."""
        return None

    def reset_running_stats(self) -> None:
        """Forget the statistics, if the norm keeps any."""

    def reset_parameters(self) -> None:
        """Gain 1, bias 0, and no statistics, as in `nn.BatchNorm`."""
        self.reset_running_stats()
        reset_affine(self.weight, self.bias)

    def _to_channels_first(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Check a call and give its input as `(N, C, *space)` and its mask as `(N, 1, *space)`."""
        if self._learns:
            refuse_transforms(type(self).__name__)
        self._check_rank(x)
        x = to_channels_first(x, self.num_features, self.channel_dim)
        if mask is not None:
            mask = mask_over_channels(mask, x)
        if self._collects:
            self._check_elements(x)
        self._check_space(x)
        if not torch.compiler.is_compiling():
            check_memory(input=x, **self._parameters)
            x = materialized(x)
            self._remember(x.ndim if mask is None else 0)
        return x, mask

    def _at_once(self, x: Tensor, mean: Tensor, sigma: Tensor) -> Tensor | None:
        """An evaluation that nobody differentiates, if a backend does it in one go, and with no other checks.

        None where there is anything to look at: the door has more to say.
        """
        own, normalize = self.__dict__, active().normalize
        if normalize is None or torch.is_grad_enabled() or type(x) is not Tensor or x.ndim not in self._dims:
            return None
        if own["channel_dim"] != 1 or own["config"].ref.located or is_rewritten() or is_watched():
            return None
        affine = self._own_affine()
        return None if affine is None else normalize(x, mean, sigma, *affine)

    def _own_affine(self) -> tuple[nn.Parameter | None, nn.Parameter | None] | None:
        """Gain and bias, if they are parameters of this layer; None where one is made of others: parametrized, say."""
        own: dict[str, Any] = self.__dict__
        parameters = own["_parameters"]
        if own["affine"] and not ("weight" in parameters and "bias" in parameters):
            return None
        return parameters.get("weight"), parameters.get("bias")

    def _check_rank(self, x: Tensor) -> None:
        """Refuse inputs with a number of dimensions that this norm is not for."""

    def _check_elements(self, x: Tensor) -> None:
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

    def _remember(self, dims: int) -> None:
        """Note how many dimensions inputs have, which decides what can stand for the layer.

        0: there was a mask or a timestep, as only norms of ours take them.
        """
        if dims not in self._dims:  # attributes of modules are slow to set
            self._dims |= {dims}

    def _remember_step(self) -> None:
        """The same for a call that was given a timestep."""
        if not torch.compiler.is_compiling():
            self._remember(0)

    def _restore_layout(self, y: Tensor) -> Tensor:
        """Undo `_to_channels_first`."""
        return y if self.channel_dim == 1 else y.movedim(1, -1)

    def _shaped_like_input(self, mean: Tensor, sigma: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Stored statistics, shaped to broadcast against the input; 0 and 1 where nothing is stored yet."""
        if mean.numel() == 0:
            shape = tuple(1 for _ in x.shape)
            return mean.new_zeros(shape), sigma.new_ones(shape)
        shape = self.ref.kept_shape(x.shape)
        return mean.reshape(shape), sigma.reshape(shape)

    def _statistic_shape(self, x: Tensor) -> tuple[int, ...]:
        """Shape of a stored statistic for this input."""
        return self.config.ref.statistic_shape(self.num_features, tuple(x.shape[2:]))

    def _initial_shape(self) -> tuple[int, ...]:
        """Shape of a stored statistic before the first call: empty where it depends on the spatial size."""
        ref = self.config.ref
        return (0,) if ref.located else ref.statistic_shape(self.num_features, ())

    def _check_space(self, x: Tensor) -> None:
        """References with a location belong to one spatial size, that of the first training call."""
        stored = self._stored if self.ref.located else None
        if stored is not None and stored.numel() and tuple(stored.shape) != self._statistic_shape(x):
            bound = tuple(stored.shape[self.ref.channels == "each" :])
            raise ValueError(
                f"input has spatial size {tuple(x.shape[2:])}, but {self.ref} keeps statistics per location and this "
                f"layer is bound to {bound}: call reset_running_stats() first, or use a reference without a location"
            )

    def _can_hold(self, shape: torch.Size) -> bool:
        """Whether statistics of this shape may replace the stored ones: the same, or either not bound to a size yet."""
        stored = self._stored
        if stored is None or shape == stored.shape:
            return stored is not None
        legal = shape == (0,) or self.ref.channels == "all" or shape[:1] == (self.num_features,)
        return self.ref.located and legal and (stored.numel() == 0 or shape == (0,))

    def _explained(self, x: Tensor, mask: Tensor | None) -> list[str]:
        """For `streamnorm.backends.explain`."""
        if not self._collects:
            return ["This call uses the latest statistics, in ordinary torch operations: it is served by no backend."]
        before = self._dims
        x, mask = self._to_channels_first(x, mask)
        self._dims = before
        dtype = torch.promote_types(x.dtype, torch.float32) if self._stored is None else self._stored.dtype
        call = signature_of(self.config, x, self.weight, self.bias, mask, dtype)
        return reasons(call, x, self.weight, self.bias, self._state_for(x))

    def _state_for(self, x: Tensor) -> State | None:
        """What a training call of a streaming norm would write into."""
        return None

    def extra_repr(self) -> str:
        """The arguments that made it: the size, and what differs from the defaults."""
        defaults = {name: each.default for name, each in signature(type(self).__init__).parameters.items()}
        given = self._arguments()
        defaults |= self.config.implied
        words = [f"{name}={value!r}" for name, value in given.items() if value != defaults.get(name)]
        return ", ".join([*([str(self.num_features)] if self.num_features else []), *words])  # lazy norms have none yet

    def _arguments(self) -> dict[str, Any]:
        """The constructor's arguments, but for the size."""
        settings = {field.name: getattr(self.config, field.name) for field in fields(self.config)}
        return settings | {"ref": code_of(self.ref), "affine": self.affine, "channel_dim": self.channel_dim}

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        own = ("_paused", "_known", "_looked", "_memo", "_sent")  # a copy is not paused, and makes its own plans
        return {key: value for key, value in state.items() if key not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        watch_encoders(Norm)  # in another process this may be the first norm
        if "config" not in state:  # pickled before settings were one object
            names = [name for name in self._config_type.__dataclass_fields__ if name in state]
            state = state | {"config": self._config_type(**{name: state[name] for name in names})}
            state = {key: value for key, value in state.items() if key not in names}
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


def check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        shape = ", not a shape" if isinstance(value, tuple | list) else ""
        raise ValueError(f"{name}={value!r}: must be a whole number of at least 1{shape}")


def check_flag(name: str, value: object) -> bool:
    if value not in (False, True):
        norm = "; a norm is passed by name, norm=" if callable(value) else ""
        raise ValueError(f"{name}={value!r}: must be True or False{norm}")
    return bool(value)


def check_dtype(dtype: torch.dtype | None) -> None:
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"dtype={dtype}: normalization needs a real floating point type")


def check_channel_dim(channel_dim: object) -> None:
    if type(channel_dim) is not int or channel_dim not in (1, -1):
        raise ValueError(f"channel_dim={channel_dim!r}: use 1 for (N, C, *space) or -1 for (N, *space, C)")


def to_channels_first(x: Tensor, num_features: int, channel_dim: int) -> Tensor:
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
