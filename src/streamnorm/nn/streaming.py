"""Streaming Normalization: the layer of the paper, F and G around S and N."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import checkpointing, kernels, stream
from .base import Device, check_memory, is_number, numbers, outside_inference_mode
from .compiled import stream_compiled
from .dispatch import apply, compute_dtype, evaluate, fused_layout, fused_settings, fuses_compiled
from .distributed import check_group
from .fused import Plan, Receiver, plan_of, stream_layer
from .hints import hinted
from .kernels import Layout, addresses, all_plain, all_vectors
from .listener import PATIENCE
from .normref import NormRef
from .rules import Call, Rules, folded, stream_gradients, stream_statistics
from .stateful import Stateful
from .stream import State
from .transforms import exported, is_rewritten, transformed

# The settings with which a layer that is called once per weight update is a batch norm.
EXACT: dict[str, Any] = {"alpha": (0.0, 1.0), "beta": (0.0, 0.0, 1.0), "center": "mean", "warmup": 0, "guard": False}


class Begun(NamedTuple):
    """What a call begins with."""

    state: State
    collects: bool  # it takes statistics, and streams them into the state; else it is as in evaluation
    folds: bool = False  # a weight update may be pending
    grads_into: State | None = None  # if not into that of the layer as it is then

    def copied(self) -> "Begun":
        return self._replace(state=stream.copied(self.state))


@hinted
class StreamingNorm(Stateful):
    """Streaming Normalization: statistics of everything seen so far, for any batch size, one included.

    Training: fold if the weights were updated since the last call; s = S(x) is pushed into H1; s_hat = alpha1 * long
    + alpha2 * short; y = weight * (x - mean) / sigma + bias with s_hat. Backward: g = dE/ds_hat is pushed into H2;
    beta1 * long + beta2 * short + beta3 * g flows on through S(x) instead of g. Evaluation uses the latest s_hat and
    changes nothing. `short` averages exactly since the last weight update, `long` is the exponential average of those
    averages with `kappa` (by default alpha, for statistics and gradients alike).

    `ref` is a code of the paper (BA1-6, SP1-5) or a NormRef, `p` the order of the moment. `center`: c of sigma =
    (average |x - c|^p + eps^(p/2))^(1/p) is the "running" mean (setting B), the "mean" of the reference (A), or "zero"
    (C). For the first `warmup` elements per statistic the layer turns gradually from a layer norm into a streaming
    norm; 0 switches that off. `guard`: windows between weight updates with fewer than 32 elements per statistic count
    for less, and pass on no longer a gradient than their own; full ones follow the paper exactly. A mini-batch with
    values that are not finite is not pushed.

    `process_group`: whose processes merge their windows after each weight update, "world" for all of them.

    Optimizers of torch tell the layer of weight updates by themselves; see `streamnorm.attach` for the exceptions.
    Shapes and `mask` as in `SampleNorm`. State: `mean`, `sigma` (the latest s_hat), `stats` (H1), `grads` (H2).

    >>> norm = StreamingNorm(3)
    >>> y = norm(torch.randn(1, 3))  # one sample
    >>> norm.stats.long.shape, int(norm.stats.count)
    (torch.Size([2, 3]), 1)
    """

    def __init__(
        self,
        num_features: int,
        *,
        ref: str | NormRef = "BA1",
        p: float = 2.0,
        center: str = "running",
        alpha: Sequence[float] = (0.7, 0.3),
        beta: Sequence[float] = (0.7, 0.3, 0.0),
        kappa: Sequence[float] | None = None,
        warmup: float = 256,
        guard: bool = True,
        eps: float = 1e-5,
        affine: bool = True,
        channel_dim: int = 1,
        process_group: object = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            num_features,
            ref=ref,
            p=p,
            center=center,
            eps=eps,
            affine=affine,
            channel_dim=channel_dim,
            device=device,
            dtype=dtype,
        )
        if not (is_number(warmup) and warmup >= 0):
            raise ValueError(f"warmup={warmup!r}: must be a finite number of at least 0 (elements per statistic)")
        if not isinstance(guard, bool):
            raise ValueError(f"guard={guard!r}: must be True, or False for the paper's rule at any size of window")
        check_group(process_group)
        self.alpha = numbers("alpha", alpha, "long short")
        self.beta = numbers("beta", beta, "long short present")
        self.kappa = numbers(
            "kappa", self.alpha * 2 if kappa is None else kappa, "long-stats short-stats long-grads short-grads"
        )
        self.warmup = warmup
        self.guard = guard
        self.process_group = process_group
        self._begin(device, dtype)

    @property
    def collects(self) -> bool:
        kept = checkpointing.find(id(self)) if checkpointing.in_backward() else None
        return self.learns if kept is None else kept.collects

    def forward(self, x: Tensor, mask: Tensor | None = None, step: int = 0) -> Tensor:
        if step:
            self.remember_step()
        compiling = torch.compiler.is_compiling()
        again = None if compiling or mask is not None else self._as_before(x)
        if again is not None:
            return stream_layer(x, *again)
        x, mask = self.enter(x, mask)
        if compiling and self.collects:
            return self.leave(self._compiled(x, mask))
        begun = Begun(self._state if not exported() else self._handed_out(), False) if compiling else self.begin_call()
        state = begun.state
        if not begun.collects:
            mean, sigma = self.view(state.mean, state.sigma, x)
            return self.leave(evaluate(x, mean, sigma, self.weight, self.bias, mask))

        real = state is self._state  # not a call that backward repeats
        layout = fused_layout(x, mask)
        plan = self._planned(state) if layout else None
        if layout and plan:
            counted = self.weight is None or not self.weight.is_inference()
            if real and counted and self.channel_dim == 1 and self._scaler is None:
                self.__dict__["_known"] = x.shape, x.stride(), layout, plan
            return self.leave(stream_layer(x, self.weight, self.bias, (layout, plan, self.receiver(begun))))
        rules = self.rules
        with outside_inference_mode(), torch.no_grad():
            before = stream.bind(state, self.statistic_shape(x))
            before = folded(rules, before) if begun.folds else before
            after, kept = stream_statistics(rules, before, x.to(compute_dtype(x, before.mean)), mask)
        gradients = partial(self._stream_gradients, rules, kept, begun.grads_into)
        y = apply(x, self.weight, self.bias, mask, kept.mean, kept.sigma, kept.own, self.statistic, gradients)
        if real:
            with outside_inference_mode(), torch.no_grad():
                self._bind(after)
                stream.write(self._own(), after)
            self._marked = False
        return self.leave(y)

    def _as_before(self, x: Tensor) -> tuple[Any, Any, tuple[Layout, Plan, Receiver]] | None:
        """What the last fused call was served by, if nothing about the layer or its input is new: no other checks."""
        own = self.__dict__
        known = own.get("_known")
        if known is None or not own["training"] or self._paused or not kernels.available():
            return None
        if is_rewritten() or checkpointing.is_watched() or type(x) is not Tensor or not all_plain(x):
            return None
        shape, stride, layout, plan = known
        weight, bias = own["_parameters"].get("weight"), own["_parameters"].get("bias")
        if x.shape != shape or x.stride() != stride or (weight is None and own["affine"]):  # parametrized
            return None
        if not all_vectors(layout[2], weight, bias) or addresses(plan.readers) != plan.record:
            return None
        pulse = own["_pulse"]
        pulse.in_backward = False
        pulse.forwards += 1
        if pulse.forwards == PATIENCE or weight is None or weight._version != pulse.version:
            self._notice(weight)
        return weight, bias, (layout, plan, self.receive)

    def _planned(self, state: State | None = None) -> Plan | None:
        """How the kernels serve the layer, or a call of it that has a state of its own; None where they do not."""
        plan: Plan | None = self.__dict__.get("_plan")
        own = state is None or state is self._state
        settings = self._settings_of_kernels() if kernels.available() else None
        if own and plan is not None and settings == plan.settings and addresses(plan.readers) == plan.record:
            return plan
        state = self._state if state is None else state
        if settings is None or not kernels.holds(state, self.num_features):
            return None
        plan = plan_of(settings, state)
        if own:
            self.__dict__["_plan"] = plan
        return plan

    def _compiled(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """A training call as the compiler sees it."""
        if self._scaler is not None:
            raise RuntimeError(
                "a streaming layer with a GradScaler attached cannot be compiled: detach the scaler and train in "
                "bfloat16, or leave the model uncompiled"
            )
        state = self._state
        if not state.mean.numel():
            raise RuntimeError(
                f"{self.ref} is bound to a spatial size by its first training call, which has to run uncompiled: call "
                "the model once before torch.compile"
            )
        vectors = self.weight, self.bias, state.mean
        fused = mask is None and fuses_compiled(self.statistic, x, vectors, self.num_features)
        return stream_compiled(x, self.weight, self.bias, mask, self.rules, fused, state)

    def _bind(self, like: State) -> None:
        """The first call binds a layer whose statistics have a location to a spatial size."""
        if like.mean.shape != self._state.mean.shape:
            self._state = stream.new_state(tuple(like.mean.shape), like.mean)

    def _stream_gradients(
        self, rules: Rules, call: Call, into: State | None, grad_mean: Tensor, grad_sigma: Tensor
    ) -> tuple[Tensor, Tensor]:
        """G for the backward pass of a call, into the state of the layer as it is then, or into another."""
        if into is None:
            self._backward_runs()
        state = self._settled() if into is None else into
        scale = None if self._scaler is None else state.loss_scale
        shape = self.ref.statistic_shape(self.num_features, tuple(grad_mean.shape[2:]))
        # After a reset between forward and backward there may be no stream of this shape any more: start one.
        known = tuple(state.mean.shape) == shape
        grads = state.grads if known else stream.new_stream(shape, state.mean)
        grads, passed_on = stream_gradients(rules, grads, call, grad_mean, grad_sigma, scale)
        if known:
            stream.write_stream(state.grads, grads)
        return passed_on

    def begin_call(self) -> Begun:
        """What a call begins with. One that backward repeats begins as it did at first, on a copy."""
        repetition = checkpointing.begin(id(self), self.collects, lambda: self._begin_call().copied())
        if repetition is None:
            return self._begin_call()
        begun: Begun = repetition.kept.copied()
        # Unless backward goes on through the repetition itself, gradients of it are for nobody.
        return begun if repetition.reentrant else begun._replace(grads_into=begun.state)

    def _begin_call(self) -> Begun:
        if not self.collects:
            state = self._state
            check_memory(mean=state.mean, sigma=state.sigma)
            if torch.is_grad_enabled() or transformed():  # backward may come after later calls changed the statistics
                state = replace(state, mean=state.mean.clone(), sigma=state.sigma.clone())
            return Begun(state, False)
        if self._planned() is None:  # then nobody has looked at all of it
            self._check_state()
        self._forward_runs(self._parameters.get("weight"))
        state = self._settled()
        if self._marked and self.process_group is not None:
            # Not by the kernels, which round otherwise: a process without a batch folds in plain torch.
            with outside_inference_mode(), torch.no_grad():
                stream.write(state, folded(self.rules, state))
            self._marked = False
        return Begun(state, True, self._marked)

    def receiver(self, begun: Begun) -> Receiver:
        """Where the backward pass of a fused call streams its gradients."""
        into = begun.grads_into
        if into is None:
            return self.receive
        scale = 1.0 if self._scaler is None else float(into.loss_scale)
        return lambda: (into, None, scale)

    def receive(self) -> tuple[State, bytes | None, float]:
        """What the backward pass of a fused call streams its gradients into: state, its record, scale of the loss."""
        self._backward_runs()
        known = self.__dict__.get("_known")
        if known is not None and addresses(known[3].grads_readers) == known[3].grads_record:
            return known[3].state, known[3].record, 1.0
        state = self._settled()
        return state, None, 1.0 if self._scaler is None else float(state.loss_scale)

    def fused_settings(self) -> bytes | None:
        """The settings for the kernels; None where they do not serve this layer as it is."""
        plan = self._planned()
        return None if plan is None else plan.settings

    def _settings_of_kernels(self) -> bytes | None:
        statistic = self.ref, self.p, self.center, self.eps
        streaming = tuple(self.alpha), tuple(self.beta), tuple(self.kappa), self.warmup, self.guard
        return fused_settings(statistic, streaming, (self.weight, self.bias), self.num_features)

    @contextmanager
    def _exactly(self) -> Iterator[None]:
        before = {name: getattr(self, name) for name in EXACT}
        for name, value in EXACT.items():
            setattr(self, name, value)
        try:
            yield
        finally:
            for name, value in before.items():
                setattr(self, name, value)
        calls = int(self._state.stats.count)
        if calls > 1:
            raise RuntimeError(
                f"LBFGS needs the exact gradient of its loss, which {type(self).__name__} has only if an evaluation "
                f"calls it once, and since the last update it was called {calls} times: give it all data in one call, "
                "or take another optimizer, or a SampleNorm"
            )

    def extra_repr(self) -> str:
        group = {} if self.process_group is None else {"process_group": self.process_group}
        own = {"alpha": self.alpha, "beta": self.beta, "kappa": self.kappa, "warmup": self.warmup, "guard": self.guard}
        return self.settings(**own, **group)
