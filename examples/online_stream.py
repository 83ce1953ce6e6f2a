"""Learning from streams, one sample at a time: small networks with each norm, beside what river has for the purpose.

    python examples/online_stream.py

Every sample is first predicted, then learned from (prequential). The streams come with river, nothing is downloaded.
What is compared and what came of it is in docs/measured/streams.md, whose tables and figure are written by

    python examples/online_stream.py --out docs/results/streams --page docs/measured/streams.md
"""

import argparse
import json
import shlex
import sys
import time
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from statistics import fmean, median, stdev

import torch
from pages import atomically, put
from torch import nn

from streamnorm import SampleNorm, StreamingNorm

try:
    import matplotlib
    import river
    from river import datasets, dummy, forest, linear_model, optim, preprocessing, stats
    from river.datasets import synth
    from tqdm import tqdm
except ImportError as missing:
    sys.exit(f'{missing}: the streams need their extras, pip install "streamnorm[streams]"')

NORMS = {
    "no norm": None,
    "layer norm": SampleNorm,
    "streaming norm": StreamingNorm,
    "streaming norm, guard=False": partial(StreamingNorm, guard=False),  # other settings are a line each
}
RAW, FIRST, SCALED = "raw", "raw, normed first", "standardized"  # what a model is given
HIDDEN = 64
LAYOUT = {"squeeze": False, "sharey": "row", "layout": "constrained"}
WINDOW, NEXT, CLOSE = 200, 100, 5.0  # back: the NEXT samples are within CLOSE points of the WINDOW before the change


def new_units(x):
    """Every second feature is measured in another unit, from another zero."""
    return {name: 10 * value + 100 if i % 2 else value for i, (name, value) in enumerate(x.items())}


def segments_in_new_units(samples):
    rows = list(islice(datasets.ImageSegments(), samples))
    half = len(rows) // 2
    return rows[:half] + [(new_units(x), y) for x, y in rows[half:]]


def agrawal_drift(samples):
    length = samples or 2000
    concepts = (synth.Agrawal(classification_function=which, seed=which) for which in (0, 3))
    drift = synth.ConceptDriftStream(*concepts, position=length // 2, width=max(1, length // 40), seed=0)
    return list(drift.take(length))


# name: (limit -> samples, number of classes or 0 for a regression, whether something changes half way)
STREAMS = {
    "phishing": (lambda samples: list(islice(datasets.Phishing(), samples)), 2, False),
    "segments": (lambda samples: list(islice(datasets.ImageSegments(), samples)), 7, False),
    "approval": (lambda samples: list(islice(datasets.TrumpApproval(), samples)), 0, False),
    "agrawal-drift": (agrawal_drift, 2, True),
    "segments-units": (segments_in_new_units, 7, True),
}


class Network:
    """Two hidden layers and plain SGD, with the methods of a river model: always `predict_one`, then `learn_one`.

    One forward pass serves both: what a norm does with a sample needs no label. The network knows how many classes
    there will be; a class gets the next free output when it is first seen. Targets of a regression are standardized
    by those seen so far.
    """

    def __init__(self, norm, given, features, classes, rate, seed):
        torch.manual_seed(seed)
        layers = [norm(features)] if given == FIRST else []
        for inputs, outputs in pairwise([features, HIDDEN, HIDDEN]):
            layers += [nn.Linear(inputs, outputs), norm(outputs) if norm else nn.Identity(), nn.ReLU()]
        self.model = nn.Sequential(*layers, nn.Linear(HIDDEN, classes or 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), rate)
        self.scaler = preprocessing.StandardScaler() if given == SCALED else None
        self.labels = {} if classes else None
        self.targets = stats.Var()

    def predict_one(self, x):
        if self.scaler:
            self.scaler.learn_one(x)
            x = self.scaler.transform_one(x)
        self.output = self.model(torch.tensor([list(x.values())], dtype=torch.float32))
        if not self.output.isfinite().all():
            return None
        if self.labels is None:
            return float(self.output.detach()) * self.spread() + self.targets.mean.get()
        seen, best = list(self.labels), int(self.output.argmax())
        return seen[best] if best < len(seen) else None

    def learn_one(self, x, y):
        if self.labels is None:
            self.targets.update(y)
            loss = (self.output - (y - self.targets.mean.get()) / self.spread()).square().sum() / 2
        else:
            label = self.labels.setdefault(y, len(self.labels))
            loss = nn.functional.cross_entropy(self.output, torch.tensor([label]))
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def spread(self):
        return self.targets.get() ** 0.5 or 1.0

    @property
    def _raw_memory_usage(self):
        tensors = sum(each.nbytes for each in self.model.state_dict().values())  # parameters and statistics
        return tensors + (self.scaler._raw_memory_usage if self.scaler else 0)


def methods(features, classes, rates, seeds):
    """name, input, (rate, seed) -> model, rates to choose from, seeds."""

    def scaled(model):  # targets too, as the networks have them
        return preprocessing.StandardScaler() | (model if classes else preprocessing.TargetStandardScaler(model))

    def same_again(rate, seed):
        return dummy.NoChangeClassifier() if classes else dummy.StatisticRegressor(stats.Shift(0))

    def linear(rate, seed):
        kinds = {0: linear_model.LinearRegression, 2: linear_model.LogisticRegression}
        return scaled(kinds.get(classes, linear_model.SoftmaxRegression)(optim.SGD(rate)))

    def trees(rate, seed):  # the regressor has linear models in its leaves, which diverge on raw features
        return forest.ARFClassifier(seed=seed) if classes else scaled(forest.ARFRegressor(seed=seed))

    yield "the label before (river)", "", same_again, [None], seeds[:1]
    yield "linear (river)", SCALED, linear, rates, seeds[:1]
    yield "adaptive random forest (river)", RAW if classes else SCALED, trees, [None], seeds
    for name, norm in NORMS.items():
        for given in (RAW, FIRST, SCALED) if norm else (RAW, SCALED):
            yield name, given, partial(Network, norm, given, features, classes), rates, seeds


def prequential(model, rows):
    """The prediction for each sample, made before its label is shown."""
    guesses = []
    for x, y in rows:
        guesses.append(model.predict_one(x))
        model.learn_one(x, y)
    return guesses


def score(guess, y, classes):
    """100 where it was right, or the absolute error. No guess is wrong, or 0."""
    return 100.0 * (guess == y) if classes else abs((guess or 0.0) - y)


def recovery(points, half):
    """Accuracy before the change and just after it, and the samples until it is back; None: never."""
    before = fmean(points[max(0, half - WINDOW) : half])
    after = [fmean(points[t : t + NEXT]) for t in range(half, max(len(points) - NEXT, half) + 1)]
    back = next((t for t, level in enumerate(after) if level >= before - CLOSE), None)
    return {"before": before, "after": after[0], "recovery": back}


def places(samples):  # where a curve has points
    return [round(samples * i / 50) for i in range(1, 51)]


def run(make, rows, classes, changes, rate, seed):
    model, start = make(rate, seed), time.perf_counter()
    guesses = prequential(model, rows)
    micros = 1e6 * (time.perf_counter() - start) / len(rows)
    points = [score(guess, y, classes) for guess, (_, y) in zip(guesses, rows, strict=True)]
    curve = [round(fmean(points[max(0, t - WINDOW) : t]), 3) for t in places(len(rows))]
    found = {"score": fmean(points), "micros": micros, "bytes": model._raw_memory_usage, "curve": curve}
    return {"rate": rate, "seed": seed} | found | (recovery(points, len(rows) // 2) if changes else {})


def study(name, samples, rates, seeds):
    """All methods on a stream. The rate is the best for the first seed, in hindsight."""
    load, classes, changes = STREAMS[name]
    rows, found = load(samples), []
    for method, given, make, to_try, to_run in tqdm([*methods(len(rows[0][0]), classes, rates, seeds)], desc=name):
        tried = [run(make, rows, classes, changes, rate, to_run[0]) for rate in to_try]
        best = (max if classes else min)(tried, key=lambda each: each["score"])
        runs = [best] + [run(make, rows, classes, changes, best["rate"], seed) for seed in to_run[1:]]
        scored = {str(each["rate"]): each["score"] for each in tried if each["rate"]}
        found.append({"name": method, "given": given, "tried": scored, "runs": runs})
    return {"samples": len(rows), "classes": classes, "changes": changes, "methods": found}


def number(value, digits):
    return f"{value:.{digits}f}" if value < 1e5 else f"{value:.0e}"


def table(stream):
    """A stream's results in Markdown: mean and standard error over seeds."""
    digits, changes = 1 if stream["classes"] else 3, stream["changes"]
    metric = "accuracy, %" if stream["classes"] else "mean absolute error"
    change = [f"last {WINDOW} before", f"first {NEXT} after", "samples until back"] if changes else []
    lines = [["model", "input", metric, *change, "rate", "first seed at each rate", "µs per sample", "kB"]]
    for each in stream["methods"]:
        runs, values = each["runs"], [run["score"] for run in each["runs"]]
        error = f" ± {number(stdev(values) / len(values) ** 0.5, digits)}" if len(values) > 1 else ""
        line = [each["name"], each["given"], number(fmean(values), digits) + error]
        if changes:
            line += [number(fmean(run[key] for run in runs), 1) for key in ("before", "after")]
            line += [", ".join("never" if run["recovery"] is None else str(run["recovery"]) for run in runs)]
        tried = ", ".join(number(score, digits) for score in each["tried"].values())
        cost = number(median(run["micros"] for run in runs), 0), number(fmean(run["bytes"] for run in runs) / 1000, 1)
        lines.append([*line, str(runs[0]["rate"] or ""), tried, *cost])
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def command_of(results):
    """What was run, and on what."""
    words = f"{results['seeds']} seeds, {results['versions']}, {results['seconds']:.0f} s in one thread:"
    return f"{words}\n\n```sh\n{results['command']}\n```"


def filled(text, results):
    """A page with the results."""
    tables = {name: table(stream) for name, stream in results["streams"].items()}
    return put(text, {"command": command_of(results)} | tables)


def draw(results, path):
    """A row for each stream, a column for each way that the input is given; river's models are in all of them."""
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "streams"  # the same file from the same results
    matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text
    from matplotlib import pyplot

    streams, ways = results["streams"], (RAW, FIRST, SCALED)
    names = list(dict.fromkeys(each["name"] for stream in streams.values() for each in stream["methods"]))
    size = (11, 2.4 * len(streams) + 1)
    figure, panels = pyplot.subplots(len(streams), len(ways), figsize=size, **LAYOUT)
    for row, (name, stream) in zip(panels, streams.items(), strict=True):
        for panel, way in zip(row, ways, strict=True):
            draw_stream(panel, stream, way, names)
            panel.set_title(f"{name}: {way}", fontsize="medium")
        row[0].set_ylabel(f"accuracy, %, last {WINDOW}" if stream["classes"] else f"mean absolute error, last {WINDOW}")
    for panel in panels[-1]:
        panel.set_xlabel("samples")
    drawn = {line.get_label(): line for panel in panels.flat for line in panel.lines if line.get_label() in names}
    figure.legend(drawn.values(), drawn, ncols=3, loc="outside lower center", fontsize="small")
    figure.savefig(path, format="svg", metadata={"Date": None})


def draw_stream(panel, stream, way, names):
    """Methods that are given their input in this way. River's are dotted, whatever they are given."""
    for each in stream["methods"]:
        theirs = "river" in each["name"]
        if each["given"] != way and not theirs:
            continue
        curve = [fmean(levels) for levels in zip(*(run["curve"] for run in each["runs"]), strict=True)]
        look = {"color": f"C{names.index(each['name'])}", "linestyle": ":" if theirs else "-", "lw": 1.2}
        panel.plot(places(stream["samples"]), curve, label=each["name"], **look)
    if stream["changes"]:
        panel.axvline(stream["samples"] // 2, color="black", lw=0.6)
    if not stream["classes"]:  # what diverges is off the chart
        usual = median(run["score"] for each in stream["methods"] for run in each["runs"])
        panel.set_ylim(0, 3 * usual)


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--streams", nargs="+", choices=STREAMS, default=list(STREAMS), metavar="NAME")
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--samples", type=int, help="at most so many of each stream")
    options.add_argument("--rates", type=float, nargs="+", default=[0.003, 0.01, 0.03], metavar="RATE")
    options.add_argument("--out", type=Path, default=Path("out/streams"), help="folder of results.json and curves.svg")
    options.add_argument("--page", type=Path, help="a Markdown page to put the tables into")
    chosen = options.parse_args()
    if chosen.seeds < 1 or (chosen.samples is not None and chosen.samples < 50):
        options.error(f"--seeds {chosen.seeds} --samples {chosen.samples}: at least 1 seed and 50 samples")
    torch.set_num_threads(1)
    start, streams = time.perf_counter(), {}
    for name in chosen.streams:
        streams[name] = study(name, chosen.samples, chosen.rates, range(chosen.seeds))
        print(f"\n{name}, {streams[name]['samples']} samples\n\n{table(streams[name])}", flush=True)
    results = {
        "command": f"python examples/online_stream.py {shlex.join(sys.argv[1:])}".strip(),
        "versions": f"torch {torch.__version__.split('+')[0]}, river {river.__version__}",
        "seeds": chosen.seeds,
        "seconds": time.perf_counter() - start,
        "streams": streams,
    }
    chosen.out.mkdir(parents=True, exist_ok=True)
    atomically(lambda part: part.write_text(json.dumps(results), encoding="utf-8"), chosen.out / "results.json")
    atomically(partial(draw, results), chosen.out / "curves.svg")
    if chosen.page:
        atomically(
            lambda part: part.write_text(filled(chosen.page.read_text(encoding="utf-8"), results), encoding="utf-8"),
            chosen.page,
        )


if __name__ == "__main__":
    main()
