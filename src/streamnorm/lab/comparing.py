"""From plans to their results: walk to the learning rates, train what is missing, write one file and one table each."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from .compare import RUNGS, Entry, Plan, Stage, rate_of, stages
from .compared import Compared, Scored, named, read_compared
from .experiment import Say, about_images, train_all
from .jobs import HERE, Carrier, Loader
from .results import Result, read_run
from .runs import Run
from .store import check_writable
from .tasks import IMAGE_CHANCE


def compare(
    plans: Sequence[Plan],
    out: Path,
    *,
    data_folder: Path | None = None,
    carrier: Carrier = HERE,
    training: bool = True,
    say: Say = lambda line: print(line, file=sys.stderr),
) -> list[Compared]:
    """The results of all plans, one for each net, written to `out`.

    Without `training`, of those runs that are there, or that the files in `out` tell of: nothing is written then, or
    downloaded. Where those files are all there is, not even the data is needed.
    """
    if training:
        check_writable(out)
    root = out / "runs"
    told = [_told(plan, out) for plan in plans]
    load = Loader(data_folder, offline=not training)
    found: list[Compared] = []
    for plan, before in zip(plans, told, strict=True):
        if not training and not root.exists() and before is not None:
            found.append(before)
        else:
            found.append(_begun(plan, before, load, root, out / f"{plan.file_name}.json"))
    if training:
        _train(found, load, root, carrier, out, say)
        for each in found:
            each.write(out)
    return found


def _told(plan: Plan, out: Path) -> Compared | None:
    """By the file of an earlier command, which may have had another plan."""
    path = out / f"{plan.file_name}.json"
    if not path.exists():
        return None
    before = read_compared(path)
    return replace(before, plan=plan, runs=[run for run in before.runs if _belongs(run, before.fingerprint, plan)])


def _belongs(row: Scored, fingerprint: str, plan: Plan) -> bool:
    """Whether this is a run of the plan as it is now: not of other images, nor of a norm that has changed since."""
    entry = Entry(plan.net, row.norm, row.samples, row.batches)
    if entry not in plan.entries(plan.rows, plan.sizes) or row.seed >= plan.seeds:
        return False
    return plan.run(entry, RUNGS[row.rate], row.seed).address(fingerprint) == row.id


def _begun(plan: Plan, before: Compared | None, load: Loader, root: Path, path: Path) -> Compared:
    """With the runs that are there. `before`: the results in the file `path`."""
    first = plan.run(Entry(plan.net, plan.rows[0], *plan.sizes[0]), 0, 0)
    note, fingerprint = about_images(first, load, before, path)
    found = before or Compared(plan, note, fingerprint, [], IMAGE_CHANCE, [])
    for entry in plan.entries(plan.rows, plan.sizes):
        while new := [
            (entry, rung, result)
            for rung, seed in found.missing(entry, plan.seeds)
            if (result := read_run(root / plan.run(entry, rung, seed).address(fingerprint))) is not None
        ]:
            found = found.with_runs(new)
    return found


def _train(found: list[Compared], load: Loader, root: Path, carrier: Carrier, out: Path, say: Say) -> None:
    """All stages in their order; after each round the file is written, so that it can be watched."""
    plans = [each.plan for each in found]
    todo = list(stages(plans))
    known: dict[Run, float] = {}  # how long runs take
    for number, stage in enumerate(todo, 1):
        at = plans.index(stage.plan)
        while wanted := _wanted(found[at], stage):
            say(f"part {number} of {len(todo)}: {stage.plan.net}, {len(wanted)} runs")
            names = {
                run: f"{named(entry)} at {rate_of(rung):g}, seed {run.seed}" for run, (entry, rung) in wanted.items()
            }
            results: dict[Run, Result] = train_all(names, load, root, carrier, say, known)
            found[at] = found[at].with_runs((*wanted[run], result) for run, result in results.items())
            found[at].write(out)


def _wanted(found: Compared, stage: Stage) -> dict[Run, tuple[Entry, int]]:
    return {
        stage.plan.run(entry, rung, seed): (entry, rung)
        for entry in stage.entries
        for rung, seed in found.missing(entry, stage.seeds)
    }
