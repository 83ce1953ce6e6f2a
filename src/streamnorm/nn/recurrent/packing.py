"""Sequences of different lengths, checked before anything is computed: the lengths of padded ones, and packed ones."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

FIX = "make it with pack_padded_sequence or pack_sequence of torch.nn.utils.rnn"


def checked_lengths(given: Any, steps: int, batch: int) -> Tensor:
    try:
        lengths: Tensor = torch.as_tensor(given).cpu()
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"lengths={given!r}: pass one whole number per sample") from None
    if lengths.numel() and (lengths.is_floating_point() or lengths.is_complex() or lengths.dtype == torch.bool):
        raise TypeError(f"lengths has dtype {lengths.dtype}: pass whole numbers")
    lengths = lengths.to(torch.int64)
    if tuple(lengths.shape) != (batch,):
        raise ValueError(f"lengths of shape {tuple(lengths.shape)}: expected one per sample, ({batch},)")
    if int(lengths.min()) < 1 or int(lengths.max()) > steps:
        raise ValueError(f"lengths from {int(lengths.min())} to {int(lengths.max())}: must be from 1 to {steps}")
    return lengths


def checked_packing(packed: PackedSequence) -> int:
    """How many samples there are, if the parts of a PackedSequence fit each other."""
    data, sizes, order, back = packed
    if not isinstance(sizes, Tensor) or sizes.dtype != torch.int64 or sizes.ndim != 1 or not len(sizes):
        got = _described(sizes) + (f" of shape {tuple(sizes.shape)}" if isinstance(sizes, Tensor) else "")
        raise TypeError(f"batch_sizes of a PackedSequence is {got}: must be torch.int64 of shape (T,), T > 0; {FIX}")
    numbers: list[int] = sizes.tolist()
    for t, here in enumerate(numbers):
        if not 1 <= here <= numbers[max(t - 1, 0)]:
            before = f" after {numbers[t - 1]}" if t else ""
            raise ValueError(
                f"batch_sizes of a PackedSequence is {here}{before} at timestep {t}: it counts the samples that reach "
                f"a timestep, at least 1 and never rising; {FIX}"
            )
    if sum(numbers) != len(data):
        raise ValueError(
            f"batch_sizes of a PackedSequence add up to {sum(numbers)}, its data has {len(data)} rows: must be one row "
            f"per sample and timestep; {FIX}"
        )
    if order is not None or back is not None:
        _check_order(order, back, numbers[0], data.device)
    return numbers[0]


def _check_order(order: Any, back: Any, samples: int, device: torch.device) -> None:
    for name, indices in (("sorted_indices", order), ("unsorted_indices", back)):
        if not isinstance(indices, Tensor) or indices.dtype != torch.int64 or indices.device != device:
            raise TypeError(
                f"{name} of a PackedSequence is {_described(indices)}: must be torch.int64 on {device}, both or "
                f"none; {FIX}"
            )
        if tuple(indices.shape) != (samples,):
            shape = tuple(indices.shape)
            raise ValueError(
                f"{name} of a PackedSequence has shape {shape}: must be ({samples},), one per sample; {FIX}"
            )
    if device.type == "meta":  # no values
        return
    inverse = torch.argsort(order)
    if not torch.equal(order[inverse], torch.arange(samples, device=device)) or not torch.equal(back, inverse):
        raise ValueError(
            f"sorted_indices and unsorted_indices of a PackedSequence must name the samples 0 to {samples - 1} once "
            f"each, and undo each other; {FIX}"
        )


def _described(value: Any) -> str:
    return f"{value.dtype} on {value.device}" if isinstance(value, Tensor) else repr(value)
