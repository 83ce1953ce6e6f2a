"""How layers hear of weight updates, with real optimizers and a real GradScaler."""

import copy
import gc
import pickle
import warnings
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import streamnorm
from streamnorm import DecoupledUpdate, GeneralBatchNorm, Manhattan, StreamingNorm, attach, kernels, paused
from streamnorm.engine.listener import PATIENCE, WINDOWS, listeners

# The compiler's warnings are about itself.
COMPILED = pytest.param("compiled", marks=pytest.mark.filterwarnings("ignore::DeprecationWarning"))
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, foreach=False),
    "sgd-foreach": lambda p: torch.optim.SGD(p, lr=0.01, foreach=True),
    "sgd-fused": lambda p: torch.optim.SGD(p, lr=0.01, fused=True),
    "adam-foreach": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
    "adam-fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "manhattan": lambda p: Manhattan(p, lr=0.01),
}


def network(**settings):
    return nn.Sequential(nn.Linear(4, 6), StreamingNorm(6, **settings), nn.ReLU(), nn.Linear(6, 2))


def backward(model, scaler=None, factor=1.0):
    loss = model(torch.randn(8, 4)).square().mean() * factor
    (loss if scaler is None else scaler.scale(loss)).backward()


def counts(layer):
    return int(layer.stats.count), int(layer.grads.count)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_an_ordinary_loop_is_heard(make):
    model = network()
    layer, optimizer = model[1], make(model.parameters())
    for update in range(3):
        for batch in range(2 + update):  # gradient accumulation
            backward(model)
            assert counts(layer) == (batch + 1, batch + 1)
        short = layer.stats.short.clone()
        optimizer.step()
        optimizer.zero_grad()
        assert counts(layer) == (2 + update, 2 + update)  # the fold is lazy: `short` is there for testing
        assert torch.equal(layer.stats.short, short)
    assert not layer.stats.empty
    assert not layer.grads.empty


def test_the_fold_is_the_papers():
    layer = StreamingNorm(3, kappa=(0.6, 0.4, 0.5, 0.2), warmup=0, guard=False, dtype=torch.float64)
    batches = torch.randn(3, 2, 8, 3, dtype=torch.float64)
    shorts = []
    for window in batches:
        for x in window:
            layer(x)
        shorts.append(layer.stats.short)
        layer.weights_updated()
    layer(batches[0, 0])
    long = 0.6 * (0.6 * shorts[0] + 0.4 * shorts[1]) + 0.4 * shorts[2]
    torch.testing.assert_close(layer.stats.long, long, rtol=1e-14, atol=0)
    assert layer.grads.empty  # H1 and H2 fold independently: there was no backward


def fit(norm, line_search, steps=15):
    """What LBFGS makes of a small regression: the loss in evaluation mode, and how often it was evaluated."""
    torch.manual_seed(1)
    x = torch.randn(64, 8)
    target = torch.sin(x.sum(1, keepdim=True)) + x[:, :1] * x[:, 1:2]
    layers = nn.Linear(8, 32), norm(32), nn.Tanh(), nn.Linear(32, 32), norm(32), nn.Tanh(), nn.Linear(32, 1)
    model = nn.Sequential(*layers)
    optimizer = torch.optim.LBFGS(model.parameters(), line_search_fn=line_search)
    evaluations = []

    def closure():
        optimizer.zero_grad()
        loss = (model(x) - target).square().mean()
        loss.backward()
        evaluations.append(float(loss.detach()))
        return loss

    for _ in range(steps):
        optimizer.step(closure)
    model.eval()
    return float((model(x) - target).square().mean().detach()), len(evaluations)


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_lbfgs_minimizes_as_with_a_layer_norm(line_search):
    ours, evaluations = fit(StreamingNorm, line_search)
    theirs, _ = fit(nn.LayerNorm, line_search)
    assert evaluations > 15  # more than one for each step
    assert ours < max(10 * theirs, 1e-6)  # 1e-9 or so; from 0.01 on where statistics moved between evaluations


def test_a_step_of_lbfgs_is_one_window_with_one_evaluation():
    model = network()
    settings = model[1].config
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    x = torch.randn(16, 4)
    losses = []

    def closure():
        optimizer.zero_grad()
        losses.append(model(x).square().mean())
        losses[-1].backward()
        return losses[-1]

    optimizer.step(closure)
    assert len(losses) > 1
    assert counts(model[1]) == (1, 1)
    assert model[1].config == settings
    own = model[0](x).detach()  # at other weights than the last evaluation had, unless that was the last step
    assert torch.allclose(model[1].stats.short[0], own.mean(0), atol=1)
    model(x)
    assert counts(model[1]) == (1, 1)  # H2 is folded by its own next push
    model(x).sum().backward()
    assert counts(model[1]) == (2, 1)


def test_lbfgs_is_refused_where_the_gradient_is_not_exact():
    net = streamnorm.GRU(3, 4)
    optimizer = torch.optim.LBFGS(net.parameters())
    norm = net.norms_l0.x[0]
    x = torch.randn(5, 2, 3)

    def closure():
        optimizer.zero_grad()
        loss = net(x)[0].square().mean()
        loss.backward()
        return loss

    with pytest.raises(RuntimeError, match=r"LBFGS.*called 5 times.*SampleNorm"):
        optimizer.step(closure)
    assert norm.alpha == (0.7, 0.3)
    alone = nn.Sequential(nn.Linear(3, 4), StreamingNorm(4))
    optimizer = torch.optim.LBFGS(alone.parameters())
    with pytest.raises(ValueError, match="one element per statistic"):
        optimizer.step(lambda: alone(x[0, :1]).sum())
    assert counts(alone[1]) == (0, 0)
    assert alone[1].center == "running"


def test_a_closure_that_runs_the_whole_step_is_one_update():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.step(lambda: backward(model))
        assert counts(model[1]) == (1, 1)


def test_two_optimizers_do_not_disturb_each_other():
    generator, critic = network(), network()
    first, second = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (generator, critic))
    backward(generator)
    backward(critic)
    first.step()
    backward(generator)
    backward(critic)
    assert counts(generator[1]) == (1, 1)
    assert counts(critic[1]) == (2, 2)
    second.step()
    backward(generator)
    backward(critic)
    assert counts(generator[1]) == (2, 2)
    assert counts(critic[1]) == (1, 1)


@pytest.mark.parametrize("frozen", [False, True])
def test_layers_of_which_nothing_learns_hear_of_the_module_that_they_sit_in(frozen):
    model = network(affine=frozen)
    model[1].requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    for _ in range(3):
        backward(model)
        assert counts(model[1]) == (1, 1)
        other.step()
        backward(model)
        assert counts(model[1]) == (2, 2)
        optimizer.step()


def test_a_layer_without_parameters_that_is_attached_hears_of_that_alone():
    model = network(affine=False)
    first, second = (torch.optim.SGD(model[i].parameters(), lr=0.1) for i in (0, 3))
    handle = attach(second, model)
    backward(model)
    first.step()
    backward(model)
    assert counts(model[1]) == (2, 2)
    second.step()
    backward(model)
    assert counts(model[1]) == (1, 1)
    handle.remove()
    handle.remove()
    first.step()
    backward(model)
    assert counts(model[1]) == (1, 1)


class Foreign:
    """An optimizer that torch knows nothing of."""

    def __init__(self, parameters):
        self.parameters = list(parameters)

    def step(self):
        with torch.no_grad():
            for p in self.parameters:
                p -= 0.1 * p.grad
        return "stepped"


def test_a_foreign_optimizer_is_heard_through_attach():
    model = network()
    optimizer = Foreign(model.parameters())
    first, second = attach(optimizer, model), attach(optimizer, model)
    for handle in (first, second):  # removed in the order of attachment, the harder one
        backward(model)
        assert optimizer.step() == "stepped"
        backward(model)
        assert counts(model[1]) == (1, 1)
        handle.remove()
    optimizer.step()
    backward(model)
    assert counts(model[1]) == (2, 2)


def test_attach_sees_through_decoupled_update():
    model = network(affine=False)
    optimizer = DecoupledUpdate(torch.optim.SGD(model.parameters(), lr=0.1), batches_per_update=3)
    attach(optimizer, model)
    seen = []
    for _ in range(7):
        backward(model)
        optimizer.step()
        seen.append(counts(model[1])[0])
    assert seen == [1, 2, 3, 1, 2, 3, 1]


def test_attach_refuses_what_it_cannot_serve():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="no streaming layer"):
        attach(optimizer, nn.Linear(2, 2))
    with pytest.raises(TypeError, match="no step"):
        attach(object(), model)
    with pytest.raises(TypeError, match="not a GradScaler"):
        attach(optimizer, model, scaler=2.0)
    assert model[1]._scaler is None


@pytest.mark.parametrize("name", ["sgd", "sgd-foreach", "sgd-fused", "adam-fused"])
@pytest.mark.parametrize("attached", [True, False])
def test_a_skipped_step_is_no_update(name, attached):
    model = network()
    layer, optimizer = model[1], OPTIMIZERS[name](model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    if attached:
        attach(optimizer, model, scaler=scaler)
    for factor in (1.0, 1.0):
        backward(model, scaler, factor)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    weights = [p.detach().clone() for p in model.parameters()]
    backward(model, scaler)  # finite, in the same window as what overflows
    long = layer.grads.long.clone()
    backward(model, scaler, float("inf"))
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    assert scaler.get_scale() == 512.0
    for stream in (layer.stats, layer.grads):
        assert torch.isfinite(stream.long).all()
        assert torch.isfinite(stream.short).all()
    assert int(layer.stats.count) == 2
    assert int(layer.grads.count) == (0 if attached else 1)  # with the scaler the skipped window is dropped whole
    backward(model, scaler)
    assert counts(layer) == (3, 1 if attached else 2)  # no fold
    assert torch.equal(layer.grads.long, long)
    scaler.step(optimizer)
    scaler.update()
    backward(model, scaler)
    assert counts(layer) == (1, 1)


@pytest.mark.parametrize("name", ["sgd", "sgd-fused"])
def test_a_changing_loss_scale_leaves_no_trace(name):
    plain = network()
    scaled = copy.deepcopy(plain)
    ours, theirs = (OPTIMIZERS[name](m.parameters()) for m in (scaled, plain))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=1)  # doubles after every step
    attach(ours, scaled, scaler=scaler)
    for seed in range(6):
        torch.manual_seed(seed)
        backward(scaled, scaler)
        scaler.step(ours)
        scaler.update()
        ours.zero_grad()
        torch.manual_seed(seed)
        backward(plain)
        theirs.step()
        theirs.zero_grad()
    assert scaler.get_scale() == 128.0
    for key, value in plain.state_dict().items():
        if not key.endswith("loss_scale"):
            torch.testing.assert_close(scaled.state_dict()[key], value, rtol=1e-6, atol=1e-7)


def test_a_scale_lowered_by_hand_after_a_good_step_drops_nothing():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    attach(optimizer, model, scaler=scaler)
    backward(model, scaler)
    scaler.step(optimizer)
    scaler.update(new_scale=8.0)
    assert int(model[1].grads.count) == 1
    backward(model, scaler)
    assert not model[1].grads.empty


def test_a_disabled_scaler_is_no_scaler():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    attach(optimizer, model, scaler=scaler)
    for _ in range(2):
        backward(model, scaler)
        scaler.step(optimizer)
        scaler.update()
    assert counts(model[1]) == (1, 1)


def test_paused_changes_nothing():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    backward(model)
    optimizer.step()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    x = torch.randn(3, 4)
    with paused(model), paused(model):
        y = model(x.requires_grad_())
        y.sum().backward()
        assert copy.deepcopy(model)[1]._paused == 0
    assert x.grad is not None
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    torch.testing.assert_close(y, model.eval()(x))
    model.train()
    backward(model)
    assert counts(model[1]) == (1, 1)


def test_paused_survives_an_exception_and_covers_batch_norms():
    layer = GeneralBatchNorm(3)
    with paused(layer):
        y = layer(torch.randn(8, 3) + 5)
    assert y.mean().abs() < 1e-5  # by the mini-batch, as in training
    assert torch.equal(layer.mean, torch.zeros(3))
    with pytest.raises(ValueError, match="channels"), paused(layer):
        layer(torch.randn(8, 4))
    layer(torch.randn(8, 3) + 5)
    assert (layer.mean > 0.3).all()


def test_a_forgotten_layer_warns_once():
    layer = StreamingNorm(2, affine=False)

    def passes(n, steps=3):
        for _ in range(n):
            h = torch.randn(1, 2, requires_grad=True)
            for _ in range(steps):  # timesteps of one backward pass count once
                h = layer(h)
            h.sum().backward()

    passes(PATIENCE - 1)
    with pytest.warns(UserWarning, match="no weight update.*attach"):
        passes(1)
    passes(2 * PATIENCE, steps=1)


def test_a_layer_that_has_heard_does_not_warn():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(3):
        backward(model)
        optimizer.step()
    for _ in range(PATIENCE + 1):
        backward(model)


def test_copies_hear_for_themselves():
    model = network()
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for other in copies:
        optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
        backward(other)
        optimizer.step()
        backward(other)
        assert counts(other[1]) == (1, 1)
    assert counts(model[1]) == (0, 0)


def test_layers_are_not_kept_alive():
    model = network()
    before = len(listeners)
    del model
    gc.collect()
    assert len(listeners) < before


def test_a_deep_copy_is_attached_to_nothing():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attach(optimizer, model, scaler=torch.amp.GradScaler("cpu"))
    assert copy.deepcopy(model)[1]._scaler is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pickle.dumps(model)


def test_handles_of_scalers_do_not_undo_each_other():
    model = network()
    first, second = (torch.optim.SGD(model[i].parameters(), lr=0.1) for i in (0, 1))
    scaler, other = torch.amp.GradScaler("cpu"), torch.amp.GradScaler("cpu")
    one, two, three = attach(first, model, scaler), attach(second, model, scaler), attach(second, model, other)
    assert model[1]._scaler is other
    one.remove()
    assert model[1]._scaler is other
    three.remove()
    assert model[1]._scaler is scaler
    two.remove()
    assert model[1]._scaler is None


def test_parametrized_layers_are_heard():
    model = network()
    for name in ("weight", "bias"):
        nn.utils.parametrize.register_parametrization(model[1], name, nn.Identity())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        backward(model)
        optimizer.step()
    assert counts(model[1]) == (1, 1)


def test_a_reset_of_the_gradients_forgets_no_update():
    layer = StreamingNorm(3)
    layer(torch.randn(4, 3)).sum().backward()
    layer.weights_updated()
    layer.reset_gradients()
    assert layer.stats.pending
    assert layer.grads.pending
    assert int(layer.grads.count) == 0


def changed_by_hand(model, run, times, between=lambda: None):
    """Weight updates that no optimizer of torch makes."""
    for _ in range(times):
        run(torch.randn(8, 4)).square().mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(0.01 * parameter.grad)
                parameter.grad = None
        between()


@pytest.mark.parametrize("how", ["fused", "plain", COMPILED])
def test_weights_that_change_unheard_are_noticed_at_the_second_time(how):
    model = network()
    with kernels.disabled() if how == "plain" else nullcontext():
        run = torch.compile(model, backend="aot_eager") if how == "compiled" else model
        changed_by_hand(model, run, 2)
        with pytest.warns(UserWarning, match=r"changed, twice.*attach"):
            changed_by_hand(model, run, 1)
        changed_by_hand(model, run, 3)  # once


def test_weights_that_change_for_a_reason_are_not():
    model = network()
    changed_by_hand(model, model, 4, lambda: model[1].weights_updated())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    saved = copy.deepcopy(model.state_dict())
    for _ in range(4):
        backward(model)
        optimizer.step()
        with torch.no_grad():
            model[1].weight.clamp_(-1, 1)
        backward(model)
        model.load_state_dict(saved)


@pytest.mark.parametrize("how", ["fused", "plain", COMPILED])
def test_calls_without_a_gradient_are_noticed(how):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def acts(n):
        for _ in range(n):
            for _ in range(3):
                with torch.no_grad():
                    run(torch.randn(8, 4))
            run(torch.randn(8, 4)).sum().backward()
            optimizer.step()

    with kernels.disabled() if how == "plain" else nullcontext():
        run = torch.compile(model, backend="aot_eager") if how == "compiled" else model
        acts(WINDOWS - 1)
        with pytest.warns(UserWarning, match=r"128 times.*32 of these.*paused"):
            acts(1)
        acts(2)


def test_calls_that_are_paused_are_not():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for step in range(2 * WINDOWS):
        with paused(model):
            model(torch.randn(8, 4))
        model.eval()
        model(torch.randn(8, 4))
        model.train()
        if step % 4 == 0:  # now and then
            model(torch.randn(8, 4))
        for _ in range(3):
            backward(model)
        optimizer.step()


@pytest.mark.parametrize("affine", [True, False])
def test_training_in_evaluation_mode_is_noticed(affine):
    model = network(affine=affine).eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def updates(n):
        for _ in range(n):
            for _ in range(2):
                backward(model)
            optimizer.step()

    updates(WINDOWS - 1)
    with pytest.warns(UserWarning, match=r"evaluation mode.*32 weight updates.*never in training.*model\.train\(\)"):
        updates(1)
    updates(2 * WINDOWS)


def batchnorm_loaded(model):
    model[1].load_state_dict(nn.BatchNorm1d(6).state_dict() | {"running_mean": torch.ones(6)}, strict=False)


FOR_A_REASON = {
    "it was trained before": lambda model: model.train()(torch.randn(8, 4)),
    "its statistics were loaded": batchnorm_loaded,
    "without gradients it is a test": lambda model: setattr(model, "forward", torch.no_grad()(model.forward)),
}


@pytest.mark.parametrize("reason", FOR_A_REASON)
def test_evaluation_mode_for_a_reason_is_not(reason):
    model = network()
    FOR_A_REASON[reason](model)
    model.eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(WINDOWS + 2):
        y = model(torch.randn(8, 4))
        if y.requires_grad:
            y.sum().backward()
        optimizer.step()
    for _ in range(WINDOWS + 2):  # nor a network that is updated and not called
        optimizer.step()


def test_a_network_that_only_acts_is_noticed():
    target = network()
    with torch.no_grad():
        for _ in range(PATIENCE - 1):
            target(torch.randn(2, 4))
        with pytest.warns(UserWarning, match=r"target network.*eval\(\)"):
            target(torch.randn(2, 4))
        for _ in range(PATIENCE):
            target(torch.randn(2, 4))


@pytest.mark.parametrize("outside", [False, True])
def test_lbfgs_with_layers_that_have_no_parameter(outside):
    """Without one they see in the first evaluation whom they belong to; if that is nobody, they are refused."""
    norm = StreamingNorm(8, affine=False)
    model = nn.Sequential(nn.Linear(4, 8), nn.Identity() if outside else norm, nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    x = torch.randn(16, 4, requires_grad=outside)

    def closure():
        optimizer.zero_grad()
        loss = model(norm(x.repeat(1, 2))[:, :4] if outside else x).square().mean()
        loss.backward()
        return loss

    if outside:
        with pytest.raises(RuntimeError, match=r"attach\(optimizer, model\)"):
            optimizer.step(closure)
        assert counts(norm) == (0, 0)
        attach(optimizer, norm)
    before = optimizer.step(closure)
    assert counts(norm) == (1, 1)
    assert closure() < before


def test_a_norm_of_the_input_without_a_gain_awaits_no_gradient():
    """Nothing in front of it learns, so that no gradient comes back, and nothing is wrong."""
    model = nn.Sequential(StreamingNorm(4, affine=False), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(2 * WINDOWS + 2):
        model(torch.randn(8, 4)).sum().backward()
        optimizer.step()


@pytest.mark.filterwarnings("ignore:.*")
@pytest.mark.parametrize("affine", [True, False])
def test_a_compiled_layer_notices_what_it_did_not_hear_of(affine):
    model = nn.Sequential(nn.Linear(4, 3), StreamingNorm(3, affine=affine))
    compiled = torch.compile(model, backend="aot_eager")
    for _ in range(3):
        compiled(torch.randn(8, 4)).sum().backward()
    assert (model[1]._pulse.forwards, model[1]._pulse.backwards) == (3, 3)


# Layers without parameters, and where they sit


class Block(nn.Module):
    """A norm in a module of its own, beside what learns."""

    def __init__(self, norm):
        super().__init__()
        self.linear, self.after = nn.Linear(4, 4), nn.Sequential(norm, nn.ReLU())

    def forward(self, x):
        return self.after(self.linear(x))


def bare(**settings):
    return StreamingNorm(4, affine=False, **settings)


def hears(model, norm, optimizer, run=None):
    """Whether a step is an update for a norm that is called in `run`; two windows make it sure."""
    folds = []
    for _ in range(2):
        (run or model)(torch.randn(8, 4)).square().mean().backward()
        before = int(norm.stats.count)
        optimizer.step()
        (run or model)(torch.randn(8, 4)).square().mean().backward()
        folds.append(int(norm.stats.count) <= before)
    assert len(set(folds)) == 1
    return folds[0]


def test_the_innermost_module_that_learns_decides():
    first, second, norms = nn.Sequential(), nn.Sequential(), [bare(), bare(), bare()]
    first.append(Block(norms[0]))
    second.append(Block(norms[1]))
    model = nn.Sequential(first, second, norms[2])
    one, two = (torch.optim.SGD(part.parameters(), lr=0.1) for part in (first, second))
    model(torch.randn(8, 4)).sum().backward()
    one.step()
    two.step()  # from now on both are known
    assert [hears(model, norm, one) for norm in norms] == [True, False, True]
    assert [hears(model, norm, two) for norm in norms] == [False, True, True]
    first.requires_grad_(False)  # for a while, as a critic is for the generator's step
    assert [hears(model, norm, two) for norm in norms[:2]] == [False, True]


def test_two_optimizers_of_one_module_are_one_update_if_they_step_together():
    model = Block(bare())
    norm = model.after[0]
    optimizers = [torch.optim.SGD([p], lr=0.1) for p in model.parameters()]
    for _ in range(3):
        for calls in (1, 2):
            backward(model)
            assert counts(norm) == (calls, calls)
        for optimizer in optimizers:
            optimizer.step()
    long = norm.stats.long
    for optimizer in optimizers:
        optimizer.step()
    assert torch.equal(norm.stats.long, long)


def test_a_part_that_no_optimizer_owns_goes_with_the_rest():
    """A backbone that is left out of the optimizer, frozen or not."""
    model = nn.Sequential(Block(bare()), nn.Linear(4, 2))
    assert hears(model, model[0].after[0], torch.optim.SGD(model[1].parameters(), lr=0.1))


def test_layers_with_a_gain_that_learns_hear_of_its_optimizer_alone():
    model = nn.Sequential(Block(StreamingNorm(4)), nn.Linear(4, 2))
    assert not hears(model, model[0].after[0], torch.optim.SGD(model[1].parameters(), lr=0.1))
    assert hears(model, model[0].after[0], torch.optim.SGD(model[0].after.parameters(), lr=0.1))


def test_converted_norms_without_parameters_hear():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.InstanceNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1))
    streamnorm.convert(model, report=None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.randn(2, 3, 5, 5)).sum().backward()
        assert counts(model[1]) == (1, 1)
        optimizer.step()


@pytest.mark.parametrize(
    "how", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_copies_without_parameters_hear_of_their_own_optimizer(how):
    model = Block(bare())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert hears(model, model.after[0], optimizer)
    other = how(model)
    theirs = torch.optim.SGD(other.parameters(), lr=0.1)
    assert not hears(other, other.after[0], optimizer)
    assert hears(other, other.after[0], theirs)
    assert not hears(model, model.after[0], theirs)
    assert hears(model, model.after[0], optimizer)


def test_a_norm_that_moves_hears_of_its_new_model():
    norm = bare()
    norm(torch.randn(8, 4))  # by itself, as in a test of it
    old, new = Block(norm), Block(nn.Identity())
    before, after = (torch.optim.SGD(model.parameters(), lr=0.1) for model in (old, new))
    backward(old)
    before.step()
    backward(old)
    before.step()
    assert hears(old, norm, before)
    old.after[0], new.after[0] = nn.Identity(), norm
    backward(new)
    after.step()
    assert hears(new, norm, after)
    assert not hears(new, norm, before)


def test_parameters_that_are_replaced_are_found_again():
    model = Block(bare())
    assert hears(model, model.after[0], torch.optim.SGD(model.parameters(), lr=0.1))
    model.load_state_dict({key: value.clone() for key, value in model.state_dict().items()}, assign=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    backward(model)
    optimizer.step()
    assert hears(model, model.after[0], optimizer)


class Uncalled(nn.Module):
    """Used by a method of its own, never called."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), bare()

    def features(self, x):
        return self.norm(self.linear(x))


def test_a_method_of_a_module_is_as_good_as_a_call():
    model = Uncalled()
    assert hears(model, model.norm, torch.optim.SGD(model.parameters(), lr=0.1), model.features)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_model_hears_without_parameters():
    model = nn.Sequential(Block(bare()), nn.Linear(4, 2))
    run = torch.compile(model, backend="aot_eager")
    assert hears(model, model[0].after[0], torch.optim.SGD(model.parameters(), lr=0.1), run)


def test_what_a_layer_sits_in_is_not_kept_alive():
    model, other = Block(bare()), Block(bare())
    norm, optimizer = model.after[0], torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    assert hears(model, norm, optimizer)
    assert hears(other, other.after[0], optimizer)
    gone = weakref.ref(other), weakref.ref(other.after[0])
    gc.collect()
    gc.disable()
    try:
        del other
        assert [each() for each in gone] == [None, None]
    finally:
        gc.enable()
    assert hears(model, norm, optimizer)


def test_a_layer_without_parameters_that_hears_does_not_warn():
    model = Block(bare())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(PATIENCE + 1):
        backward(model)
        optimizer.step()


def test_steps_that_are_heard_leave_the_next_call_steady():
    """Of the module's optimizer and of others: nothing is looked for again."""
    model, others = Block(bare()), [nn.Linear(2, 2) for _ in range(2)]
    optimizer, *rest = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, *others))
    for _ in range(3):
        backward(model)
        for each in (*rest, optimizer, *rest):
            each.step()
        optimizer.step()
    for _ in range(2 * WINDOWS):
        optimizer.step()
        assert model.after[0]._pulse.looked
