"""How the state of a streaming norm is saved and loaded: by pickle, in a state_dict, from an `nn.BatchNorm`."""

from typing import Any

import torch
from torch import Tensor

from ..core import state as stream
from ..engine.merging import SameGroup
from .live import NAMES
from .loading import BATCHNORM_KEYS, batchnorm_faults, batchnorm_statistics, fault, is_batchnorm, started
from .state import Stateful


class Saved(Stateful):
    """A streaming norm that is kept in files and sent to other processes."""

    def __getstate__(self) -> dict[str, Any]:
        self._keep_writes()
        # Whoever pickles for another process moves what it is given to shared memory, in place. That must not be the
        # state that a call may be using; what `share_memory()` has put there already stays where it is.
        sent = self._state if self._state.mean.untyped_storage().is_shared() else stream.copied(self._state)
        self.__dict__["_sent"] = sent  # until the other process has it
        return super().__getstate__() | {"process_group": SameGroup(self.process_group), "_state": sent}

    def __setstate__(self, state: dict[str, Any]) -> None:
        group = state["process_group"]
        group = group.group if isinstance(group, SameGroup) else group
        try:
            kept = stream.recounted(state["_state"])
        except AttributeError:
            raise RuntimeError(
                f"this {type(self).__name__} was pickled whole by a version of streamnorm that kept another state: "
                "load it there, save its state_dict(), and load that here"
            ) from None
        before = torch.zeros_like(kept.seen)  # of layers that were pickled by versions without merges
        super().__setstate__({"seen_before": before} | state | {"process_group": group, "_state": kept})

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        self._settled()
        self._keep_writes()
        for name, tensor in stream.to_dict(self._snapshot()).items():
            destination[prefix + name] = tensor
        if self.process_group is not None:
            destination[prefix + "seen_before"] = self.seen_before.clone()
        self._save_live(destination, prefix)

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        names = stream.to_dict(self._state).keys()
        if prefix + "pending" in state_dict:  # version 1 had one mark for both streams
            mark = state_dict[prefix + "pending"]
            state_dict = {key: value for key, value in state_dict.items() if key != prefix + "pending"}
            state_dict |= {f"{prefix}{name}_pending": mark for name in stream.STREAMS}
        before = state_dict.get(prefix + "seen_before")  # where windows are merged over processes
        ours = stream.completed({name: state_dict[prefix + name] for name in names if prefix + name in state_dict})
        if ours and (local_metadata.get("version") or self._version) > self._version:
            error_msgs.append(f"{prefix}* was saved by a newer streamnorm (state version {local_metadata['version']})")
            return
        foreign = is_batchnorm(state_dict, prefix) and not ours
        known = (*names, "seen_before", *(BATCHNORM_KEYS if foreign else NAMES))
        others = {k: v for k, v in state_dict.items() if k.removeprefix(prefix) not in known}
        super()._load_from_state_dict(others, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        self._pulse.version = -1  # weights that were loaded are no update unheard of
        assign = local_metadata.get("assign_to_params_buffers", False)
        if foreign:
            faults = batchnorm_faults(state_dict, prefix)
            error_msgs.extend(faults)
            if not faults:
                self._load_batchnorm(batchnorm_statistics(state_dict, prefix, self.eps), prefix, error_msgs, assign)
        elif len(ours) < len(names):
            missing_keys.extend(prefix + name for name in names if name not in ours)
        else:
            self._load_state(ours, prefix, assign, error_msgs, before)

    def _load_state(
        self, loaded: dict[str, Tensor], prefix: str, assign: bool, error_msgs: list[str], seen_before: Tensor | None
    ) -> None:
        shape = loaded["mean"].shape
        template = stream.to_dict(stream.new_state(tuple(shape), self._state.mean))
        legal = self._can_hold(shape)
        wrong = [name for name, like in template.items() if not legal or loaded[name].shape != like.shape]
        error_msgs.extend(
            f"size mismatch for {prefix}{name}: the checkpoint has {tuple(loaded[name].shape)}, which does not fit "
            f"{self.num_features} channels, {self.ref} and present statistics of shape {tuple(self.mean.shape)}"
            for name in wrong
        )
        faults = [] if wrong else [(name, self._fault(name, loaded[name])) for name in template]
        if seen_before is not None:
            faults.append(("seen_before", fault(seen_before, least=0)))
        error_msgs.extend(f"{prefix}{name} {words}" for name, words in faults if words)
        if not wrong and not any(words for _, words in faults):
            device = None if assign else self._state.seen.device
            self._state = stream.from_dict(
                {
                    name: loaded[name].detach().to(device=device, dtype=like.dtype, copy=True).contiguous()
                    for name, like in template.items()
                }
            )
            self._forget_merges(self._state.seen if seen_before is None else seen_before)
            self._show()

    def _load_batchnorm(
        self, statistics: tuple[Tensor, Tensor] | None, prefix: str, error_msgs: list[str], assign: bool
    ) -> None:
        """Start the streams from a trained `nn.BatchNorm`, without a warm-up; from nothing if it never saw data."""
        like = self._state.mean
        if assign and statistics is not None:
            like = torch.empty_like(like, device=statistics[0].device)
        fresh = stream.new_state(self._initial_shape(), like)
        if statistics is None:
            self._state = fresh
            self._forget_merges(None)
            self._show()
            return
        both = torch.stack([value.detach().to(like) for value in statistics])
        if both.shape[1:] != self.mean.shape or self.ref.located:
            error_msgs.append(
                f"{prefix}running_mean of shape {tuple(both.shape[1:])} is per channel, the statistics of {self.ref} "
                f"have shape {tuple(self.mean.shape)}: load an nn.BatchNorm into BA1 or SP2 with as many channels"
            )
            return
        self._state = started(fresh, both, max(self.warmup, 1.0))
        self._forget_merges(self._state.seen)
        self._show()
