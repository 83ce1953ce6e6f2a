"""The command `streamnorm`: arguments, and nothing else."""

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import __version__
from .compare import CLOSE, NORMS, SIZES, Plan, Size, size_name
from .compare import NETS as COMPARED
from .errors import LabError
from .figures import FIGURES
from .grid import BATCHES, NETS, SAMPLES, SEEDS, SIZE
from .runs import DEFAULT_DEVICE, IMAGES
from .scales import SCALES
from .starting import stoppable
from .variations import SETTINGS, read_variation

DESCRIPTION = """The experiments of "Streaming Normalization" (Liao, Kawaguchi, Poggio 2016), one command each."""
EXAMPLES = """examples:
  streamnorm check                                  does everything work on this machine, and what does it cost
  streamnorm list                                   what there is
  streamnorm run online --data digits               no download needed
  streamnorm run online --data-dir FOLDER --jobs 2  CIFAR-10 from a folder, two processes
  streamnorm run rnn --preset paper --seeds 5       the paper's own scale
  streamnorm run rnn --preset paper --cluster HOST:8786  by the workers of a Dask scheduler
  streamnorm report                                 all results so far as one page
  streamnorm bench-online --data digits             tiny batches: every norm at every size, over many learning rates
  streamnorm compare --data digits                  norms for small batches, each at its own best learning rate
Ctrl-C stops a run; the same command goes on where it stopped. Runs that were trained before are not trained again.
"""

ONLINE = """Plain SGD, once over the samples. Learning rates are for one sample per update, and multiplied by the root
of the samples per update. A run diverges if a loss is not finite or the test loss ten times that of guessing.
The convolutional networks take longest: for a part of them, --net convolutional --samples 1,2,32.
"""
COMPARE = f"""norms: {", ".join(NORMS)} (WS: weight standardization)
With the first seed the learning rate goes up and down in factors of 3 until the best on held-out training images has
a worse one on both sides; all seeds are trained there and at rates within {CLOSE:g} points, and the mean of their
accuracies there decides. Only the result is measured on test images.
"""
CHECK = """Ends with code 1 if a backend differs from plain torch by more than its tolerance, or from itself.
"""
ROUNDS, COMPILING = 10, 20.0
DEFAULT_NETS = ("fully-connected", "recurrent")


def count(text: str) -> int:
    value = int(text) if text.isascii() and text.isdigit() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, 1 or more")
    return value


def counts(text: str) -> tuple[int, ...]:
    """Each once, smallest first."""
    return tuple(sorted({count(part.strip()) for part in text.split(",")}))


def rates(text: str) -> int | tuple[float, ...]:
    """A whole number is how many, anything else the rates themselves."""
    if text.isascii() and text.isdigit():
        return count(text)
    try:
        values = sorted({float(part) for part in text.split(",")})
    except ValueError:
        values = [0.0]
    if not all(0 < value < float("inf") for value in values):
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, or positive rates such as 0.01,0.1")
    return tuple(values)


def sizes(text: str) -> tuple[Size, ...]:
    """Each once, in the order of the tables."""
    found = set[Size]()
    for part in text.split(","):
        samples, cross, batches = part.strip().partition("x")
        if not cross:
            raise argparse.ArgumentTypeError(f"{part!r} must be samples x batches, such as 2x16")
        found.add((count(samples), count(batches)))
    return tuple(sorted(found, key=lambda size: (size[0] * size[1], size[0])))


def norms(text: str) -> tuple[str, ...]:
    """By their names, in any case of letters."""
    known = {name.lower(): name for name in NORMS}
    wanted = [part.strip().lower() for part in text.split(",")]
    for name in wanted:
        if name not in known:
            raise argparse.ArgumentTypeError(f"{name!r}: there are {', '.join(NORMS)}")
    return tuple(name for key, name in known.items() if key in wanted)


def explained(title: str, named: Mapping[str, Any]) -> str:
    return f"{title}:\n" + "".join(f"  {name:7} {each.text}\n" for name, each in named.items())


def listed(values: Sequence[int]) -> str:
    return f"default: {','.join(map(str, values))}"


def parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    top = argparse.ArgumentParser("streamnorm", description=DESCRIPTION, epilog=EXAMPLES, formatter_class=raw)
    top.add_argument("--version", action="version", version=f"streamnorm {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("list", help="the figures, and what the paper says about them")
    check(commands, raw)

    run = commands.add_parser(
        "run", help="train the runs of a figure, print a table, check the claims, draw it", formatter_class=raw,
        epilog=explained("presets", SCALES) + explained("what --vary takes", SETTINGS),
    )  # fmt: skip
    run.add_argument("figure", nargs="+", metavar="FIGURE", help=f"{', '.join(FIGURES)}, or all")
    run.add_argument("--preset", choices=SCALES, default="quick", help="how large; see below (default: quick)")
    run.add_argument("--seeds", type=count, metavar="N", help="how often each curve is trained (default: the preset's)")
    run.add_argument(
        "--data", action="append", default=[], metavar="NAME",
        help="cifar10 or digits for images; shakespeare or a text file for characters; may be given twice",
    )  # fmt: skip
    run.add_argument(
        "--curves", type=lambda text: tuple(part.strip() for part in text.split(",")), default=(), metavar="NAME,NAME",
        help="some of the curves, by the names of the table (default: all)",
    )  # fmt: skip
    run.add_argument(
        "--vary", action="append", default=[], metavar="NAME=VALUE", help="change a setting in all curves; see below"
    )
    training(run)
    bench_online(commands, raw)
    compare(commands, raw)

    report = commands.add_parser("report", help="all results in a folder as one HTML page: figures, claims, settings")
    out(report)
    report.add_argument("--html", type=Path, metavar="FILE", help="where to write it (default: report.html in --out)")
    page(report)
    return top


def check(commands: Any, raw: type[argparse.HelpFormatter]) -> None:
    command = commands.add_parser(
        "check", help="this machine: devices, backends against plain torch, times beside norms of torch",
        formatter_class=raw, epilog=CHECK,
    )  # fmt: skip
    device(command, "check")
    command.add_argument("--no-times", action="store_true", help="values, gradients and state only")
    command.add_argument("--rounds", type=count, default=ROUNDS, metavar="N", help=f"of times (default: {ROUNDS})")
    command.add_argument(
        "--compile-seconds", type=float, default=COMPILING, metavar="N",
        help=f"for compiled forms: no other one is begun later; 0 for none (default: {COMPILING:g})",
    )  # fmt: skip
    command.add_argument("--out", type=Path, metavar="FILE", help="all of it as JSON, to attach to a report")


def bench_online(commands: Any, raw: type[argparse.HelpFormatter]) -> None:
    bench = commands.add_parser(
        "bench-online", help="measure online learning: networks x norms x sizes of batches x learning rates",
        formatter_class=raw, epilog=ONLINE,
    )  # fmt: skip
    bench.add_argument(
        "--net", action="append", choices=NETS, help="may be repeated (default: fully-connected and recurrent)"
    )
    bench.add_argument("--samples", type=counts, default=SAMPLES, metavar="N,N", help=f"per batch ({listed(SAMPLES)})")
    bench.add_argument(
        "--batches", type=counts, default=BATCHES, metavar="N,N", help=f"per weight update ({listed(BATCHES)})"
    )
    bench.add_argument(
        "--rates", type=rates, metavar="N|R,R", help="how many of the network's own, or others with their points"
    )
    bench.add_argument("--size", type=count, default=SIZE, metavar="N", help=f"samples seen in a run (default: {SIZE})")
    bench.add_argument("--seeds", type=count, default=SEEDS, metavar="N", help=f"runs at each rate (default: {SEEDS})")
    bench.add_argument("--data", choices=IMAGES, default="cifar10", help="(default: cifar10)")
    without_training(bench)
    page(bench)
    training(bench)


def compare(commands: Any, raw: type[argparse.HelpFormatter]) -> None:
    command = commands.add_parser(
        "compare", help="compare norms for small batches: nets x sizes x norms, each at its own best learning rate",
        formatter_class=raw, epilog=COMPARE,
    )  # fmt: skip
    command.add_argument("--net", action="append", choices=COMPARED, help="may be repeated (default: all)")
    command.add_argument(
        "--sizes", type=sizes, default=SIZES, metavar="NxN,NxN",
        help=f"samples per batch x batches per update (default: {','.join(map(size_name, SIZES))})",
    )  # fmt: skip
    command.add_argument("--norms", type=norms, default=tuple(NORMS), metavar="NAME,NAME", help="(default: all)")
    command.add_argument("--seeds", type=count, default=SEEDS, metavar="N", help=f"runs at a rate (default: {SEEDS})")
    command.add_argument("--size", type=count, metavar="N", help="training images at most (default: 6,000 or 8,000)")
    command.add_argument("--data", choices=IMAGES, default="cifar10", help="(default: cifar10)")
    without_training(command)
    page(command)
    training(command)


def training(command: argparse.ArgumentParser) -> None:
    """The options of all commands that train."""
    command.add_argument(
        "--data-dir", "--data-folder", type=Path, metavar="FOLDER", help="where the data is (default: a cache folder)"
    )
    where = command.add_mutually_exclusive_group()
    where.add_argument("--jobs", type=count, metavar="N", help="runs trained at a time, in processes (default: 1)")
    where.add_argument("--cluster", metavar="ADDRESS", help="of a Dask scheduler, whose workers train them")
    device(command, "train")
    out(command)


def without_training(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--no-train", action="store_true",
        help="train nothing: show the runs that are there already; nothing is downloaded, or written but a --page",
    )  # fmt: skip
    command.add_argument(
        "--rewrite", action="store_true", help="with --no-train: write the files in --out again, from what is there"
    )


def device(command: argparse.ArgumentParser, what: str) -> None:
    command.add_argument(
        "--device", default=DEFAULT_DEVICE, metavar="NAME", help=f"where to {what}, such as cuda (default: %(default)s)"
    )


def page(command: argparse.ArgumentParser) -> None:
    command.add_argument("--page", type=Path, metavar="FILE", help="a Markdown page whose tables are to be filled in")


def out(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--out", type=Path, default=Path("results"), metavar="FOLDER", help="results (default: results)"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else list(arguments)
    chosen = parser().parse_args(given)
    try:
        with stoppable():
            from . import commands  # not for --help
        if chosen.command == "list":
            commands.list_figures()
        elif chosen.command == "check":
            times, compiling = not chosen.no_times, chosen.compile_seconds
            return 0 if commands.check(chosen.device, times, chosen.rounds, compiling, chosen.out) else 1
        elif chosen.command == "run":
            commands.run(
                chosen.figure,
                chosen.preset,
                chosen.out,
                data=chosen.data,
                data_folder=chosen.data_dir,
                seeds=chosen.seeds,
                curves=chosen.curves,
                variation=dict(map(read_variation, chosen.vary)),
                jobs=chosen.jobs or 1,
                cluster=chosen.cluster,
                device=chosen.device,
                command=shlex.join(["streamnorm", *given]),
            )
        elif chosen.command == "bench-online":
            commands.bench_online(
                chosen.net or DEFAULT_NETS,
                chosen.samples,
                chosen.batches,
                chosen.rates,
                size=chosen.size,
                seeds=chosen.seeds,
                data=chosen.data,
                data_folder=chosen.data_dir,
                jobs=chosen.jobs or 1,
                cluster=chosen.cluster,
                device=chosen.device,
                out=chosen.out,
                training=not chosen.no_train,
                rewriting=chosen.rewrite,
                page=chosen.page,
            )
        elif chosen.command == "compare":
            nets = dict.fromkeys(chosen.net or COMPARED)
            names = ("sizes", "norms", "seeds", "size", "data", "device")
            same: dict[str, Any] = {name: getattr(chosen, name) for name in names}
            commands.compare(
                [Plan(net, **same) for net in nets],
                data_folder=chosen.data_dir,
                jobs=chosen.jobs or 1,
                cluster=chosen.cluster,
                out=chosen.out,
                training=not chosen.no_train,
                rewriting=chosen.rewrite,
                page=chosen.page,
            )
        else:
            commands.report(chosen.out, chosen.html or chosen.out / "report.html", chosen.page)
    except LabError as error:
        print(f"streamnorm: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        where = "" if chosen.command == "check" else "; the same command goes on from here"
        print(f"\nstreamnorm: stopped{where}", file=sys.stderr)
        return 130
    return 0
