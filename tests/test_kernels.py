"""What is special to the C++ kernels: threads, instruction sets, memory, their build, and what they decline.

That they compute what plain torch computes is in test_conformance.py, with all backends.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from conformance import BF16, F32, Case, agrees, law_of, layer_of, replayed, runs, same, train
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from streamnorm import GeneralBatchNorm, SampleNorm, StreamingNorm, backends, kernels, paused
from streamnorm.backends.cpu import binding
from streamnorm.core.algorithm import KEPT_NUMBERS, Kept
from streamnorm.core.config import SETTINGS, Config
from streamnorm.core.state import FIELDS, H1, H2

needs_kernels = pytest.mark.skipif(not kernels.available(), reason="the kernels are not built, or switched off")
MACHINES = [(name, threads) for name in binding.VARIANTS for threads in (1, 2)]
CPU = backends.registered()["cpu"]


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """But where a test asks for more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@contextmanager
def machine(variant, threads):
    binding._native.use(variant)  # without such instructions, what was in use stays so
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(1)
        binding._native.use(binding.variant)


class Operations(TorchDispatchMode):
    """The names of torch's operations. A push into a stream is a `lerp` in plain torch, and none in a kernel."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.__name__.split(".")[0])
        return func(*args, **(kwargs or {}))


@needs_kernels
@settings(max_examples=100)
@given(case=runs(), where=st.sampled_from(MACHINES))
def test_every_machine_computes_the_same(case, where):
    """With the instructions of an older processor and with threads, for any call: see `conformance.runs`."""
    agrees(case, "cpu", where=partial(machine, *where))


@needs_kernels
@pytest.mark.parametrize("shape", [(1400, 50), (10, 33, 17, 13), (6, 2, 6000)])
@pytest.mark.parametrize("layout", ["contiguous", "channels last"])
@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_the_number_of_threads_does_not_matter(shape, layout, p, dtype):
    settings = {"p": p, "center": "mean"}
    case = Case(shape=shape, layouts=(layout, layout), settings=settings, dtypes=(dtype, F32), windows=((1,), (1,)))
    _, fed = law_of(case)
    results = []
    for threads in (1, 2, 5):
        with machine(binding.variant, threads), backends.use("cpu"):
            results.append(train(layer_of(case), case, replayed(fed)))
    for other in results[1:]:
        same(other, results[0])


def bits(*numbers):
    return torch.tensor(numbers, dtype=torch.int32).view(F32)


def is_rounded(narrow, wide):
    """As torch rounds what is within the last digits of float32; NaN is NaN."""
    near = [(wide.double() * change).to(F32).to(BF16) for change in (1 - 1e-5, 1, 1 + 1e-5)]
    alike = torch.stack([narrow == each for each in near]).any(0)
    return bool((alike | (narrow.isnan() & wide.isnan())).all())


@needs_kernels
@pytest.mark.parametrize("variant", binding.VARIANTS)
@pytest.mark.parametrize("layout", ["contiguous", "channels last"])
@pytest.mark.parametrize("space", [1, 7, 64])
def test_bfloat16_is_float32_rounded(variant, layout, space):
    """To the nearest, of two the even one; what is too large is infinite, and every NaN stays one."""
    odd = bits(0x7FFFFFFF, -1, 0x7FC00000, 0x7F800001, 0x7F800000, 0x7F7FFFFF, 0x00000001, 0x00800000, 0x3F808000)
    case = Case(shape=(6, len(odd), space), layouts=(layout, layout), dtypes=(BF16, F32), windows=((1,),))
    x, dy, _ = law_of(case)[1][0]
    for gain, bias in ((odd, torch.zeros_like(odd)), (torch.ones_like(odd), odd)):
        found = []
        for dtype in (BF16, F32):
            layer = StreamingNorm(len(odd), guard=False)
            layer.weight.data, layer.bias.data = gain, bias
            leaf = x.detach().to(dtype, copy=True).requires_grad_()
            with machine(variant, 1), backends.use("cpu"):
                y = layer(leaf)
                y.backward(dy.to(dtype))
            found.append((y.detach(), leaf.grad))
        assert all(is_rounded(*pair) for pair in zip(*found, strict=True))


@needs_kernels
@pytest.mark.parametrize("layout", ["contiguous", "channels last", "with gaps"])
def test_a_training_call_is_the_kernels_alone(layout):
    """None of torch's operations computes anything: they make empty tensors."""
    case = Case(shape=(9, 5), layouts=(layout, layout), windows=((1,),))
    _, fed = law_of(case)
    x, dy, _ = fed[0]
    for name, pushed in (("cpu", False), ("plain", True)):
        with Operations() as seen, backends.use(name):
            layer_of(case)(x.detach().requires_grad_()).backward(dy)
        assert ("lerp" in seen.names) == pushed
        assert ("sum" in seen.names) == pushed


# What they decline, in words; test_conformance.py checks that another backend serves it, and that explain tells.


class Own(torch.Tensor):
    pass


def call(layer=None, x=None, mask=None):
    return layer or StreamingNorm(5), torch.randn(6, 5, 4) if x is None else x, mask


DECLINED = {
    "another kind of layer": (lambda: call(SampleNorm(5)), "it serves streaming layers"),
    "another device": (lambda: call(StreamingNorm(5, device="meta"), torch.empty(6, 5, device="meta")), "not meta"),
    "float16": (lambda: call(x=torch.randn(6, 5).half()), "float32 and bfloat16"),
    "float16 layer": (lambda: call(StreamingNorm(5).half()), "float32 and bfloat16"),
    "float64": (lambda: call(StreamingNorm(5).double()), "with statistics in float32"),
    "p": (lambda: call(StreamingNorm(5, p=3)), "it has p = 1 and 2, not 3"),
    "reference": (lambda: call(StreamingNorm(5, ref="BA2")), "one statistic per channel"),
    "mask": (lambda: call(mask=torch.ones(6, 4, dtype=torch.bool)), "it takes no mask"),
    "layout": (lambda: call(x=torch.randn(4, 5, 6).transpose(0, 2)), "neither contiguous nor channels last"),
    "expanded": (lambda: call(x=torch.randn(6, 5, 1).expand(6, 5, 4)), "neither contiguous nor channels last"),
    "subclass": (lambda: call(x=torch.randn(6, 5).as_subclass(Own)), "not an ordinary one"),
    "gain with gaps": (lambda: call(with_gain(torch.arange(10.0)[::2])), "replaced by one that it cannot hold"),
}


def with_gain(gain):
    layer = StreamingNorm(5)
    layer.weight = nn.Parameter(gain)
    return layer


@needs_kernels
@pytest.mark.parametrize("case", DECLINED)
def test_what_the_kernels_decline(case):
    make, words = DECLINED[case]
    said = backends.explain(*make())
    assert not said.startswith("cpu ")
    assert words in re.search(r"cpu does not: (.*?)\.( |$)", said)[1]


@needs_kernels
def test_a_setting_that_they_do_not_know_is_declined(monkeypatch):
    """Only where it is not at its default: then the kernels would compute something else."""
    monkeypatch.setattr(binding, "KNOWN", tuple(name for name in binding.KNOWN if name != "guard"))
    x = torch.randn(6, 5)
    call = backends.signature_of(Config(guard=False), x, None, None, None, torch.float32)
    assert CPU.declines(call) == "a setting is new to it"
    assert CPU.declines(call._replace(config=Config())) is None


# Their fields are the lists of Python.


@needs_kernels
def test_the_fields_of_python_and_of_the_kernels_are_the_same():
    assert not binding.mismatch
    known, h1, h2, numbers = (names.split() for names in binding._native.fields())
    assert ["ref", *known] == list(SETTINGS)
    assert h1 == list(H1)
    assert [*h2, "loss_scale"] == list(H2)
    assert numbers == list(KEPT_NUMBERS)
    assert {"mean", "sigma", "center", *numbers} == set(Kept._fields)
    assert {*h1, *h2, "loss_scale"} == set(FIELDS)


@needs_kernels
def test_a_record_of_settings_is_what_the_kernels_read():
    """Each setting has its own place in it, which a change of that setting alone changes."""
    first = binding.settings_record(Config())
    changes = {"p": 1, "center": "zero", "eps": 1.0, "alpha": (0.5, 0.5), "beta": (0.1, 0.2, 0.3)}
    changes |= {"kappa": (0.1, 0.2, 0.3, 0.4), "warmup": 7, "guard": False, "eval_memory": 7}
    places = {}
    for name in binding.KNOWN:
        base = {"kappa": (0.7, 0.3, 0.7, 0.3), "eval_memory": 64}  # which others imply
        changed = binding.settings_record(Config(**base | {name: changes[name]}))
        assert len(changed) == len(first)
        places[name] = {i // 8 for i in range(len(first)) if changed[i] != first[i]}
        assert places[name], name
    assert sum(map(len, places.values())) == len(set().union(*places.values()))


MISMATCH = """
import importlib, sys, types
import torch
from importlib import import_module
real = importlib.import_module

class Old(types.ModuleType):
    def fields(self):
        return ("p center", "mean sigma", "grads_long")

def fake(name, package=None):
    return Old("_native") if name == "._native" else real(name, package)

if sys.argv[1] == "mismatch":
    importlib.import_module = fake
elif sys.argv[1] == "missing":
    sys.modules["streamnorm.backends.cpu._native"] = None
import streamnorm
from streamnorm import backends
from streamnorm.backends.cpu import binding
assert binding.mismatch == (sys.argv[1] == "mismatch")
print(backends.registered()["cpu"].missing())
assert not streamnorm.kernels.available() and "cpu" not in backends.available()
for net, x in ((streamnorm.StreamingNorm(3), torch.randn(4, 3)), (streamnorm.GRU(3, 5), torch.randn(6, 4, 3))):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        y = net(x)
        (y if isinstance(y, torch.Tensor) else y[0]).square().mean().backward()
        optimizer.step()
    assert all(torch.isfinite(value).all() for value in net.state_dict().values())
print(backends.explain(streamnorm.StreamingNorm(3), torch.randn(4, 3)))
"""


@pytest.mark.parametrize(
    ("why", "words"), [("missing", "are not built"), ("mismatch", "built from another version of streamnorm")]
)
def test_everything_works_without_them(why, words):
    """Not built, or from a source with other fields: the backend is missing, and says in a sentence what to do."""
    done = subprocess.run([sys.executable, "-c", MISMATCH, why], env=os.environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    missing, said = done.stdout.splitlines()
    assert words in missing
    assert said.startswith("plain serves this call. ")
    assert f"cpu does not: {missing}." in said


@needs_kernels
def test_the_older_names_go_on_working():
    """`streamnorm.kernels` was there before `streamnorm.backends`."""
    layer, x = StreamingNorm(5), torch.randn(6, 5)
    assert kernels.available()
    with kernels.disabled():
        assert not kernels.available()
        assert backends.active().backends == (backends.registered()["plain"],)
        assert "cpu does not: switched off by use()." in backends.explain(layer, x)
        with backends.use("cpu"):
            assert kernels.available()
        assert not kernels.available()
    assert kernels.available()
    assert backends.explain(layer, x) == "cpu serves this call."


@needs_kernels
def test_one_build_serves_every_python_and_torch():
    """Every Python that has a GIL."""
    assert (".abi3." in binding._native.__file__) == (not sysconfig.get_config_var("Py_GIL_DISABLED"))
    if shutil.which("readelf") is None or not sys.platform.startswith("linux"):
        pytest.skip("no readelf here")
    dynamic = subprocess.run(["readelf", "-d", binding._native.__file__], capture_output=True, text=True, check=True)
    needed = re.findall(r"NEEDED.*\[(.*)\]", dynamic.stdout)
    assert needed
    assert not [name for name in needed if re.match(r"lib(torch|c10|gomp|omp|iomp|python)", name)]


# Evaluation


LAYOUTS = {
    "rows": lambda: torch.randn(6, 5),
    "rows of a wider matrix": lambda: torch.randn(6, 9)[:, 2:7],
    "one row": lambda: torch.randn(1, 5),
    "planes of one": lambda: torch.randn(6, 5, 1),
    "series": lambda: torch.randn(3, 5, 70),
    "images": lambda: torch.randn(3, 5, 7, 9),
    "images of one sample": lambda: torch.randn(2, 5, 7, 9)[1:],
    "channels last": lambda: torch.randn(3, 5, 7, 9).to(memory_format=torch.channels_last),
    "volumes": lambda: torch.randn(2, 5, 3, 4, 5),
    "volumes, channels last": lambda: torch.randn(2, 5, 3, 4, 5).to(memory_format=torch.channels_last_3d),
    "for two threads": lambda: torch.randn(8, 5, 64, 64),
    "rows for two threads": lambda: torch.randn(8, 5, 64, 64).to(memory_format=torch.channels_last),
}
OTHERWISE = {
    "columns": lambda: torch.randn(5, 6).T,
    "every other pixel": lambda: torch.randn(3, 5, 7, 18)[..., ::2],
    "one sample several times": lambda: torch.randn(1, 5, 7, 9).expand(3, 5, 7, 9),
    "no sample": lambda: torch.randn(0, 5, 7, 9),
    "float64": lambda: torch.randn(3, 5, 7, 9).double(),
    "half": lambda: torch.randn(3, 5, 7, 9).half(),
}


@pytest.fixture
def served(monkeypatch):
    """What the kernel for evaluation has answered."""
    answers = []

    def asked(*arguments):
        answers.append(binding._native.layer_normalize(*arguments))
        return answers[-1]

    monkeypatch.setattr(binding, "layer_normalize", asked)
    return answers


def evaluated(kind=StreamingNorm, x=None, **settings):
    """A layer in evaluation mode that has seen inputs like `x`, and has a gain and a bias."""
    norm = kind(5, **settings)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    norm(torch.randn(16, 5) * 2 + 3)
    norm.eval()
    if x is not None:
        norm(x)
    return norm


@needs_kernels
@pytest.mark.parametrize(("variant", "threads"), MACHINES)
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_evaluation_that_nobody_differentiates_is_the_ordinary_one(layout, dtype, variant, threads, served):
    x = LAYOUTS[layout]().to(dtype)
    for norm in (evaluated(x=x), evaluated(GeneralBatchNorm, x), evaluated(x=x, affine=False)):
        wanted = norm(x).detach()
        assert served == []
        for context in (torch.no_grad, torch.inference_mode):
            with context(), machine(variant, threads):
                y = norm(x)
            assert served.pop() is True
            assert y.dtype == x.dtype
            assert y.stride() == wanted.stride()
            torch.testing.assert_close(y, wanted, rtol=2e-6 if dtype == F32 else 2**-7, atol=2e-6)


@needs_kernels
@pytest.mark.parametrize("layout", OTHERWISE)
def test_other_inputs_are_left_to_torch(layout, served):
    x = OTHERWISE[layout]()
    norm = evaluated(x=x)
    with torch.no_grad():
        torch.testing.assert_close(norm(x), norm(x.contiguous()), rtol=1e-3, atol=1e-3)
    assert served[0] is False


@needs_kernels
@pytest.mark.parametrize(
    "change",
    [
        {"x": torch.randn(3, 4, 2)},
        {"x": torch.randn(3)},
        {"x": torch.randn(3, 5, 2, device="meta")},
        {"x": torch.randn(3, 5, 2).to_sparse()},
        {"x": torch._neg_view(torch.randn(3, 5, 2))},
        {"x": torch.randn(3, 5, 2).int()},
        {"mean": None},
        {"mean": torch.zeros(4)},
        {"mean": torch.zeros(5).double()},
        {"mean": torch.zeros(10)[::2]},
        {"sigma": None},
        {"sigma": torch.ones(1, 5)},
        {"gain": torch.ones(6)},
        {"gain": torch.ones(5).bfloat16()},
        {"bias": torch.zeros(5, 1)},
        {"y": torch.full((3, 2, 5), 7.0).transpose(1, 2)},
        {"y": torch.full((3, 5), 7.0)},
        {"y": torch.full((3, 5, 2), 7.0).double()},
        {"y": torch.full((4, 5, 2), 7.0)},
    ],
    ids=lambda change: str(
        {k: None if v is None else (tuple(v.shape), v.dtype, v.device.type) for k, v in change.items()}
    ),
)
def test_a_tensor_that_the_kernel_cannot_read_or_write_is_refused(change):
    fitting = {"x": torch.randn(3, 5, 2), "mean": torch.zeros(5), "sigma": torch.ones(5)}
    fitting |= {"gain": torch.ones(5), "bias": torch.zeros(5), "y": torch.full((3, 5, 2), 7.0)}
    assert binding.layer_normalize(*fitting.values(), 1) is True
    assert torch.equal(fitting["y"], fitting["x"])
    given = fitting | {"y": torch.full((3, 5, 2), 7.0)} | change
    assert binding.layer_normalize(*given.values(), 1) is False
    assert bool((given["y"] == 7).all())


@needs_kernels
@pytest.mark.parametrize("name", ["x", "mean", "sigma", "gain", "bias", "y"])
def test_a_tensor_whose_memory_was_taken_away_is_refused(name):
    tensors = {"x": torch.randn(3, 5, 2), "mean": torch.zeros(5), "sigma": torch.ones(5)}
    tensors |= {"gain": torch.ones(5), "bias": torch.zeros(5), "y": torch.zeros(3, 5, 2)}
    tensors[name].untyped_storage().resize_(16)
    assert binding.layer_normalize(*tensors.values(), 1) is False


@needs_kernels
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_whoever_looks_at_an_evaluation_finds_ordinary_operations(served):
    """Gradients, transforms, tracing, masks and checkpoints: the kernel is not asked."""
    x = torch.randn(4, 5, 3)
    norm = evaluated(x=x)
    wanted = norm(x).detach()
    mask = torch.ones(4, 3, dtype=torch.bool)
    with torch.no_grad():
        found = [norm(x, mask), torch.func.vmap(norm)(x.unsqueeze(0))[0], torch.jit.trace(norm, x)(x)]
        found.append(torch.func.jvp(norm, (x,), (x,))[0])
        with forward_ad.dual_level():
            y, tangent = forward_ad.unpack_dual(norm(forward_ad.make_dual(x, torch.ones_like(x))))
        found.append(y)
        last = evaluated(channel_dim=-1)
        last(x.movedim(1, -1))
        last.load_state_dict(norm.state_dict())
        found.append(last(x.movedim(1, -1)).movedim(-1, 1))
    assert tangent is not None
    leaf = x.clone().requires_grad_()
    for reentrant in (True, False):
        y = checkpoint(norm, leaf, use_reentrant=reentrant)
        y.sum().backward()
        found.append(y.detach())
    for y in found:
        torch.testing.assert_close(y, wanted, rtol=1e-5, atol=1e-5)
    assert served == []


@needs_kernels
def test_a_paused_call_that_nobody_differentiates_is_served_too(served):
    """By the statistics of training; batch norms take those of the mini-batch there, as always."""
    x = torch.randn(4, 5, 3)
    for kind, answers in ((StreamingNorm, [True]), (GeneralBatchNorm, [])):
        norm = evaluated(kind, x).train()
        with paused(norm):
            wanted = norm(x).detach()
            with torch.no_grad():
                torch.testing.assert_close(norm(x), wanted, rtol=2e-6, atol=2e-6)
        assert served == answers
        served.clear()


@needs_kernels
def test_an_evaluation_uses_what_is_new_about_the_layer(served):
    """Nothing is remembered from one evaluation to the next."""
    x = torch.randn(4, 5, 3)
    norm = evaluated(x=x)
    changes = [  # and what the kernel answers then: nothing where it is not asked
        (lambda: norm.load_state_dict(evaluated().state_dict()), [True]),
        (lambda: norm.weight.data.mul_(2), [True]),
        (lambda: setattr(norm, "bias", nn.Parameter(torch.ones(5))), [True]),
        (lambda: setattr(norm, "eval_memory", 0), [True]),
        (lambda: norm.reset_running_stats(), [True]),
        (lambda: norm.double(), [False]),
        (lambda: norm.float(), [True]),
        (lambda: parametrize.register_parametrization(norm, "weight", nn.Softplus()), []),
        (lambda: parametrize.remove_parametrizations(norm, "weight"), [True]),
        (lambda: norm.running_mean.add_(1), []),
    ]
    for change, answers in changes:
        change()
        inputs = x.to(norm.bias.dtype)
        with torch.no_grad():
            y = norm(inputs)
        assert served == answers
        served.clear()
        torch.testing.assert_close(y, norm(inputs).detach(), rtol=1e-5, atol=1e-5)
