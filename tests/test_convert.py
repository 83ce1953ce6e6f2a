"""`convert`: torch's norms become ours, and nothing else of the model changes."""

import copy
import functools
import re

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

import streamnorm
from streamnorm import GeneralBatchNorm, SampleNorm, StreamingNorm, TimeSpecificNorm, convert
from streamnorm.core.reference import CODES

quiet = functools.partial(convert, report=None)


def merges_processes():
    """Whether StreamingNorm takes a process group yet, which a SyncBatchNorm hands over."""
    try:
        StreamingNorm(2, process_group="world")
    except ValueError:
        return False
    return True


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.conv2, self.bn2 = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)

    def forward(self, x):
        return torch.relu(x + self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x))))))


def residual_net():
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), Block(6), Block(6), nn.Flatten(), nn.Linear(6 * 16, 4)
    )


def images(n=5):
    return torch.randn(n, 3, 6, 6) * 2 + 1


def step(model, optimizer, x):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def trained(model, x, updates=4):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(updates):
        step(model, optimizer, x + torch.randn_like(x))
    return optimizer


def shaken(norm):
    """With gain, bias and running statistics that are not the initial ones."""
    for p in norm.parameters():
        nn.init.normal_(p)
    if getattr(norm, "running_mean", None) is not None:
        nn.init.normal_(norm.running_mean)
        nn.init.uniform_(norm.running_var, 0.1, 3)
        norm.num_batches_tracked.fill_(7)
    return norm


def table(said):
    """The lines of a report about single norms: what they were and what became of them, by name."""
    rows = [re.split("  +", line) for line in said[1:]]
    return {row[0]: " ".join(row[1:]) for row in rows if len(row) > 1}


def test_a_trained_network_evaluates_as_before_and_its_optimizer_goes_on():
    model, x = residual_net(), images()
    optimizer = trained(model, x)
    parameters, keys = list(model.parameters()), [name for name, _ in model.named_parameters()]
    before = model.eval()(x)
    assert quiet(model) is model
    assert sum(isinstance(m, StreamingNorm) for m in model.modules()) == 5
    assert not any(isinstance(m, nn.BatchNorm2d) for m in model.modules())
    assert torch.allclose(model(x), before, atol=1e-5)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert [name for name, _ in model.named_parameters()] == keys

    model.train()
    norm, gain = model[3].bn1, model[3].bn1.weight.clone()
    for _ in range(3):  # one sample each, which batch norm could not do
        step(model, optimizer, images(1))
    assert not torch.equal(norm.weight, gain)
    assert int(norm.stats.count) == 1  # each update was heard of and folded
    assert not bool(norm.grads.empty)


AS_BATCH_NORM = {"center": "mean", "alpha": (0, 1), "beta": (0, 0, 1), "warmup": 0}


@pytest.mark.parametrize(("norm", "settings"), [(GeneralBatchNorm, {}), (StreamingNorm, AS_BATCH_NORM)])
@pytest.mark.parametrize("optimizer", [functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9), torch.optim.Adam])
def test_training_goes_on_as_if_nothing_had_happened(norm, settings, optimizer):
    """With norms that train as batch norm does: the same losses, from the same momentum."""
    one = residual_net().double()
    other = copy.deepcopy(one)
    batches = torch.randn(8, 5, 3, 6, 6, dtype=torch.float64)
    curves = []
    for model, converts in ((one, False), (other, True)):
        optim, losses = optimizer(model.parameters()), []
        for i, x in enumerate(batches):
            if converts and i == 4:
                quiet(model, norm, **settings)
            optim.zero_grad()
            losses.append(model(x).square().mean())
            losses[-1].backward()
            optim.step()
        curves.append(torch.stack(losses))
    assert isinstance(other[1], norm)
    assert torch.allclose(*curves, rtol=1e-8)


@pytest.mark.parametrize("eps", [1e-5, 1e-3, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    ("old", "shape"),
    [
        (nn.BatchNorm1d, (6, 4)),
        (nn.BatchNorm1d, (6, 4, 5)),
        (nn.BatchNorm2d, (6, 4, 3, 3)),
        (nn.BatchNorm3d, (2, 4, 3, 3, 2)),
        (functools.partial(nn.InstanceNorm1d, track_running_stats=True), (6, 4, 5)),
        (functools.partial(nn.InstanceNorm2d, track_running_stats=True, affine=True), (6, 4, 5, 5)),
    ],
)
@pytest.mark.parametrize("norm", [StreamingNorm, GeneralBatchNorm])
def test_running_statistics_start_the_new_norm(old, shape, dtype, eps, norm):
    """Whatever the eps of the old norm and of the new one."""
    layer, x = shaken(old(4, eps=eps)).to(dtype).eval(), torch.randn(shape).to(dtype)
    for new_eps in (None, 1e-2):
        settings = {} if new_eps is None else {"eps": new_eps}
        new = quiet(layer, norm, **settings)
        assert new.eps == (new_eps or eps)
        assert torch.allclose(new(x).double(), layer(x).double(), atol=1e-5 if dtype != torch.bfloat16 else 0.05)
        assert new.mean.dtype == torch.promote_types(dtype, torch.float32)
        assert torch.allclose(new.sigma, (layer.running_var.to(new.sigma) + eps).sqrt(), rtol=1e-6)


@pytest.mark.parametrize("p", [1, 2, 3])
@pytest.mark.parametrize("ref", ["BA1", "SP2"])
def test_there_is_no_new_warm_up(p, ref):
    layer = shaken(nn.BatchNorm1d(3))
    new = quiet(layer, p=p, ref=ref, center="running")
    before = new.mean.clone(), new.sigma.clone()
    assert torch.equal(new.stats.long, torch.stack(before))
    new(torch.randn(1, 3, 8))
    # alpha 0.7 of what was, 0.3 of this call; in a warm-up it would be the statistics of the layer instead
    assert torch.allclose(new.mean, 0.7 * before[0] + 0.3 * new.stats.short[0])
    assert torch.allclose(new.sigma, 0.7 * before[1] + 0.3 * new.stats.short[1])


def test_instance_norms_and_old_checkpoints_count_no_batches():
    """Both leave the counter at 0 beside real statistics."""
    tracking = nn.InstanceNorm1d(3, track_running_stats=True)
    for _ in range(5):
        tracking(torch.randn(4, 3, 6) * 3 + 2)
    assert int(tracking.num_batches_tracked) == 0
    old = shaken(nn.BatchNorm1d(3))
    old.num_batches_tracked.zero_()
    for layer in (tracking, old):
        x = torch.randn(4, 3, 6)
        assert torch.allclose(quiet(layer.eval())(x), layer(x), atol=1e-5)
        loaded = StreamingNorm(3, affine=layer.affine).eval()
        loaded.load_state_dict(layer.state_dict())
        assert torch.allclose(loaded(x), layer(x), atol=1e-5)


def test_one_that_never_saw_data_starts_afresh():
    for old in (nn.BatchNorm1d(3), nn.BatchNorm1d(3, track_running_stats=False), nn.GroupNorm(1, 3)):
        new = quiet(old)
        assert float(new.state.seen) == 0
        assert bool(new.stats.empty)


def test_layer_norm_keeps_its_layout_and_its_lack_of_a_bias():
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6, bias=False), nn.LayerNorm(6), nn.LayerNorm(6, 1e-3, False))
    gains = [model[1].weight, model[2].weight]
    quiet(model)
    assert [m.channel_dim for m in model[1:]] == [-1, -1, -1]
    assert [m.affine for m in model[1:]] == [True, True, False]
    assert model[1].bias is None
    assert model[1].weight is gains[0]
    assert model[2].weight is gains[1]
    assert model[3].weight is None
    assert model[3].eps == 1e-3
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        step(model, optimizer, torch.randn(2, 7, 4))
    assert [int(m.stats.count) for m in model[1:]] == [1, 1, 1]  # one without parameters hears of those around it
    model[1].reset_parameters()
    assert torch.equal(model[1].weight, torch.ones(6))
    assert set(model.state_dict()) >= {"1.weight", "2.bias"}
    assert "1.bias" not in model.state_dict()


@pytest.mark.parametrize("kind", [StreamingNorm, GeneralBatchNorm, SampleNorm])
@pytest.mark.parametrize("shape", [(8, 6), (8, 5, 6)])
def test_a_gain_without_a_bias_trains(kind, shape):
    """On every path: as with a bias of zero."""
    bare, whole = nn.LayerNorm(6, bias=False), nn.LayerNorm(6)
    bare.weight.data = shaken(whole).weight.data.clone()
    nn.init.zeros_(whole.bias)
    x = torch.randn(shape)
    results = []
    for layer in (quiet(bare, kind), quiet(whole, kind)):
        y = layer(x.requires_grad_())
        (gradient,) = torch.autograd.grad(y.square().sum(), x)
        results.append((y, gradient, layer.eval()(x)))
    for one, other in zip(*results, strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def test_all_kinds_of_norms_and_what_is_left_alone():
    class Own(nn.BatchNorm1d):
        def forward(self, x):
            return super().forward(x) * 2

    class Named(nn.BatchNorm1d):
        pass

    weighted = parametrizations.weight_norm(nn.LayerNorm(6), dim=None)
    pruned = prune.l1_unstructured(nn.BatchNorm1d(6), "weight", amount=1)
    patched = nn.BatchNorm1d(6)
    patched.forward = lambda x: x
    model = nn.ModuleDict(
        {
            "batch": nn.BatchNorm3d(6),
            "named": Named(6),
            "group": nn.GroupNorm(2, 6),
            "instance": nn.InstanceNorm3d(6),
            "layer": nn.LayerNorm(6),
            "rms": nn.RMSNorm(6),
            "image": nn.LayerNorm((6, 3, 3)),
            "own": Own(6),
            "weighted": weighted,
            "pruned": pruned,
            "patched": patched,
            "ours": GeneralBatchNorm(6),
            "head": nn.BatchNorm1d(6),
        }
    )
    kept = {name: model[name] for name in ("rms", "image", "own", "weighted", "pruned", "patched", "ours", "head")}
    said = []
    convert(model, skip="head", report=said.append)
    assert all(model[name] is module for name, module in kept.items())
    assert all(type(model[name]) is StreamingNorm for name in ("batch", "named", "group", "instance", "layer"))
    lines = table(said)
    assert set(lines) == set(model)
    assert said[0].startswith("5 norms converted, 8 left alone: its gain or bias is computed")
    assert "skipped (1)" in said[0]
    assert lines["group"] == "GroupNorm(6) -> StreamingNorm(6); starts afresh"
    assert lines["instance"] == "InstanceNorm3d(6) -> StreamingNorm(6); starts afresh"
    assert any(line.startswith("starts afresh: evaluation changes until trained") for line in said)
    assert lines["image"].startswith("LayerNorm(6, 3, 3) left alone: it normalizes over several dimensions")
    assert lines["head"] == "BatchNorm1d(6) left alone: skipped"
    words = {"rms": "subtracts no mean", "own": "forward", "weighted": "parametrized", "patched": "forward"}
    for name, word in words.items():
        assert word in lines[name]


def test_nothing_to_replace_is_said(capsys):
    assert isinstance(convert(nn.Linear(2, 2)), nn.Linear)
    assert "Linear has no norm to replace" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("skip", "left"),
    [
        ("1", {"1"}),
        ("3", {"3.bn1", "3.bn2"}),
        ("*.bn1", {"3.bn1", "4.bn1"}),
        (["1", "[34].bn2"], {"1", "3.bn2", "4.bn2"}),
        (lambda name, module: module.num_features == 6 and name.startswith("4"), {"4.bn1", "4.bn2"}),
    ],
)
def test_skip(skip, left):
    model = quiet(residual_net(), skip=skip)
    assert {name for name, m in model.named_modules() if isinstance(m, nn.BatchNorm2d)} == left


def test_modes_hooks_and_frozen_parameters_stay():
    model = residual_net()
    model[3].bn1.eval()
    model[3].bn1.weight.requires_grad_(False)
    calls = []

    def on_load(module, *rest):
        calls.append(("load", module))

    handles = [
        model[1].register_forward_hook(lambda m, args, y: calls.append(("after", m))),
        model[1].register_forward_pre_hook(lambda m, args, kwargs: calls.append(("before", m)), with_kwargs=True),
        model[1].register_full_backward_hook(lambda m, dx, dy: calls.append(("backward", m))),
        model[1]._register_load_state_dict_pre_hook(on_load, with_module=True),
    ]
    quiet(model)
    assert model[1].training
    assert not model[3].bn1.training
    assert not model[3].bn1.weight.requires_grad
    model(images()).sum().backward()
    model.load_state_dict(model.state_dict())
    assert calls == [(name, model[1]) for name in ("before", "after", "backward", "load")]
    for handle in handles:  # given out by the old module
        handle.remove()
    model(images()).sum().backward()
    model.load_state_dict(model.state_dict())
    assert len(calls) == 4


def test_a_shared_module_stays_shared():
    norm = shaken(nn.BatchNorm1d(4))
    model = nn.Sequential(nn.Linear(4, 4), norm, nn.Sequential(nn.ReLU(), norm))
    model.again = norm
    said = []
    convert(model, report=said.append)
    assert model[1] is model[2][1] is model.again
    assert isinstance(model.again, StreamingNorm)
    assert table(said) == {"1, again, 2.1": "BatchNorm1d(4) -> StreamingNorm(4)"}
    model(torch.randn(3, 4))
    assert int(model.again.stats.count) == 3


def test_shared_parameters_stay_shared():
    one, two = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    two.weight = one.weight
    model = quiet(nn.Sequential(one, two))
    assert model[0].weight is model[1].weight is one.weight
    assert model[0] is not model[1]


def test_a_copy_leaves_the_original_alone():
    model = residual_net()
    trained(model, images())
    before = {k: v.clone() for k, v in model.state_dict().items()}
    twin = quiet(model, inplace=False)
    assert isinstance(twin[1], StreamingNorm)
    assert isinstance(model[1], nn.BatchNorm2d)
    trained(twin, images())
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), key


def test_settings_and_factories():
    model = nn.Sequential(shaken(nn.BatchNorm1d(4, eps=1e-3, momentum=0.3)))
    one = quiet(model, inplace=False, p=1, warmup=0, alpha=(0.5, 0.5), eps=1e-4)[0]
    assert (one.p, one.warmup, one.alpha, one.eps) == (1, 0, (0.5, 0.5), 1e-4)
    factory = functools.partial(GeneralBatchNorm, eps=1e-2)
    assert quiet(model, factory, inplace=False)[0].eps == 1e-2
    assert quiet(model, factory, inplace=False, eps=1e-6)[0].eps == 1e-6
    assert quiet(model, GeneralBatchNorm, inplace=False)[0].momentum == 0.3
    assert quiet(model, TimeSpecificNorm, inplace=False, steps=3)[0].steps == 3
    assert not quiet(model, inplace=False, affine=False)[0].affine
    assert quiet(nn.Sequential(nn.InstanceNorm1d(4)), affine=True)[0].weight is not None
    grouped = quiet(model, lambda size, **given: nn.GroupNorm(2, size, given["eps"]))
    assert grouped[0].eps == 1e-3


@pytest.mark.parametrize("ref", CODES)
def test_other_references_say_that_they_start_afresh(ref):
    said = []
    model = nn.Sequential(shaken(nn.BatchNorm2d(4)))
    convert(model, ref=ref, center="running", report=said.append)
    assert ("starts afresh" in table(said)["0"]) == (ref not in ("BA1", "SP2"))
    assert model(torch.randn(2, 4, 3, 3)).shape == (2, 4, 3, 3)


def test_a_failure_leaves_the_model_as_it_was():
    model = residual_net()
    modules = dict(model.named_modules())

    def third_time(size, **given):
        third_time.calls += 1
        if third_time.calls == 3:
            raise ValueError("no more")
        return StreamingNorm(size, **given)

    third_time.calls = 0
    with pytest.raises(ValueError, match="no more") as caught:
        convert(model, third_time)
    assert "3.bn2" in caught.value.__notes__[0]
    assert dict(model.named_modules()) == modules


class Wrapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.DataParallel(nn.BatchNorm1d(3))


@pytest.mark.parametrize(
    ("model", "settings", "error", "words"),
    [
        (torch.randn(3), {}, TypeError, "pass an nn.Module"),
        (nn.BatchNorm1d(3), {"norm": "streaming"}, TypeError, "pass a class"),
        (nn.BatchNorm1d(3), {"norm": lambda size, **given: None}, TypeError, "must make an nn.Module"),
        (nn.BatchNorm1d(3), {"norm": lambda size, **given: nn.LayerNorm((size, 2))}, ValueError, "shape"),
        (nn.BatchNorm1d(3), {"p": 0.5}, ValueError, "order of the moment"),
        (nn.Sequential(nn.BatchNorm1d(3)), {"skip": "bn"}, ValueError, "names no module"),
        (nn.Sequential(nn.BatchNorm1d(3)), {"skip": [3]}, TypeError, "names or patterns"),
        (nn.DataParallel(nn.BatchNorm1d(3)), {}, ValueError, "DataParallel: pass model.module"),
        (Wrapped(), {}, ValueError, "its inner is a DataParallel"),
    ],
)
def test_what_is_refused(model, settings, error, words):
    with pytest.raises(error, match=words):
        quiet(model, **settings)


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_a_norm_without_a_size_is_refused():
    model = nn.Sequential(nn.Linear(3, 4), nn.LazyBatchNorm1d())
    with pytest.raises(ValueError, match="run one batch"):
        quiet(model)
    quiet(model, skip="1")
    model(torch.randn(5, 3))
    assert isinstance(quiet(model)[1], StreamingNorm)


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("norm_first", [True, False])
def test_a_transformer_evaluates_with_the_new_norms(norm_first, activation):
    """torch's fast path would compute layer norms from our gain and bias, and ignore the statistics."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, activation, batch_first=True, norm_first=norm_first)
    x, padding = torch.randn(4, 5, 8) * 3 + 1, torch.arange(5) >= torch.tensor([5, 3, 4, 5])[:, None]
    quiet(layer)
    for _ in range(3):
        layer(x)
    layer.eval()
    slow = layer(x)  # gradients are wanted, so there is no fast path in any case
    with torch.no_grad():
        assert torch.allclose(layer(x), slow, atol=1e-6)

    stack = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 2, enable_nested_tensor=True
    )
    quiet(stack)
    stack(x)
    stack.eval()
    slow = stack(x, src_key_padding_mask=padding)
    with torch.no_grad():
        assert torch.allclose(stack(x, src_key_padding_mask=padding), slow, atol=1e-6)
        assert torch.allclose(copy.deepcopy(stack)(x, src_key_padding_mask=padding), slow, atol=1e-6)


def test_a_transformer_that_keeps_its_norms_keeps_its_fast_path():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    stack = nn.TransformerEncoder(layer, 1, norm=nn.LayerNorm(8))
    quiet(stack, skip="layers")
    assert isinstance(stack.norm, StreamingNorm)
    assert stack.layers[0].activation_relu_or_gelu == 1


def test_two_networks_with_an_optimizer_each():
    """A GAN: each converted network hears of its own optimizer alone."""
    critic = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 1))
    generator = nn.Sequential(nn.Linear(2, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 4))
    for_critic, for_generator = (torch.optim.Adam(m.parameters()) for m in (critic, generator))
    for model in (critic, generator):
        quiet(model)
    step(critic, for_critic, torch.randn(3, 4))
    step(critic, for_critic, torch.randn(3, 4))
    assert (int(critic[1].stats.count), bool(critic[1].stats.empty)) == (1, False)
    with streamnorm.paused(critic):
        critic(generator(torch.randn(3, 2))).mean().backward()
    for_generator.step()
    assert bool(generator[1].stats.pending)
    critic(torch.randn(3, 4))
    assert not bool(critic[1].stats.pending)
    assert int(critic[1].stats.count) == 1


@pytest.mark.skipif(not merges_processes(), reason="StreamingNorm does not merge processes yet")
def test_a_synchronized_norm_stays_synchronized():
    model = nn.Sequential(shaken(nn.SyncBatchNorm(4)))
    assert quiet(model, inplace=False)[0].process_group == "world"
    assert quiet(model, inplace=False, process_group=None)[0].process_group is None
    x = torch.randn(3, 4, 5)
    assert torch.allclose(quiet(model.eval(), inplace=False)(x), model(x), atol=1e-5)


def test_a_synchronized_norm_becomes_a_local_one_when_asked():
    model = nn.Sequential(shaken(nn.SyncBatchNorm(4))).eval()
    x = torch.randn(3, 4, 5)
    for new in (quiet(model, inplace=False, process_group=None), quiet(model, GeneralBatchNorm, inplace=False)):
        assert torch.allclose(new(x), model(x), atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated", "ignore:Dynamo detected")
def test_a_compiled_model():
    """The wrapper stays, and what it runs is the converted model."""
    model = residual_net()
    trained(model, images())
    compiled, x = torch.compile(model.eval(), backend="eager"), images()
    before = compiled(x)
    assert quiet(compiled) is compiled
    assert isinstance(model[1], StreamingNorm)
    assert torch.allclose(compiled(x), before, atol=1e-5)
    model.train()
    compiled(x)
    assert int(model[1].stats.count) == 1
    alone = torch.compile(nn.BatchNorm2d(3), backend="eager")
    assert isinstance(quiet(alone), StreamingNorm)
    held = nn.Sequential(alone)
    assert isinstance(quiet(held)[0]._orig_mod, nn.BatchNorm2d)
    twin = quiet(torch.compile(residual_net(), backend="eager"), inplace=False)
    assert type(twin) is nn.Sequential


def test_models_without_memory_yet():
    with torch.device("meta"):
        model = residual_net()
    quiet(model)
    assert model[1].weight.is_meta
    assert model[1].mean.is_meta


@pytest.mark.parametrize("skip", ["b", "b.1", "a.1", lambda name, module: name == "b.1"])
def test_a_shared_block_is_skipped_by_any_of_its_names(skip):
    block = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model = nn.ModuleDict({"a": block, "b": block})
    convert(model, skip=skip, report=None)
    assert type(model["a"][1]) is nn.BatchNorm1d


def test_a_norm_that_stays_frozen_is_left_alone():
    class Frozen(nn.BatchNorm1d):
        def train(self, mode=True):
            return super().train(False)

    assert type(convert(nn.Sequential(Frozen(3)), report=None)[0]) is Frozen


def test_a_function_as_norm_keeps_the_processes_together():
    made = convert(nn.Sequential(nn.SyncBatchNorm(3)), lambda c, **k: StreamingNorm(c, **k), report=None)
    assert made[0].process_group == "world"
    made = convert(nn.Sequential(nn.SyncBatchNorm(3)), process_group=None, report=None)
    assert made[0].process_group is None


@pytest.mark.parametrize("norm", [StreamingNorm, GeneralBatchNorm])
def test_a_copy_of_a_compiled_norm_is_its_own(norm):
    layer = norm(3)
    layer.compile(backend="eager")
    twin = copy.deepcopy(layer)
    before = copy.deepcopy(layer.state_dict())
    twin(torch.randn(8, 3) + 5)
    assert all(torch.equal(value, before[key]) for key, value in layer.state_dict().items())
    assert not torch.equal(twin.mean, layer.mean)


@pytest.mark.parametrize("norm", [StreamingNorm, GeneralBatchNorm])
def test_a_batchnorm_is_loaded_into_what_has_no_memory_yet(norm):
    """With assign=True, also where its statistics are in half precision: ours stay in float32."""
    trained = nn.BatchNorm1d(3)
    trained(torch.randn(8, 3) + 5)
    layer = norm(3, device="meta")
    layer.load_state_dict(trained.bfloat16().state_dict(), assign=True)
    assert layer.mean.device.type == "cpu"
    assert layer.mean.dtype == torch.float32
    assert torch.allclose(layer.mean, trained.running_mean.float())
