"""Decoupled accumulation and update, and the Manhattan rule."""

import copy
import io

import pytest
import torch
from torch import nn

from streamnorm import DecoupledUpdate, Manhattan


def problem(n=12):
    torch.manual_seed(3)
    model = nn.Linear(4, 2)
    return model, torch.randn(n, 5, 4)


def loss_of(model, x):
    return model(x).square().mean()


INNER = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "manhattan": lambda p: Manhattan(p, lr=0.1, momentum=0.5),
}


@pytest.mark.parametrize("make", INNER.values(), ids=INNER)
def test_an_update_uses_the_average_gradient(make):
    model, data = problem()
    twin = copy.deepcopy(model)
    optimizer, reference = DecoupledUpdate(make(model.parameters()), 3), make(twin.parameters())
    for i, x in enumerate(data):
        optimizer.zero_grad()
        loss_of(model, x).backward()
        optimizer.step()
        if i % 3 == 2:
            reference.zero_grad()
            torch.stack([loss_of(twin, each) for each in data[i - 2 : i + 1]]).mean().backward()
            reference.step()
        torch.testing.assert_close(model.weight, twin.weight)


@pytest.mark.parametrize("place", ["before backward", "after step", "never"])
def test_the_loop_may_clear_gradients_anywhere(place):
    model, data = problem(6)
    twin = copy.deepcopy(model)
    optimizer, reference = (DecoupledUpdate(torch.optim.SGD(m.parameters(), lr=0.1), 3) for m in (model, twin))
    for x in data:
        if place == "before backward":
            optimizer.zero_grad()
        loss_of(model, x).backward()
        optimizer.step()
        if place == "after step":
            optimizer.zero_grad()
        loss_of(twin, x).backward()
        reference.step()
    assert torch.equal(model.weight, twin.weight)


def test_zero_grad_inside_a_window_does_nothing():
    model, data = problem()
    optimizer = DecoupledUpdate(torch.optim.SGD(model.parameters(), lr=0.1), 2)
    loss_of(model, data[0]).backward()
    optimizer.step()
    gradient = model.weight.grad.clone()
    optimizer.zero_grad()
    assert torch.equal(model.weight.grad, gradient)
    loss_of(model, data[1]).backward()
    optimizer.step()
    assert optimizer.calls == 0
    loss_of(model, data[1]).backward()
    optimizer.zero_grad()
    assert model.weight.grad is None


def test_flush_averages_over_the_calls_made():
    model, data = problem()
    twin = copy.deepcopy(model)
    optimizer = DecoupledUpdate(torch.optim.SGD(model.parameters(), lr=0.1), 5)
    optimizer.flush()
    assert torch.equal(model.weight, twin.weight)
    for x in data[:2]:
        loss_of(model, x).backward()
        optimizer.step()
    optimizer.flush()
    reference = torch.optim.SGD(twin.parameters(), lr=0.1)
    torch.stack([loss_of(twin, x) for x in data[:2]]).mean().backward()
    reference.step()
    torch.testing.assert_close(model.weight, twin.weight)
    assert optimizer.calls == 0


def test_a_closure_runs_at_each_call():
    model, data = problem()
    optimizer = DecoupledUpdate(torch.optim.SGD(model.parameters(), lr=0.1), 3)
    calls = []

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, data[len(calls)])
        loss.backward()
        calls.append(float(loss.detach()))
        return loss

    with torch.no_grad():
        losses = [float(optimizer.step(closure)) for _ in range(4)]
    assert calls == losses
    assert optimizer.calls == 1


def test_schedulers_take_the_inner_optimizer():
    model, data = problem()
    optimizer = DecoupledUpdate(torch.optim.SGD(model.parameters(), lr=1.0), 3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, step_size=1, gamma=0.5)
    for x in data[:6]:
        loss_of(model, x).backward()
        optimizer.step()
        if optimizer.calls == 0:
            scheduler.step()
    assert scheduler.get_last_lr() == [0.25]


@pytest.mark.parametrize("stop", [2, 3, 4])
def test_resuming_inside_a_window(stop):
    model, data = problem()
    fresh = copy.deepcopy(model)
    optimizer = DecoupledUpdate(INNER["sgd"](model.parameters()), 3)
    for i, x in enumerate(data):
        if i == stop:
            file = io.BytesIO()
            torch.save([model.state_dict(), optimizer.state_dict()], file)
        loss_of(model, x).backward()
        optimizer.step()
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    fresh.load_state_dict(weights)
    resumed = DecoupledUpdate(INNER["sgd"](fresh.parameters()), 3)
    resumed.load_state_dict(state)
    for x in data[stop:]:
        loss_of(fresh, x).backward()
        resumed.step()
    assert torch.equal(fresh.weight, model.weight)


def test_a_state_that_does_not_fit_is_refused_whole():
    model, data = problem()
    optimizer = DecoupledUpdate(torch.optim.SGD(model.parameters(), lr=0.1), 3)
    for x in data[:2]:
        loss_of(model, x).backward()
        optimizer.step()
    state = optimizer.state_dict()
    for other, n, message in (
        (nn.Linear(4, 2, bias=False), 3, "1 parameters|has 1"),
        (nn.Linear(4, 3), 3, "gradient of shape"),
        (nn.Linear(4, 2), 2, "2 calls into its window"),
    ):
        target = DecoupledUpdate(torch.optim.SGD(other.parameters(), lr=0.7), n)
        with pytest.raises(ValueError, match=message):
            target.load_state_dict(state)
        assert target.calls == 0
        assert other.weight.grad is None
        assert target.optimizer.param_groups[0]["lr"] == 0.7


def test_a_window_without_gradients_does_nothing():
    model, _ = problem()
    optimizer = DecoupledUpdate(torch.optim.SGD(model.parameters(), lr=0.1), 2)
    weight = model.weight.detach().clone()
    for _ in range(2):
        optimizer.step()
    assert optimizer.calls == 0
    assert torch.equal(model.weight, weight)


def test_what_is_not_an_optimizer_or_a_state_is_refused():
    with pytest.raises(TypeError, match="wraps a torch optimizer, not Linear"):
        DecoupledUpdate(nn.Linear(2, 2), 2)
    optimizer = DecoupledUpdate(torch.optim.SGD(problem()[0].parameters(), lr=0.1), 2)
    with pytest.raises(ValueError, match="not that of a DecoupledUpdate"):
        optimizer.load_state_dict({})


def test_lbfgs_is_refused():
    with pytest.raises(ValueError, match="LBFGS"):
        DecoupledUpdate(torch.optim.LBFGS(problem()[0].parameters()), 2)


@pytest.mark.parametrize(("momentum", "decay"), [(0.0, 0.0), (0.9, 0.0), (0.0, 0.1), (0.9, 0.1)])
def test_manhattan_is_the_rule(momentum, decay):
    w = nn.Parameter(torch.randn(5, dtype=torch.float64))
    v = nn.Parameter(torch.randn(2, 3, dtype=torch.float64))
    unused = nn.Parameter(torch.ones(2))
    optimizer = Manhattan([w, v, unused], lr=0.05, momentum=momentum, weight_decay=decay)
    expected = [(p.detach().clone(), torch.zeros_like(p)) for p in (w, v)]
    for _ in range(4):
        gradients = [torch.randn_like(p) for p in (w, v)]
        gradients[0][2] = 0.0
        for i, (p, g) in enumerate(zip((w, v), gradients, strict=True)):
            p.grad = g
            old, buffer = expected[i]
            buffer = momentum * buffer + (torch.sign(g) + decay * old)
            expected[i] = (old - 0.05 * buffer, buffer)
        optimizer.step()
        for p, (value, _) in zip((w, v), expected, strict=True):
            torch.testing.assert_close(p.detach(), value, rtol=1e-14, atol=1e-15)
    assert torch.equal(unused, torch.ones(2))


def test_manhattan_groups_state_and_closure():
    model, data = problem()
    groups = [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.0, "weight_decay": 0.5}]
    optimizer = Manhattan(groups, lr=0.1, momentum=0.9)
    bias = model.bias.detach().clone()

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, data[0])
        loss.backward()
        return loss

    assert optimizer.step(closure) > 0
    assert torch.equal(model.bias, bias)
    twin = copy.deepcopy(model)
    resumed = Manhattan([{"params": [twin.weight]}, {"params": [twin.bias]}], lr=0.3)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for m, o in ((model, optimizer), (twin, resumed)):
        o.zero_grad()
        loss_of(m, data[1]).backward()
        o.step()
    assert torch.equal(model.weight, twin.weight)


def test_manhattan_refuses_sparse_gradients():
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse"):
        Manhattan(table.parameters(), lr=0.1).step()
