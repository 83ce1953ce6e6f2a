"""A recurrent layer over a whole sequence: at each timestep one matrix product, and one set of launches for all norms.

The GRU has two sets, as its new state needs the reset gate; so has an LSTM with a norm on its cell state. The host
reads no number, and asks for all memory before anything is streamed.
"""

from collections.abc import Callable
from collections.abc import Sequence as Many
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core.state import PARTS, State, Stream, of_h1, to_dict, write_stream
from .. import H2, Sequence
from ..memory import as_laid_out
from . import launch
from .launch import kept_size
from .steps import CARRIED, INNER, Set, Walker, sets_of, walk
from .streams import DEVICE, unserved
from .tensors import holds, is_readable, is_vector, writable

MOST_SAMPLES = 10**6  # 16 of them for a program, which a grid has 65,535 of in its second direction


class Looked(NamedTuple):
    """A state that has been looked at. It is held."""

    state: State
    readers: tuple[Callable[[], int], ...]  # of the addresses of its tensors
    addresses: list[int]  # what they gave


class Sequences:
    """RNN, GRU and LSTM, streaming, in training or without gradients: the protocol is that of cpu/sequence.py."""

    def look(self, state: State, hidden: int) -> Looked | None:
        """A state of a norm, looked at; None if it cannot be written into."""
        tensors = to_dict(state)
        if not holds(tensors, hidden, state.mean.device):
            return None
        readers = tuple(tensor.data_ptr for tensor in tensors.values())
        return Looked(state, readers, [read() for read in readers])

    def still(self, looked: Looked) -> bool:
        """Whether what was looked at is where it was."""
        return [read() for read in looked.readers] == looked.addresses

    def declines(self, call: Sequence, tensors: Many[Tensor], affine: Many[Any]) -> str | None:
        """`tensors`: products of the input, first state, recurrent weight. All have the sizes that they need."""
        device, hidden = tensors[0].device, tensors[2].shape[1]
        if device.type != DEVICE:
            return f"it serves the device {DEVICE}, not {device.type}"
        if call.gates not in INNER or unserved(call.config):
            return "it serves the RNN, the paper's GRU and the LSTM, with one statistic per channel and p = 1 or 2"
        if call.sizes[0] > MOST_SAMPLES:
            return f"it serves up to {MOST_SAMPLES} samples"
        if not all(is_readable(tensor, device) for tensor in tensors):
            return "it serves ordinary, contiguous float32 tensors"
        if not all(v is None or (is_vector(v, hidden) and is_readable(v, device)) for v in affine):
            return "a gain or bias is not a float32 vector in memory"
        return None if launch.takes_tuples() else "it needs a newer triton, whose kernels take tuples"

    def forward(
        self, call: Sequence, products: Tensor, start: Tensor, weight: Tensor, affine: Many[Any], states: Many[Looked]
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Outputs, the state of each sample at its end, and what backward needs: see cpu/sequence.py."""
        rows, hidden, norms = products.shape[0], weight.shape[1], len(states)
        _require_one_device(products, states)
        with launch.on_device_of(products):
            output, final = products.new_empty((rows, hidden)), torch.empty_like(start)
            before = products.new_empty((CARRIED[call.gates], rows, hidden))
            inner = products.new_empty((INNER[call.gates] + call.cell_norm, rows, hidden))
            kept = products.new_empty((len(call.sizes) if call.training else 0, norms, kept_size(hidden)))
            recurrent, vectors = torch.empty_like(products), _stacked(affine, weight)
            tensors = {"products": products, "recurrent": recurrent, "before": before, "inner": inner, "kept": kept}
            tensors |= {"output": output, "final": final, "affine": vectors, "cells": inner[-1]}
            walker = Walker(call, hidden, tensors)
            if call.training:
                walker.tensors |= _scratch(walker, kept) | {"hats": kept}
                walker.tensors["table"] = _table([of_h1(looked.state) for looked in states], products)
            else:
                walker.tensors["hats"] = _used([looked.state for looked in states], call.tested)
            firsts = start.view(-1, call.sizes[0], hidden)
            for step in walk(call.sizes, call.reverse):
                if step.earlier < step.rows:
                    begin = slice(step.row + step.earlier, step.row + step.rows)
                    before[:, begin].copy_(firsts[:, step.earlier : step.rows])
                here = slice(step.row, step.row + step.rows)
                for each in sets_of(call):
                    source, part = _factor(each, before, inner, hidden)
                    if source is not None:
                        torch.mm(source[here], weight[part].t(), out=recurrent[here, part])
                    walker.forward(step, each)
        return output, final, (products, weight, recurrent, before, inner, kept, vectors)

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
        products, weight, recurrent, before, inner, kept, vectors = saved
        (carried, _, hidden), norms, like = before.shape, len(states), before[0]
        d = like.new_empty((carried, call.sizes[0], hidden))
        dstart = torch.empty_like(d if carried > 1 else d[0])
        doutput = as_laid_out(doutput, like.shape, like.stride(), like.dtype, like.device)
        dfinal = as_laid_out(dfinal, dstart.shape, dstart.stride(), like.dtype, like.device)
        with launch.on_device_of(products):
            written = [writable(each.grads, hidden, like) for each in h2]
            dproducts, drecurrent = torch.empty_like(products), torch.empty_like(products)
            dweight = torch.empty_like(weight) if needs_weight else None
            totals = products.new_zeros((norms, 2, hidden))
            tensors = {"products": products, "recurrent": recurrent, "before": before, "inner": inner, "kept": kept}
            tensors |= {"doutput": doutput, "dfinal": dfinal, "d": d, "cells": inner[-1], "gains": vectors}
            tensors |= {"dproducts": dproducts, "drecurrent": drecurrent, "dcell": drecurrent, "totals": totals}
            walker = Walker(call, hidden, tensors)
            walker.tensors |= _scratch_back(walker, kept) | {"scales": _scales(h2, like)}
            walker.tensors["table"] = _table([_parts(stream) for stream in written], products)
            starts = dstart.view_as(d)
            for step in reversed(walk(call.sizes, call.reverse)):
                for each in reversed(sets_of(call)):
                    walker.backward(step, each)
                    _through_product(each, weight, drecurrent[step.row : step.row + step.rows], walker, step.rows)
                if step.earlier < step.rows:
                    starts[:, step.earlier : step.rows].copy_(d[:, step.earlier : step.rows])
            if dweight is not None:
                for each in sets_of(call):
                    source, part = _factor(each, before, inner, hidden)
                    if source is not None:
                        torch.mm(drecurrent[:, part].t(), source, out=dweight[part])
        for given, stream in zip(h2, written, strict=True):
            if stream is not given.grads:
                write_stream(given.grads, stream)
        return dproducts, dstart, dweight, (*totals[:, 0], *totals[:, 1])


def _through_product(each: Set, weight: Tensor, drecurrent: Tensor, walker: Walker, rows: int) -> None:
    """From the gradient of recurrent products to that of the state before, or of h * r."""
    part = slice(each.gate * walker.hidden, (each.gate + each.gates) * walker.hidden)
    dh = walker.tensors["d"][0, :rows]
    if each.cell == "gates":
        dh.addmm_(drecurrent[:, part], weight[part])
    elif each.cell == "state":
        torch.mm(drecurrent[:, part], weight[part], out=walker.tensors["dreset"][:rows])
    elif each.cell != "cell":
        torch.mm(drecurrent, weight, out=dh)


def _factor(each: Set, before: Tensor, inner: Tensor, hidden: int) -> tuple[Tensor | None, slice]:
    """What a set multiplies by its part of the recurrent weight, and that part."""
    part = slice(each.gate * hidden, (each.gate + each.gates) * hidden)
    if each.cell == "cell":
        return None, part
    return inner[3] if each.cell == "state" else before[0], part  # h * r, or h


def _require_one_device(products: Tensor, states: Many[Looked]) -> None:
    for looked in states:
        if looked.state.mean.device != products.device:
            raise RuntimeError(
                f"the state of a norm is on {looked.state.mean.device}, the input of the layer on {products.device}: "
                "move the whole layer with .to()"
            )


def _stacked(affine: Many[Any], weight: Tensor) -> Tensor:
    """Gains, then biases of all norms, (2 * norms, hidden): 1 and 0 where there are none."""
    norms, hidden = len(affine) // 2, weight.shape[1]
    if all(vector is None for vector in affine):
        found = weight.new_zeros((2 * norms, hidden))
        found[:norms].fill_(1)
        return found
    absent = [weight.new_ones(hidden), weight.new_zeros(hidden)] if any(v is None for v in affine) else []
    return torch.stack([absent[i >= norms] if vector is None else vector for i, vector in enumerate(affine)])


def _used(states: Many[State], tested: bool) -> Tensor:
    """Mean and sigma of all norms for evaluation, (2 * norms, hidden)."""
    pairs = [(s.eval_mean, s.eval_sigma) if tested else (s.mean, s.sigma) for s in states]
    return torch.stack([vector for pair in pairs for vector in pair])


def _table(tensors: list[list[Tensor]], like: Tensor) -> Tensor:
    """The addresses of the norms' tensors, a row per norm, written on the device: what is not copied need not wait."""
    many = tuple(tensor for row in tensors for tensor in row)
    table = like.new_empty(len(many), dtype=torch.int64)
    launch.run(launch.kernels().note_addresses, (1,), {"table": table, "tensors": many}, {})
    return table


def _parts(stream: Stream) -> list[Tensor]:
    return [getattr(stream, part) for part in PARTS]


def _scratch(walker: Walker, like: Tensor) -> dict[str, Tensor]:
    size = walker.most_norms, 1 + 2 * walker.most_parts, walker.hidden
    return {"sums": like.new_empty(size), "sums_again": like.new_empty(size if walker.signs else 0)}


def _scratch_back(walker: Walker, like: Tensor) -> dict[str, Tensor]:
    call, hidden, norms = walker.call, walker.hidden, walker.norms
    return {
        "sums": like.new_empty((walker.most_norms, (2 + walker.signs) * walker.tiling.tiles, hidden)),
        "flow": like.new_empty((norms, 2, hidden)),
        "vectors": like.new_empty((norms, 5, hidden)),
        "da": like.new_empty((call.sizes[0], call.gates * hidden)),
        "dreset": like.new_empty((call.sizes[0] if call.gates == 3 else 0, hidden)),
    }


def _scales(h2: Many[H2], like: Tensor) -> Tensor | None:
    """Of the loss, for each norm, where a scaler was attached since the forward pass."""
    if all(each.scale is None for each in h2):
        return None
    one = like.new_ones(())
    return torch.stack([one if each.scale is None else each.scale.to(one).reshape(()) for each in h2])
