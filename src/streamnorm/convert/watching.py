"""Which layer feeds which norm, by running a model: every call of a module and every operation on tensors is seen."""

import gc
import weakref
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from ..engine.compat import EveryOperation, reads_value
from ..nn.base import Norm
from ..nn.recurrent.base import RecurrentBase
from .deploy import run_example
from .reporting import Reason
from .standardize import LAYERS
from .uses import ARGUMENTS, CHOSEN, FEEDS_OTHERS, KEPT, NO_LAYER, WEIGHT_READ, Use, tensors_in


class _Output:
    """What a call of a layer returned, and what became of it."""

    def __init__(self, layer: nn.Module, tensor: Tensor, callers: list[nn.Module], reads: int) -> None:
        self.layer, self.tensor, self.callers = layer, tensor, callers
        self.reads = reads  # how many values had been read by then
        self.norms: list[nn.Module] = []
        self.why: Reason | None = None  # it is no pair

    def use(self) -> Use:
        if self.why is None and len(self.norms) == 1:
            return Use(self.layer, self.norms[0])
        return Use(self.layer, None, self.why or FEEDS_OTHERS)


def watched_uses(model: nn.Module, example: Any) -> list[Use]:
    """The uses of layers and norms while the model runs on an example."""
    watch = _Watch(model)
    with watch.hooked(), EveryOperation(watch.see):
        result = run_example(model, example)
    uses = watch.uses()
    del result  # it may hold what a layer gave
    return uses


class _Watch:
    """The calls that are running, the outputs of layers so far, and their uses.

    Tensors are told apart by their memory, so that views of one count as it does. The outputs of layers are kept until
    the end: their memory is not given to others.
    """

    def __init__(self, model: nn.Module) -> None:
        inside = {part for layer in model.modules() if isinstance(layer, RecurrentBase) for part in layer.modules()}
        self.modules = [module for module in model.modules() if module not in inside]
        self.calls: list[nn.Module] = []  # innermost last
        self.outputs: dict[int, _Output] = {}  # by memory
        self.given: list[int] = []  # the memory of the inputs of norms that are running
        self.readers: list[nn.Module] = []  # who was running when a value was read
        self.found: list[Use] = []
        self.owners: dict[int, set[nn.Module]] = defaultdict(set)  # of parameters, by memory
        for layer in self.modules:
            for parameter in layer._parameters.values() if isinstance(layer, LAYERS) else ():
                if parameter is not None:
                    self.owners[_memory(parameter)].add(layer)

    @contextmanager
    def hooked(self) -> Iterator[None]:
        with ExitStack() as stack:
            for module in self.modules:
                before = module.register_forward_pre_hook(self.enter, prepend=True, with_kwargs=True)
                after = module.register_forward_hook(self.leave, always_call=True)
                stack.callback(after.remove)
                stack.callback(before.remove)
            yield

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if isinstance(module, Norm):
            self.found.extend(self.fed(module, args, kwargs))
            self.given.append(_memory(args[0]) if args and isinstance(args[0], Tensor) else 0)
        self.calls.append(module)

    def fed(self, norm: nn.Module, args: Any, kwargs: Any) -> Iterator[Use]:
        """A norm is called: with the output of a layer, which notes it, or with anything else."""
        output = next((self.outputs.get(_memory(tensor)) for tensor in tensors_in(args)), None)
        if len(args) != 1 or kwargs:
            yield Use(None, norm, ARGUMENTS)
        elif output is None or output.tensor is not args[0]:
            yield Use(None, norm, NO_LAYER)
        else:
            output.norms.append(norm)
            if not {*output.callers, *self.calls}.isdisjoint(self.readers[output.reads :]):
                output.why = output.why or CHOSEN
            yield Use(output.layer, norm)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self.calls.pop()
        if isinstance(module, Norm):
            self.given.pop()
        elif isinstance(module, LAYERS):
            memory = _memory(output) if isinstance(output, Tensor) else 0
            if not memory:
                self.found.append(Use(module, None, FEEDS_OTHERS))
                return
            if memory in self.outputs:  # of a layer whose output this one hands on
                self.found.append(self.outputs[memory].use())
            self.outputs[memory] = _Output(module, output, list(self.calls), len(self.readers))

    def see(self, operation: Any, arguments: tuple[Any, ...]) -> None:
        """An operation: on what a layer gave, outside of the norm that got it, or on a weight, outside of its layer."""
        if reads_value(operation) and self.calls:
            self.readers.append(self.calls[-1])
        for tensor in tensors_in(arguments):
            memory = _memory(tensor)
            output = self.outputs.get(memory)
            if output is not None and memory not in self.given:
                output.why = output.why or FEEDS_OTHERS
            owners = self.owners.get(memory, set())
            if owners and owners.isdisjoint(self.calls):
                self.found.extend(Use(owner, None, WEIGHT_READ) for owner in owners)

    def uses(self) -> list[Use]:
        """After the run: what somebody still holds of what went from a layer to a norm may be used by them later."""
        outputs = list(self.outputs.values())
        self.outputs.clear()
        held = {output: weakref.ref(output.tensor) for output in outputs if output.use().norm is not None}
        for output in outputs:
            del output.tensor
        if any(tensor() is not None for tensor in held.values()):
            gc.collect()
        for output, tensor in held.items():
            output.why = KEPT if tensor() is not None else None
        return [*self.found, *(output.use() for output in outputs)]


def _memory(tensor: Tensor) -> int:
    """Where its numbers begin; 0 for tensors that have none of their own, of which no more is known."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0
