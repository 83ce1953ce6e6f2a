"""Layers against the loops of the paper, in float64: outputs, gradients and state, over several weight updates."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import REFERENCES, BatchOracle, StreamingOracle, stacked

from streamnorm import GeneralBatchNorm, NormRef, SampleNorm, StreamingNorm, TimeSpecificNorm

CHANNELS = 2
ORDERS = (1, 1.5, 2, 3, 7)
OWN_REFERENCES = ((True, "all", 3), (False, "each", 3), (False, "each", 1), (True, "each", 3))


def close(actual, expected, what):
    actual = actual.detach().numpy() if isinstance(actual, torch.Tensor) else actual
    np.testing.assert_allclose(actual, expected, rtol=1e-10, atol=1e-10, err_msg=what)


def parameters_for(layer, oracle, rng):
    """Random gain and bias, the same on both sides."""
    oracle.weight, oracle.bias = rng.normal(size=CHANNELS) + 1, rng.normal(size=CHANNELS)
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(oracle.weight))
        layer.bias.copy_(torch.from_numpy(oracle.bias))


def window(layer, oracle, rng, shapes, unrolled, masks=None):
    """Calls before one backward pass: separate inputs, or (`unrolled`) each input made from the output before."""
    layer.zero_grad()
    inputs, calls, dys, factors, loss, previous = [], [], [], [], 0.0, None
    for t, shape in enumerate(shapes):
        fresh, dy, factor = rng.normal(size=shape) * 2 + 1, rng.normal(size=shape), rng.normal(size=shape)
        x = torch.from_numpy(fresh).requires_grad_()
        mask = None if masks is None else masks[t]
        given = x if previous is None or not unrolled else x + previous * torch.from_numpy(factor)
        y = layer(given, mask=None if mask is None else torch.from_numpy(mask))
        call = oracle.forward(given.detach().numpy(), mask)
        close(y, call.output(oracle.bias), f"output of call {t}")
        loss = loss + (y * torch.from_numpy(dy)).sum()
        previous = y
        inputs.append(x)
        calls.append(call)
        dys.append(dy)
        factors.append(factor)
    loss.backward()
    dweight, dbias, from_next = 0, 0, None
    for t in reversed(range(len(calls))):  # autograd runs later calls first
        dy = dys[t] if from_next is None else dys[t] + from_next
        dx, dw, db = oracle.backward(calls[t], dy)
        close(inputs[t].grad, dx, f"input gradient of call {t}")
        from_next = dx * factors[t] if unrolled else None
        dweight, dbias = dweight + dw, dbias + db
    close(layer.weight.grad, dweight, "gradient of the gain")
    close(layer.bias.grad, dbias, "gradient of the bias")


def same_state(layer, oracle, space):
    for streams, theirs in ((layer.stats, oracle.stats), (layer.grads, oracle.grads)):
        for row, part in enumerate(("mean", "sigma")):
            assert int(streams.count) == theirs[part].count
            for name in ("long", "short"):
                value = getattr(theirs[part], name)
                if value is not None:
                    expected = stacked(value, CHANNELS, space, oracle.reference)
                    close(getattr(streams, name)[row], expected, f"{name} of {part}")
    close(layer.mean, stacked(oracle.latest["mean"], CHANNELS, space, oracle.reference), "mean")


def run_streaming(reference, p, center, space, sizes, unrolled=False, seed=0, **settings):
    rng = np.random.default_rng(seed)
    layer = StreamingNorm(CHANNELS, ref=NormRef(*reference), p=p, center=center, dtype=torch.float64, **settings)
    oracle = StreamingOracle(CHANNELS, reference, p, center, **settings)
    parameters_for(layer, oracle, rng)
    for batches in sizes:  # one window of mini-batches per weight update
        per_backward = [batches] if unrolled else [[n] for n in batches]
        for calls in per_backward:
            window(layer, oracle, rng, [(n, CHANNELS, *space) for n in calls], unrolled)
            layer.eval()
            x = rng.normal(size=(3, CHANNELS, *space))
            close(layer(torch.from_numpy(x)), oracle.evaluate(x), "evaluation inside the window")
            layer.train()
        same_state(layer, oracle, space)
        parameters_for(layer, oracle, rng)
        layer.weights_updated()
        oracle.weights_updated()
    same_state(layer, oracle, space)


@pytest.mark.parametrize("center", ["mean", "running", "zero"])
@pytest.mark.parametrize("p", ORDERS)
@pytest.mark.parametrize("code", REFERENCES)
def test_streaming_over_updates(code, p, center):
    run_streaming(REFERENCES[code], p, center, (3, 2), [[2, 3], [2], [3, 2, 2], [2]], warmup=40)


@pytest.mark.parametrize("warmup", [0, 7.5, 256])
@pytest.mark.parametrize("reference", [REFERENCES["BA1"], REFERENCES["SP2"], *OWN_REFERENCES])
@pytest.mark.parametrize("center", ["running", "zero"])
def test_streaming_one_sample_at_a_time(reference, center, warmup):
    run_streaming(reference, 2, center, (4,), [[1], [1, 1, 1], [1], [2, 1]], warmup=warmup, beta=(0.5, 0.2, 0.3))


@pytest.mark.parametrize("space", [(), (5,), (3, 2), (2, 3, 2)])
@pytest.mark.parametrize("code", ["BA1", "BA2", "BA6", "SP1"])
def test_streaming_unrolled_with_changing_batches(code, space):
    run_streaming(REFERENCES[code], 2, "running", space, [[3, 3, 3], [1, 1], [4, 4, 4, 4]], unrolled=True, warmup=30)


@pytest.mark.parametrize("beta", [(0.7, 0.3, 0.0), (0.5, 0.2, 0.3), (0.0, 1.0, 0.0)])
@pytest.mark.parametrize("code", ["BA1", "BA2", "BA4", "BA6", "SP1"])
def test_streaming_large_samples(code, beta):
    """Of 32 locations, in windows of several batches: full ones, and others after them."""
    run_streaming(REFERENCES[code], 2, "running", (8, 4), [[8], [3, 5], [1, 1, 6], [2, 2], [3, 2]], warmup=0, beta=beta)


@given(
    code=st.sampled_from(sorted(REFERENCES)),
    p=st.sampled_from(ORDERS),
    center=st.sampled_from(["running", "zero"]),
    alpha=st.tuples(*[st.floats(0, 1)] * 2),
    beta=st.tuples(*[st.floats(-1, 1)] * 3),
    kappa=st.none() | st.tuples(*[st.floats(0, 1)] * 4),
    warmup=st.sampled_from([0, 3, 20, 256]),
    sizes=st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=3), min_size=3, max_size=5),
    seed=st.integers(0, 99),
)
def test_streaming_with_any_settings(code, p, center, alpha, beta, kappa, warmup, sizes, seed):
    alpha = (alpha[0], alpha[1] + 0.1)  # sigma must not be 0
    settings = {"alpha": alpha, "beta": beta, "kappa": kappa, "warmup": warmup, "eps": 1e-3}
    run_streaming(REFERENCES[code], p, center, (2, 2), sizes, seed=seed, **settings)


def test_streaming_special_case_of_no_gradients():
    layer = StreamingNorm(3, beta=(0, 0, 0), affine=False, dtype=torch.float64)
    for _ in range(3):
        x, dy = torch.randn(4, 3, 5, dtype=torch.float64, requires_grad=True), torch.randn(4, 3, 5, dtype=torch.float64)
        layer(x).backward(dy)
        torch.testing.assert_close(x.grad, dy / layer.sigma[:, None], rtol=1e-14, atol=0)
        layer.weights_updated()
    assert layer.grads.short.abs().min() > 0  # gradients are streamed all the same


@pytest.mark.parametrize("p", ORDERS)
@pytest.mark.parametrize("center", ["mean", "running", "zero"])
@pytest.mark.parametrize("code", [code for code in REFERENCES if code.startswith("BA")])
def test_general_batch_norm(code, p, center):
    rng = np.random.default_rng(1)
    reference, space = REFERENCES[code], (3, 2)
    layer = GeneralBatchNorm(CHANNELS, ref=code, p=p, center=center, momentum=0.3, dtype=torch.float64)
    oracle = BatchOracle(CHANNELS, reference, p, center, momentum=0.3)
    for sizes in ([2, 3], [4], [2]):
        parameters_for(layer, oracle, rng)
        window(layer, oracle, rng, [(n, CHANNELS, *space) for n in sizes], unrolled=False)
        x = rng.normal(size=(2, CHANNELS, *space))
        close(layer.eval()(torch.from_numpy(x)), oracle.evaluate(x), "evaluation")
        layer.train()
    close(layer.sigma, stacked(oracle.running[0]["sigma"], CHANNELS, space, reference), "running sigma")


@pytest.mark.parametrize("p", ORDERS)
@pytest.mark.parametrize("center", ["mean", "zero"])
@pytest.mark.parametrize("code", [code for code in REFERENCES if code.startswith("SP")])
def test_sample_norm(code, p, center):
    rng = np.random.default_rng(2)
    layer = SampleNorm(CHANNELS, ref=code, p=p, center=center, dtype=torch.float64)
    oracle = BatchOracle(CHANNELS, REFERENCES[code], p, center)
    for sizes in ([2, 1], [3]):
        parameters_for(layer, oracle, rng)
        window(layer, oracle, rng, [(n, CHANNELS, 3, 2) for n in sizes], unrolled=False)


@pytest.mark.parametrize("center", ["mean", "running", "zero"])
def test_time_specific_norm(center):
    rng = np.random.default_rng(3)
    layer = TimeSpecificNorm(CHANNELS, steps=3, center=center, momentum=0.4, dtype=torch.float64)
    oracle = BatchOracle(CHANNELS, REFERENCES["BA1"], 2, center, momentum=0.4, steps=3)
    parameters_for(layer, oracle, rng)
    for length in (2, 5, 4):
        for step in range(length):
            x = rng.normal(size=(4, CHANNELS)) * (step + 1)
            close(layer(torch.from_numpy(x), step=step), oracle.forward(x, step=step).output(oracle.bias), "training")
    layer.eval()
    x = rng.normal(size=(4, CHANNELS))
    for step in range(6):
        close(layer(torch.from_numpy(x), step=step), oracle.evaluate(x, step), f"evaluation at step {step}")


@pytest.mark.parametrize("p", [1, 2, 3])
@pytest.mark.parametrize("code", ["BA1", "BA2", "SP1", "SP2"])
def test_masked_against_the_loops(code, p):
    rng = np.random.default_rng(4)
    kind = {"BA": GeneralBatchNorm, "SP": SampleNorm}[code[:2]]
    masks = [np.array([[1, 1, 1, 0], [1, 1, 0, 0], [0, 1, 1, 1]], bool), np.array([[1, 1, 1, 1], [0, 0, 1, 1]], bool)]
    shapes = [(3, CHANNELS, 4), (2, CHANNELS, 4)]
    streaming = StreamingNorm(CHANNELS, ref=code, p=p, warmup=11, dtype=torch.float64)
    for layer, oracle in (
        (kind(CHANNELS, ref=code, p=p, dtype=torch.float64), BatchOracle(CHANNELS, REFERENCES[code], p, "mean")),
        (streaming, StreamingOracle(CHANNELS, REFERENCES[code], p, "running", warmup=11)),
    ):
        parameters_for(layer, oracle, rng)
        window(layer, oracle, rng, shapes, unrolled=False, masks=masks)


@pytest.mark.parametrize("scale", [2.0**-900, 1e-25, 1e25, 2.0**900])
def test_extreme_gradients_in_small_windows(scale):
    """Squares of them are beyond what the type can hold: the guard measures their lengths all the same."""
    rng = np.random.default_rng(0)
    layer = StreamingNorm(CHANNELS, dtype=torch.float64)
    oracle = StreamingOracle(CHANNELS, REFERENCES["BA1"], 2.0, "running")
    for _ in range(12):
        x, dy = (
            torch.from_numpy(rng.normal(size=(2, CHANNELS))).requires_grad_(),
            rng.normal(size=(2, CHANNELS)) * scale,
        )
        layer(x).backward(torch.from_numpy(dy))
        dx, _, _ = oracle.backward(oracle.forward(x.detach().numpy()), dy)
        close(x.grad / scale, dx / scale, "input gradient")
        layer.weights_updated(), oracle.weights_updated()
