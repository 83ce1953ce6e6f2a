"""Recurrent layers over whole sequences by every backend, as `cases` has it for single layers."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import PackedSequence

from ... import GRU, LSTM, RNN, backends
from ..runs import DEFAULT_DEVICE
from .agreement import F32, F64, Seen

INPUT, HIDDEN = 5, 6
SIZES = (4, 3, 3, 1)  # samples that reach each timestep
UPDATES, CHUNKS, RATE = 2, 2, 0.05
TOLERANCE = 1e-4  # of float32: what is rounded at one timestep goes on through all the others


class Whole(NamedTuple):
    """A recurrent layer, which is trained on sequences that end one after the other."""

    make: Callable[..., Any]
    settings: dict[str, Any]


SEQUENCES = {
    "sequences, RNN": Whole(RNN, {}),
    "sequences, GRU": Whole(GRU, {}),
    "sequences, LSTM": Whole(LSTM, {"bidirectional": True}),
}


def layer_of(case: Whole) -> Any:
    torch.manual_seed(0)
    return case.make(INPUT, HIDDEN, dtype=F64, **case.settings)


def trained_by(name: str, case: Whole, dtype: torch.dtype, device: str) -> Seen:
    """All that can be seen of a training by a backend: outputs, gradients, and the state at its end."""
    layer = layer_of(case).to(dtype).to(device)  # not all devices have float64
    optimizer = torch.optim.SGD(layer.parameters(), RATE)
    generator = torch.Generator().manual_seed(1)
    found: Seen = {}
    with backends.use(name):
        for update in range(UPDATES):
            for chunk in range(CHUNKS):
                x = torch.randn(sum(SIZES), INPUT, dtype=F64, generator=generator)
                x = x.to(dtype).to(device).requires_grad_()
                y = layer(PackedSequence(x, torch.tensor(SIZES)))[0].data
                y.square().mean().backward()
                results: dict[str, Any] = {"output": y.detach(), "gradient of input": x.grad}
                found |= {f"{update}.{chunk}: {what}": value for what, value in results.items()}
            optimizer.step()
            found |= {f"{update}: gradient of {n}": p.grad.clone() for n, p in layer.named_parameters()}
            optimizer.zero_grad()
    return found | {f"state: {n}": value for n, value in layer.state_dict().items()}


def law_of(case: Whole) -> Seen:
    """By plain torch in float64 on the CPU."""
    return trained_by(backends.LAW.name, case, F64, DEFAULT_DEVICE)


def declined(name: str, case: Whole, device: str) -> str:
    """Why a backend does not serve the sequences of a case; nothing if it does, or is the law, which has a loop."""
    layer, x = layer_of(case).to(F32).to(device), torch.zeros(len(SIZES), SIZES[0], INPUT, device=device)
    with backends.use(name):
        said = backends.explain(layer, x.requires_grad_())
    served = name == backends.LAW.name or said.startswith(f"{name} serves whole sequences")
    return "" if served else said.partition(": ")[2].partition(". Of its norms")[0]
