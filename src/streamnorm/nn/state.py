"""A norm that keeps streams: its state, who may hold it, how it hears of updates."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .. import backends
from ..backends.memory import outside_inference_mode
from ..core import state as stream
from ..core.algorithm import drop, folded, tested
from ..core.config import Config
from ..core.state import FIELDS, H1, Kind, State, Stream
from ..engine import merging
from ..engine.context import check_memory, transformed
from ..engine.listener import Listener
from ..engine.merging import Share
from ..engine.updates import listen, loss_scale
from .base import Device, moved, setting, statistics_like
from .live import LiveStatistics
from .loading import fault, sigma_fault

# Attributes that may be set without a look at how the next call is served: each call asks them, or none does.
_OF_NO_PLAN = ("training", "_paused", "_dims")


class Stateful(LiveStatistics, Listener):
    """Base of StreamingNorm. The state is written in place, except that what was handed out never changes."""

    config: Config
    _config_type = Config
    _version = 4
    _state: State
    seen_before: Tensor  # `seen` when the windows of all processes were last merged
    _sized = False  # all processes know the spatial size of statistics with a location
    _shared = False  # somebody may hold the tensors of the state: they are not written to any more

    alpha = setting("alpha", "Weights of `long` and `short` in s_hat.")
    beta = setting("beta", "Weights of `long`, `short` and the present gradient in g_hat.")
    kappa = setting("kappa", "Weights of `long` and `short` in a fold of H1, then of H2.")
    warmup = setting("warmup", "Elements per statistic for which it turns from a layer norm into a streaming norm.")
    eval_memory = setting("eval_memory", "Samples that evaluation averages over, at least; 0: the latest s_hat.")
    guard = setting("guard", "Whether small windows count for less, and large samples go half by their own gradient.")

    def _begin_state(self, device: Device, dtype: torch.dtype | None) -> None:
        self._state = stream.new_state(self._initial_shape(), statistics_like(device, dtype))
        self._forget_merges(None)

    def _enlist(self) -> None:
        super()._enlist()
        listen()
        backends.active()  # graphs of the compiler read its names

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _OF_NO_PLAN:
            for known in ("_known", "_looked", "_memo"):  # how the last call was served: something is new now
                self.__dict__.pop(known, None)
        if name in FIELDS and isinstance(value, Tensor):
            self._set_tensor(name, value)
        else:
            super().__setattr__(name, value)

    def _set_tensor(self, name: str, value: Tensor) -> None:
        """One tensor of the state, as loaders set it that go through a checkpoint tensor by tensor."""
        tensors = stream.to_dict(self._state)
        if value.shape != tensors[name].shape:
            raise ValueError(f"{name} has shape {tuple(tensors[name].shape)}: it cannot be set to {tuple(value.shape)}")
        if wrong := self._fault(name, value):
            raise ValueError(f"{name} {wrong}")
        if transformed() and value.dtype == tensors[name].dtype:  # a copy would be the transform's, and outlive it
            self._shared = True
        else:
            value = value.detach().to(dtype=tensors[name].dtype, copy=True).contiguous()
        self._state = stream.from_dict(tensors | {name: value})

    def _fault(self, name: str, value: Tensor) -> str | None:
        """What is wrong with a tensor for the state, if anything: no training could have left it."""
        if name in H1 and min(*self.alpha, *self.kappa) >= 0:  # else sigma may turn negative
            if name.endswith("sigma"):
                return sigma_fault(value, self.eps if any(self.alpha) else 0.0)
            if FIELDS[name] is Kind.PAIR:
                return fault(value) or fault(value[1], least=0)
        is_count = FIELDS[name] in (Kind.COUNT, Kind.COUNTER, Kind.NUMBER)
        return fault(value, least=0) if is_count else fault(value)

    @property
    def state(self) -> State:
        """All state, as it is now."""
        return self._snapshot()

    @property
    def _stored(self) -> Tensor:
        return self._state.mean

    @property
    def mean(self) -> Tensor:
        """The latest mean of s_hat, by which a training call has normalized."""
        return self._snapshot().mean

    @property
    def sigma(self) -> Tensor:
        """The latest sigma of s_hat, by which a training call has normalized."""
        return self._snapshot().sigma

    def _used(self, state: State) -> tuple[Tensor, Tensor]:
        """Mean and sigma of a call that streams nothing: training does not depend on the memory for evaluation."""
        return (state.mean, state.sigma) if self.training else self._as_written(*tested(self.config, state))

    def _latest(self) -> tuple[Tensor, Tensor]:
        return tested(self.config, self._state)

    def _take_over(self, mean: Tensor, sigma: Tensor) -> None:
        """Until the next training call, which goes by the streams."""
        if self.eval_memory:
            self._state = replace(self._state, eval_mean=mean, eval_sigma=sigma)
        else:
            self._state = replace(self._state, mean=mean, sigma=sigma)

    @property
    def stats(self) -> Stream:
        """H1: the streams of mean (row 0) and sigma (row 1)."""
        return self._snapshot().stats

    @property
    def grads(self) -> Stream:
        """H2: the streams of dE/dmean and dE/dsigma."""
        self._settled()
        return self._snapshot().grads

    def _snapshot(self) -> State:
        """The state for somebody to keep: what was read never changes under the reader's hands."""
        self._shared = True
        return self._state

    def _own(self) -> State:
        """The state for writing into."""
        if self._shared:
            with outside_inference_mode():
                self._state = stream.copied(self._state)
            self._shared = False
        return self._state

    def reset_running_stats(self) -> None:
        """Forget everything: statistics, their gradients, and the spatial size that they are bound to."""
        self._state = stream.new_state(self._initial_shape(), self._state.mean)
        self._forget_merges(None)
        self._show()

    def _forget_merges(self, seen_before: Tensor | None) -> None:
        """The state is another one: what was `seen` at the last merge, if there was one."""
        seen = self._state.seen
        self.seen_before = torch.zeros_like(seen) if seen_before is None else seen_before.detach().to(seen, copy=True)
        self._sized = False

    def reset_gradients(self) -> None:
        """Forget the streamed gradients, for a new loss or a new scale of it."""
        state, fresh = self._state, stream.new_stream(tuple(self._state.mean.shape), self._state.mean)
        grads = replace(fresh, pending=state.grads.pending)
        self._state = replace(state, grads=grads, loss_scale=state.mean.new_zeros(()))

    def _share(self) -> tuple[Any, Share] | None:
        group = merging.members(self.process_group)
        if group is None:
            return None
        state = folded(self.config, self._settled())  # a process without a batch has not folded the last update yet
        return group, Share(self.config, state, self.seen_before, self.ref.located and not self._sized, self)

    def _described(self) -> dict[str, str]:
        """What has to be the same in all processes that merge."""
        settings = self._arguments() | {"warmup": float(self.warmup)}
        words = {name: f"{name}={value!r}" for name, value in settings.items() if name != "process_group"}
        kind = {"kind": f"{type(self).__name__}({self.num_features})"}
        return kind | words | {"dtype": f"dtype={self._state.mean.dtype}"}

    def _take(self, state: State, seen_before: Tensor) -> None:
        if state.mean.shape != self._state.mean.shape:
            self._state = stream.new_state(tuple(state.mean.shape), state.mean)
        stream.write(self._own(), state)
        self.seen_before, self._sized = seen_before, bool(state.mean.numel())
        self._show()

    def _mark_update(self, found_inf: Tensor | None) -> None:
        state = self._own()
        for pending in (state.stats.pending, state.grads.pending):
            if found_inf is None:
                pending.fill_(True)
            else:
                pending.logical_or_((found_inf == 0).reshape(()).to(pending.device))

    def _check_state(self) -> None:
        """A state of which a part was moved or replaced by hand cannot be gone on with."""
        like = self._state.mean
        dtype, device = like.dtype, like.device
        for name, tensor in stream.to_dict(self._state).items():
            check_memory(**{name: tensor})
            if tensor.device != device or tensor.dtype != stream.dtype_of(name, dtype, device):
                raise RuntimeError(
                    f"{name} of {type(self).__name__} is {tensor.dtype} on {tensor.device}, where mean is {dtype} on "
                    f"{device}: move the whole layer with .to(), or load or reset all of its state"
                )

    def _settled(self) -> State:
        """The state, after dropping the gradients of a step that the scaler skipped: it lowers its scale then.

        Without a scaler nothing is written, or copied for that: graphs of the compiler write into these tensors.
        """
        if self._scaler is None:
            return self._state
        state = self._own()
        scale = loss_scale(self._scaler, state.loss_scale)
        skipped = (scale < state.loss_scale) & ~state.grads.pending
        stream.write(state, replace(state, grads=drop(state.grads, skipped), loss_scale=scale))
        return state

    def _rewinder(self) -> Callable[[], None]:
        self._keep_writes()
        state, before, sized = self._snapshot(), self.seen_before, self._sized

        def restore() -> None:
            self._state, self.seen_before, self._sized = state, before, sized
            self._shared = True
            self._show()
            self._pulse.version = -1  # whatever happened to the weights since is no news

        return restore

    def _apply(self, fn: Any, recurse: bool = True) -> "Stateful":
        super()._apply(fn, recurse)
        # Copies are moved: a call in another thread may be using the state.
        state = stream.to_dict(stream.copied(self._state))
        self._state = stream.from_dict({name: _moved(name, tensor, fn) for name, tensor in state.items()})
        self.seen_before = _moved("seen", self.seen_before, fn)
        self._shared = False  # nobody else has these
        self._show()
        return self


def _moved(name: str, tensor: Tensor, fn: Any) -> Tensor:
    """`fn` of `nn.Module._apply` for a tensor of the state: counters keep their type."""
    if FIELDS[name] is not Kind.COUNTER:
        return moved(tensor, fn)
    where = fn(tensor.new_empty(0, dtype=torch.float32)).device
    tensor = tensor.to(stream.counter_dtype(where))
    result: Tensor = fn(tensor)
    return result if result.dtype == tensor.dtype else tensor.to(where)


def _reader(name: str) -> property:
    return property(lambda layer: stream.to_dict(layer._snapshot())[name])


# Every tensor of the state can be read under its name in the state_dict too: `layer.stats_long`.
for _name in FIELDS.keys() - {"mean", "sigma"}:
    setattr(Stateful, _name, _reader(_name))
