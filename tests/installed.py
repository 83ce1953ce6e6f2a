"""A training with the package as it was installed, in an environment that need not have anything but torch.

`make dist` runs it, and so do the builds of wheels.
"""

import argparse
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path


def has_gil():
    return getattr(sys, "_is_gil_enabled", lambda: True)()


def train(torch, streamnorm):
    """One sample at a time: which half of it has the larger sum? The losses."""
    torch.manual_seed(0)
    functional, nn = torch.nn.functional, torch.nn
    body = nn.Sequential(nn.Linear(8, 16), streamnorm.StreamingNorm(16), nn.ReLU())
    recurrent, head = streamnorm.GRU(16, 16), nn.Linear(16, 2)
    parameters = [parameter for part in (body, recurrent, head) for parameter in part.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.05)
    for _ in range(300):
        x = torch.randn(1, 8)
        target = (x[:, :4].sum(1) > x[:, 4:].sum(1)).long()
        output, _ = recurrent(body(x).unsqueeze(0))
        loss = functional.cross_entropy(head(output[0]), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()


def main(options):
    if options.without:
        assert find_spec(options.without) is None, f"{options.without} is installed"
    source = Path(find_spec("streamnorm").origin).resolve()
    assert source.is_relative_to(Path(sys.prefix).resolve()), f"{source} is not what was installed"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, where numpy is missing
        import torch
    had_gil = has_gil()
    import streamnorm
    from streamnorm import backends

    missing = backends.registered()["cpu"].missing()
    assert bool(missing) == options.no_kernels, missing or "the C++ kernels are there"
    assert has_gil() == had_gil, "importing streamnorm has switched the GIL on"
    losses = list(train(torch, streamnorm))
    first, last = sum(losses[:50]) / 50, sum(losses[-50:]) / 50
    assert last < 0.8 * first, f"nothing is learned: loss {first} at first, {last} at last"
    served = backends.explain(streamnorm.StreamingNorm(3), torch.randn(1, 3)).split(".")[0]
    assert served == f"{'plain' if missing else 'cpu'} serves this call"
    versions = f"streamnorm {streamnorm.__version__}, torch {torch.__version__}, Python {sys.version.split()[0]}"
    print(f"{versions}, {'' if find_spec('numpy') else 'no '}numpy: loss {first:.2f} -> {last:.2f}; {served}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--without", metavar="PACKAGE", help="which must not be there")
    parser.add_argument("--no-kernels", action="store_true", help="in the wheel for any machine")
    main(parser.parse_args())
