"""A recurrent layer over a whole sequence by the C++ kernels: one call for all timesteps and gates."""

import struct
from collections.abc import Sequence as Many
from typing import Any

import torch
from torch import Tensor

from ...core.state import State, write_stream
from .. import H2, Sequence
from ..memory import as_laid_out, has_memory, is_plain
from . import binding
from .binding import Looked


class Sequences:
    """RNN and GRU, streaming, in training or without gradients."""

    def look(self, state: State, hidden: int) -> Looked | None:
        """A state of a norm, looked at; None if it cannot be written into."""
        return binding.look(state, hidden)

    def still(self, looked: Looked) -> bool:
        """Whether what was looked at is where it was."""
        return binding.still(looked.h1, looked.h1_record)

    def declines(self, call: Sequence, tensors: Many[Tensor], affine: Many[Any]) -> str | None:
        """`tensors`: products of the input, first hidden state, recurrent weight. All have the sizes that they need."""
        hidden = tensors[2].shape[1]
        if call.gates not in (1, 3) or binding.unserved(call.config):
            return "it serves the RNN and the paper's GRU, with one statistic per channel and p = 1 or 2"
        if not all(is_plain(t, torch.float32) and t.is_contiguous() and has_memory(t) for t in tensors):
            return "it serves ordinary, contiguous float32 tensors"
        if not binding.all_vectors(hidden, *affine):
            return "a gain or bias is not a float32 vector in memory"
        return None

    def forward(
        self, call: Sequence, products: Tensor, start: Tensor, weight: Tensor, affine: Many[Any], states: Many[Looked]
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Outputs, the hidden state of each sample at its end, and what backward needs beside gains and biases.

        `products` are those of the input, `(rows, gates * hidden)`; gains, then biases, norm by norm, those of the
        input's products first.
        """
        rows, (wide, hidden), norms = products.shape[0], weight.shape, 2 * call.gates
        kept = products.new_empty((len(call.sizes) if call.training else 0, norms * binding.kept_size(hidden)))
        recurrent, before = products.new_empty((rows, wide)), products.new_empty((rows, hidden))
        inner = products.new_empty((4 if call.gates == 3 else 1, rows, hidden))
        output, final = torch.empty_like(before), torch.empty_like(start)
        saved = products, start, weight, recurrent, before, inner, kept
        fixed = _arguments(
            call, hidden, affine, [state.h1_record for state in states], [binding.NO_H2] * norms, [1.0] * norms
        )
        binding.sequence_forward(fixed, (*saved, output, final))
        return output, final, saved

    def backward(
        self,
        call: Sequence,
        doutput: Tensor,
        dfinal: Tensor,
        saved: Many[Tensor],
        affine: Many[Any],
        states: Many[Looked],
        h2: Many[H2],
        needs_weight: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None, tuple[Tensor, ...]]:
        """Gradients of products, start and weight, and of gains and biases."""
        products, start, weight, recurrent, before, inner, _ = saved
        hidden, norms = weight.shape[1], 2 * call.gates
        affine = [None if vector is None else as_laid_out(vector, (hidden,), (1,)) for vector in affine]
        doutput = as_laid_out(doutput, before.shape, before.stride())
        dfinal = as_laid_out(dfinal, start.shape, start.stride())
        written = [binding.receiving(each.grads, state, hidden) for each, state in zip(h2, states, strict=True)]
        dproducts, drecurrent, dstart = map(torch.empty_like, (products, recurrent, start))
        sums = weight.new_empty((norms, 2, hidden))
        dweight = torch.empty_like(weight) if needs_weight else None  # before anything is streamed
        records, scales = [record for _, record in written], [1.0 if h.scale is None else float(h.scale) for h in h2]
        fixed = _arguments(call, hidden, affine, [binding.NO_H1] * norms, records, scales)
        binding.sequence_backward(fixed, (*saved, doutput, dfinal, dproducts, drecurrent, dstart, sums))
        for each, (stream, _) in zip(h2, written, strict=True):
            if stream is not each.grads:
                write_stream(each.grads, stream)

        if dweight is not None:
            split = hidden if call.gates == 1 else 2 * hidden  # the last gate of a GRU multiplies h * r
            torch.mm(drecurrent[:, :split].t(), before, out=dweight[:split])
            if call.gates == 3:
                torch.mm(drecurrent[:, split:].t(), inner[3], out=dweight[split:])
        return dproducts, dstart, dweight, (*sums[:, 0], *sums[:, 1])


def _arguments(
    call: Sequence, hidden: int, affine: Many[Any], h1: Many[bytes], h2: Many[bytes], scales: Many[float]
) -> tuple[Any, ...]:
    norms = len(affine) // 2
    parts = zip(affine[:norms], affine[norms:], h1, h2, scales, strict=True)
    records = b"".join(binding.norm_record(*each) for each in parts)
    steps, sizes = len(call.sizes), struct.pack(f"{len(call.sizes)}q", *call.sizes)
    numbers = int(call.relu), int(call.training), int(call.reverse), steps, hidden, call.tested, call.goes_on
    return binding.settings_record(call.config), call.gates, records, *numbers, sizes
