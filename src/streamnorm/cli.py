"""The command `streamnorm`: arguments, and nothing else."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from ._version import __version__
from .lab import commands
from .lab.errors import LabError
from .lab.figures import FIGURES
from .lab.scales import SCALES

DESCRIPTION = """The experiments of "Streaming Normalization" (Liao, Kawaguchi, Poggio 2016), one command each."""
EXAMPLES = """examples:
  streamnorm list                                   what there is
  streamnorm run online --data digits               no download needed
  streamnorm run online --data-dir FOLDER --jobs 2  CIFAR-10 from a folder, two processes
  streamnorm run rnn --preset paper --seeds 5       the paper's own scale
  streamnorm report                                 all results so far as one page
Ctrl-C stops a run; the same command goes on where it stopped. Runs that were trained before are not trained again.
"""


def count(text: str) -> int:
    value = int(text) if text.isascii() and text.isdigit() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, 1 or more")
    return value


def parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    top = argparse.ArgumentParser("streamnorm", description=DESCRIPTION, epilog=EXAMPLES, formatter_class=raw)
    top.add_argument("--version", action="version", version=f"streamnorm {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("list", help="the figures, and what the paper says about them")

    run = commands.add_parser(
        "run", help="train the runs of a figure, print a table, check the claims, draw it", formatter_class=raw,
        epilog="presets:\n" + "\n".join(f"  {scale.name:7} {scale.text}" for scale in SCALES.values()),
    )  # fmt: skip
    run.add_argument("figure", nargs="+", metavar="FIGURE", help=f"{', '.join(FIGURES)}, or all")
    run.add_argument("--preset", choices=SCALES, default="quick", help="how large; see below (default: quick)")
    run.add_argument("--seeds", type=count, metavar="N", help="how often each curve is trained (default: the preset's)")
    run.add_argument(
        "--data", action="append", default=[], metavar="NAME",
        help="cifar10 or digits for images; shakespeare or a text file for characters; may be given twice",
    )  # fmt: skip
    run.add_argument("--data-dir", type=Path, metavar="FOLDER", help="where the data is (default: a cache folder)")
    run.add_argument(
        "--jobs", type=count, default=1, metavar="N", help="runs trained at a time, in processes (default: 1)"
    )
    out(run)

    report = commands.add_parser("report", help="all results in a folder as one HTML page: figures, claims, settings")
    out(report)
    report.add_argument("--html", type=Path, metavar="FILE", help="where to write it (default: report.html in --out)")
    return top


def out(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--out", type=Path, default=Path("results"), metavar="FOLDER", help="results (default: results)"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else list(arguments)
    chosen = parser().parse_args(given)
    try:
        if chosen.command == "list":
            commands.list_figures()
        elif chosen.command == "run":
            commands.run(
                chosen.figure,
                chosen.preset,
                chosen.out,
                data=chosen.data,
                data_folder=chosen.data_dir,
                seeds=chosen.seeds,
                jobs=chosen.jobs,
                command=shlex.join(["streamnorm", *given]),
            )
        else:
            commands.report(chosen.out, chosen.html or chosen.out / "report.html")
    except LabError as error:
        print(f"streamnorm: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nstreamnorm: stopped; the same command goes on from here", file=sys.stderr)
        return 130
    return 0
