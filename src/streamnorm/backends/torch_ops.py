"""Layer, group, instance and batch normalization by torch's own operators, where these compute the same."""

from typing import Any

import torch
from torch import Tensor

from ..core.reference import CODES
from ..core.state import State
from . import Gradients, Plan, Result, Signature, unknown_settings
from .memory import is_vector, require_memory

BATCH_NORM, LAYER_NORM, INSTANCE_NORM = CODES["BA1"], CODES["SP1"], CODES["SP2"]
_aten = torch.ops.aten


class TorchOps:
    name, rank, sequences, streams, normalize = "torch_ops", 20, None, None, None

    def missing(self) -> str | None:
        return None

    def details(self) -> str:
        return ""

    def declines(self, call: Signature) -> str | None:
        config = call.config
        reasons = {
            "torch has no operator that streams statistics": call.streaming,
            f"torch's norms have p = 2, not {config.p:g}": config.p != 2,
            f"torch's norms have center='mean', not {config.center!r}": config.center != "mean",
            "eps is 0, with which torch divides by 0": config.eps == 0,
            "torch has no operator for this reference": config.ref not in (BATCH_NORM, LAYER_NORM, INSTANCE_NORM),
            "torch's norms take no mask": call.masked,
            "a setting is new to it": unknown_settings(config, ("ref", "p", "center", "eps"))
            if not call.streaming
            else False,
            "the compiler traces plain torch": call.compiled,
            f"it serves float32 and float64, not {call.dtype}": call.dtype not in (torch.float32, torch.float64),
            "statistics, gain and bias have to be of the type of the input": not _of_one_type(call),
            "it serves the CPU": call.device != "cpu",
            "a tensor is not an ordinary one": not call.ordinary,
            "torch's group norm has no gradient of a bias without a gain": call.gain is None and call.bias is not None,
            "the input is not contiguous": config.ref != BATCH_NORM and call.dims > 2 and call.layout != "planes",
        }
        return next((reason for reason, applies in reasons.items() if applies), None)

    def prepare(self, call: Signature, x: Tensor, weight: Any, bias: Any, state: State | None) -> Any:
        fit = is_vector(weight, x.shape[1], call.dtype) and is_vector(bias, x.shape[1], call.dtype)
        return () if fit else None

    def steady(self, prepared: Any) -> None:
        return None

    def forward(self, plan: Plan, x: Tensor, weight: Any, bias: Any, mask: Any, h1: Any, begins: bool) -> Result:
        ref, eps = plan.call.config.ref, plan.call.config.eps
        if ref == BATCH_NORM:
            y, *found = torch.native_batch_norm(_batched(x, x), weight, bias, None, None, True, 0.0, eps)
            y = _unbatched(y, x)
        elif x.ndim == 2:
            y, *found = torch.native_layer_norm(x, x.shape[1:], weight, bias, eps)
        else:
            y, *found = torch.native_group_norm(x, weight, bias, *_groups(x, ref), eps)
        return y, tuple(found), None

    def repeat(self, plan: Plan, x: Tensor, weight: Any, bias: Any, mask: Any, kept: Any) -> Result:
        return self.forward(plan, x, weight, bias, mask, None, True)

    def backward(
        self, plan: Plan, dy: Tensor, x: Tensor, weight: Any, mask: Any, saved: Any, kept: Any, h2: Any, needs: Any
    ) -> Gradients:
        ref, eps, wanted = plan.call.config.ref, plan.call.config.eps, list(needs[:3])
        require_memory(dy, x, weight, *saved)
        if ref == BATCH_NORM:
            batched = _batched(dy, x), _batched(x, x), weight, None, None
            dx, dgain, dbias = _aten.native_batch_norm_backward(*batched, *saved, True, eps, wanted)
            dx = _unbatched(dx, x) if needs[0] else None
        elif x.ndim == 2:
            size = list(x.shape[1:])
            dx, dgain, dbias = _aten.native_layer_norm_backward(
                dy.contiguous(), x.contiguous(), size, *saved, weight, weight, wanted
            )
        else:
            rest = weight, *_groups(x, ref), wanted
            dx, dgain, dbias = _aten.native_group_norm_backward(dy.contiguous(), x.contiguous(), *saved, *rest)
        return dx, dgain, dbias

    def statistics(self, plan: Plan, saved: Any) -> tuple[Tensor, ...]:
        mean, inverse = saved
        return mean.unsqueeze(0), inverse.reciprocal().unsqueeze(0)


def _of_one_type(call: Signature) -> bool:
    return all(dtype in (None, call.dtype) for dtype in (call.stored, call.gain, call.bias))


def _groups(x: Tensor, ref: Any) -> tuple[int, int, int, int]:
    """Samples, channels, locations and groups, as torch's group norm is told."""
    n, c = x.shape[:2]
    return n, c, x.numel() // (n * c), 1 if ref == LAYER_NORM else c


def _batched(values: Tensor, x: Tensor) -> Tensor:
    """`values`, as rows `(M, C)` if x is not contiguous: no copy where channels are last in memory."""
    if x.ndim == 2 or x.is_contiguous():
        return values.contiguous()
    return values.movedim(1, -1).reshape(-1, x.shape[1])


def _unbatched(y: Tensor, x: Tensor) -> Tensor:
    if x.ndim == 2 or x.is_contiguous():
        return y
    return y.view(x.movedim(1, -1).shape).movedim(-1, 1)


BACKEND = TorchOps()
