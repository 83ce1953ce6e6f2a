"""The door to the C++ kernels: records of settings and addresses, and the calls themselves.

The kernels get addresses. An address is read from a tensor in the call that uses it, the call holds that tensor until
the kernel returns, and the tensor has been looked at: type, place, shape, order in memory, and that there is memory.
"""

import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch  # before the kernels, which use the threads of the OpenMP runtime that torch loads
from torch import Tensor
from torch.nn import Parameter

from ...core.algorithm import KEPT_NUMBERS, NUMBERS
from ...core.config import CENTERS, SETTINGS, Config, Statistic
from ...core.reference import CODES
from ...core.state import FIELDS, H1, H2, PARTS, State, Stream, dtype_of, new_stream, shape_of, to_dict, write_stream
from .. import unknown_settings
from ..memory import has_memory, is_plain

_native: Any
try:
    _native = import_module("._native", __package__)
except ImportError:  # no compiler when the package was installed, or a wheel without them
    _native = None

VARIANTS = ("avx2", "baseline")
ELEMENTS = (torch.float32, torch.bfloat16)  # of inputs and outputs of a layer: `Element` of types.h
# How a setting is written into `Settings` of types.h; those that are not here are lists of numbers.
_WRITTEN: dict[str, tuple[str, Callable[[Any], list[Any]]]] = {
    "p": ("q", lambda p: [int(p)]),
    "center": ("q", lambda center: [CENTERS.index(center)]),
    "guard": ("q", lambda guard: [guard]),
    "eps": ("d", lambda eps: [eps]),
    "warmup": ("d", lambda warmup: [warmup]),
    "alpha": ("2d", list),
    "beta": ("3d", list),
    "kappa": ("4d", list),
    "eval_memory": ("d", lambda samples: [samples]),
}
H1_NAMES, H2_NAMES = H1, tuple(name for name in H2 if name != "loss_scale")  # the scale goes with the call
KNOWN = tuple(name for name in SETTINGS if name in _WRITTEN)  # and `ref`, which is always BA1
_FIELDS = tuple(map(" ".join, (KNOWN, H1_NAMES, H2_NAMES, KEPT_NUMBERS)))
_record = struct.Struct("".join(_WRITTEN[name][0] for name in KNOWN))

fitting = getattr(_native, "fields", tuple)() == _FIELDS and hasattr(_native, "layer_normalize")
mismatch = _native is not None and not fitting
if mismatch:  # built for other settings, another state, or by a version with fewer functions
    _native = None


def libraries() -> Iterator[str]:
    """Where the OpenMP runtime of torch may be: in what its library needs, or beside it in the wheel."""
    package = Path(torch.__file__).parent
    folders = package / "lib", package.with_name("torch.libs")
    yield "libtorch_cpu.so"  # wherever it was loaded from
    for pattern, folder in product(("libtorch_cpu.*", "libgomp*", "libomp*", "libiomp*"), folders):
        yield from map(str, folder.glob(pattern))


if _native is not None:
    _native.introduce(Tensor, Parameter, *ELEMENTS)
threaded = _native is not None and any(_native.find_threads(os.fsencode(library)) for library in libraries())
variant = next((name for name in VARIANTS if _native is not None and _native.use(name)), None)


def missing() -> str | None:
    if _native is not None:
        return None
    if mismatch:
        return "the C++ kernels were built from another version of streamnorm: run pip install again"
    return "the C++ kernels are not built: there was no gcc or clang when streamnorm was installed"


def details() -> str:
    """The instructions that the kernels use, and how many threads."""
    threads = _native.threads(torch.get_num_threads())
    return f"{variant}, {threads} thread{'s' * (threads > 1)}" + (", no OpenMP runtime found" if not threaded else "")


def unserved(config: Statistic) -> str | None:
    """Which setting layers and sequences do not serve, in a few words."""
    reasons = {
        f"it has p = 1 and 2, not {config.p:g}": config.p not in (1, 2),
        "it has one statistic per channel (BA1)": config.ref != CODES["BA1"],
        "a setting is new to it": unknown_settings(config, (*KNOWN, "ref")),
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


@lru_cache(maxsize=256)
def settings_record(config: Config) -> bytes:
    """`Settings` of types.h."""
    return _record.pack(*(number for name in KNOWN for number in _WRITTEN[name][1](getattr(config, name))))


Readers = tuple[Callable[[], int], ...]
# Checks for calls that come again and again. In float32: all_vectors(size, *tensors).
all_vectors: Callable[..., bool] = getattr(_native, "vectors", None)  # type: ignore[assignment]

# Whether readers give what a record says: still(readers, record).
still: Callable[[Readers, bytes], bool] = getattr(_native, "still", None)  # type: ignore[assignment]
# Whether a steady call is as the one that was looked at: fits(shape, stride, types of x, gain and bias, channels,
# readers, record, x, gain, bias).
fits: Callable[..., bool] = getattr(_native, "fits", None)  # type: ignore[assignment]
# Whether a backward pass is given what its forward pass had, and a gain in float32: suits(x stride, dy stride, type,
# channels, x, dy, gain).
suits: Callable[..., bool] = getattr(_native, "suits", None)  # type: ignore[assignment]

# What readers give now: `H1` and `H2` of types.h for those of a state.
addresses: Callable[[Readers], bytes] = getattr(_native, "addresses", None)  # type: ignore[assignment]


def readers_of(tensors: Mapping[str, Tensor], names: Iterable[str]) -> Readers:
    """What reads the addresses of tensors of a state, and holds them."""
    return tuple(tensors[name].data_ptr for name in names)


def holds(tensors: Mapping[str, Tensor], channels: int) -> bool:
    """Whether the kernels can write into these tensors of a state: every one is looked at."""
    wanted = _wanted(channels)
    for name, tensor in tensors.items():
        dtype, shape = wanted[name]
        if tensor.shape != shape or not (is_plain(tensor, dtype) and tensor.is_contiguous() and has_memory(tensor)):
            return False
    return True


@lru_cache(maxsize=256)
def _wanted(channels: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Types and shapes of the tensors of a state."""
    where = torch.device("cpu")
    return {name: (dtype_of(name, torch.float32, where), shape_of(name, (channels,))) for name in FIELDS}


class Looked(NamedTuple):
    """A state that has been looked at, with what reads its addresses, and holds it."""

    h1: Readers
    h1_record: bytes  # what the readers gave then
    grads: Stream
    h2: Readers
    h2_record: bytes


def look(state: State, channels: int) -> Looked | None:
    """None if the kernels cannot write into it."""
    tensors = to_dict(state)
    if not holds(tensors, channels):
        return None
    h1, h2 = readers_of(tensors, H1_NAMES), readers_of(tensors, H2_NAMES)
    return Looked(h1, addresses(h1), state.grads, h2, addresses(h2))


def receiving(grads: Stream, looked: Looked, channels: int) -> tuple[Stream, bytes]:
    """What to stream gradients into that are for `grads`, and its record: see `writable`."""
    if grads is looked.grads and still(looked.h2, looked.h2_record):
        return grads, looked.h2_record
    return writable(grads, channels)


def writable(grads: Stream, channels: int) -> tuple[Stream, bytes]:
    """H2 itself, or a copy if the layer was moved between forward and backward; and its record."""
    tensors = {f"grads_{part}": getattr(grads, part) for part in PARTS}
    if not holds(tensors, channels):
        like = new_stream((channels,), torch.empty(0, dtype=torch.float32))
        for name, tensor in tensors.items():
            wanted = getattr(like, name.removeprefix("grads_"))
            if tensor.shape != wanted.shape or tensor.is_meta or (tensor.is_cpu and not has_memory(tensor)):
                raise RuntimeError(
                    f"{name} of a streaming layer was replaced between its forward and its backward pass (shape "
                    f"{tuple(tensor.shape)} on {tensor.device}, for {channels} channels): its gradients have nowhere "
                    "to go"
                )
        write_stream(like, grads)
        grads, tensors = like, {f"grads_{part}": getattr(like, part) for part in PARTS}
    return grads, addresses(readers_of(tensors, H2_NAMES))


def kept_size(channels: int) -> int:
    """Numbers that a call keeps for its backward pass: `Kept` of stream.h."""
    return 5 * channels + NUMBERS


def address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


Layout = tuple[int, int, int, int, int]  # rows, samples, channels, space, stride: see `Layer` of types.h


# Calls of a layer: the place in ELEMENTS of what x, y, dy and dx are made of; settings, H1 or H2 (not of a repetition),
# the layout, threads, then the addresses of x, gain, bias and what is kept; then that of y, or that of dy, the scale of
# the loss, and the addresses of dx, dgain and dbias.
layer_forward: Callable[..., None] = getattr(_native, "layer_forward", None)  # type: ignore[assignment]
layer_repeat: Callable[..., None] = getattr(_native, "layer_repeat", None)  # type: ignore[assignment]
layer_backward: Callable[..., None] = getattr(_native, "layer_backward", None)  # type: ignore[assignment]

# N(x, s) where s are constants: layer_normalize(x, mean, sigma, gain, bias, y, threads). It looks at all tensors:
# False, with nothing written, if any of them is not as the kernels read it.
layer_normalize: Callable[..., bool] = getattr(_native, "layer_normalize", None)  # type: ignore[assignment]

# F and G alone: settings, H1 or H2, channels; then elements, samples, whether they are new, and the addresses of mean,
# sigma and what is kept; or those of what is kept and g, which is replaced by what flows on.
push_statistics: Callable[..., None] = getattr(_native, "push_statistics", None)  # type: ignore[assignment]
push_gradients: Callable[..., None] = getattr(_native, "push_gradients", None)  # type: ignore[assignment]

_gain_and_bias = struct.Struct("2q")
_scale = struct.Struct("d")
NO_H1, NO_H2 = bytes(8 * len(H1_NAMES)), bytes(8 * len(H2_NAMES))


def norm_record(gain: Tensor | None, bias: Tensor | None, h1: bytes, h2: bytes, scale: float) -> bytes:
    """`Norm` of types.h."""
    return _gain_and_bias.pack(address(gain), address(bias)) + h1 + h2 + _scale.pack(scale)


def sequence_forward(fixed: tuple[Any, ...], tensors: Iterable[Tensor]) -> None:
    """`fixed`: `Sequence` of types.h up to its tensors; then their addresses, and that of the last state."""
    _native.sequence_forward(*fixed, *[tensor.data_ptr() for tensor in tensors])


def sequence_backward(fixed: tuple[Any, ...], tensors: Iterable[Tensor | None]) -> None:
    """The same, up to what is kept; then the gradients of output and final state, and those that are asked for."""
    _native.sequence_backward(*fixed, *map(address, tensors))
