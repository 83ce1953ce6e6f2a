"""Recurrent layers: against the paper's loops, against torch.nn, and the laws of lengths and chunks."""

import copy
import gc
import inspect
import io
import pickle
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from oracle import REFERENCES, BatchOracle, StreamingOracle
from oracle_recurrent import GRUOracle, GRUResetAfterOracle, LSTMOracle, RNNOracle, relu, tanh
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_packed_sequence
from torch.utils._python_dispatch import TorchDispatchMode

from streamnorm import (
    GRU,
    LSTM,
    RNN,
    ConvGRU,
    ConvRNN,
    GeneralBatchNorm,
    GRUCell,
    LSTMCell,
    RNNCell,
    SampleNorm,
    StreamingNorm,
    TimeSpecificNorm,
    backends,
    paused,
)

DOUBLE = torch.float64
TORCHS_GRU = partial(GRU, reset_after=True)
LAYERS = {"RNN": RNN, "GRU": GRU, "GRU-after": TORCHS_GRU, "LSTM": LSTM, "LSTM-cell": partial(LSTM, cell_norm=True)}
NORMS = {
    "streaming": StreamingNorm,
    "sample": SampleNorm,
    "batch": GeneralBatchNorm,
    "time": partial(TimeSpecificNorm, steps=5),
    "none": None,
}
every_layer = pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
every_norm = pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
PAIRS = {f"{a}-{b}": (LAYERS[a], NORMS[b]) for a in LAYERS for b in NORMS if (a, b) != ("LSTM-cell", "none")}
every_pair = pytest.mark.parametrize(("make", "norm"), PAIRS.values(), ids=PAIRS)


def close(a, b, **kw):
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10, **kw)


def same_states(a, b, exact=True):
    for key, value in a.state_dict().items():
        if exact:
            assert torch.equal(b.state_dict()[key], value), key
        else:
            close(b.state_dict()[key], value, msg=key)


def randomise(module):
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn_like(p) * 0.5 + (p.ndim == 1))


@pytest.mark.parametrize("norm", ["streaming", "sample"])
@pytest.mark.parametrize(
    ("layer", "oracle", "f"),
    [
        *((layer, RNNOracle, f) for layer, f in ((RNN, tanh), (partial(RNN, nonlinearity="relu"), relu))),
        *((layer, GRUOracle, f) for layer, f in ((GRU, tanh), (partial(GRU, nonlinearity="relu"), relu))),
        (TORCHS_GRU, GRUResetAfterOracle, tanh),
        (partial(TORCHS_GRU, nonlinearity="relu"), GRUResetAfterOracle, relu),
        (LSTM, LSTMOracle, tanh),
        (partial(LSTM, cell_norm=True), LSTMOracle, tanh),
    ],
)
@pytest.mark.parametrize("dtype", [DOUBLE, torch.float32])
def test_against_slow_loops(layer, oracle, f, norm, dtype):
    """In float32 by the kernels, where they serve it."""
    size, hidden, samples = 3, 4, 3
    settings = {"beta": (0.5, 0.2, 0.3), "warmup": 20} if norm == "streaming" else {}
    factory = partial(StreamingNorm, **settings) if norm == "streaming" else SampleNorm
    net = layer(size, hidden, norm=factory, dtype=dtype)
    gates = net.kind.gates

    def near(a, b):
        tolerance = 1e-10 if dtype == DOUBLE else 1e-4
        torch.testing.assert_close(a.double(), torch.as_tensor(b), rtol=tolerance, atol=tolerance)

    def make():
        if norm == "streaming":
            return StreamingOracle(hidden, REFERENCES["BA1"], 2, "running", **settings)
        return BatchOracle(hidden, REFERENCES["SP1"], 2, "mean")

    norms_x, norms_h = [make() for _ in range(gates)], [make() for _ in range(gates)]
    norms_c = [] if net.norms_l0.cell is None else [make()]
    rng = np.random.default_rng(0)
    for steps in (4, 2, 5):  # one weight update after each sequence
        randomise(net)
        modules = [*net.norms_l0.x, *net.norms_l0.h, *(norms_c and [net.norms_l0.cell])]
        norms = list(zip(modules, [*norms_x, *norms_h, *norms_c], strict=True))
        for module, each in norms:
            each.weight, each.bias = (v.detach().double().numpy().copy() for v in (module.weight, module.bias))
        weights = [
            w.detach().double().numpy().reshape(gates, hidden, -1).copy() for w in (net.weight_ih_l0, net.weight_hh_l0)
        ]
        slow = oracle(list(weights[0]), list(weights[1]), norms_x, norms_h, f, *norms_c)
        xs, dy = rng.normal(size=(steps, samples, size)), rng.normal(size=(steps, samples, hidden))
        start, dfinal = (tuple(rng.normal(size=(net.kind.states, samples, hidden))) for _ in range(2))
        x = torch.from_numpy(xs).to(dtype).requires_grad_()
        hx = [torch.from_numpy(s)[None].to(dtype).requires_grad_() for s in start]
        pair = net.kind.states > 1
        net.zero_grad()
        output, final = net(x, tuple(hx) if pair else hx[0])
        final = final if pair else (final,)
        near(output.detach(), slow.forward(xs, start if pair else start[0]))
        near(final[0][0], output[-1].double())
        if pair:
            near(final[1][0].detach(), slow.final[1])
        torch.autograd.backward(
            (output, *final), [torch.as_tensor(d).to(dtype) for d in (dy, *(d[None] for d in dfinal))]
        )
        dxs, dstart = slow.backward(dy, dfinal if pair else dfinal[0])
        near(x.grad, dxs)
        for h, expected in zip(hx, dstart if pair else (dstart,), strict=True):
            near(h.grad[0], expected)
        for parameter, matrices in ((net.weight_ih_l0, slow.weight_x), (net.weight_hh_l0, slow.weight_h)):
            near(parameter.grad, np.concatenate([slow.gradients[id(w)] for w in matrices]))
        for module, each in norms:
            near(module.weight.grad, slow.gradients["gain", id(each)])
            near(module.bias.grad, slow.gradients["bias", id(each)])
            if norm == "streaming":
                assert int(module.stats.count) == int(module.grads.count) == steps  # every call counts
                module.weights_updated()
                each.weights_updated()


ARGUMENTS = [
    {},
    {"num_layers": 3},
    {"bidirectional": True, "num_layers": 2},
    {"batch_first": True},
    {"bias": False},
]


CASES = [(o, t, a) for o, t in ((RNN, nn.RNN), (LSTM, nn.LSTM), (TORCHS_GRU, nn.GRU)) for a in ARGUMENTS]


@pytest.mark.parametrize(("ours", "theirs", "arguments"), [*CASES, (RNN, nn.RNN, {"nonlinearity": "relu"})])
def test_without_a_norm_it_is_torch(ours, theirs, arguments):
    reference = theirs(3, 5, **arguments, dtype=DOUBLE)
    net = ours(3, 5, norm=None, **arguments, dtype=DOUBLE)
    assert [(n, p.shape) for n, p in net.named_parameters()] == [(n, p.shape) for n, p in reference.named_parameters()]
    net.load_state_dict(reference.state_dict())
    batch = torch.randn(4, 6, 3, dtype=DOUBLE)
    directions, samples = 1 + arguments.get("bidirectional", False), 4 if "batch_first" in arguments else 6
    shape = (directions * arguments.get("num_layers", 1), samples, 5)
    start = [torch.randn(shape, dtype=DOUBLE) for _ in range(1 + (ours is LSTM))]
    packed = pack_sequence(
        [torch.randn(n, 3, dtype=DOUBLE) for n in (2, 5, 1, 4, 4, 3)[:samples]], enforce_sorted=False
    )
    inputs = [(batch, None), (batch, start), (packed, None), (packed, start), (batch[0], None)]
    for x, hx in inputs:
        hx = hx if hx is None or ours is LSTM else hx[0]
        one, two = (list(flat(n(x, hx))) for n in (net, reference))
        for a, b in zip(one, two, strict=True):
            close(a, b)
        gradients = [
            torch.autograd.grad(sum(o.square().sum() for o in outs), list(n.parameters()))
            for outs, n in ((one, net), (two, reference))
        ]
        for a, b in zip(*gradients, strict=True):
            close(a, b)


def flat(result):
    """All tensors of (output, state), whatever they are wrapped in."""
    output, state = result
    yield output.data if isinstance(output, nn.utils.rnn.PackedSequence) else output
    yield from (state,) if isinstance(state, torch.Tensor) else state


TORCHS_CELL = partial(GRUCell, reset_after=True)


@every_norm
@pytest.mark.parametrize(
    ("layer", "cell"), [(RNN, RNNCell), (GRU, GRUCell), (TORCHS_GRU, TORCHS_CELL), (LSTM, LSTMCell)]
)
def test_a_layer_is_its_cell_in_a_loop(layer, cell, norm):
    net, one = layer(3, 5, norm=norm, dtype=DOUBLE), cell(3, 5, norm=norm, dtype=DOUBLE)
    one.load_state_dict({key.replace("_l0", ""): value for key, value in net.state_dict().items()})
    for _ in range(2):
        x = torch.randn(7, 4, 3, dtype=DOUBLE)
        output, state = net(x)
        h = None
        for t, each in enumerate(x):
            h = one(each, h, step=t)
            close(output[t], h if isinstance(h, torch.Tensor) else h[0])
        for a, b in zip(flat((output, state)), flat((output, h)), strict=True):
            close(a.reshape(-1), b.reshape(-1))
        output.square().sum().backward()
        (h if isinstance(h, torch.Tensor) else h[0]).square().sum().backward()
    assert one.weight_hh.grad is not None


@every_pair
@pytest.mark.parametrize(("bidirectional", "garbage"), [(False, 0.0), (True, float("nan"))])
def test_padded_equals_dropped(make, norm, bidirectional, garbage):
    """Padding, whatever is in it, equals a PackedSequence of the real steps, to the bit, over several updates."""
    padded = make(3, 4, num_layers=2, norm=norm, bidirectional=bidirectional)
    packed = copy.deepcopy(padded)
    lengths = torch.tensor([3, 6, 2, 6])
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (padded, packed)]
    for _ in range(3):
        x = torch.randn(6, 4, 3)
        sequences = [x[:n, i] for i, n in enumerate(lengths)]
        for i, n in enumerate(lengths):
            x[n:, i] = garbage
        x.requires_grad_()
        output, state = padded(x, lengths=lengths)
        other, expected = packed(pack_sequence(sequences, enforce_sorted=False))
        assert torch.equal(output, pad_packed_sequence(other)[0])
        for a, b in zip(flat((output, state)), flat((output, expected)), strict=True):
            assert torch.equal(a, b)
        output.square().sum().backward()
        other.data.square().sum().backward()
        for i, n in enumerate(lengths):
            assert (x.grad[n:, i] == 0).all()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    same_states(padded, packed)


@pytest.mark.parametrize(("layer", "cell"), [(RNN, RNNCell), (GRU, GRUCell), (LSTM, LSTMCell)])
def test_lengths_equal_a_hand_written_loop_that_drops(layer, cell):
    net, one, masked = layer(3, 5, dtype=DOUBLE), cell(3, 5, dtype=DOUBLE), cell(3, 5, dtype=DOUBLE)
    for twin in (one, masked):
        twin.load_state_dict({key.replace("_l0", ""): value for key, value in net.state_dict().items()})
    lengths, x = [6, 4, 4, 1], torch.randn(6, 4, 3, dtype=DOUBLE)
    output, _ = net(x, lengths=lengths)
    state = None
    for t in range(6):
        alive = sum(n > t for n in lengths)
        if state is not None:
            state = state[:alive] if isinstance(state, torch.Tensor) else tuple(s[:alive] for s in state)
        state = one(x[t, :alive], state, step=t)
        close(output[t, :alive], state if isinstance(state, torch.Tensor) else state[0])
        assert (output[t, alive:] == 0).all()
    h = None
    for t in range(6):  # or with a mask: samples that have ended keep their state
        h = masked(x[t], h, mask=torch.tensor([n > t for n in lengths]), step=t)
        alive = sum(n > t for n in lengths)
        close((h if isinstance(h, torch.Tensor) else h[0])[:alive], output[t, :alive])
    assert int(masked.norms.x[0].stats.count) == 6
    same_states(one, masked, exact=False)


@every_layer
def test_one_set_of_statistics_for_all_timesteps(make):
    net = make(3, 4)
    norms = [m for m in net.modules() if isinstance(m, StreamingNorm)]
    assert len(norms) == {1: 2, 3: 6, 4: 8}[net.kind.gates] + (net.norms_l0.cell is not None)
    net(torch.randn(7, 5, 3))[0].sum().backward()
    for norm in norms:
        assert norm.mean.shape == (4,)
        assert int(norm.stats.count) == int(norm.grads.count) == 7  # the product with the zero state counts


@every_layer
def test_a_chunk_boundary_is_no_event(make):
    """Truncated BPTT: whole or in chunks with the state carried and detached, statistics and outputs are the same."""
    whole = make(3, 4, num_layers=2)
    chunked = copy.deepcopy(whole)
    x = torch.randn(12, 5, 3)
    expected, _ = whole(x)
    state, outputs = None, []
    for chunk in x.split([5, 4, 3]):
        output, state = chunked(chunk, state)
        state = state.detach() if isinstance(state, torch.Tensor) else tuple(s.detach() for s in state)
        outputs.append(output)
    torch.testing.assert_close(torch.cat(outputs), expected)
    same_states(whole, chunked, exact=False)


@every_layer
def test_resuming_between_chunks_gives_the_same_bits(make):
    x = torch.randn(6, 4, 5, 3)  # chunks, steps, samples, features

    def train(net, optimizer, chunks, state, first):
        for i, chunk in enumerate(chunks, first):
            output, state = net(chunk, state)
            state = state.detach() if isinstance(state, torch.Tensor) else tuple(s.detach() for s in state)
            output.square().mean().backward()
            if i % 2:
                optimizer.step()
                optimizer.zero_grad()
        return state

    whole, first = make(3, 4), make(3, 4)
    first.load_state_dict(whole.state_dict())
    train(whole, torch.optim.SGD(whole.parameters(), lr=0.1), x, None, 0)
    state = train(first, torch.optim.SGD(first.parameters(), lr=0.1), x[:3], None, 0)
    file = io.BytesIO()
    torch.save([first.state_dict(), [p.grad for p in first.parameters()], state], file)
    file.seek(0)
    saved, gradients, state = torch.load(file, weights_only=True)
    second = make(3, 4)
    second.load_state_dict(saved)
    for p, g in zip(second.parameters(), gradients, strict=True):
        p.grad = g
    train(second, torch.optim.SGD(second.parameters(), lr=0.1), x[3:], state, 3)
    same_states(whole, second)


class Shapes(TorchDispatchMode):
    """Records the shapes of the results of matrix products."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.__name__.split(".")[0] in ("mm", "addmm", "bmm", "convolution_backward", "convolution"):
            self.seen += [tuple(r.shape) for r in (result if isinstance(result, tuple) else (result,)) if r is not None]
        return result


@pytest.mark.parametrize("steps", [3, 9])
@pytest.mark.parametrize(("make", "groups"), [(RNN, [5]), (GRU, [10, 5]), (TORCHS_GRU, [15]), (LSTM, [20])])
def test_products_are_taken_at_once_where_they_can_be(make, groups, steps):
    """By the loop over timesteps."""
    net = make(3, 5)
    with Shapes() as forward, backends.use("plain"):
        output, _ = net(torch.randn(steps, 7, 3))
    with Shapes() as backward, backends.use("plain"):
        output.sum().backward()
    rows = sum(groups)
    assert forward.seen.count((steps * 7, rows)) == 1  # the input's product, all timesteps
    for group in groups:
        assert backward.seen.count((group, 5)) == 1  # one weight gradient, not one per timestep
    assert backward.seen.count((rows, 3)) + backward.seen.count((3, rows)) == 1


@pytest.mark.parametrize(
    ("make", "flat_make"), [(ConvRNN, RNN), (ConvGRU, GRU), (partial(ConvGRU, reset_after=True), TORCHS_GRU)]
)
@pytest.mark.parametrize("norm", [None, StreamingNorm])
def test_convolutions_of_one_pixel_are_matrix_products(make, flat_make, norm):
    conv, linear = make(3, 4, 2, kernel_size=1, norm=norm, dtype=DOUBLE), flat_make(3, 4, 2, norm=norm, dtype=DOUBLE)
    state = conv.state_dict()
    linear.load_state_dict({k: v.flatten(1) if v.ndim == 4 else v for k, v in state.items()})
    x = torch.randn(5, 6, 3, dtype=DOUBLE)
    images, h = conv(x[..., None, None], lengths=[6, 6, 4, 3, 2])
    vectors, expected = linear(x.transpose(0, 1), lengths=[6, 6, 4, 3, 2])
    close(images.flatten(2), vectors.transpose(0, 1))
    close(h.flatten(2), expected)
    images.square().sum().backward()
    vectors.square().sum().backward()
    for (name, a), b in zip(conv.named_parameters(), linear.parameters(), strict=True):
        close(a.grad.flatten(1) if a.ndim == 4 else a.grad, b.grad, msg=name)


def test_conv_rnn_is_convolutions_in_a_loop():
    net = ConvRNN(2, 3, norm=None, nonlinearity="relu", dtype=DOUBLE)
    x, h = torch.randn(4, 5, 2, 6, 7, dtype=DOUBLE), torch.zeros(4, 3, 6, 7, dtype=DOUBLE)
    output, _ = net(x)
    w, u, b, c = net.weight_ih_l0, net.weight_hh_l0, net.bias_ih_l0, net.bias_hh_l0
    expected = []
    for t in range(5):
        h = torch.relu(F.conv2d(x[:, t], w, b, padding=1) + F.conv2d(h, u, c, padding=1))
        expected.append(h)
    expected = torch.stack(expected, 1)
    close(output, expected)
    for a, e in zip(
        torch.autograd.grad(output.square().sum(), (w, u, b, c)),
        torch.autograd.grad(expected.square().sum(), (w, u, b, c)),
        strict=True,
    ):
        close(a, e)


@pytest.mark.parametrize("make", [ConvRNN, ConvGRU])
def test_convolutional_norms_of_any_reference(make):
    for code in ("BA1", "BA4", "BA6", "SP1", "SP2"):
        net = make(2, 3, norm=partial(StreamingNorm, ref=code))
        images = torch.randn(2, 4, 2, 6, 6, requires_grad=True)
        output, h = net(images)
        assert output.shape == (2, 4, 3, 6, 6)
        assert h.shape == (1, 2, 3, 6, 6)
        output.sum().backward()
        assert torch.isfinite(images.grad).all()


@every_pair
def test_longer_sequences_than_in_training_work(make, norm):
    net = make(3, 4, norm=norm)
    net(torch.randn(5, 6, 3))
    output, _ = net.eval()(torch.randn(50, 6, 3))
    assert torch.isfinite(output).all()


CONTRACT = {
    **{name: partial(make, 3, 4, norm=norm) for name, (make, norm) in PAIRS.items()},
    "two-layers": partial(GRU, 3, 4, 2, dropout=0.2, bidirectional=True),
}
contract = pytest.mark.parametrize("build", CONTRACT.values(), ids=CONTRACT)


@contract
def test_contract_copies_and_types(build):
    net, x = build(), torch.randn(6, 4, 3)
    net(x)
    for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert torch.equal(twin.eval()(x)[0], net.eval()(x)[0])
        before = {k: v.clone() for k, v in net.state_dict().items()}
        optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
        twin.train()(x)[0].sum().backward()
        optimizer.step()
        assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    fresh = build()
    fresh.load_state_dict(net.state_dict())
    assert torch.equal(fresh.eval()(x)[0], net(x)[0])
    wide = copy.deepcopy(net).double().train()
    assert wide(x.double())[0].dtype == DOUBLE
    narrow = copy.deepcopy(net).bfloat16().train()
    output, _ = narrow(x.bfloat16())
    output.float().sum().backward()
    assert output.dtype == torch.bfloat16
    with torch.no_grad():
        assert not net.train()(x)[0].requires_grad


@contract
def test_contract_meta_and_deferred_initialisation(build):
    net = build(device="meta")
    x = torch.randn(6, 4, 3, device="meta", requires_grad=True)
    output, _ = net(x)
    output.sum().backward()
    assert output.device.type == x.grad.device.type == "meta"
    alive = build(device="meta").to_empty(device="cpu")
    alive.reset_parameters()
    assert torch.isfinite(alive(torch.randn(6, 4, 3))[0]).all()


OTHERS = {
    "RNNCell": (RNNCell, (2, 3)),
    "GRUCell": (GRUCell, (2, 3)),
    "LSTMCell": (LSTMCell, (2, 3)),
    "ConvRNN": (ConvRNN, (2, 4, 3, 5, 5)),
    "ConvGRU": (partial(ConvGRU, norm=partial(StreamingNorm, ref="BA6")), (2, 4, 3, 5, 5)),
}


@pytest.mark.parametrize(("make", "shape"), OTHERS.values(), ids=OTHERS)
def test_contract_of_cells_and_convolutions(make, shape):
    def first(result):
        return result if isinstance(result, torch.Tensor) else result[0]

    net, x = make(3, 4), torch.randn(shape)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(2):
        first(net(x)).square().sum().backward()
        optimizer.step()
    state = net.state_dict()
    fresh = make(3, 4)
    fresh.load_state_dict(state)
    twins = [copy.deepcopy(net), pickle.loads(pickle.dumps(net)), fresh]
    for twin in twins:
        assert torch.equal(first(twin(x)), first(copy.deepcopy(net)(x)))  # the pending update folds in all of them
    assert first(copy.deepcopy(net).double()(x.double())).dtype == DOUBLE
    assert torch.isfinite(first(net.eval()(x))).all()
    meta = make(3, 4, device="meta")
    first(meta(x.to("meta"))).sum().backward()
    assert {p.grad.device.type for p in meta.parameters()} == {"meta"}


@pytest.mark.parametrize("norm", [StreamingNorm, SampleNorm, None])
@pytest.mark.parametrize("make", [RNN, GRU, LSTM])
def test_double_backward_is_refused(make, norm):
    net = make(3, 4, norm=norm)
    x = torch.randn(6, 4, 3, requires_grad=True)
    for target in (x, net.weight_ih_l0, net.weight_hh_l0):
        output = net(x)[0].square().sum()
        before = {k: v.clone() for k, v in net.state_dict().items()}
        with pytest.raises(RuntimeError, match="no second derivative"):
            torch.autograd.grad(output, target, create_graph=True)
        assert all(torch.equal(net.state_dict()[k], v) for k, v in before.items())


def test_double_backward_works_in_evaluation():
    net, reference = RNN(3, 4, norm=None, dtype=DOUBLE).eval(), nn.RNN(3, 4, dtype=DOUBLE)
    reference.load_state_dict(net.state_dict())
    x = torch.randn(5, 2, 3, dtype=DOUBLE, requires_grad=True)
    for each in (net, reference):
        (g,) = torch.autograd.grad(each(x)[0].square().sum(), x, create_graph=True)
        g.square().sum().backward()
    for a, b in zip(net.parameters(), reference.parameters(), strict=True):
        close(a.grad, b.grad)


@pytest.mark.parametrize("make", [RNN, GRU, LSTM])
def test_an_initial_state_changed_before_backward_is_noticed_or_does_not_matter(make):
    """It does not where a copy was taken of it."""
    net, gradients = make(3, 4), []
    x, h = torch.randn(5, 2, 3), torch.randn(1, 2, 4)
    for each in (copy.deepcopy(net), net):
        loss = each(x, (h, torch.zeros(1, 2, 4)) if make is LSTM else h)[0].sum()
        if each is net:
            h.zero_()
        if each is net and make is not LSTM:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
            return
        loss.backward()
        gradients.append([p.grad for p in each.parameters()])
    for a, b in zip(*gradients, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("norm", [StreamingNorm, SampleNorm, None])
@pytest.mark.parametrize("make", [RNN, GRU, LSTM])
def test_autocast_with_a_carried_state(make, norm):
    net, state = make(3, 4, norm=norm), None
    for dtype in (torch.float32, torch.float32, torch.bfloat16):
        with torch.autocast("cpu", torch.bfloat16):
            output, state = net(torch.randn(5, 2, 3, dtype=dtype), state)
        output.float().sum().backward()
        state = state.detach() if isinstance(state, torch.Tensor) else tuple(s.detach() for s in state)
    assert torch.isfinite(net.weight_hh_l0.grad).all()


def test_activations_are_freed_after_backward():
    net = GRU(3, 7)
    loss = net(torch.randn(30, 5, 3))[0].sum()
    loss.backward()
    alive = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor) and o.shape == (5, 7)]
    assert len(alive) < 5
    assert loss.grad_fn is not None


@pytest.mark.parametrize("lengths", [None, [6] * 200])
def test_equal_lengths_are_no_lengths(lengths):
    net = GRU(3, 4)
    start = copy.deepcopy(net.state_dict())
    x = torch.randn(6, 200, 3)
    expected = net(x)[0]
    net.load_state_dict(start)
    assert torch.equal(net(x, lengths=lengths)[0], expected)


def test_paused_takes_any_length():
    net = RNN(3, 5, norm=partial(StreamingNorm, center="mean"))
    net(x)
    with paused(net):
        net(x, lengths=[6, 5, 5, 2])


def test_a_refusal_of_a_later_norm_changes_nothing():
    """The x side would accept another size of image, the h side is bound to the first."""
    sides = iter([StreamingNorm, partial(StreamingNorm, ref="BA6")])
    net = ConvRNN(2, 3, norm=lambda size, **kw: next(sides)(size, **kw))
    net(torch.randn(2, 4, 2, 6, 6))
    before = {k: v.clone() for k, v in net.state_dict().items()}
    with pytest.raises(ValueError, match="bound to"):
        net(torch.randn(2, 4, 2, 5, 5))
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())


@pytest.mark.parametrize("norm", [StreamingNorm, SampleNorm, None])
@pytest.mark.parametrize("cell", [RNNCell, GRUCell, LSTMCell])
def test_cells_keep_masked_samples_out_of_gradients(cell, norm):
    one = cell(3, 5, norm=norm)
    x, mask = torch.randn(4, 3), torch.tensor([True, True, True, False])
    x[3] = torch.nan
    x.requires_grad_()
    state = one(x, mask=mask)
    h = state if isinstance(state, torch.Tensor) else state[0]
    assert (h[3] == 0).all()  # the state it had
    h.sum().backward()
    assert torch.isfinite(one.weight_ih.grad).all()
    assert torch.isfinite(one.weight_hh.grad).all()
    assert (x.grad[3] == 0).all()
    one(torch.randn(4, 3), mask=torch.tensor(True))
    with pytest.raises(TypeError, match="mask is list"):
        one(torch.randn(4, 3), mask=[True])


def test_only_some_of_the_outputs_or_inputs_may_matter():
    net, cell = RNN(3, 4, norm=None, dtype=DOUBLE), nn.RNN(3, 4, dtype=DOUBLE)
    cell.load_state_dict(net.state_dict())
    x = torch.randn(6, 4, 3, dtype=DOUBLE, requires_grad=True)
    ours, theirs = net(x)[0], cell(x)[0]
    for pick in (lambda y: y[:2], lambda y: y[3], lambda y: y[-1, :2]):
        a = torch.autograd.grad(pick(ours).sum(), x, retain_graph=True)  # leaves nothing for the weights' turn
        b = torch.autograd.grad(pick(ours).sum(), net.weight_hh_l0, retain_graph=True)
        close(a[0], torch.autograd.grad(pick(theirs).sum(), x, retain_graph=True)[0])
        close(b[0], torch.autograd.grad(pick(theirs).sum(), cell.weight_hh_l0, retain_graph=True)[0])


def test_dropout_acts_between_layers():
    net = GRU(3, 64, 2, dropout=0.5, norm=None)
    x = torch.randn(5, 8, 3)
    assert not torch.equal(net(x)[0], net(x)[0])
    assert torch.equal(net.eval()(x)[0], net(x)[0])
    for make in (GRU, LSTM):
        with pytest.warns(UserWarning, match="acts between layers") as caught:
            make(3, 4, dropout=0.5)
        assert caught[0].filename == __file__


x = torch.randn(6, 4, 3)
BAD_CALLS = [
    (x[..., :2], {}, ValueError, "has 2 features, not 3"),
    (x.long(), {}, ValueError, r"indices of shape \(6, 4, 3\)"),
    (x.bool(), {}, TypeError, "torch.bool"),
    ("text", {}, TypeError, "input is str"),
    (torch.randn(2, 6, 4, 3), {}, ValueError, r"expected \(T, N, features\)"),
    (torch.randn(0, 4, 3), {}, ValueError, "0 timesteps"),
    (torch.randn(6, 0, 3), {}, ValueError, "of 0 samples"),
    (x, {"hx": torch.zeros(1, 3, 5)}, ValueError, r"hx of shape \(1, 3, 5\): expected .* \(1, 4, 5\) = \(num_layers"),
    (x, {"hx": torch.zeros(4, 5)}, ValueError, r"hx of shape \(4, 5\)"),
    (x, {"hx": torch.zeros(1, 4, 5, dtype=DOUBLE)}, TypeError, "hx is torch.float64"),
    (x, {"hx": torch.zeros(1, 4, 5, dtype=torch.int64)}, TypeError, "hx is torch.int64"),
    (x, {"hx": torch.zeros(1, 4, 5, device="meta")}, TypeError, "on meta"),
    (x, {"hx": [1]}, TypeError, "hx is list"),
    (x, {"hx": torch.zeros(1, 4, 5).to_sparse()}, TypeError, r"hx is .*sparse_coo.*to_dense\(\)"),
    (x.to_sparse(), {}, TypeError, r"input is torch.sparse_coo: .*to_dense\(\)"),
    (x.double(), {}, TypeError, r"weight_ih_l0 is torch.float32 .*, the input torch.float64"),
    (x, {"hx": 3}, TypeError, "hx is int"),
    (torch.tensor(1.0), {}, ValueError, r"input of shape \(\)"),
    (x, {"lengths": []}, ValueError, r"lengths of shape \(0,\)"),
    (x, {"lengths": "ab"}, TypeError, "lengths='ab'"),
    (x, {"lengths": [6, 5, 4]}, ValueError, r"lengths of shape \(3,\): expected one per sample, \(4,\)"),
    (x, {"lengths": [6, 5, 4, 0]}, ValueError, "lengths from 0 to 6: must be from 1 to 6"),
    (x, {"lengths": [7, 5, 4, 1]}, ValueError, "lengths from 1 to 7"),
    (x, {"lengths": [6.0, 5.0, 4.0, 2.0]}, TypeError, "whole numbers"),
    (x[:, 0], {"lengths": [6]}, ValueError, "needs a batch"),
    (pack_padded_sequence(x, [6, 5, 5, 2]), {"lengths": [6, 5, 5, 2]}, ValueError, "has its lengths"),
]


@pytest.mark.parametrize(("bad", "arguments", "error", "message"), BAD_CALLS, ids=[c[-1] for c in BAD_CALLS])
def test_bad_calls_change_nothing(bad, arguments, error, message):
    net = RNN(3, 5)
    net(x)
    before = {k: v.clone() for k, v in net.state_dict().items()}
    with pytest.raises(error, match=message):
        net(bad, **arguments)
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())


@pytest.mark.parametrize("norm", [GeneralBatchNorm, partial(StreamingNorm, center="mean")])
def test_a_tail_of_one_sample_is_refused_before_the_first_step(norm):
    net = GRU(3, 5, norm=norm)
    net(x)
    before = {k: v.clone() for k, v in net.state_dict().items()}
    with pytest.raises(ValueError, match=r'timestep 5 has 1 sample.*center="running"'):
        net(x, lengths=[6, 5, 5, 2])
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    net(x, lengths=[6, 6, 5, 2])
    net.eval()(x, lengths=[6, 5, 5, 2])


BAD_BUILDS = [
    (lambda: RNN(0, 4), "input_size=0"),
    (lambda: RNN(3, 4, 0), "num_layers=0"),
    (lambda: RNN(3, 4, nonlinearity="sin"), "nonlinearity='sin'"),
    (lambda: RNN(3, 4, 2, dropout=1.5), "dropout=1.5"),
    (lambda: LSTM(3, 4, norm=None, cell_norm=True), "cell_norm=True needs a norm"),
    (lambda: ConvRNN(3, 4, kernel_size=2), "kernel_size=2"),
    (lambda: RNNCell(3, 0), "hidden_size=0"),
    (lambda: GRU(3, 4, dtype=torch.int64), "dtype=torch.int64"),
]


@pytest.mark.parametrize(("build", "message"), BAD_BUILDS, ids=[m for _, m in BAD_BUILDS])
def test_bad_construction(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_other_bad_input():
    with pytest.raises(TypeError, match="norm='layer'"):
        RNN(3, 4, norm="layer")
    with pytest.raises(TypeError, match=r"norm made LayerNorm.*SampleNorm"):
        RNN(3, 4, norm=nn.LayerNorm)
    with pytest.raises(TypeError, match=r"input is PackedSequence: pass a floating point tensor \(N, T, C, H, W\) or"):
        ConvRNN(3, 4)(pack_padded_sequence(x, [6, 5, 5, 2]))
    with pytest.raises(ValueError, match=r"^input of shape .* one element"):  # nothing about timesteps
        RNN(3, 4, norm=GeneralBatchNorm)(torch.randn(6, 1, 3))
    with pytest.raises(ValueError, match=r"expected \(N, T, C, H, W\) or \(T, C, H, W\), x.unsqueeze\(0\) if"):
        ConvRNN(3, 4)(torch.randn(3, 8, 8))
    with pytest.raises(ValueError, match=r"expected a pair \(h, c\), each of shape \(1, 4, 5\)"):
        LSTM(3, 5)(x, torch.zeros(1, 4, 5))
    with pytest.raises(ValueError, match=r"hx of shape .* \(num_layers \* directions, N, hidden_size, H, W\)"):
        ConvGRU(3, 4)(torch.randn(2, 5, 3, 8, 8), torch.zeros(1, 2, 4))
    with pytest.raises(ValueError, match=r"expected \(N, 3\)"):
        RNNCell(3, 4)(torch.randn(2, 2, 3))
    for name in ("bias", "batch_first", "bidirectional"):
        with pytest.raises(ValueError, match=rf"^{name}='yes': must be True or False$"):
            GRU(3, 5, **{name: "yes"})
    with pytest.raises(ValueError, match=r"^bias=<class .*: must be True or False; a norm is passed by name, norm="):
        GRU(3, 5, 1, SampleNorm)


UNBATCHED = [(make, (6, 3)) for make in (*LAYERS.values(), partial(GRU, num_layers=2, bidirectional=True))]
UNBATCHED += [(RNNCell, (3,)), (GRUCell, (3,)), (LSTMCell, (3,)), (ConvRNN, (6, 3, 4, 4)), (ConvGRU, (6, 3, 4, 4))]


def tensors_of(result):
    return [result] if isinstance(result, torch.Tensor) else [each for part in result for each in tensors_of(part)]


@pytest.mark.parametrize(("make", "shape"), UNBATCHED)
def test_one_sequence_without_a_batch(make, shape):
    """Is a batch of one, and its states have no batch either; a state of a batch is refused, and so are lengths."""
    one, batched, x = make(3, 5), make(3, 5), torch.randn(shape)
    batched.load_state_dict(one.state_dict())
    states = None, None
    for _ in range(2):
        results = one(x, states[0]), batched(x.unsqueeze(1 if len(shape) == 2 else 0), states[1])
        for ours, theirs in zip(*map(tensors_of, results), strict=True):
            assert ours.ndim == theirs.ndim - 1
            assert torch.equal(ours.flatten(), theirs.flatten())
        states = results if len(shape) == 1 else [final for _, final in results]
    same_states(one, batched)
    with pytest.raises(ValueError, match=r"^hx of shape"):
        one(x, states[1])
    if len(shape) > 1:
        with pytest.raises(ValueError, match=r"^lengths= needs a batch: input of shape \(6, 3"):
            one(x, lengths=[6])
    same_states(one, batched)


POSITIONS = [
    ("RNN", (3, 5, 2, "relu", False, True, 0.0, True)),
    ("GRU", (3, 5, 2, False, True, 0.0, True)),
    ("LSTM", (3, 5, 2, False, True, 0.0, True)),
    ("RNNCell", (3, 5, False, "relu")),
    ("GRUCell", (3, 5, False)),
    ("LSTMCell", (3, 5, False)),
]


@pytest.mark.parametrize(("name", "arguments"), POSITIONS, ids=[name for name, _ in POSITIONS])
def test_arguments_by_position_mean_what_they_mean_in_torch(name, arguments):
    torchs = getattr(nn, name)(*arguments)
    settings = {"reset_after": True} if "GRU" in name else {}
    ours = {"RNN": RNN, "GRU": GRU, "LSTM": LSTM, "RNNCell": RNNCell, "GRUCell": GRUCell, "LSTMCell": LSTMCell}[name](
        *arguments, norm=None, **settings
    )
    ours.load_state_dict(torchs.state_dict())
    x = torch.randn(4, 6, 3) if len(arguments) > 4 else torch.randn(4, 3)
    if len(arguments) > 4:
        ours.flatten_parameters()
    for a, b in zip(tensors_of(ours(x)), tensors_of(torchs(x)), strict=True):
        torch.testing.assert_close(a, b)


def test_representation():
    """The arguments that made it, but for defaults; norms are shown below, and only without them there is a bias."""
    assert repr(GRU(3, 4)).splitlines()[1] == "  3, 4"
    assert repr(GRU(3, 4)).splitlines()[2:4] == ["  (norms_l0): Norms(", "    (x): ModuleList("]
    assert GRU(3, 4, 2, batch_first=True, norm=SampleNorm).extra_repr() == "3, 4, num_layers=2, batch_first=True"
    assert LSTM(3, 4, cell_norm=True, bias=False).extra_repr() == "3, 4, cell_norm=True"
    for text in (
        "RNN(3, 4, nonlinearity='relu', bias=False, norm=None)",
        "GRU(3, 4, num_layers=2, dropout=0.5, bidirectional=True, norm=None, reset_after=True)",
        "RNNCell(3, 4, norm=None)",
        "LSTMCell(3, 4, bias=False, norm=None)",
        "ConvGRU(3, 4, kernel_size=5, norm=None)",
    ):
        made = eval(text)
        assert f"{type(made).__name__}({made.extra_repr()})" == text


class Mine(GRU):
    pass


WRONG_ARGUMENTS = [
    (
        lambda: GRU(3, 5, 1, True, False, 0.0, False, None),
        r"^GRU\(\) takes input_size, .*, bidirectional by position, .* None: pass the rest by name: norm=",
    ),
    (lambda: LSTM(3, 5, batchfirst=True), r"^LSTM\(\) takes no batchfirst=: did you mean batch_first="),
    (lambda: LSTM(3, 5, proj_size=2), r"^LSTM\(\) takes no proj_size=: .*not projected; an nn.Linear behind"),
    (lambda: RNN(3), r"^RNN.__init__\(\) missing .*hidden_size"),
    (
        lambda: GRUCell(3, 5, False, "tanh"),
        r"^GRUCell\(\) takes input_size, hidden_size, bias by position",
    ),
    (lambda: RNNCell(3, 5, biass=False), r"^RNNCell\(\) takes no biass=: did you mean bias="),
    (lambda: LSTMCell(), r"^LSTMCell.__init__\(\) missing .*input_size"),
    (lambda: ConvRNN(3, 5, 1, 3), r"^ConvRNN\(\) takes input_channels, hidden_channels, num_layers .*kernel_size="),
    (lambda: ConvGRU(3, 5, kernel=3), r"^ConvGRU\(\) takes no kernel=: did you mean kernel_size="),
    (lambda: Mine(3, 5, 1, True, False, 0.0, False, None), r"^GRU\(\) takes input_size"),
]


@pytest.mark.parametrize(("build", "message"), WRONG_ARGUMENTS, ids=[m for _, m in WRONG_ARGUMENTS])
def test_wrong_arguments_name_the_public_class(build, message):
    with pytest.raises(TypeError, match=message):
        build()


def test_signatures_are_those_of_the_constructors():
    """By position what torch.nn takes by position, but for type and place; by name alone what is ours."""
    torchs = [name for name in inspect.signature(nn.RNNBase.__init__).parameters if name not in ("self", "mode")]
    for kind in (RNN, GRU, LSTM):
        taken = inspect.signature(kind).parameters.values()
        placed = [each.name for each in taken if each.kind is each.POSITIONAL_OR_KEYWORD]
        assert [name for name in placed if name != "nonlinearity"] == torchs[: torchs.index("proj_size")]
    assert "reset_after" not in inspect.signature(RNN).parameters
