"""torch's own operators compute what the plain path computes: outputs, gradients and running estimates."""

import copy
import pickle
from math import inf, nan

import pytest
import torch
from torch import nn

from streamnorm import GeneralBatchNorm, SampleNorm, StreamingNorm, TimeSpecificNorm, kernels, paused

pytestmark = pytest.mark.skipif(kernels.plain_forced(), reason="the plain path is forced")
LAYERS = {
    "SP1": SampleNorm,
    "SP2": lambda size, **kw: SampleNorm(size, ref="SP2", **kw),
    "BA1": GeneralBatchNorm,
    "steps": lambda size, **kw: TimeSpecificNorm(size, 3, **kw),
}
SHAPES = [(6, 4), (6, 4, 5), (6, 4, 5, 3), (1, 4, 5, 3), (6, 1, 5), (3, 4, 2, 3, 2)]
TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-10}
RESULTS = ("output", "gradient of the input", "of the gain", "of the bias")
every_layer = pytest.mark.parametrize("name", LAYERS)


def every_layer_on(*shapes):
    """But for SP2 without space: that is one element per statistic, which is refused."""
    pairs = [(name, shape) for name in LAYERS for shape in shapes if name != "SP2" or len(shape) > 2]
    return pytest.mark.parametrize(("name", "shape"), pairs)


def is_native(layer, *args, **kwargs):
    """Whether an operator of torch made the output, not counting a change of its layout."""
    node = layer(*args, **kwargs).grad_fn
    while type(node).__name__ in ("PermuteBackward0", "ViewBackward0"):
        node = node.next_functions[0][0]
    return type(node).__name__ in ("NativeLayerNormBackward0", "NativeGroupNormBackward0", "NativeBatchNormBackward0")


def make(name, size, dtype=torch.float32, **settings):
    layer = LAYERS[name](size, dtype=dtype, **settings)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(size) + 1)
    return layer


def data(shape, dtype=torch.float32):
    return (2 * torch.randn(shape, dtype=torch.float64) + 1).to(dtype)


def close(actual, expected, what):
    error, size = (actual - expected).abs().max(), expected.abs().max().clamp(min=1)
    assert error <= TOLERANCE[expected.dtype] * size, f"{what}: off by {error} of {size}"


def trained(layer, x, dy, **kwargs):
    """A training call: the output, and all gradients."""
    leaf = x.detach().requires_grad_()
    layer.zero_grad()
    y = layer(leaf, **kwargs)
    y.backward(dy)
    return [y, leaf.grad, *(p.grad for p in layer.parameters())]


def same_calls(layer, batches):
    """Training calls of the layer equal those of a copy on the plain path, which is returned."""
    plain = copy.deepcopy(layer)
    for step, x in enumerate(batches):
        dy = torch.randn(x.shape, dtype=x.dtype)
        actual = trained(layer, x, dy, step=step)
        with kernels.disabled():
            expected = trained(plain, x, dy, step=step)
        assert actual[0].stride() == expected[0].stride()
        for what, a, b in zip(RESULTS, actual, expected, strict=False):  # gain and bias may be absent
            close(a, b, what)
        for (what, a), b in zip(layer.state_dict().items(), plain.state_dict().values(), strict=True):
            close(a, b, what)
    return plain


@every_layer_on(*SHAPES)
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_equals_the_plain_path(name, shape, dtype, affine):
    layer = make(name, shape[1], dtype, affine=affine)
    batches = [data(shape, dtype) * scale for scale in (1, 0.1, 3, 1)]
    assert is_native(copy.deepcopy(layer), batches[0].clone().requires_grad_())
    plain = same_calls(layer, batches)
    for norm in (layer, plain):
        norm.eval()
    with kernels.disabled():
        close(layer(batches[0], step=1), plain(batches[0], step=1), "evaluation")


LAYOUTS = {
    "channels last": lambda x: x.movedim(1, -1).contiguous().movedim(-1, 1),
    "rows with gaps": lambda x: torch.cat([x, x], 1)[:, : x.shape[1]],
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "expanded": lambda x: x[:1].expand(x.shape),
}


@every_layer_on((6, 4), (6, 4, 5), (6, 4, 5, 3))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout(name, shape, layout):
    layer = make(name, 4, torch.float64)
    plain = copy.deepcopy(layer)
    for dy_layout in LAYOUTS.values():
        x, dy = LAYOUTS[layout](data(shape, torch.float64)), dy_layout(data(shape, torch.float64))
        actual = trained(layer, x, dy)
        with kernels.disabled():
            expected = trained(plain, x, dy)
        for what, a, b in zip(RESULTS, actual, expected, strict=True):
            close(a, b, what)


@pytest.mark.parametrize("name", ["BA1", "steps"])
@pytest.mark.parametrize("shape", [(6, 4), (6, 5, 4), (6, 5, 3, 4)])
def test_channels_last_stay_last(name, shape):
    layer = make(name, 4, channel_dim=-1)
    assert is_native(copy.deepcopy(layer), data(shape).requires_grad_())
    same_calls(layer, [data(shape) for _ in range(3)])
    x = data((6, 4, 5, 3)).to(memory_format=torch.channels_last)
    layer = make(name, 4)
    assert layer(x).is_contiguous(memory_format=torch.channels_last)
    same_calls(layer, [x, x + 1])


def test_sample_norm_with_channels_last_is_plain():
    x = data((6, 4, 5, 3)).to(memory_format=torch.channels_last).requires_grad_()
    assert not is_native(SampleNorm(4), x)
    assert SampleNorm(4)(x).is_contiguous(memory_format=torch.channels_last)
    assert is_native(SampleNorm(4, channel_dim=-1), data((6, 4)).requires_grad_())
    assert not is_native(SampleNorm(4, channel_dim=-1), data((6, 5, 4)).requires_grad_())


class Own(torch.Tensor):
    """Somebody's tensor, of which only the plain path asks nothing special."""


@every_layer
def test_where_it_is_not_taken(name):
    def plain(layer, x=None, **kwargs):
        return not is_native(layer, (data((6, 4, 5)) if x is None else x).requires_grad_(), **kwargs)

    assert not plain(make(name, 4))
    for settings in ({"p": 1}, {"center": "zero"}, {"eps": 0}):
        assert plain(make(name, 4, **settings)), settings
    assert plain(make(name, 4), mask=torch.ones(6, 5, dtype=torch.bool))
    assert plain(make(name, 4), data((6, 4, 5)).bfloat16())
    assert plain(make(name, 4), data((6, 4, 5)).double())  # gain and bias are of another type
    assert plain(make(name, 4, torch.bfloat16))
    assert plain(make(name, 4), data((6, 4, 5)).as_subclass(Own))
    for change in (lambda w: w[:1], lambda w: w.repeat(2)[::2], lambda w: w.double()):  # another size, stride, type
        layer = make(name, 4)
        layer.weight = nn.Parameter(change(layer.weight.detach()))
        assert plain(layer)
    with kernels.disabled():
        assert plain(make(name, 4))
    assert not plain(make(name, 4))
    if name in ("BA1", "steps"):
        assert plain(make(name, 4, torch.float64, affine=False))  # statistics in float64, and so the arithmetic
        assert plain(LAYERS["BA1"](4, ref="BA2"))
        assert plain(make(name, 4).eval())
    elif name == "SP1":
        assert plain(SampleNorm(4, ref="SP5"))
    assert plain(StreamingNorm(4, center="mean"))


@pytest.mark.parametrize("name", ["BA1", "steps"])
@pytest.mark.parametrize("bad", [nan, inf, -inf])
def test_data_that_are_not_finite(name, bad):
    layer = make(name, 4)
    layer(data((6, 4)))
    before = copy.deepcopy(layer.state_dict())
    x = data((6, 4))
    x[2, 1] = bad
    y = layer(x)
    assert y[:, 1].isnan().all()
    assert y[:, [0, 2, 3]].isfinite().all()
    assert all(torch.equal(v, before[k]) for k, v in layer.state_dict().items())
    x[2, 1] = 1e38  # finite, but its square is not
    layer(x * torch.tensor([1, 3, 1, 1]))
    assert all(v.isfinite().all() for v in layer.state_dict().values())


@pytest.mark.parametrize("name", ["BA1", "steps"])
def test_running_estimates_stay_where_they_should(name):
    layer = make(name, 4)
    before = copy.deepcopy(layer.state_dict())
    with paused(layer):
        assert is_native(layer, data((6, 4)))
    with pytest.raises(ValueError, match="one element per statistic"):
        layer(data((1, 4)))
    with pytest.raises(ValueError, match="empty"):
        layer(data((0, 4)))
    assert all(torch.equal(v, before[k]) for k, v in layer.state_dict().items())
    assert all(b.grad_fn is None for b in layer.buffers())


@pytest.mark.parametrize("name", ["BA1", "steps"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(name, mode):
    layer, x = make(name, 4), data((6, 4))
    twin = copy.deepcopy(layer)
    with mode():
        y = layer(x)
    assert torch.equal(y, twin(x))
    assert all(torch.equal(a, b) for a, b in zip(layer.buffers(), twin.buffers(), strict=True))
    same_calls(layer, [x, x + 1])  # and training goes on


@every_layer_on((6, 4), (6, 4, 5))
@pytest.mark.parametrize("absent", ["weight", "bias"])
def test_gain_or_bias_alone(name, absent, shape):
    layer = make(name, 4)
    setattr(layer, absent, None)
    assert is_native(copy.deepcopy(layer), data(shape).requires_grad_()) == (absent == "bias")
    same_calls(layer, [data(shape) for _ in range(2)])


@every_layer
@pytest.mark.parametrize("needed", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 2)])
def test_only_what_is_needed(name, needed):
    layer, x = make(name, 4), data((6, 4, 5))
    tensors = x, layer.weight, layer.bias
    for i, tensor in enumerate(tensors):
        tensor.requires_grad_(i in needed)
    assert is_native(copy.deepcopy(layer), x)
    layer(x).square().sum().backward()
    actual = [t.grad for t in tensors]
    assert [g is not None for g in actual] == [i in needed for i in range(3)]
    for tensor in tensors:
        tensor.grad = None
    with kernels.disabled():
        layer(x).square().sum().backward()
    for a, t in zip(actual, tensors, strict=True):
        if a is not None:
            torch.testing.assert_close(a, t.grad, rtol=1e-4, atol=1e-4)


@every_layer
def test_graph(name):
    """A graph can be kept, there is no second derivative, and a change in place is noticed."""
    layer, x = make(name, 4), data((6, 4, 5)).requires_grad_()
    y = layer(x)
    first = torch.autograd.grad(y.square().sum(), x, retain_graph=True)
    layer(x * 2)
    assert torch.equal(*first, *torch.autograd.grad(y.square().sum(), x, retain_graph=True))
    with pytest.raises(RuntimeError, match=r"no second derivative.*create_graph"):
        torch.autograd.grad(y.square().sum(), x, create_graph=True)
    for changed in (layer.weight, inner := x * 1):
        y = layer(inner)
        with torch.no_grad():
            changed.add_(1)
        with pytest.raises(RuntimeError, match="inplace operation"):
            y.sum().backward()


@pytest.mark.parametrize("name", ["BA1", "steps"])
def test_evaluation_before_training_can_be_differentiated_after_it(name):
    layer, x = make(name, 4), data((6, 4)).requires_grad_()
    layer(x)
    y = layer.eval()(x)
    expected = torch.autograd.grad(y.square().sum(), (x, layer.weight), retain_graph=True)
    layer.train()(x * 3)
    for a, b in zip(torch.autograd.grad(y.square().sum(), (x, layer.weight)), expected, strict=True):
        assert torch.equal(a, b)


@every_layer
def test_saved_tensors_may_come_back_otherwise_laid_out(name):
    def unpack(t):
        return t if t.ndim < 3 else t.transpose(0, -1).contiguous().transpose(0, -1)

    layer, x, dy = make(name, 4), data((6, 4, 5)), data((6, 4, 5))
    expected = trained(layer, x, dy)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
        actual = trained(layer, x, dy)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b)


@every_layer
def test_copies_are_served_too(name):
    for twin in (copy.deepcopy(make(name, 4)), pickle.loads(pickle.dumps(make("SP1", 4)))):
        assert is_native(twin, data((6, 4, 5)))


@every_layer
@pytest.mark.parametrize("offset", [10, 1000])
def test_far_from_zero(name, offset):
    """What float32 loses is in proportion to the distance from 0, as it is in the input itself."""
    layer, x, dy = make(name, 4), data((16, 4, 8)), data((16, 4, 8))
    actual = trained(layer, x + offset, dy)
    layer.double()
    with kernels.disabled():
        expected = trained(layer, (x + offset).double(), dy.double())
    for what, a, b in zip(RESULTS, actual, expected, strict=True):
        assert (a - b).abs().max() <= 1e-6 * offset * b.abs().max(), what


@every_layer
def test_autocast_leaves_it_alone(name):
    layer, x = make(name, 4), data((6, 4, 5))
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.float32
