"""What is asked of a tensor before its address is used, and where tensors that outlive a call are made."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

CPU = torch.device("cpu")
ORDINARY = (Tensor, Parameter)


def is_ordinary(tensor: Tensor) -> bool:
    """Whether a tensor is one of torch's own, with nothing to be done to it yet."""
    return type(tensor) in ORDINARY and not tensor.is_nested and not tensor.is_neg() and not tensor.is_meta


def is_plain(tensor: Tensor, dtype: torch.dtype, device: torch.device = CPU) -> bool:
    """Whether a tensor is what its address says: of this type, on this device, in memory, with nothing to be done."""
    plain_type = tensor.dtype == dtype and type(tensor) in ORDINARY
    if not plain_type or tensor.device != device or tensor.is_nested or tensor.is_neg():
        return False
    return tensor.data_ptr() != tensor.storage_offset() * tensor.element_size()  # the memory does not begin at 0


def has_memory(tensor: Tensor) -> bool:
    """Whether an ordinary tensor has the memory that its shape asks for: a storage can be resized under it."""
    last = tensor.numel()
    if not tensor.is_contiguous():
        last = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.untyped_storage().nbytes() >= (tensor.storage_offset() + last) * tensor.element_size()


def is_vector(tensor: Tensor | None, size: int, dtype: torch.dtype = torch.float32) -> bool:
    """Whether kernels and operators can read a gain, a bias or a statistic, or there is none."""
    return tensor is None or (is_plain(tensor, dtype) and tensor.shape == (size,) and tensor.is_contiguous())


def layout_of(x: Tensor) -> str:
    """How `(N, C, *space)` lies in memory: see `Signature.layout`."""
    if x.ndim == 2:
        return "rows" if x.stride(1) == 1 or x.shape[1] == 1 else "other"
    if x.is_contiguous():
        return "planes"
    return "rows" if x.movedim(1, -1).is_contiguous() else "other"


def require_memory(*tensors: Tensor | None) -> None:
    """For a backward pass: what was saved, or comes in, may have been freed or resized meanwhile."""
    for tensor in tensors:
        if tensor is None or type(tensor) not in ORDINARY or tensor.layout != torch.strided:
            continue
        if not (tensor.is_cpu or tensor.is_cuda):
            continue
        if not has_memory(tensor):
            raise RuntimeError(
                f"backward was given a tensor of shape {tuple(tensor.shape)} with {tensor.untyped_storage().nbytes()} "
                "bytes of memory, fewer than its shape needs: a storage was resized or freed since the forward pass"
            )


def as_laid_out(
    tensor: Tensor,
    shape: Sequence[int],
    strides: Sequence[int],
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
) -> Tensor:
    """The tensor, or a copy of it that has this type and these strides on this device, as kernels will read it.

    Where it comes from, a hook on saved tensors or a backward pass, it may be anything but of another shape.
    """
    if tensor.shape != shape:
        raise RuntimeError(
            f"backward was given {tuple(tensor.shape)} where forward saved {tuple(shape)}: a hook on saved tensors may "
            "move what it packs, but has to give it back in its shape"
        )
    require_memory(tensor)
    if tensor.stride() == strides and is_plain(tensor, dtype, device):
        return tensor
    result = torch.empty_strided(shape, strides, dtype=dtype, device=device)
    result.copy_(tensor)
    return result


def outside_inference_mode() -> AbstractContextManager[Any]:
    """For tensors that outlive the call: what is made in inference mode could not be used in training later."""
    if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():
        return nullcontext()
    return torch.inference_mode(False)
