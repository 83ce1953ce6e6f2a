"""What `convert` says: one line that sums up, a table, and what to do about what is left."""

from collections import Counter
from typing import NamedTuple

from torch import nn

from ..nn.streaming import StreamingNorm
from .places import title

AFRESH = "starts afresh"
UPDATE_STATS = (
    "after training with few samples per update: streamnorm.update_stats(model, loader) takes the statistics of a "
    "whole loader, for the weights as they are then"
)
DECAY = (
    "weight decay: the Trainer of transformers spares an nn.LayerNorm, and other norms only by their names; "
    "get_decay_parameter_names of a subclass can spare all (guide: Trainers)"
)
WIDEST = 60  # of a column that others are aligned to


class Reason(NamedTuple):
    """Why a norm is left alone, and what can be done about it."""

    why: str
    advice: str = ""


class Row(NamedTuple):
    """A norm of the model, and what has become of it."""

    names: str
    old: nn.Module
    outcome: nn.Module | Reason
    remarks: tuple[str, ...] = ()


def full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def written(rows: list[Row], model: nn.Module) -> list[str]:
    """The lines of the report: the sum, a line for each norm, and advice, each piece of it once."""
    if not rows:
        return []
    cells = [(row.names, _old(row), _outcome(row)) for row in rows]
    names, olds = ([len(cell[column]) for cell in cells if len(cell[column]) <= WIDEST] for column in (0, 1))
    first, second = max(names, default=0), max(olds, default=0)
    table = [f"{name:<{first}}  {old:<{second}}  {outcome}" for name, old, outcome in cells]
    return [_sum(rows), *table, *_advice(rows, model)]


def _sum(rows: list[Row]) -> str:
    left = Counter(row.outcome.why for row in rows if isinstance(row.outcome, Reason))
    converted, alone = len(rows) - left.total(), left.total() or "none"
    whys = "; ".join(f"{why} ({count})" for why, count in left.most_common())
    return f"{converted} norm{'s' * (converted != 1)} converted, {alone} left alone" + (whys and f": {whys}")


def _old(row: Row) -> str:
    ours = type(row.old).__module__.startswith(("torch.", "streamnorm."))
    return title(row.old) if ours or isinstance(row.outcome, nn.Module) else full_name(type(row.old))


def _outcome(row: Row) -> str:
    if isinstance(row.outcome, Reason):
        return f"left alone: {row.outcome.why}"
    return "; ".join([f"-> {_parts(row.outcome)}", *row.remarks])


def _parts(new: nn.Module) -> str:
    """A norm, or what follows it as well where a rule made a module of several."""
    parts = [title(part) for part in new.children() if not isinstance(part, nn.Identity)]
    return ", ".join(parts) or title(new)


def _advice(rows: list[Row], model: nn.Module) -> list[str]:
    """What to do, each piece of it once."""
    kinds: dict[str, dict[str, None]] = {}
    for row in rows:
        if isinstance(row.outcome, Reason) and row.outcome.advice:
            kinds.setdefault(row.outcome.advice, {})[type(row.old).__name__] = None
    lines = [f"{', '.join(names)}: {advice}" for advice, names in kinds.items()]
    if any(remark.startswith(AFRESH) for row in rows for remark in row.remarks):
        lines.append(f"{AFRESH}: evaluation changes until trained, or until streamnorm.update_stats(model, loader)")
    made = [row.outcome for row in rows if isinstance(row.outcome, nn.Module)]
    if any(isinstance(part, StreamingNorm) for new in made for part in new.modules()):
        lines.append(UPDATE_STATS)
    gains = (row.old.weight for row in rows if isinstance(row.old, nn.LayerNorm) and isinstance(row.outcome, nn.Module))
    if any(gain is not None for gain in gains) and _is_of_transformers(model):
        lines.append(DECAY)
    return lines


def _is_of_transformers(model: nn.Module) -> bool:
    return any(type(module).__module__.split(".")[0] == "transformers" for module in model.modules())
