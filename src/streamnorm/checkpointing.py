"""Activation checkpointing: a call that is run again in backward begins with the state that it began with at first.

`torch.utils.checkpoint` runs a part of the network, a segment, once more in backward. The statistics were pushed by the
first run, so the repetition works on a copy of the state as it was then, and computes the same bit for bit. A segment
repeats its calls in order: the n-th call of a repetition is the n-th call of the first run.
"""

import sys
from collections.abc import Callable
from inspect import unwrap
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch.utils import checkpoint

FIRST_RUN = object()

# How torch tells which hooks are in force on saved tensors (since 2.5), and whether a backward pass runs.
_top_hooks: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
_backward_pass: Any = torch._C._current_graph_task_id
_grad_enabled = torch.is_grad_enabled
_Frame: Any = getattr(checkpoint, "_CheckpointFrame", ())
_REENTRANT_FIRST = checkpoint.CheckpointFunction.forward.__code__
_REENTRANT_AGAIN = checkpoint.CheckpointFunction.backward.__code__


class _Segment:
    """What the calls of a segment began with, in order."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, Any]] = []  # who was called, and what it keeps
        self.repeated = False


_segments: WeakKeyDictionary[Any, _Segment] = WeakKeyDictionary()  # by what torch keeps a segment in, and as long
_position: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # calls made so far, by the hook of a repetition


def may_be_checkpointed() -> bool:
    """Whether a call needs a closer look: cheap, and False in a training loop without checkpointing."""
    return not torch.compiler.is_compiling() and is_watched()


def is_watched() -> bool:
    """The same for a call that is known not to be compiled."""
    if _backward_pass() != -1 or not _grad_enabled():
        return True
    return _top_hooks is not None and _top_hooks(True) is not None


def kept_by_first_run(caller: int, keep: Callable[[], Any]) -> Any:
    """In a repetition: what `keep` gave in the first run. Otherwise FIRST_RUN; `keep()` is kept for repetitions.

    `caller`: a number for whoever is called, by which several calls of one layer are told from calls of several.
    """
    firsts, again, hook = _segments_here()
    kept = keep() if firsts and again is None else None
    if again is not None:
        kept = _repetition(caller, again, hook)
    for first in firsts:
        _segments.setdefault(first, _Segment()).calls.append((caller, kept))
    return FIRST_RUN if again is None else kept


def _repetition(caller: int, again: Any, hook: Any) -> Any:
    segment = _segments.get(again)
    if segment is None:
        return None
    if hook is None:
        _refuse_several_reentrant(caller, segment)
        segment.repeated = True
        return next((kept for called, kept in segment.calls if called == caller), None)
    position = _position.get(hook, 0)
    _position[hook] = position + 1
    return segment.calls[position][1] if position < len(segment.calls) else None


def _refuse_several_reentrant(caller: int, segment: _Segment) -> None:
    waiting = [each for each in _segments.values() if each is segment or not each.repeated]
    calls = sum(called == caller for each in waiting for called, _ in each.calls)
    if calls > 1:
        for each in waiting:
            each.repeated = True
        raise RuntimeError(
            f"a layer was called {calls} times under torch.utils.checkpoint with use_reentrant=True before this "
            "backward pass, which can repeat only one of them exactly: use checkpoint(..., use_reentrant=False)"
        )


def _segments_here() -> tuple[list[Any], Any, Any]:
    """The segments that a call is in for the first time; the one that it repeats, if any, and the hook for that."""
    firsts: list[Any] = []
    for pack in _packing_hooks():
        frame, again = _frame_of(pack)
        if again:
            return firsts, frame, pack
        if frame is not None:
            firsts.append(frame)
    if _backward_pass() == -1 and torch.is_grad_enabled():
        return firsts, None, None
    caller = sys._getframe()
    while caller is not None:
        code = caller.f_code
        if code is _REENTRANT_FIRST:
            firsts.append(caller.f_locals["ctx"])
        elif code is _REENTRANT_AGAIN:
            return firsts, caller.f_locals["ctx"], None
        elif _top_hooks is None and code.co_filename == checkpoint.__file__ and _backward_pass() != -1:
            raise RuntimeError(
                f"torch {torch.__version__} does not tell which part of a network it runs again: "
                "torch.utils.checkpoint with use_reentrant=False needs a newer torch"
            )
        caller = caller.f_back  # type: ignore[assignment]
    return firsts, None, None


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
