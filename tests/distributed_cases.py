"""What the processes of tests/test_distributed.py do: every case of `CASES`, results saved by name and rank."""

import copy
import pickle
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP

import streamnorm
from streamnorm import StreamingNorm

SETTINGS = {
    "default": {},
    "center mean": {"center": "mean", "p": 1, "warmup": 0},
    "center zero": {"center": "zero", "p": 3, "warmup": 0},
    "located": {"ref": "BA6", "center": "mean", "warmup": 0},
    "all channels": {"ref": "BA2", "center": "mean", "warmup": 0, "kappa": (0.5, 0.5, 0.9, 0.1)},
    "per sample": {"ref": "SP1", "center": "mean", "warmup": 0},
    "frozen": {"alpha": (1.0, 0.0), "center": "mean", "warmup": 0, "kappa": (0.6, 0.4, 0.6, 0.4)},
}


def inputs(window, rank):
    """The mini-batches of a process in a window, of unequal number and size, with the gradients that reach a layer."""
    generator = torch.Generator().manual_seed(100 * window + rank)
    sizes = [[2, 3, 5], [4]][rank] if window % 2 else [[3, 2], [6, 2]][rank]
    return [torch.randn(2, size, 3, 4, generator=generator, dtype=torch.float64) for size in sizes]


def stream(norm, optimizer, batches):
    for x, dy in batches:
        norm(x.requires_grad_()).backward(dy)
    optimizer.step()


def snapshot(module):
    return copy.deepcopy(dict(module.state_dict()))


def laws(rank):
    """Given inputs: after each of three windows, the state."""
    found = {}
    for name, settings in SETTINGS.items():
        norm = StreamingNorm(3, dtype=torch.float64, process_group="world", **settings)
        optimizer = torch.optim.SGD(norm.parameters(), lr=0.0)
        found[name], held = [], norm.running_mean
        for window in range(3):
            stream(norm, optimizer, inputs(window, rank))
            assert torch.equal(held, norm.eval_mean if norm.eval_memory else norm.mean)
            found[name].append(snapshot(norm))
    return found


class Net(nn.Module):
    def __init__(self, group="world"):
        super().__init__()
        torch.manual_seed(0)
        norm = partial(StreamingNorm, process_group=group)
        self.conv, self.norm = nn.Conv2d(3, 4, 3), norm(4)
        self.located, self.bare = norm(4, ref="BA4"), norm(4, affine=False)
        self.gru, self.head = streamnorm.GRU(4, 5, norm=norm), nn.Linear(5, 2)

    def forward(self, x):
        x = self.bare(self.located(torch.relu(self.norm(self.conv(x)))))
        output, _ = self.gru(x.flatten(2).permute(2, 0, 1))
        return self.head(output[-1])


def batch(rank, size, step):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(size, 3, 5, 5, generator=generator), torch.randint(2, (size,), generator=generator)


def learn(model, rank, size, step):
    x, y = batch(rank, size, step)
    nn.functional.cross_entropy(model(x), y).backward()


def ddp(rank):
    """DDP, windows of three batches, the last smaller on one rank: saved after each update."""
    net = Net()
    model = DDP(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    streamnorm.attach(optimizer, net)
    states = []
    for update in range(4):
        optimizer.zero_grad()
        with model.no_sync():
            learn(model, rank, 2, 3 * update)
            learn(model, rank, 2, 3 * update + 1)
        learn(model, rank, 2 - (rank == 1 and update == 3), 3 * update + 2)
        own_windows = int(net.norm.stats.count)
        optimizer.step()
        states.append(snapshot(net))
    net.eval()
    with torch.no_grad():
        output = net(batch(0, 4, 99)[0])
    return {"states": states, "own windows": own_windows, "output": output}


def sharded(rank):
    """The optimizer's state is sharded: each process steps a part of the parameters."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns of itself where it is imported

    net = Net()
    model = DDP(net)
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.1)
    streamnorm.attach(optimizer, net)
    for step in range(3):
        optimizer.zero_grad()
        learn(model, rank, 2, step)
        optimizer.step()
    return snapshot(net)


def by_hand(net, optimizer, rank, sizes):
    """Data parallel without DDP, so that a process may have no batch."""
    states = []
    for step, size in enumerate(sizes):
        optimizer.zero_grad(set_to_none=False)
        if size:
            learn(net, rank, size, step)
        for p in net.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad)
        optimizer.step()
        states.append(snapshot(net))
    return states


def no_batch(rank):
    """From the first step on: the layers with a location do not know their size yet."""
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    streamnorm.attach(optimizer, net)
    return by_hand(net, optimizer, rank, [[2, 3, 0, 0, 2], [0, 2, 2, 0, 1]][rank])


def one_message(rank):
    """The sizes of what is sent in a forward and backward pass, in the first step, and the same once more."""
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    streamnorm.attach(optimizer, net)
    all_reduce, sent = dist.all_reduce, []

    def noted(message, *args, **kwargs):
        sent[-1].append(message.numel())
        return all_reduce(message, *args, **kwargs)

    dist.all_reduce = noted
    for step in range(2):
        for work in (partial(learn, net, rank, 2, step), optimizer.step):
            sent.append([])
            with torch.profiler.profile() as profile:
                work()
            assert len(sent[-1]) == sum(event.name.startswith("c10d::") for event in profile.events())
    dist.all_reduce = all_reduce
    numbers = sum(m.state.mean.numel() * 10 + 11 for m in net.modules() if isinstance(m, StreamingNorm))
    return {"sent": sent, "numbers": numbers}


def join(rank):
    net = Net()
    model = DDP(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    streamnorm.attach(optimizer, net)
    with Join([model, streamnorm.StreamJoin(optimizer)]):
        for step in range(5 if rank == 0 else 3):
            optimizer.zero_grad()
            learn(model, rank, 2, step)
            optimizer.step()
    return snapshot(net)


def join_alone(rank):
    """Ours is the only joinable, with a layer that has given inputs; in two epochs, and a step after them."""
    norm = StreamingNorm(3, dtype=torch.float64, process_group=dist.group.WORLD)
    optimizer = torch.optim.SGD(norm.parameters(), lr=0.0)
    for epoch in range(2):
        with Join([streamnorm.StreamJoin(streamnorm.DecoupledUpdate(optimizer, 1))]):
            for window in range(2 * epoch, 2 * epoch + 1 + rank):
                stream(norm, optimizer, inputs(window, rank))
    stream(norm, optimizer, inputs(4, rank))
    return snapshot(norm)


def fsdp(rank):
    try:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
    except ImportError:
        return None
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    net = nn.Sequential(nn.Linear(3, 4), StreamingNorm(4, process_group="world"), nn.Tanh(), nn.Linear(4, 2))
    fully_shard(net[0], mesh=mesh)
    fully_shard(net, mesh=mesh)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    counts = []
    for step in range(3):
        optimizer.zero_grad()
        x, y = torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + rank)), torch.tensor([0, 1, 0, 1])
        nn.functional.cross_entropy(net(x), y).backward()
        counts.append(int(net[1].state.stats.count))
        optimizer.step()
    state = {k: v for k, v in snapshot(net[1]).items() if k not in ("weight", "bias")}
    return {"state": state, "counts": counts}


def resumed(rank):
    """Saved by each process in the middle of a window, in the warm-up, and gone on with in a new layer."""

    def new():
        norm = StreamingNorm(3, process_group="world", dtype=torch.float64)
        return norm, torch.optim.SGD(norm.parameters(), lr=0.1)

    norm, optimizer = new()
    other, other_optimizer = new()
    stream(norm, optimizer, inputs(0, rank))
    first, *rest = inputs(1, rank)
    norm(first[0].requires_grad_()).backward(first[1])
    other.load_state_dict(pickle.loads(pickle.dumps(norm.state_dict())))
    for each, its in ((norm, optimizer), (other, other_optimizer)):
        each.zero_grad()
        stream(each, its, rest)
        stream(each, its, inputs(2, rank))
    return {"whole": snapshot(norm), "resumed": snapshot(other)}


def loaded_by_one(rank):
    """Only the first process has loaded a state: all go on from that."""
    norm = StreamingNorm(3, process_group="world")
    optimizer = torch.optim.SGD(norm.parameters(), lr=0.0)
    if rank == 0:
        norm.load_state_dict({**nn.BatchNorm1d(3).state_dict(), "num_batches_tracked": torch.tensor(5)})
    norm(torch.randn(4, 3, generator=torch.Generator().manual_seed(rank))).sum().backward()
    optimizer.step()
    return snapshot(norm)


def loaded_late(rank):
    """The first process loads another state in mid-training."""
    norm = StreamingNorm(3, process_group="world")
    optimizer = torch.optim.SGD(norm.parameters(), lr=0.0)
    for step in range(3):
        if step == 1 and rank == 0:
            norm.load_state_dict({**nn.BatchNorm1d(3).state_dict(), "num_batches_tracked": torch.tensor(5)})
        norm(torch.randn(4, 3, generator=torch.Generator().manual_seed(9 * step + rank))).sum().backward()
        optimizer.step()
    return snapshot(norm)


def sizes(rank):
    """Statistics with a location: reset on the way, a process without a batch, and sizes that do not fit."""
    norm = StreamingNorm(3, ref="BA6", process_group="world")
    optimizer = torch.optim.SGD(norm.parameters(), lr=0.0)
    states = []
    for step in range(3):
        if step == 1:
            norm.reset_running_stats()
        if step != 1 or rank == 0:
            norm(torch.randn(4, 3, 2)).sum().backward()
        optimizer.step()
        states.append(snapshot(norm))
    norm.reset_running_stats()
    norm(torch.randn(4, 3, 2 + rank)).sum().backward()
    try:
        optimizer.step()
    except RuntimeError as refused:
        return {"states": states, "refused": str(refused)}
    return {"states": states, "refused": ""}


def skipped(rank):
    """A step that the scaler skips, of an optimizer that is called all the same."""
    net = nn.Sequential(nn.Linear(3, 4), StreamingNorm(4, process_group="world"))
    optimizer = torch.optim.Adam(net.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    streamnorm.attach(optimizer, net, scaler=scaler)
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(rank))
    states = []
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(net(x).pow(2).sum()).backward()
        if step == 1:
            net[0].weight.grad[0, 0] = torch.inf
        for p in net.parameters():
            dist.all_reduce(p.grad)
        scaler.step(optimizer)
        scaler.update()
        states.append(snapshot(net[1]))
    return states


def groups(rank):
    """A group given as such, in copies too; a group that this process is not in, or is alone in, is no group."""
    both, alone = dist.new_group([0, 1]), [dist.new_group([r]) for r in range(2)]
    norm = StreamingNorm(3, process_group=both)
    copies = [copy.deepcopy(norm), pickle.loads(pickle.dumps(norm))]
    optimizer = torch.optim.SGD(norm.parameters(), lr=0.0)
    local = StreamingNorm(3, process_group=alone[rank])
    torch.optim.SGD(local.parameters(), lr=0.0)
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(rank))
    norm(x), local(x)
    optimizer.step()
    synchronized = nn.Sequential(nn.SyncBatchNorm(3, process_group=both))
    converted = streamnorm.convert(synchronized, inplace=False, report=None)
    copies.append(converted[0])
    found = {"same": copies[0].process_group is copies[2].process_group is both, "pickled": copies[1].process_group}
    return found | {"state": snapshot(norm), "local": snapshot(local)}


DIFFERENT = {  # what each rank makes: sizes and settings of layers, in order
    "order of the moment": [[(3, {})], [(3, {"p": 1})]],
    "weights": [[(3, {}), (3, {"alpha": (0.5, 0.5)})], [(3, {}), (3, {})]],
    "guard": [[(3, {})], [(3, {"guard": False})]],
    "reference": [[(3, {"ref": "BA1"})], [(3, {"ref": "SP2"})]],
    "channels": [[(3, {}), (4, {})], [(3, {}), (3, {})]],
    "one statistic for all": [[(3, {"ref": "BA2"})], [(4, {"ref": "BA2"})]],
    "type": [[(3, {})], [(3, {"dtype": torch.float64})]],
    "number of layers": [[(3, {}), (3, {})], [(3, {})]],
    "order of layers": [[(3, {}), (4, {})], [(4, {}), (3, {})]],
    "spelling": [[(3, {"warmup": 256, "alpha": (0.7, 0.3)})], [(3, {"warmup": 256.0, "alpha": [0.7, 0.3]})]],
}


def attempt(norms, optimizer, rank):
    """A step, and what was said against it."""
    for norm in norms:
        x = torch.randn(4, norm.num_features, generator=torch.Generator().manual_seed(rank))
        norm(x.to(norm.weight.dtype)).sum().backward()
    before = [snapshot(norm) for norm in norms]
    try:
        optimizer.step()
    except RuntimeError as refused:
        kept = [{k: v for k, v in each.items() if k not in ("weight", "bias")} for each in before]
        same = all(torch.equal(snapshot(n)[k], v) for n, each in zip(norms, kept, strict=True) for k, v in each.items())
        return f"{refused} {'' if same else 'STATE CHANGED'}"
    return ""


def made(settings, group="world"):
    norms = [StreamingNorm(size, **{"process_group": group} | given) for size, given in settings]
    return norms, torch.optim.SGD([p for norm in norms for p in norm.parameters()], lr=0.1)


def different(rank):
    """Layers that are not the same in all processes: at the first merge, the next, and with those that come later."""
    found = {}
    for name, settings in DIFFERENT.items():
        norms, optimizer = made(settings[rank])
        found[name] = [attempt(norms, optimizer, rank), attempt(norms, optimizer, rank)]
    norms, optimizer = made([(3, {})])
    found["later"] = [attempt(norms, optimizer, rank)]
    later = StreamingNorm(3, process_group="world", eps=1e-5 * (1 + rank))
    optimizer.add_param_group({"params": later.parameters()})
    found["later"] += [attempt([*norms, later], optimizer, rank)]
    found["another group"] = []
    norms[0].alpha = (0.5, 0.5) if rank else norms[0].alpha  # all have agreed on this layer, in the first group
    optimizer = torch.optim.SGD(norms[0].parameters(), lr=0.1)
    found["another group"] += [attempt(norms, optimizer, rank)]
    norms[0].process_group = dist.new_group([0, 1])
    found["another group"] += [attempt(norms, optimizer, rank)]
    return found


def again(rank):
    """The processes meet anew, in another world, with layers of the one before and with new ones."""
    norms, optimizer = made([(3, {})])
    first = attempt(norms, optimizer, rank)
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/again", rank=rank, world_size=2)
    others, for_others = made([(3, {"p": 1 + rank})])
    return [first, attempt(norms, optimizer, rank), attempt(others, for_others, rank)]


CASES = [laws, ddp, sharded, no_batch, one_message, join, join_alone, fsdp, resumed]
CASES += [loaded_by_one, loaded_late, sizes, skipped, groups, different, again]

if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for case in CASES:
        torch.save(case(dist.get_rank()), Path(sys.argv[1]) / f"{case.__name__}-{dist.get_rank()}.pt")
        dist.barrier()
    dist.destroy_process_group()
