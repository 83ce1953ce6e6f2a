"""torch.compile(fullgraph=True): the same values as without it, state included, and no recompilation at each update."""

import copy
from functools import partial

import pytest
import torch
import torch._dynamo
from torch import nn

from streamnorm import GRU, RNN, GeneralBatchNorm, SampleNorm, StreamingNorm, TimeSpecificNorm, kernels

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of the compiler, about itself
    pytest.mark.skipif(torch.__version__ < "2.13", reason="older compilers refuse some of this; see docs/speed.md"),
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


def train(called, module, pattern, updates, seed):
    """Gradients and outputs of every update, then the state."""
    torch.manual_seed(seed)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    seen = []
    for _ in range(updates):
        optimizer.zero_grad()
        pattern(called, [torch.randn(5, 3, 6, 6) for _ in range(2)])
        seen += [p.grad.clone() for p in module.parameters()]
        optimizer.step()
    return seen + [value.clone() for value in module.state_dict().values()]


def assert_same(ours, theirs, tolerance=2e-5):
    for a, b in zip(ours, theirs, strict=True):
        assert (a.double() - b.double()).abs().max() <= tolerance * (b.double().abs().max() + 1e-2)


def compare(eager, pattern, backend):
    compiled = copy.deepcopy(eager)
    called = torch.compile(compiled, fullgraph=True, backend=backend)
    assert_same(train(called, compiled, pattern, 4, 1), train(eager, eager, pattern, 4, 1))
    with torch._dynamo.config.patch(error_on_recompile=True):
        more = train(called, compiled, pattern, 3, 2)
    assert_same(more, train(eager, eager, pattern, 3, 2))
    x = torch.randn(2, 3, 6, 6)
    assert_same([called.eval()(x)], [eager.eval()(x)])


NORMS = {
    "default": StreamingNorm,
    "p=1": partial(StreamingNorm, p=1),
    "p=3": partial(StreamingNorm, p=3, warmup=0),
    "SP1": partial(StreamingNorm, ref="SP1"),
    "BA2": partial(StreamingNorm, ref="BA2", beta=(0.5, 0.3, 0.2)),
    "frozen": partial(StreamingNorm, affine=False),
    "batch": GeneralBatchNorm,
    "sample": SampleNorm,
}


@pytest.mark.parametrize(("calls", "pattern"), [(1, accumulated), (3, joined)])
@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
def test_compiled_equals_eager(norm, calls, pattern):
    compare(Network(norm, calls), pattern, "aot_eager")


def test_inductor():
    compare(Network(StreamingNorm, 2), joined, "inductor")


@pytest.mark.skipif(not kernels.available(), reason="the kernels are not built")
def test_compiled_calls_use_the_kernels():
    outputs = []
    for context in (kernels.disabled, torch.enable_grad):
        torch._dynamo.reset()
        torch.manual_seed(0)
        layer = StreamingNorm(8)
        called = torch.compile(layer, fullgraph=True, backend="aot_eager")
        with context():
            x = torch.randn(4, 8, 5, 5, requires_grad=True)
            called(x).square().sum().backward()
        outputs.append([x.grad, *layer.state_dict().values()])
    assert_same(*outputs)
    assert not all(torch.equal(a, b) for a, b in zip(*outputs, strict=True))  # by other arithmetic


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


def test_masks_layouts_and_bfloat16():
    mask = torch.rand(4, 6, 6) < 0.7
    for make, call in {
        "mask": (lambda: StreamingNorm(3), lambda f, x: f(x, mask=mask)),
        "last": (lambda: StreamingNorm(3, channel_dim=-1), lambda f, x: f(x.movedim(1, -1))),
        "channels_last": (lambda: StreamingNorm(3), lambda f, x: f(x.to(memory_format=torch.channels_last))),
        "bfloat16": (lambda: StreamingNorm(3), lambda f, x: f(x.bfloat16())),
        "double": (lambda: StreamingNorm(3, dtype=torch.float64), lambda f, x: f(x.double())),
    }.values():
        torch._dynamo.reset()
        eager = make()
        compiled = copy.deepcopy(eager)
        called, results = torch.compile(compiled, fullgraph=True, backend="aot_eager"), []
        for model, module in ((called, compiled), (eager, eager)):
            torch.manual_seed(0)
            results.append([])
            for _ in range(3):
                x = torch.randn(4, 3, 6, 6, requires_grad=True)
                y = call(model, x)
                y.float().square().sum().backward()
                module.weights_updated()
                results[-1] += [y.detach(), x.grad]
            results[-1] += module.state_dict().values()
        assert_same(*results)


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
    state = StreamingNorm(3).state
    stats, grads = state.stats, state.grads
    h1 = stats.long, stats.short, stats.count, stats.empty, stats.pending, state.mean, state.sigma
    h1 = *h1, state.seen, state.elements, state.elements_before
    h2 = grads.long, grads.short, grads.count, grads.empty, grads.pending
    weight, bias = torch.randn(3), torch.randn(3)
    streaming = [0.7, 0.3], [0.7, 0.3, 0.0], [0.7, 0.3, 0.7, 0.3], 256.0, True
    tests = ("test_schema", "test_faketensor")
    for x in (torch.randn(4, 3, 5, 5), torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last)):
        dy = torch.randn(()).expand(4, 3, 5, 5)
        for fused in (False, True) if kernels.available() else (False,):
            for p in (2.0, 1.0):
                settings = True, "each", "all", p, "running", 1e-5, *streaming, fused
                forward = x, weight, bias, None, *settings, *h1
                _, kept = torch.ops.streamnorm.forward_(*forward)
                torch.library.opcheck(torch.ops.streamnorm.forward_.default, forward, test_utils=tests)
                backward = dy, x, weight, None, kept, *settings, *h2
                torch.library.opcheck(torch.ops.streamnorm.backward_.default, backward, test_utils=tests)
