"""The GRU in torch's form: the same function, and weights that are not taken for those of the other form."""

import copy
import io
import pickle

import pytest
import torch
from test_sequence_kernels import everything, same
from torch import nn

from streamnorm import GRU, ConvGRU, GRUCell, SampleNorm, StreamingNorm

x = torch.randn(6, 4, 3, generator=torch.Generator().manual_seed(0))
AFTER, BEFORE = {"reset_after": True}, {"reset_after": False}


@pytest.mark.parametrize("bias", [True, False])
def test_the_cell_is_torchs(bias):
    reference, cell = nn.GRUCell(3, 5, bias=bias), GRUCell(3, 5, norm=None, bias=bias, reset_after=True)
    cell.load_state_dict(reference.state_dict())
    results = []
    for each in (cell, reference):
        h = None
        for step in x:
            h = each(step, h)
        results.append([h, *torch.autograd.grad(h.square().sum(), list(each.parameters()))])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_float32_is_torchs_to_the_last_digits():
    reference, net = nn.GRU(3, 5, 2, bidirectional=True), GRU(3, 5, 2, bidirectional=True, norm=None, reset_after=True)
    net.load_state_dict(reference.state_dict())
    for each in (net.eval(), reference.eval()):
        for a, b in zip(each(x), reference(x), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_the_kernels_do_not_take_it_for_the_papers():
    narrow = GRU(3, 5, 2, bidirectional=True, reset_after=True)
    wide, papers = copy.deepcopy(narrow).double(), GRU(3, 5, 2, bidirectional=True)
    results = []
    for net in (narrow, wide):
        output, final = net(x.to(net.weight_ih_l0.dtype), lengths=[6, 4, 4, 1])
        output.square().mean().backward()
        results.append({"output": output, "final": final} | everything(net))
    same(*results)
    papers.load_state_dict(copy.deepcopy(narrow).state_dict() | {"reset_after": torch.tensor(False)})
    with torch.no_grad():
        assert (papers.eval()(x)[0] - narrow.eval()(x)[0]).abs().max() > 1e-3


def test_nonlinearity_and_representation():
    net = GRU(3, 5, reset_after=True, nonlinearity="relu")
    assert net(x)[0].shape == (6, 4, 5)
    assert "reset_after=True" in repr(net)
    assert "reset_after" not in repr(GRUCell(3, 5))
    assert "reset_after=True" in repr(ConvGRU(3, 5, reset_after=True))
    with pytest.raises(ValueError, match=r"reset_after=1: must be False .*or True"):
        GRU(3, 5, reset_after=1)
    for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert torch.equal(twin.eval()(x)[0], net.eval()(x)[0])


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


COPIES = {"as it is": lambda s: s, "torch.save": through_a_file, "a plain dict": dict}
every_copy = pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
MAKES = {"layer": GRU, "cell": GRUCell, "convolutional": ConvGRU}
every_make = pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
every_norm = pytest.mark.parametrize("norm", [None, SampleNorm, StreamingNorm])


@every_copy
@every_norm
@every_make
@pytest.mark.parametrize("reset_after", [False, True])
def test_a_state_dict_loads_into_its_own_form_alone(make, norm, copied, reset_after):
    saved = make(3, 5, norm=norm, reset_after=reset_after)
    state = copied(nn.Sequential(saved).state_dict())
    twin = nn.Sequential(make(3, 5, norm=norm, reset_after=reset_after))
    twin.load_state_dict(state)
    assert all(torch.equal(a, b) for a, b in zip(twin.parameters(), saved.parameters(), strict=True))
    other = nn.Sequential(make(3, 5, norm=norm, reset_after=not reset_after))
    before = copy.deepcopy(other.state_dict())
    for strict in (True, False):
        with pytest.raises(RuntimeError, match=rf"resets .* the matrix product.*reset_after={reset_after}\)"):
            other.load_state_dict(state, strict=strict)
        assert all(torch.equal(value, before[key]) for key, value in other.state_dict().items())


@every_copy
@pytest.mark.parametrize("form", [AFTER, BEFORE, {}])
@pytest.mark.parametrize(("make", "theirs"), [(GRU, nn.GRU), (GRUCell, nn.GRUCell)])
def test_weights_of_torch_go_both_ways_or_are_refused(make, theirs, copied, form):
    reference, net = theirs(3, 5), make(3, 5, norm=None, **form)
    if form == AFTER:
        net.load_state_dict(copied(reference.state_dict()))
        reference.load_state_dict(copied(net.state_dict()))
        return
    with pytest.raises(RuntimeError, match=r"as torch.nn's do.*Make it GRU.*reset_after=True"):
        net.load_state_dict(copied(reference.state_dict()))
    with pytest.raises(RuntimeError, match="reset_after"):
        reference.load_state_dict(copied(net.state_dict()))


def test_what_a_state_dict_without_a_mark_means():
    """Ours from before the mark: with norms it is the paper's form; without, it looks like torch's."""
    with_norms = {k: v for k, v in GRU(3, 5).state_dict().items() if k != "reset_after"}
    GRU(3, 5).load_state_dict(with_norms)
    plain = {k: v for k, v in GRU(3, 5, norm=None).state_dict().items() if k != "reset_after"}
    with pytest.raises(RuntimeError, match=r"state_dict\['reset_after'\] = torch.tensor\(False\)"):
        GRU(3, 5, norm=None).load_state_dict(plain)
    GRU(3, 5, norm=None).load_state_dict(plain | {"reset_after": torch.tensor(False)})
    GRU(3, 5).load_state_dict(plain | {"reset_after": torch.tensor(False)}, strict=False)


def test_parts_of_a_state_dict_load_as_before():
    net = GRU(3, 5, norm=None)
    assert "weight_ih_l0" in net.load_state_dict({}, strict=False).missing_keys
    norms = {k: v for k, v in GRU(3, 5).state_dict().items() if k.startswith("norms")}
    assert not GRU(3, 5, reset_after=True).load_state_dict(norms, strict=False).unexpected_keys
    start = GRU(3, 5, reset_after=True)  # from torch's weights
    reference = nn.GRU(3, 5, bias=False)
    assert all("norms" in key for key in start.load_state_dict(reference.state_dict(), strict=False).missing_keys)
    assert torch.equal(start.weight_hh_l0, reference.weight_hh_l0)


@pytest.mark.parametrize("mark", [torch.ones(2), "yes", None, 1])
def test_a_mark_that_is_none(mark):
    state = dict(GRU(3, 5, norm=None).state_dict()) | {"reset_after": mark}
    with pytest.raises(RuntimeError, match="reset_after"):
        GRU(3, 5, norm=None).load_state_dict(state)


def test_deferred_initialisation():
    meta = GRU(3, 5, norm=None, device="meta")
    assert not meta.state_dict()["reset_after"].is_meta
    state = GRU(3, 5, norm=None).state_dict()
    meta.load_state_dict(state, assign=True)
    assert torch.equal(meta.weight_hh_l0, state["weight_hh_l0"])
