"""Who hears of a weight update: one global optimizer hook, `attach` for the rest, and `paused`.

A `Listener` learns that the weights changed; what it does about it is its own affair.
"""

import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from . import distributed
from .distributed import Share
from .stream import State

PATIENCE = 256  # backward passes without an update before a layer asks whether it was forgotten


class Scaler(Protocol):
    """The part of torch.amp.GradScaler that is needed here."""

    def scale(self, outputs: Tensor) -> Tensor: ...


class Removable(Protocol):
    def remove(self) -> None: ...


class Listener(nn.Module):
    """A module that hears of weight updates. What is kept here belongs to one process and is never saved."""

    _scalers: tuple[Scaler, ...] = ()  # of the attachments, the last one counts
    _heard = False  # of any weight update, ever
    _passes = 0  # backward passes until then; the timesteps of one pass count once
    _in_backward = False
    _number = 0  # in the order of making, in which all processes merge

    def __init__(self) -> None:
        super().__init__()
        self._enlist()

    def _enlist(self) -> None:
        self._number = next(_numbers)
        _listeners.add(self)
        _listen()

    def weights_updated(self) -> None:
        """Tell the layer that the weights changed. Optimizers of torch do this by themselves."""
        _tell([self], None)

    def _hear(self, found_inf: Tensor | None) -> None:
        if not self._heard:
            self._heard = True
        self._mark_update(found_inf)

    def _mark_update(self, found_inf: Tensor | None) -> None:
        """Remember that the weights changed, unless `found_inf` is non-zero: then the step was skipped."""
        raise NotImplementedError

    def _share(self) -> tuple[Any, Share] | None:
        """The processes to merge with, and what to merge; None for a layer that keeps to itself."""
        return None

    def _take(self, state: State, seen_before: Tensor) -> None:
        """The result of a merge."""
        raise NotImplementedError

    @property
    def _scaler(self) -> Scaler | None:
        return self._scalers[-1] if self._scalers else None

    def _forward_runs(self) -> None:
        if self._in_backward:  # attributes of modules are slow to set
            self._in_backward = False

    def _backward_runs(self) -> None:
        if self._heard or self._in_backward:
            return
        self._in_backward = True
        self._passes += 1
        if self._passes == PATIENCE:
            warnings.warn(
                f"{type(self).__name__} has seen {PATIENCE} backward passes and no weight update, so it averages over "
                "all of them. If its parameters are in no torch optimizer (frozen, affine=False, a foreign optimizer), "
                "call streamnorm.attach(optimizer, model) once, or layer.weights_updated() after each update.",
                stacklevel=2,
            )

    def __getstate__(self) -> dict[str, Any]:
        # A copy is attached to nothing, and compiled by nobody: the latter is torch's to drop.
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        return {key: value for key, value in state.items() if key != "_scalers"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._enlist()


_numbers = count(1)
_listeners: WeakSet[Listener] = WeakSet()
_attached: WeakKeyDictionary[Optimizer, list[list[Listener]]] = WeakKeyDictionary()


def after_step(optimizer: Optimizer, args: Any = (), kwargs: Any = None) -> None:
    """What every step of an optimizer of torch is followed by: the layers that it updates hear of it."""
    if _listeners and not _within_sharded_step():
        _tell(listeners_of(optimizer), _found_inf(optimizer))


def _within_sharded_step() -> bool:
    """Whether this is a step that a ZeroRedundancyOptimizer lets an inner one make, on the parameters of one process.

    The processes would merge different layers; all of them hear of the outer step.
    """
    sharding = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    frame = sys._getframe() if sharding else None
    while frame is not None and frame.f_code.co_filename != sharding.__file__:  # type: ignore[union-attr]
        frame = frame.f_back
    return frame is not None


def listeners_of(optimizer: Optimizer) -> list[Listener]:
    """The layers whose parameters an optimizer owns, and those attached to it, in the order of their making."""
    owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
    found = {layer for layers in _attached.get(optimizer, ()) for layer in layers}
    for layer in list(_listeners):
        # `parameters()` is slow, and only needed where a parametrization put them into submodules.
        own = layer.parameters() if layer._modules else layer._parameters.values()
        if any(id(p) in owned for p in own):
            found.add(layer)
    return sorted(found, key=lambda layer: layer._number)


def _tell(layers: Sequence[Listener], found_inf: Tensor | None) -> None:
    """A weight update, unless `found_inf` is non-zero: windows are merged over processes first, as one message."""
    groups: dict[Any, list[tuple[Listener, Share]]] = {}
    for layer in layers:
        shared = layer._share()
        if shared is not None:
            groups.setdefault(shared[0], []).append((layer, shared[1]))
    for group, members in groups.items():
        results = distributed.merged(group, [share for _, share in members], found_inf)
        for (layer, _), result in zip(members, results, strict=True):
            layer._take(*result)
    for layer in layers:
        layer._hear(found_inf)


def _found_inf(optimizer: object) -> Tensor | None:
    # A GradScaler lets fused optimizers run a step that it wants skipped and tells them so by this attribute.
    found = getattr(optimizer, "found_inf", None)
    return found if isinstance(found, Tensor) else None


_listening: Removable | None = None
_lock = threading.Lock()


def _listen() -> None:
    """To every optimizer of the process, from the first layer on: one that makes none is left alone."""
    global _listening
    with _lock:
        if _listening is None:
            _listening = register_optimizer_step_post_hook(after_step)


class _Attachment:
    def __init__(self, undo: list[Callable[[], None]]) -> None:
        self._undo = undo

    def remove(self) -> None:
        """Take back what `attach` did. Calling it again does nothing."""
        while self._undo:
            self._undo.pop()()


def attach(optimizer: Any, module: nn.Module, scaler: Scaler | None = None) -> Removable:
    """Let every streaming layer in `module` hear of the steps of `optimizer`; returns a handle with `remove()`.

    Needed for layers that own no parameters in a torch optimizer: `affine=False`, frozen ones, foreign optimizers.
    With a `torch.amp.GradScaler` pass it as `scaler`, for all layers: the streamed gradients are then kept unscaled,
    and a skipped step is no update and leaves nothing behind in them.

    >>> import torch, streamnorm
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), streamnorm.StreamingNorm(8, affine=False))
    >>> handle = attach(torch.optim.SGD(model.parameters(), lr=0.1), model)
    >>> handle.remove()
    """
    layers = [layer for layer in module.modules() if isinstance(layer, Listener)]
    if not layers:
        raise ValueError(f"attach: {type(module).__name__} has no streaming layer; pass the module that holds them")
    if scaler is not None and not callable(getattr(scaler, "scale", None)):
        raise TypeError(f"attach: scaler={scaler!r} is not a GradScaler (it has no scale method)")

    undo = [_after_steps_of(optimizer, layers)]
    if scaler is not None:
        for layer in layers:
            layer._scalers += (scaler,)
        undo.append(lambda: _detach_scaler(layers, scaler))
    return _Attachment(undo)


def _detach_scaler(layers: list[Listener], scaler: Scaler) -> None:
    for layer in layers:
        at = layer._scalers.index(scaler)
        layer._scalers = layer._scalers[:at] + layer._scalers[at + 1 :]


def unwrapped(optimizer: Any) -> Any:
    """The optimizer of torch inside of a wrapper such as DecoupledUpdate: only its steps count."""
    while not isinstance(optimizer, Optimizer) and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def _after_steps_of(optimizer: Any, layers: list[Listener]) -> Callable[[], None]:
    """Tell the layers after each step; returns how to undo it."""
    optimizer = unwrapped(optimizer)
    if isinstance(optimizer, Optimizer):
        attached = _attached.setdefault(optimizer, [])
        attached.append(layers)
        return lambda: attached.remove(layers)
    step = getattr(optimizer, "step", None)
    if not callable(step):
        raise TypeError(f"attach: {type(optimizer).__name__} has no step() method, so it cannot be listened to")
    listening = True

    def step_and_tell(*args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        if listening:
            _tell(layers, _found_inf(optimizer))
        return result

    def stop() -> None:
        nonlocal listening
        listening = False
        if optimizer.step is step_and_tell:  # otherwise somebody wrapped it again: stay in the chain, silent
            optimizer.step = step

    optimizer.step = step_and_tell
    return stop


@contextmanager
def paused(model: nn.Module) -> Iterator[None]:
    """A context in which calls in training mode change no statistics.

    Streaming layers normalize with their latest statistics, as in evaluation; batch norms still use the mini-batch
    but leave their running estimates alone. For a generator's step through the discriminator of a GAN:

    >>> import torch, streamnorm
    >>> critic = streamnorm.StreamingNorm(3)
    >>> with paused(critic):
    ...     _ = critic(torch.randn(8, 3))
    >>> int(critic.stats.count)
    0
    """
    layers: list[Any] = [layer for layer in model.modules() if hasattr(layer, "_paused")]
    for layer in layers:
        layer._paused += 1
    try:
        yield
    finally:
        for layer in layers:
            layer._paused -= 1


def loss_scale(scaler: Scaler, like: Tensor) -> Tensor:
    """The scaler's present scale as a tensor, read through its public method and without waiting for a device."""
    return scaler.scale(torch.ones((), dtype=like.dtype, device=like.device)).detach()
