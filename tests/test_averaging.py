"""Averaged weights: torch.optim.swa_utils works, and update_stats gives them the statistics of their own."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

from streamnorm import GRU, RNN, GeneralBatchNorm, SampleNorm, StreamingNorm, TimeSpecificNorm, paused, update_stats

DEPTH = 3


def chain(norm=StreamingNorm, depth=DEPTH, **settings):
    layers = [part for _ in range(depth) for part in (nn.Linear(4, 4), norm(4, **settings), nn.Tanh())]
    return nn.Sequential(*layers, nn.Dropout(0.5), nn.Linear(4, 2)).double()


def batches(count=40, size=1):
    return [torch.randn(size, 4, dtype=torch.float64) * 2 + 1 for _ in range(count)]


def norms(model):
    return [module for module in model.modules() if isinstance(module, StreamingNorm | GeneralBatchNorm)]


def inputs(model, loader):
    """What each norm is given in evaluation, call by call."""
    seen = {norm: [] for norm in norms(model)}
    hooks = [norm.register_forward_pre_hook(lambda norm, args: seen[norm].append(args[0])) for norm in seen]
    with torch.no_grad():
        for batch in loader:
            model.eval()(batch)
    for hook in hooks:
        hook.remove()
    return seen


def sigma(x, norm):
    center = {"running": norm.mean, "mean": x.mean(0), "zero": 0}[norm.center]
    return ((x - center).abs().pow(norm.p).mean(0) + norm.eps ** (norm.p / 2)) ** (1 / norm.p)


def same_state(a, b):
    one, two = a.state_dict(), b.state_dict()
    assert one.keys() == two.keys()
    for key, value in one.items():
        assert torch.equal(value, two[key]), key


@pytest.mark.parametrize(
    ("norm", "settings", "size", "passes"),
    [
        (StreamingNorm, {}, 1, 2 * DEPTH),  # sigma is about the mean of the pass before
        (StreamingNorm, {"p": 1}, 3, 2 * DEPTH),
        (StreamingNorm, {"center": "zero"}, 1, DEPTH),
        (StreamingNorm, {"center": "mean", "warmup": 0}, 5, DEPTH),
        (GeneralBatchNorm, {}, 5, DEPTH),
        (GeneralBatchNorm, {"center": "running", "p": 3}, 5, 2 * DEPTH),
    ],
)
def test_each_norm_ends_with_the_average_of_what_it_sees_in_evaluation(norm, settings, size, passes):
    """Exactly, layer by layer: one pass per norm in depth, two where sigma is about the running mean."""
    model, loader = chain(norm, **settings), batches(size=size)
    update_stats(model, loader, passes=passes)
    for each, seen in inputs(model, loader).items():
        torch.testing.assert_close(each.mean, torch.stack([x.mean(0) for x in seen]).mean(0), rtol=1e-9, atol=1e-11)
        wanted = torch.stack([sigma(x, each) for x in seen]).mean(0)
        torch.testing.assert_close(each.sigma, wanted, rtol=1e-9, atol=1e-11)


def test_one_pass_gives_the_first_norm_its_mean_and_the_others_nearly():
    model, loader = chain(), batches(400)
    update_stats(model, loader)
    (first, *rest), seen = norms(model), inputs(model, loader)
    torch.testing.assert_close(first.mean, torch.cat(seen[first]).mean(0), rtol=1e-9, atol=1e-11)
    for each in rest:
        assert ((each.mean - torch.cat(seen[each]).mean(0)) / each.sigma).abs().max() < 0.3


def test_what_was_there_before_does_not_matter():
    one, loader = chain(), batches()
    other = copy.deepcopy(one)
    for _ in range(5):
        other(torch.randn(8, 4, dtype=torch.float64) * 100)
    with torch.no_grad():
        for a, b in zip(one.parameters(), other.parameters(), strict=True):
            assert torch.equal(a, b)
    update_stats(one, loader)
    update_stats(other, loader)
    for a, b in zip(norms(one), norms(other), strict=True):
        assert torch.equal(a.mean, b.mean)
        assert torch.equal(a.sigma, b.sigma)


@pytest.mark.parametrize("make", [RNN, GRU])
def test_every_call_of_a_recurrent_layer_counts(make):
    """The norm of the input's products sees every timestep once: its mean is that of all products."""
    layer, loader = make(3, 4, batch_first=True).double(), [torch.randn(1, 7, 3, dtype=torch.float64) for _ in range(5)]
    update_stats(layer, loader)
    products = torch.cat(loader).flatten(0, 1) @ layer.weight_ih_l0.detach().t()
    for i, norm in enumerate(layer.norms_l0.x):
        torch.testing.assert_close(norm.mean, products[:, 4 * i : 4 * i + 4].mean(0), rtol=1e-9, atol=1e-11)


def test_a_shared_norm_counts_each_call():
    norm = StreamingNorm(4).double()

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = norm

        def forward(self, x):
            return self.norm(x) + self.norm(3 * x)

    loader = batches(10)
    update_stats(Twice(), loader)
    torch.testing.assert_close(norm.mean, 2 * torch.cat(loader).mean(0), rtol=1e-9, atol=1e-11)


def test_time_specific_norms_learn_timestep_by_timestep():
    norm = TimeSpecificNorm(4, steps=3).double()
    norm(torch.randn(5, 4, dtype=torch.float64), step=2)
    before = norm.mean.clone()
    loader = batches(6, size=5)
    update_stats(norm, loader, forward=lambda x: [norm(t * x, step=t) for t in (0, 1, 7)])
    average = torch.stack([x.mean(0) for x in loader]).mean(0)
    torch.testing.assert_close(norm.mean[0], 0 * average)
    torch.testing.assert_close(norm.mean[1], average)
    assert torch.equal(norm.mean[2], before[2])  # a timestep that never came


@pytest.mark.parametrize("norm", [StreamingNorm, GeneralBatchNorm])
def test_references_with_a_location_are_bound(norm):
    layer = norm(3, ref="BA6")
    loader = [torch.randn(4, 3, 5, 5) for _ in range(3)]
    update_stats(layer, loader)
    torch.testing.assert_close(layer.mean, torch.cat(loader).mean(0))
    layer(loader[0])  # trains on


def test_masks_reach_the_statistics():
    norm = StreamingNorm(4)
    x, mask = torch.randn(3, 4, 6), torch.arange(6) < torch.tensor([6, 3, 1])[:, None]
    update_stats(norm, [(x, mask)], forward=lambda batch: norm(batch[0], mask=batch[1]))
    torch.testing.assert_close(norm.mean, x.movedim(1, -1)[mask].mean(0))


def test_nothing_else_changes_and_training_goes_on():
    model, loader = chain(), batches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in loader[:4]:
        model(x).square().mean().backward()
        optimizer.step()
    model[4].eval()
    model[0].weight.requires_grad_(False)
    twin = copy.deepcopy(model)
    grads = [(norm.grads.long, norm.grads.short, norm.grads.count) for norm in norms(model)]
    with paused(model):
        update_stats(model, loader)
        assert all(norm._paused == 1 for norm in norms(model))
    assert [m.training for m in model.modules()] == [m.training for m in twin.modules()]
    assert not any(m._forward_pre_hooks for m in model.modules())
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a, b)
        assert a.requires_grad == b.requires_grad
    for norm, (long, short, count) in zip(norms(model), grads, strict=True):
        assert torch.equal(norm.grads.long, long)
        assert torch.equal(norm.grads.short, short)
        assert torch.equal(norm.grads.count, count)
        assert int(norm.stats.count) == 0
        torch.testing.assert_close(norm.stats.long, torch.stack([norm.mean, norm.sigma]))
        before, norm.guard = norm.mean.clone(), False
        norm.train()(torch.zeros(1, 4, dtype=torch.float64))  # a new window: short is replaced, long is the average
        torch.testing.assert_close(norm.mean, 0.7 * before)


def test_the_results_are_tensors_for_training_also_from_inference_mode():
    model, loader = chain(GeneralBatchNorm), batches(size=4)
    with torch.inference_mode():
        update_stats(model, loader)
    model.train()(loader[0]).sum().backward()
    assert not any(value.is_inference() for value in model.state_dict().values())


def test_batches_that_are_not_finite_are_not_counted():
    one, loader = chain(), batches(10)
    two = copy.deepcopy(one)
    bad = torch.full((1, 4), torch.nan, dtype=torch.float64)
    update_stats(one, loader, passes=2)
    update_stats(two, [*loader[:3], bad, *loader[3:]], passes=2)
    same_state(one, two)


class Broken(Exception):
    pass


def breaking(loader):
    yield from loader
    raise Broken


@pytest.mark.parametrize("norm", [StreamingNorm, GeneralBatchNorm])
def test_whatever_is_raised_everything_is_as_before(norm):
    model = chain(norm)
    loader = batches(4, size=3)
    for x in loader:
        model(x).sum().backward()
    before = copy.deepcopy(model)
    nan = [torch.full((3, 4), torch.nan, dtype=torch.float64)]
    wrong = [loader[0], torch.randn(3, 5, dtype=torch.float64)]
    for error, match, call in (
        (Broken, None, lambda: update_stats(model, breaking(loader))),
        (RuntimeError, "shapes", lambda: update_stats(model, wrong)),
        (ValueError, "empty", lambda: update_stats(model, [])),
        (ValueError, "finite", lambda: update_stats(model, nan)),
        (ValueError, "finite", lambda: update_stats(model, loader, forward=lambda batch: batch)),
        (ValueError, "read once", lambda: update_stats(model, iter(loader), passes=2)),
        (ValueError, "passes=0", lambda: update_stats(model, loader, passes=0)),
        (ValueError, "device='cpu'", lambda: update_stats(model, loader, "cpu", forward=model)),
    ):
        with pytest.raises(error, match=match):
            call()
        same_state(model, before)
        assert [m.training for m in model.modules()] == [m.training for m in before.modules()]
        assert not any(m._forward_pre_hooks for m in model.modules())
    with pytest.raises(ValueError, match="no norm that keeps statistics"):
        update_stats(nn.Sequential(SampleNorm(4)), loader)


def test_single_samples_are_refused_where_they_leave_nothing():
    with pytest.raises(ValueError, match="one element per statistic"):
        update_stats(chain(GeneralBatchNorm), batches())


@pytest.mark.parametrize("use_buffers", [True, False])
@pytest.mark.parametrize("kind", ["swa", "ema"])
def test_swa_utils(kind, use_buffers):
    """Train, average, recompute: in evaluation the averaged model is its weights with their own statistics."""
    model = nn.Sequential(nn.Linear(4, 8), StreamingNorm(8), nn.ReLU(), nn.Linear(8, 6), GeneralBatchNorm(6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scheduler = SWALR(optimizer, swa_lr=0.01, anneal_epochs=2)
    average = {"multi_avg_fn": get_ema_multi_avg_fn(0.9)} if kind == "ema" else {}
    averaged = AveragedModel(model, use_buffers=use_buffers, **average)
    loader = [(torch.randn(4, 4), torch.randn(4)) for _ in range(12)]
    history = []
    for x, _ in loader:
        model(x).pow(3).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        averaged.update_parameters(model)
        history.append(model[0].weight.detach().clone())
    if kind == "swa":
        torch.testing.assert_close(averaged.module[0].weight, torch.stack(history).mean(0))
    before = copy.deepcopy(averaged)
    update_bn(loader, averaged)  # torch's own knows nn.BatchNorm alone
    same_state(averaged, before)
    update_stats(averaged, loader)
    first = averaged.module[0]
    torch.testing.assert_close(averaged.module[1].mean, torch.cat([first(x) for x, _ in loader]).mean(0))
    assert not torch.equal(averaged.module[1].mean, model[1].mean)
    model(loader[0][0]).sum().backward()  # and the model trains on, by itself


def test_update_bn_of_a_mixed_model():
    model = nn.Sequential(nn.Linear(4, 6), StreamingNorm(6), nn.Linear(6, 3), nn.BatchNorm1d(3))
    averaged, loader = AveragedModel(model), [torch.randn(8, 4) for _ in range(5)]
    update_stats(averaged, loader)
    before = copy.deepcopy(averaged.module[1])
    with paused(averaged):
        update_bn(loader, averaged)
    same_state(averaged.module[1], before)
    wanted = torch.stack([averaged.module.eval()[:3](x).mean(0) for x in loader]).mean(0)
    torch.testing.assert_close(averaged.module[3].running_mean, wanted)


@pytest.mark.filterwarnings("ignore")  # of the compiler, about itself
@pytest.mark.skipif(not hasattr(torch.compiler, "set_stance"), reason="before torch 2.6 there is no stance to set")
def test_a_compiled_model():
    model, loader = chain(), batches()
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, backend="eager")
    compiled(loader[0])
    compiled.eval()(loader[0])
    update_stats(compiled, loader)
    update_stats(twin, loader)
    for a, b in zip(norms(model), norms(twin), strict=True):
        assert torch.equal(a.mean, b.mean)
    torch.testing.assert_close(compiled.eval()(loader[0]), twin.eval()(loader[0]))


def test_merges_over_processes_know_the_new_count():
    norm = StreamingNorm(3, process_group="world")
    for _ in range(50):
        norm(torch.randn(20, 3))
    norm.seen_before = norm.seen.clone()
    update_stats(norm, [torch.randn(2, 3) for _ in range(10)])
    assert norm.seen_before == norm.seen
