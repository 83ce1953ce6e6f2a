"""The layer as a function computes what the layer computes, and leaves the state that it is given alone."""

import copy

import pytest
import torch

from streamnorm import StreamingNorm, backends, functional
from streamnorm.core.state import H1, to_dict
from streamnorm.functional import Config, new_state, streaming_norm, weights_updated

SETTINGS = [
    {},
    {"p": 1.0, "center": "mean", "warmup": 0},
    {"ref": "BA6", "beta": (0.5, 0.2, 0.3)},
    {"ref": "SP2", "guard": False},
]


def layer_and_state(settings, size=4, space=(3,)):
    layer = StreamingNorm(size, **settings)
    with torch.no_grad():
        layer.weight.normal_()
        layer.bias.normal_()
    return layer, new_state(size, Config(**settings), space)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("calls", [1, 3])
@pytest.mark.parametrize("backend", ["fastest", "plain"])
def test_it_is_the_layer(settings, calls, backend):
    """Over several updates, with several calls before each backward pass: outputs, gradients, state."""
    layer, state = layer_and_state(settings)
    weight, bias = (p.detach().clone().requires_grad_() for p in (layer.weight, layer.bias))
    with backends.use(backends.available()[0] if backend == "fastest" else "plain"):
        for _ in range(3):
            losses = [0.0, 0.0]
            inputs = [torch.randn(5, 4, 3) for _ in range(calls)]
            for x in inputs:
                ours, state = streaming_norm(x, state, Config(**settings), weight, bias)
                theirs = layer(x)
                assert torch.equal(ours, theirs)
                losses = [losses[0] + ours.square().sum(), losses[1] + theirs.square().sum()]
            for loss in losses:
                loss.backward()
            state = weights_updated(state)
            layer.weights_updated()
    assert torch.equal(weight.grad, layer.weight.grad)
    for name, tensor in to_dict(layer.state).items():
        assert torch.equal(to_dict(state)[name], tensor), name


def test_the_state_that_is_given_keeps_its_statistics():
    _, state = layer_and_state({})
    _, state = streaming_norm(torch.randn(5, 4), state)
    before = copy.deepcopy(to_dict(state))
    y, after = streaming_norm(torch.randn(5, 4, requires_grad=True), weights_updated(state))
    assert all(torch.equal(to_dict(state)[name], before[name]) for name in H1)
    assert not torch.equal(after.mean, state.mean)
    y.sum().backward()
    assert int(after.grads.count) == 1


def test_evaluation_changes_nothing():
    layer, state = layer_and_state({})
    _, state = streaming_norm(torch.randn(64, 4), state)
    x = torch.randn(5, 4)
    y, same = streaming_norm(x, state, weight=layer.weight, bias=layer.bias, training=False)
    assert same is state
    torch.testing.assert_close(y, layer.weight * (x - state.mean) / state.sigma + layer.bias)


def test_what_does_not_fit_is_refused():
    state = new_state(4)
    with pytest.raises(ValueError, match=r"state has statistics of shape \(4,\).*new_state\(3, config, space=\(\)\)"):
        streaming_norm(torch.randn(5, 3), state)
    with pytest.raises(ValueError, match="3 channels in dimension 1"):
        streaming_norm(torch.randn(5, 3), state, weight=torch.ones(4))
    with pytest.raises(RuntimeError, match="training mode"):
        torch.func.vmap(lambda x: streaming_norm(x, state)[0])(torch.randn(2, 5, 4))
    assert functional.__all__ == sorted(functional.__all__)
