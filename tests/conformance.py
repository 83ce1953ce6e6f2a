"""What the conformance suite runs: cases of calls, and how a case goes through the compiler and the oracle.

What a case is, and how it goes through a backend, is in `streamnorm.lab.check.agreement`, which users run too. Nothing
here knows a backend by its name, but for the law: plain torch in float64, which the oracle is compared with.
"""

from collections import Counter
from contextlib import contextmanager, nullcontext
from functools import partial
from math import prod

import numpy as np
import torch
from hypothesis import strategies as st
from oracle import REFERENCES, BatchOracle, StreamingOracle, stacked

from streamnorm import backends
from streamnorm.lab.check.agreement import (  # noqa: F401
    BF16,
    F16,
    F32,
    F64,
    KINDS,
    LAYOUTS,
    STEPS,
    TOLERANCE,
    Case,
    Differs,
    arithmetic,
    data,
    difference,
    feeder,
    law_of,
    layer_of,
    on,
    replayed,
    state_of,
    train,
    trained_by,
)

LAW = "plain"
CENTERS = ("mean", "running", "zero")


def cases():
    """Each way in which calls differ, one at a time; `runs` draws them together."""
    found = {}

    def add(name, **changes):
        small = {"shape": (6, 5, 4, 3)} if changes.get("kind") == "instance" else {}  # elements enough for a spread
        found[name] = Case(**small | changes)

    shapes = [(9, 5), (4, 5, 3), (4, 5, 3, 3), (2, 3, 2, 3, 2), (1, 4, 5, 3), (6, 1, 5), (1, 5), (80, 40, 5, 5)]
    for kind in KINDS:
        first = {"p": 2, "center": "running" if kind == "streaming" else "mean"}
        for shape in shapes:
            fewest = {"sample": prod(shape[1:]), "instance": prod(shape[2:])}.get(kind, shape[0] * prod(shape[2:]))
            if fewest > 1 or kind == "streaming":  # else there is no spread, which is refused
                large = {"windows": ((1,), (1,))} if prod(shape) > 10000 else {}
                add(f"{kind} {shape}", kind=kind, shape=shape, **large)
        for layout in [name for name in LAYOUTS if name != "contiguous"]:
            flat = kind != "instance" and not (layout == "expanded" and kind in ("batch", "steps"))  # without a spread
            for shape in ((6, 5), (6, 5, 14), (6, 5, 4, 3))[not flat :]:
                add(f"{kind} {layout} {shape}", kind=kind, shape=shape, layouts=(layout, layout))
            add(f"{kind} gradient {layout}", kind=kind, layouts=("contiguous", layout))
        for change in ({"p": 1}, {"p": 3}, {"p": 1.5, "center": "zero"}, {"eps": 1e-2}, {"eps": 0}):
            add(f"{kind} {change}", kind=kind, settings=first | change)
        for center in CENTERS[:: 1 if kind in ("streaming", "batch", "steps") else 2]:
            add(f"{kind} {center}", kind=kind, settings={"center": center})
        add(f"{kind} channels in the last dimension", kind=kind, settings={"channel_dim": -1})
        for absent in (("weight",), ("bias",), ("weight", "bias")):
            add(f"{kind} without {' and '.join(absent)}", kind=kind, absent=absent)
            if kind != "instance":
                add(f"{kind} without {' and '.join(absent)}, flat", kind=kind, absent=absent, shape=(6, 5))
        for shape in ((6, 5, 14), (6, 5, 4, 3)):
            add(f"{kind} masked {shape}", kind=kind, masked=True, shape=shape)
        for dtypes in ((F64, F64), (BF16, BF16), (F16, F16), (BF16, F32), (F32, F64), (F64, F32)):
            words = " on ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            add(f"{kind} {words}", kind=kind, dtypes=dtypes)
        add(f"{kind} float64 on float64, no gain", kind=kind, dtypes=(F64, F64), absent=("weight", "bias"))
        add(f"{kind} chained", kind=kind, chained=True, windows=((3,), (2, 4), (1,), (2,)))
        for scale in (1e-3, 1e3):
            add(f"{kind} scale {scale}", kind=kind, scale=scale)
    for code in REFERENCES:
        for kind, pools in (("streaming", "BS"), ("batch", "B"), ("sample", "S")):
            if code[0] in pools:
                located = REFERENCES[code][2] != "all"
                change = {"ref": code} | ({"center": "zero"} if located else {})  # few elements have no spread
                add(f"{kind} {code}", kind=kind, shape=(3, 2, 3, 2), settings=change)
                if not located:  # what padding alone would use is not in the loops
                    add(f"{kind} {code} masked", kind=kind, shape=(3, 2, 9), settings=change, masked=True)
    few = {"shape": (2, 5), "windows": ((1,), (1,), (1, 1), (2,), (1,))}  # a window that the guard looks at
    large = {"shape": (8, 2, 8, 4), "windows": ((1,), (1, 1), (2,), (1,))}  # whose own gradients the guard looks at
    for name, change in {
        "alpha": {"settings": {"alpha": (0.5, 0.4)}},
        "alpha 0": {"settings": {"alpha": (0.0, 1.0)}},
        "beta": {"settings": {"beta": (0.5, 0.2, 0.3)}},
        "beta below 0": {"settings": {"beta": (-0.3, 0.4, 0.9)}},
        "kappa": {"settings": {"kappa": (0.9, 0.2, 0.4, 0.7)}},
        "no warmup": {"settings": {"warmup": 0, "center": "mean"}},
        "part of warmup": {"settings": {"warmup": 61.5}},
        "guard": few,
        "guard p=1": few | {"settings": {"p": 1}},
        "no guard": few | {"settings": {"guard": False}},
        "guard and beta": few | {"settings": {"beta": (0.5, 0.2, 0.3)}},
        "large samples": large,
        "large samples, no guard": large | {"settings": {"guard": False}},
        "large samples, p=1 and beta": large | {"settings": {"p": 1, "beta": (0.5, 0.2, 0.3)}},
        "large samples, masked": large | {"masked": True, "shape": (8, 2, 80)},
        "large samples in float64": large | {"dtypes": (F64, F64)},
        "large samples in bfloat16": large | {"dtypes": (BF16, F32)},
        "the paper": {"settings": {"guard": False, "warmup": 0, "center": "mean", "p": 1}},
        "one window": {"windows": ((1, 1, 1, 1, 1),)},
        "an update after each call": {"windows": ((1,),) * 8},
        "updates without calls": {"windows": ((1,), (), (), (1,), (2,))},
        "bfloat16 gain, float32 input": {"dtypes": (F32, BF16)},
    }.items():
        add(f"streaming {name}", **change)
    for layout in ("contiguous", "channels last", "with gaps"):
        for shape in ((9, 5), (3, 5, 7), (4, 17, 5, 5)):
            for p, center in ((1, "zero"), (2, "mean"), (2, "running")):
                given = {"layouts": (layout, layout), "settings": {"p": p, "center": center}}
                add(f"streaming bfloat16 {layout} {shape} {p} {center}", shape=shape, dtypes=(BF16, F32), **given)
    return found


def close(actual, expected, what="", tolerance=1e-5):
    """Within a tolerance relative to the largest value; what is not finite is so in the same places."""
    try:
        error = difference(actual, expected)
    except Differs as error:
        raise AssertionError(f"{what}: {error}") from None
    assert error <= tolerance * expected.is_floating_point(), f"{what}: off by {error} of the largest"


def same(actual, expected, least=0.0):
    """Everything that was seen of two trainings. What is said in fewer digits may be off by more."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        close(actual[name], value, name, max(least, TOLERANCE.get(actual[name].dtype, 0.0)))


def by_the_oracle(case, fed):
    """The case by the loops of the paper: what the law is compared with."""
    streaming = case.kind == "streaming"
    layer = layer_of(case).double()
    ref = layer.ref.samples, layer.ref.channels, layer.ref.space
    names = "alpha", "beta", "kappa", "warmup", "guard", "eval_memory"
    rest = {name: getattr(layer, name) for name in names} if streaming else {"steps": 1 + 2 * (case.kind == "steps")}
    make = StreamingOracle if streaming else BatchOracle
    oracle = make(case.shape[1], ref, layer.p, layer.center, eps=layer.eps, **rest)
    for name in ("weight", "bias"):
        if getattr(layer, name) is not None:
            setattr(oracle, name, getattr(layer, name).detach().numpy())
    keeps = streaming or case.kind in ("batch", "steps")

    def first(values):
        return values if layer.channel_dim == 1 else np.moveaxis(values, -1, 1)

    def state():
        if not keeps:
            return {}
        shape = partial(stacked, channels=case.shape[1], space=case.shape[2:], reference=oracle.reference)
        if not streaming:
            starts, seen = {"mean": np.zeros_like, "sigma": np.ones_like}, next(r for r in oracle.running if r["mean"])
            parts = {
                part: [shape(each[part]) if each[part] else start(shape(seen[part])) for each in oracle.running]
                for part, start in starts.items()
            }
            return {part: np.stack(found) if case.kind == "steps" else found[0] for part, found in parts.items()}
        found = {part: shape(oracle.latest[part]) for part in ("mean", "sigma")}
        found |= {f"eval_{part}": shape(oracle.tested[part]) for part in ("mean", "sigma")}
        counts = "seen", "elements", "counted", "samples"
        found |= {name: np.array(getattr(oracle, name), dtype=float) for name in counts}
        for name, streams in (("stats", oracle.stats), ("grads", oracle.grads)):
            found[f"{name}_count"] = np.array(streams["mean"].count)
            for row, part in enumerate(("mean", "sigma")):
                for length in ("long", "short"):
                    value = getattr(streams[part], length)
                    if value is not None:
                        found[f"{name}_{length} {row}"] = shape(value)
        return found

    found, again, number = {}, iter(fed), 0
    for update, passes in enumerate(case.windows):
        for place, calls in enumerate(passes):
            made, previous = [], None
            for i in range(calls):
                x, dy, mask = (None if t is None else t.double().numpy() if t.is_floating_point() else t.numpy()
                               for t in next(again))  # fmt: skip
                x, dy = first(x), first(dy)
                given = x if previous is None or not case.chained else x + 0.5 * previous
                step = {"step": number % (STEPS + 1)} if streaming or case.kind == "steps" else {}
                call = oracle.forward(given, mask, **step)
                previous = call.output(oracle.bias)
                made.append((call, dy))
                found[f"{update}.{place}: output {i}"] = previous
                h1 = {name: value for name, value in state().items() if "grads" not in name}  # the loops fold both here
                found |= {f"{update}.{place} after call {i}: {name}": value for name, value in h1.items()}
                number += 1
            dgain, dbias, later = 0, 0, 0
            for i, (call, dy) in reversed(list(enumerate(made))):  # autograd runs later calls first
                dx, dg, db = oracle.backward(call, dy + later)
                dgain, dbias, later = dgain + dg, dbias + db, 0.5 * dx if case.chained else 0
                found[f"{update}.{place}: gradient of input {i}"] = dx
            found |= {f"{update}.{place}: gradient of weight": dgain, f"{update}.{place}: gradient of bias": dbias}
            found |= {f"{update}.{place}: {name}": value for name, value in state().items()}
        if streaming:
            oracle.weights_updated()
    last = layer.channel_dim == -1
    wide = ("output", "gradient of input")
    return {
        name: torch.from_numpy(np.moveaxis(value, 1, -1) if last and any(w in name for w in wide) else value)
        for name, value in found.items()
    }


@contextmanager
def watched():
    """Who computes: how often each backend is called, by its name and what it is asked for."""
    seen, patched = Counter(), []

    def wrapped(name, part, function):
        def call(*arguments):
            seen[name, part] += 1
            return function(*arguments)

        return call

    for name, backend in backends.registered().items():
        parts = [(backend, part, part) for part in ("forward", "backward", "repeat")]
        if backend.streams is not None:
            parts += [(backend.streams, "forward", "F"), (backend.streams, "backward", "G")]
        for owner, part, called in parts:
            if (owner, part) in patched:  # backends may have it in common
                continue
            setattr(owner, part, wrapped(name, called, getattr(owner, part)))
            patched.append((owner, part))
    try:
        yield seen
    finally:
        for backend, part in patched:
            delattr(backend, part)


def signature(case, device="cpu", compiled=False):
    """Of the calls of a case."""
    layer = layer_of(case)
    x = torch.zeros(case.shape, dtype=case.dtypes[0])
    last = layer.channel_dim == -1
    x = LAYOUTS[case.layouts[0]](x.movedim(1, -1).contiguous() if last else x)
    mask = torch.ones(()) if case.masked else None
    stored = torch.promote_types(case.dtypes[1] if layer.state_dict().get("mean") is not None else case.dtypes[0], F32)
    x = x.movedim(-1, 1) if last else x
    call = backends.signature_of(layer.config, x, layer.weight, layer.bias, mask, stored, compiled)
    return call._replace(device=device)


def serves(backend, case, device="cpu", compiled=False):
    return backends.registered()[backend].declines(signature(case, device, compiled)) is None


def serves_compiled(backend, case):
    """Whether F and G of a compiled case are a backend's; layers without them are the compiler's alone."""
    if case.kind != "streaming":
        return backend == "plain"
    streams, layer = backends.registered()[backend].streams, layer_of(case)
    dtype = torch.promote_types(case.dtypes[0], layer.state.mean.dtype)
    return streams is not None and streams.declines(layer.config, dtype, "cpu", case.masked) is None


def home(backend):
    """The device on which a backend serves the first calls that it serves; None if it serves nowhere."""
    for device in ("cpu", "cuda", "xpu", "mps"):
        if any(serves(backend, Case(kind=kind), device) for kind in KINDS):
            return device
    return None


def kinds_of(backend):
    """The kinds of layers that a backend serves with their first settings."""
    return [kind for kind in KINDS if serves(backend, Case(kind=kind), home(backend) or "cpu")]


tenths = st.integers(0, 10).map(lambda n: n / 10)


@st.composite
def runs(draw, kinds=("streaming",)):
    """Cases of all sizes, settings, layouts, types and schedules together."""
    kind = draw(st.sampled_from(kinds))
    space = draw(st.sampled_from([(), (), (1,), (3,), (33,), (3, 3), (5, 7), (8, 8), (3, 5, 1), (3, 2, 5)]))
    samples, channels = draw(st.integers(1, 20)), draw(st.integers(1, 70))
    if kind == "streaming" and draw(st.integers(0, 5)) == 0:
        samples = 65536 // (channels * prod(space)) + draw(st.integers(1, 5))  # enough work for threads
    elements = samples * prod(space)
    layouts = tuple(draw(st.sampled_from([name for name in LAYOUTS if name != "expanded"])) for _ in range(2))
    calls = st.lists(st.integers(1, 2), min_size=1, max_size=2).map(tuple)
    windows = tuple(draw(st.lists(calls, min_size=1, max_size=3)))
    settings, dtypes = {"channel_dim": draw(st.sampled_from([1, 1, -1]))}, Case.dtypes
    if kind == "streaming":
        center, warmup = draw(st.sampled_from(CENTERS)), draw(st.sampled_from([0, 256, None]))
        if elements < 8:  # few elements have a spread only about a running center and with neighbours
            center, warmup, channels = "zero" if center == "zero" else "running", warmup or 64, channels + 8
        short, decay = draw(tenths), draw(st.sampled_from([1.0, 0.9]))
        settings |= {
            "p": draw(st.sampled_from([1, 2])),
            "center": center,
            "warmup": 2.5 * elements if warmup is None else warmup,
            "guard": draw(st.booleans()),
            "alpha": (decay * (1 - short), decay * short),
            "beta": tuple(draw(tenths) for _ in range(3)),
            "kappa": tuple(draw(tenths) + 0.1 for _ in range(4)),
        }
        dtypes = draw(st.sampled_from([(F32, F32), (F32, F32), (BF16, F32), (BF16, BF16), (F32, BF16)]))
    elif kind == "sample":
        channels += 8
    elif elements < 8 or (kind == "instance" and prod(space) < 8):
        space = (3, 3)
    return Case(
        kind=kind,
        shape=(samples, channels, *space),
        settings=settings,
        layouts=layouts,
        dtypes=dtypes,
        absent=draw(st.sampled_from([(), (), ("weight", "bias"), ("weight",), ("bias",)])),
        windows=windows,
        scale=draw(st.sampled_from([0.03, 1.0, 100.0])),
        seed=draw(st.integers(0, 1000)),
    )


def agrees(case, backend, device="cpu", where=nullcontext):
    """The backend's training of a case is the law's. `where`: a context for the backend alone."""
    expected, fed = law_of(case)
    same(trained_by(backend, case, fed, device, where), expected, arithmetic(case))
