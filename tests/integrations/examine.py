"""What is asked of a model of somebody else's: converted, trained with few samples, saved, deployed, exported.

It needs torch and streamnorm alone; the models are in `zoo`.
"""

import copy
import io
import re
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stderr
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import streamnorm
from streamnorm import SampleNorm, StreamingNorm, convert
from streamnorm.convert.deploy import run_example
from streamnorm.convert.uses import tensors_in

NEAR = 1e-4  # of the largest number of a result
UPDATES, WINDOW = 3, 2  # batches per update


class Model(NamedTuple):
    """A model with small settings and random weights."""

    library: str
    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int], Any]  # for so many samples: a tensor, a tuple of arguments, or a dict of them by name
    rules: Callable[[nn.Module], Any] = lambda model: None  # for `convert`


class Outcome(NamedTuple):
    """Of one step: whether it went well, the largest error where results were compared, and what is to be said."""

    ok: bool
    error: float | None = None
    note: str = ""


def examine(model: Model) -> dict[str, Any]:
    """All steps, as what JSON can hold. A step that raises has failed; the others are tried all the same."""
    torch.manual_seed(0)
    old, x = shaken(model.build(), model.inputs), model.inputs(2)
    if is_blind(old, x):
        old = shaken(model.build(), model.inputs, larger=True)
    new, rules, lines = copy.deepcopy(old), model.rules(old), []
    convert(new, rules=rules, report=lines.append)
    row: dict[str, Any] = {"library": model.library, "name": model.name, **norms_of(old, new, lines)}
    row["before"] = attempt(lambda: trained(copy.deepcopy(old), model.inputs, sizes=(1,)))
    row["evaluation"] = attempt(lambda: same_evaluation(old, new, x))
    row["training"] = attempt(lambda: trained(new, model.inputs))
    row["round trip"] = attempt(lambda: round_trip(old, new, x, rules))
    row["to_batchnorm"] = attempt(lambda: deployed(old, new, x))
    row["fuse"] = attempt(lambda: fused(new, x))
    row["export"] = attempt(lambda: exported(old, new, x))
    return row


def attempt(step: Callable[[], Outcome]) -> dict[str, Any]:
    torch.manual_seed(1)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            outcome = step()
    except Exception as error:  # of the library, of torch or of ours: that is the result
        return Outcome(False, None, said(error))._asdict()
    ours = [str(warning.message) for warning in caught if "StreamingNorm" in str(warning.message)]
    return (outcome._replace(ok=False, note=ours[0]) if ours else outcome)._asdict()


def said(error: Exception) -> str:
    first = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {re.sub(r'(/[^ /]+)+/', '', first)}"[:160]


def shaken(model: nn.Module, inputs: Callable[[int], Any], larger: bool = False) -> nn.Module:
    """With running statistics as after training, and nothing that is constant: it could be lost without a trace.

    `larger`: also with weights of the size that keeps a signal alive, for models that begin with tiny ones.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.is_floating_point() or parameter.numel() == 1:
                continue
            spread, usual = float(parameter.std()), parameter[0].numel() ** -0.5
            if spread == 0:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
            elif larger and parameter.ndim > 1 and spread < usual / 2:
                parameter.mul_(usual / spread)
        tracked = [module for module in model.modules() if module._buffers.get("running_var") is not None]
        momenta = [getattr(module, "momentum", None) for module in tracked]
        for module in tracked:
            module.momentum = 1.0
        model.train()
        called(model, inputs(6))
        for module, momentum in zip(tracked, momenta, strict=True):
            module.momentum = momentum
            mean, var = module._buffers["running_mean"], module._buffers["running_var"]
            mean.mul_(torch.empty_like(mean).uniform_(0.8, 1.2))
            var.mul_(torch.empty_like(var).uniform_(0.8, 1.2)).clamp_(min=1e-3)  # or rounding would be all there is
    return model


def called(model: nn.Module, x: Any) -> Any:
    return model(**x) if isinstance(x, dict) else model(*x) if isinstance(x, tuple) else model(x)


# ---- what became of the norms ----------------------------------------------------------------------------------------


def norms_of(old: nn.Module, new: nn.Module, report: list[str]) -> dict[str, Any]:
    """How many of which class were converted, and which stayed, with the reason."""
    before = dict(old.named_modules())
    after = dict(new.named_modules())
    replaced = [name for name in before if name in after and type(after[name]) is not type(before[name])]
    left: dict[str, list[Any]] = {}
    for line in report[1:]:
        name, _, rest = (part.strip() for part in line.partition("  "))
        if "left alone: " in rest and name.split(", ")[0] in before:
            entry = left.setdefault(type(before[name.split(", ")[0]]).__name__, [0, rest.partition("left alone: ")[2]])
            entry[0] += 1
    return {"converted": dict(Counter(type(before[name]).__name__ for name in replaced)), "left": left}


# ---- the steps -------------------------------------------------------------------------------------------------------


def results(model: nn.Module, x: Any) -> list[Tensor]:
    model.eval()
    found = [tensor for tensor in tensors_in(run_example(model, x)) if tensor.is_floating_point()]
    if any(tensor.isnan().any() for tensor in found):
        raise ValueError("results that are not a number")
    return found


def difference(one: list[Tensor], other: list[Tensor]) -> float:
    """The largest difference, as a part of the largest number of each tensor."""
    if [tensor.shape for tensor in one] != [tensor.shape for tensor in other] or not one:
        raise ValueError("results of other shapes, or none")
    worst = 0.0
    for a, b in zip(one, other, strict=True):
        finite = a.isfinite()
        if not torch.equal(finite, b.isfinite()):
            raise ValueError("results that are not finite")
        if finite.any():
            scale = float(a[finite].abs().max())
            worst = max(worst, float((a - b)[finite].abs().max()) / max(scale, 1e-30))
    return worst


def near(one: list[Tensor], other: list[Tensor], note: str = "") -> Outcome:
    error = difference(one, other)
    return Outcome(error <= NEAR, error, note)


def same_evaluation(old: nn.Module, new: nn.Module, x: Any) -> Outcome:
    """Batch norms hand their statistics over. Those that start afresh are compared as norms of single samples."""
    expected = results(old, x)
    if is_blind(old, x):
        return Outcome(False, None, "the result does not depend on the norms")
    hand_over = copy.deepcopy(old)
    convert(hand_over, skip=lambda name, module: getattr(module, "running_mean", None) is None, report=None)
    error = difference(expected, results(hand_over, x))
    for kind, ref in ((is_layer_norm, "SP5"), (is_instance_norm, "SP2"), (is_one_group, "SP1")):
        single = copy.deepcopy(old)
        convert(single, SampleNorm, ref=ref, skip=lambda name, module, kind=kind: not kind(module), report=None)
        error = max(error, difference(expected, results(single, x)))
    results(new, x)
    return Outcome(error <= NEAR, error)


def is_blind(model: nn.Module, x: Any) -> bool:
    """Whether gains that are up to twice as large change nothing, so that nothing would be seen of what is wrong."""
    other = copy.deepcopy(model)
    gains = [norm._parameters.get("weight") for norm in other.modules() if "Norm" in type(norm).__name__]
    with torch.no_grad():
        for gain in gains:
            if gain is not None:
                gain.mul_(1 + torch.rand_like(gain))
    return any(gain is not None for gain in gains) and difference(results(model, x), results(other, x)) < 10 * NEAR


def is_layer_norm(norm: nn.Module) -> bool:
    return hasattr(norm, "normalized_shape")


def is_instance_norm(norm: nn.Module) -> bool:
    return isinstance(norm, nn.InstanceNorm1d | nn.InstanceNorm2d | nn.InstanceNorm3d) and norm.running_mean is None


def is_one_group(norm: nn.Module) -> bool:
    return getattr(norm, "num_groups", None) == 1


def trained(model: nn.Module, inputs: Callable[[int], Any], sizes: tuple[int, ...] = (1, 2)) -> Outcome:
    """A few updates with each size of batch, each of several batches; every streaming norm has to hear of them."""
    model.train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3, momentum=0.9)
    reached: set[nn.Module] = set()
    norms = [module for module in model.modules() if isinstance(module, StreamingNorm)]
    handles = [norm.register_forward_hook(lambda norm, args, y: reached.add(norm)) for norm in norms]
    for size in sizes:
        for _ in range(UPDATES):
            optimizer.zero_grad()
            for _ in range(WINDOW):
                loss(model, inputs(size)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
            optimizer.step()
    for handle in handles:
        handle.remove()
    deaf = [name for name, norm in model.named_modules() if norm in reached and not is_heard(norm)]
    broken = [name for name, value in model.state_dict().items() if not is_finite(value)]
    idle = len(norms) - len(reached)
    note = f"{deaf[0]} did not hear of updates" if deaf else f"{broken[0]} is not finite" if broken else ""
    return Outcome(not deaf and not broken, None, note or (f"{idle} norms not called" if idle else ""))


def is_heard(norm: nn.Module) -> bool:
    return isinstance(norm, StreamingNorm) and bool(norm.stats.pending) and not bool(norm.stats.empty)


def is_finite(value: Any) -> bool:
    return not isinstance(value, Tensor) or not value.is_floating_point() or bool(value.isfinite().all())


def loss(model: nn.Module, x: Any) -> Tensor:
    """The mean square of all that comes out; some models mask with infinities."""
    found = [tensor for tensor in tensors_in(called(model, x)) if tensor.is_floating_point() and tensor.requires_grad]
    return torch.stack([tensor[tensor.abs() < 1e4].square().mean() for tensor in found if tensor.numel()]).sum()


def round_trip(old: nn.Module, new: nn.Module, x: Any, rules: Any) -> Outcome:
    """Through a file into a model that was converted afresh, bit for bit; and the checkpoint of the model before."""
    file = io.BytesIO()
    torch.save(new.state_dict(), file)
    file.seek(0)
    other = convert(copy.deepcopy(old), rules=rules, report=None).train()  # some models keep things while they evaluate
    other.load_state_dict(torch.load(file, weights_only=True))
    one, two = new.state_dict(), other.state_dict()
    unequal = [name for name, value in one.items() if isinstance(value, Tensor) and not torch.equal(value, two[name])]
    if unequal or any(not torch.equal(a, b) for a, b in zip(results(new, x), results(other, x), strict=True)):
        return Outcome(False, None, f"{unequal[0] if unequal else 'the result'} is another")
    fresh, later = (convert(copy.deepcopy(each), rules=rules, report=None) for each in (old, noisy(old)))
    later.load_state_dict(old.state_dict(), strict=False)
    outcome = near(results(fresh, x), results(later, x))
    return outcome if outcome.ok else outcome._replace(note="a checkpoint from before")


def noisy(model: nn.Module) -> nn.Module:
    """A copy with other weights and statistics."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for value in other.state_dict().values():
            if isinstance(value, Tensor) and value.is_floating_point():
                value.add_(torch.rand_like(value))
    return other


def deployed(old: nn.Module, new: nn.Module, x: Any) -> Outcome:
    """The same without our norms; where all were batch norms, the state_dict is one for the model as it was."""
    expected = results(new, x)
    plain = streamnorm.to_batchnorm(new, example=x, report=None)
    if not any(isinstance(module, StreamingNorm) for module in new.modules()):
        return Outcome(True, None, "nothing to do")
    if any(isinstance(module, StreamingNorm) for module in plain.modules()):
        return Outcome(False, None, "a streaming norm is left")
    outcome = near(expected, results(plain, x))
    before = [type(m) for m in old.modules() if m._buffers.get("running_mean") is not None]
    if not before or len(before) != sum(isinstance(m, StreamingNorm) for m in new.modules()):
        return outcome
    back = copy.deepcopy(old)
    back.load_state_dict(plain.state_dict())
    error = difference(expected, results(back, x))
    return Outcome(outcome.ok and error <= NEAR, max(error, outcome.error or 0.0), "and back")


def fused(new: nn.Module, x: Any) -> Outcome:
    lines: list[str] = []
    expected = results(new, x)
    model = streamnorm.fuse(new, example=x, report=lines.append)
    total = next((line for line in lines if re.match(r"\d+ norms? folded", line)), "")
    return near(expected, results(model, x), total)


def exported(old: nn.Module, new: nn.Module, x: Any) -> Outcome:
    """The converted model as a program. If torch cannot export the model as it was, that is said, and no failure."""
    try:
        return near(results(new, x), program_results(new, x))
    except Exception:
        try:
            program_results(old, x)
        except Exception as error:
            return Outcome(True, None, f"not exported before either: {said(error)}")
        raise


def program_results(model: nn.Module, x: Any) -> list[Tensor]:
    args, kwargs = ((), x) if isinstance(x, dict) else (x if isinstance(x, tuple) else (x,), {})
    model = copy.deepcopy(model).eval()
    with torch.no_grad(), redirect_stderr(io.StringIO()):  # where torch prints the program that it gives up
        program = torch.export.export(model, args, kwargs, strict=False)
        found = program.module()(*args, **kwargs)
    return [tensor for tensor in tensors_in(found) if tensor.is_floating_point()]
