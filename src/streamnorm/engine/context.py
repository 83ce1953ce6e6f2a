"""What kind of call this is: eager, compiled, exported, recorded by torch.fx, or transformed: torch.func, AD, tracing.

Transforms want ordinary operations and no side effects. A call that changes no statistics gives them that; one in
training, which streams statistics, is refused. torch.compile is not among them: it is served by `operators`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Proxy as Proxy

from ..backends.memory import ORDINARY, has_memory
from . import compat

_is_exporting = getattr(torch.compiler, "is_exporting", None)  # torch 2.7 and later


def _in_torch_func() -> bool:
    return compat.functorch_is_active()  # asked by the compiler while it traces


_in_torch_func = compat.assumed_constant(_in_torch_func)


def transformed() -> bool:
    """Whether this call is being transformed.

    >>> transformed()
    False
    >>> torch.func.vmap(lambda x: x + transformed())(torch.zeros(2))
    tensor([1., 1.])
    """
    if torch.compiler.is_compiling():
        return exported() or _in_torch_func()
    return compat.is_rewritten()


def exported() -> bool:
    """Whether a call that is being compiled is being exported."""
    if _is_exporting is None:  # only an export that is not strict compiles without dynamo
        return not torch.compiler.is_dynamo_compiling()
    return bool(_is_exporting())


def has_values(tensor: Tensor) -> bool:
    """Whether a tensor has values that can be asked for here, where nothing traces or transforms."""
    return not (torch.compiler.is_compiling() or type(tensor) not in ORDINARY or tensor.is_meta or transformed())


def refuse_transforms(who: str) -> None:
    """For calls that would change the statistics of a layer."""
    if not transformed():
        return
    training = f"{who} is in training mode, where a call changes its statistics"
    if exported() if torch.compiler.is_compiling() else compat.is_tracing():
        raise RuntimeError(f"{training}: call model.eval() before it is exported or traced")
    raise RuntimeError(
        f"{training}, which neither torch.func (grad, vmap, jvp, ...) nor forward-mode differentiation allows: call "
        "model.eval() first, or make the call inside streamnorm.paused(model), or train with loss.backward()"
    )


def recorded(module: nn.Module, x: Proxy, **settings: Any) -> Any:
    """A call for torch.fx, which gives proxies to modules that it does not know: one node, as of a module of torch."""
    if type(module).forward.__module__.split(".")[0] != __name__.split(".")[0] or "forward" in vars(module):
        raise TypeError(
            f"{type(module).__name__} has a forward of its own, which torch.fx cannot look into: let is_leaf_module of "
            "the tracer be true for it"
        )
    tracer: Any = x.tracer
    name = tracer.path_of_module(module)
    if not name:
        raise TypeError(f"{type(module).__name__} is one step for torch.fx: trace a model that holds it")
    defaults = [key for key, value in settings.items() if value is None or (isinstance(value, int) and value == 0)]
    given = {key: value for key, value in settings.items() if key not in defaults}
    return tracer.create_proxy("call_module", name, (x,), given)


def refuse_second_derivative(who: str = "streamnorm layers", way_out: str = "") -> None:
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{who} have no second derivative in training: create_graph=True reached one. "
            f"Call backward without create_graph, or put the layer in evaluation mode first{way_out}."
        )


def in_memory(tensor: Tensor) -> bool:
    """Whether a tensor has the memory that its shape asks for, as far as that can be asked here."""
    return torch.compiler.is_compiling() or transformed() or _in_memory(tensor)


def _in_memory(tensor: Tensor) -> bool:
    if type(tensor) not in ORDINARY:
        return True
    if tensor.layout != torch.strided or not tensor.is_cpu or compat.is_zero_tensor(tensor):
        return True
    return has_memory(tensor)


def check_memory(**tensors: Tensor | None) -> None:
    """Refuse tensors whose storage was resized under them: torch and the kernels would read beyond its end."""
    if torch.compiler.is_compiling() or transformed():
        return
    for name, tensor in tensors.items():
        if tensor is not None and not _in_memory(tensor):
            raise ValueError(
                f"{name} of shape {tuple(tensor.shape)} has {tensor.untyped_storage().nbytes()} bytes of memory, fewer "
                "than its shape needs: the storage was resized or freed; resize it back, or give the values anew"
            )


def materialized(tensor: Tensor) -> Tensor:
    """With memory of its own, which a tensor of zeros that autograd made may lack: it cannot be written to.

    What the compiler hands to a graph has memory.
    """
    return tensor if torch.compiler.is_compiling() or not compat.is_zero_tensor(tensor) else tensor.clone()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode and without gradients; its modes are as before afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode
