"""The kernels of a layer compute what the plain path computes: outputs, gradients and state, for all they serve."""

import copy
import os
import pickle
import re
import shutil
import subprocess
import sys
from contextlib import contextmanager, nullcontext
from math import inf, nan, prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from streamnorm import StreamingNorm, attach, kernels

needs_kernels = pytest.mark.skipif(not kernels.available(), reason="the kernels are not built, or switched off")
MACHINES = [(name, threads) for name in kernels.VARIANTS for threads in (1, 2)]
CENTERS = ("mean", "running", "zero")
LAYOUTS = {
    "contiguous": lambda x: x.contiguous(),
    "channels_last": lambda x: x.movedim(1, -1).contiguous().movedim(-1, 1),
    "sliced": lambda x: torch.cat([x, x], 1)[:, : x.shape[1]],  # rows with a gap in between
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
}


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """But where a test asks for more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@contextmanager
def machine(variant, threads):
    kernels._native.use(variant)  # without such instructions, what was in use stays so
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(1)
        kernels._native.use(kernels.variant)


def close(actual, expected, what="", tolerance=1e-5):
    """Within a tolerance relative to the largest value; what is not finite is so in the same places."""
    actual, expected = actual.detach(), expected.detach()
    if not expected.is_floating_point():
        assert torch.equal(actual, expected), what
        return
    finite = expected.isfinite()
    assert torch.equal(actual.isfinite(), finite), f"{what}: not finite in other places"
    actual, expected = (torch.where(finite, t, 0) for t in (actual, expected))
    error, size = (actual - expected).abs().max(), expected.abs().max()
    assert error <= tolerance * size, f"{what}: off by {error} of {size}"


def same_state(fused, plain):
    for (name, a), b in zip(fused.state_dict().items(), plain.state_dict().values(), strict=True):
        for row in range(2 if "long" in name or "short" in name else 0):  # mean and sigma have sizes of their own
            close(a[row], b[row], f"{name}[{row}]")
        close(a, b, name)


def trained(layer, x, dy):
    """A training call: the output and all gradients."""
    leaf = x.detach().requires_grad_()
    y = layer(leaf)
    y.backward(dy)
    return [y, leaf.grad, *(p.grad for p in layer.parameters())]


def same_call(fused, plain, x, dy):
    actual = trained(fused, x, dy)
    with kernels.disabled():
        expected = trained(plain, x, dy)
    for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
        close(a, b, ("output", "gradient of the input", "of the gain", "of the bias")[i])
    same_state(fused, plain)
    return actual


class Operations(TorchDispatchMode):
    """The names of torch's operations. A push into a stream is a `lerp` on the plain path, and none in a kernel."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.__name__.split(".")[0])
        return func(*args, **(kwargs or {}))


def data(*shape):
    """An input with an offset per channel, and a gradient whose sums over a channel are not near 0 by chance."""
    wide = (1, -1, *(1 for _ in shape[2:]))
    offset, scale = (torch.linspace(*ends, shape[1]).view(wide) for ends in ((0.5, 3), (2, 0.5)))
    z = torch.randn(shape)
    return offset + scale * z, 0.5 + 0.5 * z + 0.5 * torch.randn(shape)


def away_from_center(x, layer):
    """Without elements so close to c that rounding decides their sign, on which the gradient for p = 1 depends."""
    c = x.double().mean([d for d in range(x.ndim) if d != 1], keepdim=True)
    if layer.center == "zero":
        c = torch.zeros_like(c)
    elif layer.center == "running":
        started = layer.state_dict()["seen"] > 0 or not layer.warmup
        c = layer.mean.view(c.shape) if started else c.mean()
    distance, least = x - c, 1e-3 * x.std()
    return torch.where(distance.abs() < least, c + least.copysign(distance), x.double()).float()


tenths = st.integers(0, 10).map(lambda n: n / 10)


@st.composite
def runs(draw):
    """A layer, the shape and layouts of its input, and how often it is called: updates, batches, calls per batch."""
    space = draw(st.sampled_from([(), (), (1,), (3,), (33,), (3, 3), (5, 7), (8, 8), (3, 5, 1), (3, 2, 5)]))
    samples, channels = draw(st.integers(1, 20)), draw(st.integers(1, 70))
    if draw(st.integers(0, 5)) == 0:
        samples = 65536 // (channels * prod(space)) + draw(st.integers(1, 5))  # enough work for threads
    center, warmup = draw(st.sampled_from(CENTERS)), draw(st.sampled_from([0, 256, None]))
    if samples * prod(space) < 8:  # few elements have a spread only about a running center and with neighbours
        center, warmup, channels = "zero" if center == "zero" else "running", warmup or 64, channels + 8
    short, decay = draw(tenths), draw(st.sampled_from([1.0, 0.9]))
    arguments = {
        "p": draw(st.sampled_from([1, 2])),
        "center": center,
        "warmup": 2.5 * samples * prod(space) if warmup is None else warmup,
        "alpha": (decay * (1 - short), decay * short),
        "beta": [draw(tenths) for _ in range(3)],
        "kappa": [draw(tenths) + 0.1 for _ in range(4)],
        "affine": draw(st.booleans()),
        "channel_dim": draw(st.sampled_from([1, 1, -1])),
    }
    layouts = [draw(st.sampled_from(sorted(LAYOUTS))) for _ in range(2)]
    schedule = [draw(st.integers(1, most)) for most in (3, 2, 2)]
    size = draw(st.sampled_from([0.03, 1.0, 100.0]))
    return (samples, channels, *space), arguments, layouts, schedule, size, draw(st.integers(0, 1000))


def train(layer, schedule, feed):
    updates, batches, calls = schedule
    seen = []
    for _ in range(updates):
        for _ in range(batches):
            xs, ys, dys = [], [], []
            for _ in range(calls):  # before the one backward pass, as a recurrent network does
                x, dy = feed(layer)
                xs.append(x.requires_grad_())
                ys.append(layer(x))
                dys.append(dy)
            torch.autograd.backward(ys, dys)
            seen += [*ys, *(x.grad for x in xs)]
        layer.weights_updated()
    return [*seen, *(p.grad for p in layer.parameters())]


@needs_kernels
@settings(max_examples=200)
@given(run=runs(), where=st.sampled_from(MACHINES))
def test_fused_equals_plain(run, where):
    shape, arguments, layouts, schedule, size, seed = run
    torch.manual_seed(seed)
    fused, fed = StreamingNorm(shape[1], **arguments), []
    for parameter in fused.parameters():
        nn.init.uniform_(parameter, 0.5, 2)
    plain = copy.deepcopy(fused).double()

    def make(layer):
        x, dy = data(*shape)
        pair = away_from_center(x * size, layer) if layer.p == 1 else x * size, dy
        if layer.channel_dim == -1:
            pair = [t.movedim(1, -1).contiguous() for t in pair]
        fed.append([LAYOUTS[layout](t) for layout, t in zip(layouts, pair, strict=True)])
        return [t.double() for t in fed[-1]]

    expected = train(plain, schedule, make)  # in float64, which the kernels do not serve
    again = iter(fed)
    with machine(*where):
        actual = train(fused, schedule, lambda layer: next(again))
    for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
        close(a, b, f"result {i} of {len(actual)}")
    same_state(fused, plain)


SERVED = {
    "rows": (9, 5),
    "one row": (1, 5),
    "planes": (4, 5, 3),
    "channels_last": (4, 5, 3, 3),
    "sliced": (9, 5),
    "threads": (80, 40, 5, 5),
}


@needs_kernels
@pytest.mark.parametrize("case", SERVED)
def test_what_the_kernels_serve(case):
    x, dy = (LAYOUTS.get(case, LAYOUTS["contiguous"])(t) for t in data(*SERVED[case]))
    for context, pushed in ((nullcontext(), False), (kernels.disabled(), True)):
        with Operations() as seen, context:
            trained(StreamingNorm(x.shape[1]), x, dy)
        assert ("lerp" in seen.names) == pushed


class Subclass(torch.Tensor):
    pass


NOT_SERVED = {
    "float64": ({"dtype": torch.float64}, lambda x: x.double()),
    "float64 layer": ({"dtype": torch.float64}, lambda x: x),
    "bfloat16": ({"dtype": torch.bfloat16}, lambda x: x.bfloat16()),
    "bfloat16 input": ({}, lambda x: x.bfloat16()),
    "p": ({"p": 3}, lambda x: x),
    **{ref: ({"ref": ref}, lambda x: x) for ref in ("BA2", "BA4", "BA6", "SP1", "SP2")},
    "subclass": ({}, lambda x: x.as_subclass(Subclass)),
    "meta": ({"device": "meta"}, lambda x: x.to("meta")),
    "expanded": ({}, lambda x: x[..., :1].expand_as(x)),
    "transposed": ({}, LAYOUTS["transposed"]),
    "mask": ({}, lambda x: x),
}


@pytest.mark.parametrize("case", NOT_SERVED)
def test_the_rest_goes_to_the_plain_path(case):
    if case == "subclass" and torch.__version__ < "2.6":
        pytest.skip("this torch has no subclasses under a dispatch mode")
    arguments, change = NOT_SERVED[case]
    x, mask = change(data(6, 5, 4)[0]), torch.rand(6, 4) < 0.7
    results = []
    for context in (nullcontext(), kernels.disabled()):
        layer, leaf = StreamingNorm(5, **arguments), x.detach().requires_grad_()
        with Operations() as seen, context:
            y = layer(leaf, mask=mask if case == "mask" else None)
            y.square().sum().backward()
        assert "lerp" in seen.names
        results.append([y, leaf.grad, layer.weight.grad, *layer.state_dict().values()])
    for a, b in zip(*results, strict=True):
        assert a.dtype == b.dtype
        assert a.is_meta or torch.equal(a, b)


@needs_kernels
@pytest.mark.parametrize("shape", [(1400, 50), (10, 33, 17, 13), (6, 2, 6000)])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("p", [1, 2])
def test_the_number_of_threads_does_not_matter(shape, layout, p):
    x, dy = (LAYOUTS[layout](t) for t in data(*shape))
    results = []
    for threads in (1, 2, 5):
        layer = StreamingNorm(shape[1], p=p, center="mean")
        with machine(kernels.variant, threads):
            results.append([*trained(layer, x, dy), *layer.state_dict().values()])
    for other in results[1:]:
        for a, b in zip(other, results[0], strict=True):
            close(a, b)


@needs_kernels
@pytest.mark.parametrize("wanted", [(), ("input",), ("weight", "bias"), ("weight",), ("input", "bias"), None])
@pytest.mark.parametrize("shape", [(9, 5), (9, 5, 3)])
def test_whatever_needs_a_gradient_gets_it(wanted, shape):
    """None: in training, but without gradients at all."""
    fused = StreamingNorm(5)
    plain = copy.deepcopy(fused).double()
    for _ in range(3):
        x, dy = data(*shape)
        results = []
        for layer in (fused, plain):
            leaves = {"input": x.to(layer.weight.dtype, copy=True), "weight": layer.weight, "bias": layer.bias}
            for name, tensor in leaves.items():
                tensor.requires_grad_(name in (wanted or ())).grad = None
            with torch.set_grad_enabled(wanted is not None):
                y = layer(leaves["input"])
            if wanted:
                y.backward(dy.to(y.dtype))
            layer.weights_updated()
            assert [name for name, tensor in leaves.items() if tensor.grad is not None] == list(wanted or ())
            results.append([y, *(leaves[name].grad for name in wanted or ())])
        for a, b in zip(*results, strict=True):
            close(a, b)
    same_state(fused, plain)
    assert int(fused.grads.count) == bool(wanted)


@needs_kernels
@pytest.mark.parametrize("bad", [nan, inf])
@pytest.mark.parametrize("center", CENTERS)
@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("beta", [(0.7, 0.3, 0), (0.5, 0.2, 0.3)])
def test_one_bad_value(beta, p, center, bad):
    """In the input or in the gradient, in a channel's first element or later, in the first call or later."""
    for layout, warmup in (("contiguous", 0), ("contiguous", 256), ("channels_last", 256)):
        for place, row, call in (("x", 0, 0), ("x", 4, 1), ("dy", 4, 0), ("dy", 0, 1)):
            fused = StreamingNorm(5, p=p, center=center, warmup=warmup, beta=beta)
            plain = copy.deepcopy(fused)
            for i in range(3):
                x, dy = data(9, 5, 3, 3)
                x = away_from_center(x, plain)
                if i == call:
                    (x if place == "x" else dy)[row, 2].view(-1)[0] = bad
                _, dx, *_ = same_call(fused, plain, LAYOUTS[layout](x), LAYOUTS[layout](dy))
                for parameter in (*fused.parameters(), *plain.parameters()):
                    parameter.grad = None
            assert torch.isfinite(dx).all()
            assert all(torch.isfinite(value).all() for value in fused.state_dict().values())


def step(layer, seed):
    torch.manual_seed(seed)
    trained(layer, *data(9, 5))
    layer.weights_updated()


@needs_kernels
def test_state_that_was_handed_out_does_not_change():
    layer = StreamingNorm(5)
    step(layer, 0)
    held = [layer.mean, layer.sigma, *vars(layer.stats).values(), *vars(layer.grads).values()]
    held += list(layer.state_dict().values())
    before = [t.clone() for t in held]
    for seed in (1, 2):
        step(layer, seed)
    assert all(torch.equal(a, b) for a, b in zip(held, before, strict=True))
    assert not torch.equal(layer.mean, held[0])


@needs_kernels
@pytest.mark.parametrize("twin_of", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_copies_go_their_own_ways(twin_of):
    layer = StreamingNorm(5)
    step(layer, 0)
    twin = twin_of(layer)
    before = {name: value.clone() for name, value in twin.state_dict().items()}
    step(layer, 1)
    assert all(torch.equal(value, before[name]) for name, value in twin.state_dict().items())
    step(twin, 1)
    assert all(torch.equal(value, layer.state_dict()[name]) for name, value in twin.state_dict().items())


@needs_kernels
@pytest.mark.parametrize("shape", [(9, 5), (9, 5, 3)])
def test_a_layer_moved_between_forward_and_backward(shape):
    fused = StreamingNorm(5, affine=False)
    plain = copy.deepcopy(fused)
    x, dy = data(*shape)
    leaf = x.clone().requires_grad_()
    y = fused(leaf)
    fused.double()
    y.backward(dy)
    with kernels.disabled():
        _, dx = trained(plain, x, dy)
    close(leaf.grad, dx)
    same_state(fused, plain.double())
    assert fused.grads.short.dtype == torch.float64
    assert int(fused.grads.count) == 1


@needs_kernels
def test_with_a_scaler():
    """The scale of the loss doubles after every good step, and one step overflows."""
    fused = nn.Sequential(nn.Linear(4, 6), StreamingNorm(6, beta=(0.5, 0.2, 0.3)), nn.Tanh(), nn.Linear(6, 2))
    plain = copy.deepcopy(fused)
    batches = torch.randn(7, 8, 4)
    for model, context in ((fused, nullcontext()), (plain, kernels.disabled())):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1)
        attach(optimizer, model, scaler=scaler)
        with context:
            for i, x in enumerate(batches):
                scaler.scale(model(x).square().mean() * (inf if i == 3 else 1)).backward()
                if i != 4:  # two batches in one window
                    scaler.step(optimizer)
                    scaler.update()
                    optimizer.zero_grad()
        assert scaler.get_scale() == 1024
    same_state(fused, plain)


@needs_kernels
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("center", CENTERS)
def test_only_the_input_stays_alive_between_forward_and_backward(layout, center):
    x = LAYOUTS[layout](torch.randn(8, 16, 32, 32)).requires_grad_()
    saved = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.setdefault(t.data_ptr(), t), lambda t: t):
        StreamingNorm(16, center=center)(x)
    assert x.data_ptr() in saved
    assert sum(t.untyped_storage().nbytes() for t in saved.values()) <= 1.01 * x.nbytes


@needs_kernels
def test_settings_may_be_changed_to_lists():
    fused, plain = StreamingNorm(5), StreamingNorm(5)
    for layer in (fused, plain):
        step(layer, 0)
        layer.zero_grad()
        layer.beta = [0.5, 0.2, 0.3]
    same_call(fused, plain, *data(6, 5))


@needs_kernels
@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_gain_or_bias_of_another_size_is_never_read(name):
    """Not before the first call, and not after one that was served: torch says what is wrong."""
    layer = StreamingNorm(5)
    for _ in range(2):
        getattr(layer, name).data = torch.ones(3)
        with pytest.raises(RuntimeError):
            layer(torch.randn(6, 5))
        getattr(layer, name).data = torch.ones(5)
        layer(torch.randn(6, 5))


UNUSUAL = {
    "gain": lambda layer: setattr(layer, "weight", nn.Parameter(torch.arange(10.0)[::2])),
    "bias": lambda layer: setattr(layer, "bias", nn.Parameter(torch.arange(10.0)[::2])),
    "type": lambda layer: setattr(layer, "bias", nn.Parameter(torch.arange(5.0).double())),
    "state": lambda layer: layer.load_state_dict(
        {k: v.t().contiguous().t() if v.ndim == 2 else v for k, v in layer.state_dict().items()}
    ),
    "saved": lambda layer: None,
}


@needs_kernels
@pytest.mark.parametrize("case", UNUSUAL)
def test_tensors_are_read_as_they_lie_in_memory(case):
    """A gain or bias with gaps or of another type, a state loaded from transposed tensors, an input saved elsewhere."""
    fused, plain = StreamingNorm(5), StreamingNorm(5)
    for layer in (fused, plain):
        step(layer, 0)
        layer.zero_grad()
        UNUSUAL[case](layer)
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t.contiguous(), lambda t: t)
    with hooks if case == "saved" else nullcontext():
        same_call(fused, plain, *map(LAYOUTS["channels_last"], data(6, 5, 4)))


WITHOUT = """
import sys
if sys.argv[1] == "missing":
    sys.modules["streamnorm.kernels._native"] = None
import torch, streamnorm
assert not streamnorm.kernels.available()
for net, x in ((streamnorm.StreamingNorm(3), torch.randn(4, 3)), (streamnorm.GRU(3, 5), torch.randn(6, 4, 3))):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        y = net(x)
        (y if isinstance(y, torch.Tensor) else y[0]).square().mean().backward()
        optimizer.step()
    assert all(torch.isfinite(value).all() for value in net.state_dict().values())
"""


@pytest.mark.parametrize("why", ["missing", "switched off"])
def test_everything_works_without_them(why):
    environment = os.environ | {"STREAMNORM_PLAIN": "" if why == "missing" else "1"}
    done = subprocess.run([sys.executable, "-c", WITHOUT, why], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@needs_kernels
def test_one_build_serves_every_python_and_torch():
    assert ".abi3." in kernels._native.__file__
    if shutil.which("readelf") is None or not sys.platform.startswith("linux"):
        pytest.skip("no readelf here")
    dynamic = subprocess.run(["readelf", "-d", kernels._native.__file__], capture_output=True, text=True, check=True)
    needed = re.findall(r"NEEDED.*\[(.*)\]", dynamic.stdout)
    assert needed
    assert not [name for name in needed if re.match(r"lib(torch|c10|gomp|omp|iomp|python)", name)]
