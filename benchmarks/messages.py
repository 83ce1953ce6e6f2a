"""What data parallel training of network B sends, per update:  torchrun --nproc-per-node 2 benchmarks/messages.py

Ours is counted. SyncBatchNorm refuses the CPU, so its messages are counted by what it does on a GPU: each layer gathers
2 C + 1 numbers in every forward pass and sums 2 C in every backward pass.
"""

import torch
import torch.distributed as dist
from torch import nn

from streamnorm import StreamingNorm
from streamnorm.lab.models import NetC


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = NetC(lambda channels, steps: StreamingNorm(channels, process_group="world"), 64, 1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    sizes = [m.num_features for m in net.modules() if isinstance(m, StreamingNorm)]
    all_reduce, sent = dist.all_reduce, []

    def counted(message, *args, **kwargs):
        sent.append(message.numel() * message.element_size())
        return all_reduce(message, *args, **kwargs)

    def update(batches):
        for _ in range(batches):
            x, y = torch.randn(1, 3, 32, 32), torch.randint(10, (1,))
            nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()

    update(1)  # at the first one the processes compare their layers, which is a message more
    dist.all_reduce = counted
    rows = []
    for batches in (1, 4, 32):
        sent.clear()
        update(batches)
        theirs = sum(4 * (2 * c + 1) + 4 * 2 * c for c in sizes) * batches
        rows.append((batches, len(sent), sum(sent), 2 * len(sizes) * batches, theirs))
    if dist.get_rank() == 0:
        print(f"network B, {len(sizes)} norms of {sizes[0]} channels; per update, messages and bytes from one process")
        print(f"{'batches per update':>18}  {'streaming':>14}  {'SyncBatchNorm':>16}")
        for batches, ours, our_bytes, their, their_bytes in rows:
            print(f"{batches:18}  {ours:4} {our_bytes:9,}  {their:5} {their_bytes:10,}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
