"""Activation checkpointing: a call that is run again in backward begins with the state that it began with at first.

`torch.utils.checkpoint` runs a part of the network, a segment, once more in backward. The statistics were pushed by the
first run, so the repetition works on a copy of the state as it was then, and computes the same bit for bit. A segment
repeats its calls in order: the n-th call of a repetition is the n-th call of the first run.
"""

import sys
from collections.abc import Callable
from inspect import unwrap
from threading import RLock
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch.utils import checkpoint

# How torch tells which hooks are in force on saved tensors (since 2.5), and whether a backward pass runs.
_top_hooks: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
_backward_pass: Any = torch._C._current_graph_task_id
_grad_enabled = torch.is_grad_enabled
_Frame: Any = getattr(checkpoint, "_CheckpointFrame", ())
_REENTRANT_FIRST = checkpoint.CheckpointFunction.forward.__code__
_REENTRANT_AGAIN = checkpoint.CheckpointFunction.backward.__code__


class Kept(NamedTuple):
    """What a call of a first run keeps."""

    caller: int  # a number for whoever was called
    learned: bool  # statistics
    what: Any


class Repetition(NamedTuple):
    """A call that is run again."""

    kept: Any  # `what` of the first run
    reentrant: bool  # its graph is the one that backward goes through; else that of the first run is


class _Segment:
    def __init__(self, reentrant: bool) -> None:
        self.calls: list[Kept] = []  # in order
        self.reentrant, self.repeated = reentrant, False


class _Here(NamedTuple):
    """Where a call is: in segments that run for the first time, and in one that is repeated, by a hook or reentrant."""

    firsts: list[tuple[Any, bool]]  # what torch keeps a segment in; whether it is reentrant
    again: Any = None
    hook: Any = None


_segments: WeakKeyDictionary[Any, _Segment] = WeakKeyDictionary()  # by what torch keeps a segment in, and as long
_position: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # calls made so far, by the hook of a repetition
_lock = RLock()


def may_be_checkpointed() -> bool:
    """Whether a call needs a closer look: cheap, and False in a training loop without checkpointing."""
    return not torch.compiler.is_compiling() and is_watched()


def is_watched() -> bool:
    """The same for a call that is known not to be compiled."""
    if _backward_pass() != -1 or (_top_hooks is not None and _top_hooks(True) is not None):
        return True
    return not _grad_enabled() and bool(_reentrant().firsts)


def in_backward() -> bool:
    return not torch.compiler.is_compiling() and _backward_pass() != -1


def begin(caller: int, learns: bool, keep: Callable[[], Any]) -> Repetition | None:
    """A call begins. In a first run it keeps what `keep` gives, if it has to; a repetition gets that."""
    if not may_be_checkpointed():
        return None
    here = _here()
    with _lock:
        again = here.again is not None
        kept = _repeat(caller, here) if again else keep() if here.firsts else None
        for key, reentrant in here.firsts:
            _segments.setdefault(key, _Segment(reentrant)).calls.append(Kept(caller, learns, kept))
    return Repetition(kept, here.hook is None) if again and kept is not None else None


def find(caller: int) -> Any:
    """What the next call of `caller` in a repetition will find kept; None outside of one."""
    here = _here()
    segment = None if here.again is None else _segments.get(here.again)
    if segment is None:
        return None
    rest = segment.calls[_position.get(here.hook, 0) if here.hook else 0 :]
    return next((kept.what for kept in rest if kept.caller == caller), None)


def _repeat(caller: int, here: _Here) -> Any:
    """What the first run of the call kept; None if that is not known."""
    segment = _segments.get(here.again)
    if segment is None:
        return None
    if here.hook is None:
        _refuse_several(caller, segment)
        segment.repeated = True
        return next((kept.what for kept in segment.calls if kept.caller == caller), None)
    position = _position.get(here.hook, 0)
    _position[here.hook] = position + 1
    if position >= len(segment.calls) or segment.calls[position].caller != caller:
        raise RuntimeError(
            "torch.utils.checkpoint: a segment calls its norms in another order when it is run again, so it is not "
            "known which statistics they had: let the segment do the same each time"
        )
    return segment.calls[position].what


def _refuse_several(caller: int, segment: _Segment) -> None:
    waiting = [s for s in list(_segments.values()) if s.reentrant and (s is segment or not s.repeated)]
    calls = sum(kept.caller == caller and kept.learned for each in waiting for kept in each.calls)
    if calls > 1:
        for each in waiting:
            each.repeated = True
        raise RuntimeError(
            f"a layer was called {calls} times under torch.utils.checkpoint with use_reentrant=True before this "
            "backward pass, which can repeat only one of them exactly: use checkpoint(..., use_reentrant=False)"
        )


def _here() -> _Here:
    firsts: list[tuple[Any, bool]] = []
    for pack in _packing_hooks():
        frame, again = _frame_of(pack)
        if again:
            return _Here(firsts, frame, pack)
        if frame is not None:
            firsts.append((frame, False))
    if _backward_pass() == -1 and _grad_enabled():
        return _Here(firsts)
    reentrant = _reentrant()
    return reentrant._replace(firsts=firsts + reentrant.firsts)


def _reentrant() -> _Here:
    """Reentrant segments, which are found on the stack."""
    firsts: list[tuple[Any, bool]] = []
    frame = sys._getframe()
    while frame is not None:
        code = frame.f_code
        if code is _REENTRANT_FIRST:
            firsts.append((frame.f_locals["ctx"], True))
        elif code is _REENTRANT_AGAIN:
            return _Here(firsts, frame.f_locals["ctx"])
        elif _top_hooks is None and code.co_name == "unpack_hook" and code.co_filename == checkpoint.__file__:
            raise RuntimeError(
                f"torch {torch.__version__} does not tell which part of a network it runs again: "
                "torch.utils.checkpoint with use_reentrant=False needs a newer torch"
            )
        frame = frame.f_back  # type: ignore[assignment]
    return _Here(firsts)


def _packing_hooks() -> list[Any]:
    """The hooks in force on saved tensors, innermost first."""
    hooks: list[Any] = []
    while _top_hooks is not None and (top := _top_hooks(True)) is not None:
        hooks.append(top)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    for pack, unpack in reversed(hooks):
        torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)
    return [pack for pack, _ in hooks]


def _frame_of(pack: Any) -> tuple[Any, bool]:
    """What torch keeps the segment of a hook in, and whether the hook belongs to a repetition; None for other hooks."""
    for cell in getattr(unwrap(pack), "__closure__", None) or ():
        content = cell.cell_contents
        again = isinstance(content, ref)
        frame = content() if again else content
        if isinstance(frame, _Frame):
            return frame, again
    return None, False
