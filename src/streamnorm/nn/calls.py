"""A call of a streaming layer: what it begins with, how it is served, and where its gradients are streamed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import backends
from ..backends import H1, H2, Plan
from ..backends.memory import outside_inference_mode
from ..core import state as stream
from ..core.algorithm import fold_gradients, fold_statistics
from ..core.config import EXACT
from ..core.state import State
from ..engine import replay
from ..engine.compat import is_rewritten, version_of
from ..engine.context import check_memory, exported, transformed
from ..engine.function import Call, evaluate
from ..engine.function import stream as stream_eagerly
from ..engine.listener import PATIENCE
from ..engine.operators import stream_compiled
from ..engine.replay import Entry
from .saving import Saved

# What computes a call, and what it is given: `engine.function.stream` in training, `stream_compiled` while
# torch.compile traces, `evaluate` with the latest statistics.
Computation = tuple[Callable[..., Tensor], tuple[Any, ...]]


def _given(y: Tensor) -> Tensor:
    return y


class Known(NamedTuple):
    """How the last call was served, as long as nothing about the layer is new."""

    fits: Callable[[Tensor, Any, Any], bool]
    plan: Plan
    state: State
    h2: H2
    among: Any  # the backends that were asked
    compute: Callable[..., Tensor] | None  # None: there are live statistics


class Calls(Saved):
    """The middle of StreamingNorm, between its state and its face."""

    @property
    def _collects(self) -> bool:
        first = replay.find(id(self)) if replay.in_backward() else None
        return self._learns if first is None else first.learned

    @property
    def _folds_alike(self) -> bool:
        """Folds are made in plain torch, which all processes of a group round alike, with or without a batch."""
        return self.process_group is not None

    @property
    def _is_fresh(self) -> bool:
        return not self._state.seen.is_meta and not bool(self._state.seen)

    def _state_for(self, x: Tensor) -> State:
        return stream.bind(self._state, self._statistic_shape(x))

    def _begin(self, x: Tensor, mask: Tensor | None, step: int) -> Computation:
        """Look at everything that is new about a call."""
        if step:
            self._remember_step()
        if torch.compiler.is_compiling():
            return self._begin_compiled(*self._to_channels_first(x, mask), step == 0)
        if mask is None and (self._paused or not self.training) and self._live is None:
            y = self._at_once(x, *self._used(self._state))
            if y is not None:
                return _given, (y,)
        known = self._as_before(x, step == 0) if mask is None else None
        if known is not None:
            return known
        x, mask = self._to_channels_first(x, mask)
        collects = self._collects
        entry = replay.begin(id(self), collects)
        if not collects:
            return self._begin_evaluation(x, mask, entry)
        return self._begin_training(x, mask, entry, step == 0)

    def _as_before(self, x: Tensor, begins: bool) -> Computation | None:
        """The call, if nothing about the layer or its input is new since the last one: no other checks."""
        own = self.__dict__
        known = own.get("_known")
        if known is None or not own["training"] or self._paused or known.among is not backends.in_use:
            return None
        pulse = own["_pulse"]
        if type(x) is not Tensor or not pulse.looked or is_rewritten() or replay.is_watched():
            return None
        affine = self._own_affine()
        if affine is None or not known.fits(x, *affine):
            return None
        weight, bias = affine
        pulse.in_backward = False
        pulse.forwards += 1
        if weight is None:
            pulse.forwards -= not self._awaits(x, None)
        elif version_of(weight) != pulse.version or pulse.forwards == PATIENCE:
            self._notice(weight)
        call = known.plan, None, self._receive, None, False, begins
        return known.compute or self._stream_and_show, (x, weight, bias, None, call)

    def _begin_compiled(self, x: Tensor, mask: Tensor | None, begins: bool) -> Computation:
        state = self._snapshot() if exported() else self._state
        if not self._collects:
            mean, sigma = self._shaped_like_input(*self._used(state), x)
            return evaluate, (x, mean, sigma, self.weight, self.bias, mask)
        if self._scaler is not None:
            raise RuntimeError(
                "a streaming layer with a GradScaler attached cannot be compiled: detach the scaler and train in "
                "bfloat16, or leave the model uncompiled"
            )
        if not state.mean.numel():
            raise RuntimeError(
                f"{self.ref} is bound to a spatial size by its first training call, which has to run uncompiled: call "
                "the model once before torch.compile"
            )
        return stream_compiled, (x, self.weight, self.bias, mask, self._name_tag, self.config, state, begins)

    def _begin_evaluation(self, x: Tensor, mask: Tensor | None, entry: Entry | None) -> Computation:
        self._release()
        mean, sigma = self._used(self._state)
        check_memory(mean=mean, sigma=sigma)
        if not self.training:
            self._on_evaluation()
        if entry is not None and entry.again:
            mean, sigma = entry.kept
        elif entry is not None or torch.is_grad_enabled() or transformed():
            mean, sigma = mean.clone(), sigma.clone()  # backward may come after later calls changed the statistics
        if entry is not None:
            entry.kept = mean, sigma
        return evaluate, (x, *self._shaped_like_input(mean, sigma, x), self.weight, self.bias, mask)

    def _begin_training(self, x: Tensor, mask: Tensor | None, entry: Entry | None, begins: bool) -> Computation:
        weight, bias = self.weight, self.bias
        again = entry is not None and entry.again
        if not again:
            self._on_forward(self._parameters.get("weight"), self._awaits(x, weight))
        state = self._opened(self._statistic_shape(x))
        call = backends.signature_of(self.config, x, weight, bias, mask, state.mean.dtype)
        plan = backends.choose(call, x, weight, bias, state)
        if again and not (isinstance(entry.kept, tuple) and plan.backend is entry.kept[0]):  # type: ignore[union-attr]
            raise RuntimeError(
                "a call of a streaming layer that torch.utils.checkpoint runs again is served by another backend than "
                "at first: let the layer and streamnorm.backends.use() be the same in backward"
            )
        fits = None if self._is_special(mask, entry) else plan.backend.steady(plan.prepared)
        compute = stream_eagerly if self._live is None else None
        if fits is not None:
            self.__dict__["_known"] = Known(fits, plan, state, H2(state.grads), backends.active(), compute)
        arguments = x, weight, bias, mask, Call(plan, H1(state), self._receive, entry, begins=begins)
        if state is not self._state:
            return self._bind_by, arguments
        return compute or self._stream_and_show, arguments

    def _is_special(self, mask: Tensor | None, entry: Entry | None) -> bool:
        """Whether the next call like this one has to be looked at, whatever serves it."""
        weight = self._parameters.get("weight")
        counted = weight is None or not weight.is_inference()  # inference tensors do not count their versions
        plain = mask is None and entry is None and self.channel_dim == 1
        return not (plain and counted and self._scaler is None and not self._folds_alike)

    def _look(self, runner: Any) -> Any:
        """The state as a backend for whole sequences has looked at it; None if it cannot write into it."""
        state, known = self._own(), self.__dict__.get("_looked")
        if known is not None and known[0] is state and known[1] is runner and runner.still(known[2]):
            return known[2]
        looked = runner.look(state, self.num_features)
        if looked is not None:
            self.__dict__["_looked"] = state, runner, looked
        return looked

    def _begin_sequence(self, runner: Any) -> tuple[Any, Callable[[], H2]]:
        """The state for all timesteps of a call, looked at; H1 is written to. And where gradients are streamed.

        A repetition gets a copy of what its first run began with: the statistics of every timestep would be as large
        as the activations that checkpointing is to spare.
        """
        collects = self._collects
        entry = replay.begin(id(self), collects)
        if entry is not None and entry.again:
            state = stream.copied(entry.kept)
            nobody = not entry.reentrant  # the gradients of a graph that is thrown away
            return runner.look(state, self.num_features), (lambda: H2(state.grads)) if nobody else self._receive
        if collects:
            self._on_forward(self._parameters.get("weight"))
            if self._folds_alike:
                self._fold_alike(self._state)
        elif not self.training:
            self._on_evaluation()
            self._keep_writes()
        if entry is not None:
            entry.kept = stream.copied(self._state)
        return self._look(runner), self._receive

    def _awaits(self, x: Tensor, weight: Tensor | None) -> bool:
        """Whether a gradient may come back from a call; where grad mode is off none does, which may not be meant."""
        return not torch.is_grad_enabled() or x.requires_grad or (weight is not None and weight.requires_grad)

    def _opened(self, shape: tuple[int, ...]) -> State:
        """The state for a training call to write into, bound to the shape of a statistic of its input."""
        self._check_state()
        with outside_inference_mode(), torch.no_grad():
            state = stream.bind(self._own(), shape)
        if self._folds_alike:
            self._fold_alike(state)
        return state

    def _fold_alike(self, state: State) -> None:
        with outside_inference_mode(), torch.no_grad():
            stream.write(state, fold_statistics(self.config, state), stream.H1)

    def _bind_by(self, *arguments: Any) -> Tensor:
        """A first training call, which binds the layer to a spatial size if it goes through."""
        y: Tensor = stream_eagerly(*arguments)
        self._state = arguments[4].h1.state
        self._follow()
        return y

    def _stream_and_show(self, *arguments: Any) -> Tensor:
        """A training call with live statistics. The state is the layer's own by now, and written in place."""
        y: Tensor = stream_eagerly(*arguments)
        self._follow()
        return y

    def _receive(self) -> H2:
        """H2, for the backward pass of a call: that of the layer as it is then."""
        self._on_backward()
        known = self.__dict__.get("_known")
        if known is not None and known.state is self._state:
            return known.h2  # type: ignore[no-any-return]
        self._settled()
        state = self._own()
        if self._folds_alike:
            window, total = state.elements_before, state.counted - state.elements
            stream.write_stream(state.grads, fold_gradients(self.config, state.grads, window, total))
        return H2(state.grads, None if self._scaler is None else state.loss_scale)

    @contextmanager
    def _exactly(self) -> Iterator[None]:
        before = self.config
        self.config = replace(before, **EXACT)
        try:
            yield
        finally:
            self.config = before
        calls = int(self._state.stats.count)
        if calls > 1:
            raise RuntimeError(
                f"LBFGS needs the exact gradient of its loss, which {type(self).__name__} has only if an evaluation "
                f"calls it once, and since the last update it was called {calls} times: give it all data in one call, "
                "or take another optimizer, or a SampleNorm"
            )
