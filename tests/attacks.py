"""Ways to move memory under a trained layer, each in a process of its own, which using freed memory would end.

`python tests/attacks.py` runs all of them and prints what became of each as JSON: "" if the law held.
"""

import copy
import json
import os
import pickle
import signal
import sys
import traceback
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
import torch.multiprocessing  # registers how tensors are pickled for other processes
from torch import nn
from torch.nn.utils import parametrize

from streamnorm import GRU, GeneralBatchNorm, SampleNorm, StreamingNorm
from streamnorm.core.state import FIELDS as NAMES
from streamnorm.core.state import from_dict, to_dict

torch.set_num_threads(1)
SHAPES = {"rows": (3, 4), "planes": (2, 4, 3, 3)}
WHEN = ("between steps", "between forward and backward")


def batches(shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, *shape, generator=generator)


def step(layer, seed, between=lambda: None):
    x, dy = batches(SHAPES[layer.shape], seed)
    x.requires_grad_()
    y = layer(x)
    between()
    y.backward(dy)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.sub_(0.1 * parameter.grad)
            parameter.grad = None
    layer.weights_updated()
    return y.detach(), x.grad


def trained(shape):
    layer = StreamingNorm(4, warmup=8)
    layer.shape = shape
    for seed in range(4):
        step(layer, seed)
    return layer


def churn():
    """Give freed memory to somebody else, so that what still uses it is noticed."""
    return [torch.full((n,), 1e30) for n in (1, 2, 3, 4, 8, 16, 25, 32) for _ in range(40)]


def same(layer, twin):
    theirs = twin.state_dict()
    assert layer.state_dict().keys() == theirs.keys()
    for name, tensor in layer.state_dict().items():
        assert torch.equal(tensor, theirs[name]), name


def moved_is_as_unmoved(move, shape, when):
    """The law: whatever moves the memory of a layer, it computes what its twin computes."""
    layer = trained(shape)
    twin = copy.deepcopy(layer)
    held = []

    def attack():
        held.extend([move(layer), churn()])

    for seed in range(10, 14):
        if when == WHEN[0]:
            attack()
        ours = step(layer, seed, attack if when == WHEN[1] else lambda: None)
        theirs = step(twin, seed)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        same(layer, twin)


def each_tensor(act, layer):
    return [act(tensor) for tensor in [*layer.parameters(), *to_dict(layer._state).values()]]


def set_data(tensor):
    old = tensor.data
    tensor.data = tensor.data.clone()
    del old


def set_storage(tensor):
    with torch.no_grad():
        tensor.set_(tensor.detach().clone())


def grow_storage(tensor):
    tensor.untyped_storage().resize_(tensor.untyped_storage().nbytes() + 4096)


def swapped(tensor):
    other = nn.Parameter(tensor.detach().clone()) if isinstance(tensor, nn.Parameter) else tensor.clone()
    torch.utils.swap_tensors(tensor, other)
    del other


def on_and_off(layer):
    parametrize.register_parametrization(layer, "weight", nn.Identity())
    parametrize.remove_parametrizations(layer, "weight")


def emptied_and_loaded(layer):
    saved = copy.deepcopy(layer.state_dict())
    layer.to_empty(device="cpu")
    layer.load_state_dict(saved)


MOVES = {
    "ForkingPickler.dumps(layer)": ForkingPickler.dumps,
    "ForkingPickler.dumps(state_dict)": lambda layer: ForkingPickler.dumps(layer.state_dict()),
    "pickle.dumps(layer)": pickle.dumps,
    "share_memory()": lambda layer: layer.share_memory() and None,
    "tensor.data = clone": partial(each_tensor, set_data),
    "tensor.set_(clone)": partial(each_tensor, set_storage),
    "storage.resize_(more)": partial(each_tensor, grow_storage),
    "storage.share_memory_": partial(each_tensor, lambda tensor: tensor.detach().share_memory_()),
    "swap_tensors": partial(each_tensor, swapped),
    "to_empty, load_state_dict": emptied_and_loaded,
    "load_state_dict(assign=True)": lambda layer: layer.load_state_dict(
        {name: tensor.clone() for name, tensor in layer.state_dict().items()}, assign=True
    ),
    "_apply": lambda layer: layer._apply(torch.clone) and None,
    "double().float()": lambda layer: layer.double().float() and None,
    "parametrization on and off": on_and_off,
}
# Of these autograd does not let the gain be replaced while a backward pass waits for it.
BETWEEN_STEPS_ONLY = {
    "tensor.set_(clone)",
    "swap_tensors",
    "to_empty, load_state_dict",
    "load_state_dict(assign=True)",
    "parametrization on and off",
    "double().float()",
}


def partly(change, names):
    """The law: a state of which a part is something else is refused with a sentence, and is as it was."""
    for name in names:
        for kept in SHAPES:
            layer = trained(kept)
            tensors = to_dict(layer._state)
            layer._state = from_dict(tensors | {name: change(tensors[name])})
            before = {key: tensor.clone() for key, tensor in to_dict(layer._state).items()}
            with pytest.raises(RuntimeError, match=rf"({name}|mean).*\.to\(\)"):
                layer(batches(SHAPES[kept], 0)[0])
            for key, tensor in to_dict(layer._state).items():
                assert tensor.is_meta or torch.equal(tensor, before[key]), key


def freed(which):
    """The law: a tensor whose memory was freed is refused with a sentence."""
    layer = trained("rows")
    x = batches(SHAPES["rows"], 0)[0]
    victim = {"x": x, "weight": layer.weight, "bias": layer.bias, "mean": layer._state.mean}[which]
    victim.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="has 0 bytes of memory"):
        layer(x)


def shrunk_steadily(steps):
    """The law: also of an input with gaps, which a layer has seen before, every element is in memory."""
    layer = StreamingNorm(4, warmup=8)
    wide = torch.randn(2000, 2048)
    x = wide[:, :4]
    for _ in range(steps):
        layer(x)
    wide.untyped_storage().resize_(32000)
    with pytest.raises(ValueError, match="has 32000 bytes of memory"):
        layer(x)


def freed_before_backward(make, which, left):
    """The law: what backward needs and is not there any more is refused with a sentence, before anything is pushed."""
    layer = make()
    x, dy = torch.randn(2000, 4, 5, requires_grad=True), torch.randn(2000, 4, 5)
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.detach().clone(), emptied)
    with hooks if which == "hook" else nullcontext():
        y = layer(x)
    before = copy.deepcopy(layer.state_dict())
    if which != "hook":
        {"x": x, "dy": dy}[which].untyped_storage().resize_(left)
    with pytest.raises(RuntimeError, match="resized or freed"):
        y.backward(dy)
    assert all(torch.equal(tensor, before[name]) for name, tensor in layer.state_dict().items())


def emptied(tensor):
    tensor.untyped_storage().resize_(0)
    return tensor


FREED_LATE = {
    "rows": lambda: StreamingNorm(4, warmup=8),
    "p = 3": lambda: StreamingNorm(4, p=3, warmup=8),
    "batch norm": lambda: GeneralBatchNorm(4),
    "instance norm": lambda: SampleNorm(4, ref="SP2"),
}


def odd_gradient(make, shape):
    """The law: how a gradient is kept does not matter."""
    layer = trained(shape)
    twin = copy.deepcopy(layer)
    x, dy = batches(SHAPES[shape], 5)
    x.requires_grad_()
    odd = make(dy)
    layer(x).backward(odd)
    ours, x.grad = x.grad, None
    twin(x).backward(odd.clone().contiguous() + 0 if not odd._is_zerotensor() else torch.zeros_like(dy))
    assert torch.equal(ours, x.grad)
    same(layer, twin)


ODD = {
    "negated view": torch._neg_view,
    "zero tensor": lambda dy: torch._efficientzerotensor(dy.shape),
    "expanded": lambda dy: dy.flatten()[:1].expand(dy.numel()).reshape(dy.shape),
    "transposed": lambda dy: dy.transpose(0, -1).contiguous().transpose(0, -1),
}


def hooked(unpack, shape, refused):
    """The law: a hook may keep saved tensors as it likes, and has to give them back in their shape."""
    layer = trained(shape)
    twin = copy.deepcopy(layer)
    x, dy = batches(SHAPES[shape], 5)
    x.requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.clone(), unpack):
        y = layer(x)
    before = {key: tensor.clone() for key, tensor in to_dict(layer._state).items()}
    if refused:
        with pytest.raises(RuntimeError, match="hook on saved tensors"):
            y.backward(dy)
        assert all(torch.equal(tensor, before[key]) for key, tensor in to_dict(layer._state).items())
        return
    y.backward(dy)
    ours, x.grad = x.grad, None
    twin(x).backward(dy)
    assert torch.equal(ours, x.grad)
    same(layer, twin)


HOOKS = {
    "to float64": (lambda tensor: tensor.double(), False),
    "negated twice": (lambda tensor: torch._neg_view(-tensor), False),
    "other strides": (lambda tensor: torch.stack([tensor, tensor], -1)[..., 0], False),
    "shorter": (lambda tensor: tensor[:1], True),
    "empty": (lambda tensor: tensor.new_empty(0), True),
}


def sequence_hooked(unpack, refused):
    net = GRU(3, 4)
    twin = copy.deepcopy(net)
    x = torch.randn(5, 2, 3)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.clone(), unpack):
        y = net(x)[0]
    if refused:
        with pytest.raises(RuntimeError, match="hook on saved tensors"):
            y.sum().backward()
        return
    y.sum().backward()
    twin(x)[0].sum().backward()
    for a, b in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-6)
    same(net, twin)


def sequence_partly(change):
    """A norm inside of a recurrent layer is looked at as one that is called alone."""
    net = GRU(3, 4)
    x = torch.randn(5, 2, 3)
    net(x)[0].sum().backward()
    norm = net.norms_l0.h[1]
    norm._state = replace(norm._state, sigma=change(norm._state.sigma))
    with pytest.raises(RuntimeError, match=r"\.to\(\)"):
        net(x)


def sequence_moved(move):
    net = GRU(3, 4)
    twin = copy.deepcopy(net)
    held = []
    for seed in range(4):
        x = batches((5, 2, 3), seed)[0]
        for each in (net, twin):
            each(x)[0].sum().backward()
        held += [move(net), churn()]
        same(net, twin)


ATTACKS = {
    **{
        f"{name}, {shape}, {when}": partial(moved_is_as_unmoved, move, shape, when)
        for name, move in MOVES.items()
        for shape in SHAPES
        for when in WHEN
        if when == WHEN[0] or name not in BETWEEN_STEPS_ONLY
    },
    "a part on meta": partial(partly, lambda tensor: tensor.to("meta"), sorted(NAMES)),
    "a part of another type": partial(
        partly,
        lambda tensor: tensor.to(torch.float16 if tensor.is_floating_point() else torch.int32),
        sorted(NAMES),
    ),
    **{f"freed {which}": partial(freed, which) for which in ("x", "weight", "bias", "mean")},
    **{f"shrunk under a layer that saw it {steps} times": partial(shrunk_steadily, steps) for steps in (0, 1, 3)},
    **{
        f"freed before backward: {which}, {left} bytes left, {name}": partial(freed_before_backward, make, which, left)
        for name, make in FREED_LATE.items()
        for which in ("x", "dy", "hook")
        for left in ((0, 4) if which != "hook" else (0,))
    },
    **{
        f"gradient: {name}, {shape}": partial(odd_gradient, make, shape)
        for name, make in ODD.items()
        for shape in SHAPES
    },
    **{
        f"hook: {name}, {shape}": partial(hooked, unpack, shape, refused)
        for name, (unpack, refused) in HOOKS.items()
        for shape in SHAPES
    },
    # torch's own products refuse another type.
    **{f"hook on a GRU: {name}": partial(sequence_hooked, *hook) for name, hook in HOOKS.items() if "64" not in name},
    "a part of a norm in a GRU on meta": partial(sequence_partly, lambda tensor: tensor.to("meta")),
    "a part of a norm in a GRU of another type": partial(sequence_partly, lambda tensor: tensor.double()),
    "GRU: ForkingPickler.dumps": partial(sequence_moved, ForkingPickler.dumps),
    "GRU: share_memory()": partial(sequence_moved, lambda net: net.share_memory() and None),
}


def outcome(attack):
    """What became of an attack in a process of its own."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        signal.alarm(60)
        said = ""
        try:
            attack()
        except BaseException:
            said = traceback.format_exc()
        os.write(writer, said.encode()[-4000:])
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, encoding="utf-8") as stream:
        said = stream.read()
    status = os.waitpid(child, 0)[1]
    return said if status == 0 else f"ended by signal {os.WTERMSIG(status)}"


if __name__ == "__main__":
    print(json.dumps({name: outcome(attack) for name, attack in ATTACKS.items()}))
    sys.exit(0)
