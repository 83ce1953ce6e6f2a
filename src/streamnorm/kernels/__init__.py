"""Fused kernels for the CPU, in C++. Without them everything runs on plain torch, only slower.

They are built when the package is installed, if there is a compiler. `STREAMNORM_PLAIN=1` in the environment forces the
plain path for a process, `disabled()` for a while. `dispatch` decides which calls they serve.
"""

import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch  # before the kernels, which use the threads of the OpenMP runtime that torch loads
from torch import Tensor

from ..stream import State

_native: Any
try:
    from . import _native
except ImportError:  # no compiler when the package was installed
    _native = None

CENTERS = ("mean", "running", "zero")
VARIANTS = ("avx2", "baseline")

_enabled = os.environ.get("STREAMNORM_PLAIN", "") in ("", "0")
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


_state_record = struct.Struct("16q")


def state_record(state: State) -> bytes:
    """`State` of types.h: the addresses of a state's tensors, which the kernels write into."""
    return _state_record.pack(*_state_addresses(state))


def _state_addresses(state: State) -> list[int]:
    stats, grads = state.stats, state.grads
    return [
        stats.long.data_ptr(),
        stats.short.data_ptr(),
        stats.count.data_ptr(),
        stats.empty.data_ptr(),
        stats.pending.data_ptr(),
        grads.long.data_ptr(),
        grads.short.data_ptr(),
        grads.count.data_ptr(),
        grads.empty.data_ptr(),
        grads.pending.data_ptr(),
        state.mean.data_ptr(),
        state.sigma.data_ptr(),
        state.seen.data_ptr(),
        state.elements.data_ptr(),
        state.elements_before.data_ptr(),
        state.loss_scale.data_ptr(),
    ]


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
    addresses = x.data_ptr(), address(weight), address(bias), kept.data_ptr(), y.data_ptr()
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
    addresses = x.data_ptr(), address(weight), 0, kept.data_ptr(), dy.data_ptr(), scale
    results = address(dx), dgain.data_ptr(), dbias.data_ptr()
    _native.layer_backward(settings, state, *layout, torch.get_num_threads(), *addresses, *results)


_norm_record = struct.Struct("18qd")


def norm_records(norms: Iterable[tuple[Tensor | None, Tensor | None, State, float]]) -> bytes:
    """`Norm`s of types.h: gain, bias, state and scale of the loss of each."""
    return b"".join(
        _norm_record.pack(address(gain), address(bias), *_state_addresses(state), scale)
        for gain, bias, state, scale in norms
    )


def sequence_forward(fixed: tuple[Any, ...], tensors: Iterable[Tensor]) -> None:
    """`fixed`: `Sequence` of types.h up to its tensors; then the addresses, and the state after the last step."""
    _native.sequence_forward(*fixed, *[tensor.data_ptr() for tensor in tensors])


def sequence_backward(fixed: tuple[Any, ...], tensors: Iterable[Tensor]) -> None:
    """The same, up to what is kept; then the gradients of output and final state, and those that are asked for."""
    _native.sequence_backward(*fixed, *[tensor.data_ptr() for tensor in tensors])
