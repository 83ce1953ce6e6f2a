"""What is asked of tensors before kernels get them, and copies of those that kernels cannot read or write."""

from typing import Any

import torch
from torch import Tensor

from ...core.state import PARTS, Stream, dtype_of, new_stream, shape_of
from ..memory import has_memory, is_ordinary


def is_vector(tensor: Tensor | None, size: int) -> bool:
    return tensor is None or (tensor.shape == (size,) and tensor.is_contiguous())


def is_readable(tensor: Tensor, device: torch.device) -> bool:
    """Whether it lies in float32 on the device, one number after the other."""
    plain = is_ordinary(tensor) and tensor.layout == torch.strided and tensor.is_contiguous() and has_memory(tensor)
    return plain and tensor.dtype == torch.float32 and tensor.device == device


def holds(tensors: dict[str, Tensor], channels: int, device: torch.device) -> bool:
    """Whether kernels can write into these tensors of a state."""
    for name, tensor in tensors.items():
        suits = tensor.dtype == dtype_of(name, torch.float32, device) and tensor.shape == shape_of(name, (channels,))
        if not (suits and tensor.device == device and is_ordinary(tensor) and tensor.is_contiguous()):
            return False
        if not has_memory(tensor):
            return False
    return True


def writable(grads: Stream, channels: int, like: Tensor) -> Stream:
    """H2 itself, or a copy if the layer was moved between forward and backward."""
    tensors = {f"grads_{part}": getattr(grads, part) for part in PARTS}
    if holds(tensors, channels, like.device):
        return grads
    fresh: Any = new_stream((channels,), like)
    if grads.long.shape != fresh.long.shape:
        raise RuntimeError(
            f"grads_long of a streaming layer was replaced between its forward and its backward pass (shape "
            f"{tuple(grads.long.shape)}, for {channels} channels): its gradients have nowhere to go"
        )
    for part in PARTS:
        getattr(fresh, part).copy_(getattr(grads, part))
    return fresh  # type: ignore[no-any-return]
