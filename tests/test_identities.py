"""What the layers reduce to: torch's own norms, each other, and the exact derivative of what they compute."""

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck

from streamnorm import Affine, GeneralBatchNorm, NormRef, SampleNorm, StreamingNorm
from streamnorm.core.reference import CODES

ORDERS = (1, 1.5, 2, 3, 7)
SHAPES = [(6, 4), (6, 4, 5), (6, 4, 5, 3), (6, 4, 2, 5, 3)]


def same_as(layer, function, x):
    """Forward and backward of a layer and of a function (x, weight, bias) agree."""
    with torch.no_grad():
        layer.weight.uniform_(0.5, 2)
        layer.bias.uniform_(-1, 1)
    dy = torch.randn_like(x)
    ours, theirs = (x.clone().requires_grad_() for _ in range(2))
    weight, bias = (p.detach().clone().requires_grad_() for p in (layer.weight, layer.bias))
    y, z = layer(ours), function(theirs, weight, bias)
    torch.testing.assert_close(y, z, rtol=1e-12, atol=1e-12)
    y.backward(dy)
    z.backward(dy)
    for a, b in ((ours, theirs), (layer.weight, weight), (layer.bias, bias)):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-11, atol=1e-11)


def double(*shape):
    return torch.randn(*shape, dtype=torch.float64) * 3 + 1


@pytest.mark.parametrize("shape", SHAPES)
def test_batch_norm(shape):
    layer = GeneralBatchNorm(4, dtype=torch.float64)
    same_as(layer, lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True), double(*shape))


@pytest.mark.parametrize("shape", SHAPES)
def test_layer_norm_over_channels_and_space(shape):
    same_as(SampleNorm(4, dtype=torch.float64), lambda x, w, b: F.group_norm(x, 1, w, b), double(*shape))


@pytest.mark.parametrize("shape", SHAPES[1:])
def test_instance_norm(shape):
    layer = SampleNorm(4, ref="SP2", dtype=torch.float64)
    same_as(layer, lambda x, w, b: F.instance_norm(x, None, None, w, b), double(*shape))


@pytest.mark.parametrize("shape", [(6, 4), (6, 5, 4), (6, 5, 3, 4)])
def test_layer_norm_with_channels_last_dimension(shape):
    layer = SampleNorm(4, ref="SP5", channel_dim=-1, dtype=torch.float64)
    same_as(layer, lambda x, w, b: F.layer_norm(x, (4,), w, b), double(*shape))


def test_rms_norm_is_center_zero():
    layer = SampleNorm(4, ref="SP5", center="zero", dtype=torch.float64)

    def rms(x, w, b):  # sigma is the root mean square; the mean is subtracted all the same
        sigma = (x.square().mean(1, keepdim=True) + 1e-5).sqrt()
        return (x - x.mean(1, keepdim=True)) / sigma * w + b

    same_as(layer, rms, double(6, 4))


@pytest.mark.parametrize("p", ORDERS)
@pytest.mark.parametrize("code", [code for code in CODES if code.startswith("BA")])
def test_streaming_without_memory_is_batch_norm(code, p):
    settings = {"ref": code, "p": p, "center": "mean", "dtype": torch.float64}
    streaming = StreamingNorm(2, alpha=(0, 1), beta=(0, 0, 1), warmup=0, **settings)
    batch = GeneralBatchNorm(2, **settings)
    for _ in range(3):
        x, dy = double(3, 2, 4, 3), double(3, 2, 4, 3)
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        streaming(a).backward(dy)
        batch(b).backward(dy)
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(streaming(x), batch(x), rtol=1e-12, atol=1e-12)
        streaming.weights_updated()


@pytest.mark.parametrize("p", ORDERS)
@pytest.mark.parametrize("center", ["mean", "zero"])
@pytest.mark.parametrize("code", CODES)
def test_gradient_is_the_derivative(code, p, center):
    kind = GeneralBatchNorm if code.startswith("BA") else SampleNorm
    layer = kind(2, ref=code, p=p, center=center, dtype=torch.float64)
    x = double(2, 2, 3, 2).requires_grad_()
    assert gradcheck(
        lambda x, w, b: torch.func.functional_call(layer, {"weight": w, "bias": b}, (x,)), (x, layer.weight, layer.bias)
    )
    mask = torch.rand(2, 3, 2) > 0.2
    assert gradcheck(lambda x: layer(x, mask=mask), (x,))


def test_evaluation_differs_from_torch_as_documented():
    x = torch.randn(5, 3, dtype=torch.float64)
    ours, theirs = GeneralBatchNorm(3, dtype=torch.float64), torch.nn.BatchNorm1d(3, dtype=torch.float64)
    ours(x)
    theirs(x)
    torch.testing.assert_close(ours.mean, theirs.running_mean)
    torch.testing.assert_close(ours.sigma, 0.9 + 0.1 * (x.var(0, correction=0) + 1e-5).sqrt())  # sigma, biased
    torch.testing.assert_close(theirs.running_var, 0.9 + 0.1 * x.var(0))  # variance, unbiased


def test_gain_and_bias_are_a_separate_step():
    x = torch.randn(4, 3, 5)
    whole, bare, affine = StreamingNorm(3), StreamingNorm(3, affine=False), Affine(3)
    with torch.no_grad():
        for target in (whole, affine):
            target.weight.copy_(torch.tensor([1.0, -2.0, 0.5]))
            target.bias.copy_(torch.tensor([0.0, 1.0, 2.0]))
    torch.testing.assert_close(whole(x), affine(bare(x)))
    last = Affine(5, channel_dim=-1)
    torch.testing.assert_close(last(x), x)


@pytest.mark.parametrize("kind", [StreamingNorm, GeneralBatchNorm, SampleNorm])
def test_channel_dim_last_is_a_transpose(kind):
    first, last = kind(4), kind(4, channel_dim=-1)
    x = torch.randn(6, 4, 5, 3)
    torch.testing.assert_close(last(x.movedim(1, -1).contiguous()), first(x).movedim(1, -1))


@pytest.mark.parametrize("code", CODES)
def test_memory_format_is_kept(code):
    x = torch.randn(2, 8, 6, 6).to(memory_format=torch.channels_last).requires_grad_()
    dy = torch.randn(2, 8, 6, 6).to(memory_format=torch.channels_last)
    kinds = [StreamingNorm, GeneralBatchNorm if code.startswith("BA") else SampleNorm]
    for kind in kinds:
        layer = kind(8, ref=code)
        y = layer(x)
        (dx,) = torch.autograd.grad(y, x, dy)
        plain = kind(8, ref=code)(x.detach().contiguous())
        for tensor in (y, dx, layer.eval()(x)):
            assert tensor.is_contiguous(memory_format=torch.channels_last)
        assert plain.is_contiguous()
        torch.testing.assert_close(y, plain)


@pytest.mark.parametrize("p", [7, 30, 80])
@pytest.mark.parametrize("ref", ["BA1", "BA4", "SP1", "SP3"])
@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_large_orders_do_not_overflow(p, ref, scale):
    x = (torch.randn(4, 3, 6, 6) * scale).requires_grad_()
    layer = StreamingNorm(3, ref=ref, p=p)
    layer(x).square().sum().backward()
    exact = StreamingNorm(3, ref=ref, p=p, dtype=torch.float64)
    exact(x.detach().double())
    assert torch.isfinite(x.grad).all()
    torch.testing.assert_close(layer.sigma.double(), exact.sigma, rtol=1e-4, atol=0)
    assert (layer.sigma > 0).all()


def test_windows_keep_their_precision_far_from_zero():
    x = torch.randn(4, 3, 8, 8, dtype=torch.float64)
    narrow = GeneralBatchNorm(3, ref="BA4")(x.float() + 1000)
    wide = GeneralBatchNorm(3, ref="BA4", dtype=torch.float64)((x.float() + 1000).double())
    torch.testing.assert_close(narrow.double(), wide, rtol=1e-3, atol=1e-3)
    x = torch.randn(8, 1, 40) * 1e-2
    x[..., 20:] += 1e3  # a quiet half beside a loud one
    quiet, exact = GeneralBatchNorm(1, ref="BA4", momentum=1), GeneralBatchNorm(1, ref="BA4", momentum=1).double()
    quiet(x)
    exact(x.double())
    torch.testing.assert_close(quiet.sigma[:, :18].double(), exact.sigma[:, :18], rtol=1e-5, atol=0)


@pytest.mark.parametrize("samples", [True, False])
@pytest.mark.parametrize("channels", ["each", "all"])
def test_a_window_over_everything_is_all_of_space(samples, channels):
    kind = GeneralBatchNorm if samples else SampleNorm
    x = double(3, 2, 4, 3)
    for p in (1, 2, 3):
        windowed = kind(2, ref=NormRef(samples, channels, 7), p=p, dtype=torch.float64)
        whole = kind(2, ref=NormRef(samples, channels, "all"), p=p, dtype=torch.float64)
        torch.testing.assert_close(windowed(x), whole(x), rtol=1e-12, atol=1e-12)
