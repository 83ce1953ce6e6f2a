"""A second device, for machines that have none: its tensors are kept by the CPU, and refuse to meet those of the CPU.

Torch takes it for an accelerator: it has a type of its own, and an operation on tensors of both is an error, as it is
on a GPU. What it does not have: kernels of its own, streams, other rounding. Needs torch's experimental way to register
a device in Python, so whoever imports this does so in a process of its own.
"""

from collections import Counter
from contextlib import contextmanager

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "other"
READ = "read"  # counted among the operations: whatever the caller waits for
CROSSING = ("aten::_to_copy", "aten::copy_")  # the ways from one device to another


class Module:
    """torch.other"""

    waits = 0

    @staticmethod
    def is_available():
        return True

    @staticmethod
    def is_initialized():
        return True

    @staticmethod
    def _is_in_bad_fork():
        return False

    @staticmethod
    def current_device():
        return 0

    @staticmethod
    def device_count():
        return 1

    @staticmethod
    def get_amp_supported_dtype():
        return [torch.float16, torch.bfloat16]

    @staticmethod
    def manual_seed_all(seed):
        pass

    @staticmethod
    def synchronize(device=None):
        Module.waits += 1


_setup_privateuseone_for_python_backend(NAME, backend_module=Module)


class Other(torch.Tensor):
    """There; `kept` is where its numbers are."""

    @staticmethod
    def __new__(cls, kept):
        made = torch.Tensor._make_wrapper_subclass(
            cls, kept.shape, strides=kept.stride(), storage_offset=kept.storage_offset(), dtype=kept.dtype,
            device=torch.device(NAME, 0), dispatch_sizes_strides_policy=None,
        )  # fmt: skip
        made.kept = kept
        return made

    def __init__(self, kept):
        pass

    def __repr__(self):
        return f"Other({self.kept!r})"

    def tolist(self):  # torch reads the memory of a subclass not at all
        seen[READ] += 1
        return self.detach().kept.tolist()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})


seen = Counter()  # operations, by their names
sent = []  # messages to other processes: the operation, and how many numbers
moved = []  # numbers of elements that went from the CPU to the device


def is_cpu(x):
    return isinstance(x, torch.Tensor) and not isinstance(x, Other) and x.device.type == "cpu"


def send(name, func, args, inner, options):
    """A message to other processes: as in NCCL, nothing of the CPU is sent."""
    if name != "c10d::barrier":  # whose tensor is torch's own
        messages = tree_leaves(args[0])
        if not all(isinstance(each, Other) for each in messages):
            raise RuntimeError(f"{name}: no backend for tensors of the CPU, as in NCCL")
        sent.append((name, sum(each.numel() for each in messages)))
    out = func(*inner, **options)
    return (args[0], *out[1:]) if isinstance(out, tuple) else out


def run(func, args, kwargs):
    name = func._schema.name
    seen[name] += 1
    seen[READ] += name == "aten::_local_scalar_dense"
    there = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Other)]
    here = [x for x in tree_leaves((args, kwargs)) if is_cpu(x) and x.ndim]  # numbers may meet any tensor
    device = kwargs.get("device")
    device = None if device is None else torch.device(device).type
    if there and here and name not in CROSSING:
        raise RuntimeError(f"{name}: expected all tensors to be on one device, and found {NAME} and the CPU")
    inner = tree_map(lambda x: x.kept if isinstance(x, Other) else x, (args, dict(kwargs)))
    if device == NAME:
        inner[1]["device"] = torch.device("cpu")
    if name.startswith("c10d::"):
        return send(name, func, args, *inner)
    out = func(*inner[0], **inner[1])
    if name == "aten::copy_":
        if isinstance(args[0], Other) and is_cpu(args[1]):
            moved.append(args[1].numel())
        seen[READ] += is_cpu(args[0]) and isinstance(args[1], Other)
        return args[0]
    if name == "aten::_to_copy" and device == NAME and here:
        moved.append(here[0].numel())
    seen[READ] += bool(there) and device not in (None, NAME)
    if device not in (None, NAME) or not (there or device == NAME):
        return out
    wrapped = tree_map(lambda x: Other(x) if isinstance(x, torch.Tensor) else x, out)
    return return_and_correct_aliasing(func, args, kwargs, wrapped) if there else wrapped


class Factories(TorchDispatchMode):
    """What is made on the device by its name, and what goes there."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})


class Literals(TorchFunctionMode):
    """`torch.tensor` goes past modes of the dispatcher."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.tensor and kwargs.get("device") is not None and torch.device(kwargs["device"]).type == NAME:
            return func(*args, **kwargs | {"device": "cpu"}).to(NAME)
        return func(*args, **kwargs)


@contextmanager
def there():
    """Within, torch knows how to make tensors on the device."""
    with Factories(), Literals():
        yield
