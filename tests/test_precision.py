"""Mixed precision: autocast in bfloat16, models cast to bfloat16, float16 with a real GradScaler."""

import copy

import pytest
import torch
from torch import nn

from streamnorm import GRU, LSTM, RNN, GeneralBatchNorm, SampleNorm, StreamingNorm, TimeSpecificNorm, attach
from streamnorm.core.state import FIELDS, Kind, to_dict

COUNTERS = {name for name, kind in FIELDS.items() if kind is Kind.COUNTER}

NORMS = {
    "streaming": StreamingNorm,
    "streaming-BA6": lambda c: StreamingNorm(c, ref="BA6"),
    "streaming-SP1": lambda c: StreamingNorm(c, ref="SP1", p=1),
    "batch": GeneralBatchNorm,
    "sample": SampleNorm,
    "time-specific": lambda c: TimeSpecificNorm(c, steps=3),
}


def conv_net(norm):
    body = nn.Conv2d(2, 8, 3), norm(8), nn.ReLU(), nn.Conv2d(8, 8, 3), norm(8), nn.ReLU()
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))


def statistics(model):
    """Of all norms: everything that they keep and that is a floating point number, but for counters."""
    kept = {}
    for name, module in model.named_modules():
        if isinstance(module, StreamingNorm):
            kept |= {f"{name}.{key}": value for key, value in to_dict(module.state).items() if key not in COUNTERS}
        elif isinstance(module, GeneralBatchNorm | TimeSpecificNorm):
            kept |= {f"{name}.mean": module.mean, f"{name}.sigma": module.sigma}
    return {key: value.clone() for key, value in kept.items() if value.is_floating_point()}


def task(steps, size=8):
    """Images whose class is where they are bright."""
    for _ in range(steps):
        y = torch.randint(3, (size,))
        x = torch.randn(size, 2, 8, 8)
        x[range(size), 0, :, 1] += 3.0 * y[:, None]
        yield x, y


def train(model, steps, autocast, seed=1):
    torch.manual_seed(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for x, y in task(steps):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
def test_autocast_trains_like_float32(norm):
    wide, narrow = (conv_net(norm) for _ in range(2))
    narrow.load_state_dict(wide.state_dict())
    losses = [train(wide, 30, False), train(narrow, 30, True)]
    assert sum(losses[1][-5:]) < 0.9 * sum(losses[1][:5])  # it learns
    assert sum(losses[1]) == pytest.approx(sum(losses[0]), rel=0.1)
    kept = statistics(narrow)
    assert all(value.dtype == torch.float32 for value in kept.values())
    assert all(parameter.dtype == torch.float32 for parameter in narrow.parameters())
    x, _ = next(task(1))
    with torch.autocast("cpu", torch.bfloat16):
        y = narrow.eval()(x)
    torch.testing.assert_close(y.float(), narrow(x), rtol=0.1, atol=0.1)


@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
def test_the_output_has_the_type_that_batch_norm_gives(norm, training, given):
    ours, torchs = norm(4).train(training), nn.BatchNorm2d(4).train(training)
    x = torch.randn(6, 4, 5, 5).to(given)
    with torch.autocast("cpu", torch.bfloat16):
        assert ours(x).dtype == torchs(x).dtype == given


@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
def test_under_autocast_a_norm_computes_as_without(norm):
    """It never rounds more than its input and output were: statistics, output and gradients are those of float32."""
    one = norm(4)
    two = copy.deepcopy(one)
    for _ in range(3):
        x = (torch.randn(6, 4, 5, 5) * 3 + 20).bfloat16()
        mask = torch.rand(6, 5, 5) < 0.7
        mask[0] = True
        with torch.autocast("cpu", torch.bfloat16):
            narrow = one(x, mask=mask)
        wide = two(x.float(), mask=mask)
        torch.testing.assert_close(narrow, wide.bfloat16())
        (narrow.float().pow(3)).sum().backward()
        (wide.bfloat16().float().pow(3)).sum().backward()
        torch.testing.assert_close(one.weight.grad, two.weight.grad, rtol=0.02, atol=0.2)
    for key, value in statistics(two).items():
        if "grads" not in key:
            torch.testing.assert_close(statistics(one)[key], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("layer", "norm"), [(RNN, StreamingNorm), (GRU, StreamingNorm), (LSTM, SampleNorm)])
def test_recurrent_layers_train_under_autocast(layer, norm):
    """Is the sum of a sequence positive? With lengths, and a state carried along."""
    results = []
    for autocast in (False, True):
        torch.manual_seed(0)
        model = nn.ModuleDict({"layer": layer(2, 12, norm=norm, batch_first=True), "head": nn.Linear(12, 1)})
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
        losses = []
        for _ in range(24):
            x, lengths = torch.randn(8, 4, 2), torch.tensor([4, 4, 4, 4, 3, 3, 3, 3])
            wanted = (x[:, :3].sum((1, 2)) > 0).float()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                _, state = model["layer"](x, lengths=lengths)
                h = state[0] if isinstance(state, tuple) else state
                model["layer"](x, state)
                y = model["head"](h[-1]).squeeze(1)
            loss = nn.functional.binary_cross_entropy_with_logits(y.float(), wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert all(value.dtype == torch.float32 for value in statistics(model).values())
        assert all(torch.isfinite(value).all() for value in model.state_dict().values())
        results.append(losses)
    assert sum(results[1][-8:]) < sum(results[1][:8])
    assert sum(results[1]) == pytest.approx(sum(results[0]), rel=0.15)


@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
def test_a_model_cast_to_bfloat16(norm):
    model = conv_net(norm).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for x, y in task(5):
        out = model(x.bfloat16())
        assert out.dtype == torch.bfloat16
        nn.functional.cross_entropy(out, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(value.dtype == torch.float32 for value in statistics(model).values())
    loaded = conv_net(norm).bfloat16()
    for x, _ in task(1):
        loaded(x.bfloat16())
    loaded.load_state_dict(model.state_dict())
    for key, value in statistics(model).items():
        assert torch.equal(statistics(loaded)[key], value)  # nothing is rounded on the way


def step(model, optimizer, scaler, x, y):
    with torch.autocast("cpu", torch.float16):
        loss = nn.functional.cross_entropy(model(x).float(), y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return loss.item()


def build(norm=StreamingNorm):
    body = nn.Linear(6, 16), norm(16), nn.ReLU(), nn.Linear(16, 16), norm(16), nn.ReLU()
    model = nn.Sequential(*body, nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    # So large a scale overflows in float16, and every fourth step it is tried again.
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=4)
    attach(optimizer, model, scaler=scaler)
    return model, optimizer, scaler


def samples(count):
    for _ in range(count):
        y = torch.randint(3, (4,))
        yield torch.randn(4, 6) + 2 * nn.functional.one_hot(y, 6), y


def test_float16_with_a_scaler_that_skips_steps():
    """Steps that overflow are skipped and leave nothing in H2; the streamed gradients are those without a scale."""
    model, optimizer, scaler = build()
    scales, losses, skipped = [], [], 0
    for x, y in samples(60):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        scale = scaler.get_scale()
        losses.append(step(model, optimizer, scaler, x, y))
        scales.append(scale)
        if scaler.get_scale() < scale:
            skipped += 1
            assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
            assert all(int(norm.grads.count) == 0 for norm in model if isinstance(norm, StreamingNorm))
    assert skipped > 5
    assert max(scales) > 64 * min(scales)
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])
    kept = statistics(model)
    assert all(value.dtype == torch.float32 and torch.isfinite(value).all() for value in kept.values())
    gradients = [value for key, value in kept.items() if "grads_long" in key]
    assert all(0 < value.abs().max() < 10 for value in gradients)  # scaled they would be thousands


@pytest.mark.parametrize("stop", [7, 20])
def test_resuming_float16_with_the_state_of_the_scaler(stop):
    """Stopped and resumed equals never stopped, to the bit, skipped steps included."""
    data = list(samples(40))
    model, optimizer, scaler = build()
    start = copy.deepcopy(model.state_dict())
    for x, y in data:
        step(model, optimizer, scaler, x, y)
    one, before, narrow = build()
    one.load_state_dict(start)
    for x, y in data[:stop]:
        step(one, before, narrow, x, y)
    saved = copy.deepcopy((one.state_dict(), before.state_dict(), narrow.state_dict()))
    resumed = build()
    for part, state in zip(resumed, saved, strict=True):
        part.load_state_dict(state)
    for x, y in data[stop:]:
        step(*resumed, x, y)
    assert resumed[2].get_scale() == scaler.get_scale()
    for key, value in model.state_dict().items():
        assert torch.equal(resumed[0].state_dict()[key], value), key


@pytest.mark.filterwarnings("ignore")  # of the compiler, about itself
@pytest.mark.skipif(torch.__version__ < "2.13", reason="older compilers refuse some of this; see speed.md")
def test_compiled_autocast_trains_like_autocast():
    eager = conv_net(StreamingNorm)
    model = copy.deepcopy(eager)
    torch._dynamo.reset()
    losses = train(eager, 6, True), train(torch.compile(model, backend="eager", fullgraph=True), 6, True)
    assert losses[1] == pytest.approx(losses[0], rel=0.02)
    kept = statistics(model)
    for key, value in statistics(eager).items():
        assert kept[key].dtype == torch.float32
        if "grads" not in key:
            torch.testing.assert_close(kept[key], value, rtol=0.05, atol=0.05)
