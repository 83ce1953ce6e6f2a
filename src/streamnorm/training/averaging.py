"""Statistics for weights that were not trained with them, such as averaged ones (SWA, EMA)."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..backends.memory import outside_inference_mode
from ..core import state as stream
from ..core.algorithm import blend, stream_input
from ..core.config import STATISTIC, Config
from ..core.state import State
from ..engine.context import evaluating
from ..nn.batch import GeneralBatchNorm, TimeSpecificNorm
from ..nn.streaming import StreamingNorm


def update_stats(
    model: nn.Module,
    loader: Iterable[Any],
    device: torch.device | str | None = None,
    *,
    passes: int = 1,
    forward: Callable[[Any], Any] | None = None,
) -> None:
    """Compute the statistics of all norms in `model` anew, from the data in `loader` and for the present weights.

    Afterwards every norm holds the average of the statistics of its calls, each call counting once, as if the whole
    loader were one window of training: pass batches as they come in training. The model runs in evaluation mode
    without gradients, so nothing else changes. Streamed gradients are kept. If anything is raised, all statistics are
    as before.

    Args:
        model: a model with norms that keep statistics.
        loader: batches, each a tensor, or a tuple or list whose first entry is the input.
        device: where inputs are moved to, if it is given.
        passes: over the loader. In the first one a norm normalizes by its average so far, in each further one by the
            result of the one before: then deep norms see what they will see in evaluation.
        forward: calls the model, as `forward(batch)`, for other batches.

    Example:
        >>> import streamnorm
        >>> model = nn.Sequential(nn.Linear(2, 3), streamnorm.StreamingNorm(3))
        >>> averaged = torch.optim.swa_utils.AveragedModel(model)
        >>> update_stats(averaged, [torch.randn(1, 2) for _ in range(10)])
        >>> int(averaged.module[1].stats.count)
        0
    """
    if isinstance(passes, bool) or not isinstance(passes, int) or passes < 1:
        raise ValueError(f"passes={passes!r}: must be a whole number of at least 1")
    if forward is not None and device is not None:
        raise ValueError(f"device={device!r} is for the input of the model, which forward= calls: move batches there")
    if passes > 1 and isinstance(loader, Iterator):
        raise ValueError(
            f"loader is a {type(loader).__name__}, which can be read once: pass a DataLoader or a list, or passes=1"
        )
    keeping = StreamingNorm | GeneralBatchNorm | TimeSpecificNorm
    norms = [norm for norm in model.modules() if isinstance(norm, keeping)]
    if not norms:
        raise ValueError(f"update_stats: {type(model).__name__} has no norm that keeps statistics")
    call = forward or partial(_call, model, device)
    collectors: list[_Collector] = []
    with outside_inference_mode(), evaluating(model), _uncompiled(), ExitStack() as afterwards:
        for norm in norms:
            collectors.append(_Collector(norm))
            afterwards.callback(collectors[-1].close)
        for number in range(passes):
            for collector in collectors:
                collector.begin(settled=number > 0)
            batches = 0
            for batches, batch in enumerate(loader, 1):  # noqa: B007
                call(batch)
            if not batches:
                raise ValueError("the loader is empty: statistics need at least one batch")
            if not sum(collector.end() for collector in collectors):
                raise ValueError(
                    "no norm of the model was given finite data: check the batches, and that forward= calls this model"
                )
    with outside_inference_mode(), torch.no_grad():
        for collector in collectors:
            collector.commit()


def _call(model: nn.Module, device: torch.device | str | None, batch: Any) -> None:
    x = batch[0] if isinstance(batch, tuple | list) else batch
    model(x if device is None else x.to(device))


def _uncompiled() -> AbstractContextManager[Any]:
    """Compiled code would not see the hooks. Before torch 2.6 a compiled model has to be unwrapped by hand."""
    stance = getattr(torch.compiler, "set_stance", None)
    return stance("force_eager") if stance else nullcontext()


class _Collector:
    """Streams the statistics of the calls of one norm in evaluation mode, and sets those that it normalizes by.

    One window for each set of statistics: a TimeSpecificNorm has one per timestep, the others have one, index ().
    """

    def __init__(self, norm: Any) -> None:
        norm._keep_writes()
        self.norm, self.streaming = norm, isinstance(norm, StreamingNorm)
        like = norm._state.mean if self.streaming else norm.mean
        self.fresh = stream.new_state(norm._initial_shape(), like)
        self.states: dict[tuple[int, ...], State] = {}
        only_short = {"alpha": (0, 1), "beta": (0, 0, 0), "guard": False}
        taken = {name: getattr(norm.config, name) for name in STATISTIC}
        self.config = norm.config if self.streaming else Config(**taken | only_short)
        self.kept: Any = norm._snapshot() if self.streaming else (norm.mean, norm.sigma)
        if not self.streaming:
            norm.mean, norm.sigma = norm.mean.clone(), norm.sigma.clone()
        self.hook = norm.register_forward_pre_hook(self._before_call, with_kwargs=True)

    def begin(self, settled: bool) -> None:
        """A pass begins. `settled`: the norm goes on as the pass before left it; else it follows the average so far."""
        self.settled = settled
        self.states = {index: replace(s, stats=self._fresh(s).stats) for index, s in self.states.items()}

    def end(self) -> bool:
        """The norm normalizes by what the pass found; returns whether that was anything."""
        self.states = {index: state for index, state in self.states.items() if int(state.stats.count)}
        for index, state in self.states.items():
            mean, sigma = blend(state.stats, *self.config.alpha)
            self.states[index] = replace(state, mean=mean, sigma=sigma)
            self._use(index, mean, sigma)
        return bool(self.states)

    def close(self) -> None:
        """The norm is as it was before."""
        self.hook.remove()
        if self.streaming:
            self.norm._state = self.kept
            self.norm._snapshot()
        else:
            self.norm.mean, self.norm.sigma = self.kept

    def commit(self) -> None:
        """The norm takes the result over, into its own tensors, which others may hold."""
        for index, state in self.states.items():
            if self.streaming:
                self._commit_streams(state)
            else:
                self.norm._bind(tuple(state.mean.shape))
                self.norm.mean[index].copy_(state.mean)
                self.norm.sigma[index].copy_(state.sigma)
        self.norm._show()

    def _commit_streams(self, found: State) -> None:
        """As after a weight update: the next training call opens a new window. No warm-up, and H2 is kept."""
        average, norm = found.stats.short, self.norm
        stats = replace(
            self._fresh(found).stats, long=average, short=average, empty=torch.zeros_like(found.stats.empty)
        )
        seen = found.seen.clamp(min=max(self.config.warmup, 1.0))
        bound = stream.bind(self.kept, tuple(found.mean.shape))
        none = torch.zeros_like(seen)
        after = replace(bound, stats=stats, mean=found.mean, sigma=found.sigma, seen=seen, elements=none)
        after = replace(
            after, counted=seen.clone(), samples=none, eval_long=average, eval_mean=found.mean, eval_sigma=found.sigma
        )
        if after.mean.shape != norm._state.mean.shape:
            norm._state = stream.new_state(tuple(after.mean.shape), after.mean)
        stream.write(norm._own(), after)
        norm._forget_merges(norm._state.seen)

    def _before_call(self, norm: Any, args: Any, kwargs: Any) -> None:
        x, mask, step = _arguments(*args, **kwargs)
        x, mask = norm._to_channels_first(x, mask)
        norm._check_elements(x)
        index = (step,) if isinstance(norm, TimeSpecificNorm) else ()
        if index and step >= norm.steps:  # of which no statistics are kept
            return
        before = stream.bind(self.states.get(index, self.fresh), norm._statistic_shape(x))
        config = replace(self.config, warmup=0) if self.settled else self.config
        wide = x.to(torch.promote_types(x.dtype, before.mean.dtype))
        after, _, _ = stream_input(config, before, wide, mask)
        if self.settled:
            after = replace(after, mean=before.mean, sigma=before.sigma)
        else:
            self._use(index, after.mean, after.sigma)
        self.states[index] = after

    def _use(self, index: tuple[int, ...], mean: Tensor, sigma: Tensor) -> None:
        """Let the norm normalize by these."""
        if self.streaming:
            self.norm._state = replace(self.norm._state, mean=mean, sigma=sigma, eval_mean=mean, eval_sigma=sigma)
        else:
            self.norm._bind(tuple(mean.shape))
            self.norm.mean[index], self.norm.sigma[index] = mean, sigma

    def _fresh(self, like: State) -> State:
        return stream.new_state(tuple(like.mean.shape), like.mean)


def _arguments(x: Tensor, mask: Tensor | None = None, step: int = 0) -> tuple[Tensor, Tensor | None, int]:
    """Of a call of a norm."""
    return x, mask, step
