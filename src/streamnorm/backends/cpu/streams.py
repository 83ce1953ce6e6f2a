"""F and G alone, on vectors, by the C++ kernels: what is left of a call that the compiler has taken apart."""

from collections.abc import Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor

from ...core.algorithm import NUMBERS, center_of
from ...core.config import Config
from .. import Measured
from ..memory import has_memory, is_plain
from . import binding
from .binding import H1_NAMES, H2_NAMES


class Streams:
    def declines(self, config: Config, dtype: torch.dtype, device: str, masked: bool) -> str | None:
        unserved = binding.unserved(config)
        reasons = {
            f"it serves the CPU, not {device}": device != "cpu",
            "it serves float32 throughout": dtype != torch.float32,
            "it takes no mask": masked,
            unserved or "": unserved,
        }
        return next((reason for reason, applies in reasons.items() if applies), None)

    def center(self, config: Config, latest: Tensor, seen: Tensor, mean: Tensor, present: Tensor | None) -> Tensor:
        if float(seen) == 0:  # nobody waits for a number of the CPU
            return center_of(config, latest, seen, mean, present)
        return latest.reshape(1, *mean.shape[1:]).clone()

    def forward(self, config: Config, h1: Sequence[Tensor], s: Measured, memo: dict[Any, Any]) -> Tensor:
        channels = s.channels
        record = _record(H1_NAMES, h1, channels, memo)
        mean, sigma = _vector(s.mean, channels), _vector(s.sigma, channels)
        kept = mean.new_empty(2 * channels + NUMBERS)
        counts = channels, s.elements, s.samples, s.begins
        given = mean.data_ptr(), sigma.data_ptr(), kept.data_ptr()
        binding.push_statistics(binding.settings_record(config), record, *counts, *given)
        return kept

    def backward(self, config: Config, h2: Sequence[Tensor], kept: Tensor, g: Tensor, memo: dict[Any, Any]) -> Tensor:
        channels = g.shape[1]
        record = _record(H2_NAMES, h2, channels, memo)
        kept, g_hat = _vector(kept, 2 * channels + NUMBERS), g.clone(memory_format=torch.contiguous_format)
        binding.push_gradients(binding.settings_record(config), record, channels, kept.data_ptr(), g_hat.data_ptr())
        return g_hat


def _record(names: tuple[str, ...], tensors: Sequence[Tensor], channels: int, memo: dict[Any, Any]) -> bytes:
    """Where the tensors of H1 or H2 are: a graph may be given any, so that those that are new are looked at."""
    before, readers, record = memo.get(names, ((), (), b""))
    if len(before) == len(tensors) and all(map(is_, before, tensors)) and binding.still(readers, record):
        return record  # type: ignore[no-any-return]
    named = dict(zip(names, tensors, strict=True))
    if not binding.holds(named, channels):
        raise RuntimeError(
            "the state of a compiled streaming layer was moved or replaced since it was compiled: run torch.compile "
            "again, or call torch.compiler.reset() first"
        )
    readers = binding.readers_of(named, names)
    memo[names] = tuple(tensors), readers, binding.addresses(readers)
    return memo[names][2]  # type: ignore[no-any-return]


def _vector(values: Tensor, size: int) -> Tensor:
    plain = is_plain(values, torch.float32) and has_memory(values)
    if not (plain and values.is_contiguous() and values.numel() == size):
        raise RuntimeError(f"F and G were given {tuple(values.shape)} {values.dtype}, not {size} numbers in float32")
    return values
