"""The figures of the benchmark: ratios with quartiles and targets, and growth with size.

python benchmarks/plot.py benchmarks/results     draws results.json again
"""

import json
import sys
from pathlib import Path

import matplotlib
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


def draw(results, out):
    matplotlib.rcParams["svg.hashsalt"] = "streamnorm"  # equal results, equal files
    ratios = [row for row in results["rows"] if row["kind"] != "growth"]
    growth = [row for row in results["rows"] if row["kind"] == "growth"]
    if ratios:
        save(ratio_figure(ratios, results), out, "results")
    if growth:
        save(growth_figure(growth, results), out, "growth")


def save(figure, out, name):
    figure.savefig(Path(out, f"{name}.png"), dpi=150)
    figure.savefig(Path(out, f"{name}.svg"), metadata={"Date": None})


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
