"""Files of earlier versions load, and what was saved goes on as it would have gone on then; see files/write.py."""

import copy
import io
import pickle

import pytest
import torch
from files.write import goes_on, made, read

from streamnorm import backends
from streamnorm.core import algorithm

# The files are from the plain path, on which this version agrees to 1e-6; kernels sum in another order.
CLOSE = {torch.float32: {"rtol": 1e-5, "atol": 3e-6}, torch.float64: {"rtol": 1e-10, "atol": 1e-12}}
STATES = {
    (file, name): case
    for file in ("states1", "states1_marks", "states2", "states3_float32", "states3")
    for name, case in read(f"{file}.pt.gz").items()
}
MODULES = read("modules3.pt.gz")
REF = MODULES.pop("NormRef")
LOADS = {
    "torch_save": lambda data: torch.load(io.BytesIO(data), weights_only=False),
    "pickle": pickle.loads,
}


@pytest.fixture(autouse=True)
def counted_as_then(monkeypatch):
    """Up to version 3 pixels and timesteps counted each for an element of their window, and windows weighed n / 32.

    Kernels do not know that.
    """
    for name, value in {"ALIKE": torch.inf, "FULL": 32, "POWER": 1}.items():
        monkeypatch.setattr(algorithm, name, value)
    monkeypatch.setattr(algorithm, "held", lambda before, new, begins: before + new)
    with backends.use("plain"):
        yield


def same(found, old, exactly=False):
    """The tensors of a state, whatever their names and types were: what is new since then is not compared."""
    for key, value in old.items():
        for now in ("stats_pending", "grads_pending") if key == "pending" else (key,):  # one mark, in version 1
            counter = key.rpartition(".")[2] in ("seen", "seen_before", "elements", "elements_before")
            close = {"rtol": 0, "atol": 0} if exactly or not value.is_floating_point() else CLOSE[value.dtype]
            torch.testing.assert_close(
                found[now], value, check_dtype=not counter, msg=lambda m, now=now: f"{now}: {m}", **close
            )
            assert not counter or found[now].dtype == torch.float64


def went_on(found, case):
    for name in ("evaluated", "outputs", "gradients"):
        torch.testing.assert_close(
            found[name], case[name], **CLOSE[case[name].dtype], msg=lambda m, name=name: f"{name}: {m}"
        )
    same(found["after"], case["after"])


@pytest.mark.parametrize("metadata", [True, False], ids=["state_dict", "plain dict"])
@pytest.mark.parametrize(("file", "name"), STATES)
def test_a_state_goes_on(file, name, metadata):
    """Also without its metadata, which plain dicts and safetensors lose."""
    case = STATES[file, name]
    saved = copy.deepcopy(case["state_dict"])
    module = made(case["make"])
    if file < "states3":
        module.guard = False  # which those versions did not have
    assert module.load_state_dict(saved if metadata else dict(saved)) == ([], [])
    same(module.state_dict(), case["state_dict"], exactly=True)
    went_on(goes_on(module, case["x"]), case)


@pytest.mark.parametrize("how", LOADS)
@pytest.mark.parametrize("name", MODULES)
def test_a_module_goes_on(name, how):
    case = MODULES[name]
    loaded = LOADS[how](bytes(case[how].tolist()))
    module, optimizer = loaded if isinstance(loaded, tuple) else (loaded, None)
    went_on(goes_on(module, case["x"], optimizer), case)


@pytest.mark.parametrize("how", LOADS)
def test_a_reference_is_the_same(how):
    found = LOADS[how](bytes(REF[how].tolist()))
    assert found == copy.deepcopy(found) == made(REF["make"])


@pytest.mark.parametrize("how", LOADS)
@pytest.mark.parametrize("file", ["modules1.pt.gz", "modules2.pt.gz"])
def test_a_module_with_an_older_state_is_refused(file, how):
    """Whole modules of versions 1 and 2 do not load, as the state in them has no counts; their state_dicts do."""
    for case in read(file).values():
        with pytest.raises(RuntimeError, match=r"save its state_dict\(\)"):
            LOADS[how](bytes(case[how].tolist()))
