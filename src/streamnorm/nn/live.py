"""What evaluation uses, by the names that code for batch norms knows: tensors that others may hold and write to."""

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from ..backends.memory import outside_inference_mode
from ..engine import compat
from ..engine.context import has_values
from .base import Norm, moved
from .loading import spread, variance

NAMES = ("running_mean", "running_var")


class Live(NamedTuple):
    """`running_mean` and `running_var`, and what the layer put there last: anything else was written by others.

    The versions of tensors would not tell: writes to `tensor.data` are not counted.
    """

    running_mean: Tensor
    running_var: Tensor
    shown_mean: Tensor
    shown_var: Tensor
    own: tuple[Tensor, Tensor]  # the first two, unless others were put in their place

    @property
    def is_own(self) -> bool:
        return self.running_mean is self.own[0] and self.running_var is self.own[1]


class LiveStatistics(Norm):
    """A norm with `running_mean` and `running_var`, made when they are first asked for.

    They follow every training call, and evaluation uses what others wrote into them. What the layer keeps is not
    touched by that before it is saved or moved. Once nobody holds their memory, as after a state_dict was saved, they
    are forgotten, and cost nothing; those that were asked for as attributes last as long as the layer.
    """

    _live: Live | None = None
    _asked = False

    def _latest(self) -> tuple[Tensor, Tensor]:
        """Mean and sigma that evaluation uses, as far as nobody wrote others."""
        raise NotImplementedError

    def _take_over(self, mean: Tensor, sigma: Tensor) -> None:
        """Keep what others wrote."""
        raise NotImplementedError

    @property
    def running_mean(self) -> Tensor:
        """The mean that evaluation uses: always the same tensor, which may be written to."""
        return self._asked_for().running_mean

    @property
    def running_var(self) -> Tensor:
        """The variance that evaluation uses, sigma^2 - eps, in the same way."""
        return self._asked_for().running_var

    def __setattr__(self, name: str, value: Any) -> None:
        if name in NAMES:
            self._put(name, value)
        elif name == "config" and self._live is not None:  # with another eps, other numbers mean the same
            self._keep_writes()
            super().__setattr__(name, value)
            self._show()
        else:
            super().__setattr__(name, value)

    def _put(self, name: str, value: Any) -> None:
        """Let another tensor take the place of a live one, as when a buffer is set."""
        live = self._asked_for()
        old: Tensor = getattr(live, name)
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} is {type(value).__name__}: it must be a tensor of shape {tuple(old.shape)}")
        if value.shape != old.shape:
            raise ValueError(f"{name} has shape {tuple(old.shape)}: it cannot be set to {tuple(value.shape)}")
        if old.is_meta and not value.is_meta:  # a layer that is loaded tensor by tensor: its streams say the same
            self._live = None
            return
        value = value.detach() if isinstance(value, nn.Parameter) else value
        if (value.device, value.dtype) != (old.device, old.dtype):  # else the tensor itself, which a transform may own
            value = value.to(old)
        self._live = live._replace(**{name: value})

    def _asked_for(self) -> Live:
        if not self._asked:
            self._asked = True
        return self._made()

    def _made(self) -> Live:
        if self._live is None:
            mean, sigma = self._latest()
            with outside_inference_mode(), compat.outside_functorch(), torch.no_grad():
                var = variance(sigma, self.eps)
                self._live = _live(mean.clone(), var.clone(), mean.clone(), var)
        elif self._live.is_own and has_values(self._live.running_mean) and not self._is_written():
            self._show()  # a tensor of the state may have been set
        return self._live

    def _show(self, latest: tuple[Tensor, Tensor] | None = None) -> None:
        """The statistics are others now: those of the layer, or `latest`."""
        live = self._live
        if live is None:
            return
        mean, sigma = latest or self._latest()
        if not mean.device == sigma.device == live.running_mean.device:  # in the middle of being moved or loaded
            self._live = None
            return
        with outside_inference_mode(), torch.no_grad():
            if live.running_mean.shape != mean.shape:  # bound to a spatial size, or to none any more
                for tensor in live[:4]:
                    tensor.resize_(mean.shape)
            compat.foreach_copy_(live[2:4], (mean, sigma))  # in place: no memory is asked for, which might not be there
            live.shown_var.square_().sub_(self.eps)
            compat.foreach_copy_(live[:2], live[2:4])

    def _as_written(self, mean: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
        """These, but where others wrote something else: without reading a value, so that no device is waited for."""
        live = self._live
        if live is None or live.running_mean.shape != mean.shape:
            return mean, sigma
        mean = torch.where(live.running_mean == live.shown_mean, mean, live.running_mean)
        # A root may not give back the sigma that was squared: where all that is kept was copied, it is there too.
        same = (live.running_var == live.shown_var) | (live.running_var == variance(sigma, self.eps))
        return mean, torch.where(same, sigma, spread(live.running_var, self.eps))

    def _is_written(self) -> bool:
        live = cast(Live, self._live)
        if live.running_mean.is_cuda and torch.cuda.is_current_stream_capturing():
            return True  # that cannot be asked now
        return not (torch.equal(live[0], live[2]) and torch.equal(live[1], live[3]))

    def _keep_writes(self) -> None:
        """Keep what others wrote, where that can be asked: what is saved then says what evaluation uses."""
        live = self._live
        if live is None or not has_values(live.running_mean):
            return
        with outside_inference_mode(), torch.no_grad():
            if self._is_written():
                self._take_over(*self._as_written(*self._latest()))
                compat.foreach_copy_(live[2:4], live[:2])

    def _is_held(self) -> bool:
        """Whether somebody may read or write them."""
        live = self._live
        return self._asked or (live is not None and any(compat.is_aliased(tensor) for tensor in live.own))

    def _follow(self, latest: tuple[Tensor, Tensor] | None = None) -> None:
        """After a training call, with the statistics that it left."""
        if self._live is not None and (torch.compiler.is_compiling() or self._is_held()):
            self._show(latest)
        elif self._live is not None:
            self._live = None

    def _release(self) -> None:
        """Before an evaluation, which uses what others wrote until they let go."""
        if self._live is not None and has_values(self._live.running_mean) and not self._is_held():
            self._keep_writes()
            self._live = None

    def _save_live(self, destination: Any, prefix: str) -> None:
        """Into a state_dict; what is loaded are the statistics that they show."""
        for name, tensor in zip(NAMES, self._made()[:2], strict=True):
            destination[prefix + name] = tensor.detach()  # the same memory

    def __getstate__(self) -> dict[str, Any]:
        """A copy keeps what was written, and is held by nobody."""
        self._keep_writes()
        return {key: value for key, value in super().__getstate__().items() if key not in ("_live", "_asked")}

    def _apply(self, fn: Any, recurse: bool = True) -> "LiveStatistics":
        self._keep_writes()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self._live is not None:
            self._live = _live(*(moved(tensor, fn) for tensor in self._live[:4]))
        return self


def _live(mean: Tensor, var: Tensor, shown_mean: Tensor, shown_var: Tensor) -> Live:
    return Live(mean, var, shown_mean, shown_var, (mean, var))
