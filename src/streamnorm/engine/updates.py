"""Who hears of a weight update: one global optimizer hook, `attach` for the rest, and `paused`."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import LBFGS
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from .compat import within_sharded_step
from .listener import Listener, Scaler, listeners, on_step
from .rooms import Room, still_in


class Removable(Protocol):
    def remove(self) -> None: ...


_attached: WeakKeyDictionary[Optimizer, list[list[Listener]]] = WeakKeyDictionary()
_owned: WeakKeyDictionary[Optimizer, set[int]] = WeakKeyDictionary()  # by each one that has made a step


def after_step(optimizer: Optimizer, args: Any = (), kwargs: Any = None) -> None:
    """What every step of an optimizer of torch is followed by: the layers that it updates hear of it."""
    # Of a ZeroRedundancyOptimizer the outer step counts: after the inner ones processes would merge different layers.
    if listeners and not within_sharded_step():
        on_step(listeners_of(optimizer), _found_inf(optimizer))


def listeners_of(optimizer: Optimizer) -> list[Listener]:
    """The layers whose parameters an optimizer owns, and those attached to it, in the order of their making.

    A layer of which nothing learns goes with the innermost module around it of which something does.
    """
    ownership = _Ownership(optimizer)
    found = {layer for layers in _attached.get(optimizer, ()) for layer in layers}
    for layer in list(listeners):
        # `parameters()` is slow, and only needed where a parametrization put them into submodules.
        own = list(layer.parameters()) if layer._modules else [p for p in layer._parameters.values() if p is not None]
        if any(id(p) in ownership.owned for p in own) or ownership.has_around(layer, own):
            found.add(layer)
    return sorted(found, key=lambda layer: layer._number)


class _Ownership:
    """What one optimizer owns at its step, and what the others did at theirs."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self.others = [owned for other, owned in _owned.items() if other is not optimizer]
        _owned[optimizer] = self.owned
        self._rooms: dict[Room, bool | None] = {}

    def has_around(self, layer: Listener, own: list[nn.Parameter]) -> bool:
        """Whether a layer of which nothing learns sits in a module of which something does, by this optimizer.

        The innermost such module decides. Several optimizers may own parts of it: the layer hears of each.
        """
        pulse = layer._pulse
        # Processes that merge have to agree on when to, and not all of them may have called the layer.
        if pulse.attachments or layer.process_group is not None or any(p.requires_grad for p in own):
            return False
        ours = False if any(id(p) in owned for p in own for owned in self.others) else None
        depth = 0
        while ours is None and depth < len(pulse.rooms):
            ours = self._of(pulse.rooms[depth])
            depth += 1
        if ours is not None and not still_in(layer, pulse.rooms[:depth]):
            pulse.rooms, pulse.looked = (), False
        elif ours:
            return True
        layer._miss(elsewhere=ours is False)
        return False

    def _of(self, room: Room) -> bool | None:
        """Whether this optimizer owns a part of a module; None if no optimizer does."""
        if room not in self._rooms:  # many layers may sit in it
            ours = room.has_any(self.owned)
            self._rooms[room] = True if ours else False if any(map(room.has_any, self.others)) else None
        return self._rooms[room]


def _found_inf(optimizer: object) -> Tensor | None:
    # A GradScaler lets fused optimizers run a step that it wants skipped and tells them so by this attribute.
    found = getattr(optimizer, "found_inf", None)
    return found if isinstance(found, Tensor) else None


def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """LBFGS evaluates its closure many times per step, and takes the loss for one function of the weights."""
    if not (isinstance(optimizer, LBFGS) and listeners):
        return None
    layers = listeners_of(optimizer)
    optimizer_again, *given = args
    closure = given[0] if given else kwargs.get("closure")
    return (optimizer_again, _repeatable(closure, layers, lambda: listeners_of(optimizer))), {}


def _repeatable(
    closure: Callable[[], Any], layers: Sequence[Listener], look_again: Callable[[], Sequence[Listener]]
) -> Callable[[], Any]:
    """A closure whose evaluations all begin with the statistics that the first one began with.

    In each of them the layers are batch norms, differentiated exactly: gradients of earlier mini-batches belong to
    other weights, and a line search along them goes anywhere.
    """
    begin, evaluations = [layer._rewinder() for layer in layers], 0
    others = [layer for layer in listeners if layer not in layers]
    calls, undo = [layer._pulse.forwards for layer in others], [layer._rewinder() for layer in others]

    instead: Callable[[], Any] | None = None

    def evaluate() -> Any:
        nonlocal evaluations, instead
        if instead is not None:
            return instead()
        evaluations += 1
        if evaluations > 1:
            for restore in begin:
                restore()
        with ExitStack() as stack:
            for layer in layers:
                stack.enter_context(layer._exactly())
            loss = closure()
        if [layer._pulse.forwards for layer in others] == calls:
            return loss
        for restore in begin + undo:
            restore()
        more = look_again()
        if len(more) > len(layers):  # layers that saw only now which module they sit in
            instead = _repeatable(closure, more, look_again)
            return instead()
        raise RuntimeError(
            "LBFGS evaluates its closure several times per step, and a streaming layer that runs in it is not known to "
            "be trained by it, so its statistics would move in between: call streamnorm.attach(optimizer, model) once"
        )

    return evaluate


_listening: tuple[Removable, ...] = ()
_lock = threading.Lock()


def listen() -> None:
    """To every optimizer of the process, from the first layer on: one that makes none is left alone."""
    global _listening
    with _lock:
        if not _listening:
            _listening = register_optimizer_step_pre_hook(before_step), register_optimizer_step_post_hook(after_step)


class _Attachment:
    def __init__(self, undo: list[Callable[[], None]]) -> None:
        self._undo = undo

    def remove(self) -> None:
        """Take back what `attach` did. Calling it again does nothing."""
        while self._undo:
            self._undo.pop()()


def attach(optimizer: Any, module: nn.Module, scaler: Scaler | None = None) -> Removable:
    """Let every streaming layer in `module` hear of the steps of `optimizer`; returns a handle with `remove()`.

    Needed for optimizers that are not torch's, and where neither a layer nor a module around it has parameters in one.
    A layer without parameters that is attached to an optimizer hears of that one alone.

    Args:
        optimizer: anything with a `step()`.
        module: a model with streaming layers, or one of them.
        scaler: a `torch.amp.GradScaler`, if there is one, for all layers: the streamed gradients are then kept
            unscaled, and a skipped step is no update and leaves nothing behind in them.

    Example:
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

    undo = [_after_steps_of(optimizer, layers), lambda: _count_attachments(layers, -1)]
    _count_attachments(layers, 1)
    if scaler is not None:
        for layer in layers:
            layer._scalers += (scaler,)
        undo.append(lambda: _detach_scaler(layers, scaler))
    return _Attachment(undo)


def _count_attachments(layers: list[Listener], by: int) -> None:
    for layer in layers:
        layer._pulse.attachments += by


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
            on_step(layers, _found_inf(optimizer))
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
    but leave their running estimates alone. As for a generator's step through the discriminator of a GAN.

    Args:
        model: a model with norms, or one of them.

    Example:
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
