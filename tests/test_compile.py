"""What is special to torch.compile: one graph for all updates, what it refuses, and the promises of the operators.

That compiled calls compute what others compute is in test_conformance.py, for every backend.
"""

import copy
from collections import Counter
from functools import partial
from itertools import product

import pytest
import torch
import torch._dynamo
from torch import nn
from torch._dynamo.backends.common import aot_autograd

from streamnorm import GRU, RNN, GeneralBatchNorm, StreamingNorm, TimeSpecificNorm, backends
from streamnorm.core.algorithm import NUMBERS
from streamnorm.core.config import Config
from streamnorm.core.state import H1, H2, to_dict

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of the compiler, about itself
    pytest.mark.skipif(torch.__version__ < "2.13", reason="older compilers refuse some of this; see speed.md"),
]


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


class Network(nn.Module):
    """A convolutional network; with `calls` > 1 the same norm and weights serve several times, as in a recurrence."""

    def __init__(self, norm, calls=1):
        super().__init__()
        self.conv, self.norm, self.calls = nn.Conv2d(3, 3, 3, padding=1), norm(3), calls
        self.out = nn.Linear(3 * 36, 4)

    def forward(self, x):
        for _ in range(self.calls):
            x = x + 0.3 * torch.tanh(self.norm(self.conv(x)))
        return self.out(x.flatten(1))


def accumulated(model, batches):
    for x in batches:
        model(x).square().mean().backward()


def joined(model, batches):
    """All forward passes before one backward pass."""
    sum(model(x).square().mean() for x in batches).backward()


def train(called, module, pattern, updates, seed, samples=5):
    """Gradients and outputs of every update, then the state."""
    torch.manual_seed(seed)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    seen = []
    for _ in range(updates):
        optimizer.zero_grad()
        pattern(called, [torch.randn(samples, 3, 6, 6) for _ in range(2)])
        seen += [p.grad.clone() for p in module.parameters()]
        optimizer.step()
    return seen + [value.clone() for value in module.state_dict().values()]


def assert_same(ours, theirs, tolerance=2e-5):
    for a, b in zip(ours, theirs, strict=True):
        assert (a.double() - b.double()).abs().max() <= tolerance * (b.double().abs().max() + 1e-2)


def compare(eager, pattern, backend, samples=5):
    compiled = copy.deepcopy(eager)
    held = compiled.state_dict()  # live statistics, for graphs that read them
    called = torch.compile(compiled, fullgraph=True, backend=backend)
    assert_same(train(called, compiled, pattern, 4, 1, samples), train(eager, eager, pattern, 4, 1, samples))
    with torch._dynamo.config.patch(error_on_recompile=True):
        more = train(called, compiled, pattern, 3, 2, samples)
    assert_same(more, train(eager, eager, pattern, 3, 2, samples))
    now = compiled.state_dict()
    assert all(torch.equal(value, now[key]) for key, value in held.items() if "running_" in key)
    x = torch.randn(2, 3, 6, 6)
    assert_same([called.eval()(x)], [eager.eval()(x)])


@pytest.mark.parametrize(
    ("norm", "calls", "pattern"),
    [(StreamingNorm, 3, joined), (partial(StreamingNorm, ref="SP1"), 1, accumulated), (GeneralBatchNorm, 1, joined)],
)
def test_a_network_is_one_graph_for_all_updates(norm, calls, pattern):
    """Without a recompilation once it is warm. Calls of every kind are compiled in test_conformance.py."""
    compare(Network(norm, calls), pattern, "aot_eager")


@pytest.mark.parametrize("samples", [1, 5], ids=["small windows", "full windows"])
def test_folds_of_a_process_group(samples):
    """Which a graph makes in plain torch: of one process here."""
    compare(Network(partial(StreamingNorm, process_group="world", warmup=0)), accumulated, "aot_eager", samples)


@pytest.mark.parametrize("norm", [StreamingNorm, partial(StreamingNorm, p=1, warmup=0)])
def test_inductor(norm):
    compare(Network(norm, 2), joined, "inductor")


def test_the_compiler_sees_everything_but_the_streams():
    """No operator of ours is given anything of the size of the activations: what is computed of these can be fused."""
    graphs = []

    def seen(graph, inputs):
        graphs.append(graph)
        return graph.forward

    model = Network(StreamingNorm)
    called = torch.compile(model, fullgraph=True, backend=aot_autograd(fw_compiler=seen, bw_compiler=seen))
    called(torch.randn(5, 3, 6, 6)).sum().backward()
    assert len(graphs) == 2
    found = Counter()
    for node in (node for graph in graphs for node in graph.graph.nodes if node.op == "call_function"):
        names = [str(node.target), *(str(each) for each in node.args if isinstance(each, torch._ops.OpOverload))]
        ours = [name for name in names if name.startswith("streamnorm.")]
        if not ours:
            continue
        found[ours[0].split(".")[1]] += 1
        given = [each.meta["val"] for each in node.all_input_nodes if isinstance(each.meta["val"], torch.Tensor)]
        assert max(tensor.numel() for tensor in given) <= 2 * 3 + NUMBERS
    assert found == {"center": 1, "push_statistics_": 1, "push_gradients_": 1}


def test_changing_batch_sizes():
    """One graph for a size, one for all of them, one for a single sample: no more."""
    eager = Network(StreamingNorm)
    compiled = copy.deepcopy(eager)
    graphs = []

    def counted(graph, inputs):  # once it is compiled: torch begins anew where it meets a scalar in float64
        graphs.append(torch._dynamo.lookup_backend("aot_eager")(graph, inputs))
        return graphs[-1]

    called = torch.compile(compiled, fullgraph=True, backend=counted)
    for size in (8, 8, 5, 3, 7, 2, 1, 6, 1):
        x = torch.randn(size, 3, 6, 6)
        for model in (called, eager):
            model(x).square().mean().backward()
    assert len(graphs) <= 3
    assert_same(compiled.state_dict().values(), eager.state_dict().values())


@pytest.mark.parametrize(
    "make",
    [
        RNN,
        partial(GRU, batch_first=True, norm=None),
        partial(GRU, reset_after=True),
        partial(RNN, norm=partial(TimeSpecificNorm, steps=2)),
    ],
)
def test_recurrent_layers(make):
    eager = make(3, 4)
    compiled = copy.deepcopy(eager)
    called, x = torch.compile(compiled, fullgraph=True, backend="aot_eager"), torch.randn(3, 3, 3)
    results = []
    for model, module in ((called, compiled), (eager, eager)):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        results.append([])
        for _ in range(3):
            optimizer.zero_grad()
            output, final = model(x)
            (output.square().mean() + final.square().mean()).backward()
            optimizer.step()
            results[-1] += [output.detach(), *(p.grad.clone() for p in module.parameters())]
        results[-1] += module.state_dict().values()
    assert_same(*results)


def test_what_cannot_be_compiled_says_so():
    """Binding to a spatial size has to happen outside; afterwards it compiles."""
    layer = StreamingNorm(3, ref="BA6")
    called = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="has to run uncompiled"):
        called(torch.randn(4, 3, 5))
    layer(torch.randn(4, 3, 5))
    torch._dynamo.reset()
    assert called(torch.randn(4, 3, 5)).shape == (4, 3, 5)
    assert int(layer.stats.count) == 2


def test_the_operators_keep_their_promises():
    """torch's own check of the schemas (what is written to), the fake implementations and their strides."""
    layer = StreamingNorm(3)
    tensors, ops = to_dict(layer.state), torch.ops.streamnorm
    h1, h2 = [tensors[name] for name in H1], [tensors[name] for name in H2 if name != "loss_scale"]
    mean, sigma, present = torch.randn(1, 3, 1, 1), torch.rand(1, 3, 1, 1) + 0.5, torch.ones(1, 3, 1, 1).bool()
    counted = (None, None, None), (torch.full((1, 1, 1, 1), 50.0), present, torch.tensor(2))

    def check(operator, *arguments):
        torch.library.opcheck(operator.default, arguments, test_utils=("test_schema", "test_faketensor"))
        return operator(*arguments)

    for among in {"plain", backends.among}:
        for p, counts in product((2.0, 1.0), counted):
            text = Config(p=p).text
            sizes, settings = (100, 4, 3, True, torch.randn(3)), (layer._name_tag, text, among)
            check(ops.center, mean, counts[1], *settings, layer.state.mean, layer.state.seen)
            kept = check(ops.push_statistics_, mean, sigma, *counts, *sizes, *settings, *h1)
            check(ops.push_gradients_, torch.randn(2, 3), kept, *settings, *h2)
