"""Layers and directions over a sequence: what vectors and images share."""

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from ...core.config import is_number
from ..base import Device, Norm, check_count, check_flag
from .base import ACTIVATIONS, STATE, RecurrentBase
from .loop import explained, run_packed
from .packing import checked_lengths
from .step import Factory, Hidden, Product


class SequenceLayer(RecurrentBase):
    """Layers and directions over a sequence."""

    def __init__(
        self,
        product: Product,
        input_size: int,
        hidden_size: int,
        num_layers: int,
        *,
        norm: Factory | None,
        nonlinearity: str = "tanh",
        bias: bool = True,
        cell_norm: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        for name, value in (("input_size", input_size), ("hidden_size", hidden_size), ("num_layers", num_layers)):
            check_count(name, value)
        if not (is_number(dropout) and 0 <= dropout <= 1):
            raise ValueError(f"dropout={dropout!r}: must be a number from 0 to 1")
        if dropout and num_layers == 1:
            warnings.warn(f"dropout={dropout} acts between layers, and num_layers=1 has none", stacklevel=5)
        bidirectional = check_flag("bidirectional", bidirectional)
        directions = ["", "_reverse"] if bidirectional else [""]
        suffixes = [
            (f"_l{layer}{direction}", hidden_size * len(directions) if layer else input_size)
            for layer in range(num_layers)
            for direction in directions
        ]
        super().__init__(product, input_size, hidden_size, norm, nonlinearity, bias, cell_norm, suffixes, device, dtype)
        self.num_layers = num_layers
        self.dropout = float(dropout)
        self.bidirectional = bidirectional
        self._suffixes = [suffix for suffix, _ in suffixes]

    def _run(self, data: Tensor, sizes: list[int], start: Hidden, goes_on: bool) -> tuple[Tensor, Hidden]:
        """All layers over packed data `(rows, features, *space)`; states are `(layers * directions, N, ...)`."""
        f, finals, directions = ACTIVATIONS[self.nonlinearity], [], 1 + self.bidirectional
        taken = [
            self._taken(suffix, self.hidden_size * directions if i >= directions else self.input_size, data)
            for i, suffix in enumerate(self._suffixes)
        ]
        self._check_affine()
        self._check_norms(data, sizes)
        for i in range(0, len(self._suffixes), directions):
            if i and self.dropout:
                data = nn.functional.dropout(data, self.dropout, self.training)
            outputs = []
            for j, (gates, weight, bias) in enumerate(taken[i : i + directions]):
                gates.goes_on = goes_on
                products = self._input_products(data, weight, bias)
                first = tuple(s[i + j] for s in start)
                output, final = run_packed(gates, products, sizes, first, f, reverse=j == 1, late=self.training)
                outputs.append(output)
                finals.append(final)
            data = torch.cat(outputs, 1) if self.bidirectional else outputs[0]
        return data, tuple(torch.stack(states) for states in zip(*finals, strict=True))

    def _explained(self, x: Tensor, mask: Tensor | None) -> list[str]:
        """For `streamnorm.backends.explain`: of a padded sequence, by the first layer and direction."""
        x = x.transpose(0, 1) if getattr(self, "batch_first", False) else x
        gates, weight, bias = self._taken(self._suffixes[0], self.input_size, x)
        products = self._input_products(x.flatten(0, 1), weight, bias)
        return explained(gates, products, x.shape[1], ACTIVATIONS[self.nonlinearity])

    def _check_norms(self, data: Tensor, sizes: list[int]) -> None:
        """Ask the norms before the first timestep whether they can take the smallest."""
        shape = (min(sizes), self.hidden_size, *data.shape[2:])
        for norm in self.modules():
            if isinstance(norm, Norm):
                try:
                    norm._to_channels_first(torch.empty(shape, device="meta"), None)
                except ValueError as refused:
                    if shape[0] == max(sizes):
                        raise
                    raise ValueError(
                        f"timestep {sizes.index(shape[0])} has {shape[0]} sample(s): {refused}; or batch sequences "
                        "so that the longest have company"
                    ) from None

    def _padded(self, x: Tensor, hx: Any, lengths: Any) -> tuple[Tensor, Hidden]:
        """A sequence `(T, N, ...)`: packed if there are lengths, run, and padded again with zeros."""
        steps, batch = x.shape[:2]
        if steps == 0 or batch == 0:
            raise ValueError(f"input has {steps} timesteps of {batch} samples: a sequence needs at least one of each")
        shape = (len(self._suffixes), batch, self.hidden_size, *x.shape[3:])
        start = self._states(hx, shape, STATE + (", H, W)" if x.ndim > 3 else ")"), x)
        if lengths is None:
            output, final = self._run(x.flatten(0, 1), [batch] * steps, start, hx is not None)
            return output.reshape(steps, batch, *output.shape[1:]), final
        falling, order = torch.sort(checked_lengths(lengths, steps, batch), descending=True, stable=True)
        order = order.to(x.device)
        packed = pack_padded_sequence(x.index_select(1, order), falling)
        packed, final = self._packed(PackedSequence(packed.data, packed.batch_sizes, order), start, hx is not None)
        return pad_packed_sequence(packed, total_length=steps)[0], final

    def _packed(self, packed: PackedSequence, start: Hidden, goes_on: bool) -> tuple[PackedSequence, Hidden]:
        data, sizes, order, back = packed
        if order is not None:
            start = tuple(s.index_select(1, order) for s in start)
        output, final = self._run(data, sizes.tolist(), start, goes_on)
        if back is not None:
            final = tuple(s.index_select(1, back) for s in final)
        return PackedSequence(output, sizes, order, back), final

    def _unbatched(self, x: Tensor, hx: Any, lengths: Any) -> tuple[Tensor, Hidden]:
        """One sequence `(T, ...)`, and the final state without a batch."""
        if lengths is not None:
            raise ValueError(f"lengths= needs a batch: input of shape {tuple(x.shape)} is one sequence")
        if hx is not None:
            shape = (len(self._suffixes), self.hidden_size, *x.shape[2:])
            meaning = STATE.replace(" N,", "") + (", H, W)" if x.ndim > 3 else ")")
            hx = tuple(s.unsqueeze(1) for s in self._states(hx, shape, meaning, x))
        output, final = self._padded(x.unsqueeze(1), hx, None)
        return output.squeeze(1), tuple(s.squeeze(1) for s in final)
