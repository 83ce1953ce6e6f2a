"""Decoupled accumulation and update (section 2 of the paper), and the Manhattan update rule."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS
from torch.optim.optimizer import Optimizer

from ..core.config import is_number
from ..engine import compat
from ..nn.base import check_count


class DecoupledUpdate:
    """Update the weights every `batches_per_update` mini-batches, on the average gradient of those (DAU).

    `step()` after each mini-batch counts it; each n-th call divides the accumulated gradients by the number of calls,
    steps `optimizer` and clears the gradients. `zero_grad()` inside a window does nothing, so an ordinary training
    loop stays as it is. A closure runs at each call. `flush()` updates with what a last, short window has. Schedulers
    take `.optimizer`; `calls` is 0 right after an update. Not an Optimizer itself, and not for a GradScaler, which
    has to see each step: accumulate in the loop there.

    Args:
        optimizer: an optimizer of torch, other than LBFGS.
        batches_per_update: n, the number of mini-batches of a window.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = DecoupledUpdate(torch.optim.SGD(model.parameters(), lr=0.1), batches_per_update=2)
        >>> for x in torch.ones(4, 1, 2):
        ...     optimizer.zero_grad()
        ...     model(x).sum().backward()
        ...     _ = optimizer.step()
        >>> optimizer.flush()
    """

    def __init__(self, optimizer: Optimizer, batches_per_update: int) -> None:
        check_count("batches_per_update", batches_per_update)
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"DecoupledUpdate wraps a torch optimizer, not {type(optimizer).__name__}")
        if isinstance(optimizer, LBFGS):
            raise ValueError("DecoupledUpdate cannot wrap LBFGS: it evaluates again batches that are gone")
        self.optimizer = optimizer
        self.batches_per_update = batches_per_update
        self.calls = 0  # mini-batches in the window so far

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Count a mini-batch, and update if it completes the window. Returns what `closure` returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.calls += 1
        if self.calls >= self.batches_per_update:
            self.flush()
        return loss

    def flush(self) -> None:
        """Update with the average over the calls made so far; nothing to do in an empty window."""
        if self.calls == 0:
            return
        if self.calls > 1:
            gradients = [p.grad for p in self._parameters() if p.grad is not None]
            if gradients:
                compat.foreach_div_(gradients, self.calls)
        self.optimizer.step()
        self.calls = 0
        self.optimizer.zero_grad()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, unless they belong to a window that is not complete."""
        if self.calls == 0:
            self.optimizer.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state and the window: its gradients so far, and how many calls they come from."""
        inside = self.calls > 0
        gradients = [p.grad.clone() if inside and p.grad is not None else None for p in self._parameters()]
        return {"optimizer": self.optimizer.state_dict(), "calls": self.calls, "gradients": gradients}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken; refused whole if it does not fit."""
        if set(state_dict) != {"optimizer", "calls", "gradients"}:
            raise ValueError(f"state_dict has the keys {sorted(state_dict)}: it is not that of a DecoupledUpdate")
        parameters, gradients, calls = self._parameters(), state_dict["gradients"], state_dict["calls"]
        shapes = [None if g is None else tuple(g.shape) for g in gradients]
        if len(shapes) != len(parameters):
            raise ValueError(
                f"state_dict has gradients of {len(shapes)} parameters, the optimizer has {len(parameters)}"
            )
        for i, (p, shape) in enumerate(zip(parameters, shapes, strict=True)):
            if shape is not None and shape != tuple(p.shape):
                raise ValueError(
                    f"state_dict has a gradient of shape {shape} for parameter {i}, which has {tuple(p.shape)}"
                )
        if not 0 <= calls < self.batches_per_update:
            raise ValueError(
                f"state_dict is {calls} calls into its window, batches_per_update={self.batches_per_update}"
            )
        self.optimizer.load_state_dict(state_dict["optimizer"])
        self.calls = calls
        for p, g in zip(parameters, gradients, strict=True):
            p.grad = None if g is None else g.to(p, copy=True)

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def __repr__(self) -> str:
        return f"DecoupledUpdate({self.optimizer!r}, batches_per_update={self.batches_per_update})"


class Manhattan(Optimizer):
    """The Manhattan update rule: steps of one size, along the sign of the gradient.

    d = sign(g) + weight_decay * w; buf = momentum * buf + d; w <- w - lr * buf, with sign(0) = 0.

    Args:
        params: parameters, or groups of them, as for optimizers of torch.
        lr: the size of a step.
        momentum: what is kept of earlier directions.
        weight_decay: what is added of the weights themselves.

    Example:
        >>> w = torch.nn.Parameter(torch.tensor([1.0, 1.0]))
        >>> (w * torch.tensor([3.0, -0.1])).sum().backward()
        >>> _ = Manhattan([w], lr=0.5).step()
        >>> w.tolist()
        [0.5, 1.5]
    """

    def __init__(self, params: Iterable[Any], lr: float, momentum: float = 0.0, weight_decay: float = 0.0) -> None:
        given = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        for name, value in given.items():
            real = value if isinstance(value, Tensor) else is_number(value) and value >= 0
            if real is False:
                raise ValueError(f"{name}={value!r}: must be a finite number of at least 0")
        super().__init__(params, given)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient. Returns what `closure` returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if not parameters:
                continue
            if any(p.grad.is_sparse for p in parameters):
                raise RuntimeError("Manhattan does not take sparse gradients: use sparse=False in the embedding")
            directions = list(compat.foreach_sign([p.grad for p in parameters]))
            if group["weight_decay"]:
                compat.foreach_add_(directions, parameters, alpha=group["weight_decay"])
            if group["momentum"]:
                directions = self._accumulate(parameters, directions, group["momentum"])
            compat.foreach_add_(parameters, directions, alpha=-group["lr"])
        return loss

    def _accumulate(self, parameters: list[Tensor], directions: list[Tensor], momentum: float) -> list[Tensor]:
        for p, d in zip(parameters, directions, strict=True):
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(d)
        buffers = [self.state[p]["momentum_buffer"] for p in parameters]
        compat.foreach_mul_(buffers, momentum)
        compat.foreach_add_(buffers, directions)
        return buffers
