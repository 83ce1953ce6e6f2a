"""Writes the files of this folder, with the package of a given source tree: what users have on their disks.

    git archive COMMIT | tar x -C TREE
    STREAMNORM_PLAIN=1 PYTHONPATH=TREE/src python tests/files/write.py FILE

| FILE | COMMIT | by |
|---|---|---|
| states1.pt.gz | 3616286 | state version 1: one pending mark for both streams |
| states1_marks.pt.gz | b68dd51 | the last with state version 1, which has the two marks of version 2 already |
| states2.pt.gz | fbb1569 | the last with state version 2: no counts of the elements in a window, no guard |
| states3_float32.pt.gz | 4d4b465 | state version 3 while counters were float32 |
| states3.pt.gz | 19543d4 | state version 3 before the package was reorganised |
| modules1.pt.gz, modules2.pt.gz | 3616286, fbb1569 | whole modules with these states, which do not load any more |
| modules3.pt.gz | 19543d4 | whole modules before that: torch.save and pickle name classes by their place |

A file is a dict of cases: what made the module (`make`, see `made`), its `state_dict`, or the bytes of `torch_save` and
`pickle`; an input `x`; and what that version computed from there on (`goes_on`), on torch 2.13 without kernels.
Files are never written anew: a new format gets a new one.
"""

import copy
import gzip
import io
import pickle
import sys
from functools import partial
from pathlib import Path

import torch
from torch import nn

import streamnorm

IMAGES, ROWS, SEQUENCES = (4, 3, 3, 3), (5, 3), (4, 3, 2)
CALLS = {"pending": 4, "middle": 5}  # of training; each second is followed by a weight update

# What makes a module (the strings are saved), and the shape of its input.
STREAMS = {  # by all versions
    "BA1": ("StreamingNorm(3)", IMAGES),
    "BA6": ('StreamingNorm(3, ref="BA6")', IMAGES),
    "SP1": ('StreamingNorm(3, ref="SP1")', IMAGES),
}
STATES = {  # by version 3
    "float64": ("StreamingNorm(3, dtype=torch.float64)", ROWS),
    "world": ('StreamingNorm(3, process_group="world")', ROWS),
    "scaled": ("StreamingNorm(3)", ROWS),
    "batch": ("GeneralBatchNorm(3)", ROWS),
    "located batch": ('GeneralBatchNorm(3, ref="BA6")', IMAGES),
    "time": ("TimeSpecificNorm(3, steps=2)", ROWS),
    "rnn": ("RNN(2, 2)", SEQUENCES),
    "gru": ("GRU(2, 2)", SEQUENCES),
    "gru of torch": ("GRU(2, 2, reset_after=True, norm=GeneralBatchNorm)", SEQUENCES),
    "lstm": ("LSTM(2, 2, cell_norm=True, norm=partial(TimeSpecificNorm, steps=2))", SEQUENCES),
    "convgru": ("ConvGRU(1, 2)", (2, 2, 1, 3, 3)),
}
SETTINGS = "p=1, alpha=(0.6, 0.4), kappa=(0.8, 0.2, 0.9, 0.1), guard=False, channel_dim=-1"
MODULES = {
    "BA1": (f"StreamingNorm(3, {SETTINGS})", (4, 3, 3, 3)),
    "BA6": (f'StreamingNorm(3, ref="BA6", {SETTINGS})', (4, 3, 3, 3)),
    "window": ('StreamingNorm(3, ref=NormRef(True, "all", 3), center="zero")', IMAGES),
    "world": ('StreamingNorm(3, process_group="world")', ROWS),
    "sequential": ("nn.Sequential(nn.Linear(3, 2), StreamingNorm(2), nn.Tanh())", ROWS),
    "deployed": ('nn.Sequential(StreamingNorm(3), StreamingNorm(3, ref="BA6"), nn.Conv2d(3, 2, 1))', IMAGES),
    "batch": ("GeneralBatchNorm(3)", ROWS),
    "sample": ("SampleNorm(3)", ROWS),
    "time": ("TimeSpecificNorm(3, steps=2)", ROWS),
    "affine": ("Affine(3)", ROWS),
    "rnn": ("RNN(2, 2)", SEQUENCES),
    "gru": ("GRU(2, 2)", SEQUENCES),
    "gru of torch": ("GRU(2, 2, reset_after=True)", SEQUENCES),
    "both directions": ("GRU(2, 2, bidirectional=True, norm=GeneralBatchNorm)", SEQUENCES),
    "lstm": ("LSTM(2, 2, norm=GeneralBatchNorm)", SEQUENCES),
    "cell": ("GRUCell(3, 2)", ROWS),
    "convgru": ("ConvGRU(1, 2, norm=SampleNorm)", (2, 2, 1, 3, 3)),
    "convrnn": ("ConvRNN(1, 2)", (2, 2, 1, 3, 3)),
}
# Optimizers are pickled with the module whose parameters they have.
OPTIMIZERS = {
    "Manhattan": "Manhattan(module.parameters(), lr=0.01, momentum=0.5)",
    "DecoupledUpdate": "DecoupledUpdate(torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.5), 2)",
}
REF = 'NormRef(False, "all", 3)'


def made(words, **more):
    """What the words of a case make: they use public names alone, so a name that changes needs one entry here."""
    names = {name: getattr(streamnorm, name) for name in streamnorm.__all__}
    return eval(words, {**names, "torch": torch, "nn": nn, "partial": partial, **more})


def read(name):
    """The cases of a file. Compressed, since torch aligns each of its small tensors."""
    return torch.load(io.BytesIO(gzip.decompress((Path(__file__).parent / name).read_bytes())), weights_only=True)


def called(module, x, scale=1.0):
    """The output of a call and the gradient of its input, in a loss that every element enters differently."""
    x = x.clone().requires_grad_()
    y = module(x)
    y = y[0] if isinstance(y, tuple) else y
    (y * torch.linspace(-scale, scale, y.numel(), dtype=y.dtype).reshape(y.shape)).sum().backward()
    return y.detach(), x.grad


def goes_on(module, x, optimizer=None):
    """What a module computes from here on: in evaluation, in two steps of training, and its state after them."""
    evaluated, _ = called(module.eval(), x)
    module.train()
    optimizer = optimizer or torch.optim.SGD(module.parameters(), lr=0.1)
    outputs, gradients = [], []
    for factor in (1, 2):
        optimizer.zero_grad()
        y, gradient = called(module, factor * x)
        optimizer.step()
        outputs.append(y)
        gradients.append(gradient)
    found = {"evaluated": evaluated, "outputs": torch.stack(outputs), "gradients": torch.stack(gradients)}
    return found | {"after": copy.deepcopy(module.state_dict())}


def trained(words, shape, calls, scaled=False):
    """A module in training, and an input for what comes after."""
    torch.manual_seed(0)
    module = made(words)
    dtype = next(module.parameters()).dtype
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if scaled else None
    attached = streamnorm.attach(optimizer, module, scaler) if scaled else None
    for i in range(calls):
        called(module, 2 * torch.randn(shape, dtype=dtype) + 1, 8.0 if scaled else 1.0)
        if i % 2:
            optimizer.step()
            optimizer.zero_grad()
    if attached:
        attached.remove()
    return module, torch.randn(shape, dtype=dtype)


def state_cases(more):
    """`STREAMS` at both moments, the others in the middle of a window."""
    named = {f"{name}, {moment}": (*case, calls) for name, case in STREAMS.items() for moment, calls in CALLS.items()}
    if more:
        named |= {name: (*case, CALLS["middle"]) for name, case in STATES.items()}
    for name, case in named.items():
        module, x = trained(*case, scaled=name == "scaled")
        saved = copy.deepcopy(module.state_dict())
        yield name, {"make": case[0], "state_dict": saved, "x": x} | goes_on(module, x)


def module_cases(more):
    """`STREAMS` by the versions whose modules are refused."""
    for name, (words, shape) in (MODULES if more else STREAMS).items():
        module, x = trained(words, shape, CALLS["pending" if name in ("BA1", "rnn") else "middle"])
        if name == "deployed":
            module = streamnorm.to_batchnorm(module.eval(), report=lambda line: None)
        yield name, {"make": words, "x": x} | pickled(module) | goes_on(module, x)
    if more:
        yield from optimizer_cases()
        yield "NormRef", {"make": REF} | pickled(made(REF))


def optimizer_cases():
    """Between windows: gradients, which a DecoupledUpdate gathers in one, are not pickled with parameters."""
    for name, words in OPTIMIZERS.items():
        module, x = trained(*MODULES["sequential"], CALLS["middle"])
        module.zero_grad()
        optimizer = made(words, module=module)
        for _ in range(2):
            called(module, x)
            optimizer.step()
        optimizer.zero_grad()
        yield name, {"make": words, "x": x} | pickled((module, optimizer)) | goes_on(module, x, optimizer)


def pickled(thing):
    """Its bytes as tensors, so that the file itself is free of code."""
    file = io.BytesIO()
    torch.save(thing, file)
    return {"torch_save": as_tensor(file.getvalue()), "pickle": as_tensor(pickle.dumps(thing))}


def as_tensor(data):
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def main(name):
    cases = module_cases if name.startswith("modules") else state_cases
    file = io.BytesIO()
    torch.save(dict(cases(more=name.endswith("s3.pt.gz"))), file)
    (Path(__file__).parent / name).write_bytes(gzip.compress(file.getvalue(), mtime=0))


if __name__ == "__main__":
    main(*sys.argv[1:])
