"""Two threads train one layer while a third reads it: no defined result, but no freed memory is ever touched.

    python tests/stress_threads.py --seconds 5

Under AddressSanitizer (`make test-sanitized`) an access to freed memory ends the process; without it, it may.
`--share-memory`: the third thread moves the layer to shared memory too, once. torch frees the old memory of a storage
in place then, also under an operation of its own that is running in another thread.
"""

import argparse
import copy
import pickle
import sys
import threading
import time

import torch

from streamnorm import GRU, LSTM, StreamingNorm, kernels

TARGETS = {
    "rows": (lambda: StreamingNorm(32), (64, 32)),
    "image": (lambda: StreamingNorm(8), (2, 8, 6, 6)),
    "GRU": (lambda: GRU(5, 16), (4, 8, 5)),
    "LSTM": (lambda: LSTM(5, 16, cell_norm=True), (4, 8, 5)),
}


def norms_of(net):
    return [module for module in net.modules() if isinstance(module, StreamingNorm)]


READS = [
    lambda net: net.state_dict(),
    lambda net: [(norm.stats.long.sum(), norm.grads.short.sum()) for norm in norms_of(net)],
    lambda net: [(norm.mean.clone(), norm.sigma.clone()) for norm in norms_of(net)],
    copy.deepcopy,
    lambda net: pickle.loads(pickle.dumps(net)),
    lambda net: net.load_state_dict(net.state_dict()),
    lambda net: [norm.weights_updated() for norm in norms_of(net)],
]


def stress(make, shape, seconds, share):
    """How often each thread went round. An error in Python is allowed: what was read was just being changed."""
    net, end, rounds = make(), time.monotonic() + seconds, [0, 0, 0]

    def train(i):
        generator = torch.Generator().manual_seed(i)
        while time.monotonic() < end:
            x = torch.randn(shape, generator=generator).requires_grad_()
            try:
                y = net(x)
                (y if isinstance(y, torch.Tensor) else y[0]).square().mean().backward()
            except (RuntimeError, KeyError, AttributeError, TypeError):
                continue
            rounds[i] += 1

    def read():
        if share:
            time.sleep(seconds / 2)
            net.share_memory()
        while time.monotonic() < end:
            for each in READS:
                try:
                    each(net)
                except (RuntimeError, KeyError, AttributeError, TypeError):
                    continue
                rounds[2] += 1

    threads = [threading.Thread(target=train, args=(i,)) for i in range(2)] + [threading.Thread(target=read)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return rounds


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=5.0, help="for each kind of layer")
    parser.add_argument("--share-memory", action="store_true")
    parser.add_argument("only", nargs="*", help=f"of {', '.join(TARGETS)}")
    given = parser.parse_args()
    torch.set_num_threads(1)
    sys.setswitchinterval(1e-5)  # threads change places often
    for name in given.only or TARGETS:
        rounds = stress(*TARGETS[name], given.seconds, given.share_memory)
        print(f"{name}: {rounds[0]} and {rounds[1]} training calls, {rounds[2]} reads", flush=True)
        if not all(rounds):
            print("a thread never got through")
            return 1
    print(f"kernels: {kernels._native.__file__ if kernels.available() else 'none'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
