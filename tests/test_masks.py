"""The law of masks: masked equals dropped. What lies under a mask never enters a statistic or a gradient."""

import pytest
import torch

from streamnorm import GeneralBatchNorm, SampleNorm, StreamingNorm, TimeSpecificNorm
from streamnorm.core.reference import CODES

KINDS = [StreamingNorm, GeneralBatchNorm, lambda n, **kw: TimeSpecificNorm(n, 2, **kw)]
GARBAGE = [0.0, 1e30, float("nan"), float("inf")]


def gradients(layer, x, dy, mask=None):
    x = x.clone().requires_grad_()
    y = layer(x, mask=mask)
    layer.zero_grad()
    y.backward(dy)
    return y.detach(), x.grad, layer.weight.grad.clone(), layer.bias.grad.clone()


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("code", [code for code in CODES if code.startswith("BA")])
def test_masked_samples_equal_dropped_samples(kind, code, garbage):
    keep = torch.tensor([True, False, True, True, False])
    masked, dropped = (kind(3, ref=code, dtype=torch.float64) for _ in range(2))
    for _ in range(3):
        x, dy = (torch.randn(5, 3, 4, 2, dtype=torch.float64) for _ in range(2))
        y, dx, dw, db = gradients(dropped, x[keep], dy[keep])
        x[~keep] = garbage
        y2, dx2, dw2, db2 = gradients(masked, x, dy, keep[:, None, None])
        for a, b in ((y2[keep], y), (dx2[keep], dx), (dw2, dw), (db2, db)):
            torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)
        assert (y2[~keep] == 0).all()
        assert (dx2[~keep] == 0).all()
        for layer in (masked, dropped):
            if isinstance(layer, StreamingNorm):
                layer.weights_updated()
    ours, theirs = masked.state_dict(), dropped.state_dict()
    for key, value in theirs.items():
        torch.testing.assert_close(ours[key], value, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("code", ["BA1", "BA2", "SP1", "SP2"])
def test_masked_tail_equals_a_shorter_sequence(code, garbage):
    kinds = [StreamingNorm, GeneralBatchNorm if code.startswith("BA") else SampleNorm]
    mask = torch.arange(7) < 4
    for kind in kinds:
        masked, short = (kind(3, ref=code, dtype=torch.float64) for _ in range(2))
        for _ in range(2):
            x, dy = (torch.randn(5, 3, 7, dtype=torch.float64) for _ in range(2))
            y, dx, dw, db = gradients(short, x[..., :4], dy[..., :4])
            x[..., 4:] = garbage
            y2, dx2, dw2, db2 = gradients(masked, x, dy, mask)
            for a, b in ((y2[..., :4], y), (dx2[..., :4], dx), (dw2, dw), (db2, db)):
                torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)
        for key, value in short.state_dict().items():
            torch.testing.assert_close(masked.state_dict()[key], value, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("code", ["SP1", "SP2", "SP4", "SP5"])
def test_masked_samples_do_not_count_in_streams_of_sample_references(code):
    keep = torch.tensor([True, False, True])
    masked, dropped = (StreamingNorm(3, ref=code, dtype=torch.float64) for _ in range(2))
    x, dy = (torch.randn(3, 3, 4, dtype=torch.float64) for _ in range(2))
    y, dx, *_ = gradients(dropped, x[keep], dy[keep])
    x[1] = torch.nan
    y2, dx2, *_ = gradients(masked, x, dy, keep[:, None])
    torch.testing.assert_close(y2[keep], y, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(dx2[keep], dx, rtol=1e-13, atol=1e-13)
    for key, value in dropped.state_dict().items():
        torch.testing.assert_close(masked.state_dict()[key], value, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("kind", KINDS)
def test_a_wholly_masked_call_changes_nothing(kind):
    layer = kind(3)
    layer(torch.randn(4, 3))
    before = {k: v.clone() for k, v in layer.state_dict().items()}
    y = layer(torch.full((4, 3), torch.nan), mask=torch.zeros(4, dtype=torch.bool))
    assert (y == 0).all()
    for key, value in layer.state_dict().items():
        assert torch.equal(value, before[key]), key


@pytest.mark.parametrize("kind", KINDS)
def test_a_wholly_masked_call_pushes_no_gradient(kind):
    """As the padded end of an unrolled batch makes them."""
    padded, real = kind(3), kind(3)
    x, nothing = torch.randn(4, 3), torch.zeros(4, dtype=torch.bool)
    for layer, calls in ((padded, 3), (real, 0)):
        y = layer(x).square().sum()
        for _ in range(calls):
            y = y + layer(x, mask=nothing).sum()
        y.backward()
    for key, value in real.state_dict().items():
        assert torch.equal(padded.state_dict()[key], value), key


@pytest.mark.parametrize("code", ["BA4", "BA5", "BA6", "SP4", "SP5"])
def test_padding_of_every_sample_is_not_there_for_located_references(code):
    """The same outputs, streams and warm start as on the shorter input, where there is data."""
    masked, short = (StreamingNorm(3, ref=code, warmup=64, dtype=torch.float64) for _ in range(2))
    for _ in range(3):
        x, dy = (torch.randn(4, 3, 8, dtype=torch.float64) for _ in range(2))
        y, dx, dw, db = gradients(short, x[..., :4], dy[..., :4])
        x[..., 4:] = torch.nan
        y2, dx2, dw2, db2 = gradients(masked, x, dy, torch.arange(8) < 4)
        for a, b in ((y2[..., :4], y), (dx2[..., :4], dx), (dw2, dw), (db2, db)):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
        assert masked.state_dict()["seen"] == short.state_dict()["seen"]


def test_a_location_without_data_so_far_starts_from_the_layer():
    layer = StreamingNorm(1, ref="BA6", warmup=0)
    x = 10 + torch.randn(4, 1, 2)
    layer(x, mask=torch.tensor([True, False]))
    layer(x)
    assert (layer.mean > 8).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_mask_changed_before_backward_is_noticed(kind):
    layer, mask = kind(3), torch.rand(4, 5) > 0.3
    y = layer(torch.randn(4, 3, 5, requires_grad=True), mask=mask).sum()
    mask.fill_(True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_in_evaluation_do_not_see_what_is_masked(kind, garbage):
    layer = kind(3)
    layer(torch.randn(4, 3, 5))
    x, mask = torch.randn(4, 3, 5), torch.arange(5) < 4
    x[..., 4] = garbage
    layer.eval()(x.requires_grad_(), mask=mask).sum().backward()
    assert torch.isfinite(layer.weight.grad).all()
    assert (x.grad[..., 4] == 0).all()


def test_a_location_without_data_keeps_its_latest_statistic():
    layer = StreamingNorm(3, ref="BA6", warmup=0)
    layer(torch.randn(4, 3, 5))
    layer.weights_updated()
    latest = layer.mean.clone()
    layer(torch.randn(4, 3, 5), mask=torch.arange(5) < 3)
    torch.testing.assert_close(layer.mean[:, 3:], latest[:, 3:])
    assert (layer.mean[:, :3] != latest[:, :3]).all()


def test_one_real_element_is_no_data_about_its_own_mean():
    layer = StreamingNorm(3, center="mean")
    layer(torch.randn(4, 3))
    before = layer.stats.short.clone()
    layer(torch.randn(4, 3), mask=torch.tensor([True, False, False, False]))
    assert torch.equal(layer.stats.short, before)


def test_masks_work_with_the_channels_last():
    first, last = StreamingNorm(3), StreamingNorm(3, channel_dim=-1)
    x, mask = torch.randn(4, 3, 5), torch.rand(4, 5) > 0.4
    torch.testing.assert_close(last(x.movedim(1, -1), mask=mask), first(x, mask=mask).movedim(1, -1))


def test_masks_in_evaluation():
    layer = StreamingNorm(3)
    x, mask = torch.randn(4, 3, 5), torch.rand(4, 5) > 0.4
    layer(x)
    layer.eval()
    torch.testing.assert_close(layer(x, mask=mask), layer(x) * mask[:, None])
