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

INNER = {1: 1, 3: 4, 4: 6}  # activations that a cell keeps, by its gates: see cells.h


class Sequences:
    """RNN, GRU and LSTM, streaming, in training or without gradients."""

    def look(self, state: State, hidden: int) -> Looked | None:
        """A state of a norm, looked at; None if it cannot be written into."""
        return binding.look(state, hidden)

    def still(self, looked: Looked) -> bool:
        """Whether what was looked at is where it was."""
        return binding.still(looked.h1, looked.h1_record)

    def declines(self, call: Sequence, tensors: Many[Tensor], affine: Many[Any]) -> str | None:
        """`tensors`: products of the input, first state, recurrent weight. All have the sizes that they need."""
        hidden = tensors[2].shape[1]
        if call.gates not in INNER or binding.unserved(call.config):
            return "it serves the RNN, the paper's GRU and the LSTM, with one statistic per channel and p = 1 or 2"
        if not all(is_plain(t, torch.float32) and t.is_contiguous() and has_memory(t) for t in tensors):
            return "it serves ordinary, contiguous float32 tensors"
        if not binding.all_vectors(hidden, *affine):
            return "a gain or bias is not a float32 vector in memory"
        return None

    def forward(
        self, call: Sequence, products: Tensor, start: Tensor, weight: Tensor, affine: Many[Any], states: Many[Looked]
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Outputs, the state of each sample at its end, and what backward needs beside gains and biases.

        `products` are those of the input, `(rows, gates * hidden)`; states are `(samples, hidden)`, of an LSTM `(2,
        samples, hidden)`: h and c. Gains, then biases, norm by norm: those of the input's products, of the hidden
        state's, of the cell state.
        """
        rows, (wide, hidden), norms = products.shape[0], weight.shape, len(states)
        kept = products.new_empty((len(call.sizes) if call.training else 0, norms * binding.kept_size(hidden)))
        recurrent, before = products.new_empty((rows, wide)), products.new_empty((rows, hidden))
        inner = products.new_empty((INNER[call.gates], rows, hidden))
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
        products, start, weight, _, before, *_ = saved
        (wide, hidden), norms = weight.shape, len(states)
        affine = [None if vector is None else as_laid_out(vector, (hidden,), (1,)) for vector in affine]
        doutput = as_laid_out(doutput, before.shape, before.stride())
        dfinal = as_laid_out(dfinal, start.shape, start.stride())
        written = [binding.receiving(each.grads, state, hidden) for each, state in zip(h2, states, strict=True)]
        dproducts, dstart = torch.empty_like(products), torch.empty_like(start)
        sums = weight.new_empty((norms, 2, hidden))
        transposed = weight.new_empty((hidden, wide)) if needs_weight else None
        dweight = torch.empty_like(weight) if needs_weight else None  # before anything is streamed
        records, scales = [record for _, record in written], [1.0 if h.scale is None else float(h.scale) for h in h2]
        fixed = _arguments(call, hidden, affine, [binding.NO_H1] * norms, records, scales)
        binding.sequence_backward(fixed, (*saved, doutput, dfinal, dproducts, transposed, dstart, sums))
        for each, (stream, _) in zip(h2, written, strict=True):
            if stream is not each.grads:
                write_stream(each.grads, stream)
        if dweight is not None and transposed is not None:
            dweight.copy_(transposed.t())
        return dproducts, dstart, dweight, (*sums[:, 0], *sums[:, 1])


def _arguments(
    call: Sequence, hidden: int, affine: Many[Any], h1: Many[bytes], h2: Many[bytes], scales: Many[float]
) -> tuple[Any, ...]:
    norms = len(affine) // 2
    parts = zip(affine[:norms], affine[norms:], h1, h2, scales, strict=True)
    records = b"".join(binding.norm_record(*each) for each in parts)
    steps, sizes = len(call.sizes), struct.pack(f"{len(call.sizes)}q", *call.sizes)
    numbers = int(call.relu), int(call.training), int(call.reverse), steps, hidden, call.tested, call.goes_on
    return binding.settings_record(call.config), call.gates, int(call.cell_norm), records, *numbers, sizes
