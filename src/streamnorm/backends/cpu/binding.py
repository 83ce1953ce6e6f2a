"""Fused kernels for the CPU, in C++. Without them everything runs on plain torch, only slower.

They get addresses. An address is read from a tensor in the call that uses it, the call holds that tensor until the
kernel returns, and the tensor has been looked at: type, place, shape, order in memory, and that there is memory.

They are built when the package is installed, if there is a compiler. `STREAMNORM_PLAIN=1` in the environment forces the
plain path for a process, `disabled()` for a while. `dispatch` decides which calls they serve.
"""

import os
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch  # before the kernels, which use the threads of the OpenMP runtime that torch loads
from torch import Tensor
from torch.nn import Parameter

from ..stream import State
from ..transforms import transformed

_native: Any
try:
    from . import _native
except ImportError:  # no compiler when the package was installed
    _native = None

CENTERS = ("mean", "running", "zero")
VARIANTS = ("avx2", "baseline")

_enabled = os.environ.get("STREAMNORM_PLAIN", "") in ("", "0")
if _native is not None:
    _native.introduce(Tensor, Parameter, torch.float32)
variant = next((name for name in VARIANTS if _native is not None and _native.use(name)), None)


def available() -> bool:
    """Whether the kernels are there and in use: built, and not switched off.

    >>> with disabled():
    ...     available()
    False
    """
    return _enabled and _native is not None


def plain_forced() -> bool:
    """Whether everything is to run on the plain path."""
    return not _enabled


@contextmanager
def disabled() -> Iterator[None]:
    """A context in which everything runs on the plain path, for comparisons."""
    global _enabled
    before, _enabled = _enabled, False
    try:
        yield
    finally:
        _enabled = before


def settings_record(
    p: float,
    center: str,
    alpha: Sequence[float],
    beta: Sequence[float],
    kappa: Sequence[float],
    warmup: float,
    guard: bool,
    eps: float,
) -> bytes:
    """`Settings` of types.h."""
    return struct.pack("3q11d", int(p), CENTERS.index(center), guard, *alpha, *beta, *kappa, warmup, eps)


def is_plain(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether a tensor is what its address says: of this type, on the CPU, in memory, with nothing to be done yet."""
    plain_type = tensor.dtype == dtype and type(tensor) in (Tensor, Parameter)
    if not plain_type or not tensor.is_cpu or tensor.is_nested or tensor.is_neg():
        return False
    return tensor.data_ptr() != tensor.storage_offset() * tensor.element_size()  # the memory does not begin at 0


def in_memory(tensor: Tensor) -> bool:
    """Whether a tensor has the memory that its shape asks for, or needs none: a storage can be resized under it."""
    if torch.compiler.is_compiling() or type(tensor) not in (Tensor, Parameter) or transformed():
        return True
    if _native is not None and all_plain(tensor) and tensor.is_contiguous():  # which has looked at that
        return True
    if tensor.layout != torch.strided or not tensor.is_cpu or tensor._is_zerotensor():
        return True
    last = tensor.numel()
    if not tensor.is_contiguous():
        last = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.untyped_storage().nbytes() >= (tensor.storage_offset() + last) * tensor.element_size()


def is_vector(tensor: Tensor | None, size: int, dtype: torch.dtype = torch.float32) -> bool:
    """Whether kernels and operators can read a gain, a bias or a statistic, or there is none."""
    return tensor is None or (is_plain(tensor, dtype) and tensor.shape == (size,) and tensor.is_contiguous())


# The same checks in float32, for calls that come again and again: all_plain(*tensors), all_vectors(size, *tensors).
all_plain: Callable[..., bool] = getattr(_native, "plain", None)  # type: ignore[assignment]
all_vectors: Callable[..., bool] = getattr(_native, "vectors", None)  # type: ignore[assignment]


Readers = tuple[Callable[[], int], ...]
GRADS = slice(5, 10)  # of those of a state, the ones of H2


def _tensors(state: State) -> tuple[Tensor, ...]:
    """Those of `State` of types.h, in that order."""
    streams = [(h.long, h.short, h.count, h.empty, h.pending) for h in (state.stats, state.grads)]
    return *streams[0], *streams[1], state.mean, state.sigma, state.seen, state.elements, state.elements_before


def holds(state: State, channels: int) -> bool:
    """Whether the kernels can write into a state: every tensor of it is looked at."""
    stream = [(torch.float32, (2, channels))] * 2 + [(torch.int64, ()), (torch.bool, ()), (torch.bool, ())]
    wanted = stream * 2 + [(torch.float32, (channels,))] * 2 + [(torch.float64, ())] * 3 + [(torch.float32, ())]
    return all(
        is_plain(tensor, dtype) and tensor.shape == shape and tensor.is_contiguous() and in_memory(tensor)
        for tensor, (dtype, shape) in zip([*_tensors(state), state.loss_scale], wanted, strict=True)
    )


def state_readers(state: State) -> Readers:
    """What reads the addresses of a state, and holds its tensors."""
    return tuple(tensor.data_ptr for tensor in _tensors(state))


# What readers give now: for those of a state, `State` of types.h.
addresses: Callable[[Readers], bytes] = getattr(_native, "addresses", None)  # type: ignore[assignment]


def kept_size(channels: int) -> int:
    """Numbers that a call keeps for its backward pass: `Kept` of stream.h."""
    return 5 * channels + 5


def address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


Layout = tuple[int, int, int, int, int]  # rows, samples, channels, space, stride: see `Layer` of types.h


def layer_forward(
    settings: bytes,
    state: bytes,
    layout: Layout,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    kept: Tensor,
    y: Tensor,
) -> None:
    gain, shift = 0 if weight is None else weight.data_ptr(), 0 if bias is None else bias.data_ptr()
    addresses = x.data_ptr(), gain, shift, kept.data_ptr(), y.data_ptr()
    _native.layer_forward(settings, state, *layout, torch.get_num_threads(), *addresses)


def layer_backward(
    settings: bytes,
    state: bytes,
    layout: Layout,
    x: Tensor,
    weight: Tensor | None,
    kept: Tensor,
    dy: Tensor,
    scale: float,
    out: tuple[Tensor | None, Tensor, Tensor],
) -> None:
    """`out`: dx, which may be None, dgain and dbias."""
    dx, dgain, dbias = out
    gain = 0 if weight is None else weight.data_ptr()
    addresses = x.data_ptr(), gain, 0, kept.data_ptr(), dy.data_ptr(), scale
    results = 0 if dx is None else dx.data_ptr(), dgain.data_ptr(), dbias.data_ptr()
    _native.layer_backward(settings, state, *layout, torch.get_num_threads(), *addresses, *results)


_gain_and_bias = struct.Struct("2q")
_scale = struct.Struct("d")


def norm_records(norms: Iterable[tuple[Tensor | None, Tensor | None, State, float]]) -> bytes:
    """`Norm`s of types.h: gain, bias, state and scale of the loss of each."""
    return b"".join(
        _gain_and_bias.pack(address(gain), address(bias)) + addresses(state_readers(state)) + _scale.pack(scale)
        for gain, bias, state, scale in norms
    )


def sequence_forward(fixed: tuple[Any, ...], tensors: Iterable[Tensor]) -> None:
    """`fixed`: `Sequence` of types.h up to its tensors; then the addresses, and the state after the last step."""
    _native.sequence_forward(*fixed, *[tensor.data_ptr() for tensor in tensors])


def sequence_backward(fixed: tuple[Any, ...], tensors: Iterable[Tensor]) -> None:
    """The same, up to what is kept; then the gradients of output and final state, and those that are asked for."""
    _native.sequence_backward(*fixed, *[tensor.data_ptr() for tensor in tensors])
