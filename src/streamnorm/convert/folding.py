"""`fuse`: norms folded into the convolution or linear layer before them."""

from collections import Counter
from typing import Any, TypeVar, cast

from torch import nn

from ..nn.base import Norm
from .deploy import deployed, run_example
from .pairing import pairs_of, verdicts_on
from .places import Report, find_places, names_of, opened, returned, say, swap, title
from .reporting import Reason
from .standardize import bake
from .trial import folded_parameters, is_close

Model = TypeVar("Model", bound=nn.Module)


def fuse(model: Model, *, example: Any = None, inplace: bool = False, report: Report = print) -> Model:
    """A copy of a model for deployment whose norms are folded into the convolution or linear layer before them.

    That is done where a layer feeds the norm and nothing else, and the norm has no location; the norm becomes
    `nn.Identity`. The other norms become what `to_batchnorm` makes of them. Weights that `weight_standardize` computes
    become ordinary ones first. Evaluation is the same.

    Args:
        model: a model with norms of streamnorm.
        example: as in `to_batchnorm`. Where torch.fx cannot trace the model, norms are folded by how it runs on the
            example, and results before and after are compared.
        inplace: True changes the model itself; folded layers get new Parameter objects.
        report: gets a sum, a line for each norm and for each weight that was standardized, and what to do.

    Example:
        >>> from streamnorm import StreamingNorm
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), StreamingNorm(8), nn.ReLU())
        >>> fused = fuse(model.eval())
        1 norm folded, none left
        1: StreamingNorm(8) folded into 0
    """
    root = opened(model, "fuse", inplace)
    before = run_example(root, example)
    baked = bake(find_places(root))
    places = find_places(root)  # a layer that was parametrized has lost what it held
    replacements, lines = deployed(root, places)
    verdicts = verdicts_on([norm for norm in replacements if isinstance(norm, Norm)], root, places, example, before)
    folded = {layer: folded_parameters(layer, norm) for layer, norm in pairs_of(verdicts).items()}
    for norm, verdict in verdicts.items():
        if isinstance(verdict, Reason):
            lines[norm] += f"; not folded: {verdict.why}"
        else:
            replacements[norm] = nn.Identity()
            lines[norm] = f"{names_of(places[norm])}: {title(norm)} folded into {names_of(places[verdict])}"
    changed = swap(root, places, replacements)
    for layer, parameters in folded.items():
        for name, parameter in parameters.items():
            setattr(layer, name, parameter)
    if not is_close(before, run_example(changed, example)):
        raise RuntimeError(
            "fuse: without its norms the model gives something else for the example than before, so it does more with "
            "them than to call them: deploy it as it is" + (", and load the weights again" if inplace else "")
        )
    say(report, [*baked, *_summed(list(lines.values()), list(verdicts.values()))], root)
    return cast(Model, returned(model, root, changed, inplace))


def _summed(lines: list[str], verdicts: list[nn.Module | Reason]) -> list[str]:
    """A sum before the lines about norms, and what to do after them; `lines` has those that are left alone too."""
    if not lines:
        return []
    reasons = [verdict for verdict in verdicts if isinstance(verdict, Reason)]
    folded, left = len(verdicts) - len(reasons), len(lines) - len(verdicts) + len(reasons)
    whys = "; ".join(f"{why} ({count})" for why, count in Counter(reason.why for reason in reasons).most_common())
    told = f"{folded} norm{'s' * (folded != 1)} folded, {left or 'none'} left"
    advice = dict.fromkeys(f"{reason.why}: {reason.advice}" for reason in reasons if reason.advice)
    return [told + (whys and f": {whys}"), *lines, *advice]
