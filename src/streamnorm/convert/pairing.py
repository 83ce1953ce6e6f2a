"""Which norms are folded into which layers, and why the others are not."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from torch import nn

from ..engine.compat import HOOKS
from ..nn.base import Norm
from .deploy import inside_recurrent_layers
from .places import Places
from .reporting import Reason
from .tracing import traced_uses
from .trial import Pairs, Trial
from .uses import BEYOND, FEEDS_OTHERS, SEVERAL, Use, tensors_in, why_apart, why_unfit
from .watching import watched_uses

Verdicts = dict[Norm, nn.Module | Reason]  # the layer that a norm is folded into, or why it is not

UNCALLED = Reason("nothing calls it")
UNSEEN = Reason("the example does not reach it")
RECURRENT = Reason("it is inside of a recurrent layer")
HEARD = Reason("a hook sees what goes from the layer to the norm")
DIFFERS = Reason("folded, the model would give something else for the example")
INCOMPARABLE = Reason("what the model gives for the example has no tensors to compare")


def verdicts_on(norms: list[Norm], model: nn.Module, places: Places, example: Any, before: Any) -> Verdicts:
    """By tracing; where that ends, by running the example, with a check of what was found so.

    Args:
        norms: the norms of the model that may be folded.
        model: it is as it was afterwards.
        places: of its modules.
        example: as in `fuse`.
        before: what the model gives for it.
    """
    uses, opaque = traced_uses(model)
    recurrent = inside_recurrent_layers(model)
    verdicts: Verdicts = {norm: RECURRENT for norm in norms if norm in recurrent}
    others = [norm for norm in norms if norm not in recurrent]
    verdicts |= _judged(others, uses, places, opaque, BEYOND if opaque else UNCALLED)
    if example is None:
        return verdicts
    trial = Trial(model, places, example, before, pairs_of(verdicts))
    if not trial.holds():
        raise RuntimeError(
            "fuse: the model gives something else for the example than before, so it uses a folded layer in a way that "
            "tracing did not see: use to_batchnorm"
        )
    beyond = [norm for norm, verdict in verdicts.items() if verdict is BEYOND]
    return verdicts | (_by_running(beyond, uses, trial) if beyond else {})


def pairs_of(verdicts: Verdicts) -> Pairs:
    return {layer: norm for norm, layer in verdicts.items() if isinstance(layer, nn.Module)}


def _by_running(norms: list[Norm], traced: list[Use], trial: Trial) -> Verdicts:
    """What an example shows of the norms that tracing did not reach."""
    if not any(tensor.numel() for _, before in trial.cases for tensor in tensors_in(before)):
        return dict.fromkeys(norms, INCOMPARABLE)
    trial.widen()
    try:
        watched = [use for example, _ in trial.cases for use in watched_uses(trial.model, example)]
    except Exception as error:  # of the model's own code, which ran well before
        return dict.fromkeys(norms, Reason(f"the example cannot be watched: {type(error).__name__}: {error}"))
    certain = [use for use in traced if use.why is not BEYOND]
    verdicts = _judged(norms, [*certain, *watched], trial.places, set(), UNSEEN)
    accepted = trial.accepted(pairs_of(verdicts))
    return {norm: why if isinstance(why, Reason) or why in accepted else DIFFERS for norm, why in verdicts.items()}


def _judged(norms: list[Norm], uses: list[Use], places: Places, opaque: set[nn.Module], absent: Reason) -> Verdicts:
    """All uses of a layer and a norm have to be of that pair; `absent` is said of norms without any."""
    of: dict[nn.Module | None, list[Use]] = defaultdict(list)
    for use in uses:
        of[use.layer].append(use)
        of[use.norm].append(use)
    hooked = [set(module.modules()) for module in places if any(getattr(module, hooks) for hooks in HOOKS)]

    def verdict(norm: Norm) -> nn.Module | Reason:
        layers = {use.layer for use in of[norm]}
        reason = why_unfit(norm) or _clearest(use.why for use in of[norm])
        if reason is not None or len(layers) != 1:
            return reason or (SEVERAL if layers else absent)
        layer = layers.pop()
        assert layer is not None  # or else there was a reason
        # What a module holds whose forward could not be traced may have uses that nobody saw.
        holders = {place.parent for place in (*places[layer], *places[norm])}
        # A hook on what holds only one of the two, or is one of them, sees what goes from one to the other.
        heard = any((layer in inside) != (norm in inside) for inside in hooked)
        others = [use.why or FEEDS_OTHERS for use in of[layer] if use.norm is not norm]
        whys = [
            why_apart(layer, norm),
            HEARD if heard else None,
            *others,
            None if holders.isdisjoint(opaque) else BEYOND,
        ]
        return _clearest(whys) or layer

    return {norm: verdict(norm) for norm in norms}


def _clearest(whys: Iterable[Reason | None]) -> Reason | None:
    """The first reason, that of what was not seen last."""
    return min((why for why in whys if why is not None), key=lambda why: why is BEYOND, default=None)
