"""docs/models.md: the results of `make test-integrations` as tables."""

import re
from collections import Counter, defaultdict

from integrations.examine import NEAR

STEPS = ("evaluation", "training", "round trip", "to_batchnorm", "fuse", "export")
HEAD = """# Models

What `convert`, `to_batchnorm` and `fuse` do to models of other libraries. This page is written by
`make test-integrations`, which installs the libraries in an environment of its own, builds each model with small
settings and random weights, and tries the steps below: {models} models of {libraries} libraries, {good} of which pass
them all{bad}. Versions: {versions}.

- **norms**: those that `convert` replaced, and those that it left, for [reasons](#what-is-left-and-why).
- **batch 1 before**: whether the model as it was trains with one sample per batch.
- **evaluation**: norms with running statistics are converted, and results are the same. Layer norms, instance norms
  without statistics and group norms of one group start afresh, so they are compared as `SampleNorm`, which computes
  what they do.
- **training**: three updates of two batches with one sample each, then three of two batches with two samples each, by
  SGD: everything is finite, and every norm that was called has heard of every update.
- **round trip**: the state_dict goes through a file into a model that was converted afresh, and results are equal to
  the last bit; a checkpoint from before `convert` loads too.
- **to_batchnorm**: after training, results are the same; where all norms were batch norms, the state_dict also loads
  into the model as it was.
- **fuse**: with an example, results are the same; how many norms were folded into the layer before, and
  [why not the others](#what-is-not-folded-and-why).
- **export**: `torch.export` of the converted model gives the same results.

A number is the largest difference between two results, as a part of the largest number in them; {near:.0e} is allowed.
Weights are shaken first, so that no model passes because its norms do nothing: gains up to twice as large have to
change the result. Of torchvision the compiled operators are not used, so models that detect objects are not here.
"""
NEEDS_NORMS = ("evaluation", "to_batchnorm", "fuse")


def failures(rows):
    """The steps that failed, one line each."""
    return [
        f"{row['library']} {row['name']}: {step}: {row[step]['note'] or row[step]['error']}"
        for row in rows
        for step in STEPS
        if not row[step]["ok"]
    ]


def page(results):
    rows = results["rows"]
    libraries = list(dict.fromkeys(row["library"] for row in rows))
    failed = failures(rows)
    bad = {line.partition(": ")[0] for line in failed}
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    parts = [
        HEAD.format(
            models=len(rows),
            libraries=len(libraries),
            good=len(rows) - len(bad),
            bad=" ([the others](#what-fails))" if bad else "",
            versions=versions,
            near=NEAR,
        )
    ]
    for library in libraries:
        mine = [row for row in rows if row["library"] == library]
        lines = [" | ".join(cells(row)) for row in mine]
        head = " | ".join(["model", "norms", "batch 1 before", *STEPS])
        rule = "|".join(["---"] * (len(STEPS) + 3))
        parts.append(f"## {library}\n\n| {head} |\n|{rule}|\n" + "".join(f"| {line} |\n" for line in lines))
    if failed:
        parts.append("## What fails\n\n" + "".join(f"- {line}\n" for line in failed))
    parts.append(left_alone(rows))
    parts.append(not_folded(rows))
    return "\n".join(parts)


def cells(row):
    before = "yes" if row["before"]["ok"] else "raises"
    return [row["name"], norms(row), before, *(cell(row, step) for step in STEPS)]


def norms(row):
    """As "20 BatchNorm2d" and "5 LlamaRMSNorm left"."""
    converted = [f"{count} {kind}" for kind, count in row["converted"].items()]
    return ", ".join([*converted, *(f"{count} {kind} left" for kind, (count, _) in row["left"].items())]) or "none"


def cell(row, step):
    found = row[step]
    if not found["ok"]:
        return "**fails**"
    said = folded(row) if step == "fuse" else ""
    if not row["converted"] and step in NEEDS_NORMS:
        return "-"
    if found["error"] is None:
        return {"training": "yes"}.get(step, found["note"].partition(":")[0])
    number = f"{found['error']:.0e}" if found["error"] else "equal"
    return f"{said}, {number}" if said else number


def folded(row):
    match = re.match(r"(\d+) norms? folded, (\w+) left", row["fuse"]["note"])
    if match is None:
        return ""
    count, left = int(match[1]), 0 if match[2] == "none" else int(match[2])
    return f"{count} of {count + left}"


def left_alone(rows):
    """Classes that stay, in how many models, and why."""
    models, whys = Counter(), {}
    for row in rows:
        for kind, (_, why) in row["left"].items():
            models[row["library"], kind] += 1
            whys[row["library"], kind] = why
    lines = [f"| {library} | {kind} | {count} | {whys[library, kind]} |\n" for (library, kind), count in models.items()]
    return "## What is left, and why\n\n| library | class | models | why |\n|---|---|---|---|\n" + "".join(lines)


def not_folded(rows):
    """Reasons for norms that `fuse` did not fold, with how many norms and models."""
    counts, models = Counter(), defaultdict(set)
    for row in rows:
        for why, count in re.findall(r"(?:left: |; )(.*?) \((\d+)\)(?=;|$)", row["fuse"]["note"]):
            counts[why] += int(count)
            models[why].add((row["library"], row["name"]))
    lines = [f"| {why} | {count} | {len(models[why])} |\n" for why, count in counts.most_common()]
    return "## What is not folded, and why\n\n| reason | norms | models |\n|---|---|---|\n" + "".join(lines)
