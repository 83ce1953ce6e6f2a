"""Sequences longer than those trained on: train at 50 timesteps, test at 200.

    python benchmarks/sequence_length.py

A recurrent network predicts the next symbol of a random second-order Markov chain. Streaming normalization keeps one
set of statistics for all timesteps; time-specific batch norm keeps 50, and the last serves beyond. Loss is in nats per
step, on fresh sequences in evaluation mode: mean and standard deviation over seeds. Steps 41-50 are shown too, because
the first steps of a sequence have no past to predict from.
"""

import argparse
import statistics
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from streamnorm import RNN, SampleNorm, StreamingNorm, TimeSpecificNorm

try:
    from tqdm import tqdm
except ImportError:
    raise SystemExit("the progress bar needs tqdm: pip install 'streamnorm[lab]'") from None

SYMBOLS, HIDDEN, SAMPLES, TRAINED, TESTED = 8, 64, 32, 50, 200
NORMS = {
    "streaming": StreamingNorm,
    "time-specific": partial(TimeSpecificNorm, steps=TRAINED),
    "layer norm": SampleNorm,
}
SPANS = {"1-50": (0, 50), "41-50": (40, 50), "51-200": (50, 200)}


class Model(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.rnn, self.head = RNN(SYMBOLS, HIDDEN, norm=norm), nn.Linear(HIDDEN, SYMBOLS)

    def losses(self, sequence):
        """Nats per step and sample; `sequence` is `(T + 1, N)`."""
        output, _ = self.rnn(sequence[:-1])  # indices stand for one-hot vectors
        return F.cross_entropy(self.head(output).flatten(0, 1), sequence[1:].flatten(), reduction="none").view(
            len(sequence) - 1, -1
        )


def sample(chain, steps, samples):
    """Sequences `(steps, samples)` of the chain, begun at random."""
    drawn = [torch.randint(SYMBOLS, (samples,)) for _ in range(2)]
    while len(drawn) < steps:
        drawn.append(torch.multinomial(chain[drawn[-2], drawn[-1]], 1).squeeze(1))
    return torch.stack(drawn)


def run(norm, seed, updates, progress):
    torch.manual_seed(seed)
    chain = torch.softmax(2 * torch.randn(SYMBOLS, SYMBOLS, SYMBOLS), -1)
    model = Model(norm)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(updates):
        optimizer.zero_grad()
        model.losses(sample(chain, TRAINED + 1, SAMPLES)).mean().backward()
        optimizer.step()
        progress.update()
    model.eval()
    with torch.no_grad():
        losses = model.losses(sample(chain, TESTED + 1, 512)).mean(1)
    return {name: float(losses[a:b].mean()) for name, (a, b) in SPANS.items()}


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--updates", type=int, default=400)
    chosen = options.parse_args()
    torch.set_num_threads(1)
    with tqdm(total=len(NORMS) * chosen.seeds * chosen.updates, desc="training", unit="update") as progress:
        results = {
            name: [run(norm, seed, chosen.updates, progress) for seed in range(chosen.seeds)]
            for name, norm in NORMS.items()
        }
    print(f"\nnats per step{'':12}" + "".join(f"{f'steps {span}':>18}" for span in SPANS) + f"{'51-200 less 1-50':>20}")
    for name, runs in results.items():
        columns = [[r[span] for r in runs] for span in SPANS] + [[r["51-200"] - r["1-50"] for r in runs]]
        cells = [f"{statistics.mean(c):.3f} ± {statistics.stdev(c) if len(c) > 1 else 0:.3f}" for c in columns]
        print(f"{name:25}" + "".join(f"{c:>18}" for c in cells[:-1]) + f"{cells[-1]:>20}")
    print(f"{chosen.seeds} seeds, {chosen.updates} updates of {SAMPLES} sequences of {TRAINED} steps")


if __name__ == "__main__":
    main()
