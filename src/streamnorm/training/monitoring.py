"""How the streaming layers of a model are doing, read from their state and without a trace in it."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from ..core import state as stream
from ..core.algorithm import blend, bounded, by_largest, guarded, window_share
from ..core.state import State
from ..nn.streaming import StreamingNorm

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GROWN = 10  # times its own past
OUTGROWN = 100  # times the others of its layer


class Writer(Protocol):
    """The part of torch.utils.tensorboard.SummaryWriter that is needed here."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any: ...


@dataclass(frozen=True)
class LayerHealth:
    """The health of one layer, as `monitor` reports it.

    `short` is its present window, `long` the windows before it; after an `optimizer.step()` the present window is the
    one that this step completed. A channel is one statistic of the layer's reference. Drifts are 0 before the first
    update; gradients are NaN where there was none, or where it was zero.

    Attributes:
        channels: how many statistics the layer keeps; 0 while it is not bound to a spatial size.
        drift_mean: |short - long| of the mean in units of the long-term sigma, the worst over channels.
        drift_sigma: |short / long - 1| of sigma, the worst over channels.
        gradient_ratio: length of the streamed gradient over that of the true one, the average of the present window.
        gradient_cosine: of the angle between these two; 1: the same direction, 0: nothing in common, below 0: it points
            away from the true one, which is noted.
        dead: channels whose own spread is at most sqrt(eps), so that half of sigma^p or more is what eps adds.
        exploding: channels whose sigma in the window is not finite, or over 10 times its long-term value, or over 100
            times the median of the channels of the layer that are not dead.
        sigma_min, sigma_median, sigma_max: of the sigma that the layer divides by now.
        warm: share of the warm start that is over; 1 for a streaming norm without any of the layer norm that it began
            as.
        calls: training calls of the present window that were counted; batches that are not finite are not.
        heard: whether the layer has ever heard of a weight update.

    Example:
        >>> layer = monitor(nn.Sequential(StreamingNorm(8)))["0"]
        >>> layer.channels, layer.calls, layer.notes
        (8, 0, ['never called'])
    """

    channels: int
    drift_mean: float
    drift_sigma: float
    gradient_ratio: float
    gradient_cosine: float
    dead: int
    exploding: int
    sigma_min: float
    sigma_median: float
    sigma_max: float
    warm: float
    calls: int
    heard: bool

    @property
    def points_away(self) -> bool:
        """Whether the streamed gradient has a part against the true one; NaN, no gradient, has none."""
        return self.gradient_cosine < 0

    @property
    def notes(self) -> list[str]:
        """What a person should look at, in words."""
        never = not self.heard
        said = {
            "never called": never and not self.calls,
            f"warming up ({self.warm:.0%})": 0 < self.warm < 1,
            f"{self.dead} of {self.channels} dead": self.dead,
            f"{self.exploding} of {self.channels} exploding": self.exploding,
            f"streamed gradient points away from the true one (cosine {self.gradient_cosine:.2f})": self.points_away,
            "no update heard of yet": never and self.calls,
            "no finite call in this window": self.heard and not self.calls,
        }
        return [words for words, applies in said.items() if applies]


class Health(Mapping[str, LayerHealth]):
    """The health of every streaming layer of a model by its name, in the order of the model; printed, a table.

    `monitor` makes it.

    Args:
        layers: the health of each layer.
        details: of each layer the numbers of its channels, for the picture.

    Example:
        >>> health = monitor(nn.Sequential(nn.Linear(4, 8), StreamingNorm(8)))
        >>> list(health), health["1"].channels
        (['1'], 8)
    """

    def __init__(self, layers: dict[str, LayerHealth], details: dict[str, Tensor]) -> None:
        self._layers = layers
        self._details = details  # (5, channels), see _channels_of

    def __getitem__(self, name: str) -> LayerHealth:
        return self._layers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)

    def __repr__(self) -> str:
        header = ["layer", "channels", "drift mean", "drift sigma", "streamed/true", "cosine", "sigma", "notes"]
        lines = [header, *([name or "(itself)", *_cells(layer)] for name, layer in self.items())]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        rows = ["  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines]
        return "\n".join(rows) if self else "no streaming layer in this model"

    def scalars(self, tag: str = "streamnorm") -> dict[str, float]:
        """Every finite number that can change under `tag/quantity/layer`, for any logger."""
        return {
            f"{tag}/{quantity}/{name or 'norm'}": float(value)
            for name, layer in self.items()
            for quantity, value in asdict(layer).items()
            if quantity != "channels" and math.isfinite(value)
        }

    def log(self, writer: Writer, step: int, tag: str = "streamnorm") -> None:
        """Write `scalars` with `writer.add_scalar(name, value, step)`, as TensorBoard's SummaryWriter has it."""
        for name, value in self.scalars(tag).items():
            writer.add_scalar(name, value, step)

    def plot(self, path: str | PathLike[str] | None = None) -> "Figure":
        """Draw sigma and drift of every channel and the gradient of every layer; written to `path` if given.

        Needs matplotlib: `pip install "streamnorm[lab]"`.
        """
        from .drawing import Row, draw

        rows = []
        for name, layer in self.items():
            sigma, drift_mean, drift_sigma, dead, exploding = self._details[name].tolist()
            ill = [bool(a or b) for a, b in zip(dead, exploding, strict=True)]
            gradient, notes = (layer.gradient_ratio, layer.gradient_cosine), ", ".join(layer.notes)
            rows.append(
                Row(name or "(itself)", sigma, ill, drift_mean, drift_sigma, gradient, notes, layer.points_away)
            )
        return draw(rows, path)


def monitor(model: nn.Module) -> Health:
    """The health of every streaming layer in `model`; see `LayerHealth` for what is in it.

    Changes nothing: training goes on bit for bit as without it. A module that is used in several places is there once,
    under its first name; a model without streaming layers has an empty report. Best called after `optimizer.step()`,
    when the present window is whole.

    Args:
        model: any module.

    Returns:
        A mapping from the names of layers to their `LayerHealth`; printed, it is a table.

    Example:
        >>> health = monitor(nn.Sequential(nn.Linear(4, 8), StreamingNorm(8)))
        >>> health["1"].dead, health["1"].notes
        (0, ['never called'])
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, StreamingNorm)}
    if not layers:
        return Health({}, {})
    alike: dict[object, list[str]] = {}  # layers of one kind are measured together: the cost is that of torch's calls
    for name, layer in layers.items():
        like, settings = layer._state.mean, layer.config
        alike.setdefault((like.shape, like.dtype, like.device, settings), []).append(name)
    rows: list[Tensor] = []
    details: dict[str, Tensor] = {}
    with torch.no_grad():
        for names in alike.values():
            group = [layers[name] for name in names]
            state = _together(group)
            channels = _channels_of(state, group[0])
            rows.append(_numbers_of(state, group[0], channels))
            details |= dict(zip(names, channels, strict=True))
        table = torch.cat([row.to(rows[0].device) for row in rows]).tolist()  # the only wait for a device
    numbers = dict(zip(details, table, strict=True))
    return Health({name: _health_of(layer, numbers[name]) for name, layer in layers.items()}, details)


def _together(layers: list[StreamingNorm]) -> State:
    """A copy of the states, layers first: streams are (layers, 2, channels), all else (layers, 1, channels or 1)."""
    kept = [stream.to_dict(layer._state) for layer in layers]

    def gathered(name: str, like: Tensor) -> Tensor:
        rows = 2 if name.endswith(("_long", "_short")) else 1
        return torch.stack([tensors[name] for tensors in kept]).reshape(len(kept), rows, like.numel() // rows)

    return stream.from_dict({name: gathered(name, like) for name, like in kept[0].items()})


def _channels_of(state: State, like: StreamingNorm) -> Tensor:
    """Of each channel: sigma in use, drift of the mean, drift of sigma, whether it is dead, whether it explodes."""
    stats, sigma = state.stats, state.sigma[:, 0]
    mean, window = stats.short.unbind(1)
    long_mean, long = torch.where(stats.empty, stats.short, stats.long).unbind(1)
    # Where nothing ever moved (eps = 0, or no call yet) there is no unit to measure in, and no drift: 0 / 0 is 0.
    drift_mean = ((mean - long_mean).abs() / long).nan_to_num(0.0, math.inf)
    growth = (window / long - 1).nan_to_num(0.0, math.inf)
    dead = sigma <= 2 ** (1 / like.p) * like.eps**0.5
    living = torch.where(dead, math.nan, sigma)
    typical = living.nanmedian(1, keepdim=True).values if sigma.numel() else sigma
    exploding = (growth > GROWN - 1) | (window > OUTGROWN * typical) | ~window.isfinite()
    return torch.stack([sigma, drift_mean, growth.abs(), dead, exploding], 1)


def _numbers_of(state: State, like: StreamingNorm, channels: Tensor) -> Tensor:
    """What the `LayerHealth` of each layer is made of, a row for each."""
    stats, grads, sigma = state.stats, state.grads, state.sigma[:, 0]
    w = (state.seen / like.warmup).clamp(max=1) if like.warmup else torch.ones_like(state.seen)
    # A long-term average of statistics may have been loaded; gradients are folded by nothing but updates.
    about = torch.cat([w, stats.count, ~grads.empty | grads.pending], 1)[:, :, 0]
    if not sigma.numel():
        return torch.cat([about, about.new_zeros(len(about), 4), about.new_full((len(about), 8), math.nan)], 1)
    # g_hat of a call whose own gradient is the average of the window; exact with one batch per update.
    long, short, present = like.beta
    share = window_share(like.config, state.elements, state.elements_before)
    long_weight, short_weight = guarded((long, short), share)
    true = grads.short.flatten(1)
    g_hat = blend(grads, long_weight, short_weight + present).flatten(1)
    streamed = bounded(g_hat, true, share[:, 0])
    (true, of_true), (streamed, of_streamed) = by_largest(true), by_largest(streamed)
    lengths = [true.norm(dim=1), streamed.norm(dim=1), of_true[:, 0], of_streamed[:, 0]]
    gradient = [*lengths, (true * streamed).sum(1)]
    spread = [*sigma.aminmax(dim=1), sigma.median(1).values]
    worst, sums = channels[:, 1:3].amax(2), channels[:, 3:].sum(2)
    return torch.cat([about, worst, sums, torch.stack([*gradient, *spread], 1)], 1)


def _health_of(layer: StreamingNorm, row: list[float]) -> LayerHealth:
    warm, calls, folded, drift_mean, drift_sigma, dead, exploding, *gradient, low, high, median = row
    true, streamed, of_true, of_streamed, product = gradient  # vectors over their largest magnitudes, and these
    return LayerHealth(
        channels=layer._state.mean.numel(),
        drift_mean=drift_mean,
        drift_sigma=drift_sigma,
        gradient_ratio=_divided(streamed, true) * warm * of_streamed / of_true,
        gradient_cosine=_divided(product, true * streamed),
        dead=int(dead),
        exploding=int(exploding),
        sigma_min=low,
        sigma_median=median,
        sigma_max=high,
        warm=warm,
        calls=int(calls),
        heard=bool(folded) or layer._pulse.updates > 0,
    )


def _divided(a: float, b: float) -> float:
    return a / b if b else math.nan


def _cells(layer: LayerHealth) -> list[str]:
    drifts = [layer.drift_mean, layer.drift_sigma, layer.gradient_ratio, layer.gradient_cosine]
    sigma = f"{layer.sigma_min:.2g} - {layer.sigma_median:.2g} - {layer.sigma_max:.2g}"
    return [str(layer.channels), *(f"{value:.3g}" for value in drifts), sigma, ", ".join(layer.notes)]
