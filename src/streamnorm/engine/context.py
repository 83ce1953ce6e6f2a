"""Whether a call is transformed rather than simply run: by torch.func, forward-mode AD, torch.export, torch.jit.trace.

All of them want ordinary operations and no side effects. A call that changes no statistics gives them that; one in
training, which streams statistics, is refused. torch.compile is not among them: it is served by `compiled`.
"""

from collections.abc import Callable

import torch
from torch.autograd import forward_ad

_is_exporting = getattr(torch.compiler, "is_exporting", None)  # torch 2.7 and later


# No public function tells of torch.func; this is what autograd.Function asks.
_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
_tracing: Callable[[], bool] = torch._C._is_tracing


def _in_torch_func() -> bool:
    return _active()  # asked by the compiler while it traces


# What torch.compiler.assume_constant_result does, which would import the compiler: 2 s of every process.
_in_torch_func._dynamo_marked_constant = True  # type: ignore[attr-defined]


def transformed() -> bool:
    """Whether this call is being transformed.

    >>> transformed()
    False
    >>> torch.func.vmap(lambda x: x + transformed())(torch.zeros(2))
    tensor([1., 1.])
    """
    if torch.compiler.is_compiling():
        return exported() or _in_torch_func()
    return is_rewritten()


def is_rewritten() -> bool:
    """The same for a call that is known not to be compiled."""
    return _active() or forward_ad._current_level >= 0 or _tracing()


def exported() -> bool:
    """Whether a call that is being compiled is being exported."""
    if _is_exporting is None:  # only an export that is not strict compiles without dynamo
        return not torch.compiler.is_dynamo_compiling()
    return bool(_is_exporting())


def refuse_transforms(who: str) -> None:
    """For calls that would change the statistics of a layer."""
    if not transformed():
        return
    training = f"{who} is in training mode, where a call changes its statistics"
    if exported() if torch.compiler.is_compiling() else torch._C._is_tracing():
        raise RuntimeError(f"{training}: call model.eval() before it is exported or traced")
    raise RuntimeError(
        f"{training}, which neither torch.func (grad, vmap, jvp, ...) nor forward-mode differentiation allows: call "
        "model.eval() first, or make the call inside streamnorm.paused(model), or train with loss.backward()"
    )
