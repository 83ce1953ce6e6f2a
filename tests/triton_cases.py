"""Kernels for GPUs, run by NumPy in Triton's interpreter: `test_triton.py` runs this file with TRITON_INTERPRET=1.

Shapes are small, as each program of a kernel takes milliseconds here. With the same variable the whole conformance
suite runs through the interpreter, too: pytest tests/test_conformance.py -k triton -W ignore::RuntimeWarning
"""

import copy
from collections import Counter
from contextlib import contextmanager
from functools import partial
from math import inf, nan

import pytest
import torch
from conformance import BF16, F16, F32, Case, agrees, close, data, same, state_of
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime.interpreter import InterpretedFunction

from streamnorm import GRU, DecoupledUpdate, StreamingNorm, backends
from streamnorm.backends.triton import launch, tiling
from streamnorm.core.algorithm import fold_gradients, fold_statistics, stream_gradients, stream_input
from streamnorm.core.config import Config
from streamnorm.core.state import H1, new_state, to_dict, write, write_stream

_call = InterpretedFunction.__call__


def _call_on_device(self, *arguments, **keywords):
    """A launch has prepared the language for all of our functions; half of the time goes to doing it again in each."""
    if self.fn.__module__.startswith("streamnorm."):
        return self.rewrite()(*arguments, **keywords)
    return _call(self, *arguments, **keywords)


InterpretedFunction.__call__ = _call_on_device

WINDOWS = ((1,), (2,))
PLANES, ROWS = (3, 2, 5), (7, 5)
CASES = {
    **{f"p={p} {center}": Case(shape=PLANES, settings={"p": p, "center": center}) for p in (1, 2)
       for center in ("mean", "running", "zero")},
    **{f"p={p} {center}, rows": Case(shape=ROWS, settings={"p": p, "center": center}, windows=WINDOWS) for p in (1, 2)
       for center in ("mean", "running", "zero")},
    "channels last": Case(shape=(3, 2, 3, 2), layouts=("channels last", "transposed"), windows=WINDOWS),
    "rows with gaps": Case(shape=ROWS, layouts=("with gaps", "expanded"), windows=WINDOWS),
    "one row": Case(shape=(1, 5), windows=((1,), (1,), (1, 1))),
    "guard": Case(shape=(2, 3), settings={"beta": (0.5, 0.2, 0.3)}, windows=((1,), (1,), (1, 1), (2,))),
    "the paper": Case(shape=ROWS, settings={"guard": False, "warmup": 0, "center": "mean"}, windows=WINDOWS),
    "part of warmup": Case(shape=ROWS, settings={"warmup": 20.5, "kappa": (0.9, 0.2, 0.4, 0.7)}),
    "no gain, no bias": Case(shape=ROWS, absent=("weight", "bias"), windows=WINDOWS),
    "bfloat16": Case(shape=ROWS, dtypes=(BF16, BF16), windows=WINDOWS),
    "float16 on float32": Case(shape=ROWS, dtypes=(F16, F32), absent=("bias",), windows=WINDOWS),
    "bad input": Case(shape=(9, 5, 3), windows=WINDOWS, bad=(-inf, "x", 1, 4)),
    "bad first input": Case(shape=ROWS, settings={"p": 1}, windows=WINDOWS, bad=(-inf, "x", 0, 0)),
    "bad gradient": Case(shape=ROWS, windows=WINDOWS, bad=(nan, "dy", 1, 4)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_it_is_as_plain_torch_computes_it(name):
    agrees(CASES[name], "triton")


def test_it_serves_nobody_who_has_not_asked():
    said = backends.explain(StreamingNorm(5), torch.randn(9, 5))
    assert not said.startswith("triton")


@pytest.mark.parametrize("settings", [{"p": 1, "center": "mean"}, {"p": 1}, {}])
@pytest.mark.parametrize("shape", [(3, 3, 9), (11, 3)])
def test_any_number_of_tiles_parts_and_blocks(settings, shape, monkeypatch):
    """Small sizes take small inputs through every loop."""
    for name, size in {"TILE": 8, "LOCATIONS": 4, "CHANNELS": 2, "VECTOR": 2, "MOST_PARTS": 3}.items():
        monkeypatch.setattr(tiling, name, size)
    sizes = tiling.tiling_of(torch.empty(shape))
    assert sizes.blocks > 1
    assert sizes.adders()[0] > 1
    assert sizes.adders()[1] > 1 or len(shape) == 2
    agrees(Case(shape=shape, settings=settings, windows=((1,), (1,))), "triton")


def test_data_far_from_zero_lose_no_digits():
    """Also where the first elements of a channel are not like the others."""
    x = 1000 + 2 * torch.randn(64, 3)
    x[:4] = 0
    for settings in ({}, {"center": "mean"}):
        layer = StreamingNorm(3, **settings)
        plain = copy.deepcopy(layer).double()
        with backends.use("triton"):
            y = layer(x)
        with backends.use("plain"):
            close(y, plain(x.double()), tolerance=1e-4)
        close(layer.sigma, plain.sigma, tolerance=1e-6)


# F and G on vectors.


@pytest.mark.parametrize("settings", [{}, {"p": 1, "center": "mean", "beta": (0.4, 0.3, 0.2)}, {"guard": False}])
def test_statistics_and_gradients_on_vectors(settings):
    config, like = Config(**settings), torch.empty(0)
    ours, law = new_state((5,), like), new_state((5,), like.double())
    for i in range(4):
        x = data((2, 5))[0]
        with torch.no_grad():
            after, own, kept = stream_input(config, fold_statistics(config, law), x, None, i != 1)
            write(law, after, H1)
        s = own.mean.flatten().float(), own.sigma.flatten().float()
        numbers = launch.push_statistics(config, ours, *s, 2, 2, i != 1)
        g, scale = torch.randn(2, 5).double(), torch.tensor(8.0) if i == 2 else None
        grads = fold_gradients(config, law.grads, kept.window, kept.total)
        grads, passed_on = stream_gradients(config, grads, kept, g, scale)
        write_stream(law.grads, grads)
        flow = launch.push_gradients(config, ours.grads, numbers[15:], *g.float(), scale)
        close(flow, passed_on, "what flows on")
        close(numbers[15:25], torch.cat([kept.mean, kept.sigma]).flatten(), "s_hat")
        same(to_dict(ours), to_dict(law), 1e-5)
        for state in (ours, law):
            state.stats.pending.fill_(i != 0)
            state.grads.pending.fill_(i != 0)


@pytest.mark.filterwarnings("ignore")  # of the compiler, about itself
@pytest.mark.skipif(torch.__version__ < "2.13", reason="older compilers refuse some of this; see speed.md")
def test_the_streams_of_a_compiled_layer():
    """A launch forward and one backward; the rest is what the compiler makes."""
    torch.manual_seed(0)
    ours = StreamingNorm(5)
    plain, called = copy.deepcopy(ours).double(), torch.compile(ours, fullgraph=True, backend="aot_eager")
    for _ in range(3):
        x, dy = data((4, 5, 3))
        with backends.use("triton"), launched() as found:
            called(x.float().requires_grad_()).backward(dy.float())
        assert names(found) == ["push_statistics", "push_gradients"]
        with backends.use("plain"):
            plain(x.requires_grad_()).backward(dy)
        for layer in (ours, plain):
            layer.weights_updated()
    same(state_of(ours), state_of(plain), 1e-5)


# Launches, and what the host asks.


@contextmanager
def launched():
    """What is launched; what the interpreter does for that is nobody's to see."""
    found, start = [], launch.start

    def noted(*launch_of):
        found.append(launch_of)
        with _disable_current_modes():
            start(*launch_of)

    launch.start = noted
    try:
        yield found
    finally:
        launch.start = start


def names(found):
    return [kernel.__name__ for kernel, *_ in found]


FREE = {"empty", "empty_like", "new_empty", "empty_strided", "detach", "slice", "select", "view", "alias", "set_"}


class Operations(TorchDispatchMode):
    """Counts operators of torch, but those that only make or look at a tensor, which launch nothing on a GPU.

    Refuses those by which the host reads a number of a device, or waits for it.
    """

    WAITS = ("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select", "unique", "_unique2")

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in self.WAITS, f"{func} reads a number"
        self.found[name] += name not in FREE
        return func(*args, **(kwargs or {}))


FORWARD, BACKWARD = ["sum_powers", "push_statistics", "normalize"], ["sum_gradients", "push_gradients", "pull_back"]


@pytest.mark.parametrize("settings", [{}, {"center": "mean"}, {"p": 1}, {"p": 1, "center": "zero"}])
@pytest.mark.parametrize("shape", [PLANES, ROWS])
def test_three_launches_forward_and_three_backward(settings, shape):
    """And nothing else: no operator of torch that would be one more. The second call is a steady one."""
    layer, (x, dy) = StreamingNorm(shape[1], **settings), (t.float() for t in data(shape))
    x.requires_grad_()
    with backends.use("triton"):
        for _ in range(2):
            with launched() as forward, Operations() as asked:
                y = layer(x)
            with launched() as backward, Operations() as asked_back:
                grads = torch.autograd.grad(y, [x, layer.weight, layer.bias], dy)
    assert (names(forward), names(backward)) == (FORWARD, BACKWARD)
    assert +asked.found == Counter()
    assert +asked_back.found == Counter()
    assert len(grads) == 3


def test_the_mean_of_the_mini_batch_with_p_1_takes_a_pass_more():
    layer, x = StreamingNorm(5, p=1, center="mean"), torch.randn(7, 5, requires_grad=True)
    with backends.use("triton"), launched() as found:
        layer(x).sum().backward()
    assert names(found) == ["sum_powers", *FORWARD, *BACKWARD]


def test_no_gradient_of_the_input_no_launch_for_it():
    layer = StreamingNorm(5)
    with backends.use("triton"), launched() as found:
        layer(torch.randn(7, 5)).sum().backward()
    assert names(found) == FORWARD + BACKWARD[:2]


def test_norms_of_gates_read_their_columns_of_the_products():
    """Three launches for each norm and timestep, and no copy, where a layer is called timestep by timestep."""
    ours = GRU(3, 5, reset_after=True)
    plain, x, forward = copy.deepcopy(ours).double(), torch.randn(2, 7, 3), []
    for name, each in (("triton", ours), ("plain", plain)):
        with backends.use(name), launched() as found:
            output = each(x.to(each.weight_hh_l0))[0]
            forward.append(len(found))
            output.square().sum().backward()
    assert forward == [2 * 6 * 3, 0]
    gradients = [{name: p.grad for name, p in each.named_parameters()} for each in (ours, plain)]
    same(*(found | state_of(each) for found, each in zip(gradients, (ours, plain), strict=True)), 1e-5)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), StreamingNorm(6), nn.Tanh(), nn.Linear(6, 5), StreamingNorm(5, p=1))


@pytest.mark.parametrize("backend", ["triton", "plain"])
@pytest.mark.parametrize("wrap", [lambda optimizer: optimizer, lambda optimizer: DecoupledUpdate(optimizer, 2)])
def test_the_host_reads_no_number_in_a_training(backend, wrap):
    """Forward, backward, the step of the optimizer, and what the layers hear of it, over several windows."""
    model = net()
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1))
    batches = torch.randn(4, 8, 4)
    with backends.use(backend), launched(), Operations() as asked:
        for x in batches:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    assert asked.found["fill_"]  # the marks of the updates
    assert float(model[1].stats.count) >= 1


def test_what_reads_a_number_is_noticed():
    with pytest.raises(AssertionError, match="reads a number"), Operations():
        float(torch.ones(1).sum())


# A training step that is recorded once and replayed, as CUDA graphs do.


class Record(TorchDispatchMode):
    """Notes operators, and launches among them, to do it all again on the same tensors."""

    def __init__(self, launches):
        super().__init__()
        self.launches, self.done = launches, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.note_launches()
        result = func(*args, **(kwargs or {}))
        self.done.append((func, args, kwargs or {}, result))
        return result

    def note_launches(self):
        self.done += [(launch.start, each, {}, None) for each in self.launches]
        self.launches.clear()


@torch.no_grad()
def replay(done):
    """Every operator and every kernel once more, in their order; what an operator made anew goes where it went."""
    for what, args, kwargs, result in done:
        again = what(*args, **kwargs)
        made = again if isinstance(again, tuple | list) else [again]
        went = result if isinstance(result, tuple | list) else [result]
        for new, old in zip(made, went, strict=True):
            if isinstance(old, torch.Tensor) and old.numel() and new.data_ptr() != old.data_ptr():
                old.copy_(new)


def test_a_step_that_is_recorded_and_replayed_trains_as_others_do():
    """No hook of Python runs in a replay: marks and folds have to be among what was recorded."""
    batches, results = torch.randn(6, 8, 4), []
    for recorded in (False, True):
        model = net()
        optimizer, x = torch.optim.SGD(model.parameters(), lr=0.1), torch.empty(8, 4)

        def step(model=model, optimizer=optimizer, x=x):
            optimizer.zero_grad(set_to_none=False)
            model(x).square().mean().backward()
            optimizer.step()

        again = step
        with backends.use("triton"):
            for i, batch in enumerate(batches):
                x.copy_(batch)
                if recorded and i == 2:  # gradients and plans are there by now
                    with launched() as launches, Record(launches) as record:
                        step()
                        record.note_launches()
                    again = partial(replay, record.done)
                else:
                    again()
        results.append({f"{i} {name}": value for i in (1, 4) for name, value in state_of(model[i]).items()})
        results[-1] |= {name: value.detach().clone() for name, value in model.named_parameters()}
    assert all(torch.equal(value, results[1][name]) for name, value in results[0].items())
    assert int(results[1]["1 stats_count"]) == 1  # a fold before each push
