"""torch's encoders in evaluation: they compute layer norms by themselves, unless what stands there is to be called."""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from ..engine.compat import leave_encoder_fast_path

_watched: set[type[nn.Module]] = set()


def leave_fast_path(parent: nn.Module, name: str, child: nn.Module | None, called: Callable[[nn.Module], bool]) -> None:
    """If `parent` is such an encoder, and gets a child with a module that has to be `called`, keep it to its slow path.

    The fast one takes `norm1` and `norm2` for `nn.LayerNorm` and reads their gain, bias and eps.
    """
    if not isinstance(parent, nn.TransformerEncoderLayer | nn.TransformerEncoder) or child is None:
        return
    normalizes = isinstance(parent, nn.TransformerEncoderLayer) or name == "layers"
    if normalizes and any(map(called, child.modules())):
        leave_encoder_fast_path(parent)


def watch_encoders(kind: type[nn.Module]) -> None:
    """From now on, encoders that get a module of this kind leave their fast path."""
    if kind in _watched:
        return
    _watched.add(kind)

    def registers(parent: nn.Module, name: str, child: Any) -> None:
        leave_fast_path(parent, name, child, lambda module: isinstance(module, kind))

    register_module_module_registration_hook(registers)
