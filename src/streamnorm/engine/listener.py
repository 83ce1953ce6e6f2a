"""A layer that hears of weight updates, and notices what it should have heard of."""

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import count
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakSet, WeakValueDictionary

import torch
from torch import Tensor, nn

from ..core.state import State
from . import compat, merging
from .merging import Share
from .rooms import Rooms, around

PATIENCE = 256  # passes without an update, or calls without a gradient, before a layer asks whether that is meant
WINDOWS = 32  # between weight updates, before it asks the same of calls without a gradient, or in evaluation alone


class Scaler(Protocol):
    """The part of torch.amp.GradScaler that is needed here."""

    def scale(self, outputs: Tensor) -> Tensor: ...


class Pulse:
    """What a layer hears and sees in one process: never copied, never saved. Cheap to change, unlike a module."""

    __slots__ = (
        "asked",
        "at_version",
        "attachments",
        "backwards",
        "evaluated",
        "forwards",
        "in_backward",
        "looked",
        "missed",
        "passes",
        "rooms",
        "unheard",
        "untrained",
        "updates",
        "version",
    )

    def __init__(self) -> None:
        self.updates = 0  # weight updates heard of
        self.forwards = self.backwards = 0  # training calls; those of them that gradients came back to
        self.passes, self.in_backward = 0, False  # backward passes: the timesteps of one pass count once
        self.version, self.at_version = -1, 0  # of the gain at the last training call, and `updates` then
        self.unheard = 0  # changes of the gain that no update explains
        self.evaluated = False  # called in evaluation mode, with gradients, since the last update
        self.untrained = 0  # windows in which it was, and never in training mode
        self.rooms: Rooms = ()  # the modules that the layer sits in, as far as it knows
        self.looked = False  # for them
        self.missed = 0  # steps of optimizers since the last update heard of
        self.attachments = 0
        self.asked = False


class Listener(nn.Module):
    """A module that hears of weight updates."""

    _scalers: tuple[Scaler, ...] = ()  # of the attachments, the last one counts
    _number = 0  # in the order of making, in which all processes merge
    _name_tag: Tensor  # the same, for operators of the compiler, which know tensors and not the layers that own them
    _pulse: Pulse
    _live: Any = None  # statistics that others hold
    process_group: Any = None  # whose processes merge their windows

    def __init__(self) -> None:
        super().__init__()
        self._enlist()

    def _enlist(self) -> None:
        self.__dict__["_pulse"] = Pulse()
        self._number = next(_numbers)
        self.__dict__["_name_tag"] = torch.tensor(self._number, device="cpu")
        listeners.add(self)
        _by_number[self._number] = self

    def weights_updated(self) -> None:
        """Tell the layer that the weights changed. Optimizers of torch do this by themselves."""
        on_step([self], None)

    def _on_step(self, found_inf: Tensor | None) -> None:
        pulse = self._pulse
        pulse.updates += 1
        pulse.missed = 0
        often = pulse.updates >= WINDOWS and pulse.forwards > 1.25 * pulse.backwards + WINDOWS
        # From a norm of the input without a gain no gradient comes back.
        if often and not pulse.asked and (pulse.backwards or self._parameters.get("weight") is not None):
            self._ask(
                f"was called {pulse.forwards} times in training mode and got gradients back from {pulse.backwards} of "
                "these calls. Each call counts in its statistics: make the others (action selection, logging, a "
                "generator's step) inside of streamnorm.paused(model), or after model.eval()."
            )
        if pulse.evaluated:
            pulse.evaluated = False
            pulse.untrained += 1
            if pulse.untrained == WINDOWS and not pulse.forwards and self._is_fresh:
                self._ask(
                    f"was called in evaluation mode between {WINDOWS} weight updates, and never in training mode. It "
                    "has no statistics, and normalizes with mean 0 and sigma 1: call model.train() before training."
                )
        self._mark_update(found_inf)

    @property
    def _is_fresh(self) -> bool:
        """Whether it has no statistics, of data or loaded."""
        raise NotImplementedError

    def _mark_update(self, found_inf: Tensor | None) -> None:
        """Remember that the weights changed, unless `found_inf` is non-zero: then the step was skipped."""
        raise NotImplementedError

    def _rewinder(self) -> Callable[[], None]:
        """How to make the layer forget everything from here on."""
        raise NotImplementedError

    def _exactly(self) -> AbstractContextManager[None]:
        """A context in which it is a function of its input, and has its gradient."""
        raise NotImplementedError

    def _follow(self, latest: tuple[Tensor, Tensor] | None = None) -> None:
        """Let statistics that others hold follow a training call."""
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

    def _on_forward(self, weight: Tensor | None, awaited: bool = True) -> None:
        """A training call begins. `awaited`: unless nothing needs a gradient, one may come back."""
        self._pulse.forwards += awaited
        self._pulse.in_backward = False
        if not self._pulse.looked:
            self._look_around()
        self._notice(weight)

    def _on_evaluation(self) -> None:
        """A call in evaluation mode begins."""
        pulse = self._pulse
        if not pulse.forwards and torch.is_grad_enabled():
            pulse.evaluated = True
            if not pulse.looked:
                self._look_around()

    def _look_around(self) -> None:
        """See which modules the layer sits in. The others in the same model need not look for themselves then."""
        self._pulse.looked = True
        for layer, rooms in around(self, lambda module: isinstance(module, Listener)):
            pulse: Pulse = layer._pulse  # type: ignore[assignment]
            if layer is self or not pulse.rooms:
                pulse.rooms, pulse.looked = rooms, True

    def _miss(self, elsewhere: bool) -> None:
        """A step that the layer did not hear of. Where it is not known to belong `elsewhere`, look around again."""
        pulse = self._pulse
        pulse.missed += 1
        if pulse.missed % WINDOWS == (0 if elsewhere else 1):
            pulse.looked = False

    def _notice(self, weight: Tensor | None) -> None:
        """A gain that changes from call to call is proof of weight updates; calls without them may not be meant."""
        pulse = self._pulse
        version = -1 if weight is None or weight.is_inference() else compat.version_of(weight)
        if version != pulse.version:
            pulse.unheard += pulse.version >= 0 <= version and pulse.updates == pulse.at_version
            pulse.version, pulse.at_version = version, pulse.updates
            if pulse.unheard == 2:
                self._ask("has weights that were changed, twice, without an update that it heard of." + _TELL_IT)
        if pulse.forwards == PATIENCE and not pulse.backwards and not pulse.updates:
            self._ask(
                f"was called {PATIENCE} times in training mode without a gradient or a weight update, and averages its "
                "statistics over all of these calls. If that is not meant (a target network, a network that only "
                "acts), call model.eval(), or make the calls inside of streamnorm.paused(model)."
            )

    def _on_backward(self) -> None:
        pulse = self._pulse
        pulse.backwards += 1
        if pulse.in_backward:
            return
        pulse.in_backward = True
        pulse.passes += 1
        if pulse.passes == PATIENCE and not pulse.updates:
            self._ask(f"has seen {PATIENCE} backward passes and no weight update." + _TELL_IT)

    def _ask(self, about: str) -> None:
        if not self._pulse.asked:
            self._pulse.asked = True
            warnings.warn(f"{type(self).__name__} {about}", stacklevel=compat.stacklevel_outside(*_INSIDE))

    def __getstate__(self) -> dict[str, Any]:
        # A copy is attached to nothing, and compiled by nobody: the latter is torch's to drop.
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        return {key: value for key, value in state.items() if key not in ("_scalers", "_pulse", "_name_tag")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._enlist()


_TELL_IT = (
    " So it averages over all calls. If no optimizer of torch owns parameters of the layer or of the module that it is "
    "in, call streamnorm.attach(optimizer, model) once, or layer.weights_updated() after each update."
)


_INSIDE = str(Path(__file__).parents[1]), str(Path(torch.__file__).parent)

_numbers = count(1)
listeners: WeakSet[Listener] = WeakSet()
_by_number: WeakValueDictionary[int, Listener] = WeakValueDictionary()


def layer_of(number: int) -> Listener | None:
    return _by_number.get(number)


def on_step(layers: Sequence[Listener], found_inf: Tensor | None) -> None:
    """A weight update, unless `found_inf` is non-zero: windows are merged over processes first, as one message."""
    groups: dict[Any, list[tuple[Listener, Share]]] = {}
    for layer in layers:
        shared = layer._share()
        if shared is not None:
            groups.setdefault(shared[0], []).append((layer, shared[1]))
    for group, members in groups.items():
        results = merging.merged(group, [share for _, share in members], found_inf)
        for (layer, _), result in zip(members, results, strict=True):
            layer._take(*result)
    for layer in layers:
        layer._on_step(found_inf)
