"""A closer look at the comparison: streaming beside its best rival again, with other seeds and more images.

    python benchmarks/closer.py --data-dir FOLDER --out benchmarks/results/closer.json    # CIFAR-10
    python benchmarks/closer.py --data digits --size 64 --seeds 2    # no download
    python benchmarks/closer.py --table benchmarks/results/closer.json

`streamnorm compare` has three seeds, 2,000 images that choose the rate, and 4,000 test images. For networks in which
that leaves streaming and the best of the others close, here are six other seeds, 10,000 images that choose the rate and
10,000 test images. The rivals are those of docs/results, and so are the rates to choose from: those within 1.5 points
of the best with the first seed. Accuracy in % with its standard error; then the differences between runs of the same
seed, in accuracy and in training loss: mean and standard error, positive where streaming is better.
"""

import argparse
from dataclasses import replace
from operator import sub
from pathlib import Path
from statistics import fmean
from typing import Any

from tables import measure_or_show, trained

from streamnorm.lab.compare import Entry, close_rungs, rate_of, size_name
from streamnorm.lab.compared import Compared, Scored, read_compared
from streamnorm.lab.data import Images, load_images
from streamnorm.lab.results import mean_and_error

RESULTS = Path(__file__).parent.parent / "docs/results"
OURS, HELD_OUT = "streaming", 10_000
FIRST_SEED = 20  # lower ones chose the rates of the comparison and the constants of the guard
HEAD = "| network | size | streaming | best of the others | accuracy | training loss |\n|---|---|---|---|---|---|"


def measured(chosen: argparse.Namespace) -> dict[str, Any]:
    data, rows = load_images(chosen.data, chosen.data_dir), []
    for net in chosen.net:
        earlier = read_compared(RESULTS / f"compare-{net}.json")
        rivals = {verdict.size: verdict.rival for verdict in earlier.verdicts() if verdict.ours == OURS}
        for size in earlier.plan.sizes:
            entries = {"ours": Entry(net, OURS, *size), "theirs": Entry(net, rivals[size], *size)}
            sides = {name: side(data, earlier, entry.trained, chosen) for name, entry in entries.items()}
            rows.append({"net": net, "size": size, **sides})
            print(line(rows[-1]), flush=True)
    return {"data": data.name, "note": data.note, "rows": rows}


def side(data: Images, earlier: Compared, entry: Entry, chosen: argparse.Namespace) -> dict[str, Any]:
    """A norm at its best rate."""
    seeds = range(FIRST_SEED, FIRST_SEED + chosen.seeds)
    rates = []
    for rung in close_rungs(earlier.walked(entry)):
        scores = [scored(data, entry, rung, seed, chosen) for seed in seeds]
        rates.append(
            {
                "rate": rate_of(rung),
                "held out": [earlier.accuracy(score, "valid") for score in scores],
                "accuracy": [earlier.accuracy(score, "test") for score in scores],
                "loss": [earlier.chance["loss"] if s.train_loss is None else s.train_loss for s in scores],
            }
        )
    return {"norm": entry.norm, "rates": rates}


def scored(data: Images, entry: Entry, rung: int, seed: int, chosen: argparse.Namespace) -> Scored:
    run = entry.run(rung, seed, chosen.size, data.name)
    more = replace(run, test_size=None, held_out=min(HELD_OUT, len(data.train) - (run.train_size or 0)))
    return Scored.of(entry.norm, rate_of(rung), trained(more, data, chosen.runs))


def best(side: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = max(side["rates"], key=lambda rate: fmean(rate["held out"]))
    return found


def line(row: dict[str, Any]) -> str:
    ours, theirs = best(row["ours"]), best(row["theirs"])
    accuracy, loss = (list(map(sub, ours[kind], theirs[kind])) for kind in ("accuracy", "loss"))
    one, two = ("{:.1f} ± {:.1f}".format(*mean_and_error(side["accuracy"])) for side in (ours, theirs))
    less = "{:+.3f} ± {:.3f}".format(*mean_and_error(-each for each in loss))
    more = "{:+.1f} ± {:.1f}".format(*mean_and_error(accuracy))
    sides = f"{one} @ {ours['rate']:g} | {row['theirs']['norm']} {two} @ {theirs['rate']:g}"
    return f"| {row['net']} | {size_name(row['size'])} | {sides} | {more} | {less} |"


def table(result: dict[str, Any]) -> str:
    return "\n".join([HEAD, *map(line, result["rows"])])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", choices=("cifar10", "digits"), default="cifar10")
    parser.add_argument("--data-dir", type=Path, help="where CIFAR-10 is")
    parser.add_argument("--size", type=int, help="images that are trained on, at most")
    parser.add_argument("--seeds", type=int, default=6, help="how many (default: 6)")
    parser.add_argument("--runs", type=Path, help="where trainings are kept: what was stopped goes on")
    parser.add_argument("--net", nargs="+", default=["fully-connected"], help="(default: fully-connected)")
    measure_or_show(parser, measured, table)
