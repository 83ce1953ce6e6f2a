"""Activation checkpointing: a call that is run again in backward replays what its first run kept.

`torch.utils.checkpoint` runs a part of the network, a segment, once more in backward. The statistics were pushed by the
first run, so the repetition normalizes with what that kept and pushes nothing. A segment repeats its calls in order:
the n-th call of a repetition is the n-th call of the first run.
"""

from threading import RLock
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from ..backends import H2
from ..core.state import copied_stream
from . import compat

_grad_enabled = torch.is_grad_enabled


class Entry:
    """A call inside a checkpoint: what it kept is put here by its first run, and found here by the repetition."""

    __slots__ = ("again", "caller", "h2", "kept", "learned", "reentrant")

    def __init__(self, caller: int, learned: bool) -> None:
        self.caller = caller  # a number for whoever was called
        self.learned = learned  # statistics
        self.kept: Any = None
        self.h2: Any = None  # that a backward pass within the segment began with, if there was one
        self.again = self.reentrant = False

    def repeated(self, reentrant: bool) -> "Entry":
        """The same call, run again. `reentrant`: its graph is the one that backward goes through."""
        entry = Entry(self.caller, self.learned)
        entry.kept, entry.h2, entry.again, entry.reentrant = self.kept, self.h2, True, reentrant
        return entry


class _Segment:
    def __init__(self, reentrant: bool) -> None:
        self.calls: list[Entry] = []  # in order
        self.reentrant, self.repeated = reentrant, False


class _Here(NamedTuple):
    """Where a call is: in segments that run for the first time, and in one that is repeated, by a hook or reentrant."""

    firsts: list[tuple[Any, bool]]  # what torch keeps a segment in; whether it is reentrant
    again: Any = None
    hook: Any = None


_segments: WeakKeyDictionary[Any, _Segment] = WeakKeyDictionary()  # by what torch keeps a segment in, and as long
_position: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # calls made so far, by the hook of a repetition
_lock = RLock()


def is_watched() -> bool:
    """Whether an eager call needs a closer look: cheap, and False in a training loop without checkpointing."""
    if compat.current_backward_pass() != -1 or (compat.top_hooks is not None and compat.top_hooks(True) is not None):
        return True
    return not _grad_enabled() and bool(compat.reentrant_segments()[0])


def in_backward() -> bool:
    return not torch.compiler.is_compiling() and compat.current_backward_pass() != -1


def begin(caller: int, learns: bool) -> Entry | None:
    """A call begins: None outside of checkpoints, else what it fills in, or what its first run has filled in."""
    if torch.compiler.is_compiling() or not is_watched():
        return None
    here = _here()
    with _lock:
        entry = None
        if here.again is not None:
            found = _repeat(caller, here)
            entry = None if found is None else found.repeated(here.hook is None)
        elif here.firsts:
            entry = Entry(caller, learns)
        if entry is not None:
            for key, reentrant in here.firsts:
                _segments.setdefault(key, _Segment(reentrant)).calls.append(entry)
    return entry


def own_h2(entry: Entry, h2: H2) -> H2:
    """H2 for a backward pass through a call of a checkpoint.

    Gradients that are taken within a segment are streamed by its first run; the repetition gets a copy of what that
    began with, so that it computes the same, and what it pushes is for nobody.
    """
    if entry.again and not entry.reentrant:
        return h2._replace(grads=copied_stream(entry.h2 or h2.grads))
    if entry.h2 is None:
        entry.h2 = copied_stream(h2.grads)
    return h2


def find(caller: int) -> Entry | None:
    """What the next call of `caller` in a repetition will find; None outside of one."""
    here = _here()
    segment = None if here.again is None else _segments.get(here.again)
    if segment is None:
        return None
    rest = segment.calls[_position.get(here.hook, 0) if here.hook else 0 :]
    return next((entry for entry in rest if entry.caller == caller), None)


def _repeat(caller: int, here: _Here) -> Entry | None:
    """The first run of the call; None if that is not known."""
    segment = _segments.get(here.again)
    if segment is None:
        return None
    if here.hook is None:
        _refuse_several(caller, segment)
        segment.repeated = True
        return next((entry for entry in segment.calls if entry.caller == caller), None)
    position = _position.get(here.hook, 0)
    _position[here.hook] = position + 1
    if position >= len(segment.calls) or segment.calls[position].caller != caller:
        raise RuntimeError(
            "torch.utils.checkpoint: a segment calls its norms in another order when it is run again, so it is not "
            "known which statistics they had: let the segment do the same each time"
        )
    return segment.calls[position]


def _refuse_several(caller: int, segment: _Segment) -> None:
    waiting = [s for s in list(_segments.values()) if s.reentrant and (s is segment or not s.repeated)]
    calls = sum(entry.caller == caller and entry.learned for each in waiting for entry in each.calls)
    if calls > 1:
        for each in waiting:
            each.repeated = True
        raise RuntimeError(
            f"a layer was called {calls} times under torch.utils.checkpoint with use_reentrant=True before this "
            "backward pass, which can repeat only one of them exactly: use checkpoint(..., use_reentrant=False)"
        )


def _here() -> _Here:
    firsts: list[tuple[Any, bool]] = []
    for pack in compat.packing_hooks():
        frame, again = compat.checkpoint_of(pack)
        if again:
            return _Here(firsts, frame, pack)
        if frame is not None:
            firsts.append((frame, False))
    if compat.current_backward_pass() == -1 and _grad_enabled():
        return _Here(firsts)
    reentrant, again = compat.reentrant_segments()
    return _Here(firsts + [(key, True) for key in reentrant], again)
