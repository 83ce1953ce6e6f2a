"""The kernels of whole sequences compute what the loop over timesteps computes; indices stand for one-hot vectors."""

import copy
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from conformance import close, tenths
from hypothesis import given, settings
from hypothesis import strategies as st
from test_kernels import MACHINES, Operations, _one_thread, machine, needs_kernels  # noqa: F401
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from streamnorm import GRU, LSTM, RNN, ConvGRU, ConvRNN, StreamingNorm, attach, backends, kernels

LSTM_WITH_CELL = partial(LSTM, cell_norm=True)
LAYERS = {"RNN": RNN, "GRU": GRU, "LSTM": LSTM, "LSTM-cell": LSTM_WITH_CELL}
every_layer = pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)


def states_of(final):
    """What is carried from step to step: h, and c of an LSTM."""
    return final if isinstance(final, tuple) else (final,)


def as_given(net, states):
    """The same as an argument of the layer."""
    return tuple(states) if isinstance(net, LSTM) else states[0]


def norms_of(net):
    return [module for module in net.modules() if isinstance(module, StreamingNorm)]


def joined(tensors):
    """Tensors by the last part of their names: in a layer of one unit, a sum may be near 0 in one norm, not in all."""
    groups = {}
    for name, tensor in tensors:
        name = name.split(".")[-1]
        for row, part in enumerate(tensor if tensor.ndim == 2 and "weight" not in name else [tensor]):
            groups.setdefault(f"{name} {row}", []).append(part.detach().flatten())
    return {name: torch.cat(parts).clone() for name, parts in groups.items()}


def everything(net):
    return joined(net.state_dict().items()) | joined((f"{n} grad", p.grad) for n, p in net.named_parameters())


def same(actual, expected, tolerance=1e-5):
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        close(actual[name], tensor, name, tolerance)


def train(net, windows, start, lengths, packed):
    """Truncated backpropagation: the state is carried over from chunk to chunk. Yields all there is at each update."""
    dtype = next(net.parameters()).dtype
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    attach(optimizer, net)  # norms without gain and bias have nothing in it
    start = None if start is None else [s.to(dtype, copy=True).requires_grad_() for s in start]
    for window in windows:
        found = {}
        for i, x in enumerate(window):
            x = x.to(dtype, copy=True).requires_grad_()
            given_x = pack_padded_sequence(x, lengths, enforce_sorted=False) if packed else x
            hx = None if start is None else as_given(net, start)
            output, final = net(given_x, hx, lengths=None if packed else lengths)
            output, final = output.data if packed else output, states_of(final)
            (output.square().mean() + sum(s.square().mean() for s in final)).backward()
            found |= {f"output {i}": output, f"dx {i}": x.grad} | {f"final {i} {j}": s for j, s in enumerate(final)}
            found |= {f"dstart {i} {j}": s.grad for j, s in enumerate(start or ())}
            start = [s.detach().requires_grad_() for s in final]
        yield found | everything(net)
        optimizer.step()
        optimizer.zero_grad()


def off(actual, exact):
    """By how much of the largest value."""
    if not exact.is_floating_point() or not exact.numel():
        return 0.0
    actual, exact = actual.detach().double(), exact.detach()
    return float((actual - exact).abs().max() / exact.abs().max().clamp(min=1e-300))


@st.composite
def runs(draw):
    center, warmup = draw(st.sampled_from(["running", "zero", "mean"])), draw(st.sampled_from([0, 40, 256]))
    steps, batch, hidden = draw(st.integers(1, 5)), draw(st.integers(1, 9)), draw(st.integers(1, 40))
    longest = 1
    if warmup == 0 or center == "mean" or hidden < 4:  # a spread in every step, not by chance
        longest = 4
    lengths = [steps] * longest + [draw(st.integers(1, steps)) for _ in range(batch)]
    num_layers, bidirectional = draw(st.sampled_from([(1, False), (1, False), (1, True), (2, False), (2, True)]))
    make = draw(st.sampled_from(list(LAYERS.values())))
    arguments = {
        **({"nonlinearity": draw(st.sampled_from(["tanh", "relu"]))} if make in (RNN, GRU) else {}),
        "num_layers": num_layers,
        "bidirectional": bidirectional,
        "norm": partial(
            StreamingNorm,
            p=draw(st.sampled_from([1, 2])),
            center=center,
            warmup=warmup,
            beta=[draw(tenths) / 2 for _ in range(3)],
            affine=draw(st.integers(0, 3)) > 0,
        ),
    }
    net = make, hidden, arguments
    form = draw(st.sampled_from(["whole", "lengths", "packed"]))
    return net, steps, draw(st.permutations(lengths)), form, draw(st.booleans()), draw(st.integers(0, 1000))


@needs_kernels
@settings(max_examples=30)
@given(run=runs(), where=st.sampled_from(MACHINES))
def test_fused_equals_plain(run, where):
    (make, hidden, arguments), steps, lengths, form, started, seed = run
    torch.manual_seed(seed)
    fused = make(5, hidden, **arguments)
    for norm in norms_of(fused):
        for parameter in norm.parameters():
            torch.nn.init.uniform_(parameter, 0.5, 1)
    plain, rounded, batch = copy.deepcopy(fused).double(), copy.deepcopy(fused), len(lengths)
    windows = [[torch.randn(steps, batch, 5) for _ in range(chunks)] for chunks in (2, 1, 1)]
    shape = (fused.num_layers * (1 + fused.bidirectional), batch, hidden)
    start = [torch.randn(shape) for _ in range(fused.kind.states)] if started else None
    rest = windows, start, None if form == "whole" else lengths, form == "packed"
    with machine(*where):
        actual = list(train(fused, *rest))
    with backends.use("plain"):
        theirs = list(train(rounded, *rest))
    # After an update the weights differ by their rounding, which the recurrence amplifies. How much it does without a
    # warm start, where a first sigma may be next to 0, plain torch in float32 tells.
    for tolerance, a, b, other in zip((1e-5, 1e-4, 1e-4), actual, train(plain, *rest), theirs, strict=True):
        assert a.keys() == b.keys()
        for name, exact in b.items():
            close(a[name], exact, name, max(tolerance, 10 * off(other[name], exact)))
    with torch.no_grad(), machine(*where):
        close(fused.eval()(windows[0][0])[0], plain.eval()(windows[0][0].double())[0], "evaluation", 1e-4)


@needs_kernels
@every_layer
def test_what_the_kernels_serve(make):
    net, x = make(3, 5, 2, bidirectional=True), torch.randn(6, 4, 3)
    for context, plain in ((nullcontext, False), (kernels.disabled, True)):
        with Operations() as seen, context():
            net.train()(x)[0].square().mean().backward()
        assert ("lerp" in seen.names) == plain
        with Operations() as seen, context(), torch.no_grad():
            net.eval()(x)
        assert ("tanh" in seen.names) == plain


@needs_kernels
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("make", [ConvRNN, ConvGRU, partial(ConvGRU, reset_after=True)])
def test_the_kernels_serve_every_norm_of_a_convolutional_layer(make, layout):
    fused, x = make(3, 5), torch.randn(2, 3, 3, 4, 4)
    plain = copy.deepcopy(fused).double()
    fused.to(memory_format=layout)
    assert "Of its norms: cpu serves this call" in backends.explain(fused, x.transpose(0, 1))
    for _ in range(2):
        with Operations() as seen:
            output = fused(x)[0]
            output.square().mean().backward()
        assert "lerp" not in seen.names
        exact = plain(x.double())[0]
        exact.square().mean().backward()
        same({"output": output} | everything(fused), {"output": exact} | everything(plain))
        for norm in (*norms_of(fused), *norms_of(plain)):
            norm.weights_updated()


NOT_SERVED = {
    "float64": lambda make: make(3, 5, dtype=torch.float64),
    "p": lambda make: make(3, 5, norm=partial(StreamingNorm, p=3)),
    "reference": lambda make: make(3, 5, norm=partial(StreamingNorm, ref="SP1")),
    "evaluation": lambda make: make(3, 5).eval(),  # can be differentiated twice
}


@every_layer
@pytest.mark.parametrize("case", NOT_SERVED)
def test_the_rest_goes_to_the_plain_path(make, case):
    net, results = NOT_SERVED[case](make), []
    x = torch.randn(6, 4, 3, dtype=net.weight_ih_l0.dtype)
    for context in (nullcontext(), kernels.disabled()):
        twin, leaf = copy.deepcopy(net), x.clone().requires_grad_()
        with context:
            output, _ = twin(leaf)
            (first,) = torch.autograd.grad(output.pow(3).sum(), leaf, create_graph=case == "evaluation")
            second = torch.autograd.grad(first.sum(), leaf)[0] if case == "evaluation" else first
        assert second.abs().max() > 0
        results.append([output, first, second, *twin.state_dict().values()])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@every_layer
def test_a_hook_on_a_norm_hears_every_timestep(make):
    fused, heard = make(3, 5), []
    plain = copy.deepcopy(fused).double()
    fused.norms_l0.h[0].register_forward_hook(lambda *call: heard.append(call))
    x = torch.randn(6, 4, 3)
    for net in (fused, plain):
        net(x.to(net.weight_ih_l0.dtype))[0].square().mean().backward()
    assert len(heard) == 6
    same(everything(fused), everything(plain))


@needs_kernels
@every_layer
@pytest.mark.parametrize(
    "frozen", [["weight_ih"], ["weight_hh"], ["norms"], ["weight_hh", "norms"], ["weight_ih", "norms"], ["h.0"], [""]]
)
@pytest.mark.parametrize("of_input", [True, False])
def test_whatever_needs_a_gradient_gets_it(make, frozen, of_input):
    fused = make(3, 5)
    for name, parameter in fused.named_parameters():
        parameter.requires_grad_(not any(part in name for part in frozen))
    plain = copy.deepcopy(fused).double()
    x, start = torch.randn(6, 4, 3), [torch.randn(1, 4, 5) for _ in range(fused.kind.states)]
    results = []
    for net in (fused, plain):
        leaf = x.to(net.weight_ih_l0.dtype, copy=True).requires_grad_(of_input)
        output, final = net(leaf, as_given(net, [s.to(leaf.dtype) for s in start]))
        if output.requires_grad:
            (output.square().mean() + sum(s.mean() for s in states_of(final))).backward()
        gradients = {name: p.grad for name, p in [("x", leaf), *net.named_parameters()] if p.grad is not None}
        results.append({"output": output} | gradients | joined(net.state_dict().items()))
    same(*results)


@needs_kernels
@every_layer
@pytest.mark.parametrize("only", ["output", "one step", "final", "last of the final states"])
def test_part_of_the_result_may_matter(make, only):
    fused = make(3, 5)
    plain = copy.deepcopy(fused).double()
    x = torch.randn(6, 4, 3)
    results = []
    for net in (fused, plain):
        output, final = net(x.to(net.weight_ih_l0.dtype))
        final = states_of(final)
        parts = {"output": output, "one step": output[2], "final": final[0], "last of the final states": final[-1]}
        parts[only].square().mean().backward()
        results.append(everything(net))
    same(*results)
    assert all(int(norm.grads.count) == 6 for norm in norms_of(fused))


@needs_kernels
@every_layer
def test_one_bad_value(make):
    """A sample with a NaN spoils its own outputs, and no statistics."""
    fused = make(3, 5)
    plain = copy.deepcopy(fused).double()
    for bad in (False, True, False):
        x = torch.randn(6, 4, 3)
        if bad:
            x[2, 1, 0] = torch.nan
        results = []
        for net in (fused, plain):
            net.zero_grad()
            output, final = net(x.to(net.weight_ih_l0.dtype))
            output.square().mean().backward()
            finals = {f"final {i}": s for i, s in enumerate(states_of(final))}
            results.append({"output": output} | finals | everything(net))
        same(*results)
        assert torch.isfinite(output).all() != bad
        assert all(torch.isfinite(value).all() for value in fused.state_dict().values())


@needs_kernels
@every_layer
def test_graphs_of_training(make):
    """A second derivative is refused in the words of the plain path; a retained graph pushes again."""
    fused, x, words = make(3, 5), torch.randn(6, 4, 3), []
    plain = copy.deepcopy(fused)
    for net, context in ((fused, nullcontext()), (plain, kernels.disabled())):
        with context:
            loss = net(x)[0].square().mean()
            before = {name: value.clone() for name, value in net.state_dict().items()}
            with pytest.raises(RuntimeError, match="no second derivative") as refused:
                torch.autograd.grad(loss, net.weight_hh_l0, create_graph=True)
            assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
            words.append(str(refused.value))
            loss.backward(retain_graph=True)
            loss.backward()
        assert all(int(norm.grads.count) == 12 for norm in norms_of(net))
    assert words[0] == words[1]
    same(everything(fused), everything(plain))


@needs_kernels
@pytest.mark.parametrize(
    "make", [*LAYERS.values(), partial(RNN, nonlinearity="relu"), partial(GRU, nonlinearity="relu")]
)
def test_saturated_units(make):
    """Where tanh and sigmoid are at their ends, and beyond the range of exp."""
    fused = make(3, 7)
    with torch.no_grad():
        for norm in fused.norms_l0.x:
            norm.bias.copy_(torch.tensor([-200.0, -90, -20, 0, 20, 90, 200]))
    plain = copy.deepcopy(fused).double()
    x, results = torch.randn(4, 5, 3), []
    for net in (fused, plain):
        output, _ = net(x.to(net.weight_ih_l0.dtype))
        output.square().mean().backward()
        results.append({"output": output} | everything(net))
    same(*results)


@every_layer
def test_the_output_may_be_changed_in_place(make):
    """As by dropout or an activation in place; with torch.nn it may be, too."""
    net = make(3, 5)
    output, _ = net(torch.randn(6, 4, 3))
    F.dropout(output, 0.5, inplace=True).square().mean().backward()
    assert torch.isfinite(net.weight_hh_l0.grad).all()


FORMS = ["(T, N)", "(N, T)", "(T,)", "packed", "lengths"]


@pytest.mark.parametrize("norm", [StreamingNorm, None])
@pytest.mark.parametrize("make", [RNN, GRU, LSTM])
@pytest.mark.parametrize("form", FORMS)
def test_indices_are_one_hot_vectors(make, norm, form):
    net = make(7, 5, 2, norm=norm, batch_first=form == "(N, T)", bidirectional=True)
    twin, lengths = copy.deepcopy(net), [6, 2, 5, 6]
    for dtype in (torch.int64, torch.int32):
        indices = torch.randint(7, {"(N, T)": (4, 6), "(T,)": (6,)}.get(form, (6, 4)))
        hot = F.one_hot(indices, 7).float()
        results = []
        for each, x in ((net, indices.to(dtype)), (twin, hot)):
            if form == "packed":
                x = pack_padded_sequence(x, lengths, enforce_sorted=False)
            output, state = each(x, lengths=lengths) if form == "lengths" else each(x)
            output = output.data if isinstance(output, PackedSequence) else output
            output.square().mean().backward()
            results.append({"output": output} | joined((f"state {i}", s) for i, s in enumerate(states_of(state))))
            results[-1] |= everything(each)
            for module in norms_of(each):
                module.weights_updated()
        same(*results)


BAD_INDICES = {
    "negative": (torch.tensor([[0, -1]]), ValueError, "from -1 to 0.*must be from 0 to 6"),
    "too large": (torch.tensor([[0, 7]]), ValueError, "from 0 to 7.*input_size=7"),
    "too many dimensions": (torch.zeros(2, 3, 7, dtype=torch.int64), ValueError, r"indices of shape \(2, 3, 7\)"),
    "no dimension": (torch.tensor(3), ValueError, r"indices of shape \(\)"),
    "bool": (torch.ones(2, 3, dtype=torch.bool), TypeError, "torch.bool"),
    "uint8": (torch.ones(2, 3, dtype=torch.uint8), TypeError, "torch.uint8"),
    "packed": (pack_padded_sequence(torch.tensor([[0, 9]]), [1, 1]), ValueError, "from 0 to 9"),
    "packed rows": (pack_padded_sequence(torch.zeros(1, 2, 7).long(), [1, 1]), ValueError, "indices of shape"),
    "none": (torch.zeros(0, 3, dtype=torch.int64), ValueError, "0 timesteps"),
}


@pytest.mark.parametrize("case", BAD_INDICES)
@pytest.mark.parametrize("make", [RNN, GRU, LSTM])
def test_bad_indices_change_nothing(make, case):
    bad, error, message = BAD_INDICES[case]
    net = make(7, 5)
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(error, match=message):
        net(bad)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


@needs_kernels
def test_a_norm_that_serves_several_products_is_called_in_order():
    """By the loop: one set of statistics sees the products of a timestep one after the other."""
    made = []

    def shared(size, **kw):
        made.append(made[-1] if made else StreamingNorm(size, **kw))
        return made[-1]

    x = torch.randn(5, 6, 3)
    net = GRU(3, 4, norm=shared)
    twin = copy.deepcopy(net)
    with kernels.disabled():
        expected = twin(x)[0]
    torch.testing.assert_close(net(x)[0], expected, rtol=1e-5, atol=1e-5)


@needs_kernels
def test_global_hooks_hear_the_norms():
    heard = []
    handle = torch.nn.modules.module.register_module_forward_hook(lambda module, *_: heard.append(type(module)))
    try:
        RNN(3, 4)(torch.randn(5, 6, 3))
    finally:
        handle.remove()
    assert heard.count(StreamingNorm) == 10


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: GRU(3, 5), "cpu serves whole sequences"),
        (lambda: LSTM(3, 5), "cpu serves whole sequences"),
        (lambda: LSTM_WITH_CELL(3, 5), "cpu serves whole sequences"),
        (lambda: GRU(3, 5, reset_after=True), "A loop over timesteps serves this layer: backends have the RNN, the"),
        (lambda: GRU(3, 5, norm=None), "it has no norms"),
        (lambda: GRU(3, 5, batch_first=True).eval(), "evaluation can be differentiated twice. Of its norms: This call"),
        (lambda: GRU(3, 5, norm=lambda size, **kw: StreamingNorm(size, p=3, **kw)), "p = 1 or 2. Of its norms: plain"),
    ],
)
@needs_kernels
def test_what_serves_a_sequence_is_explained(make, words):
    """In words, and the layer is as it was."""
    layer = make()
    before = [value.clone() for value in layer.state_dict().values()]
    assert words in backends.explain(layer, torch.randn(7, 4, 3))
    assert all(torch.equal(a, b) for a, b in zip(before, layer.state_dict().values(), strict=True))


@needs_kernels
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("read", ["output", "h", "c"])
def test_gates_that_the_loss_does_not_reach(frozen, read):
    """Whatever is read of an LSTM, H2 gets what the loop over timesteps gives it: not one gradient more."""
    layer, x, found = LSTM(3, 4), torch.randn(5, 2, 3), []
    layer.weight_hh_l0.requires_grad_(not frozen)
    for name in ("cpu", "plain"):
        each = copy.deepcopy(layer)
        with backends.use(name):
            output, (h, c) = each(x)
            {"output": output[1], "h": h, "c": c}[read].square().sum().backward()
        found.append(each.state_dict())
    for name, value in found[0].items():
        assert torch.allclose(value.double(), found[1][name].double(), rtol=1e-4, atol=1e-4), name
