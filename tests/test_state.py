"""State: saved, loaded, copied, cast, reset, and safe from bad data."""

import copy
import io
import pickle
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from streamnorm import GRU, GeneralBatchNorm, SampleNorm, StreamingNorm, TimeSpecificNorm, kernels
from streamnorm.core import algorithm
from streamnorm.core.reference import CODES
from streamnorm.core.state import FIELDS, Kind

COUNTERS = {name for name, kind in FIELDS.items() if kind is Kind.COUNTER}


def network(code="BA1", **settings):
    norm = StreamingNorm(5, ref=code, **settings)
    return nn.Sequential(nn.Conv1d(3, 5, 1), norm, nn.ReLU(), nn.Conv1d(5, 5, 1), StreamingNorm(5), nn.Flatten())


def train(model, optimizer, batches, every=3, start=0):
    for i, x in enumerate(batches, start):
        model(x).square().mean().backward()
        if (i + 1) % every == 0:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("stop", [3, 4, 5, 6])
@pytest.mark.parametrize("code", ["BA1", "BA2", "BA4", "BA6", "SP1", "SP4"])
def test_resuming_gives_the_same_bits(code, stop):
    """Stopped right after an update (pending), or inside a window, and gone on from a file."""
    batches = torch.randn(9, 4, 3, 6)
    whole = network(code)
    start = copy.deepcopy(whole.state_dict())
    train(whole, torch.optim.SGD(whole.parameters(), lr=0.05, momentum=0.9), batches)

    first = network(code)
    first.load_state_dict(start)
    optimizer = torch.optim.SGD(first.parameters(), lr=0.05, momentum=0.9)
    train(first, optimizer, batches[:stop])
    file = io.BytesIO()
    gradients = [p.grad for p in first.parameters()]
    torch.save({"model": first.state_dict(), "optimizer": optimizer.state_dict(), "gradients": gradients}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    second = network(code)
    second.load_state_dict(saved["model"])
    optimizer = torch.optim.SGD(second.parameters(), lr=0.05, momentum=0.9)
    optimizer.load_state_dict(saved["optimizer"])
    for p, g in zip(second.parameters(), saved["gradients"], strict=True):
        p.grad = g
    train(second, optimizer, batches[stop:], start=stop)
    for key, value in whole.state_dict().items():
        assert torch.equal(second.state_dict()[key], value), key


@pytest.mark.parametrize("code", ["BA1", "BA4", "SP1"])
def test_no_two_tensors_of_a_state_dict_share_memory(code):
    """Formats that store each tensor once, such as safetensors, refuse those that do."""

    def assert_apart(model):
        addresses = [t.untyped_storage().data_ptr() for t in model.state_dict().values() if t.numel()]
        assert len(set(addresses)) == len(addresses)

    model = network(code)
    assert_apart(model)
    train(model, torch.optim.SGD(model.parameters(), lr=0.05), torch.randn(4, 4, 3, 6))
    read = model[1].mean, model[1].stats, model.state_dict()
    assert_apart(model)
    model(torch.randn(4, 3, 6))
    assert_apart(model.double())
    other = network(code)
    other.load_state_dict(read[-1], assign=True)
    assert_apart(other)
    batchnorm = nn.BatchNorm1d(5)
    batchnorm(torch.randn(4, 5))
    other[4].load_state_dict(batchnorm.state_dict())
    assert_apart(other)


@pytest.mark.parametrize("code", ["BA1", "BA6"])
def test_a_state_that_is_set_tensor_by_tensor(code):
    """As loaders do it that look each name of a checkpoint up in its module."""
    model, other = network(code), network(code)
    train(model, torch.optim.SGD(model.parameters(), lr=0.05), torch.randn(5, 4, 3, 6))
    other(torch.randn(4, 3, 6))  # binds BA6 to its size
    read = other[1].stats_long, other[1].stats_long.clone()
    for name, value in model.state_dict().items():
        path, _, last = name.rpartition(".")
        module = other.get_submodule(path)
        assert getattr(module, last).shape == value.shape
        setattr(module, last, nn.Parameter(value.clone(), requires_grad=value.is_floating_point()))
    assert len(list(other.parameters())) == len(list(model.parameters()))
    assert torch.equal(*read)  # what was read before stays as it was
    x = torch.randn(4, 3, 6)
    assert torch.equal(model(x), other(x))
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name
    with pytest.raises(ValueError, match=r"stats_short has shape .* cannot be set to \(3,\)"):
        other[1].stats_short = torch.zeros(3)


def test_the_state_is_outside_the_buffers_and_whole():
    layer = StreamingNorm(3)
    assert list(layer.buffers()) == []
    parts = {f"{s}_{part}" for s in ("stats", "grads") for part in ("long", "short", "count", "empty", "pending")}
    numbers = "seen", "elements", "elements_before", "counted", "samples", "loss_scale"
    tested = "eval_long", "eval_mean", "eval_sigma"
    live = "running_mean", "running_var"
    assert set(layer.state_dict()) == {"weight", "bias", "mean", "sigma", *numbers, *tested, *live} | parts
    assert layer.state_dict()._metadata[""]["version"] == 4
    assert layer.stats.count.dtype == torch.int64
    assert layer.stats.count.shape == ()


@pytest.mark.parametrize(
    ("code", "shape"),
    [("BA1", (3,)), ("BA2", ()), ("BA4", (3, 4, 5)), ("BA5", (4, 5)), ("BA6", (3, 4, 5)), ("SP1", ()), ("SP2", (3,))],
)
def test_the_shape_of_statistics(code, shape):
    layer = StreamingNorm(3, ref=code)
    layer(torch.randn(2, 3, 4, 5))
    assert layer.mean.shape == layer.sigma.shape == shape
    for stream in (layer.stats, layer.grads):
        assert stream.long.shape == stream.short.shape == (2, *shape)


def test_states_of_version_1_load():
    layer = StreamingNorm(3)
    layer(torch.randn(4, 3)).sum().backward()
    layer.weights_updated()
    old = layer.state_dict()
    old["pending"] = old.pop("stats_pending")
    del old["grads_pending"]
    old._metadata[""]["version"] = 1
    loaded = StreamingNorm(3)
    assert loaded.load_state_dict(old) == ([], [])
    x = torch.randn(4, 3)
    assert torch.equal(loaded(x), layer(x))
    assert torch.equal(loaded.grads.long, layer.grads.long)


def test_a_saved_state_is_a_snapshot():
    """But for what torch's norms have too, and what goes on with the layer there: gain, bias, live statistics."""
    layer = StreamingNorm(3)
    layer(torch.randn(4, 3))
    saved = layer.state_dict()
    kept = {k: v.clone() for k, v in saved.items()}
    other = StreamingNorm(3)
    other.load_state_dict(saved)
    for module in (layer, other):
        module.weights_updated()
        module(torch.randn(4, 3) + 9).sum().backward()
    for key, value in kept.items():
        if key not in ("weight", "bias", "running_mean", "running_var"):
            assert torch.equal(saved[key], value), key


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_never_touches_the_original(duplicate):
    layer = StreamingNorm(3)
    layer(torch.randn(4, 3)).sum().backward()
    before = {k: v.clone() for k, v in layer.state_dict().items()}
    twin = duplicate(layer)
    for key, value in twin.state_dict().items():
        assert torch.equal(value, before[key])
    twin.weights_updated()
    twin(torch.randn(4, 3)).sum().backward()
    assert int(twin.stats.count) == 1
    assert not torch.equal(twin.mean, layer.mean)
    for key, value in layer.state_dict().items():
        assert torch.equal(value, before[key]), key


def test_a_copy_between_forward_and_backward_is_apart():
    layer = StreamingNorm(3)
    y = layer(torch.randn(4, 3, requires_grad=True))
    twin = copy.deepcopy(layer)
    y.sum().backward()
    assert int(layer.grads.count) == 1
    assert int(twin.grads.count) == 0


KINDS = [StreamingNorm, GeneralBatchNorm, lambda n, **kw: TimeSpecificNorm(n, 2, **kw)]


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_statistics_are_float32_or_wider(kind, affine):
    layer = kind(3, affine=affine)
    layer(torch.randn(8, 3))
    mean = layer.mean.clone()
    assert mean.dtype == torch.float32
    for narrow in (torch.bfloat16, torch.float16):
        cast = copy.deepcopy(layer).to(narrow)
        assert cast.mean.dtype == cast.sigma.dtype == torch.float32
        assert torch.equal(cast.mean, mean)  # never rounded on the way
        y = cast(torch.randn(8, 3, dtype=narrow))
        assert y.dtype == narrow
        y.sum().backward() if affine else None
        assert cast.mean.dtype == torch.float32
    wide = copy.deepcopy(layer).double()
    assert wide.mean.dtype == wide(torch.randn(4, 3).double()).dtype == torch.float64
    assert wide.float().mean.dtype == torch.float32
    assert kind(3, affine=affine, dtype=torch.bfloat16).mean.dtype == torch.float32
    assert kind(3, affine=affine, dtype=torch.float64).mean.dtype == torch.float64


def test_counters_keep_their_type():
    layer = StreamingNorm(3).type(torch.float16)
    layer(torch.randn(4, 3, dtype=torch.float16))
    assert layer.stats.count.dtype == torch.int64
    assert layer.stats.empty.dtype == torch.bool


def test_bfloat16_trains_like_float32():
    x = torch.randn(64, 8) * 3 + 2
    wide, narrow = StreamingNorm(8), StreamingNorm(8, dtype=torch.bfloat16)
    for _ in range(3):
        a, b = x.clone().requires_grad_(), x.bfloat16().requires_grad_()
        y, z = wide(a), narrow(b)
        y.square().sum().backward()
        z.square().sum().backward()
        torch.testing.assert_close(z.float(), y, rtol=0.02, atol=0.02)
        torch.testing.assert_close(narrow.sigma, wide.sigma, rtol=0.01, atol=0.01)


def test_mixed_types_compute_in_the_wider_one():
    layer = StreamingNorm(3)
    y = layer(torch.randn(4, 3, dtype=torch.float64, requires_grad=True))
    y.sum().backward()
    assert y.dtype == torch.float64
    kinds = {t.dtype for name, t in layer.state_dict().items() if name not in COUNTERS}
    assert kinds == {torch.float32, torch.int64, torch.bool}
    assert layer.weight.grad.dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(torch.randn(4, 3)).dtype == torch.float32
        assert layer(torch.randn(4, 3, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_no_grad_collects_statistics_and_nothing_else():
    with_grad, without = StreamingNorm(3), StreamingNorm(3)
    x = torch.randn(4, 3)
    with_grad(x)
    with torch.no_grad():
        y = without(x)
    assert not y.requires_grad
    assert torch.equal(with_grad.stats.short, without.stats.short)
    with torch.inference_mode():
        without(x)
    without(x.requires_grad_()).sum().backward()
    assert int(without.stats.count) == 3
    assert int(without.grads.count) == 1


@pytest.mark.parametrize("code", CODES)
def test_evaluation_is_a_pure_function(code):
    layer = StreamingNorm(3, ref=code)
    x = torch.randn(4, 3, 6)
    layer.eval()
    assert torch.equal(layer(x), x)  # before training mean = 0, sigma = 1
    layer.train()
    layer(x).sum().backward()
    layer.weights_updated()
    layer.eval()
    before = {k: v.clone() for k, v in layer.state_dict().items()}
    one, two = layer(x), layer(x)
    assert torch.equal(one, two)
    torch.testing.assert_close(layer(x[:1]), one[:1])  # of each sample by itself
    layer(x.requires_grad_()).sum().backward()
    assert all(torch.equal(v, before[k]) for k, v in layer.state_dict().items())
    assert layer(x[:0]).shape == (0, 3, 6)


def test_resetting():
    layer = StreamingNorm(3, ref="BA6")
    layer(torch.randn(4, 3, 5)).sum().backward()
    with torch.no_grad():
        layer.weight.fill_(7)
    layer.reset_gradients()
    assert int(layer.grads.count) == 0
    assert layer.grads.empty
    assert int(layer.stats.count) == 1
    layer.reset_running_stats()
    assert int(layer.stats.count) == 0
    layer(torch.randn(4, 3, 7))  # free to take another size
    assert (layer.weight == 7).all()
    layer.reset_parameters()
    assert (layer.weight == 1).all()
    batch = GeneralBatchNorm(3, ref="BA6")
    batch(torch.randn(4, 3, 5))
    batch.reset_running_stats()
    batch(torch.randn(4, 3, 7))
    assert batch.mean.shape == (3, 7)


@pytest.mark.parametrize("kind", [StreamingNorm, GeneralBatchNorm])
@pytest.mark.parametrize("torch_norm", [nn.BatchNorm1d, nn.BatchNorm2d])
def test_loading_a_trained_batch_norm(kind, torch_norm):
    theirs = torch_norm(3)
    shape = (16, 3) if torch_norm is nn.BatchNorm1d else (16, 3, 4, 4)
    for _ in range(20):
        theirs(torch.randn(shape) * 4 + 2)
    nn.init.uniform_(theirs.weight)
    ours = kind(3)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(shape)
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(x), rtol=1e-5, atol=1e-5)
    ours.train()
    if kind is StreamingNorm:
        assert not ours.stats.empty
        y = ours(torch.randn(shape) * 4 + 2)  # no warm-up, and long counts at once
        torch.testing.assert_close(ours.mean, 0.7 * ours.stats.long[0] + 0.3 * ours.stats.short[0])
        y.sum().backward()


def test_loading_a_batch_norm_that_saw_nothing_starts_afresh():
    layer = StreamingNorm(3)
    layer(torch.randn(4, 3))
    layer.load_state_dict(nn.BatchNorm1d(3).state_dict())
    assert layer.stats.empty
    assert float(layer.state_dict()["seen"]) == 0


def test_loading_a_batch_norm_where_it_does_not_fit():
    theirs = nn.BatchNorm1d(3)
    theirs(torch.randn(4, 3))
    with pytest.raises(RuntimeError, match=r"per channel.*BA1 or SP2"):
        StreamingNorm(3, ref="BA2").load_state_dict(theirs.state_dict())
    StreamingNorm(3, ref="SP2").load_state_dict(theirs.state_dict())


def test_a_whole_model_loads_from_its_batch_norm_twin():
    theirs = nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.ReLU())
    ours = nn.Sequential(nn.Conv2d(3, 5, 3), StreamingNorm(5), nn.ReLU())
    for _ in range(5):
        theirs(torch.randn(4, 3, 8, 8))
    assert str(ours.load_state_dict(theirs.state_dict())) == "<All keys matched successfully>"
    x = torch.randn(4, 3, 8, 8)
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("code", ["BA4", "BA5", "BA6"])
def test_located_statistics_travel_with_their_size(kind, code):
    trained, fresh, other = (kind(3, ref=code) for _ in range(3))
    trained(torch.randn(4, 3, 6))
    unbound = fresh.state_dict()
    unbound = {k: v.clone() for k, v in unbound.items()}
    fresh.load_state_dict(trained.state_dict())
    assert torch.equal(fresh.mean, trained.mean)
    with pytest.raises(ValueError, match=r"spatial size \(7,\).*bound to \(6,\)"):
        fresh(torch.randn(4, 3, 7))
    other(torch.randn(4, 3, 7))
    before = other.mean.clone()
    with pytest.raises(RuntimeError, match="size mismatch"):
        other.load_state_dict(trained.state_dict())
    assert torch.equal(other.mean, before)
    other.load_state_dict(unbound)
    other(torch.randn(4, 3, 8))


def test_loading_reports_what_does_not_fit():
    state = StreamingNorm(3).state_dict()
    with pytest.raises(RuntimeError, match="size mismatch for stats_long"):
        StreamingNorm(4).load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"Missing key.*grads_short"):
        StreamingNorm(3).load_state_dict({k: v for k, v in state.items() if k != "grads_short"})
    with pytest.raises(RuntimeError, match=r"Unexpected key.*stray"):
        StreamingNorm(3).load_state_dict({**state, "stray": torch.zeros(1)})
    state._metadata[""]["version"] = 5
    with pytest.raises(RuntimeError, match="newer streamnorm"):
        StreamingNorm(3).load_state_dict(state)


def test_loading_with_assign_brings_a_meta_model_to_life():
    trained = StreamingNorm(3)
    trained(torch.randn(4, 3))
    with torch.device("meta"):
        empty = StreamingNorm(3)
    empty.load_state_dict(trained.state_dict(), assign=True)
    assert torch.equal(empty.mean, trained.mean)
    assert torch.equal(empty(torch.ones(2, 3)), trained(torch.ones(2, 3)))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("when", ["first", "later"])
def test_a_batch_that_is_not_finite_leaves_no_trace(kind, bad, when):
    layer = kind(3)
    if when == "later":
        layer(torch.randn(4, 3)).sum().backward()
    before = {k: v.clone() for k, v in layer.state_dict().items()}
    x = torch.randn(4, 3)
    x[1, 2] = bad
    y = layer(x)
    assert not torch.isfinite(y[1, 2])  # it is not hidden either
    y.sum().backward()
    for key, value in layer.state_dict().items():
        assert torch.equal(value, before[key]), key
    layer.zero_grad()
    clean = copy.deepcopy(layer)
    layer(torch.ones(4, 3) * torch.arange(4)[:, None]).sum().backward()
    clean(torch.ones(4, 3) * torch.arange(4)[:, None]).sum().backward()
    assert torch.equal(layer.mean, clean.mean)
    assert torch.isfinite(layer.weight.grad).all()


def test_training_recovers_from_bad_batches():
    torch.manual_seed(1)
    x = torch.randn(256, 10)
    target = (x @ torch.randn(10, 1)).tanh()
    model = nn.Sequential(nn.Linear(10, 32), StreamingNorm(32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for step in range(120):
        batch = x[step % 8 :: 8].clone()
        if step % 10 == 3:
            batch[0, 0] = torch.nan
        loss = (model(batch) - target[step % 8 :: 8]).square().mean()
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        if torch.isfinite(loss):  # the usual guard: the weights are the loop's to protect
            loss.backward()
            optimizer.step()
    finite = [loss for loss in losses if loss == loss]
    assert len(finite) == 108
    assert sum(finite[-8:]) < 0.7 * sum(finite[:8])


def test_non_finite_gradients_are_passed_on_but_not_streamed():
    layer = StreamingNorm(3, beta=(0.5, 0.2, 0.3))
    layer(torch.randn(4, 3)).sum().backward()
    before = layer.grads.short.clone()
    x = torch.randn(4, 3, requires_grad=True)
    layer(x).backward(torch.full((4, 3), torch.inf))
    assert not torch.isfinite(x.grad).any()
    assert torch.equal(layer.grads.short, before)


def test_sample_norm_has_no_state():
    assert set(SampleNorm(3).state_dict()) == {"weight", "bias"}


@pytest.mark.parametrize("code", ["BA1", "BA6"])
def test_a_refused_batch_norm_leaves_the_layer_as_it_was(code):
    layer, theirs = StreamingNorm(3, ref=code), nn.BatchNorm1d(4)
    layer(torch.randn(4, 3) + 5)
    theirs(torch.randn(4, 4))
    before = {k: v.clone() for k, v in layer.state_dict().items()}
    state = {k: v for k, v in theirs.state_dict().items() if k not in ("weight", "bias")}
    with pytest.raises(RuntimeError, match="per channel"):
        layer.load_state_dict(state, strict=False)
    assert all(torch.equal(v, before[k]) for k, v in layer.state_dict().items())


def test_a_newer_state_is_refused_whole():
    layer, newer = StreamingNorm(3), StreamingNorm(3)
    nn.init.zeros_(newer.weight)
    state = newer.state_dict()
    state._metadata[""]["version"] = 5
    with pytest.raises(RuntimeError, match="newer streamnorm"):
        layer.load_state_dict(state)
    assert (layer.weight == 1).all()


NAN, INF = float("nan"), float("inf")
DAMAGED = [
    ("stats_count", -1, "holds -1: must be finite and at least 0"),
    ("grads_count", NAN, "holds nan"),
    ("seen", NAN, "holds nan: must be finite and at least 0"),
    ("seen", -3.0, "holds -3.0"),
    ("seen", INF, "holds inf"),
    ("elements", -1.0, "holds -1.0"),
    ("elements_before", INF, "holds inf"),
    ("loss_scale", -2.0, "holds -2.0"),
    ("sigma", 0.0, "holds 0.0: must be finite and above 0"),
    ("sigma", NAN, "holds nan"),
    ("mean", -INF, "holds -inf: must be finite"),
    ("stats_long", NAN, "holds nan"),
    ("stats_short", -1.0, "holds -1.0: must be finite and at least 0"),
    ("grads_long", INF, "holds inf"),
    ("grads_short", NAN, "holds nan"),
    ("stats_pending", NAN, "holds nan"),
]


def damaged(tensor, value):
    """One number of a tensor is another; counters and marks become floats where they must, as in some formats."""
    bad = tensor.clone() if not isinstance(value, float) or tensor.is_floating_point() else tensor.double()
    bad.view(-1)[-1] = value
    return bad


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("name", "value", "words"), DAMAGED)
def test_a_state_that_no_training_leaves_is_refused(name, value, words, dtype, assign):
    """Naming the key; the statistics stay as they were."""
    model, other = (nn.Sequential(StreamingNorm(3, affine=False, dtype=dtype)) for _ in range(2))
    for each, offset in ((model, 0), (other, 5)):
        for _ in range(3):
            each(torch.randn(4, 3, dtype=dtype, requires_grad=True) + offset).sum().backward()
            each[0].weights_updated()
    state, before = other.state_dict(), copy.deepcopy(model.state_dict())
    state[f"0.{name}"] = damaged(state[f"0.{name}"], value)
    with pytest.raises(RuntimeError, match=rf"0\.{name} {words}"):
        model.load_state_dict(state, assign=assign)
    with pytest.raises(ValueError, match=rf"^{name} {words}"):
        setattr(model[0], name, state[f"0.{name}"])
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
    model.load_state_dict(other.state_dict(), assign=assign)


BATCHNORM_DAMAGE = [("running_mean", NAN), ("running_var", -1e-7), ("running_var", INF), ("num_batches_tracked", -1)]


@pytest.mark.parametrize("kind", [StreamingNorm, GeneralBatchNorm])
@pytest.mark.parametrize(("name", "value"), BATCHNORM_DAMAGE)
def test_a_batch_norm_that_no_training_leaves_is_refused(kind, name, value):
    theirs, ours = nn.BatchNorm1d(3), kind(3)
    theirs(torch.randn(4, 3)), ours(torch.randn(4, 3))
    state, before = theirs.state_dict(), copy.deepcopy(ours.state_dict())
    state[name] = damaged(state[name], value)
    with pytest.raises(RuntimeError, match=f"{name} holds"):
        ours.load_state_dict(state)
    assert all(torch.equal(tensor, before[key]) for key, tensor in ours.state_dict().items())


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("make", [lambda: GeneralBatchNorm(3), lambda: TimeSpecificNorm(3, 2)])
@pytest.mark.parametrize(("name", "value"), [("mean", NAN), ("sigma", INF), ("sigma", 0.0), ("sigma", -1.0)])
def test_estimates_that_no_training_leaves_are_refused(make, name, value, assign):
    layer, other = make(), make()
    layer(torch.randn(4, 3)), other(torch.randn(4, 3) + 5)
    state, before = other.state_dict(), copy.deepcopy(layer.state_dict())
    state[name] = damaged(state[name], value)
    with pytest.raises(RuntimeError, match=rf"{name} holds {value}: must be finite"):
        layer.load_state_dict(state, assign=assign)
    assert all(torch.equal(tensor, before[key]) for key, tensor in layer.state_dict().items())
    layer.load_state_dict(other.state_dict(), assign=assign)


@pytest.mark.parametrize("kind", [StreamingNorm, GeneralBatchNorm])
def test_what_a_layer_can_reach_loads(kind):
    """Without eps a constant channel has a sigma of 0; meta tensors have no values to look at."""
    layer = kind(3, eps=0.0, center="mean")
    for _ in range(2):
        layer(torch.ones(4, 3))
    kind(3, eps=0.0).load_state_dict(layer.state_dict())
    extreme = StreamingNorm(3, alpha=(1.5, -0.5), warmup=0)
    for scale in (1.0, 100.0):
        extreme(scale * torch.randn(4, 3))
        extreme.weights_updated()
    assert float(extreme.sigma.min()) < 0
    StreamingNorm(3, alpha=(1.5, -0.5)).load_state_dict(extreme.state_dict())
    meta = kind(3, device="meta")
    meta.load_state_dict(meta.state_dict(), assign=True)


def test_general_batch_norm_from_a_batch_norm_that_saw_nothing():
    layer = GeneralBatchNorm(3)
    layer(torch.randn(4, 3) + 5)
    layer.load_state_dict(nn.BatchNorm1d(3).state_dict())
    assert torch.equal(layer.mean, torch.zeros(3))
    assert torch.equal(layer.sigma, torch.ones(3))


def test_general_batch_norm_refuses_half_a_state():
    layer = GeneralBatchNorm(3, ref="BA6")
    state = {**layer.state_dict(), "mean": torch.zeros(3, 4), "sigma": torch.ones(3, 5)}
    with pytest.raises(RuntimeError, match="size mismatch for mean"):
        layer.load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"Missing key.*sigma"):
        layer.load_state_dict({k: v for k, v in state.items() if k != "sigma"})
    assert layer.eval()(torch.randn(2, 3, 6)).shape == (2, 3, 6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("code", ["BA3", "BA5", "BA6"])
def test_no_space_is_a_spatial_size_too(kind, code):
    layer, fresh = kind(3, ref=code), kind(3, ref=code)
    layer(torch.randn(4, 3))
    fresh.load_state_dict(layer.state_dict())
    for bound in (layer, fresh):
        with pytest.raises(ValueError, match=r"bound to \(\)"):
            bound(torch.randn(4, 3, 5))


def test_the_state_can_be_written_in_place():
    """As a broadcast over processes does: every tensor has memory of its own, and the layer sees what was written."""
    source, target = (nn.Sequential(nn.Linear(3, 3), StreamingNorm(3)) for _ in range(2))
    optimizer = torch.optim.SGD(source.parameters(), lr=0.1)
    for _ in range(3):
        source(torch.randn(8, 3) + 2).square().sum().backward()
        optimizer.step()
    for model in (source, target):
        memory = [tensor.untyped_storage().data_ptr() for tensor in model.state_dict().values()]
        assert len(set(memory)) == len(memory)
    for key, tensor in target.state_dict().items():
        tensor.copy_(source.state_dict()[key])
    x = torch.randn(8, 3)
    assert torch.equal(source(x), target(x))
    for key, tensor in source.state_dict().items():
        assert torch.equal(target.state_dict()[key], tensor), key


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("code", ["BA1", "BA6"])
def test_inference_mode_leaves_nothing_behind(kind, code):
    layer, x = kind(3, ref=code), torch.randn(4, 3, 2)
    with torch.inference_mode():
        layer(torch.randn(4, 3, 2))
    layer.eval()(x).sum().backward()
    layer.train()(x).sum().backward()
    twin = kind(3, ref=code)
    twin.load_state_dict(layer.state_dict())
    assert not any(tensor.is_inference() for tensor in layer.state_dict().values())


def test_deferred_initialisation():
    layer = StreamingNorm(3, device="meta").to_empty(device="cpu")
    layer.reset_parameters()
    fresh = StreamingNorm(3)
    for key, tensor in fresh.state_dict().items():
        assert torch.equal(layer.state_dict()[key], tensor), key


def test_a_backward_pass_after_a_reset_is_not_streamed():
    layer = StreamingNorm(3, ref="BA6")
    x = torch.randn(4, 3, 5, requires_grad=True)
    y = layer(x)
    layer.reset_running_stats()
    layer(torch.randn(4, 3, 7))
    y.sum().backward()
    assert torch.isfinite(x.grad).all()
    assert int(layer.grads.count) == 0
    assert layer.grads.short.shape == (2, 3, 7)


def test_statistics_are_freed_after_backward():
    layer = SampleNorm(3, ref="SP4")
    x = torch.randn(4, 3, 16, 16, requires_grad=True)
    y = layer(x)
    loss = y.sum()
    saved = [t for t in y.grad_fn.saved_tensors if t is not None and t.numel() > 100]
    assert len(saved) > 1
    del saved
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.grad_fn.saved_tensors  # noqa: B018


def test_torchs_distributed_checkpoints_find_every_tensor():
    """They look the entries of a state_dict up as attributes."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    model, other = (nn.Sequential(nn.Linear(3, 4), StreamingNorm(4, process_group="world")) for _ in range(2))
    model(torch.randn(5, 3)).sum().backward()
    set_model_state_dict(other, get_model_state_dict(model))
    for key, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[key], value), key


@pytest.mark.filterwarnings("ignore")  # of the compiler, about itself
@pytest.mark.parametrize("how", ["fused", "plain", "compiled", "BA3"])
def test_elements_are_counted_beyond_the_digits_of_float32(how):
    layer = StreamingNorm(3, ref="BA3" if how == "BA3" else "BA1")
    x = torch.randn(2, 3, 4, 4)
    layer(x)
    new = float(layer.seen)
    saved = layer.state_dict() | {"seen": torch.tensor(2.0**24)}  # as earlier versions saved it
    layer.load_state_dict(saved)
    with kernels.disabled() if how == "plain" else nullcontext():
        run = torch.compile(layer, backend="aot_eager") if how == "compiled" else layer
        for _ in range(3):
            run(x)
    assert float(layer.seen) == pytest.approx(2.0**24 + 3 * new, abs=1e-3)
    assert layer.half().seen.dtype == layer.float().elements.dtype == torch.float64
    old = layer.state_dict()
    back = StreamingNorm(3, ref=layer.ref)
    back.load_state_dict(copy.deepcopy(old))
    assert float(back.seen) == float(layer.seen)
    assert pickle.loads(pickle.dumps(layer)).seen.dtype == torch.float64


def test_a_module_pickled_with_other_counters_goes_on():
    layer = StreamingNorm(3)
    layer(torch.randn(4, 3))
    kept = layer.__getstate__()
    narrow = {name: getattr(layer.state, name).float() for name in COUNTERS}
    older = StreamingNorm.__new__(StreamingNorm)
    older.__setstate__(kept | {"_state": replace(copy.deepcopy(layer.state), **narrow)})
    x = torch.randn(4, 3)
    assert torch.equal(older(x), layer(x))
    assert older.seen.dtype == torch.float64


# Written by the version before counters were float64: a model of four layers, in the middle of a window.
STATES = Path(__file__).parent / "states"


def old_model(how):
    if how == "module":
        return torch.load(STATES / "module3.pt", weights_only=False)
    layers = {"rows": StreamingNorm(3), "located": StreamingNorm(2, ref="BA6"), "batch": GeneralBatchNorm(3)}
    model = nn.ModuleDict(layers | {"gru": GRU(3, 4)})
    model.load_state_dict(torch.load(STATES / "version3.pt", weights_only=True))
    return model


@pytest.mark.parametrize("how", ["state_dict", "module"])
def test_what_an_earlier_version_saved_goes_on(how, monkeypatch):
    for name, value in {"ALIKE": 4, "FULL": 32, "POWER": 1}.items():  # as the guard counted then
        monkeypatch.setattr(algorithm, name, value)
    expected = torch.load(STATES / "expected3.pt", weights_only=True)
    model = old_model(how)
    for mode in ("next", "eval"):
        model.train(mode == "next")
        x, image = expected["x"], expected["image"]
        with kernels.disabled():  # they count as it is done now
            found = model["batch"](model["rows"](x)).sum() + model["located"](image).square().sum()
            found = found + model["gru"](x.unsqueeze(0))[0].square().sum()
        torch.testing.assert_close(found, expected[mode], rtol=1e-5, atol=1e-5)
