"""Reinforcement learning from a stream: Q(lambda) with each norm, one step of the environment, one update.

    python examples/stream_q.py --env CartPole-v1 --steps 20000 --seeds 1

No replay, no target network, no batch. The agent follows the equations of Elsayed, Vasan and Mahmood (2024, "Streaming
deep reinforcement learning finally works"): eligibility traces cut by exploration (Watkins), a step size that is
bounded so that no update overshoots, sparse first weights, observations and rewards scaled by what was seen so far.
What is compared and what came of it is in docs/measured/reinforcement.md, whose tables and figure are written by

    python examples/stream_q.py --out docs/results/reinforcement --page docs/measured/reinforcement.md

A run that has finished is kept in the folder and not run again.
"""

import argparse
import json
import random
import re
import shlex
import sys
import time
import warnings
from contextlib import nullcontext
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from statistics import fmean, stdev
from typing import NamedTuple

import numpy as np
import torch
from pages import atomically, put
from torch import nn

import streamnorm
from streamnorm import SampleNorm, StreamingNorm

try:
    import gymnasium
    from tqdm import tqdm
except ImportError as missing:
    sys.exit(f'{missing}: reinforcement learning needs its extras, pip install "streamnorm[rl]"')

VERSIONS = torch.__version__.split("+")[0], gymnasium.__version__
HIDDEN = 32
GAMMA, LAMBDA, RATE, KAPPA = 0.99, 0.8, 1.0, 2.0
EXPLORE, LEAST = 0.2, 0.01  # epsilon falls from 1 to LEAST in this part of the steps
MARKS = "os^DvP<>X"  # of lines in one panel
BELOW = {"bbox_to_anchor": (0.5, -0.22), "fontsize": "x-small", "frameon": False}  # a legend under its panel
LAYOUT = {"squeeze": False, "sharey": "row", "layout": "constrained"}
POINTS = 25  # of a curve
LAST = 5  # parts of the steps of which the last one is scored
WORST = {"CartPole-v1": 0.0, "Acrobot-v1": -500.0}  # of a part in which no episode ends; others: not a number


class Arm(NamedTuple):
    """What is tried: the hidden norms, a norm in place of the scaled observations, and what the layers are told."""

    hidden: object = None
    first: object = None  # takes raw observations
    after: object = None  # a second norm behind each hidden one
    all_push: bool = False  # the pass for the target too
    of_loss: bool = False  # backward starts from the error, not from 1, and the trace divides by it


STEPS = {"CartPole-v1": 12_000, "Acrobot-v1": 22_000}  # in which layer norm learns
LONG, LONGER = (0.97, 0.03), (0.99, 0.01)
OWN, OFF = (0.0, 0.0, 1.0), (0.0, 0.0, 0.0)  # beta: H2 passes on the present gradient, or none
ARMS = {
    "no norm": Arm(),
    "layer norm": Arm(SampleNorm),
    "streaming": Arm(StreamingNorm),
    "streaming, alpha (.99, .01)": Arm(partial(StreamingNorm, alpha=LONGER)),
    "streaming, beta (0, 0, 1)": Arm(partial(StreamingNorm, beta=OWN)),
    "streaming, beta (0, 0, 1), alpha (.97, .03)": Arm(partial(StreamingNorm, beta=OWN, alpha=LONG)),
    "streaming, beta (0, 0, 1), alpha (.99, .01)": Arm(partial(StreamingNorm, beta=OWN, alpha=LONGER)),
    "streaming, beta (0, 0, 0)": Arm(partial(StreamingNorm, beta=OFF)),
    "streaming, beta (0, 0, 0), alpha (.97, .03)": Arm(partial(StreamingNorm, beta=OFF, alpha=LONG)),
    "streaming, beta (0, 0, 0), alpha (.99, .01)": Arm(partial(StreamingNorm, beta=OFF, alpha=LONGER)),
    "streaming, H2 of error times gradient": Arm(StreamingNorm, of_loss=True),
    "streaming, every pass pushes": Arm(StreamingNorm, all_push=True),
    "streaming, then layer norm": Arm(StreamingNorm, after=SampleNorm),
    "streaming, beta (0, 0, 0), alpha (.97, .03), then layer norm": Arm(
        partial(StreamingNorm, beta=OFF, alpha=LONG), after=SampleNorm
    ),
    "streaming, statistics of the sample, beta (0, 0, 0)": Arm(partial(StreamingNorm, beta=OFF, warmup=1e9)),
    "streaming on the state alone": Arm(first=partial(StreamingNorm, alpha=LONGER)),
    "streaming on the state, layer norm": Arm(SampleNorm, first=partial(StreamingNorm, alpha=LONGER)),
}
# An environment that is not CartPole is the second opinion: not every setting again.
AGAIN = [
    "no norm",
    "layer norm",
    "streaming",
    "streaming, beta (0, 0, 1), alpha (.97, .03)",
    "streaming, beta (0, 0, 0), alpha (.97, .03)",
    "streaming on the state alone",
    "streaming on the state, layer norm",
]


class ObGD(torch.optim.Optimizer):
    """Gradient descent along eligibility traces, with a bound against overshooting.

    z <- decay * z + gradient of the value, w <- w + step * error * z,
    step = min(lr, 1 / (kappa * max(|error|, 1) * |z|_1)).

    A torch optimizer, so that streaming norms hear of each update.
    """

    def __init__(self, params, lr=RATE, kappa=KAPPA, decay=GAMMA * LAMBDA):
        super().__init__(params, {"lr": lr, "kappa": kappa, "decay": decay})
        (self.group,) = self.param_groups
        self.forget()

    def forget(self):
        """Cut the traces: an episode has ended, or the action was not the greedy one."""
        self.traces = [torch.zeros_like(weight) for weight in self.group["params"]]

    @torch.no_grad()
    def step(self, error, times=1.0):
        """One update; `times`: what the gradients have been multiplied by."""
        gradients = [weight.grad for weight in self.group["params"]]
        torch._foreach_mul_(self.traces, self.group["decay"])
        torch._foreach_add_(self.traces, gradients, alpha=1 / times)
        length = float(torch.stack(torch._foreach_norm(self.traces, 1)).sum())
        bound = self.group["kappa"] * max(abs(error), 1.0) * length
        step = min(self.group["lr"], 1 / bound) if bound else self.group["lr"]
        torch._foreach_add_(self.group["params"], self.traces, alpha=step * error)


class Running:
    """Mean and spread of what was seen so far."""

    def __init__(self):
        self.count, self.mean, self.squares = 0, 0.0, 0.0

    def see(self, value):
        self.count += 1
        away = value - self.mean
        self.mean = self.mean + away / self.count
        self.squares = self.squares + away * (value - self.mean)

    @property
    def spread(self):
        return (self.squares / (self.count - 1) + 1e-8) ** 0.5 if self.count > 1 else 1.0


def sparse(linear, generator, part=0.9):
    """Most inputs of a unit have weight 0, one at least has not; no bias."""
    inputs = linear.in_features
    none = min(round(part * inputs), inputs - 1)
    with torch.no_grad():
        linear.weight.uniform_(-(inputs**-0.5), inputs**-0.5, generator=generator)
        for row in linear.weight:
            row[torch.randperm(inputs, generator=generator)[:none]] = 0
        linear.bias.zero_()
    return linear


class Agent:
    """Q(lambda) of Watkins, from a stream."""

    def __init__(self, arm, features, actions, seed):
        self.arm, self.actions = arm, actions
        self.chance, weights = random.Random(seed), torch.Generator().manual_seed(seed)
        layers = [arm.first(features, affine=False)] if arm.first else []
        for inputs, outputs in pairwise([features, HIDDEN, HIDDEN]):
            norms = [norm(outputs, affine=False) for norm in (arm.hidden, arm.after) if norm]
            layers += [sparse(nn.Linear(inputs, outputs), weights), *norms, nn.LeakyReLU()]
        self.model = nn.Sequential(*layers, sparse(nn.Linear(HIDDEN, actions), weights))
        self.optimizer = ObGD(self.model.parameters())
        if arm.first or arm.hidden not in (None, SampleNorm):
            streamnorm.attach(self.optimizer, self.model)  # the norms have no gain and bias by which it knew them
        self.state, self.reward, self.returned = Running(), Running(), 0.0

    def see(self, observation):
        """As the model takes it: scaled, unless its first layer does that."""
        if not self.arm.first:
            self.state.see(observation)
            observation = (observation - self.state.mean) / self.state.spread
        return torch.from_numpy(observation.astype(np.float32)).unsqueeze(0)

    def act(self, seen, epsilon):
        """An action. Its pass is the one whose gradient will be taken: it pushes."""
        self.values = self.model(seen)[0]
        best = int(self.values.argmax())
        self.action = self.chance.randrange(self.actions) if self.chance.random() < epsilon else best
        if self.action != best:
            self.optimizer.forget()
        return self.action

    def learn(self, reward, seen, terminated, ended):
        """From what the action brought. The pass for the target pushes nothing."""
        self.returned = GAMMA * self.returned + reward
        self.reward.see(self.returned)
        target = reward / self.reward.spread
        if not terminated:
            with torch.no_grad(), nullcontext() if self.arm.all_push else streamnorm.paused(self.model):
                target += GAMMA * float(self.model(seen).max())
        value = self.values[self.action]
        error = target - float(value.detach())
        times = (error or 1e-6) if self.arm.of_loss else 1.0
        self.model.zero_grad()
        value.backward(torch.tensor(times))  # of the value, not of a loss: what H2 averages is this
        self.optimizer.step(error, times)
        if ended:
            self.optimizer.forget()
            self.returned = 0.0


def run(name, arm, seed, steps):
    """The returns of all episodes, as (step at which it ended, return)."""
    world = gymnasium.make(name)
    features, actions = world.observation_space.shape[0], int(world.action_space.n)
    agent, episodes, total = Agent(arm, features, actions, seed), [], 0.0
    start = time.process_time()
    seen = agent.see(world.reset(seed=seed)[0])
    for step in range(steps):
        epsilon = max(LEAST, 1 - (1 - LEAST) * step / (EXPLORE * steps))
        observation, reward, terminated, truncated, _ = world.step(agent.act(seen, epsilon))
        total, ended = total + float(reward), terminated or truncated
        seen = agent.see(observation)
        agent.learn(float(reward), seen, terminated, ended)
        if ended:
            episodes.append((step + 1, total))
            total, seen = 0.0, agent.see(world.reset()[0])
    world.close()
    score = curve(name, episodes, steps, LAST)[-1]
    seconds = round(time.process_time() - start, 1)
    return {"score": score, "curve": curve(name, episodes, steps, POINTS), "seconds": seconds}


def curve(name, episodes, steps, points):
    """The average return of the episodes that end in each part of the steps; without any, that of the part before."""
    levels, level = [], WORST.get(name, 0.0)
    for first, last in pairwise(round(steps * i / points) for i in range(points + 1)):
        ended = [total for step, total in episodes if first < step <= last]
        level = round(fmean(ended), 1) if ended else level
        levels.append(level)
    return levels


def kept(path, name, arm, seed, steps):
    """The run of that file, or a new one."""
    asked = {"env": name, "arm": arm, "seed": seed, "steps": steps, "torch": VERSIONS[0], "gymnasium": VERSIONS[1]}
    if path.exists():
        found = json.loads(path.read_text(encoding="utf-8"))
        if asked.items() <= found.items():
            return found
    found = asked | run(name, ARMS[arm], seed, steps)
    path.parent.mkdir(parents=True, exist_ok=True)
    atomically(lambda part: part.write_text(json.dumps(found), encoding="utf-8"), path)
    return found


def study(names, arms, seeds, steps, folder):
    """All runs, seed by seed, so that a study that is cut short has a bit of everything."""
    asked = [(seed, name, arm) for seed, name in product(range(seeds), names) for arm in arms or arms_of(name)]
    worlds = {name: {"steps": steps or STEPS.get(name, 15_000), "arms": {}} for name in names}
    for seed, name, arm in tqdm(asked, desc="runs"):
        file = folder / "runs" / f"{name}-{re.sub(r'[^a-z0-9]+', '-', arm.lower())}-{seed}.json"
        found = kept(file, name, arm, seed, worlds[name]["steps"])
        few = {key: found[key] for key in ("score", "curve", "seconds")}
        worlds[name]["arms"].setdefault(arm, []).append(few)
    return worlds


def arms_of(name):
    return list(ARMS) if name == "CartPole-v1" else AGAIN


def table(world):
    """Markdown: the return of the last episodes, mean and standard error over seeds, and that of each seed."""
    lines = ["| norm | return | each seed |", "| --- | --- | --- |"]
    for arm, runs in world["arms"].items():
        scores = [each["score"] for each in runs]
        error = f" ± {stdev(scores) / len(scores) ** 0.5:.0f}" if len(scores) > 1 else ""
        lines.append(f"| {arm} | {fmean(scores):.0f}{error} | {', '.join(f'{score:.0f}' for score in scores)} |")
    return "\n".join(lines)


def filled(text, results):
    """A page with the results."""
    words = f"{results['seeds']} seeds, {results['versions']}, {results['seconds'] / 60:.0f} minutes in one thread:"
    blocks = {"agents": f"{words}\n\n```sh\n{results['command']}\n```"}
    return put(text, blocks | {name: table(world) for name, world in results["worlds"].items()})


def draw(results, path):
    """A row for each environment, a column for each group of norms, with a legend of its own."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "reinforcement"  # the same file from the same results
    matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text
    from matplotlib import pyplot

    worlds = results["worlds"]
    groups = grouped(dict.fromkeys(arm for world in worlds.values() for arm in world["arms"]))
    size = (11, 2.6 * len(worlds) + 1.6)
    figure, panels = pyplot.subplots(len(worlds), len(groups), figsize=size, **LAYOUT)
    for row, (name, world) in zip(panels, worlds.items(), strict=True):
        places = [world["steps"] * i / POINTS for i in range(1, POINTS + 1)]
        for panel, arms in zip(row, groups, strict=True):
            for i, arm in enumerate(arms):
                curves = [each["curve"] for each in world["arms"].get(arm, ())]
                levels = [fmean(several) for several in zip(*curves, strict=True)]
                if levels:
                    panel.plot(places, levels, color=f"C{i}", label=arm, lw=1.2, marker=MARKS[i], ms=3)
            panel.set_title(name, fontsize="medium")
        row[0].set_ylabel("return")
    for panels_of_group in panels.T:
        most = max(panels_of_group, key=lambda panel: len(panel.lines))
        panels_of_group[-1].set_xlabel("steps")
        panels_of_group[-1].legend(*most.get_legend_handles_labels(), loc="upper center", **BELOW)
    figure.savefig(path, format="svg", metadata={"Date": None})


def grouped(arms):
    """Those beside which a streaming norm is measured; streaming norms with H2; all others. Groups that there are."""
    around = [arm for arm in arms if "layer norm" in arm or "no norm" in arm or "state alone" in arm]
    rest = [arm for arm in arms if arm not in around]
    without = [arm for arm in rest if "(0, 0, 0)" in arm or "pass" in arm or "H2" in arm]
    return [group for group in (around, [arm for arm in rest if arm not in without], without) if group]


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--env", nargs="+", default=list(STEPS), metavar="NAME", help="of gymnasium, with few actions")
    options.add_argument("--arms", nargs="+", choices=ARMS, metavar="NORM", help=f"some of: {'; '.join(ARMS)}")
    options.add_argument("--steps", type=int, help="of the environment, each of which is an update")
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--out", type=Path, default=Path("out/reinforcement"), help="results.json, curves.svg, runs")
    options.add_argument("--page", type=Path, help="a Markdown page to put the tables into")
    chosen = options.parse_args()
    if chosen.seeds < 1 or (chosen.steps is not None and chosen.steps < POINTS):
        options.error(f"--seeds {chosen.seeds} --steps {chosen.steps}: at least 1 seed and {POINTS} steps")
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "StreamingNorm")  # one of the arms does what the layer warns of
    worlds = study(chosen.env, chosen.arms, chosen.seeds, chosen.steps, chosen.out)
    results = {
        "command": f"python examples/stream_q.py {shlex.join(sys.argv[1:])}".strip(),
        "versions": "torch {}, gymnasium {}".format(*VERSIONS),
        "seeds": chosen.seeds,
        "seconds": sum(
            each["seconds"] for world in worlds.values() for runs in world["arms"].values() for each in runs
        ),
        "worlds": worlds,
    }
    for name, world in worlds.items():
        print(f"\n{name}, {world['steps']} steps\n\n{table(world)}", flush=True)
    atomically(lambda part: part.write_text(json.dumps(results), encoding="utf-8"), chosen.out / "results.json")
    atomically(partial(draw, results), chosen.out / "curves.svg")
    if chosen.page:
        atomically(
            lambda part: part.write_text(filled(chosen.page.read_text(encoding="utf-8"), results), encoding="utf-8"),
            chosen.page,
        )


if __name__ == "__main__":
    main()
