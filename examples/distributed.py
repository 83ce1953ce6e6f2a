"""Data parallel on the digits data, two samples per batch and process, that survives the loss of a worker:

    torchrun --nproc-per-node 2 --max-restarts 3 examples/distributed.py

After every tenth update rank 0 saves everything. When a worker dies, torchrun starts all of them again and they go on
from there: the end is the same, bit for bit, as without the loss. Later the same command goes on, or shows the result.
"""

import argparse
import os
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from streamnorm import StreamingNorm

try:
    from sklearn.datasets import load_digits
except ImportError:
    raise SystemExit("the digits data needs scikit-learn: pip install 'streamnorm[lab]'") from None

TRAIN, BATCH, BATCHES = 1500, 2, 4  # samples to train on, per batch and process; batches per update


def network():
    def layer(inputs, outputs):
        return nn.Conv2d(inputs, outputs, 3, padding=1), StreamingNorm(outputs, process_group="world"), nn.ReLU()

    return nn.Sequential(*layer(1, 16), nn.MaxPool2d(2), *layer(16, 32), nn.Flatten(), nn.Linear(512, 10))


def join_processes():
    """After a restart torchrun's store still holds the addresses of the processes before, so each has its own part."""
    rank, world, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    serves = rank == 0 and os.environ["TORCHELASTIC_USE_AGENT_STORE"] != "True"
    store = dist.TCPStore(os.environ["MASTER_ADDR"], port, is_master=serves)
    store = dist.PrefixStore(f"attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    return rank, world


def save(path, **state):
    torch.save(state, f"{path}.part")
    os.replace(f"{path}.part", path)  # whole or not at all


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--updates", type=int, default=300)
    options.add_argument("--checkpoint", type=Path, default=Path("out/distributed.pt"))
    options = options.parse_args()
    options.checkpoint.parent.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    rank, world = join_processes()

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    labels = torch.tensor(digits.target)
    torch.manual_seed(0)
    model = network()
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    start = 0
    if options.checkpoint.exists():
        saved = torch.load(options.checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        start = saved["update"]
    print(f"rank {rank} is process {os.getpid()} and begins at update {start}", flush=True)

    for update in range(start, options.updates):
        order = torch.randperm(TRAIN, generator=torch.Generator().manual_seed(update))
        batches = order[rank::world][: BATCH * BATCHES].split(BATCH)
        for i, batch in enumerate(batches, 1):
            with nullcontext() if i == BATCHES else parallel.no_sync():
                loss = nn.functional.cross_entropy(parallel(images[batch]), labels[batch])
                (loss / BATCHES).backward()
        optimizer.step()  # the windows of all processes are merged here
        optimizer.zero_grad()
        done = update + 1
        if rank == 0 and (done % 10 == 0 or done == options.updates):
            save(options.checkpoint, model=model.state_dict(), optimizer=optimizer.state_dict(), update=done)
            print(f"update {done}: loss {loss:.3f}", flush=True)

    model.eval()
    with torch.no_grad():
        right = model(images[TRAIN:]).argmax(1) == labels[TRAIN:]
    print(f"rank {rank}: {right.float().mean():.1%} of {len(right)} test digits are right", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
