"""What streamnorm costs: time against other norms, memory, and growth with the size of the input.

    python benchmarks/bench.py [--rounds 5] [--only layers]     all of it takes about eight minutes

The contenders of a case run interleaved in one process, in many short rounds. The ratio ours / theirs is taken per
round; the table has its median and quartiles, and the median time of one call on each side. Fewer rounds also shorten
the warm-up. Ctrl-C keeps the cases that are done. Writes results.json, results.md and the figures: all of it to
benchmarks/results, a part to build/bench, unless --out says where.
"""

import argparse
import gc
import json
import os
import platform
import sys
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from cases import CASES, OURS, fused
from torch.profiler import ProfilerActivity, profile

import streamnorm
from streamnorm.lab.devices import called, find, synchronize
from streamnorm.lab.errors import DeviceError
from streamnorm.lab.race import race, settled
from streamnorm.lab.store import write_text

# Otherwise glibc hands large tensors back to the system after every call, and page faults are what is timed.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "268435456", "MALLOC_TRIM_THRESHOLD_": "536870912"}
ROUND_SECONDS = 0.2  # of all contenders together; slow ones run one call each, in twice the time, in fewer rounds
WARMUP_SECONDS = 0.025  # at most, before and after the first update, for each round asked for
QUARTILES = torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)


def machine(device):
    return {
        "cpu": called(torch.device("cpu")),
        "device": f"{device}: {called(device)}",
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "streamnorm": streamnorm.__version__,
        "kernels": fused(),
        "path": "fused" if fused() else "plain",
        "allocator": {name: os.environ.get(name, "not set") for name in ALLOCATOR},
    }


def prepare(case, rounds, device):
    """Each contender, settled, and the seconds of its fastest call; None in place of one that cannot run."""
    ready = {}
    for name, make in case.contenders().items():
        try:
            with device:  # where the contenders make their tensors
                run = make()
            spent = settled(run.call, run.module, case.more, rounds * WARMUP_SECONDS, partial(synchronize, device))
            ready[name] = run.call, spent
        except ValueError:
            if name == OURS or case.kind == "growth":
                raise
            ready[name] = None
    return ready


def time_rows(case, rounds, device):
    ready = prepare(case, rounds, device)
    running = {name: run for name, run in ready.items() if run}
    raced = race(running, rounds, ROUND_SECONDS, partial(synchronize, device))
    times = {name: torch.tensor(each, dtype=torch.float64) for name, each in raced.items()}
    ms = {name: 1e3 * float(each.quantile(0.5)) for name, each in times.items()}
    first = next(iter(ready))
    for name in ready:
        if case.kind == "growth":
            yield row(case, name, times[name] / times[first], ms[name], ms[first])
        elif name not in times:
            yield row(case, name, None, ms[first], None)
        elif name != first:
            yield row(case, name, times[first] / times[name], ms[first], ms[name])


def row(case, against, ratios, ours, theirs, unit="ms"):
    quartiles = [None] * 3 if ratios is None else ratios.quantile(QUARTILES).tolist()
    return {
        "case": case.name,
        "kind": case.kind,
        "against": against,
        **dict(zip(("low", "median", "high"), quartiles, strict=True)),
        "rounds": 0 if ratios is None else len(ratios),
        "ours": ours,
        "theirs": theirs,
        "unit": unit,
        "target": case.targets.get(against),
    }


def memory_rows(case):
    """What is alive between forward and backward, the input included and the output not; and the peak of both."""
    alive, peak = {}, {}
    for name, make in case.contenders().items():
        run = make()
        alive[name] = bytes_alive(run.module, run.x) / run.x.nbytes + 1
        run.x.grad = None
        peak[name] = allocations(run.call)[0] / run.x.nbytes
    other = next(name for name in alive if name != OURS)
    for against, ours, theirs in (
        ("alive: the input", alive[OURS], 1.0),
        (f"alive: {other}", alive[OURS], alive[other]),
        (f"peak: {other}", peak[OURS], peak[other]),
    ):
        yield row(case, against, torch.tensor([ours / theirs], dtype=torch.float64), ours, theirs, "inputs")


def bytes_alive(layer, x):
    """Bytes kept from the forward pass for the backward pass, besides input and output."""
    layer(x).sum().backward()  # what is made once only does not count
    _, left, y = allocations(lambda: layer(x))
    return left - y.nbytes


def allocations(function):
    """Bytes at the peak and bytes left of what `function` allocates through torch, and its result."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        result = function()
    with TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        record.export_chrome_trace(str(trace))
        events = [
            event
            for event in json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
            if event["name"] == "[memory]"
        ]
    alive, now, peak = {}, 0, 0
    for event in sorted(events, key=lambda event: event["ts"]):
        address, size = event["args"]["Addr"], event["args"]["Bytes"]
        if size > 0:
            alive[address] = size
            now += size
        else:
            now -= alive.pop(address, 0)  # what was there before is none of its business
        peak = max(peak, now)
    return peak, now, result


def measure(case, threads, rounds, device):
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    gc.collect()
    rows = memory_rows(case) if case.kind == "memory" else time_rows(case, rounds, device)
    return [{**each, "threads": threads} for each in rows]


def table(header, rows):
    """Markdown that can be read as it is."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    padded = ([cell.ljust(w) for cell, w in zip(line, widths, strict=True)] for line in (header, *rows))
    lines = [f"| {' | '.join(line)} |" for line in padded]
    return "\n".join([lines[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *lines[1:], ""])


def number(value):
    if value is None:
        return ""
    return f"{value:.0f}" if value >= 100 else f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"


def cells(r):
    ratio, *quartiles = (number(r[name]) for name in ("median", "low", "high"))
    sides = [number(r[side]) and f"{number(r[side])} {r['unit']}" for side in ("ours", "theirs")]
    return [ratio or "raises", " - ".join(filter(None, quartiles)), *sides, number(r["target"])]


def report(results):
    of = results["machine"]
    allocator = " ".join(f"{name}={value}" for name, value in of["allocator"].items())
    text = (
        f"{of['cpu']}, {of['cores']} cores, load {of['load']:.1f} at the start; {of['system']}; Python {of['python']}, "
        f"torch {of['torch']}, streamnorm {of['streamnorm']}; kernels available: {of['kernels']}, {of['path']} path.\n"
        f"Allocator: {allocator}. Forward + backward or a training step, float32; median and quartiles of the ratio "
        f"per round, at most {results['settings']['rounds']} interleaved rounds per case.\n"
    )
    text += "" if results["complete"] else "Interrupted: there are more cases.\n"
    ratios = ["against", "ours / theirs", "quartiles", "ours", "theirs", "at most"]
    growth = ["at", "relative to the first", "quartiles", "ours"]
    for columns in (ratios, growth):
        rows = [r for r in results["rows"] if (r["kind"] == "growth") == (columns is growth)]
        lines = [[r["case"], str(r["threads"]), *[r["against"], *cells(r)][: len(columns)]] for r in rows]
        text += "\n" + table(["case", "threads", *columns], lines) if rows else ""
    return text


def progress(jobs):
    """The jobs, each announced on stderr: a bar at a terminal that has tqdm, otherwise a line."""
    try:
        from tqdm import tqdm
    except ImportError:
        tqdm = None
    bar = tqdm(jobs, unit="case") if tqdm and sys.stderr.isatty() else None
    for i, (case, threads) in enumerate(jobs if bar is None else bar, 1):
        label = f"{case.name}, {threads} thread{'s' * (threads > 1)}"
        if bar is None:
            print(f"[{i}/{len(jobs)}] {label}", file=sys.stderr, flush=True)
        else:
            bar.set_description(label)
        yield case, threads


def draw(results, out):
    try:
        import plot
    except ImportError as error:
        print(f"no figures ({error}): pip install matplotlib, then python benchmarks/plot.py {out}", file=sys.stderr)
    else:
        plot.draw(results, out)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="rounds per case (default 20)")
    parser.add_argument("--only", default="", metavar="PREFIX", help="cases that begin so, such as layers or growth/b")
    parser.add_argument("--out", type=Path, help="folder for the results (default benchmarks/results, or build/bench)")
    parser.add_argument("--device", default="cpu", help="where to measure, such as cuda (default cpu)")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="thread counts (default 1 2)")
    chosen = parser.parse_args()
    here = Path(__file__).parent
    chosen.out = chosen.out or (here.parent / "build/bench" if chosen.only else here / "results")
    if min(chosen.rounds, *chosen.threads) < 1:
        parser.error("--rounds and --threads must be at least 1")
    if not any(case.name.startswith(chosen.only) for case in CASES):
        parser.error(f"no case begins with {chosen.only!r}; there are {', '.join(case.name for case in CASES)}")
    try:
        chosen.device = find(chosen.device)
    except DeviceError as error:
        parser.error(str(error))
    return chosen


def main():
    chosen = arguments()
    here = chosen.device.type == "cpu"
    # Memory is counted by the allocator of the CPU, and the lab has runs of its own.
    cases = [case for case in CASES if here or (case.kind != "memory" and not case.name.startswith("lab"))]
    jobs = [(case, n) for case in cases if case.name.startswith(chosen.only) for n in chosen.threads]
    settings = {"rounds": chosen.rounds, "threads": chosen.threads, "only": chosen.only}
    results = {"machine": machine(chosen.device), "settings": settings, "complete": False, "rows": []}
    try:
        for case, threads in progress(jobs):
            results["rows"] += measure(case, threads, chosen.rounds, chosen.device)
            write_text(chosen.out / "results.json", json.dumps(results, indent=1))
        results["complete"] = True
    except KeyboardInterrupt:
        print("\ninterrupted: keeping the cases that are done", file=sys.stderr)
    write_text(chosen.out / "results.json", json.dumps(results, indent=1))
    write_text(chosen.out / "results.md", report(results))
    print(report(results))
    draw(results, chosen.out)
    return 0 if results["complete"] else 130


if __name__ == "__main__":
    if not ALLOCATOR.keys() <= os.environ.keys():  # glibc reads them when a process starts
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**ALLOCATOR, **os.environ})
    sys.exit(main())
