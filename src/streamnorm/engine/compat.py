"""Every private symbol of torch that we lean on, one function each; tests/test_compat.py has a canary for each.

Where a version of torch lacks one, the function says what follows.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from inspect import unwrap
from operator import attrgetter
from types import FrameType
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules.batchnorm import _NormBase
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

# ---- tensors --------------------------------------------------------------------------------------------------------


# Whether these are zeros without memory, as forward-mode differentiation makes them.
is_zero_tensor: Callable[[Tensor], bool] = Tensor._is_zerotensor
# How often a tensor was written to.
version_of: Callable[[Tensor], int] = attrgetter("_version")
_storage_uses: Any = getattr(torch._C, "_storage_Use_Count", None)


def is_aliased(tensor: Tensor) -> bool:
    """Whether another tensor has the same memory; if torch does not tell, one may."""
    return _storage_uses is None or _storage_uses(tensor.untyped_storage()._cdata) > 2  # the tensor, and the question


# In-place operations on lists of tensors, which torch's own optimizers are made of.
foreach_add_: Callable[..., None] = torch._foreach_add_
foreach_copy_: Callable[..., None] = torch._foreach_copy_
foreach_div_: Callable[..., None] = torch._foreach_div_
foreach_mul_: Callable[..., None] = torch._foreach_mul_
foreach_norm: Callable[..., Sequence[Tensor]] = torch._foreach_norm
foreach_sign: Callable[..., Sequence[Tensor]] = torch._foreach_sign


# ---- autograd and transforms ----------------------------------------------------------------------------------------


# What `Function.apply` calls after it has looked for torch.func, which a steady call has done already.
def apply_of(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    return super(torch.autograd.Function, function).apply  # type: ignore[misc, no-any-return]


functorch_is_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
# A context for tensors that outlive a transform of torch.func.
outside_functorch: Callable[[], Any] = torch._C._DisableFuncTorch
is_tracing: Callable[[], bool] = torch._C._is_tracing
# The backward pass that runs in this thread, -1 for none.
current_backward_pass: Callable[[], int] = torch._C._current_graph_task_id


def is_rewritten() -> bool:
    """Whether a call that is not compiled is transformed: by torch.func, forward-mode differentiation or tracing."""
    return functorch_is_active() or forward_ad._current_level >= 0 or is_tracing()


def assumed_constant(function: Callable[[], bool]) -> Callable[[], bool]:
    """What torch.compiler.assume_constant_result does, which would import the compiler: 2 s of every process."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


class EveryOperation(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context in which `see(operation, arguments)` is called before each operation on tensors, whoever asks for it.

    What reads the memory of a tensor by itself, as `tolist` does, is not seen.
    """

    def __init__(self, see: Callable[[Any, tuple[Any, ...]], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.see = see

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # asked by new versions of torch, which else import the compiler: 2 s of every process

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.see(func, (*args, *(kwargs or {}).values()))
        return func(*args, **(kwargs or {}))


def reads_value(operation: Any) -> bool:
    """Whether an operation, of `EveryOperation`, hands a number of a tensor to Python, which may decide by it."""
    return operation in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default)


def repeats_in_backward() -> bool:
    """Whether the node that the compiler makes now is one that it may run again in backward."""
    return "ac_graph_id" in torch.fx.traceback.get_current_meta()


# ---- activation checkpointing ---------------------------------------------------------------------------------------

# Which hooks are in force on saved tensors: since torch 2.5. Without it, only reentrant checkpoints are served.
top_hooks: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
_Frame: Any = getattr(checkpoint, "_CheckpointFrame", ())
_REENTRANT_FIRST = checkpoint.CheckpointFunction.forward.__code__
_REENTRANT_AGAIN = checkpoint.CheckpointFunction.backward.__code__


def packing_hooks() -> list[Any]:
    """The hooks in force on saved tensors, innermost first."""
    hooks: list[Any] = []
    while top_hooks is not None and (top := top_hooks(True)) is not None:
        hooks.append(top)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    for pack, unpack in reversed(hooks):
        torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)
    return [pack for pack, _ in hooks]


def checkpoint_of(pack: Any) -> tuple[Any, bool]:
    """What torch keeps the segment of a hook in, and whether the hook belongs to a repetition; None for other hooks."""
    for cell in getattr(unwrap(pack), "__closure__", None) or ():
        content = cell.cell_contents
        again = isinstance(content, ref)
        frame = content() if again else content
        if isinstance(frame, _Frame):
            return frame, again
    return None, False


def _stack() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def reentrant_segments() -> tuple[list[Any], Any]:
    """Reentrant checkpoints on the stack: those that run for the first time, and the one that is repeated."""
    firsts: list[Any] = []
    for frame in _stack():
        code = frame.f_code
        if code is _REENTRANT_FIRST:
            firsts.append(frame.f_locals["ctx"])
        elif code is _REENTRANT_AGAIN:
            return firsts, frame.f_locals["ctx"]
        elif top_hooks is None and code.co_name == "unpack_hook" and code.co_filename == checkpoint.__file__:
            raise RuntimeError(
                f"torch {torch.__version__} does not tell which part of a network it runs again: "
                "torch.utils.checkpoint with use_reentrant=False needs a newer torch"
            )
    return firsts, None


# ---- modules and optimizers -----------------------------------------------------------------------------------------


# What a module keeps its hooks in.
HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def move_hooks(old: nn.Module, new: nn.Module) -> None:
    """The dictionaries themselves: the handles that were given out hold on to them."""
    for name in HOOKS:
        hooks = getattr(old, name)
        hooks.update(getattr(new, name))
        setattr(new, name, hooks)
        for hook in hooks.values():
            if getattr(hook, "with_module", False):  # torch's wrapper of hooks that are told their module
                hook.module = ref(new)
    if old._is_full_backward_hook is not None:
        new._is_full_backward_hook = old._is_full_backward_hook


_CALL = nn.Module.__call__.__code__


def calling_modules(layer: nn.Module) -> Iterator[nn.Module]:
    """The modules whose calls are on the stack, innermost first, and the one whose method calls the layer.

    Variables of no other frames are read: before Python 3.13 a frame that is asked for them keeps them.
    """
    inner = None
    for frame in _stack():
        if frame.f_code is _CALL:
            inner = frame.f_locals["self"]
            yield inner
        elif inner is layer and frame.f_code.co_varnames[:1] == ("self",):
            inner = frame.f_locals.get("self")
            if isinstance(inner, nn.Module):
                yield inner
        else:
            inner = None


def has_hooks(module: nn.Module) -> bool:
    """Whether calling the module may do more than its class says."""
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    sides = "forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks"
    everywhere = [f"_global_{side}" for side in sides]
    return any(hooks) or "forward" in vars(module) or any(getattr(nn.modules.module, name, ()) for name in everywhere)


# What computes when one of torch's convolutions or linear layers is called, and what a subclass may put in its place.
LAYER_METHODS = ("forward", "_conv_forward", "_output_padding", "__call__", "_call_impl", "__getattr__")


# The base of torch's batch and instance norms.
torch_norm_base = _NormBase


def uncompiled(module: nn.Module) -> nn.Module:
    """The module inside of the wrapper that torch.compile(module) returns; others as they are."""
    inner: nn.Module = getattr(module, "_orig_mod", module)
    return inner


def leave_encoder_fast_path(encoder: nn.Module) -> None:
    """Keep one of torch's encoders to its slow path, which calls its norms.

    The attributes that are set here are read for nothing but the decision to do so, and stay in copies.
    """
    if isinstance(encoder, nn.TransformerEncoderLayer):
        encoder.activation_relu_or_gelu = 0
    else:
        encoder.use_nested_tensor = False  # type: ignore[assignment]


def stacklevel_outside(*folders: str) -> int:
    """Of the first caller whose file is in none of these, for a warning that names a line of the user."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(folders):
        frame, level = frame.f_back, level + 1
    return level


def within_sharded_step() -> bool:
    """Whether a ZeroRedundancyOptimizer lets an inner optimizer make a step, on the parameters of one process."""
    sharding = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return sharding is not None and any(frame.f_code.co_filename == sharding.__file__ for frame in _stack())
