"""The figures of the benchmark: the cases in short, ratios with quartiles and targets, and growth with size.

python benchmarks/plot.py benchmarks/results     draws results.json again
"""

import json
import re
import sys
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

STYLES = [  # told apart by shape and filling, not by colour
    {"marker": "o", "color": "black", "markerfacecolor": "black"},
    {"marker": "s", "color": "0.35", "markerfacecolor": "white"},
    {"marker": "^", "color": "0.35", "markerfacecolor": "0.7"},
    {"marker": "D", "color": "black", "markerfacecolor": "white"},
]
TITLES = {
    "growth/channels": ("channels, batch 8, 16 x 16", "channels"),
    "growth/batch": ("batch size, 64 channels, 16 x 16", "samples"),
    "growth/timesteps": ("timesteps, GRU of 100 units, batch 32", "timesteps"),
    "growth/reference": ("reference, input (16, 32, 16, 16)", "code"),
}
# The cases that a reader asks for first, in words.
HEADLINES = {
    ("layers/32x64x32x32", "nn.BatchNorm2d"): "layer on 32 images, beside nn.BatchNorm2d",
    ("layers/32x64x32x32", "nn.GroupNorm"): "layer on 32 images, beside nn.GroupNorm",
    ("layers/1x64x32x32", "nn.BatchNorm2d"): "layer on one image, beside nn.BatchNorm2d",
    ("layers/1x64x32x32", "nn.GroupNorm"): "layer on one image, beside nn.GroupNorm",
    ("layers/1x512", "nn.LayerNorm"): "layer on one vector, beside nn.LayerNorm",
    ("net_b/batch32", "nn.BatchNorm2d"): "training step of a residual net, beside nn.BatchNorm2d",
    ("compiled/net_b", "nn.BatchNorm2d, compiled"): "the same, both compiled",
    ("net_a/batch1", "nn.LayerNorm"): "training step of dense layers on one sample, beside nn.LayerNorm",
    ("recurrent/GRU", "torch.nn.GRU"): "GRU with norms, beside torch.nn.GRU without",
    ("recurrent/LSTM", "torch.nn.LSTM"): "LSTM with norms, beside torch.nn.LSTM without",
}
# The rest, by the first figure whose cases they are of: none is longer than a page.
FIGURES = {
    "images": r"layers/\d+x\d+x\d+x\d+(-p|-center|$)|kernels/",
    "formats": r"layers/.*(channels_last|bfloat16)",
    "recurrent": r"recurrent/",
    "networks": r"",
}


def draw(results, out):
    ratios = [row for row in results["rows"] if row["kind"] != "growth"]
    growth = [row for row in results["rows"] if row["kind"] == "growth"]
    headlines = [row for row in ratios if (row["case"], row["against"]) in HEADLINES]
    if headlines:
        save(headline_figure(headlines, results), out, "headline")
    for name, rows in parted(ratios).items():
        save(ratio_figure(rows, results), out, name)
    if growth:
        save(growth_figure(growth, results), out, "growth")


def parted(rows):
    """The rows of each figure, of those that have any."""
    found = {name: [] for name in FIGURES}
    for row in rows:
        found[next(name for name, cases in FIGURES.items() if re.match(cases, row["case"]))].append(row)
    return {name: each for name, each in found.items() if each}


def headline_figure(rows, results):
    """What it costs, in one look: a bar from 1 for each case, with the most threads that were measured."""
    most = max(row["threads"] for row in rows)
    shown = {(row["case"], row["against"]): row for row in rows if row["threads"] == most and row["median"] is not None}
    names = [name for name in HEADLINES if name in shown]
    figure = Figure(figsize=(8.5, 1.0 + 0.34 * len(names)), layout="constrained")
    axes = figure.add_subplot()
    for y, name in enumerate(reversed(names)):
        value = shown[name]["median"]
        color = "#0064b0" if value <= 1 else "#d98200"
        axes.barh(y, value - 1, left=1, height=0.62, color=color)
        words = {"va": "center", "ha": "right" if value < 1 else "left", "fontsize": 9}
        axes.annotate(
            f"{value:.2f}", (value, y), xytext=(-4 if value < 1 else 4, 0), textcoords="offset points", **words
        )
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xlim(min(0.3, axes.get_xlim()[0] / 1.15), max(2.2, axes.get_xlim()[1] * 1.15))
    plain_numbers(axes.xaxis)
    axes.set_yticks(range(len(names)), [HEADLINES[name] for name in reversed(names)], fontsize=9)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_xlabel(f"time, ours / theirs (log scale): left of 1 ours is faster; {most} threads", fontsize=9)
    figure.suptitle(caption(results), fontsize=8)
    return figure


def save(figure, out, name):
    figure.savefig(Path(out, f"{name}.png"), dpi=150, metadata={"Software": None})


def caption(results):
    machine = results["machine"]
    return (
        f"{machine['cpu']}, {machine['cores']} cores, torch {machine['torch']}, "
        f"streamnorm {machine['streamnorm']} ({machine['path']} path)"
    )


def lines_of(rows):
    """From top to bottom: a heading for each case, then its contenders, in the order measured."""
    lines = {}
    for row in rows:
        lines.setdefault((row["case"], None), None)
        lines.setdefault((row["case"], row["against"]), None)
    cases = list(dict.fromkeys(case for case, _ in lines))
    return [line for case in cases for line in lines if line[0] == case]


def ratio_figure(rows, results):
    lines = lines_of(rows)
    at = {line: -i for i, line in enumerate(lines)}
    height = 1.2 + 0.19 * len(lines)
    figure = Figure(figsize=(8.5, height))
    axes = figure.add_axes((0.34, 0.55 / height, 0.63, 1 - 1.2 / height))
    threads = sorted({row["threads"] for row in rows})
    for k, count in enumerate(threads):
        offset = 0.16 - 0.32 * k / max(1, len(threads) - 1) if len(threads) > 1 else 0
        draw_ratios(axes, [row for row in rows if row["threads"] == count], at, offset, k, count)
    draw_targets(axes, rows, at)
    axes.axvline(1, color="black", linewidth=0.8, zorder=0)
    dress(axes, lines, at)
    axes.set_xlabel("ours / theirs: below 1, ours is cheaper (log scale; bars are quartiles)", fontsize=9)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), fontsize=9, ncols=4, frameon=False)
    figure.text(0.5, 1 - 0.18 / height, caption(results), ha="center", va="center", fontsize=8)
    return figure


def draw_ratios(axes, rows, at, offset, k, count):
    known = [row for row in rows if row["median"] is not None]
    x = [row["median"] for row in known]
    spread = [[r["median"] - r["low"] for r in known], [r["high"] - r["median"] for r in known]]
    y = [at[row["case"], row["against"]] + offset for row in known]
    label = f"{count} thread{'s' * (count > 1)}"
    axes.errorbar(x, y, xerr=spread, linestyle="none", markersize=4.5, elinewidth=1.6, label=label, **STYLES[k % 4])
    for row in rows:
        if row["median"] is None and k == 0:
            axes.text(1.03, at[row["case"], row["against"]], "raises", va="center", fontsize=8, style="italic")


def draw_targets(axes, rows, at):
    aimed = {(row["case"], row["against"]): row["target"] for row in rows if row["target"] is not None}
    if aimed:
        y = [at[line] for line in aimed]
        axes.vlines(list(aimed.values()), [v - 0.45 for v in y], [v + 0.45 for v in y], "black", linewidths=2.4)
        axes.plot([], [], "|", color="black", markersize=10, markeredgewidth=2.4, label="at most (target)")


def dress(axes, lines, at):
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    axes.set_xlim(min(low, 0.45), max(high, 2.2))
    axes.set_ylim(-len(lines) + 0.3, 0.7)
    plain_numbers(axes.xaxis)
    axes.grid(axis="x", color="0.88", linewidth=0.6, zorder=0)
    axes.set_axisbelow(True)
    axes.set_yticks(list(at.values()), [against or case for case, against in lines], fontsize=8)
    for label, tick, (_, against) in zip(axes.get_yticklabels(), axes.yaxis.get_major_ticks(), lines, strict=True):
        if against is None:
            label.set_fontweight("bold")
            tick.tick1line.set_visible(False)
    for (_, against), y in at.items():
        if against is None:
            axes.axhspan(y - 0.5, y + 0.5, color="0.93", linewidth=0, zorder=-1)


def plain_numbers(axis):
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def growth_figure(rows, results):
    cases = list(dict.fromkeys(row["case"] for row in rows))
    figure = Figure(figsize=(9, 0.6 + 3.2 * ((len(cases) + 1) // 2)), layout="constrained")
    for i, case in enumerate(cases, 1):
        axes = figure.add_subplot((len(cases) + 1) // 2, min(2, len(cases)), i)
        draw_growth(axes, [row for row in rows if row["case"] == case], case)
    figure.suptitle(f"time of forward + backward; {caption(results)}", fontsize=9)
    return figure


def draw_growth(axes, rows, case):
    sizes = list(dict.fromkeys(row["against"] for row in rows))
    counted = all(size.isdigit() for size in sizes)
    for k, count in enumerate(sorted({row["threads"] for row in rows})):
        here = [row for row in rows if row["threads"] == count]
        x = [int(row["against"]) if counted else sizes.index(row["against"]) for row in here]
        line = "-" if counted else "none"
        label = f"{count} thread{'s' * (count > 1)}"
        axes.plot(x, [row["ours"] for row in here], linestyle=line, markersize=5, label=label, **STYLES[k % 4])
        if counted and k == 0:
            last = here[-1]["ours"]
            axes.plot([x[0], x[-1]], [last * x[0] / x[-1], last], ":", color="0.5", label="proportional", zorder=0)
    axes.set_yscale("log")
    plain_numbers(axes.yaxis)
    if counted:
        axes.set_xscale("log")
        axes.minorticks_off()
        axes.set_xticks([int(size) for size in sizes], sizes)
    else:
        axes.set_xticks(range(len(sizes)), sizes, fontsize=8)
    title, xlabel = TITLES.get(case, (case, ""))
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(xlabel)
    axes.set_ylabel("ms per call")
    axes.grid(color="0.88", linewidth=0.6)
    axes.legend(fontsize=8, frameon=False)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    draw(json.loads(Path(sys.argv[1], "results.json").read_text(encoding="utf-8")), sys.argv[1])
