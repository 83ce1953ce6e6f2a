"""What is special to torch's own operators: which calls they decline, running estimates, and the layout of results.

That they compute what plain torch computes is in test_conformance.py, with all backends.
"""

import copy
import pickle
import re

import pytest
import torch
from torch import nn

from streamnorm import GeneralBatchNorm, SampleNorm, StreamingNorm, TimeSpecificNorm, backends, paused

IN_USE = [backend.name for backend in backends.active().backends]
pytestmark = pytest.mark.skipif("torch_ops" not in IN_USE, reason="switched off")
LAYERS = {
    "SP1": SampleNorm,
    "SP2": lambda size, **kw: SampleNorm(size, ref="SP2", **kw),
    "BA1": GeneralBatchNorm,
    "steps": lambda size, **kw: TimeSpecificNorm(size, 3, **kw),
}
every_layer = pytest.mark.parametrize("name", LAYERS)
with_estimates = pytest.mark.parametrize("name", ["BA1", "steps"])


def served(layer, x):
    """By torch's operators."""
    return backends.explain(layer, x).split()[0] == "torch_ops"


def make(name, size, dtype=torch.float32, **settings):
    layer = LAYERS[name](size, dtype=dtype, **settings)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(size) + 1)
    return layer


def data(shape, dtype=torch.float32):
    return (2 * torch.randn(shape, dtype=torch.float64) + 1).to(dtype)


def trained(layer, x, dy):
    """A training call: the output, and all gradients."""
    leaf = x.detach().requires_grad_()
    layer.zero_grad()
    y = layer(leaf)
    y.backward(dy)
    return [y, leaf.grad, *(p.grad for p in layer.parameters())]


@with_estimates
def test_channels_last_stay_last(name):
    """And are served: as rows, without a copy."""
    x = data((6, 4, 5, 3)).to(memory_format=torch.channels_last)
    assert served(make(name, 4), x)
    y, dx, *_ = trained(make(name, 4), x, torch.randn_like(x))
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert dx.is_contiguous(memory_format=torch.channels_last)
    for shape in ((6, 4), (6, 5, 4), (6, 5, 3, 4)):
        layer = make(name, 4, channel_dim=-1)
        assert served(layer, data(shape))
        assert layer(data(shape)).is_contiguous()


class Own(torch.Tensor):
    """Somebody's tensor, of which only plain torch asks nothing special."""


def replaced(name, part, change):
    layer = make(name, 4)
    setattr(layer, part, change(getattr(layer, part)))
    return layer


DECLINED = {
    "streaming": (lambda _: StreamingNorm(4, center="mean", p=3), None, "no operator that streams"),
    "p": (lambda name: make(name, 4, p=1), None, "torch's norms have p = 2, not 1"),
    "center": (lambda name: make(name, 4, center="zero"), None, "torch's norms have center='mean', not 'zero'"),
    "eps": (lambda name: make(name, 4, eps=0), None, "eps is 0"),
    "mask": (lambda name: make(name, 4), "mask", "torch's norms take no mask"),
    "bfloat16": (lambda name: make(name, 4), lambda x: x.bfloat16(), "float32 and float64, not torch.bfloat16"),
    "types": (lambda name: make(name, 4), lambda x: x.double(), "have to be of the type of the input"),
    "bfloat16 layer": (lambda name: make(name, 4, torch.bfloat16), None, "have to be of the type of the input"),
    "subclass": (lambda name: make(name, 4), lambda x: x.as_subclass(Own), "a tensor is not an ordinary one"),
    "bias alone": (lambda name: replaced(name, "weight", lambda _: None), None, "a bias without a gain"),
    "small gain": (
        lambda name: replaced(name, "weight", lambda w: nn.Parameter(w[:1].detach())),
        None,
        "that it cannot hold",
    ),
    "gain with gaps": (
        lambda name: replaced(name, "weight", lambda w: nn.Parameter(w.repeat(2)[::2].detach())),
        None,
        "cannot hold",
    ),
    "meta": (lambda name: make(name, 4).to("meta"), lambda x: x.to("meta"), "it serves the CPU"),
}


@every_layer
@pytest.mark.parametrize("case", DECLINED)
def test_what_torch_declines(name, case):
    """In these words; test_conformance.py checks that another backend serves it."""
    make_it, change, words = DECLINED[case]
    x = data((6, 4, 5)) if change in (None, "mask") else change(data((6, 4, 5)))
    assert served(make(name, 4), data((6, 4, 5)))
    said = backends.explain(make_it(name), x, torch.ones(6, 5, dtype=torch.bool) if change == "mask" else None)
    assert words in re.search(r"torch_ops does not: (.*?)\.( |$)", said)[1]


@pytest.mark.parametrize(
    ("layer", "x", "words"),
    [
        (SampleNorm(4, ref="SP5"), data((6, 4, 5)), "no operator for this reference"),
        (GeneralBatchNorm(4, ref="BA2"), data((6, 4, 5)), "no operator for this reference"),
        (SampleNorm(4), data((6, 4, 5, 3)).to(memory_format=torch.channels_last), "the input is not contiguous"),
        (SampleNorm(4, channel_dim=-1), data((6, 5, 4)), "the input is not contiguous"),
        (GeneralBatchNorm(4, dtype=torch.float64, affine=False), data((6, 4)), "of the type of the input"),
    ],
)
def test_what_torch_declines_of_one_kind(layer, x, words):
    assert words in re.search(r"torch_ops does not: (.*?)\.( |$)", backends.explain(layer, x))[1]


@with_estimates
def test_a_square_that_is_not_finite(name):
    """Of a finite number: the running estimates stay finite."""
    layer, x = make(name, 4), data((6, 4))
    layer(x)
    x[2, 1] = 3e38
    layer(x)
    assert all(v.isfinite().all() for v in layer.state_dict().values())


@with_estimates
def test_running_estimates_stay_where_they_should(name):
    layer = make(name, 4)
    before = copy.deepcopy(layer.state_dict())
    with paused(layer):
        assert served(layer, data((6, 4)))
        layer(data((6, 4)))
    with pytest.raises(ValueError, match="one element per statistic"):
        layer(data((1, 4)))
    with pytest.raises(ValueError, match="empty"):
        layer(data((0, 4)))
    assert all(torch.equal(v, before[k]) for k, v in layer.state_dict().items())
    assert all(b.grad_fn is None for b in layer.buffers())


@with_estimates
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
        assert served(twin, data((6, 4, 5)))
