"""A character model with a streaming-normalized GRU, for any text file:  python examples/char_model.py TEXT

Parallel streams through the text, state carried over chunks and detached, the sign rule of the paper as the optimizer.
Ctrl-C ends the training and goes on to the sample; with --checkpoint the same command later goes on where it stopped.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from streamnorm import GRU, Manhattan

try:
    from tqdm import tqdm
except ImportError:
    raise SystemExit("the progress bar needs tqdm: pip install 'streamnorm[lab]'") from None


class CharModel(nn.Module):
    def __init__(self, symbols, hidden):
        super().__init__()
        self.gru, self.head = GRU(symbols, hidden), nn.Linear(hidden, symbols)

    def forward(self, text, state=None):
        """`text` `(T, N)` -> logits `(T, N, symbols)` and the state to go on from."""
        output, state = self.gru(text, state)  # indices stand for one-hot vectors
        return self.head(output), state.detach()


def loss_of(model, text, state=None):
    logits, state = model(text[:-1], state)
    return F.cross_entropy(logits.flatten(0, 1), text[1:].flatten()), state


@torch.no_grad()
def sample(model, alphabet, length, temperature):
    text, state, drawn = torch.zeros(1, 1, dtype=torch.long), None, []
    for _ in range(length):
        logits, state = model(text, state)
        text = torch.multinomial(torch.softmax(logits[0] / temperature, 1), 1)
        drawn.append(alphabet[int(text)])
    return "".join(drawn)


def save(path, **state):
    torch.save(state, f"{path}.part")
    os.replace(f"{path}.part", path)  # whole or not at all


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("text", type=Path)
    for name, default in (("--hidden", 100), ("--streams", 32), ("--chunk", 50), ("--updates", 300)):
        options.add_argument(name, type=int, default=default)
    options.add_argument("--lr", type=float, default=0.003)
    options.add_argument("--temperature", type=float, default=0.7)
    options.add_argument("--checkpoint", type=Path)
    chosen = options.parse_args()
    text = chosen.text.read_text(errors="replace", encoding="utf-8")
    alphabet = sorted(set(text))
    codes = torch.tensor([alphabet.index(c) for c in text])
    held, streams = max(len(codes) // 20, 2), chosen.streams
    rows = (len(codes) - held) // streams
    if rows <= chosen.chunk:
        raise SystemExit(f"{chosen.text} is too short: {streams} streams of {chosen.chunk} steps need more text")
    train, valid = codes[: rows * streams].view(streams, rows).t(), codes[-held:][:5000, None]
    torch.manual_seed(0)
    model, state, first = CharModel(len(alphabet), chosen.hidden), None, 0
    optimizer = Manhattan(model.parameters(), chosen.lr)
    if chosen.checkpoint and chosen.checkpoint.exists():
        saved = torch.load(chosen.checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        state, first = saved["state"], saved["update"]
    try:
        for update in (bar := tqdm(range(first, chosen.updates), initial=first, total=chosen.updates)):
            at = update * chosen.chunk % (rows - chosen.chunk)
            loss, state = loss_of(model.train(), train[at : at + chosen.chunk + 1], state)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if update % 20 == 19:
                with torch.no_grad():
                    validation, _ = loss_of(model.eval(), valid)
                bar.set_postfix_str(f"train {float(loss.detach()):.3f}, validation {float(validation):.3f} nats")
                if chosen.checkpoint:
                    progress = {"state": state, "update": update + 1}
                    save(chosen.checkpoint, model=model.state_dict(), optimizer=optimizer.state_dict(), **progress)
    except KeyboardInterrupt:
        print("stopped")
    print(sample(model.eval(), alphabet, 400, chosen.temperature))


if __name__ == "__main__":
    main()
