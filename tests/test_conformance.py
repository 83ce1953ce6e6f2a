"""Every backend computes what plain torch computes, and plain torch what the paper says: outputs, gradients and state.

A new backend is found here by itself, and tested on the device that it serves; one that cannot be used on this machine
is skipped, with its reason.
"""

import copy
import json
import os
import pickle
import subprocess
import sys
import threading
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import cache
from math import inf, nan, prod

import pytest
import torch
import torch._dynamo
from conformance import (
    BF16,
    CENTERS,
    F32,
    KINDS,
    LAW,
    Case,
    agrees,
    arithmetic,
    by_the_oracle,
    cases,
    close,
    data,
    feeder,
    home,
    kinds_of,
    law_of,
    layer_of,
    on,
    replayed,
    runs,
    same,
    serves,
    serves_compiled,
    state_of,
    train,
    watched,
)
from hypothesis import given, settings
from torch import nn
from torch.utils.checkpoint import checkpoint

from streamnorm import StreamingNorm, attach, backends
from streamnorm.engine.compat import top_hooks

CASES = cases()
REGISTERED = list(backends.registered())
every_backend = pytest.mark.parametrize("backend", REGISTERED)
every_case = pytest.mark.parametrize("name", CASES)
# A backend and a kind of layer that it serves.
PAIRS = [(backend, kind) for backend in REGISTERED for kind in kinds_of(backend)]
every_pair = pytest.mark.parametrize(("backend", "kind"), PAIRS)
# And the types of its input and of the layer.
TYPED = [
    (backend, kind, dtypes)
    for backend, kind in PAIRS
    for dtypes in ((F32, F32), (BF16, F32), (BF16, BF16))
    if serves(backend, Case(kind, dtypes=dtypes), home(backend) or "cpu")
]
every_type = pytest.mark.parametrize(("backend", "kind", "dtypes"), TYPED)
STREAMING = [backend for backend, kind in PAIRS if kind == "streaming"]
every_streaming_backend = pytest.mark.parametrize("backend", STREAMING)
DEVICES = {backend: home(backend) for backend in REGISTERED}


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Threads are in test_kernels.py; here they would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _usable(request):
    """Skips what needs a backend that cannot be used here."""
    name = getattr(request.node, "callspec", None) and request.node.callspec.params.get("backend")
    missing = None if name is None else backends.registered()[name].missing()
    if missing:
        pytest.skip(f"{name}: {missing}")


@cache
def law(name):
    return law_of(CASES[name])


def trained(layer, x, dy, **more):
    """A training call: the output and all gradients, by name."""
    layer.zero_grad()
    leaf = x.detach().requires_grad_()
    y = layer(leaf, **more)
    y.backward(dy)
    return {"output": y.detach(), "input": leaf.grad} | {name: p.grad for name, p in layer.named_parameters()}


def pair_of(shape, device="cpu", dtype=F32):
    return [t.to(device, dtype) for t in data(shape)]


# The law, and that every backend keeps it.


# The loops are slow, and know neither types nor layouts.
LOOPS = [
    name
    for name, case in CASES.items()
    if prod(case.shape) <= 135 and case == replace(case, layouts=Case.layouts, dtypes=Case.dtypes, scale=Case.scale)
]


@pytest.mark.parametrize("name", LOOPS)
def test_plain_torch_is_the_paper(name):
    """In float64, whatever the types of the case."""
    seen, fed = law(name)
    expected = by_the_oracle(CASES[name], fed)
    kept = {"gradient of weight": "weight", "gradient of bias": "bias"}
    for what, value in expected.items():
        if kept.get(what.split(": ")[1]) not in CASES[name].absent:
            close(seen[what].double(), value.double(), what, 1e-9)
    assert sum("output" in what for what in expected) == sum("output" in what for what in seen)


@every_backend
@every_case
def test_every_call_is_computed_as_plain_torch_does(backend, name):
    """By this backend where it serves the call and by the next one where it declines: `explain` says which, and why."""
    case, device, (expected, fed) = CASES[name], DEVICES[backend], law(name)
    served = serves(backend, case, device)
    if not served:  # by plain torch, whose own test has all windows
        case = replace(case, windows=case.windows[:1])
        expected = {what: value for what, value in expected.items() if what.startswith("0.")}
    feed, layer = replayed(fed, device), on(layer_of(case), device)
    x, _, mask = (None if t is None else t.to(device) for t in fed[0])
    with backends.use(backend), watched() as who:
        said = backends.explain(layer, x, mask)
        assert not who
        actual = train(layer, case, feed)
    if not served:
        del actual["evaluation"]
    same(actual, expected, arithmetic(case))
    server, calls = said.split()[0], sum(map(sum, case.windows))
    evaluations = case.kind in ("sample", "instance")  # take statistics in evaluation, too
    assert who == {(server, "forward"): calls + evaluations, (server, "backward"): calls}
    assert (server == backend) == served, said
    for sentence in said.removesuffix(".").split(". ")[1:]:  # why the faster ones do not, in a few words
        declined, reason = sentence.split(" does not: ")
        assert declined in REGISTERED
        assert 2 <= len(reason.split()) <= 30
    assert served or f"{backend} does not: " in said
    for what, value in actual.items():
        if "output" in what or "input" in what:
            assert value.dtype == case.dtypes[0]
            assert value.device.type == device


@every_backend
def test_a_backend_serves_something(backend):
    """Or its tests would compare plain torch with itself."""
    assert sum(serves(backend, case, DEVICES[backend]) for case in CASES.values()) >= 10


@every_pair
def test_any_call(backend, kind):
    """Sizes, settings, layouts and schedules drawn together."""

    @settings(max_examples=40 if kind == "streaming" and backend != LAW else 15)
    @given(case=runs([kind]))
    def law_holds(case):
        agrees(case, backend, DEVICES[backend])

    law_holds()


@every_backend
@pytest.mark.parametrize("name", ["streaming (9, 5)", "batch (4, 5, 3, 3)", "sample (4, 5, 3)", "streaming BA2"])
def test_the_same_call_gives_the_same_bits(backend, name):
    device, (_, fed) = DEVICES[backend], law(name)
    with backends.use(backend):
        found = [train(on(layer_of(CASES[name]), device), CASES[name], replayed(fed, device)) for _ in range(2)]
    assert all(torch.equal(found[0][what], found[1][what]) for what in found[0])


# Data that are not finite.


@every_type
@pytest.mark.parametrize("value", [nan, -inf])
@pytest.mark.parametrize("place", ["x", "dy"])
def test_one_bad_value(backend, kind, dtypes, value, place):
    """In a channel's first element or later, in the first call or later: no state keeps it."""
    changes = [{}]
    if kind == "streaming":
        changes = [{"p": p, "center": c, "warmup": w} for p, w in ((1, 0), (2, 256)) for c in CENTERS]
        changes += [{"beta": (0.5, 0.2, 0.3)}, {"warmup": 0}]
    for number, change in enumerate(changes):
        for sample, call in ((0, 0), (4, 1)):
            layout = ("contiguous", "channels last")[number % 2]
            case = Case(
                kind,
                (9, 5, 3, 3),
                change,
                (layout, layout),
                dtypes,
                windows=((1,), (1, 1), (1,)),
                bad=(value, place, call, sample),
                seed=number,
            )
            expected, fed = law_of(case)
            layer = on(layer_of(case), DEVICES[backend])
            with backends.use(backend):
                actual = train(layer, case, replayed(fed, DEVICES[backend]))
            same(actual, expected, arithmetic(case))
            spoiled = [what for what, found in actual.items() if not found.isfinite().all()]
            assert spoiled
            assert all(what.startswith(("0.0", "1.0")[call]) for what in spoiled)
            assert all(found.isfinite().all() for found in state_of(layer).values())


# What autograd asks of a backend.

WANTED = [(), ("input",), ("weight",), ("bias",), ("input", "weight"), ("weight", "bias"), ("input", "bias"), None]


@every_pair
@pytest.mark.parametrize("shape", [(9, 5), (9, 5, 14)])
@pytest.mark.parametrize("wanted", WANTED)
def test_whatever_needs_a_gradient_gets_it(backend, kind, wanted, shape):
    """None: in training, but without gradients at all. Nothing else changes by what is asked for."""
    if kind == "instance" and len(shape) == 2:
        pytest.skip("one element per statistic, which is refused")
    layer = on(layer_of(Case(kind)), DEVICES[backend])
    plain = copy.deepcopy(layer).double()
    for _ in range(3):
        x, dy = pair_of(shape)
        results = []
        for each, name in ((layer, backend), (plain, LAW)):
            tensors = {"input": x.to(each.weight, copy=True), "weight": each.weight, "bias": each.bias}
            for what, tensor in tensors.items():
                tensor.requires_grad_(what in (wanted or ())).grad = None
            with torch.set_grad_enabled(wanted is not None), backends.use(name), watched() as who:
                y = each(tensors["input"])
                if wanted:
                    y.backward(dy.to(y))
            assert who == {(name, "forward"): 1} | ({(name, "backward"): 1} if wanted else {})
            assert [what for what, t in tensors.items() if t.grad is not None] == list(wanted or ())
            if kind == "streaming":
                each.weights_updated()
                assert int(each.grads.count) == bool(wanted)
            results.append({"output": y} | {what: tensors[what].grad for what in wanted or ()} | state_of(each))
        same(*results)


@every_type
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(backend, kind, dtypes, mode):
    """The same output and state, and training goes on."""
    layer = on(layer_of(Case(kind, dtypes=dtypes)), DEVICES[backend])
    twin, (x, dy) = copy.deepcopy(layer), pair_of((6, 5, 4), DEVICES[backend], dtypes[0])
    with backends.use(backend):
        with mode():
            y = layer(x)
        assert torch.equal(y, twin(x))
        same(state_of(layer), state_of(twin))
        same(trained(layer, x + 1, dy), trained(twin, x + 1, dy))
        same(state_of(layer), state_of(twin))


@every_pair
def test_graphs(backend, kind):
    """A graph can be kept, there is no second derivative, and a change in place is noticed."""
    layer = on(layer_of(Case(kind, settings={"beta": (0, 0, 1)} if kind == "streaming" else {})), DEVICES[backend])
    x = pair_of((6, 5, 4), DEVICES[backend])[0].requires_grad_()
    with backends.use(backend):
        y = layer(x)
        first = torch.autograd.grad(y.square().sum(), x, retain_graph=True)
        layer(x * 2)
        assert torch.equal(*first, *torch.autograd.grad(y.square().sum(), x, retain_graph=True))
        before = state_of(layer)
        with pytest.raises(RuntimeError, match=r"no second derivative.*create_graph"):
            torch.autograd.grad(y.square().sum(), x, create_graph=True)
        same(state_of(layer), before)
        for changed in (layer.weight, inner := x * 1):
            y = layer(inner)
            with torch.no_grad():
                changed.add_(1)
            with pytest.raises(RuntimeError, match="inplace operation"):
                y.sum().backward()


HOOKS = {
    "as they were": (lambda t: t, lambda t: t),
    "contiguous": (lambda t: t.contiguous(), lambda t: t),
    "transposed": (lambda t: t, lambda t: t if t.ndim < 3 else t.transpose(0, -1).contiguous().transpose(0, -1)),
    "copied": (lambda t: t.clone(), lambda t: t.clone()),
}


@every_type
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("layout", ["contiguous", "channels last"])
def test_saved_tensors_may_come_back_otherwise_laid_out(backend, kind, dtypes, hook, layout):
    case = Case(kind, shape=(6, 5, 4, 3), layouts=(layout, "contiguous"), dtypes=dtypes)
    expected, fed = law_of(case)
    with backends.use(backend), torch.autograd.graph.saved_tensors_hooks(*HOOKS[hook]):
        actual = train(on(layer_of(case), DEVICES[backend]), case, replayed(fed, DEVICES[backend]))
    same(actual, expected, arithmetic(case))


@every_streaming_backend
@pytest.mark.parametrize("dtypes", [(F32, F32), (BF16, F32), (BF16, BF16)])
def test_saved_tensors_may_come_back_in_a_wider_type(backend, dtypes):
    """As from a hook that compresses: nothing is read as what it is not."""
    case = Case(shape=(6, 5, 4, 3), dtypes=dtypes)
    expected, fed = law_of(case)
    with backends.use(backend), torch.autograd.graph.saved_tensors_hooks(lambda t: t.double(), lambda t: t):
        actual = train(on(layer_of(case), DEVICES[backend]), case, replayed(fed, DEVICES[backend]))
    same(actual, expected, arithmetic(case))


@every_type
def test_inputs_and_gradients_are_never_changed(backend, kind, dtypes):
    device, case = DEVICES[backend], Case(kind, dtypes=dtypes)
    layer = on(layer_of(case), device)
    x, dy, _ = (None if t is None else t.to(device) for t in feeder(case)(layer))
    tensors = x, dy, layer.weight, layer.bias
    before = [t.detach().clone() for t in tensors]
    with backends.use(backend):
        y = trained(layer, x, dy)["output"]
    assert y.stride() == x.stride()
    assert all(torch.equal(t, b) for t, b in zip(tensors, before, strict=True))


@every_pair
def test_autocast_leaves_it_alone(backend, kind):
    layer, (x, dy) = on(layer_of(Case(kind)), DEVICES[backend]), pair_of((6, 5, 4), DEVICES[backend])
    twin = copy.deepcopy(layer)
    with backends.use(backend):
        expected = trained(twin, x, dy)
        with torch.autocast(DEVICES[backend], torch.bfloat16):
            actual = trained(layer, x, dy)
    assert all(torch.equal(value, expected[what]) for what, value in actual.items())


def rounded_once(actual, exact, what):
    """To the nearest number of its type, after arithmetic in float32."""
    error, nearest = (actual.double() - exact).abs(), torch.finfo(actual.dtype).eps / 2 * exact.abs()
    assert (error <= nearest + 1e-5 * exact.abs().max()).all(), what


@every_streaming_backend
@pytest.mark.parametrize("layout", ["contiguous", "channels last"])
@pytest.mark.parametrize("dtypes", [(BF16, F32), (BF16, BF16)])
def test_half_precision_is_rounded_once(backend, layout, dtypes):
    """Output and gradients; the state is as exact as in float32."""
    once = ((1,), (1,), (1,))  # autograd rounds again where gradients of several calls add up
    case = Case(shape=(9, 5, 7, 3), layouts=(layout, layout), dtypes=dtypes, windows=once)
    expected, fed = law_of(case)
    with backends.use(backend):
        actual = train(on(layer_of(case), DEVICES[backend]), case, replayed(fed, DEVICES[backend]))
    for what, value in actual.items():
        if value.is_floating_point():
            rounded_once(value.cpu(), expected[what].cpu().double(), what)
    assert all(value.dtype == dtypes[1] for what, value in actual.items() if what.endswith(("weight", "bias")))


# One layer, whose inputs and parameters change their type from call to call.
TYPES = {
    "input": [(F32, F32), (BF16, F32), (BF16, F32), (F32, F32), (F32, F32), (torch.float16, F32), (BF16, F32)],
    "layer": [(BF16, F32), (BF16, BF16), (BF16, BF16), (BF16, F32), (F32, BF16), (F32, F32)],
    "both": [(F32, F32), (BF16, BF16), (F32, F32), (torch.float64, torch.float64), (BF16, BF16)],
}


@every_pair
@pytest.mark.parametrize("changes", TYPES)
@pytest.mark.parametrize("autocast", [False, True])
def test_types_may_change_from_call_to_call(backend, kind, changes, autocast):
    """No tensor is read as what another call gave: also where sizes, strides and settings are the same."""
    device, results = DEVICES[backend], []
    first, batches = on(layer_of(Case(kind)), device), [pair_of((6, 5, 4), device) for _ in TYPES[changes]]
    for name in (backend, LAW):
        layer, found = copy.deepcopy(first), {}
        with backends.use(name), torch.autocast(device, BF16, enabled=autocast):
            for i, ((x, dy), (taken, stored)) in enumerate(zip(batches, TYPES[changes], strict=True)):
                if layer.weight.dtype != stored:  # else the next call is a steady one
                    layer.to(stored)
                now = trained(layer, x.to(taken), dy.to(taken))
                assert now["output"].dtype == now["input"].dtype == taken
                assert now["weight"].dtype == now["bias"].dtype == stored
                found |= {f"{what} {i}": value for what, value in now.items()}
                if kind == "streaming":
                    layer.weights_updated()
        results.append(found | state_of(layer))
    same(*results, arithmetic(Case()))


@every_pair
@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_parameter_may_change_its_type_under_the_hands_of_a_layer(backend, kind, name):
    """As `parameter.data = ...` does it, of which a module hears nothing."""
    device, results = DEVICES[backend], []
    first, batches = on(layer_of(Case(kind)), device), [pair_of((6, 5, 4), device, BF16)[0] for _ in range(5)]
    for server in (backend, LAW):
        layer, found = copy.deepcopy(first), {}
        with backends.use(server):
            for i, (x, dtype) in enumerate(zip(batches, (F32, F32, BF16, BF16, F32), strict=True)):
                parameter = getattr(layer, name)
                parameter.data = parameter.data.to(dtype)
                found[f"output {i}"] = layer(x)
        results.append(found | state_of(layer))
    same(*results, arithmetic(Case()))


@every_pair
@pytest.mark.parametrize("offset", [10, 1000])
def test_far_from_zero(backend, kind, offset):
    """What float32 loses is in proportion to the distance from 0, as it is in the input itself."""
    layer, (x, dy) = on(layer_of(Case(kind)), DEVICES[backend]), torch.randn(2, 16, 5, 8, device=DEVICES[backend])
    x, dy = 2 * x, 2 * dy + 1
    plain = copy.deepcopy(layer).double()
    with backends.use(backend):
        actual = trained(layer, x + offset, dy)
    with backends.use(LAW):
        expected = trained(plain, (x + offset).double(), dy.double())
    for what, value in expected.items():
        assert (actual[what] - value).abs().max() <= 1e-6 * offset * value.abs().max(), what


# What is unusual about a tensor: whoever serves the call, the result is the law's.


class Own(torch.Tensor):
    """Somebody's tensor, of which only plain torch asks nothing special."""


def replaced(name, change):
    def apply(layer):
        setattr(layer, name, nn.Parameter(change(getattr(layer, name).detach())))

    return apply


def transposed_state(layer):
    layer.load_state_dict({k: v.t().contiguous().t() if v.ndim == 2 else v for k, v in layer.state_dict().items()})


UNUSUAL = {
    "gain with gaps": replaced("weight", lambda w: w.repeat_interleave(2)[::2]),
    "bias with gaps": replaced("bias", lambda b: b.repeat_interleave(2)[::2]),
    "gain of another type": replaced("weight", lambda w: w.double()),
    "bias of another type": replaced("bias", lambda b: b.double()),
    "one gain for all": replaced("weight", lambda w: w[:1]),
    "state loaded from transposed tensors": transposed_state,
    "settings as lists": lambda layer: setattr(layer, "beta", [0.5, 0.2, 0.3]),
    "a tensor of another class": None,
}


@every_pair
@pytest.mark.parametrize("case", UNUSUAL)
def test_unusual_tensors(backend, kind, case):
    """Before the first call, and after a steady one; explain names who serves it."""
    if case == "a tensor of another class" and torch.__version__ < "2.6":
        pytest.skip("this torch has no subclasses under a dispatch mode")
    device = DEVICES[backend]
    first = on(layer_of(Case(kind)), device)
    for steady in (False, True):
        results, batches = [], [pair_of((6, 5, 4), device) for _ in range(3)]
        for name in (backend, LAW):
            layer, found = copy.deepcopy(first), {}
            with backends.use(name):
                if steady:
                    trained(layer, *batches[0])
                if UNUSUAL[case]:
                    UNUSUAL[case](layer)
                for i, (x, dy) in enumerate(batches[1:]):
                    x = x if UNUSUAL[case] else x.as_subclass(Own)
                    server = backends.explain(layer, x).split()[0]
                    with watched() as who:
                        found |= {f"{what} {i}": value for what, value in trained(layer, x, dy).items()}
                    assert set(who) == {(server, "forward"), (server, "backward")}
                    found |= {f"{what} {i}": value for what, value in state_of(layer).items()}
            results.append({what: value.as_subclass(torch.Tensor) for what, value in found.items()})
        same(*results, arithmetic(Case()))


@every_pair
@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_gain_or_bias_of_another_size_is_never_read(backend, kind, name):
    """Not before the first call, and not after one that was served: torch says what is wrong."""
    device = DEVICES[backend]
    layer, (x, _) = on(layer_of(Case(kind)), device), pair_of((6, 5, 4), device)
    with backends.use(backend):
        for _ in range(2):
            getattr(layer, name).data = torch.ones(3, device=device)
            with pytest.raises(RuntimeError):
                layer(x)
            getattr(layer, name).data = torch.ones(5, device=device)
            layer(x)


# The state of streaming layers.


def step(layer, seed, shape=(9, 5)):
    torch.manual_seed(seed)
    trained(layer, *pair_of(shape, layer.mean.device))
    layer.weights_updated()


@every_streaming_backend
def test_state_that_was_handed_out_does_not_change(backend):
    with backends.use(backend):
        layer = on(StreamingNorm(5), DEVICES[backend])
        step(layer, 0)
        held = [layer.mean, layer.sigma, *vars(layer.stats).values(), *vars(layer.grads).values()]
        held += [value for key, value in layer.state_dict().items() if not key.startswith("running_")]
        before = [t.clone() for t in held]
        for seed in (1, 2):
            step(layer, seed)
    assert all(torch.equal(a, b) for a, b in zip(held, before, strict=True))
    assert not torch.equal(layer.mean, held[0])


@every_streaming_backend
@pytest.mark.parametrize("twin_of", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_copies_go_their_own_ways(backend, twin_of):
    with backends.use(backend):
        layer = on(StreamingNorm(5), DEVICES[backend])
        step(layer, 0)
        twin = twin_of(layer)
        before = state_of(twin)
        step(layer, 1)
        assert all(torch.equal(value, before[name]) for name, value in state_of(twin).items())
        with watched() as who:
            step(twin, 1)
        assert set(who) == {(backend, "forward"), (backend, "backward")}
        assert all(torch.equal(value, state_of(layer)[name]) for name, value in state_of(twin).items())


@every_streaming_backend
@pytest.mark.parametrize("shape", [(9, 5), (9, 5, 3)])
def test_a_layer_moved_between_forward_and_backward(backend, shape):
    layer = on(StreamingNorm(5, affine=False), DEVICES[backend])
    plain, (x, dy) = copy.deepcopy(layer), pair_of(shape, DEVICES[backend])
    leaf = x.clone().requires_grad_()
    with backends.use(backend):
        y = layer(leaf)
        layer.double()
        y.backward(dy)
    with backends.use(LAW):
        expected = trained(plain, x, dy)
    close(leaf.grad, expected["input"])
    same(state_of(layer), state_of(plain.double()), arithmetic(Case()))
    assert layer.grads.short.dtype == torch.float64
    assert int(layer.grads.count) == 1


@every_streaming_backend
def test_backends_may_change_from_call_to_call(backend):
    """A state is everybody's: what one began another goes on with, also between forward and backward."""
    layer = on(layer_of(Case()), DEVICES[backend])
    plain = copy.deepcopy(layer).double()
    for i in range(6):
        x, dy = pair_of((6, 5, 4), DEVICES[backend])
        with backends.use((backend, LAW)[i % 2]):
            leaf = x.clone().requires_grad_()
            y = layer(leaf)
        with backends.use((backend, LAW)[i // 2 % 2]), watched() as who:
            y.backward(dy)
        assert who == {((backend, LAW)[i % 2], "backward"): 1}  # which has been decided
        with backends.use(LAW):
            expected = trained(plain, x.double(), dy.double())
        same({"output": y, "input": leaf.grad}, {what: expected[what] for what in ("output", "input")})
        same(state_of(layer), state_of(plain))
        for each in (layer, plain):
            each.weights_updated()


@every_streaming_backend
def test_with_a_scaler(backend):
    """The scale of the loss doubles after every good step, and one step overflows."""
    device = DEVICES[backend]
    ours = nn.Sequential(nn.Linear(4, 6), StreamingNorm(6, beta=(0.5, 0.2, 0.3)), nn.Tanh(), nn.Linear(6, 2)).to(device)
    plain, batches = copy.deepcopy(ours), torch.randn(7, 8, 4, device=device)
    for model, name in ((ours, backend), (plain, LAW)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler(device, init_scale=64.0, growth_interval=1)
        attach(optimizer, model, scaler=scaler)
        with backends.use(name):
            for i, x in enumerate(batches):
                scaler.scale(model(x).square().mean() * (inf if i == 3 else 1)).backward()
                if i != 4:  # two batches in one window
                    scaler.step(optimizer)
                    scaler.update()
                    optimizer.zero_grad()
        assert scaler.get_scale() == 1024
    same(state_of(ours), state_of(plain), 2e-5)


@every_streaming_backend
@pytest.mark.parametrize("layout", ["contiguous", "channels last"])
@pytest.mark.parametrize("center", CENTERS)
def test_only_the_input_stays_alive_between_forward_and_backward(backend, layout, center):
    case = Case(shape=(8, 16, 32, 32), layouts=(layout, layout), settings={"center": center})
    layer = on(layer_of(case), DEVICES[backend])
    x = feeder(case)(layer)[0].to(DEVICES[backend]).requires_grad_()
    saved = {}
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.setdefault(t.data_ptr(), t), lambda t: t)
    with backends.use(backend), hooks:
        layer(x)
    assert x.data_ptr() in saved
    assert sum(t.untyped_storage().nbytes() for t in saved.values()) <= 1.01 * x.nbytes


@pytest.mark.skipif(top_hooks is None, reason="this torch does not tell which segment it runs again")
@every_type
def test_a_call_that_checkpointing_repeats_is_the_same(backend, kind, dtypes):
    """Nothing is pushed twice, and the backend that served a call repeats it."""
    device = DEVICES[backend]
    layer = on(layer_of(Case(kind, dtypes=dtypes)), device)
    twin = copy.deepcopy(layer)
    for _ in range(2):
        (x, dy), results = pair_of((6, 5, 4), device, dtypes[0]), []
        for each, repeats in ((layer, True), (twin, False)):
            leaf = x.clone().requires_grad_()
            with backends.use(backend), watched() as who:
                y = checkpoint(each, leaf, use_reentrant=False) if repeats else each(leaf)
                y.backward(dy)
            assert {name for name, _ in who} == {backend}
            assert who[backend, "forward"] + who[backend, "repeat"] == 1 + repeats
            results.append({"output": y, "input": leaf.grad} | state_of(each))
            if kind == "streaming":
                each.weights_updated()
        same(*results)


# The compiler: a compiled call is served by the same backends, through operators.

COMPILED = {
    "several calls": Case(settings={"beta": (0.5, 0.2, 0.3), "kappa": (0.9, 0.2, 0.4, 0.7)}, windows=((2,), (1, 1))),
    "chained, p=1": Case(shape=(2, 5), settings={"p": 1, "center": "zero"}, chained=True, windows=((1,), (3,), (2,))),
    "channels last": Case(
        shape=(4, 5, 3, 3),
        layouts=("channels last", "transposed"),
        windows=((1,), (1,), (2,)),
        bad=(nan, "x", 1, 3),
    ),
    "channels in the last dimension": Case(
        settings={"channel_dim": -1, "warmup": 0, "center": "mean"}, absent=("weight", "bias"), windows=((2,), (1,))
    ),
    "p=3, masked": Case(settings={"p": 3}, masked=True, windows=((1,), (2,))),
    "SP1, bfloat16 input": Case(settings={"ref": "SP1"}, dtypes=(BF16, F32), windows=((1,), (2,))),
    "bfloat16 input": Case(shape=(4, 5, 3, 3), dtypes=(BF16, F32), windows=((1,), (2,))),
    "bfloat16": Case(shape=(4, 5, 3, 3), layouts=("channels last",) * 2, dtypes=(BF16, BF16), windows=((1,), (2,))),
    "BA2, float64": Case(settings={"ref": "BA2"}, dtypes=(torch.float64, torch.float64), windows=((1,), (2,))),
    **{kind: Case(kind, windows=((1,), (2,))) for kind in ("batch", "sample")},
}
# Those that each backend serves; plain torch gets what all others decline.
SERVED = [
    (backend, name) for name, case in COMPILED.items() for backend in REGISTERED if serves_compiled(backend, case)
]


@pytest.mark.filterwarnings("ignore")  # of the compiler, about itself
@pytest.mark.skipif(torch.__version__ < "2.13", reason="older compilers refuse some of this; see speed.md")
@pytest.mark.parametrize(("backend", "name"), SERVED)
def test_compiled_calls_are_the_same(backend, name):
    """F and G of a streaming layer are the backend's, the rest is what the compiler makes."""
    torch._dynamo.reset()
    case, device = COMPILED[name], DEVICES[backend]
    expected, fed = law_of(case)
    layer = on(layer_of(case), device)
    called = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with backends.use(backend), watched() if case.kind == "streaming" else nullcontext() as who:
        actual = train(layer, case, replayed(fed, device), called, between=False)
    same(actual, {what: value for what, value in expected.items() if "after call" not in what}, arithmetic(case))
    if case.kind == "streaming":
        calls = sum(map(sum, case.windows))
        assert who == {(backend, "F"): calls, (backend, "G"): calls}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(torch.__version__ < "2.13", reason="older compilers refuse some of this; see speed.md")
@pytest.mark.parametrize("backend", STREAMING[:1])
def test_the_state_may_be_saved_before_the_backward_pass_of_a_compiled_call(backend):
    """As without the compiler: what was handed out stays as it was, and what comes back is streamed all the same."""
    torch._dynamo.reset()
    with backends.use(backend):
        layer = on(StreamingNorm(5), DEVICES[backend])
        called, ys = torch.compile(layer, fullgraph=True, backend="aot_eager"), []
        for _ in range(2):
            ys.append(called(torch.randn(40, 5, device=DEVICES[backend], requires_grad=True)).square().sum())
            layer.state_dict()
        torch.autograd.backward(ys)
    assert int(layer.grads.count) == 2


# Which backends there are, and which one serves a call.


@contextmanager
def among(*more, missing=None):
    """A world in which there are more backends, and one cannot be used for a reason."""
    known = {backend.name: backend for backend in [*backends.registered().values(), *more]}
    known = dict(sorted(known.items(), key=lambda item: item[1].rank))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backends, "registered", lambda: known)
        for variable in ("STREAMNORM_PLAIN", "STREAMNORM_BACKEND"):
            patch.delenv(variable, raising=False)
        patch.setattr(backends, "in_use", None)
        patch.setattr(backends, "among", "")
        for name, reason in (missing or {}).items():
            patch.setattr(known[name], "missing", lambda reason=reason: reason)
        backends.active()
        yield


class Squares(type(backends.LAW)):
    """A backend that serves p = 2 without a mask, as somebody might add one."""

    name, rank = "squares", 1

    def declines(self, call):
        reasons = {"it knows squares alone": call.config.p != 2, "it has no mask": call.masked}
        return next((reason for reason, applies in reasons.items() if applies), None)


def test_backends_are_asked_in_the_order_of_their_rank():
    known = list(backends.registered().values())
    assert [backend.rank for backend in known] == sorted(backend.rank for backend in known)
    assert all(name == backend.name for name, backend in backends.registered().items())
    assert known[-1].name == LAW
    assert backends.available() == [each.name for each in known if each.missing() is None]


def test_the_law_serves_every_call():
    assert backends.registered()[LAW].missing() is None
    for case in CASES.values():
        assert serves(LAW, case)
        assert serves(LAW, case, "cuda", compiled=True)


def test_a_new_backend_is_asked_and_may_decline():
    x, mask = torch.randn(6, 5, 4), torch.ones(6, 4, dtype=torch.bool)
    with among(Squares()):
        assert backends.available()[0] == "squares"
        for settings_, given_mask, reason in (
            ({}, None, None),
            ({"p": 3}, None, "it knows squares alone"),
            ({}, mask, "it has no mask"),
        ):
            layer = StreamingNorm(5, **settings_)
            said = backends.explain(layer, x, given_mask)
            with watched() as who:
                layer(x, mask=given_mask)
            server = said.split()[0]
            assert who == {(server, "forward"): 1}
            assert (server == "squares") == (reason is None)
            assert reason is None or f"squares does not: {reason}." in said
    assert "squares" not in backends.available()
    layer = StreamingNorm(5)
    with watched() as who:
        layer(x)
    assert ("squares", "forward") not in who


@pytest.mark.parametrize("backend", [name for name in REGISTERED if name != LAW])
def test_a_backend_that_is_missing(backend):
    """Calls are served by the others, and whoever asks for it is told why."""
    kind, device = kinds_of(backend)[0], DEVICES[backend]
    layer, x = on(layer_of(Case(kind)), device), torch.randn(6, 5, 4, device=device)
    served = backends.explain(layer, x).split()[0]
    with among(missing={backend: "there is no such machine"}):
        assert backend not in backends.available()
        if served == backend:  # a slower one is not spoken of
            assert f"{backend} does not: there is no such machine." in backends.explain(layer, x)
        with watched() as who:
            layer(x)
        assert who
        assert all(name != backend for name, _ in who)
        words = f"{backend}.*cannot be used here: there is no such machine"
        with pytest.raises(ValueError, match=words), backends.use(backend):
            pass
    assert backend in backends.available() or backends.registered()[backend].missing()


def test_use_is_a_context():
    layer, x = StreamingNorm(5), torch.randn(6, 5)
    before = backends.active()
    with backends.use(LAW):
        inside = backends.active()
        for name in backends.available():
            if name != LAW:
                assert f"{name} does not: switched off by use()." in backends.explain(layer, x)
        for name in backends.available():
            with suppress(KeyError), backends.use(name):
                assert [each.name for each in backends.active().backends] == list(dict.fromkeys([name, LAW]))
                raise KeyError
            assert backends.active() is inside
        heard = []
        thread = threading.Thread(target=lambda: heard.append(backends.active()))  # it holds for all threads
        thread.start()
        thread.join()
        assert heard == [inside]
    assert backends.active() is before


@pytest.mark.parametrize("name", ["", "fast", "Plain", "plain,plain"])
def test_names_that_are_unknown(name):
    before = backends.active()
    with pytest.raises(ValueError, match=f"backend {name!r}: there is .*{LAW}"), backends.use(name):
        pass
    assert backends.active() is before


def test_explain_changes_nothing():
    for kind in KINDS:
        layer, x = layer_of(Case(kind)), torch.randn(6, 5, 4)
        twin, before = copy.deepcopy(layer), state_of(layer)
        backends.explain(layer, x)
        same(state_of(layer), before)
        assert torch.equal(layer(x), twin(x))
    located = StreamingNorm(5, ref="BA6")
    backends.explain(located, torch.randn(6, 5, 4))
    located(torch.randn(6, 5, 3))  # it is bound to a spatial size by calls alone


def test_explain_of_other_calls():
    with pytest.raises(TypeError, match="Linear is no "):
        backends.explain(nn.Linear(3, 3), torch.randn(2, 3))
    with pytest.raises(ValueError, match="channels"):
        backends.explain(StreamingNorm(5), torch.randn(2, 3))
    assert "served by no backend" in backends.explain(StreamingNorm(5).eval(), torch.randn(2, 5))


PROCESSES = """
import json, os, sys
import torch, torch._dynamo
for number, variables in enumerate(json.loads(sys.argv[1])):
    if os.fork() == 0:  # torch is imported once, streamnorm by each
        os.environ.update(variables)
        try:
            import streamnorm
            from streamnorm import backends
            told = [backend.name for backend in backends.active().backends]
            for net, x in (
                (streamnorm.StreamingNorm(3), torch.randn(4, 3)),
                (streamnorm.SampleNorm(3), torch.randn(4, 3)),
                (streamnorm.GRU(3, 5), torch.randn(6, 4, 3)),
            ):
                optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
                for _ in range(3):
                    y = net(x)
                    (y if isinstance(y, torch.Tensor) else y[0]).square().mean().backward()
                    optimizer.step()
                assert all(torch.isfinite(value).all() for value in net.state_dict().values())
        except ValueError as error:
            told = str(error)
        print(json.dumps([number, told]), flush=True)
        os._exit(0)
    os.wait()
"""


def test_the_environment_chooses_for_a_process():
    """STREAMNORM_BACKEND names a backend; STREAMNORM_PLAIN is older, and stronger."""
    everyone = backends.available()
    wanted = [({}, everyone), ({"STREAMNORM_PLAIN": "0"}, everyone), ({"STREAMNORM_PLAIN": "1"}, [LAW])]
    wanted += [({"STREAMNORM_BACKEND": LAW}, [LAW]), ({"STREAMNORM_BACKEND": "", "STREAMNORM_PLAIN": ""}, everyone)]
    wanted += [({"STREAMNORM_BACKEND": name}, [name, LAW]) for name in everyone if name != LAW]
    wanted += [({"STREAMNORM_BACKEND": everyone[0], "STREAMNORM_PLAIN": "1"}, [LAW])]
    wanted += [({"STREAMNORM_BACKEND": "fast"}, f"backend 'fast': there is {', '.join(REGISTERED)}")]
    environment = {k: v for k, v in os.environ.items() if k not in ("STREAMNORM_PLAIN", "STREAMNORM_BACKEND")}
    command = [sys.executable, "-c", PROCESSES, json.dumps([variables for variables, _ in wanted])]
    done = subprocess.run(command, env=environment | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    told = dict(map(json.loads, done.stdout.splitlines()))
    assert told == {number: names for number, (_, names) in enumerate(wanted)}, done.stderr
