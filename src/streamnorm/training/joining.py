"""Processes with unequal amounts of data, through torch's Join: who has no more takes part in merges all the same."""

from typing import Any

import torch
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from ..engine import merging as distributed
from ..engine.updates import after_step, listeners_of, unwrapped
from ..nn.state import Stateful


class StreamJoin(Joinable):
    """Lets the streaming layers that an optimizer updates be trained under `Join`, one optimizer step per batch.

    A process that has run out of data shadows the merges of the others, and ends with the same state as they.

    Args:
        optimizer: of layers with a `process_group`.

    Example:
        >>> with Join([ddp_model, StreamJoin(optimizer)]):  # doctest: +SKIP
        ...     for batch in loader:  # in this order; loaders may have another length in each process
        ...         train(batch)
    """

    def __init__(self, optimizer: Any) -> None:
        super().__init__()
        optimizer = unwrapped(optimizer)
        layers = [layer for layer in listeners_of(optimizer) if isinstance(layer, Stateful)]
        merging = [(layer, distributed.members(layer.process_group)) for layer in layers]
        found = next(((layer, group) for layer, group in merging if group is not None), None)
        if found is None:
            raise ValueError(
                "StreamJoin: the optimizer updates no streaming layer that merges over processes: give the layers "
                'process_group="world", and call torch.distributed.init_process_group() first'
            )
        self.optimizer, self._group, self._device = optimizer, found[1], found[0]._state.seen.device
        self._before_step: Any = None

    def join_hook(self, **kwargs: Any) -> JoinHook:
        self.leave()
        self._before_step = self.optimizer.register_step_pre_hook(self._notify)
        return _Shadow(self)

    def _notify(self, *step: Any) -> None:
        Join.notify_join_context(self)  # only heeded from the first of the joinables

    def leave(self) -> None:
        """The context is over: torch would leave the notifications on."""
        if self._before_step is not None:
            self._before_step.remove()
            self._before_step = None

    @property
    def join_device(self) -> torch.device:
        return self._device

    @property
    def join_process_group(self) -> Any:
        return self._group


class _Shadow(JoinHook):
    def __init__(self, joinable: StreamJoin) -> None:
        self.joinable = joinable

    def main_hook(self) -> None:
        after_step(self.joinable.optimizer)

    def post_hook(self, is_last_joiner: bool) -> None:
        self.joinable.leave()
