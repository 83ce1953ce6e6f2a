"""A model's norms become ours: the same parameters, mode, hooks and places, and the statistics it was trained with."""

from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any, TypeVar, cast

from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize

from ..nn.streaming import StreamingNorm
from .known import Factory, rms
from .making import Make
from .places import (
    Place,
    Places,
    Report,
    Skip,
    find_places,
    is_compiled,
    names_of,
    opened,
    returned,
    say,
    skipped_by,
    swap,
)
from .reporting import Reason, Row, written
from .rules import COMPUTED, NORMS, Rules, applied, check_rules, register, rule_for

Model = TypeVar("Model", bound=nn.Module)


class Convert:
    """`streamnorm.convert(model)`, with `convert.register` for classes that it does not know, and `convert.rms`."""

    def __init__(self) -> None:
        self.register, self.rms = register, rms

    def __reduce__(self) -> str:
        """Pickled and copied by its name, as a function is."""
        return "convert"

    def __call__(
        self,
        model: Model,
        norm: Callable[..., nn.Module] = StreamingNorm,
        *,
        inplace: bool = True,
        skip: Skip = None,
        rules: Rules | None = None,
        report: Report = print,
        **settings: Any,
    ) -> Model:
        """Replace the batch, layer, group and instance norms in a model by `norm`: torch's, and other known ones.

        The Parameter objects stay, so that an optimizer goes on working; so do device, dtype, mode, hooks and sharing.
        A trained batch norm hands its running statistics over, without a new warm-up: evaluation does not change. Other
        norms have none to give, so there the first training calls begin the statistics. If anything is refused, the
        model is as it was.

        Args:
            model: any module; a norm itself is returned converted.
            norm: called as `norm(num_features, eps=..., affine=..., channel_dim=..., device=..., dtype=...,
                **settings)`.
            inplace: False changes a copy.
            skip: what to leave alone: a name or pattern of modules, several, or a function `(name, module) -> bool`.
            rules: for this call, classes of norms and what becomes of them, as in `convert.register`.
            report: gets the report line by line: a sum, a line for each norm, and what to do about those that stay.
            settings: further arguments of `norm`, which win over what is taken from the old norm.

        Example:
            >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
            >>> model = convert(model, p=1)  # doctest: +ELLIPSIS
            1 norm converted, none left alone
            1  BatchNorm2d(8)  -> StreamingNorm(8)
            after training with few samples per update: streamnorm.update_stats(model, loader) takes ...
        """
        if not callable(norm):
            raise TypeError(f"norm={norm!r}: pass a class such as StreamingNorm, or a function that makes a norm")
        if isinstance(norm, partial):
            norm, settings = partial(norm.func, *norm.args), norm.keywords | settings
            norm = norm if norm.args else norm.func
        rules = check_rules(rules)
        root = opened(model, "convert", inplace)
        places = find_places(root)
        found = {old: rule for old in places if (rule := rule_for(old, rules)) is not None}
        skipped = _skipped(skip, places, found)
        rows: list[Row] = []
        inside: set[nn.Module | None] = set()  # of modules that are replaced as a whole
        for old, rule in found.items():
            make = Make(old, norm, settings, _first_tensor(root))
            if not inside.issuperset(place.parent for place in places[old]):
                try:
                    outcome = Reason("skipped") if old in skipped else _outcome(old, places[old], rule, make)
                except Exception as error:
                    error.add_note(f"convert: while replacing {names_of(places[old])}; the model is as it was")
                    raise
                rows.append(Row(names_of(places[old]), old, outcome, tuple(make.remarks)))
                inside.update(old.modules() if isinstance(outcome, nn.Module) else ())
        changed = swap(root, places, {row.old: row.outcome for row in rows if isinstance(row.outcome, nn.Module)})
        say(report, written(rows, root), root)
        return cast(Model, returned(model, root, changed, inplace))


convert = Convert()


def _skipped(skip: Skip, places: Places, found: dict[nn.Module, Factory | Reason]) -> set[nn.Module]:
    """A function is asked about the norms, those without a rule excepted."""
    kinds = {type(old) for old, rule in found.items() if isinstance(old, NORMS) or not isinstance(rule, Reason)}
    return skipped_by(skip, places, tuple(kinds))


def _outcome(old: nn.Module, places: list[Place], rule: Factory | Reason, make: Make) -> nn.Module | Reason:
    """The replacement, or why there is none. The old norm is only read."""
    if isinstance(rule, Reason):
        return rule
    if isinstance(old, LazyModuleMixin):
        raise ValueError(
            f"convert: {names_of(places)} is a {type(old).__name__} without a size yet: run one batch through the "
            "model first"
        )
    if is_compiled(places):
        return Reason("it was compiled by itself", "convert before torch.compile")
    if "forward" in vars(old):
        return Reason("its forward was replaced by another", "convert before that, or put the norm there by hand")
    if parametrize.is_parametrized(old) or any(name.rpartition("_")[0] in vars(old) for name in old._parameters):
        return COMPUTED
    return applied(rule, old, make)


def _first_tensor(model: nn.Module) -> Tensor | None:
    """For type and place of norms that have no tensor of their own."""
    return next((t for t in chain(model.parameters(), model.buffers()) if t.is_floating_point()), None)
