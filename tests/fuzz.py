"""Random calls of streaming layers, and the laws that each of them must keep.

    python tests/fuzz.py --calls 100000 --seed 0
    python tests/fuzz.py --case 12345

A case is a layer or a recurrent network with random settings, and a few things done to it: training calls, calls in
other modes, updates, moves and copies, calls that are refused. Laws: nothing crashes, the state stays finite, inputs
are not changed, outputs have the type, shape and layout of the input, a refused call leaves the state as it was, bit by
bit. A part of the cases, those without values near the ends of float32, is run again on the plain path in float64.

How far the two may be apart: 1e-5 of the largest value or term, as in conformance.py; or, if that fails, 32 times as
far as the plain path moves by itself when its inputs are changed in their last digit, or 8 times as far as it is from
itself in float32. So no case has to be well-conditioned. Near the ends of float32 nothing is compared.
"""

import argparse
import copy
import io
import os
import pickle
import random
import struct
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, nullcontext
from functools import partial
from math import prod

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from streamnorm import GRU, LSTM, RNN, StreamingNorm, kernels, paused
from streamnorm.backends.cpu import binding
from streamnorm.core.state import to_dict

# What breaks a law and waits to be mended: left out, unless --all is given. Take a name away when the law holds.
AWAITED: set[str] = set()
COMPARED, TOLERANCE, NOISES = 0.1, 1e-5, 4
KINDS = ["normal", "normal", "normal", "offset", "far constant", "zeros", "minus zeros", "tiny", "denormal", "bad"]
WILD = [*KINDS, "huge", "large", "mixed", "all nan", "all inf", "ends"]
SMALL = [torch.bfloat16, torch.float16]
NARROW = torch.float16  # gradients of parameters would overflow in it: nothing is compared


class Broken(AssertionError):
    """A law."""


def size_of(tensor):
    tensor = tensor if tensor.is_floating_point() else tensor.double()
    return float(torch.nan_to_num(tensor, 0.0, 0.0, 0.0).abs().max()) if tensor.numel() else 0.0


def law(holds, words):
    if not holds:
        raise Broken(words)


# ---- inputs --------------------------------------------------------------------------------------------------------


def values(rng, kind, shape):
    """A tensor `(N, C, ...)` of float32 or, for a sequence, anything."""
    x = torch.randn(shape)
    if kind == "normal":
        return x * rng.choice([0.03, 1.0, 100.0]) + rng.choice([0.0, 0.5, 3.0])
    if kind == "offset":
        return x + rng.choice([-1e3, 1e4])
    if kind == "far constant":
        return torch.full(shape, rng.choice([-7.0, 1e4, 3.3e5]))
    if kind in ("zeros", "minus zeros"):
        return torch.full(shape, -0.0 if kind == "minus zeros" else 0.0)
    if kind in ("tiny", "denormal", "huge", "large"):
        return x * {"tiny": 1e-30, "denormal": 1e-40, "huge": 1e38, "large": 1e17}[kind]
    if kind == "bad":
        x.view(-1)[rng.randrange(x.numel())] = rng.choice([torch.nan, torch.inf, -torch.inf])
        return x
    if kind == "mixed":
        return x * 10.0 ** torch.randint(-44, 36, shape)
    if kind == "ends":
        return torch.finfo(torch.float32).max * x.sign()
    return torch.full(shape, torch.nan if kind == "all nan" else torch.inf)


def gapped(x):
    """With other numbers in between: an element too many along the last dimension."""
    return torch.cat([x, x[..., :1]], -1)[..., :-1]


LAYOUTS = {
    "contiguous": lambda x: x,
    "channels last": lambda x: x.movedim(1, -1).contiguous().movedim(-1, 1),
    "sliced rows": lambda x: torch.cat([x, x], 1)[:, : x.shape[1]],
    "gapped": gapped,
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "expanded": lambda x: x[:1].expand_as(x),
    "expanded columns": lambda x: x[..., :1].expand_as(x),
    "negative bit": lambda x: torch._neg_view(-x),
    "offset": lambda x: torch.cat([x.new_zeros(3), x.reshape(-1)])[3:].view(x.shape),
    "zero tensor": lambda x: torch._efficientzerotensor(x.shape, dtype=x.dtype),
}


SERVED = [
    "contiguous",
    "contiguous",
    "contiguous",
    "channels last",
    "sliced rows",
    "offset",
]  # as the kernels like them


def names(table, what, everything):
    return [name for name in table if everything or f"{what}: {name}" not in AWAITED]


# ---- a case --------------------------------------------------------------------------------------------------------


class Case:
    """What is common to layers and networks. `exact`: on the plain path in float64; `noise`: inputs changed by that."""

    def __init__(self, rng, exact, noise, everything):
        self.rng, self.exact, self.everything, self.calls, self.found = rng, exact, everything, 0, []
        self.noise, self.noises = noise, torch.Generator().manual_seed(rng.randrange(2**31))
        self.wild = rng.random() < 0.3
        self.compared = rng.random() < COMPARED and not self.wild
        self.dtype = rng.choice([torch.float32] * 24 + [torch.float64, NARROW] + [torch.bfloat16] * 4)
        self.compared &= self.dtype != NARROW
        self.coarsest = torch.finfo(self.dtype).eps
        self.kinds = rng.sample(names(WILD, "values", everything) if self.wild else KINDS, 2)
        self.settings = self.draw_settings()
        if self.settings["p"] != 2 and not self.wild:  # an element on its center has no sign to agree about
            self.kinds = ["normal"]
        self.large = rng.random() < 0.004  # enough for threads
        self.threads = 2 if self.large else 1
        self.variant = rng.choice(binding.VARIANTS)
        self.net = self.make()
        for parameter in self.net.parameters():
            if parameter.ndim == 1:
                nn.init.uniform_(parameter, 0.5, 2)
        if exact:
            self.net.double()
        self.norms = [module for module in self.net.modules() if isinstance(module, StreamingNorm)]
        self.optimizer, self.steepest, self.furthest = None, 0.0, 0.0

    def draw_settings(self):
        rng = self.rng
        tenth = [rng.randrange(11) / 10 for _ in range(8)]
        settings = {
            "p": rng.choice([1, 2, 2]),
            "center": rng.choice(["running", "mean", "zero"]),
            "warmup": rng.choice([0, 10, 256]),
            "guard": rng.random() < 0.7,
            "affine": rng.random() < 0.8,
            "eps": rng.choice([1e-5, 1e-5, 1e-3, 1e-8]),
        }
        if rng.random() < 0.5:
            settings |= {"alpha": (1 - tenth[0], tenth[0]), "beta": tenth[1:4], "kappa": tenth[4:8]}
        if self.wild:
            settings["eps"] = rng.choice([0.0, 1e-5, 1e-45, 1e10])
        return settings

    # ---- laws

    def fixed(self):
        """All that a refused call must leave alone."""
        tensors = [tensor for norm in self.norms for tensor in to_dict(norm._state).values()]
        return [tensor.clone() for tensor in [*tensors, *(p.detach() for p in self.net.parameters())]]

    def check_state(self):
        tensors = [to_dict(norm._state) for norm in self.norms]
        floats = [t.reshape(-1) for state in tensors for t in state.values() if t.is_floating_point()]
        if not torch.cat(floats).isfinite().all():
            bad = {name for state in tensors for name, t in state.items() if not t.isfinite().all()}
            raise Broken(f"the state is not finite: {sorted(bad)}")

    @contextmanager
    def unchanged(self, *tensors):
        before = [tensor.detach().clone() for tensor in tensors]
        yield
        for tensor, old in zip(tensors, before, strict=True):
            law(torch.equal(*(torch.nan_to_num(t.detach(), 7.0) for t in (tensor, old))), "an input was changed")

    def note(self, scale=0.0, **tensors):
        """Results to compare. `scale`: the size of terms that they are the sum of, which may cancel."""
        if self.compared:
            self.found += [(name, t.detach().clone(), scale) for name, t in tensors.items() if t is not None]

    def given(self, x, layout, dtype):
        """An input as a call gets it."""
        x = layout(x.to(dtype).double() if self.exact else x.to(dtype))
        return x * (1 + self.noise * self.coarsest * torch.randn(x.shape, generator=self.noises)) if self.noise else x

    def layout(self, what):
        rng = self.rng
        return LAYOUTS[rng.choice(SERVED if rng.random() < 0.6 else names(LAYOUTS, what, self.everything))]

    def gradient(self, y):
        """A dy, which need not lie in memory as y does."""
        rng, dy = self.rng, 0.5 + torch.randn(y.shape)
        if self.wild and rng.random() < 0.3:
            dy = values(rng, rng.choice(names(WILD, "values", self.everything)), tuple(y.shape))
        dy = torch.zeros_like(dy) if rng.random() < 0.05 else dy
        return self.given(dy, self.layout("dy"), y.dtype)

    def slope(self):
        """At most dy/dx of a norm by itself."""
        each = [(norm.weight, to_dict(norm._state)["sigma"]) for norm in self.norms]
        return max(
            (float((1 if w is None else size_of(w.detach())) / s.min()) for w, s in each if s.numel()), default=1.0
        )

    # ---- what is done

    def run(self):
        rng = self.rng
        for _ in range(rng.randint(3, 20)):
            does = rng.choice([*[self.train] * 12, *[self.look] * 4, *[self.update] * 3, self.move, self.refuse])
            does()
            self.check_state()
        for i, norm in enumerate(self.norms if self.compared else []):
            state = to_dict(norm._state)
            largest = max(size_of(state["stats_short"]), size_of(state["stats_long"]))
            for name, tensor in state.items():
                self.note(self.steepest if "grads" in name else largest, **{f"{i} {name}": tensor})
        return self

    def train(self):
        rng, ys, dys = self.rng, [], []
        self.net.train()
        kept = []
        for _ in range(rng.choice([1, 1, 1, 2, 3])):
            inputs, call = self.draw_call(grad=rng.random() < 0.8)
            with self.unchanged(*inputs):
                results = self.called(call)
            if results is None:
                continue
            kept.append(inputs)
            results = [y for y in results if y.requires_grad]
            chosen = results if rng.random() < 0.8 else results[: rng.randint(0, len(results))]
            ys, dys = [*ys, *chosen], [*dys, *(self.gradient(y) for y in chosen)]
        if rng.random() < 0.1:
            self.move_lightly()
        if not ys or rng.random() < 0.05:
            return
        again = rng.random() < 0.05
        with self.unchanged(*dys):
            if again:
                torch.autograd.backward(ys, dys, retain_graph=True)
            torch.autograd.backward(ys, dys)
        scale = 0.0
        if self.compared:
            scale = self.slope() * max(map(size_of, dys))
            self.steepest = max(self.steepest, scale)
        for inputs in kept:
            for x in inputs:
                self.note(scale, dx=x.grad)
        self.note(scale, **{f"grad {name}": p.grad for name, p in self.net.named_parameters()})

    def look(self):
        """A call that is not backpropagated: of training, of evaluation, paused, without gradients."""
        rng = self.rng
        self.net.train(rng.random() < 0.4)
        contexts = {"": nullcontext, "no_grad": torch.no_grad, "inference": torch.inference_mode}
        contexts["paused"] = partial(paused, self.net)
        context = rng.choice(list(contexts))
        inputs, call = self.draw_call(grad=False)
        before = None if self.net.training and context != "paused" else self.fixed()
        with contexts[context](), self.unchanged(*inputs):
            self.called(call)
        if before is not None:
            self.same(before, "a call in evaluation, or paused, changed the state")

    def called(self, call):
        """The outputs of a call; None if there were too few elements for it."""
        before = self.fixed() if self.few else None
        if self.compared:
            self.furthest = max(self.furthest, *(size_of(norm._state.mean) for norm in self.norms))
        self.calls += 1
        try:
            results = call()
        except ValueError as refused:
            if before is None or "one element per statistic" not in str(refused):
                raise
            self.same(before, "a call with too few elements changed the state")
            return None
        # The kernels take a mean about a center, which may have been further from 0 than the input is.
        scale = self.furthest * self.slope() if self.compared else 0.0
        self.note(scale, **{f"output {i}": y for i, y in enumerate(results)})
        return results

    def same(self, before, words):
        law(all(torch.equal(a, b) for a, b in zip(before, self.fixed(), strict=True)), words)

    def update(self):
        """By an optimizer that hears itself, where there are parameters in it."""
        for parameter in self.net.parameters():
            if parameter.grad is not None:
                parameter.grad = torch.nan_to_num(parameter.grad, 0.0, 0.0, 0.0).clamp(-1, 1)
        if self.optimizer is None and any(True for _ in self.net.parameters()):
            self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01)
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=self.rng.random() < 0.5)
        for norm in self.norms:
            if not norm.affine or self.rng.random() < 0.2:
                norm.weights_updated()

    def move(self):
        name = self.rng.choice(names(MOVES, "move", self.everything))
        moved = MOVES[name](self)
        if moved is not None:
            self.net, self.optimizer = moved, None
            self.norms = [module for module in moved.modules() if isinstance(module, StreamingNorm)]

    def move_lightly(self):
        """Between forward and backward: what reads the layer, and must not disturb it."""
        if self.rng.random() < 0.5:
            copy.deepcopy(self.net)
        else:
            self.net.state_dict()

    def change_dtype(self, dtype):
        if self.wild and max(size_of(t) for norm in self.norms for t in to_dict(norm._state).values()) > 1e38:
            return  # float32 has no room for what float64 took
        self.dtype = dtype
        self.compared &= dtype != NARROW
        self.coarsest = max(self.coarsest, torch.finfo(dtype).eps)
        self.net.to(dtype)
        if self.exact:
            self.net.double()

    def refuse(self):
        rng = self.rng
        self.net.train(rng.random() < 0.8)
        table = self.refusals()
        name = rng.choice(names(table, "refused", self.everything))
        attempt, error = table[name]
        made = attempt()  # what has to happen before it
        before = self.fixed()
        self.calls += 1
        try:
            made()
        except error:
            pass
        else:
            raise Broken(f"not refused: {name}")
        self.same(before, f"a refused call changed the state: {name}")

    def wrong_state(self):
        state = self.net.state_dict()
        key = self.rng.choice(list(state))
        state[key] = torch.zeros((*state[key].shape, 3))
        return lambda: self.net.load_state_dict(state)


def changed_grads(case):
    for parameter in case.net.parameters():
        parameter.requires_grad_(case.rng.random() < 0.7)


def round_trip(case):
    case.net.load_state_dict(case.net.state_dict(), assign=case.rng.random() < 0.3)
    for parameter in case.net.parameters():
        parameter.requires_grad_(True)
    case.optimizer = None  # of other parameters, if they were assigned


def sent(case):
    """As a torch queue sends it: storages move to shared memory in place."""
    from multiprocessing.reduction import ForkingPickler

    case.sent = io.BytesIO(ForkingPickler.dumps(case.net))


MOVES = {
    "deepcopy": lambda case: copy.deepcopy(case.net),
    "pickle": lambda case: pickle.loads(pickle.dumps(case.net)),
    "state_dict": round_trip,
    "requires_grad": changed_grads,
    "shared memory": lambda case: None if case.rng.random() < 0.8 else case.net.share_memory(),
    "sent to a process": sent,
    "double": lambda case: case.change_dtype(torch.float64),
    "float": lambda case: case.change_dtype(torch.float32),
    "float again": lambda case: case.change_dtype(torch.float32),
    "half": lambda case: case.change_dtype(case.rng.choice(SMALL)),
    "read": lambda case: [(norm.mean, norm.stats.long, norm.grads) for norm in case.norms][:0] or None,
    "reset": lambda case: [norm.reset_running_stats() for norm in case.norms][:0] or None,
}


class LayerCase(Case):
    def make(self):
        rng = self.rng
        self.ref = rng.choice(["BA1"] * 90 + ["BA2", "BA3", "BA4", "BA5", "BA6", "SP1", "SP2", "SP3", "SP4", "SP5"])
        self.channels = rng.choice([1, 2, 3, 5, 8, 9, 16, 17, 33, 40, 70])
        if self.ref != "BA1":
            self.channels += 1
            self.settings["p"] = rng.choice([1, 2, 2, 1.5, 3])
        self.last = rng.random() < 0.15
        self.shape = self.draw_shape()
        return StreamingNorm(
            self.channels, ref=self.ref, dtype=self.dtype, channel_dim=-1 if self.last else 1, **self.settings
        )

    def draw_shape(self):
        rng = self.rng
        space = rng.choice([(), (), (), (1,), (3,), (7,), (33,), (2, 3), (5, 5), (1, 1), (2, 1, 3)])
        samples = rng.choice([1, 2, 3, 4, 7, 16])
        if self.large:
            samples = 66000 // (self.channels * prod(space)) + 1
        return samples, self.channels, *space

    def draw_call(self, grad):
        rng = self.rng
        if rng.random() < 0.3:
            shape = self.draw_shape()
            self.shape = shape if self.ref in ("BA1", "BA2", "SP1", "SP2") else (shape[0], *self.shape[1:])
        dtype = self.dtype if rng.random() < 0.95 else rng.choice([torch.float32, torch.float64, *SMALL])
        self.coarsest = max(self.coarsest, torch.finfo(dtype).eps)
        x = self.given(values(rng, rng.choice(self.kinds), self.shape), self.layout("x"), dtype)
        x = x.movedim(1, -1) if self.last else x
        if self.last and rng.random() < 0.5:
            x = x.contiguous()
        x.requires_grad_(grad)
        mask = torch.rand(self.shape[:1] + self.shape[2:]) < 0.7 if rng.random() < 0.05 else None
        self.few = self.settings["center"] == "mean" and (self.ref != "BA1" or x.numel() == self.channels)

        def call():
            y = self.net(x, mask=mask) if mask is not None else self.net(x)
            law(y.shape == x.shape and y.dtype == x.dtype, f"{x.dtype} {x.shape} became {y.dtype} {y.shape}")
            law(
                x._is_zerotensor() or y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr(),
                "the output lies in the input",
            )
            law(self.last or not x.is_contiguous() or y.is_contiguous(), "the output of a contiguous input has gaps")
            return (y,)

        return (x,), call

    def refusals(self):
        net, rng, shape = self.net, self.rng, self.shape
        as_given = (lambda x: x.movedim(1, -1)) if self.last else (lambda x: x)
        good = as_given(torch.randn(shape).to(self.net._stored.dtype))
        wrong = as_given(torch.randn(shape[0], self.channels + rng.choice([1, 3]), *shape[2:]))
        outside = self.shape[0] + 1
        bad_shape = (outside, *shape[2:], 2) if shape[0] > 1 else (2, outside, *shape[2:], 3)
        mask = torch.ones(bad_shape, dtype=torch.bool)
        return {
            "channels": (lambda: lambda: net(wrong), ValueError),
            "dimensions": (lambda: lambda: net(torch.randn(self.channels)), ValueError),
            "whole numbers": (lambda: lambda: net(good.long()), TypeError),
            "complex": (lambda: lambda: net(torch.complex(good.double(), good.double())), TypeError),
            "empty": (lambda: lambda: net.train()(as_given(torch.ones(0, *shape[1:]))), ValueError),
            "no tensor": (lambda: lambda: net(good.tolist()), TypeError),
            "mask of floats": (lambda: lambda: net(good, mask=mask.float()), TypeError),
            "mask of another shape": (lambda: lambda: net(good, mask=mask), ValueError),
            "second derivative": (self.second_derivative, (RuntimeError, ValueError)),
            "transform": (lambda: lambda: torch.func.vmap(net.train())(good.unsqueeze(0)), RuntimeError),
            "state of another shape": (self.wrong_state, RuntimeError),
        }

    def second_derivative(self):
        x = torch.randn(max(self.shape[0], 2), *self.shape[1:], requires_grad=True)
        x = x.movedim(1, -1) if self.last else x
        try:
            y = self.net.train()(x)
        except ValueError as too_few:
            y, error = None, too_few

        def attempt():
            if y is None:
                raise error
            torch.autograd.grad(y.sum(), x, create_graph=True)

        return attempt


class NetCase(Case):
    def make(self):
        rng = self.rng
        self.features, self.hidden = rng.choice([1, 3, 5]), rng.choice([1, 2, 5, 8, 15, 16, 17, 33])
        self.batch_first, self.layers = rng.random() < 0.3, rng.choice([1, 1, 1, 2])
        self.bidirectional = rng.random() < 0.3
        if rng.random() < 0.05:
            self.settings["ref"] = "SP1"
        make = rng.choice([RNN, GRU, LSTM])
        own = {"cell_norm": rng.random() < 0.5} if make is LSTM else {}
        if make is not LSTM and self.wild:
            own = {"nonlinearity": rng.choice(["tanh", "tanh", "relu"])}
        return make(
            self.features,
            self.hidden,
            self.layers,
            norm=partial(StreamingNorm, **self.settings),
            **own,
            batch_first=self.batch_first,
            bidirectional=self.bidirectional,
            dtype=self.dtype,
        )

    def now(self):
        return torch.float64 if self.exact else self.dtype

    def states(self):
        return range(self.net.kind.states)

    def draw_call(self, grad):
        rng = self.rng
        steps, batch = rng.choice([1, 2, 3, 5]), rng.choice([1, 2, 3, 4, 9])
        shape = (batch, steps) if self.batch_first else (steps, batch)
        x = self.given(values(rng, rng.choice(self.kinds), (*shape, self.features)), self.layout("x"), self.dtype)
        x.requires_grad_(grad)
        inputs, hx = [x], None
        if rng.random() < 0.4:
            shape_of_state = (self.layers * (1 + self.bidirectional), batch, self.hidden)
            states = [self.given(torch.randn(shape_of_state), self.layout("x"), self.dtype) for _ in self.states()]
            inputs += [state.requires_grad_(grad) for state in states]
            hx = tuple(states) if len(states) > 1 else states[0]
        form = rng.choice(["whole", "lengths", "packed", "unbatched"])
        self.few = self.settings["center"] == "mean"
        lengths = [steps, *(rng.randint(1, steps) for _ in range(batch - 1))]
        rng.shuffle(lengths)

        def call():
            if form == "unbatched" and hx is None:
                one = x[0] if self.batch_first else x[:, 0]
                output, final = self.net(one)
                law(output.shape == (one.shape[0], self.hidden * (1 + self.bidirectional)), "shape of an output")
            elif form == "packed":
                given = pack_padded_sequence(x, lengths, batch_first=self.batch_first, enforce_sorted=False)
                output, final = self.net(given, hx)
                law(torch.equal(output.batch_sizes, given.batch_sizes), "another packing")
                output = output.data
            else:
                output, final = self.net(x, hx, lengths=lengths if form == "lengths" else None)
                law(output.shape == (*shape, self.hidden * (1 + self.bidirectional)), "shape of an output")
            final = final if isinstance(final, tuple) else (final,)
            law(all(result.dtype == x.dtype for result in (output, *final)), "type of an output")
            return output, *final

        return inputs, call

    def refusals(self):
        net, rng, features = self.net, self.rng, self.features
        dtype, batch = self.now(), 4
        x, rows = torch.randn(3, batch, features).to(dtype), torch.randn(6, features).to(dtype)

        def packed(*sizes):
            return lambda: lambda: net(PackedSequence(rows, torch.tensor(sizes)))

        size = 3 if self.batch_first else batch
        table = {
            "features": (lambda: lambda: net(x.repeat(1, 1, 2)), ValueError),
            "dimensions": (lambda: lambda: net(x.unsqueeze(0)), ValueError),
            "state": (
                lambda: lambda: net(x, [x.new_zeros(1, size + 1, self.hidden) for _ in self.states()]),
                ValueError,
            ),
            "lengths": (lambda: lambda: net(x, lengths=[9] * size), ValueError),
            "number of lengths": (lambda: lambda: net(x, lengths=[1] * (size + 1)), ValueError),
            "lengths of floats": (lambda: lambda: net(x, lengths=[0.5] * size), TypeError),
            "indices": (lambda: lambda: net(torch.tensor([[features, 0], [0, 0]])), ValueError),
            "no timestep": (lambda: lambda: net(x[:0]), ValueError),
            "complex": (lambda: lambda: net(torch.complex(x.double(), x.double())), (TypeError, ValueError)),
            "state of another shape": (self.wrong_state, RuntimeError),
            "packed, too many rows": (packed(3, 2), ValueError),
            "packed, too few rows": (packed(5, 4), ValueError),
            "packed, rising": (packed(2, 4), ValueError),
            "packed, zero": (packed(3, 3, 0), ValueError),
            "packed, negative": (packed(4, 3, -1), ValueError),
            "recurrent weight of another shape": (self.wrong_weight, (ValueError, RuntimeError)),
        }
        if rng.random() < 0.5:
            table.pop("state of another shape")
        return table

    def wrong_weight(self):
        net, x = self.net, torch.randn(3, 4, self.features).to(self.now())

        def attempt():
            before = net.weight_hh_l0.data
            net.weight_hh_l0.data = before.new_ones(before.shape[0], before.shape[1] + 1)
            try:
                net(x)
            finally:
                net.weight_hh_l0.data = before

        return attempt


# ---- comparing -----------------------------------------------------------------------------------------------------


def run(number, exact=False, noise=0.0, everything=False):
    rng = random.Random(number)
    torch.manual_seed(number)
    case = (NetCase if rng.random() < 0.1 else LayerCase)(rng, exact, noise, everything)
    torch.set_num_threads(case.threads)
    fused = kernels.available()
    if fused:
        binding._native.use(case.variant)  # without such instructions, what was in use stays so
    try:
        with kernels.disabled() if exact else nullcontext():
            return case.run()
    finally:
        torch.set_num_threads(1)
        if fused:
            binding._native.use(binding.variant)


def differences(found, expected, rest):
    """What is too far apart: the name of each result, how far, and how far it may be."""
    for i, ((name, a, _), (other, b, scale)) in enumerate(zip(found, expected, strict=True)):
        law(name == other and a.shape == b.shape, f"{name} of {a.shape}, expected {other} of {b.shape}")
        if not a.numel():
            continue
        if not a.is_floating_point():
            law(torch.equal(a, b), f"{name} is {a.tolist()}, expected {b.tolist()}")
            continue
        limits = torch.finfo(a.dtype)
        by_row = "long" in name or "short" in name  # mean and sigma have sizes of their own
        for row in range(2) if by_row else [...]:
            left, right = a[row].double(), b[row]
            fits = right.abs() < limits.max / 4
            bad = ~right.isfinite()
            if (bad != ~left.isfinite())[fits | bad].any():
                yield name, "not finite in other places", ""
            size = torch.where(fits, right, 0).abs().max().clamp(min=scale)
            allowed = max(TOLERANCE, 4 * limits.eps) * size + torch.finfo(torch.float32).tiny
            for times, other_run in rest:
                allowed = allowed + times * torch.where(fits, other_run[i][1][row].double() - right, 0).abs().max()
            off = torch.where(fits, left - right, 0).abs().max()
            if off > allowed:
                yield name, float(off), f"of {float(size):.3g}, allowed {float(allowed):.3g}"


def check(number, everything=False):
    """Run a case; the number of its calls."""
    case = run(number, everything=everything)
    if not case.compared or not kernels.available():
        return case.calls
    exact = run(number, exact=True, everything=everything).found
    if list(differences(case.found, exact, [])):
        noisy = [run(number, exact=True, noise=2.0**i, everything=everything).found for i in range(NOISES)]
        with kernels.disabled():
            narrow = run(number, everything=everything).found
        for name, off, words in differences(case.found, exact, [*((32, found) for found in noisy), (8, narrow)]):
            raise Broken(f"kernels and plain path differ: {name} off by {off} {words}")
    return case.calls


# ---- many cases ----------------------------------------------------------------------------------------------------


def first_case(seed):
    return seed * 10_000_000


def in_this_process(calls, first, everything, note=lambda number: None, progress=lambda done, cases: None):
    """Cases from number `first` on, until there were so many calls; how many cases and calls there were."""
    done, number = 0, first
    while done < calls:
        note(number)
        try:
            done += check(number, everything)
        except Exception as error:
            options = " --all" if everything else ""
            again = f"python tests/fuzz.py --case {number}{options}"
            raise Broken(f"case {number}: {type(error).__name__}: {error}\n  {again}") from error
        number += 1
        progress(done, number - first)
    return number - first, done


def supervised(calls, seed, everything=False):
    """The same in another process, so that a crash names its case too: whether all went well, and what was printed."""
    with tempfile.NamedTemporaryFile() as slot:
        command = [sys.executable, __file__, "--calls", str(calls), "--seed", str(seed), "--note", slot.name]
        done = subprocess.run(command + ["--all"] * everything, stdout=subprocess.PIPE, text=True)
        if done.returncode < 0 or (done.returncode and "case" not in done.stdout):
            number = struct.unpack("q", slot.read(8) or bytes(8))[0]
            words = f"case {number} ended the process ({done.returncode})\n  python tests/fuzz.py --case {number}"
            return False, done.stdout + words
    return done.returncode == 0, done.stdout


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="this case alone")
    parser.add_argument("--all", action="store_true", help="also what is known to fail: AWAITED in this file")
    parser.add_argument("--note", help=argparse.SUPPRESS)  # a file for the number of the case that runs
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.case is not None:
        print(f"{check(given.case, given.all)} calls")
        return 0
    if given.note is None:
        well, words = supervised(given.calls, given.seed, given.all)
        print(words.strip())
        return not well

    start, shown = time.monotonic(), [0.0]
    with open(given.note, "wb", buffering=0) as slot:

        def note(number):
            slot.seek(0)
            slot.write(struct.pack("q", number))

        def progress(done, cases):
            passed = time.monotonic() - start
            if passed - shown[0] > 10:
                shown[0] = passed
                rate = done / passed
                print(f"{done:,} calls, {cases:,} cases, {rate:.0f} calls/s", file=sys.stderr, flush=True)

        try:
            cases, done = in_this_process(given.calls, first_case(given.seed), given.all, note, progress)
        except Broken as broken:
            print(broken)
            return 1
    where = os.path.relpath(binding._native.__file__) if kernels.available() else "none"
    passed = time.monotonic() - start
    print(f"{done:,} calls in {cases:,} cases, {passed:.0f} s, {done / passed:.0f} calls/s; kernels: {where}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
