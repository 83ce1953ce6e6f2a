"""What reaches a recurrent layer is checked before anything changes; some of this ended the process once."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from streamnorm import GRU, LSTM, RNN, ConvGRU, ConvRNN, GRUCell, LSTMCell, RNNCell, StreamingNorm

every_layer = pytest.mark.parametrize("make", [RNN, GRU, LSTM])
x = torch.randn(6, 4, 3, generator=torch.Generator().manual_seed(0))


def refused(net, error, message, *call):
    """The call is refused, and the layer is as it was: an update that is pending is not folded in, either."""
    norms = [module for module in net.modules() if isinstance(module, StreamingNorm)]
    for norm in norms:
        norm.weights_updated()
    before = [copy.deepcopy(norm.state) for norm in norms]
    with pytest.raises(error, match=message):
        net(*call)
    for norm, state in zip(norms, before, strict=True):
        same(norm.state, state)


def same(a, b):
    """Dataclasses of tensors and of such dataclasses."""
    for name, value in vars(a).items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, getattr(b, name)), name
        else:
            same(value, getattr(b, name))


def trained(make, *arguments, **keywords):
    net = make(*arguments, **keywords)
    shape = (2, 5, 3, 6, 6) if "Conv" in make.__name__ else (4, 3) if "Cell" in make.__name__ else (6, 4, 3)
    result = net(torch.randn(shape))
    (result if isinstance(result, torch.Tensor) else result[0]).sum().backward()
    return net


def packed(sizes, rows=None, order=None, back=None):
    sizes = sizes if isinstance(sizes, torch.Tensor) else torch.tensor(sizes)
    data = torch.randn(int(sizes.sum()) if rows is None else rows, 3)
    order, back = (None if each is None else torch.tensor(each) for each in (order, back))
    return PackedSequence(data, sizes, order, back)


PACKS = {
    "too many": ((400, 300, 200), 9, ValueError, "add up to 900, its data has 9 rows: .*pack_padded_sequence"),
    "one more": ((4, 3, 2), 8, ValueError, "add up to 9, its data has 8 rows"),
    "too few": ((3, 2), 9, ValueError, "add up to 5, its data has 9 rows"),
    "no rows": ((3, 2), 0, ValueError, "add up to 5, its data has 0 rows"),
    "rising": ((2, 4, 3), None, ValueError, "is 4 after 2 at timestep 1: .*never rising"),
    "rising at the end": ((4, 2, 3), None, ValueError, "is 3 after 2 at timestep 2"),
    "zero": ((4, 0), None, ValueError, "is 0 after 4 at timestep 1: .*at least 1"),
    "zero first": ((0,), None, ValueError, "is 0 at timestep 0"),
    "negative": ((4, -3, 5), 6, ValueError, "is -3 after 4 at timestep 1"),
    "large": ((2**62, 2**62), 4, ValueError, "add up to 9223372036854775808"),
    "empty": (torch.zeros(0, dtype=torch.int64), 4, TypeError, r"torch.int64 .*of shape \(0,\): .*T > 0"),
    "float": (torch.tensor([3.0, 2.0]), 5, TypeError, "torch.float32.*must be torch.int64"),
    "int32": (torch.tensor([3, 2], dtype=torch.int32), 5, TypeError, "torch.int32"),
    "table": (torch.tensor([[3, 2]]), 5, TypeError, r"of shape \(1, 2\)"),
    "number": (torch.tensor(3), 3, TypeError, r"of shape \(\)"),
}


@pytest.mark.parametrize("case", PACKS)
@every_layer
def test_batch_sizes_that_do_not_fit(make, case):
    sizes, rows, error, message = PACKS[case]
    sizes = sizes if isinstance(sizes, torch.Tensor) else torch.tensor(sizes)
    bad = PackedSequence(torch.randn(int(sizes.sum()) if rows is None else rows, 3), sizes)
    refused(trained(make, 3, 5, 2, bidirectional=True), error, f"batch_sizes of a PackedSequence.*{message}", bad)


ORDERS = {
    "short": ([0, 1], [0, 1, 2], ValueError, r"^sorted_indices .*shape \(2,\): must be \(3,\)"),
    "long": ([0, 1, 2, 3], [0, 1, 2], ValueError, r"^sorted_indices .*shape \(4,\)"),
    "short back": ([0, 1, 2], [0, 1], ValueError, r"^unsorted_indices .*shape \(2,\)"),
    "twice": ([0, 1, 1], [0, 1, 2], ValueError, "0 to 2 once each"),
    "out of range": ([0, 1, 3], [0, 1, 2], ValueError, "once each"),
    "negative": ([0, 1, -1], [0, 1, 2], ValueError, "once each"),
    "back out of range": ([0, 1, 2], [0, 1, 7], ValueError, "undo each other"),
    "not the inverse": ([1, 2, 0], [1, 2, 0], ValueError, "undo each other"),
    "float": ([0.0, 1.0, 2.0], [0, 1, 2], TypeError, "^sorted_indices .*torch.float32.*must be torch.int64"),
    "one alone": (None, [0, 1, 2], TypeError, "^sorted_indices .*None.*both or none"),
}


@pytest.mark.parametrize("case", ORDERS)
@every_layer
def test_orders_that_do_not_fit(make, case):
    order, back, error, message = ORDERS[case]
    refused(trained(make, 3, 5), error, message, packed([3, 2], None, order, back))


def test_indices_are_checked_like_vectors():
    bad = PackedSequence(torch.zeros(5, dtype=torch.int64), torch.tensor([300, 2]))
    refused(trained(GRU, 3, 5), ValueError, "add up to 302, its data has 5 rows", bad)


@every_layer
def test_what_fits_is_taken(make):
    net = trained(make, 3, 5)
    for given in (packed([3, 2]), packed([1]), packed([3, 2], None, [1, 2, 0], [2, 0, 1])):
        assert net(given)[0].data.shape == (len(given.data), 5)
    meta = make(3, 5, device="meta")
    assert meta(pack_padded_sequence(x.to("meta"), [6, 5, 5, 2], enforce_sorted=False))[0].data.is_meta


def emptied(tensor, left=0):
    tensor.untyped_storage().resize_(left)
    return tensor


class Grown(nn.Module):
    def forward(self, weight):
        return torch.cat([weight, weight], 1)


LAST = "_l1_reverse"
NEEDS = "with input_size=3 and hidden_size=5 needs"
WEIGHTS = {
    "small": (lambda n: setattr(n, "weight_hh" + LAST, nn.Parameter(torch.zeros(3, 3))), ValueError, NEEDS),
    "wide": (
        lambda n: setattr(n, "weight_hh" + LAST, nn.Parameter(torch.zeros(n.kind.gates * 5, 64))),
        ValueError,
        rf"weight_hh{LAST} has shape \(\d+, 64\): .* {NEEDS} \(\d+, 5\)",
    ),
    "narrow data": (
        lambda n: setattr(getattr(n, "weight_hh" + LAST), "data", torch.zeros(n.kind.gates * 5, 3)),
        ValueError,
        rf"{NEEDS} \(\d+, 5\)",
    ),
    "of the input": (
        lambda n: setattr(getattr(n, "weight_ih" + LAST), "data", torch.zeros(3, 10)),
        ValueError,
        rf"weight_ih{LAST} has shape \(3, 10\): .* {NEEDS} \(\d+, 10\)",
    ),
    "of vectors": (
        lambda n: setattr(n, "weight_hh" + LAST, nn.Parameter(torch.zeros(n.kind.gates * 25))),
        ValueError,
        NEEDS,
    ),
    "none": (lambda n: setattr(n, "weight_hh" + LAST, None), ValueError, rf"weight_hh{LAST} has shape None"),
    "bias": (lambda n: setattr(n, "bias_hh" + LAST, nn.Parameter(torch.zeros(2))), ValueError, "bias_hh.*needs"),
    "bias of the input": (
        lambda n: setattr(n, "bias_ih" + LAST, nn.Parameter(torch.zeros(2, 2))),
        ValueError,
        r"bias_ih.* shape \(2, 2\)",
    ),
    "double": (
        lambda n: setattr(n, "weight_hh" + LAST, nn.Parameter(torch.zeros(n.kind.gates * 5, 5).double())),
        TypeError,
        rf"weight_hh{LAST} is torch.float64 on cpu, the input torch.float32",
    ),
    "meta": (
        lambda n: setattr(n, "weight_hh" + LAST, nn.Parameter(torch.zeros(n.kind.gates * 5, 5, device="meta"))),
        TypeError,
        "on meta, the input",
    ),
    "no memory": (
        lambda n: emptied(getattr(n, "weight_hh" + LAST)),
        ValueError,
        rf"weight_hh{LAST} .* has 0 bytes of memory, fewer than its shape needs",
    ),
    "little memory": (lambda n: emptied(getattr(n, "weight_ih" + LAST), 4), ValueError, "has 4 bytes of memory"),
    "parametrized": (
        lambda n: parametrize.register_parametrization(n, "weight_hh" + LAST, Grown(), unsafe=True),
        ValueError,
        rf"weight_hh{LAST} has shape \(\d+, 10\): .*take off what changed it",
    ),
    "another size": (lambda n: setattr(n, "hidden_size", 7), ValueError, "hidden_size=7 needs"),
    "a norm less": (lambda n: n.norms_l1_reverse.h.__delitem__(0), ValueError, r"norms_l1_reverse.h has \d norms"),
    "a norm more": (
        lambda n: n.norms_l1_reverse.x.append(StreamingNorm(5)),
        ValueError,
        r"norms_l1_reverse.x has \d norms: .* needs one per gate",
    ),
    "a small norm": (
        lambda n: n.norms_l1_reverse.x.__setitem__(0, StreamingNorm(3)),
        ValueError,
        "num_features=3",
    ),
    "a gain": (
        lambda n: setattr(n.norms_l1_reverse.h[0].weight, "data", torch.ones(3)),
        ValueError,
        r"norms_l1_reverse.h.0.weight is torch.float32 of shape \(3,\): a norm of 5 features needs",
    ),
    "a gain of another type": (
        lambda n: setattr(n.norms_l1_reverse.h[0], "bias", nn.Parameter(torch.ones(5).long(), requires_grad=False)),
        ValueError,
        "norms_l1_reverse.h.0.bias is torch.int64",
    ),
    "a gain without memory": (
        lambda n: emptied(n.norms_l1_reverse.h[0].weight),
        ValueError,
        "norms_l1_reverse.h.0.weight .* has 0 bytes of memory",
    ),
}


@pytest.mark.parametrize("case", WEIGHTS)
@every_layer
def test_weights_that_do_not_fit(make, case):
    """In the last layer: the first has not streamed anything by then."""
    spoil, error, message = WEIGHTS[case]
    net = trained(make, 3, 5, 2, bidirectional=True)
    spoil(net)
    refused(net, error, message, x)
    refused(net, error, message, pack_padded_sequence(x, [6, 5, 5, 2]))


@pytest.mark.parametrize("make", [RNNCell, GRUCell, LSTMCell])
def test_weights_of_cells(make):
    for name, value in (("weight_hh", torch.zeros(3, 3)), ("weight_ih", torch.zeros(2)), ("bias_hh", torch.zeros(2))):
        net = trained(make, 3, 5)
        setattr(net, name, nn.Parameter(value))
        refused(net, ValueError, f"{name} has shape", x[0])
    net = trained(make, 3, 5)
    net.norms.h[-1].weight.data = torch.ones(3)
    refused(net, ValueError, r"norms.h.\d.weight", x[0])


@pytest.mark.parametrize("make", [ConvRNN, ConvGRU])
def test_weights_of_convolutions(make):
    net = trained(make, 3, 5, 2)
    net.weight_hh_l1 = nn.Parameter(torch.zeros(net.kind.gates * 5, 5, 1, 1))
    refused(net, ValueError, r"weight_hh_l1 has shape \(\d+, 5, 1, 1\): .*5, 3, 3\)", torch.randn(2, 5, 3, 6, 6))


@every_layer
def test_states_and_inputs_without_memory(make):
    net = trained(make, 3, 5)
    h = emptied(torch.randn(1, 4, 5))
    refused(net, ValueError, "hx .* has 0 bytes of memory", x, (h, h) if make is LSTM else h)
    refused(net, ValueError, "input .* has 8 bytes of memory", emptied(x.clone(), 8))
    refused(net, ValueError, "input .* has 0 bytes of memory", emptied(torch.zeros(6, 4, dtype=torch.int64)))


def negated(*shape):
    """A view with a neg bit."""
    return torch.view_as_complex(torch.randn(*shape, 2)).conj().imag


ODD = {
    "negative": negated,
    "zero": lambda *shape: torch._efficientzerotensor(shape),
    "expanded": lambda *shape: torch.randn(shape[-1:]).expand(shape),
    "strided": lambda *shape: torch.randn(*shape, 2)[..., 1],
    "offset": lambda *shape: torch.randn(2, *shape)[1],
}


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("part", ["hx", "weight", "gain"])
@every_layer
def test_odd_tensors_count_by_their_values(make, part, kind):
    first, results = make(3, 5), []
    odd = ODD[kind](*{"hx": (1, 4, 5), "weight": (first.kind.gates * 5, 5), "gain": (5,)}[part])
    for value in (odd, torch.empty(odd.shape).copy_(odd)):
        net, h = copy.deepcopy(first), value if part == "hx" else None
        h = (value, value) if make is LSTM and part == "hx" else h
        if part == "weight":
            net.weight_hh_l0 = nn.Parameter(value)
        elif part == "gain":
            net.norms_l0.h[0].weight = nn.Parameter(value)
        output, final = net(x, h)
        output.square().mean().backward()
        results.append([output, *(final if make is LSTM else [final]), net.weight_ih_l0.grad])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@every_layer
def test_a_bias_put_there_by_hand_counts_everywhere(make):
    net = make(3, 5).eval()
    net.bias_hh_l0 = nn.Parameter(torch.full((net.kind.gates * 5,), 5.0))
    with torch.no_grad():
        fast = net(x)[0]
    torch.testing.assert_close(fast, net(x)[0])  # with gradients, by the loop


def test_a_parametrization_is_computed_once_per_call():
    calls = []

    class Counted(nn.Module):
        def forward(self, weight):
            calls.append(1)
            return weight * 1

    net = GRU(3, 5)
    parametrize.register_parametrization(net, "weight_hh_l0", Counted())
    calls.clear()
    net(x)
    assert len(calls) == 1
