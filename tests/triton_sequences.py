"""Whole recurrent sequences by the kernels for GPUs, in Triton's interpreter: run by `test_triton.py`, as triton_cases.

Sequences are short and layers small, as each norm of each timestep takes tens of milliseconds here.
"""

import copy
from collections import Counter
from functools import partial

import pytest
import torch
from test_sequence_kernels import LAYERS, everything, norms_of, same, states_of, train
from triton_cases import Operations, launched, names

from streamnorm import GRU, LSTM, RNN, StreamingNorm, attach, backends
from streamnorm.backends.triton import tiling
from streamnorm.nn.recurrent.loop import run_packed
from streamnorm.nn.recurrent.step import Gates, Linear

STEPS, HIDDEN = 2, 3
CELL = LAYERS["LSTM-cell"]
PAPER = partial(StreamingNorm, guard=False, warmup=0, center="mean")
ABSOLUTE = partial(StreamingNorm, p=1, center="mean", affine=False)
# What is made, whether the state is given, lengths of the samples (None: no padding), whether they are packed, and the
# chunks of each window.
CASES = {
    "RNN": (partial(RNN, bidirectional=True), True, [2, 1, 2, 2], True, (1, 1)),
    "RNN, relu, p=1": (partial(RNN, nonlinearity="relu", norm=partial(StreamingNorm, p=1)), False, None, False, (2, 1)),
    "GRU": (GRU, True, [1, 2, 2, 2], False, (1, 1)),
    "GRU, the paper": (partial(GRU, bidirectional=True, norm=PAPER), True, [2, 2, 2, 1], False, (1,)),
    "LSTM": (LSTM, True, [2, 2, 1], True, (1,)),
    "LSTM, p=1 mean": (partial(LSTM, norm=ABSOLUTE), False, None, False, (1,)),
    "LSTM with a norm on the cell": (partial(CELL, bidirectional=True), True, [2, 2, 1], False, (1,)),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_as_the_loop_in_plain_torch_computes_it(name):
    """Outputs, all gradients and all state over some windows; and evaluation after them."""
    make, started, lengths, packed, chunks = CASES[name]
    ours = make(2, HIDDEN)
    for norm in norms_of(ours):
        for parameter in norm.parameters():
            torch.nn.init.uniform_(parameter, 0.5, 1)
    plain, batch = copy.deepcopy(ours).double(), len(lengths or "four")
    windows = [[torch.randn(max(lengths or [STEPS]), batch, 2) for _ in range(many)] for many in chunks]
    shape = 1 + ours.bidirectional, batch, HIDDEN
    start = [torch.randn(shape) for _ in range(ours.kind.states)] if started else None
    with backends.use("triton"), launched() as found:
        assert backends.explain(ours, windows[0][0]) == "triton serves whole sequences of this layer."
        actual = list(train(ours, windows, start, lengths, packed))
    assert "step_backward" in names(found)
    with backends.use("plain"):
        for a, b in zip(actual, train(plain, windows, start, lengths, packed), strict=True):
            same(a, b)
    x, results = windows[0][0], []
    for net, backend in ((ours, "triton"), (plain, "plain")):
        with torch.no_grad(), backends.use(backend), launched() as found:
            results.append({"evaluation": net.eval()(x.to(net.weight_hh_l0.dtype), lengths=lengths)[0]})
        assert set(names(found)) == ({"step_forward"} if net is ours else set())
    same(*results)


@pytest.mark.parametrize(("make", "lengths"), [(RNN, [1, 2, 2, 2, 2]), (CELL, [1, 1, 1])])
def test_any_number_of_tiles_parts_and_blocks(make, lengths, monkeypatch):
    sizes = {"TILE": 4, "STEP_TILE": 4, "CHANNELS": 2, "VECTOR": 2, "MOST_PARTS": 2, "ADDERS_OF_ROWS": 4}
    for name, size in sizes.items():
        monkeypatch.setattr(tiling, name, size)
    assert tiling.of_rows(5, HIDDEN, 0).adders() == (2, 2)
    ours, x = make(2, HIDDEN), torch.randn(max(lengths), len(lengths), 2)
    compare(ours, lambda net: net(x.to(net.weight_hh_l0), lengths=lengths)[0].square().sum())


def compare(ours, loss):
    plain = copy.deepcopy(ours).double()
    for net, backend in ((ours, "triton"), (plain, "plain")):
        with backends.use(backend):
            loss(net).backward()
    same(everything(ours), everything(plain))


def test_norms_with_and_without_gain_and_bias():
    ours = RNN(2, HIDDEN)
    ours.norms_l0.h[0] = StreamingNorm(HIDDEN, affine=False)
    x = torch.randn(STEPS, 4, 2)
    compare(ours, lambda net: net(x.to(net.weight_hh_l0))[0].square().sum())


def test_what_needs_no_gradient():
    ours, x = RNN(2, HIDDEN), torch.randn(STEPS, 4, 2)
    ours.weight_hh_l0.requires_grad_(False)
    plain = copy.deepcopy(ours).double()
    for net, backend in ((ours, "triton"), (plain, "plain")):
        with backends.use(backend):
            net(x.to(net.weight_hh_l0))[0].square().sum().backward()
    found = [{n: p.grad for n, p in net.named_parameters() if p.grad is not None} for net in (ours, plain)]
    assert "weight_hh_l0" not in found[0]
    same(*found)


def test_one_bad_value_spoils_no_statistics():
    ours, results = GRU(2, HIDDEN), []
    plain = copy.deepcopy(ours).double()
    x = torch.randn(STEPS, 4, 2)
    x[1, 2, 0] = torch.nan
    for net, backend in ((ours, "triton"), (plain, "plain")):
        with backends.use(backend):
            output, final = net(x.to(net.weight_hh_l0))
            output.square().sum().backward()
        results.append({"output": output, "final": states_of(final)[0]} | everything(net))
    same(*results)
    assert not torch.isfinite(output).all()
    assert all(torch.isfinite(value).all() for value in ours.state_dict().values())


def test_a_retained_graph_pushes_again_and_a_second_derivative_is_refused():
    def twice(net):
        loss = net(x.to(net.weight_hh_l0))[0].square().sum()
        with pytest.raises(RuntimeError, match="no second derivative"):
            torch.autograd.grad(loss, net.weight_hh_l0, create_graph=True)
        loss.backward(retain_graph=True)
        return loss

    ours, x = RNN(2, HIDDEN), torch.randn(STEPS, 4, 2)
    compare(ours, twice)
    assert all(int(norm.grads.count) == 2 * STEPS for norm in norms_of(ours))


def test_a_scaler_that_is_attached_before_backward():
    """The gradients of statistics are kept without the scale of the loss."""

    def scaled(net):
        loss, optimizer = net(x.to(net.weight_hh_l0))[0].square().sum(), torch.optim.SGD(net.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        scaler.scale(loss)
        attach(optimizer, net, scaler=scaler)
        return scaler.scale(loss)

    x = torch.randn(STEPS, 4, 2)
    compare(RNN(2, HIDDEN), scaled)


# Launches, and what the host asks.

FORWARD = ["sum_gates", "stream_gates", "step_forward"]
BACKWARD = ["step_backward", "stream_gate_gradients", "pull_gates_back"]
# Sets of launches at each timestep, and matrix products beside them.
SETS = {"RNN": (1, 1), "GRU": (2, 2), "LSTM": (1, 1), "LSTM-cell": (2, 1)}
VIEWS = {"t", "unbind", "split", "view_as", "_unsafe_view"}


def counted(asked):
    return {name: n for name, n in asked.found.items() if n and name not in VIEWS}


@pytest.mark.parametrize("name", LAYERS)
def test_one_set_of_launches_for_all_norms_of_a_timestep(name):
    """Three forward and three backward, twice that in a GRU or with a norm on the cell; and matrix products.

    No other operator of torch at any timestep. The host reads nothing, and the same input gives the same bits.
    """
    first, results, steps = LAYERS[name](2, HIDDEN), [], 2
    states, (sets, factors) = first.kind.states, SETS[name]
    start = [torch.randn(4, HIDDEN) for _ in range(states)]
    products = torch.randn(steps * 4, first.kind.gates * HIDDEN, requires_grad=True)
    dy = torch.randn(steps * 4, HIDDEN)
    for net in (first, copy.deepcopy(first)) if name in ("RNN", "GRU") else (first,):
        gates = Gates(net.kind, Linear(), net.weight_hh_l0, None, net.norms_l0, HIDDEN)
        inputs = [products, *(p for n, p in net.named_parameters() if n != "weight_ih_l0")]
        with backends.use("triton"):
            with launched() as forward, Operations() as asked:
                output, final = run_packed(gates, products, [4] * steps, tuple(start), torch.tanh, False, True)
            with launched() as backward, Operations() as asked_back:
                gradients = torch.autograd.grad(output, inputs, dy)
        assert names(forward) == ["note_addresses", *FORWARD * sets * steps]
        assert names(backward) == ["note_addresses", *BACKWARD * sets * steps]
        # Once for all timesteps: gains and biases, and the states of an LSTM, side by side; the first state. And back:
        # what was not used of the result, sums from 0, the gradients of the first state and of the weight.
        assert counted(asked) == {"stack": states, "copy_": 1, "mm": factors * steps}
        added = Counter(addmm_=steps) if name == "GRU" else Counter()
        once = Counter(zeros=1, new_zeros=1, copy_=1, mm=factors)
        assert counted(asked_back) == once + added + Counter(mm=steps)
        results.append([output, *final, *gradients, *net.state_dict().values()])
    assert all(torch.equal(a, b) for a, b in zip(results[0], results[-1], strict=True))


def test_the_host_reads_no_number_in_a_training():
    net, x = RNN(2, HIDDEN), torch.randn(2, STEPS, 4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with backends.use("triton"), launched(), Operations() as asked:
        for batch in x:
            optimizer.zero_grad()
            net(batch)[0].square().mean().backward()
            optimizer.step()
    assert asked.found["fill_"]  # the marks of the updates
    assert all(int(norm.stats.count) == STEPS for norm in norms_of(net))


# What is declined, and what is refused.

DECLINED = {
    "float64": (lambda: GRU(2, HIDDEN, dtype=torch.float64), "float32 tensors"),
    "p": (lambda: RNN(2, HIDDEN, norm=partial(StreamingNorm, p=3)), "p = 1 or 2"),
    "a strided gain": (
        lambda: strided(RNN(2, HIDDEN)),
        "a gain or bias is not a float32 vector in memory",
    ),
    "no memory": (lambda: emptied(RNN(2, HIDDEN)), "the state of a norm is not one that it can write into"),
}


def strided(net):
    net.norms_l0.h[0].weight = torch.nn.Parameter(torch.ones(HIDDEN, 2)[:, 0])
    return net


def emptied(net):
    net.norms_l0.h[0]._state.eval_mean.untyped_storage().resize_(0)
    return net


@pytest.mark.parametrize("case", DECLINED)
def test_what_is_declined(case):
    make, reason = DECLINED[case]
    net = make()
    with backends.use("triton"):
        said = backends.explain(net, torch.randn(STEPS, 4, 2, dtype=net.weight_hh_l0.dtype))
    assert "A loop over timesteps serves this layer" in said
    assert reason in said


def test_a_state_that_another_backend_has_looked_at():
    """Both serve the CPU here: each looks at the state for itself."""
    net, x = RNN(2, HIDDEN), torch.randn(STEPS, 4, 2)
    for backend in backends.available()[::-1]:
        with backends.use(backend):
            net(x)[0].sum().backward()
    assert int(net.norms_l0.h[0].stats.count) == STEPS * len(backends.available())
